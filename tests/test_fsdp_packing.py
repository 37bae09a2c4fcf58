"""Micro-batches and packed rows, as geometry."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.batch import Batch
from hybridflow.errors import BatchError
from hybridflow.workers.training.packing import micro_batches, pack, token_slice

pytestmark = pytest.mark.unit

lengths_of_rows = st.lists(st.integers(1, 300), max_size=80)
budgets = st.integers(1, 400)


@given(lengths_of_rows, budgets)
def test_every_row_is_in_exactly_one_micro_batch(lengths: list[int], budget: int) -> None:
    parts = micro_batches(np.array(lengths, np.int64), budget)
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    assert all(len(part) and (np.diff(part) > 0).all() for part in parts)


@given(lengths_of_rows, budgets)
def test_the_token_budget_is_kept_and_only_a_longer_row_is_alone_above_it(lengths: list[int], budget: int) -> None:
    tokens = np.array(lengths, np.int64)
    assert all(tokens[part].sum() <= budget or len(part) == 1 for part in micro_batches(tokens, budget))


@given(lengths_of_rows, budgets, st.randoms(use_true_random=False))
def test_rows_of_a_unit_stay_together(lengths: list[int], budget: int, random: object) -> None:
    tokens = np.array(lengths, np.int64)
    unit = np.array([random.randrange(10) for _ in lengths], np.int64)  # type: ignore[attr-defined]
    parts = micro_batches(tokens, budget, unit)
    of_part = [set(unit[part]) for part in parts]
    assert sum(map(len, of_part)) == len(set(unit.tolist()))
    assert all(tokens[part].sum() <= budget or len(units) == 1 for part, units in zip(parts, of_part, strict=True))


@given(lengths_of_rows, budgets)
def test_the_same_rows_are_cut_the_same_way(lengths: list[int], budget: int) -> None:
    first, second = (micro_batches(np.array(lengths, np.int64), budget) for _ in range(2))
    assert [part.tolist() for part in first] == [part.tolist() for part in second]


def test_micro_batches_are_few_and_balanced() -> None:
    lengths = np.random.default_rng(0).lognormal(5, 0.8, 500).astype(np.int64).clip(1, 2000)
    loads = np.array([lengths[part].sum() for part in micro_batches(lengths, 4096)])
    assert len(loads) <= -(-lengths.sum() // 4096) + 1
    assert loads.max() <= 1.02 * loads.mean()


def test_packed_rows_hold_all_tokens_but_the_last_and_restart_their_positions() -> None:
    batch = Batch(
        {
            "prompt_ids": [[11, 12, 13], [21]],
            "response_ids": [[14, 15], [22, 23, 24]],
            "response_mask": [[True, True], [True, False, True]],
        }
    )
    packed = pack(batch)
    assert packed.input_ids.tolist() == [11, 12, 13, 14, 21, 22, 23]
    assert packed.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert packed.lengths == [4, 3]
    assert packed.read.tolist() == [2, 3, 4, 6]
    assert packed.targets.tolist() == [14, 15, 22, 24]
    assert packed.scored.tolist() == [0, 1, 2, 4]
    assert packed.responses == 5


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=8), st.integers(1, 9))
def test_slices_of_packed_rows_are_equally_long_and_bring_every_token_once(
    rows: list[tuple[int, int]], parts: int
) -> None:
    batch = Batch(
        {
            "prompt_ids": [np.arange(prompt) + 10 * i for i, (prompt, _) in enumerate(rows)],
            "response_ids": [np.arange(response) + 10 * i for i, (_, response) in enumerate(rows)],
        }
    )
    whole = pack(batch)
    slices, shares = zip(*(token_slice(whole, part, parts) for part in range(parts)), strict=True)
    total, size = len(whole.input_ids), len(slices[0].input_ids)
    for name in ("input_ids", "position_ids"):
        joined = np.concatenate([getattr(own, name) for own in slices])
        assert len(joined) == size * parts < total + parts
        assert (joined[:total] == getattr(whole, name)).all()
    assert (np.concatenate([own.read + part * size for part, own in enumerate(slices)]) == whole.read).all()
    assert (np.concatenate([own.targets for own in slices]) == whole.targets).all()
    assert all(share == [len(own.read) for own in slices] for share in shares)
    assert all(sum(own.lengths) == size * parts and min(own.lengths) > 0 for own in slices)


def test_a_row_without_a_prompt_token_is_named() -> None:
    with pytest.raises(BatchError, match="row 1 has no prompt token"):
        pack(Batch({"prompt_ids": [[1], []], "response_ids": [[2], [3]]}))
