"""Which rows a run reads, when, and what it says where there are none."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from hybridflow.batch import Batch
from hybridflow.controller.group import Place
from hybridflow.controller.runtime.inline import InlineRuntime
from hybridflow.controller.trace import Trace
from hybridflow.errors import ConfigError, DataError
from hybridflow.trainer.config import compose
from hybridflow.trainer.rows import Rows, RowsSettings, check_given
from tests.models import character_tokenizer

pytestmark = pytest.mark.unit
ROWS = [{"prompt": f"{i}+{i}", "answer": str(2 * i)} for i in range(5)]


def write(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows_of(
    *words: object,
    rows: Any = None,
    validation: Any = None,
    model: object = None,
    context: int | None = 2000,
    trains: bool = True,
) -> Rows:
    """The handle, over one inline rank."""
    limit = [] if context is None else [f"rollout.max_context_tokens={context}"]
    config = compose([f"model.path={model or tiny()}", *limit, *map(str, words)])
    check_given(config, rows, validation)
    settings = RowsSettings(config, rows, validation, trains)
    return Rows(settings, "data", group=InlineRuntime(Trace()).group("data", Rows, settings, Place("data")))


@cache
def tiny() -> Path:
    """A model folder of which the tokenizer is read."""
    folder = Path(tempfile.mkdtemp())
    character_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text("{}")
    return folder


def prompts_of(batch: Batch) -> list[str]:
    return list(batch.fetch("prompt")["prompt"])


def test_data_that_only_has_a_test_split_can_be_evaluated(tmp_path: Path) -> None:
    write(tmp_path / "parts" / "test.jsonl")
    rows = rows_of(f"data.path={tmp_path / 'parts'}", trains=False)
    assert len(rows.validation_rows()) == 5
    with pytest.raises(DataError, match="no file for the split train"):
        rows.steps_in(1)


def test_data_without_splits_is_itself_the_validation_set_only_of_a_driver_that_takes_no_steps(tmp_path: Path) -> None:
    for path, rows in ((write(tmp_path / "a.jsonl"), None), ("memory", ROWS)):
        assert rows_of(f"data.path={path}", rows=rows).no_validation is not None
        evaluated = rows_of(f"data.path={path}", rows=rows, trains=False)
        assert evaluated.no_validation is None
        assert prompts_of(evaluated.validation_rows()) == [row["prompt"] for row in ROWS]


def test_case_29_a_resume_at_an_epochs_boundary_goes_on_with_the_next_epochs_rows() -> None:
    rows = [{"prompt": f"{i}", "answer": str(i)} for i in range(6)]
    whole = rows_of("data.path=memory", rows=rows)
    expected = [prompts_of(whole.draw("prompts", 3)) for _ in range(6)]
    for steps_before in range(6):
        before, after = rows_of("data.path=memory", rows=rows), rows_of("data.path=memory", rows=rows)
        for _ in range(steps_before):
            before.draw("prompts", 3)
        after.load_state_dict(json.loads(json.dumps(before.state_dict())))
        assert [prompts_of(after.draw("prompts", 3)) for _ in range(6 - steps_before)] == expected[steps_before:]
        assert after.epoch == 3.0


def test_why_there_are_no_validation_rows_names_the_data_and_the_split(tmp_path: Path) -> None:
    file, folder = write(tmp_path / "a.jsonl"), write(tmp_path / "parts" / "train.jsonl").parent
    assert rows_of(f"data.path={file}").no_validation == f"data.path={file} has no splits; set data.validation_path."
    assert rows_of(f"data.path={folder}").no_validation.startswith(f"data.path={folder} has no split 'test'; set data")
    assert rows_of("data.path=memory", rows=ROWS).no_validation.startswith("rows in memory have no splits; give")


@pytest.mark.parametrize(
    ("word", "validation", "said"),
    [
        ("data.split=dev", None, r"^data\.split is set, but rows in memory have no splits"),
        ("data.validation_split=dev", None, r"^data\.validation_split is set, but rows in memory have no splits"),
        ("data.validation_split=dev", ROWS, r"^data\.validation_split is set, but the validation rows are given"),
        ("data.validation_path=dev", ROWS, r"^data\.validation_path is set, but the validation rows are given"),
    ],
)
def test_keys_that_rows_in_memory_leave_unread_are_refused(word: str, validation: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        rows_of("data.path=memory", word, rows=ROWS, validation=validation)


def test_a_prompt_that_fills_the_models_context_is_left_out_and_said(tiny_model: Path) -> None:
    template = len("SuserNENSassistantN")  # S and E: the tokens of a turn's start and end, N: a newline
    rows = [*ROWS, {"prompt": "1" * (4095 - template)}, {"prompt": "1" * (4096 - template)}]
    made = rows_of("data.path=memory", "data.max_prompt_tokens=9999", rows=rows, model=tiny_model, context=None)
    assert len(made.draw("prompts", 6)) == 6
    assert made.epoch == 1.0
    notice = made.info.notices[0]
    assert "1 of 7 prompts are longer than the model's max_position_embeddings=4096 leaves room for" in notice
