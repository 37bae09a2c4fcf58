"""The engines by the names that `training=` and `rollout=` give them; each is imported when it is first built."""

from __future__ import annotations

import importlib
from typing import Any

from ..engines import RolloutEngine, TrainEngine
from .settings import Settings

TRAIN = {"fsdp": "hybridflow.workers.training.fsdp:FSDPEngine"}
ROLLOUT = {"transformers": "hybridflow.workers.rollout.transformers:TransformersRollout"}


def train_engine(settings: Settings, *, path: str | None = None, trainable: bool = True) -> TrainEngine:
    """The training engine of the configuration over the model at `path` (None: model.path)."""
    if settings.deterministic:
        from ..device import use_deterministic_algorithms  # brings torch

        use_deterministic_algorithms()
    engine: TrainEngine = _load(TRAIN[settings.training.engine])(
        settings.model,
        settings.training,
        path=path,
        temperature=settings.sampling.temperature,
        banned_tokens=settings.sampling.banned_tokens,
        total_steps=settings.optimizer_steps,
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
