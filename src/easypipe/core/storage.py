# pyright: strict
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingTypeStubs=false
"""Reads and commits files and JSON, on disk or in a store, atomically; sweeps old temporaries.

Law (commit or nothing): a reader of `path` sees the old bytes or the new ones, whenever this
process is killed. A local commit writes a temporary file, fsyncs it, renames it and fsyncs the
folder. A commit to an object store is one PUT of the finished file, checked by the store's checksum
of what arrived (S3, GCS) or its size. `create_bytes` makes it only if there is no file yet. Every
call to a store is retried if it fails for a transient reason (core/remote.py).

`set_fault_hook` lets tests stop the process at any step.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import json
import os
import re
import secrets
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import xxhash
from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs

from easypipe.core.errors import EasypipeError, MissingFileError, StorageError, raising
from easypipe.core.ranged import http_facts, http_options, http_range, object_range
from easypipe.core.remote import (
    ShortReadError,
    StorageOptions,
    is_http,
    never_answered,
    public_url,
    remote_call,
    retrying,
    tell,
)
from easypipe.core.trust import hub_token
from easypipe.core.values import Arguments, JsonValue

T = TypeVar("T")
CHUNK_BYTES = 1 << 22
# bytes that are read and hashed at a time, in the same buffer: hashing is three times as fast if it
# fits a core's cache
HASHED_BYTES = 1 << 18
TEMPORARY = ".tmp-"

# a folder is swept again after this many times the duration of the last sweep
SWEPT_SELDOM = 100
OLD_S = 86_400.0  # a temporary file that was not written to for this long has no writer

_sweep_again: dict[Path, float] = {}  # when a folder may be swept again, by time.monotonic
_swept: set[Path] = set()  # folders in which this process removed leftovers of killed ones

_fault: Callable[[str, str], None] | None = None


def set_fault_hook(hook: Callable[[str, str], None] | None) -> None:
    """Sets a function for tests that is called before each step of a commit.

    Args:
        hook: Called as `hook(step, path)`, where step is "write", "sync", "rename" or "committed";
            it may raise or exit there. None removes it.
    """
    global _fault
    _fault = hook


def _step(step: str, path: str) -> None:
    if _fault is not None:
        _fault(step, path)


@dataclass(frozen=True, kw_only=True)
class Stamp:
    """The size and the checksum of a committed file.

    Args:
        num_bytes: The size in bytes.
        checksum: XXH3-128 of the content, in hex.
    """

    num_bytes: int
    checksum: str


def is_remote(path: str | Path) -> bool:
    return "://" in str(path) and not str(path).startswith("file://")


def filesystem(
    path: str | Path, storage_options: StorageOptions = None
) -> tuple[AbstractFileSystem, str]:
    """Returns the fsspec filesystem of `path`, and the path in that filesystem's form.

    Raises:
        StorageError: The protocol is unknown, its fsspec package or its options are missing, no
            bucket is named, or a chain of URLs is more than a cache of a store.
    """
    _refuse_chain(str(path))
    options = dict(storage_options or {})
    if re.match(r"(s3a?|gc?s|https?):///", str(path)):
        place = "server" if is_http(str(path)) else "bucket"
        problem, fix = f"names no {place}", f"Write it behind the two slashes: //{place}/path."
        raise StorageError(at=public_url(str(path)), problem=problem, fix=fix)
    if str(path).startswith("hf://"):
        options["token"] = hub_token(options.get("endpoint"), options.get("token"))
    elif is_http(str(path)):
        options = http_options(str(path), options)
    try:
        return url_to_fs(str(path), **options)
    # a filesystem that lacks its options raises the last three
    except (ValueError, ImportError, TypeError, AttributeError, IsADirectoryError) as error:
        at, protocol = public_url(str(path)), str(path).partition("://")[0]
        extra = {"gs": "gcs", "gcs": "gcs", "s3": "s3", "s3a": "s3"}.get(protocol)
        fix = (
            f"pip install 'easypipe[{extra}]'."
            if extra
            else f"Install the fsspec package for {protocol}."
            if isinstance(error, ValueError | ImportError)
            else f"Give what fsspec needs for {protocol}:// in storage_options."
        )
        problem = f"cannot open {protocol}:// paths: {tell(error, str(path), storage_options)}"
    # raised without the library's error, which may contain credentials
    raise StorageError(at=at, problem=problem, fix=fix)


def _refuse_chain(url: str) -> None:
    """Raises StorageError for URLs joined by `::`, except a cache of a store (simplecache::s3://).

    Names of other files could not be made from them.
    """
    *first, last = url.split("::")
    inner = next((link for link in first if "://" in link), None)
    if is_http(url) or not first or (inner is None and is_remote(last)):
        return
    below = public_url("::".join(url.split("::")[first.index(inner) + 1 :]) if inner else last)
    raise StorageError(
        at="::".join(map(public_url, url.split("::"))),
        problem="URLs joined by '::' are read only as a cache of a store",
        fix=f"Give {below!r} alone."
        if inner is None
        else f"Give {public_url(inner)!r}, with storage_options={{'fo': {below!r}}}.",
    )


def is_inside(name: JsonValue) -> bool:
    """Returns whether `name`, read from a file, names a file in or below that file's folder."""
    return (
        isinstance(name, str)
        and "\0" not in name
        and "://" not in name
        and not {"", ".", ".."} & {*name.replace("\\", "/").split("/")}
    )


def exists(path: str | Path, storage_options: StorageOptions = None) -> bool:
    """Returns whether there is a file or folder at `path`.

    Raises:
        StorageError: The path cannot be checked.
    """
    if not is_remote(path):
        with raising(StorageError, path, "cannot be read", "Check the path and permissions."):
            return Path(_local(path)).exists()
    try:
        if is_http(str(path)):
            ask(path, storage_options, http_facts, kind="facts")
        else:
            ask(path, storage_options, _fresh_info)
    except MissingFileError:
        return False
    return True


def read_bytes(path: str | Path, storage_options: StorageOptions = None) -> bytes:
    """Returns all bytes of a file.

    Raises:
        MissingFileError: There is no file.
        StorageError: It cannot be read.
    """
    try:
        if not is_remote(path):
            return endless_refused(path).read_bytes()
        return bytes(
            ask(
                path,
                storage_options,
                lambda fs, name, timeout_s: remote_call(fs, "cat_file", timeout_s, name),
            )
        )
    except EasypipeError:
        raise
    except FileNotFoundError as error:
        raise MissingFileError(at=str(path), problem="no such file") from error
    except OSError as error:
        raise StorageError(
            at=str(path),
            problem=f"cannot be read: {error}",
            fix="Check the path and permissions.",
        ) from error


def read_range(
    path: str | Path, start: int, stop: int, storage_options: StorageOptions = None
) -> bytes:
    """Returns all bytes from `start` to `stop` of a remote file.

    Raises:
        MissingFileError: There is no file.
        StorageError: The file is shorter, or cannot be read.
    """

    def call(fs: AbstractFileSystem, name: str, timeout_s: float) -> bytes:
        try:
            if is_http(str(path)):
                return http_range(fs, str(path), start, stop, "", timeout_s)
            return object_range(fs, name, start, stop, "", timeout_s)
        except ShortReadError:
            size = int(_fresh_info(fs, name, timeout_s).get("size") or 0)
            if size < stop:
                raise StorageError(
                    at=public_url(str(path)),
                    problem=f"has {size} bytes, {start} to {stop} were asked for",
                ) from None
            raise

    return ask(path, storage_options, call, stop - start, "range")


def chunks(path: str | Path, storage_options: StorageOptions = None) -> Iterator[bytes]:
    """Yields the bytes of a file in order, CHUNK_BYTES at a time.

    Raises:
        FileNotFoundError: There is no file.
        OSError: It cannot be read.
    """
    if not is_remote(path):
        with open(endless_refused(path), "rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                yield chunk
        return
    size = size_of(path, storage_options)
    if size is None:
        raise MissingFileError(at=public_url(str(path)), problem="no such file")
    for start in range(0, size, CHUNK_BYTES):
        yield read_range(path, start, min(start + CHUNK_BYTES, size), storage_options)


def size_of(path: str | Path, storage_options: StorageOptions = None) -> int | None:
    """Returns the size of a file in bytes; None if there is no file."""
    if not is_remote(path):
        local = _local(path)
        return local.stat().st_size if local.is_file() else None
    try:
        if is_http(str(path)):
            return ask(path, storage_options, http_facts, kind="facts").num_bytes
        found = ask(path, storage_options, _fresh_info, kind="facts")
    except MissingFileError:
        return None
    return None if found.get("type") == "directory" else int(found.get("size") or 0)


def names_in(folder: str | Path, storage_options: StorageOptions = None) -> list[str]:
    """Returns the sorted names directly in a folder, without temporaries; [] if there is none."""

    def call(fs: AbstractFileSystem, name: str, timeout_s: float) -> list[str]:
        fs.invalidate_cache()  # stores remember listings; another process may have written since
        return [str(path) for path in remote_call(fs, "ls", timeout_s, name, detail=False)]

    if is_remote(folder):
        try:
            found = ask_long(folder, storage_options, call)
        except MissingFileError:
            return []
    else:
        local = _local(folder)
        with raising(StorageError, folder, "cannot be listed", "Check the path and permissions."):
            found = [path.name for path in local.iterdir()] if local.is_dir() else []
    names = {name.rstrip("/").rpartition("/")[2] for name in found}
    return sorted(name for name in names if name and not name.startswith(TEMPORARY))


def remove(path: str | Path, storage_options: StorageOptions = None) -> None:
    """Removes a file, or a folder with its content; does nothing if there is none.

    Raises:
        StorageError: It cannot be removed.
    """

    def call(fs: AbstractFileSystem, name: str, timeout_s: float) -> None:
        fs.invalidate_cache()
        remote_call(fs, "rm", timeout_s, name, recursive=True)

    if not is_remote(path):
        local = _local(path)
        with raising(StorageError, path, "cannot be removed", "Remove it, or run again."):
            shutil.rmtree(local) if local.is_dir() else local.unlink(missing_ok=True)
        return
    with contextlib.suppress(MissingFileError):
        ask(path, storage_options, call)


def _fresh_info(fs: AbstractFileSystem, name: str, timeout_s: float) -> Any:
    fs.invalidate_cache()
    return remote_call(fs, "info", timeout_s, name)


def ask(
    path: str | Path,
    storage_options: StorageOptions,
    call: Callable[[AbstractFileSystem, str, float], T],
    num_bytes: int = 0,
    kind: str | None = "",
) -> T:
    """Calls a store, with retries if that fails for a transient reason.

    Args:
        path: The URL that the call is about.
        storage_options: Passed to fsspec.
        call: Makes one attempt; called as `call(filesystem, name, timeout in s)`.
        num_bytes: As in `retrying`.
        kind: As in `retrying`.

    Raises:
        MissingFileError: There is nothing at `path`.
        StorageError: All attempts failed.
    """

    def attempt(timeout_s: float) -> T:
        fs, name = filesystem(path, storage_options)
        return call(fs, name, timeout_s)

    return retrying(str(path), attempt, options=storage_options, num_bytes=num_bytes, kind=kind)


def ask_long(
    path: str | Path,
    storage_options: StorageOptions,
    call: Callable[[AbstractFileSystem, str, float], T],
) -> T:
    """Does what `ask` does, for listings, which may take minutes.

    A host that has not answered yet first gets a short request, because its time limit is short.
    """
    if never_answered(str(path)):
        try:
            ask(path, storage_options, _fresh_info)
        except EasypipeError:
            if never_answered(str(path)):
                raise
    return ask(path, storage_options, call)


def read_json(path: str | Path, storage_options: StorageOptions = None) -> Any:
    """Returns the value of a JSON file.

    Raises:
        MissingFileError: There is no file.
        StorageError: It cannot be read, or is not JSON.
    """
    data = read_bytes(path, storage_options)
    with raising(StorageError, path, "not JSON", "Delete the file and run again.", ValueError):
        return json.loads(data)


def commit_bytes(
    path: str | Path, data: bytes, storage_options: StorageOptions = None, *, synced: bool = True
) -> Stamp:
    with commit_file(path, storage_options, synced=synced) as (temporary, stamp):
        temporary.write_bytes(data)
    return stamp()


def create_bytes(path: str | Path, data: bytes, storage_options: StorageOptions = None) -> bool:
    """Commits `data` at a URL only if there is no file yet.

    On S3 (If-None-Match) and GCS (ifGenerationMatch=0) this is one atomic step, so exactly one of
    several writers wins. For other fsspec stores it checks first and then writes.

    Returns:
        False if there is a file with other bytes.
    """
    _step("rename", str(path))
    try:
        _upload(
            path,
            storage_options,
            len(data),
            lambda fs, name, timeout_s: _create(fs, name, data, timeout_s),
        )
    except FileExistsError:
        # an earlier attempt, whose answer was lost, may have made it
        return read_bytes(path, storage_options) == data
    _step("committed", str(path))
    return True


def commit_json(path: str | Path, value: Any, storage_options: StorageOptions = None) -> Stamp:
    return commit_bytes(path, json_bytes(value), storage_options)


def json_bytes(value: Any) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()


@contextlib.contextmanager
def commit_file(
    path: str | Path, storage_options: StorageOptions = None, *, synced: bool = True
) -> Generator[tuple[Path, Callable[[], Stamp]]]:
    """Commits a file that the caller writes under a temporary name.

    In `with commit_file(path) as (temporary, stamp):` write `temporary`; leaving the block commits
    it, an exception discards it.

    Args:
        path: The file.
        storage_options: Passed to fsspec.
        synced: Whether the file is then synced to disk. If not, a power loss may damage or remove
            it, so this is only for files that are checked and can be made again.

    Yields:
        The temporary path, and `stamp()`, which returns size and checksum after the block.

    Raises:
        StorageError: The bytes cannot be written.
    """
    done: list[Stamp] = []
    remote = is_remote(path)
    local = Path(path) if remote else _local(path)
    target = str(path) if remote else str(local)
    with raising(StorageError, target, "cannot be written", "Check the path and permissions."):
        if remote:
            folder = Path(tempfile.mkdtemp(prefix="easypipe-"))
            temporary = folder / "commit"
        else:
            if _is_device(local):  # a rename would replace the device
                raise FileExistsError(errno.EEXIST, "it is a pipe, a socket or a device")
            temporary, folder = temporary_of(local), None
    try:
        _step("write", target)
        try:
            yield temporary, lambda: done[0]
            _step("sync", target)
            if synced:
                sync(temporary)
            stamp = checksum(temporary)
            _step("rename", target)
            if remote:
                _put(temporary, target, storage_options)
            else:
                os.replace(temporary, target)
                if synced:
                    sync(local.parent)
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            raise StorageError(
                at=target, problem=f"cannot be written: {error}", fix="Check space and permissions."
            ) from error
        done.append(stamp)
        _step("committed", target)
    finally:
        with contextlib.suppress(OSError):  # it was renamed, or an error is already being raised
            temporary.unlink(missing_ok=True)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def commit_folder(temporary: Path, target: Path) -> None:
    """Renames the local folder `temporary` to `target` after its content is synced to disk.

    Args:
        temporary: A folder on the same file system.
        target: A name that does not exist, or an empty folder.
    """
    _step("sync", str(target))
    for folder, _, files in os.walk(temporary):
        for file in files:
            sync(Path(folder, file))
        sync(Path(folder))
    _step("rename", str(target))
    os.rename(temporary, target)
    sync(target.parent)
    _step("committed", str(target))


def _put(file: Path, target: str, storage_options: StorageOptions) -> None:
    """Uploads a file, and checks what arrived."""
    size = file.stat().st_size

    def call(fs: AbstractFileSystem, name: str, timeout_s: float) -> None:
        remote_call(fs, "put_file", timeout_s, str(file), name, **_checked(fs))
        if (
            not _checks(fs)
            and int(remote_call(fs, "info", timeout_s, name).get("size") or 0) != size
        ):
            raise ShortReadError(f"not all of {size} bytes arrived")

    _upload(target, storage_options, size, call)


def _create(fs: AbstractFileSystem, name: str, data: bytes, timeout_s: float) -> None:
    """Uploads bytes if there is no file of that name."""
    fs.invalidate_cache()
    remote_call(fs, "pipe_file", timeout_s, name, data, mode="create", **_checked(fs))


def _checks(fs: AbstractFileSystem) -> bool:
    """Returns whether the client compares checksums with the store.

    botocore sends one by default; `_checked` makes gcsfs do so.
    """
    return bool({"gs", "s3"} & set([fs.protocol] if isinstance(fs.protocol, str) else fs.protocol))


def _checked(fs: AbstractFileSystem) -> Arguments:
    return {"consistency": "md5"} if "gs" in fs.protocol else {}


def _upload(
    path: str | Path,
    storage_options: StorageOptions,
    num_bytes: int,
    call: Callable[[AbstractFileSystem, str, float], None],
) -> None:
    """Runs an upload with retries.

    Raises:
        FileExistsError: `call` raised it.
        StorageError: It failed for any other permanent reason.
    """

    def attempt(fs: AbstractFileSystem, name: str, timeout_s: float) -> bool:
        try:
            call(fs, name, timeout_s)
        except FileExistsError:
            return False
        return True

    try:
        done = ask(path, storage_options, attempt, num_bytes)
    except (StorageError, MissingFileError) as error:  # a bucket may be missing
        fix = error.fix or "Check the address, storage_options and permissions."
        raise StorageError(
            at=error.at, problem=f"cannot be written: {error.problem}", fix=fix
        ) from None
    if not done:
        raise FileExistsError(public_url(str(path)))


def checksum(path: str | Path, storage_options: StorageOptions = None) -> Stamp:
    """Returns size and XXH3-128 of a file.

    Raises:
        FileNotFoundError: There is no file.
        OSError: It cannot be read.
    """
    hasher, total = xxhash.xxh3_128(), 0
    if is_remote(path):
        for chunk in chunks(path, storage_options):
            hasher.update(chunk)
            total += len(chunk)
        return Stamp(num_bytes=total, checksum=hasher.hexdigest())
    held = memoryview(bytearray(HASHED_BYTES))
    with open(endless_refused(path), "rb", buffering=0) as file:
        while count := file.readinto(held):
            hasher.update(held[:count])
            total += count
    return Stamp(num_bytes=total, checksum=hasher.hexdigest())


def temporary_of(target: Path) -> Path:
    """Returns a new temporary name next to the local `target`, for the file that will replace it.

    It creates the folder. The first time that this process writes there, it removes the temporaries
    of killed processes.

    Raises:
        OSError: The folder cannot be created or listed.
    """
    folder = target.parent.absolute()
    make_folder(folder)
    if folder not in _swept:
        _swept.add(folder)
        _sweep(folder.iterdir())
    return folder / f"{TEMPORARY}{owner()}-{secrets.token_hex(4)}-{target.name}"


def make_folder(folder: Path) -> None:
    """Creates a local folder and its parents, and syncs them to disk."""
    if folder.is_dir():
        return
    missing = list(itertools.filterfalse(Path.is_dir, (folder, *folder.parents)))
    folder.mkdir(parents=True, exist_ok=True)
    for made in missing:
        with contextlib.suppress(PermissionError):  # writing is allowed there, but not reading
            sync(made.parent)


def sweep(folder: str | Path) -> int:
    """Removes temporaries that killed processes of this host left in a folder and those below it.

    A folder that takes long to search is not searched again soon, so that this costs little in a
    process that writes often there.

    Returns:
        How many temporaries were removed.
    """
    here, began = Path(folder).absolute(), time.monotonic()
    if began < _sweep_again.get(here, 0.0):
        return 0
    swept = _sweep(here.rglob(f"{TEMPORARY}*"))
    ended = time.monotonic()
    _sweep_again[here] = ended + SWEPT_SELDOM * (ended - began)
    return swept


def _sweep(paths: Iterable[Path]) -> int:
    leftovers = [path for path in paths if path.name.startswith(TEMPORARY)]
    swept = 0
    for leftover in filter(_is_left, leftovers):
        with contextlib.suppress(OSError):  # another process was faster, or access is denied
            remove(leftover)
            swept += 1
    return swept


def _is_left(temporary: Path) -> bool:
    """Returns whether the process that wrote a temporary has ended.

    A process of this host with ids from another counter, for example in another container, counts
    as ended a day after it last wrote.
    """
    owner, _, pid = temporary.name.removeprefix(TEMPORARY).split("-", 2)[0].rpartition("_")
    if owner == _numbered_by():
        return pid.isdigit() and not _alive(int(pid))
    try:
        return owner.partition("_")[0] == _host() and time.time() - _changed(temporary) > OLD_S
    except OSError:  # it is gone by now
        return False


def _changed(path: Path) -> float:
    """Returns when a file, or anything in a folder, was last written to."""
    inside = path.rglob("*") if path.is_dir() else ()
    return max(one.lstat().st_mtime for one in (path, *inside))


def endless_refused(path: str | Path) -> Path:
    """Returns the local path of a file that can be read to its end.

    Raises:
        StorageError: It is a pipe, a socket or a device.
    """
    local = _local(path)
    if _is_device(local):
        raise StorageError(
            at=str(path),
            problem="is a pipe, a socket or a device",
            fix="Copy its content into a file.",
        )
    return local


def _is_device(path: Path) -> bool:
    """Returns whether a path names a pipe, a socket or a device, which may never end.

    It asks the file system once: a file that another writer commits meanwhile is not a device.
    """
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def _local(path: str | Path) -> Path:
    text = os.path.expanduser(str(path).removeprefix("file://"))  # Path.expanduser may raise
    return path if isinstance(path, Path) and str(path) == text else Path(text)


def sync(path: Path) -> None:
    """Syncs a local file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@functools.cache
def _host() -> str:
    return "".join(c for c in socket.gethostname() if c.isalnum()) or "host"


@functools.cache
def _numbered_by() -> str:
    """Returns a name for the counter of process ids: host, boot, and container if there is one."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        told = f"{boot}{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return _host()
    return f"{_host()}_{xxhash.xxh3_64_hexdigest(told.encode())[:8]}"


def owner() -> str:
    """Returns the name of this process in its temporaries: its machine and process id."""
    return f"{_numbered_by()}_{os.getpid()}"


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
