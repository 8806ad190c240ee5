"""A server on loopback that speaks as much of the Hub's API as its client needs to create, list,
upload, commit and read datasets.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

LARGE = 2000  # bytes from which a file goes to the large file store


@dataclass
class Repo:
    private: bool
    branches: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"main": {}})
    heads: dict[str, str] = field(default_factory=lambda: {"main": "0" * 40})


@dataclass
class Hub:
    """tokens: those that may write; readers: those that may not. fail: (method, part of the path)
    -> status, once each.
    """

    tokens: set[str]
    readers: set[str] = field(default_factory=set)
    repos: dict[str, Repo] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)
    uploads: list[str] = field(default_factory=list)
    fail: dict[tuple[str, str], int] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    url: str = ""

    def __enter__(self) -> Hub:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                hub.answer(self)

            do_POST = do_PUT = do_HEAD = do_GET

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        path, method = unquote(urlsplit(request.path).path), request.command
        with self.lock:
            self.requests.append((method, path))
            status, headers, content = self._route(
                method, path, parse_qs(urlsplit(request.path).query), body, request.headers
            )
        request.send_response(status)
        headers.setdefault("Content-Length", str(len(content)))
        for name, value in headers.items():
            request.send_header(name, value)
        request.end_headers()
        if method != "HEAD":
            request.wfile.write(content)

    def _route(
        self, method: str, path: str, query: dict, body: bytes, headers: Any
    ) -> tuple[int, dict[str, str], bytes]:
        for (of, part), status in list(self.fail.items()):
            if of == method and part in path:
                del self.fail[of, part]
                return said(status, {"error": "the server says no"})
        if path.startswith("/lfs/"):
            oid = path.removeprefix("/lfs/")
            assert hashlib.sha256(body).hexdigest() == oid
            self.objects[oid] = body
            self.uploads.append(oid)
            return said(200, {})
        token = (headers.get("Authorization") or "").removeprefix("Bearer ")
        if token not in self.tokens | self.readers:
            return said(401, {"error": "Invalid username or password."})
        if (
            token in self.readers
            and method != "GET"
            and method != "HEAD"
            and "paths-info" not in path
        ):
            return said(403, {"error": "You don't have the required permissions."})
        if path == "/api/validate-yaml":
            return said(200, {"errors": [], "warnings": []})
        if path == "/api/repos/create":
            wanted = json.loads(body)
            name = f"{wanted['organization']}/{wanted['name']}"
            if name in self.repos:
                return said(
                    409,
                    {
                        "error": "You already created this dataset repo",
                        "url": f"{self.url}/datasets/{name}",
                    },
                )
            private = wanted.get("private", wanted.get("visibility") == "private")
            self.repos[name] = Repo(private=private)
            return said(200, {"url": f"{self.url}/datasets/{name}"})
        found = re.match(r"(?:/api)?/datasets/([^/]+/[^/.]+)(?:\.git)?(?:/(.*))?$", path)
        if found is None or found[1] not in self.repos:
            return said(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        return self._in_repo(
            method, found[1], self.repos[found[1]], (found[2] or "").split("/"), body, headers
        )

    def _in_repo(
        self, method: str, name: str, repo: Repo, rest: list[str], body: bytes, headers: Any
    ) -> tuple[int, dict[str, str], bytes]:
        what, branch, below = rest[0], rest[1] if len(rest) > 1 else "main", "/".join(rest[2:])
        if what == "info":  # .git/info/lfs/objects/batch
            wanted = json.loads(body)["objects"]
            missing = {"upload": {"href": None}}
            objects = [
                o
                if o["oid"] in self.objects
                else o | {"actions": {k: {"href": f"{self.url}/lfs/{o['oid']}"} for k in missing}}
                for o in wanted
            ]
            return said(200, {"transfer": "basic", "objects": objects})
        if what in ("", "revision"):
            if branch not in repo.branches:
                return said(404, {"error": "no revision"}, {"X-Error-Code": "RevisionNotFound"})
            info = {
                "id": name,
                "private": repo.private,
                "sha": repo.heads[branch],
                "siblings": [],
                "tags": [],
                "downloads": 0,
            }
            return said(200, info)
        if what == "branch":
            if branch in repo.branches:
                return said(409, {"error": "Reference already exists"})
            repo.branches[branch], repo.heads[branch] = (
                dict(repo.branches["main"]),
                repo.heads["main"],
            )
            return said(200, {})
        branch = next((b for b, head in repo.heads.items() if head == branch), branch)
        if branch not in repo.branches:
            return said(404, {"error": "no revision"}, {"X-Error-Code": "RevisionNotFound"})
        files = repo.branches[branch]
        if what == "preupload":
            asked = json.loads(body)["files"]
            modes = [
                {
                    "path": f["path"],
                    "uploadMode": "lfs" if f["size"] >= LARGE else "regular",
                    "shouldIgnore": False,
                    "oid": None,
                }
                for f in asked
            ]
            return said(200, {"files": modes})
        if what == "commit":
            for line in body.splitlines():
                entry = json.loads(line)
                value = entry["value"]
                if entry["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif entry["key"] == "lfsFile":
                    files[value["path"]] = self.objects[value["oid"]]
                elif entry["key"] == "deletedFile":
                    del files[value["path"]]
            repo.heads[branch] = hashlib.sha1(body + repo.heads[branch].encode()).hexdigest()
            return said(
                200,
                {
                    "commitUrl": f"{self.url}/datasets/{name}/commit/{repo.heads[branch]}",
                    "commitOid": repo.heads[branch],
                },
            )
        if what == "tree":
            return said(
                200,
                [item for item in listing(files, recursive=True) if item["path"].startswith(below)],
            )
        if what == "paths-info":
            asked = (
                json.loads(body)["paths"] if body[:1] == b"{" else parse_qs(body.decode())["paths"]
            )
            return said(
                200, [item for item in listing(files, recursive=True) if item["path"] in asked]
            )
        if what == "resolve":
            return self._resolve(files, below, repo.heads[branch], headers)
        return said(404, {"error": f"unknown: {method} {rest}"})

    def _resolve(
        self, files: dict[str, bytes], name: str, head: str, headers: Any
    ) -> tuple[int, dict[str, str], bytes]:
        if name not in files:
            return said(404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound"})
        data, status, extra = files[name], 200, {}
        if (asked := re.match(r"bytes=(\d+)-(\d*)", headers.get("Range") or "")) is not None:
            start, end = int(asked[1]), min(int(asked[2] or len(data)), len(data) - 1)
            extra = {"Content-Range": f"bytes {start}-{end}/{len(data)}"}
            data, status = data[start : end + 1], 206
        etag = hashlib.sha1(files[name]).hexdigest()
        return (
            status,
            {
                "ETag": f'"{etag}"',
                "X-Repo-Commit": head,
                "Content-Type": "application/octet-stream",
                **extra,
            },
            data,
        )


def said(
    status: int, value: Any, headers: dict[str, str] | None = None
) -> tuple[int, dict[str, str], bytes]:
    return (
        status,
        {"Content-Type": "application/json", **(headers or {})},
        json.dumps(value).encode(),
    )


def listing(files: dict[str, bytes], *, recursive: bool) -> list[dict[str, Any]]:
    folders = {
        "/".join(name.split("/")[:depth])
        for name in files
        for depth in range(1, name.count("/") + 1)
    }
    entries = [
        {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
        for name, data in sorted(files.items())
    ]
    return entries + [
        {"type": "directory", "path": name, "oid": "0" * 40} for name in sorted(folders)
    ]
