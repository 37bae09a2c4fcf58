"""From rewards to advantages: KL in the reward first, then the estimator that `advantage=` names."""

from __future__ import annotations

import inspect
from typing import Any

from ..algorithms.advantages.statistics import group_statistics, only_singletons
from ..algorithms.config import AlgorithmConfig
from ..algorithms.kl import AdaptiveKL
from ..algorithms.registry import resolve
from ..algorithms.token_rewards import token_rewards
from ..batch import Batch
from ..errors import BatchError
from .config import Plugin


class Advantages:
    """Callable on a scored batch. The KL coefficient is state: it adapts when algorithm.kl_target is set."""

    def __init__(self, algorithm: AlgorithmConfig, advantage: Plugin) -> None:
        self._algorithm = algorithm
        self._estimator = resolve(advantage.name, "advantage")
        self._options = advantage.options
        self._kl = AdaptiveKL(algorithm.kl_coef, algorithm.kl_target, algorithm.kl_horizon)

    def __call__(self, batch: Batch) -> Batch:
        """Columns advantages (and returns, token_rewards where made) for the rows of the batch; metrics ride along."""
        asked = inspect.signature(self._estimator).parameters
        metrics = self._group_metrics(batch)
        if "group_id" in asked:
            _check_groups(batch)
        full, extra = batch, None
        if self._algorithm.kl == "reward" or "token_rewards" in asked:
            extra, kl_metrics = self._token_rewards(batch)
            metrics |= kl_metrics
            full = (batch.drop("reward") if "reward" in extra else batch) | extra
            extra = extra.select("token_rewards")
        out = full.map(self._estimator, to="advantages", **self._options)
        out = out if extra is None else extra | out
        return out.with_metrics(metrics)

    def state_dict(self) -> dict[str, Any]:
        return self._kl.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._kl.load_state_dict(state)

    def _token_rewards(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        if self._algorithm.kl != "reward":
            return batch.map(_without_kl), {}
        batch.select("ref_logprobs", "old_logprobs")  # says what to call where one is missing
        coef = self._kl.coef
        extra = batch.map(token_rewards, kl_coef=coef, kl_estimator=self._algorithm.kl_estimator)
        dense = (batch.select("reward", "keep") | extra.select("kl")).fetch()
        kl, keep = dense.array("kl"), dense.array("keep")
        less = Batch({"reward": dense.array("reward") - coef * kl}, extra.ids)
        mean = float(kl[keep].mean()) if keep.any() else 0.0
        self._kl.update(mean, int(keep.sum()))
        return extra.drop("kl") | less, {"kl/coef": coef, "kl/sequence": mean}

    def _group_metrics(self, batch: Batch) -> dict[str, float]:
        dense = batch.fetch("reward", "group_id", "keep", "rollout_id")
        return dict(group_statistics(*(dense.array(name) for name in dense.names)))


def _without_kl(reward: Any, response_mask: Any, row_of_token: Any) -> dict[str, Any]:
    return dict(token_rewards(reward, response_mask, row_of_token))


def _check_groups(batch: Batch) -> None:
    """A wrong group id makes every row a group of its own, which has no baseline: nothing would ever be learned."""
    dense = batch.fetch("group_id", "rollout_id")
    if len(batch) > 1 and only_singletons(dense.array("group_id"), dense.array("rollout_id")):
        raise BatchError(
            f"all {len(batch)} rows are groups of one: no baseline, every advantage would be 0. Is group_id the "
            "prompt's? Sample several per prompt with sampling.n."
        )
