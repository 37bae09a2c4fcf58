"""Configuration of the training engines."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...errors import ConfigError, did_you_mean

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
