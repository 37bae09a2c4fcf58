"""Arrays in few bytes."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hybridflow.columns import Ragged
from hybridflow.controller.wire import packed, unpacked

pytestmark = pytest.mark.unit
NUMBERS = st.one_of(hnp.boolean_dtypes(), hnp.integer_dtypes(), hnp.unsigned_integer_dtypes(), hnp.floating_dtypes())


@given(hnp.arrays(NUMBERS, st.integers(0, 20)))
def test_an_array_arrives_as_it_was(array: Any) -> None:
    arrived = unpacked(pickle.loads(pickle.dumps(packed(array))))
    assert arrived.dtype == array.dtype
    assert arrived.tobytes() == array.tobytes()


def test_whole_numbers_take_as_many_bytes_as_their_distances_need() -> None:
    near = (4 << 56) + np.arange(256)
    assert len(pickle.dumps(packed(near))) < 2 * len(near)
    assert len(pickle.dumps(packed(near * 200))) < 3 * len(near)


@pytest.mark.parametrize(
    "value", [None, np.zeros((2, 3)), np.array(["a"], object), Ragged.from_rows([[1, 2]]), np.array(["2026"], "M8[Y]")]
)
def test_what_is_no_flat_array_of_numbers_is_left_alone(value: Any) -> None:
    assert unpacked(packed(value)) is value
