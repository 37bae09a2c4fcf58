"""Rows into micro-batches, and a micro-batch into one flat row of tokens without padding. Pure; numpy only."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...batch import Batch
from ...columns import offsets_of
from ...errors import BatchError

Ints = NDArray[np.int64]


def micro_batches(lengths: Ints, budget: int, unit: NDArray[Any] | None = None) -> list[Ints]:
    """Row numbers of each micro-batch, ascending: every row exactly once, balanced, the same for the same arguments.

    lengths [n] tokens of each row; budget: tokens of a micro-batch; unit [n]: rows of equal values stay together. What
    is longer than the budget is a micro-batch of its own; no other one is over the budget.
    """
    if not len(lengths):
        return []
    item = np.arange(len(lengths)) if unit is None else np.unique(unit, return_inverse=True)[1]
    sizes = np.bincount(item, weights=lengths).astype(np.int64)
    bins = _bins(sizes, budget)
    rows = [np.flatnonzero(bins[item] == b) for b in range(bins.max() + 1)]
    return sorted(rows, key=lambda row: int(row[0]))


def _bins(sizes: Ints, budget: int) -> Ints:
    """Bin of each item: alone if over the budget; else longest first, into the emptiest of as few bins as go."""
    order = np.argsort(-sizes, kind="stable").tolist()
    alone = [item for item in order if sizes[item] > budget]
    others = order[len(alone) :]
    count = -(-int(sizes[others].sum()) // budget)
    while (placed := _emptiest_first(sizes, others, count, budget)) is None:
        count += 1
    bins = np.empty(len(sizes), np.int64)
    bins[alone] = np.arange(len(alone))
    bins[others] = np.asarray(placed, np.int64) + len(alone)
    return bins


def _emptiest_first(sizes: Ints, order: list[int], count: int, budget: int) -> list[int] | None:
    """Bin of each item of `order`, or None if `count` bins are too few for this rule."""
    loads = [(0, b) for b in range(count)]
    placed = []
    for item in order:
        load, b = loads[0]
        load += int(sizes[item])
        if load > budget:
            return None
        heapq.heapreplace(loads, (load, b))
        placed.append(b)
    return placed


@dataclass(frozen=True)
class PackedRows:
    """Some rows of a batch as one flat row of T tokens: prompt and response of each, without its last token, which
    predicts nothing. S of their R response tokens are scored.

    input_ids [T]; position_ids [T], from 0 in each row; lengths: tokens of each row; read [S]: the position in [0, T)
    whose hidden state predicts a token; targets [S]: that token; scored [S]: its number in [0, R); responses: R.
    """

    input_ids: Ints
    position_ids: Ints
    lengths: list[int]
    read: Ints
    targets: Ints
    scored: Ints
    responses: int


DUMMY = PackedRows(*(np.zeros(1, np.int64),) * 2, [1], *(np.zeros(1, np.int64),) * 3, 1)
"""One token that predicts itself: for a rank that has fewer micro-batches than others. Its outputs weigh nothing."""


def pack(batch: Batch) -> PackedRows:
    """All rows of `batch`; response tokens that were not sampled (response_mask 0) are not scored.

    Errors: BatchError for a row without a prompt token: nothing predicts its first response token.
    """
    prompts, responses = batch.ragged("prompt_ids"), batch.ragged("response_ids")
    if not prompts.lengths.all():
        raise BatchError(
            f"row {int(prompts.lengths.argmin())} has no prompt token, which its first response token needs."
        )
    whole = prompts.lengths + responses.lengths
    starts = offsets_of(whole)[:-1]
    ids = np.empty(int(whole.sum()), np.int64)
    ids[_ranges(starts, prompts.lengths)] = prompts.values
    ids[_ranges(starts + prompts.lengths, responses.lengths)] = responses.values
    lengths = whole - 1
    kept = _ranges(starts, lengths)
    begin = offsets_of(lengths)[:-1]
    read = _ranges(begin + prompts.lengths - 1, responses.lengths)
    scored = np.arange(len(read))
    if "response_mask" in batch:
        scored = np.flatnonzero(batch.ragged("response_mask").values)
    return PackedRows(
        input_ids=ids[kept],
        position_ids=_ranges(np.zeros_like(lengths), lengths),
        lengths=lengths.tolist(),
        read=read[scored],
        targets=responses.values[scored],
        scored=scored,
        responses=len(responses.values),
    )


def token_slice(rows: PackedRows, part: int, parts: int) -> tuple[PackedRows, list[int]]:
    """What one of `parts` ranks runs of packed rows, and how many scored tokens each of the ranks has.

    Slices are equally long: padding that nothing reads, a row of its own, follows the last row. input_ids,
    position_ids, read and targets are those of the slice, `read` counted from its start; the rest is of all tokens.
    """
    size = -(-len(rows.input_ids) // parts)
    padding = size * parts - len(rows.input_ids)
    part_of_read = rows.read // size
    tokens, reads = slice(part * size, (part + 1) * size), part_of_read == part
    own = replace(
        rows,
        input_ids=np.append(rows.input_ids, np.zeros(padding, np.int64))[tokens],
        position_ids=np.append(rows.position_ids, np.arange(padding))[tokens],
        lengths=[*rows.lengths, padding] if padding else rows.lengths,
        read=rows.read[reads] - tokens.start,
        targets=rows.targets[reads],
    )
    return own, np.bincount(part_of_read, minlength=parts).tolist()


def _ranges(starts: Ints, lengths: Ints) -> Ints:
    """start, start + 1, ... of each of `lengths`, one after another."""
    ends = offsets_of(lengths)
    ranges: Ints = np.repeat(starts - ends[:-1], lengths) + np.arange(ends[-1])
    return ranges
