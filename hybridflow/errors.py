"""The few kinds of error a user meets. Each message names what, where and the remedy."""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from difflib import get_close_matches
from typing import ClassVar


class HybridFlowError(Exception):
    """Base of every error raised on purpose. `where` names role, rank and call, once a worker is involved.

    of_input: the message is about a file or key of the user's, which is the same on any rank.
    """

    of_input: ClassVar[bool] = False

    def __init__(self, message: str, *, where: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.where = where

    def locate(self, where: str) -> None:
        """Say where a worker raised it, if that helps and nobody has."""
        if not self.of_input:
            self.where = self.where or where

    def __str__(self) -> str:
        return f"{self.where}: {self.message}" if self.where else self.message

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, self.where))


class ConfigError(HybridFlowError):
    """A wrong configuration: names the key, the legal values and the remedy. Raised before any process starts."""

    of_input = True


class BatchError(HybridFlowError):
    """Rows or columns that do not fit: names the column and the row."""


class DataError(HybridFlowError):
    """A data file or row that cannot be used: names the file and the line."""

    of_input = True


class ModelError(HybridFlowError):
    """A model folder that is not one, or a model the engines cannot hold."""

    of_input = True


class RewardError(HybridFlowError):
    """Too many rewards in one step raised, hung or returned no number."""


class EngineError(HybridFlowError):
    """A training or rollout engine met something it must not go on with, such as a NaN."""


class WorkerError(HybridFlowError):
    """A rank raised, died or fell silent: names the first to do so, with its own traceback."""


class CheckpointError(HybridFlowError):
    """A checkpoint that cannot be written or read, or belongs to another run."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` Did you mean X?` for the nearest known word, or an empty string."""
    close = get_close_matches(word, list(known), 1)
    return f" Did you mean {close[0]}?" if close else ""


def named(error: BaseException) -> str:
    """Type and message of any error, as they end its traceback; without notes."""
    lines = traceback.format_exception_only(error)
    notes = sum(str(note).count("\n") + 1 for note in getattr(error, "__notes__", ()))
    return lines[-1 - notes].strip()


def _rebuild(kind: type[HybridFlowError], message: str, where: str | None) -> HybridFlowError:
    return kind(message, where=where)
