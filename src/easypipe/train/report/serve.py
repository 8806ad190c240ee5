"""Serves the report page of a run, only on this machine, while the run trains."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

from easypipe.core.errors import EasypipeError
from easypipe.train.report.page import RunReader, live_page, news, run_readers

HOST = "127.0.0.1"
REFRESH_SECONDS = 10


def server(folders: Sequence[Path], port: int = 0) -> ThreadingHTTPServer:
    """Returns a server of the page, and of nothing else, on a port of this machine (0: a free one).

    It answers only GET, and only requests that name this machine as host: a foreign page cannot
    read it through a name that it lets point here.

    Raises:
        StateError: A folder holds no run.
        OSError: The port is taken.
    """
    readers = run_readers(folders)
    news(readers)

    class Handler(_Handler):
        runs = readers

    return ThreadingHTTPServer((HOST, port), Handler)


class _Handler(BaseHTTPRequestHandler):
    """Answers requests for the page of `runs` and for what is new on it."""

    runs: ClassVar[Sequence[RunReader]]

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):  # the browser has left the page
            super().handle()

    def do_GET(self) -> None:
        assert isinstance(self.server, ThreadingHTTPServer)
        port = self.server.server_port
        if self.headers.get("Host") not in (f"{HOST}:{port}", f"localhost:{port}"):
            self._answer(403, "text/plain", "Ask for this machine by its own name.")
            return
        try:
            if self.path == "/":
                self._answer(200, "text/html", live_page(self.runs, REFRESH_SECONDS))
            elif self.path == "/news.json":
                self._answer(200, "application/json", json.dumps(news(self.runs)))
            else:
                self._answer(404, "text/plain", "There is one page: /")
        except EasypipeError as error:  # a file of the run may be damaged by now
            self._answer(500, "text/plain", str(error))

    def _answer(self, status: int, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: str) -> None:
        """Logs nothing."""
