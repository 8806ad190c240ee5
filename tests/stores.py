"""Object stores on loopback: S3 by moto, GCS by gcp-storage-emulator. Fixtures `s3`, `gs`, and
`store`, which is each of them in turn.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import os
import secrets
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from web import bomb

BUCKET = "bucket"
SECRET = "hidden-secret"

# Read once, when gcsfs is imported: without it gcsfs asks every bucket over gRPC whether it is
# hierarchical, which no emulator answers.
os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")


@dataclasses.dataclass(frozen=True)
class Store:
    """A bucket. options: storage_options for it."""

    protocol: str
    options: dict[str, Any]

    def url(self, *names: str) -> str:
        return "/".join([f"{self.protocol}://{BUCKET}", *names])

    def new(self) -> str:
        """The URL of a folder that nobody has used."""
        return self.url(f"folder-{secrets.token_hex(4)}")

    def files(self, url: str) -> dict[str, bytes]:
        """Everything below `url`, by its name there."""
        fs = self.filesystem
        fs.invalidate_cache()
        root = url.partition("://")[2]
        return {str(name).removeprefix(f"{root}/"): fs.cat_file(name) for name in fs.find(root)}

    @property
    def filesystem(self) -> Any:
        import fsspec

        return fsspec.filesystem(self.protocol, **self.options)


@pytest.fixture(scope="session")
def s3() -> Iterator[Store]:
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server", reason="moto[server] serves S3 on loopback")
    server = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    store = Store(
        "s3", {"key": "AKIAEXAMPLE1", "secret": SECRET, "endpoint_url": f"http://{host}:{port}"}
    )
    store.filesystem.mkdir(BUCKET)
    yield store
    server.stop()


@pytest.fixture(scope="session")
def gs() -> Iterator[Store]:
    pytest.importorskip("gcsfs")
    pytest.importorskip(
        "gcp_storage_emulator", reason="gcp-storage-emulator serves GCS on loopback"
    )
    with contextlib.closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = Path(__file__).with_name("gcs_emulator.py")
    # A process of its own: gcsfs's event loop and the emulator's server would otherwise wait for
    # each other's turn.
    server = subprocess.Popen(
        [sys.executable, str(script), str(port), BUCKET],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 30
    try:
        while True:
            try:
                urllib.request.urlopen(f"{url}/storage/v1/b/{BUCKET}", timeout=5).close()
                break
            except (urllib.error.URLError, ConnectionError):
                if server.poll() is not None or time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("STORAGE_EMULATOR_HOST", url)
            yield Store("gs", {"token": "anon", "endpoint_url": url})
    finally:
        server.kill()
        server.wait()


@pytest.fixture(params=["s3", "gs"])
def store(request: pytest.FixtureRequest) -> Store:
    return request.getfixturevalue(request.param)


class FaultyProxy(ThreadingHTTPServer):
    """Passes requests on to a store. faults: what the next ones that write meet: a status, "reset",
    or "lost" (done, but the answer is a reset); `always` meets all of them. seen: (method, path) of
    those that write. reads: whether those that read meet `always` too. answers: what the next
    requests for a part of an object meet: a status, "reset", "hang", "short" (half of it comes),
    "fewer" (and is announced so), "wrong" (a later part), "page" (HTML with status 200), "bomb" (64
    MB, packed)."""

    daemon_threads = True

    def __init__(self, target: str) -> None:
        super().__init__(("127.0.0.1", 0), _Proxied)
        self.target = target.removeprefix("http://")
        self.faults: deque[Any] = deque()
        self.always: Any = None
        self.reads = False
        self.answers: deque[Any] = deque()
        self.seen: list[tuple[str, str]] = []

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is no news."""


class _Proxied(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultyProxy

    def do_PUT(self) -> None:
        body = self._body()
        fault = None
        if self.command in ("PUT", "POST"):
            self.server.seen.append((self.command, self.path))
            fault = self.server.faults.popleft() if self.server.faults else self.server.always
        elif self.server.reads:
            fault = self.server.always
        elif self.server.answers and "Range" in self.headers:
            fault = self.server.answers.popleft()
        if fault == "hang":
            threading.Event().wait(3)
            return self._reset()
        if fault == "wrong":
            first, last = self.headers["Range"].removeprefix("bytes=").split("-")
            self.headers.replace_header("Range", f"bytes={int(first) + 1}-{int(last) + 1}")
        if isinstance(fault, int):
            return self._answer(fault, b"{}", {})
        if fault == "reset":
            return self._reset()
        there = http.client.HTTPConnection(self.server.target, timeout=30)
        there.request(
            self.command,
            self.path,
            body=body,
            headers={k: v for k, v in self.headers.items() if k.lower() != "transfer-encoding"},
        )
        answer = there.getresponse()
        data = answer.read()
        there.close()
        if fault == "lost":
            return self._reset()
        kept = {
            k: v
            for k, v in answer.getheaders()
            if k.lower()
            not in ("connection", "transfer-encoding", "content-length", "date", "server")
        }
        if fault == "page":
            return self._answer(200, b"<html>" * 50_000, {"Content-Type": "text/html"})
        if fault == "bomb":
            return self._answer(answer.status, bomb(), {**kept, "Content-Encoding": "gzip"})
        if fault in ("short", "fewer"):
            half = data[: len(data) // 2]
            self._answer(answer.status, half, kept, len(data) if fault == "short" else len(half))
            self.close_connection = True
            return None
        length = answer.getheader("Content-Length")
        return self._answer(
            answer.status,
            data,
            kept,
            int(length) if self.command == "HEAD" and length else len(data),
        )

    do_GET = do_HEAD = do_POST = do_DELETE = do_PUT

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", "0")))
        pieces = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            pieces.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(pieces)

    def _reset(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True

    def _answer(
        self, status: int, data: bytes, headers: dict[str, str], length: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in {
            **headers,
            "Content-Length": str(len(data) if length is None else length),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextlib.contextmanager
def faulty(store: Store) -> Iterator[tuple[Store, FaultyProxy]]:
    """The same store behind a proxy whose faults a test chooses."""
    proxy = FaultyProxy(store.options["endpoint_url"])
    thread = threading.Thread(
        target=proxy.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
    )
    thread.start()
    try:
        url = f"http://127.0.0.1:{proxy.server_address[1]}"
        with pytest.MonkeyPatch.context() as patch:
            if store.protocol == "gs":
                patch.setenv("STORAGE_EMULATOR_HOST", url)
            yield dataclasses.replace(store, options={**store.options, "endpoint_url": url}), proxy
    finally:
        proxy.shutdown()
        proxy.server_close()
        thread.join()
