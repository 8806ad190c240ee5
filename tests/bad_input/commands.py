"""Cases: arguments of commands, folders and files that cannot be used, and answers of a server."""

from __future__ import annotations

import contextlib
import gzip
import os
from collections.abc import Callable, Generator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

from bad_input.case import DATA, Action, Case


def command(says: str | None, *arguments: str) -> Case:
    return Case(f"`easypipe {' '.join(arguments)[:60]}`".replace("|", "/"), says, run=arguments)


ARGUMENTS = [
    command("No such command", "prepar", "run.yaml"),
    command("Missing argument", "prepare"),
    command("No such option", "prepare", "run.yaml", "--sed", "5"),
    command("nowhere.yaml: no such file", "prepare", "nowhere.yaml"),
    command("tokenizer: this is a folder", "prepare", "tokenizer"),
    command("data.jsonl", "prepare", "data.jsonl"),
    command("'': no such file", "prepare", "''"),
    command("not of the form key.path=value", "prepare", "run.yaml", "--set", "seed"),
    command("not of the form key.path=value", "prepare", "run.yaml", "--set", "=5"),
    command("sede: unknown key", "prepare", "run.yaml", "--set", "sede=5"),
    command("seed", "prepare", "run.yaml", "--set", "seed=five"),
    command("seed.x", "prepare", "run.yaml", "--set", "seed.x=5"),
    command("datasets.5: no item", "prepare", "run.yaml", "--set", "datasets.5.name=x"),
    command("datasets.²: no item", "prepare", "run.yaml", "--set", "datasets.².name=x"),
    command("datasets.x: no item", "prepare", "run.yaml", "--set", "datasets.x=5"),
    command("seed", "prepare", "run.yaml", "--set", "seed=[1"),
    command("--shard: '1' is not a part", "prepare", "run.yaml", "--shard", "1"),
    command("--shard: '5/2' is not a part", "prepare", "run.yaml", "--shard", "5/2"),
    command("--shard: '-1/2' is not a part", "prepare", "run.yaml", "--shard", "-1/2"),
    command("--shard: '0/0' is not a part", "prepare", "run.yaml", "--shard", "0/0"),
    command("--shard: '²/3' is not a part", "prepare", "run.yaml", "--shard", "²/3"),
    command("--shard: '0/x' is not a part", "prepare", "run.yaml", "--shard", "0/x"),
    command("--finalize", "prepare", "run.yaml", "--finalize"),
    command("", "explain", "run.yaml", "--step", "x"),
    command("", "explain", "run.yaml", "--step", "-1"),
    command("999", "explain", "run.yaml", "--step", "999999"),
    command("--step … 1000000000", "explain", "run.yaml", "--step", "1000000000001"),
    command("", "explain", "run.yaml", "--step", "99999999999999999999999"),
    command("nowhere", "explain", "nowhere.yaml", "--step", "0"),
    command("", "preview", "run.yaml", "-n", "0"),
    command("nowhere", "discover", "nowhere"),
    command("", "discover", "tokenizer/tokenizer_config.json", "--rows", "-1"),
    command(None, "discover", "data.jsonl"),
    command("", "cache", "clear", "--older-than", "soon"),
    command("run.yaml: is a pipeline config … under data:", "train", "run.yaml"),
    *(
        command("data.seed … Write --set seed=5.", name, "run.yaml", *more, "--set", "data.seed=5")
        for name, *more in (
            ("prepare",),
            ("train",),
            ("plan",),
            ("preview",),
            ("explain", "--step", "0"),
        )
    ),
    command("train.steps: run.yaml … no train", "prepare", "run.yaml", "--set", "train.steps=5"),
    command("", "plan", "run.yaml", "--on", "h100"),
]


# Files and folders


def wrong(what: str, says: str | None, setup: Action, **options: object) -> Case:
    return Case(
        what, says, setup=setup, options={k.replace("__", "."): v for k, v in options.items()}
    )


def put(name: str, target: str) -> Action:
    """A symbolic link."""
    return lambda folder: (folder / name).symlink_to(target)


FOLDERS = [
    wrong(
        "a link to nothing",
        "a.jsonl: no such file",
        put("a.jsonl", "nowhere"),
        datasets__0__data_files="a.jsonl",
    ),
    wrong(
        "a link to itself", "a.jsonl", put("a.jsonl", "a.jsonl"), datasets__0__data_files="a.jsonl"
    ),
    wrong(
        "a link to a file", None, put("a.jsonl", "data.jsonl"), datasets__0__data_files="a.jsonl"
    ),
    wrong(
        "a folder that is called like a file",
        "a.jsonl",
        lambda folder: (folder / "a.jsonl").mkdir(),
        datasets__0__data_files="a.jsonl",
    ),
    wrong(
        "a pipe",
        "a.jsonl: is a pipe, a socket or a device … Copy its content into a file.",
        lambda folder: os.mkfifo(folder / "a.jsonl"),
        datasets__0__data_files="a.jsonl",
    ),
    wrong(
        "a pipe that a pattern finds",
        "a.jsonl: is a pipe, a socket or a device",
        lambda folder: os.mkfifo(folder / "a.jsonl"),
        datasets__0__data_files="*.jsonl",
    ),
    wrong(
        "a device",
        "/dev/null",
        lambda folder: None,
        datasets__0__data_files="/dev/null",
        datasets__0__type="json",
    ),
    wrong(
        "a device without an end",
        "/dev/zero",
        lambda folder: None,
        datasets__0__data_files="/dev/zero",
        datasets__0__type="txt",
    ),
    wrong(
        "a folder without files",
        "empty",
        lambda folder: (folder / "empty").mkdir(),
        datasets__0__data_files="empty",
    ),
    wrong(
        "a folder of several formats",
        "mixed",
        lambda folder: (
            (folder / "mixed").mkdir(),
            (folder / "mixed/a.jsonl").write_text(DATA),
            (folder / "mixed/b.txt").write_text("x"),
        ),
        datasets__0__data_files="mixed",
    ),
    wrong(
        "a folder with an empty file beside good ones",
        "half/b.jsonl: is empty",
        lambda folder: (
            (folder / "half").mkdir(),
            (folder / "half/a.jsonl").write_text(DATA),
            (folder / "half/b.jsonl").write_text(""),
        ),
        datasets__0__data_files="half",
    ),
    wrong(
        "a cache folder that is a link to nothing",
        "cache",
        put("cache", "nowhere/deep"),
        cache_dir="cache",
    ),
    wrong(
        "a cache folder that is a link to itself", "cache", put("cache", "cache"), cache_dir="cache"
    ),
    wrong(
        "a cache folder below a device", "/dev/null", lambda folder: None, cache_dir="/dev/null/x"
    ),
    wrong("a cache folder of the system", "/proc", lambda folder: None, cache_dir="/proc/easypipe"),
    wrong(
        "an output folder that is a link to itself",
        "out",
        put("out", "out"),
        save={"output_dir": "out"},
    ),
    wrong(
        "an output folder below a file",
        "data.jsonl/out",
        lambda folder: None,
        save={"output_dir": "data.jsonl/out"},
    ),
    wrong(
        "an output folder of the system",
        "/proc",
        lambda folder: None,
        save={"output_dir": "/proc/easypipe"},
    ),
    wrong(
        "a config that is a pipe",
        "run.yaml",
        lambda folder: ((folder / "run.yaml").unlink(), os.mkfifo(folder / "run.yaml")),
    ),
    wrong(
        "a tokenizer that is a link to nothing",
        "tok",
        put("tok", "nowhere"),
        default_tokenizer="./tok",
    ),
]


# Servers


@contextlib.contextmanager
def serving(answer: Callable[[BaseHTTPRequestHandler], None]) -> Generator[str]:
    """A server on this machine that answers so, and its address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            answer(self)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def said(
    status: int, body: bytes = b"", **headers: str
) -> Callable[[BaseHTTPRequestHandler], None]:
    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(status)
        for name, value in ({"Content_Length": str(len(body))} | headers).items():
            request.send_header(name.replace("_", "-"), value)
        request.send_header("Connection", "close")
        request.end_headers()
        if request.command == "GET":
            request.wfile.write(body)
        request.close_connection = True

    return answer


def remote(
    what: str,
    says: str | None,
    answer: Callable[[BaseHTTPRequestHandler], None],
    name: str = "a.jsonl",
) -> Case:
    def act(folder: Path) -> None:
        from easypipe.sources.open import open_files

        with serving(answer) as url:
            source = open_files(f"{url}/{name}")
            for number, shard in enumerate(source.shards):
                source.read(number, 0, shard.num_rows or 1)

    return Case(what, says, run=act)


SERVERS = [
    remote("404", "a.jsonl", said(404, b"not here")),
    remote("403", "a.jsonl", said(403)),
    remote("401", "a.jsonl", said(401)),
    remote("410", "a.jsonl", said(410)),
    remote(
        "a page of HTML in place of JSON lines",
        "a.jsonl",
        said(200, b"<!DOCTYPE html><html>Log in</html>"),
    ),
    remote(
        "a page of HTML in place of Parquet",
        "a.parquet",
        said(200, b"<!DOCTYPE html><html>Log in</html>"),
        "a.parquet",
    ),
    remote("nothing", "a.jsonl: is empty", said(200)),
    remote("a length that is not a number", "a.jsonl", said(200, b"x", Content_Length="many")),
    remote("a length below zero", "a.jsonl", said(200, b"x", Content_Length="-5")),
    remote("a redirect to itself", "a.jsonl", said(302, Location="/a.jsonl")),
    remote(
        "a redirect to a file of this machine", "a.jsonl", said(302, Location="file:///etc/passwd")
    ),
    remote("noise", "a.jsonl, row 0, line 1", said(200, bytes(range(128, 256)) * 10)),
    remote(
        "gz data under another name",
        "a.jsonl: is compressed (gz)",
        said(200, gzip.compress(DATA.encode())),
    ),
    remote("good lines", None, said(200, DATA.encode())),
]
KINDS = {
    "Arguments of commands": ARGUMENTS,
    "Files and folders": FOLDERS,
    "Answers of servers": SERVERS,
}
