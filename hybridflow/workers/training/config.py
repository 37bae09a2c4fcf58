"""Configuration of the training engines."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Self

from ...errors import ConfigError, did_you_mean
from ...layout import ParallelLayout

PRECISIONS = ("auto", "fp32", "bf16")


@dataclass
class OptimizerConfig:
    """`training.*` of every engine: AdamW, its schedule, and the size of a micro-batch."""

    lr: float = 1e-6
    """Learning rate after the warm-up."""
    lr_schedule: str = "constant"
    """Any transformers scheduler that needs no options of its own: constant, linear, cosine, ..."""
    warmup_steps: int = 0
    """Optimizer steps over which lr rises from 0; from 1 on, lr_schedule=constant warms up too."""
    weight_decay: float = 0.0
    """Decoupled weight decay of matrices; norms and biases have none."""
    adam_betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    """Decay of the two moving averages."""
    grad_clip: float = 1.0
    """Largest gradient norm (over all parameters); 0 = no clipping."""
    precision: str = "auto"
    """auto | fp32 | bf16: dtype of matrix products; auto = bf16 on an accelerator, fp32 on a CPU. Masters are fp32."""
    tokens_per_microbatch: int = 16384
    """Tokens that one rank runs at once; a longer row is a micro-batch of its own."""
    activation_checkpointing: bool = True
    """Recompute each layer in the backward pass: one forward pass more, memory of one layer instead of all."""

    def __post_init__(self) -> None:
        """Errors: ConfigError for a value out of its range."""
        if self.precision not in PRECISIONS:
            raise ConfigError(
                f"training.precision={self.precision}: it is one of {', '.join(PRECISIONS)}."
                + did_you_mean(self.precision, PRECISIONS)
            )
        for name in ("lr", "warmup_steps", "weight_decay", "grad_clip"):
            if getattr(self, name) < 0:
                raise ConfigError(f"training.{name}={getattr(self, name)}: it is 0 or more.")
        if self.tokens_per_microbatch < 1:
            raise ConfigError(f"training.tokens_per_microbatch={self.tokens_per_microbatch}: it is 1 or more.")
        if len(self.adam_betas) != 2 or not all(0 <= beta < 1 for beta in self.adam_betas):
            raise ConfigError(f"training.adam_betas={list(self.adam_betas)}: two numbers in [0, 1) are needed.")


@dataclass
class FSDPConfig(OptimizerConfig):
    """`training=fsdp`: torch's FSDP2."""

    engine: str = "fsdp"
    shard_size: int | None = None
    """Ranks that hold one copy of the model in shards; the groups of so many ranks are replicas (HSDP). null = all."""
    sequence_parallel: int = 1
    """Neighbouring ranks that share each row (Ulysses); a micro-batch has tokens_per_microbatch tokens for each."""

    def __post_init__(self) -> None:
        """Errors: ConfigError for a value out of its range."""
        super().__post_init__()
        for name in ("shard_size", "sequence_parallel"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"training.{name}={value}: it is 1 or more, and divides the number of ranks.")

    def layout(self, ranks: int, key: str = "training") -> ParallelLayout:
        """How so many ranks are arranged. key: of this node. Errors: ConfigError as `check_ranks`."""
        check_ranks(self, ranks, key)
        return ParallelLayout(dp=ranks // self.sequence_parallel, cp=self.sequence_parallel)

    def fitted(self, ranks: int) -> Self:
        """For a frozen model on ranks of its own, which has no keys of its own: what does not divide them gives way."""
        shard_size = self.shard_size and math.gcd(self.shard_size, ranks)
        return replace(self, shard_size=shard_size, sequence_parallel=math.gcd(self.sequence_parallel, ranks))


def check_ranks(config: FSDPConfig, ranks: int, key: str = "training") -> None:
    """Errors: ConfigError if so many ranks can't be arranged as `config`, the node `key`, says."""
    for name in ("shard_size", "sequence_parallel"):
        _check_divides(f"{key}.{name}", getattr(config, name) or 1, ranks, f"{ranks} ranks")


def check_heads(config: FSDPConfig, heads: int) -> None:
    """Errors: ConfigError if a model's attention heads can't be split over training.sequence_parallel ranks."""
    _check_divides(
        "training.sequence_parallel", config.sequence_parallel, heads, f"the model's {heads} attention heads"
    )


def _check_divides(key: str, value: int, total: int, what: str) -> None:
    if total % value:
        legal = [size for size in range(1, total + 1) if total % size == 0]
        raise ConfigError(f"{key}={value} does not divide {what}: legal values {legal}.")
