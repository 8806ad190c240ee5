"""Files of a folder with sizes and times, whatever a store calls these."""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from easypipe.core import storage
from easypipe.core.errors import StorageError
from easypipe.core.tree import Found, _written, files_below

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
