"""Columns: kinds, dtypes, and rows of different lengths without padding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.columns import (
    TABLE,
    Kind,
    Ragged,
    as_column,
    concat_rows,
    kind_of,
    objects,
    offsets_of,
    read_only,
    spec_of,
    take_rows,
)
from hybridflow.errors import BatchError

pytestmark = pytest.mark.unit

ROWS = st.lists(st.lists(st.integers(-5, 5), max_size=4), max_size=6)


def lists(ragged: Ragged) -> list[list[Any]]:
    return [row.tolist() for row in ragged]


@given(ROWS)
def test_ragged_gives_back_the_rows_it_was_made_from(rows: list[list[int]]) -> None:
    ragged = Ragged.from_rows(rows)
    assert lists(ragged) == rows
    assert ragged.lengths.tolist() == [len(row) for row in rows]
    assert len(ragged.values) == sum(len(row) for row in rows)


@given(ROWS.filter(bool), st.data())
def test_ragged_take_is_list_indexing(rows: list[list[int]], data: st.DataObject) -> None:
    index = np.array(data.draw(st.lists(st.integers(0, len(rows) - 1))), np.int64)
    assert lists(Ragged.from_rows(rows).take(index)) == [rows[i] for i in index]


@given(ROWS.filter(bool), st.data())
def test_taking_rows_of_all_columns_is_list_indexing_however_the_rows_lie(
    rows: list[list[int]], data: st.DataObject
) -> None:
    first = data.draw(st.integers(0, len(rows) - 1))
    consecutive = list(range(first, data.draw(st.integers(first, len(rows)))))
    index = data.draw(st.sampled_from([consecutive, data.draw(st.lists(st.integers(0, len(rows) - 1)))]))
    ragged = Ragged.from_rows(rows, np.int64)
    columns = {"a": ragged, "b": ragged.with_values(-ragged.values), "c": np.arange(len(rows)), "d": objects(rows)}
    taken = take_rows(columns, np.array(index, np.int64))
    assert lists(taken["a"]) == [rows[i] for i in index]
    assert lists(taken["b"]) == [[-value for value in rows[i]] for i in index]
    assert taken["c"].tolist() == index
    assert taken["d"].tolist() == [rows[i] for i in index]
    assert taken["a"].offsets is taken["b"].offsets


def test_consecutive_rows_are_taken_without_a_copy() -> None:
    ragged = Ragged.from_rows([[1], [2, 3], [4]])
    taken = take_rows({"a": ragged}, np.array([1, 2]))["a"]
    assert np.shares_memory(taken.values, ragged.values)


@given(st.lists(ROWS, min_size=1, max_size=4))
def test_concatenated_rows_are_the_lists_one_after_the_other(parts: list[list[list[int]]]) -> None:
    columns = [{"a": Ragged.from_rows(rows, np.int64), "n": np.array([len(r) for r in rows], int)} for rows in parts]
    joined = concat_rows(columns)
    assert lists(joined["a"]) == [row for rows in parts for row in rows]
    assert joined["n"].tolist() == [len(row) for rows in parts for row in rows]


def test_columns_that_shared_offsets_share_them_after_concatenation() -> None:
    ragged = Ragged.from_rows([[1], [2, 3]])
    part = {"a": ragged, "b": ragged.with_values(ragged.values * 2)}
    joined = concat_rows([part, part])
    assert joined["a"].offsets is joined["b"].offsets


def test_a_column_of_two_kinds_does_not_concatenate() -> None:
    with pytest.raises(BatchError, match="column 'a' is ragged in one batch and dense in another"):
        concat_rows([{"a": Ragged.from_rows([[1]])}, {"a": np.zeros(1)}])


def test_empty_rows_and_an_empty_first_row_keep_the_dtype_and_inner_shape() -> None:
    assert Ragged.from_rows([[], [1, 2], []]).values.dtype == np.int64
    assert as_column("prompt_ids", [[], [7]]).values.tolist() == [7]
    two_wide = Ragged.from_rows([[], np.ones((3, 2), np.float32)])
    assert two_wide.values.shape == (3, 2)


def test_ragged_rows_count_from_the_end_too_and_stop_at_the_last() -> None:
    ragged = Ragged.from_rows([[1], [2, 3]])
    assert ragged[-1].tolist() == [2, 3]
    with pytest.raises(IndexError, match="row 2 of 2"):
        ragged[2]


@pytest.mark.parametrize("offsets", [[0, 2, 1, 3], [1, 3], [0, 2], []])
def test_offsets_that_do_not_rise_from_zero_to_the_end_are_refused(offsets: list[int]) -> None:
    with pytest.raises(BatchError, match="column 'prompt_ids': offsets must rise from 0 to 3"):
        as_column("prompt_ids", Ragged(np.arange(3), np.array(offsets, np.int64)))


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ([1, 2], Kind.DENSE),
        ([1.5, 2], Kind.DENSE),
        ([True, False], Kind.DENSE),
        (np.zeros((2, 3)), Kind.DENSE),
        (["a", "b"], Kind.OBJECTS),
        ([np.str_("a"), np.str_("b")], Kind.OBJECTS),
        (np.array(["a", "b"]), Kind.OBJECTS),
        ([None, 1], Kind.OBJECTS),
        ([{"a": 1}, {"b": 2}], Kind.OBJECTS),
        ([[1], [2, 3]], Kind.OBJECTS),
        ([np.array([1]), np.array([2, 3])], Kind.RAGGED),
        ([], Kind.OBJECTS),
    ],
)
def test_a_users_column_has_the_kind_its_values_suggest(value: Any, kind: Kind) -> None:
    column = as_column("mine", value)
    assert kind_of(column) is kind
    assert len(column) == len(value)


def test_text_in_a_numpy_array_becomes_plain_strings() -> None:
    assert type(as_column("answer", np.array(["4", "12"]))[0]) is str


@pytest.mark.parametrize(
    ("name", "value", "dtype"),
    [
        ("reward", [0, 1], np.float32),
        ("reward", np.array([0.5, 1.0]), np.float32),
        ("reward/math", [1, 0], np.float32),
        ("keep", [1, 0], np.bool_),
        ("keep", [True, False], np.bool_),
        ("finish_reason", np.array([0, 4]), np.int8),
        ("group_id", [3, 3], np.int64),
    ],
)
def test_a_known_dense_column_gets_its_dtype(name: str, value: Any, dtype: Any) -> None:
    assert as_column(name, value).dtype == dtype


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("keep", [0.0, 1.0], "column 'keep' should be dense bool, not float64"),
        ("keep", [0, 2], "column 'keep' should be dense bool, not int64"),
        ("group_id", [0.5], "column 'group_id' should be dense int64, not float64"),
        ("reward", ["good"], "column 'reward' should be dense float32"),
        ("reward", Ragged.from_rows([[1.0]]), "column 'reward' holds one value a row"),
        ("response_ids", [[1.0, 2.0]], "column 'response_ids' should be ragged int64, not float64"),
        ("response_ids", [1, 2], "column 'response_ids' should be ragged int64"),
    ],
)
def test_a_known_column_of_another_kind_or_dtype_is_refused(name: str, value: Any, said: str) -> None:
    with pytest.raises(BatchError, match=said):
        as_column(name, value)


def test_case_05_advantages_in_the_place_of_the_mask_are_refused() -> None:
    advantages = Ragged.from_rows([[0.7, -0.7]])
    with pytest.raises(BatchError, match="column 'response_mask' should be ragged bool, not float64"):
        as_column("response_mask", advantages)
    with pytest.raises(BatchError, match="column 'response_mask' should be ragged bool, not float64"):
        as_column("response_mask", [[1.0, 0.0]])


def test_columns_cannot_be_written_through() -> None:
    for column in (as_column("mine", np.zeros(2)), as_column("prompt_ids", [[1], [2]]).values, objects(["a"])):
        with pytest.raises(ValueError, match="read-only"):
            read_only(column)[0] = 1


def test_every_component_of_the_reward_is_a_float_a_row() -> None:
    assert spec_of("reward/anything") == TABLE["reward"]
    assert spec_of("mine") is None


@given(st.lists(st.integers(0, 9)))
def test_offsets_are_running_totals(lengths: list[int]) -> None:
    assert offsets_of(lengths).tolist() == [sum(lengths[:i]) for i in range(len(lengths) + 1)]
