"""Ulysses: ranks that share rows run a slice of their tokens each; in attention, all tokens for a share of the heads.

    tokens of this rank, all heads  --all-to-all-->  all tokens, heads of this rank  --attention, all-to-all-->  back

Source: DeepSpeed Ulysses, arXiv 2309.14509.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import all_to_all_single_autograd


def to_heads(states: Tensor, group: ProcessGroup) -> Tensor:
    """This rank's tokens [1, heads, T / ranks, head size] -> this rank's heads [1, heads / ranks, T, head size].

    Key-value heads that the ranks can't share evenly are repeated first, as few times as make them do.
    """
    ranks, heads = group.size(), states.shape[1]
    if heads % ranks:
        states = states.repeat_interleave(ranks // math.gcd(heads, ranks), 1)
    by_rank = states[0].reshape(ranks, -1, *states.shape[2:]).transpose(1, 2)  # [ranks, T / ranks, heads / ranks, size]
    received = all_to_all_single_autograd(by_rank.contiguous(), None, None, group)
    return received.flatten(0, 1).transpose(0, 1)[None]


def to_tokens(states: Tensor, group: ProcessGroup) -> Tensor:
    """This rank's heads [1, T, heads / ranks, head size] -> this rank's tokens [1, T / ranks, heads, head size]."""
    by_rank = states[0].reshape(group.size(), -1, *states.shape[2:])  # [ranks, T / ranks, heads / ranks, head size]
    received = all_to_all_single_autograd(by_rank.contiguous(), None, None, group)
    return received.transpose(0, 1).flatten(1, 2)[None]


def gather_slices(values: Tensor, lengths: Sequence[int], group: ProcessGroup) -> Tensor:
    """The ranks' values one after the other, [sum of lengths]; `lengths`: how many each rank has.

    Every rank computes the same loss from the result. So the backward pass keeps this rank's slice of the gradient and
    sums nothing: the sum over ranks of the parameters' gradients counts each value once.
    """
    gathered: Any = _GatherSlices.apply  # torch has no type for it
    whole: Tensor = gathered(values, lengths, group)
    return whole


class _GatherSlices(torch.autograd.Function):
    """See `gather_slices`."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, lengths: Sequence[int], group: ProcessGroup) -> Tensor:
        start = sum(lengths[: group.rank()])
        ctx.own = slice(start, start + len(values))
        padded = values.new_zeros(max(lengths))
        padded[: len(values)] = values
        parts = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(parts, padded, group)
        return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient[ctx.own], None, None
