"""ArrayRecord files of text and of tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from easypipe import DatasetConfig, Pipeline, PipelineConfig
from easypipe.core.errors import SourceError
from easypipe.sources.external.token_files import TokenFilesConfig
from easypipe.sources.open import open_files
from laws import assert_stateless_reads

array_record_module = pytest.importorskip(
    "array_record.python.array_record_module", reason="array-record is optional"
)


def write(path: Path, rows: list[bytes], group: int = 3) -> Path:
    writer = array_record_module.ArrayRecordWriter(str(path), f"group_size:{group}")
    for row in rows:
        writer.write(row)
    writer.close()
    return path


def test_text(tmp_path: Path) -> None:
    files = [
        write(
            tmp_path / f"a.array_record-0000{i}-of-00002",
            [f"é {i} {n}".encode() for n in range(50)],
        )
        for i in range(2)
    ]
    source = open_files(files)
    assert_stateless_reads(source, [1, 2, 3, 49])
    assert source.schema == pa.schema([("text", pa.large_string())])
    assert source.read(1, 7, 9).column("text").to_pylist() == ["é 1 7", "é 1 8"]
    config = PipelineConfig(
        datasets=[DatasetConfig(name="d", data_files=str(tmp_path), type="arrayrecord")],
        seed=1,
        cache_dir=str(tmp_path / "c"),
    )
    assert [
        shard.num_rows for shard in Pipeline.from_config(config).source().get_data()["d"].shards
    ] == [50, 50]


def test_tokens(tmp_path: Path) -> None:
    docs = [list(range(n)) for n in range(20)]
    path = write(tmp_path / "t.array_record", [np.array(doc, np.uint16).tobytes() for doc in docs])
    source = open_files(path, token_files=TokenFilesConfig(dtype="uint16"))
    assert_stateless_reads(source, [1, 5])
    assert source.read(0, 0, 20).column("input_ids").to_pylist() == docs
    assert (
        source.fingerprint
        != open_files(path, token_files=TokenFilesConfig(dtype="uint8")).fingerprint
        != open_files(path).fingerprint
    )


def test_fingerprint_follows_the_file(tmp_path: Path) -> None:
    before = open_files(write(tmp_path / "a.array_record", [b"one"]))
    fingerprint = before.fingerprint
    assert before.shards
    write(tmp_path / "a.array_record", [b"one", b"two"])
    assert open_files(tmp_path / "a.array_record").fingerprint != fingerprint
    with pytest.raises(SourceError, match="changed after the source was made"):
        before.read(0, 0, 1)


@pytest.mark.parametrize(
    ("layout", "rows", "message"),
    [
        (None, [b"\xff\xfe"], "row 0: column 'text' is not UTF-8"),
        (
            {"dtype": "uint16"},
            [b"ab", b"abc"],
            "row 1: 3 bytes are not a whole number of uint16 tokens. Check dtype.",
        ),
        ({}, [b"ab"], "records of tokens do not say their dtype"),
        (
            {"dtype": "uint8", "separator_id": 1},
            [b"ab"],
            "separator_id has no effect: every record is a document",
        ),
        (
            {"dtype": "uint8", "document_tokens": 2},
            [b"ab"],
            "document_tokens has no effect: every record is a document",
        ),
    ],
)
def test_bad_records(
    tmp_path: Path, layout: dict[str, Any] | None, rows: list[bytes], message: str
) -> None:
    source = open_files(
        write(tmp_path / "a.array_record", rows),
        token_files=None if layout is None else TokenFilesConfig(**layout),
    )
    with pytest.raises(SourceError) as caught:
        source.read(0, 0, len(rows))
    assert message in str(caught.value)


def test_bad_files(tmp_path: Path) -> None:
    whole = write(tmp_path / "a.array_record", [b"one"] * 100).read_bytes()
    for data, message in (
        (whole[:-40], "or truncated"),
        (b"hello" * 100, "not an ArrayRecord file"),
        (b"", "is empty"),
    ):
        (tmp_path / "b.array_record").write_bytes(data)
        with pytest.raises(SourceError, match=message):
            open_files(tmp_path / "b.array_record").shards  # noqa: B018
    import fsspec

    fsspec.filesystem("memory").pipe_file("/bucket/a.array_record", whole)
    remote = open_files("memory://bucket/a.array_record")
    with pytest.raises(
        SourceError, match=r"ArrayRecord files are read locally only\. Copy them to this machine"
    ):
        remote.shards  # noqa: B018
