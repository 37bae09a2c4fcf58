"""Configuration of the rollout engines."""

from __future__ import annotations

from dataclasses import dataclass

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
        if self.max_concurrent < 1:
            raise ConfigError(f"rollout.max_concurrent={self.max_concurrent}: at least 1 rollout is decoded at once.")
