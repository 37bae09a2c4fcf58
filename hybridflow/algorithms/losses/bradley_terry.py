"""A reward model's loss: the chosen of two responses should score higher (Bradley and Terry 1952)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...errors import BatchError, ConfigError
from ..groups import groups_of
from ..registry import register

if TYPE_CHECKING:
    from torch import Tensor


def check_options(centering: float) -> None:
    """Errors: ConfigError for a weight that would push scores away from 0."""
    if centering < 0:
        raise ConfigError(f"loss.centering={centering}: it is at least 0.")


@register("loss", check=check_options)
def bradley_terry(
    score: Tensor, chosen: Tensor, group_id: Tensor, margin: Tensor | None = None, *, centering: float = 0.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """-log sigmoid(s_chosen - s_rejected - margin) + centering (s_chosen + s_rejected)^2 per pair, [groups].

    score, chosen (bool), group_id, margin [rows]: a group is a pair, in any order of its two rows. Pairs come in the
    order of their group_id. centering holds scores, which are else free to drift by a constant, near 0.
    Metrics: accuracy, 1 where the chosen one scores higher (1/2: equal); score_gap.
    Source: InstructGPT, arXiv 2203.02155, eq. 1; margin: Llama 2, arXiv 2307.09288, eq. 2; centering: Eisenstein et al.
    2023, arXiv 2312.09244. Errors: BatchError for a group that is no pair.
    """
    groups, group = groups_of(group_id)
    zero = score.new_zeros(len(groups))
    better = zero.index_add(0, group, score * chosen)
    worse = zero.index_add(0, group, score * ~chosen)
    _check_pairs(groups, group.bincount(), group[chosen].bincount(minlength=len(groups)))
    gap = better - worse
    wanted = gap if margin is None else gap - zero.index_add(0, group, margin.to(score.dtype) * chosen)
    loss = (-wanted).logaddexp(zero) + centering * (better + worse) ** 2  # -log sigmoid(x) = log(1 + exp(-x))
    return loss, {"accuracy": (gap > 0) + 0.5 * (gap == 0), "score_gap": gap}


def _check_pairs(groups: Tensor, rows: Tensor, chosen: Tensor) -> None:
    wrong = groups[(rows != 2) | (chosen != 1)]
    if len(wrong):
        raise BatchError(
            f"bradley_terry: the rows of group_id {int(wrong[0])} are no pair, one chosen and one not; both rows of a "
            "pair must be on one rank, in one mini-batch. Draw them with run.pairs()."
        )
