"""ParallelLayout: how the ranks of a worker group are arranged, and the map between a rank and its coordinates."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

from .errors import ConfigError


class Coordinates(NamedTuple):
    """Where one rank stands in a layout; each value counts from 0."""

    pp: int
    dp: int
    cp: int
    tp: int


@dataclass(frozen=True)
class ParallelLayout:
    """Sizes of the parallel dimensions. Ranks are numbered with tp fastest, then cp, dp, pp, as Megatron-LM does.

    `ep` regroups ranks of dp x cp for expert parameters and does not multiply the number of ranks.
    """

    pp: int = 1
    tp: int = 1
    dp: int = 1
    ep: int = 1
    cp: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 1:
                raise ConfigError(f"layout: {field.name}={getattr(self, field.name)}; every dimension is at least 1.")
        if (self.dp * self.cp) % self.ep:
            raise ConfigError(f"layout: ep={self.ep} does not divide dp x cp = {self.dp * self.cp}.")

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.pp * self.tp * self.dp * self.cp

    def coordinates(self, rank: int) -> Coordinates:
        """The coordinates of `rank`."""
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} is outside a layout of {self.size} ranks")
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        return Coordinates(pp=pp, dp=dp, cp=cp, tp=tp)

    def rank(self, at: Coordinates) -> int:
        """The rank that stands at `at`; inverse of `coordinates`."""
        return ((at.pp * self.dp + at.dp) * self.cp + at.cp) * self.tp + at.tp
