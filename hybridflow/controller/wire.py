"""Arrays in few bytes, for what passes through the driver. Pure; numpy only."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..columns import Array, read_only

NUMBERS = "biuf"


def packed(value: Any) -> Any:
    """A flat array of numbers as bytes, whole numbers as narrow as their distance from the smallest allows; what is
    none, as it is."""
    if not isinstance(value, np.ndarray) or value.ndim != 1 or value.dtype.kind not in NUMBERS:
        return value
    if value.dtype.itemsize == 1 or value.dtype.kind == "f" or not len(value):
        return value.dtype.str, value.tobytes()
    least = value.min()
    narrow = np.min_scalar_type(int(value.max()) - int(least))
    return value.dtype.str, (value - least).astype(narrow).tobytes(), narrow.str, int(least)


def unpacked(value: Any) -> Any:
    """What `packed` was given."""
    if not isinstance(value, tuple):
        return value
    dtype, data, *rest = value
    if not rest:
        return np.frombuffer(data, dtype)
    narrow, least = rest
    widened: Array = np.frombuffer(data, narrow).astype(dtype)
    widened += widened.dtype.type(least)
    return read_only(widened)
