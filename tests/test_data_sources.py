"""Where rows of data come from: files, folders, the hub, reasoning-gym tasks, functions."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybridflow.errors import ConfigError, DataError
from hybridflow.trainer.data import load_rows, load_validation_rows
from hybridflow.trainer.data_config import DataConfig
from hybridflow.trainer.data_sources import SplitError, read_rows

pytestmark = pytest.mark.unit


def numbered(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"p{i}", "answer": str(i)} for i in range(count)]


# ---- files and folders
def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    import pyarrow
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def write_array(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text(json.dumps(rows, indent=1))
    return path


def load(path: str | Path, **config: Any) -> list[dict[str, Any]]:
    return load_rows(DataConfig(path=str(path), **config))


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("sums.jsonl", write_jsonl),
        ("sums.json", write_jsonl),
        ("sums.json", write_array),
        ("sums.parquet", write_parquet),
    ],
)
def test_rows_of_a_file_have_its_name_as_source(tmp_path: Path, name: str, write: Callable[..., Path]) -> None:
    path = write(tmp_path / name, numbered(3))
    assert load(path) == [{"source": "sums", **row} for row in numbered(3)]


def test_empty_lines_are_skipped_and_unicode_line_separators_are_text(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('\ufeff{"prompt": "a\u2028b"}\n\n  \n{"prompt": "c"}', encoding="utf-8")
    assert [row["prompt"] for row in load(path)] == ["a\u2028b", "c"]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (
            "a.jsonl",
            b'{"a": 1}\n\n{"a": oops}\n',
            r"a.jsonl, line 3: not JSON \(Expecting value at column 7\): {\"a\": oops}",
        ),
        ("a.jsonl", b'{"a": 1}\n[1]\n', r"a.jsonl, line 2: a row is an object of named columns, not a list: \[1\]"),
        ("a.jsonl", b'{"a": 1}\n{"a": "\xff"}\n', "a.jsonl, line 2: not UTF-8 text"),
        ("a.jsonl", b"\n", "a.jsonl: there are no rows in it"),
        ("a.json", b'[{"a": 1},\n{"a" 2}]', "a.json, line 2: not JSON"),
        ("a.json", b"[1]", "a.json, row 1: a row is an object"),
        ("a.parquet", b"PAR?", "a.parquet: not a parquet file"),
        ("a.csv", b"a,b", "a.csv: rows are read from .jsonl, .json, .parquet files"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_its_line(
    tmp_path: Path, name: str, content: bytes, said: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=said):
        load(tmp_path / name)


def test_a_missing_file_is_named_as_written_with_its_near_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_jsonl(Path("train.jsonl"), numbered(1))
    with pytest.raises(DataError, match=r"data.path=./trian.jsonl: no such file. Near it: train.jsonl."):
        load("./trian.jsonl")
    with pytest.raises(DataError, match=r"data.path=other.parquet: no such file. In . there is no name like it."):
        load("other.parquet")
    with pytest.raises(DataError, match=r"data.path=gone/a.jsonl: no such file. There is no folder gone either."):
        load("gone/a.jsonl")


def test_a_folder_has_a_file_or_shards_for_each_split(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", numbered(2))
    write_jsonl(tmp_path / "trainer.jsonl", numbered(9))
    write_parquet(tmp_path / "data/test-00001-of-00002.parquet", numbered(3)[2:])
    write_parquet(tmp_path / "data/test-00000-of-00002.parquet", numbered(3)[:2])
    assert [row["answer"] for row in load(tmp_path)] == ["0", "1"]
    assert [row["answer"] for row in load(tmp_path, split="test")] == ["0", "1", "2"]
    with pytest.raises(SplitError, match=r"no file for the split dev, such as dev.jsonl. It has .*train.jsonl"):
        load(tmp_path, split="dev")
    write_parquet(tmp_path / "train.parquet", numbered(2))
    with pytest.raises(DataError, match=r"the split train comes in several formats"):
        load(tmp_path)


def test_a_folder_without_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a folder without .jsonl, .json, .parquet files"):
        load(tmp_path)


def test_a_saved_dataset_is_read_by_split(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    one = datasets.Dataset.from_list(numbered(2))
    datasets.DatasetDict({"train": one}).save_to_disk(str(tmp_path / "splits"))
    one.save_to_disk(str(tmp_path / "one"))
    assert [row["answer"] for row in load(tmp_path / "splits")] == ["0", "1"]
    assert [row["answer"] for row in load(tmp_path / "one")] == ["0", "1"]
    with pytest.raises(SplitError, match="no split test; it has train"):
        load(tmp_path / "splits", split="test")
    assert load_validation_rows(DataConfig(path=str(tmp_path / "one"))) is None


# ---- the hub
class Hub:
    """Stands in for `datasets.load_dataset`."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.asked: list[tuple[Any, ...]] = []

    def __call__(self, name: str, configuration: str | None, *, split: str) -> Any:
        self.asked.append((name, configuration, split))
        if self.error is not None:
            raise self.error
        return self

    def to_list(self) -> list[dict[str, Any]]:
        return numbered(1)


def test_a_hub_name_may_carry_its_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub()
    monkeypatch.setattr("datasets.load_dataset", hub)
    assert load("openai/gsm8k:main") == [{"source": "gsm8k", **numbered(1)[0]}]
    load("openai/gsm8k", split="test")
    assert hub.asked == [("openai/gsm8k", "main", "train"), ("openai/gsm8k", None, "test")]


def test_a_hub_that_cannot_be_reached_is_a_data_error_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.load_dataset", Hub(ConnectionError("Couldn't reach it")))
    with pytest.raises(DataError, match=r"data.path=a/b: neither a file or folder here.*Couldn't reach it.*downloaded"):
        load("a/b")


# ---- reasoning-gym
def test_a_reasoning_gym_task_gives_prompt_answer_and_metadata() -> None:
    rows = load("reasoning_gym:chain_sum", task={"size": 3, "max_terms": 2})
    assert len(rows) == 3
    assert {row["source"] for row in rows} == {"chain_sum"}
    for row in rows:
        expression = json.loads(row["metadata"])["expression"]
        assert expression in row["prompt"]
        assert eval(expression) == int(row["answer"])
    assert rows == load("reasoning_gym:chain_sum", task={"size": 3, "max_terms": 2})
    assert rows != load("reasoning_gym:chain_sum", task={"size": 3, "max_terms": 2, "seed": 5})


def test_train_and_test_rows_of_a_task_are_not_the_same_ones_moved_by_a_few() -> None:
    task = {"size": 20, "min_digits": 4}
    train = {row["prompt"] for row in load("reasoning_gym:chain_sum", task=task)}
    test = load_validation_rows(DataConfig(path="reasoning_gym:chain_sum", task=task))
    assert test is not None
    assert len(test) == 20
    assert not train & {row["prompt"] for row in test}


@pytest.mark.parametrize(
    ("path", "config", "said"),
    [
        ("reasoning_gym:chain_sums", {}, "no such task. Did you mean chain_sum"),
        ("reasoning_gym:chain_sum", {"task": {"max_term": 2}}, "data.task.max_term: .* Did you mean max_terms"),
        ("reasoning_gym:chain_sum", {"task": {"min_terms": 0}}, "data.task: .* refuses min_terms=0"),
        ("reasoning_gym:chain_sum", {"split": "dev"}, "no split dev; it has train and test"),
        ("rows.jsonl", {"task": {"size": 2}}, "data.task.size is set, but data.path=rows.jsonl reads it nowhere"),
    ],
)
def test_a_wrong_task_or_option_is_named(path: str, config: dict[str, Any], said: str) -> None:
    with pytest.raises((ConfigError, DataError), match=said):
        load(path, **config)


# ---- functions
@pytest.fixture
def functions(tmp_path: Path) -> Path:
    file = tmp_path / "my_data.py"
    file.write_text(
        "def by_split(split):\n    yield {'prompt': split}\n"
        "def plain():\n    return [{'prompt': 'x', 'source': 'own'}]\n"
        "def wrong():\n    return [{'prompt': 'x'}, 'y']\n"
        "def nothing():\n    return None\n"
    )
    return file


def test_a_function_gives_rows_and_is_told_the_split_if_it_asks(functions: Path) -> None:
    assert load(f"{functions}:by_split", split="dev") == [{"source": "by_split", "prompt": "dev"}]
    assert load(f"{functions}:plain") == [{"source": "own", "prompt": "x"}]
    assert len(load("hybridflow.trainer.arithmetic:problems", split="test")) == 512


def test_a_function_that_gives_no_rows_is_named(functions: Path) -> None:
    with pytest.raises(DataError, match="wrong, row 2: a row is an object of named columns, not a str: y"):
        load(f"{functions}:wrong")
    with pytest.raises(DataError, match="it returned a NoneType; an iterable of rows"):
        load(f"{functions}:nothing")
    with pytest.raises(ConfigError, match=r"data.path .*defines by_split, plain, wrong, nothing, not plian"):
        load(f"{functions}:plian")


# ---- validation rows
def test_validation_rows_are_the_other_split_or_none_where_there_are_no_splits(tmp_path: Path, functions: Path) -> None:
    file = write_jsonl(tmp_path / "train.jsonl", numbered(2))
    assert load_validation_rows(DataConfig(path=str(file))) is None
    assert load_validation_rows(DataConfig(path=f"{functions}:plain")) is None
    assert load_validation_rows(DataConfig(path=str(file)), fallback=True) == load(file)
    assert load_validation_rows(DataConfig(path=f"{functions}:by_split")) == [{"source": "by_split", "prompt": "test"}]
    folder = tmp_path / "folder"
    write_jsonl(folder / "train.jsonl", numbered(2))
    assert load_validation_rows(DataConfig(path=str(folder))) is None
    assert load_validation_rows(DataConfig(path=str(folder)), fallback=True) is None
    with pytest.raises(SplitError, match="no file for the split dev"):
        load_validation_rows(DataConfig(path=str(folder), validation_split="dev"))


def test_a_validation_path_of_its_own_is_read_whole(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "held_out.jsonl", numbered(2))
    config = DataConfig(path="reasoning_gym:chain_sum", task={"size": 2}, validation_path=str(file))
    assert load_validation_rows(config) == read_rows(str(file), "test", {})
    with pytest.raises(DataError, match="no such file"):
        load_validation_rows(DataConfig(path=str(file), validation_path=str(tmp_path / "gone.jsonl")))
