"""Keys of `data`: where rows come from and how they become prompts. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


@dataclass
class DataConfig:
    """The rows to train on and to validate on."""

    path: str = MISSING
    """jsonl or parquet file, folder, hub name (`owner/name`, or `owner/name:CONFIGURATION` where the hub has several),
    reasoning_gym:TASK, package.module:function or path/file.py:function."""
    task: dict[str, Any] = field(default_factory=dict)
    """Keys of the reasoning-gym task's own configuration, as data.task.KEY=VALUE; for reasoning_gym:TASK alone."""
    kind: str = "prompts"
    """prompts (sampled from) | examples (prompt and response, learned as they are) | pairs (prompt, chosen and rejected
    response). The algorithm presets set it."""
    split: str = "train"
    """Split of a hub dataset or of a folder to train on."""
    validation_path: str | None = None
    """Rows to validate on, written as path; null = path."""
    validation_split: str = "test"
    """Split to validate on."""
    validation_rows: int | None = None
    """Validate on the first so many rows; null = all."""
    prompt_key: str = "prompt"
    """Column that holds the prompt: text, or a list of chat messages."""
    format: str | None = None
    """package.module:function or path/file.py:function, row (dict) -> row with prompt [, response, answer]; of pairs
    with prompt, chosen, rejected [, margin]; null = rows as they are."""
    system_prompt: str | None = None
    """System message put before every prompt; null = none."""
    rows_per_step: int = 64
    """Dataset rows of one step: prompts in RL, examples in supervised fine-tuning, pairs for a reward model."""
    max_prompt_tokens: int = 1024
    """Longest prompt, in tokens; less where the model's context leaves no more room."""
    overlong_prompt: str = "drop"
    """What happens to a longer one: drop (counted) | error."""
    shuffle: bool = True
    """Draw rows in an order given by run.seed, another one each epoch; false = in the file's order."""
