"""The inline runtime: one rank, in the driver's own process, each call done when it returns. Breakpoints work."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ...batch import Batch
from ...errors import BatchError, ConfigError, HybridFlowError
from ...layout import ParallelLayout
from ..batch_ref import BatchRef
from ..group import OTHER_ROWS, Place, Runtime, WorkerGroup
from ..protocols import Protocol
from ..trace import Trace
from ..worker import Worker

R = TypeVar("R")


class InlineRuntime(Runtime):
    """Everything in this process."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._groups: list[InlineGroup] = []

    @property
    def devices(self) -> int:
        return 1

    def group(self, name: str, role: type[Worker[Any]], settings: Any, place: Place) -> InlineGroup:
        if place.ranks > 1:
            raise ConfigError(f"{name} has {place.ranks} ranks, but run.runtime=inline has one: say run.runtime=ray.")
        group = InlineGroup(name, lambda: role(settings, name), self._trace)
        self._groups.append(group)
        return group

    def settle(self) -> None:
        pass  # each call is done when it returns

    def close(self) -> None:
        for group in self._groups:
            group.stop()


class InlineGroup(WorkerGroup):
    """A group of exactly one rank. `make` builds the rank's worker when the group starts."""

    def __init__(self, name: str, make: Callable[[], Worker[Any]], trace: Trace) -> None:
        self.name = name
        self.layout = ParallelLayout()
        self._make = make
        self._trace = trace
        self._worker: Worker[Any] | None = None

    def start(self) -> None:
        if self._worker is None:
            worker = self._make()
            worker.progress = self._trace.progress
            with self._trace.call(self.name, "start"):
                worker.start()
            self._worker = worker

    def call(self, method: str, protocol: Protocol, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        worker = self._started()
        batch = next((value for value in (*args, *kwargs.values()) if isinstance(value, Batch)), None)
        with self._trace.call(self.name, method, inputs=batch) as span:
            [(rank_args, rank_kwargs)] = protocol.distribute(self.layout, args, kwargs)
            try:
                result = getattr(worker, method)(
                    *(_here(value) for value in rank_args),
                    **{name: _here(value) for name, value in rank_kwargs.items()},
                )
            except HybridFlowError as error:
                error.locate(f"{self.name}.{method}, rank 0")
                raise
            except Exception as error:
                error.add_note(f"in {self.name}.{method}, rank 0 (inline)")
                raise
            result = protocol.collect(self.layout, [result])
            if not isinstance(result, Batch):
                return result
            if batch is not None and _other_rows(batch, result):
                raise BatchError(OTHER_ROWS, where=f"{self.name}.{method}, rank 0")
            span.output(result)
            return BatchRef.of(result)

    def on_ranks(self, fn: Callable[..., R], args: Sequence[Any], ranks: Sequence[int] | None) -> list[R]:
        worker = self._started()
        here = [_here(value) for value in args]
        return [fn(worker, *here) for rank in ([0] if ranks is None else ranks) if self.layout.coordinates(rank)]

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._started().save_rank(folder)

    def load(self, folder: Path) -> None:
        self._started().load_rank(folder)

    def stop(self) -> None:
        """End the rank."""
        if self._worker is not None:
            self._worker.stop()
            self._worker = None

    def _started(self) -> Worker[Any]:
        self.start()
        assert self._worker is not None
        return self._worker


def _other_rows(given: Batch, made: Batch) -> bool:
    """Whether a call made its rows of those it was given, and not the same ones."""
    if given.ids is None or made.ids is None or made.ids is given.ids or np.array_equal(made.ids, given.ids):
        return False
    return bool(np.isin(made.ids, given.ids).any()) or not len(given)


def _here(value: Any) -> Any:
    return value.fetch() if isinstance(value, BatchRef) else value
