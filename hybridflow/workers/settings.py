"""What the roles read of a run's configuration, and nothing else of the run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..algorithms.config import AlgorithmConfig
from ..algorithms.registry import Loss
from ..engines import Sampling
from .models.config import ModelConfig
from .rollout.config import RolloutConfig
from .scoring import RewardConfig
from .training.config import FSDPConfig


@dataclass(frozen=True)
class Settings:
    """Frozen once the run has started.

    reward_functions: name, function, weight of each. clip_value: of the critic's loss. trains: whether anything will be
    learned. optimizer_steps: of the whole run, for schedules.
    """

    model: ModelConfig
    training: FSDPConfig
    rollout: RolloutConfig
    algorithm: AlgorithmConfig
    sampling: Sampling
    reward: RewardConfig
    reward_functions: tuple[tuple[str, Callable[..., Any], float], ...]
    loss: Loss
    reads_old_logprobs: bool
    reference_path: str | None
    critic_path: str | None
    critic_training: FSDPConfig
    clip_value: float | None
    seed: int
    deterministic: bool
    trains: bool
    optimizer_steps: int
