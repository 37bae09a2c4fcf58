"""How a call's inputs are spread over a group's ranks and the outputs brought together again: HybridFlow's Table 3.

A protocol is a pair of pure functions of the group's layout. Only Batch arguments are split, into parts of consecutive
rows: brought together in the order of the parts they have the original order, whichever rank was done first. Part sizes
differ by at most one row; a part may be empty. A runtime that balances cost hands over `Parts` of its own choice, the
same for all batches with as many rows as the first, and restores the order by the rows' identities.

Source: HybridFlow, arXiv 2409.19256, section 4.1 and Table 3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..batch import Batch, concat
from ..errors import BatchError, ConfigError
from ..layout import Coordinates, ParallelLayout

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of one rank."""


@dataclass(frozen=True)
class Protocol:
    """distribute(layout, args, kwargs) -> one Call a rank; collect(layout, outputs by rank) -> the value of the call.

    A protocol of your own is another pair of functions: `Protocol("MINE", distribute, collect)`.
    parts(layout): into how many parts rows are split, so that a runtime may choose which rows go into each; None: the
    protocol splits no rows. unit: rows with the same value in this column stay in one part.
    """

    name: str
    distribute: Callable[[ParallelLayout, Sequence[Any], Mapping[str, Any]], list[Call]]
    collect: Callable[[ParallelLayout, Sequence[Any]], Any]
    parts: Callable[[ParallelLayout], int] | None = None
    unit: str | None = None


@dataclass(frozen=True)
class Parts:
    """A batch that was cut already, for a protocol that splits it."""

    batches: Sequence[Batch]


# ---- distribute
def broadcast(layout: ParallelLayout, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Call]:
    """Every rank gets the same arguments."""
    return [(tuple(args), dict(kwargs)) for _ in range(layout.size)]


def split_over_dp(layout: ParallelLayout, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Call]:
    """Batches are split over data-parallel coordinates; all ranks of one coordinate get the same rows."""
    part_of_rank = [layout.coordinates(rank).dp for rank in range(layout.size)]
    return _split(part_of_rank, layout.dp, args, kwargs)


def one_argument_a_rank(layout: ParallelLayout, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Call]:
    """Every argument is a sequence with one value a rank. Errors: BatchError for one of another length."""
    for name, value in (*enumerate(args), *kwargs.items()):
        if not isinstance(value, (list, tuple)) or len(value) != layout.size:
            raise BatchError(
                f"ALL_TO_ALL: argument {name!r} should be a list of {layout.size} values, one for each rank."
            )
    return [
        (tuple(value[rank] for value in args), {name: value[rank] for name, value in kwargs.items()})
        for rank in range(layout.size)
    ]


# ---- collect
def of_rank_0(layout: ParallelLayout, outputs: Sequence[Any]) -> Any:
    """The value of rank 0: all ranks ran the same code on the same input."""
    return outputs[0]


def of_each_dp(layout: ParallelLayout, outputs: Sequence[Any]) -> Any:
    """Of the first rank of each data-parallel coordinate: rows one after the other; for other values, rank 0's."""
    return _together([outputs[layout.rank(Coordinates(pp=0, dp=dp, cp=0, tp=0))] for dp in range(layout.dp)])


def of_last_stage(layout: ParallelLayout, outputs: Sequence[Any]) -> Any:
    """As `of_each_dp`, from the last pipeline stage, which alone holds the model's output."""
    last = layout.pp - 1
    return _together([outputs[layout.rank(Coordinates(pp=last, dp=dp, cp=0, tp=0))] for dp in range(layout.dp)])


def of_each_stage(layout: ParallelLayout, outputs: Sequence[Any]) -> list[Any]:
    """Lists of the first rank of each pipeline stage, one after the other."""
    stages = [layout.rank(Coordinates(pp=pp, dp=0, cp=0, tp=0)) for pp in range(layout.pp)]
    return [item for rank in stages for item in outputs[rank]]


def of_all_ranks(layout: ParallelLayout, outputs: Sequence[Any]) -> list[Any]:
    """Every rank's value, by rank."""
    return list(outputs)


# ---- the protocols
ONE_TO_ALL = Protocol("ONE_TO_ALL", broadcast, of_rank_0)
"""The same call on all ranks, such as building a model or a sync. (The paper gathers the ranks' equal values; a caller
needs one, and asks with ALL_TO_ALL for those that differ.)"""

DP = Protocol("DP", split_over_dp, of_each_dp, parts=lambda layout: layout.dp)
"""Rows split over data-parallel ranks. Metrics are of the whole batch on every rank, so rank 0's are taken."""

THREE_D = Protocol("THREE_D", split_over_dp, of_last_stage, parts=lambda layout: layout.dp)
"""Rows split over data-parallel groups of ranks that share a model by tensor, pipeline and context parallelism."""

THREE_D_GROUPS = replace(THREE_D, name="THREE_D_GROUPS", unit="group_id")
"""As THREE_D; rows of one group (group_id) go to one rank, for losses that compare them."""

THREE_D_PP_ONLY = Protocol("THREE_D_PP_ONLY", broadcast, of_each_stage)
"""What differs between pipeline stages alone, such as the names of weights. The method returns a list."""

ALL_TO_ALL = Protocol("ALL_TO_ALL", one_argument_a_rank, of_all_ranks)
"""Each rank's own arguments in, each rank's own value out: for debugging."""


def three_d_all_micro_dp(pp: int, tp: int) -> Protocol:
    """THREE_D_ALL_MICRO_DP for a generation layout of `pp` stages and `tp` shards inside the training layout.

    The p x t ranks of a training replica hold pt / (pp tp) generation replicas, one for each micro-data-parallel
    coordinate. Rows are split over the generation replicas of all training replicas; all ranks of one get the same
    rows, and its first rank gives the result. As in section 5.3, the ranks of a generation replica lie at strides
    p / pp and t / tp, so that each rank's generation shard contains its training shard.
    """

    def distribute(layout: ParallelLayout, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Call]:
        replica_of_rank = _generation_replicas(layout, pp, tp)
        return _split(replica_of_rank, max(replica_of_rank) + 1, args, kwargs)

    def collect(layout: ParallelLayout, outputs: Sequence[Any]) -> Any:
        replica_of_rank = _generation_replicas(layout, pp, tp)
        return _together([outputs[replica_of_rank.index(replica)] for replica in range(max(replica_of_rank) + 1)])

    def parts(layout: ParallelLayout) -> int:
        return max(_generation_replicas(layout, pp, tp)) + 1

    return Protocol("THREE_D_ALL_MICRO_DP", distribute, collect, parts)


# ---- inside
def _generation_replicas(layout: ParallelLayout, pp: int, tp: int) -> list[int]:
    """The number of each rank's generation replica, counted over all training replicas."""
    if layout.pp % pp or layout.tp % tp:
        raise ConfigError(f"generation pp={pp}, tp={tp} does not divide training pp={layout.pp}, tp={layout.tp}.")
    over_pp, over_tp = layout.pp // pp, layout.tp // tp
    places = [layout.coordinates(rank) for rank in range(layout.size)]
    return [(at.dp * over_pp + at.pp % over_pp) * over_tp + at.tp % over_tp for at in places]


def _split(part_of_rank: Sequence[int], parts: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Call]:
    args_in_parts = [_parts(value, parts) for value in args]
    kwargs_in_parts = {name: _parts(value, parts) for name, value in kwargs.items()}
    return [
        (tuple(value[part] for value in args_in_parts), {name: value[part] for name, value in kwargs_in_parts.items()})
        for part in part_of_rank
    ]


def _parts(value: Any, count: int) -> Sequence[Any]:
    if isinstance(value, Parts):
        return value.batches
    return value.split(count) if isinstance(value, Batch) else [value] * count


def _together(parts: Sequence[Any]) -> Any:
    """Batches as one; of other values, which are the same on every rank, the first."""
    batches = [part for part in parts if isinstance(part, Batch)]
    if not batches:
        return parts[0]
    # a part without rows may lack the columns that only a row's values name, such as a reward's components
    return concat([batch for batch in batches if len(batch)] or batches[:1])
