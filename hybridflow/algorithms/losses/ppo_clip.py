"""PPO's clipped surrogate (Schulman et al. 2017, arXiv 1707.06347, eq. 7), with a clip for each side and dual clip."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...errors import ConfigError
from ..kl import MAX_LOG_RATIO
from ..registry import register

if TYPE_CHECKING:
    from torch import Tensor


def check_options(clip_low: float, clip_high: float, dual_clip: float | None) -> None:
    """Errors: ConfigError for bounds that would invert the clip."""
    if not 0 <= clip_low < 1:
        raise ConfigError(f"loss.clip_low={clip_low}: it is in [0, 1); the ratio is clipped below at 1 - clip_low.")
    if clip_high < 0:
        raise ConfigError(f"loss.clip_high={clip_high}: it is at least 0; the ratio is clipped above at 1 + clip_high.")
    if dual_clip and dual_clip <= 1:
        raise ConfigError(f"loss.dual_clip={dual_clip}: it is above 1, or 0 to switch it off.")


@register("loss", check=check_options)
def ppo_clip(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = 3.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) per token, [T], with r = p / p_old.

    Where A < 0 the objective is at least dual_clip x A (Ye et al. 2020, arXiv 1912.09729); 0 or None: unbounded.
    Metrics: ratio; clip_fraction and dual_clip_fraction, the share of tokens whose gradient each of the clips removes.
    """
    ratio = (logprobs - old_logprobs).clamp(max=MAX_LOG_RATIO).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = unclipped.maximum(clipped)
    metrics = {"ratio": ratio, "clip_fraction": clipped > unclipped}
    if dual_clip:
        bound = -advantages * dual_clip
        beyond = (advantages < 0) & (loss > bound)
        loss = bound.where(beyond, loss)
        metrics["dual_clip_fraction"] = beyond
    return loss, metrics
