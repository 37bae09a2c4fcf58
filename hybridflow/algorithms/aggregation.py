"""Aggregation is a weight per token, not a reduction: so a loss is the same however a batch is cut into micro-batches.

A *sequence* is a rollout: rows that share a rollout_id are one. A token counts if it is sampled (response_mask) and its
row is kept; sequences and groups count if they have such a token. With S sequences and G groups that count, a token of
sequence s (|s| tokens that count) and group g (|g| tokens that count) weighs

    token_mean                  1 / tokens that count      DAPO's token-level loss (arXiv 2503.14476), over the batch
    sequence_mean_token_mean    1 / (S |s|)                GRPO (DeepSeekMath, arXiv 2402.03300, eq. 3)
    sequence_mean_token_sum     1 / S                      REINFORCE: a sequence's log-prob is one term
    sequence_sum_constant       1 / (S max_new_tokens)     Dr. GRPO (arXiv 2503.20783): no bias by length
    group_mean                  1 / (G |g|)                DAPO as its paper writes it (sec. 3): a mean over groups
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import BatchError, ConfigError

AGGREGATIONS = (
    "token_mean",
    "sequence_mean_token_mean",
    "sequence_mean_token_sum",
    "sequence_sum_constant",
    "group_mean",
)

Array = NDArray[Any]


def token_weights(
    mode: str,
    response_mask: Array,
    lengths: Array,
    keep: Array | None,
    rollout_id: Array | None,
    group_id: Array | None,
    max_new_tokens: int,
) -> NDArray[np.float64]:
    """Weight of each response token, [T]; the loss of the batch is the sum of weight x per-token loss.

    response_mask [T] bool; lengths [n] response tokens of each row; keep [n] bool (None: all); rollout_id, group_id [n]
    (rollout_id None: each row is a sequence). If no token counts, all weights are 0.
    Errors: BatchError for a mask that is not one, and for group_mean without group_id.
    """
    row = np.repeat(np.arange(len(lengths)), lengths)
    if response_mask.dtype != np.bool_ or response_mask.shape != row.shape:
        raise BatchError(
            f"response_mask is {response_mask.dtype} {list(response_mask.shape)}: one bool for each of {len(row)} "
            "response tokens is needed."
        )
    counts = response_mask if keep is None else response_mask & keep[row]
    if mode == "group_mean" and group_id is None:
        raise BatchError("algorithm.aggregation=group_mean needs the column 'group_id'.")
    unit_id = group_id if mode == "group_mean" else rollout_id
    unit = row if unit_id is None else np.unique(unit_id, return_inverse=True)[1][row]
    weights: NDArray[np.float64] = np.where(counts, _weights(mode, unit, counts, max_new_tokens), 0.0)
    return weights


def row_weights(response_mask: Array, lengths: Array, keep: Array | None, group_id: Array) -> NDArray[np.float64]:
    """Weight of each response token where a loss is of rows, [T]: 1 / (G |g|) at the last token that counts of each row
    of group g, |g| rows, of G groups that have two such rows or more; 0 elsewhere. Arguments: as of `token_weights`."""
    row = np.repeat(np.arange(len(lengths)), lengths)
    rows, last = last_tokens(response_mask if keep is None else response_mask & keep[row], row)
    _, group, sizes = np.unique(group_id[rows], return_inverse=True, return_counts=True)
    stands_for_row = np.zeros(len(row), np.bool_)
    stands_for_row[last[sizes[group] > 1]] = True
    return token_weights("group_mean", stands_for_row, lengths, keep, None, group_id, 1)


def last_tokens(counts: Array, row_of_token: Array) -> tuple[Array, Array]:
    """The rows that have a token that counts, ascending, and the position in [0, T) of the last one of each."""
    tokens = np.flatnonzero(counts)[::-1]
    rows, first = np.unique(row_of_token[tokens], return_index=True)
    return rows, tokens[first]


def _weights(mode: str, unit: Array, counts: Array, max_new_tokens: int) -> Array:
    """Weights of tokens that count, [T]; `unit` numbers each token's sequence (group, for group_mean)."""
    tokens = np.bincount(unit[counts], minlength=unit.max(initial=0) + 1)
    units = max(int((tokens > 0).sum()), 1)
    per_unit = np.full(len(unit), 1.0 / units)
    match mode:
        case "token_mean":
            return np.full(len(unit), 1.0 / max(int(tokens.sum()), 1))
        case "sequence_mean_token_mean" | "group_mean":
            per_token: Array = per_unit / np.maximum(tokens, 1)[unit]
            return per_token
        case "sequence_mean_token_sum":
            return per_unit
        case "sequence_sum_constant":
            return per_unit / max_new_tokens
    raise ConfigError(f"algorithm.aggregation={mode}: it is one of {', '.join(AGGREGATIONS)}.")
