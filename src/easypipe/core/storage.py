# pyright: strict
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingTypeStubs=false
"""The one door to bytes at rest: where files are read from, and how they are committed.

Law (commit or nothing): whoever looks at `path` sees the old bytes or the new ones, whenever this process is killed. Locally: a temporary
name, fsync, rename, fsync of the folder. On object stores: one PUT of the finished file.

`set_fault_hook` lets tests stop the process at every step.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import fsspec
import xxhash
from fsspec.core import url_to_fs

from easypipe.core.errors import EasypipeError, MissingFileError, StorageError
from easypipe.core.remote import http_facts, is_http, public_url, remote_call, retrying, tell

T = TypeVar("T")
CHUNK_BYTES = 1 << 22
TEMPORARY = ".tmp-"

_fault: Callable[[str, str], None] | None = None


def set_fault_hook(hook: Callable[[str, str], None] | None) -> None:
    """`hook(step, path)` is called before each step of a commit ("write", "sync", "rename", "committed"); tests raise or exit there."""
    global _fault
    _fault = hook


def _step(step: str, path: str) -> None:
    if _fault is not None:
        _fault(step, path)


@dataclass(frozen=True, kw_only=True)
class Stamp:
    """What was committed: size in bytes and XXH3-128 of the content, in hex."""

    num_bytes: int
    checksum: str


def is_remote(path: str | Path) -> bool:
    return "://" in str(path) and not str(path).startswith("file://")


def filesystem(path: str | Path, storage_options: dict[str, Any] | None = None) -> tuple[fsspec.AbstractFileSystem, str]:
    """The fsspec filesystem of `path`, and the path as that filesystem spells it. Raises StorageError where the protocol is unknown."""
    try:
        return url_to_fs(str(path), **(storage_options or {}))
    except (ValueError, ImportError) as error:
        at, protocol = public_url(str(path)), str(path).partition("://")[0]
        extra = {"gs": "gcs", "gcs": "gcs", "s3": "s3", "s3a": "s3"}.get(protocol)
        fix = f"pip install 'easypipe[{extra}]'." if extra else f"Install the fsspec package for {protocol}."
        problem = f"cannot open {protocol}:// paths: {tell(error, str(path), storage_options)}"
    raise StorageError(at=at, problem=problem, fix=fix)  # not from the library's error, which may show credentials


def exists(path: str | Path, storage_options: dict[str, Any] | None = None) -> bool:
    if not is_remote(path):
        return Path(_local(path)).exists()
    try:
        if is_http(str(path)):
            _remote(path, storage_options, http_facts)
        else:
            _remote(path, storage_options, lambda fs, name, timeout_s: remote_call(fs, "info", timeout_s, name))
    except MissingFileError:
        return False
    return True


def read_bytes(path: str | Path, storage_options: dict[str, Any] | None = None) -> bytes:
    try:
        if not is_remote(path):
            return Path(_local(path)).read_bytes()
        return bytes(_remote(path, storage_options, lambda fs, name, timeout_s: remote_call(fs, "cat_file", timeout_s, name)))
    except EasypipeError:
        raise
    except FileNotFoundError as error:
        raise MissingFileError(at=str(path), problem="no such file") from error
    except OSError as error:
        raise StorageError(at=str(path), problem=f"cannot be read: {error}") from error


def _remote(path: str | Path, storage_options: dict[str, Any] | None, call: Callable[[Any, str, float], T]) -> T:
    """`call(filesystem, name, timeout in s)`, tried again where it fails for a passing reason."""

    def attempt(timeout_s: float) -> T:
        fs, name = filesystem(path, storage_options)
        return call(fs, name, timeout_s)

    return retrying(str(path), attempt, options=storage_options)


def read_json(path: str | Path, storage_options: dict[str, Any] | None = None) -> Any:
    """Raises StorageError where the file is not JSON."""
    data = read_bytes(path, storage_options)
    try:
        return json.loads(data)
    except ValueError as error:
        raise StorageError(at=str(path), problem=f"not JSON: {error}", fix="Delete the file and run again.") from error


def commit_bytes(path: str | Path, data: bytes, storage_options: dict[str, Any] | None = None) -> Stamp:
    with commit_file(path, storage_options) as (temporary, stamp):
        temporary.write_bytes(data)
    return stamp()


def commit_json(path: str | Path, value: Any, storage_options: dict[str, Any] | None = None) -> Stamp:
    return commit_bytes(path, (json.dumps(value, indent=1, sort_keys=True) + "\n").encode(), storage_options)


@contextlib.contextmanager
def commit_file(path: str | Path, storage_options: dict[str, Any] | None = None) -> Generator[tuple[Path, Callable[[], Stamp]]]:
    """`with commit_file(path) as (temporary, stamp):` write `temporary`; leaving the block commits it, an exception discards it.

    `stamp()` tells size and checksum once the block is left. Raises StorageError where the bytes cannot be written.
    """
    done: list[Stamp] = []
    remote = is_remote(path)
    target = str(path) if remote else str(_local(path))
    try:
        if remote:
            folder = Path(tempfile.mkdtemp(prefix="easypipe-"))
            temporary = folder / "commit"
        else:
            Path(target).parent.mkdir(parents=True, exist_ok=True)
            temporary = Path(target).parent / f"{TEMPORARY}{_owner()}-{secrets.token_hex(4)}-{Path(target).name}"
            folder = None
    except OSError as error:
        raise StorageError(at=target, problem=f"cannot be written: {error}") from error
    try:
        _step("write", target)
        try:
            yield temporary, lambda: done[0]
            _step("sync", target)
            _sync(temporary)
            stamp = checksum(temporary)
            _step("rename", target)
            if remote:
                _put(temporary, target, storage_options)
            else:
                os.replace(temporary, target)
                _sync(Path(target).parent)
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            raise StorageError(at=target, problem=f"cannot be written: {error}", fix="Check space and permissions.") from error
        done.append(stamp)
        _step("committed", target)
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)


def _put(file: Path, target: str, storage_options: dict[str, Any] | None) -> None:
    fs, name = filesystem(target, storage_options)
    try:
        fs.put_file(str(file), name)
    except OSError:
        raise
    except Exception as error:  # each store's client has errors of its own: missing credentials, a bucket that is not there
        raise StorageError(
            at=target,
            problem=f"cannot be written: {type(error).__name__}: {error}",
            fix="Check the address, storage_options and permissions.",
        ) from error


def checksum(path: str | Path) -> Stamp:
    """Size and XXH3-128 of a local file."""
    hasher = xxhash.xxh3_128()
    total = 0
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            hasher.update(chunk)
            total += len(chunk)
    return Stamp(num_bytes=total, checksum=hasher.hexdigest())


def sweep(folder: str | Path) -> int:
    """Removes temporaries that processes of this host left when they were killed. Returns how many."""
    host, swept = _host(), 0
    for leftover in Path(folder).rglob(f"{TEMPORARY}*"):
        owner, _, pid = leftover.name.removeprefix(TEMPORARY).split("-", 2)[0].rpartition("_")
        if owner == host and pid.isdigit() and not _alive(int(pid)):
            leftover.unlink(missing_ok=True)
            swept += 1
    return swept


def _local(path: str | Path) -> Path:
    return Path(str(path).removeprefix("file://")).expanduser()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@functools.cache
def _host() -> str:
    return "".join(c for c in socket.gethostname() if c.isalnum()) or "host"


def _owner() -> str:
    return f"{_host()}_{os.getpid()}"


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
