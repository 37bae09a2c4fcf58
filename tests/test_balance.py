"""Balancing of cost over data-parallel ranks."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from hybridflow.controller.balance import ATTENTION_TOKENS, TOLERANCE, balanced_parts, cost

pytestmark = pytest.mark.unit

COSTS = st.lists(st.integers(0, 1000), max_size=60)
PARTS = st.integers(1, 9)
SEEDS = st.integers(0, 2**32 - 1)

Parts = list[NDArray[np.int64]]


def lognormal(rows: int, spread: float, seed: int) -> NDArray[np.float64]:
    return cost(np.random.default_rng(seed).lognormal(7, spread, rows).astype(np.int64))


def loads(costs: NDArray[np.float64], parts: Parts) -> list[float]:
    return [float(costs[part].sum()) for part in parts]


def balance(costs: NDArray[np.float64], parts: Parts) -> float:
    """The heaviest part over max(mean, heaviest row)."""
    return max(loads(costs, parts)) / max(costs.sum() / len(parts), costs.max())


def places(parts: Parts) -> NDArray[np.int64]:
    """The part of each row."""
    place = np.empty(sum(map(len, parts)), np.int64)
    for number, part in enumerate(parts):
        place[part] = number
    return place


def test_attention_doubles_a_row_of_six_hidden_sizes() -> None:
    assert cost(np.array([0, 1000, ATTENTION_TOKENS])).tolist() == [0, 1000 + 1000**2 / 24576, 2 * 24576]


@given(COSTS, PARTS, SEEDS)
def test_every_row_is_in_exactly_one_part_and_units_are_whole(costs: list[int], parts: int, seed: int) -> None:
    draw, rows = np.random.default_rng(seed), len(costs)
    present, unit = draw.integers(-1, parts + 1, rows), draw.integers(0, 12, rows)
    for of_rows in ({}, {"present": present}, {"unit": unit}, {"present": present, "unit": unit}):
        found = balanced_parts(np.array(costs), parts, **of_rows)
        again = balanced_parts(np.array(costs), parts, **of_rows)
        assert len(found) == parts
        assert sorted(row for part in found for row in part) == list(range(rows))
        assert all((np.diff(part) > 0).all() for part in found)
        assert [part.tolist() for part in found] == [part.tolist() for part in again]
        if "unit" in of_rows:
            assert sum(len(set(unit[part])) for part in found) == len(set(unit))


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.integers(1, 3), SEEDS)
def test_the_heaviest_part_is_within_the_bound_or_grahams_distance_of_the_optimum(
    costs: list[int], parts: int, seed: int
) -> None:
    draw, rows = np.random.default_rng(seed), len(costs)
    present = draw.integers(-1, parts, rows)
    for unit in (np.arange(rows), draw.integers(0, rows, rows)):
        units = np.array([np.array(costs)[unit == one].sum() for one in sorted(set(unit))])
        optimum = min(
            max(units[np.array(choice) == part].sum() for part in range(parts))
            for choice in product(range(parts), repeat=len(units))
        )
        reached = max(TOLERANCE * max(sum(costs) / parts, max(units)), (4 / 3 - 1 / (3 * parts)) * optimum)
        for where in (None, present):
            found = balanced_parts(np.array(costs), parts, where, unit)
            assert max(loads(np.array(costs), found)) <= reached + 1e-6


@pytest.mark.parametrize(("rows", "ranks"), [(1024, 8), (8192, 512)])
@pytest.mark.parametrize("spread", [0.3, 0.8, 1.5])
def test_many_rows_are_balanced_within_two_percent(rows: int, ranks: int, spread: float) -> None:
    for seed in range(3):
        costs = lognormal(rows, spread, seed)
        assert balance(costs, balanced_parts(costs, ranks)) <= 1.02


@pytest.mark.parametrize(("rows", "ranks"), [(1024, 8), (8192, 512)])
def test_from_a_random_placement_few_rows_move_and_the_balance_is_as_good(rows: int, ranks: int) -> None:
    costs = lognormal(rows, 0.8, seed=0)
    present = np.random.default_rng(1).integers(0, ranks, rows)
    found = balanced_parts(costs, ranks, present)
    assert balance(costs, found) <= 1.02
    moved = places(found) != present
    assert costs[moved].sum() <= 0.15 * costs.sum()


@given(COSTS.filter(any), PARTS, SEEDS)
def test_a_placement_that_is_good_enough_is_kept(costs: list[int], parts: int, seed: int) -> None:
    weights = np.array(costs, np.float64)
    present = np.random.default_rng(seed).permutation(parts)[places(balanced_parts(weights, parts))]
    good = balance(weights, [np.flatnonzero(present == part) for part in range(parts)]) < TOLERANCE - 1e-6
    kept = places(balanced_parts(weights, parts, present)).tolist() == present.tolist()
    assert kept or not good


def test_parts_made_anew_are_named_after_the_rows_that_lie_there() -> None:
    costs = np.array([5, 8, 3, 8, 2])
    # 18 and 8: if the first 8 of part 0 stayed there, the other would follow it. So {5, 8} and {3, 8, 2} are made, and
    # of the second more lies in part 0 than of the first
    found = balanced_parts(costs, 2, present=np.array([1, 0, 1, 0, 0]))
    assert [part.tolist() for part in found] == [[2, 3, 4], [0, 1]]


def test_the_lightest_rows_of_an_overloaded_part_move_and_no_others() -> None:
    costs = np.array([5, 40, 10, 20, 20, 30, 55])
    found = balanced_parts(costs, 3, present=np.array([0, 0, 0, 0, 1, 1, 2]))
    assert [part.tolist() for part in found] == [[1, 3], [2, 4, 5], [0, 6]]


def test_rows_that_lie_nowhere_go_where_there_is_room() -> None:
    costs = np.array([40, 30, 10, 35, 5, 15])
    found = balanced_parts(costs, 3, present=np.array([0, -1, 1, 1, 7, -1]))
    assert [part.tolist() for part in found] == [[0, 4], [2, 3], [1, 5]]


def test_a_unit_whose_rows_lie_apart_is_brought_together() -> None:
    found = balanced_parts(np.ones(6), 3, present=np.array([0, 1, 1, 2, 2, 1]), unit=np.array([5, 3, 3, 4, 4, 5]))
    assert [part.tolist() for part in found] == [[0, 5], [1, 2], [3, 4]]


@given(st.integers(0, 40), PARTS, st.sampled_from([0.0, 3.5]))
def test_rows_of_equal_cost_are_spread_as_evenly_as_they_go(rows: int, parts: int, each: float) -> None:
    sizes = [len(part) for part in balanced_parts(np.full(rows, each), parts)]
    assert sizes == [len(part) for part in np.array_split(np.arange(rows), parts)]


def test_one_long_row_has_a_rank_to_itself() -> None:
    found = balanced_parts(np.array([1, 1, 900, 1, 1, 1]), 2)
    assert [part.tolist() for part in found] == [[2], [0, 1, 3, 4, 5]]
