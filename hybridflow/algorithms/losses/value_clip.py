"""A critic's loss: the squared error to the returns, with PPO's clip on how far a value moves in one batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...errors import ConfigError
from ..registry import register

if TYPE_CHECKING:
    from torch import Tensor


def check_options(clip_value: float | None) -> None:
    """Errors: ConfigError for a width that would hold every value where it is."""
    if clip_value is not None and clip_value <= 0:
        raise ConfigError(f"critic.clip_value={clip_value}: it is above 0, or null for no clip.")


@register("loss", check=check_options)
def value_clip(
    values: Tensor, old_values: Tensor, returns: Tensor, *, clip_value: float | None = 0.2
) -> tuple[Tensor, dict[str, Tensor]]:
    """max((V - R)^2, (clip(V, V_old - clip_value, V_old + clip_value) - R)^2) / 2 per token, [T].

    values: of the critic as it is; old_values: of the one that the returns were made with. None: no clip, eq. 9's loss.
    Metrics: value, return, error (squared); clip_fraction, the share of tokens whose gradient the clip removes.
    Source: PPO, arXiv 1707.06347, eq. 9; the clip is that of its authors' code (OpenAI baselines, ppo2).
    """
    error = (values - returns) ** 2
    metrics = {"value": values, "return": returns, "error": error}
    if clip_value is None:
        return error / 2, metrics
    clipped = (values.clamp(old_values - clip_value, old_values + clip_value) - returns) ** 2
    return error.maximum(clipped) / 2, {**metrics, "clip_fraction": clipped > error}
