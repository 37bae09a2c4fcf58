"""Worker: the base of every role, and @remote, which makes a method callable on all ranks of a group."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Concatenate, Generic, ParamSpec, TypeVar

from ..errors import HybridFlowError
from ..layout import ParallelLayout

if TYPE_CHECKING:
    from pathlib import Path

    from .group import WorkerGroup
    from .protocols import Protocol

S = TypeVar("S")
W = TypeVar("W", bound="Worker[Any]")
P = ParamSpec("P")
R = TypeVar("R")


class Worker(Generic[S]):
    """One class is two things: a worker's code on a rank, and the typed handle of its group in a driver.

    On a rank `group` is None and @remote methods run. In a driver the same call goes to every rank of `group`, and
    methods without @remote run in the driver. `settings` is what the role reads of the configuration.
    """

    role: ClassVar[str] = "worker"
    needs_device: ClassVar[bool] = True
    """False: it runs in one process that takes no device."""

    def __init__(self, settings: S, name: str, rank: int = 0, group: WorkerGroup | None = None) -> None:
        self.settings = settings
        self.name = name
        self.rank = rank
        self.group = group
        self.progress: Callable[[int, int], None] = lambda done, total: None
        """To be told (done, total) in a call that takes long."""

    @classmethod
    def arranged(cls, settings: S, ranks: int) -> ParallelLayout:
        """How so many ranks are arranged; data-parallel if the role does not say. Errors: ConfigError."""
        return ParallelLayout(dp=ranks)

    # ---- on a rank
    def start(self) -> None:
        """Build what the role needs on this rank: engines, pools. Called once."""

    def stop(self) -> None:
        """Give up what `start` took."""

    def save_rank(self, folder: Path) -> None:
        """Write this rank's part of a checkpoint; a role without state writes nothing."""

    def load_rank(self, folder: Path) -> None:
        """Read what `save_rank` wrote."""

    # ---- in a driver
    @property
    def off(self) -> bool:
        """Switched off by the configuration: calls answer with no columns, at no cost."""
        return False

    @property
    def layout(self) -> ParallelLayout:
        """How the group's ranks are arranged."""
        return self._group().layout

    def on_ranks(self, fn: Callable[..., R], *args: Any, ranks: Sequence[int] | None = None) -> list[R]:
        """fn(worker, *args) on these ranks (all, if None), results by rank: to look at weights, or time something."""
        return self._group().on_ranks(fn, args, ranks)

    def state_dict(self) -> dict[str, Any]:
        """What the handle itself has to keep over a restart."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""

    def _group(self) -> WorkerGroup:
        if self.group is None:
            raise HybridFlowError(f"{self.name} is a worker on rank {self.rank}, not a group's handle.")
        return self.group


def remote(
    protocol: Protocol | Callable[..., Protocol],
) -> Callable[[Callable[Concatenate[W, P], R]], Callable[Concatenate[W, P], R]]:
    """Marks a method that runs on every rank; `protocol` distributes its inputs and collects its outputs. A function of
    the handle and the call's arguments chooses one for each call."""

    def wrap(method: Callable[Concatenate[W, P], R]) -> Callable[Concatenate[W, P], R]:
        @functools.wraps(method)
        def call(self: W, /, *args: P.args, **kwargs: P.kwargs) -> R:
            if self.group is None:
                return method(self, *args, **kwargs)
            chosen = protocol(self, *args, **kwargs) if callable(protocol) else protocol
            result: R = self.group.call(method.__name__, chosen, args, kwargs)
            return result

        return call

    return wrap
