"""The small data of the golden cases: the same bytes on every machine, by arithmetic; the tokenizer
is kept beside it.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import struct
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from easypipe import DatasetConfig, PipelineConfig, TokenFilesConfig

TOKENIZER = Path(__file__).parent / "saved" / "tokenizer"
WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "while",
    "def",
    "return",
    "naïve",
    "日本",
    "self",
    "\n",
    "“so”",
]


def texts(count: int, salt: int, longest: int = 30) -> list[str]:
    """Texts of 1 to `longest` words, no two alike."""
    return [
        f"{salt} {i} "
        + " ".join(
            WORDS[(i * salt + j * j) % len(WORDS)] for j in range(1 + (i * 7919 * salt) % longest)
        )
        for i in range(count)
    ]


def rows_of(count: int, salt: int, longest: int = 30) -> list[dict[str, Any]]:
    return [{"text": text, "n": i} for i, text in enumerate(texts(count, salt, longest))]


def chats(count: int) -> list[dict[str, Any]]:
    """Conversations of one to three turns; every third has a system message."""
    made = []
    for i, text in enumerate(texts(count, 11, 12)):
        messages = [{"role": "system", "content": f"be {i}"}] if i % 3 == 0 else []
        for turn in range(1 + i % 3):
            messages += [
                {"role": "user", "content": f"{text} {turn}"},
                {"role": "assistant", "content": f"answer {turn} to {i}, " + text[:20]},
            ]
        made.append({"messages": messages})
    return made


def pairs(count: int) -> list[dict[str, Any]]:
    return [
        {
            "prompt": f"ask {text}",
            "completion": f"yes, {i}",
            "chosen": f"yes {i}",
            "rejected": f"no {text[:9]}",
        }
        for i, text in enumerate(texts(count, 13, 9))
    ]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    """In the format that the name of `path` ends with. What stands there already stays: a file that
    is written again counts as changed.
    """
    made = path.with_name(f".made-{path.name}.json")
    rows_json = json.dumps(rows, ensure_ascii=False)
    if made.exists() and made.read_text(encoding="utf-8") == rows_json:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    made.write_text(rows_json, encoding="utf-8")
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    name = path.name
    if name.endswith((".parquet", ".arrow", ".feather")):
        table = pa.Table.from_pylist(rows)
        if name.endswith(".parquet"):
            pq.write_table(table, path, row_group_size=max(1, len(rows) // 3))
        else:
            with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
                writer.write_table(table, max_chunksize=max(1, len(rows) // 3))
        return path
    if name.endswith(".tar"):
        with tarfile.open(path, "w") as tar:
            for i, row in enumerate(rows):
                member = tarfile.TarInfo(f"{i:04}.text")
                member.size = len(data := row["text"].encode())
                tar.addfile(member, io.BytesIO(data))
        return path
    if name.endswith(".mds"):
        path.write_bytes(_mds([row["text"].encode() for row in rows]))
        return path
    if ".csv" in name or ".tsv" in name:
        text = io.StringIO()
        writer = csv.DictWriter(
            text, list(rows[0]), lineterminator="\n", delimiter="\t" if ".tsv" in name else ","
        )
        writer.writeheader()
        writer.writerows(rows)
        lines = text.getvalue().encode()
    elif ".txt" in name:
        lines = "".join(row["text"].replace("\n", " ") + "\n" for row in rows).encode()
    elif ".json" in name and ".jsonl" not in name:
        lines = json.dumps(rows, ensure_ascii=False, indent=1).encode()
    if name.endswith(".gz"):
        lines = gzip.compress(lines, mtime=0)
    elif name.endswith(".bz2"):
        lines = bz2.compress(lines)
    elif name.endswith(".zst"):
        frames = [lines[i : i + 2000] for i in range(0, len(lines), 2000)]
        lines = b"".join(zstandard.ZstdCompressor().compress(frame) for frame in frames)
    path.write_bytes(lines)
    return path


def _mds(rows: list[bytes]) -> bytes:
    """A shard of MosaicML streaming with one column of text."""
    columns = {"column_names": ["text"], "column_encodings": ["str"], "column_sizes": [None]}
    header = json.dumps(columns).encode()
    data = [struct.pack("<I", len(row)) + row for row in rows]
    ends = np.cumsum([4 + 4 * (len(rows) + 1) + len(header), *map(len, data)])
    return struct.pack(f"<{len(rows) + 2}I", len(rows), *ends) + header + b"".join(data)


def two_datasets(folder: Path, code: int = 60, docs: int = 90) -> tuple[DatasetConfig, ...]:
    """`code` in two JSONL files, `docs` in one parquet file of three row groups."""
    rows = rows_of(code, 3)
    write(folder / "code" / "a.jsonl", rows[: code // 3])
    write(folder / "code" / "b.jsonl", rows[code // 3 :])
    write(folder / "docs" / "a.parquet", rows_of(docs, 5, 25))
    return (
        DatasetConfig(name="code", data_files=str(folder / "code" / "*.jsonl")),
        DatasetConfig(name="docs", data_files=str(folder / "docs" / "a.parquet")),
    )


def one_dataset(
    path: Path, rows: list[dict[str, Any]], **options: Any
) -> tuple[DatasetConfig, ...]:
    return (DatasetConfig(name="data", data_files=str(write(path, rows)), **options),)


def token_files(folder: Path) -> tuple[DatasetConfig, ...]:
    """Documents of ids in .npy, cut at the tokenizer's EOS (id 0)."""
    folder.mkdir(parents=True, exist_ok=True)
    ids = np.concatenate([np.append(np.arange(5, 5 + 1 + i % 40), 0) for i in range(80)]).astype(
        np.uint16
    )
    np.save(folder / "ids.npy", ids)
    return (
        DatasetConfig(
            name="tokens",
            data_files=str(folder / "ids.npy"),
            type="tokens",
            token_files=TokenFilesConfig(separator_id=0),
        ),
    )


def config(folder: Path, **options: Any) -> PipelineConfig:
    """Both datasets, the kept tokenizer, a seed and a cache of one's own; `options` go on top."""
    values: dict[str, Any] = {
        "default_tokenizer": str(TOKENIZER),
        "seed": 7,
        "cache_dir": folder / "cache",
    }
    if "datasets" not in options:
        values["datasets"] = two_datasets(folder / "data")
    return PipelineConfig(**(values | options))
