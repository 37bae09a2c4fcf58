"""Configuration of the algorithm, `algorithm.*`: what any advantage and any loss share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import ConfigError, did_you_mean
from .aggregation import AGGREGATIONS
from .kl import ESTIMATORS

KL_PLACES = ("none", "reward", "loss")
OLD_POLICIES = ("recompute", "rollout", "current")


@dataclass
class AlgorithmConfig:
    """Errors: ConfigError, when made, for a value outside its range or one that no other key lets anything read."""

    name: str = "grpo"
    """The preset that set these values; shown, and read by nothing."""

    epochs: int = 1
    """Passes over a rollout batch."""

    minibatches: int = 1
    """Optimizer steps per epoch."""

    aggregation: str = "token_mean"
    """How losses of tokens become one number: see `hybridflow.algorithms.aggregation`."""

    entropy_coef: float = 0.0
    """Weight of the entropy bonus in the loss. 0: entropy is not computed for it."""

    kl: str = "none"
    """Where the KL penalty to the reference stands: none | reward (per token, before advantages) | loss."""

    kl_coef: float = 0.001
    """Weight of that penalty; with kl_target, its first value."""

    kl_estimator: str = "k3"
    """k1 | k2 | k3: see `hybridflow.algorithms.kl`. In the loss, k1 has an expected gradient of zero."""

    kl_target: float | None = None
    """KL to the reference, in nats per rollout, that an adaptive coefficient holds (kl=reward). None: it is fixed."""

    kl_horizon: int = 10_000
    """Rollouts over which the adaptive coefficient reacts."""

    kl_stop: float | None = None
    """KL to the old policy, in nats per token, above which the remaining steps on a batch are skipped. None: never."""

    old_policy: str = "recompute"
    """Where the ratio's denominator comes from: recompute (a forward pass) | rollout (the sampler's log-probs) |
    current (the detached log-probs of the update itself; one optimizer step per batch)."""

    critic_warmup_steps: int = 0
    """Steps at the start in which the critic learns and the policy does not."""

    def __post_init__(self) -> None:
        for key, legal in {
            "aggregation": AGGREGATIONS,
            "kl": KL_PLACES,
            "kl_estimator": ESTIMATORS,
            "old_policy": OLD_POLICIES,
        }.items():
            _check_choice(key, getattr(self, key), legal)
        for key in ("epochs", "minibatches", "kl_horizon"):
            if getattr(self, key) < 1:
                raise ConfigError(f"algorithm.{key}={getattr(self, key)}: it is at least 1.")
        for key in ("entropy_coef", "kl_coef", "critic_warmup_steps"):
            if getattr(self, key) < 0:
                raise ConfigError(f"algorithm.{key}={getattr(self, key)}: it is at least 0.")
        for key in ("kl_target", "kl_stop"):
            if getattr(self, key) is not None and getattr(self, key) <= 0:
                raise ConfigError(f"algorithm.{key}={getattr(self, key)}: it is above 0, or null to switch it off.")
        if self.kl_target is not None and self.kl != "reward":
            raise ConfigError(
                f"algorithm.kl_target is set, but algorithm.kl={self.kl} reads it nowhere: say algorithm.kl=reward."
            )
        if self.kl == "reward" and self.old_policy == "current":
            raise ConfigError(
                "algorithm.kl=reward needs old log-probs before the update, and algorithm.old_policy=current has none: "
                "say algorithm.old_policy=recompute or rollout."
            )


def _check_choice(key: str, value: str, legal: Sequence[str]) -> None:
    if value not in legal:
        raise ConfigError(f"algorithm.{key}={value}: it is one of {', '.join(legal)}.{did_you_mean(value, legal)}")
