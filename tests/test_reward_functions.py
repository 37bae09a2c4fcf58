"""The built-in rewards."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.algorithms.registry import known, resolve
from hybridflow.workers.reward_functions import exact, integers, last_integer, math

pytestmark = pytest.mark.unit


def test_the_built_in_rewards_are_known_by_name() -> None:
    assert {"exact", "last_integer", "math"} <= set(known("reward"))
    assert resolve("last_integer", "reward") is last_integer


def test_exact_ignores_blanks_at_the_ends_only() -> None:
    assert exact(" Paris\n", "Paris") == 1.0
    assert exact("paris", "Paris") == 0.0
    assert exact("a  b", "a b") == 0.0


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("first 3, then 12.", [3, 12]),
        ("it is -7", [-7]),
        ("10-7 = 3", [10, 7, 3]),
        ("\u22125 degrees", [-5]),
        ("1,234 and 1,234,567", [1234, 1234567]),
        ("3.5 is no integer", []),
        ("room 12b, x2", []),
        ("\\boxed{42}", [42]),
        ("$1200$", [1200]),
        ("007, -0 and +5", [7, 0, 5]),
        ("none", []),
        ("(1, 2)", [1, 2]),
        ("1,2,3", [1, 2, 3]),
        ("1,2345", [1, 2345]),
        ("1,234.5 or 3.5x or 1.2.3 or 1,234x", []),
        ("what is 2+2? 4", [2, 2, 4]),
    ],
)
def test_integers_of_a_text(text: str, found: list[int]) -> None:
    assert integers(text) == [str(number) for number in found]


def test_last_integer_takes_the_last_one() -> None:
    assert last_integer("3 + 4 = 7", "7") == 1.0
    assert last_integer("7, that is 3 + 4", "7") == 0.0
    assert last_integer("The sum is 1,234.", "1234") == 1.0
    assert last_integer("I do not know.", "7") == 0.0
    assert last_integer("-7", "7") == 0.0


@given(st.integers(), st.integers())
def test_last_integer_compares_numbers(said: int, wanted: int) -> None:
    assert last_integer(f"the answer is {said}", str(wanted)) == float(said == wanted)
    assert last_integer(f"the answer is {said:,}.", f"{wanted:,}") == float(said == wanted)


def test_a_number_without_end_is_a_wrong_answer_and_no_error() -> None:
    assert last_integer("1" * 10_000, "7") == 0.0


def test_an_answer_without_integer_is_an_error_not_a_reward_of_zero() -> None:
    with pytest.raises(ValueError, match="'seven' holds no integer"):
        last_integer("7", "seven")


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        ("so it is \\boxed{\\frac{1}{2}}", "\\frac{1}{2}", 1.0),
        ("the answer is 0.5", "1/2", 1.0),
        ("$x^2 + 2x + 1$", "$(x+1)^2$", 1.0),
        ("\\boxed{3}", "\\boxed{3}", 1.0),
        ("\\boxed{3}", "4", 0.0),
        ("\\boxed{10^{-3}}", "10^{-3}", 1.0),
        ("no idea", "4", 0.0),
        ("", "4", 0.0),
        ("\\boxed{\\frac{1}{", "4", 0.0),
    ],
)
def test_math_compares_expressions(response: str, answer: str, reward: float) -> None:
    assert math(response, answer) == reward


def test_math_refuses_an_answer_without_expression() -> None:
    with pytest.raises(ValueError, match="holds no mathematical expression"):
        math("4", "")


def test_case_18_math_needs_no_signal_and_so_scores_in_any_thread() -> None:
    rewards: list[float] = []
    thread = threading.Thread(target=lambda: rewards.append(math("\\boxed{4}", "2+2")))
    thread.start()
    thread.join()
    assert rewards == [1.0]
