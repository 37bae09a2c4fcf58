"""WorkerGroup: the ranks of one role, called together; Runtime: what makes groups."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ..layout import ParallelLayout
from .protocols import Protocol
from .worker import Worker

R = TypeVar("R")


@dataclass(frozen=True)
class Place:
    """Where a group runs: the pool of that name, which has so many ranks, of a device each or of none."""

    pool: str
    ranks: int = 1
    devices: bool = True


OTHER_ROWS = (
    "the rows that went in came out as others: a worker never drops, adds or reorders rows, and answers for those of "
    "its first batch."
)


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


class Runtime(ABC):
    """Where the groups of one run live. Single use: `close` ends all of them."""

    @property
    @abstractmethod
    def devices(self) -> int:
        """How many ranks `all` devices can hold."""

    @abstractmethod
    def group(self, name: str, role: type[Worker[Any]], settings: Any, place: Place) -> WorkerGroup:
        """The group `name` of a role; nothing is started yet."""

    @abstractmethod
    def settle(self) -> None:
        """Waits until no call is under way. Errors: what went wrong in one."""

    @abstractmethod
    def close(self) -> None:
        """Ends every rank. What they held is lost."""
