"""A failed call's inputs: kept with the run, to be made again on one inline rank, where breakpoints work.

That is the same computation, because results do not depend on how rows are cut, packed or placed.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cloudpickle

from ..batch import Batch
from ..errors import HybridFlowError
from .worker import Worker

FILE = "call.pkl"


@dataclass(frozen=True)
class Replay:
    """A method call to a group: of which role, with which settings, on what."""

    group: str
    role: type[Worker[Any]]
    settings: Any
    method: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def name(self) -> str:
        """`group.method`."""
        return f"{self.group}.{self.method}"

    def save(self, folder: Path) -> None:
        """Write it with all rows it was given; functions and classes of the user's files go by value."""
        here = replace(
            self, args=tuple(map(_here, self.args)), kwargs={name: _here(v) for name, v in self.kwargs.items()}
        )
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FILE).write_bytes(cloudpickle.dumps(here, protocol=5))

    @staticmethod
    def load(folder: Path) -> Replay:
        """Read what `save` wrote. Only for files of your own: it unpickles. Errors: HybridFlowError."""
        path = folder / FILE
        if not path.is_file():
            raise HybridFlowError(f"{folder} holds no failed call ({FILE}): it is the folder `failure` of a run.")
        found = pickle.loads(path.read_bytes())
        if not isinstance(found, Replay):
            raise HybridFlowError(f"{path} is not a failed call.")
        return found


def _here(value: Any) -> Any:
    return value.fetch() if isinstance(value, Batch) else value
