"""A real pretrained model on a real task, one step of what docs/smollm2.md shows whole."""

from __future__ import annotations

import shlex
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from hybridflow import configure
from hybridflow.recipes import grpo
from hybridflow.trainer.recipe import execute
from hybridflow.workers.models import smollm2

DOCS = Path(__file__).parent.parent / "docs" / "smollm2.md"
SMALL = ("data.rows_per_step=2", "data.validation_rows=4", "sampling.n=4", "sampling.max_new_tokens=8", "run.steps=1")


@pytest.fixture(scope="session", autouse=True)
def _converted() -> None:
    assert smollm2.main() == 0


def documented_command() -> list[str]:
    """The overrides of the page's command."""
    text = DOCS.read_text()
    command = text[text.index("hybridflow grpo model=smollm2") :].split("```")[0].replace("\\\n", " ")
    return shlex.split(command)[2:]


@pytest.mark.timeout(1200)  # the first time, the model is fetched and converted
def test_one_step_of_the_documented_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*documented_command(), *SMALL, f"run.dir={tmp_path / 'run'}", "run.export=false", "run.checkpoint_steps=0"]
    run = execute(grpo, configure(*words, recipe=grpo))
    before, after = run.metrics()
    assert 0 <= before["val/reward"] <= 1 and after["actor/grad_norm"] >= 0
    assert after["rollout/errors"] == 0 and after["reward/errors"] == 0
    rows = pq.read_table(tmp_path / "run" / "completions" / "step-000001.parquet").to_pylist()
    assert len(rows) == 8 and all(row["prompt"].endswith("=") for row in rows)
    assert f"model.path=smollm2: {smollm2.folder()}" in capsys.readouterr().out
