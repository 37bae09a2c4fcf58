"""From logits to tokens: which token a row draws, from which random number, with which log-probability."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ...engines import Sampling

WEYL = np.uint64(0x9E3779B97F4A7C15)  # the golden ratio in 64 bits: SplitMix64's step
SHIFT_A, SHIFT_B, SHIFT_C, SHIFT_UNIT = (np.uint64(shift) for shift in (30, 27, 31, 11))
MIX_A, MIX_B = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
MASK_64 = (1 << 64) - 1


class Drawn(NamedTuple):
    """One token a row [rows]: its id, its log-probability, and whether the row's logits were sound (no NaN or inf)."""

    tokens: torch.Tensor
    logprobs: torch.Tensor
    sound: torch.Tensor


def stream_key(seed: int, group_id: int, sample: int) -> np.uint64:
    """The key of one rollout's random numbers."""
    words = [seed & MASK_64, group_id & MASK_64, sample]
    return np.uint64(np.random.SeedSequence(words).generate_state(1, np.uint64)[0])


def uniforms(keys: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.float64]:
    """A number in [0, 1) per row for the token at this position of its context, prompt included.

    A pure function of key and position, whatever else is in the batch: SplitMix64 (Steele, Lea, Flood 2014) seeded with
    the key, read at the position. A later turn of the same rollout stands at other positions, so it draws afresh.
    """
    x = keys + (positions + np.uint64(1)) * WEYL
    x = (x ^ (x >> SHIFT_A)) * MIX_A
    x = (x ^ (x >> SHIFT_B)) * MIX_B
    unit: NDArray[np.float64] = ((x ^ (x >> SHIFT_C)) >> SHIFT_UNIT) * 2.0**-53
    return unit


def draw(logits: torch.Tensor, uniform: torch.Tensor, sampling: Sampling, banned: torch.Tensor) -> Drawn:
    """Draw one token a row by inverting its cumulative distribution at `uniform` (float64 [rows]).

    logits [rows, vocabulary]; banned: int64 ids never drawn. The log-probability is that of the distribution at the
    sampling temperature (greedy: at 1) over the whole vocabulary less the banned tokens, which a trainer can mirror;
    top-k, top-p and min-p narrow the draw and do not renormalise it.
    """
    greedy = sampling.temperature == 0
    temperature = 1.0 if greedy else sampling.temperature
    scores = logits.float()
    if len(banned):
        scores = scores.index_fill(1, banned, -torch.inf)
    best_score, best = scores.max(-1)
    weights = (scores - best_score[:, None]).div_(temperature).exp_()
    total = weights.sum(-1)
    tokens = best if greedy else _invert(_narrowed(weights, sampling), uniform, best)
    below_best = scores.gather(1, tokens[:, None])[:, 0] - best_score
    return Drawn(tokens, below_best / temperature - total.log(), total.isfinite())


def _invert(weights: torch.Tensor, uniform: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
    """The first token whose cumulated weight passes `uniform`'s share of the total; never one of weight 0."""
    cumulated = weights.cumsum(-1)
    target = (uniform * cumulated[:, -1]).to(cumulated.dtype)
    found = torch.searchsorted(cumulated, target[:, None], right=True).clamp_(max=weights.shape[1] - 1)
    # rounding can put the target at the very end, behind the last token that has a weight
    return torch.where(weights.gather(1, found)[:, 0] > 0, found[:, 0], best)


def _narrowed(weights: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Weights (relative to the most probable token's 1) with those outside top-k, then top-p, then min-p set to 0."""
    if 0 < sampling.top_k < weights.shape[1]:
        weights = _at_least(weights, weights.topk(sampling.top_k).values[:, -1:])
    if sampling.top_p < 1:
        ordered = weights.sort(descending=True).values
        mass = ordered.cumsum(-1)
        inside = mass - ordered < sampling.top_p * mass[:, -1:]
        weights = _at_least(weights, ordered.masked_fill(~inside, torch.inf).amin(-1, keepdim=True))
    if sampling.min_p > 0:
        weights = weights.masked_fill(weights < sampling.min_p, 0)
    return weights


def _at_least(weights: torch.Tensor, floor: torch.Tensor) -> torch.Tensor:
    return weights.masked_fill(weights < floor, 0)
