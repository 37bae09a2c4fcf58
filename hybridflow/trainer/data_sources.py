"""Where rows come from: a file, a folder, the hub, a reasoning-gym task, or a function. Each gives a list of dicts.

Lines and rows are counted from 1 in messages. A file, and a function without the parameter `split`, has no splits.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ..algorithms.registry import resolve
from ..errors import DataError
from .tasks import GYM, check_task

Row = dict[str, Any]

TEST_SEED_OFFSET = 1_000_000_000  # item i of a task is drawn from seed + i: neighbouring seeds would share problems
SINGLE_DATASET = "state.json"  # `save_to_disk` of one split writes it
FUNCTION = re.compile(r"(.+\.py|[A-Za-z_][\w.]*):[A-Za-z_]\w*")
HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?(:[\w.-]+)?")


class SplitError(DataError):
    """The data has no split of the name asked for."""


def read_rows(path: str, split: str, task: Mapping[str, Any]) -> list[Row]:
    """All rows of one split, each with a column `source` (the data's name, where the rows don't bring their own).

    path: as data.path. task: the keys of data.task, for reasoning_gym.
    Errors: DataError naming the file, the line and the remedy; SplitError; ConfigError for a function that isn't there
    and as `check_task`.
    """
    check_task(path, task)
    name, rows = _read(path, split, task)
    if not rows:
        raise DataError(f"{path}: there are no rows in it.")
    return [{"source": name, **row} for row in rows]


def has_splits(path: str) -> bool:
    """Whether data.split means anything for this path."""
    if not path.startswith(GYM) and FUNCTION.fullmatch(path):
        return "split" in inspect.signature(resolve(path, "data.path")).parameters
    local = _local(path)
    return not (local.is_file() or (local / SINGLE_DATASET).is_file())


def _read(path: str, split: str, task: Mapping[str, Any]) -> tuple[str, list[Row]]:
    """The data's name and its rows."""
    if path.startswith(GYM):
        name = path.removeprefix(GYM)
        return name, _of_reasoning_gym(name, split, task)
    if FUNCTION.fullmatch(path):
        return path.rpartition(":")[2], _of_function(path, split)
    local = _local(path)
    if local.is_file():
        return local.stem, _of_file(local, path)
    if local.is_dir():
        return local.name, _of_folder(local, path, split)
    if local.suffix in READERS or not HUB_NAME.fullmatch(path):
        raise DataError(f"data.path={path}: no such file.{_nearest(local)}")
    return path.partition(":")[0].rpartition("/")[2], _of_hub(path, split)


# ---- files
def _of_file(file: Path, shown: str) -> list[Row]:
    if file.suffix not in READERS:
        raise DataError(
            f"{shown}: rows are read from {', '.join(READERS)} files; convert it, or give file.py:function."
        )
    return READERS[file.suffix](file, shown)


def _json_lines(file: Path, shown: str) -> list[Row]:
    rows: list[Row] = []
    for number, line in enumerate(_text(file, shown).split("\n"), 1):
        if line.strip():
            rows.append(_json_object(line.strip(), f"{shown}, line {number}"))
    return rows


def _json_object(text: str, where: str) -> Row:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON ({error.msg} at column {error.colno}): {_start(text)}") from error
    return _row(value, where)


def _json(file: Path, shown: str) -> list[Row]:
    """One array of objects, or, as many tools write .json, one object a line."""
    text = _text(file, shown)
    if not text.lstrip().startswith("["):
        return _json_lines(file, shown)
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        line = text.splitlines()[error.lineno - 1]
        raise DataError(f"{shown}, line {error.lineno}: not JSON ({error.msg}): {_start(line)}") from error
    return [_row(value, f"{shown}, row {number}") for number, value in enumerate(values, 1)]


def _text(file: Path, shown: str) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        line = file.read_bytes()[: error.start].count(b"\n") + 1
        raise DataError(f"{shown}, line {line}: not UTF-8 text ({error.reason}).") from error


def _parquet(file: Path, shown: str) -> list[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        rows: list[Row] = pyarrow.parquet.read_table(file).to_pylist()
    except pyarrow.ArrowException as error:
        raise DataError(f"{shown}: not a parquet file ({error}).") from error
    return rows


READERS: dict[str, Callable[[Path, str], list[Row]]] = {".jsonl": _json_lines, ".json": _json, ".parquet": _parquet}


# ---- folders and the hub
def _of_folder(folder: Path, shown: str, split: str) -> list[Row]:
    """A dataset written by `save_to_disk`, or files named after their split: train.jsonl, data/train-0000.parquet."""
    if any((folder / name).is_file() for name in ("dataset_dict.json", SINGLE_DATASET)):
        return _of_saved_dataset(folder, shown, split)
    files = sorted(file for file in (*folder.glob("*"), *folder.glob("data/*")) if file.suffix in READERS)
    found = [file for file in files if re.fullmatch(rf"{re.escape(split)}([-_.].*)?", file.stem)]
    if not files:
        raise DataError(f"{shown}: a folder without {', '.join(READERS)} files.")
    if not found:
        raise SplitError(f"{shown}: no file for the split {split}, such as {split}.jsonl. It has {_names(files)}.")
    if len({file.suffix for file in found}) > 1:
        raise DataError(f"{shown}: the split {split} comes in several formats ({_names(found)}): give one file's path.")
    return [row for file in found for row in _of_file(file, f"{shown}/{file.relative_to(folder)}")]


def _of_saved_dataset(folder: Path, shown: str, split: str) -> list[Row]:
    import datasets

    found = datasets.load_from_disk(str(folder))
    if isinstance(found, datasets.DatasetDict):
        if split not in found:
            raise SplitError(f"{shown}: no split {split}; it has {', '.join(found)}.")
        found = found[split]
    rows: list[Row] = found.to_list()
    return rows


def _of_hub(path: str, split: str) -> list[Row]:
    import datasets

    name, _, configuration = path.partition(":")
    try:
        rows: list[Row] = datasets.load_dataset(name, configuration or None, split=split).to_list()
    except (OSError, ValueError) as error:
        if "Unknown split" in str(error):
            raise SplitError(f"data.path={path}: {error}") from error
        raise DataError(
            f"data.path={path}: neither a file or folder here, nor a dataset the hub gives ({error}). Without a "
            "network, give the path of a downloaded file or folder; a private dataset needs a login."
        ) from error
    return rows


# ---- tasks and functions
def _of_reasoning_gym(name: str, split: str, task: Mapping[str, Any]) -> list[Row]:
    """Rows prompt, answer, metadata (JSON). data.task.size: how many; data.task.seed: which."""
    from reasoning_gym.factory import create_dataset

    if split not in ("train", "test"):
        raise SplitError(f"{GYM}{name}: no split {split}; it has train and test.")
    seed = int(task.get("seed") or 0) + (TEST_SEED_OFFSET if split == "test" else 0)
    try:
        items = list(create_dataset(name, **{**task, "seed": seed}))
    except (AssertionError, TypeError, ValueError) as error:
        raise DataError(f"{GYM}{name}: the task refuses data.task={dict(task)}: {error}.") from error
    return [
        {"prompt": item["question"], "answer": item["answer"], "metadata": json.dumps(item["metadata"], default=str)}
        for item in items
    ]


def _of_function(path: str, split: str) -> list[Row]:
    function = resolve(path, "data.path")
    asks = "split" in inspect.signature(function).parameters
    values = function(split=split) if asks else function()
    if isinstance(values, (str, Mapping)) or not isinstance(values, Iterable):
        raise DataError(
            f"data.path={path}: it returned a {type(values).__name__}; an iterable of rows (dicts) is needed."
        )
    return [_row(value, f"data.path={path}, row {number}") for number, value in enumerate(values, 1)]


# ---- words
def _row(value: Any, where: str) -> Row:
    if not isinstance(value, Mapping):
        raise DataError(f"{where}: a row is an object of named columns, not a {type(value).__name__}: {_start(value)}")
    return dict(value)


def _local(path: str) -> Path:
    return Path(path).expanduser()


def _nearest(missing: Path) -> str:
    folder = missing.parent
    if not folder.is_dir():
        return f" There is no folder {folder} either."
    close = get_close_matches(missing.name, [entry.name for entry in folder.iterdir()], 3, 0.5)
    return f" Near it: {', '.join(close)}." if close else f" In {folder} there is no name like it."


def _names(files: list[Path]) -> str:
    return ", ".join(file.name for file in files[:5]) + (", ..." if len(files) > 5 else "")


def _start(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
