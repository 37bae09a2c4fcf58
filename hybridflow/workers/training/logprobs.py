"""Log-probabilities and entropies from hidden states, without a [tokens, vocabulary] tensor.

The output embedding is applied to a chunk of tokens at a time; the backward pass computes each chunk's logits again. So
one matrix product in four is a repeat, and memory is that of one chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_BYTES = 32 * 2**20
"""Size of one chunk's float32 logits: what a CPU's caches bear."""
ACCELERATOR_CHUNK_BYTES = 256 * 2**20
"""The same where it has to keep an accelerator busy."""
CHUNK_TOKENS = 128
"""Tokens of a chunk at least, whatever the vocabulary: below that the matrix products wait for memory."""


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    banned: Tensor | None = None,
    entropy: bool = False,
    chunk_bytes: int = CHUNK_BYTES,
) -> tuple[Tensor, Tensor | None]:
    """(log-prob of each target [S], entropy of each distribution [S] or None), float32, differentiable.

    The distribution of a token is softmax(hidden @ weight.T / temperature) without the banned ids.
    hidden [S, hidden size]; weight [vocabulary, hidden size], both of the compute dtype; targets [S] int64; banned [k]
    int64. Statistics are float32 in any case. A banned target has log-prob -inf.
    """
    rows = max(CHUNK_TOKENS, chunk_bytes // (4 * weight.shape[0]))
    chunked_head: Any = _ChunkedHead.apply  # torch has no type for it
    logprobs, entropies = chunked_head(hidden, weight, targets, 1.0 / temperature, banned, entropy, rows)
    return logprobs, entropies if entropy else None


class _ChunkedHead(torch.autograd.Function):
    """See `token_logprobs`. With p the probabilities and H the entropy of a token,

    d log p(target) / d logits = onehot(target) - p        dH / d logits = -p (log p + H)
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        scale: float,
        banned: Tensor | None,
        entropy: bool,
        rows: int,
    ) -> tuple[Tensor, Tensor]:
        logprobs, log_normalizers, entropies = (hidden.new_zeros(len(hidden), dtype=torch.float32) for _ in range(3))
        for start in range(0, len(hidden), rows):
            at = slice(start, start + rows)
            logits = _logits(hidden[at], weight, scale, banned)
            highest = logits.amax(1)
            logits -= highest[:, None]
            logprobs[at] = logits.gather(1, targets[at, None]).squeeze(1)
            exps = logits.exp() if entropy else logits.exp_()
            sums = exps.sum(1)
            log_sums = sums.log()
            logprobs[at] -= log_sums
            log_normalizers[at] = highest + log_sums
            if entropy:
                entropies[at] = log_sums - torch.linalg.vecdot(exps, _without_banned(logits, banned)) / sums
        ctx.save_for_backward(hidden, weight, targets, banned, log_normalizers, entropies)
        ctx.scale, ctx.entropy, ctx.rows = scale, entropy, rows
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_logprobs: Tensor, d_entropies: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, banned, log_normalizers, entropies = ctx.saved_tensors
        d_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for start in range(0, len(hidden), ctx.rows):
            at = slice(start, start + ctx.rows)
            log_p = _logits(hidden[at], weight, ctx.scale, banned).sub_(log_normalizers[at, None])
            if ctx.entropy:
                p, log_p = log_p.exp(), _without_banned(log_p, banned)
                constant = d_logprobs[at] + d_entropies[at] * entropies[at]
                d_logits = log_p.mul_(-d_entropies[at, None]).sub_(constant[:, None]).mul_(p)
            else:
                d_logits = log_p.exp_().mul_(-d_logprobs[at, None])
            d_logits.scatter_add_(1, targets[at, None], d_logprobs[at, None])
            d_logits = d_logits.mul_(ctx.scale).to(weight.dtype)
            if d_hidden is not None:
                torch.mm(d_logits, weight, out=d_hidden[at])
            if d_weight is not None:
                _add_product(d_weight, d_logits, hidden[at])
        return d_hidden, None if d_weight is None else d_weight.to(weight.dtype), None, None, None, None, None


def _logits(hidden: Tensor, weight: Tensor, scale: float, banned: Tensor | None) -> Tensor:
    """float32 logits of the sampling distribution, [rows, vocabulary]."""
    logits = (hidden @ weight.t()).float()
    if scale != 1.0:
        logits *= scale
    return logits if banned is None else logits.index_fill_(1, banned, -torch.inf)


def _without_banned(log_p: Tensor, banned: Tensor | None) -> Tensor:
    """0 in the place of -inf, whose product with a probability of 0 would be NaN."""
    return log_p if banned is None else log_p.index_fill_(1, banned, 0.0)


def _add_product(total: Tensor, d_logits: Tensor, hidden: Tensor) -> None:
    """total += d_logits.T @ hidden; the sum over chunks is float32 also where the products are bf16."""
    if total.dtype == hidden.dtype:
        total.addmm_(d_logits.t(), hidden)
    else:
        total += d_logits.t() @ hidden
