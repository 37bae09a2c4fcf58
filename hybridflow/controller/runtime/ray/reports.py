"""What a host tells the driver of a call, small enough to pass through it. Pure; strings and arrays only."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

from ....batch import Batch
from ....columns import Array, Column, Kind, Ragged, kind_of, objects, spec_of
from ....device import is_collective_error
from ....errors import HybridFlowError, WorkerError, named
from ...trace import nbytes
from ...wire import packed, unpacked

MESSAGE_LENGTH = 2000
NO_VALUE = "no value"
"""Known of objects of which no row has one."""


class Blame(IntEnum):
    """Whose fault a failure is, as far as it can be seen where it happened; of several, the first is the cause."""

    OWN = 0
    UPSTREAM = 1
    """Of a host whose rows it wanted."""
    COLLECTIVE = 2
    """Of some other rank, seen in a collective."""


class LostRowsError(WorkerError):
    """Rows that another host made cannot be read: that host, or its node, is the cause."""


@dataclass(frozen=True)
class Failure:
    """Why a call did not return. error: of ours, as it was raised; None for any other, which `message` tells."""

    message: str
    traceback: str = ""
    error: HybridFlowError | None = None
    blame: Blame = Blame.OWN

    @staticmethod
    def of(error: BaseException) -> Failure:
        """From what a worker's method raised; nothing of the user's own classes is kept."""
        text = "".join(traceback.format_exception(error))
        ours = _portable(error) if isinstance(error, HybridFlowError) else None
        message = named(error)[:MESSAGE_LENGTH]
        return Failure(message, text, ours, _blame(error))


class Made(NamedTuple):
    """What is known in the driver of a batch that stays with its maker; arrays are packed.

    ids: of rows that did not exist before; None: the call's own rows, in their order. columns: name, kind, what is
    known of its values, mean bytes a row.
    """

    rows: int
    ids: Any
    columns: Sequence[tuple[str, str, Any, float]]
    metrics: dict[str, float]

    @property
    def nbytes(self) -> int:
        """Of the columns' values."""
        return round(self.rows * sum(size for *_, size in self.columns))

    @staticmethod
    def of(batch: Batch) -> Made:
        """Of a batch whose columns are here."""
        columns = []
        for name in batch.names:
            column = batch.column(name)
            columns.append((name, kind_of(column).value, known_of(name, column), nbytes(column) / max(1, len(batch))))
        return Made(len(batch), packed(batch.ids), columns, dict(batch.metrics))


class Report(NamedTuple):
    """How a call went: its value unless that is a batch, and when and how long it ran (Unix nanoseconds, seconds)."""

    start_ns: int
    seconds: float
    value: Any = None
    made: Made | None = None
    failure: Failure | None = None

    @property
    def wire(self) -> tuple[Any, ...]:
        """Plain tuples, which take fewer bytes."""
        return self.start_ns, self.seconds, self.value, self.made and tuple(self.made), self.failure

    @staticmethod
    def of(wire: tuple[Any, ...]) -> Report:
        """From `wire`."""
        start_ns, seconds, value, made, failure = wire
        return Report(start_ns, seconds, value, made and Made(*made), failure)


def known_of(name: str, column: Column) -> Any:
    """What the driver gets to know of a column: one value a row of a dense one, lengths of a ragged one unless they are
    those of response_ids, of objects that none has a value."""
    if isinstance(column, Ragged):
        spec = spec_of(name)
        follows = spec is not None and spec.aligned is not None
        return None if follows else packed(column.lengths)
    if column.dtype == object:
        return NO_VALUE if all(value is None for value in column) else None
    return packed(column) if column.ndim == 1 else None


def known_in(value: Any, kind: Kind, rows: int) -> Array | None:
    """What `known_of` said, as a stored column wants it."""
    known: Array | None = objects([None] * rows) if kind is Kind.OBJECTS and value == NO_VALUE else unpacked(value)
    return known


def _blame(error: BaseException) -> Blame:
    if isinstance(error, LostRowsError):
        return Blame.UPSTREAM
    return Blame.COLLECTIVE if is_collective_error(error) else Blame.OWN


def _portable(error: HybridFlowError) -> HybridFlowError:
    """The same error of the library's own class, which the driver has."""
    kind = next(each for each in type(error).__mro__ if each.__module__.startswith("hybridflow."))
    rebuilt: HybridFlowError = kind(error.message, where=error.where)
    return rebuilt
