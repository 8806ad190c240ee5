"""Rows given in memory, and limits."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pyarrow as pa
import pytest

from easypipe.core.errors import ConfigError, SourceError
from easypipe.sources.external.dicts import FAULTS, as_batch, columns_of
from easypipe.sources.external.memory import InMemoryShardedSource
from easypipe.sources.schemas import JSON
from easypipe.sources.splits import limited


def test_shapes_of_rows() -> None:
    rows = [{"a": 1, "b": "x"}, {"b": "y", "c": [1, 2]}, {}]
    source = InMemoryShardedSource(rows)
    assert source.schema == pa.schema(
        [("a", pa.int64()), ("b", pa.large_string()), ("c", pa.large_list(pa.int64()))]
    )
    assert source.read(0, 1, 3).to_pylist() == [
        {"a": None, "b": "y", "c": [1, 2]},
        {"a": None, "b": None, "c": None},
    ]
    tokens = InMemoryShardedSource(
        {"input_ids": np.arange(6, dtype=np.uint16).reshape(2, 3), "n": np.array([1, 2])}
    )
    assert tokens.schema == pa.schema(
        [("input_ids", pa.large_list(pa.uint16())), ("n", pa.int64())]
    )
    assert InMemoryShardedSource(rows, columns=["b"]).schema.names == ["b"]


def test_fingerprint_is_of_the_content() -> None:
    table = pa.table({"text": ["a", "b", "c"]})
    chunked = pa.concat_tables([table.slice(0, 1), table.slice(1)])
    assert InMemoryShardedSource(table).fingerprint == InMemoryShardedSource(chunked).fingerprint
    assert (
        InMemoryShardedSource(table).fingerprint
        == InMemoryShardedSource({"text": ["a", "b", "c"]}).fingerprint
    )
    assert (
        InMemoryShardedSource(table.slice(1)).fingerprint
        == InMemoryShardedSource({"text": ["b", "c"]}).fingerprint
    )
    assert (
        InMemoryShardedSource(table).fingerprint
        != InMemoryShardedSource({"text": ["a", "b", "d"]}).fingerprint
    )
    assert InMemoryShardedSource(table).shard_identity(0) == InMemoryShardedSource(
        table
    ).shard_identity(0)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([{"a": 1}, {"a": "x"}], "memory, row 1, column 'a': its values have no common type"),
        ([{"a": 1}, 5], "memory, row 1: expected a dict, got int. Give rows like {'text': ...}."),
        ([{1: 2}], "memory, row 0: key 1 is not a string. Name columns with strings."),
        (
            {"a": [1], "b": [1, 2]},
            "memory: columns differ in length: {'a': 1, 'b': 2}. Give every column a value for "
            "every row.",
        ),
        ([], "memory: holds no column. Give at least one row with at least one key."),
        (
            "text",
            "memory: cannot read rows from str. Give a pyarrow.Table, a list of dicts or a dict of "
            "columns.",
        ),
    ],
)
def test_what_is_no_table(data: object, message: str) -> None:
    with pytest.raises(SourceError, match=re.escape(message)):
        InMemoryShardedSource(data)  # type: ignore[arg-type]


def test_missing_column() -> None:
    with pytest.raises(
        SourceError, match=re.escape("memory: no column 'txt' (have: text). Did you mean 'text'?")
    ):
        InMemoryShardedSource({"text": ["a"]}, columns=["txt"])


def test_limits() -> None:
    source = InMemoryShardedSource({"n": range(10)})
    assert limited(source, 100).shards[0].num_rows == 10
    first = limited(source, 4)
    assert first.read(0, 2, 4).to_pylist() == [{"n": 2}, {"n": 3}]
    with pytest.raises(
        SourceError, match=re.escape("memory: row 4 was asked for. num_rows leaves rows 0:4 of it.")
    ):
        first.read(0, 2, 5)
    with pytest.raises(
        ConfigError,
        match=re.escape(
            "num_rows: 0 rows are not a dataset. Give at least 1, or None for all rows."
        ),
    ):
        limited(source, 0)


REFUSED = None


def faults(rows: list[dict[str, object]]) -> int:
    """The rows that do not have the columns of all rows."""
    batch = as_batch(rows, range(len(rows)), columns_of(rows, "rows"))
    return len(rows) - batch.column(FAULTS).null_count


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    ("first", "second", "kind"),
    [
        (None, [1, "x"], JSON),
        ([1], ["x"], JSON),
        ([1], [1, "x"], JSON),
        ([[1]], [["x"], 2], JSON),
        ({"a": 1}, {"a": "x"}, JSON),
        ({"a": 1}, {"a": [1, "x"]}, JSON),
        (np.ones((2, 2)), ["x"], JSON),
        ([1], [1.5], pa.large_list(pa.float64())),
        ([1], None, pa.large_list(pa.int64())),
        ({"a": 1}, {"b": "x"}, pa.struct([("a", pa.int64()), ("b", pa.large_string())])),
        (1, 1.5, pa.float64()),
        ([1], {"a": 1}, REFUSED),
        ([1], "x", REFUSED),
        ([1, "x"], "x", REFUSED),
        ([1, "x"], 1, REFUSED),
        ({"a": 1}, "x", REFUSED),
        (1, "x", REFUSED),
        (True, 1, REFUSED),
    ],
)
def test_the_type_of_a_column_that_holds_both(
    first: object, second: object, kind: pa.DataType | None, turned: bool
) -> None:
    """Lists of any insides go together, and objects; nothing else is kept as JSON."""
    rows = [{"x": first}, {"x": second}]
    rows = rows[::-1] if turned else rows
    if kind is REFUSED:
        assert faults(rows) == 1
        assert columns_of(rows, "rows") == columns_of(rows[:1], "rows")  # as frequent, and first
        return
    found = columns_of(rows, "rows").field("x").type
    if pa.types.is_struct(kind):
        assert {field.name: field.type for field in found} == {f.name: f.type for f in kind}
    else:
        assert found == kind
    assert [row["x"] is None for row in InMemoryShardedSource(rows).read(0, 0, 2).to_pylist()] == [
        row["x"] is None for row in rows
    ]


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (([1], {"a": 1}, None), REFUSED),
        (([1], {"a": 1}, [1, "x"]), JSON),
        (([1], {"a": 1}, {"a": "x"}), JSON),
        (([1], ["x"], {"a": 1}, {"a": "x"}), JSON),
        (([1], {"a": 1}, [1, "x"], 2), REFUSED),
        (({"a": 1}, {"a": "x"}, {"a": 1.5}), JSON),
    ],
)
def test_the_order_of_rows_does_not_decide_the_type(
    values: tuple[object, ...], kind: pa.DataType | None
) -> None:
    """As in JSON lines."""
    for order in itertools.permutations(values):
        rows = [{"x": value} for value in order]
        if kind is REFUSED:
            assert faults(rows)
        else:
            assert not faults(rows)
            assert columns_of(rows, "rows").field("x").type == kind
