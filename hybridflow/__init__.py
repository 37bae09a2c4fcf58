"""HybridFlow: reinforcement-learning post-training of language models, written as dataflow over worker groups.

One import for a driver. Nothing heavy is imported until a name is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .algorithms.registry import Loss as Loss
    from .algorithms.registry import register as register
    from .batch import Batch as Batch
    from .batch import concat as concat
    from .controller.worker import Worker as Worker
    from .controller.worker import remote as remote
    from .engines import Sampling as Sampling
    from .errors import HybridFlowError as HybridFlowError
    from .trainer.config import Config as Config
    from .trainer.recipe import configure as configure
    from .trainer.recipe import recipe as recipe
    from .trainer.recipe import train as train
    from .trainer.run import Run as Run
    from .workers.actor import Actor as Actor
    from .workers.critic import Critic as Critic
    from .workers.reference import Reference as Reference
    from .workers.reward import Reward as Reward
    from .workers.reward_model import RewardModel as RewardModel

__version__ = "0.1.0"

_HOME = {
    "Actor": "workers.actor",
    "Batch": "batch",
    "Config": "trainer.config",
    "Critic": "workers.critic",
    "HybridFlowError": "errors",
    "Loss": "algorithms.registry",
    "Reference": "workers.reference",
    "Reward": "workers.reward",
    "RewardModel": "workers.reward_model",
    "Run": "trainer.run",
    "Sampling": "engines",
    "Worker": "controller.worker",
    "concat": "batch",
    "configure": "trainer.recipe",
    "recipe": "trainer.recipe",
    "register": "algorithms.registry",
    "remote": "controller.worker",
    "train": "trainer.recipe",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'hybridflow' has no attribute '{name}'")
    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value
