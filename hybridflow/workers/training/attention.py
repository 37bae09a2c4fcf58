"""Causal attention inside each packed row and never across rows, as an attention implementation of transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from ...device import is_accelerated
from ...errors import ConfigError, ModelError, did_you_mean
from .sequence import to_heads, to_tokens

NAMES = ("auto", "sdpa", "flash")
PACKED = "hybridflow_packed"


@dataclass(frozen=True)
class Segments:
    """Where the packed rows lie. lengths: tokens of each; offsets [rows + 1] int32 on the device, for flash alone.

    sequence: the ranks that hold a slice of the tokens each, in their order; None if this one holds them all.
    """

    lengths: list[int]
    offsets: Tensor | None = None
    sequence: ProcessGroup | None = None


def resolve_attention(name: str, dtype: torch.dtype) -> str:
    """`model.attention` as sdpa or flash. Errors: ConfigError for an unknown name, or flash where it can't run."""
    if name not in NAMES:
        raise ConfigError(f"model.attention={name}: it is one of {', '.join(NAMES)}.{did_you_mean(name, NAMES)}")
    possible = is_accelerated() and dtype == torch.bfloat16
    if name == "flash" and not possible:
        raise ConfigError("model.attention=flash needs an accelerator and training.precision=bf16: say sdpa or auto.")
    return "flash" if possible and name != "sdpa" else "sdpa"


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    segments: Segments,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """query [1, heads, T, head size]; key, value [1, key-value heads, T, head size] -> [1, T, heads, head size].

    With segments.sequence, T counts the tokens of this rank's slice. Errors: ModelError for a model that asks for more
    than causal attention.
    """
    for name in ("sliding_window", "softcap", "s_aux", "position_bias"):
        if options.get(name) is not None:
            raise ModelError(f"{type(module).__name__} uses {name}, which packed attention does not do.")
    if segments.sequence is None:
        return _attend(query, key, value, segments, scaling), None
    query, key, value = (to_heads(states, segments.sequence) for states in (query, key, value))
    return to_tokens(_attend(query, key, value, segments, scaling), segments.sequence), None


def _attend(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scaling: float | None) -> Tensor:
    if segments.offsets is None:
        return _each_segment(query, key, value, segments.lengths, scaling)
    return _flash(query, key, value, segments.offsets, max(segments.lengths), scaling)


def _each_segment(query: Tensor, key: Tensor, value: Tensor, lengths: list[int], scaling: float | None) -> Tensor:
    grouped = query.shape[1] != key.shape[1]
    outputs = [
        F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=grouped)
        for q, k, v in zip(*(torch.split(x, lengths, 2) for x in (query, key, value)), strict=True)
    ]
    return torch.cat(outputs, 2).transpose(1, 2)


def _flash(query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, longest: int, scaling: float | None) -> Tensor:
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    causal = (-1, 0)
    out: Any = varlen_attn(
        q, k, v, offsets, offsets, longest, longest, scale=scaling, window_size=causal, enable_gqa=True
    )
    output: Tensor = out[None]
    return output


AttentionInterface.register(PACKED, packed_attention)
