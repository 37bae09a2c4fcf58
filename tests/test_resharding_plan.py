"""ReshardPlan against an oracle of boolean masks, one entry per element."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.errors import ConfigError, EngineError
from hybridflow.resharding import Parameter, Region, ReshardPlan, gathered_bytes, lower_bound, plan_reshard

pytestmark = pytest.mark.unit

UNTOUCHED = -1
Sides = list[list[Region]]


@dataclass(frozen=True)
class Case:
    parameters: list[Parameter]
    held: Sides
    wanted: Sides
    bucket_bytes: int
    nodes: list[int]

    def plan(self) -> ReshardPlan:
        return plan_reshard(self.parameters, self.held, self.wanted, bucket_bytes=self.bucket_bytes, nodes=self.nodes)


# ---- layouts to draw
def slab(name: str, shape: Sequence[int], dim: int, start: int, stop: int) -> Region:
    return Region(name, tuple((start, stop) if axis == dim else (0, n) for axis, n in enumerate(shape)))


def fsdp(draw, name, shape, ranks):
    """Rows in equal chunks, the last ones short or empty."""
    if not shape:
        return replicated(draw, name, shape, ranks)
    rows = -(-shape[0] // ranks)
    return [[slab(name, shape, 0, min(r * rows, shape[0]), min((r + 1) * rows, shape[0]))] for r in range(ranks)]


def uneven(draw, name, shape, ranks):
    """Rows cut anywhere."""
    if not shape:
        return replicated(draw, name, shape, ranks)
    cuts = sorted(draw(st.lists(st.integers(0, shape[0]), min_size=ranks - 1, max_size=ranks - 1)))
    edges = [0, *cuts, shape[0]]
    return [[slab(name, shape, 0, edges[r], edges[r + 1])] for r in range(ranks)]


def tensor_parallel(draw, name, shape, ranks):
    """Equal parts of either dimension, the last one padded; more ranks than parts hold replicas."""
    if not shape:
        return replicated(draw, name, shape, ranks)
    dim, parts = draw(st.integers(0, len(shape) - 1)), draw(st.integers(1, ranks))
    width = -(-shape[dim] // parts)
    return [[slab(name, shape, dim, r % parts * width, (r % parts + 1) * width)] for r in range(ranks)]


def pipeline(draw, name, shape, ranks):
    """Whole, on some ranks."""
    stage = draw(st.sets(st.integers(0, ranks - 1), min_size=1))
    return [[Region.whole(name, shape)] if r in stage else [] for r in range(ranks)]


def replicated(draw, name, shape, ranks):
    return [[Region.whole(name, shape)] for _ in range(ranks)]


def boxes(draw, name, shape, ranks):
    """Anything: overlapping, empty, sticking out."""
    intervals = st.tuples(*(st.tuples(st.integers(0, n + 2), st.integers(0, n + 2)).map(sorted) for n in shape))
    region = intervals.map(lambda bounds: Region(name, tuple((start, stop) for start, stop in bounds)))
    return [draw(st.lists(region, max_size=3)) for _ in range(ranks)]


def whole_somewhere(draw, name, shape, ranks):
    """Anything, and all of it on one rank."""
    held = boxes(draw, name, shape, ranks)
    held[draw(st.integers(0, ranks - 1))].append(Region.whole(name, shape))
    return held


TRAINING = (fsdp, uneven, tensor_parallel, pipeline, replicated, whole_somewhere)
GENERATION = (tensor_parallel, pipeline, replicated, boxes)


@st.composite
def cases(draw) -> Case:
    ranks = draw(st.integers(2, 6))
    parameters: list[Parameter] = []
    held: Sides = [[] for _ in range(ranks)]
    wanted: Sides = [[] for _ in range(ranks)]

    def add(side: Sides, kinds: Sequence[Callable[..., Sides]], name: str, shape: tuple[int, ...]) -> None:
        for regions, more in zip(side, draw(st.sampled_from(kinds))(draw, name, shape, ranks), strict=True):
            regions += more

    for number in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(st.integers(1, 8), max_size=3) | st.just([0, 3])))
        names = [f"p{number}", f"tied{number}"][: draw(st.integers(1, 2))]
        parameters.append(Parameter(names[0], shape, draw(st.sampled_from([2, 4])), tuple(names[1:])))
        add(held, TRAINING, draw(st.sampled_from(names)), shape)
        for name in names:
            add(wanted, GENERATION, name, shape)
    bucket_bytes = draw(st.sampled_from([4, 10, 64, 1 << 20]))
    nodes = draw(st.lists(st.integers(0, 1), min_size=ranks, max_size=ranks))
    return Case(parameters, held, wanted, bucket_bytes, nodes)


# ---- the oracle
def index(region: Region) -> tuple[slice, ...]:
    """In an array of the whole parameter; numpy leaves out what sticks out of it."""
    return tuple(slice(start, stop) for start, stop in region.bounds)


def mask(parameter: Parameter, regions: Sequence[Region]) -> np.ndarray:
    """bool, of the parameter's shape: the elements in any of the regions that bear one of its names."""
    inside = np.zeros(parameter.shape, bool)
    for region in regions:
        if region.name in (parameter.name, *parameter.aliases):
            inside[index(region)] = True
    return inside


def missing_bytes(case: Case, rank: int) -> int:
    return sum(
        int((mask(p, case.wanted[rank]) & ~mask(p, case.held[rank])).sum()) * p.itemsize for p in case.parameters
    )


# ---- properties
@settings(max_examples=600)
@given(cases())
def test_every_wanted_element_comes_once_from_its_own_rank_or_from_a_holder_and_bytes_are_the_lower_bound(case):
    plan = case.plan()
    ranks = range(len(case.held))
    for parameter in case.parameters:
        holds = [mask(parameter, case.held[rank]) for rank in ranks]
        wants = [mask(parameter, case.wanted[rank]) for rank in ranks]
        comes, copied = (np.zeros((len(ranks), *parameter.shape), int) for _ in range(2))
        for bucket in plan.buckets:
            for at in (index(region) for region in bucket.regions if region.name == parameter.name):
                comes[bucket.target, *at] += 1
                assert holds[bucket.source][at].all()
        for rank in ranks:
            for at in (index(region) for region in plan.copies[rank] if region.name == parameter.name):
                copied[rank, *at] += 1
            assert np.array_equal(comes[rank], wants[rank] & ~holds[rank])
            assert np.array_equal(copied[rank], wants[rank] & holds[rank])
    bound = tuple(missing_bytes(case, rank) for rank in ranks)
    assert plan.received == bound == lower_bound(case.parameters, case.held, case.wanted)
    assert sum(plan.sent) == sum(bound)


@settings(max_examples=400)
@given(cases(), st.integers(0, 2**32 - 1))
def test_a_run_of_the_plan_gives_each_rank_its_wanted_regions_and_leaves_padding_alone(case, seed):
    random = np.random.default_rng(seed)
    by_name = {name: p for p in case.parameters for name in (p.name, *p.aliases)}
    whole = {p.name: random.integers(0, 1 << 14, p.shape).astype(f"i{p.itemsize}") for p in case.parameters}

    def blank(region: Region) -> np.ndarray:
        return np.full(region.shape, UNTOUCHED, f"i{by_name[region.name].itemsize}")

    def filled(region: Region) -> np.ndarray:
        array, source = blank(region), whole[by_name[region.name].name]
        part = source[index(region)]
        array[tuple(slice(0, n) for n in part.shape)] = part
        return array

    plan = case.plan()
    memory = [{region: filled(region) for region in regions} for regions in plan.held]
    engine = [{region: blank(region) for region in regions} for regions in plan.wanted]

    def read(rank: int, region: Region) -> np.ndarray:
        origin = plan.origin(rank, region)
        return memory[rank][origin][region.within(origin)]

    def write(rank: int, region: Region, values: np.ndarray) -> None:
        places = plan.destinations(rank, region)
        assert places
        for place in places:
            engine[rank][place][region.within(place)] = values

    for rank, regions in enumerate(plan.copies):
        for region in regions:
            write(rank, region, read(rank, region))
    for bucket in plan.buckets:
        message = b"".join(read(bucket.source, region).tobytes() for region in bucket.regions)
        assert len(message) == bucket.nbytes
        for region in bucket.regions:
            dtype = whole[region.name].dtype
            taken, message = message[: region.size * dtype.itemsize], message[region.size * dtype.itemsize :]
            write(bucket.target, region, np.frombuffer(taken, dtype).reshape(region.shape))
    for rank, regions in enumerate(case.wanted):
        assert set(engine[rank]) == set(regions)
        for region in regions:
            assert np.array_equal(engine[rank][region], filled(region))


@settings(max_examples=150)
@given(cases(), st.randoms(use_true_random=False))
def test_the_plan_and_its_digest_do_not_depend_on_the_order_of_the_input(case, random):
    def shuffled(items: Sequence) -> list:
        return random.sample(list(items), len(items))

    other = Case(
        shuffled(case.parameters),
        [shuffled(regions) for regions in case.held],
        [shuffled(regions) for regions in case.wanted],
        case.bucket_bytes,
        case.nodes,
    )
    assert other.plan() == case.plan() and other.plan().digest == case.plan().digest


@settings(max_examples=150)
@given(cases())
def test_steps_stay_within_the_bucket_and_all_lists_follow_the_order_of_regions(case):
    plan = case.plan()
    names: list[str] = []
    for step in plan.steps:
        assert step
        staged = [0] * len(case.held)
        for bucket in step:
            assert bucket.source != bucket.target and list(bucket.regions) == sorted(bucket.regions)
            for rank in (bucket.source, bucket.target):
                staged[rank] += bucket.nbytes
        assert max(staged) <= case.bucket_bytes
        assert [(b.source, b.target) for b in step] == sorted({(b.source, b.target) for b in step})
        names += sorted({region.name for bucket in step for region in bucket.regions})
    assert names == sorted(names)
    assert all(list(regions) == sorted(regions) for regions in plan.copies)


@settings(max_examples=100)
@given(cases())
def test_a_gather_receives_what_the_group_holds_and_the_rank_does_not(case):
    ranks = range(len(case.held))
    pairs = [sorted({rank, rank ^ 1} & set(ranks)) for rank in ranks]
    for groups, given_groups in ((pairs, pairs), ([ranks] * len(ranks), None)):
        expected = tuple(
            sum(
                int((mask(p, [x for peer in groups[r] for x in case.held[peer]]) & ~mask(p, case.held[r])).sum())
                * p.itemsize
                for p in case.parameters
            )
            for r in ranks
        )
        assert gathered_bytes(case.parameters, case.held, given_groups) == expected


# ---- examples
WEIGHT = Parameter("w", (8, 4), 4)
WHOLE = Region.whole("w", (8, 4))


def test_replicas_share_the_sending_and_the_own_node_comes_first():
    held, wanted = [[WHOLE]] * 4 + [[]] * 4, [[]] * 4 + [[WHOLE]] * 4
    assert plan_reshard([WEIGHT], held, wanted, bucket_bytes=1 << 20).sent == (128,) * 4 + (0,) * 4
    plan = plan_reshard([WEIGHT], held, wanted, bucket_bytes=1 << 20, nodes=[0, 0, 0, 1, 1, 0, 0, 0])
    assert [bucket.source for bucket in plan.buckets if bucket.target == 4] == [3]
    assert plan.sent[:4] == (128, 128, 128, 128)


def test_all_ranks_send_and_receive_in_the_same_step():
    held = [[Region("w", ((2 * rank, 2 * rank + 2), (0, 4)))] for rank in range(4)]
    plan = plan_reshard([WEIGHT], held, [[WHOLE]] * 4, bucket_bytes=64)
    assert [sorted(bucket.source for bucket in step) for step in plan.steps] == [[0, 1, 2, 3]] * 3


def test_small_parameters_share_a_message():
    parameters = [Parameter(f"p{i}", (3,), 4) for i in range(50)]
    regions = [Region.whole(parameter.name, parameter.shape) for parameter in parameters]
    plan = plan_reshard(parameters, [regions, []], [[], regions], bucket_bytes=1 << 20)
    assert [(b.source, b.target, len(b.regions), b.nbytes) for b in plan.buckets] == [(0, 1, 50, 600)]


def test_a_tied_weight_travels_once_and_is_written_under_both_names():
    tied = Parameter("embed", (4, 2), 2, aliases=("lm_head",))
    both = [Region.whole("embed", (4, 2)), Region.whole("lm_head", (4, 2))]
    plan = plan_reshard([tied], [[both[0]], []], [[], both], bucket_bytes=64)
    assert plan.received == (0, 16)
    assert plan.destinations(1, both[0]) == tuple(both)


def test_nothing_travels_when_every_rank_holds_what_it_wants():
    plan = plan_reshard([WEIGHT], [[WHOLE]] * 2, [[WHOLE]] * 2, bucket_bytes=64)
    assert plan.steps == () and plan.received == (0, 0)
    assert sum(region.size for region in plan.copies[0]) == WHOLE.size


def test_the_digest_tells_plans_apart():
    def digest(**changes) -> str:
        sides = {"held": [[WHOLE], []], "wanted": [[], [WHOLE]], "bucket_bytes": 128, **changes}
        return plan_reshard([WEIGHT], **sides).digest

    others = [digest(bucket_bytes=64), digest(held=[[WHOLE], [WHOLE]]), digest(wanted=[[WHOLE], []])]
    assert len({digest(), *others}) == 4


# ---- errors
def test_a_region_that_nobody_holds_is_named_with_the_ranks_that_want_it():
    upper = Region("w", ((0, 4), (0, 4)))
    with pytest.raises(EngineError, match=r"w\[4:8, 0:4\] is wanted by ranks 1, 2 and held by no rank"):
        plan_reshard([WEIGHT], [[upper]] * 3, [[upper], [WHOLE], [WHOLE]], bucket_bytes=1024)


def test_a_wanted_parameter_that_is_not_trained_is_named_with_the_ranks_that_want_it():
    extra = Region.whole("rotary", (4,))
    with pytest.raises(EngineError, match="rotary is wanted by ranks 0, 2"):
        plan_reshard([WEIGHT], [[WHOLE]] * 3, [[extra], [WHOLE], [extra]], bucket_bytes=1024)


def test_a_region_of_another_number_of_dimensions_is_refused():
    with pytest.raises(EngineError, match=r"w\[0:8\], held by rank 1, does not fit the shape \(8, 4\)"):
        plan_reshard([WEIGHT], [[WHOLE], [Region("w", ((0, 8),))]], [[], []], bucket_bytes=1024)


def test_a_name_given_twice_is_refused():
    with pytest.raises(EngineError, match="two parameters are called w"):
        plan_reshard([WEIGHT, Parameter("v", (1,), 4, aliases=("w",))], [[]], [[]], bucket_bytes=1024)


def test_a_bucket_smaller_than_an_element_is_refused():
    with pytest.raises(ConfigError, match="bucket_bytes=3 holds no element; it is at least 4"):
        plan_reshard([WEIGHT], [[]], [[]], bucket_bytes=3)


def test_sides_of_different_numbers_of_ranks_are_refused():
    with pytest.raises(ValueError, match="held lists 1 ranks and wanted 2"):
        plan_reshard([WEIGHT], [[]], [[], []], bucket_bytes=64)


# ---- regions
def test_regions_are_ordered_by_name_then_position():
    rows = [Region("b", ((0, 2),)), Region("a", ((4, 6),)), Region("a", ((0, 4),))]
    assert sorted(rows) == rows[::-1]


def test_a_region_is_indexed_relative_to_the_one_around_it():
    inner, outer = Region.at("w", (3, 1), (2, 2)), Region.at("w", (2, 0), (4, 3))
    assert inner.within(outer) == (slice(1, 3), slice(1, 3))
    assert inner.intersection(outer) == inner and inner.shape == (2, 2) and inner.size == 4
    with pytest.raises(ValueError, match="not inside"):
        outer.within(inner)


@pytest.mark.parametrize("bounds", [((-1, 2),), ((3, 2),)])
def test_a_region_with_impossible_bounds_is_refused(bounds):
    with pytest.raises(ValueError, match="0 <= start <= stop"):
        Region("w", bounds)
