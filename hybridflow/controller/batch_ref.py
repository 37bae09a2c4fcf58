"""BatchRef: what a worker-group call gives back. A Batch that lives where it was made, with the same verbs."""

from __future__ import annotations

import os
from typing import Never

from ..batch import Batch
from ..errors import BatchError


class BatchRef(Batch):
    """Rows that belong to a worker group. A driver selects, joins and maps them; to read values it calls `fetch`.

    Under the inline runtime the rows are in this process already, yet reading is refused all the same, so that a driver
    that runs on one rank runs on many. What joins these rows with a Batch is a BatchRef too.
    """

    @classmethod
    def of(cls, batch: Batch) -> BatchRef:
        """The same rows, columns and metrics, as a reference."""
        return batch if isinstance(batch, cls) else cls._of(batch._columns, batch.ids, batch.metrics)

    # `batch[name]`, `array` and `ragged` read through this
    def column(self, name: str) -> Never:
        self._column(name)
        raise BatchError(f"column '{name}' lives with the workers: read it with batch.fetch('{name}')['{name}'].")

    def to_torch(self, *names: str) -> Never:
        raise BatchError("the rows live with the workers: read them with batch.fetch().to_torch().")

    def save(self, path: str | os.PathLike[str]) -> Never:
        raise BatchError("the rows live with the workers: read them with batch.fetch().save(path).")
