"""Batch: an immutable table of rows (prompts, rollouts, examples). No padding exists outside a model's forward.

Rows have an identity, so that `a | b` joins columns of the same rows and never by position alone.
"""

from __future__ import annotations

import inspect
import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from .columns import (
    AnyColumn,
    Array,
    Column,
    Index,
    Kind,
    Ragged,
    Stored,
    aligned,
    as_column,
    concat_rows,
    kind_of,
    objects,
    read_only,
    spec_of,
    take_rows,
)
from .errors import BatchError

if TYPE_CHECKING:
    import torch

Metrics = Mapping[str, float]
R = TypeVar("R")

FIRST_STAYS = "drop_reason"  # on both sides of `|` the first reason a row was dropped stays
REMEDY = {
    "ref_logprobs": "Call ref.log_probs(batch) first.",
    "old_logprobs": "Call actor.old_log_probs(batch) first.",
    "advantages": "Call run.advantages(batch) first.",
    "reward": "Call reward.score(batch) first.",
    "token_rewards": "run.advantages(batch) makes it from the reward.",
    "values": "It is written by a critic.",
}


class RowKind(IntEnum):
    """What a row is; part of its identity, so that a prompt and a rollout of the same number are different rows."""

    PROMPT = 1
    EXAMPLE = 2
    PAIR = 3
    ROLLOUT = 4


def row_ids(kind: RowKind, numbers: Array) -> NDArray[np.int64]:
    """Identities of rows, from numbers that are unique among rows of this kind in a run."""
    return np.asarray(numbers, np.int64) | np.int64(int(kind) << 56)


class Batch:
    """n rows in named columns: dense [n, ...], ragged (`Ragged`), or objects (one Python value a row).

    Errors: BatchError for columns of different length, a wrong kind or dtype under a known name, or a per-token column
    whose row lengths are not those of response_ids.
    """

    def __init__(
        self,
        columns: Mapping[str, Any],
        ids: NDArray[np.int64] | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        checked: dict[str, AnyColumn] = {
            name: value if isinstance(value, Stored) else as_column(name, value) for name, value in columns.items()
        }
        _check_lengths(checked, ids)
        self._columns = aligned(checked)
        self.ids = None if ids is None else read_only(np.asarray(ids, np.int64))
        self.metrics: dict[str, float] = dict(metrics or {})

    # ---- looking
    def __len__(self) -> int:
        for column in self._columns.values():
            return len(column)
        return 0 if self.ids is None else len(self.ids)

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    def __getitem__(self, name: str) -> Any:
        return self.column(name)

    def column(self, name: str) -> Column:
        """The column `name`: an array (dense or objects) or a Ragged; read first, if it is kept elsewhere.

        Errors: BatchError with the names there are.
        """
        return self._here(name)

    def array(self, name: str) -> Array:
        """A dense or objects column."""
        return _one_a_row(name, self.column(name))

    def ragged(self, name: str) -> Ragged:
        """A ragged column."""
        return _ragged(name, self.column(name))

    def kind(self, name: str) -> Kind:
        """The kind of a column."""
        return kind_of(self._column(name))

    def lengths(self, name: str) -> Array:
        """Row lengths of a ragged column, [n]."""
        column, spec = self._column(name), spec_of(name)
        if isinstance(column, Stored) and column.kind is Kind.RAGGED and column.known is not None:
            return column.known
        if isinstance(column, Stored) and spec is not None and spec.aligned in self._columns:
            return self.lengths(spec.aligned)
        return _ragged(name, self._here(name)).lengths

    @property
    def names(self) -> tuple[str, ...]:
        """Column names, in the order they came."""
        return tuple(self._columns)

    def __repr__(self) -> str:
        kinds = ", ".join(f"{name}: {kind_of(column).value}" for name, column in self._columns.items())
        return f"{type(self).__name__}({len(self)} rows; {kinds})"

    # ---- columns
    def __or__(self, other: Batch) -> Batch:
        """Same rows, more columns.

        A column on both sides is an error, except keep (and-ed) and drop_reason (the first stays).
        """
        _check_same_rows(self, other)
        twice = (set(self._columns) & set(other._columns)) - {"keep", FIRST_STAYS}
        if twice:
            raise BatchError(f"| would overwrite {sorted(twice)}: rename or drop one side.")
        merged = {**self._columns, **other._columns}
        if "keep" in self and "keep" in other:
            merged["keep"] = read_only(self._array("keep") & other._array("keep"))
        if FIRST_STAYS in self and FIRST_STAYS in other:
            pairs = zip(self._array(FIRST_STAYS), other._array(FIRST_STAYS), strict=True)
            merged[FIRST_STAYS] = read_only(objects(first if first is not None else second for first, second in pairs))
        ids = self.ids if self.ids is not None else other.ids
        return _kind(self, other)._of(aligned(merged), ids, {**self.metrics, **other.metrics})

    def select(self, *names: str) -> Self:
        """Only these columns."""
        return self._of({name: self._column(name) for name in names}, self.ids, self.metrics)

    def drop(self, *names: str) -> Self:
        """All columns but these."""
        for name in names:
            self._column(name)
        return self._of({n: c for n, c in self._columns.items() if n not in names}, self.ids, self.metrics)

    def rename(self, **new_from_old: str) -> Self:
        """`batch.rename(baseline="reward")`: new name = old name."""
        new_name = {old: new for new, old in new_from_old.items()}
        for old, new in new_name.items():
            self._column(old)
            if new in self and new not in new_name:
                raise BatchError(f"rename: there is a column '{new}' already; drop it first.")
        columns = {
            new_name.get(n, n): as_column(new_name[n], c) if n in new_name and not isinstance(c, Stored) else c
            for n, c in self._columns.items()
        }
        return self._of(aligned(columns), self.ids, self.metrics)

    def with_metrics(self, metrics: Metrics) -> Self:
        """The same rows, with these metrics riding along beside those there are."""
        return self._of(self._columns, self.ids, {**self.metrics, **metrics})

    # ---- rows
    def take(self, rows: Sequence[int] | Array | slice) -> Self:
        """Rows by number, slice or mask. Metrics, which describe the whole batch, stay behind."""
        index = self._row_numbers(rows)
        return self._of(take_rows(self._columns, index), None if self.ids is None else read_only(self.ids[index]), {})

    def kept(self) -> Self:
        """Rows with keep = 1 (all, if the batch has no such column)."""
        return self.take(np.flatnonzero(self._array("keep"))) if "keep" in self else self

    def pick(self, fn: Callable[..., Array], **options: Any) -> Self:
        """Rows whose numbers `fn` returns; its positional parameters are dense columns."""
        return self.take(fn(**self._arguments(fn), **options))

    def split(self, k: int) -> list[Self]:
        """k batches of consecutive rows, sizes differing by at most one."""
        return [self.take(part) for part in np.array_split(np.arange(len(self)), k)]

    def minibatches(
        self, count: int, epochs: int = 1, seed: int | Sequence[int] = 0, unit: str = "rollout_id"
    ) -> Iterator[Self]:
        """`epochs` times `count` shuffled parts that cover all rows; rows of a `unit` stay together, nothing is padded.

        Sizes in units differ by at most one. The same seed gives the same parts. Without the column, a row is a unit.
        """
        key = self._array(unit) if unit in self else np.arange(len(self))
        _, inverse = np.unique(key, return_inverse=True)
        units = int(inverse.max()) + 1 if len(self) else 0
        rows_by_unit = np.split(
            np.argsort(inverse, kind="stable"), np.cumsum(np.bincount(inverse, minlength=units))[:-1]
        )
        seeds = [seed] if isinstance(seed, int) else list(seed)
        for epoch in range(epochs):
            order = np.random.default_rng([*seeds, epoch]).permutation(units)
            for part in np.array_split(order, count):
                yield self.take(np.concatenate([rows_by_unit[u] for u in part]) if len(part) else np.arange(0))

    def join(self, other: Batch, on: str, **new_from_old: str) -> Batch:
        """Dense columns of `other`, which has one row per key, brought to the rows of this batch by the key `on`.

        A key without a kept row in `other` gives keep = 0 here. Errors: BatchError if `other` repeats a kept key.
        """
        kept = other.kept()
        keys = kept._array(on)
        order = np.argsort(keys, kind="stable")
        if len(keys) > 1 and (np.diff(keys[order]) == 0).any():
            raise BatchError(f"join: the other batch has several kept rows for one {on}; pick one first.")
        at = np.searchsorted(keys[order], self._array(on))
        found = at < len(keys)
        found[found] = keys[order][at[found]] == self._array(on)[found]
        columns: dict[str, Any] = {}
        for new, old in new_from_old.items():
            values = kept._array(old)
            columns[new] = np.full((len(self), *values.shape[1:]), None if values.dtype == object else 0, values.dtype)
            columns[new][found] = values[order[at[found]]]
        return _kind(self, other)({**columns, "keep": found}, self.ids)

    # ---- functions of columns
    def map(self, fn: Callable[..., Mapping[str, Any] | Array], to: str | None = None, **options: Any) -> Self:
        """New columns from old ones: `fn(columns, **options)` returns a mapping, or one array (named `to`).

        Positional parameters are columns by name: dense [n], ragged flat [T]; also `lengths` [n], `row_of_token` [T],
        `rewards` [n, components]. An array of n values is one a row, of T values one a token of response_ids.
        """
        out = fn(**self._arguments(fn), **options)
        columns = out if isinstance(out, Mapping) else {to or fn.__name__: out}
        return type(self)({name: self._shaped(fn, name, value) for name, value in columns.items()}, self.ids)

    def apply(self, fn: Callable[..., R], *args: Any) -> R:
        """fn(batch, *args) in a process where the rows are; what it returns. To write them to a file, for instance."""
        return fn(self, *args)

    # ---- data
    def fetch(self, *names: str) -> Batch:
        """These columns (all, if none is named), here in this process."""
        self._read(names or self.names)
        return Batch._of({name: self._here(name) for name in names or self._columns}, self.ids, self.metrics)

    def to_torch(self, *names: str) -> dict[str, torch.Tensor]:
        """Dense and ragged columns as tensors (ragged ones flat). Always copies: a tensor over a shared buffer could be
        written to, and would corrupt it for every other reader."""
        import torch

        columns = {name: self.column(name) for name in names or self._columns}
        return {
            name: torch.from_numpy(np.array(column.values if isinstance(column, Ragged) else column))
            for name, column in columns.items()
            if kind_of(column) is not Kind.OBJECTS
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to one file; `Batch.load` reads it back, rows' identities and metrics included."""
        with Path(path).open("wb") as file:
            columns = self.fetch()._columns
            pickle.dump({"columns": columns, "ids": self.ids, "metrics": self.metrics}, file, protocol=5)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Batch:
        """Read what `save` wrote. Only for files of your own: it unpickles."""
        with Path(path).open("rb") as file:
            return Batch(**pickle.load(file))

    def __getstate__(self) -> dict[str, Any]:
        """With all values: where a column is kept means nothing to whoever is handed the bytes."""
        self._read(self.names)
        columns = {name: self._here(name) for name in self._columns}
        return {"_columns": columns, "ids": self.ids, "metrics": self.metrics}

    # ---- inside
    @classmethod
    def _of(cls, columns: Mapping[str, AnyColumn], ids: NDArray[np.int64] | None, metrics: Metrics) -> Self:
        """A batch of columns that were checked before, which selections and joins need not do again."""
        batch = object.__new__(cls)
        batch._columns, batch.ids, batch.metrics = dict(columns), ids, dict(metrics)
        return batch

    def _column(self, name: str) -> AnyColumn:
        """The column wherever it is kept, for the verbs, which need no values."""
        if name not in self._columns:
            raise BatchError(f"no column '{name}'; the batch has {sorted(self._columns)}.{_remedy(name)}")
        return self._columns[name]

    def _here(self, name: str) -> Column:
        """The column's values, in this process from now on."""
        column = self._column(name)
        if isinstance(column, Stored):
            if column.kind is not Kind.RAGGED and column.known is not None:
                return column.known
            column = self._columns[name] = column.read()
        return column

    def _read(self, names: Sequence[str]) -> None:
        """Bring these columns here, those that were made together at once."""
        together: dict[int, dict[str, Stored]] = {}
        for name in names:
            column = self._column(name)
            if isinstance(column, Stored) and (column.kind is Kind.RAGGED or column.known is None):
                together.setdefault(id(column.rows), {})[name] = column
        for stored in together.values():
            values = next(iter(stored.values())).rows.read(list({column.name for column in stored.values()}))
            self._columns |= {name: values[column.name] for name, column in stored.items()}

    def _array(self, name: str) -> Array:
        """A column with one value a row, for the verbs."""
        return _one_a_row(name, self._here(name))

    def _row_numbers(self, rows: Sequence[int] | Array | slice) -> Index:
        if isinstance(rows, slice):
            start, stop, step = rows.indices(len(self))
            return slice(start, max(start, stop)) if step == 1 else np.arange(len(self))[rows]
        index = np.asarray(rows)
        if index.dtype == bool:
            if len(index) != len(self):
                raise BatchError(f"take: a mask of {len(index)} values for {len(self)} rows.")
            return np.flatnonzero(index)
        if not len(index):
            return np.arange(0)
        if index.dtype.kind not in "iu":
            raise BatchError(f"take: rows are chosen by number, slice or mask, not by {index.dtype} values.")
        least, most = index.min(), index.max()
        if least < -len(self) or most >= len(self):
            raise BatchError(f"take: row {most if most >= len(self) else least} of {len(self)} rows.")
        return (index if least >= 0 else np.where(index < 0, index + len(self), index)).astype(np.int64, copy=False)

    def _arguments(self, fn: Callable[..., Any]) -> dict[str, Any]:
        """The columns that `fn` asks for by its positional parameters' names; keyword-only ones are options."""
        found: dict[str, Any] = {}
        for parameter in _positional(fn):
            value = self._argument(parameter.name)
            if value is not None:
                found[parameter.name] = value
            elif parameter.default is parameter.empty:
                raise BatchError(
                    f"{_name_of(fn)} needs the column '{parameter.name}'; the batch has {sorted(self._columns)}."
                    f"{_remedy(parameter.name)}"
                )
        return found

    def _read_by(self, fn: Callable[..., Any]) -> list[str]:
        """Names of the columns that `_arguments` looks at."""
        asked = {parameter.name for parameter in _positional(fn)}
        if asked & {"lengths", "row_of_token"}:
            asked.add("response_ids")
        return [n for n in self._columns if n in asked or ("rewards" in asked and n.startswith("reward/"))]

    def _argument(self, name: str) -> Any:
        if name in self._columns:
            if kind_of(self._columns[name]) is not Kind.RAGGED:
                return self._array(name)
            column = self._here(name)
            return column.values if isinstance(column, Ragged) else column
        if name == "lengths" and "response_ids" in self:
            return self.lengths("response_ids")
        if name == "row_of_token" and "response_ids" in self:
            return np.repeat(np.arange(len(self)), self._response_ids().lengths)
        if name == "rewards":
            parts = [self._array(n) for n in self._columns if n.startswith("reward/")]
            return np.stack(parts, axis=1) if parts else None
        return None

    def _shaped(self, fn: Callable[..., Any], name: str, value: Any) -> Any:
        if isinstance(value, Ragged):
            return value
        # a list may hold strings or arrays of different lengths: it becomes an array only where one is needed
        values = value if isinstance(value, list) else np.asarray(value)
        if isinstance(values, np.ndarray) and not values.ndim:
            raise BatchError(f"{_name_of(fn)} returned one value for '{name}': one a row or one a token is needed.")
        count, spec = len(values), spec_of(name)
        per_token = spec is not None and spec.kind is Kind.RAGGED
        if count == len(self) and not per_token:
            return values
        tokens = self._response_ids() if "response_ids" in self else None
        if tokens is not None and count == len(tokens.values) and (count != len(self) or self._reads_tokens(fn)):
            return tokens.with_values(np.asarray(values))
        if tokens is not None and per_token and count == len(self):  # one value a row stands for all its tokens
            return tokens.with_values(np.repeat(np.asarray(values), tokens.lengths, axis=0))
        total = "none" if tokens is None else len(tokens.values)
        raise BatchError(
            f"{_name_of(fn)} returned {count} values for '{name}': neither one a row ({len(self)}) nor one a response "
            f"token ({total})."
        )

    def _response_ids(self) -> Ragged:
        return _ragged("response_ids", self._here("response_ids"))

    def _reads_tokens(self, fn: Callable[..., Any]) -> bool:
        """Whether a function sees tokens, and so returns one value a token where that could also be one a row."""
        names = inspect.signature(fn).parameters
        return "row_of_token" in names or any(
            name in self and kind_of(self._columns[name]) is Kind.RAGGED for name in names
        )


def concat(batches: Sequence[Batch]) -> Batch:
    """The rows of all batches, which must have the same columns. Metrics of the same name: the last one's stay."""
    if not batches:
        raise BatchError("concat needs at least one batch.")
    names = [set(batch.names) for batch in batches]
    if any(n != names[0] for n in names):
        odd = sorted(set().union(*names) - names[0].intersection(*names[1:]))
        raise BatchError(f"concat needs the same columns; only some batches have {odd}.")
    columns = concat_rows([batch._columns for batch in batches])
    ids = [batch.ids for batch in batches if batch.ids is not None]
    metrics = {name: value for batch in batches for name, value in batch.metrics.items()}
    return _kind(*batches)._of(columns, read_only(np.concatenate(ids)) if len(ids) == len(batches) else None, metrics)


def _one_a_row(name: str, column: Column) -> Array:
    if isinstance(column, Ragged):
        raise BatchError(f"column '{name}' is ragged; a column with one value a row was asked for.")
    return column


def _ragged(name: str, column: Column) -> Ragged:
    if not isinstance(column, Ragged):
        raise BatchError(f"column '{name}' has one value a row; a ragged column was asked for.")
    return column


def _kind(*batches: Batch) -> type[Batch]:
    """The class of what is made of these: rows of which a part lives with the workers do not live here."""
    return next((type(batch) for batch in batches if type(batch) is not Batch), Batch)


def _positional(fn: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters of a function of columns that stand for columns."""
    others = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return [parameter for parameter in inspect.signature(fn).parameters.values() if parameter.kind not in others]


def _name_of(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__name__", repr(fn))


def _remedy(name: str) -> str:
    return f" {REMEDY[name]}" if name in REMEDY else ""


def _check_lengths(columns: Mapping[str, AnyColumn], ids: Array | None) -> None:
    lengths = {name: len(column) for name, column in columns.items()}
    if ids is not None:
        lengths["row ids"] = len(ids)
    if len(set(lengths.values())) > 1:
        raise BatchError(f"columns of different length: {lengths}.")


def _check_same_rows(left: Batch, right: Batch) -> None:
    if (not left.names and left.ids is None) or (not right.names and right.ids is None):
        return
    if left.ids is None and right.ids is None:
        if len(left) != len(right):
            raise BatchError(f"| needs the same rows: left has {len(left)}, right {len(right)}.")
        return
    if left.ids is None or right.ids is None:
        side = "left" if left.ids is None else "right"
        raise BatchError(
            f"| needs the same rows, but those of the {side} have no ids: make it as Batch(columns, other.ids)."
        )
    if len(left.ids) == len(right.ids) and (left.ids is right.ids or (left.ids == right.ids).all()):
        return
    missing = int((~np.isin(left.ids, right.ids)).sum())
    detail = f"{missing} rows of the left are not in the right" if missing else "the order differs"
    raise BatchError(
        f"| needs the same rows: left has {len(left)}, right {len(right)}; {detail}. Call the worker with the whole "
        "batch, or select the left first (left.kept() or left.pick(...))."
    )
