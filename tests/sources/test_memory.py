"""Rows given in memory, and limits."""

from __future__ import annotations

import re

import numpy as np
import pyarrow as pa
import pytest

from easypipe.core.errors import ConfigError, SourceError
from easypipe.sources.external.memory import InMemoryShardedSource
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
        match=re.escape("num_rows: 0 rows are no dataset. Give at least 1, or None for all rows."),
    ):
        limited(source, 0)
