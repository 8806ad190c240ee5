"""Small real datasets and a small real tokenizer for the tests of stages, pipeline and command
line.
"""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import yaml

from easypipe import DatasetConfig, PipelineConfig
from easypipe.core.config import to_dict
from easypipe.transforms.tokenizer.bpe import train_bpe

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
    "import",
    "class",
    "self",
    "value",
]


def texts(count: int, salt: int = 1, longest: int = 40) -> list[str]:
    """Deterministic texts of 1 to `longest` words, no two alike."""
    return [
        f"{salt} {i} "
        + " ".join(
            WORDS[(i * salt + j * j) % len(WORDS)] for j in range(1 + (i * 7919 * salt) % longest)
        )
        for i in range(count)
    ]


@functools.cache
def tokenizer(vocab_size: int = 320) -> str:
    """The folder of a byte-level BPE, trained once per process."""
    folder = Path(tempfile.mkdtemp(prefix="easypipe-test-tokenizer-"))
    return str(train_bpe(texts(200), vocab_size, [], folder / f"bpe{vocab_size}"))


def jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    # a file that is written again counts as changed
    if not (path.exists() and path.read_text() == text):
        path.write_text(text)
    return path


def two_datasets(folder: Path, code: int = 60, docs: int = 90) -> tuple[DatasetConfig, ...]:
    """`code` in two JSONL files, `docs` in one."""
    rows = [{"text": text} for text in texts(code, 3)]
    jsonl(folder / "code" / "a.jsonl", rows[: code // 3])
    jsonl(folder / "code" / "b.jsonl", rows[code // 3 :])
    jsonl(folder / "docs" / "a.jsonl", [{"text": text} for text in texts(docs, 5, 25)])
    return (
        DatasetConfig(name="code", data_files=str(folder / "code" / "*.jsonl")),
        DatasetConfig(name="docs", data_files=str(folder / "docs" / "a.jsonl")),
    )


def config(folder: Path, **options: Any) -> PipelineConfig:
    """Both datasets, the small tokenizer, a seed and a cache of one's own; `options` go on top."""
    values: dict[str, Any] = {
        "default_tokenizer": tokenizer(),
        "seed": 7,
        "cache_dir": folder / "cache",
    }
    values["datasets"] = (
        options.pop("datasets") if "datasets" in options else two_datasets(folder / "data")
    )
    return PipelineConfig(**(values | options))


def mixed_file(folder: Path) -> Path:
    """Writes the config of a pipeline that mixes, packs and saves both datasets."""
    values = to_dict(config(folder)) | {
        "mix": {"weights": {"code": 0.7, "docs": 0.3}, "stop_strategy": "all_exhausted"},
        "pack": {"seq_length": 64},
        "save": {"output_dir": str(folder / "out")},
    }
    path = folder / "pipeline.yaml"
    path.write_text(yaml.safe_dump(values))
    return path
