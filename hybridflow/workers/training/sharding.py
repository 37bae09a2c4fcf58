"""FSDP2 over a policy model: how its parameters get to the ranks, and what a rank holds of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ...device import current_device
from ...engines import ParameterShard
from .optimizer import local
from .policy import PolicyModel


def shard(model: PolicyModel, mesh: DeviceMesh, compute_dtype: torch.dtype) -> None:
    """Splits every parameter over the last dimension of `mesh`, in place: each decoder layer is a group, the rest is
    another. Only rank 0 has weights; the others get them from it, one group at a time.

    Gradients are summed over ranks, not averaged: weights of tokens hold for the whole batch.
    """
    half = compute_dtype if compute_dtype != torch.float32 else None
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32 if half else None)
    # gathering again in the backward pass saves memory only where there is another rank to hold the rest
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "reshard_after_forward": mesh.size(-1) > 1}
    for group in (*model.layers(), model):
        if mesh.size() > 1:
            _take_from_rank_0(group)
        fully_shard(group, **options)
    for module in fsdp_modules(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor


def _take_from_rank_0(group: nn.Module) -> None:
    """Rank 0's parameters and buffers take the place of this rank's; those that are sharded already stay."""
    device, first = current_device(), dist.get_rank() == 0
    taken: dict[nn.Parameter, nn.Parameter] = {}  # tied parameters stay one
    for owner in group.modules():
        for name, old in owner.named_parameters(recurse=False):
            if isinstance(old, DTensor):
                continue
            if old not in taken:
                whole = old.detach().to(device) if first else torch.empty_like(old, device=device)
                dist.broadcast(whole, 0)
                taken[old] = nn.Parameter(whole, old.requires_grad)
            setattr(owner, name, taken[old])
        for name, buffer in owner.named_buffers(recurse=False):
            whole = buffer.to(device)
            dist.broadcast(whole, 0)
            setattr(owner, name, whole)


def fsdp_modules(model: nn.Module) -> Iterator[FSDPModule]:
    """The modules that own a group of parameters."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))


@contextmanager
def gathering(model: nn.Module) -> Iterator[None]:
    """Forward passes gather parameters and keep them. After this block, whatever happened in it, only the rank's own
    parts are left: an optimizer step, a load or another engine finds them, and no gathered copy is stale."""
    try:
        yield
    finally:
        for module in fsdp_modules(model):
            module.reshard()


def shard_of(name: str, parameter: Tensor) -> ParameterShard:
    """What this rank holds of a parameter; a live view."""
    offset: tuple[int, ...] = (0,) * parameter.dim()
    if isinstance(parameter, DTensor):
        _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return ParameterShard(name, tuple(parameter.shape), offset, local(parameter))


def gathered(name: str, parameter: Tensor, dtype: torch.dtype) -> ParameterShard:
    """A parameter whole, in `dtype`, gathered from the ranks that hold its shards: all of them make this call. What one
    rank holds whole is the live tensor and no copy."""
    if not isinstance(parameter, DTensor) or parameter.device_mesh.size(-1) == 1:
        return shard_of(name, parameter)
    own: Any = parameter.detach().to(dtype)
    whole: Tensor = own.full_tensor()
    received = (whole.numel() - local(own).numel()) * whole.element_size()
    return ParameterShard(name, tuple(whole.shape), (0,) * whole.dim(), whole, received)
