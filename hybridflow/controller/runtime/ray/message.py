"""What passes between the driver and its hosts, in few bytes: arguments of calls, reports, references of rows."""

from __future__ import annotations

import pickle
import sys
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import cloudpickle
import numpy as np
import ray.cloudpickle

from ....batch import Batch
from ....columns import Array, Kind, read_only
from ....errors import BatchError
from ...group import OTHER_ROWS
from ...stored import Placed, StoredColumn
from ...wire import packed, unpacked
from .shards import RayShard

SEVERAL = 3  # references, which have much in common
SMALL, LARGE = 256, 1 << 20
"""Bytes: what has fewer gains little by compression; what has more takes longer to compress than to send."""
PICKLE = b"\x80"  # the first byte of every pickle, and of no compressed one


class Sent:
    """A batch that has come to a rank: stored columns as where they lie, the others as they are.

    ids: a row's identity is its position in what was sent, above the number of the batch in the call, so that it can be
    told whether the call kept the rows as they came.
    """

    def __init__(self, wire: tuple[Any, ...]) -> None:
        rows, number, self._local, self._stored = wire
        self.ids = read_only(np.arange(number << 40, (number << 40) + rows))

    def lends(self, ids: Array) -> bool:
        """Whether rows of these identities are among those sent."""
        return ids is self.ids or bool(np.isin(ids, self.ids).any()) or not (len(ids) or len(self.ids))

    def has(self, ids: Array) -> bool:
        """Whether these are the rows sent, in their order."""
        return ids is self.ids or np.array_equal(ids, self.ids)

    def received(self) -> Batch:
        """The batch, on the rank; stored columns are read when looked at."""
        columns = {name: unpacked(column) for name, column in self._local.items()}
        for shards, shard, row, names in self._stored:
            placed = Placed([RayShard(*each) for each in shards], unpacked(shard), unpacked(row))
            columns |= {name: StoredColumn(own, Kind(kind), placed) for name, own, kind in names}
        return Batch._of(columns, self.ids, {})


class Inputs:
    """Arguments of a call that have come to a rank, as `sent` sent them."""

    def __init__(self, values: Mapping[int | str, Any], batches: Mapping[int | str, tuple[Any, ...]]) -> None:
        self._values, self._batches = values, {key: Sent(wire) for key, wire in batches.items()}

    def received(self) -> tuple[list[Any], dict[str, Any]]:
        """Positional and keyword arguments."""
        values = {**self._values, **{key: batch.received() for key, batch in self._batches.items()}}
        named = {key: value for key, value in values.items() if isinstance(key, str)}
        return [values[position] for position in range(len(values) - len(named))], named

    def returned(self, made: Any) -> Any:
        """What a call made of them: a batch without identities, if its rows are those that came in.

        Errors: BatchError for a method that dropped, added or reordered the rows it was given.
        """
        return made._of(made._columns, self._new_ids(made), made.metrics) if isinstance(made, Batch) else made

    def _new_ids(self, made: Batch) -> Array | None:
        batches = list(self._batches.values())
        if made.ids is not None and not any(each.lends(made.ids) for each in batches):
            return made.ids
        if made.ids is None and batches and len(made) != len(batches[0].ids):
            raise BatchError(f"{len(made)} rows came out where {len(batches[0].ids)} went in, without identities.")
        if made.ids is not None and not batches[0].has(made.ids):
            raise BatchError(OTHER_ROWS)
        return None


def sent(args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> tuple[dict[int | str, Any], Any]:
    """Arguments of a call on their way to a rank, in plain tuples, which are few bytes and quickly made: those that are
    no batches, and those that are, by position or name."""
    values: dict[int | str, Any] = dict(enumerate(args))
    values.update(kwargs or {})
    batches = [key for key, value in values.items() if isinstance(value, Batch)]
    wires = {key: _wire(values.pop(key), number) for number, key in enumerate(batches, 1)}
    several = sum(len(shards) for _, _, _, stored in wires.values() for shards, *_ in stored) >= SEVERAL
    return values, Folded(wires) if several else wires


def folded(value: Any) -> Any:
    """A value in few bytes; a large one as it is, since Ray copies arrays only once."""
    data = ray.cloudpickle.dumps(value, protocol=5)
    if len(data) > LARGE:
        return value
    return data if len(data) < SMALL else zlib.compress(data, 1)


def unfolded(value: Any) -> Any:
    """What `folded` was given."""
    if not isinstance(value, bytes):
        return value
    return pickle.loads(value if value.startswith(PICKLE) else zlib.decompress(value))


class Folded:
    """A value that travels folded inside an argument, where Ray sees to the references in it."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __reduce__(self) -> tuple[Any, ...]:
        return unfolded, (folded(self._value),)


def send_user_files_by_value() -> None:
    """Those of modules that exist in this process alone: Ray's cloudpickle has a register of its own."""
    for name in cloudpickle.list_registry_pickle_by_value() - ray.cloudpickle.list_registry_pickle_by_value():
        if name in sys.modules:
            ray.cloudpickle.register_pickle_by_value(sys.modules[name])


def _wire(batch: Batch, number: int) -> tuple[Any, ...]:
    """What a `Sent` is made of."""
    local: dict[str, Any] = {}
    stored: dict[int, tuple[Any, ...]] = {}
    for name in batch.names:
        column = batch._column(name)
        if not isinstance(column, StoredColumn):
            local[name] = packed(column)
            continue
        rows = column.rows
        if id(rows) not in stored:
            shards = [(s.ref, s.host, s.call, s.rows) for s in rows.shards if isinstance(s, RayShard)]
            stored[id(rows)] = shards, packed(rows.shard), packed(rows.row), []
        stored[id(rows)][-1].append((name, column.name, column.kind.value))
    return len(batch), number, local, list(stored.values())
