"""Looks for bad input that is answered badly: `nox -s fuzz -- MINUTES [TARGET ...]`.

Hypothesis draws projects that are wrong somewhere: files that readers get, configs, chat templates,
tokenizer files, answers of web servers. Each has to end in time, well or with an error of ours that
has a fix, and to leave nothing behind. What is found is printed; once mended it becomes a case of
tests/bad_input. With --atheris the search follows which branches of our code an input reaches.
"""

from __future__ import annotations

import argparse
import bz2
import gzip
import importlib
import io
import json
import lzma
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["HF_HUB_OFFLINE"] = "1"

if "--atheris" in sys.argv:  # which has to see our code before it is imported
    import atheris  # pyright: ignore[reportMissingImports]

    root = Path(__file__).parents[1] / "src"
    kernels = ["easypipe.core.random"]  # which numba compiles, with others: it knows no counters
    kernels += [
        ".".join(file.relative_to(root).with_suffix("").parts)
        for file in root.glob("easypipe/**/*.py")
        if "@jit" in file.read_text(encoding="utf-8")
    ]
    with atheris.instrument_imports(include=["easypipe"], exclude=kernels):
        for name in ("cli.app", "sources.open", "stages.source.stage"):
            importlib.import_module(f"easypipe.{name}")

import pyarrow as pa
import pyarrow.csv as pc
import pyarrow.parquet as pq
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from bad_input.case import (
    CONFIG,
    DATA,
    DEADLINE_S,
    ROWS,
    Answer,
    Case,
    lines,
    try_out,
    warm_up,
    well_answered,
)
from easypipe import Pipeline
from easypipe.cli.keys import paths
from easypipe.core.config import from_dict, load_yaml
from easypipe.stages.config import PipelineConfig
from pipelines import tokenizer
from web import WebServer

LIMITS = ("-max_len=4096", "-len_control=0", "-timeout=120", "-rss_limit_mb=0")  # of libFuzzer
ROUND = 25  # examples that are drawn before the clock is looked at
ODD = [
    b"",
    b"\0",
    b"\xff\xfe",
    b"\xef\xbb\xbf",
    b"\r",
    b"\n\n",
    b'"',
    b"\\u",
    b"\\ud800",
    b"{",
    b"]",
]
ODD += [b"null", b"NaN", b"1e999", b"9" * 400, b"[" * 2000, b"-1", b"\x1b[31m", b"\xe2\x80\xa8"]
VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    0.5,
    10**30,
    float("nan"),
    "",
    "x",
    "\0",
    "../x",
    "x" * 5000,
]
VALUES += ["${HOME}", "file:///etc/passwd", "a:b", "1e-3", [], {}, [None], [[]], {"a": 1}, {"": {}}]


@st.composite
def damaged(draw: st.DrawFn, good: bytes) -> bytes:
    """`good` with a few spans replaced, removed or cut off."""
    data = bytearray(good)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        stop = draw(st.sampled_from([at, at + 1, at + 7, len(data)]))
        data[at:stop] = draw(st.one_of(st.sampled_from(ODD), st.binary(max_size=8)))
    return bytes(data)


@st.composite
def altered(draw: st.DrawFn, good: Any) -> Any:
    """A copy of plain data in which something is another value, or gone."""
    copy = json.loads(json.dumps(good))
    for _ in range(draw(st.integers(1, 3))):
        node: Any = copy
        while isinstance(node, dict | list) and node:
            keys = list(node) if isinstance(node, dict) else list(range(len(node)))
            key = draw(st.sampled_from(keys[:30]))
            if not isinstance(node[key], dict | list) or draw(st.booleans()):
                if draw(st.integers(0, 3)):
                    # the next turn may alter it
                    node[key] = deepcopy(draw(st.sampled_from(VALUES)))
                else:
                    del node[key]
                break
            node = node[key]
    return copy


def written(write: Callable[[pa.Table, Any], object]) -> bytes:
    sink = io.BytesIO()
    write(pa.Table.from_pylist(ROWS), sink)
    return sink.getvalue()


def _ipc(table: pa.Table, sink: Any) -> None:
    with pa.ipc.new_file(sink, table.schema) as file:
        file.write_table(table)


FILES: dict[str, bytes] = {
    "rows.jsonl": DATA.encode(),
    "rows.json": json.dumps(ROWS).encode(),
    "rows.csv": written(pc.write_csv),
    "rows.tsv": written(pc.write_csv).replace(b",", b"\t"),
    "rows.txt": "\n".join(row["text"] for row in ROWS).encode(),
    "rows.parquet": written(pq.write_table),
    "rows.arrow": written(_ipc),
    "rows.jsonl.gz": gzip.compress(DATA.encode()),
    "rows.jsonl.zst": pa.compress(DATA.encode(), "zstd", asbytes=True),
    "rows.jsonl.bz2": bz2.compress(DATA.encode()),
    "rows.jsonl.xz": lzma.compress(DATA.encode()),
}


@st.composite
def of_readers(draw: st.DrawFn) -> Case:
    name = draw(st.sampled_from(list(FILES)))
    data = draw(damaged(FILES[name]))
    return Case("a file", None, files={name: data}, options={"datasets.0.data_files": name})


@st.composite
def of_configs(draw: st.DrawFn) -> Case:
    options = draw(st.sampled_from([CONFIG, CONFIG | WIDE]))
    way = draw(st.integers(0, 2))
    if way == 0:
        return Case("a config", None, config=draw(damaged(json.dumps(options, indent=1).encode())))
    if way == 1:
        return Case("a config", None, config=json.dumps(draw(altered(options))))
    key = draw(st.sampled_from(KEYS))
    return Case("a config", None, options={key: draw(st.sampled_from(VALUES))})


WIDE: dict[str, Any] = {
    "mix": {"weights": {"web": 1.0}, "stop_strategy": "all_exhausted", "unit": "tokens"},
    "tokenize": {"max_length": 16, "num_workers": 1, "batch_size": 10},
    "save": {"output_dir": "out", "format": "parquet", "num_shards": 2},
    "pack": {"seq_length": 32, "strategy": "first_fit", "oversize": "split"},
    "load": {"batch_size": 2, "num_epochs": 1, "drop_last": False, "prefetch_batches": 2},
    "order": {"block_rows": 4},
}
KEYS = [path.removeprefix("data.") for path, _ in paths() if path.startswith("data.")]
KEYS = [key.replace("datasets.", "datasets.0.") for key in KEYS]
KEYS = [key for key in KEYS if not key.startswith("default_tokenizer.")]  # a text in CONFIG
TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
FRAGMENTS = [
    "{% for m in messages %}",
    "{% endfor %}",
    "{{ m.role }}",
    "{{ m['content'] }}",
    "{% if m.role == 'user' %}",
    "{% else %}",
    "{% endif %}",
    "{% generation %}",
    "{% endgeneration %}",
    "{% set x = namespace(a=1) %}",
    "{{ x.a.b.c }}",
    "{{ messages[7]['x'] }}",
    "{{ raise_exception('no') }}",
    "{{ 'a' * 10 ** 9 }}",
    "{{ range(10 ** 9) | list }}",
    "{% for i in range(10 ** 8) %}.{% endfor %}",
    "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
    "{{ messages | tojson }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ strftime_now('%Y') }}",
    "{{ m.content.split('')[0] }}",
    "{{ 1 // 0 }}",
    "{% include 'x' %}",
    "{# ",
    "{{ '%s' | format(m) }}",
    "{{ bos_token + eos_token }}",
]


@st.composite
def of_templates(draw: st.DrawFn) -> Case:
    text = st.text(max_size=6)
    parts = draw(st.lists(st.one_of(st.sampled_from(FRAGMENTS), text), min_size=1, max_size=9))
    body = "".join(parts)
    if draw(st.booleans()):
        body = f"{{% for m in messages %}}{body}{{% endfor %}}"
    chosen = {"data_files": "chat.jsonl", "content_field": "messages", "chat_template": body}
    return Case(
        "a template",
        None,
        files={"chat.jsonl": lines([{"messages": TALK}] * 3)},
        options={f"datasets.0.{key}": value for key, value in chosen.items()},
    )


@st.composite
def of_tokenizers(draw: st.DrawFn) -> Case:
    name = draw(st.sampled_from(["tokenizer.json", "tokenizer.json", "tokenizer_config.json"]))
    good = (Path(tokenizer()) / name).read_bytes()
    changed = (
        draw(damaged(good))
        if draw(st.booleans())
        else json.dumps(draw(altered(json.loads(good)))).encode()
    )
    return Case("a tokenizer", None, files={f"tokenizer/{name}": changed})


HEADERS = {
    "Content-Encoding": ["gzip", "br", "x", ""],
    "ETag": ["", "x", 'W/"x"', '"' + "x" * 5000 + '"'],
    "Last-Modified": ["", "yesterday", "Thu, 01 Jan 1970 00:00:00 GMT"],
    "Accept-Ranges": ["none", "bytes", "x"],
    "Content-Type": ["text/html", "x", "application/octet-stream; charset=x"],
    "Transfer-Encoding": ["x"],
    "Location": ["", "/data.jsonl", "ftp://x", "//"],
    "Retry-After": ["-1", "x", "1e9", "Thu, 01 Jan 1970 00:00:00 GMT"],
}
FAULTS = [None, 201, 204, 206, 301, 304, 400, 401, 403, 404, 410, 416, 429, 500, 503]
FAULTS += ["short", "page", "bomb", "reset"]


@contextmanager
def serving() -> Iterator[WebServer]:
    with WebServer() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()


@st.composite
def of_answers(draw: st.DrawFn) -> Case:
    name = draw(st.sampled_from(["rows.jsonl", "rows.parquet", "rows.jsonl.gz", "rows.csv"]))
    good = FILES[name]
    body = draw(st.one_of(st.just(good), damaged(good)))
    headers = draw(st.fixed_dictionaries({}, optional=_drawn_headers()))
    faults = draw(st.lists(st.sampled_from(FAULTS), max_size=3))
    told = draw(st.sampled_from([None, None, "bytes 0-0/1", "bytes */9", "x", "bytes 5-1/-1"]))
    ranges = draw(st.booleans())

    def run(folder: Path) -> None:
        with serving() as server:
            server.files["/" + name] = body
            server.extra["/" + name] = headers
            server.faults.extend(faults)
            server.told, server.ranges = told, ranges
            values = load_yaml(folder / "run.yaml")
            values["datasets"][0]["data_files"] = f"{server.url}/{name}"
            config = from_dict(PipelineConfig, values)
            Pipeline.from_config(config).source().tokenize().prepare()

    what = f"{name}: {body!r} with {headers} after {faults}, told {told}, ranges {ranges}"
    return Case(what, None, run=run)


def _drawn_headers() -> dict[str, st.SearchStrategy[str]]:
    return {name: st.sampled_from(values) for name, values in HEADERS.items()}


TARGETS: dict[str, st.SearchStrategy[Case]] = {
    "readers": of_readers(),
    "configs": of_configs(),
    "templates": of_templates(),
    "tokenizers": of_tokenizers(),
    "answers": of_answers(),
}


class Hunt:
    """Tries cases of one target, and remembers what was answered badly, each kind once."""

    def __init__(self, target: str) -> None:
        self.cases, self.tried, self.known = TARGETS[target], 0, set[str]()

    def try_one(self, case: Case) -> None:
        self.tried += 1
        try:
            answer = _answer(case)
            if answer.seconds >= DEADLINE_S:  # what it compiled stands now
                answer = _answer(case)
            well_answered(answer)
        except AssertionError as wrong:
            if _kind(wrong) not in self.known:
                raise

    def test(self, examples: int = ROUND, *, derandomize: bool = False) -> Any:
        return settings(
            max_examples=examples,
            derandomize=derandomize,
            deadline=None,
            database=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        )(given(self.cases)(self.try_one))

    def go_on(self, seconds: float) -> None:
        ends, rounds = time.monotonic() + seconds, 0
        while time.monotonic() < ends:
            rounds += 1
            try:
                seed(time.time_ns())(self.test())()
            except AssertionError as wrong:
                self.known.add(_kind(wrong))
                print(f"FOUND: {wrong}\n" + "\n".join(getattr(wrong, "__notes__", ())), flush=True)


def _answer(case: Case) -> Answer:
    with tempfile.TemporaryDirectory() as folder:
        return try_out(case, Path(folder).resolve())


def _kind(wrong: AssertionError) -> str:
    """What is the same in two messages that say the same."""
    return re.sub(r"\W+|\d+|'[^']*'", " ", str(wrong).splitlines()[0])[:80]


def follow_branches(target: str, seconds: int) -> None:
    """With atheris: ends the process at the first find."""
    import atheris  # pyright: ignore[reportMissingImports]

    hunt = Hunt(target)
    atheris.Setup(
        [sys.argv[0], f"-max_total_time={seconds}", *LIMITS],
        hunt.test().hypothesis.fuzz_one_input,
    )
    atheris.Fuzz()


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("minutes", type=float)
    options.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(TARGETS))
    options.add_argument("--atheris", action="store_true")
    asked = options.parse_args()
    targets = asked.targets or list(TARGETS)
    seconds = asked.minutes * 60 / len(targets)
    with tempfile.TemporaryDirectory() as folder:
        warm_up(Path(folder))
    if asked.atheris:
        follow_branches(targets[0], int(seconds))
    found = 0
    for target in targets:
        hunt = Hunt(target)
        hunt.go_on(seconds)
        found += len(hunt.known)
        print(f"{target}: {hunt.tried} tried, {len(hunt.known)} answered badly", flush=True)
    return found > 0


if __name__ == "__main__":
    sys.exit(main())
