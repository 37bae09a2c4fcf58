"""BatchRef: what a worker-group call gives back. A Batch that lives where it was made, with the same verbs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Never, Self, TypeVar, cast

from ..batch import Batch
from ..columns import Array, Kind, spec_of
from ..errors import BatchError
from .stored import StoredColumn

R = TypeVar("R")


class BatchRef(Batch):
    """Rows that belong to a worker group. A driver selects, joins and maps them; to read values it calls `fetch`.

    Under the inline runtime the rows are in this process already, yet reading is refused all the same, so that a driver
    that runs on one rank runs on many. What joins these rows with a Batch is a BatchRef too.
    """

    @classmethod
    def of(cls, batch: Batch) -> BatchRef:
        """The same rows, columns and metrics, as a reference."""
        return batch if isinstance(batch, cls) else cls._of(batch._columns, batch.ids, batch.metrics)

    @classmethod
    def pending(cls, result: Callable[[], Batch]) -> BatchRef:
        """What a call that is under way will make. Who looks at it waits for `result`; passing it on does not."""
        batch = object.__new__(cls)
        batch._result = result
        return batch

    def __getattr__(self, name: str) -> Any:
        if name not in ("_columns", "ids", "metrics") or "_result" not in self.__dict__:
            raise AttributeError(name)
        made = self._result()
        self._columns, self.ids, self.metrics = made._columns, made.ids, made.metrics
        del self._result  # it knows the call's inputs, which may be forgotten
        return self.__dict__[name]

    _result: Callable[[], Batch]

    # `batch[name]`, `array` and `ragged` read through this
    def column(self, name: str) -> Never:
        self._column(name)
        raise BatchError(f"column '{name}' lives with the workers: read it with batch.fetch('{name}')['{name}'].")

    def to_torch(self, *names: str) -> Never:
        raise BatchError("the rows live with the workers: read them with batch.fetch().to_torch().")

    def save(self, path: str | os.PathLike[str]) -> Never:
        raise BatchError("the rows live with the workers: read them with batch.fetch().save(path).")

    def map(self, fn: Callable[..., Mapping[str, Any] | Array], to: str | None = None, **options: Any) -> Self:
        """As `Batch.map`: in the driver where all that `fn` reads and makes has one value a row, which is known here;
        else in one process, beside the shards."""
        read = self._read_by(fn)
        per_token = to is not None and (spec := spec_of(to)) is not None and spec.kind is Kind.RAGGED
        if not self._stored or not (per_token or any(self._is_away(name) for name in read)):
            return super().map(fn, to, **options)
        needed = [*read, *(["response_ids"] if "response_ids" in self and "response_ids" not in read else [])]
        made = self.select(*needed).apply(_mapped, fn, to, options)
        return type(self)._of(made._columns, self.ids, made.metrics)

    def apply(self, fn: Callable[..., R], *args: Any) -> R:
        if not self._stored:
            return fn(self.fetch(), *args)
        shards = [shard for column in self._stored for shard in column.rows.shards]
        return cast(R, max(shards, key=lambda shard: shard.rows).apply(self, fn, *args))

    @property
    def _stored(self) -> list[StoredColumn]:
        columns = [self._column(name) for name in self.names]
        return [column for column in columns if isinstance(column, StoredColumn)]

    def _is_away(self, name: str) -> bool:
        """Whether a column has to be read where it is kept."""
        column = self._column(name)
        return isinstance(column, StoredColumn) and (column.kind is Kind.RAGGED or column.known is None)


class PendingMetrics(Mapping[str, float]):
    """Metrics of a call that is under way. Whoever looks at them waits."""

    def __init__(self, result: Callable[[], Mapping[str, float]]) -> None:
        self._result: Callable[[], Mapping[str, float]] | None = result
        self._known: Mapping[str, float] = {}

    @property
    def _metrics(self) -> Mapping[str, float]:
        if self._result is not None:
            self._known, self._result = self._result(), None
        return self._known

    def __getitem__(self, name: str) -> float:
        return self._metrics[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._metrics)

    def __len__(self) -> int:
        return len(self._metrics)

    def __repr__(self) -> str:
        return repr(dict(self._metrics))


def _mapped(batch: Batch, fn: Callable[..., Any], to: str | None, options: Mapping[str, Any]) -> Batch:
    return batch.map(fn, to, **options)
