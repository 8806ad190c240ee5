"""Commit or nothing: a process that stops at any step leaves the old bytes or the new ones, and no
litter that stays.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import fsspec
import pytest
import xxhash
from fsspec import AbstractFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from easypipe.core import ranged, remote, storage
from easypipe.core.errors import MissingFileError, StorageError
from easypipe.core.tree import files_below
from easypipe.sources.files import resolve

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


def test_what_another_container_of_this_name_writes_is_left_for_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its processes have numbers of their own, which say nothing here."""
    monkeypatch.setattr(storage, "SWEPT_SELDOM", 0)  # a slow first sweep puts the second one off
    host = storage.owner().partition("_")[0]
    there = tmp_path / f".tmp-{host}_0123abcd_999999999-0123abcd-folder"
    there.mkdir()
    (there / "file").write_bytes(b"half")
    before = time.time() - 90_000
    os.utime(there, (before, before))
    assert storage.sweep(tmp_path) == 0
    os.utime(there / "file", (before, before))
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


@pytest.fixture(params=["local", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path) if request.param == "local" else f"memory://{tmp_path.name}"


def test_what_lies_where(root: str) -> None:
    for name in ("b", "a", "below/c", f"{storage.TEMPORARY}x"):
        storage.commit_bytes(f"{root}/{name}", name.encode() * 5)
    assert storage.names_in(root) == storage.names_in(f"{root}/") == ["a", "b", "below"]
    assert storage.names_in(f"{root}/nothing") == []
    assert [storage.size_of(f"{root}/{name}") for name in ("a", "below", "nothing")] == [
        5,
        None,
        None,
    ]
    assert [storage.exists(f"{root}/{name}") for name in ("a", "below", "no")] == [
        True,
        True,
        False,
    ]
    for name in ("b", "below", "nothing", "b"):
        storage.remove(f"{root}/{name}")
    assert storage.names_in(root) == ["a"]
    assert not storage.exists(f"{root}/below/c")
    assert storage.read_bytes(f"{root}/a") == b"aaaaa"


@pytest.mark.parametrize("size", [0, 1, 3, 4, 5, 8, 11])
def test_a_file_comes_in_pieces(root: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "CHUNK_BYTES", 4)
    content = bytes(range(size))
    storage.commit_bytes(f"{root}/x", content)
    pieces = list(storage.chunks(f"{root}/x"))
    assert b"".join(pieces) == content
    assert [len(piece) for piece in pieces] == [4] * (size // 4) + [size % 4] * (size % 4 > 0)
    with pytest.raises(FileNotFoundError):
        list(storage.chunks(f"{root}/nothing"))


class Remembering(MemoryFileSystem):
    """A store whose client remembers listings, as those of S3 and GCS do, until it is told to
    forget them.
    """

    protocol = "remembering"
    known: ClassVar[dict[str, list[dict[str, Any]]]] = {}
    find = AbstractFileSystem.find  # by these listings

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.replace("remembering://", "memory://"))

    def ls(self, path: str, detail: bool = True, **_: object) -> list[Any]:
        path = self._strip_protocol(path)
        if path not in self.known:
            self.known[path] = super().ls(path, detail=True)
        return [one if detail else one["name"] for one in self.known[path]]

    def info(self, path: str, **more: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        listed = self.known.get(self._parent(path))
        if listed is None:
            return super().info(path, **more)
        for one in listed:
            if one["name"] == path:
                return one
        raise FileNotFoundError(path)

    def invalidate_cache(self, path: str | None = None) -> None:
        self.known.clear()


def as_data(folder: str) -> list[int] | None:
    """The sizes of the files that `data_files` finds as b; None where there is none."""
    try:
        return [file.num_bytes for file in resolve(f"{folder}/b")]
    except MissingFileError:
        return None


def test_what_another_process_has_done_is_seen_whatever_the_client_remembers() -> None:
    fsspec.register_implementation("remembering", Remembering, clobber=True)
    # as another process writes: nobody tells this one's client
    others = MemoryFileSystem()
    others.pipe_file("/shared/a", b"1")
    for call, before, after in (
        (storage.names_in, ["a"], ["a", "b"]),
        (lambda _: storage.exists("remembering://shared/b"), False, True),
        (lambda _: storage.size_of("remembering://shared/b"), None, 2),
        (as_data, None, [2]),
        (lambda folder: [*files_below(folder)], ["a"], ["a", "b"]),
    ):
        assert call("remembering://shared") == before
        others.ls("/shared")
        Remembering().ls("/shared")  # which is remembered
        others.pipe_file("/shared/b", b"22")
        assert call("remembering://shared") == after
        Remembering().ls("/shared")
        others.rm("/shared/b")
        assert call("remembering://shared") == before
    Remembering().ls("/shared")
    others.pipe_file("/shared/c", b"333")
    assert not storage.create_bytes("remembering://shared/c", b"else")
    storage.remove("remembering://shared/c")
    assert not others.exists("/shared/c")


def test_only_the_first_creates() -> None:
    url = "memory://created/once.json"
    assert storage.create_bytes(url, b"first")
    assert not storage.create_bytes(url, b"other")
    assert storage.create_bytes(url, b"first"), "an attempt whose answer was lost"
    assert storage.read_bytes(url) == b"first"


def test_a_range_that_came_short_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    storage.commit_bytes("memory://bucket/whole", b"hello there")
    whole, asked = storage.remote_call, list[str]()

    def call(fs: object, name: str, *args: object, **options: object) -> object:
        asked.append(name)
        answer = whole(fs, name, *args, **options)  # type: ignore[arg-type]
        return answer[:2] if asked == ["cat_file"] and isinstance(answer, bytes) else answer

    for module in (storage, ranged):
        monkeypatch.setattr(module, "remote_call", call)
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: None)
    monkeypatch.setattr(remote, "time", clock)
    assert storage.read_range("memory://bucket/whole", 2, 8) == b"llo th"
    assert asked == ["cat_file", "info", "cat_file"]


def test_every_step_is_told_in_its_order(tmp_path: Path) -> None:
    seen: list[tuple[str, str]] = []
    storage.set_fault_hook(lambda step, path: seen.append((step, path)))
    target = str(tmp_path / "file")
    storage.commit_json(target, {"b": 1, "a": [2]})
    assert seen == [(step, target) for step in STEPS]
    assert Path(target).read_text() == '{\n "a": [\n  2\n ],\n "b": 1\n}\n'
    assert storage.read_json(target) == {"a": [2], "b": 1}
    seen.clear()
    (tmp_path / "made").mkdir()
    storage.commit_folder(tmp_path / "made", tmp_path / "named")
    assert seen == [(step, str(tmp_path / "named")) for step in STEPS[1:]]
    seen.clear()
    storage.create_bytes("memory://bucket/steps", b"x")
    assert seen == [(step, "memory://bucket/steps") for step in STEPS[2:]]


def test_an_error_of_a_disk_names_the_file(tmp_path: Path) -> None:
    def write(error: OSError) -> None:
        with storage.commit_file(tmp_path / "file"):
            raise error

    with pytest.raises(StorageError, match=r"file: cannot be written: .*No space.*Check space"):
        write(OSError(28, "No space left on device"))
    with pytest.raises(StorageError, match="elsewhere: as it is"):
        write(StorageError(at="elsewhere", problem="as it is"))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(StorageError, match=r"cannot be read: .*Check the path"):
        storage.read_bytes(tmp_path)


def test_a_folder_that_took_long_is_not_swept_again_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [50.0]

    def monotonic() -> float:
        now[0] += 1  # a sweep asks twice: it takes a second
        return now[0]

    host = storage.owner().rpartition("_")[0]
    litter = tmp_path / "deep" / f"{storage.TEMPORARY}{host}_999999999-0a1b2c3d-x"
    litter.parent.mkdir()
    monkeypatch.setattr(
        storage, "time", SimpleNamespace(monotonic=monotonic, time=time.time), raising=True
    )
    assert storage.sweep(tmp_path) == 0
    litter.write_bytes(b"half")
    now[0] += storage.SWEPT_SELDOM - 2
    assert storage.sweep(tmp_path) == 0
    assert litter.exists()
    assert storage.sweep(tmp_path) == 1
    assert not litter.exists()


def test_a_process_of_another_user_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(pid: int, signal: int) -> None:
        assert signal == 0
        raise PermissionError if pid == 7 else ProcessLookupError

    monkeypatch.setattr(os, "kill", kill)
    host = storage.owner().rpartition("_")[0]
    for owner in (f"{host}_7", f"{host}_8", f"{host}_x", "elsewhere_8"):
        (tmp_path / f"{storage.TEMPORARY}{owner}-0a1b2c3d-x").write_bytes(b"half")
    assert storage.sweep(tmp_path) == 1
    kept = {
        path.name.removeprefix(storage.TEMPORARY).partition("-")[0] for path in tmp_path.iterdir()
    }
    assert kept == {f"{host}_7", f"{host}_x", "elsewhere_8"}


@pytest.mark.parametrize(
    ("name", "inside"),
    [
        *((name, True) for name in ("a", "a/b", ".a", "a..b", "...", "a b")),
        *((name, False) for name in ("", ".", "..", "/a", "a/", "a//b", "a/../b", "a/.", "a\\..\\b", "s3://b/a", "a\0b", 7, None, ["a"])),
    ],
)  # fmt: skip
def test_which_names_stay_in_their_folder(name: object, inside: bool) -> None:
    assert storage.is_inside(name) is inside  # type: ignore[arg-type]


def test_urls_of_files_are_local() -> None:
    remotes = [
        storage.is_remote(path) for path in ("s3://b/x", "/a/b", "file:///a", "a:b", Path("x"))
    ]
    assert remotes == [True, False, False, False, False]


def test_what_cannot_be_removed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a library saves: nobody above turns an OSError into words."""

    def unlink(*_: object, **__: object) -> None:
        raise InterruptedError(errno.EINTR, "Interrupted system call")

    (tmp_path / "file").touch()
    monkeypatch.setattr(os, "unlink", unlink)
    with pytest.raises(StorageError, match=r"file: cannot be removed: .*Interrupted"):
        storage.remove(tmp_path / "file")


def test_a_file_that_another_commits_meanwhile_is_no_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes that prepare the same tokens write the same file."""
    target, usual = tmp_path / "file", Path.is_file

    def committed_after(path: Path) -> bool:
        found = usual(path)
        if path == target:
            target.write_bytes(b"theirs")
        return found

    monkeypatch.setattr(Path, "is_file", committed_after)
    storage.commit_bytes(target, b"ours")
    assert target.read_bytes() == b"ours"
