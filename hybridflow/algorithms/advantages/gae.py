"""Generalised advantage estimation: a critic's values say how good each token was (Schulman et al. 2016)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...errors import ConfigError
from ..registry import register
from .statistics import Flags, Floats, Ints

EPSILON = 1e-8


def check_options(gamma: float, lam: float, whiten: bool) -> None:
    """Errors: ConfigError for a discount that is none."""
    for name, value in (("gamma", gamma), ("lam", lam)):
        if not 0 <= value <= 1:
            raise ConfigError(f"advantage.{name}={value}: it is in [0, 1]; 1 = nothing is discounted.")


@register("advantage", check=check_options)
def gae(
    token_rewards: Floats,
    values: Floats,
    response_mask: Flags,
    row_of_token: Ints,
    keep: Flags,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    whiten: bool = True,
) -> dict[str, NDArray[np.float64]]:
    """A_t = d_t + gamma lam A_t+1 with d_t = r_t + gamma V_t+1 - V_t; returns A_t + V_t. Both [T].

    values: of the state before each token; behind a row's last sampled token V and A are 0. Time counts sampled tokens
    of kept rows: t + 1 is the next of them, whatever a tool wrote between the two; all other tokens get 0.
    whiten: advantages, not returns, less their mean and divided by their standard deviation, over the whole batch.
    Source: arXiv 1506.02438, eq. 16; whitening as in the code of Ziegler et al. 2019 (arXiv 1909.08593).
    """
    counted = np.flatnonzero(response_mask & keep[row_of_token])
    estimated = _estimate(token_rewards[counted], values[counted], row_of_token[counted], len(keep), gamma, lam)
    advantages, returns = np.zeros(len(values)), np.zeros(len(values))
    returns[counted] = estimated + values[counted]
    advantages[counted] = _whitened(estimated) if whiten else estimated
    return {"advantages": advantages, "returns": returns}


def _estimate(rewards: Floats, values: Floats, row: Ints, rows: int, gamma: float, lam: float) -> NDArray[np.float64]:
    """Advantages of tokens that all count, in order of their `row`: last tokens first, all rows at once."""
    lengths = np.bincount(row, minlength=rows)
    last = np.cumsum(lengths) - 1
    advantages, advantage, value = np.zeros(len(row)), np.zeros(rows), np.zeros(rows)
    for behind in range(lengths.max(initial=0)):
        running = np.flatnonzero(lengths > behind)
        at = last[running] - behind
        error = rewards[at] + gamma * value[running] - values[at]
        advantage[running] = error + gamma * lam * advantage[running]
        value[running] = values[at]
        advantages[at] = advantage[running]
    return advantages


def _whitened(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Mean 0 and variance 1 (that of a sample: divisor N - 1)."""
    centred = values - values.mean() if len(values) else values
    variance = float((centred**2).sum()) / max(len(values) - 1, 1)
    whitened: NDArray[np.float64] = centred / np.sqrt(variance + EPSILON)
    return whitened
