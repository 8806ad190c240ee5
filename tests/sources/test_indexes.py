"""Indexes of text files: kept beside each other, made again when they must be, and what they
save.
"""

from __future__ import annotations

import gzip
import json
import logging
import os
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import zstandard

from easypipe.core import storage
from easypipe.core.errors import SourceError
from easypipe.core.schema import ROW_NUMBER
from easypipe.sources.formats import records, streams
from easypipe.sources.open import open_files

ROWS = 6000


def lines(rows: int = ROWS) -> bytes:
    return b"".join(b'{"text": "row %d %s"}\n' % (i, b"x" * (i % 900)) for i in range(rows))


@pytest.mark.parametrize(
    ("ending", "pack"),
    [
        (".jsonl", bytes),
        (".jsonl.gz", gzip.compress),
        (".json", lambda d: b"[" + b",".join(d.splitlines()) + b"]"),
    ],
)
def test_sidecar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str, pack) -> None:
    path = tmp_path / f"a{ending}"
    path.write_bytes(pack(lines()))
    built = []
    index_records = records.index_records
    monkeypatch.setattr(records, "index_records", lambda *a: built.append(1) or index_records(*a))

    def opened(**options):
        source = open_files(path, index_dir=tmp_path / "index", **options)
        return (
            source,
            source.read(0, 3000, 3002).column("text").to_pylist(),
            source.schema,
            source.shards,
        )

    _, first, schema, shards = opened()
    assert len(built) == 1
    _, again, same_schema, same_shards = opened()
    assert len(built) == 1
    assert (again, same_schema, same_shards) == (first, schema, shards)

    sidecar = next((tmp_path / "index").iterdir())
    for damage in [
        "",
        "{",
        "[]",
        json.dumps({"num_rows": 3}),
        sidecar.read_text().replace('"rows": "A', '"rows": "!'),
    ]:
        sidecar.write_text(damage)
        assert opened()[1] == first
        assert storage.read_json(sidecar)["num_rows"] == ROWS
    assert len(built) == 6

    path.write_bytes(pack(lines(4000)))
    assert opened()[3][0].num_rows == 4000
    assert len(built) == 7


def test_damaged_sidecar_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.txt").write_bytes(b"x\n")
    open_files(tmp_path / "a.txt", index_dir=tmp_path / "index").shards  # noqa: B018
    sidecar = next((tmp_path / "index").iterdir())
    sidecar.write_text("{}")
    with caplog.at_level(logging.WARNING, "easypipe"):
        open_files(tmp_path / "a.txt", index_dir=tmp_path / "index").shards  # noqa: B018
    assert str(sidecar) in caplog.text
    assert "is rebuilt: damaged" in caplog.text


def test_killed_while_committing(tmp_path: Path) -> None:
    """A sidecar is there whole or not at all; the next run makes it."""
    (tmp_path / "a.jsonl").write_bytes(lines(10))

    class Killed(BaseException):
        pass

    def kill(step: str, path: str) -> None:
        if step == at:
            raise Killed

    for at in ("write", "sync", "rename"):
        storage.set_fault_hook(kill)
        with pytest.raises(Killed):
            open_files(tmp_path / "a.jsonl", index_dir=tmp_path / at).shards  # noqa: B018
        storage.set_fault_hook(None)
        assert not list((tmp_path / at).glob("*.json"))
        assert open_files(tmp_path / "a.jsonl", index_dir=tmp_path / at).shards[0].num_rows == 10


def test_cuts_and_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines())
    source = open_files(tmp_path / "a.jsonl")
    # every 1,024 rows there is an entry, every 1 MiB a cut
    assert source.shards[0].cuts == (0, 3072)
    whole = source.read(0, 0, ROWS)
    monkeypatch.setattr(records, "PIECE_BYTES", 100_000)
    assert source.read(0, 0, ROWS).equals(whole)


@pytest.fixture
def decompressed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that were decompressed."""
    seen: list[int] = []
    read = streams._Unpacking._read
    monkeypatch.setattr(
        streams._Unpacking,
        "_read",
        lambda self: (lambda out: seen.append(len(out)) or out)(read(self)),
    )
    return seen


@pytest.mark.parametrize(("ending", "pack"), [("gz", gzip.compress), ("zst", zstandard.compress)])
def test_consecutive_ranges_decompress_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decompressed: list[int], ending: str, pack
) -> None:
    monkeypatch.setattr(streams, "BLOCK_BYTES", 100_000)
    monkeypatch.setattr(streams, "KEPT_BLOCKS", 12)
    data = lines()
    (tmp_path / f"a.jsonl.{ending}").write_bytes(pack(data))
    source = open_files(tmp_path / f"a.jsonl.{ending}")
    assert source.shards[0].num_rows == ROWS
    assert sum(decompressed) == len(data)
    decompressed.clear()
    for start in range(0, ROWS, 500):
        source.read(0, start, start + 500)
    assert sum(decompressed) == len(data)

    # three threads that stay within the kept blocks of each other do not begin again
    decompressed.clear()
    turn = threading.Barrier(3, timeout=60)

    def work(first: int) -> None:
        for start in range(first, ROWS, 750):
            turn.wait()
            source.read(0, start, start + 250)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, (0, 250, 500)))
    assert sum(decompressed) == len(data)


@pytest.mark.parametrize("ending", ["gz", "zst"])
def test_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decompressed: list[int], ending: str
) -> None:
    """Files of several members (BGZF, multi-frame zst) are entered near the rows that are asked
    for.
    """
    for name in ("RESTART_BYTES", "BLOCK_BYTES"):
        monkeypatch.setattr(streams, name, 50_000)
    pack = gzip.compress if ending == "gz" else zstandard.compress
    data = lines()
    path = tmp_path / f"a.jsonl.{ending}"
    path.write_bytes(b"".join(pack(data[i : i + 60_000]) for i in range(0, len(data), 60_000)))
    source = open_files(path, index_dir=tmp_path / "index")
    last = source.read(0, ROWS - 1, ROWS)
    decompressed.clear()
    again = open_files(path, index_dir=tmp_path / "index")
    assert again.read(0, ROWS - 1, ROWS).equals(last)
    assert sum(decompressed) < len(data) // 2


def test_a_file_that_grew_shorter_under_its_index(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(100))
    source = open_files(path)
    assert source.shards[0].num_rows == 100
    path.write_bytes(lines(10))
    with pytest.raises(SourceError, match="changed after the source was made"):
        source.read(0, 90, 100)


def test_fewer_records_than_its_index_says(tmp_path: Path) -> None:
    """Neither its size nor its time tells that the file changed."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"n": 1}\n' * 4)
    source, times = open_files(path), path.stat()
    assert source.shards[0].num_rows == 4
    path.write_bytes((b'{"n":' + b" " * 10 + b"1}\n") * 2)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(SourceError, match="changed after the source was made"):
        source.read(0, 0, 4)


def test_without_a_folder_no_index_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl").write_text('{"n": 1}\n')
    monkeypatch.chdir(tmp_path)
    assert open_files("a.jsonl").read(0, 0, 1).column("n").to_pylist() == [1]
    assert os.listdir() == ["a.jsonl"]


def test_each_choice_of_columns_has_an_index_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1, "b": {"c": "x"}}\n')
    index_dir = tmp_path / "index"
    assert open_files(tmp_path / "a.jsonl", columns=["a"], index_dir=index_dir).schema.names == [
        "a",
        ROW_NUMBER,
    ]
    source = open_files(tmp_path / "a.jsonl", index_dir=index_dir)
    assert source.schema.names == ["a", "b", ROW_NUMBER]
    assert source.read(0, 0, 1).column("b").to_pylist() == [{"c": "x"}]


@pytest.mark.parametrize(
    ("ending", "text"),
    [(".jsonl", '{"t": "x"}\n{"t": "y"}\n\n{"t": "z"}\n'), (".csv", "t\nx\ny\n\nz\n")],
)
def test_a_blank_line_has_its_number_wherever_reading_begins(
    tmp_path: Path, ending: str, text: str
) -> None:
    (tmp_path / f"a{ending}").write_text(text)
    found = open_files(tmp_path / f"a{ending}").scan(0, 1, 4)
    assert [(reject.row, reject.reason) for reject in found.rejects] == [(2, "blank_line")]
    assert found.batch.column(ROW_NUMBER).to_pylist() == [1, 3]


@pytest.mark.parametrize(("ending", "pack"), [(".tsv", bytes), (".tsv.gz", gzip.compress)])
def test_tabs_divide_tsv(tmp_path: Path, ending: str, pack) -> None:
    (tmp_path / f"a{ending}").write_bytes(pack(b"a\tb\n1,5\tx\n"))
    found = open_files(tmp_path / f"a{ending}").read(0, 0, 1)
    assert (found.column("a").to_pylist(), found.column("b").to_pylist()) == (["1,5"], ["x"])


@pytest.mark.parametrize("ending", [".jsonl", ".json", ".csv"])
def test_a_row_may_have_mebibytes(tmp_path: Path, ending: str) -> None:
    texts = ["a", "b" * (3 << 20), "c"]
    rows = [json.dumps({"text": text}) for text in texts]
    path = tmp_path / f"a{ending}"
    path.write_text(
        {".jsonl": "\n".join(rows), ".json": f"[{', '.join(rows)}]"}.get(
            ending, "\n".join(["text", *texts])
        )
    )
    assert open_files(path).read(0, 0, 3).column("text").to_pylist() == texts


def test_long_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "CHUNK_BYTES", 64)
    text = "y" * 5000
    (tmp_path / "a.jsonl").write_text(
        json.dumps({"text": "a"}) + "\n" + json.dumps({"text": text}) + "\n"
    )
    assert open_files(tmp_path / "a.jsonl").read(0, 1, 2).column("text").to_pylist() == [text]
    monkeypatch.setattr(records, "MAX_RECORD_BYTES", 1024)
    with pytest.raises(
        SourceError,
        match=r"a\.jsonl, row 1: a record of more than 0 MiB begins here\. A quote or bracket may "
        r"be open",
    ):
        open_files(tmp_path / "a.jsonl").shards  # noqa: B018


@pytest.mark.parametrize("ending", [".jsonl", ".csv", ".json", ".jsonl.gz"])
def test_every_text_has_its_own_row_number(tmp_path: Path, ending: str) -> None:
    """Texts say which row they are; ranges begin between the entries of the index, and behind
    them.
    """
    path = tmp_path / f"a{ending}"
    rows = [{"text": f"row {i}\n" + "x" * (i % 90), "n": i} for i in range(ROWS)]
    if ending == ".csv":
        path.write_text(
            "text,n\n" + "".join(f'"{row["text"]}",{row["n"]}\n' for row in rows), encoding="utf-8"
        )
    elif ending == ".json":
        path.write_text(json.dumps(rows), encoding="utf-8")
    else:
        data = "".join(json.dumps(row) + "\n" for row in rows).encode()
        path.write_bytes(gzip.compress(data) if ending.endswith(".gz") else data)
    source = open_files(path, index_dir=tmp_path / "index")
    for start, stop in (
        (0, 1),
        (1, 3),
        (1020, 1030),
        (1024, 1025),
        (2500, 4200),
        (ROWS - 1, ROWS),
        (0, ROWS),
    ):
        batch = source.read(0, start, stop)
        assert [int(n) for n in batch.column("n").to_pylist()] == list(range(start, stop))
        assert [text.partition("\n")[0] for text in batch.column("text").to_pylist()] == [
            f"row {i}" for i in range(start, stop)
        ]
        if ROW_NUMBER in batch.schema.names:
            assert batch.column(ROW_NUMBER).to_pylist() == list(range(start, stop))


def test_the_index_of_a_small_file_waits_for_no_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    usual = storage.sync

    def sync(path: Path) -> None:
        synced.append(path)
        usual(path)

    monkeypatch.setattr(storage, "sync", sync)
    for count, waits in ((10, False), (60_000, True)):
        path = tmp_path / f"{count}.jsonl"
        path.write_text('{"text": "twenty bytes"}\n' * count)
        synced.clear()
        assert open_files(path, index_dir=tmp_path / "indexes").shards[0].num_rows == count
        assert any(one.name.endswith(".index.json") for one in synced) is waits
    assert len([*tmp_path.glob("indexes/*.index.json")]) == 2


def test_text_that_packs_well_is_not_unpacked_at_once(tmp_path: Path) -> None:
    """Of 16 KB, zstd made 400 MB in one piece, which was copied again for every MB of it."""
    packer = zstandard.ZstdCompressor().compressobj()
    with (tmp_path / "a.txt.zst").open("wb") as out:
        for _ in range(400):
            out.write(packer.compress(b"x" * 999_999 + b"\n"))
        out.write(packer.flush())
    source = open_files(tmp_path / "a.txt.zst")
    tracemalloc.start()
    try:
        assert source.shards[0].num_rows == 400
        assert tracemalloc.get_traced_memory()[1] < 380 << 20
    finally:
        tracemalloc.stop()
