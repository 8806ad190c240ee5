"""Sixty refusals, word for word: configs, files with their rows and lines, chains, states, and what
streaming does not do.
"""

from __future__ import annotations

import copy
import dataclasses
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from easypipe import (
    EasypipeError,
    LoaderState,
    MixStageConfig,
    Pipeline,
    SaveStageConfig,
    TokenizeStageConfig,
    load_saved,
    load_tokenizer,
)
from easypipe.core.config import from_dict
from easypipe.core.schema import INPUT_IDS
from easypipe.run import RunConfig
from easypipe.stages.streamable import require_streamable
from golden.batches import chain, load, pack
from golden.cases import golden
from golden.data import TOKENIZER, chats, config, pairs, rows_of, two_datasets, write
from golden.digests import message


def _base(folder: Path) -> dict[str, Any]:
    two_datasets(folder / "data")
    return {
        "datasets": [
            {"name": "code", "data_files": str(folder / "data" / "code" / "*.jsonl")},
            {"name": "docs", "data_files": str(folder / "data" / "docs" / "a.parquet")},
        ],
        "default_tokenizer": str(TOKENIZER),
        "seed": 7,
        "cache_dir": str(folder / "cache"),
        "mix": {"weights": {"code": 0.6, "docs": 0.4}, "stop_strategy": "all_exhausted"},
        "pack": {"seq_length": 48},
        "load": {"batch_size": 4},
    }


# What is put into a config that is right: (key path, value); "-" takes the key away
CONFIGS: dict[str, list[tuple[str, Any]]] = {
    "unknown_key": [("pack.seq_len", 48)],
    "unknown_section": [("packing", {})],
    "no_datasets": [("datasets", [])],
    "twice_the_same_name": [("datasets.1.name", "code")],
    "weight_of_nobody": [("mix.weights", {"cod": 0.5, "docs": 0.5})],
    "weight_missing": [("mix.weights", {"code": 1.0})],
    "weight_below_zero": [("mix.weights", {"code": -1.0, "docs": 0.5})],
    "weight_of_text": [("mix.weights", {"code": "much", "docs": 0.5})],
    "no_such_strategy": [("pack.strategy", "greedi")],
    "row_of_nothing": [("pack.seq_length", 0)],
    "batch_of_nothing": [("load.batch_size", 0)],
    "epochs_of_nothing": [("load.num_epochs", 0)],
    "micro_batches_that_do_not_divide": [("load.accumulation_steps", 3)],
    "seed_below_zero": [("seed", -1)],
    "schedule_backwards": [
        ("mix.weights", "-"),
        (
            "mix.weight_schedule",
            [
                {"step": 9, "weights": {"code": 1, "docs": 1}},
                {"step": 3, "weights": {"code": 1, "docs": 1}},
            ],
        ),
    ],
    "weights_and_schedule": [
        ("mix.weight_schedule", [{"step": 0, "weights": {"code": 1, "docs": 1}}])
    ],
    "cap_of_nobody": [("mix.max_epochs", {"dogs": 1})],
    "eos_that_differs": [("pack.eos_token_id", 5)],
    "no_such_file": [("datasets.0.data_files", "<0>/data/code/*.json")],
    "no_such_type": [("datasets.0.type", "jsn")],
    "no_such_column": [("datasets.0.content_field", "txt")],
    "no_such_tokenizer": [("default_tokenizer", "<0>/tokenizer")],
    "no_tokenizer": [("default_tokenizer", "-")],
    "completion_without_prompt": [("datasets.0.completion_field", "text")],
    "train_on_of_plain_text": [("datasets.0.train_on", "assistant")],
    "streams_that_do_not_divide": [("streaming", True), ("num_streams", 3)],
    "streaming_quarantine": [("streaming", True), ("datasets.0.on_error", "quarantine")],
    "streaming_cached": [("streaming", True), ("executor", "ray")],
    "streaming_grouped": [("streaming", True), ("load.group_by_length", 4)],
    "streaming_blocks": [("streaming", True), ("order.block_rows", 4)],
    "streams_of_nothing": [("num_streams", 2)],
    "streaming_pairs": [
        ("streaming", True),
        ("datasets.0.prompt_field", "text"),
        ("datasets.0.completion_field", "n"),
        ("datasets.0.rejected_field", "other"),
    ],
    "unpacked_truncation": [("pack", "-"), ("tokenize", {"max_length": 0})],
    "schedule_of_batches_backwards": [("load.batch_size_schedule", [[9, 8], [3, 16]])],
    "template_and_field": [("datasets.0.prompt", {"format_type": "custom"})],
    "no_such_mesh_axis": [("load.mesh", {"rows": 2})],
    "prefetch_of_nobody": [("load.prefetch_workers", 0)],
}

# Files that cannot be read, and the options of their dataset
FILES: dict[str, tuple[str, Callable[[Path], Any], dict[str, Any]]] = {
    "broken_line": (
        "a.jsonl",
        lambda p: p.write_text('{"text": "one"}\n{"text": \n{"text": "three"}\n'),
        {},
    ),
    "null_text": ("a.jsonl", lambda p: p.write_text('{"text": "one"}\n{"text": null}\n'), {}),
    "number_for_text": ("a.jsonl", lambda p: p.write_text('{"text": 5}\n'), {}),
    "no_object": ("a.jsonl", lambda p: p.write_text('{"text": "one"}\n[1, 2]\n'), {}),
    "not_utf8": (
        "a.jsonl",
        lambda p: p.write_bytes(b'{"text": "one"}\n{"text": "\xff\xfe"}\n'),
        {},
    ),
    "empty_file": ("a.jsonl", lambda p: p.write_bytes(b""), {}),
    "cut_gzip": (
        "a.jsonl.gz",
        lambda p: p.write_bytes(gzip.compress(b'{"text": "one"}\n' * 500, mtime=0)[:-20]),
        {},
    ),
    "no_gzip": ("a.jsonl.gz", lambda p: p.write_bytes(b'{"text": "one"}\n'), {}),
    "no_parquet": ("a.parquet", lambda p: p.write_bytes(b"PAR1 not so"), {}),
    "number_column": ("a.parquet", lambda p: pq.write_table(pa.table({"text": [1, 2]}), p), {}),
    "too_many_cells": ("a.csv", lambda p: p.write_text("text,n\none,1\ntwo,2,3\n"), {}),
    "open_quote": ("a.csv", lambda p: p.write_text('text,n\none,1\n"two,2\n'), {}),
    "budget": (
        "a.jsonl",
        lambda p: p.write_text("{broken\n" * 4 + '{"text": "one"}\n'),
        {"on_error": "skip", "max_bad_rows": 2},
    ),
    "array_cut": ("a.json", lambda p: p.write_text('[{"text": "one"}, {"text": "two"'), {}),
    "role_of_nobody": (
        "a.jsonl",
        lambda p: p.write_text(
            json.dumps({"messages": [{"role": "user", "content": "a"}, {"content": "b"}]}) + "\n"
        ),
        {"content_field": "messages"},
    ),
    "no_answer": (
        "a.jsonl",
        lambda p: p.write_text(json.dumps({"messages": [{"role": "user", "content": "a"}]}) + "\n"),
        {"content_field": "messages", "train_on": "assistant"},
    ),
    "content_of_numbers": (
        "a.jsonl",
        lambda p: p.write_text(json.dumps({"messages": [{"role": "user", "content": 5}]}) + "\n"),
        {"content_field": "messages"},
    ),
    "completion_missing": (
        "a.jsonl",
        lambda p: write(p, [{"prompt": "a"}]),
        {"prompt_field": "prompt", "completion_field": "answer"},
    ),
    "rejected_missing": (
        "a.jsonl",
        lambda p: write(p, pairs(2)),
        {
            "prompt": {
                "format_type": "prompt_completion",
                "input_columns": ["prompt"],
                "label_column": "chosen",
                "rejected_column": "worse",
            }
        },
    ),
    "split_of_nothing": ("a.jsonl", lambda p: write(p, rows_of(3, 3)), {"split": "train[5:5]"}),
    "split_unreadable": ("a.jsonl", lambda p: write(p, rows_of(3, 3)), {"split": "train[5"}),
    "labels_that_differ": (
        "a.parquet",
        lambda p: pq.write_table(pa.table({INPUT_IDS: [[5, 6, 7]], "labels": [[6, 7, 8]]}), p),
        {},
    ),
    "ids_out_of_range": (
        "a.parquet",
        lambda p: pq.write_table(pa.table({INPUT_IDS: [[5, 6, 70_000]]}), p),
        {},
    ),
    "chat_as_text": (
        "a.jsonl",
        lambda p: write(p, chats(2)),
        {"content_field": "messages", "chat_template": "{{ messages[0].nothing.more }}"},
    ),
}


@golden(*CONFIGS)
def of_configs(folder: Path, name: str) -> Any:
    values = _base(folder)
    for path, value in copy.deepcopy(CONFIGS[name]):
        *way, last = path.split(".")
        place: Any = values
        for key in way:
            place = place[int(key)] if isinstance(place, list) else place.setdefault(key, {})
        value = value.replace("<0>", str(folder)) if isinstance(value, str) else value
        if value == "-":
            del place[last]
        else:
            place[last] = value
    return _refusal(lambda: _first_batch(Pipeline.from_config(values)), folder)


@golden(*FILES)
def of_files(folder: Path, name: str) -> Any:
    file, make, options = FILES[name]
    make(folder / file)
    values = _base(folder) | {
        "datasets": [{"name": "data", "data_files": str(folder / file)} | options]
    }
    del values["mix"]
    return _refusal(lambda: _first_batch(Pipeline.from_config(values)), folder)


def _first_batch(pipeline: Pipeline) -> Any:
    made = pipeline.get_context().config
    return next(iter(chain(made).build()))


def _of_state(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], Any]:
    def run(folder: Path) -> Any:
        state = chain(from_dict(type(config(folder)), _base(folder))).build().state_at(2).to_json()
        return LoaderState.from_json(change(json.loads(state)))

    return run


CALLS: dict[str, Callable[[Path], Any]] = {
    "state_altered": _of_state(lambda values: json.dumps(values | {"row": 99})),
    "state_of_another_version": _of_state(lambda values: json.dumps(values | {"version": 99})),
    "state_of_nothing": lambda d: LoaderState.from_json("not so"),
    "tokenize_first": lambda d: Pipeline(config(d)).tokenize(),
    "load_twice": lambda d: Pipeline(config(d)).source().tokenize().mix().pack().load().load(),
    "unmixed": lambda d: Pipeline(config(d)).source().tokenize().load().build(),
    "nothing_to_build": lambda d: Pipeline(config(d)).source().build(),
    "explain_behind_the_end": lambda d: (
        chain(from_dict(type(config(d)), _base(d))).build().explain(10_000)
    ),
    "restored_elsewhere": lambda d: _restored_elsewhere(d),
    "no_saved_folder": lambda d: load_saved(d / "nowhere"),
    "no_tokenizer_folder": lambda d: load_tokenizer(str(d)),
    "run_without_train": lambda d: from_dict(RunConfig, {"data": _base(d)}),
    "streaming_explain": lambda d: _streaming(d).build().explain(0),
    "streaming_len": lambda d: len(_streaming(d).build()),
    "streaming_state_at": lambda d: _streaming(d).build().state_at(3),
    "streaming_plan": lambda d: _streaming(d).plan(),
    "streaming_ledger": lambda d: _streaming(d).ledger(),
    "streaming_part": lambda d: _streaming(d).prepare_part(0, 2),
    "streaming_save": lambda d: (
        Pipeline.from_config(_base(d) | {"streaming": True})
        .source()
        .tokenize()
        .save(SaveStageConfig(output_dir=d / "out"))
    ),
}


def _streaming(folder: Path) -> Pipeline:
    return chain(from_dict(type(config(folder)), _base(folder) | {"streaming": True}))


@golden()
def options_that_streaming_refuses(folder: Path) -> Any:
    """Every option of a stage that is not there in streaming, with the reason."""
    found = {}
    stages = {
        "tokenize": TokenizeStageConfig(),
        "mix": MixStageConfig(),
        "pack": pack(),
        "load": load(),
    }
    for stage, options in stages.items():
        for field in dataclasses.fields(options):
            asked = copy.copy(options)
            object.__setattr__(asked, field.name, "another value")
            said = _refusal(lambda at=stage, asked=asked: require_streamable(at, asked), folder)
            if said != "runs":
                found[f"{stage}.{field.name}"] = said
    return found


def _restored_elsewhere(folder: Path) -> Any:
    base = _base(folder)
    state = chain(from_dict(type(config(folder)), base)).build().state_at(2)
    other = chain(
        from_dict(type(config(folder)), base | {"seed": 8, "load": {"batch_size": 8}})
    ).build()
    return other.restore(state)


@golden(*CALLS)
def of_calls(folder: Path, name: str) -> Any:
    return _refusal(lambda: CALLS[name](folder), folder)


def _refusal(run: Callable[[], Any], folder: Path) -> str:
    try:
        run()
    except (EasypipeError, TypeError) as error:
        return message(error, folder, TOKENIZER)
    return "runs"
