"""What Hydra composes from: the tree's nodes, the options of each group, and the algorithm presets.

A preset holds only what differs from the defaults: a default value stands in one place, its dataclass.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from ..algorithms.config import AlgorithmConfig
from ..workers.models.config import ModelConfig
from ..workers.rollout.config import TransformersConfig, VLLMConfig
from ..workers.scoring import RewardConfig
from ..workers.training.config import FSDPConfig
from .data_config import DataConfig
from .placement import PlacementConfig
from .tree import CriticConfig, ReferenceConfig, RunConfig, SamplingConfig, ValidationConfig

DEFAULTS = {"model": "default", "data": "default", "training": "fsdp", "rollout": "transformers", "algorithm": "grpo"}

GROUPS: dict[str, dict[str, Any]] = {
    "model": {"default": ModelConfig, "smollm2": ModelConfig(path="smollm2")},
    "data": {
        "default": DataConfig,
        "arithmetic": DataConfig(path="hybridflow.trainer.arithmetic:problems"),
        "gsm8k": DataConfig(path="openai/gsm8k:main", format="hybridflow.trainer.formats:gsm8k"),
        "reasoning_gym": DataConfig(path="reasoning_gym:chain_sum"),
    },
    "training": {"fsdp": FSDPConfig},
    "rollout": {"transformers": TransformersConfig, "vllm": VLLMConfig},
}
"""Options of the groups that fill one node each."""

PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "reinforce": {"advantage": {"name": "reinforce"}, "loss": {"name": "reinforce"}},
    "ppo": {
        "advantage": {"name": "gae"},
        "algorithm": {"kl": "reward", "kl_estimator": "k1", "minibatches": 4},
        "sampling": {"n": 1},
    },
    "sft": {"loss": {"name": "sft"}, "data": {"kind": "examples"}, "validation": {"metric": "loss"}},
    "reward_model": {"loss": {"name": "bradley_terry"}, "data": {"kind": "pairs"}, "validation": {"metric": "loss"}},
}
"""Options of `algorithm`, over the whole tree. An advantage or loss is named, with any options beside the name."""

CHOSEN_BY_NAME = {
    "training.engine": "training",
    "critic.training.engine": "training",
    "rollout.engine": "rollout",
    "algorithm.name": "algorithm",
}
"""Keys that say which option of a group was chosen; nobody sets them."""

FREE_NODES = ("data.task", "rollout.options")
"""Nodes whose keys are those of somebody else, who checks them."""

PLUGINS = ("advantage", "loss")
"""Nodes whose keys are the keyword-only parameters of the function they name."""


@dataclass
class Tree:
    """The whole configuration as Hydra composes it. Presets come last, so that they may change any node."""

    defaults: list[Any] = field(
        default_factory=lambda: ["_self_", *({group: name} for group, name in DEFAULTS.items())]
    )
    model: Any = MISSING
    data: Any = MISSING
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    training: Any = MISSING
    rollout: Any = MISSING
    advantage: dict[str, Any] = field(default_factory=lambda: {"name": "grpo"})
    loss: dict[str, Any] = field(default_factory=lambda: {"name": "ppo_clip"})
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    run: RunConfig = field(default_factory=RunConfig)
    options: Any = None
