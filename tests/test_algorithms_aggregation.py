"""Token weights: closed forms by hand, and what no cut of the batch may change."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.algorithms.aggregation import AGGREGATIONS, token_weights
from hybridflow.errors import BatchError, ConfigError

pytestmark = pytest.mark.unit

# five rows: 2 and 3 are one trajectory, 1 is rejected, 4 has no sampled token; the second token of row 0 is a tool's
LENGTHS = np.array([3, 2, 1, 2, 1])
MASK = np.array([1, 0, 1, 1, 1, 1, 1, 1, 0], bool)
KEEP = np.array([1, 0, 1, 1, 1], bool)
ROLLOUT = np.array([10, 11, 12, 12, 13])
GROUP = np.array([0, 0, 1, 1, 1])


def weights(mode: str, **changed: Any) -> np.ndarray:
    columns = {"response_mask": MASK, "lengths": LENGTHS, "keep": KEEP, "rollout_id": ROLLOUT, "group_id": GROUP}
    return token_weights(mode, max_new_tokens=8, **{**columns, **changed})


@pytest.mark.parametrize(
    ("mode", "row_0", "rows_2_and_3"),
    [
        ("token_mean", 1 / 5, 1 / 5),
        ("sequence_mean_token_mean", 1 / 2 / 2, 1 / 2 / 3),
        ("sequence_mean_token_sum", 1 / 2, 1 / 2),
        ("sequence_sum_constant", 1 / 2 / 8, 1 / 2 / 8),
        ("group_mean", 1 / 2 / 2, 1 / 2 / 3),
    ],
)
def test_the_weights_by_hand(mode: str, row_0: float, rows_2_and_3: float) -> None:
    expected = [row_0, 0, row_0, 0, 0, rows_2_and_3, rows_2_and_3, rows_2_and_3, 0]
    np.testing.assert_allclose(weights(mode), expected, rtol=1e-15)


def test_group_mean_weighs_groups_alike_and_tokens_of_a_group_alike() -> None:
    computed = weights("group_mean", keep=None, group_id=np.array([7, 7, 7, 7, 3]), response_mask=np.ones(9, bool))
    np.testing.assert_allclose(computed, [1 / 2 / 8] * 8 + [1 / 2])


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("nothing", [{"keep": np.zeros(5, bool)}, {"response_mask": np.zeros(9, bool)}])
def test_nothing_to_learn_from_is_all_zeros(mode: str, nothing: dict[str, np.ndarray]) -> None:
    computed = weights(mode, **nothing)
    assert computed.dtype == np.float64
    assert (computed == 0).all()


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_an_empty_batch_has_no_weights(mode: str) -> None:
    empty = np.zeros(0, np.int64)
    assert len(token_weights(mode, np.zeros(0, bool), empty, None, None, empty, 8)) == 0


def test_without_keep_and_rollout_id_every_row_is_a_sequence_that_counts() -> None:
    computed = weights("sequence_mean_token_sum", keep=None, rollout_id=None)
    np.testing.assert_allclose(computed, MASK / 4)


def test_group_mean_needs_groups() -> None:
    with pytest.raises(BatchError, match="group_mean needs the column 'group_id'"):
        weights("group_mean", group_id=None)


@pytest.mark.parametrize("wrong", [np.linspace(-1, 1, 9), np.ones(9, np.int64), np.ones(8, bool)])
def test_case_05_advantages_are_not_taken_for_a_mask(wrong: np.ndarray) -> None:
    with pytest.raises(BatchError, match=r"response_mask is .*: one bool for each of 9 response tokens"):
        weights("token_mean", response_mask=wrong)


def test_an_unknown_aggregation_is_refused() -> None:
    with pytest.raises(ConfigError, match="aggregation=mean: it is one of token_mean"):
        weights("mean")


@st.composite
def batches(draw: st.DrawFn) -> dict[str, Any]:
    n = draw(st.integers(1, 8))
    lengths = np.array(draw(st.lists(st.integers(0, 4), min_size=n, max_size=n)))
    total = int(lengths.sum())
    rollout = np.array(draw(st.lists(st.integers(0, 4), min_size=n, max_size=n)))
    return {
        "lengths": lengths,
        "response_mask": np.array(draw(st.lists(st.booleans(), min_size=total, max_size=total)), bool),
        "keep": np.array(draw(st.lists(st.booleans(), min_size=n, max_size=n)), bool),
        "rollout_id": rollout,
        "group_id": rollout // 2,
    }


def permuted(batch: dict[str, Any], order: np.ndarray) -> tuple[dict[str, Any], np.ndarray]:
    """The batch with its rows in another order, and where each of its tokens stood."""
    starts = np.cumsum([0, *batch["lengths"]])
    tokens = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in order]).astype(int)
    rows = {name: batch[name][order] for name in ("lengths", "keep", "rollout_id", "group_id")}
    return {**rows, "response_mask": batch["response_mask"][tokens]}, tokens


@given(batches(), st.sampled_from(AGGREGATIONS), st.randoms(use_true_random=False))
def test_the_order_of_rows_changes_no_weight(batch: dict[str, Any], mode: str, random: Any) -> None:
    order = np.array(random.sample(range(len(batch["keep"])), len(batch["keep"])))
    shuffled, tokens = permuted(batch, order)
    np.testing.assert_array_equal(
        token_weights(mode, max_new_tokens=8, **shuffled), token_weights(mode, max_new_tokens=8, **batch)[tokens]
    )


@given(batches(), st.sampled_from(AGGREGATIONS))
def test_case_04_rejected_rows_move_no_denominator(batch: dict[str, Any], mode: str) -> None:
    kept, tokens = permuted(batch, np.flatnonzero(batch["keep"])) if batch["keep"].any() else (None, None)
    computed = token_weights(mode, max_new_tokens=8, **batch)
    rejected = ~batch["keep"][np.repeat(np.arange(len(batch["keep"])), batch["lengths"])]
    assert (computed[rejected] == 0).all()
    if kept is not None:
        np.testing.assert_array_equal(computed[tokens], token_weights(mode, max_new_tokens=8, **kept))


@given(batches(), st.sampled_from(("token_mean", "sequence_mean_token_mean", "group_mean")))
def test_weights_of_a_mean_sum_to_one(batch: dict[str, Any], mode: str) -> None:
    computed = token_weights(mode, max_new_tokens=8, **batch)
    assert computed.sum() == pytest.approx(1.0 if computed.any() else 0.0)


@given(batches(), st.sampled_from(AGGREGATIONS), st.integers(0, 8), st.integers(0, 2**32 - 1))
def test_case_01_any_cut_of_the_rows_sums_to_the_same_loss(
    batch: dict[str, Any], mode: str, cut: int, seed: int
) -> None:
    losses = np.random.default_rng(seed).normal(size=len(batch["response_mask"]))
    weighted = token_weights(mode, max_new_tokens=8, **batch) * losses
    split = np.cumsum([0, *batch["lengths"]])[min(cut, len(batch["lengths"]))]
    assert weighted[:split].sum() + weighted[split:].sum() == pytest.approx(weighted.sum(), rel=1e-12, abs=1e-15)


def test_case_16_a_trajectory_of_many_rows_weighs_as_one_sequence() -> None:
    one_row = token_weights(
        "sequence_mean_token_mean", np.ones(8, bool), np.array([4, 4]), None, np.array([0, 1]), None, 8
    )
    cut = token_weights(
        "sequence_mean_token_mean", np.ones(8, bool), np.array([1, 1, 2, 4]), None, np.array([0, 0, 0, 1]), None, 8
    )
    np.testing.assert_array_equal(one_row, cut)
