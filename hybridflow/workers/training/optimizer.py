"""AdamW over named parameters, the schedule of its learning rate, and which parameters are trained at all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_scheduler
from transformers.trainer_utils import SchedulerType

from ...errors import ConfigError, did_you_mean
from .config import OptimizerConfig

NEED_OPTIONS = (
    "reduce_lr_on_plateau",
    "greedy",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "warmup_stable_decay",
)
SCHEDULES = tuple(kind.value for kind in SchedulerType if kind.value not in NEED_OPTIONS)


def freeze(model: nn.Module, globs: Sequence[str]) -> None:
    """Parameters whose name matches a glob get no gradient. Errors: ConfigError for a glob that matches none."""
    names = dict(model.named_parameters())
    for glob in globs:
        matching = [name for name in names if fnmatchcase(name, glob)]
        if not matching:
            examples = ", ".join([*list(names)[:3], *list(names)[-1:]])
            raise ConfigError(f"model.freeze: '{glob}' matches no parameter; there are {examples}, ...")
        for name in matching:
            names[name].requires_grad_(False)


def build_optimizer(parameters: Iterable[Tensor], config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW with its moments already there, so that it can be saved and loaded at any step. Vectors (norms, biases) have
    no weight decay."""
    trained = [p for p in parameters if p.requires_grad]
    if not trained:
        raise ConfigError("model.freeze leaves no parameter to train.")
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    beta1, beta2 = config.adam_betas
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=config.lr, betas=(beta1, beta2), fused=True
    )
    for p in trained:
        optimizer.state[p] = {
            "step": torch.zeros((), device=p.device),
            "exp_avg": torch.zeros_like(p),
            "exp_avg_sq": torch.zeros_like(p),
        }
    return optimizer


def build_schedule(optimizer: torch.optim.Optimizer, config: OptimizerConfig, total_steps: int | None) -> LRScheduler:
    """The transformers scheduler `config.lr_schedule`. Errors: ConfigError for a name or a length it can't take."""
    name = config.lr_schedule
    if name not in SCHEDULES:
        raise ConfigError(
            f"training.lr_schedule={name}: it is one of {', '.join(SCHEDULES)}.{did_you_mean(name, SCHEDULES)}"
        )
    if name == "constant" and config.warmup_steps:
        name = "constant_with_warmup"
    try:
        schedule: LRScheduler = get_scheduler(name, optimizer, config.warmup_steps, total_steps)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"training.lr_schedule={name} with run.steps={total_steps}: {error}") from error
    return schedule


def local(tensor: Any) -> Tensor:
    """This rank's part of a parameter or gradient; it shares memory with it."""
    part: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part.detach()


def gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """This rank's parts of all gradients there are."""
    return [local(p.grad) for p in parameters if p.grad is not None]


def gradient_norm(grads: list[Tensor], device: torch.device) -> float:
    """2-norm over the gradients of all ranks; NaN or infinite if one of them is."""
    squares = torch.zeros((), device=device)
    if grads:
        squares = torch.stack(torch._foreach_norm(grads)).square().sum()
    dist.all_reduce(squares)
    return squares.sqrt().item()


def clip(grads: list[Tensor], norm: float, limit: float) -> None:
    """Scales the gradients so that their norm is at most `limit`; 0: no limit."""
    if limit and norm > limit:
        torch._foreach_mul_(grads, limit / norm)
