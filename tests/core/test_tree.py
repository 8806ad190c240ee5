"""Files of a folder with sizes and times, whatever a store calls these."""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec import AbstractFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from easypipe.core import storage
from easypipe.core.errors import MissingFileError, SourceError, StorageError
from easypipe.core.tree import Found, _written, files_below
from easypipe.sources.files import resolve

WHEN = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


@pytest.mark.parametrize(
    ("info", "written"),
    [
        ({"LastModified": WHEN}, WHEN.timestamp()),  # S3
        ({"updated": WHEN.isoformat()}, WHEN.timestamp()),  # GCS
        ({"mtime": 12.5}, 12.5),  # a disk
        ({"created": WHEN, "LastModified": None}, WHEN.timestamp()),  # memory
        ({"created": 1.0, "mtime": 3.0, "updated": WHEN}, WHEN.timestamp()),
        ({"mtime": 0, "created": 7}, 7.0),
    ],
)
def test_when_a_file_was_written(info: dict[str, Any], written: float) -> None:
    assert _written(info) == written


def test_now_where_a_store_does_not_tell() -> None:
    before = time.time()
    assert before <= _written({"size": 3}) <= time.time()


def test_a_folder_that_cannot_be_listed_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its token files would seem to be named by no manifest."""
    storage.commit_bytes(tmp_path / "manifests" / "a.json", b"{}")
    storage.commit_bytes(tmp_path / "tokens" / "a.arrow", b"")

    def refused(path: Any, listed: Any = os.scandir) -> Any:
        if str(path) == str(tmp_path / "manifests"):
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(os, "scandir", refused)
    monkeypatch.setattr(os, "listdir", lambda path: [one.name for one in refused(path)])
    with pytest.raises(
        StorageError, match=r"manifests: cannot be listed: Permission denied\. Chec"
    ):
        files_below(tmp_path)
    with pytest.raises(StorageError, match=r"manifests: cannot be listed: .*Check the path and pe"):
        storage.names_in(tmp_path / "manifests")


def test_every_file_below_a_folder(tmp_path: Path) -> None:
    names = ["a", "b/c", "b/d/e"]
    for i, name in enumerate(names):
        storage.commit_bytes(tmp_path / name, b"x" * i)
        storage.commit_bytes(f"memory://tree/{tmp_path.name}/{name}", b"x" * i)
        os.utime(tmp_path / name, (i + 5, i + 5))
    expected = {name: Found(i, i + 5) for i, name in enumerate(names)}
    assert files_below(tmp_path) == files_below(f"file://{tmp_path}") == expected
    assert list(files_below(tmp_path)) == sorted(names)
    found = files_below(f"memory://tree/{tmp_path.name}")
    assert {name: one.num_bytes for name, one in found.items()} == {"a": 0, "b/c": 1, "b/d/e": 2}
    for nothing in (tmp_path / "no", f"memory://tree/{tmp_path.name}/no", tmp_path / "a"):
        assert not files_below(nothing).keys() - {""}


class Walked(MemoryFileSystem):
    """A store that is listed folder by folder, by the methods of fsspec that leave out errors."""

    protocol = "walked"
    locked = ""
    find = AbstractFileSystem.find

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return f"/{path.partition('://')[2] or path}".replace("//", "/").rstrip("/")

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        if self.locked and path.strip("/").endswith(self.locked):
            raise PermissionError(13, "Permission denied", path)
        return super().ls(path, detail, **kwargs)


class S3Like(Walked):
    """Like s3fs, which asks once only where everything is wanted."""

    protocol = "s3like"

    def find(self, path: str, maxdepth: int | None = None, **kwargs: Any) -> Any:
        kind = AbstractFileSystem if maxdepth else MemoryFileSystem
        return kind.find(self, path, maxdepth=maxdepth, **kwargs)


@pytest.mark.parametrize("kind", [Walked, S3Like])
def test_a_folder_of_a_store_that_cannot_be_listed_is_an_error_and_not_left_out(
    tmp_path: Path, kind: type[Walked], monkeypatch: pytest.MonkeyPatch
) -> None:
    fsspec.register_implementation(kind.protocol, kind, clobber=True)
    root = f"{kind.protocol}://{tmp_path.name}"
    for name in ("a.jsonl", "y1/b.jsonl", "y2/b.jsonl", "y2/deep/c.jsonl", "z/b.jsonl"):
        storage.commit_bytes(f"{root}/{name}", b"{}\n")
    matches = {
        "": ["a.jsonl", "y1/b.jsonl", "y2/b.jsonl", "y2/deep/c.jsonl", "z/b.jsonl"],
        "**/*.jsonl": ["a.jsonl", "y1/b.jsonl", "y2/b.jsonl", "y2/deep/c.jsonl", "z/b.jsonl"],
        "y*/*.jsonl": ["y1/b.jsonl", "y2/b.jsonl"],
        "*/b.jsonl": ["y1/b.jsonl", "y2/b.jsonl", "z/b.jsonl"],
        "*/deep/*": ["y2/deep/c.jsonl"],
        "y2/*/c*": ["y2/deep/c.jsonl"],
        "*.jsonl": ["a.jsonl"],
        "?[12]/?.json?": ["y1/b.jsonl", "y2/b.jsonl"],
    }

    def found(pattern: str) -> list[str]:
        files = resolve(f"{root}/{pattern}".rstrip("/"))
        return [file.path.partition(f"/{tmp_path.name}/")[2] for file in files]

    for pattern, expected in matches.items():
        assert found(pattern) == expected, pattern
    with pytest.raises(MissingFileError, match="the pattern matches no file"):
        found("nowhere/*/b.jsonl")
    assert sorted(files_below(root)) == matches[""]
    monkeypatch.setattr(kind, "locked", "y2")
    at_once = ("", "**/*.jsonl") if kind is S3Like else ()
    for pattern, expected in matches.items():
        if "y2" in "".join(expected) and pattern not in at_once:
            with pytest.raises(SourceError, match="Permission denied"):
                found(pattern)
    if not at_once:
        with pytest.raises(StorageError, match="Permission denied"):
            files_below(root)
    assert found("z/*.jsonl") == ["z/b.jsonl"]
