"""REINFORCE: the reward itself, against the mean of the batch (Williams 1992, Machine Learning 8)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...errors import ConfigError
from ..registry import register
from .statistics import Flags, Floats, Ints, kept_rollouts


def check_options(baseline: str) -> None:
    """Errors: ConfigError for an unknown baseline."""
    if baseline not in ("mean", "none"):
        raise ConfigError(f"advantage.baseline={baseline}: it is mean or none.")


@register("advantage", check=check_options)
def reinforce(
    reward: Floats, keep: Flags, rollout_id: Ints | None = None, *, baseline: str = "mean"
) -> NDArray[np.float64]:
    """reward - baseline, one value per row, [n].

    baseline: mean (over the kept rollouts of the batch) | none. Rejected rows get 0 and move no mean. Rows of one
    rollout count once and have one advantage.
    """
    rollouts = kept_rollouts(reward, np.zeros(len(reward), np.int64), keep, rollout_id)
    level = rollouts.mean(rollouts.reward) if baseline == "mean" else 0.0
    return rollouts.to_rows(rollouts.reward - level)
