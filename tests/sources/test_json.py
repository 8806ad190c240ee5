"""Types of JSON columns are the file's: no range, chunk or neighbour changes them, and what is read
is what Python's json reads.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from easypipe.core.errors import SourceError
from easypipe.core.schema import ROW_NUMBER
from easypipe.sources.formats import jsonlines, jsontypes, records
from easypipe.sources.formats.forward import open_forward
from easypipe.sources.formats.jsonlines import JsonShardedSource
from easypipe.sources.formats.jsontypes import merge_json
from easypipe.sources.schemas import JSON
from laws import assert_stateless_reads
from strategies import examples


def lines_of(tmp_path: Path, rows: list, name: str = "a.jsonl") -> Path:
    path = tmp_path / name
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def types_of(source: JsonShardedSource) -> dict[str, pa.DataType]:
    return {field.name: field.type for field in source.schema if field.name != ROW_NUMBER}


def test_types_of_scalars(tmp_path: Path) -> None:
    rows = [
        {"s": "2020-01-01 00:00:00", "i": 1, "f": 1, "b": True, "n": None, "late": None},
        {"s": "x", "i": -9223372036854775808, "f": 2.5, "b": None, "big": 9223372036854775808},
        {
            "i": 9223372036854775807,
            "late": "at last",
            "e": 1e3,
            "k\u00e9y": "v",
            'key with "quotes"': 1,
        },
    ]
    source = JsonShardedSource(lines_of(tmp_path, rows))
    assert types_of(source) == {
        "s": pa.large_string(),
        "i": pa.int64(),
        "f": pa.float64(),
        "b": pa.bool_(),
        "n": pa.null(),
        "late": pa.large_string(),
        "big": JSON,
        "e": pa.float64(),
        "k\u00e9y": pa.large_string(),
        'key with "quotes"': pa.int64(),
    }
    assert_stateless_reads(source, [1, 2])
    assert source.read(0, 2, 3).to_pylist()[0]["i"] == 9223372036854775807
    assert source.read(0, 0, 1).to_pylist()[0]["s"] == "2020-01-01 00:00:00"


def test_types_of_nested_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fields that appear only in later chunks are in the schema of the first row."""
    monkeypatch.setattr(records, "CHUNK_BYTES", 64)
    monkeypatch.setattr(records, "ENTRY_ROWS", 2)
    rows = [
        {"messages": []},
        {"messages": [{"role": "user", "content": "hi", "at": "2020-01-01"}]},
        {"messages": [{"role": "assistant", "content": None, "calls": [{"id": 1}]}]},
        {
            "messages": [{"role": "tool", "calls": [{"id": 1.5, "ok": True}]}],
            "meta": {"a": {"b": [1, None]}},
        },
        {"messages": None, "meta": {}},
    ]
    source = JsonShardedSource(lines_of(tmp_path, rows))
    call = pa.struct([("id", pa.float64()), ("ok", pa.bool_())])
    message = pa.struct(
        [
            ("role", pa.large_string()),
            ("content", pa.large_string()),
            ("at", pa.large_string()),
            ("calls", pa.large_list(call)),
        ]
    )
    assert types_of(source) == {
        "messages": pa.large_list(message),
        "meta": pa.struct([("a", pa.struct([("b", pa.large_list(pa.int64()))]))]),
    }
    assert_stateless_reads(source, [1, 2, 3, 4])
    first = source.read(0, 1, 2).to_pylist()[0]["messages"]
    assert first == [{"role": "user", "content": "hi", "at": "2020-01-01", "calls": None}]


def test_kinds_that_clash(tmp_path: Path) -> None:
    """Strings win, else the first kind; the others are bad rows, named one by one, but for those of
    columns that are kept as JSON.
    """
    rows = [
        {"a": 1, "b": {"x": 1}},
        {"a": "one", "b": {"x": 2}},
        {"a": "two", "b": 5},
        {"a": "three", "b": {"x": "no"}},
    ]
    path = lines_of(tmp_path, rows)
    source = JsonShardedSource(path, on_error="skip")
    assert types_of(source) == {"a": pa.large_string(), "b": JSON}
    found = source.scan(0, 0, 4)
    assert [(r.row, r.reason) for r in found.rejects] == [(0, "not_a_string")]
    # what has no common type inside is kept as JSON
    assert found.batch.column("b").to_pylist() == ['{"x": 2}', "5", '{"x": "no"}']
    assert_stateless_reads(source, [1, 2, 3])
    only = JsonShardedSource(path, columns=["a"], on_error="skip")
    assert only.read(0, 0, 4).column("a").to_pylist() == ["one", "two", "three"]


def test_a_few_texts_make_no_text_of_a_column_of_conversations(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "hi"}]
    rows = [
        {"m": None},
        *[{"m": talk}] * 3,
        {"m": "not json"},
        {"m": ["x"]},
        {"m": {"role": "user"}},
        {"m": talk},
    ]
    source = JsonShardedSource(lines_of(tmp_path, rows), on_error="skip")
    # a list of texts has no common type with lists of objects
    assert types_of(source) == {"m": JSON}
    said = [
        None if text is None else json.loads(text)
        for text in source.read(0, 0, len(rows)).column("m").to_pylist()
    ]
    assert said == [row["m"] for row in rows]
    source = JsonShardedSource(lines_of(tmp_path, rows[:5] + rows[6:]), on_error="skip")
    assert types_of(source) == {
        "m": pa.large_list(pa.struct([("role", pa.large_string()), ("content", pa.large_string())]))
    }
    found = source.scan(0, 0, len(rows) - 1)
    assert [reject.row for reject in found.rejects] == [4, 5]
    assert found.batch.column("m").to_pylist() == [None, talk, talk, talk, talk]
    assert_stateless_reads(source, [1, 4, 5, 6])


def test_rows_with_different_keys(tmp_path: Path) -> None:
    source = JsonShardedSource(lines_of(tmp_path, [{"a": 1}, {"b": "x"}, {}, {"b": None, "a": 2}]))
    assert source.read(0, 0, 4).drop_columns(ROW_NUMBER).to_pylist() == [
        {"a": 1, "b": None},
        {"a": None, "b": "x"},
        {"a": None, "b": None},
        {"a": 2, "b": None},
    ]


def test_more_keys_than_can_be_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{f"key{i}": i, "text": "t"} for i in range(jsontypes.MAX_KEYS + 5)]
    path = lines_of(tmp_path, rows)
    with pytest.raises(
        SourceError, match=r"have more than 4096 different keys\. Name those to read with columns="
    ):
        JsonShardedSource(path).schema  # noqa: B018
    last = f"key{jsontypes.MAX_KEYS + 4}"
    source = JsonShardedSource(path, columns=["text", last])
    assert types_of(source) == {"text": pa.large_string(), last: pa.int64()}
    assert source.read(0, len(rows) - 1, len(rows)).to_pylist()[0][last] == jsontypes.MAX_KEYS + 4


def test_objects_whose_rows_have_keys_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond a limit the column is JSON: 20,000 rows of 924 KB took 4.9 GB, a cell for each key in
    each row.
    """
    cells: list[int] = []
    read = jsontypes.pj.read_json

    def counted(*args: object, **options: object) -> pa.Table:
        table = read(*args, **options)
        cells.append(sum(1 + kind.num_fields for kind in table.schema.types))
        return table

    monkeypatch.setattr(jsontypes.pj, "read_json", counted)
    most = jsontypes.MAX_INNER

    def rows_of(count: int) -> list[dict]:
        return [
            {
                "text": "t",
                "meta": {f"k{i}": i, "at": "2020-01-01"},
                "calls": [{"name": "f", "arguments": {f"x{i // 2}": {f"y{i % 2}": [i]}}}],
                "role": {"a": 1} if i else {"b": "x"},
            }
            for i in range(count)
        ]

    role = pa.struct([("b", pa.large_string()), ("a", pa.int64())])
    path = lines_of(tmp_path, [*rows_of(most), {}])  # "at" is one key more
    source = JsonShardedSource(path)
    assert types_of(source)["meta"] == JSON
    assert types_of(source)["calls"] == JSON
    assert types_of(source)["role"] == role
    assert json.loads(source.read(0, 9, 10).column("meta")[0].as_py()) == {
        "k9": 9,
        "at": "2020-01-01",
    }
    assert_stateless_reads(source, [1, most - 1])
    forward = open_forward(path)
    assert forward is not None
    assert forward.schema.field("meta").type == JSON
    assert forward.schema.field("role").type == role
    monkeypatch.setattr(records, "BATCH_RECORDS", 40)  # many blocks: the file's keys count
    assert types_of(JsonShardedSource(path)) == types_of(source)
    assert max(cells) <= most + 10
    kind = types_of(JsonShardedSource(lines_of(tmp_path, rows_of(most - 1), "b.jsonl")))["meta"]
    assert kind.num_fields == most
    # columns that are not read are no cells either
    monkeypatch.setattr(records, "BATCH_RECORDS", 1 << 14)
    keys = [{f"k{i}": i, "role": {"a": 1}, f"o{i}": {f"z{i}": 1}} for i in range(most)]
    path = lines_of(tmp_path, keys, "c.jsonl")
    cells.clear()
    assert types_of(JsonShardedSource(path, columns=["role"])) == {
        "role": pa.struct([("a", pa.int64())])
    }
    assert max(cells) == 2


@pytest.mark.parametrize(("opening", "closing"), ["[]", ('{"a": ', "}")])
def test_more_levels_than_arrow_writes(tmp_path: Path, opening: str, closing: str) -> None:
    """They are JSON: from 125 on, the schema was an `Invalid flatbuffers message`."""
    for levels in (60, 61, 130, 199):
        value = opening * levels + "1" + closing * levels
        path = lines_of(tmp_path, [f'{{"text": "t", "m": {value}, "n": [1]}}', {"text": "u"}])
        source = JsonShardedSource(path)
        assert (types_of(source)["m"] == JSON) == (levels > 60)
        assert types_of(source)["n"] == pa.large_list(pa.int64())
        assert source.read(0, 0, 2).column("text").to_pylist() == ["t", "u"]
        read = source.read(0, 0, 1).column("m")[0].as_py()
        assert (json.loads(read) if levels > 60 else read) == json.loads(value)


def test_thousands_of_values_of_another_kind_are_told_apart_quickly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by asking pyarrow about each of them: 600,000 took minutes."""
    asked: list[int] = []
    read = jsonlines.pj.read_json
    monkeypatch.setattr(
        jsonlines.pj, "read_json", lambda *a, **k: (asked.append(1), read(*a, **k))[1]
    )
    rows = [{"text": "t" if i % 50 == 0 else i} for i in range(2000)]
    source = JsonShardedSource(lines_of(tmp_path, rows), on_error="skip")
    assert [reject.row for reject in source.scan(0, 0, 2000).rejects] == [
        i for i in range(2000) if i % 50
    ]
    assert len(asked) < 200


def test_line_breaks_of_windows_and_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n \t\r\n{"a": 2}')
    source = JsonShardedSource(path)
    assert source.read(0, 0, 3).to_pylist() == [{"a": 1, ROW_NUMBER: 0}, {"a": 2, ROW_NUMBER: 2}]
    (tmp_path / "b.json").write_bytes(b'\xef\xbb\xbf\n [{"a": 1}\r\n,\n{"a":\r\n 2}]\n')
    assert [
        row["a"] for row in JsonShardedSource(tmp_path / "b.json").read(0, 0, 2).to_pylist()
    ] == [1, 2]


def test_lines_and_arrays_together(tmp_path: Path) -> None:
    a = lines_of(tmp_path, [{"text": "x", "n": 1}])
    (tmp_path / "b.json").write_text('[{"text": "y", "n": 1.5, "more": [1]}]')
    (tmp_path / "c.json.gz").write_bytes(gzip.compress(b'[{"text": "z"}]'))
    source = JsonShardedSource([a, tmp_path / "b.json", tmp_path / "c.json.gz"])
    rows = [
        row for s in range(3) for row in source.read(s, 0, 1).drop_columns(ROW_NUMBER).to_pylist()
    ]
    assert rows == [
        {"text": "x", "n": 1.0, "more": None},
        {"text": "y", "n": 1.5, "more": [1]},
        {"text": "z", "n": None, "more": None},
    ]
    assert_stateless_reads(source, [1])


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("xyz"), inner, max_size=3)
    ),
    max_leaves=6,
)
dicts = st.dictionaries(st.sampled_from(["a", "b", "text", "\u00fc\\"]), values, max_size=4)


@examples(80)
@given(
    rows=st.lists(
        st.one_of(dicts, st.sampled_from(["", "  ", "[1]", "{", '{"a": }', '{"a": 01}', '{"a"'])),
        min_size=1,
        max_size=20,
    ),
    cuts=st.lists(st.integers(0, 30), max_size=5),
)
@example(rows=[{"a": "\u2028"}, "", {"a": "}{"}], cuts=[1])
def test_any_rows(tmp_path: Path, rows: list, cuts: list[int]) -> None:
    """Whatever stands in the lines: reads are stateless, and rows that come out say what json says
    of their line.
    """
    path = tmp_path / "a.jsonl"
    written = [
        row if isinstance(row, str) else json.dumps(row, ensure_ascii=i % 2 == 0)
        for i, row in enumerate(rows)
    ]
    path.write_bytes("".join(line + "\n" for line in written).encode("utf-8", "surrogatepass"))
    source = JsonShardedSource(path, on_error="skip")
    try:
        schema = source.schema
    except SourceError as error:
        said = str(error)
        assert "be determined" in said or "Correct the file" in said
        return
    assert_stateless_reads(source, cuts)
    for out in source.read(0, 0, source.shards[0].num_rows).to_pylist():
        line = json.loads(written[out[ROW_NUMBER]])
        for name in schema.names:
            if name != ROW_NUMBER:
                read = (
                    json.loads(out[name])
                    if schema.field(name).type == JSON and out[name] is not None
                    else out[name]
                )
                assert _agrees(read, line.get(name)), (name, out[name], line)


def _agrees(read: object, written: object) -> bool:
    if isinstance(written, dict):
        return isinstance(read, dict) and all(
            _agrees(read.get(key), value) for key, value in written.items()
        )
    if isinstance(written, list):
        return (
            isinstance(read, list)
            and len(read) == len(written)
            and all(map(_agrees, read, written))
        )
    if isinstance(read, float) and isinstance(written, int):
        return read == float(written)
    return read == written


kinds = st.recursive(
    st.sampled_from([pa.null(), pa.bool_(), pa.int64(), pa.float64(), pa.large_string()]),
    lambda inner: (
        inner.map(pa.large_list)
        | st.dictionaries(st.sampled_from("xy"), inner, max_size=2).map(
            lambda d: pa.struct(list(d.items()))
        )
    ),
    max_leaves=4,
)


@given(kinds, kinds)
def test_merging_types_again_changes_nothing(first: pa.DataType, second: pa.DataType) -> None:
    merged = merge_json(first, second)
    assert merge_json(merged, second).equals(merged)
    assert merge_json(merged, first).equals(merged)
    assert merge_json(first, first).equals(first)
