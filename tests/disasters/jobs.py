"""The jobs that are killed, each a few files large: what is there before, and what is run."""

from __future__ import annotations

import hashlib
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
    """before: what has been run when it begins. run: is called in the folder. arrays: needs jax.

    processes: as many run it at the same time, and meet by jax.distributed; `struck` is the one
    that is struck.
    """

    name: str
    run: Callable[[], object]
    before: tuple[str, ...] = ()
    arrays: bool = False
    processes: int = 1
    struck: int = 0


def command(*arguments: str) -> Callable[[], None]:
    """Ends in SystemExit where the command does not end well."""

    def call() -> None:
        from easypipe.cli import main

        code = main([*arguments])
        if code:
            raise SystemExit(code)

    return call


TRAINED = command("train", "train.yaml", "--samples", "0")
BY_FOUR = command("train", "train_by_four.yaml", "--samples", "0")


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


def read_batches(*gone: str, state: bool = True) -> Callable[[], None]:
    """Removes what the patterns name, then makes every batch of save.yaml. Prints a digest of them.

    state: whether from a loader state that is written once and read afterwards.
    """

    def call() -> None:
        from easypipe import LoaderState, Pipeline
        from easypipe.core.config import from_dict, load_yaml
        from easypipe.stages.config import PipelineConfig

        for pattern in gone:
            for path in Path().glob(pattern):
                path.unlink()
        config = from_dict(PipelineConfig, load_yaml("save.yaml"))
        loader = Pipeline.from_config(config).source().tokenize().mix().pack().load().build()
        file = Path("state.json")
        if state and not file.exists():
            file.write_text(loader.state().to_json())
        if state:
            loader.restore(LoaderState.from_json(file.read_text(errors="replace")))
        hasher = hashlib.sha256()
        for batch in loader:
            for name in sorted(batch):
                hasher.update(bytes(memoryview(batch[name]).cast("B")))
        print("digest", hasher.hexdigest())

    return call


def read_saved() -> None:
    """Prints a digest of the rows of the saved folder."""
    from easypipe import load_saved

    source = load_saved("saved")
    hasher = hashlib.sha256()
    for number, shard in enumerate(source.shards):
        hasher.update(repr(source.read(number, 0, shard.num_rows or 0).to_pydict()).encode())
    print("digest", hasher.hexdigest())


JOBS = {
    job.name: job
    for job in (
        Job("prepare", command("prepare", "run.yaml")),
        Job("tokenize_and_save", tokenize_and_save),
        Job("save", command("prepare", "save.yaml"), before=("prepare",)),
        Job("checkpoint", TRAINED, ("prepare",), True),
        Job("export", command("export", "run", "out"), ("prepare", "checkpoint"), True),
        Job("report", command("report", "run"), ("prepare", "checkpoint"), True),
        Job("first of two processes", TRAINED, ("prepare",), True, processes=2),
        Job("second of two processes", TRAINED, ("prepare",), True, processes=2, struck=1),
        Job("third of four processes", BY_FOUR, ("prepare",), True, processes=4, struck=2),
    )
}
READERS = {
    job.name: job
    for job in (
        Job("batches", read_batches(), ("save",)),
        Job("batches, manifests gone", read_batches("cache/manifests/*.json"), ("save",)),
        Job(
            "batches, records gone",
            read_batches("cache/manifests/*.json", "cache/ranges/*/*"),
            ("save",),
        ),
        Job(
            "batches, tokens gone",
            read_batches("cache/manifests/*.json", "cache/tokens/*/*", "cache/ranges/*/*"),
            ("save",),
        ),
        Job("rows of the saved folder", read_saved, ("save",)),
        Job("save again", command("prepare", "save.yaml"), ("save",)),
        Job(
            "train again",
            TRAINED,
            ("checkpoint",),
            True,
        ),
        Job("export", command("export", "run", "out"), ("checkpoint",), True),
        Job("report", command("report", "run"), ("checkpoint",), True),
        Job(
            "report of a run that went on",
            command("report", "run"),
            ("checkpoint", "train again"),
            True,
        ),
    )
}
# what several processes do to one folder at the same time
TOGETHER = {
    job.name: job
    for job in (
        Job("read", read_batches(state=False)),
        Job("clear", command("cache", "clear", "--cache-dir", "cache")),
        Job("train", TRAINED, arrays=True),
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
        ("train_by_four", TRAIN | {"data": CONFIG | {"load": {"batch_size": 4, "num_epochs": 1}}}),
    ):
        (folder / f"{name}.yaml").write_text(json.dumps(values))
