"""Transfer protocols: which rows each rank gets, and how outputs come together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.batch import Batch, RowKind, row_ids
from hybridflow.controller.protocols import (
    ALL_TO_ALL,
    DP,
    ONE_TO_ALL,
    THREE_D,
    THREE_D_GROUPS,
    THREE_D_PP_ONLY,
    Parts,
    Protocol,
    broadcast,
    of_all_ranks,
    three_d_all_micro_dp,
)
from hybridflow.errors import BatchError, ConfigError
from hybridflow.layout import Coordinates, ParallelLayout

pytestmark = pytest.mark.unit

SIZES = st.integers(1, 3)
LAYOUTS = st.builds(ParallelLayout, pp=SIZES, tp=SIZES, dp=SIZES, cp=SIZES)
SINGLE = ParallelLayout()


def rows(count: int) -> Batch:
    lengths = [i % 4 for i in range(count)]
    columns = {
        "n": np.arange(count),
        "text": [str(i) for i in range(count)],
        "mine": [np.full(length, i) for i, length in enumerate(lengths)],
    }
    return Batch(columns, row_ids(RowKind.ROLLOUT, 7 * np.arange(count)))


def share(count: int, parts: int, part: int) -> list[int]:
    """Plain arithmetic for consecutive parts, the first ones one longer."""
    size, longer = divmod(count, parts)
    start = part * size + min(part, longer)
    return list(range(start, start + size + (part < longer)))


def doubled(inputs: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]) -> list[Batch]:
    """What workers would answer: a new column for their rows, and their rank as a metric."""
    return [
        Batch({"twice": args[0].array("n") * 2}, args[0].ids, {"rank": float(rank)})
        for rank, (args, _) in enumerate(inputs)
    ]


@given(LAYOUTS, st.integers(0, 7), st.sampled_from([DP, THREE_D]))
def test_rows_are_split_over_dp_and_equal_within_one_dp_coordinate(
    layout: ParallelLayout, count: int, protocol: Protocol
) -> None:
    calls = protocol.distribute(layout, [rows(count), "same"], {"again": rows(count), "flag": 3})
    assert len(calls) == layout.size
    for rank, (args, kwargs) in enumerate(calls):
        expected = share(count, layout.dp, layout.coordinates(rank).dp)
        assert args[0].array("n").tolist() == kwargs["again"].array("n").tolist() == expected
        assert args[1:] == ("same",)
        assert kwargs["flag"] == 3


@given(LAYOUTS, st.lists(st.integers(0, 26), max_size=9), st.sampled_from([DP, THREE_D_GROUPS, THREE_D]))
def test_parts_of_any_size_go_to_their_dp_coordinates_and_come_back_in_their_order(
    layout: ParallelLayout, part_of_row: list[int], protocol: Protocol
) -> None:
    assert protocol.parts is not None
    assert protocol.parts(layout) == layout.dp
    batch = rows(len(part_of_row))
    expected = [[row for row, part in enumerate(part_of_row) if part % layout.dp == dp] for dp in range(layout.dp)]
    calls = protocol.distribute(layout, [Parts([batch.take(part) for part in expected]), "same"], {"again": batch})
    for rank, (args, kwargs) in enumerate(calls):
        dp = layout.coordinates(rank).dp
        assert args[0].array("n").tolist() == expected[dp]
        assert args[1] == "same"
        assert kwargs["again"].array("n").tolist() == share(len(batch), layout.dp, dp)
    result = protocol.collect(layout, doubled(calls))
    assert result.array("twice").tolist() == [2 * row for part in expected for row in part]


@given(LAYOUTS, st.integers(1, 7), st.sampled_from([DP, THREE_D, three_d_all_micro_dp(1, 1)]))
def test_collected_rows_have_the_order_and_identity_of_those_given(
    layout: ParallelLayout, count: int, protocol: Protocol
) -> None:
    batch = rows(count)
    result = protocol.collect(layout, doubled(protocol.distribute(layout, [batch], {})))
    joined = batch | result
    assert joined.array("twice").tolist() == (2 * batch.array("n")).tolist()


@given(LAYOUTS, st.integers(0, 3))
def test_the_output_of_3d_is_of_the_last_stage_and_the_first_shard(layout: ParallelLayout, count: int) -> None:
    outputs = [
        Batch({"rank": np.full(count, rank)}, row_ids(RowKind.ROLLOUT, np.arange(count))) for rank in range(layout.size)
    ]
    taken = [layout.rank(Coordinates(pp=layout.pp - 1, dp=dp, cp=0, tp=0)) for dp in range(layout.dp)]
    expected = [rank for rank in taken for _ in range(count)]
    assert THREE_D.collect(layout, outputs).array("rank").tolist() == expected


@given(LAYOUTS, st.lists(st.integers(0, 2), min_size=3, max_size=3), st.sampled_from([DP, THREE_D]))
def test_one_output_of_each_dp_coordinate_is_taken_whatever_its_size(
    layout: ParallelLayout, sizes: list[int], protocol: Protocol
) -> None:
    def output(rank: int) -> Batch | None:
        at = layout.coordinates(rank)
        if protocol is THREE_D and at.pp < layout.pp - 1:
            return None  # an earlier pipeline stage has no output
        return Batch({"rank": np.full(sizes[at.dp], rank)})

    stage = layout.pp - 1 if protocol is THREE_D else 0
    taken = [layout.rank(Coordinates(pp=stage, dp=dp, cp=0, tp=0)) for dp in range(layout.dp)]
    expected = [rank for dp, rank in enumerate(taken) for _ in range(sizes[dp])]
    result = protocol.collect(layout, [output(rank) for rank in range(layout.size)])
    assert result.array("rank").tolist() == expected


def test_more_ranks_than_rows_leaves_shards_without_rows_but_with_columns() -> None:
    layout = ParallelLayout(dp=4)
    batch = rows(2)
    calls = DP.distribute(layout, [batch], {})
    assert [len(args[0]) for args, _ in calls] == [1, 1, 0, 0]
    assert calls[3][0][0].names == batch.names
    outputs = doubled(calls)
    outputs[3] = Batch({}, calls[3][0][0].ids)  # a worker without rows may name no columns
    assert DP.collect(layout, outputs).array("twice").tolist() == [0, 2]


def test_a_batch_without_rows_comes_back_without_rows() -> None:
    layout = ParallelLayout(dp=2)
    result = DP.collect(layout, doubled(DP.distribute(layout, [rows(0)], {})))
    assert len(result) == 0
    assert result.names == ("twice",)


def test_metrics_are_global_on_every_rank_so_rank_0_speaks() -> None:
    layout = ParallelLayout(dp=2, tp=2)
    assert DP.collect(layout, [{"loss": 1.0}] * 4) == {"loss": 1.0}
    assert THREE_D.collect(ParallelLayout(pp=2), [None, {"loss": 2.0}]) == {"loss": 2.0}


@pytest.mark.parametrize(
    ("training", "generation", "replica_of_rank"),
    [  # the paper's figure 8: training 1-4-2, generation 1-2-2-2; and one with pipeline stages
        (ParallelLayout(tp=4, dp=2), (1, 2), [0, 1, 0, 1, 2, 3, 2, 3]),
        (ParallelLayout(pp=2, tp=2), (1, 1), [0, 1, 2, 3]),
        (ParallelLayout(pp=2, tp=2), (1, 2), [0, 0, 1, 1]),
        (ParallelLayout(pp=2, tp=2), (2, 1), [0, 1, 0, 1]),
    ],
)
def test_micro_dp_splits_rows_over_generation_replicas(
    training: ParallelLayout, generation: tuple[int, int], replica_of_rank: list[int]
) -> None:
    replicas = max(replica_of_rank) + 1
    protocol = three_d_all_micro_dp(*generation)
    calls = protocol.distribute(training, [rows(7)], {})
    for (args, _), replica in zip(calls, replica_of_rank, strict=True):
        assert args[0].array("n").tolist() == share(7, replicas, replica)
    assert protocol.collect(training, doubled(calls)).array("twice").tolist() == [2 * i for i in range(7)]


@given(LAYOUTS, st.integers(0, 7), st.data())
def test_each_generation_replica_gets_its_share_and_its_first_rank_answers(
    layout: ParallelLayout, count: int, data: st.DataObject
) -> None:
    over_pp = data.draw(st.sampled_from([k for k in range(1, layout.pp + 1) if layout.pp % k == 0]))
    over_tp = data.draw(st.sampled_from([k for k in range(1, layout.tp + 1) if layout.tp % k == 0]))
    protocol = three_d_all_micro_dp(layout.pp // over_pp, layout.tp // over_tp)
    replicas = [  # of each training replica: the ranks at strides p / pp and t / tp, and their context-parallel peers
        [
            layout.rank(Coordinates(pp=p, dp=dp, cp=cp, tp=t))
            for p in range(first_p, layout.pp, over_pp)
            for t in range(first_t, layout.tp, over_tp)
            for cp in range(layout.cp)
        ]
        for dp in range(layout.dp)
        for first_p in range(over_pp)
        for first_t in range(over_tp)
    ]
    assert protocol.parts is not None
    assert protocol.parts(layout) == len(replicas)
    calls = protocol.distribute(layout, [rows(count)], {})
    for number, ranks in enumerate(replicas):
        for rank in ranks:
            assert calls[rank][0][0].array("n").tolist() == share(count, len(replicas), number)
    outputs = [Batch({"rank": np.full(len(args[0]), rank)}) for rank, (args, _) in enumerate(calls)]
    expected = [min(ranks) for i, ranks in enumerate(replicas) for _ in share(count, len(replicas), i)]
    assert protocol.collect(layout, outputs).array("rank").tolist() == expected


@given(SIZES, SIZES, SIZES, st.data())
def test_a_generation_replica_is_one_whole_model_whose_shards_contain_the_training_shards(
    pp: int, tp: int, dp: int, data: st.DataObject
) -> None:
    layout = ParallelLayout(pp=pp, tp=tp, dp=dp)
    gen_tp = data.draw(st.sampled_from([k for k in range(1, tp + 1) if tp % k == 0]))
    gen_pp = data.draw(st.sampled_from([k for k in range(1, pp + 1) if pp % k == 0]))
    replicas = dp * (pp * tp) // (gen_pp * gen_tp)
    calls = three_d_all_micro_dp(gen_pp, gen_tp).distribute(layout, [rows(replicas)], {})
    places: dict[int, list[tuple[int, int]]] = {}
    for rank, (args, _) in enumerate(calls):
        at = layout.coordinates(rank)
        shard = math.floor(at.pp / (pp / gen_pp)), math.floor(at.tp / (tp / gen_tp))  # that holds the rank's own
        places.setdefault(args[0].array("n").item(), []).append(shard)
    whole = sorted((p, t) for p in range(gen_pp) for t in range(gen_tp))
    assert all(sorted(shards) == whole for shards in places.values())
    assert sorted(places) == list(range(replicas))


def test_a_generation_layout_that_does_not_divide_the_training_layout_is_refused() -> None:
    with pytest.raises(ConfigError, match="generation pp=1, tp=3 does not divide training pp=1, tp=4"):
        three_d_all_micro_dp(1, 3).distribute(ParallelLayout(tp=4), [], {})


@given(LAYOUTS)
def test_one_to_all_gives_every_rank_everything_and_takes_one_value(layout: ParallelLayout) -> None:
    batch = rows(3)
    calls = ONE_TO_ALL.distribute(layout, [batch], {"x": 1})
    assert calls == [((batch,), {"x": 1})] * layout.size
    assert ONE_TO_ALL.collect(layout, list(range(layout.size))) == 0


def test_pp_only_gives_every_rank_everything_and_chains_the_stages() -> None:
    layout = ParallelLayout(pp=2, dp=2, tp=2)
    batch = rows(3)
    assert THREE_D_PP_ONLY.distribute(layout, [batch], {"x": 1}) == [((batch,), {"x": 1})] * 8
    names = [[f"layer.{layout.coordinates(rank).pp}", f"rank {rank}"] for rank in range(8)]
    assert THREE_D_PP_ONLY.collect(layout, names) == ["layer.0", "rank 0", "layer.1", "rank 4"]


@given(LAYOUTS, st.lists(st.integers(0, 3), min_size=3, max_size=3))
def test_pp_only_chains_the_lists_of_the_stages_whatever_their_length(
    layout: ParallelLayout, lengths: list[int]
) -> None:
    outputs = [[(rank, i) for i in range(lengths[layout.coordinates(rank).pp])] for rank in range(layout.size)]
    first = [layout.rank(Coordinates(pp=pp, dp=0, cp=0, tp=0)) for pp in range(layout.pp)]
    expected = [(rank, i) for pp, rank in enumerate(first) for i in range(lengths[pp])]
    assert THREE_D_PP_ONLY.collect(layout, outputs) == expected


@given(LAYOUTS, st.data())
def test_all_to_all_hands_each_rank_its_own_rows_and_brings_back_each_answer(
    layout: ParallelLayout, data: st.DataObject
) -> None:
    counts = data.draw(st.lists(st.integers(0, 3), min_size=layout.size, max_size=layout.size))
    calls = ALL_TO_ALL.distribute(layout, [[rows(count) for count in counts]], {"count": tuple(counts)})
    assert [(len(args[0]), kwargs) for args, kwargs in calls] == [(count, {"count": count}) for count in counts]
    answers = ALL_TO_ALL.collect(layout, [args[0] for args, _ in calls])
    assert [len(answer) for answer in answers] == counts


def test_all_to_all_takes_one_value_a_rank_in_and_out() -> None:
    layout = ParallelLayout(dp=2)
    assert ALL_TO_ALL.distribute(layout, [["a", "b"]], {"x": (1, 2)}) == [(("a",), {"x": 1}), (("b",), {"x": 2})]
    assert ALL_TO_ALL.collect(layout, [rows(1), None])[1] is None
    with pytest.raises(BatchError, match="argument 'x' should be a list of 2 values, one for each rank"):
        ALL_TO_ALL.distribute(layout, [], {"x": [1]})
    with pytest.raises(BatchError, match="argument 0 should be a list of 2 values"):
        ALL_TO_ALL.distribute(layout, [rows(2)], {})


@pytest.mark.parametrize("protocol", [ONE_TO_ALL, DP, THREE_D, three_d_all_micro_dp(1, 1)])
def test_one_rank_gets_the_call_as_it_was_written(protocol: Protocol) -> None:
    batch = rows(3)
    [(args, kwargs)] = protocol.distribute(SINGLE, [batch, 1], {"x": batch})
    assert args[0].array("n").tolist() == kwargs["x"].array("n").tolist() == [0, 1, 2]
    assert protocol.collect(SINGLE, [{"a": 1.0}]) == {"a": 1.0}


def test_a_protocol_of_ones_own_is_a_pair_of_functions() -> None:
    def first_rank_only(layout: ParallelLayout, args: Any, kwargs: Any) -> Any:
        return [(tuple(args), dict(kwargs)) if rank == 0 else ((), {}) for rank in range(layout.size)]

    mine = Protocol("FIRST", first_rank_only, of_all_ranks)
    assert mine.distribute(ParallelLayout(dp=2), [1], {}) == [((1,), {}), ((), {})]
    assert Protocol("EVERY", broadcast, of_all_ranks).collect(ParallelLayout(dp=2), [1, 2]) == [1, 2]
