"""Estimates of the KL divergence of the policy from a reference, from sampled tokens, and its adaptive coefficient.

With x sampled from the policy and r = p_reference(x) / p_policy(x) (J. Schulman, "Approximating KL divergence", 2020):

    k1 = -log r            unbiased, high variance, negative for half of the samples
    k2 = (log r)^2 / 2     biased, low variance; as a loss, its expected gradient is that of the KL
    k3 = r - 1 - log r     unbiased, low variance, never negative

As a loss on the policy's own samples k1 regularises nothing: its expected gradient is that of log p, which is zero.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError, EngineError

if TYPE_CHECKING:
    import torch

ESTIMATORS = ("k1", "k2", "k3")
MAX_LOG_RATIO = 20.0  # ratios are bounded by exp(20), about 5e8: beyond it float32 would overflow, and 0 x inf is NaN
MAX_CHANGE = 0.2

Values = TypeVar("Values", NDArray[np.floating], "torch.Tensor")


def kl_estimate(logprobs: Values, ref_logprobs: Values, estimator: str) -> Values:
    """Per-token estimate of KL(policy || reference), [T], in nats, for tokens sampled from the policy.

    numpy arrays or torch tensors (differentiable), either kind for both. k3 is constant where log r is above 20.
    """
    log_ratio = ref_logprobs - logprobs
    match estimator:
        case "k1":
            return -log_ratio
        case "k2":
            return log_ratio**2 / 2
        case "k3":
            bounded = log_ratio.clip(max=MAX_LOG_RATIO)
            # expm1: near 0 the terms of r - 1 - log r cancel, and float32 would leave noise where the estimate is tiny
            k3: Values = (np.expm1(bounded) if isinstance(bounded, np.ndarray) else bounded.expm1()) - bounded
            return k3
    raise ConfigError(f"algorithm.kl_estimator={estimator}: it is one of {', '.join(ESTIMATORS)}.")


class AdaptiveKL:
    """The KL coefficient, held so that the KL stays near a target; fixed if the target is None.

    Ziegler et al. 2019 (arXiv 1909.08593, sec. 2.2): e = clip((KL - target) / target, -0.2, 0.2), coef *= 1 + K e, with
    K = samples / horizon, at most 1. Saved state of a run.
    """

    def __init__(self, coef: float, target: float | None, horizon: int) -> None:
        self.coef = coef
        self.target = target
        self.horizon = horizon

    def update(self, observed_kl: float, n_samples: int) -> None:
        """Adapt to the mean KL of `n_samples` rollouts, in the target's unit. Errors: EngineError if it is NaN."""
        if self.target is None:
            return
        if not math.isfinite(observed_kl):
            raise EngineError(
                f"the KL to the reference is {observed_kl}: look for NaN in old_logprobs and ref_logprobs."
            )
        error = min(max((observed_kl - self.target) / self.target, -MAX_CHANGE), MAX_CHANGE)
        self.coef *= 1 + min(n_samples / self.horizon, 1.0) * error

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.coef = state["coef"]
