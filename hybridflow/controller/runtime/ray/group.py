"""Worker groups on a Ray cluster: a method call is one call to each rank, its rows placed to balance their cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ....batch import Batch
from ....columns import Kind, as_slice
from ....errors import HybridFlowError
from ...balance import balanced_parts, cost
from ...batch_ref import BatchRef, PendingMetrics
from ...group import Place, WorkerGroup
from ...protocols import Parts, Protocol
from ...replay import Replay
from ...stored import Ints, Placed, StoredColumn
from ...trace import Span
from ...wire import unpacked
from ...worker import Worker
from . import host as tasks
from .message import sent
from .reports import Report, known_in
from .shards import HostKey, RayShard

if TYPE_CHECKING:
    from .runtime import RayRuntime

R = TypeVar("R")


@dataclass(frozen=True)
class RankCall:
    """A call to one rank that is under way. inputs: the batch it was given, None if none."""

    report: Any
    made: Any
    number: int
    host: HostKey
    inputs: Batch | None = None

    def value(self, report: Report) -> Any:
        """What the rank returned; a batch as where it lies."""
        if report.made is None:
            return report.value
        made = report.made
        rows = Placed([RayShard(self.made, self.host, self.number, made.rows)])
        columns = {
            name: StoredColumn(name, Kind(kind), rows, known_in(known, Kind(kind), made.rows), size)
            for name, kind, known, size in made.columns
        }
        ids = unpacked(made.ids) if made.ids is not None or self.inputs is None else self.inputs.ids
        return BatchRef._of(columns, ids, made.metrics)


class GroupCall:
    """A method call to all ranks, once it was sent. placed: rows of `inputs` that went to each part, if any did."""

    def __init__(
        self, group: RayGroup, protocol: Protocol, span: Span, inputs: Batch | None, placed: Sequence[Ints] | None
    ) -> None:
        self.group, self.protocol, self.span, self.inputs, self.placed = group, protocol, span, inputs, placed
        self.ranks: list[RankCall] = []
        self._error: HybridFlowError | None = None

    @property
    def result(self) -> Any:
        """The value of the call; waits for it. Errors: what went wrong, however often it is looked at."""
        if self._error is not None:
            raise self._error
        try:
            return self._value
        except HybridFlowError as error:
            self._error = error
            raise

    @cached_property
    def _value(self) -> Any:
        reports = self.group.runtime.wait(self.ranks, self.span)
        values = [rank.value(report) for rank, report in zip(self.ranks, reports, strict=True)]
        value = self.protocol.collect(self.group.layout, values)
        made = self._in_order(value) if isinstance(value, Batch) else None
        self.group.runtime.trace.end(self.span, made)
        return value if made is None else made

    def _in_order(self, made: Batch) -> Batch:
        """Rows in the order of the inputs; those that did not exist before, in that of their identities."""
        if self.placed is None or self.inputs is None:
            return made
        came, ids = np.concatenate(self.placed), self.inputs.ids
        new = made.ids if made.ids is not None and (ids is None or not np.array_equal(made.ids, ids[came])) else None
        order = np.argsort(came if new is None else new, kind="stable")
        return made if (order == np.arange(len(order))).all() else made.take(order).with_metrics(made.metrics)


class RayGroup(WorkerGroup):
    """The ranks of one role, one on each host of a pool."""

    def __init__(self, name: str, role: type[Worker[Any]], settings: Any, place: Place, runtime: RayRuntime) -> None:
        self.name, self.place, self.runtime = name, place, runtime
        self.layout = role.arranged(settings, place.ranks)
        self.role, self.settings = role, settings
        self._started = False

    def start(self) -> None:
        if self._started:
            return
        self._started = True
        self.runtime.start(self.place)
        self._together("start", tasks.build, lambda rank: (self.name, self.role, self.settings, rank))

    # ---- calls
    def call(self, method: str, protocol: Protocol, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self.start()
        inputs = next((value for value in (*args, *kwargs.values()) if isinstance(value, Batch)), None)
        placed = self._placed(protocol, inputs)
        call = GroupCall(self, protocol, self.runtime.trace.begin(self.name, method, inputs), inputs, placed)
        parts = [_cut(value, inputs, placed) for value in args]
        named = {name: _cut(value, inputs, placed) for name, value in kwargs.items()}
        for rank, (own, own_named) in enumerate(protocol.distribute(self.layout, parts, named)):
            batch = next((value for value in (*own, *own_named.values()) if isinstance(value, Batch)), None)
            task = tasks.debug if self.runtime.debug == (self.name, rank) else tasks.call
            wire = sent(own, own_named)
            call.ranks.append(self.runtime.submit(self, rank, method, task, self.name, method, *wire, inputs=batch))
        self.runtime.remember(call, Replay(self.name, self.role, self.settings, method, tuple(args), dict(kwargs)))
        kind = _returned(self.role, method)
        if kind in ("Batch", "BatchRef"):
            return BatchRef.pending(lambda: call.result)
        return PendingMetrics(lambda: call.result) if kind == "Metrics" else call.result

    def on_ranks(self, fn: Callable[..., R], args: Sequence[Any], ranks: Sequence[int] | None) -> list[R]:
        self.start()
        chosen = range(self.layout.size) if ranks is None else ranks
        for rank in chosen:
            self.layout.coordinates(rank)  # raises for a rank that is none
        return self._together("on_ranks", tasks.apply, lambda rank: (self.name, fn, *sent(args)), chosen)

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._together("save", tasks.save, lambda rank: (self.name, folder))

    def load(self, folder: Path) -> None:
        self._together("load", tasks.load, lambda rank: (self.name, folder))

    def _together(
        self,
        what: str,
        task: Callable[..., Any],
        args: Callable[[int], tuple[Any, ...]],
        ranks: Sequence[int] | None = None,
    ) -> list[Any]:
        """A task on these ranks (all, if None), waited for; its values by rank."""
        chosen = range(self.layout.size) if ranks is None else ranks
        span = self.runtime.trace.begin(self.name, what)
        calls = [self.runtime.submit(self, rank, what, task, *args(rank)) for rank in chosen]
        reports = self.runtime.wait(calls, span)
        self.runtime.trace.end(span)
        return [call.value(report) for call, report in zip(calls, reports, strict=True)]

    def _placed(self, protocol: Protocol, inputs: Batch | None) -> Sequence[Ints] | None:
        """Rows of each part, balanced by cost and where they lie. Where their lengths are not known here: by number, if
        a unit has to stay whole, else None."""
        if protocol.parts is None or inputs is None or not len(inputs):
            return None
        unit = inputs._array(protocol.unit) if protocol.unit is not None else None
        tokens, count = _tokens(inputs), protocol.parts(self.layout)
        if tokens is not None:
            return balanced_parts(cost(tokens), count, self._present(inputs, count), unit)
        return None if unit is None else balanced_parts(np.ones(len(inputs)), count, unit=unit)

    def _present(self, inputs: Batch, parts: int) -> Ints:
        """The part (of as many as data-parallel coordinates) on whose rank each row lies, -1 where it is none."""
        column = inputs._column("response_ids" if "response_ids" in inputs else "prompt_ids")
        if not isinstance(column, StoredColumn) or parts != self.layout.dp:
            return np.full(len(inputs), -1)
        hosts = [shard.host for shard in column.rows.shards if isinstance(shard, RayShard)]
        here = [self.layout.coordinates(rank).dp if pool == self.place.pool else -1 for pool, rank, _ in hosts]
        return np.array(here)[column.rows.where()[0]]


def _cut(value: Any, inputs: Batch | None, placed: Sequence[Ints] | None) -> Any:
    """A batch in the parts of `placed`; one of another number of rows, and any other value, as it is."""
    if placed is None or inputs is None or not isinstance(value, Batch) or len(value) != len(inputs):
        return value
    return Parts([value.take(as_slice(rows)) for rows in placed])


def _tokens(rows: Batch) -> Ints | None:
    """Tokens of each row, where they are known."""
    names = [name for name in ("prompt_ids", "response_ids") if name in rows]
    known = [rows._column(name) for name in names]
    if not names or any(isinstance(column, StoredColumn) and column.known is None for column in known):
        return None
    tokens: Ints = np.sum([rows.lengths(name) for name in names], axis=0).astype(np.int64)
    return tokens


def _returned(role: type[Worker[Any]], method: str) -> str:
    """The name of the type that a method says it returns."""
    kind = getattr(role, method).__annotations__.get("return", "")
    return kind if isinstance(kind, str) else getattr(kind, "__name__", "")
