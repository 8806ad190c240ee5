"""The head of a file: its first whole records, whatever stands behind them is not read."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from easypipe.core.errors import SourceError
from easypipe.core.protocols import scan
from easypipe.sources.open import open_files
from laws import assert_stateless_reads

ROWS = [{"text": f"row {i}, " + "words " * (i % 7), "number": str(i)} for i in range(3000)]
TEXTS = {
    "rows.jsonl": "".join(json.dumps(row) + "\n" for row in ROWS),
    "rows.json": json.dumps(ROWS, indent=1),
    "rows.csv": "text,number\n" + "".join(f'"{row["text"]}",{row["number"]}\n' for row in ROWS),
    "rows.txt": "".join(row["text"] + "\n" for row in ROWS),
}


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("packed", [False, True])
def test_a_head_is_the_first_rows(tmp_path: Path, name: str, packed: bool) -> None:
    path = tmp_path / (name + ".gz" if packed else name)
    data = TEXTS[name].encode()
    path.write_bytes(gzip.compress(data) if packed else data)
    whole = open_files(path)
    head = whole.head(20_000)
    rows = head.shards[0].num_rows or 0
    assert 100 < rows < 1500
    assert head.total_rows(0) is None
    assert_stateless_reads(head, [0, 1, rows // 2, rows])
    assert head.read(0, 0, rows).equals(whole.read(0, 0, rows))
    assert head.fingerprint != whole.fingerprint
    longer = whole.head(len(data))  # exactly as long as the file
    assert longer.total_rows(0) == whole.total_rows(0) == len(ROWS)
    assert longer.read(0, 0, len(ROWS)).equals(whole.read(0, 0, len(ROWS)))


@pytest.mark.parametrize("name", TEXTS)
def test_a_terabyte_behind_it_is_not_read(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with path.open("wb") as file:
        file.write(TEXTS[name].encode()[:10_000])
        file.truncate(1 << 40)  # holes: the file takes no room
    (tmp_path / f"small.{name}").write_text(TEXTS[name])
    small = open_files(tmp_path / f"small.{name}").head(1 << 16)
    scan(small, 0, 0, small.shards[0].num_rows or 0)  # reads what is imported first
    before = _bytes_read()
    head = open_files(path, on_error="skip").head(1 << 16)
    rows = scan(head, 0, 0, head.shards[0].num_rows or 0).batch
    assert rows.num_rows > 50
    assert rows.column("text")[0].as_py().strip() == ROWS[0]["text"].strip()
    assert _bytes_read() - before < 8 << 20


def test_the_index_of_the_whole_file_tells_its_rows(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(TEXTS["rows.jsonl"])
    source = open_files(tmp_path / "rows.jsonl", index_dir=tmp_path / "indexes")
    assert source.head(5000).total_rows(0) is None
    assert not (tmp_path / "indexes").exists()
    assert source.shards[0].num_rows == len(ROWS)
    head = source.head(5000)
    assert head.total_rows(0) == len(ROWS) > (head.shards[0].num_rows or 0)


def test_a_head_without_a_whole_record_says_so(tmp_path: Path) -> None:
    (tmp_path / "long.jsonl").write_text(json.dumps({"text": "x" * 10_000}) + "\n")
    with pytest.raises(SourceError, match="has no row from which columns can be determined"):
        _ = open_files(tmp_path / "long.jsonl").head(1000).schema
    assert open_files(tmp_path / "long.jsonl").head(1 << 20).shards[0].num_rows == 1


def _bytes_read() -> int:
    """By this process, from page cache or disk."""
    with open(f"/proc/{os.getpid()}/io") as file:
        return int(next(line for line in file if line.startswith("rchar")).split()[1])
