"""AdamW over named parameters, the schedule of its learning rate, and which parameters are trained at all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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


class Optimization:
    """AdamW over what a model trains, its schedule, and the number of steps taken.

    The moments exist from the start, so that they can be saved and loaded at any step. Vectors (norms, biases) have no
    weight decay. replicas: how many times the ranks hold the model. Errors: ConfigError for a schedule that is not one,
    or if nothing is trained.
    """

    def __init__(self, model: nn.Module, config: OptimizerConfig, total_steps: int | None, replicas: int) -> None:
        self._trained = [p for p in model.parameters() if p.requires_grad]
        if not self._trained:
            raise ConfigError("model.freeze leaves no parameter to train.")
        self._clip, self._replicas = config.grad_clip, replicas
        self._optimizer = _adamw(self._trained, config)
        self._schedule = _schedule(self._optimizer, config, total_steps)
        self.steps = 0

    def gradient_norm(self) -> float:
        """2-norm over the gradients of all ranks; NaN or infinite if one of them is."""
        norms = torch._foreach_norm(self._gradients())
        squares = torch.stack(norms).square().sum()
        if dist.get_world_size() > 1:
            dist.all_reduce(squares)
        return (squares / self._replicas).sqrt().item()

    def step(self, norm: float) -> float:
        """One step with gradients of this norm, clipped to training.grad_clip. Returns its learning rate."""
        if self._clip and norm > self._clip:
            torch._foreach_mul_(self._gradients(), self._clip / norm)
        lr: float = self._optimizer.param_groups[0]["lr"]
        self._optimizer.step()
        self._schedule.step()
        self.steps += 1
        return lr

    @contextmanager
    def gradients(self) -> Iterator[None]:
        """Gradients add up inside, and are forgotten after it, whatever happened."""
        try:
            yield
        finally:
            self._optimizer.zero_grad()

    def tensors(self, model: nn.Module) -> dict[str, Tensor]:
        """All that is saved as tensors, live: parameters, and the moments of those that are trained."""
        tensors = {}
        for name, parameter in model.named_parameters():
            tensors[f"model.{name}"] = parameter.detach()
            for key, value in self._optimizer.state.get(parameter, {}).items():
                tensors[f"optimizer.{name}.{key}"] = value
        return tensors

    def state_dict(self) -> dict[str, Any]:
        """All that is saved beside them."""
        return {"steps": self.steps, "schedule": self._schedule.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` gave."""
        self.steps = state["steps"]
        self._schedule.load_state_dict(state["schedule"])
        for group, lr in zip(self._optimizer.param_groups, self._schedule.get_last_lr(), strict=True):
            group["lr"] = lr

    def _gradients(self) -> list[Tensor]:
        return [local(p.grad) for p in self._trained if p.grad is not None]


def local(tensor: Any) -> Tensor:
    """This rank's part of a parameter or gradient; it shares memory with it."""
    with torch.no_grad():
        part: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return part.detach()


def _adamw(trained: Sequence[nn.Parameter], config: OptimizerConfig) -> torch.optim.AdamW:
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    beta1, beta2 = config.adam_betas
    groups = [group for group in groups if group["params"]]
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=(beta1, beta2), fused=True)
    for p in trained:
        optimizer.state[p] = {
            "step": torch.zeros((), device=p.device),
            "exp_avg": torch.zeros_like(p),
            "exp_avg_sq": torch.zeros_like(p),
        }
    return optimizer


def _schedule(optimizer: torch.optim.Optimizer, config: OptimizerConfig, total_steps: int | None) -> LRScheduler:
    """The transformers scheduler `config.lr_schedule`."""
    name = config.lr_schedule
    if name not in SCHEDULES:
        known = ", ".join(SCHEDULES)
        raise ConfigError(f"training.lr_schedule={name}: it is one of {known}.{did_you_mean(name, SCHEDULES)}")
    if name == "constant" and config.warmup_steps:
        name = "constant_with_warmup"
    try:
        schedule: LRScheduler = get_scheduler(name, optimizer, config.warmup_steps, total_steps)
    except ValueError as error:
        raise ConfigError(f"training.lr_schedule={name} over {total_steps} steps: {error}") from error
    return schedule
