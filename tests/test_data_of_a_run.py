"""Which rows a run reads, when, and what it says where there are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hybridflow.errors import ConfigError, DataError
from hybridflow.trainer.config import compose
from hybridflow.trainer.rows import RunRows
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
    model: object = "none",
    context: int | None = 2000,
    said: list[str] | None = None,
) -> RunRows:
    tokenizer, heard = character_tokenizer(), [] if said is None else said
    limit = [] if context is None else [f"rollout.max_context_tokens={context}"]
    config = compose([f"model.path={model}", *limit, *map(str, words)])
    return RunRows(config, tokenizer, rows, validation, heard.append)


def test_data_that_only_has_a_test_split_can_be_evaluated(tmp_path: Path) -> None:
    write(tmp_path / "parts" / "test.jsonl")
    rows = rows_of(f"data.path={tmp_path / 'parts'}")
    validation = rows.validation(fallback=True)
    assert validation is not None
    assert len(validation) == 5
    with pytest.raises(DataError, match="no file for the split train"):
        rows.steps_in(1)


def test_data_without_splits_is_itself_the_validation_set_only_of_a_driver_that_takes_no_steps(tmp_path: Path) -> None:
    for rows in (rows_of(f"data.path={write(tmp_path / 'a.jsonl')}"), rows_of("data.path=memory", rows=ROWS)):
        assert rows.validation() is None
        validation = rows.validation(fallback=True)
        assert validation is not None
        assert validation["prompt"].tolist() == [row["prompt"] for row in ROWS]


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
    heard: list[str] = []
    template = len("SuserNENSassistantN")  # S and E: the tokens of a turn's start and end, N: a newline
    rows = [*ROWS, {"prompt": "1" * (4095 - template)}, {"prompt": "1" * (4096 - template)}]
    made = rows_of(
        "data.path=memory", "data.max_prompt_tokens=9999", rows=rows, model=tiny_model, context=None, said=heard
    )
    assert len(made.draw("prompts", 6).ragged("prompt_ids")) == 6
    assert made.epoch == 1.0
    assert "1 of 7 prompts are longer than the model's max_position_embeddings=4096 leaves room for" in heard[0]
