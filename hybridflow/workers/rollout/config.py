"""Configuration of the rollout engines."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ...errors import ConfigError


@dataclass
class TransformersConfig:
    """rollout=transformers: a transformers model decoded in the actor's own process, over the trainer's own weights."""

    engine: str = "transformers"
    max_context_tokens: int | None = None
    """Prompt and response together; null = what the model was made for (its max_position_embeddings)."""
    max_concurrent: int = 256
    """Rollouts decoded at once; more wait for their turn. Their keys and values are what takes memory."""

    def __post_init__(self) -> None:
        _check_concurrent(self.max_concurrent)


@dataclass
class VLLMConfig:
    """rollout=vllm: vLLM's engine in the actor's own process; the weights are copied into it at each sync."""

    engine: str = "vllm"
    max_context_tokens: int | None = None
    """Prompt and response together; null = what the model was made for (its max_position_embeddings)."""
    max_concurrent: int = 256
    """Rollouts decoded at once; more wait for their turn."""
    memory_fraction: float = 0.5
    """Of an accelerator's memory, for vLLM's weights, keys and values together."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM's engine, by its own names: rollout.options.KEY=..."""

    def __post_init__(self) -> None:
        _check_concurrent(self.max_concurrent)
        if not 0 < self.memory_fraction <= 1:
            raise ConfigError(f"rollout.memory_fraction={self.memory_fraction}: it is above 0 and at most 1.")


RolloutConfig = TransformersConfig | VLLMConfig


def _check_concurrent(most: int) -> None:
    if most < 1:
        raise ConfigError(f"rollout.max_concurrent={most}: at least 1 rollout is decoded at once.")
