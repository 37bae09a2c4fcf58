"""Layouts: ranks and coordinates."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.errors import ConfigError
from hybridflow.layout import Coordinates, ParallelLayout

pytestmark = pytest.mark.unit

SIZES = st.integers(1, 4)
LAYOUTS = st.builds(ParallelLayout, pp=SIZES, tp=SIZES, dp=SIZES, cp=SIZES)


@given(LAYOUTS)
def test_coordinates_and_rank_are_inverse_and_cover_every_place_once(layout: ParallelLayout) -> None:
    places = [layout.coordinates(rank) for rank in range(layout.size)]
    assert [layout.rank(place) for place in places] == list(range(layout.size))
    assert len(set(places)) == layout.size == layout.pp * layout.tp * layout.dp * layout.cp


@given(LAYOUTS)
def test_ranks_count_with_tp_fastest_then_cp_dp_pp(layout: ParallelLayout) -> None:
    sizes = (layout.pp, layout.dp, layout.cp, layout.tp)
    order = [Coordinates(*place) for place in itertools.product(*map(range, sizes))]
    assert [layout.coordinates(rank) for rank in range(layout.size)] == order


@pytest.mark.parametrize("dimension", ["pp", "tp", "dp", "ep", "cp"])
def test_a_dimension_below_one_is_named(dimension: str) -> None:
    with pytest.raises(ConfigError, match=f"{dimension}=0"):
        ParallelLayout(**{dimension: 0})


def test_expert_parallelism_divides_dp_times_cp_and_adds_no_ranks() -> None:
    assert ParallelLayout(dp=4, cp=2, ep=8).size == 8
    with pytest.raises(ConfigError, match="ep=3 does not divide dp x cp = 8"):
        ParallelLayout(dp=4, cp=2, ep=3)


@pytest.mark.parametrize("rank", [-1, 8])
def test_a_rank_outside_the_layout_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match=f"rank {rank} is outside a layout of 8 ranks"):
        ParallelLayout(tp=2, dp=4).coordinates(rank)
