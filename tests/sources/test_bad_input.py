"""Every way in which files are not what they should be, with its message; where the message
recommends something, that is done.
"""

from __future__ import annotations

import bz2
import gzip
import json
import re
import struct
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
import zstandard

from easypipe.core.errors import ConfigError, MissingFileError, SourceError
from easypipe.core.schema import ROW_NUMBER
from easypipe.sources.formats import csv
from easypipe.sources.formats.csv import CsvShardedSource
from easypipe.sources.formats.jsonlines import JsonShardedSource
from easypipe.sources.formats.parquet import ParquetShardedSource
from easypipe.sources.formats.txt import TextShardedSource
from easypipe.sources.open import open_files
from easypipe.stages.tokenize.text_rows import require_text

TABLE = pa.table({"text": ["some text"] * 2000, "n": range(2000)})


def put(path: Path, data: bytes | str) -> Path:
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def read_all(source) -> list[dict]:
    return [
        row
        for s, shard in enumerate(source.shards)
        for row in source.read(s, 0, shard.num_rows).to_pylist()
    ]


def refused(source_or_path, message: str, **options) -> SourceError:
    """Reading raises SourceError with exactly this text, `{path}` standing for the file."""
    with pytest.raises(SourceError) as caught:
        read_all(open_files(source_or_path, **options))
    assert str(caught.value) == message.replace("{path}", str(source_or_path))
    return caught.value


# Files that are not there


def test_missing_file(tmp_path: Path) -> None:
    put(tmp_path / "train.jsonl", "{}")
    with pytest.raises(MissingFileError) as caught:
        open_files(tmp_path / "trian.jsonl")
    assert (
        str(caught.value)
        == f"{tmp_path}/trian.jsonl: no such file or folder (have: train.jsonl). Did you mean "
        "'train.jsonl'?"
    )
    assert isinstance(caught.value, FileNotFoundError)


def test_hub_like_name_is_a_missing_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        MissingFileError,
        match=re.escape(
            "roneneldan/TinyStories: no such file or folder (have: none). Check the path, "
            "which is relative to the current folder. If it is a dataset of the Hub: hf://datasets/roneneldan/TinyStories."
        ),
    ):
        open_files("roneneldan/TinyStories")


def test_empty_glob(tmp_path: Path) -> None:
    put(tmp_path / "a.json", "{}")
    with pytest.raises(MissingFileError) as caught:
        open_files(str(tmp_path / "*.jsonl"))
    assert (
        str(caught.value)
        == f"{tmp_path}/*.jsonl: the pattern matches no file (have: a.json). Correct the pattern."
    )
    assert open_files(str(tmp_path / "*.json")).files


def test_folder_without_data(tmp_path: Path) -> None:
    put(tmp_path / "README.md", "hello")
    with pytest.raises(MissingFileError, match=r"the folder holds no data file \(\.parquet \.pq\)"):
        ParquetShardedSource(tmp_path)


def test_file_removed_later(tmp_path: Path) -> None:
    path = put(tmp_path / "a.txt", "x")
    source = open_files(path)
    path.unlink()
    with pytest.raises(MissingFileError, match="was there when the source was made, and is gone"):
        source.shards  # noqa: B018


def test_file_twice(tmp_path: Path) -> None:
    path = put(tmp_path / "a.txt", "x")
    with pytest.raises(
        SourceError,
        match=r"a\.txt: named twice in data_files \(again by '.*\*\.txt'\)\. Name every file once",
    ):
        open_files([path, str(tmp_path / "*.txt")])


# Files that are not what their name says


@pytest.mark.parametrize(
    "name",
    ["a.parquet", "a.arrow", "a.jsonl", "a.json", "a.csv", "a.txt", "a.jsonl.gz", "a.txt.zst"],
)
def test_empty_file(tmp_path: Path, name: str) -> None:
    refused(put(tmp_path / name, b""), "{path}: is empty (0 bytes). Remove it from data_files.")


@pytest.mark.parametrize(
    ("name", "pack"),
    [("a.jsonl.gz", gzip.compress), ("a.txt.zst", zstandard.compress), ("a.csv.bz2", bz2.compress)],
)
def test_empty_when_decompressed(tmp_path: Path, name: str, pack) -> None:
    refused(
        put(tmp_path / name, pack(b"")),
        "{path}: is empty (nothing is left when it is decompressed). Remove it from data_files.",
    )


def test_text_called_parquet(tmp_path: Path) -> None:
    path = put(tmp_path / "a.parquet", '{"text": "x"}\n')
    refused(
        path, "{path}: not a parquet file: it begins with b'{\"te', not b'PAR1'. Check its type."
    )
    assert read_all(JsonShardedSource(path)) == [{"text": "x", ROW_NUMBER: 0}]


def test_truncated_parquet(tmp_path: Path) -> None:
    pq.write_table(TABLE, tmp_path / "whole.parquet")
    for data in ((tmp_path / "whole.parquet").read_bytes()[:-100], b"PAR1", b"PAR1PAR1"):
        refused(
            put(tmp_path / "a.parquet", data),
            "{path}: truncated: it begins as parquet but ends without the footer's b'PAR1'. Copy "
            "or write it again.",
        )


def test_damaged_parquet(tmp_path: Path) -> None:
    pq.write_table(TABLE, tmp_path / "whole.parquet", compression="snappy", use_dictionary=False)
    data = bytearray((tmp_path / "whole.parquet").read_bytes())
    data[40:140] = bytes(100)
    path = put(tmp_path / "a.parquet", bytes(data))
    with pytest.raises(
        SourceError,
        match=r"a\.parquet, row group 0: damaged parquet: .*Copy or write the file again",
    ):
        read_all(open_files(path))
    data = (tmp_path / "whole.parquet").read_bytes()
    with pytest.raises(SourceError, match=r"b\.parquet: damaged parquet: "):
        read_all(open_files(put(tmp_path / "b.parquet", data[:100] + b"\xff\xff\xff\x00PAR1")))


def test_of_row_groups_that_are_read_together_the_damaged_one_is_named(tmp_path: Path) -> None:
    table = pa.table({"text": [f"row {i} of many" for i in range(40)]})
    pq.write_table(
        table,
        tmp_path / "whole.parquet",
        compression="snappy",
        use_dictionary=False,
        row_group_size=10,
    )
    assert [
        row["text"] for row in read_all(open_files(tmp_path / "whole.parquet"))
    ] == table.column("text").to_pylist()
    start = (
        pq.ParquetFile(tmp_path / "whole.parquet").metadata.row_group(2).column(0).data_page_offset
    )
    data = bytearray((tmp_path / "whole.parquet").read_bytes())
    data[start : start + 60] = bytes(60)
    source = open_files(put(tmp_path / "a.parquet", bytes(data)))
    assert source.read(0, 0, 20).num_rows == 20
    with pytest.raises(
        SourceError,
        match=r"(?s)a\.parquet, row group 2: damaged parquet: .*Copy or write the file again",
    ):
        source.read(0, 0, 40)


def test_encrypted_parquet(tmp_path: Path) -> None:
    refused(
        put(tmp_path / "a.parquet", b"PARE" + bytes(40) + b"PARE"),
        "{path}: is an encrypted parquet file. Decrypt it first.",
    )


def test_not_arrow(tmp_path: Path) -> None:
    path = put(tmp_path / "a.arrow", "hello world, hello")
    refused(
        path,
        "{path}: neither an Arrow file nor a stream: it begins with b'hello wo'. Check its type.",
    )


def test_truncated_arrow(tmp_path: Path) -> None:
    feather.write_feather(TABLE, tmp_path / "whole.feather", compression="zstd")
    data = (tmp_path / "whole.feather").read_bytes()
    refused(
        put(tmp_path / "a.feather", data[:-10]),
        "{path}: truncated: an Arrow file without its footer. Copy or write it again.",
    )
    with pa.ipc.new_stream(tmp_path / "whole.arrows", TABLE.schema) as writer:
        writer.write_table(TABLE)
    data = (tmp_path / "whole.arrows").read_bytes()
    with pytest.raises(
        SourceError, match=r"a\.arrows: damaged Arrow data: .*Copy or write the file again"
    ):
        read_all(open_files(put(tmp_path / "a.arrows", data[: len(data) // 2])))


@pytest.mark.filterwarnings("ignore:Feather V1:DeprecationWarning")
@pytest.mark.parametrize("wrong", [(0, 12, 8), (0, 3, 1 << 20), (-9, 3, 8)])
@pytest.mark.parametrize(
    "within",
    [
        lambda texts: texts,
        lambda texts: texts.cast(pa.binary()),
        lambda texts: pa.ListArray.from_arrays([0, 2], texts),
        lambda texts: pa.LargeListArray.from_arrays([0, 2], texts),
        lambda texts: pa.FixedSizeListArray.from_arrays(texts, 2),
        lambda texts: pa.MapArray.from_arrays([0, 2], pa.array([1, 2]), texts),
        lambda texts: pa.StructArray.from_arrays([texts], ["a"]),
        lambda texts: pa.DictionaryArray.from_arrays(pa.array([1, 0]), texts),
        lambda texts: pa.ExtensionArray.from_storage(pa.json_(), texts),
    ],
)
def test_a_text_that_leaves_its_file_is_refused_at_any_depth(
    tmp_path: Path, within: Any, wrong: tuple[int, ...]
) -> None:
    table = pa.table({"x": within(pa.array(["345", "67890"]))})
    path = tmp_path / "a.arrow"
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)
    edges = struct.pack("<3i", 0, 3, 8)
    assert path.read_bytes().count(edges) == 1
    assert len(read_all(open_files(path))) == table.num_rows
    put(path, path.read_bytes().replace(edges, struct.pack("<3i", *wrong)))
    with pytest.raises(SourceError, match=r"a\.arrow: damaged column 'x'"):
        read_all(open_files(path))


def test_old_feather(tmp_path: Path) -> None:
    feather.write_feather(TABLE, tmp_path / "a.feather", version=1)
    with pytest.raises(
        SourceError,
        match=r"is feather version 1\. Write it again with pyarrow\.feather \(version 2\)",
    ):
        read_all(open_files(tmp_path / "a.feather"))
    feather.write_feather(feather.read_table(tmp_path / "a.feather"), tmp_path / "b.feather")
    assert len(read_all(open_files(tmp_path / "b.feather"))) == 2000


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.txt.gz"])
def test_plain_text_called_gz(tmp_path: Path, name: str) -> None:
    refused(
        put(tmp_path / name, "plain"),
        "{path}: not gz data, in spite of its name: it begins with b'plai'. Rename the file.",
    )


def test_gz_called_plain(tmp_path: Path) -> None:
    path = put(tmp_path / "a.jsonl", gzip.compress(b"{}"))
    refused(
        path, "{path}: is compressed (gz), which its name does not say. Rename it to end in .gz."
    )


@pytest.mark.parametrize(
    ("ending", "pack"), [("gz", gzip.compress), ("zst", zstandard.compress), ("bz2", bz2.compress)]
)
def test_truncated_compressed(tmp_path: Path, ending: str, pack) -> None:
    data = pack(b"".join(b'{"text": "%d"}\n' % (i * 7919) for i in range(2000)))
    path = put(tmp_path / f"a.jsonl.{ending}", data[:-200])
    refused(path, f"{{path}}: truncated {ending} data. Copy or write the file again.")
    damaged = data[: len(data) // 2] + bytes(64) + data[len(data) // 2 + 64 :]
    with pytest.raises(
        SourceError, match=rf"b\.jsonl\.{ending}: damaged {ending} data after byte "
    ):
        read_all(open_files(put(tmp_path / f"b.jsonl.{ending}", damaged)))


def test_parquet_called_text(tmp_path: Path) -> None:
    pq.write_table(TABLE, tmp_path / "a.txt")
    refused(
        tmp_path / "a.txt",
        "{path}: not text: it begins with b'PAR1'. Give the format by type=, or rename the file.",
    )
    assert len(read_all(open_files(tmp_path / "a.txt", type="parquet"))) == 2000


@pytest.mark.parametrize("kind", ["utf-16-le", "utf-16-be"])
def test_utf16(tmp_path: Path, kind: str) -> None:
    refused(
        put(tmp_path / "a.csv", "\ufeffa,b\n1,2\n".encode(kind)),
        "{path}: is UTF-16. Convert it to UTF-8.",
    )


# JSON


def test_jsonl_line_that_does_not_parse(tmp_path: Path) -> None:
    path = put(tmp_path / "a.jsonl", '{"text": "a"}\n\n{"text": "b"\n{"text": "c"}\n')
    refused(
        path,
        "{path}, row 2, line 3: not JSON: Expecting ',' delimiter at character 13. "
        "Correct the file, or read it with on_error='skip' or 'quarantine'.",
    )
    source = open_files(path, on_error="skip")
    assert [row["text"] for row in read_all(source)] == ["a", "c"]
    found = source.scan(0, 0, 4)
    assert [(r.row, r.reason, r.benign) for r in found.rejects] == [
        (1, "blank_line", True),
        (2, "unparsable", False),
    ]
    assert found.batch.column(ROW_NUMBER).to_pylist() == [0, 3]
    assert source.raw(0, 2) == '{"text": "b"'
    assert source.scan(0, 2, 3).rejects == found.rejects[1:]


@pytest.mark.parametrize(
    ("line", "reason", "detail"),
    [
        ("[1, 2]", "not_an_object", "expected an object, found an array"),
        ("5", "not_an_object", "expected an object, found a number"),
        ("null", "not_an_object", "expected an object, found null"),
        (
            '{"text": 5}',
            "not_a_string",
            "column 'text': expected a string as in other rows, found a number",
        ),
        (
            '{"text": ["a"]}',
            "not_a_string",
            "column 'text': expected a string as in other rows, found an array",
        ),
        ('{"text": "a"} {"text": "b"}', "unparsable", "not JSON: Extra data at character 15"),
        ('{"text": "a"}{"text": "b"}', "unparsable", "not JSON: Extra data at character 14"),
        (
            '{"text": "a", "text": "b"}',
            "unparsable",
            "not a row: JSON parse error: Column(/text) was specified twice",
        ),
        (
            '{"text": "\\ud800"}',
            "unparsable",
            "not a row: JSON parse error: The surrogate pair in string is invalid.",
        ),
        ('{"text": tru}', "unparsable", "not JSON: Expecting value at character 10"),
        ('{"x": ' + "[" * 300 + "]" * 300 + "}", "unparsable", "nested too deeply"),
        ('{"x": ' + "[" * 100_000 + "]" * 100_000 + "}", "unparsable", "nested too deeply"),
    ],
)
def test_json_rows_that_are_none(tmp_path: Path, line: str, reason: str, detail: str) -> None:
    """One bad row among good ones, in lines and in an array; the good ones are all there and the
    bad one is named.
    """
    rows = [json.dumps({"text": f"good {i}"}) for i in range(40)]
    rows[17] = line
    for name, content in {
        "a.jsonl": "\n".join(rows),
        "a.json": "[" + ",\n".join(rows) + "]",
    }.items():
        source = open_files(put(tmp_path / name, content), on_error="skip")
        found = source.scan(0, 0, 40)
        assert [(r.row, r.reason, r.detail) for r in found.rejects] == [(17, reason, detail)]
        assert found.batch.column("text").to_pylist() == [f"good {i}" for i in range(40) if i != 17]
        with pytest.raises(
            SourceError,
            match=re.escape(
                f"{name}, row 17, line 18: {detail.removesuffix('.')}. Correct the file"
            ),
        ):
            read_all(open_files(tmp_path / name))


def test_json_invalid_utf8(tmp_path: Path) -> None:
    path = put(
        tmp_path / "a.jsonl",
        b'{"text": "a"}\n{"text": "\xff"}\n{"text": "b", "meta": {"k": ["\xfe"]}}\n',
    )
    found = open_files(path, on_error="skip").scan(0, 0, 3)
    assert [(r.row, r.reason, r.detail) for r in found.rejects] == [
        (1, "invalid_utf8", "column 'text' is not UTF-8"),
        (2, "invalid_utf8", "column 'meta' is not UTF-8"),
    ]
    assert found.batch.column("text").to_pylist() == ["a"]
    refused(
        path,
        "{path}, row 1, line 2: column 'text' is not UTF-8. Correct the file, or read it with "
        "on_error='skip' or 'quarantine'.",
    )
    assert len(read_all(open_files(path, on_error="skip", columns=["text"]))) == 2


def test_one_pretty_printed_object(tmp_path: Path) -> None:
    path = put(tmp_path / "a.json", json.dumps({"text": "a"}, indent=1))
    with pytest.raises(
        SourceError, match=r"if this file is one object over many lines, write one object a line"
    ):
        read_all(open_files(path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            '[{"a": 1}, {"a": 2}',
            "{path}, row 2: truncated: the JSON array does not end. Copy or write it again.",
        ),
        (
            '[{"a": 1}, {"a": ',
            "{path}, row 1: truncated: the JSON array does not end. Copy or write it again.",
        ),
        (
            '[{"a": 1},',
            "{path}, row 1: truncated: the JSON array does not end. Copy or write it again.",
        ),
        ('[{"a": 1},]', "{path}, row 1: broken JSON array near byte 10. Correct the file."),
        (
            '[{"a": 1},,{"a": 2}]',
            "{path}, row 1: broken JSON array near byte 10. Correct the file.",
        ),
        (
            '[{"a": 1}}, {"a": 2}]',
            "{path}, row 0: broken JSON array near byte 9. Correct the file.",
        ),
        (
            '[{"a": 1}] [{"a": 2}]',
            "{path}: goes on after the end of the array: b'[{\"a\": 2}]'. Correct the file.",
        ),
        ("[]", "{path}: has no row from which columns can be determined. Give files with rows."),
        ("\n\n", "{path}: has no row from which columns can be determined. Give files with rows."),
    ],
)
def test_broken_arrays(tmp_path: Path, content: str, message: str) -> None:
    refused(put(tmp_path / "a.json", content), message)


# CSV and text


def test_json_keys_that_are_not_utf8(tmp_path: Path) -> None:
    """They end nothing: a row is bad if a column that is read has one; pyarrow drops the key."""
    rows = [
        b'{"text": "a", "m": {"a": 1}, "n": [{"b": "x"}]}',
        b'{"text": "b", "m": {"pr\xe9nom": 1}}',
        b'{"text": "c", "m": {"\\ud800": {}}}',
        b'{"text": "d", "m": {"a": 1}, "n": [{"b": "x", "\xe9": {}}]}',
        b'{"text": "e", "pr\xe9nom": [1]}',
    ]
    path = put(tmp_path / "a.jsonl", b"\n".join(rows))
    source = JsonShardedSource(path, on_error="skip")
    assert source.schema.field("m").type == pa.struct([("a", pa.int64())])
    found = source.scan(0, 0, 5)
    assert [(r.row, r.reason) for r in found.rejects] == [
        (1, "invalid_utf8"),
        (2, "unparsable"),
        (3, "invalid_utf8"),
    ]
    assert found.rejects[0].detail == "not UTF-8 at byte 23 of the line"
    assert found.batch.column("text").to_pylist() == ["a", "e"]
    found = JsonShardedSource(path, on_error="skip", columns=["text", "m"]).scan(0, 0, 5)
    assert [r.row for r in found.rejects] == [1, 2]
    assert found.batch.column("m").to_pylist() == [{"a": 1}, {"a": 1}, None]
    only = put(tmp_path / "b.jsonl", rows[1])
    assert [r.reason for r in open_files(only, on_error="skip").scan(0, 0, 1).rejects] == [
        "invalid_utf8"
    ]


@pytest.mark.parametrize("name", [b"number", b"inside"])
def test_arrow_names_that_are_not_utf8(tmp_path: Path, name: bytes) -> None:
    match_of = {
        b"number": r"a\.arrow: damaged Arrow data: 'utf-8' codec",
        b"inside": r"a\.arrow: the name of a column or field: 'utf-8' codec.*names in UTF-8",
    }
    rows = pa.table({"text": ["a"], "number": [1], "m": [{"inside": 1}]})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, rows.schema) as writer:
        writer.write(rows)
    damaged = sink.getvalue().to_pybytes().replace(name, b"\xe9" + name[1:])
    path = put(tmp_path / "a.arrow", damaged)
    with pytest.raises(SourceError, match=match_of[name]):
        open_files(path).schema  # noqa: B018
    pq.write_table(rows, tmp_path / "a.parquet", store_schema=False)
    damaged = (tmp_path / "a.parquet").read_bytes().replace(name, b"\xe9" + name[1:])
    path = put(tmp_path / "b.parquet", damaged)
    with pytest.raises(SourceError, match="damaged parquet: 'utf-8' codec"):
        open_files(path).schema  # noqa: B018


def test_csv_wrong_number_of_fields(tmp_path: Path) -> None:
    path = put(tmp_path / "a.csv", 'text,n\n"two\nlines",1\nb\n\nc,3,4\nd,5\n')
    refused(
        path,
        "{path}, row 1, line 4: 1 fields, the header has 2. Correct the file, or read it with "
        "on_error='skip' or 'quarantine'.",
    )
    found = open_files(path, on_error="skip").scan(0, 0, 5)
    assert [(r.row, r.reason, r.detail) for r in found.rejects] == [
        (1, "wrong_fields", "1 fields, the header has 2"),
        (2, "blank_line", "a blank line"),
        (3, "wrong_fields", "3 fields, the header has 2"),
    ]
    assert found.batch.to_pylist() == [
        {"text": "two\nlines", "n": "1", ROW_NUMBER: 0},
        {"text": "d", "n": "5", ROW_NUMBER: 4},
    ]


def test_csv_wrong_number_of_fields_in_bytes_that_are_not_utf8(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reasons are by row, no traceback is printed, and the good records are not read one by one."""
    blocks: list[int] = []
    read = csv.pc.read_csv
    monkeypatch.setattr(csv.pc, "read_csv", lambda *a, **k: (blocks.append(1), read(*a, **k))[1])
    good = [f"{i},text {i}" for i in range(3000)]
    rows = [*good, "5,caf\xe9,extra", *good, "caf\xe9", "6,caf\xe9", "7,\u00c3\u00a9", "8,a,b"]
    path = put(tmp_path / "a.csv", "\n".join(["id,text", *rows]).encode("latin-1"))
    found = open_files(path, on_error="skip").scan(0, 0, len(rows))
    assert [(r.row, r.reason, r.detail) for r in found.rejects] == [
        (3000, "wrong_fields", "3 fields, the header has 2"),
        (6001, "wrong_fields", "1 fields, the header has 2"),
        (6002, "invalid_utf8", "column 'text' is not UTF-8"),
        (6004, "wrong_fields", "3 fields, the header has 2"),
    ]
    assert found.batch.column("text").to_pylist()[-2:] == ["text 2999", "\u00e9"]
    assert found.batch.num_rows == 6001
    assert len(blocks) == 2
    only = put(tmp_path / "b.csv", b"id,text\n\xe9\n")
    assert [r.reason for r in open_files(only, on_error="skip").scan(0, 0, 1).rejects] == [
        "wrong_fields"
    ]
    assert "UnicodeDecodeError" not in capfd.readouterr().err


@pytest.mark.parametrize("code", ["utf-32", "utf-32-be"])
def test_utf_32_is_told(tmp_path: Path, code: str) -> None:
    mark = "\ufeff" if code == "utf-32-be" else ""
    path = put(tmp_path / "a.jsonl", (mark + '{"text": "a"}').encode(code))
    refused(path, "{path}: is UTF-32. Convert it to UTF-8.")


def test_csv_with_semicolons_is_told(tmp_path: Path) -> None:
    source = open_files(put(tmp_path / "a.csv", "text;url\na;b\n"))
    with pytest.raises(SourceError, match=r"with commas, or as \.tsv with tabs: it seems to have"):
        require_text(source, "text", "d")


def test_csv_open_quote(tmp_path: Path) -> None:
    path = put(tmp_path / "a.csv", 'text,n\na,1\n"b,2\nc,3\n')
    refused(path, "{path}, row 1: a quoted field begins here and never ends. Close the quote.")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (
            "a,a\n1,2\n",
            "column 'a' appears twice (have: a, a). Give every column a name of its own.",
        ),
        ("a, \n1,2\n", "a column has no name (have: a,  ). Give every column a name of its own."),
    ],
)
def test_csv_header(tmp_path: Path, content: str, problem: str) -> None:
    refused(put(tmp_path / "a.csv", content), "{path}, header: " + problem)


def test_text_invalid_utf8(tmp_path: Path) -> None:
    path = put(tmp_path / "a.txt", b"good\n\n\xff\xfe\nlast")
    refused(
        path,
        "{path}, row 2, line 3: column 'text' is not UTF-8. Correct the file, or read it with "
        "on_error='skip' or 'quarantine'.",
    )
    assert [row["text"] for row in read_all(open_files(path, on_error="skip"))] == ["good", "last"]


def test_parquet_invalid_utf8(tmp_path: Path) -> None:
    column = pa.Array.from_buffers(
        pa.string(), 3, pa.array([b"ok", b"\xff\xff", b"fine"]).buffers()
    )
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    with pytest.raises(SourceError, match=r"a\.parquet, row 1: column 'text' is not UTF-8"):
        read_all(open_files(tmp_path / "a.parquet"))
    assert read_all(open_files(tmp_path / "a.parquet", on_error="skip")) == [
        {"text": "ok", ROW_NUMBER: 0},
        {"text": "fine", ROW_NUMBER: 2},
    ]


# Files that differ, and options


def test_schemas_that_do_not_go_together(tmp_path: Path) -> None:
    a = put(tmp_path / "a.jsonl", '{"text": "x", "id": 1}\n')
    b = put(tmp_path / "b.jsonl", '{"text": "y", "id": "one"}\n')
    with pytest.raises(SourceError) as caught:
        read_all(open_files([a, b]))
    assert str(caught.value) == (
        f"{b}, column 'id': is large_string here and int64 in {a}. Rewrite one of the "
        "files, or make two datasets of them; a source in Python may leave the column out with "
        "columns=[...]."
    )
    assert [row["text"] for row in read_all(open_files([a, b], columns=["text"]))] == ["x", "y"]


@pytest.mark.parametrize("kind", ["parquet", "arrow", "json", "csv"])
def test_missing_column(tmp_path: Path, kind: str) -> None:
    table = pa.table({"text": ["a"], "label": ["b"]})
    path = tmp_path / "a"
    {
        "parquet": lambda: pq.write_table(table, path),
        "arrow": lambda: feather.write_feather(table, path),
        "json": lambda: path.write_text('{"text": "a", "label": "b"}'),
        "csv": lambda: path.write_text("text,label\na,b\n"),
    }[kind]()
    with pytest.raises(SourceError) as caught:
        read_all(open_files(path, type=kind, columns=["txt"]))
    assert str(caught.value) == f"{path}: no column 'txt' (have: text, label). Did you mean 'text'?"
    assert len(read_all(open_files(path, type=kind, columns=["text"]))) == 1


def test_mixed_formats(tmp_path: Path) -> None:
    put(tmp_path / "a.jsonl", "{}")
    put(tmp_path / "b.txt", "x")
    with pytest.raises(
        SourceError,
        match=r"files of several formats: .*a\.jsonl \(json\), .*b\.txt \(txt\)\. Give one format "
        r"by type=",
    ):
        open_files(tmp_path)
    assert open_files(tmp_path, type="txt").files[0].path.endswith("b.txt")


def test_unknown_extension_and_options(tmp_path: Path) -> None:
    path = put(tmp_path / "a.dat", "x")
    with pytest.raises(
        SourceError,
        match=r"a\.dat: its extension names no format \(have: \.parquet, .*Give the format by "
        r"type=",
    ):
        open_files(path)
    for ending in ("xz", "lzma", "zip", "tgz", "7z", "lz4", "br", "rar"):
        have = r"\(have: \.gz, \.zst, \.zstd, \.bz2\)"
        with pytest.raises(
            SourceError,
            match=rf"a\.jsonl\.{ending}: \.{ending} files are not read {have}\. Unpack it",
        ):
            open_files(put(tmp_path / f"a.jsonl.{ending}", "x"))
    with pytest.raises(
        SourceError, match=r"a\.idx: an index holds no tokens\. Name the file beside it: a\.bin\."
    ):
        open_files(put(tmp_path / "a.idx", "x"))
    assert len(read_all(open_files(path, type="txt"))) == 1
    with pytest.raises(
        ConfigError,
        match=r"type: 'jsno' is not a file format \(have: parquet, arrow, json, csv, txt, tokens, "
        r"arrayrecord, mds, webdataset\)\. Did you mean 'json'",
    ):
        open_files(path, type="jsno")
    with pytest.raises(
        ConfigError,
        match=r"on_error: 'skp' is not an option \(have: error, skip, quarantine\)\. Did you mean "
        r"'skip'",
    ):
        TextShardedSource(path, on_error="skp")  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError,
        match=r"columns: expected different column names, got 'text'\. Write columns=\['text'\]",
    ):
        TextShardedSource(path, columns="text")
    with pytest.raises(ConfigError, match="data_files: names no file"):
        CsvShardedSource([])


def test_rows_out_of_range(tmp_path: Path) -> None:
    path = put(tmp_path / "a.txt", "a\nb\n")
    source = open_files(path)
    for start, stop in [(0, 3), (-1, 1), (2, 1)]:
        with pytest.raises(
            SourceError, match=rf"rows {start}:{stop} were asked for\. It has rows 0:2"
        ):
            source.read(0, start, stop)
