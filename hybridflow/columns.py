"""The kinds of column a Batch holds, and the one table that says what each column name means."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import BatchError

Array = NDArray[Any]
Index = NDArray[np.int64] | slice


class Kind(Enum):
    """Dense: one value of a fixed shape a row. Ragged: a sequence of its own length. Objects: any Python value."""

    DENSE = "dense"
    RAGGED = "ragged"
    OBJECTS = "objects"


class FinishReason(IntEnum):
    """Why a rollout ended; the values of the column `finish_reason`."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    TOOL_LIMIT = 3
    ERROR = 4


@dataclass(frozen=True, eq=False)
class Ragged:
    """n sequences without padding: row i is `values[offsets[i]:offsets[i + 1]]`.

    values [total, ...]; offsets int64 [n + 1], starting at 0, never falling, ending at total.
    """

    values: Array
    offsets: NDArray[np.int64]

    @staticmethod
    def from_rows(rows: Sequence[Array | Sequence[float]], dtype: Any = None) -> Ragged:
        """Ragged from one array (or list of numbers) per row."""
        arrays = [np.asarray(row, dtype) for row in rows]
        filled = [array for array in arrays if len(array)]  # an empty list has no dtype and no inner shape to say
        flat = np.concatenate(filled) if filled else np.empty(0, dtype or np.int64)
        return Ragged(flat, offsets_of([len(a) for a in arrays]))

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Length of each row, [n]."""
        return np.diff(self.offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> Array:
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        row %= len(self)
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    def __iter__(self) -> Iterator[Array]:
        return (self[i] for i in range(len(self)))

    def take(self, rows: NDArray[np.int64]) -> Ragged:
        """The rows at these numbers, in this order."""
        positions, offsets = _positions(self.offsets, rows)
        return Ragged(self.values[positions], offsets)

    def with_values(self, values: Array) -> Ragged:
        """Other values under the same row lengths."""
        return Ragged(values, self.offsets)


Column = Array | Ragged  # an array of dtype object is an OBJECTS column


class Stored(ABC):
    """A column whose values are kept elsewhere: rows of it are chosen and joined without reading them.

    name: where it is kept. known: what is known of it here: a dense column's values, a ragged one's lengths; None:
    nothing.
    """

    name: str
    kind: Kind
    known: Array | None
    rows: StoredRows

    def __len__(self) -> int:
        return len(self.rows)

    @abstractmethod
    def at(self, rows: StoredRows, index: Index) -> Stored:
        """The column at `rows`, which are this column's rows taken by `index`."""

    def read(self) -> Column:
        """The values, here."""
        return self.rows.read([self.name])[self.name]

    @abstractmethod
    def alike(self, other: Stored) -> bool:
        """Whether `other` is the same column of other rows, so that the two can be joined unread."""

    @abstractmethod
    def joined(self, rows: StoredRows, parts: Sequence[Stored]) -> Stored:
        """The column at `rows`, which are those of `parts`, this one first, one after the other."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of its values."""


class StoredRows(ABC):
    """Which rows, and where they are kept; columns that were made together share it."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def take(self, index: Index) -> StoredRows:
        """The rows at these numbers."""

    @abstractmethod
    def joined(self, others: Sequence[StoredRows]) -> StoredRows:
        """These rows, then those of the others."""

    @abstractmethod
    def read(self, names: Sequence[str]) -> dict[str, Column]:
        """These columns of all rows, in their order, here."""


AnyColumn = Column | Stored


@dataclass(frozen=True)
class ColumnSpec:
    """What a column name means: its kind, its dtype (None: any), and the column whose row lengths it must share."""

    kind: Kind
    dtype: Any = None
    aligned: str | None = None


def _per_token(dtype: Any) -> ColumnSpec:
    return ColumnSpec(Kind.RAGGED, dtype, aligned="response_ids")


_DENSE_I64, _DENSE_F32 = ColumnSpec(Kind.DENSE, np.int64), ColumnSpec(Kind.DENSE, np.float32)
_FLAG, _OBJECTS = ColumnSpec(Kind.DENSE, np.bool_), ColumnSpec(Kind.OBJECTS)

TABLE: dict[str, ColumnSpec] = {
    "prompt_ids": ColumnSpec(Kind.RAGGED, np.int64),
    "response_ids": ColumnSpec(Kind.RAGGED, np.int64),
    "response_mask": _per_token(np.bool_),
    "rollout_logprobs": _per_token(np.float32),
    "policy_version": _per_token(np.int32),
    "token_rewards": _per_token(np.float32),
    "old_logprobs": _per_token(np.float32),
    "ref_logprobs": _per_token(np.float32),
    "values": _per_token(np.float32),
    "advantages": _per_token(np.float32),
    "returns": _per_token(np.float32),
    "group_id": _DENSE_I64,
    "sample": _DENSE_I64,
    "rollout_id": _DENSE_I64,
    "keep": _FLAG,
    "chosen": _FLAG,
    "reward": _DENSE_F32,
    "baseline": _DENSE_F32,
    "loss": _DENSE_F32,
    "finish_reason": ColumnSpec(Kind.DENSE, np.int8),
    "prompt": _OBJECTS,
    "response": _OBJECTS,
    "source": _OBJECTS,
    "drop_reason": _OBJECTS,
}


DERIVED = ("lengths", "row_of_token", "rewards")  # what a function of columns may ask for beside columns


def spec_of(name: str) -> ColumnSpec | None:
    """The table's entry for `name`; None for a user's own column."""
    return _DENSE_F32 if name.startswith("reward/") else TABLE.get(name)


def kind_of(column: AnyColumn) -> Kind:
    """The kind a column's value has."""
    if isinstance(column, Stored):
        return column.kind
    if isinstance(column, Ragged):
        return Kind.RAGGED
    return Kind.OBJECTS if column.dtype == object else Kind.DENSE


def offsets_of(lengths: Iterable[int] | Array) -> NDArray[np.int64]:
    """Row lengths [n] -> offsets [n + 1]."""
    return np.concatenate([[0], np.cumsum(np.asarray(lengths, np.int64))]).astype(np.int64)


def objects(values: Iterable[Any]) -> Array:
    """A one-dimensional object array, one value a row, whatever the values are."""
    if isinstance(values, np.ndarray) and values.dtype == object and values.ndim == 1:
        return values
    values = values.tolist() if isinstance(values, np.ndarray) else list(values)
    out = np.empty(len(values), dtype=object)
    for i, value in enumerate(values):
        out[i] = value
    return out


def as_column(name: str, value: Any) -> Column:
    """`value` as the column `name`: what the table says, or for a user's own name the kind the values suggest.

    Errors: BatchError if the values are not of the kind or dtype that the table gives the name.
    """
    spec = spec_of(name)
    column = _infer(value) if spec is None else _coerce(name, value, spec)
    if isinstance(column, Ragged):
        _check_offsets(name, column)
        return Ragged(read_only(column.values), read_only(column.offsets))
    return read_only(column)


def take_rows(columns: Mapping[str, AnyColumn], rows: Index) -> dict[str, AnyColumn]:
    """These rows of every column; a slice has no step. Consecutive rows are views; ragged columns of the same offsets
    share the work, and so do stored columns of the same rows."""
    at = rows if isinstance(rows, slice) else as_slice(rows)
    positions: dict[int, tuple[Array | slice, NDArray[np.int64]]] = {}
    stored: dict[int, StoredRows] = {}
    taken: dict[str, AnyColumn] = {}
    for name, column in columns.items():
        if isinstance(column, Stored):
            key = id(column.rows)
            if key not in stored:
                stored[key] = column.rows.take(at)
            taken[name] = column.at(stored[key], at)
            continue
        if not isinstance(column, Ragged):
            taken[name] = read_only(column[at])
            continue
        key = id(column.offsets)
        if key not in positions:
            positions[key] = _positions(column.offsets, at)
        where, offsets = positions[key]
        taken[name] = Ragged(read_only(column.values[where]), offsets)
    return taken


def concat_rows(parts: Sequence[Mapping[str, AnyColumn]]) -> dict[str, AnyColumn]:
    """The rows of all parts, which have the same column names. Ragged columns that shared offsets still do.

    A column that is stored in some parts only, or as different ones, is read. Errors: BatchError for one that is ragged
    in one part only.
    """
    offsets: dict[tuple[int, ...], NDArray[np.int64]] = {}
    stored: dict[tuple[int, ...], StoredRows] = {}
    joined: dict[str, AnyColumn] = {}
    for name in parts[0]:
        everywhere = [part[name] for part in parts]
        kept = [column for column in everywhere if isinstance(column, Stored)]
        if len(kept) == len(everywhere) and all(kept[0].alike(column) for column in kept):
            rows = tuple(id(column.rows) for column in kept)
            if rows not in stored:
                stored[rows] = kept[0].rows.joined([column.rows for column in kept[1:]])
            joined[name] = kept[0].joined(stored[rows], kept)
            continue
        columns = [column.read() if isinstance(column, Stored) else column for column in everywhere]
        ragged = [column for column in columns if isinstance(column, Ragged)]
        if not ragged:
            joined[name] = read_only(np.concatenate([column for column in columns if not isinstance(column, Ragged)]))
            continue
        if len(ragged) != len(columns):
            raise BatchError(f"concat: column '{name}' is ragged in one batch and dense in another.")
        key = tuple(id(column.offsets) for column in ragged)
        if key not in offsets:
            offsets[key] = read_only(offsets_of(np.concatenate([column.lengths for column in ragged])))
        joined[name] = Ragged(read_only(np.concatenate([column.values for column in ragged])), offsets[key])
    return joined


def aligned(columns: Mapping[str, AnyColumn]) -> dict[str, AnyColumn]:
    """The columns, each per-token one with the very offsets of response_ids: selecting rows does its work once.

    Errors: BatchError for a per-token column whose row lengths are others.
    """
    together = dict(columns)
    for name, column in columns.items():
        spec = spec_of(name)
        if spec is None or spec.aligned is None:
            continue
        owner = columns.get(spec.aligned)
        if not isinstance(column, Ragged) or not isinstance(owner, Ragged) or column.offsets is owner.offsets:
            continue
        wrong = np.flatnonzero(column.lengths != owner.lengths)
        if len(wrong):
            row = int(wrong[0])
            raise BatchError(
                f"column '{name}' has {column.lengths[row]} values in row {row}, where {spec.aligned} has "
                f"{owner.lengths[row]} tokens: one value a token is needed."
            )
        together[name] = Ragged(column.values, owner.offsets)
    return together


def read_only(array: Array) -> Array:
    """The array, or a view of it, that cannot be written through."""
    if array.flags.writeable:
        array = array.view()
        array.flags.writeable = False
    return array


def as_slice(rows: NDArray[np.int64]) -> Index:
    """Row numbers as a slice, if they are consecutive."""
    count = len(rows)
    if not count or rows[-1] - rows[0] != count - 1 or (rows[1:] - rows[:-1] != 1).any():
        return rows
    return slice(int(rows[0]), int(rows[0]) + count)


def _positions(offsets: NDArray[np.int64], rows: Array | slice) -> tuple[Array | slice, NDArray[np.int64]]:
    """Where the values of these rows lie, and the offsets they then have."""
    if isinstance(rows, slice):
        part = offsets[rows.start : rows.stop + 1]
        return slice(int(part[0]), int(part[-1])), read_only(part - part[0])
    starts = offsets[:-1][rows]
    lengths = offsets[1:][rows] - starts
    taken = offsets_of(lengths)
    # position inside the source = start of the row + distance from the start of the target row
    positions = np.repeat(starts - taken[:-1], lengths)
    positions += np.arange(taken[-1])
    return positions, read_only(taken)


def _infer(value: Any) -> Column:
    if isinstance(value, Ragged):
        return value
    if isinstance(value, np.ndarray) and value.ndim:
        return value if value.dtype != object and value.dtype.kind != "U" else objects(value)
    values = list(value)
    if values and all(isinstance(v, np.ndarray) and v.ndim for v in values):
        return Ragged.from_rows(values)
    if values and all(isinstance(v, (bool, int, float, np.number, np.bool_)) for v in values):
        return np.asarray(values)
    return objects(values)


def _coerce(name: str, value: Any, spec: ColumnSpec) -> Column:
    if spec.kind is Kind.OBJECTS:
        return objects(value)
    try:
        if spec.kind is Kind.RAGGED:
            ragged = value if isinstance(value, Ragged) else Ragged.from_rows(value)
            return ragged.with_values(_cast(name, ragged.values, spec))
        if isinstance(value, Ragged):
            raise BatchError(f"column '{name}' holds one value a row, but a ragged column was given.")
        return _cast(name, np.asarray(value), spec)
    except (TypeError, ValueError) as error:
        raise BatchError(f"column '{name}' should be {spec.kind.value} {np.dtype(spec.dtype)}: {error}.") from error


def _cast(name: str, array: Array, spec: ColumnSpec) -> Array:
    if array.dtype == spec.dtype or not len(array):
        return array.astype(spec.dtype, copy=False)
    integers = array.dtype.kind in "biu"
    flags = spec.dtype == np.bool_ and integers and bool(np.isin(array, (0, 1)).all())
    numbers = spec.dtype == np.float32 and integers
    if not (flags or numbers or np.can_cast(array.dtype, spec.dtype, "same_kind")):
        raise BatchError(f"column '{name}' should be {spec.kind.value} {np.dtype(spec.dtype)}, not {array.dtype}.")
    return array.astype(spec.dtype)


def _check_offsets(name: str, column: Ragged) -> None:
    offsets = column.offsets
    if len(offsets) < 1 or offsets[0] != 0 or offsets[-1] != len(column.values) or (np.diff(offsets) < 0).any():
        raise BatchError(f"column '{name}': offsets must rise from 0 to {len(column.values)}, the number of values.")
