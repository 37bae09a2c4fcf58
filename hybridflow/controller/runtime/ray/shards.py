"""Where batches lie on a Ray cluster: one object in the object store for each rank's call, read whole by mapping it on
the node where it lies, and in part, through the host that made it, from another node."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError

from ....batch import Batch
from ....columns import Array, Column, read_only, take_rows
from ....errors import HybridFlowError
from ...stored import Ints, Shard
from ...trace import nbytes
from .faults import unreadable

READ_S = 600.0
HostKey = tuple[str, int, int]
"""Pool and rank of a host, and the number of its run in the process that drives it."""


@dataclass
class Peer:
    """A host as another process sees it. where: to name it in messages."""

    handle: Any
    node: str
    where: str


@dataclass
class Drive:
    """A run that this process drives. apply: runs a function of a batch on a host. fetched: told columns and bytes of
    each read. read_s: how long one may take."""

    apply: Callable[..., Any]
    fetched: Callable[[Sequence[str], int], None]
    read_s: float = READ_S


class Directory:
    """Hosts that this process knows, and where it runs itself: of a host's own run, or of all runs that it drives."""

    def __init__(self) -> None:
        self.node = ""
        self.peers: dict[HostKey, Peer] = {}
        self.drives: dict[int, Drive] = {}

    def forget(self, run: int) -> None:
        """A run that is over."""
        self.drives.pop(run, None)
        self.peers = {key: peer for key, peer in self.peers.items() if key[2] != run}


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
        peer, drive = DIRECTORY.peers.get(self.host), DIRECTORY.drives.get(self.host[2])
        seconds = READ_S if drive is None else drive.read_s
        if peer is None:
            raise HybridFlowError(f"rows of {self.host[0]} rank {self.host[1]} are gone: its run is over.")
        try:
            if peer.node == DIRECTORY.node:
                found = rows_of(ray.get(self.ref, timeout=seconds), names, rows)
            else:
                found = ray.get(peer.handle.rows.remote([self.ref], list(names), rows), timeout=seconds)
        except RayError as error:
            raise unreadable(error, f"{self.host[0]} rank {self.host[1]} ({peer.where})") from error
        if drive is not None:
            drive.fetched(names, sum(nbytes(column) for column in found.values()))
        return found

    def apply(self, batch: Batch, fn: Callable[..., Any], *args: Any) -> Any:
        drive = DIRECTORY.drives.get(self.host[2])
        return fn(batch, *args) if drive is None else drive.apply(self.host, batch, fn, *args)


class Pickled:
    """Objects in the object store: they become objects where somebody looks at them, not wherever a column beside them
    is read."""

    def __init__(self, column: Array) -> None:
        self.data = np.frombuffer(pickle.dumps(column, protocol=5), np.uint8)

    @property
    def objects(self) -> Array:
        """The column."""
        column: Array = pickle.loads(self.data.data)
        return read_only(column)


def kept(column: Column) -> Column | Pickled:
    """A column as it is put into the object store."""
    return Pickled(column) if isinstance(column, np.ndarray) and column.dtype == object else column


def rows_of(shard: Mapping[str, Column | Pickled], names: Sequence[str], rows: Ints | None) -> dict[str, Column]:
    """These rows of these columns of what `kept` made."""
    chosen: dict[str, Any] = {}
    for name in names:
        column = shard[name]
        chosen[name] = column.objects if isinstance(column, Pickled) else column
    return chosen if rows is None else dict(take_rows(chosen, rows))  # type: ignore[arg-type]
