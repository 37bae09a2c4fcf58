"""WorkerGroup: the ranks of one role, called together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ..layout import ParallelLayout
from .protocols import Protocol

R = TypeVar("R")


class WorkerGroup(ABC):
    """What a runtime makes of a role: its ranks, and one call to all of them.

    Program order: a call sees the effect of every call written before it in the driver, and of none after.
    """

    layout: ParallelLayout

    @abstractmethod
    def start(self) -> None:
        """Create the ranks. A call before it starts them too."""

    @abstractmethod
    def call(self, method: str, protocol: Protocol, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The method on every rank: inputs distributed and outputs collected by `protocol`."""

    @abstractmethod
    def on_ranks(self, fn: Callable[..., R], args: Sequence[Any], ranks: Sequence[int] | None) -> list[R]:
        """fn(worker, *args) on these ranks (all, if None), results by rank."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Every rank's part of a checkpoint, under `folder`."""

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Restore what `save` wrote, on ranks that have started."""

    @abstractmethod
    def stop(self) -> None:
        """End the ranks."""
