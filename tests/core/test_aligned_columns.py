"""Which columns can stand beside tokens, and which rows of them are refused."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from easypipe.core.aligned import (
    LOSS_WEIGHTS,
    AlignedColumn,
    column_of,
    flat_values,
    numbers_of,
    values_of,
)
from easypipe.core.errors import SourceError

FIXED = pa.list_(pa.float32(), 3)


@pytest.mark.parametrize("outer", [pa.list_, pa.large_list])
@pytest.mark.parametrize(
    ("inner", "width", "expected"),
    [
        (pa.int8(), None, ("int8", 0)),
        (pa.uint16(), 0, ("uint16", 0)),
        (pa.float64(), None, ("float64", 0)),
        (pa.bool_(), None, ("uint8", 0)),
        (FIXED, None, ("float32", 3)),
        (FIXED, 3, ("float32", 3)),
        (pa.list_(pa.int32()), 5, ("int32", 5)),
        (pa.list_(pa.bool_(), 2), None, ("uint8", 2)),
        (FIXED, 4, None),  # another width than its type says
        (pa.int8(), 2, None),  # no lists in its lists
        (pa.list_(pa.int32()), None, None),  # of a width that nobody has said
        (pa.list_(pa.int32()), 0, None),
        (pa.string(), None, None),
        (pa.list_(pa.string(), 2), None, None),
        (pa.date32(), None, None),
    ],
)
def test_which_columns(outer: Any, inner: pa.DataType, width: int | None, expected: Any) -> None:
    field = pa.field("value", outer(inner))
    if expected is None:
        with pytest.raises(
            SourceError, match=rf"x\.parquet, column 'value': holds .*{width or ''}"
        ):
            column_of(field, width, "x.parquet")
        return
    made = column_of(field, width, "x.parquet")
    assert (made.name, made.dtype, made.width) == ("value", *expected)
    assert made.shape == ((made.width,) if made.width else ())
    assert made.num_bytes == np.dtype(made.dtype).itemsize * (made.width or 1)
    empty = made.empty(2, 5)
    assert (empty.shape, empty.dtype, empty.any()) == ((2, 5, *made.shape), made.kind, False)


def test_what_is_no_list_and_weights() -> None:
    with pytest.raises(SourceError, match="holds int32"):
        column_of(pa.field("value", pa.int32()), None, "x")
    for kind in (pa.int64(), pa.float64(), pa.bool_(), pa.float32()):
        made = column_of(pa.field(LOSS_WEIGHTS, pa.list_(kind)), None, "x")
        assert (made.dtype, made.width) == ("float32", 0)
    with pytest.raises(SourceError, match="a number for every token"):
        column_of(pa.field(LOSS_WEIGHTS, pa.list_(FIXED)), None, "x")


@pytest.mark.parametrize("cut", [0, 1, 2])
@pytest.mark.parametrize("width", [0, 2])
def test_values_are_those_of_the_rows(width: int, cut: int) -> None:
    """Also of a slice, whose lists begin behind those of others."""
    column = AlignedColumn(name="value", dtype="int16", width=width)
    sizes = np.array([2, 0, 3, 1])
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    values = np.arange(6 * (width or 1), dtype=np.int16).reshape(-1, *column.shape)
    lists = column.lists(offsets, values)
    assert lists.type == column.field.type
    assert lists.to_pylist() == [values[a:b].tolist() for a, b in itertools.pairwise(offsets)]
    assert values_of(lists).tolist() == values.tolist()
    assert numbers_of(lists).to_pylist() == values.reshape(-1).tolist()
    read = flat_values(column, lists.slice(cut), offsets[cut:] - offsets[cut], str)
    assert (read.tolist(), read.dtype) == (values[offsets[cut] :].tolist(), np.int16)
    other = pa.array([lists[i].as_py() for i in range(4)], pa.list_(column.field.type.value_type))
    assert flat_values(column, other, offsets, str).tolist() == values.tolist()


@pytest.mark.parametrize("row", [0, 1, 3])
@pytest.mark.parametrize(
    ("kind", "wrong", "words"),
    [
        ("float32", [1.0], "1 values, and the row has 2 tokens"),
        ("float32", [1.0] * 3, "3 values, and the row has 2 tokens"),
        ("float32", None, "-1 values, and the row has 2 tokens"),
        ("float32", [None, 1.0], "a null among its values"),
        ("float32", [1.0, None], "a null among its values"),
        (LOSS_WEIGHTS, [1.0, -0.5], "a weight that is below 0, or not a number"),
        (LOSS_WEIGHTS, [float("nan"), 1.0], "a weight that is below 0, or not a number"),
        (LOSS_WEIGHTS, [1.0, float("inf")], "a weight that is below 0, or not a number"),
        ("pairs", [[1.0, 2.0], [1.0]], "one of its tokens does not have 2 values"),
        ("pairs", [[1.0, 2.0], None], "one of its tokens does not have 2 values"),
        ("pairs", [[1.0, None], [1.0, 2.0]], "a null among its values"),
    ],
)
def test_the_row_that_is_wrong_is_named(kind: str, wrong: Any, words: str, row: int) -> None:
    width = 2 if kind == "pairs" else 0
    name = LOSS_WEIGHTS if kind == LOSS_WEIGHTS else "value"
    column = AlignedColumn(name=name, dtype="float32", width=width)
    good = [[0.0, 1.0], [2.0, 3.0]] if width else [0.0, 1.0]
    rows = [good, good, good, good, wrong]  # the last one is wrong in all, and never the first
    rows[row] = wrong
    lists = pa.array(rows, pa.list_(pa.list_(pa.float32()) if width else pa.float32()))
    offsets = np.arange(6) * 2
    with pytest.raises(SourceError) as caught:
        flat_values(column, lists, offsets, lambda i: f"a.parquet, row {i + 7}")
    assert str(caught.value).startswith(f"a.parquet, row {row + 7}, column '{name}': {words}. Give")


def test_no_weight_and_a_weight_of_0_are_weights() -> None:
    column = AlignedColumn(name=LOSS_WEIGHTS, dtype="float32")
    read = flat_values(column, pa.array([[0.0, 2.5], []]), np.array([0, 2, 2]), str)
    assert read.tolist() == [0.0, 2.5]
