"""Small whole runs for the tests: a tiny random model, a dense reward that it can learn in seconds."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridflow import Run, train
from hybridflow.recipes import grpo

ROWS = [{"prompt": f"{i}+{j}", "answer": str(i + j)} for i in range(5) for j in range(4)]
QUICK = (
    "run.steps=4",
    "data.rows_per_step=4",
    "sampling.n=4",
    "sampling.max_new_tokens=6",
    "training.lr=3e-3",
    "training.activation_checkpointing=false",
    "run.trackers=[]",
    "reward.workers=0",
    "run.completions_shown=0",
)


def share_of_digits(response: str) -> float:
    """Dense and easily learned: the share of characters that are digits."""
    return len(re.findall(r"\d", response)) / max(1, len(response))


def quick(
    model: Path,
    folder: Path,
    *overrides: str,
    driver: Callable[..., None] = grpo,
    rows: Sequence[Mapping[str, Any]] = ROWS,
    reward: Any = share_of_digits,
    **given: Any,
) -> Run:
    """A run of a few seconds."""
    return train(driver, *QUICK, f"run.dir={folder}", *overrides, model=model, data=rows, reward=reward, **given)


def numbers(folder: Path) -> list[dict[str, float]]:
    """What a run computed: its metrics, times aside."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.startswith("time/")} for line in lines]


def weights(folder: Path) -> bytes:
    """The exported weights, to the bit."""
    return (folder / "export" / "model.safetensors").read_bytes()
