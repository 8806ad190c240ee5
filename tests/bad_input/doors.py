"""Cases of a second stranger: numbers of YAML 1.1, bytes between records, lists beside tokens, sizes
that no machine holds, folders that nothing tells of, and calls of Python that cannot be meant.
"""

from __future__ import annotations

import gzip
import io
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import easypipe
from bad_input.case import CONFIG, DATA, Case, lines
from bad_input.commands import command
from bad_input.strange import TEXTS, tar
from easypipe import Pipeline, PipelineConfig
from easypipe.core.config import from_dict, load_yaml

PLAIN = (
    "datasets: [{name: web, data_files: data.jsonl}]\n"
    "default_tokenizer: tokenizer\nseed: 7\ncache_dir: cache\n"
)


def packed(value: str, says: str | None) -> Case:
    text = f"{PLAIN}pack: {{seq_length: {value}}}\n"
    return Case(f"`seq_length: {value}`", says, config=text)


def named(value: str, says: str | None) -> Case:
    return Case(f"`name: {value}`", says, config=PLAIN.replace("web", value))


YAML = [
    packed("1:30", "pack.seq_length: wants a whole number, got '1:30'"),
    packed("010", "pack.seq_length: wants a whole number, got '010'"),
    packed("1_024", None),
    packed("0x20", None),
    packed("1e3", "pack.seq_length: wants a whole number … Write 1000."),
    packed("2k", "pack.seq_length: wants a whole number, got '2k'"),
    packed("“32”", "pack.seq_length: wants a whole number"),
    named("no", "datasets[0].name: wants a text, got False"),
    named("2024-01-01", None),
    named("12:30", None),
    command("pack..x=5: not of the form", "prepare", "run.yaml", "--set", "pack..x=5"),
    command("pack.=5: not of the form", "prepare", "run.yaml", "--set", "pack.=5"),
]


# Data files


def file(what: str, says: str | None, name: str, content: bytes | str, **options: Any) -> Case:
    chosen = {"datasets.0.data_files": name}
    chosen |= {f"datasets.0.{key}": value for key, value in options.items()}
    return Case(what, says, files={name: content}, options=chosen)


def arrow(texts: list[str]) -> bytes:
    out, table = io.BytesIO(), pa.table({"text": texts})
    with pa.ipc.new_file(out, table.schema) as writer:
        writer.write_table(table)
    return out.getvalue()


def npy(array: Any) -> bytes:
    out = io.BytesIO()
    np.save(out, array, allow_pickle=True)
    return out.getvalue()


def megatron(what: str, says: str | None, lengths: list[int], at: list[int], **counts: int) -> Case:
    told = struct.pack("<QBQQ", 1, 8, counts.get("rows", 2), counts.get("documents", 3))
    index = b"MMIDIDX\0\0" + told + np.array(lengths, np.int32).tobytes()
    index += np.array(at, np.int64).tobytes() + np.array([0, 1, 2], np.int64).tobytes()
    files = {"a.bin": np.arange(10, dtype=np.uint16).tobytes(), "a.idx": index}
    return Case(f"Megatron: {what}", says, files=files, options={"datasets.0.data_files": "a.bin"})


RAW, MARK = DATA.encode(), b"\xef\xbb\xbf"
LONG, SHORT = "x" * 7777, "y" * 10
ARROW = arrow([LONG, SHORT])
WIDE = ",".join(f"c{i}" for i in range(20_000)) + "\n" + ",".join("1" * 20_000) + "\n"
TOKENS = np.arange(12, dtype=np.int32).reshape(4, 3)
FILES = [
    file("a byte order mark between two files", "row 20 … BOM", "a.jsonl", RAW + MARK + RAW),
    file("line ends of old Macs", "row 0", "a.jsonl", RAW.replace(b"\n", b"\r")),
    file("commas behind the rows", "row 0", "a.jsonl", RAW.replace(b"}\n", b"},\n")),
    file("rows below a key", "have: data", "a.json", '{"data": [{"text": "a b"}]}'),
    file("an array of texts", "row 0 … expected an object", "a.json", '["a", "b"]'),
    file("gz within gz", "row 0", "a.jsonl.gz", gzip.compress(gzip.compress(RAW))),
    file("gz with other bytes behind it", "damaged gz", "a.jsonl.gz", gzip.compress(RAW) + b"xyz"),
    file("two gz members", None, "a.jsonl.gz", gzip.compress(RAW) + gzip.compress(RAW)),
    file(
        "Arrow: a text that ends behind the file",
        "a.arrow",
        "a.arrow",
        ARROW.replace(struct.pack("<ii", 0, 7777), struct.pack("<ii", 0, 1 << 20)),
    ),
    file(
        "Arrow: a text that ends before it begins",
        "a.arrow",
        "a.arrow",
        ARROW.replace(struct.pack("<ii", 7777, 7787), struct.pack("<ii", 7777, -3)),
    ),
    file("20,000 columns", None, "a.csv", WIDE, content_field="c0"),
    file("npy of three dimensions", "shape (2, 2, 3)", "a.npy", npy(TOKENS.reshape(2, 2, 3))),
    file("npy in Fortran order", "Fortran", "a.npy", npy(np.asfortranarray(TOKENS))),
    file("npy of objects", "a.npy: an array of |O", "a.npy", npy(np.array([[1], [2, 3]], object))),
    file("npy of another size", "truncated", "a.npy", npy(TOKENS).replace(b"(4, 3)", b"(9, 9)")),
    file(
        "a separator that no token of the type is",
        "a.bin: no token of uint8 is 999",
        "a.bin",
        bytes(range(10)),
        token_files={"dtype": "uint8", "separator_id": 999},
    ),
    megatron("a good index", None, [5, 5], [0, 10]),
    megatron("10^15 rows", "a.idx … truncated", [5, 5], [0, 10], rows=10**15),
    megatron("10^15 documents", "a.idx … truncated", [5, 5], [0, 10], documents=10**15),
    megatron("a length below zero", "a.idx, row 1", [5, -5], [0, 10]),
    megatron("a place behind the end", "a.bin", [5, 5], [0, 10**12]),
    megatron("a place before the file", "a.idx, row 0", [5, 5], [-10, 10]),
    Case(
        "a folder of tars",
        "t: the folder holds no data file … It has files that are read with type='webdataset'.",
        files={"t/a.tar": tar(*TEXTS)},
        options={"datasets.0.data_files": "t"},
    ),
    Case(
        "`easypipe discover` of a folder of tars",
        "t: the folder holds no data file … type='webdataset'",
        files={"t/a.tar": tar(*TEXTS)},
        run=("discover", "t"),
    ),
    file(
        "a tar with a link to a file of this machine",
        None,
        "a.tar",
        tar(*TEXTS),
        content_field="txt",
    ),
]


# Tokens that were made before


def row(what: str, says: str | None, **columns: Any) -> Case:
    """One row of tokens."""
    values = {"input_ids": [1, 2, 3, 4]} | columns
    return file(what, says, "t.jsonl", lines([values]))


LISTS = "expected lists of integers … Give such lists"
TOKEN_ROWS = [
    row("a mask that is too short", "row 0, column 'loss_mask': not as long", loss_mask=[1]),
    row("a mask of fractions", LISTS, loss_mask=[0, 0.5, 1, 1]),
    row("a mask that is a text", LISTS, loss_mask="1111"),
    row("labels that are too short", "row 0, column 'labels': not as long", labels=[1]),
    row("labels that are shifted", "row 0, column 'labels': token 0", labels=[2, 3, 4, 5]),
    row("a null among the tokens", "row 0, column 'input_ids': a null", input_ids=[1, None]),
    row("tokens that are true and false", LISTS, input_ids=[True, False]),
    row("tokens within lists", LISTS, input_ids=[[1, 2]]),
    row("tokens that are a text", LISTS, input_ids="1 2"),
    row("padding within a row", "the row is padded", attention_mask=[1, 0, 1, 1]),
]


# Sizes, and options that are at odds


def sized(option: str, value: Any, says: str | None) -> Case:
    return Case(f"`{option}: {value}`", says, options={option: value})


def run_config(what: str, says: str | None, **parts: Any) -> Case:
    model = {"hidden_size": 16, "num_layers": 1, "num_heads": 2}
    config = {"data": CONFIG, "model": model, "train": {"output_dir": "run", "steps": 2}}
    for name, values in parts.items():
        config[name] = config[name] | values
    return Case(f"a run with {what}", says, config=lines([config]), run=("train", "run.yaml"))


SIZES = [
    sized("pack", {"seq_length": 32, "strategy": "pool", "num_packers": 10**9}, None),
    sized("tokenize", {"batch_size": 10**18}, None),
    sized("save", {"output_dir": "out", "num_shards": 10**9}, "save.num_shards … at most 8"),
    sized("save", {"output_dir": "."}, "is not empty"),
    sized("mix", {"weights": {"web": 1e308}}, None),
    Case(
        "weights that are too far apart",
        "mix.weights.a: 1e-300 is less than",
        options={
            "datasets": [{"name": name, "data_files": "data.jsonl"} for name in "ab"],
            "mix": {"weights": {"a": 1e-300, "b": 1e300}},
        },
    ),
    run_config(
        "a hidden_size of 10^9", "model.hidden_size: … too large", model={"hidden_size": 10**9}
    ),
    run_config("10^9 layers", "model.num_layers: … at most 10,000", model={"num_layers": 10**9}),
    run_config(
        "a vocabulary of 10^12", "model.vocab_size: … too large", model={"vocab_size": 10**12}
    ),
    run_config(
        "a rate below zero", "learning_rate … Give one", train={"optimizer": {"learning_rate": -1}}
    ),
    run_config("a clip of 0", "clip_norm … Give one", train={"optimizer": {"clip_norm": 0}}),
    run_config("a mesh of three", "train.mesh … does not fit 1 cpu", train={"mesh": {"data": 3}}),
    run_config(
        "an output that is a file",
        "data.jsonl is a file",
        train={"output_dir": "data.jsonl"},
    ),
]


# Calls of Python


def call(what: str, says: str | None, act: Callable[[Pipeline], object]) -> Case:
    """act: is given the pipeline of the folder's config."""

    def run(folder: Path) -> None:
        config = from_dict(PipelineConfig, load_yaml(folder / "run.yaml"))
        act(Pipeline.from_config(config))

    return Case(f"`{what}`", says, run=run)


def loader(pipeline: Pipeline) -> Any:
    return pipeline.source().tokenize().pack().load().build()


CALLS = [
    call("tokenize() before source()", "Call source() before", lambda one: one.tokenize()),
    call("pack() before tokenize()", "Call tokenize() before", lambda one: one.source().pack()),
    call("source() twice", "source() was called already", lambda one: one.source().source()),
    call("build() behind source()", "nothing to build", lambda one: one.source().build()),
    call("tokenize(5)", "expected TokenizeStageConfig", lambda one: one.source().tokenize(5)),  # type: ignore[arg-type]
    call("transform(5)", "5 is not a transform", lambda one: one.source().transform(5)),  # type: ignore[arg-type]
    call("restore({})", "loader state", lambda one: loader(one).restore({})),
    call("restore(None)", "loader state", lambda one: loader(one).restore(None)),
    call("discover(5)", "5 is neither a path", lambda one: easypipe.discover(5)),
    call("load_saved(5)", "not a complete saved folder", lambda one: easypipe.load_saved(5)),  # type: ignore[arg-type]
    call(
        "LoadStageConfig(batch_size=2.5)",
        "batch_size",
        lambda one: easypipe.LoadStageConfig(batch_size=2.5),
    ),  # type: ignore[arg-type]
]

# Devices that never end, and files that a command would write over


CHAT = {"chat_template": "/dev/zero"}


def endless(what: str, says: str, **dataset: Any) -> Case:
    options = {f"datasets.0.{key}": value for key, value in dataset.items()}
    return Case(what, says, options=options)


def lists(edges: tuple[int, int]) -> bytes:
    """An Arrow file of two rows of tokens, whose lists end at `edges` in place of 7777 and 7787."""
    columns = {"input_ids": [[1] * 7777, [1] * 10]}
    out, table = io.BytesIO(), pa.table(columns, pa.schema([("input_ids", pa.list_(pa.int32()))]))
    with pa.ipc.new_file(out, table.schema) as writer:
        writer.write_table(table)
    return out.getvalue().replace(struct.pack("<ii", 7777, 7787), struct.pack("<ii", *edges))


def dictionary() -> bytes:
    array = pa.DictionaryArray.from_arrays(pa.array([0, 7], pa.int8()), pa.array(["x"]), safe=False)
    out, table = io.BytesIO(), pa.table({"text": array})
    with pa.ipc.new_file(out, table.schema) as writer:
        writer.write_table(table)
    return out.getvalue()


ENDLESS = [
    endless("a chat template that is a device", "'/dev/zero' is neither a file nor the", **CHAT),
    endless(
        "a template of prompts that is a device",
        "'/dev/zero' is neither a file nor the",
        prompt={"format_type": "custom", "template": "/dev/zero", "input_columns": ["text"]},
    ),
    endless(
        "few-shot examples that are a device",
        "/dev/zero: is a pipe, a socket or a device. Copy",
        prompt={"format_type": "alpaca", "few_shot": {"data_files": "/dev/zero", "count": 1}},
    ),
    Case(
        "a page that would replace a pipe",
        "out.html: cannot be written … it is a pipe, a socket or a device … Check the path",
        setup=lambda folder: os.mkfifo(folder / "out.html"),
        run=("preview", "run.yaml", "--html", "out.html"),
    ),
    command("run.yaml: is a file, and no HTML page", "preview", "run.yaml", "--html", "run.yaml"),
    command("--json: has no effect", "preview", "run.yaml", "--json", "--html", "out.html"),
    command("--json: has no effect", "plan", "run.yaml", "--json", "--html", "out.html"),
    command("--json: has no effect", "discover", "data.jsonl", "--json", "--html", "out.html"),
    Case(
        "a plan of 10^20 steps of data without end",
        "steps … passes over this data … Give steps for at most 100,000",
        options={"datasets": [{"name": name, "data_files": "data.jsonl"} for name in "ab"]},
        run=("plan", "run.yaml", "--steps", "9" * 20),
    ),
    command("load … recursive", "prepare", "run.yaml", "--set", "load=&a [*a]"),
    command("not of the form", "prepare", "run.yaml", "--set", ".".join("a" * 2000) + "=1"),
    file(
        "Arrow: a list that ends behind the file",
        "damaged column 'input_ids': … Copy",
        "a.arrow",
        lists((7777, 1 << 24)),
    ),
    file(
        "Arrow: a list that ends before it begins",
        "damaged column 'input_ids': … Copy",
        "a.arrow",
        lists((7777, 3)),
    ),
    file(
        "Arrow: a list that begins before the file",
        "damaged column 'input_ids': … Copy",
        "a.arrow",
        lists((-5, 7787)),
    ),
    file(
        "Arrow: a text of a dictionary that ends before",
        "'text' … Index 7",
        "a.arrow",
        dictionary(),
    ),
]


KINDS = {
    "Devices, and what commands write over": ENDLESS,
    "Numbers and names of YAML": YAML,
    "Bytes of data files": FILES,
    "Rows of tokens": TOKEN_ROWS,
    "Sizes": SIZES,
    "Calls of Python": CALLS,
}
