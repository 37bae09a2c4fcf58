"""GRPO: a sample's reward against the other samples of its prompt (DeepSeekMath, arXiv 2402.03300, sec. 4.1.2)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..registry import register
from .statistics import Flags, Floats, Ints, kept_rollouts

EPSILON = 1e-6


@register("advantage")
def grpo(
    reward: Floats, group_id: Ints, keep: Flags, rollout_id: Ints | None = None, *, normalize_std: bool = True
) -> NDArray[np.float64]:
    """(reward - mean of the group) / (std of the group + 1e-6), one value per row, [n].

    The std is the sample's (divisor N - 1). normalize_std=False leaves it out (Dr. GRPO, arXiv 2503.20783).
    Exactly 0: rejected rows, which move no mean and no std; groups of one, which have no baseline; groups whose rewards
    are all equal. Rows of one rollout count once and have one advantage.
    """
    rollouts = kept_rollouts(reward, group_id, keep, rollout_id)
    centred = np.where(rollouts.varied[rollouts.group], rollouts.reward - rollouts.mean(rollouts.reward), 0.0)
    if normalize_std:
        centred /= np.sqrt(rollouts.mean(centred**2, lost=1)) + EPSILON
    return rollouts.to_rows(centred)
