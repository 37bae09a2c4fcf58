"""Which ranks generate together, given how they train, and what going from one to the other costs.

Source: HybridFlow (arXiv 2409.19256), section 5.3, figure 8 and table 2. A training replica of p x t ranks becomes
d_g = p t / (p_g t_g) generation replicas, which hold the same weights and are told apart by the micro-DP coordinate.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from typing import NamedTuple

from ..errors import ConfigError
from ..layout import ParallelLayout
from .region import Region


class Grouping(Enum):
    """How the ranks of a training replica are dealt to generation groups."""

    STRIDED = "strided"
    """Generation TP and PP groups at strides t/t_g and p/p_g, micro-DP groups consecutive: each rank's generation shard
    contains its training shard."""
    VANILLA = "vanilla"
    """Generation replicas of consecutive ranks, as in training: on some ranks the two shards have nothing in common."""


class GenerationCoordinates(NamedTuple):
    """Where one rank stands in the generation layout of its training replica; each value counts from 0."""

    pp: int
    tp: int
    micro_dp: int


@dataclass(frozen=True)
class GenerationLayout:
    """`pp` stages x `tp` shards that generate inside each replica of the training layout.

    Ranks of different dp and cp are never in one group. Errors: ConfigError if pp or tp does not divide the training
    layout's; it names the values that do.
    """

    training: ParallelLayout
    pp: int = 1
    tp: int = 1
    grouping: Grouping = Grouping.STRIDED

    def __post_init__(self) -> None:
        for key, value, whole in (("pp", self.pp, self.training.pp), ("tp", self.tp, self.training.tp)):
            legal = [size for size in range(1, whole + 1) if whole % size == 0]
            if value not in legal:
                raise ConfigError(
                    f"generation layout: {key}={value} does not divide the training layout's {key}={whole}; "
                    f"it is one of {', '.join(map(str, legal))}."
                )

    @property
    def micro_dp(self) -> int:
        """d_g: generation replicas per training replica."""
        return self.training.pp * self.training.tp // (self.pp * self.tp)

    def coordinates(self, rank: int) -> GenerationCoordinates:
        """The generation coordinates of `rank`."""
        at = self.training.coordinates(rank)
        if self.grouping is Grouping.VANILLA:
            rest, tp = divmod(at.pp * self.training.tp + at.tp, self.tp)
            micro_dp, pp = divmod(rest, self.pp)
            return GenerationCoordinates(pp, tp, micro_dp)
        stages, shards = self.training.pp // self.pp, self.training.tp // self.tp
        return GenerationCoordinates(
            pp=at.pp // stages, tp=at.tp // shards, micro_dp=at.pp % stages * shards + at.tp % shards
        )

    def tp_group(self, rank: int) -> tuple[int, ...]:
        """The ranks that hold the tensor shards of this rank's generation stage, itself included."""
        return self._peers(rank, lambda at: (at.pp, at.micro_dp))

    def pp_group(self, rank: int) -> tuple[int, ...]:
        """The ranks that hold the other stages of this rank's tensor shard, itself included."""
        return self._peers(rank, lambda at: (at.tp, at.micro_dp))

    def micro_dp_group(self, rank: int) -> tuple[int, ...]:
        """The ranks that generate with the same weights as this one; with `STRIDED` they train all parts of them."""
        return self._peers(rank, lambda at: (at.pp, at.tp))

    def training_replica(self, rank: int) -> tuple[int, ...]:
        """The p x t ranks that train the same copy of the model, by rank."""
        return self._peers(rank, lambda at: ())

    def training_region(self, rank: int, name: str, shape: tuple[int, int], tp_shards: int | None = None) -> Region:
        """What `rank` trains of an ideal model [layers, width]: PP cuts the layers, TP the width.

        tp_shards: parts that TP can cut the width into, beyond which they are replicated; None = any number.
        """
        at, sizes = self.training.coordinates(rank), self.training
        return _cell(name, shape, (at.pp, sizes.pp), (at.tp, sizes.tp), tp_shards)

    def generation_region(self, rank: int, name: str, shape: tuple[int, int], tp_shards: int | None = None) -> Region:
        """What `rank` generates with; as `training_region`."""
        at = self.coordinates(rank)
        return _cell(name, shape, (at.pp, self.pp), (at.tp, self.tp), tp_shards)

    def _peers(self, rank: int, alike: Callable[[GenerationCoordinates], Hashable]) -> tuple[int, ...]:
        """Ranks of the same training replica whose generation coordinates are alike."""
        at, key = self.training.coordinates(rank), alike(self.coordinates(rank))
        replica = (at._replace(pp=pp, tp=tp) for pp in range(self.training.pp) for tp in range(self.training.tp))
        return tuple(peer for peer in map(self.training.rank, replica) if alike(self.coordinates(peer)) == key)


@dataclass(frozen=True)
class Overhead:
    """What a rank pays to go from training to generation, in units of the model's size M (table 2).

    communication: received. peak_memory: the most generation weights held at a time. redundancy: training weights held
    beside the generation weights, on the ranks that have to.
    """

    communication: Fraction
    peak_memory: Fraction
    redundancy: Fraction


def deepspeed_chat_overhead(layout: GenerationLayout) -> Overhead:
    """Each rank trains one of N = p t d equal parts and gathers the whole model from all ranks."""
    part = Fraction(1, layout.training.size)
    return Overhead(communication=1 - part, peak_memory=Fraction(1), redundancy=part)


def vanilla_overhead(layout: GenerationLayout) -> Overhead:
    """HybridFlow-V: the vanilla grouping; each rank gathers the whole model from its training replica."""
    part = Fraction(1, layout.training.pp * layout.training.tp)
    return Overhead(communication=1 - part, peak_memory=Fraction(1), redundancy=part)


def hybridflow_overhead(layout: GenerationLayout, tp_shards: int | None = None) -> Overhead:
    """The strided grouping; each rank gathers its generation shard from its micro-DP group.

    tp_shards: parts that TP can cut the parameters into, beyond which they are replicated: the number of KV heads, 1
    for norms. None is the table's case, parameters that TP always cuts. M is the size of the parameters in question.
    """
    train = Fraction(1, layout.training.pp * _parts(layout.training.tp, tp_shards))
    generation = Fraction(1, layout.pp * _parts(layout.tp, tp_shards))
    return Overhead(communication=generation - train, peak_memory=generation, redundancy=Fraction(0))


def _parts(tp: int, tp_shards: int | None) -> int:
    return tp if tp_shards is None else min(tp, tp_shards)


def _cell(name: str, shape: tuple[int, int], pp: tuple[int, int], tp: tuple[int, int], tp_shards: int | None) -> Region:
    """pp, tp: (coordinate, size)."""
    layers, width = shape
    parts = _parts(tp[1], tp_shards)
    return Region(name, (_share(layers, *pp), _share(width, tp[0] * parts // tp[1], parts)))


def _share(extent: int, index: int, parts: int) -> tuple[int, int]:
    return extent * index // parts, extent * (index + 1) // parts
