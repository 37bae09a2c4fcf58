"""Built-in rewards: 1.0 if the response gives the answer, else 0.0."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable
from typing import Any

from ..algorithms.registry import register

# A number that no letter, digit or point touches: sign, digits (commas between groups of three), fraction.
# Atomic, so that a number is taken whole or not at all.
_NUMBER = re.compile(r"(?<![\w.])([-+\u2212]?(?>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+))(\.[0-9]+)?+(?!\w)")


@register("reward")
def exact(response: str, answer: str) -> float:
    """1.0 if response and answer are the same text, blanks at the ends aside."""
    return float(response.strip() == str(answer).strip())


@register("reward")
def last_integer(response: str, answer: str) -> float:
    """1.0 if the last integer written in the response is the answer; 0.0 also if it holds none.

    `1,234` is one integer, `1,2` is two, a decimal such as `3.5` is none; a sign belongs to its number unless a letter,
    digit or point stands before it (`10-7`). Errors: ValueError if the answer itself holds no integer.
    """
    found = integers(response)
    wanted = integers(str(answer))
    if not wanted:
        raise ValueError(f"the answer {str(answer)!r} holds no integer")
    return float(bool(found) and found[-1] == wanted[-1])


def integers(text: str) -> list[str]:
    """The integers written in a text, in its order, each in one spelling: `-7`, `0`, `1234`.

    As text, because Python refuses to read an integer of more than 4300 digits, which a model may well write.
    """
    return [_spelled(whole) for whole, fraction in _NUMBER.findall(text) if not fraction]


def _spelled(number: str) -> str:
    digits = re.sub("[^0-9]", "", number).lstrip("0")
    return ("-" if number[0] in "-\u2212" else "") + digits if digits else "0"


class Math:
    r"""1.0 if the mathematical expression the response ends on equals the answer, by math-verify.

    The answer is LaTeX or plain, with or without `$...$` or `\boxed{...}` around it. A response without an expression
    gets 0.0. Errors: ValueError if the answer holds no expression, since then every response would count as wrong.
    """

    __name__ = "math"

    def __call__(self, response: str, answer: str) -> float:
        parse, verify = _math_verify()
        answer = str(answer)
        wanted = parse(answer if "$" in answer or r"\boxed" in answer else f"${answer}$", parsing_timeout=None)
        if not wanted:
            raise ValueError(f"the answer {answer!r} holds no mathematical expression")
        return float(verify(wanted, parse(response, parsing_timeout=None), timeout_seconds=None))

    def __reduce__(self) -> tuple[object, ...]:
        return _math_loaded, ()


math = register("reward")(Math())


def _math_loaded() -> Math:
    """What unpickling calls: a worker imports math-verify, which can take seconds, before its calls are timed."""
    _math_verify()
    return math


@functools.cache
def _math_verify() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """math-verify's two functions, imported when first needed: a driver never needs it.

    Its own time-outs stay off. They set the process's alarm, which is ours while a reward is called, and fail outside
    the main thread; math-verify's warning about that is silenced.
    """
    from math_verify import parse, verify  # type: ignore[import-untyped]

    for part in ("parser", "grader"):
        logging.getLogger(f"math_verify.{part}").setLevel(logging.ERROR)
    return parse, verify
