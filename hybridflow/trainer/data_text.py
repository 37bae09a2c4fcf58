"""Prompts as the data has them, text or chat messages: checked, and as a reader knows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import DataError
from ..workers.models.rendering import Prompt


def checked_prompt(value: Any, where: str) -> Prompt:
    """A prompt as text or chat messages. Errors: DataError for anything else."""
    if isinstance(value, str):
        return value
    if not isinstance(value, Sequence) or not value:
        raise DataError(f"{where}: a prompt is text or a list of chat messages, not {value!r:.60}.")
    for message in value:
        if not isinstance(message, Mapping) or not isinstance(message.get("content"), str) or "role" not in message:
            raise DataError(f"{where}: a chat message has the keys role and content (text), unlike {message!r:.60}.")
    return [dict(message) for message in value]


def shown_prompt(prompt: Prompt) -> str:
    """The prompt as a reader or a reward function knows it: the text, or what the user said last."""
    if isinstance(prompt, str):
        return prompt
    said = [str(message["content"]) for message in prompt if message["role"] == "user"]
    return said[-1] if said else str(prompt[-1]["content"])
