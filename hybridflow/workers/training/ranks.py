"""How an engine's ranks share the work, and what they must agree on. One rank is a group of one: the same code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh

from ...batch import Batch, concat
from ...device import device_type, init_process_group_once
from ...errors import HybridFlowError
from .config import FSDPConfig, check_ranks

T = TypeVar("T")


class Ranks:
    """All ranks of the default process group, as data-parallel x sequence-parallel: neighbours share their rows.

    parameters: the mesh that shards every parameter, under a first dimension of replicas where there are several.
    sequence: the ranks with this one's rows; None if it has them alone. frozen: what does not fit gives way. Errors:
    ConfigError as `check_ranks`.
    """

    def __init__(self, config: FSDPConfig, frozen: bool = False) -> None:
        init_process_group_once()
        ranks, kind = dist.get_world_size(), device_type()
        config = config.fitted(ranks) if frozen else config
        check_ranks(config, ranks)
        shards, sharing = config.shard_size or ranks, config.sequence_parallel
        self.replicas = ranks // shards
        self.parameters = init_device_mesh(kind, (ranks,))
        self._all = self.parameters.get_group()
        self._rows: ProcessGroup = self._all
        self.sequence: ProcessGroup | None = None
        if self.replicas > 1:
            self.parameters = init_device_mesh(kind, (self.replicas, shards), mesh_dim_names=("replicas", "shards"))
        if sharing > 1:
            rows = init_device_mesh(kind, (ranks // sharing, sharing), mesh_dim_names=("rows", "sequence"))
            self._rows, self.sequence = rows.get_group("rows"), rows.get_group("sequence")

    @property
    def first(self) -> bool:
        """Whether this is rank 0."""
        return self._all.rank() == 0

    def gather(self, value: T) -> list[T]:
        """The value of every data-parallel rank; of those that share rows, which have the same, one."""
        return _gather(value, self._rows)

    def whole_batch(self, batch: Batch, *columns: str) -> tuple[Batch, slice]:
        """These columns of the rows of all ranks, in rank order, and where this rank's rows are among them."""
        parts = self.gather(batch.select(*(name for name in columns if name in batch)))
        start = sum(len(part) for part in parts[: self._rows.rank()])
        return concat(parts), slice(start, start + len(batch))

    def most(self, count: int) -> int:
        """The largest of the ranks' counts."""
        return max(self.gather(count))

    def totals(self, sums: Mapping[str, float], maxima: Mapping[str, float]) -> dict[str, float]:
        """Sums and maxima by name over data-parallel ranks; a name that a rank lacks takes no part there."""
        totals: dict[str, float] = {}
        for own_sums, own_maxima in self.gather((dict(sums), dict(maxima))):
            totals.update({name: totals.get(name, 0.0) + value for name, value in own_sums.items()})
            totals.update({name: max(totals.get(name, value), value) for name, value in own_maxima.items()})
        return totals

    @contextmanager
    def together(self) -> Iterator[None]:
        """An error that one rank raises in this block is raised by all at its end: none goes on to wait for another
        that gave up."""
        error: HybridFlowError | None = None
        try:
            yield
        except HybridFlowError as raised:
            error = raised
        errors = [found for found in _gather(error, self._all) if found is not None]
        if errors:
            raise error or errors[0]


def _gather(value: T, group: ProcessGroup) -> list[T]:
    """The value of every rank of `group`."""
    values = [value] * group.size()
    if len(values) > 1:
        dist.all_gather_object(values, value, group)
    return values
