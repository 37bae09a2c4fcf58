"""Where batches lie on a Ray cluster: one object in the object store for each rank's call, read whole by mapping it on
the node where it lies, and in part, through the host that made it, from another node."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray

from ....batch import Batch
from ....columns import AnyColumn, Array, Column, Kind, take_rows
from ....errors import HybridFlowError
from ...stored import Ints, Placed, Shard, StoredColumn
from ...trace import nbytes
from ...wire import packed, unpacked

READ_S = 600.0
HostKey = tuple[str, int]
"""Pool and rank of a host."""


@dataclass
class Peer:
    """A host as another process sees it."""

    handle: Any
    node: str


class Directory:
    """The hosts of the run, in this process; `node`: where this process runs. `fetched`: told columns and bytes of each
    read.

    apply: in a driver, runs a function of a batch on a host.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget a run that is over."""
        self.node = ""
        self.peers: dict[HostKey, Peer] = {}
        self.fetched: Callable[[Sequence[str], int], None] = lambda names, nbytes: None
        self.apply: Callable[..., Any] | None = None


DIRECTORY = Directory()


class RayShard(Shard):
    """What call number `call` made on a host."""

    def __init__(self, ref: Any, host: HostKey, call: int, rows: int) -> None:
        self.ref, self.host, self.call, self.rows = ref, host, call, rows

    def __reduce__(self) -> tuple[Any, ...]:  # for Ray's own messages alone: elsewhere nothing would keep the object
        return RayShard, (self.ref, self.host, self.call, self.rows)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RayShard) and (self.host, self.call) == (other.host, other.call)

    def __hash__(self) -> int:
        return hash((self.host, self.call))

    def read(self, names: Sequence[str], rows: Ints | None) -> dict[str, Column]:
        peer = DIRECTORY.peers.get(self.host)
        if peer is None:
            raise HybridFlowError(f"rows of {self.host[0]} rank {self.host[1]} are gone: its run is over.")
        if peer.node == DIRECTORY.node:
            found = rows_of(ray.get(self.ref, timeout=READ_S), names, rows)
        else:
            found = ray.get(peer.handle.rows.remote([self.ref], list(names), rows), timeout=READ_S)
        DIRECTORY.fetched(names, sum(nbytes(column) for column in found.values()))
        return found

    def apply(self, batch: Batch, fn: Callable[..., Any], *args: Any) -> Any:
        if DIRECTORY.apply is None:
            return fn(batch, *args)
        return DIRECTORY.apply(self.host, batch, fn, *args)


def rows_of(columns: Mapping[str, Column], names: Sequence[str], rows: Ints | None) -> dict[str, Column]:
    """These rows of these columns."""
    chosen: dict[str, Any] = {name: columns[name] for name in names}
    return chosen if rows is None else dict(take_rows(chosen, rows))  # type: ignore[arg-type]


class Sent:
    """A batch on its way to a rank: stored columns as where they lie, the others as they are.

    On the rank a row's identity is its position in what was sent (`number`: which batch of the call this is), so that
    it can be told whether the call kept the rows as they came.
    """

    def __init__(self, batch: Batch, number: int) -> None:
        self.rows, self.number = len(batch), number
        self.local: dict[str, AnyColumn] = {}
        stored: dict[int, tuple[Placed, list[tuple[str, ...]]]] = {}
        for name in batch.names:
            column = batch._column(name)
            if isinstance(column, StoredColumn):
                own = () if name == column.name else (column.name,)
                stored.setdefault(id(column.rows), (column.rows, []))[1].append((column.kind.value, name, *own))
            else:
                self.local[name] = column
        self.stored = tuple(stored.values())

    def __reduce__(self) -> tuple[Any, ...]:
        local = {name: packed(column) for name, column in self.local.items()}
        return _sent, (self.rows, self.number, local, self.stored)

    @property
    def ids(self) -> Array:
        """The rows' identities on the rank, [rows]."""
        return np.arange(self.rows) + (self.number << 40)

    def made_of(self, ids: Array) -> bool:
        """Whether rows of these identities are among those sent."""
        return bool(np.isin(ids, self.ids).any()) or (not len(ids) and not self.rows)

    def received(self) -> Batch:
        """The batch, on the rank; stored columns are read when looked at."""
        columns = dict(self.local)
        for rows, names in self.stored:
            for kind, name, *own in names:
                columns[name] = StoredColumn(own[0] if own else name, Kind(kind), rows)
        return Batch(columns, self.ids)


class Inputs:
    """Arguments of a call on their way to a rank."""

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> None:
        count = itertools.count(1)
        self._args = [_outgoing(value, count) for value in args]
        self._kwargs = {name: _outgoing(value, count) for name, value in (kwargs or {}).items()}

    def __reduce__(self) -> tuple[Any, ...]:
        return Inputs, (self._args, self._kwargs)

    @property
    def batches(self) -> list[Sent]:
        """The batches among them."""
        return [value for value in (*self._args, *self._kwargs.values()) if isinstance(value, Sent)]

    def received(self) -> tuple[list[Any], dict[str, Any]]:
        """Positional and keyword arguments, on the rank."""
        return [_incoming(value) for value in self._args], {n: _incoming(v) for n, v in self._kwargs.items()}


def _outgoing(value: Any, count: Iterator[int]) -> Any:
    return Sent(value, next(count)) if isinstance(value, Batch) else value


def _incoming(value: Any) -> Any:
    return value.received() if isinstance(value, Sent) else value


def _sent(rows: int, number: int, local: dict[str, Any], stored: Any) -> Sent:
    sent = object.__new__(Sent)
    sent.rows, sent.number, sent.stored = rows, number, stored
    sent.local = {name: unpacked(column) for name, column in local.items()}
    return sent
