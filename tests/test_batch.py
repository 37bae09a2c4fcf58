"""Batch: rows with an identity, in columns without padding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.batch import Batch, RowKind, concat, row_ids
from hybridflow.columns import Ragged
from hybridflow.controller.batch_ref import BatchRef
from hybridflow.errors import BatchError

pytestmark = pytest.mark.unit

Row = dict[str, Any]


def rollouts(responses: list[list[int]], first_id: int = 0, per_group: int = 2) -> Batch:
    """A batch of rollouts with these response tokens, and every kind of column."""
    n = len(responses)
    tokens = Ragged.from_rows(responses, np.int64)
    columns = {
        "prompt_ids": Ragged.from_rows([[i] * (i % 3 + 1) for i in range(n)], np.int64),
        "response_ids": tokens,
        "response_mask": tokens.with_values(tokens.values % 2 == 0),
        "old_logprobs": Ragged(-tokens.values.astype(np.float32), tokens.offsets.copy()),
        "group_id": np.arange(n) // per_group,
        "rollout_id": np.arange(n),
        "keep": np.arange(n) % 3 > 0,
        "answer": [str(i) for i in range(n)],
    }
    return Batch(columns, row_ids(RowKind.ROLLOUT, first_id + np.arange(n)))


def rows_of(batch: Batch) -> list[Row]:
    """The batch as plain Python rows: the oracle for everything that selects or orders rows."""
    ids = [None] * len(batch) if batch.ids is None else batch.ids.tolist()
    plain = {name: [_plain(value) for value in batch.column(name)] for name in batch.names}
    return [{"id": ids[i], **{name: values[i] for name, values in plain.items()}} for i in range(len(batch))]


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value


RESPONSES = st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=7)
BATCHES = RESPONSES.map(rollouts)


# ---- rows
@given(BATCHES, st.data())
def test_take_is_list_indexing_and_rows_keep_their_identity(batch: Batch, data: st.DataObject) -> None:
    index = data.draw(st.lists(st.integers(-len(batch), len(batch) - 1)))
    rows = rows_of(batch)
    assert rows_of(batch.take(index)) == [rows[i] for i in index]


@given(BATCHES, st.slices(7))
def test_take_by_slice_is_list_slicing(batch: Batch, part: slice) -> None:
    assert rows_of(batch.take(part)) == rows_of(batch)[part]


@given(BATCHES)
def test_kept_rows_are_those_with_keep(batch: Batch) -> None:
    assert rows_of(batch.kept()) == [row for row in rows_of(batch) if row["keep"]]
    assert rows_of(batch.take(batch.array("keep"))) == rows_of(batch.kept())
    assert batch.drop("keep").kept().names == batch.drop("keep").names


@given(BATCHES, st.integers(1, 9))
def test_split_and_concat_are_inverse_with_sizes_within_one(batch: Batch, k: int) -> None:
    parts = batch.split(k)
    assert rows_of(concat(parts)) == rows_of(batch)
    assert len(parts) == k
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(st.lists(RESPONSES, min_size=1, max_size=3))
def test_concat_appends_the_rows_of_all_batches(parts: list[list[list[int]]]) -> None:
    batches = [rollouts(part, first_id=10 * i) for i, part in enumerate(parts)]
    assert rows_of(concat(batches)) == [row for batch in batches for row in rows_of(batch)]


def test_concat_names_the_columns_that_some_batches_lack() -> None:
    batch = rollouts([[1], [2]])
    with pytest.raises(BatchError, match=r"only some batches have \['answer', 'keep'\]"):
        concat([batch, batch.drop("answer"), batch.drop("keep")])
    with pytest.raises(BatchError, match="at least one batch"):
        concat([])


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([0, 2], "row 2 of 2 rows"),
        ([-3], "row -3 of 2 rows"),
        (np.array([True]), "a mask of 1 values for 2 rows"),
        ([0.0, 1.0], "not by float64 values"),
    ],
)
def test_rows_that_are_not_there_are_named(rows: Any, said: str) -> None:
    with pytest.raises(BatchError, match=said):
        rollouts([[1], [2]]).take(rows)


def test_pick_takes_the_rows_a_function_of_dense_columns_returns() -> None:
    batch = rollouts([[1], [2], [3], [4]])

    def last_of_each(group_id: Any, *, group: int) -> Any:
        return np.flatnonzero(group_id == group)[-1:]

    assert batch.pick(last_of_each, group=1).array("rollout_id").tolist() == [3]


# ---- minibatches
@given(RESPONSES, st.integers(1, 4), st.integers(1, 3), st.integers(0, 5), st.data())
def test_minibatches_cover_all_rows_once_an_epoch_with_whole_rollouts(
    responses: list[list[int]], count: int, epochs: int, seed: int, data: st.DataObject
) -> None:
    batch = rollouts(responses)
    owner = data.draw(st.lists(st.integers(0, 3), min_size=len(batch), max_size=len(batch)))
    batch = batch.drop("rollout_id") | Batch({"rollout_id": owner}, batch.ids)
    parts = list(batch.minibatches(count, epochs, seed))
    assert len(parts) == count * epochs
    for epoch in range(epochs):
        of_epoch = parts[epoch * count : (epoch + 1) * count]
        ids = np.concatenate([part.ids for part in of_epoch])
        assert sorted(ids) == sorted(batch.ids)
        held = [set(part.array("rollout_id").tolist()) for part in of_epoch]
        assert sum(map(len, held)) == len(set(owner)), "a rollout is split over two minibatches"
        assert max(map(len, held)) - min(map(len, held)) <= 1


def test_minibatches_repeat_with_their_seed_and_differ_between_epochs_and_seeds() -> None:
    batch = rollouts([[i] for i in range(16)])

    def orders(seed: int | list[int]) -> list[list[int]]:
        return [part.array("rollout_id").tolist() for part in batch.minibatches(2, 2, seed)]

    assert orders([0, 3]) == orders([0, 3])
    assert orders(0)[:2] != orders(0)[2:]
    assert orders([0, 3]) != orders([0, 4])


def test_minibatches_of_groups_keep_groups_whole_and_without_the_column_a_row_is_the_unit() -> None:
    batch = rollouts([[i] for i in range(6)], per_group=2)
    by_group = [part.array("group_id").tolist() for part in batch.minibatches(3, unit="group_id")]
    assert sorted(by_group) == [[0, 0], [1, 1], [2, 2]]
    assert [len(part) for part in batch.drop("rollout_id").minibatches(3)] == [2, 2, 2]


# ---- columns
@given(BATCHES)
def test_or_joins_the_columns_of_the_same_rows(batch: Batch) -> None:
    left, right = batch.select("prompt_ids", "group_id"), batch.drop("prompt_ids", "group_id")
    assert rows_of(left | right) == [{name: row[name] for name in row} for row in rows_of(batch)]
    assert rows_of(right | left) == rows_of(left | right)


@given(BATCHES, st.data())
def test_or_never_joins_by_position(batch: Batch, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(batch))))
    other = Batch({"reward": np.arange(len(batch))}, batch.ids).take(list(order))
    if list(order) == sorted(order):
        assert "reward" in (batch | other)
        return
    with pytest.raises(BatchError, match="the order differs"):
        _ = batch | other


def test_or_of_other_rows_says_how_many_are_missing_and_what_to_do() -> None:
    batch = rollouts([[1], [2], [3]])
    reward = Batch({"reward": np.zeros(3)}, batch.ids)
    with pytest.raises(BatchError, match=r"left has 3, right 2; 1 rows of the left .*left\.kept\(\)"):
        _ = batch | reward.kept().take([0, 1])
    assert "reward" in (batch.kept() | reward.take(batch.array("keep")))


def test_or_of_rows_of_the_same_number_but_another_kind_is_an_error() -> None:
    prompts = Batch({"prompt": ["a"]}, row_ids(RowKind.PROMPT, np.array([0])))
    rows = Batch({"reward": [1.0]}, row_ids(RowKind.ROLLOUT, np.array([0])))
    with pytest.raises(BatchError, match="1 rows of the left are not in the right"):
        _ = prompts | rows


def test_or_with_rows_that_have_no_identity_is_an_error_unless_neither_side_has() -> None:
    batch = rollouts([[1], [2]])
    with pytest.raises(BatchError, match=r"those of the right have no ids: make it as Batch\(columns, other.ids\)"):
        _ = batch | Batch({"reward": [0.0, 1.0]})
    assert (Batch({"a": [1]}) | Batch({"b": [2]})).names == ("a", "b")
    with pytest.raises(BatchError, match="left has 1, right 2"):
        _ = Batch({"a": [1]}) | Batch({"b": [2, 3]})


def test_a_column_on_both_sides_is_an_error_except_keep_and_drop_reason() -> None:
    ids = row_ids(RowKind.ROLLOUT, np.arange(4))
    left = Batch({"keep": [1, 1, 0, 0], "drop_reason": [None, None, "slow", "slow"], "x": [0, 0, 0, 0]}, ids)
    right = Batch({"keep": [1, 0, 1, 0], "drop_reason": [None, "wrong", None, "wrong"]}, ids)
    both = left | right
    assert both.array("keep").tolist() == [True, False, False, False]
    assert both.array("drop_reason").tolist() == [None, "wrong", "slow", "slow"]
    with pytest.raises(BatchError, match=r"would overwrite \['x'\]: rename or drop one side"):
        _ = left | left


def test_a_switched_off_role_answers_with_no_columns_and_changes_nothing() -> None:
    batch = rollouts([[1], [2]])
    assert rows_of(batch | Batch({}, batch.ids)) == rows_of(batch)
    assert rows_of(Batch({}) | batch) == rows_of(batch)
    assert len(Batch({}, batch.ids)) == 2


def test_metrics_ride_along_with_or_and_stay_behind_with_a_selection() -> None:
    batch = rollouts([[1], [2]])
    joined = batch.with_metrics({"a": 1.0, "b": 1.0}) | Batch({}, batch.ids, {"b": 2.0})
    assert joined.metrics == {"a": 1.0, "b": 2.0}
    assert joined.select("keep").metrics == joined.metrics
    assert joined.take([0]).metrics == {}


def test_rename_moves_a_column_in_its_place_and_swaps_two() -> None:
    batch = rollouts([[1], [2, 3]])
    renamed = batch.rename(rollout_logprobs="old_logprobs")
    assert renamed.names == tuple("rollout_logprobs" if n == "old_logprobs" else n for n in batch.names)
    swapped = batch.rename(group_id="rollout_id", rollout_id="group_id")
    assert swapped.array("group_id").tolist() == batch.array("rollout_id").tolist()


def test_rename_checks_the_new_name() -> None:
    batch = rollouts([[1], [2, 3]])
    with pytest.raises(BatchError, match="there is a column 'keep' already"):
        batch.rename(keep="answer")
    with pytest.raises(BatchError, match="no column 'nothing'"):
        batch.rename(x="nothing")
    with pytest.raises(BatchError, match="column 'reward' should be dense float32"):
        batch.rename(reward="answer")
    with pytest.raises(BatchError, match="column 'ref_logprobs' has 2 values in row 1, where response_ids has 1"):
        (batch.drop("response_ids", "response_mask", "old_logprobs") | _ragged_of(batch)).rename(ref_logprobs="mine")


def _ragged_of(batch: Batch) -> Batch:
    tokens = Ragged.from_rows([[1], [2]])
    return Batch({"response_ids": tokens, "mine": Ragged.from_rows([[1.0], [2.0, 3.0]])}, batch.ids)


def test_a_column_that_is_not_there_is_named_with_those_that_are_and_the_remedy() -> None:
    batch = rollouts([[1]]).select("keep")
    with pytest.raises(BatchError, match=r"no column 'ref_logprobs'; the batch has \['keep'\]. Call ref.log_probs"):
        batch.column("ref_logprobs")
    with pytest.raises(BatchError, match="column 'keep' has one value a row; a ragged column was asked for"):
        batch.ragged("keep")
    with pytest.raises(BatchError, match="column 'response_ids' is ragged"):
        rollouts([[1]]).array("response_ids")


def test_columns_of_different_length_are_refused() -> None:
    with pytest.raises(BatchError, match=r"columns of different length: {'a': 2, 'b': 1}"):
        Batch({"a": [1, 2], "b": [1]})
    with pytest.raises(BatchError, match=r"columns of different length: {'a': 2, 'row ids': 1}"):
        Batch({"a": [1, 2]}, row_ids(RowKind.PROMPT, np.arange(1)))


def test_case_12_a_mask_longer_than_the_ids_names_column_and_row() -> None:
    tokens = Ragged.from_rows([[5, 6], [7], [8, 9]])
    mask = Ragged.from_rows([[1, 1], [1], [1, 1, 1]])
    said = "column 'response_mask' has 3 values in row 2, where response_ids has 2 tokens: one value a token"
    with pytest.raises(BatchError, match=said):
        Batch({"response_ids": tokens, "response_mask": mask})
    ids = row_ids(RowKind.ROLLOUT, np.arange(3))
    with pytest.raises(BatchError, match=said):
        _ = Batch({"response_ids": tokens}, ids) | Batch({"response_mask": mask}, ids)


# ---- join
@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=8),
    st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=6, unique_by=lambda row: row[0]),
)
def test_join_brings_each_row_the_value_of_its_key(keys: list[int], others: list[tuple[int, bool]]) -> None:
    batch = Batch({"group_id": keys}, row_ids(RowKind.ROLLOUT, np.arange(len(keys))))
    other = Batch(
        {
            "group_id": np.array([key for key, _ in others], np.int64),
            "keep": np.array([keep for _, keep in others], bool),
            "reward": np.array([10.0 + key for key, _ in others]),
            "answer": [f"of {key}" for key, _ in others],
        }
    )
    joined = batch.join(other, on="group_id", baseline="reward", theirs="answer")
    known = {key for key, keep in others if keep}
    assert joined.array("keep").tolist() == [key in known for key in keys]
    assert joined.array("baseline").tolist() == [10.0 + key if key in known else 0.0 for key in keys]
    assert joined.array("theirs").tolist() == [f"of {key}" if key in known else None for key in keys]
    assert (joined.ids == batch.ids).all()


def test_join_refuses_a_key_with_several_kept_rows() -> None:
    batch = Batch({"group_id": [0, 1]})
    other = Batch({"group_id": [1, 1], "reward": [0.0, 1.0]})
    with pytest.raises(BatchError, match="several kept rows for one group_id; pick one first"):
        batch.join(other, on="group_id", baseline="reward")
    kept = other | Batch({"keep": [0, 1]})
    assert batch.join(kept, on="group_id", baseline="reward").array("baseline").tolist() == [0.0, 1.0]


# ---- map
@given(BATCHES)
def test_map_gives_flat_tokens_and_takes_back_one_value_a_token_or_a_row(batch: Batch) -> None:
    def of_tokens(old_logprobs: Any, row_of_token: Any, lengths: Any, group_id: Any) -> dict[str, Any]:
        assert len(old_logprobs) == len(row_of_token) == lengths.sum()
        return {"advantages": old_logprobs * group_id[row_of_token], "count": lengths}

    out = batch.map(of_tokens)
    expected = [[t * row["group_id"] for t in row["old_logprobs"]] for row in rows_of(batch)]
    assert [row["advantages"] for row in rows_of(out)] == expected
    assert out.array("count").tolist() == [len(row["response_ids"]) for row in rows_of(batch)]
    assert rows_of(batch | out)


def test_map_spreads_one_value_a_row_over_the_tokens_of_a_per_token_column() -> None:
    batch = rollouts([[1, 2], [3], [], [4, 5]])
    out = batch.map(lambda group_id: group_id + 0.5, to="advantages")
    assert [row["advantages"] for row in rows_of(out)] == [[0.5, 0.5], [0.5], [], [1.5, 1.5]]


def test_map_with_as_many_tokens_as_rows_goes_by_what_the_function_reads() -> None:
    batch = rollouts([[5, 6], [7], []])
    of_rows = batch.map(lambda rollout_id: rollout_id, to="advantages")
    of_tokens = batch.map(lambda rollout_id, old_logprobs: old_logprobs, to="advantages")
    assert [row["advantages"] for row in rows_of(of_rows)] == [[0.0, 0.0], [1.0], []]
    assert [row["advantages"] for row in rows_of(of_tokens)] == [[-5.0, -6.0], [-7.0], []]


def test_map_names_the_column_after_the_function_and_passes_options() -> None:
    def doubled(group_id: Any, *, factor: int = 2) -> Any:
        return group_id * factor

    assert rollouts([[1], [2], [3]]).map(doubled, factor=3).array("doubled").tolist() == [0, 0, 3]


def test_map_hands_over_the_components_of_the_reward_and_leaves_optional_columns_out() -> None:
    batch = Batch({"reward/a": [1.0, 2.0], "reward/b": [3.0, 4.0]})

    def total(rewards: Any, values: Any = None) -> Any:
        assert values is None
        return rewards.sum(axis=1)

    assert batch.map(total).array("total").tolist() == [4.0, 6.0]


@pytest.mark.parametrize(
    ("fn", "said"),
    [
        (lambda group_id: np.zeros(4), "returned 4 values for 'x': neither one a row .2. nor one a response token .3."),
        (lambda group_id: 1.0, "returned one value for 'x'"),
        (lambda values: values, "needs the column 'values'; .* It is written by a critic"),
        (lambda rewards: rewards, "needs the column 'rewards'"),
    ],
)
def test_map_says_what_a_function_lacks_or_returned_wrongly(fn: Callable[..., Any], said: str) -> None:
    with pytest.raises(BatchError, match=said):
        rollouts([[1], [2, 3]]).map(fn, to="x")


def test_map_takes_lists_of_text_and_of_arrays() -> None:
    batch = rollouts([[1], [2, 3]])
    out = batch.map(lambda answer: {"text": [a + "!" for a in answer], "parts": [np.arange(1), np.arange(2)]})
    assert rows_of(out.drop("parts"))[1]["text"] == "1!"
    assert out.ragged("parts").lengths.tolist() == [1, 2]


# ---- data
@given(RESPONSES)
def test_saved_and_loaded_rows_are_equal(tmp_path_factory: pytest.TempPathFactory, responses: list[list[int]]) -> None:
    batch = rollouts(responses).with_metrics({"a": 1.5})
    path = tmp_path_factory.mktemp("batch") / "rows"
    batch.save(path)
    loaded = Batch.load(path)
    assert rows_of(loaded) == rows_of(batch)
    assert loaded.metrics == batch.metrics
    assert {n: loaded[n].dtype for n in ("keep", "group_id")} == {n: batch[n].dtype for n in ("keep", "group_id")}


def test_nothing_reaches_the_values_of_a_batch_through_its_columns() -> None:
    batch = rollouts([[1], [2], [3]])
    for rows in (batch, batch.take([2, 0]), batch.take(slice(1, 3)), concat([batch, batch]), batch | Batch({})):
        for values in (rows.array("group_id"), rows.ragged("response_ids").values, rows.ids):
            assert values is not None
            with pytest.raises(ValueError, match="read-only"):
                values[0] = 7


def test_tensors_are_copies() -> None:
    torch = pytest.importorskip("torch")
    batch = rollouts([[1], [2, 3]])
    tensors = batch.to_torch("response_ids", "keep")
    tensors["response_ids"] += 1
    assert batch.ragged("response_ids").values.tolist() == [1, 2, 3]
    assert tensors["keep"].dtype == torch.bool
    assert "answer" not in batch.to_torch()


def test_fetch_gives_these_columns_of_the_same_rows(tmp_path: Path) -> None:
    ref = BatchRef.of(rollouts([[1], [2]]))
    here = ref.fetch("keep", "answer")
    assert type(here) is Batch
    assert here.names == ("keep", "answer")
    assert here["answer"].tolist() == ["0", "1"]
    assert (here.ids == ref.ids).all()


def test_a_reference_has_the_verbs_of_a_batch_and_keeps_its_kind_but_is_not_read() -> None:
    batch = rollouts([[1], [2], [3]])
    ref = BatchRef.of(batch)
    selections = [ref.take([0]), ref.kept(), ref.select("keep"), ref | Batch({}, ref.ids), concat([ref, ref])]
    for rows in [*selections, *ref.split(2), *ref.minibatches(2), ref.map(lambda group_id: group_id, to="g")]:
        assert type(rows) is BatchRef
    assert BatchRef.of(ref) is ref
    assert len(ref) == 3 and "keep" in ref and ref.names == batch.names
    assert ref.pick(lambda keep: np.flatnonzero(keep)).fetch("answer")["answer"].tolist() == ["1", "2"]
    assert rows_of((ref.drop("answer") | ref.rename(name="answer").select("name")).fetch())[2]["name"] == "2"
    joined = ref.join(ref.take([1, 2]), on="rollout_id", group="group_id")
    assert joined.fetch("keep")["keep"].tolist() == [False, True, True]
    assert ref.with_metrics({"a": 1.0}).metrics == {"a": 1.0}
    tokens = BatchRef.of(rollouts([[1], [2, 3]])).map(lambda response_ids, row_of_token: -response_ids, to="x")
    assert tokens.fetch("x").ragged("x").values.tolist() == [-1, -2, -3]


@pytest.mark.parametrize(
    "read",
    [
        lambda ref: ref["keep"],
        lambda ref: ref.column("keep"),
        lambda ref: ref.array("keep"),
        lambda ref: ref.ragged("response_ids"),
        lambda ref: ref.to_torch("keep"),
        lambda ref: ref.save("rows"),
    ],
)
def test_no_value_of_a_reference_is_read_without_fetching_it(read: Callable[[Batch], object]) -> None:
    ref = BatchRef.of(rollouts([[1], [2]]))
    with pytest.raises(BatchError, match=r"with the workers: read (it|them) with batch\.fetch\("):
        read(ref)
    with pytest.raises(BatchError, match=r"no column 'reward'"):
        ref.array("reward")


def test_rows_joined_with_a_reference_are_a_reference() -> None:
    batch = rollouts([[1], [2]])
    ref = BatchRef.of(batch)
    extra = Batch({"x": [1.0, 2.0]}, batch.ids)
    for rows in (extra | ref, ref | extra, concat([batch, ref]), batch.join(ref, on="rollout_id", group="group_id")):
        assert type(rows) is BatchRef
    assert type(extra | batch) is Batch


def test_a_batch_shows_its_columns_and_their_kinds() -> None:
    batch = rollouts([[1]]).select("response_ids", "keep", "answer")
    assert repr(batch) == "Batch(1 rows; response_ids: ragged, keep: dense, answer: objects)"


def test_rows_of_different_kinds_never_share_an_identity() -> None:
    ids = np.concatenate([row_ids(kind, np.arange(1000)) for kind in RowKind])
    assert len(set(ids.tolist())) == len(ids)
