"""What ends a response."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.workers.rollout.requests import StopRule

pytestmark = pytest.mark.unit


class Bytes:
    """A tokenizer whose tokens are pieces of bytes; half a character decodes to a replacement character."""

    def __init__(self, *pieces: bytes) -> None:
        self._pieces = pieces or tuple(bytes([value]) for value in range(256))

    def decode(self, ids: list[int], skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        assert not skip_special_tokens
        assert not clean_up_tokenization_spaces
        return b"".join(self._pieces[i] for i in ids).decode(errors="replace")


def end_of(rule: StopRule, ids: list[int]) -> int | None:
    """Number of tokens up to and including the one that ends the response."""
    return next((k for k in range(1, len(ids) + 1) if rule.ends(ids[:k])), None)


def test_an_end_id_or_a_stop_id_ends_a_response() -> None:
    rule = StopRule(Bytes(), [2], (7, "never"))
    assert end_of(rule, [1, 2, 3]) == 2
    assert end_of(rule, [1, 3, 7]) == 3
    assert end_of(rule, [1, 3, 5]) is None


def test_a_stop_string_is_found_across_token_borders_and_inside_a_token() -> None:
    rule = StopRule(Bytes(b"say ", b"EN", b"D.", b"the END now"), [], ("END",))
    assert end_of(rule, [0, 1, 0, 1, 2, 0]) == 5
    assert end_of(rule, [0, 3, 0]) == 2


def test_a_stop_string_of_many_bytes_is_found_with_one_byte_a_token() -> None:
    rule = StopRule(Bytes(), [], ("停止。",))
    ids = list("好的停止。好".encode())
    assert end_of(rule, ids) == len("好的停止。".encode())


@given(
    text=st.text("ab\u00e9\u505c", max_size=12), stop=st.text("ab\u00e9\u505c", min_size=1, max_size=3), cut=st.data()
)
def test_a_response_ends_at_the_first_token_that_completes_a_stop_string(
    text: str, stop: str, cut: st.DataObject
) -> None:
    raw = text.encode()
    borders = sorted(cut.draw(st.sets(st.integers(1, max(1, len(raw) - 1)), max_size=6)) - {len(raw)})
    pieces = [raw[a:b] for a, b in zip([0, *borders], [*borders, len(raw)], strict=True) if a < b]
    decoded = [b"".join(pieces[:k]).decode(errors="replace") for k in range(1, len(pieces) + 1)]
    expected = next((k for k, prefix in enumerate(decoded, 1) if stop in prefix), None)
    assert end_of(StopRule(Bytes(*pieces), [], (stop,)), list(range(len(pieces)))) == expected
