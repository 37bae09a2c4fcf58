"""Sweeps: which runs there are, where each goes, and what a mistake in one of them does."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from hybridflow.errors import ConfigError
from hybridflow.trainer import multirun
from hybridflow.trainer.config import Config, compose
from hybridflow.trainer.multirun import jobs_in, summary
from hybridflow.trainer.overrides import jobs_of

pytestmark = pytest.mark.unit

BASE = ["model=smollm2", "data=arithmetic", "run.dir=sweep"]


def configured(words: Sequence[str]) -> Config:
    return compose(words)


def test_all_combinations_run_with_the_last_key_varying_fastest() -> None:
    jobs = jobs_of(["a=1,2", "b=x", "c=range(3,5)", "d=choice(u,v)"])
    assert jobs == [{"a": a, "c": c, "d": d} for a in "12" for c in "34" for d in "uv"]


def test_lists_are_swept_as_wholes() -> None:
    assert jobs_of(["reward.functions=[math],[math,exact]"]) == [
        {"reward.functions": "[math]"},
        {"reward.functions": "[math,exact]"},
    ]


def test_each_run_has_its_values_and_a_folder_of_its_own() -> None:
    jobs = jobs_in([*BASE, "training.lr=1e-6,3e-6", "model.path=Qwen/a,b"], configured)
    assert [job.config.training.lr for job in jobs] == [1e-6, 1e-6, 3e-6, 3e-6]
    assert [job.config.run.dir for job in jobs][:2] == [
        "sweep/training.lr=1e-06,model.path=Qwen%2Fa",
        "sweep/training.lr=1e-06,model.path=b",
    ]
    assert jobs[0].config == compose(jobs[0].words)


def test_a_swept_folder_is_taken_as_it_is() -> None:
    assert [job.config.run.dir for job in jobs_in([*BASE[:2], "run.dir=a,b"], configured)] == ["a", "b"]


def test_one_wrong_combination_stops_the_sweep_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Sequence[str]] = []
    monkeypatch.setattr(multirun, "_run", started.append)
    with pytest.raises(ConfigError, match=r"^sampling\.n=0: it is at least 1\.$"):
        multirun.multirun("grpo", [*BASE, "sampling.n=2,0"], configured)
    assert started == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["training.lr=1e-6"],
            "-m sweeps over keys with several values, such as training.lr=1e-6,3e-6; there is none.",
        ),
        (
            ["training.lr=interval(0,1)"],
            "training.lr=interval(0,1): a sweep needs single values, such as training.lr=1,2 or range(1,5).",
        ),
    ],
)
def test_what_is_no_sweep_says_so(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        jobs_of(words)
    assert str(caught.value) == message


def test_text_that_hydra_cannot_read_is_not_swept() -> None:
    assert jobs_of(["data.system_prompt=Say (a), please.", "sampling.n=2,4"]) == [
        {"sampling.n": "2"},
        {"sampling.n": "4"},
    ]


def test_runs_follow_one_another_and_the_worst_exit_code_is_the_sweeps(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    codes = iter([0, 3, 1])
    commands: list[Sequence[str]] = []

    def run(command: Sequence[str]) -> int:
        commands.append(command)
        return next(codes)

    monkeypatch.setattr(multirun, "_run", run)
    assert multirun.multirun("grpo", [*BASE, "sampling.n=2,4,8"], configured) == 3
    assert commands[1] == [
        *(sys.executable, "-m", "hybridflow", "grpo"),
        *(*BASE, "sampling.n=4", "run.dir=sweep/sampling.n=4"),
    ]
    printed = capsys.readouterr().out
    assert "run 2 of 3: sampling.n=4" in printed
    assert [line.split()[1:3] for line in printed.splitlines()[-3:]] == [
        ["done", "val/reward"],
        ["exit", "3"],
        ["exit", "1"],
    ]


def test_the_summary_shows_the_last_validation_of_each_run(tmp_path: Path) -> None:
    jobs = jobs_in([*BASE[:2], f"run.dir={tmp_path}", "sampling.n=2,4"], configured)
    folder = Path(jobs[0].config.run.dir)
    folder.mkdir()
    rows = [{"step": 0.0, "val/reward": 0.25}, {"step": 1.0}, {"step": 2.0, "val/reward": 0.5}, {"step": 3.0}]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert summary([(jobs[0], 0, 1.4), (jobs[1], 1, 2.0)]).splitlines() == [
        f"sampling.n=2  done      val/reward 0.5000  1 s  {folder}",
        f"sampling.n=4  exit 1    val/reward -  2 s  {jobs[1].config.run.dir}",
    ]


def test_a_process_s_exit_code_is_the_run_s() -> None:
    assert multirun._run([sys.executable, "-c", "raise SystemExit(7)"]) == 7
