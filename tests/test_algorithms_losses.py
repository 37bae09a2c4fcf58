"""Losses against closed forms, and their gradients against finite differences."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.algorithms.losses.ppo_clip import ppo_clip
from hybridflow.algorithms.losses.reinforce import reinforce
from hybridflow.algorithms.losses.sft import sft
from hybridflow.algorithms.registry import known, options_of, resolve

pytestmark = pytest.mark.unit


def t(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def values_of(returned: Any) -> torch.Tensor:
    loss: torch.Tensor = returned[0] if isinstance(returned, tuple) else returned
    return loss


def clipped_objective(ratio: float, advantage: float, low: float, high: float, dual: float) -> float:
    """The papers' formulas in plain Python."""
    value = min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
    return max(value, dual * advantage) if dual and advantage < 0 else value


@given(
    st.floats(-3, 3),
    st.floats(-2, 2),
    st.floats(0, 0.9),
    st.floats(0, 2),
    st.sampled_from([0.0, 1.5, 3.0]),
)
def test_ppo_clip_is_the_papers_formula(
    log_ratio: float, advantage: float, low: float, high: float, dual: float
) -> None:
    loss, _ = ppo_clip(t(log_ratio - 1), t(-1), t(advantage), clip_low=low, clip_high=high, dual_clip=dual)
    ratio = math.exp(log_ratio - 1 + 1)
    assert loss.item() == pytest.approx(-clipped_objective(ratio, advantage, low, high, dual), rel=1e-9, abs=1e-12)


@given(st.floats(-30, 0), st.floats(-5, 5), st.sampled_from([0.0, 0.2]))
def test_at_the_old_policy_the_gradient_is_minus_the_advantage(logprob: float, advantage: float, clip: float) -> None:
    logprobs = t(logprob).requires_grad_()
    loss, _ = ppo_clip(logprobs, logprobs.detach(), t(advantage), clip_low=clip, clip_high=clip)
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    assert gradient.item() == pytest.approx(-advantage)


def test_the_clips_stop_the_gradient_where_they_hold_and_are_counted() -> None:
    #      up and good, up and bad, far up and bad, down and bad, down and good, inside
    ratio = t(1.5, 1.5, 4.0, 0.5, 0.5, 1.1)
    advantages = t(1.0, -1.0, -1.0, -1.0, 1.0, 1.0)
    logprobs = ratio.log().requires_grad_()
    loss, metrics = ppo_clip(logprobs, torch.zeros(6, dtype=torch.float64), advantages)
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    torch.testing.assert_close(gradient, t(0, 1.5, 0, 0, -0.5, -1.1))
    torch.testing.assert_close(metrics["ratio"].detach(), ratio)
    assert metrics["clip_fraction"].tolist() == [1, 0, 0, 1, 0, 0]
    assert metrics["dual_clip_fraction"].tolist() == [0, 0, 1, 0, 0, 0]


@pytest.mark.parametrize("off", [0, 0.0, None])
def test_dual_clip_can_be_off(off: float | None) -> None:
    loss, metrics = ppo_clip(t(math.log(4.0)), t(0), t(-1), dual_clip=off)
    assert loss.item() == pytest.approx(4.0)
    assert "dual_clip_fraction" not in metrics


@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
def test_a_ratio_that_would_overflow_gives_finite_losses_and_gradients(advantage: float) -> None:
    logprobs = torch.tensor([0.0, -500.0], requires_grad=True)
    old = torch.tensor([-500.0, 0.0])
    loss, _ = ppo_clip(logprobs, old, torch.full((2,), advantage), dual_clip=0)
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    assert torch.isfinite(loss).all()
    assert torch.isfinite(gradient).all()


def test_reinforce_and_sft_by_hand() -> None:
    assert reinforce(t(-2, -1), t(3, -1)).tolist() == [6, -1]
    assert sft(t(-2, -1)).tolist() == [2, 1]


PER_TOKEN = {
    "logprobs": t(-1.0, -2.0, -0.5, -3.0),
    "old_logprobs": t(-1.1, -1.9, -0.7, -2.2),
    "advantages": t(1.0, -1.0, 0.5, -2.0),
}


@pytest.mark.parametrize("name", ["ppo_clip", "reinforce", "sft"])
def test_gradients_agree_with_finite_differences(name: str) -> None:
    fn = resolve(name, "loss")
    asked = {
        key: value for key, value in PER_TOKEN.items() if key in fn.__code__.co_varnames[: fn.__code__.co_argcount]
    }

    def loss(logprobs: torch.Tensor) -> torch.Tensor:
        return values_of(fn(**{**asked, "logprobs": logprobs}))

    assert torch.autograd.gradcheck(loss, (PER_TOKEN["logprobs"].clone().requires_grad_(),))


@pytest.mark.parametrize("name", ["ppo_clip", "reinforce", "sft"])
def test_a_token_depends_on_no_other_token(name: str) -> None:
    fn = resolve(name, "loss")
    asked = {
        key: value for key, value in PER_TOKEN.items() if key in fn.__code__.co_varnames[: fn.__code__.co_argcount]
    }
    whole = values_of(fn(**asked))
    alone = torch.cat([values_of(fn(**{key: value[i : i + 1] for key, value in asked.items()})) for i in range(4)])
    assert torch.equal(whole, alone)


def test_the_options_of_every_loss_are_numbers_or_flags_that_configuration_can_hold() -> None:
    for name in known("loss"):
        assert all(isinstance(value, (bool, int, float, str)) for value in options_of(resolve(name, "loss")).values())
