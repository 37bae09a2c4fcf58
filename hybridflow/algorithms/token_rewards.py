"""Rewards per token: the row's reward where its last sampled token stands, less a KL penalty on every sampled token."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .aggregation import last_tokens
from .kl import kl_estimate

Floats = NDArray[np.floating]


def token_rewards(
    reward: Floats,
    response_mask: NDArray[np.bool_],
    row_of_token: NDArray[np.int64],
    old_logprobs: Floats | None = None,
    ref_logprobs: Floats | None = None,
    *,
    kl_coef: float = 0.0,
    kl_estimator: str = "k1",
) -> dict[str, Floats]:
    """InstructGPT's per-token reward (Ouyang et al. 2022, arXiv 2203.02155, eq. 2; Ziegler et al. 2019, eq. 2).

    reward [n]; response_mask, row_of_token and the log-probs [T]. Gives token_rewards [T] and, where log-probs of a
    reference are given, kl [n]: each row's sum of the estimate. A row without a sampled token has no reward to place.
    """
    rewards = np.zeros(len(row_of_token), np.float32)
    rows, last = last_tokens(response_mask, row_of_token)
    rewards[last] = reward[rows]
    if old_logprobs is None or ref_logprobs is None:
        return {"token_rewards": rewards}
    estimate = np.where(response_mask, kl_estimate(old_logprobs, ref_logprobs, kl_estimator), 0.0)
    kl = np.bincount(row_of_token, estimate, len(reward)).astype(np.float64)
    return {"token_rewards": rewards - kl_coef * estimate, "kl": kl}
