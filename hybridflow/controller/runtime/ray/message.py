"""What passes between the driver and its hosts, in few bytes."""

from __future__ import annotations

import pickle
import sys
import zlib
from typing import Any

import cloudpickle
import ray.cloudpickle

SMALL, LARGE = 256, 1 << 20
"""Bytes: what has fewer gains little by compression; what has more takes longer to compress than to send."""
PICKLE = b"\x80"  # the first byte of every pickle, and of no compressed one


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
    """Modules made of the user's files, which exist in this process alone: Ray's cloudpickle has a register of its own."""
    for name in cloudpickle.list_registry_pickle_by_value() - ray.cloudpickle.list_registry_pickle_by_value():
        if name in sys.modules:
            ray.cloudpickle.register_pickle_by_value(sys.modules[name])
