"""Every source under the law of stateless reads, with indexes, chunks and pieces so small that all
their borders are met.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import itertools
import json
import os
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from easypipe import DatasetConfig, Pipeline
from easypipe.core.errors import SourceError
from easypipe.core.schema import ROW_NUMBER
from easypipe.sources.external.memory import InMemoryShardedSource
from easypipe.sources.formats import members, parquet, records, streams
from easypipe.sources.formats.arrow import ArrowShardedSource
from easypipe.sources.open import open_files
from easypipe.sources.splits import limited
from laws import assert_stateless_reads
from pipelines import config
from strategies import examples, row_cuts, text_tables


def _jsonl(table: pa.Table) -> bytes:
    return "".join(
        json.dumps(row, ensure_ascii=n % 2 == 0) + "\n" for n, row in enumerate(table.to_pylist())
    ).encode()


def _json_array(table: pa.Table) -> bytes:
    return json.dumps(table.to_pylist(), indent=1, ensure_ascii=False).encode()


def _csv(table: pa.Table) -> bytes:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\r\n")
    writer.writerow(table.column_names)
    writer.writerows(row.values() for row in table.to_pylist())
    return out.getvalue().encode()


def _txt(table: pa.Table) -> bytes:
    return (
        "\n".join(
            text.replace("\n", " ").replace("\r", " ") for text in table.column("text").to_pylist()
        ).encode()
        + b"\n"
    )


def _parquet(table: pa.Table) -> bytes:
    out = io.BytesIO()
    pq.write_table(table, out, row_group_size=7)
    return out.getvalue()


def _feather(table: pa.Table) -> bytes:
    out = io.BytesIO()
    feather.write_feather(table, out, compression="lz4", chunksize=5)
    return out.getvalue()


def _stream(table: pa.Table) -> bytes:
    out = io.BytesIO()
    with pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table, max_chunksize=5)
    return out.getvalue()


def _dictionary_stream(table: pa.Table) -> bytes:
    chunks = [table.slice(i, 4) for i in range(0, table.num_rows, 4)]
    encoded = [
        chunk.set_column(0, "text", chunk.column("text").dictionary_encode()) for chunk in chunks
    ]
    schema = pa.schema([("text", pa.dictionary(pa.int32(), pa.string())), ("n", pa.int64())])
    out = io.BytesIO()
    with pa.ipc.new_stream(out, schema) as writer:
        for chunk in encoded:
            writer.write_table(chunk)
    return out.getvalue()


def _mds(table: pa.Table) -> bytes:
    """A shard as MDSWriter writes it (nox -s shards compares with its own)."""
    told = {"column_names": ["n", "text"], "column_encodings": ["int", "str"]}
    header = json.dumps({**told, "column_sizes": [8, None], "format": "mds"}).encode()
    rows = []
    for row in table.to_pylist():
        text = row["text"].encode()
        rows.append(struct.pack("<Iq", len(text), row["n"]) + text)
    begin = 4 + 4 * (len(rows) + 1) + len(header)
    ends = itertools.accumulate(map(len, rows), initial=begin)
    return struct.pack(f"<{len(rows) + 2}I", len(rows), *ends) + header + b"".join(rows)


def _tar(table: pa.Table) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for number, row in enumerate(table.to_pylist()):
            for name, value in row.items():
                member = tarfile.TarInfo(f"a/{number}.{name}")
                data = str(value).encode()
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return out.getvalue()


def _many_members(data: bytes) -> bytes:
    """gzip of several members, as BGZF and concatenated files have them, padded with zeros as tapes
    do.
    """
    return b"".join(gzip.compress(data[i : i + 50]) for i in range(0, len(data), 50)) + b"\0" * 9


def _many_streams(data: bytes) -> bytes:
    """bzip2 as pbzip2 writes it."""
    return b"".join(bz2.compress(data[i : i + 50]) for i in range(0, len(data), 50))


def _many_frames(data: bytes) -> bytes:
    skippable = b"\x50\x2a\x4d\x18\x04\x00\x00\x00skip"
    return skippable + b"".join(
        zstandard.compress(data[i : i + 50]) for i in range(0, len(data), 50)
    )


PACKINGS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": zstandard.compress,
    ".bz2": bz2.compress,
    ".streams.bz2": _many_streams,
    ".members.gz": _many_members,
    ".frames.zst": _many_frames,
}
KINDS: dict[str, tuple[str, Callable[[pa.Table], bytes]]] = {
    "jsonl": (".jsonl", _jsonl),
    "array": (".json", _json_array),
    "csv": (".csv", _csv),
    "txt": (".txt", _txt),
}
BINARY: dict[str, tuple[str, Callable[[pa.Table], bytes]]] = {
    "parquet": (".parquet", _parquet),
    "feather": (".feather", _feather),
    "stream": (".arrows", _stream),
    "dictionary_stream": (".arrow", _dictionary_stream),
    "mds": (".mds", _mds),
    "webdataset": (".tar", _tar),
}
EVERY = [
    *((kind, ending, packing) for kind, (ending, _) in KINDS.items() for packing in PACKINGS),
    *((kind, ending, "") for kind, (ending, _) in BINARY.items()),
    ("mds", ".mds", ".zst"),
]


@pytest.fixture(params=EVERY, ids=lambda p: f"{p[0]}{p[2]}")
def written(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Path]:
    """Writes a table in one format, and says where."""
    kind, ending, packing = request.param
    encode = {**KINDS, **BINARY}[kind][1]
    # .members and .frames only name a way of packing; the extension that counts stands last
    stem, last = (
        (packing.rpartition(".")[0], "." + packing.rpartition(".")[2]) if packing else ("", "")
    )

    def write(table: pa.Table, name: str = "rows") -> Path:
        path = tmp_path / f"{name}{stem}{ending}{last}"
        path.write_bytes(PACKINGS[packing](encode(table)))
        return path

    return write


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, sizes in {
        records: {
            "ENTRY_ROWS": 3,
            "ENTRY_BYTES": 90,
            "CUT_BYTES": 40,
            "CHUNK_BYTES": 16,
            "PIECE_BYTES": 64,
            "BATCH_RECORDS": 2,
        },
        streams: {
            "INPUT_BYTES": 11,
            "OUTPUT_BYTES": 13,
            "BLOCK_BYTES": 23,
            "KEPT_BLOCKS": 2,
            "RESTART_BYTES": 30,
        },
        members: {"CUT_BYTES": 64, "WINDOW_BYTES": 80},
        parquet: {"SMALL_GROUP_BYTES": 0, "STREAMED_BYTES": 64, "KEPT_PLACES": 2, "CUT_BYTES": 64},
    }.items():
        for name, value in sizes.items():
            monkeypatch.setattr(module, name, value)


def expected(path: Path, table: pa.Table) -> list[dict]:
    rows = table.to_pylist()
    if ".txt" in path.name:
        lines = [
            line.removesuffix("\r") for line in _txt(table).decode("utf-8-sig").split("\n")[:-1]
        ]
        return [{"text": line} for line in lines if line.strip(" \t\r")]
    if ".csv" in path.name:
        return [{"text": row["text"], "n": str(row["n"])} for row in rows]
    if ".mds" in path.name:  # columns in order of their names
        return [{"n": row["n"], "text": row["text"]} for row in rows]
    if ".tar" in path.name:
        return [
            {"__key__": f"a/{i}", "text": row["text"], "n": str(row["n"]).encode()}
            for i, row in enumerate(rows)
        ]
    return rows


@examples(12)
@given(table=text_tables(min_rows=1, max_rows=30), cuts=row_cuts())
def test_stateless_reads(
    written: Callable[..., Path], small_steps: None, table: pa.Table, cuts: list[int]
) -> None:
    path = written(table)
    for on_error in ("error", "skip"):
        source = open_files(path, on_error=on_error)
        assert_stateless_reads(source, cuts)
        rows = source.read(0, 0, source.shards[0].num_rows)
        data = rows.drop_columns(ROW_NUMBER) if ROW_NUMBER in rows.schema.names else rows
        assert data.to_pylist() == expected(path, table)
        assert source.shards[0].num_bytes == path.stat().st_size


def test_normal_steps(written: Callable[..., Path]) -> None:
    """The same with the sizes that are in use, and several shards."""
    table = pa.table({"text": [f"row {i} " * (i % 40 + 1) for i in range(5000)], "n": range(5000)})
    files = [written(table, "a"), written(table.slice(100, 1300), "b")]
    source = open_files(files)
    assert_stateless_reads(source, [1, 1023, 1024, 1025, 2049, 4999])
    assert [shard.num_rows for shard in source.shards] == [5000, 1300]
    assert (
        source.read(1, 7, 9).column("text").to_pylist() == table.column("text").to_pylist()[107:109]
    )


def test_projection(written: Callable[..., Path]) -> None:
    table = pa.table({"text": ["a", "b"], "n": [1, 2]})
    source = open_files(written(table), columns=["text"])
    assert [name for name in source.schema.names if name != ROW_NUMBER] == ["text"]
    assert source.read(0, 1, 2).column("text").to_pylist() == ["b"]
    narrowed = open_files(source.files[0].path).select(["text"])
    assert_stateless_reads(narrowed, [1])
    assert narrowed.schema == source.schema
    assert narrowed.read(0, 0, 2).equals(source.read(0, 0, 2))
    assert (narrowed.fingerprint, narrowed.shard_identity(0)) == (
        source.fingerprint,
        source.shard_identity(0),
    )
    with pytest.raises(SourceError, match=r"no column 'txt' .have: .*text.*\. Did you mean 'text'"):
        narrowed.select(["txt"])
    whole = open_files(source.files[0].path)
    names = [name for name in whole.schema.names if name != ROW_NUMBER]
    turned = whole.select(names[::-1])
    assert [name for name in turned.schema.names if name != ROW_NUMBER] == names[::-1]
    assert_stateless_reads(turned, [1])


def test_a_column_that_is_not_read_spoils_no_row(tmp_path: Path) -> None:
    path = tmp_path / "mixed.jsonl"
    path.write_text(
        '{"text": "a", "meta": 1}\n{"text": "b", "meta": "x"}\n{"text": "c", "meta": [2]}\n'
    )
    source = open_files(path)
    with pytest.raises(SourceError, match="row 0, line 1"):
        source.read(0, 0, 3)
    assert source.select(["text"]).read(0, 0, 3).column("text").to_pylist() == ["a", "b", "c"]
    assert limited(source, 2).select(["text"]).read(0, 0, 2).column("text").to_pylist() == [
        "a",
        "b",
    ]


@examples(20)
@given(
    tables=st.lists(text_tables(min_rows=1, max_rows=12), min_size=1, max_size=3),
    limit=st.integers(1, 40),
    cuts=row_cuts(),
)
def test_limited(tmp_path: Path, tables: list[pa.Table], limit: int, cuts: list[int]) -> None:
    files = []
    for i, table in enumerate(tables):
        files.append(tmp_path / f"{i}.jsonl")
        files[-1].write_bytes(_jsonl(table))
    whole = open_files(files)
    source = limited(whole, limit)
    assert_stateless_reads(source, cuts)
    rows = [
        row
        for s, shard in enumerate(source.shards)
        for row in source.read(s, 0, shard.num_rows).column("text").to_pylist()
    ]
    assert rows == [text for table in tables for text in table.column("text").to_pylist()][:limit]
    assert source.fingerprint != limited(whole, limit + 1).fingerprint != whole.fingerprint
    assert source.shard_identity(0) == whole.shard_identity(0)


@given(table=text_tables(max_rows=30), cuts=row_cuts())
def test_memory(table: pa.Table, cuts: list[int]) -> None:
    for data in (table, table.to_pylist() or table, table.to_pydict()):
        source = InMemoryShardedSource(data)
        assert_stateless_reads(source, cuts)
        assert (
            source.read(0, 0, table.num_rows).column("text").to_pylist()
            == table.column("text").to_pylist()
        )


def test_many_threads_at_once(written: Callable[..., Path], small_steps: None) -> None:
    """Threads that read one shard here and there, forward and back, see what one thread sees."""
    from concurrent.futures import ThreadPoolExecutor

    table = pa.table({"text": [f"row {i}" for i in range(120)], "n": range(120)})
    path = written(table)
    alone, shared = open_files(path), open_files(path)
    spans = [(i * 37 % 110, i * 37 % 110 + 1 + i % 9) for i in range(60)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda span: shared.read(0, *span), spans))
    for span, batch in zip(spans, together, strict=True):
        assert batch.equals(alone.read(0, *span)), span


def test_fingerprints_follow_the_files(written: Callable[..., Path]) -> None:
    table = pa.table({"text": ["a", "b"], "n": [1, 2]})
    path = written(table)
    source = open_files(path)
    again = open_files(path)
    assert (source.fingerprint, source.shard_identity(0)) == (
        again.fingerprint,
        again.shard_identity(0),
    )
    assert open_files(path, columns=["text"]).fingerprint != source.fingerprint
    assert open_files(path, on_error="skip").fingerprint != source.fingerprint
    assert (
        open_files(path, on_error="skip").fingerprint
        == open_files(path, on_error="quarantine").fingerprint
    )
    written(pa.table({"text": ["a", "b", "c"], "n": [1, 2, 3]}))
    changed = open_files(path)
    assert changed.fingerprint != source.fingerprint
    assert changed.shard_identity(0) != source.shard_identity(0)
    with pytest.raises(
        ValueError, match=r"changed after the source was made. Make the source again"
    ):
        source.read(0, 0, 2)
    assert changed.read(0, 0, 3).num_rows == 3


def test_a_large_row_group_is_entered_in_its_middle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward, backward, and again from where another range ended."""
    monkeypatch.setattr(parquet, "SMALL_GROUP_BYTES", 0)
    monkeypatch.setattr(parquet, "STREAMED_BYTES", 512)
    table = pa.table({"n": range(900), "m": range(900)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=500)
    source = open_files(tmp_path / "a.parquet")
    for start, stop in ((7, 450), (450, 480), (3, 9), (498, 503), (620, 640), (641, 900), (0, 900)):
        for columns in (["n"], ["m"], ["n", "m"]):  # each has a place of its own
            read = source.select(columns).read(0, start, stop)
            for name in columns:
                assert read.column(name).to_pylist() == list(range(start, stop))


def test_a_name_with_dots_is_cut_as_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "CUT_BYTES", 512)
    numbers = range(900)
    pq.write_table(
        pa.table({"a.text": numbers, "a": numbers, "b": [{"a.text": n} for n in numbers]}),
        tmp_path / "a.parquet",
    )
    cuts = [
        len(open_files(tmp_path / "a.parquet", columns=[name]).shards[0].cuts)
        for name in ("a.text", "b", "a")
    ]
    assert cuts[0] == cuts[1] > 3
    assert cuts[2] >= cuts[0]  # the library reads `a.text` with `a`


def test_what_stays_of_a_large_row_group_is_less_than_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "SMALL_GROUP_BYTES", 0)
    monkeypatch.setattr(parquet, "STREAMED_BYTES", 1 << 16)
    table = pa.table({"text": [f"{i:01000d}" for i in range(10_000)]})
    pq.write_table(table, tmp_path / "a.parquet")
    source = open_files(tmp_path / "a.parquet")
    assert source.shards[0].num_rows == 10_000
    before = pa.total_allocated_bytes()
    assert source.read(0, 3000, 3001).column("text").to_pylist() == [f"{3000:01000d}"]
    assert pa.total_allocated_bytes() - before < table.nbytes / 2


@pytest.mark.parametrize("kept", [1, 2])
def test_an_arrow_stream_without_its_end_mark_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kept: int
) -> None:
    """Cut between two messages, it reads like a shorter one."""
    table, path = pa.table({"x": list(range(300))}), tmp_path / "x.arrow"
    edges = []
    with pa.OSFile(str(path), "wb") as out, pa.ipc.new_stream(out, table.schema) as writer:
        for batch in table.to_batches(max_chunksize=100):
            edges.append(out.tell())
            writer.write_batch(batch)
        edges.append(out.tell())
    for old in (True, False):  # an end mark of 8 bytes, or of 4 as old writers leave it
        assert ArrowShardedSource([str(path)]).shards[0].num_rows == 300
        assert not caplog.records
        path.write_bytes(path.read_bytes()[: edges[3]] + b"\0" * 4) if old else None
    path.write_bytes(path.read_bytes()[: edges[kept]])
    assert ArrowShardedSource([str(path)]).shards[0].num_rows == 100 * kept
    (record,) = caplog.records
    assert (
        f"x.arrow: an Arrow stream without its end mark: its {100 * kept} rows in {kept} batches "
        "are read" in record.getMessage()
    )


@pytest.mark.parametrize("cut", [0, 2])
def test_streams_without_their_end_mark_are_counted_in_the_ledger(tmp_path: Path, cut: int) -> None:
    rows = pa.table({"text": ["one", "two"]})
    for i in range(3):
        with (
            pa.OSFile(str(tmp_path / f"{i}.arrow"), "wb") as out,
            pa.ipc.new_stream(out, rows.schema) as writer,
        ):
            writer.write_table(rows)
            end = out.tell()
        os.truncate(tmp_path / f"{i}.arrow", end) if i < cut else None
    dataset = DatasetConfig(name="d", data_files=str(tmp_path / "*.arrow"), num_rows=5)
    save = {"output_dir": tmp_path / "out"}
    for _ in range(2):  # made, and found
        report = (
            Pipeline(config(tmp_path, datasets=[dataset]))
            .source()
            .tokenize()
            .save(save | {"overwrite": True})
            .build()
        )
        assert report.ledger.facts.get("tokenize.d.files_cut", 0) == cut
