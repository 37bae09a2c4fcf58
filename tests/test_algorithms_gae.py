"""Generalised advantage estimation against the sum of its definition, and what may not move it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hybridflow.algorithms.advantages.gae import gae
from hybridflow.algorithms.registry import checked_options
from hybridflow.errors import ConfigError

pytestmark = pytest.mark.unit

Columns = dict[str, Any]


@st.composite
def rollouts(draw: st.DrawFn) -> Columns:
    """Rows of unequal lengths, some empty, some rejected, with tool tokens among the sampled ones."""
    lengths = draw(st.lists(st.integers(0, 7), min_size=1, max_size=6))
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    total = sum(lengths)
    return {
        "token_rewards": rng.normal(size=total).astype(np.float32),
        "values": rng.normal(size=total).astype(np.float32),
        "response_mask": rng.random(total) < draw(st.sampled_from([0.6, 1.0])),
        "row_of_token": np.repeat(np.arange(len(lengths)), lengths),
        "keep": rng.random(len(lengths)) < 0.8,
    }


def by_definition(batch: Columns, gamma: float, lam: float) -> list[float]:
    """A_t = sum over l of (gamma lam)^l d_t+l, and 0 where nothing counts: two loops over tokens."""
    out = [0.0] * len(batch["values"])
    for row in range(len(batch["keep"])):
        tokens = [t for t in np.flatnonzero(batch["row_of_token"] == row) if batch["response_mask"][t]]
        if not batch["keep"][row]:
            continue
        for i in range(len(tokens)):
            for j in range(i, len(tokens)):
                ahead = float(batch["values"][tokens[j + 1]]) if j + 1 < len(tokens) else 0.0
                error = float(batch["token_rewards"][tokens[j]]) + gamma * ahead - float(batch["values"][tokens[j]])
                out[tokens[i]] += (gamma * lam) ** (j - i) * error
    return out


def counted(batch: Columns) -> np.ndarray:
    return batch["response_mask"] & batch["keep"][batch["row_of_token"]]


@given(rollouts(), st.sampled_from([0.0, 0.9, 1.0]), st.sampled_from([0.0, 0.95, 1.0]))
def test_advantages_are_the_discounted_sum_of_errors_and_returns_add_the_values(
    batch: Columns, gamma: float, lam: float
) -> None:
    found = gae(**batch, gamma=gamma, lam=lam, whiten=False)
    expected = by_definition(batch, gamma, lam)
    np.testing.assert_allclose(found["advantages"], expected, atol=1e-9)
    values = np.where(counted(batch), batch["values"].astype(np.float64), 0.0)
    np.testing.assert_allclose(found["returns"], expected + values, atol=1e-9)


def test_without_discounts_a_return_is_all_the_reward_to_come() -> None:
    batch = {
        "token_rewards": np.array([0.0, 1.0, 2.0, 5.0]),
        "values": np.array([0.5, 0.25, 0.0, 7.0]),
        "response_mask": np.ones(4, bool),
        "row_of_token": np.array([0, 0, 0, 1]),
        "keep": np.ones(2, bool),
    }
    found = gae(**batch, whiten=False)
    assert found["returns"].tolist() == [3.0, 3.0, 2.0, 5.0]
    assert found["advantages"].tolist() == [2.5, 2.75, 2.0, -2.0]


@given(rollouts(), st.floats(0, 1), st.floats(0, 1), st.booleans())
def test_tool_tokens_are_passed_over_as_if_they_were_not_there(
    batch: Columns, gamma: float, lam: float, whiten: bool
) -> None:
    mask = batch["response_mask"]
    per_token = ("token_rewards", "values", "response_mask", "row_of_token")
    without = {**batch, **{name: batch[name][mask] for name in per_token}}
    whole, sampled = (gae(**columns, gamma=gamma, lam=lam, whiten=whiten) for columns in (batch, without))
    for name, column in whole.items():
        np.testing.assert_array_equal(column[mask], sampled[name])
        assert (column[~mask] == 0).all()


@given(rollouts(), st.sampled_from([np.nan, np.inf, 1e9]), st.booleans())
def test_case_04_what_a_rejected_row_or_a_tool_token_holds_moves_nothing(
    batch: Columns, value: float, whiten: bool
) -> None:
    changed = {
        **batch,
        **{name: np.where(counted(batch), batch[name], np.float32(value)) for name in ("token_rewards", "values")},
    }
    before, after = (gae(**columns, whiten=whiten) for columns in (batch, changed))
    for name in before:
        np.testing.assert_array_equal(before[name], after[name])
        assert (before[name][~counted(batch)] == 0).all()


@given(rollouts())
def test_whitening_is_of_the_counted_tokens_of_the_whole_batch_and_leaves_returns(batch: Columns) -> None:
    at = counted(batch)
    plain, white = (gae(**batch, gamma=0.9, lam=0.9, whiten=whiten) for whiten in (False, True))
    np.testing.assert_array_equal(plain["returns"], white["returns"])
    assume(at.sum() > 1 and np.ptp(plain["advantages"][at]) > 1e-3)
    assert white["advantages"][at].mean() == pytest.approx(0, abs=1e-6)
    assert white["advantages"][at].std(ddof=1) == pytest.approx(1, abs=1e-3)
    assert (np.argsort(white["advantages"][at]) == np.argsort(plain["advantages"][at])).all()


def test_a_single_token_and_no_token_are_no_division_by_zero() -> None:
    one = {
        "token_rewards": np.ones(1),
        "values": np.zeros(1),
        "response_mask": np.ones(1, bool),
        "row_of_token": np.zeros(1, np.int64),
        "keep": np.ones(1, bool),
    }
    assert gae(**one)["advantages"].tolist() == [0.0]
    assert gae(**{**one, "keep": np.zeros(1, bool)})["returns"].tolist() == [0.0]
    nothing = {name: column[:0] for name, column in one.items()}
    assert gae(**nothing)["advantages"].shape == (0,)


@pytest.mark.parametrize("options", [{"gamma": 1.5}, {"lam": -0.1}])
def test_a_discount_outside_its_range_is_refused(options: dict[str, float]) -> None:
    (name,) = options
    with pytest.raises(ConfigError, match=rf"advantage\.{name}=.*: it is in \[0, 1\]"):
        checked_options(gae, "advantage", options)
