"""Preparing and streaming from files of every shape, in new processes: this source tree, and
another where `--other SRC` names one.

gz, csv, row_group   one file of JSON lines in gzip, of quoted CSV, of one parquet row group
files                many small text files: the unit is thousands of files
cold                 a first run on 1 MB of text, imports and the tokenizer's check included
discover             `easypipe discover` of a folder, to its answer
shards, ranges       20 batches of shuffled rows of a token cache in a bucket (S3 on
                     loopback), by `cache.reading`
http-parquet, http-jsonl, stream-parquet, stream-jsonl
                     8 files from a web server on loopback that answers every request 50 ms late:
                     prepared, or streamed to batches; the share of the local rate and the number
                     of requests stand below

The time of a run begins behind the imports, but for `cold` and `discover`. Every run has a token
cache of its own.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import itertools
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from _common import Report, arguments, documents, table, tokenizer_folder

LATE_S = 0.05
HERE = Path(__file__).resolve().parents[1] / "src"
BATCHES = 20


def rows(texts: list[str], num_bytes: int) -> Iterator[str]:
    size = 0
    for text in itertools.cycle(texts):
        yield text
        size += len(text.encode())
        if size >= num_bytes:
            return


def write_gz(folder: Path, texts: list[str]) -> None:
    with gzip.open(folder / "text.jsonl.gz", "wt", compresslevel=6, encoding="utf-8") as out:
        out.writelines(json.dumps({"text": text}) + "\n" for text in texts)


def write_csv(folder: Path, texts: list[str]) -> None:
    with open(folder / "text.csv", "w", encoding="utf-8", newline="") as out:
        writer = csv.writer(out, quoting=csv.QUOTE_ALL)
        writer.writerow(["id", "text"])
        writer.writerows((str(i), text.replace("\0", "")) for i, text in enumerate(texts))


def write_row_group(folder: Path, texts: list[str]) -> None:
    column = pa.table({"text": pa.array(texts, pa.large_string())})
    pq.write_table(column, folder / "text.parquet", row_group_size=len(texts), compression="zstd")


def write_parquet(folder: Path, texts: list[str]) -> None:
    for i in range(8):
        column = pa.table({"text": pa.array(texts[i::8], pa.large_string())})
        pq.write_table(column, folder / f"{i}.parquet", row_group_size=512, compression="zstd")


def write_jsonl(folder: Path, texts: list[str]) -> None:
    for i in range(8):
        lines = (json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts[i::8])
        (folder / f"{i}.jsonl").write_text("".join(lines), encoding="utf-8")


def write_files(folder: Path, texts: list[str]) -> None:
    for i, text in enumerate(texts):
        part = folder / f"{i // 1000:03d}"
        part.mkdir(exist_ok=True)
        (part / f"{i % 1000:03d}.txt").write_text(text[:500].replace("\n", " ") + "\n", "utf-8")


CASES: dict[str, Callable[[Path, list[str]], None]] = {
    "gz": write_gz,
    "csv": write_csv,
    "row_group": write_row_group,
    "files": write_files,
    "cold": write_jsonl,
    "discover": write_jsonl,
    "shards": write_jsonl,
    "ranges": write_jsonl,
    "http-parquet": write_parquet,
    "http-jsonl": write_jsonl,
    "stream-parquet": write_parquet,
    "stream-jsonl": write_jsonl,
}


def run(case: str, data: list[str], tokenizer: str, cache: str, options: dict[str, Any]) -> None:
    """One run, in a process of its own; prints its seconds."""
    start = time.perf_counter()
    if case == "discover":
        from easypipe import discover

        for part in discover(str(Path(data[0]).parent)).parts:
            part.propose()
        print(time.perf_counter() - start)
        return
    import easypipe
    from easypipe import DatasetConfig, LoadStageConfig, PackStageConfig, Pipeline, PipelineConfig

    if case != "cold":
        easypipe.load_tokenizer(tokenizer)  # imports what encodes
        start = time.perf_counter()
    bucket = case in {"shards", "ranges"}
    config = PipelineConfig(
        datasets=[DatasetConfig(name="text", data_files=data)],
        default_tokenizer=tokenizer,
        seed=1,
        streaming=case.startswith("stream"),
        cache_dir=cache,
        cache={"reading": case, "storage_options": options} if bucket else None,
        pack=PackStageConfig(seq_length=2048, strategy="first_fit"),
        load=LoadStageConfig(batch_size=8, drop_last=False),
    )
    loader = Pipeline.from_config(config).source().tokenize().pack().load().build()
    if bucket:  # prepared by the first run, untimed
        start = time.perf_counter()
        loader = Pipeline.from_config(config).source().tokenize().pack().load().build()
        for _batch in itertools.islice(loader, BATCHES):
            pass
    elif config.streaming:
        for _batch in loader:
            pass
    else:
        len(loader)
    print(time.perf_counter() - start)


class Late(BaseHTTPRequestHandler):
    """Serves the files below `root`, ranges included, every answer LATE_S late."""

    protocol_version = "HTTP/1.1"
    root = Path()
    requests = itertools.count()

    def do_GET(self) -> None:
        next(self.requests)
        time.sleep(LATE_S)
        path = self.root / self.path.lstrip("/")
        if not path.is_file():
            self.send_error(404)
            return
        size = path.stat().st_size
        first, stop, wanted = 0, size, self.headers.get("Range")
        if wanted:
            low, _, high = wanted.removeprefix("bytes=").partition("-")
            first, stop = int(low), min(size, int(high) + 1 if high else size)
        self.send_response(206 if wanted else 200)
        self.send_header("ETag", f'"{path.name}-{size}"')
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(stop - first))
        if wanted:
            self.send_header("Content-Range", f"bytes {first}-{stop - 1}/{size}")
        self.end_headers()
        if self.command == "GET":
            with path.open("rb") as file:
                file.seek(first)
                self.wfile.write(file.read(stop - first))

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


class Server(ThreadingHTTPServer):
    request_queue_size = 128  # with 5, the default, some of many connections at once wait a second


@contextmanager
def served(root: Path) -> Iterator[tuple[str, type[Late]]]:
    handler = type("Handler", (Late,), {"root": root, "requests": itertools.count()})
    server = Server(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", handler
    finally:
        server.shutdown()


@contextmanager
def bucket() -> Iterator[tuple[str, dict[str, Any]]]:
    import s3fs
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for each request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    options = {"key": "example", "secret": "example", "endpoint_url": f"http://{host}:{port}"}
    s3fs.S3FileSystem(**options).makedirs("caches", exist_ok=True)
    try:
        yield "s3://caches", options
    finally:
        server.stop()


def seconds(tree: Path, case: str, data: list[str], tokenizer: Path, **more: Any) -> float:
    with tempfile.TemporaryDirectory() as scratch:
        order = {
            "case": case,
            "data": data,
            "tokenizer": str(tokenizer),
            "cache": more.get("cache") or scratch,
            "options": more.get("options") or {},
        }
        done = subprocess.run(
            [sys.executable, __file__, "--run", json.dumps(order)],
            env=os.environ
            | {"PYTHONPATH": str(tree), "EASYPIPE_CACHE": scratch, "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise SystemExit(f"{case} with {tree}: {done.stderr[-2000:]}")
    return float(done.stdout.split()[-1])


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--other", type=Path, help="the `src` folder of another easypipe")
    parser.add_argument("--megabytes", type=float, default=40, help="of text in a file or folder")
    parser.add_argument("--files", type=int, default=100_000, help="small files")
    given = parser.parse_args()
    if given.run:
        run(**json.loads(given.run))
        return
    texts = documents(given.text)
    trees = {"easypipe": HERE} | ({"other": given.other.resolve()} if given.other else {})
    facts: dict[str, Any] = {}
    lines = []
    with tempfile.TemporaryDirectory() as scratch_name:
        scratch = Path(scratch_name)
        tokenizer = tokenizer_folder(scratch, texts)
        for case in given.cases:
            folder = scratch / case
            folder.mkdir()
            if case == "files":
                CASES[case](folder, list(itertools.islice(itertools.cycle(texts), given.files)))
            else:
                size = 1e6 if case in {"cold", "discover"} else given.megabytes * 1e6
                CASES[case](folder, list(rows(texts, int(size))))
            figures, shares, asked = measure(case, folder, tokenizer, trees, given.rounds)
            for name, figure in figures.items():
                lines.append(
                    (case, name, f"{figure:.3f} s", shares.get(name, ""), asked.get(name, ""))
                )
            facts[case] = figures
            if "other" in figures:
                facts[f"{case}: speed beside the other"] = figures["other"] / figures["easypipe"]
    table(("case", "tree", "median", "share of the local rate", "requests"), lines)
    Report("preparing", "s", facts).finish(given.out)


def measure(
    case: str, folder: Path, tokenizer: Path, trees: dict[str, Path], rounds: int
) -> tuple[dict[str, float], dict[str, str], dict[str, int]]:
    """Medians in seconds; over http also the share of the local rate, and the requests of a run."""
    local = sorted(str(path) for path in folder.rglob("*") if path.is_file())
    data = [str(folder / "**" / "*.txt")] if case == "files" else local
    taken: dict[str, list[float]] = {}
    beside: dict[str, list[float]] = {}
    asked: dict[str, int] = {}
    if case in {"shards", "ranges"}:
        with bucket() as (url, options):
            for turn, (name, tree) in itertools.product(range(rounds), trees.items()):
                where = f"{url}/{case}-{name}-{turn}"
                took = seconds(tree, case, data, tokenizer, cache=where, options=options)
                taken.setdefault(name, []).append(took)
    elif case.startswith(("http", "stream")):
        with served(folder) as (url, handler):
            remote = [f"{url}/{Path(path).name}" for path in local]
            for _, (name, tree) in itertools.product(range(rounds), trees.items()):
                beside.setdefault(name, []).append(seconds(tree, case, data, tokenizer))
                before = next(handler.requests)
                taken.setdefault(name, []).append(seconds(tree, case, remote, tokenizer))
                asked[name] = next(handler.requests) - before - 1
    else:
        for _, (name, tree) in itertools.product(range(rounds), trees.items()):
            taken.setdefault(name, []).append(seconds(tree, case, data, tokenizer))
    medians = {name: statistics.median(each) for name, each in taken.items()}
    shares = {name: f"{statistics.median(beside[name]) / medians[name]:.2f}" for name in beside}
    return medians, shares, asked


if __name__ == "__main__":
    main()
