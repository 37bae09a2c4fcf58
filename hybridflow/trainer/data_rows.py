"""Rows as a user has them, made into rows that can be trained on: data.format, required keys, own columns."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..algorithms.registry import resolve
from ..columns import DERIVED, Array, objects, spec_of
from ..errors import DataError
from ..workers.models.rendering import MESSAGES
from .data_config import DataConfig
from .data_sources import Row
from .data_text import checked_prompt

RESPONSES: dict[str, tuple[str, ...]] = {"prompts": (), "examples": ("response",), "pairs": ("chosen", "rejected")}
"""data.kind -> keys of the texts that answer the prompt."""
AS_THEY_ARE = ("answer",)  # never a dense column: a reward function gets what the data says


def prepared_rows(rows: Iterable[Mapping[str, Any]], config: DataConfig, name: str) -> list[Row]:
    """Rows after data.format, each with `prompt` (text or messages), `source` and the texts that its kind has beside
    the prompt, see `RESPONSES`; of pairs all with a `margin`, or none.

    name: what the data is called in messages. Errors: DataError naming the row, counted from 1, and the remedy.
    """
    format_row = None if config.format is None else resolve(config.format, "data.format")
    prepared: list[Row] = []
    for number, given in enumerate(rows, 1):
        where = f"{name}, row {number}"
        row = dict(given) if format_row is None else _formatted(format_row, dict(given), where)
        prepared.append({"source": name, **_checked(row, config, where)})
    if not prepared:
        raise DataError(f"{name}: there are no rows in it.")
    if config.kind == "pairs" and any("margin" in row for row in prepared):
        for number, row in enumerate(prepared, 1):
            row["margin"] = _margin(row.get("margin"), f"{name}, row {number}")
    return prepared


def own_columns(rows: Sequence[Mapping[str, Any]], name: str) -> tuple[dict[str, Array], list[str]]:
    """The data's own columns, which are carried and never interpreted, and a notice for each that some rows lack.

    Numbers of one type are dense; anything else is objects, None where a row has no value.
    Errors: DataError for a column whose name means something else in training.
    """
    columns: dict[str, Array] = {}
    notices: list[str] = []
    for key in dict.fromkeys(key for row in rows for key in row):
        if spec_of(key) is not None or key in (*DERIVED, MESSAGES):
            raise DataError(
                f"{name}: the column '{key}' has a name that training itself uses: rename it, or leave it out, in "
                "data.format."
            )
        missing = sum(key not in row for row in rows)
        if missing:
            notices.append(f"{name}: the column '{key}' is missing in {missing} of {len(rows)} rows, which get None")
        columns[key] = _own_column(key, [row.get(key) for row in rows])
    return columns, notices


def _formatted(format_row: Callable[[Row], Any], row: Row, where: str) -> Row:
    source = {"source": row["source"]} if "source" in row else {}
    try:
        formatted = format_row(row)
    except Exception as error:
        raise DataError(f"{where}: data.format raised {type(error).__name__}: {error}") from error
    if not isinstance(formatted, Mapping):
        raise DataError(f"{where}: data.format returned {formatted!r:.60}, not a row (dict).")
    return {**source, **formatted}


def _checked(row: Row, config: DataConfig, where: str) -> Row:
    """The row with its prompt under `prompt`."""
    key = config.prompt_key
    if key not in row:
        have = ", ".join(map(str, row)) or "none"
        raise DataError(
            f"{where}: no column '{key}' (columns: {have}). Set data.prompt_key, or make it in data.format."
        )
    prompt = checked_prompt(row.pop(key), where)
    if "prompt" in row:
        raise DataError(f"{where}: a column 'prompt' beside data.prompt_key={key}: leave it out in data.format.")
    for response in RESPONSES[config.kind]:
        if not isinstance(row.get(response), str):
            raise DataError(
                f"{where}: data.kind={config.kind} needs the text '{response}', not {row.get(response)!r:.60}. Make it "
                "in data.format."
            )
    return {**row, "prompt": prompt}


def _margin(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise DataError(f"{where}: 'margin' is a number in every row or in none, not {value!r:.60}.")
    return float(value)


def _own_column(key: str, values: list[Any]) -> Array:
    kinds = {type(value) for value in values}
    if key not in AS_THEY_ARE and kinds in ({bool}, {int}, {float}):
        array = np.asarray(values)
        if array.dtype.kind in "bif":  # not an integer beyond 64 bits
            return array
    return objects(values)
