"""A failed call's inputs: kept with the run, to be made again on one inline rank, where breakpoints work.

Results do not depend on how rows are cut, packed or placed; weights are what the caller restores. Functions and classes
of the user's own files are kept by name: a breakpoint or a mended line in the file counts.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
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
        """Write it with all rows it was given."""
        here = replace(
            self, args=tuple(map(_here, self.args)), kwargs={name: _here(v) for name, v in self.kwargs.items()}
        )
        folder.mkdir(parents=True, exist_ok=True)
        with _own_files_by_name() as files:
            call = cloudpickle.dumps(here, protocol=5)
        used = {name: file for name, file in files.items() if name.encode() in call}
        (folder / FILE).write_bytes(pickle.dumps((used, call)))

    @staticmethod
    def load(folder: Path, module_of: Callable[[str], ModuleType]) -> Replay:
        """Read what `save` wrote; `module_of` makes a module of a file of the user's. Only for files of your own: it
        unpickles. Errors: HybridFlowError; AttributeError for a name that such a file has no longer."""
        path = folder / FILE
        if not path.is_file():
            raise HybridFlowError(
                f"{folder} holds no failed call ({FILE}): give the folder `failure` of a run on Ray that "
                "failed in a call. An inline run keeps none: set a breakpoint."
            )
        used, call = pickle.loads(path.read_bytes())
        sys.modules.update({name: module_of(file) for name, file in used.items()})
        found: Replay = pickle.loads(call)
        return found


@contextmanager
def _own_files_by_name() -> Iterator[dict[str, str]]:
    """Modules made of the user's files, which else are pickled by value, and where those are."""
    registered = ((name, sys.modules.get(name)) for name in cloudpickle.list_registry_pickle_by_value())
    # under the name that a file had when a call failed there may be the module of the mended file
    own = [module for name, module in registered if module and module.__name__ == name and module.__file__]
    for module in own:
        cloudpickle.unregister_pickle_by_value(module)
    try:
        yield {module.__name__: str(module.__file__) for module in own}
    finally:
        for module in own:
            cloudpickle.register_pickle_by_value(module)


def _here(value: Any) -> Any:
    return value.fetch() if isinstance(value, Batch) else value
