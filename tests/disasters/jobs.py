"""The jobs that are killed, each a few files large: what is there before, and what is run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines import jsonl, texts, tokenizer

BAD_ROW = {"text": None}
CONFIG: dict[str, Any] = {
    "datasets": [
        {"name": "code", "data_files": "code.jsonl"},
        {"name": "docs", "data_files": "docs.jsonl", "on_error": "quarantine"},
    ],
    "default_tokenizer": "tokenizer",
    "seed": 7,
    "cache_dir": "cache",
    "tokenize": {"num_workers": 1},
    "pack": {"seq_length": 32},
    "load": {"batch_size": 2, "num_epochs": 1},
}
SAVE = {"output_dir": "saved", "num_shards": 2}
TRAIN = {
    "data": CONFIG,
    "model": {"hidden_size": 16, "intermediate_size": 32, "num_layers": 1, "num_heads": 2},
    "train": {
        "output_dir": "run",
        "steps": 4,
        "seed": 1,
        "optimizer": {"learning_rate": 0.01, "warmup_steps": 1},
        "checkpoint": {"every": 2, "keep": 1},
    },
}


@dataclass(frozen=True)
class Job:
    """before: what has been run when it begins. run: is called in the folder. arrays: needs jax."""

    name: str
    run: Callable[[], object]
    before: tuple[str, ...] = ()
    arrays: bool = False


def command(*arguments: str) -> Callable[[], None]:
    """Ends in SystemExit where the command does not end well."""

    def call() -> None:
        from easypipe.cli import main

        code = main([*arguments])
        if code:
            raise SystemExit(code)

    return call


def tokenize_and_save() -> None:
    import easypipe
    from easypipe.core.protocols import silent

    easypipe.tokenize_and_save(
        "code.jsonl",
        "tokenizer",
        "documents",
        num_shards=2,
        num_workers=1,
        cache_dir="cache",
        progress=silent,
    )


JOBS = {
    job.name: job
    for job in (
        Job("prepare", command("prepare", "run.yaml")),
        Job("tokenize_and_save", tokenize_and_save),
        Job("save", command("prepare", "save.yaml"), before=("prepare",)),
        Job("checkpoint", command("train", "train.yaml", "--samples", "0"), ("prepare",), True),
        Job("export", command("export", "run", "out"), ("prepare", "checkpoint"), True),
        Job("report", command("report", "run"), ("prepare", "checkpoint"), True),
    )
}


def write_inputs(folder: Path) -> None:
    """The data, the tokenizer and the configs of all jobs."""
    folder.mkdir()
    shutil.copytree(tokenizer(), folder / "tokenizer")
    jsonl(folder / "code.jsonl", [{"text": text} for text in texts(20, 3, 12)])
    docs: list[dict[str, Any]] = [{"text": text} for text in texts(24, 5, 12)]
    jsonl(folder / "docs.jsonl", [*docs[:9], BAD_ROW, *docs[9:]])
    for name, values in (
        ("run", CONFIG),
        ("save", CONFIG | {"mix": {"stop_strategy": "all_exhausted"}, "save": SAVE}),
        ("train", TRAIN),
    ):
        (folder / f"{name}.yaml").write_text(json.dumps(values))
