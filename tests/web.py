"""A web server on loopback that serves bytes, ranges included, and fails as it is told to."""

from __future__ import annotations

import contextlib
import functools
import gzip
import json
import re
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote


@functools.cache
def bomb() -> bytes:
    """64 MB, packed."""
    return gzip.compress(bytes(1 << 26), 1)


class WebServer(ThreadingHTTPServer):
    """files: path → content. seen: (method, path, range) of every request.

    faults: what the next requests meet: a status, "reset", "short", "hang", "page" (HTML with status
    200), "bomb" (far more bytes than were asked for, packed), "more" (one more) or None.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, bytes] = {}
        self.faults: deque[Any] = deque()
        self.seen: list[tuple[str, str, str | None]] = []
        self.headers: list[dict[str, str]] = []
        self.ranges = True
        self.told: str | None = None  # in Content-Range, in place of the truth
        self.sent = 0
        self.late_s = 0.0
        self.waiting, self.counting = 0, threading.Lock()
        self.beside: list[int] = []  # by request, how many waited for `late_s` when it came
        self.retry_after = ""
        self.etags: dict[str, str] = {}
        self.extra: dict[str, dict[str, str]] = {}  # path → further headers
        self.denied: dict[str, tuple[int, dict[str, str]]] = {}  # path → status and headers

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is no news."""

    def json(self, path: str, value: Any) -> None:
        self.files[path] = json.dumps(value).encode()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: WebServer

    def do_GET(self) -> None:
        server, wanted = self.server, self.headers.get("Range")
        path = unquote(self.path.partition("?")[0])
        server.seen.append((self.command, self.path, wanted))
        server.headers.append(dict(self.headers))
        if server.late_s:
            self._wait()
        fault = server.faults.popleft() if server.faults else None
        if fault == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            self.close_connection = True
            return
        if fault == "hang":
            threading.Event().wait(3)
            self.close_connection = True
            return
        if isinstance(fault, int):
            return self._answer(
                fault, b"no", {"Retry-After": server.retry_after} if server.retry_after else {}
            )
        if path in server.denied:
            status, headers = server.denied[path]
            return self._answer(status, b"{}", headers)
        if path not in server.files:
            return self._answer(404, b"not here", {})
        data = server.files[path]
        headers = {"ETag": server.etags.get(path, f'"{hash(data)}"'), **server.extra.get(path, {})}
        status = 200
        if wanted and server.ranges:
            first, last = re.fullmatch(r"bytes=(\d+)-(\d*)", wanted).groups()  # type: ignore[union-attr]
            start, stop = int(first), min(len(data), int(last) + 1 if last else len(data))
            if start >= len(data):
                told = f"bytes */{len(data)}" if server.told is None else server.told
                return self._answer(416, b"", {"Content-Range": told})
            headers["Content-Range"] = (
                f"bytes {start}-{stop - 1}/{len(data)}" if server.told is None else server.told
            )
            data, status = data[start:stop], 206
        if fault == "page":
            return self._answer(200, b"<html>" * 10_000, {"Content-Type": "text/html"})
        if fault == "bomb":
            return self._answer(status, bomb(), {**headers, "Content-Encoding": "gzip"})
        if fault == "more":
            return self._answer(status, data + b"x", headers)
        if fault == "short":  # announces it all, sends half, hangs up
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data[: len(data) // 2])
            self.close_connection = True
            return None
        return self._answer(status, data, headers)

    do_HEAD = do_GET

    def _wait(self) -> None:
        server = self.server
        with server.counting:
            server.beside.append(server.waiting)
            server.waiting += 1
        time.sleep(server.late_s)
        with server.counting:
            server.waiting -= 1

    def _answer(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
            self.server.sent += len(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextlib.contextmanager
def web_server() -> Iterator[WebServer]:
    server = WebServer()
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
    )
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
