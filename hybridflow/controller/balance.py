"""Which rows go to which data-parallel rank, so that no rank waits long for another. Pure; numpy only."""

from __future__ import annotations

import heapq
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..columns import offsets_of

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

ATTENTION_TOKENS = 6 * 4096
"""Tokens of a row whose attention costs as much as all else: 6 times the hidden size h, 4,096 at 8 B parameters.

Source: Narayanan et al., arXiv 2104.04473, equation 3: the work on s tokens is proportional to s (1 + s / 6h).
"""
TOLERANCE = 1.02
"""The heaviest part over max(mean, heaviest unit) up to which rows stay where they are."""
RESOLUTION = 2**40
"""The sum of all costs, in whole numbers: sums are exact, and a load and its part fit into one int."""


def cost(tokens: NDArray[Any]) -> Floats:
    """What a row of so many tokens costs, in tokens: itself and its attention, [n]."""
    counted = np.asarray(tokens, np.float64)
    return counted + counted**2 / ATTENTION_TOKENS


def balanced_parts(
    costs: NDArray[Any], parts: int, present: NDArray[Any] | None = None, unit: NDArray[Any] | None = None
) -> list[Ints]:
    """Row numbers of each part, ascending: every row exactly once, the same for the same arguments.

    costs [n], none negative; present [n]: the part where each row lies, any other number for none; unit [n]: rows of
    equal values stay together. A part has as many rows as its cost allows; it may have none.

    Of what lies in a part the heaviest units stay, up to TOLERANCE x max(mean, heaviest unit); the others go to the
    lightest part, heaviest first. Where that ends above this bound and placing all anew ends lower, all are, in parts
    numbered after what lay there. So the heaviest part is within the bound or 4/3 - 1 / (3 parts) x the least possible.

    Source: Graham, Bounds on Multiprocessing Timing Anomalies, SIAM J. Appl. Math. 17 (1969).
    """
    if unit is None and present is not None and _balanced(costs, present, parts):
        return _rows(present, parts)
    item = np.arange(len(costs)) if unit is None else np.unique(unit, return_inverse=True)[1]
    weights = _whole(np.bincount(item, costs))
    bound = TOLERANCE * max(weights.sum() / parts, weights.max(initial=0))

    def heaviest(place: Ints) -> float:
        return float(np.bincount(place, weights).max(initial=0))

    nowhere = np.full(len(weights), -1)
    home = nowhere if present is None else _homes(present, item, len(weights), parts)
    place = _placed(weights, _staying(weights, home, bound), parts)
    if heaviest(place) > bound:
        anew = _placed(weights, nowhere, parts)
        place = min(place, _named(anew, home, weights, parts), key=heaviest)
    return _rows(place[item], parts)


def _balanced(costs: NDArray[Any], present: NDArray[Any], parts: int) -> bool:
    """Whether all rows may stay."""
    if not len(costs) or present.min() < 0 or present.max() >= parts:
        return False
    loads = np.bincount(present, costs)
    return bool(loads.max() <= TOLERANCE * max(loads.sum() / parts, costs.max()))


def _rows(place: NDArray[Any], parts: int) -> list[Ints]:
    """Row numbers of each part."""
    rows = np.argsort(place, kind="stable")
    ends = offsets_of(np.bincount(place, minlength=parts)).tolist()
    return [rows[start:end] for start, end in pairwise(ends)]


def _whole(costs: NDArray[Any]) -> Ints:
    """Costs as whole numbers, 1 at least: what costs nothing is spread as well."""
    return 1 + np.rint(costs * (RESOLUTION / (costs.sum() or 1))).astype(np.int64)


def _homes(present: NDArray[Any], item: Ints, items: int, parts: int) -> Ints:
    """The part where all rows of an item lie, or -1."""
    home = np.empty(items, np.int64)
    home[item] = present
    home[item[home[item] != present]] = -1
    return np.where(home < parts, home, -1)


def _staying(weights: Ints, home: Ints, bound: float) -> Ints:
    """The part of the items that stay: of each part the heaviest ones that are within the bound together. Else -1."""
    order = np.lexsort((-weights, home))
    first = np.searchsorted(home[order], home[order])
    sums = np.cumsum(weights[order])
    within_part = sums - sums[first] + weights[order][first]
    staying = home.copy()
    staying[order[within_part > bound]] = -1
    return staying


def _placed(weights: Ints, staying: Ints, parts: int) -> Ints:
    """The part of each item: those that do not stay go to the lightest part, heaviest first."""
    stays = staying >= 0
    loads = np.bincount(staying[stays], weights[stays], parts).astype(np.int64)
    heap = (loads * parts + np.arange(parts)).tolist()  # ordered by load, then part
    heapq.heapify(heap)
    going = np.flatnonzero(~stays)
    going = going[np.argsort(-weights[going], kind="stable")]
    taken = [heapq.heapreplace(heap, heap[0] + step) for step in (weights[going] * parts).tolist()]
    place = staying.copy()
    place[going] = np.asarray(taken, np.int64) % parts
    return place


def _named(place: Ints, home: Ints, weights: Ints, parts: int) -> Ints:
    """The same parts under other numbers: greedily, that of the part where most of a part's weight lies."""
    lies = home >= 0
    pairs, pair = np.unique(place[lies] * parts + home[lies], return_inverse=True)
    shared = np.bincount(pair, weights[lies])
    name, free = np.full(parts, -1), set(range(parts))
    for old, new in (divmod(both, parts) for both in pairs[np.argsort(-shared, kind="stable")].tolist()):
        if name[old] < 0 and new in free:
            name[old] = new
            free.remove(new)
    name[name < 0] = sorted(free)
    return name[place]
