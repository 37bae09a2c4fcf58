"""ReshardPlan: which rank sends which regions to whom, so that each rank receives exactly what it lacks.

It is made for any pair of layouts, given as the regions that each rank holds and wants, and is a pure function of them:
ranks that agree on these agree on the plan, which `ReshardPlan.digest` shows.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from ..errors import ConfigError, EngineError
from .region import Bounds, Grid, Region, cut

RegionsOfRank = Sequence[Collection[Region]]
"""Item r: regions of rank r, in any order; they may overlap, be empty or stick out of the parameter."""


@dataclass(frozen=True)
class Parameter:
    """A parameter to move. shape: of the whole. itemsize: bytes of an element. aliases: other names of the same
    weights, under which regions may be held or wanted (tied embeddings)."""

    name: str
    shape: tuple[int, ...]
    itemsize: int
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class Bucket:
    """One message: the elements of `regions`, one region after the other, each in C order. nbytes: of all of them."""

    source: int
    target: int
    regions: tuple[Region, ...]
    nbytes: int


@dataclass(frozen=True)
class ReshardPlan:
    """Brings every wanted element to each rank that lacks it, once.

    parameters: by name. held, wanted: of each rank, in order. copies: regions a rank takes from its own memory.
    steps: buckets that travel at the same time, by (source, target). Steps follow the order of the parameters, and in
    one of them a rank sends and receives at most bucket_bytes together. Regions of buckets and copies bear the
    parameter's own name, never an alias, and lie wholly inside or wholly outside of each held and wanted region.
    """

    parameters: tuple[Parameter, ...]
    held: tuple[tuple[Region, ...], ...]
    wanted: tuple[tuple[Region, ...], ...]
    copies: tuple[tuple[Region, ...], ...]
    steps: tuple[tuple[Bucket, ...], ...]

    @property
    def buckets(self) -> Iterator[Bucket]:
        """Those of all steps."""
        return (bucket for step in self.steps for bucket in step)

    @cached_property
    def received(self) -> tuple[int, ...]:
        """Bytes each rank receives from others."""
        return _sums(len(self.held), ((bucket.target, bucket.nbytes) for bucket in self.buckets))

    @cached_property
    def sent(self) -> tuple[int, ...]:
        """Bytes each rank sends to others."""
        return _sums(len(self.held), ((bucket.source, bucket.nbytes) for bucket in self.buckets))

    @cached_property
    def digest(self) -> str:
        """sha256 (hex) of parameters, copies and steps: equal on two ranks whose plans do the same."""
        canonical = hashlib.sha256()
        for parameter in self.parameters:
            canonical.update(f"{parameter.name} {parameter.shape} {parameter.itemsize}\n".encode())
        for rank, regions in enumerate(self.copies):
            canonical.update(f"copy {rank} {_words(regions)}\n".encode())
        for number, step in enumerate(self.steps):
            for bucket in step:
                line = f"{number} {bucket.source}>{bucket.target} {_words(bucket.regions)}\n"
                canonical.update(line.encode())
        return canonical.hexdigest()

    def origin(self, rank: int, region: Region) -> Region:
        """The held region of `rank` to read a region of its copies or outgoing buckets from."""
        return next(held for held in self._held[region.name][rank] if held.contains(region))

    def destinations(self, rank: int, region: Region) -> tuple[Region, ...]:
        """The wanted regions of `rank` to write a region of its copies or incoming buckets to; at least one."""
        return tuple(wanted for wanted in self._wanted[region.name][rank] if wanted.contains(region))

    @cached_property
    def _held(self) -> _ByParameter:
        return _by_parameter(self.parameters, self.held, "held")

    @cached_property
    def _wanted(self) -> _ByParameter:
        return _by_parameter(self.parameters, self.wanted, "wanted")


def plan_reshard(
    parameters: Iterable[Parameter],
    held: RegionsOfRank,
    wanted: RegionsOfRank,
    *,
    bucket_bytes: int,
    nodes: Sequence[int] | None = None,
) -> ReshardPlan:
    """The plan from `held` to `wanted`, which list the same ranks; a rank without part in one has no regions there.

    Of several holders of a region the one sends that has sent least so far, those on the target's own node first
    (nodes: the node of each rank; None = one node). Errors: EngineError for a wanted region that no rank holds, naming
    it and who wants it, for a region that does not fit its parameter and for a name given twice; ConfigError if an
    element does not fit into bucket_bytes.
    """
    parameters = tuple(sorted(parameters, key=attrgetter("name")))
    held_in_order, wanted_in_order = tuple(map(_ordered, held)), tuple(map(_ordered, wanted))
    _check_bucket(parameters, bucket_bytes)
    sources, steps = _Sources(nodes or [0] * len(held)), _Steps(len(held), bucket_bytes)
    copies: list[list[Region]] = [[] for _ in held]
    for parameter, geometry in _geometries(parameters, held_in_order, wanted_in_order):
        transfers: list[_Transfer] = []
        for piece in _pieces(geometry, bucket_bytes // parameter.itemsize):
            region, nbytes = Region(parameter.name, piece.bounds), piece.size * parameter.itemsize
            for rank in piece.keepers:
                copies[rank].append(region)
            if piece.targets and not piece.holders:
                raise _missing(region, piece.targets)
            for target in piece.targets:
                transfers.append((sources.choose(piece.holders, target, nbytes), target, region, nbytes))
        steps.add(transfers)
    return ReshardPlan(parameters, held_in_order, wanted_in_order, tuple(map(tuple, copies)), steps.finished())


def lower_bound(parameters: Iterable[Parameter], held: RegionsOfRank, wanted: RegionsOfRank) -> tuple[int, ...]:
    """Bytes that each rank must receive: of the elements it wants and does not hold."""
    total = np.zeros(len(held), np.int64)
    for parameter, geometry in _geometries(tuple(parameters), held, wanted):
        cells = _cells(geometry)
        total += parameter.itemsize * cells.elements(cells.wants & ~cells.holds)
    return tuple(total.tolist())


def gathered_bytes(
    parameters: Iterable[Parameter], held: RegionsOfRank, groups: Sequence[Sequence[int]] | None = None
) -> tuple[int, ...]:
    """Bytes that each rank receives if it gathers all that the ranks of its group hold.

    groups: the group of each rank, such as its training replica (the vanilla all-gather); None = all ranks
    (gather-full).
    """
    everyone = range(len(held))
    total = np.zeros(len(held), np.int64)
    for parameter, geometry in _geometries(tuple(parameters), held, [()] * len(held)):
        cells = _cells(geometry)
        in_group = np.stack([cells.holds[list(group)].any(0) for group in groups or [everyone] * len(held)])
        total += parameter.itemsize * cells.elements(in_group & ~cells.holds)
    return tuple(total.tolist())


# ---- inside: geometry
_ByParameter = dict[str, list[list[Region]]]
"""By a parameter's own name and by rank: the regions."""


class _Geometry(NamedTuple):
    """All that the pieces of a parameter depend on, but for its name; many parameters of a model share one."""

    shape: tuple[int, ...]
    held: tuple[tuple[Bounds, ...], ...]
    wanted: tuple[tuple[Bounds, ...], ...]


class _Cells(NamedTuple):
    """holds, wants: bool [ranks, cells]."""

    grid: Grid
    holds: np.ndarray
    wants: np.ndarray

    def elements(self, of_rank: np.ndarray) -> np.ndarray:
        """int64 [ranks]: elements of the marked cells; of_rank is bool [ranks, cells]."""
        return np.asarray(of_rank @ self.grid.sizes)


class _Piece(NamedTuple):
    """A region by its ranks. keepers: want and hold it. targets: want it and don't hold it."""

    bounds: Bounds
    size: int
    holders: tuple[int, ...]
    keepers: tuple[int, ...]
    targets: tuple[int, ...]


def _geometries(
    parameters: Sequence[Parameter], held: RegionsOfRank, wanted: RegionsOfRank
) -> Iterator[tuple[Parameter, _Geometry]]:
    """Errors: EngineError for a region that is of no parameter or has another number of dimensions."""
    if len(held) != len(wanted):
        raise ValueError(f"held lists {len(held)} ranks and wanted {len(wanted)}; they are the same ranks")
    sides = (_by_parameter(parameters, held, "held"), _by_parameter(parameters, wanted, "wanted"))
    for parameter in parameters:
        bounds = [
            tuple(tuple(region.bounds for region in regions) for regions in side[parameter.name]) for side in sides
        ]
        yield parameter, _Geometry(parameter.shape, *bounds)


@lru_cache(256)
def _cells(geometry: _Geometry) -> _Cells:
    sides = (geometry.held, geometry.wanted)
    grid = Grid(geometry.shape, (bounds for side in sides for regions in side for bounds in regions))
    holds, wants = (np.stack([grid.mark(regions) for regions in side]) for side in sides)
    return _Cells(grid, holds, wants)


@lru_cache(256)
def _pieces(geometry: _Geometry, max_elements: int) -> tuple[_Piece, ...]:
    """What is wanted of a parameter, by position, in pieces that each rank holds and wants wholly or not at all."""
    grid, holds, wants = _cells(geometry)
    pieces: list[_Piece] = []
    for bounds, held, wanted in zip(grid.cells(), holds.T, wants.T, strict=True):
        if wanted.any():
            holders, keepers, targets = map(_ranks, (held, wanted & held, wanted & ~held))
            pieces += [_Piece(part, _size(part), holders, keepers, targets) for part in cut(bounds, max_elements)]
    return tuple(sorted(pieces))


def _ranks(mask: np.ndarray) -> tuple[int, ...]:
    return tuple(np.flatnonzero(mask).tolist())


def _size(bounds: Bounds) -> int:
    return prod(stop - start for start, stop in bounds)


def _ordered(regions: Iterable[Region]) -> tuple[Region, ...]:
    return tuple(sorted(set(regions), key=attrgetter("name", "bounds")))


def _by_parameter(parameters: Iterable[Parameter], regions_of_rank: RegionsOfRank, verb: str) -> _ByParameter:
    known = _by_any_name(parameters)
    found: _ByParameter = {parameter.name: [[] for _ in regions_of_rank] for parameter in known.values()}
    for rank, regions in enumerate(regions_of_rank):
        for region in regions:
            parameter = known.get(region.name)
            if parameter is None:
                raise _unknown(region.name, verb, regions_of_rank)
            if len(region.bounds) != len(parameter.shape):
                raise EngineError(
                    f"resharding: {region}, {verb} by rank {rank}, does not fit the shape {parameter.shape}; "
                    "training and generation must describe the same model."
                )
            found[parameter.name][rank].append(region)
    return found


def _by_any_name(parameters: Iterable[Parameter]) -> dict[str, Parameter]:
    found: dict[str, Parameter] = {}
    for parameter in parameters:
        for name in (parameter.name, *parameter.aliases):
            if name in found:
                raise EngineError(f"resharding: two parameters are called {name}; tied ones are given once.")
            found[name] = parameter
    return found


# ---- inside: who sends, and when
_Transfer = tuple[int, int, Region, int]
"""source, target, what, bytes"""


class _Sources:
    """Chooses who sends. nodes: the node of each rank."""

    def __init__(self, nodes: Sequence[int]) -> None:
        self._nodes = nodes
        self._sent = [0] * len(nodes)

    def choose(self, holders: Sequence[int], target: int, nbytes: int) -> int:
        """The holder that has sent least, of those on the target's node if there are any; the first of equals."""
        if len(holders) > 1:
            near = [holder for holder in holders if self._nodes[holder] == self._nodes[target]]
            source = min(near or holders, key=self._sent.__getitem__)
        else:
            source = holders[0]
        self._sent[source] += nbytes
        return source


class _Steps:
    """Fills steps with transfers; a step ends before a rank would send and receive more than bucket_bytes in it."""

    def __init__(self, ranks: int, bucket_bytes: int) -> None:
        self._ranks, self._bucket_bytes = ranks, bucket_bytes
        self._done: list[tuple[Bucket, ...]] = []
        self._begin()

    def add(self, transfers: Iterable[_Transfer]) -> None:
        """One parameter's transfers, to the next rank first, so that all ranks send and receive at the same time."""
        for source, target, region, nbytes in sorted(transfers, key=lambda it: (it[1] - it[0]) % self._ranks):
            if max(self._staged[source], self._staged[target]) + nbytes > self._bucket_bytes:
                self._end()
            self._staged[source] += nbytes
            self._staged[target] += nbytes
            self._regions[source, target].append(region)
            self._nbytes[source, target] += nbytes

    def finished(self) -> tuple[tuple[Bucket, ...], ...]:
        """All steps."""
        self._end()
        return tuple(self._done)

    def _begin(self) -> None:
        self._staged = [0] * self._ranks
        self._regions: defaultdict[tuple[int, int], list[Region]] = defaultdict(list)
        self._nbytes: defaultdict[tuple[int, int], int] = defaultdict(int)

    def _end(self) -> None:
        if self._regions:
            pairs = sorted(self._regions.items())
            self._done.append(tuple(Bucket(*pair, tuple(regions), self._nbytes[pair]) for pair, regions in pairs))
        self._begin()


# ---- inside: words and sums
def _check_bucket(parameters: Iterable[Parameter], bucket_bytes: int) -> None:
    least = max((parameter.itemsize for parameter in parameters), default=1)
    if bucket_bytes < least:
        raise ConfigError(f"resharding: bucket_bytes={bucket_bytes} holds no element; it is at least {least}.")


def _unknown(name: str, verb: str, regions_of_rank: RegionsOfRank) -> EngineError:
    ranks = [rank for rank, regions in enumerate(regions_of_rank) if any(region.name == name for region in regions)]
    return EngineError(
        f"resharding: {name} is {verb} by ranks {_words(ranks)}, but is none of the parameters that are trained; "
        "training and generation must use the names of the checkpoint."
    )


def _missing(region: Region, targets: Iterable[int]) -> EngineError:
    return EngineError(
        f"resharding: {region} is wanted by ranks {_words(targets)} and held by no rank; "
        "the training engine must give all of its parameters."
    )


def _words(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))


def _sums(ranks: int, amounts: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    """Of (rank, amount), the total of each rank."""
    totals = [0] * ranks
    for rank, amount in amounts:
        totals[rank] += amount
    return tuple(totals)
