"""Where batches lie on a Ray cluster: one object in the object store for each rank's call, read whole by mapping it on
the node where it lies, and in part, through the host that made it, from another node."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError

from ....batch import Batch
from ....columns import Array, Column, Kind, take_rows
from ....errors import HybridFlowError
from ...stored import Ints, Placed, Shard, StoredColumn
from ...trace import nbytes
from ...wire import packed, unpacked
from .faults import unreadable
from .message import Folded

READ_S = 600.0
SEVERAL = 3  # references, which have much in common
HostKey = tuple[str, int]
"""Pool and rank of a host."""


@dataclass
class Peer:
    """A host as another process sees it. where: to name it in messages."""

    handle: Any
    node: str
    where: str


class Directory:
    """The hosts of the run, in this process; `node`: where this process runs. `fetched`: told columns and bytes of each
    read. `read_s`: how long one may take.

    apply: in a driver, runs a function of a batch on a host.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget a run that is over."""
        self.node, self.read_s = "", READ_S
        self.peers: dict[HostKey, Peer] = {}
        self.fetched: Callable[[Sequence[str], int], None] = lambda names, nbytes: None
        self.apply: Callable[..., Any] | None = None


DIRECTORY = Directory()


class RayShard(Shard):
    """What call number `call` made on a host."""

    def __init__(self, ref: Any, host: HostKey, call: int, rows: int) -> None:
        self.ref, self.host, self.call, self.rows = ref, host, call, rows

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RayShard) and (self.host, self.call) == (other.host, other.call)

    def __hash__(self) -> int:
        return hash((self.host, self.call))

    def read(self, names: Sequence[str], rows: Ints | None) -> dict[str, Column]:
        peer = DIRECTORY.peers.get(self.host)
        if peer is None:
            raise HybridFlowError(f"rows of {self.host[0]} rank {self.host[1]} are gone: its run is over.")
        try:
            if peer.node == DIRECTORY.node:
                found = rows_of(ray.get(self.ref, timeout=DIRECTORY.read_s), names, rows)
            else:
                found = ray.get(peer.handle.rows.remote([self.ref], list(names), rows), timeout=DIRECTORY.read_s)
        except RayError as error:
            raise unreadable(error, f"{self.host[0]} rank {self.host[1]} ({peer.where})") from error
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

    def __init__(self, wire: tuple[Any, ...]) -> None:
        self.rows: int
        self.rows, self.number, self._local, self._stored = wire

    @property
    def ids(self) -> Array:
        """The rows' identities on the rank, [rows]."""
        return np.arange(self.number << 40, (self.number << 40) + self.rows)

    def made_of(self, ids: Array) -> bool:
        """Whether rows of these identities are among those sent."""
        return bool(np.isin(ids, self.ids).any()) or (not len(ids) and not self.rows)

    def received(self) -> Batch:
        """The batch, on the rank; stored columns are read when looked at."""
        columns = {name: unpacked(column) for name, column in self._local.items()}
        for shards, shard, row, names in self._stored:
            placed = Placed([RayShard(*each) for each in shards], unpacked(shard), unpacked(row))
            columns |= {name: StoredColumn(own, Kind(kind), placed) for name, own, kind in names}
        return Batch(columns, self.ids)


class Inputs:
    """Arguments of a call on their way to a rank. Its wire form is plain tuples: few bytes, and quickly made."""

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> None:
        self._values: dict[int | str, Any] = dict(enumerate(args))
        self._values.update(kwargs or {})
        batches = [key for key, value in self._values.items() if isinstance(value, Batch)]
        self._wires = {key: _wire(self._values.pop(key), number) for number, key in enumerate(batches, 1)}

    def __reduce__(self) -> tuple[Any, ...]:
        several = sum(len(shards) for _, _, _, stored in self._wires.values() for shards, *_ in stored) >= SEVERAL
        return _inputs, (self._values, Folded(self._wires) if several else self._wires)

    @property
    def batches(self) -> list[Sent]:
        """The batches among them."""
        return [Sent(wire) for wire in self._wires.values()]

    def received(self) -> tuple[list[Any], dict[str, Any]]:
        """Positional and keyword arguments, on the rank."""
        values = {**self._values, **{key: Sent(wire).received() for key, wire in self._wires.items()}}
        named = {key: value for key, value in values.items() if isinstance(key, str)}
        return [values[position] for position in range(len(values) - len(named))], named


def _inputs(values: dict[int | str, Any], wires: dict[int | str, tuple[Any, ...]]) -> Inputs:
    inputs = Inputs(())
    inputs._values, inputs._wires = values, wires
    return inputs


def _wire(batch: Batch, number: int) -> tuple[Any, ...]:
    """What a `Sent` is made of."""
    local: dict[str, Any] = {}
    stored: dict[int, tuple[Any, ...]] = {}
    for name in batch.names:
        column = batch._column(name)
        if not isinstance(column, StoredColumn):
            local[name] = packed(column)
            continue
        rows = column.rows
        if id(rows) not in stored:
            shards = [(s.ref, s.host, s.call, s.rows) for s in rows.shards if isinstance(s, RayShard)]
            stored[id(rows)] = shards, packed(rows.shard), packed(rows.row), []
        stored[id(rows)][-1].append((name, column.name, column.kind.value))
    return len(batch), number, local, list(stored.values())
