"""Formats of well-known datasets: a row as it is on the hub -> a row with prompt and answer. Named by data.format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def gsm8k(row: Mapping[str, Any]) -> dict[str, str]:
    """openai/gsm8k (Cobbe et al., arXiv 2110.14168): the question, and the number after `####` as answer."""
    answer = row["answer"].rpartition("####")[2]
    return {"prompt": row["question"], "answer": answer.strip().replace(",", "")}
