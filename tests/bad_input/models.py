"""Cases: published models, records of runs, configs of other trainers, the environment, and answers
of a server that a stranger brought last.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from bad_input.case import AWAY, CONFIG, DATA, ROWS, Action, Case, Files, lines
from bad_input.commands import command, remote, said
from easypipe import Pipeline, PipelineConfig
from easypipe.core.config import from_dict, load_yaml

# Published models

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 320,
}
QWEN = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}


def model(
    what: str, says: str, config: Mapping[str, Any] | str = "", files: Files | None = None
) -> Case:
    """A run that begins with a model whose config.json is LLAMA with other values, or that text."""
    run = {"data": CONFIG, "model": {"pretrained": "./m"}, "train": {"output_dir": "run"}}
    own = config if isinstance(config, str) and config else json.dumps(LLAMA | dict(config or {}))
    held = {"m/config.json": own} | {f"m/{name}": data for name, data in (files or {}).items()}
    run["train"] |= {"steps": 1}
    return Case(what, says, files=held, config=json.dumps(run), run=("train", "run.yaml"))


def weights(**header: Any) -> Files:
    """A file of weights with that header, and 20 KB behind it."""
    told = json.dumps(header).encode()
    return {"model.safetensors": struct.pack("<Q", len(told)) + told + bytes(20480)}


AT = "m/config.json: "
SIZE = "is not a whole number from 1. Download the folder again."
FOLDER = "is not a whole safetensors file"
TABLE = "model.embed_tokens.weight"
MODELS = [
    model("config.json that is null", "m/config.json: is not a JSON object", "null"),
    model("config.json of noise", "m/config.json: cannot be read as JSON", "\0"),
    model("hidden_size that is a text", f"{AT}hidden_size: 'big' {SIZE}", {"hidden_size": "big"}),
    model("no heads", f"{AT}num_attention_heads: 0 {SIZE}", {"num_attention_heads": 0}),
    model("layers below zero", f"{AT}num_hidden_layers: -3 {SIZE}", {"num_hidden_layers": -3}),
    model("a vocabulary of 320.0", f"{AT}vocab_size: 320.0 {SIZE}", {"vocab_size": 320.0}),
    model("rms_norm_eps that is a text", f"{AT}rms_norm_eps: 'x' is", {"rms_norm_eps": "x"}),
    model("rope_scaling that is a list", f"{AT}rope_scaling: [1] is", {"rope_scaling": [1]}),
    model(
        "rope_scaling without its factor",
        f"{AT}rope_scaling has no factor",
        {"rope_scaling": {"type": "linear"}},
    ),
    model(
        "a factor that is a text",
        f"{AT}rope_scaling.factor: 'x' is not a number",
        {"rope_scaling": {"type": "linear", "factor": "x"}},
    ),
    model(
        "layer_types that are a number",
        f"{AT}layer_types: 5 is not a list",
        {**QWEN, "sliding_window": 4, "layer_types": 5},
    ),
    model("an unknown model", f"{AT}model_type 'zeta' is not", {"model_type": "zeta"}),
    model("10^9 layers", "num_layers: 1000000000 is too large", {"num_hidden_layers": 10**9}),
    model("no weights", "m/model.safetensors: no such file"),
    model(
        "weights of another shape",
        FOLDER,
        files=weights(**{TABLE: {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 4]}}),
    ),
    model("weights whose header is too long", FOLDER, files={"model.safetensors": b"\xff" * 99}),
    model(
        "an index that names a file of another folder",
        "'../../etc/passwd' is not a file of this folder",
        files={"model.safetensors.index.json": '{"weight_map": {"a": "../../etc/passwd"}}'},
    ),
]


# Records of runs


def records(command: str, says: str, line: str) -> Case:
    """A run whose metrics are that line."""
    where = "r" if command == "report" else "."
    what = f"`easypipe {command}` of metrics {line}"
    return Case(what, says, files={"r/metrics.jsonl": f"{line}\n"}, run=(command, where))


BROKEN = (
    '{"step": 1, "loss": "x"}',
    '{"step": 1, "loss": [1]}',
    '{"step": 1, "eval": 5}',
    '{"step": 1, "eval": {"a": {"loss": "x"}}}',
)


def listed(config: str) -> Action:
    """Lists a run that goes on although its run.yaml was edited."""

    def act(folder: Path) -> None:
        from easypipe.cli import main

        (folder / "r").mkdir()
        (folder / "r/metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
        (folder / "r/run.yaml").write_text(config)
        assert main(["runs", "."]) == 0

    return act


RUNS = [
    *(records("report", "r/metrics.jsonl, line 1: not a metrics record", line) for line in BROKEN),
    Case("`easypipe runs` of a run whose `train` is a number", None, run=listed("train: 5")),
    Case("`easypipe runs` of a run whose steps are a text", None, run=listed("train: {steps: x}")),
    Case(
        "checkpoints that are a file",
        "run/checkpoints: cannot hold checkpoints … Give another train.output_dir.",
        files={"run/checkpoints": "x"},
        config=json.dumps(
            {
                "data": CONFIG,
                "model": {"hidden_size": 16, "num_layers": 1, "num_heads": 2},
                "train": {"output_dir": "run", "steps": 1},
            }
        ),
        run=("train", "run.yaml"),
    ),
]


# Other trainers


def foreign(tool: str, says: str | None, text: str) -> Case:
    what = f"`easypipe import {tool}` of {text!r:.50}"
    return Case(what, says, files={"theirs.yml": text}, run=("import", tool, "theirs.yml"))


IMPORTED = [
    foreign("axolotl", "theirs.yml: expected a mapping", "- a\n"),
    foreign("axolotl", "theirs.yml: names no dataset", "{base_model: x, datasets: null}\n"),
    foreign(
        "axolotl", "theirs.yml, datasets: 'a' is nothing that axolotl reads", "{datasets: a}\n"
    ),
    foreign("trl", "theirs.yml: expected a mapping", ""),
    foreign("llamafactory", "theirs.yml, dataset: 5 is nothing that", "{dataset: 5, stage: sft}\n"),
]


# The environment, and what may stand where a file of the cache was


def within(**given: str) -> Action:
    """Prepares with these variables of the environment."""

    def act(folder: Path) -> None:
        with mock.patch.dict(os.environ, given):
            prepare(folder)

    return act


def prepare(folder: Path) -> None:
    config = from_dict(PipelineConfig, load_yaml(folder / "run.yaml"))
    Pipeline.from_config(config).source().tokenize().mix().pack().load().prepare()


def in_place(pattern: str, make: Callable[[Path], object]) -> Action:
    """Puts something else in the place of the file that the pattern finds."""

    def act(folder: Path) -> None:
        [path] = folder.glob(pattern)
        path.unlink()
        make(path)

    return act


def link(path: Path) -> None:
    path.symlink_to(path.name)


QUARANTINED = {
    "datasets.0.data_files": "bad.jsonl",
    "datasets.0.on_error": "quarantine",
    "datasets.0.max_bad_rows": 1,
}
BAD = {"bad.jsonl": lines([*ROWS, {"text": None}])}
TOKENS, KEPT = "cache/tokens/*/*.arrow", "cache/manifests/*.quarantine.jsonl"
PLACES = [
    Case(
        "EASYPIPE_CACHE whose bytes are not UTF-8",
        None,
        options={"cache_dir": AWAY},
        run=within(EASYPIPE_CACHE="cache\udcff"),
    ),
    Case(
        "EASYPIPE_CACHE that is a file",
        "data.jsonl is a file. Give a folder.",
        options={"cache_dir": AWAY},
        run=within(EASYPIPE_CACHE="data.jsonl"),
    ),
    Case(
        "a pipe in place of tokens",
        "is a pipe, a socket or a device",
        damage=in_place(TOKENS, os.mkfifo),
    ),
    Case("a link to itself in place of tokens", None, damage=in_place(TOKENS, link)),
    Case(
        "a pipe in place of a quarantine file",
        ".quarantine.jsonl: cannot be written … it is a pipe",
        files=BAD,
        options=QUARANTINED,
        damage=in_place(KEPT, os.mkfifo),
    ),
    Case(
        "a folder in place of a quarantine file",
        ".quarantine.jsonl: cannot be written",
        files=BAD,
        options=QUARANTINED,
        damage=in_place(KEPT, Path.mkdir),
    ),
    Case(
        "a link to itself in place of a quarantine file",
        None,
        files=BAD,
        options=QUARANTINED,
        damage=in_place(KEPT, link),
    ),
]


# Masks and pairs

MASKS = [
    Case(
        "`easypipe masks` of no conversations",
        "chats.jsonl: holds no conversation",
        files={"chats.jsonl": ""},
        run=("masks", "chatml", "--messages", "chats.jsonl"),
    ),
    command("source: 'nowhere.jinja' is neither a file nor", "masks", "nowhere.jinja"),
    Case(
        "a pair without its rejected answer",
        "pairs.jsonl, row 1 … column 'rejected' has no text. Correct the row",
        files={
            "pairs.jsonl": lines(
                [{"prompt": "a", "chosen": "b", "rejected": "c"}, {"prompt": "a", "chosen": "b"}]
            )
        },
        options={
            "datasets.0.data_files": "pairs.jsonl",
            "datasets.0.prompt_field": "prompt",
            "datasets.0.completion_field": "chosen",
            "datasets.0.rejected_field": "rejected",
            "pack.oversize": "drop",
        },
    ),
]


# Servers

SERVERS = [
    remote("a redirect to nowhere", "a.jsonl: … HTTP 301 came in place of the file", said(301)),
    remote("no content", "a.jsonl: … HTTP 204 came in place of the file", said(204)),
    remote(
        "half of the file, each time",
        "gave up after 5 attempts … 816 of 1632 bytes came",
        said(200, DATA.encode(), Content_Length=str(2 * len(DATA))),
    ),
]

KINDS: dict[str, list[Case]] = {
    "Published models": MODELS,
    "Records of runs": RUNS,
    "Configs of other trainers": IMPORTED,
    "The environment, and what stands in place of a file": PLACES,
    "Masks and pairs": MASKS,
    "Servers that send no file": SERVERS,
}
