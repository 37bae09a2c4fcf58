"""Columns that stay with the workers that made them. Pure: where a shard lies and how it is read is the runtime's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..columns import Array, Column, Index, Kind, Stored, StoredRows, concat_rows, take_rows

if TYPE_CHECKING:
    from ..batch import Batch

Ints = NDArray[np.int64]


class Shard(ABC):
    """Rows that one rank's call made, kept where it ran. Hashable: equal means the same shard."""

    rows: int

    @abstractmethod
    def read(self, names: Sequence[str], rows: Ints | None) -> dict[str, Column]:
        """These rows (all, if None) of these columns, here."""

    @abstractmethod
    def apply(self, batch: Batch, fn: Callable[..., Any], *args: Any) -> Any:
        """fn(batch, *args) in a process where this shard is; a batch that it returns stays there."""


class Placed(StoredRows):
    """Which row of which shard each row is. shard None: the only one; row None: all its rows, in their order.

    shard, row: the smallest unsigned integers that hold them, [n]. Only shards that a row is in are listed.
    """

    def __init__(self, shards: Sequence[Shard], shard: Array | None = None, row: Array | None = None) -> None:
        self.shards = tuple(shards)
        self.shard, self.row = shard, row

    def __len__(self) -> int:
        return self.shards[0].rows if self.row is None else len(self.row)

    def where(self) -> tuple[Array, Array]:
        """(shard, row) of each row, [n] each."""
        shard = np.zeros(len(self), np.uint8) if self.shard is None else self.shard
        return shard, np.arange(len(self)) if self.row is None else self.row

    def take(self, index: Index) -> Placed:
        shard, row = self.where()
        return _placed(self.shards, shard[index], row[index])

    def joined(self, others: Sequence[StoredRows]) -> Placed:
        every = [self, *(other for other in others if isinstance(other, Placed))]
        number: dict[Shard, int] = {}
        shards, own_rows = [], []
        for rows in every:
            own = np.array([number.setdefault(each, len(number)) for each in rows.shards])
            shard, row = rows.where()
            shards.append(own[shard])
            own_rows.append(row)
        return _placed(list(number), np.concatenate(shards), np.concatenate(own_rows))

    def read(self, names: Sequence[str]) -> dict[str, Column]:
        """These columns of all rows, in their order."""
        if self.row is None or self.shard is None:
            return self.shards[0].read(names, None if self.row is None else self.row.astype(np.int64))
        parts = [shard.read(names, self.row[self.shard == i].astype(np.int64)) for i, shard in enumerate(self.shards)]
        came = np.argsort(self.shard, kind="stable")
        back = np.empty(len(came), np.int64)
        back[came] = np.arange(len(came))
        columns: dict[str, Any] = take_rows(concat_rows(parts), back)
        return columns


class StoredColumn(Stored):
    """Column `name` of the shards that `rows` lie in. bytes_a_row: their mean size."""

    def __init__(self, name: str, kind: Kind, rows: Placed, known: Array | None = None, bytes_a_row: float = 0.0):
        self.name, self.kind, self.rows, self.known, self.bytes_a_row = name, kind, rows, known, bytes_a_row

    rows: Placed

    def at(self, rows: StoredRows, index: Index) -> StoredColumn:
        assert isinstance(rows, Placed)
        known = None if self.known is None else self.known[index]
        return StoredColumn(self.name, self.kind, rows, known, self.bytes_a_row)

    def alike(self, other: Stored) -> bool:
        return (self.name, self.kind) == (other.name, other.kind)

    def joined(self, rows: StoredRows, parts: Sequence[Stored]) -> Stored:
        assert isinstance(rows, Placed)
        known = [part.known for part in parts if part.known is not None]
        together = np.concatenate(known) if len(known) == len(parts) else None
        size = sum(part.nbytes for part in parts) / max(1, len(rows))
        return StoredColumn(self.name, self.kind, rows, together, size)

    @property
    def nbytes(self) -> int:
        return round(self.bytes_a_row * len(self))


def _placed(shards: Sequence[Shard], shard: Array, row: Array) -> Placed:
    """In its smallest form."""
    used = np.flatnonzero(np.bincount(shard)).tolist() or [0]
    kept = [shards[i] for i in used]
    row = row.astype(_smallest(max(each.rows for each in kept)), copy=False)
    if len(kept) > 1:
        number = np.zeros(len(shards), _smallest(len(kept)))
        number[used] = np.arange(len(used))
        return Placed(kept, number[shard], row)
    whole = len(row) == kept[0].rows and bool((row == np.arange(len(row))).all())
    return Placed(kept, None, None if whole else row)


def _smallest(count: int) -> np.dtype[Any]:
    return np.min_scalar_type(max(0, count - 1))
