"""KL estimates against the exact KL of known distributions, and the adaptive coefficient against its closed form."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.algorithms.kl import ESTIMATORS, AdaptiveKL, kl_estimate
from hybridflow.errors import ConfigError, EngineError

pytestmark = pytest.mark.unit

P = np.array([0.5, 0.3, 0.15, 0.05])
Q = np.array([0.4, 0.35, 0.05, 0.2])
KL = float((P * np.log(P / Q)).sum())


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_expectation_of_k1_and_k3_is_the_kl(estimator: str) -> None:
    assert float((P * kl_estimate(np.log(P), np.log(Q), estimator)).sum()) == pytest.approx(KL, rel=1e-12)


def test_k2_is_near_the_kl_of_near_distributions() -> None:
    near = P + 0.01 * np.array([1, -1, 1, -1])
    exact = float((P * np.log(P / near)).sum())
    assert float((P * kl_estimate(np.log(P), np.log(near), "k2")).sum()) == pytest.approx(exact, rel=0.1)


def test_the_estimators_are_schulmans_by_hand() -> None:
    logprobs, ref = np.log([0.5]), np.log([0.25])
    assert kl_estimate(logprobs, ref, "k1") == pytest.approx(np.log(2))
    assert kl_estimate(logprobs, ref, "k2") == pytest.approx(np.log(2) ** 2 / 2)
    assert kl_estimate(logprobs, ref, "k3") == pytest.approx(0.5 - 1 + np.log(2))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_torch_and_numpy_agree(estimator: str) -> None:
    ours = kl_estimate(torch.tensor(np.log(P)), torch.tensor(np.log(Q)), estimator)
    np.testing.assert_allclose(ours.numpy(), kl_estimate(np.log(P), np.log(Q), estimator), rtol=1e-14)


@given(st.floats(-80, 0, width=32), st.floats(-80, 0, width=32))
def test_k3_is_finite_and_never_negative_in_float32(logprob: float, ref: float) -> None:
    logprobs = torch.tensor([logprob], requires_grad=True)
    estimate = kl_estimate(logprobs, torch.tensor([ref]), "k3")
    torch.autograd.backward(estimate.sum())
    assert torch.isfinite(estimate).all()
    assert estimate.item() >= 0
    assert logprobs.grad is not None
    assert torch.isfinite(logprobs.grad).all()


def test_k3_of_a_small_difference_is_not_lost_in_float32() -> None:
    estimate = kl_estimate(np.array([-1.0], np.float32), np.array([-1.0 + 2**-10], np.float32), "k3")
    assert estimate == pytest.approx(2**-21, rel=1e-3)


def test_k3_is_bounded_where_the_ratio_would_overflow() -> None:
    estimate = kl_estimate(np.array([-200.0], np.float32), np.array([0.0], np.float32), "k3")
    assert estimate == pytest.approx(np.exp(20.0) - 21, rel=1e-6)


def test_the_expected_gradient_of_k2_is_that_of_the_kl_and_of_k1_zero() -> None:
    logits = torch.tensor(np.log(P), requires_grad=True)
    logq = torch.tensor(np.log(Q))

    def gradient(loss: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(loss, logits)[0]

    logp = logits.log_softmax(0)
    exact = gradient((logp.exp() * (logp - logq)).sum())
    p = torch.tensor(P)
    logp = logits.log_softmax(0)
    torch.testing.assert_close(gradient((p * kl_estimate(logp, logq, "k2")).sum()), exact)
    logp = logits.log_softmax(0)
    torch.testing.assert_close(gradient((p * kl_estimate(logp, logq, "k1")).sum()), torch.zeros_like(exact))


def test_an_unknown_estimator_is_refused() -> None:
    with pytest.raises(ConfigError, match="kl_estimator=k4: it is one of k1, k2, k3"):
        kl_estimate(np.zeros(1), np.zeros(1), "k4")


def test_the_coefficient_follows_zieglers_controller() -> None:
    kl = AdaptiveKL(0.1, target=6.0, horizon=10_000)
    kl.update(6.6, n_samples=500)  # error 0.1
    assert kl.coef == pytest.approx(0.1 * (1 + 500 / 10_000 * 0.1))
    kl = AdaptiveKL(0.1, target=6.0, horizon=10_000)
    kl.update(60.0, n_samples=500)  # error clipped at 0.2
    assert kl.coef == pytest.approx(0.1 * (1 + 500 / 10_000 * 0.2))
    kl = AdaptiveKL(0.1, target=6.0, horizon=10_000)
    kl.update(0.0, n_samples=500)  # and at -0.2
    assert kl.coef == pytest.approx(0.1 * (1 - 500 / 10_000 * 0.2))


def test_the_coefficient_is_fixed_without_a_target() -> None:
    kl = AdaptiveKL(0.1, target=None, horizon=10)
    kl.update(1e6, n_samples=512)
    assert kl.coef == 0.1


@given(st.lists(st.floats(-1, 1e6), max_size=20))
def test_the_coefficient_stays_positive_whatever_the_horizon(observed: list[float]) -> None:
    kl = AdaptiveKL(0.1, target=1.0, horizon=1)
    for value in observed:
        kl.update(value, n_samples=4096)
    assert kl.coef > 0


def test_a_kl_that_is_no_number_is_refused_before_it_poisons_the_coefficient() -> None:
    kl = AdaptiveKL(0.1, target=1.0, horizon=10)
    with pytest.raises(EngineError, match="KL to the reference is nan"):
        kl.update(float("nan"), 1)
    assert kl.coef == 0.1


def test_the_coefficient_is_saved_state() -> None:
    kl = AdaptiveKL(0.1, target=1.0, horizon=10)
    kl.update(5.0, 5)
    restored = AdaptiveKL(0.1, target=1.0, horizon=10)
    restored.load_state_dict(kl.state_dict())
    assert restored.coef == kl.coef != 0.1
