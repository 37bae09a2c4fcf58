"""FSDP2 over a policy model, and what all ranks must agree on. One rank is a mesh of one: the same code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ...batch import Batch, concat
from ...device import current_device, device_type, init_process_group_once
from ...engines import ParameterShard
from .optimizer import local
from .policy import PolicyModel


def shard(model: PolicyModel, compute_dtype: torch.dtype) -> DeviceMesh:
    """Splits every parameter over all ranks, in place: each decoder layer is a group, the rest is another.

    Gradients are summed over ranks, not averaged: weights of tokens hold for the whole batch.
    """
    init_process_group_once()
    mesh = init_device_mesh(device_type(), (dist.get_world_size(),))
    half = compute_dtype if compute_dtype != torch.float32 else None
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32 if half else None)
    # gathering again in the backward pass saves memory only where there is another rank to hold the rest
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "reshard_after_forward": mesh.size() > 1}
    for layer in model.layers():
        fully_shard(layer, **options)
    fully_shard(model, **options)
    for module in fsdp_modules(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor
    return mesh


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


def whole_batch(batch: Batch, *columns: str) -> tuple[Batch, slice]:
    """These columns of the rows of all ranks, in rank order, and where this rank's rows are among them."""
    own = batch.select(*(name for name in columns if name in batch))
    if dist.get_world_size() == 1:
        return own, slice(0, len(own))
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, own)
    start = sum(len(part) for part in parts[: dist.get_rank()])
    return concat(parts), slice(start, start + len(own))


def most(count: int) -> int:
    """The largest of the ranks' counts."""
    if dist.get_world_size() == 1:
        return count
    counts = torch.tensor(count, device=current_device())
    dist.all_reduce(counts, dist.ReduceOp.MAX)
    return int(counts.item())


def sum_over_ranks(values: dict[str, float]) -> dict[str, float]:
    """Sums by name; a name that a rank lacks counts 0 there."""
    parts: list[dict[str, float]] = [values]
    if dist.get_world_size() > 1:
        parts *= dist.get_world_size()
        dist.all_gather_object(parts, values)
    return {name: sum(part.get(name, 0.0) for part in parts) for part in parts for name in part}
