"""Shards that differ: what is reconciled, and what is refused by name. Every pair is read, not only
compared.
"""

from __future__ import annotations

import datetime
import json
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from easypipe.core.errors import SourceError
from easypipe.core.schema import ROW_NUMBER
from easypipe.sources.open import open_files
from easypipe.sources.schemas import JSON, conform, plain_type
from laws import assert_stateless_reads

DAY = datetime.datetime(2026, 1, 31, 12)


def source_of(folder: Path, *columns: pa.Array):
    for i, column in enumerate(columns):
        pq.write_table(pa.table({"x": column}), folder / f"{i}.parquet")
    return open_files(folder)


TEXT, BYTES = pa.large_string(), pa.large_binary()
PLAIN = {  # what a column may hold -> what it is here
    pa.string(): TEXT,
    TEXT: TEXT,
    pa.string_view(): TEXT,
    pa.binary(): BYTES,
    BYTES: BYTES,
    pa.binary_view(): BYTES,
    pa.uuid(): pa.binary(16),
    pa.bool8(): pa.int8(),
    pa.opaque(pa.string(), "kind", "vendor"): TEXT,
    pa.dictionary(pa.int8(), pa.string()): TEXT,
    pa.run_end_encoded(pa.int32(), pa.string()): TEXT,
    pa.uint16(): pa.uint16(),
    pa.timestamp("us"): pa.timestamp("us"),
}
AROUND = (
    (pa.list_, pa.large_list),
    (pa.large_list, pa.large_list),
    (pa.list_view, pa.large_list),
    (pa.large_list_view, pa.large_list),
    (lambda kind: pa.list_(kind, 3), lambda kind: pa.list_(kind, 3)),
    (lambda kind: pa.struct([("a", kind)]), lambda kind: pa.struct([("a", kind)])),
)


def test_every_type_has_a_plain_one_at_any_depth() -> None:
    """A type that is forgotten is met in a file of somebody's, where two shards are not alike."""
    for kind, plain in PLAIN.items():
        assert plain_type(kind) == plain_type(plain) == plain
        for around, there in AROUND:
            assert plain_type(around(kind)) == there(plain)
            for further, here in AROUND:
                assert plain_type(further(around(kind))) == here(there(plain))


def test_views_and_runs_keep_their_values(tmp_path: Path) -> None:
    """pyarrow 26 casts the last list of a view to an empty one, and has no cast of runs."""
    lists = [["a", None], ["b"], None, [], ["c", "d"]]
    for kind in (pa.list_view(pa.string()), pa.large_list_view(pa.string())):
        views = pa.array(lists, kind)
        whole = pa.FixedSizeListArray.from_arrays(views.slice(1), 2)
        for array in (views, views.slice(1, 3), whole, whole.slice(1)):
            path = tmp_path / f"{array.type.num_fields}.arrow"
            with pa.ipc.new_file(path, pa.schema([("x", array.type)])) as writer:
                writer.write_table(pa.table({"x": array}))
            batch = open_files(path).read(0, 0, len(array))
            batch.validate(full=True)
            assert batch.column("x").to_pylist() == array.to_pylist()
    runs = pa.RunEndEncodedArray.from_arrays(pa.array([2, 3, 5]), pa.array(["x", None, "y"]))
    for array in (runs, runs.slice(1, 3)):
        assert conform(array, TEXT).to_pylist() == array.to_pylist()


STRUCT = pa.struct([("a", pa.int32()), ("b", pa.struct([("c", pa.string())]))])


@pytest.mark.parametrize(
    ("first", "second", "together", "values"),
    [
        (pa.array([1], pa.int8()), pa.array([2], pa.int64()), pa.int64(), [1, 2]),
        (pa.array([1], pa.uint8()), pa.array([-2], pa.int8()), pa.int16(), [1, -2]),
        (pa.array([1], pa.uint32()), pa.array([-2], pa.int32()), pa.int64(), [1, -2]),
        (pa.array([1], pa.int32()), pa.array([0.5], pa.float32()), pa.float64(), [1.0, 0.5]),
        (pa.array([0.5], pa.float32()), pa.array([0.1]), pa.float64(), [0.5, 0.1]),
        (pa.array([0.5], pa.float16()), pa.array([2.5], pa.float32()), pa.float32(), [0.5, 2.5]),
        (pa.array([None], pa.null()), pa.array(["x"]), pa.large_string(), [None, "x"]),
        (
            pa.array([[]], pa.list_(pa.null())),
            pa.array([["x"]]),
            pa.large_list(pa.large_string()),
            [[], ["x"]],
        ),
        (
            pa.array([[1]], pa.list_(pa.int8())),
            pa.array([[2, None]]),
            pa.large_list(pa.int64()),
            [[1], [2, None]],
        ),
        (
            pa.array([[1, 2]], pa.list_(pa.int8(), 2)),
            pa.array([[3]]),
            pa.large_list(pa.int64()),
            [[1, 2], [3]],
        ),
        (
            pa.array([[1, 2], None], pa.list_(pa.int8(), 2)),
            pa.array([[3]], pa.list_(pa.int8(), 1)),
            pa.large_list(pa.int8()),
            [[1, 2], None, [3]],
        ),
        (
            pa.array([DAY], pa.timestamp("s")),
            pa.array([DAY], pa.timestamp("us")),
            pa.timestamp("us"),
            [DAY, DAY],
        ),
        (
            pa.array([Decimal("1.50")], pa.decimal128(5, 2)),
            pa.array([Decimal("2.25")], pa.decimal128(9, 2)),
            pa.decimal128(9, 2),
            [Decimal("1.50"), Decimal("2.25")],
        ),
        (
            pa.array([{"a": 1, "b": {"c": "x"}}, None], STRUCT),
            pa.array([{"b": {"d": [1]}}]),
            pa.struct(
                [
                    ("a", pa.int32()),
                    ("b", pa.struct([("c", pa.large_string()), ("d", pa.large_list(pa.int64()))])),
                ]
            ),
            [{"a": 1, "b": {"c": "x", "d": None}}, None, {"a": None, "b": {"c": None, "d": [1]}}],
        ),
        (
            pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.int8())),
            pa.array([[("k", 2), ("l", None)]], pa.map_(pa.string(), pa.int64())),
            pa.map_(pa.string(), pa.int64()),
            [[("k", 1)], None, [("k", 2), ("l", None)]],
        ),
        (
            pa.array([[{"role": "user"}]]),
            pa.array([[{"role": "tool", "name": "f"}], []]),
            pa.large_list(pa.struct([("role", pa.large_string()), ("name", pa.large_string())])),
            [[{"role": "user", "name": None}], [{"role": "tool", "name": "f"}], []],
        ),
    ],
    ids=lambda value: str(value.type) if isinstance(value, pa.Array) else "",
)
def test_reconciled(
    tmp_path: Path, first: pa.Array, second: pa.Array, together: pa.DataType, values: list[Any]
) -> None:
    """In either order of the files."""
    for name, columns in (("there", (first, second)), ("back", (second, first))):
        (tmp_path / name).mkdir()
        source = source_of(tmp_path / name, *columns)
        assert_stateless_reads(source, [1])
        read = [
            value
            for s, shard in enumerate(source.shards)
            for value in source.read(s, 0, shard.num_rows).column("x").to_pylist()
        ]
        kind, begins = source.schema.field("x").type, len(first) if name == "back" else 0
        assert read == values[begins:] + values[:begins]
        # an object's fields have the order in which they first appear
        assert kind == together or (begins and "struct" in str(kind))


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (pa.array(["a"]), pa.array([1]), "is int64 here and large_string in "),
        (pa.array([True]), pa.array([1]), "is int64 here and bool in "),
        (pa.array([1], pa.uint64()), pa.array([1], pa.int8()), "is int8 here and uint64 in "),
        (pa.array([b"a"]), pa.array(["a"]), "is large_string here and large_binary in "),
        (pa.array([[1]]), pa.array([1]), "is int64 here and large_list"),
        (
            pa.array([[b"a"]]),
            pa.array([["a"]]),
            "is large_list<item: large_string> here and large_list",
        ),
        (
            pa.array([DAY], pa.timestamp("s", "UTC")),
            pa.array([DAY], pa.timestamp("s")),
            "is timestamp[ms] here and timestamp[ms, tz=UTC] in ",
        ),
        (
            pa.array([Decimal("1.5")], pa.decimal128(5, 1)),
            pa.array([Decimal("1.25")], pa.decimal128(5, 2)),
            "is decimal128(5, 2) here and ",
        ),
    ],
)
def test_refused(tmp_path: Path, first: pa.Array, second: pa.Array, message: str) -> None:
    source = source_of(tmp_path, first, second)
    with pytest.raises(SourceError, match=re.escape(f"1.parquet, column 'x': {message}")) as caught:
        source.schema  # noqa: B018
    assert "0.parquet. Rewrite one of the files, or make two datasets of them;" in str(caught.value)
    pq.write_table(pa.table({"x": first, "y": ["kept"]}), tmp_path / "0.parquet")
    pq.write_table(pa.table({"x": second, "y": ["kept"]}), tmp_path / "1.parquet")
    # what the message says
    assert open_files(tmp_path, columns=["y"]).read(1, 0, 1).to_pylist() == [{"y": "kept"}]


def test_messages_alone_keep_nulls_of_their_own_keys() -> None:
    said = {"role": "user", "content": None, "name": None, "about": {"content": None, "n": 1}}
    [text] = conform(pa.array([[said]]), JSON).storage.to_pylist()
    assert json.loads(text) == [{"role": "user", "content": None, "about": {"n": 1}}]


def test_columns_that_some_files_lack(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1]}), tmp_path / "0.parquet")
    pq.write_table(pa.table({"b": ["x", "y"]}), tmp_path / "1.parquet")
    source = open_files(tmp_path, columns=["a"])
    assert_stateless_reads(source, [1])
    assert source.read(1, 0, 2).to_pylist() == [{"a": None}, {"a": None}]


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet", "a.arrow"])
@pytest.mark.parametrize("on_error", ["error", "skip"])
def test_a_column_with_the_name_of_row_numbers_is_left_out(
    tmp_path: Path, name: str, on_error: Any
) -> None:
    table = pa.table({"text": ["x", "y"], ROW_NUMBER: [5, 6]})
    path = tmp_path / name
    if name == "a.jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    elif name == "a.csv":
        pyarrow.csv.write_csv(table, path)
    elif name == "a.parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    source = open_files(path, on_error=on_error)
    assert_stateless_reads(source)
    rows = source.read(0, 0, 2)
    assert rows.column("text").to_pylist() == ["x", "y"]
    assert rows.schema.names in (["text"], ["text", ROW_NUMBER])
    if ROW_NUMBER in rows.schema.names:
        assert rows.column(ROW_NUMBER).to_pylist() == [0, 1]
