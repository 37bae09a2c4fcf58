"""Kept rollouts by group: what group-relative advantages are computed from, and what says whether they can teach."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class KeptRollouts:
    """m kept rollouts in g groups: rows that share a rollout_id are one rollout, rejected rows are in none.

    reward [m]: the mean over the rollout's kept rows. group [m]: 0..g-1. of_row [n]: the row's rollout, -1 if rejected.
    """

    reward: NDArray[np.float64]
    group: Ints
    of_row: Ints

    @property
    def sizes(self) -> Ints:
        """Kept rollouts of each group, [g]."""
        return np.bincount(self.group)

    @property
    def varied(self) -> Flags:
        """Groups with at least two different rewards, [g]."""
        highest = np.full(len(self.sizes), -np.inf)
        lowest = -highest
        np.maximum.at(highest, self.group, self.reward)
        np.minimum.at(lowest, self.group, self.reward)
        return highest > lowest

    def mean(self, values: NDArray[np.float64], lost: int = 0) -> NDArray[np.float64]:
        """Mean of `values` [m] over each rollout's group, [m]; `lost` degrees of freedom are taken off the divisor."""
        sums = np.bincount(self.group, values)
        means: NDArray[np.float64] = (sums / np.maximum(self.sizes - lost, 1))[self.group]
        return means

    def to_rows(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Each row's value of its rollout, [n]; 0 for rejected rows."""
        return np.append(values, 0.0)[self.of_row]


def kept_rollouts(reward: Floats, group_id: NDArray[Any], keep: Flags, rollout_id: Ints | None = None) -> KeptRollouts:
    """The kept rollouts of rows with these columns [n]; without rollout_id each row is a rollout."""
    rows = np.flatnonzero(keep)
    rollout = np.arange(len(keep)) if rollout_id is None else rollout_id
    pairs, of_kept = np.unique(np.stack([group_id[rows], rollout[rows]], axis=1), axis=0, return_inverse=True)
    of_row = np.full(len(keep), -1)
    of_row[rows] = of_kept
    sums = np.bincount(of_kept, reward[rows].astype(np.float64), len(pairs))
    means = sums / np.bincount(of_kept, minlength=len(pairs))
    return KeptRollouts(means, np.unique(pairs[:, 0], return_inverse=True)[1], of_row)


def group_statistics(reward: Floats, group_id: Ints, keep: Flags, rollout_id: Ints | None = None) -> dict[str, float]:
    """What answers "the loss is 0, is it broken?".

    groups/count: groups with a kept rollout. groups/single: of these, groups of one, which have no baseline.
    groups/without_variance: groups of two or more whose rewards are all equal. rows/kept_share: share of rows kept.
    """
    rollouts = kept_rollouts(reward, group_id, keep, rollout_id)
    several = rollouts.sizes > 1
    return {
        "groups/count": float(len(several)),
        "groups/single": float((~several).sum()),
        "groups/without_variance": float((several & ~rollouts.varied).sum()),
        "rows/kept_share": float(np.mean(keep)) if len(keep) else 0.0,
    }


def only_singletons(group_id: Ints, rollout_id: Ints | None = None) -> bool:
    """Whether no two rollouts, kept or not, share a group: one sample per prompt, or wrong group ids. Group-relative
    advantages are then all 0."""
    n = len(group_id)
    return n > 0 and bool((kept_rollouts(np.zeros(n), group_id, np.ones(n, bool), rollout_id).sizes == 1).all())
