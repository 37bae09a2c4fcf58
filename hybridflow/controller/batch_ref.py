"""BatchRef: what a worker-group call gives back. A Batch that lives where it was made, with the same verbs."""

from __future__ import annotations

from typing import Any

from ..batch import Batch
from ..errors import BatchError


class BatchRef(Batch):
    """Rows that belong to a worker group. A driver selects, joins and maps them; to read values it calls `fetch`.

    Under the inline runtime the rows are in this process already, yet reading is refused all the same, so that a driver
    that runs on one rank runs on many.
    """

    @classmethod
    def of(cls, batch: Batch) -> BatchRef:
        """The same rows, columns and metrics, as a reference."""
        if isinstance(batch, cls):
            return batch
        return cls({name: batch.column(name) for name in batch.names}, batch.ids, batch.metrics)

    def __getitem__(self, name: str) -> Any:
        raise BatchError(f"column '{name}' lives with the workers: read it with batch.fetch('{name}')['{name}'].")
