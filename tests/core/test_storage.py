"""Commit or nothing: a process that stops at any step leaves the old bytes or the new ones, and no
litter that stays.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import xxhash

from easypipe.core import storage
from easypipe.core.errors import MissingFileError, StorageError

STEPS = ("write", "sync", "rename", "committed")


class Stop(RuntimeError):
    pass


@pytest.mark.parametrize("step", STEPS)
def test_a_fault_leaves_old_or_new(tmp_path: Path, step: str) -> None:
    target = tmp_path / "a" / "file"
    storage.commit_bytes(target, b"old")

    def fail(at: str, path: str) -> None:
        if at == step:
            raise Stop(step)

    storage.set_fault_hook(fail)
    with pytest.raises(Stop):
        storage.commit_bytes(target, b"new")
    storage.set_fault_hook(None)
    assert target.read_bytes() == (b"new" if step == "committed" else b"old")
    assert [p.name for p in target.parent.iterdir()] == ["file"]


@pytest.mark.parametrize("step", STEPS)
def test_a_kill_leaves_old_or_new_and_is_swept(tmp_path: Path, step: str) -> None:
    target = tmp_path / "file"
    storage.commit_bytes(target, b"old")
    script = (
        "import os, sys\nfrom easypipe.core import storage\n"
        "storage.set_fault_hook(lambda step, path: os._exit(9) if step == sys.argv[2] else None)\n"
        "storage.commit_bytes(sys.argv[1], b'new')\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(target), step], check=False)
    assert done.returncode == 9
    assert target.read_bytes() == (b"new" if step == "committed" else b"old")
    litter = [p for p in tmp_path.iterdir() if p != target]
    assert storage.sweep(tmp_path) == len(litter)
    assert list(tmp_path.iterdir()) == [target]


def test_an_exception_in_the_block_discards(tmp_path: Path) -> None:
    def half_written() -> None:
        with storage.commit_file(tmp_path / "file") as (temporary, _):
            temporary.write_bytes(b"half")
            raise Stop

    with pytest.raises(Stop):
        half_written()
    assert list(tmp_path.iterdir()) == []


def test_stamp_and_object_stores() -> None:
    stamp = storage.commit_bytes("memory://bucket/x", b"hello")
    assert stamp.num_bytes == 5
    assert len(stamp.checksum) == 32
    assert storage.read_bytes("memory://bucket/x") == b"hello"
    assert storage.exists("memory://bucket/x")
    assert not storage.exists("memory://bucket/y")


@pytest.mark.parametrize(
    "size", [0, 1, storage.HASHED_BYTES - 1, storage.HASHED_BYTES, 2 * storage.HASHED_BYTES + 7]
)
def test_the_checksum_of_a_file_is_that_of_its_bytes(tmp_path: Path, size: int) -> None:
    content = bytes(i * 37 % 251 for i in range(size))
    stamp = storage.commit_bytes(tmp_path / "x", content)
    assert (
        stamp
        == storage.checksum(tmp_path / "x")
        == storage.Stamp(num_bytes=size, checksum=xxhash.xxh3_128_hexdigest(content))
    )


def test_a_range_is_whole_or_an_error_and_temporaries_are_not_listed(tmp_path: Path) -> None:
    storage.commit_bytes("memory://bucket/short", b"hello")
    assert storage.read_range("memory://bucket/short", 1, 5) == b"ello"
    with pytest.raises(StorageError, match="has 5 bytes, 3 to 9 were asked for"):
        storage.read_range("memory://bucket/short", 3, 9)
    with storage.commit_file(tmp_path / "file") as (temporary, _):
        temporary.write_bytes(b"half")
        assert storage.names_in(tmp_path) == []
    assert storage.names_in(tmp_path) == ["file"]


def test_errors_name_the_path(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match=r"nothing: no such file"):
        storage.read_bytes(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError):
        storage.read_bytes("memory://bucket/nothing")
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match="cannot be written"):
        storage.commit_bytes(tmp_path / "file" / "below", b"x")
    with pytest.raises(StorageError, match="not JSON"):
        storage.read_json(tmp_path / "file")
    with pytest.raises(StorageError, match="nosuch:// paths"):
        storage.filesystem("nosuch://bucket/x")


def test_file_and_folder_are_on_the_disk_before_and_after_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rename that reaches the disk before the bytes, or never, would be a commit that a power cut
    undoes.
    """
    events: list[str] = []
    fsync, replace = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
        events.append("folder" if name == tmp_path.name else "content")
        fsync(descriptor)

    def replaced(source: Path, target: str) -> None:
        events.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    storage.commit_bytes(tmp_path / "file", b"new")
    assert events == ["content", "rename", "folder"]


def test_a_sweep_leaves_what_a_living_process_is_writing(tmp_path: Path) -> None:
    with storage.commit_file(tmp_path / "file") as (temporary, _):
        temporary.write_bytes(b"half")
        assert storage.sweep(tmp_path) == 0
        assert temporary.exists()
    assert (tmp_path / "file").read_bytes() == b"half"


def test_what_another_container_of_this_name_writes_is_left_for_a_day(tmp_path: Path) -> None:
    """Its processes have numbers of their own, which say nothing here."""
    host = storage.owner().partition("_")[0]
    there = tmp_path / f".tmp-{host}_0123abcd_999999999-0123abcd-folder"
    there.mkdir()
    (there / "file").write_bytes(b"half")
    before = time.time() - 90_000
    os.utime(there, (before, before))
    assert storage.sweep(tmp_path) == 0
    os.utime(there / "file", (before, before))
    time.sleep(0.2)
    assert storage.sweep(tmp_path) == 1
    assert list(tmp_path.iterdir()) == []


def test_what_is_committed_stays_so_where_the_temporary_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, missing_ok: bool = False) -> None:
        raise PermissionError(13, "no", str(self))

    monkeypatch.setattr(Path, "unlink", refuse)
    storage.commit_bytes(tmp_path / "a", b"whole")
    assert (tmp_path / "a").read_bytes() == b"whole"


def test_the_first_commit_in_a_folder_removes_what_killed_processes_left(tmp_path: Path) -> None:
    """Folders that nobody sweeps as a whole: of runs, exports, noted configs."""
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    host = storage.owner().rpartition("_")[0]
    litter = tmp_path / f"{storage.TEMPORARY}{host}_{dead.pid}-0a1b2c3d-plan.json"
    litter.write_bytes(b"half")
    unfinished = tmp_path / f"{storage.TEMPORARY}{host}_{dead.pid}-0a1b2c3d-exported"
    (unfinished / "deep").mkdir(parents=True)
    theirs = tmp_path / f"{storage.TEMPORARY}elsewhere_{dead.pid}-0a1b2c3d-plan.json"
    theirs.write_bytes(b"half")
    storage.commit_bytes(tmp_path / "file", b"new")
    assert sorted(tmp_path.iterdir()) == [theirs, tmp_path / "file"]


def test_new_folders_are_on_the_disk_before_a_file_in_them_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(storage, "sync", synced.append)
    storage.commit_bytes(tmp_path / "a" / "b" / "file", b"new")
    assert {tmp_path, tmp_path / "a"} <= {*synced[:-2]}
    assert synced[-1] == tmp_path / "a" / "b"
