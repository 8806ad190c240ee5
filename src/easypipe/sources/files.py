"""Resolves `data_files` (paths, globs, folders, URLs) to FileRefs, and reads ranges of files.

A URL names an object, a pattern, a folder, or a file of a web server (HTTP). Nothing here guesses:
a path that does not exist is a MissingFileError, and is never looked up on the Hub.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import glob
import io
import logging
import os
import re
import stat
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import pyarrow as pa
from fsspec import AbstractFileSystem

from easypipe.core import remote, storage
from easypipe.core.config import digest
from easypipe.core.errors import (
    MissingFileError,
    SourceError,
    StorageError,
    few,
    names_in,
    near_path,
    nearest_folder,
    require,
)
from easypipe.core.ranged import http_facts, http_range, object_range
from easypipe.core.remote import StorageOptions
from easypipe.core.threads import each
from easypipe.core.tree import every_file, matching
from easypipe.core.values import Json
from easypipe.sources.refs import (
    EXTENSIONS,
    FileRef,
    changed,
    data_files_in,
    fixed_part,
    natural,
    partitioned,
    plain_name,
    reading,
)

log = logging.getLogger("easypipe")

ASKED = 16  # how many patterns of data_files are listed at a time
SMALL_BYTES = 4 << 20  # a remote file up to this size is read whole
KEPT_SMALL = 16  # how many such files a process keeps
_small = tuple(threading.Lock() for _ in range(64))
_holding = threading.Lock()
_held: dict[FileRef, tuple[tuple[int, bytes], ...]] = {}  # (start, bytes) of ranges, see `held`

DataFiles = str | os.PathLike[str] | Sequence[str | os.PathLike[str] | FileRef]


@functools.cache
def _warn_once(message: str, *of: str | int) -> None:
    """Logs a warning only once, because a process may list the same files several times."""
    log.warning(message, *of)


def resolve(
    data_files: DataFiles,
    storage_options: StorageOptions = None,
    *,
    extensions: Iterable[str] | None = None,
) -> list[FileRef]:
    """Returns every file that `data_files` names, in the order given, naturally sorted within each.

    A folder means its data files of the formats `extensions` (None: all keys of EXTENSIONS); names
    that begin with "." or "_" are left out. If links give a file several names in a folder or
    pattern, it is read once. A link back into a folder is not followed again. Both log a warning.

    Raises:
        MissingFileError: A path does not exist, or a pattern matches nothing.
        SourceError: A file is named twice.
        ConfigError: The list is empty.
    """
    patterns: list[Any] = (
        [data_files] if isinstance(data_files, str | os.PathLike) else list(data_files)
    )
    require(
        patterns,
        "data_files",
        "names no file",
        "Give a path, a glob, a folder, a URL, or a list of them.",
    )
    kinds = tuple(EXTENSIONS) if extensions is None else tuple(extensions)
    listed = each(partial(_listed, storage_options, kinds), patterns, ASKED, "list")
    found: list[FileRef] = []
    known: dict[tuple[int, int] | str, str] = {}  # the path of each `_inode`
    for text, files in listed:
        again: list[tuple[str, str]] = []  # (name, the first name of the same file)
        mine: dict[tuple[int, int] | str, str] = {}
        for file in files:
            inode = _inode(file)
            if inode in mine:
                again.append((file.path, mine[inode]))
                continue
            if inode in known:
                other = "" if known[inode] == file.path else f" as {known[inode]}"
                raise file.error(
                    f"named twice in data_files{other} (again by {remote.public_url(text)!r})",
                    "Name every file once; to see rows more often, give the dataset more "
                    "epochs or weight.",
                )
            mine[inode] = file.path
            found.append(file)
        if again:
            _warn_once(
                "%s: %d names stand for files that it has already (%s is %s), and are left out",
                text,
                len(again),
                *again[0],
            )
        known |= mine
    return found


def _listed(
    storage_options: StorageOptions, kinds: tuple[str, ...], pattern: Any
) -> tuple[str, list[FileRef]]:
    """Returns a pattern as text, and the files that it names."""
    if isinstance(pattern, FileRef):
        return pattern.path, [pattern]
    require(
        isinstance(pattern, str | os.PathLike) and pattern != "",
        "data_files",
        f"{pattern!r} is not a path",
        "Give a path, a glob, a folder or a URL.",
    )
    text = os.fspath(pattern)
    if storage.is_remote(text):
        return text, resolve_remote(text, storage_options, kinds)
    return text, _resolve_local(text, kinds)


def read_range(file: FileRef, start: int, stop: int) -> bytes:
    """Returns the bytes `start` to `stop` of the file as stored. It is thread-safe.

    This is the only place where data files are read remotely: transient failures are retried
    (core/remote.py). A small file is fetched whole, once, and kept: its bytes take no longer to
    arrive than the answer to a request.

    Raises:
        SourceError: The file has changed or cannot be read.
    """
    if not file.remote:
        with open_local(file) as opened:
            return _at(file, opened, start, stop)
    if start >= stop:
        return b""
    for first, data in _held.get(file, ()):
        if first <= start and stop <= first + len(data):
            return data[start - first : stop - first]
    if file.num_bytes > SMALL_BYTES:
        return _requested(file, start, stop)
    # threads that ask for it at the same time fetch it only once
    with _small[hash(file) % len(_small)]:
        return _whole(file)[start:stop]


@contextlib.contextmanager
def held(file: FileRef, start: int, stop: int) -> Generator[None, None, None]:
    """Fetches a range of a remote file, and serves reads of it within the block.

    Raises:
        SourceError: The file has changed or cannot be read.
    """
    piece = start, read_range(file, start, stop)
    with _holding:
        _held[file] = (*_held.get(file, ()), piece)
    try:
        yield
    finally:
        with _holding:
            _held[file] = tuple(one for one in _held[file] if one is not piece)
            if not _held[file]:
                del _held[file]


@lru_cache(maxsize=KEPT_SMALL)
def _whole(file: FileRef) -> bytes:
    return _requested(file, 0, file.num_bytes)


def _requested(file: FileRef, start: int, stop: int) -> bytes:
    """Returns the bytes `start` to `stop` of a remote file, by one request."""
    url, options = file.address, file.storage_options

    def call(fs: AbstractFileSystem, name: str, timeout_s: float) -> bytes:
        if remote.is_http(url):
            return http_range(fs, url, start, stop, file.identity, timeout_s)
        return object_range(fs, name, start, stop, file.identity, timeout_s)

    with reading(file):
        return storage.ask(url, options, call, stop - start, "range")


def open_binary(file: FileRef, ahead_bytes: int = 1 << 22) -> Any:
    """Returns a new seekable binary file object.

    Args:
        file: The file.
        ahead_bytes: How many bytes of a remote file are read at a time if fewer are asked for;
            small for readers that seek often.

    Raises:
        SourceError: The file is gone or changed.
    """
    if not file.remote:
        return io.BufferedReader(open_local(file))
    size = file.num_bytes
    fetch = lambda start, stop: read_range(file, start, min(stop, size))  # noqa: E731
    return io.BufferedReader(RangeFile(fetch, size), ahead_bytes)


@contextlib.contextmanager
def library_errors(at: str, what: str) -> Generator[None, None, None]:
    """Turns errors of the library that reads a file into SourceErrors, for the block."""
    try:
        yield
    # UnicodeDecodeError: a name within the file
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        if isinstance(error, SourceError):
            raise
        raise SourceError(
            at=at, problem=f"damaged {what}: {error}", fix="Copy or write the file again."
        ) from error


class RangeFile(io.RawIOBase):
    """A file object that reads by fetch(start, stop), which may return fewer bytes at the end."""

    def __init__(self, fetch: Callable[[int, int], bytes], num_bytes: int) -> None:
        self._fetch, self._num_bytes, self._at = fetch, num_bytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._num_bytes}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        """Fetches as many bytes as the buffer holds, fewer at the end."""
        view = memoryview(buffer).cast("B")
        data = self._fetch(self._at, self._at + len(view))
        view[: len(data)] = data
        self._at += len(data)
        return len(data)


def open_local(file: FileRef) -> io.FileIO:
    """Opens a local file without a buffer; refuses one that changed since it was resolved."""
    here = file.here
    with reading(file):
        opened = io.FileIO(here.path)
    status = os.fstat(opened.fileno())
    if status.st_size != here.num_bytes or str(status.st_mtime_ns) != here.identity:
        opened.close()
        raise changed(file)
    return opened


def _at(file: FileRef, opened: io.FileIO, start: int, stop: int) -> bytes:
    """Returns all bytes `start` to `stop`; a short read is continued, an early end is an error."""
    data = b""
    with reading(file):
        while len(data) < stop - start:
            more = os.pread(opened.fileno(), stop - start - len(data), start + len(data))
            if not more:
                raise changed(file)
            data = data + more if data else more
    return data


def _resolve_local(text: str, kinds: tuple[str, ...]) -> list[FileRef]:
    given = os.path.expanduser(text.removeprefix("file://"))
    path = os.path.abspath(given)
    here = (
        ""
        if os.path.isabs(given) or given[:1] == "~"
        else ", which is relative to the current folder"
    )
    if os.path.isdir(path):
        inside = data_files_in(path, text, _names_below(path, text), kinds)
        return partitioned([_local(name) for name in inside], path)
    if os.path.exists(path):  # before patterns, so that a file called data[1].txt can be named
        return [_local(path)]
    folder = nearest_folder(path)  # it exists, so brackets in its name are not a pattern
    rest = path[len(folder) :].lstrip("/")
    if glob.has_magic(rest) and "\0" not in rest:
        circles: list[str] = []
        found = dict.fromkeys(_matches(folder, rest.split("/"), circles))
        matches = [name for name in found if not os.path.isdir(name)]
        if circles:
            _warn_once(
                "%s: %s leads to a folder that it has already, and is not followed",
                text,
                ", ".join(dict.fromkeys(circles)),
            )
        if not matches:
            raise MissingFileError(
                at=text,
                problem="the pattern matches no file",
                have=few(names_in(folder)),
                fix=f"Correct the pattern{here}.",
            )
        return partitioned([_local(name) for name in sorted(matches, key=natural)], folder)
    near, fix = near_path(path)
    fix = fix or f"Check the path{here}."
    owner, *_ = text.split("/")
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", text) and not os.path.exists(owner):
        fix += f" If it is a dataset of the Hub: hf://datasets/{text}."
    raise MissingFileError(at=text, problem="no such file or folder", have=near, fix=fix)


def _names_below(folder: str, text: str) -> list[str]:
    """Returns the files below a folder; links to other folders are not followed, with a warning."""
    inside: list[str] = []
    links: list[str] = []
    for root, folders, names in os.walk(folder, onerror=_unlisted):
        inside += [os.path.join(root, name) for name in names]
        folders[:] = [name for name in folders if name[0] not in "._"]
        links += filter(os.path.islink, (os.path.join(root, name) for name in folders))
    if links:
        _warn_once(
            "%s: %s %s not followed: they link to folders. Name those in data_files, or give a "
            "pattern with **, where their files are wanted",
            text,
            ", ".join(links[:3]),
            "are" if len(links) > 1 else "is",
        )
    return inside


def _unlisted(error: OSError) -> None:
    """Raises the error of a folder that cannot be listed; what is no folder lists nothing.

    The lost+found of a disk, which only root may list, holds no data.
    """
    folder = str(error.filename)
    gone = isinstance(error, FileNotFoundError) and not os.path.islink(folder)
    if gone or isinstance(error, NotADirectoryError) or os.path.basename(folder) == "lost+found":
        return
    raise SourceError(
        at=folder,
        problem=f"cannot be listed, and its files would be left out: {error.strerror}",
        fix="Correct its permissions or its target, or give a pattern that leaves it out.",
    ) from error


def _names(folder: str) -> list[str]:
    """Returns the names in what a pattern matched, which is not always a folder."""
    try:
        return os.listdir(folder)
    except OSError as error:
        _unlisted(error)
        return []


def _matches(folder: str, parts: Sequence[str], circles: list[str]) -> Iterable[str]:
    """Yields the paths below `folder` that a pattern matches, some of them twice.

    It does what `glob.glob(..., recursive=True)` does, but enters no folder twice through a link,
    and names a folder that cannot be listed.

    Args:
        folder: A path, which may be a file.
        parts: The pattern, split at its slashes.
        circles: Links under `**` to folders that were entered already are appended to it.
    """
    if not parts:
        yield folder
        return
    part, rest = parts[0], parts[1:]
    if part == "**":
        for below in _folders(folder, circles):
            yield from _matches(below, rest or ["*"], circles)
    elif glob.has_magic(part):
        names = fnmatch.filter(_names(folder), part)
        for name in names if part[0] == "." else [name for name in names if name[0] != "."]:
            yield from _matches(os.path.join(folder, name), rest, circles)
    else:
        path = os.path.join(folder, part)
        try:
            os.lstat(path)
        except OSError as error:
            _unlisted(error)
            return
        yield from _matches(path, rest, circles)


def _folders(top: str, circles: list[str]) -> Iterable[str]:
    """Yields `top` and the folders below it that do not begin with a dot, linked ones last.

    Links to folders that were already yielded are appended to `circles`.
    """
    seen: set[tuple[int, int]] = set()
    waiting = [top]
    for start in waiting:  # the list grows meanwhile
        for root, folders, _ in os.walk(start, onerror=_unlisted):
            status = os.stat(root)
            if (status.st_dev, status.st_ino) in seen:
                circles.append(root)
                folders.clear()
                continue
            seen.add((status.st_dev, status.st_ino))
            yield root
            folders[:] = [name for name in folders if not name.startswith(".")]
            waiting += [
                os.path.join(root, name)
                for name in folders
                if os.path.islink(os.path.join(root, name))
            ]


def _inode(file: FileRef) -> tuple[int, int] | str:
    """Returns what identifies a file, independent of its name."""
    if file.remote or file.local_copy is not None:  # the Hub's client stores equal files once
        return file.path
    try:
        status = os.stat(file.path)
    except OSError:  # it was deleted after it was listed; reading it will report that
        return file.path
    return (status.st_dev, status.st_ino) if status.st_ino else file.path


def _local(path: str) -> FileRef:
    try:
        status = os.stat(path)
    except OSError as error:
        kind = MissingFileError if isinstance(error, FileNotFoundError) else SourceError
        link = f"is a link to {os.readlink(path)}, which " if os.path.islink(path) else ""
        fix = "Correct or remove it, or give a pattern that leaves it out."
        raise kind(at=path, problem=f"{link}cannot be read: {error.strerror}", fix=fix) from error
    if not stat.S_ISREG(status.st_mode) and not os.path.isdir(path):
        problem = "is a pipe, a socket or a device, which cannot be read twice"
        raise SourceError(at=path, problem=problem, fix="Copy its content into a file.")
    return FileRef(path=path, num_bytes=status.st_size, identity=str(status.st_mtime_ns))


WHOLE_BYTES = 64 << 20  # the largest file that is read from a server without ranges


_Listing = Callable[[AbstractFileSystem, str, float], dict[str, Json]]


def resolve_remote(
    text: str, storage_options: StorageOptions, kinds: tuple[str, ...]
) -> list[FileRef]:
    """Returns the files that a URL, a pattern or a folder of an object store names.

    Raises:
        MissingFileError: The file does not exist.
        SourceError: The store cannot be asked.
    """
    name = remote.public_url(text)
    here = FileRef(path=name, num_bytes=0, identity="", url=text, storage_options=storage_options)
    # a single file on the Hub is read like any other, because saved folders name such files
    dataset = text.startswith("hf://") and "." not in text.rpartition("/")[2]
    fix = "Read it with type='huggingface'."
    require(not dataset, "data_files", f"{name!r} is a dataset on the Hub", fix)
    if remote.is_http(text):
        return [_resolve_http(text, here)]

    def info_of(fs: AbstractFileSystem, path: str, timeout_s: float) -> Json:
        return remote.remote_call(fs, "info", timeout_s, path)

    fs, path = storage.ask(text, storage_options, lambda fs, path, _: (fs, path), kind=None)
    fs.invalidate_cache()

    def ref(found: str, info: Json) -> FileRef:
        url = fs.unstrip_protocol(found)
        named = replace(here, path=remote.public_url(url), url=url)
        return _sized(named, info.get("size"), _identity(info))

    def listed(method: _Listing) -> dict[str, Json]:
        with reading(here):
            found = storage.ask_long(text, storage_options, method)
        plain = fs._strip_protocol  # pyright: ignore[reportPrivateUsage]  (fsspec has no other name)
        return {
            str(plain(key)): info
            for key, info in found.items()
            # an empty object with a slash stands for a folder
            if info.get("type") != "directory" and not key.endswith("/")
        }

    pattern = glob.has_magic(path)
    try:  # brackets may be a name's own
        info = storage.ask(text, storage_options, info_of) if not pattern or "[" in path else None
    except MissingFileError:
        info = None
    except StorageError as error:
        raise SourceError(at=name, problem=error.problem, fix=error.fix) from None
    if info is not None and info.get("type") != "directory":
        return [ref(path, info)]
    if info is None and pattern:
        if not (matches := listed(matching)):
            problem = "the pattern matches no file"
            raise MissingFileError(at=name, problem=problem, fix="Correct the pattern.")
        files = [ref(found, matches[found]) for found in sorted(matches, key=natural)]
        return partitioned(files, fixed_part(fs.unstrip_protocol(path)))
    inside = listed(every_file) if info is not None else {}
    if not inside:
        raise MissingFileError(at=name, problem="no such file or folder", fix="Check the URL.")
    files = [ref(found, inside[found]) for found in data_files_in(path, name, inside, kinds)]
    return partitioned(files, remote.public_url(fs.unstrip_protocol(path)))


def _resolve_http(text: str, here: FileRef) -> FileRef:
    """Returns the one file that a URL of a web server names."""
    name, options = here.path, here.storage_options
    require(
        not glob.has_magic(plain_name(text)) and not text.endswith("/"),
        "data_files",
        f"{name!r}: a web server does not list files",
        "Give the URL of every file.",
    )

    try:
        use = lambda fs, _, s: http_facts(fs, text, s)  # noqa: E731
        facts = storage.ask(text, options, use, kind="facts")
    except StorageError as error:
        raise SourceError(at=name, problem=error.problem, fix=error.fix) from None
    if facts.num_bytes is None and facts.packed:
        raise here.error(
            f"the server compresses it ({facts.packed}), and so does not report its size",
            "Turn compression off for this file there, or copy it to storage that reports it.",
        )
    file = _sized(here, facts.num_bytes, facts.identity)
    if facts.identity.startswith("size:"):
        log.warning(
            "%s: the server sends neither ETag nor Last-Modified: a new file of the same size is "
            "not noticed, and its old tokens are used. `easypipe cache clear` removes them.",
            name,
        )
    if not facts.ranges and file.num_bytes > WHOLE_BYTES:
        problem = (
            "the server does not support range requests, so every read would transfer all "
            f"{file.num_bytes >> 20} MiB"
        )
        raise SourceError(
            at=name, problem=problem, fix="Download the file, or serve it from storage that does."
        )
    if not facts.ranges:
        log.warning(
            "%s: the server does not support range requests: every read transfers the whole file "
            "(%d bytes)",
            name,
            file.num_bytes,
        )
    return file


def _sized(file: FileRef, num_bytes: int | None, identity: str) -> FileRef:
    """Returns the file with its server's facts; raises SourceError if the size is not a number."""
    if num_bytes is None:
        raise file.error(
            "the server does not report its size", "Copy the file to storage that does."
        )
    return replace(file, num_bytes=int(num_bytes), identity=identity)


def _identity(info: Json) -> str:
    """Returns the store's mark of the content (etag), or a digest of all that the store says."""
    for key in ("generation", "etag", "ETag", "md5Hash", "md5", "checksum"):
        if info.get(key):
            return f"{key}:{info[key]}"
    for key in ("mtime", "LastModified", "last_modified", "updated", "modified", "created"):
        if info.get(key):
            return f"{key}:{info[key]}"
    return digest({key: str(value) for key, value in sorted(info.items())})
