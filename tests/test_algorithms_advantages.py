"""Advantages: closed forms by hand, and what may not move them."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hybridflow.algorithms.advantages.grpo import grpo
from hybridflow.algorithms.advantages.reinforce import reinforce
from hybridflow.algorithms.advantages.statistics import group_statistics, only_singletons
from hybridflow.algorithms.registry import known, resolve

pytestmark = pytest.mark.unit

ALL = np.ones(4, bool)


def f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def test_grpo_by_hand() -> None:
    group = np.array([5, 9, 5, 9])
    expected = np.array([1, 2, -1, -2]) / (np.array([1, 2, 1, 2]) * np.sqrt(2) + 1e-6)  # std of (x, -x) is x sqrt 2
    np.testing.assert_allclose(grpo(f32(3, 4, 1, 0), group, ALL), expected, rtol=1e-12)
    np.testing.assert_allclose(grpo(f32(3, 4, 1, 0), group, ALL, normalize_std=False), [1, 2, -1, -2])


def test_grpo_divides_by_the_std_of_a_sample() -> None:
    reward, group = f32(0, 0, 0, 1), np.zeros(4, np.int64)
    np.testing.assert_allclose(grpo(reward, group, ALL), (reward - 0.25) / (np.std(reward, ddof=1) + 1e-6), rtol=1e-6)


def test_case_02_a_group_of_one_has_advantage_zero() -> None:
    advantages = grpo(f32(1, 0, 1, 7), np.array([0, 0, 0, 1]), ALL)
    assert advantages[3] == 0
    assert (advantages[:3] != 0).all()
    rest_rejected = grpo(f32(1, 0, 1, 7), np.zeros(4, np.int64), np.array([0, 0, 0, 1], bool))
    assert (rest_rejected == 0).all()


def test_case_03_groups_that_are_all_singletons_are_told_apart() -> None:
    assert only_singletons(np.array([0, 1, 2]))
    assert not only_singletons(np.array([0, 1, 1]))
    assert only_singletons(np.array([0, 0, 1]), rollout_id=np.array([4, 4, 5]))  # two rows of one trajectory
    assert not only_singletons(np.zeros(0, np.int64))
    statistics = group_statistics(f32(1, 0, 1, 0), np.arange(4), ALL)
    assert statistics["groups/single"] == statistics["groups/count"] == 4
    assert (grpo(f32(1, 0, 1, 0), np.arange(4), ALL) == 0).all()


def test_case_04_rejected_rows_move_no_baseline_even_if_their_reward_is_nan() -> None:
    keep, group = np.array([1, 1, 0, 1], bool), np.zeros(4, np.int64)
    for reward in (f32(1, 0, np.nan, 0), f32(1, 0, 100, 0)):
        advantages = grpo(reward, group, keep)
        np.testing.assert_array_equal(advantages[keep], grpo(reward[keep], group[keep], keep[keep]))
        assert advantages[2] == 0
        np.testing.assert_allclose(reinforce(reward, keep), [2 / 3, -1 / 3, 0, -1 / 3])


def test_case_08_the_statistics_say_why_the_loss_is_zero() -> None:
    reward = f32(1, 1, 0, 1, 1, 5, 5, 2)
    group = np.array([0, 0, 1, 1, 2, 3, 3, 4])
    keep = np.array([1, 1, 1, 1, 1, 1, 0, 0], bool)
    assert group_statistics(reward, group, keep) == {
        "groups/count": 4.0,  # group 4 has no kept row
        "groups/single": 2.0,  # groups 2 and 3
        "groups/without_variance": 1.0,  # group 0
        "rows/kept_share": 0.75,
    }


def test_case_08_a_group_of_equal_rewards_has_advantage_exactly_zero() -> None:
    assert (grpo(np.full(7, 0.1), np.zeros(7, np.int64), np.ones(7, bool)) == 0).all()


def test_case_09_a_reward_of_zero_is_a_reward() -> None:
    np.testing.assert_allclose(grpo(f32(0, 1), np.zeros(2, np.int64), ALL[:2]), [-1 / 2**0.5, 1 / 2**0.5], rtol=1e-5)
    np.testing.assert_allclose(reinforce(f32(0, 1), ALL[:2]), [-0.5, 0.5])
    assert group_statistics(f32(0, 1), np.zeros(2, np.int64), ALL[:2])["groups/without_variance"] == 0


def test_case_16_rows_of_one_trajectory_count_once() -> None:
    whole = grpo(f32(1, 0, 0), np.zeros(3, np.int64), ALL[:3])
    spanning = grpo(f32(1, 0, 0, 0, 0), np.zeros(5, np.int64), np.ones(5, bool), np.array([0, 1, 1, 1, 2]))
    np.testing.assert_allclose(spanning, whole[[0, 1, 1, 1, 2]])
    np.testing.assert_allclose(reinforce(f32(1, 0, 0), ALL[:3], np.array([0, 1, 1])), [0.5, -0.5, -0.5])


def test_reinforce_without_a_baseline_is_the_reward() -> None:
    np.testing.assert_array_equal(reinforce(f32(3, 1), np.array([1, 0], bool), baseline="none"), [3, 0])


def test_no_rows_give_no_advantages() -> None:
    empty, none = np.zeros(0, np.int64), np.zeros(0, bool)
    assert grpo(f32(), empty, none).shape == reinforce(f32(), none).shape == (0,)
    assert group_statistics(f32(), empty, none)["groups/count"] == 0


def test_every_advantage_is_annotated() -> None:
    for name in known("advantage"):
        signature = inspect.signature(resolve(name, "advantage"))
        assert signature.return_annotation is not signature.empty
        assert all(p.annotation is not p.empty for p in signature.parameters.values()), name


@st.composite
def rows(draw: st.DrawFn) -> dict[str, Any]:
    n = draw(st.integers(1, 12))
    rollout = np.array(draw(st.lists(st.integers(0, 8), min_size=n, max_size=n)))
    rewards = np.array(draw(st.lists(st.integers(-8, 8), min_size=9, max_size=9)), np.float32) / 4  # exact sums
    return {
        "reward": rewards[rollout],
        "group_id": rollout % draw(st.integers(1, 4)),
        "keep": np.array(draw(st.lists(st.booleans(), min_size=n, max_size=n)), bool),
        "rollout_id": rollout,
    }


ESTIMATORS = {
    "grpo": grpo,
    "grpo, std left out": lambda **columns: grpo(**columns, normalize_std=False),
    "reinforce": lambda group_id, **columns: reinforce(**columns),
}
any_estimator = st.sampled_from(sorted(ESTIMATORS)).map(ESTIMATORS.__getitem__)


@given(rows(), any_estimator, st.randoms(use_true_random=False))
def test_the_order_of_rows_changes_no_advantage(batch: dict[str, Any], estimate: Any, random: Any) -> None:
    order = np.array(random.sample(range(len(batch["keep"])), len(batch["keep"])))
    shuffled = {name: column[order] for name, column in batch.items()}
    np.testing.assert_allclose(estimate(**shuffled), estimate(**batch)[order], rtol=1e-12, atol=1e-12)


@given(rows(), any_estimator, st.integers(-40, 40))
def test_a_constant_added_to_all_rewards_changes_no_advantage(batch: dict[str, Any], estimate: Any, shift: int) -> None:
    shifted = {**batch, "reward": batch["reward"] + np.float32(shift / 4)}
    np.testing.assert_allclose(estimate(**shifted), estimate(**batch), rtol=1e-9, atol=1e-12)


@given(rows(), any_estimator, st.floats(allow_nan=True, width=32))
def test_case_04_whatever_a_rejected_row_holds_moves_nothing(
    batch: dict[str, Any], estimate: Any, value: float
) -> None:
    changed = {**batch, "reward": np.where(batch["keep"], batch["reward"], np.float32(value))}
    np.testing.assert_array_equal(estimate(**changed), estimate(**batch))
    assert (estimate(**batch)[~batch["keep"]] == 0).all()


@given(rows(), any_estimator)
def test_case_04_rejecting_is_the_same_as_never_having_been_there(batch: dict[str, Any], estimate: Any) -> None:
    assume(batch["keep"].any())
    kept = {name: column[batch["keep"]] for name, column in batch.items()}
    np.testing.assert_array_equal(estimate(**batch)[batch["keep"]], estimate(**kept))


@given(rows())
def test_advantages_of_the_rollouts_of_a_group_sum_to_zero(batch: dict[str, Any]) -> None:
    advantages = grpo(**batch)
    pairs = zip(batch["group_id"], batch["rollout_id"], advantages, batch["keep"], strict=True)
    of_rollout = {(group, rollout): value for group, rollout, value, kept in pairs if kept}
    for group in set(batch["group_id"].tolist()):
        assert sum(value for (g, _), value in of_rollout.items() if g == group) == pytest.approx(0, abs=1e-9)
