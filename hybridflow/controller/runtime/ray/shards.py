"""Where batches lie on a Ray cluster: one object in the object store for each rank's call, read whole by mapping it on
the node where it lies, and in part, through the host that made it, from another node."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from ....batch import Batch
from ....columns import Column, take_rows
from ....errors import HybridFlowError
from ...stored import Ints, Shard
from ...trace import nbytes
from .faults import unreadable

READ_S = 600.0
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
