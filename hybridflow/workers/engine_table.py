"""The engines by the names that `training=` and `rollout=` give them; each is imported when it is first built."""

from __future__ import annotations

import importlib
from typing import Any

from ..engines import RolloutEngine, TrainEngine
from .models.config import ModelConfig
from .settings import Settings
from .training.config import FSDPConfig

TRAIN = {"fsdp": "hybridflow.workers.training.fsdp:FSDPEngine"}
ROLLOUT = {
    "transformers": "hybridflow.workers.rollout.transformers:TransformersRollout",
    "vllm": "hybridflow.workers.rollout.vllm:VLLMRollout",
}


def train_engine(
    settings: Settings,
    *,
    head: str = "lm",
    model: ModelConfig | None = None,
    path: str | None = None,
    training: FSDPConfig | None = None,
    idle_steps: int = 0,
    trainable: bool = True,
) -> TrainEngine:
    """A training engine over `model` (None: the policy's) with the weights at `path` (None: the model's own).

    head: lm, value or score. training: None: the policy's. idle_steps: steps of the run that it sits out.
    """
    training = training or settings.training
    if settings.deterministic:
        from ..device import use_deterministic_algorithms  # brings torch

        use_deterministic_algorithms()
    engine: TrainEngine = _load(TRAIN[training.engine])(
        model or settings.model,
        training,
        head=head,
        path=path,
        temperature=settings.sampling.temperature,
        banned_tokens=settings.sampling.banned_tokens,
        total_steps=settings.optimizer_steps - idle_steps * settings.algorithm.epochs * settings.algorithm.minibatches,
        trainable=trainable,
    )
    return engine


def rollout_engine(settings: Settings, dtype: Any) -> RolloutEngine:
    """The rollout engine of the configuration; it samples once weights of this torch dtype were synced to it."""
    engine: RolloutEngine = _load(ROLLOUT[settings.rollout.engine])(
        settings.model, settings.rollout, seed=settings.seed, dtype=dtype
    )
    return engine


def _load(spec: str) -> Any:
    module, name = spec.split(":")
    return getattr(importlib.import_module(module), name)
