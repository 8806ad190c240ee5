"""A mirror of the Hub on loopback, from which datasets are read through the real client."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from easypipe.core import remote
from web import WebServer, web_server

MAIN = "a" * 40


def publish(
    server: WebServer,
    repo: str,
    files: dict[str, bytes],
    *,
    commit: str = MAIN,
    revisions: tuple[str, ...] = ("main",),
    **info,
) -> None:
    siblings = []
    for name, data in files.items():
        sha = hashlib.sha256(data).hexdigest()
        lfs = (
            {"lfs": {"sha256": sha, "size": len(data), "pointerSize": 100}}
            if name.endswith((".parquet", ".gz"))
            else {}
        )
        siblings.append({"rfilename": name, "size": len(data), "blobId": sha[:40], **lfs})
        path = f"/datasets/{repo}/resolve/{commit}/{name}"
        server.files[path] = data
        server.etags[path] = f'"{sha}"'
        server.extra[path] = {"X-Repo-Commit": commit}
    answer = {
        "_id": "1",
        "id": repo,
        "sha": commit,
        "private": False,
        "gated": False,
        "siblings": siblings,
        "tags": [],
        "downloads": 0,
        "likes": 0,
        **info,
    }
    for revision in (*revisions, commit):
        server.json(f"/api/datasets/{repo}/revision/{revision}", answer)
    if "main" in revisions:
        server.json(f"/api/datasets/{repo}", answer)


@pytest.fixture
def hub_mirror(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[WebServer]:
    with web_server() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # the server is on this machine
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        remote.set_retry_policy(
            remote.RetryPolicy(
                attempts=4,
                first_wait_s=0.01,
                longest_wait_s=0.02,
                attempt_timeout_s=5,
                deadline_s=10,
            )
        )
        yield server
        remote.set_retry_policy(None)
