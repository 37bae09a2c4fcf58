"""Taking over weights: another engine's tensors become the parameters of a transformers model in this process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ...engines import ParameterShard
from ...errors import EngineError, did_you_mean

NAMES_SHOWN = 5


def adopt(model: Any, shards: Iterable[ParameterShard], dtype: torch.dtype, device: torch.device) -> int:
    """Make each shard's tensor the parameter of that name: the tensor itself, where dtype and device are right already
    (nothing is copied, and later in-place updates are seen), a converted copy otherwise. Parameters tied to another
    one follow it and do not come themselves. Returns how many bytes the shards received from other ranks.

    Errors: EngineError for a parameter that is missing, unknown, misshapen, only part of one, or in the memory
    of another; some parameters may have been replaced by then.
    """
    tied = set(model.all_tied_weights_keys)
    missing = {name: p.shape for name, p in model.named_parameters(remove_duplicate=False) if name not in tied}
    known, owner_of_memory, received = list(missing), dict[int, str](), 0
    for shard in shards:
        _check(shard, missing, known)
        del missing[shard.name]
        tensor = shard.tensor.detach().to(device, dtype)
        owner = owner_of_memory.setdefault(tensor.data_ptr(), shard.name)
        if owner != shard.name and tensor.numel():
            raise EngineError(f"sync: '{shard.name}' lies in the same memory as '{owner}'; a buffer was reused.")
        _set(model, shard.name, tensor)
        received += shard.received
    if missing:
        names = ", ".join(list(missing)[:NAMES_SHOWN])
        raise EngineError(f"sync: {len(missing)} of {len(known)} parameters did not come: {names}.")
    model.tie_weights(recompute_mapping=False)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    return received


def _check(shard: ParameterShard, missing: dict[str, torch.Size], known: list[str]) -> None:
    name = shard.name
    if name not in missing:
        fault = "came twice" if name in known else f"is unknown to the model.{did_you_mean(name, known)}"
        raise EngineError(f"sync: parameter '{name}' {fault}".rstrip(".") + ".")
    if tuple(shard.shape) != tuple(missing[name]):
        raise EngineError(
            f"sync: parameter '{name}' has shape {tuple(shard.shape)}; the model has {tuple(missing[name])}."
        )
    if shard.tensor.shape != missing[name]:
        part = f"{tuple(shard.tensor.shape)} of {tuple(shard.shape)}"
        raise EngineError(f"sync: parameter '{name}' came in part, {part}; gather the shards of all ranks first.")


def _set(model: Any, name: str, tensor: torch.Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, torch.nn.Parameter(tensor, requires_grad=False))
