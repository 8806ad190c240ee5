"""Values of Python as typed arrays: what Arrow would cut is refused, all else is as Arrow has it."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from easypipe.core.schema import typed_array

INT = pa.int64()
NUMBER = pa.struct([("n", INT)])
COUNTS = pa.map_(pa.string(), INT)


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([1, 1.5], INT),
        ([[1], [2, 2.5]], pa.list_(INT)),
        ([{"n": 1}, {"n": 1.5}], NUMBER),
        ([{"n": 1.5, "x": [1]}, {"n": 2, "x": {}}], NUMBER),
        ([[("a", 1.5)]], COUNTS),
        ([[{"n": [None, 0.5]}]], pa.list_(pa.struct([("n", pa.list_(INT))]))),
    ],
)
def test_a_fraction_is_no_integer(values: list[Any], kind: pa.DataType) -> None:
    with pytest.raises(pa.ArrowInvalid, match=r"[012]\.5 is no integer"):
        typed_array(values, kind)


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([1, 2.0, None], INT),
        ([1, 1.5], pa.float32()),
        ([{"n": 1, "x": [1]}, {"n": 2, "x": {}}], NUMBER),
        ([{"n": 1, "x": 1.5}, None], NUMBER),
        ([[("a", 1)], None], COUNTS),
    ],
)
def test_other_values_are_as_arrow_has_them(values: list[Any], kind: pa.DataType) -> None:
    assert typed_array(values, kind).equals(pa.array(values, kind))
