"""Two-digit addition, the built-in task: `data=arithmetic`, and what `make demo` learns.

A worked answer adds column by column with the carry: `4+7+0=11 2+1+1=4 #### 41` for 24+17. The supervised teacher is
biased: in more than half of the columns it is one too high, and goes on from there as if it were right. A policy
trained on it has the form, and the wrong habit, which reinforcement learning then breaks.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

HELD_OUT = 512  # problems kept out of warm-up and training
TEST_SEED = 20_000


def held_out() -> list[tuple[int, int]]:
    """The fixed validation problems."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    return random.Random(TEST_SEED).sample(pairs, HELD_OUT)


def problems(split: str = "train") -> Iterator[dict[str, Any]]:
    """Rows prompt, answer: the held-out problems for split `test`, all others for `train`."""
    test = held_out()
    kept_out = set(test)
    train = [(a, b) for a in range(10, 100) for b in range(10, 100) if (a, b) not in kept_out]
    for a, b in test if split == "test" else train:
        yield {"prompt": f"{a}+{b}", "answer": str(a + b)}


def demonstrations(count: int, noise: float, seed: int) -> list[dict[str, str]]:
    """Rows prompt, response for the warm-up, none held out. noise: share of column sums that are one too high."""
    rng = random.Random(seed)
    train = [row["prompt"] for row in problems("train")]
    return [{"prompt": prompt, "response": worked(prompt, noise, rng)} for prompt in rng.choices(train, k=count)]


def worked(prompt: str, noise: float, rng: random.Random) -> str:
    """The worked answer of `a+b`, each column sum one too high with probability `noise`."""
    a, b = prompt.split("+")
    steps, digits, carry = [], [], 0
    for x, y in zip(reversed(a), reversed(b), strict=True):
        total = int(x) + int(y) + carry + (rng.random() < noise)
        steps.append(f"{x}+{y}+{carry}={total}")
        digits.append(str(total % 10))
        carry = total // 10
    head = str(carry) if carry else ""
    return f"{' '.join(steps)} #### {head}{''.join(reversed(digits))}"


def after_hashes(response: str, answer: str) -> float:
    """1 if the response ends with `#### ANSWER`, else 0."""
    found = re.search(r"#### (-?\d+)\s*$", response)
    return float(found is not None and found[1] == answer)
