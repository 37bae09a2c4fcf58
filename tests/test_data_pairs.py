"""Preference pairs: two rows each, which stay a pair, and the prompts as messages that another tokenizer needs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.batch import RowKind, row_ids
from hybridflow.errors import DataError
from tests.test_data import CHAT, PLAIN, source_of, text_of

pytestmark = pytest.mark.unit

ROWS = [{"prompt": f"p{i}", "chosen": f"good{i}", "rejected": f"bad{i}", "level": i} for i in range(5)]


def pairs_of(rows: Any = ROWS, tokenizer: Any = PLAIN, **config: Any) -> Any:
    return source_of(rows, tokenizer, kind="pairs", **config)


def test_a_pair_is_two_rows_of_one_group_the_chosen_one_first() -> None:
    batch = pairs_of(shuffle=False, first_id=10).draw(0, 2)
    assert batch.array("group_id").tolist() == [10, 10, 11, 11]
    assert batch.array("chosen").tolist() == [True, False, True, False]
    assert batch.array("response").tolist() == ["good0", "bad0", "good1", "bad1"]
    assert [text_of(ids) for ids in batch.ragged("prompt_ids")] == ["p0", "p0", "p1", "p1"]
    assert [text_of(ids) for ids in batch.ragged("response_ids")] == [
        "good0<eos>",
        "bad0<eos>",
        "good1<eos>",
        "bad1<eos>",
    ]
    assert batch.ragged("response_mask").values.all()
    assert batch.array("level").tolist() == [0, 0, 1, 1]
    assert "margin" not in batch and "prompt_messages" not in batch
    assert batch.ids.tolist() == row_ids(RowKind.PAIR, np.array([20, 21, 22, 23])).tolist()


def test_both_responses_end_as_the_template_ends_a_turn() -> None:
    batch = pairs_of(tokenizer=CHAT, shuffle=False).draw(0, 1)
    assert [text_of(ids) for ids in batch.ragged("response_ids")] == ["good0<|im_end|>", "bad0<|im_end|>"]


@given(st.integers(1, 9), st.lists(st.integers(1, 12), max_size=4), st.integers(0, 3))
def test_an_epoch_is_counted_in_pairs_and_no_draw_parts_one(count: int, draws: list[int], seed: int) -> None:
    rows = [{"prompt": "p", "chosen": f"c{i}", "rejected": f"r{i}"} for i in range(count)]
    source, first, seen = pairs_of(rows, seed=seed), 0, []
    assert len(source) == count
    for n in draws:
        batch = source.draw(first, n)
        first += n
        chosen, rejected = batch.array("response")[::2], batch.array("response")[1::2]
        assert [text[1:] for text in chosen] == [text[1:] for text in rejected]
        assert len(batch) == 2 * n == 2 * len(set(batch.array("group_id").tolist()))
        seen += chosen.tolist()
    for start in range(0, len(seen) - count + 1, count):
        assert sorted(seen[start : start + count]) == sorted(f"c{i}" for i in range(count))


def test_validation_rows_are_limited_in_pairs() -> None:
    assert pairs_of(first_id=1000).all(2).array("group_id").tolist() == [1000, 1000, 1001, 1001]


def test_margins_are_both_rows_and_come_in_all_pairs_or_in_none() -> None:
    rows = [{**row, "margin": i} for i, row in enumerate(ROWS)]
    batch = pairs_of(rows, shuffle=False).draw(0, 2)
    assert batch.array("margin").tolist() == [0, 0, 1, 1] and batch.array("margin").dtype == np.float32
    with pytest.raises(DataError, match=r"rows\.jsonl, row 2: 'margin' is a number in every row or in none, not None"):
        pairs_of([rows[0], ROWS[1]])
    with pytest.raises(DataError, match=r"row 1: 'margin' is a number .* not 'large'"):
        pairs_of([{**ROWS[0], "margin": "large"}])


@pytest.mark.parametrize("key", ["chosen", "rejected"])
def test_a_response_that_is_missing_or_no_text_is_named(key: str) -> None:
    with pytest.raises(
        DataError, match=rf"row 2: data\.kind=pairs needs the text '{key}', not \['x'\]\. Make it in data"
    ):
        pairs_of([ROWS[0], {**ROWS[1], key: ["x"]}])


def test_the_fingerprint_tells_which_response_was_chosen() -> None:
    swapped = [{**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in ROWS]
    assert pairs_of().fingerprint() != pairs_of(swapped).fingerprint()


# ---- prompts as messages
def test_prompts_that_are_more_than_their_shown_text_are_kept_as_messages() -> None:
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yo"},
        {"role": "user", "content": "x"},
    ]
    batch = source_of([{"prompt": messages}], CHAT).draw(0, 1)
    assert batch.array("prompt").tolist() == ["x"]
    assert batch.array("prompt_messages").tolist() == [messages]
    asked = source_of([{"prompt": "x"}], CHAT, system_prompt="Sum.").draw(0, 1)
    assert asked.array("prompt_messages").tolist() == [
        [{"role": "system", "content": "Sum."}, {"role": "user", "content": "x"}]
    ]
    assert "prompt_messages" not in source_of([{"prompt": "x"}], CHAT).draw(0, 1)


def test_the_data_cannot_bring_a_column_of_that_name() -> None:
    with pytest.raises(DataError, match="the column 'prompt_messages' has a name that training itself uses"):
        source_of([{"prompt": "x", "prompt_messages": 1}])
