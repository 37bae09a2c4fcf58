"""Region: a rectangular part of one parameter. Grid: the cells between the edges of several of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod

import numpy as np

Bounds = tuple[tuple[int, int], ...]
"""(start, stop) in elements, per dimension; no dimension for a scalar."""


@dataclass(frozen=True, order=True, slots=True)
class Region:
    """The elements of the parameter `name` between `bounds`. Ordered by name, then by position.

    The geometry does not compare names, since tied weights have several. Errors: ValueError for a bound that is
    negative or ends before it starts, and where two regions differ in their number of dimensions.
    """

    name: str
    bounds: Bounds

    def __post_init__(self) -> None:
        for start, stop in self.bounds:
            if not 0 <= start <= stop:
                raise ValueError(f"{self}: a region needs 0 <= start <= stop in each dimension")

    @classmethod
    def at(cls, name: str, offset: Iterable[int], shape: Iterable[int]) -> Region:
        """The region of that shape that starts at `offset`."""
        return cls(name, tuple((start, start + extent) for start, extent in zip(offset, shape, strict=True)))

    @classmethod
    def whole(cls, name: str, shape: Iterable[int]) -> Region:
        """The whole of a parameter of that shape."""
        return cls(name, tuple((0, extent) for extent in shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements per dimension."""
        return tuple(stop - start for start, stop in self.bounds)

    @property
    def size(self) -> int:
        """Number of elements; 1 for a scalar."""
        return prod(self.shape)

    def intersection(self, other: Region) -> Region:
        """The part that is also in `other`, under this name; of size 0 if there is none."""
        overlaps = ((max(a, c), min(b, d)) for (a, b), (c, d) in zip(self.bounds, other.bounds, strict=True))
        return Region(self.name, tuple((start, max(start, stop)) for start, stop in overlaps))

    def contains(self, other: Region) -> bool:
        """Whether each element of `other` is in this region."""
        pairs = zip(self.bounds, other.bounds, strict=True)
        return not other.size or all(a <= c and d <= b for (a, b), (c, d) in pairs)

    def within(self, outer: Region) -> tuple[slice, ...]:
        """The index of this region in an array that holds `outer`. Errors: ValueError if it sticks out."""
        if not outer.contains(self):
            raise ValueError(f"{self} is not inside {outer}")
        pairs = zip(self.bounds, outer.bounds, strict=True)
        return tuple(slice(start - origin, stop - origin) for (start, stop), (origin, _) in pairs)

    def __str__(self) -> str:
        return f"{self.name}[{', '.join(f'{start}:{stop}' for start, stop in self.bounds)}]"


class Grid:
    """A parameter of `shape`, cut at every edge of some regions, so that each cell is inside or outside of each.

    What sticks out of the parameter, such as the padding of a vocabulary, belongs to no cell.
    """

    def __init__(self, shape: tuple[int, ...], regions: Iterable[Bounds]) -> None:
        edges = [{0, extent} for extent in shape]
        for bounds in regions:
            for cuts, extent, pair in zip(edges, shape, bounds, strict=True):
                cuts.update(min(edge, extent) for edge in pair)
        self._shape = shape
        self._edges = [sorted(cuts) for cuts in edges]
        self._position = [{edge: i for i, edge in enumerate(cuts)} for cuts in self._edges]

    @property
    def sizes(self) -> np.ndarray:
        """int64 [cells]: elements of each cell, by position."""
        sizes = np.ones(1, np.int64)
        for cuts in self._edges:
            sizes = np.kron(sizes, np.diff(np.array(cuts, np.int64)))
        return sizes

    def mark(self, regions: Iterable[Bounds]) -> np.ndarray:
        """bool [cells]: those inside any of these regions, which are among the ones that cut the grid."""
        inside = np.zeros([len(cuts) - 1 for cuts in self._edges], bool)
        for bounds in regions:
            axes = zip(self._position, self._shape, bounds, strict=True)
            inside[tuple(slice(at[min(a, extent)], at[min(b, extent)]) for at, extent, (a, b) in axes)] = True
        return inside.reshape(-1)

    def cells(self) -> Iterator[Bounds]:
        """The bounds of each cell, by position."""
        return product(*(pairwise(cuts) for cuts in self._edges))


def cut(bounds: Bounds, max_elements: int) -> Iterator[Bounds]:
    """Parts of at most `max_elements` (from 1), by position, each of as many whole rows as fit."""
    if prod(stop - start for start, stop in bounds) <= max_elements:
        yield bounds
        return
    (start, stop), rest = bounds[0], bounds[1:]
    rows = max(1, max_elements // prod(end - begin for begin, end in rest))
    for row in range(start, stop, rows):
        part = (row, min(row + rows, stop))
        if rows > 1:
            yield (part, *rest)
        else:
            yield from ((part, *inner) for inner in cut(rest, max_elements))
