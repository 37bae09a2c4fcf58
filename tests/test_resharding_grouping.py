"""Generation grouping and what the way from training to generation costs (HybridFlow, section 5.3 and table 2)."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from itertools import product

import pytest

from hybridflow.controller.protocols import Parts, three_d_all_micro_dp
from hybridflow.errors import ConfigError
from hybridflow.layout import ParallelLayout
from hybridflow.resharding import (
    GenerationLayout,
    Grouping,
    Overhead,
    Parameter,
    Region,
    deepspeed_chat_overhead,
    gathered_bytes,
    hybridflow_overhead,
    lower_bound,
    plan_reshard,
    vanilla_overhead,
)

pytestmark = pytest.mark.unit

SIZES = (1, 2, 4, 8)
PAIRS = list(product(SIZES, SIZES))
FIGURE_8 = ParallelLayout(pp=1, tp=4, dp=2)


def layouts(p: int, t: int, grouping: Grouping, dp: int = 1) -> Iterator[GenerationLayout]:
    """All generation layouts inside p-t."""
    for p_g, t_g in PAIRS:
        if p % p_g == 0 and t % t_g == 0:
            yield GenerationLayout(ParallelLayout(pp=p, tp=t, dp=dp), p_g, t_g, grouping)


def elements(region: Region) -> set[tuple[int, ...]]:
    return set(product(*(range(start, stop) for start, stop in region.bounds)))


def distinct(groups: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    return sorted(set(groups))


# ---- groups
def test_figure_8b_the_generation_groups_lie_at_strides():
    layout = GenerationLayout(FIGURE_8, pp=1, tp=2)
    ranks = range(8)
    assert layout.micro_dp == 2
    assert distinct([layout.tp_group(r) for r in ranks]) == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert distinct([layout.micro_dp_group(r) for r in ranks]) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert [layout.pp_group(r) for r in ranks] == [(r,) for r in ranks]
    assert layout.coordinates(6) == (0, 1, 0)


def test_figure_8a_vanilla_groups_are_consecutive_and_four_ranks_keep_nothing_of_what_they_train():
    layout = GenerationLayout(FIGURE_8, pp=1, tp=2, grouping=Grouping.VANILLA)
    ranks = range(8)
    assert distinct([layout.tp_group(r) for r in ranks]) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert distinct([layout.micro_dp_group(r) for r in ranks]) == [(0, 2), (1, 3), (4, 6), (5, 7)]
    overlaps = [
        layout.training_region(r, "w", (1, 4)).intersection(layout.generation_region(r, "w", (1, 4))) for r in ranks
    ]
    assert [r for r in ranks if overlaps[r].size == 0] == [1, 2, 5, 6]


def test_pipeline_groups_lie_at_stride_p_over_p_g():
    layout = GenerationLayout(ParallelLayout(pp=4, tp=2), pp=2, tp=1)
    assert layout.pp_group(0) == (0, 4) and layout.pp_group(3) == (3, 7)
    assert layout.micro_dp_group(0) == (0, 1, 2, 3)
    assert layout.tp_group(5) == (5,)


def test_vanilla_stages_are_consecutive_within_a_replica():
    layout = GenerationLayout(ParallelLayout(pp=4, tp=2), pp=2, tp=2, grouping=Grouping.VANILLA)
    assert layout.tp_group(0) == (0, 1) and layout.pp_group(0) == (0, 2)
    assert layout.micro_dp_group(0) == (0, 4)


@pytest.mark.parametrize("grouping", Grouping)
@pytest.mark.parametrize(("p", "t"), PAIRS)
def test_groups_have_their_sizes_and_coordinates_are_unique(p, t, grouping):
    for layout in layouts(p, t, grouping):
        ranks = range(layout.training.size)
        of_group = (
            (layout.tp_group, layout.tp),
            (layout.pp_group, layout.pp),
            (layout.micro_dp_group, layout.micro_dp),
        )
        for group, size in of_group:
            group_of = [group(rank) for rank in ranks]
            groups = distinct(group_of)
            assert {len(members) for members in groups} == {size}
            assert sorted(rank for members in groups for rank in members) == list(ranks)
            assert all(rank in group_of[rank] for rank in ranks)
        assert len({layout.coordinates(rank) for rank in ranks}) == p * t


def test_ranks_of_other_dp_and_cp_are_in_other_groups():
    training = ParallelLayout(pp=2, tp=2, dp=2, cp=2)
    layout = GenerationLayout(training, pp=1, tp=1)
    for rank in range(training.size):
        places = [training.coordinates(peer) for peer in layout.micro_dp_group(rank)]
        assert len(places) == 4 and len({(at.dp, at.cp) for at in places}) == 1
        assert layout.training_replica(rank) == layout.micro_dp_group(rank)


@pytest.mark.parametrize(("p", "t"), PAIRS)
def test_micro_dp_agrees_with_the_transfer_protocol(p, t):
    for layout in layouts(p, t, Grouping.STRIDED, dp=2):
        protocol, training = three_d_all_micro_dp(layout.pp, layout.tp), layout.training
        calls = protocol.distribute(training, (Parts(tuple(range(protocol.parts(training)))),), {})
        for rank, ((part,), _) in enumerate(calls):
            assert part == training.coordinates(rank).dp * layout.micro_dp + layout.coordinates(rank).micro_dp


@pytest.mark.parametrize(
    ("sizes", "message"), [((3, 1), "pp=3 .* 1, 2, 4"), ((1, 5), "tp=5 .* 1, 2, 3, 6"), ((0, 1), "pp=0")]
)
def test_a_size_that_does_not_divide_is_refused_with_the_legal_ones(sizes, message):
    with pytest.raises(ConfigError, match=message):
        GenerationLayout(ParallelLayout(pp=4, tp=6), *sizes)


# ---- table 2
@pytest.mark.parametrize(("p", "t"), PAIRS)
def test_table_2_hybridflow_is_what_the_regions_count_on_every_rank(p, t):
    for layout in layouts(p, t, Grouping.STRIDED):
        for rank in range(layout.training.size):
            train = elements(layout.training_region(rank, "w", (p, t)))
            generation = elements(layout.generation_region(rank, "w", (p, t)))
            counted = [Fraction(len(part), p * t) for part in (generation - train, generation, train - generation)]
            assert Overhead(*counted) == hybridflow_overhead(layout)
        p_g, t_g = layout.pp, layout.tp
        assert hybridflow_overhead(layout) == Overhead(
            Fraction(t * p - t_g * p_g, t_g * p_g * t * p), Fraction(1, t_g * p_g), Fraction(0)
        )


@pytest.mark.parametrize(("p", "t"), PAIRS)
def test_table_2_vanilla_is_what_the_regions_count_and_its_redundancy_that_of_the_ranks_that_miss(p, t):
    for layout in layouts(p, t, Grouping.VANILLA):
        ranks = range(layout.training.size)
        train = [elements(layout.training_region(rank, "w", (p, t))) for rank in ranks]
        apart = [train[rank] - elements(layout.generation_region(rank, "w", (p, t))) for rank in ranks]
        formula = vanilla_overhead(layout)
        assert formula == Overhead(Fraction(t * p - 1, t * p), Fraction(1), Fraction(1, t * p))
        for rank in ranks:
            gathered = set().union(*(train[peer] for peer in layout.training_replica(rank)))
            assert Fraction(len(gathered - train[rank]), p * t) == formula.communication
            assert Fraction(len(gathered), p * t) == formula.peak_memory
            assert Fraction(len(apart[rank]), p * t) in (formula.redundancy, 0)
        in_place = layout.tp in (1, t) and (layout.pp == 1 or (layout.tp, layout.pp) == (t, p))
        assert any(apart) != in_place  # where consecutive groups happen to contain every training shard


@pytest.mark.parametrize(("p", "t", "d"), list(product(SIZES, SIZES, (1, 2))))
def test_table_2_deepspeed_chat_is_what_the_regions_count(p, t, d):
    layout = GenerationLayout(ParallelLayout(pp=p, tp=t, dp=d))
    size = p * t * d
    shards = [[Region("w", ((rank, rank + 1),))] for rank in range(size)]
    (received,) = set(gathered_bytes([Parameter("w", (size,), 1)], shards))
    assert deepspeed_chat_overhead(layout) == Overhead(
        Fraction(received, size), Fraction(received + shards[0][0].size, size), Fraction(shards[0][0].size, size)
    )
    assert deepspeed_chat_overhead(layout).communication == Fraction(t * p * d - 1, t * p * d)


@pytest.mark.parametrize(("p", "t", "heads"), list(product(SIZES, SIZES, (1, 2, 4))))
def test_replicated_norms_and_kv_heads_add_what_the_regions_count(p, t, heads):
    for layout in layouts(p, t, Grouping.STRIDED):
        formula = hybridflow_overhead(layout, tp_shards=heads)
        for rank in range(layout.training.size):
            train = elements(layout.training_region(rank, "kv", (p, heads), tp_shards=heads))
            generation = elements(layout.generation_region(rank, "kv", (p, heads), tp_shards=heads))
            counted = [Fraction(len(part), p * heads) for part in (generation - train, generation, train - generation)]
            assert Overhead(*counted) == formula


# ---- the plan of a layout and what other ways receive
@pytest.mark.parametrize(
    ("train", "generation", "more"),
    [
        ((1, 8), (1, 2), Fraction(7, 3)),
        ((1, 8), (1, 4), Fraction(7)),
        ((4, 8), (1, 8), Fraction(31, 3)),
        ((8, 8), (1, 8), Fraction(9)),
    ],
)
def test_the_vanilla_all_gather_receives_so_many_times_more_than_the_plan(train, generation, more):
    layout = GenerationLayout(ParallelLayout(*train, dp=2), *generation)
    ranks, shape = range(layout.training.size), (8, 64)
    parameters = [Parameter("w", shape, 2)]
    held = [[layout.training_region(rank, "w", shape)] for rank in ranks]
    wanted = [[layout.generation_region(rank, "w", shape)] for rank in ranks]
    plan = plan_reshard(parameters, held, wanted, bucket_bytes=4096)
    assert plan.received == lower_bound(parameters, held, wanted)
    replicas = [layout.training_replica(rank) for rank in ranks]
    for gathered in (gathered_bytes(parameters, held, replicas), gathered_bytes(parameters, held)):
        assert {Fraction(much, little) for much, little in zip(gathered, plan.received, strict=True)} == {more}
    assert vanilla_overhead(layout).communication / hybridflow_overhead(layout).communication == more
