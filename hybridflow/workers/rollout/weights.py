"""Taking over weights: what comes is checked by name and shape, and becomes the parameters of a model here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch

from ...engines import ParameterShard
from ...errors import EngineError, did_you_mean

NAMES_SHOWN = 5


@dataclass(frozen=True)
class Manifest:
    """The parameters that have to come, whole, each once: name -> shape. Those tied to another one follow it."""

    shapes: dict[str, torch.Size]

    @classmethod
    def of(cls, model: Any) -> Self:
        """Of a transformers model."""
        tied = set(model.all_tied_weights_keys)
        parameters = model.named_parameters(remove_duplicate=False)
        return cls({name: parameter.shape for name, parameter in parameters if name not in tied})

    def checked(self, shards: Iterable[ParameterShard]) -> Iterator[ParameterShard]:
        """The shards as they come.

        Errors: EngineError for a parameter that is missing, unknown, misshapen, or only part of one; those before it
        have been handed out by then.
        """
        missing = dict(self.shapes)
        for shard in shards:
            _check(shard, missing, list(self.shapes))
            del missing[shard.name]
            yield shard
        if missing:
            names = ", ".join(list(missing)[:NAMES_SHOWN])
            raise EngineError(f"sync: {len(missing)} of {len(self.shapes)} parameters did not come: {names}.")


def adopt(model: Any, shards: Iterable[ParameterShard], dtype: torch.dtype, device: torch.device) -> int:
    """Make each shard's tensor the parameter of that name: the tensor itself, where dtype and device are right already
    (nothing is copied, and later in-place updates are seen), a converted copy otherwise. Returns how many bytes the
    shards received from other ranks.

    Errors: EngineError as `Manifest.checked`, and for one in the memory of another; some parameters may have been
    replaced by then.
    """
    owner_of_memory, received = dict[int, str](), 0
    for shard in Manifest.of(model).checked(shards):
        tensor = shard.tensor.detach().to(device, dtype)
        owner = owner_of_memory.setdefault(tensor.data_ptr(), shard.name)
        if owner != shard.name and tensor.numel():
            raise EngineError(f"sync: '{shard.name}' lies in the same memory as '{owner}'; a buffer was reused.")
        _set(model, shard.name, tensor)
        received += shard.received
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
