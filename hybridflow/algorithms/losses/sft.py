"""Supervised fine-tuning: the negative log-likelihood of the response."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..registry import register

if TYPE_CHECKING:
    from torch import Tensor


@register("loss")
def sft(logprobs: Tensor) -> Tensor:
    """-log p per token, [T]."""
    return -logprobs
