"""Values of Python as typed arrays: what Arrow would change is refused, all else is as it has it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from easypipe.core.schema import token_dtype, typed_array

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
    with pytest.raises(pa.ArrowInvalid, match=r"[012]\.5 is not an integer"):
        typed_array(values, kind)


SMALL = pa.float32()


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([1.0, 1e39], SMALL),
        ([None, -1e39], SMALL),
        ([[1.0], [2.0, 1e39]], pa.list_(SMALL)),
        ([[1.0, 1e39]], pa.list_(SMALL, 2)),
        ([{"n": 1e39}], pa.struct([("n", SMALL)])),
        ([[("a", 1e39)]], pa.map_(pa.string(), SMALL)),
    ],
)
def test_a_number_that_is_too_large_is_not_made_infinite(
    values: list[Any], kind: pa.DataType
) -> None:
    with pytest.raises(pa.ArrowInvalid, match=r"1e\+39 is beyond the largest float"):
        typed_array(values, kind)


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([1, 2.0, None], INT),
        ([1, 1.5], pa.float32()),
        ([1.5, None, math.inf, -math.inf, 3.4e38], SMALL),
        ([65504.0, math.inf], pa.float16()),
        ([1e39], pa.float64()),
        ([{"n": 1, "x": [1]}, {"n": 2, "x": {}}], NUMBER),
        ([{"n": 1, "x": 1.5}, None], NUMBER),
        ([[("a", 1)], None], COUNTS),
    ],
)
def test_other_values_are_as_arrow_has_them(values: list[Any], kind: pa.DataType) -> None:
    assert typed_array(values, kind).equals(pa.array(values, kind))


@pytest.mark.parametrize("words", [255, 256, 257, 65535, 65536, 65537, 1 << 32])
def test_every_id_of_a_vocabulary_fits(words: int) -> None:
    assert token_dtype(words).itemsize == (2 if words <= 65536 else 4)
    assert np.array([words - 1]).astype(token_dtype(words)).tolist() == [words - 1]
