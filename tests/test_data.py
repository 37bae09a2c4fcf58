"""Rows of data: how they become tokens, and in which order they are drawn."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hybridflow.batch import Batch, RowKind, row_ids
from hybridflow.columns import Kind, kind_of
from hybridflow.errors import DataError
from hybridflow.trainer.data import PromptSource, prompt_limit
from hybridflow.trainer.data_config import DataConfig

pytestmark = pytest.mark.unit

SPECIAL = ("<pad>", "<eos>", "<|im_start|>", "<|im_end|>")
VOCABULARY = {token: i for i, token in enumerate((*SPECIAL, *string.printable[:95], "\n"))}
TOKENS = {i: token for token, i in VOCABULARY.items()}
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def characters(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """One token a character."""
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.add_special_tokens(list(SPECIAL))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", chat_template=chat_template
    )


PLAIN, CHAT = characters(), characters(CHAT_TEMPLATE)


def text_of(ids: Any) -> str:
    return "".join(TOKENS[int(i)] for i in ids)


def source_of(rows: Any, tokenizer: Any = PLAIN, *, seed: int = 0, first_id: int = 0, **config: Any) -> PromptSource:
    settings = DataConfig(**{"path": "rows.jsonl", **config})
    return PromptSource(rows, tokenizer, settings, seed=seed, first_id=first_id)


def numbered(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"p{i}", "answer": str(i)} for i in range(count)]


def drawn(batch: Batch) -> list[int]:
    return [int(text[1:]) for text in batch.array("prompt")]


# ---- draws
def test_a_draw_has_tokens_numbers_and_the_datas_own_columns() -> None:
    rows = [{"prompt": "1+1", "answer": "2", "level": 3, "source": "sums"}, {"prompt": "2+2=", "answer": 4, "level": 5}]
    batch = source_of(rows, shuffle=False, first_id=10).draw(0, 2)
    assert [text_of(ids) for ids in batch.ragged("prompt_ids")] == ["1+1", "2+2="]
    assert batch.array("group_id").tolist() == [10, 11]
    assert batch.array("prompt").tolist() == ["1+1", "2+2="]
    assert batch.array("answer").tolist() == ["2", 4]
    assert batch.array("source").tolist() == ["sums", "rows.jsonl"]
    assert batch.array("level").tolist() == [3, 5]
    assert batch.ids is not None
    assert batch.ids.tolist() == row_ids(RowKind.PROMPT, np.array([10, 11])).tolist()


@given(st.integers(1, 9), st.lists(st.integers(1, 20), max_size=6), st.integers(0, 3), st.booleans())
def test_every_epoch_has_every_row_once_however_the_draws_are_cut(
    count: int, draws: list[int], seed: int, shuffle: bool
) -> None:
    source = source_of(numbered(count), seed=seed, shuffle=shuffle)
    firsts = np.cumsum([0, *draws])[:-1].tolist()
    got = [row for first, n in zip(firsts, draws, strict=True) for row in drawn(source.draw(first, n))]
    for start in range(0, len(got) - count + 1, count):
        assert sorted(got[start : start + count]) == list(range(count))
    assert source_of(numbered(count), seed=seed, shuffle=shuffle).draw(0, sum(draws)).array("prompt").tolist() == [
        f"p{row}" for row in got
    ]
    if not shuffle:
        assert got == [position % count for position in range(sum(draws))]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    source = source_of(numbered(20))
    first, second = drawn(source.draw(0, 20)), drawn(source.draw(20, 20))
    assert first != second
    assert first != drawn(source_of(numbered(20), seed=1).draw(0, 20))
    assert first != list(range(20))


def test_case_03_every_draw_has_a_group_of_its_own_even_of_the_same_row() -> None:
    source = source_of(numbered(3))
    ids = np.concatenate([source.draw(first, n).array("group_id") for first, n in ((0, 2), (2, 5), (7, 1))])
    assert ids.tolist() == list(range(8))


def test_case_32_a_draw_counts_rows_and_an_epoch_is_the_usable_rows() -> None:
    rows = [*numbered(4), {"prompt": "much too long", "answer": ""}]
    source = source_of(rows, max_prompt_tokens=2)
    assert len(source) == 4
    assert len(source.draw(0, 3)) == 3


def test_validation_rows_come_in_the_datas_order_with_ids_apart() -> None:
    source = source_of(numbered(5), first_id=1000)
    assert drawn(source.all()) == [0, 1, 2, 3, 4]
    assert source.all(2).array("group_id").tolist() == [1000, 1001]


def test_the_fingerprint_is_that_of_the_content() -> None:
    base = source_of(numbered(5)).fingerprint()
    assert source_of(numbered(5), seed=3, first_id=7).fingerprint() == base
    changed = [
        source_of(numbered(6)),
        source_of(numbered(5)[::-1]),
        source_of([{**row, "answer": "0"} for row in numbered(5)]),
        source_of(numbered(5), CHAT),
    ]
    assert base not in {source.fingerprint() for source in changed}
    odd = [{"prompt": "a", "answer": {"x": {1, 2}}, "image": object()}]
    assert source_of(odd).fingerprint() == source_of([{**odd[0], "image": object()}]).fingerprint()


def test_a_dataset_in_memory_is_as_good_as_a_list() -> None:
    datasets = pytest.importorskip("datasets")
    assert source_of(datasets.Dataset.from_list(numbered(4))).fingerprint() == source_of(numbered(4)).fingerprint()


# ---- columns
def test_numbers_of_one_type_are_dense_and_all_else_is_kept_as_it_is() -> None:
    rows = [
        {"prompt": "a", "i": 1, "f": 0.5, "b": True, "s": "x", "mixed": 1, "none": None, "list": [1], "big": 2**70},
        {"prompt": "b", "i": 2, "f": 1.5, "b": False, "s": "y", "mixed": 0.5, "none": 1, "list": [2, 3], "big": 1},
    ]
    batch = source_of(rows, shuffle=False).draw(0, 2)
    for name in rows[0].keys() - {"prompt"}:
        assert batch.array(name).tolist() == [row[name] for row in rows]
        assert kind_of(batch.column(name)) is (Kind.DENSE if name in ("i", "f", "b") else Kind.OBJECTS)


def test_a_column_that_some_rows_lack_is_none_there_and_said_once() -> None:
    source = source_of([{"prompt": "a", "hint": "x"}, {"prompt": "b"}, {"prompt": "c"}], shuffle=False)
    assert source.draw(0, 3).array("hint").tolist() == ["x", None, None]
    assert source.notices == ["rows.jsonl: the column 'hint' is missing in 2 of 3 rows, which get None"]


@pytest.mark.parametrize("name", ["reward", "keep", "reward/mine", "response_ids", "group_id", "lengths", "response"])
def test_a_column_of_a_name_that_training_uses_is_refused(name: str) -> None:
    with pytest.raises(
        DataError, match=rf"column '{name}' has a name that training itself uses: rename it, .*data.format"
    ):
        source_of([{"prompt": "a", name: 1}])


# ---- prompts
def test_a_row_without_a_prompt_is_named_with_its_columns() -> None:
    with pytest.raises(DataError, match=r"rows.jsonl, row 2: no column 'prompt' \(columns: question, answer\)"):
        source_of([{"prompt": "a"}, {"question": "b", "answer": "c"}])
    batch = source_of([{"question": "b"}], prompt_key="question").draw(0, 1)
    assert batch.array("prompt").tolist() == ["b"]
    assert "question" not in batch
    with pytest.raises(DataError, match=r"a column 'prompt' beside data.prompt_key=question"):
        source_of([{"question": "b", "prompt": "a"}], prompt_key="question")


@pytest.mark.parametrize("prompt", [None, 3, [], ["hello"], [{"role": "user"}], [{"content": "x"}]])
def test_a_prompt_is_text_or_messages(prompt: Any) -> None:
    with pytest.raises(DataError, match=r"rows.jsonl, row 1: a (prompt|chat message)"):
        source_of([{"prompt": prompt}], CHAT)


def test_with_a_chat_template_prompts_are_rendered_up_to_the_models_turn() -> None:
    rows = [
        {"prompt": "hi"},
        {
            "prompt": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "b"},
                {"role": "user", "content": "c"},
            ]
        },
    ]
    batch = source_of(rows, CHAT, shuffle=False).draw(0, 2)
    assert text_of(batch.ragged("prompt_ids")[0]) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert text_of(batch.ragged("prompt_ids")[1]) == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert batch.array("prompt").tolist() == ["hi", "c"]


def test_the_system_prompt_comes_first_unless_the_row_has_its_own() -> None:
    own = [{"role": "system", "content": "mine"}, {"role": "user", "content": "a"}]
    batch = source_of([{"prompt": "a"}, {"prompt": own}], CHAT, system_prompt="ours", shuffle=False).draw(0, 2)
    starts = [text_of(ids).split("<|im_end|>")[0] for ids in batch.ragged("prompt_ids")]
    assert starts == ["<|im_start|>system\nours", "<|im_start|>system\nmine"]


def test_messages_and_a_system_prompt_need_a_chat_template() -> None:
    with pytest.raises(DataError, match=r"row 1: the prompt is chat messages, .* model.chat_template"):
        source_of([{"prompt": [{"role": "user", "content": "a"}]}])
    with pytest.raises(DataError, match=r"data.system_prompt needs a chat template.* model.chat_template"):
        source_of(numbered(1), system_prompt="be brief")


def test_what_a_chat_template_refuses_is_named_by_row() -> None:
    template = (
        "{% if messages|length > 1 %}{{ raise_exception('one message only') }}{% endif %}{{ messages[0].content }}"
    )
    two = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    with pytest.raises(DataError, match="row 2: the chat template refuses the messages: one message only"):
        source_of([{"prompt": "a"}, {"prompt": two}], characters(template))


def test_long_prompts_are_left_out_and_counted_or_an_error() -> None:
    rows = [{"prompt": "12345"}, {"prompt": "1"}, {"prompt": "1234"}]
    source = source_of(rows, max_prompt_tokens=4, shuffle=False)
    assert source.draw(0, 2).array("prompt").tolist() == ["1", "1234"]
    assert source.notices == ["rows.jsonl: 1 of 3 prompts are longer than data.max_prompt_tokens=4 and were left out"]
    with pytest.raises(DataError, match=r"1 of 3 prompts are longer .*=4: row 1 has 5 tokens. Raise it"):
        source_of(rows, max_prompt_tokens=4, overlong_prompt="error")
    with pytest.raises(DataError, match=r"2 of 2 prompts are longer .*=1: row 1 has 2 tokens, row 2 has 2"):
        source_of(numbered(2), max_prompt_tokens=1)


def test_case_17_a_prompt_that_would_fill_the_context_is_left_out_by_whichever_limit_is_less() -> None:
    rows, config = [{"prompt": "12345"}, {"prompt": "1"}, {"prompt": "1234"}], DataConfig(path="rows.jsonl")
    source = PromptSource(rows, PLAIN, config, seed=0, limit=prompt_limit(4, 4, "rollout.max_context_tokens"))
    assert len(source) == 1
    said = "rows.jsonl: 2 of 3 prompts are longer than rollout.max_context_tokens=4 leaves room for"
    assert source.notices == [f"{said} and were left out"]
    with pytest.raises(DataError, match=r"rollout.max_context_tokens=1 leaves room for: .* Give them a longer context"):
        PromptSource(rows, PLAIN, config, seed=0, limit=prompt_limit(4, 1, "rollout.max_context_tokens"))
    source = PromptSource(rows, PLAIN, config, seed=0, limit=prompt_limit(4, 5, "rollout.max_context_tokens"))
    assert source.notices == ["rows.jsonl: 1 of 3 prompts are longer than data.max_prompt_tokens=4 and were left out"]


def test_no_rows_and_an_empty_prompt_are_errors() -> None:
    with pytest.raises(DataError, match=r"rows.jsonl: there are no rows"):
        source_of([])
    with pytest.raises(DataError, match=r"rows.jsonl, row 2: the prompt is empty"):
        source_of([{"prompt": "a"}, {"prompt": ""}])


def test_format_makes_rows_of_rows(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "def ask(row):\n    return {'prompt': f\"{row['a']}?\", 'answer': 10 / row['a']}\n"
        "def nothing(row):\n    return None\n"
    )
    batch = source_of([{"a": 2, "source": "x"}], format=f"{file}:ask").draw(0, 1)
    assert (batch.array("prompt")[0], batch.array("answer")[0], batch.array("source")[0]) == ("2?", 5.0, "x")
    with pytest.raises(DataError, match=r"row 2: data.format raised ZeroDivisionError: division by zero"):
        source_of([{"a": 1}, {"a": 0}], format=f"{file}:ask")
    with pytest.raises(DataError, match=r"row 1: data.format returned None, not a row"):
        source_of([{"a": 1}], format=f"{file}:nothing")


# ---- examples
def test_an_example_is_a_prompt_and_a_response_that_ends_its_turn() -> None:
    batch = source_of([{"prompt": "1+1", "response": "2", "level": 1}], CHAT, kind="examples").draw(0, 1)
    assert text_of(batch.ragged("prompt_ids")[0]) == "<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n"
    assert text_of(batch.ragged("response_ids")[0]) == "2<|im_end|>"
    assert batch.ragged("response_mask").values.tolist() == [True, True]
    assert batch.ids is not None
    assert batch.ids.tolist() == row_ids(RowKind.EXAMPLE, np.array([0])).tolist()
    assert "response" not in batch


def test_an_example_without_a_template_ends_with_the_end_of_sequence_token() -> None:
    batch = source_of([{"prompt": "1+1=", "response": "2"}], kind="examples").draw(0, 1)
    assert text_of(batch.ragged("prompt_ids")[0]) == "1+1="
    assert text_of(batch.ragged("response_ids")[0]) == "2<eos>"


def test_a_template_that_writes_no_end_of_turn_gets_the_end_of_sequence_token() -> None:
    turns = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    template = turns + "{% if add_generation_prompt %}assistant: {% endif %}"
    batch = source_of([{"prompt": "a", "response": "b"}], characters(template), kind="examples").draw(0, 1)
    assert text_of(batch.ragged("prompt_ids")[0]) == "user: a\nassistant: "
    assert text_of(batch.ragged("response_ids")[0]) == "b<eos>"


def test_case_12_a_template_that_renders_the_prompt_otherwise_before_a_response_is_refused() -> None:
    thinking = CHAT_TEMPLATE.replace("assistant\n{% endif %}", "assistant\n<think>{% endif %}")
    with pytest.raises(DataError, match=r"row 1: the chat template renders .* does not begin .*model.chat_template"):
        source_of([{"prompt": "a", "response": "b"}], characters(thinking), kind="examples")


@given(st.lists(st.sampled_from("ab \n"), min_size=1, max_size=6), st.lists(st.sampled_from("ab \n"), max_size=6))
def test_case_12_prompt_and_response_tokens_are_those_of_the_whole_text(prompt: list[str], response: list[str]) -> None:
    row = {"prompt": "".join(prompt), "response": "".join(response)}
    batch = source_of([row], CHAT, kind="examples").draw(0, 1)
    messages = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["response"]}]
    whole = CHAT.apply_chat_template(messages, tokenize=False)
    tokens = np.concatenate([batch.ragged("prompt_ids")[0], batch.ragged("response_ids")[0]])
    assert text_of(tokens) == whole.rstrip()


def test_an_example_needs_a_response() -> None:
    with pytest.raises(DataError, match=r"row 1: data.kind=examples needs the text 'response', not None"):
        source_of([{"prompt": "a"}], kind="examples")


def test_a_tokenizer_without_an_end_of_sequence_token_cannot_learn_responses() -> None:
    tokenizer = characters()
    tokenizer.eos_token = None
    with pytest.raises(DataError, match="no end-of-sequence token"):
        source_of([{"prompt": "a", "response": "b"}], tokenizer, kind="examples")
