"""The policy gradient's surrogate (Williams 1992, Machine Learning 8): no ratio, no clip."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..registry import register

if TYPE_CHECKING:
    from torch import Tensor


@register("loss")
def reinforce(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """-A log p per token, [T]."""
    return -advantages * logprobs
