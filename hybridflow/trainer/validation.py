"""Validation numbers: pass@k and means, overall and by source."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..batch import Batch, Metrics
from ..engines import Sampling
from ..errors import ConfigError
from .config import ValidationConfig

SOLVED = 0.999  # a sample counts as solved from this value of its first reward function on
LOWER_IS_BETTER = ("loss",)


class Validation:
    """When to validate, what to make of it, and whether it got better. State: the best value and how stale it is."""

    def __init__(self, config: ValidationConfig, rows: Batch | None, sampling: Sampling) -> None:
        self._config = config
        self._rows = rows
        self._sampling = sampling
        self.best: float | None = None
        self.without_improvement = 0

    def due(self, step: int, last: bool) -> bool:
        """Whether to validate after this many steps (0: before training). The last step always is, if any is."""
        every = self._config.every_steps
        if self._rows is None or not every:
            return False
        return self._config.before_training if step == 0 else last or step % every == 0

    def run(self, fn: Callable[[Batch, Sampling], Batch]) -> dict[str, float]:
        """`fn` on all validation rows; the metrics without prefix. Errors: ConfigError without rows."""
        if self._rows is None:
            raise ConfigError("there are no validation rows: set data.validation_path, or data.validation_split.")
        return validation_metrics(fn(self._rows, self._sampling), self._config.pass_at)

    def improved(self, metrics: Metrics) -> bool:
        """Whether validation.metric is the best so far; keeps count of those that are not."""
        name = self._config.metric
        if name not in metrics:
            raise ConfigError(f"validation.metric={name} is not among the validation's metrics: {', '.join(metrics)}.")
        value = -metrics[name] if name.startswith(LOWER_IS_BETTER) else metrics[name]
        better = self.best is None or value > self.best
        self.best = value if better else self.best
        self.without_improvement = 0 if better else self.without_improvement + 1
        return better

    @property
    def out_of_patience(self) -> bool:
        """Whether validation.patience validations in a row brought nothing better."""
        patience = self._config.patience
        return patience is not None and self.without_improvement >= patience

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "without_improvement": self.without_improvement}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.without_improvement = state["best"], state["without_improvement"]


def validation_metrics(rows: Batch, pass_at: Sequence[int]) -> dict[str, float]:
    """Mean of reward, of every reward/* component, of loss and of accuracy (of pairs) over kept rows; pass@k; the same
    for each source if there are several; `errors`: rows that could not be scored, which count as 0 in the reward and as
    unsolved.

    A sample is solved if the first component that applies to it (the first column reward/* that is not NaN: the first
    function of reward.functions) is at least 0.999, whatever reward.weights say; without components, if the reward is.
    Errors: ValueError from pass_at_k if a k is over the number of samples of a prompt.
    """
    names = [n for n in rows.names if n in ("reward", "loss", "accuracy") or n.startswith("reward/")]
    data = rows.fetch(*names, *(n for n in ("keep", "group_id", "source") if n in rows))
    metrics = _means(data, names, pass_at)
    sources = data.array("source") if "source" in data else np.array([])
    if len(set(sources)) > 1:
        for source in sorted(set(sources)):
            part = data.take(np.flatnonzero(sources == source))
            metrics |= {f"{name}/{source}": value for name, value in _means(part, names, pass_at).items()}
    return metrics


def pass_at_k(solved: NDArray[np.bool_], group_id: NDArray[np.int64], k: int) -> float:
    """Chance that one of k samples of a prompt is solved, averaged over prompts.

    The unbiased estimator 1 - C(n - c, k) / C(n, k) of Chen et al. 2021 (arXiv 2107.03374, eq. 1), n samples of which c
    are solved. solved [rows], group_id [rows]. Errors: ValueError if a prompt has fewer than k samples.
    """
    _, inverse = np.unique(group_id, return_inverse=True)
    n = np.bincount(inverse)
    c = np.bincount(inverse, solved.astype(np.float64))
    if (n < k).any():
        raise ValueError(f"pass@{k} needs {k} samples of each prompt; one has {n.min()}")
    miss = np.ones(len(n))
    for i in range(k):
        miss *= np.maximum(n - c - i, 0) / (n - i)
    return float((1 - miss).mean())


def _means(data: Batch, names: Sequence[str], pass_at: Sequence[int]) -> dict[str, float]:
    keep = data.array("keep") if "keep" in data else np.ones(len(data), bool)
    metrics: dict[str, float] = {}
    for name in names:
        values = data.array(name).astype(np.float64)
        if name == "reward":
            values = np.where(keep, values, 0.0)
        known = np.isfinite(values)
        if known.any():
            metrics[name] = float(values[known].mean())
    if "reward" in names:
        solved = keep & (_judged_by(data, names) >= SOLVED)
        metrics |= {f"pass@{k}": pass_at_k(solved, data.array("group_id"), k) for k in pass_at}
        metrics["errors"] = float((~keep).sum())
    return metrics


def _judged_by(data: Batch, names: Sequence[str]) -> NDArray[np.floating]:
    """What says whether a sample is solved, [rows]."""
    judge = np.full(len(data), np.nan)
    for name in (*(n for n in names if n.startswith("reward/")), "reward"):
        judge = np.where(np.isnan(judge), data.array(name), judge)
    return judge
