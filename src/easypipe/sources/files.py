"""Which files a source reads: paths, lists, globs, folders and URLs become an ordered list of FileRef.

Nothing here guesses: a path that does not exist is a MissingFileError, never a name to look up on the Hub.
"""

from __future__ import annotations

import functools
import glob
import io
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

from easypipe.core.config import digest
from easypipe.core.errors import ConfigError, MissingFileError, SourceError, did_you_mean
from easypipe.core.storage import filesystem, is_remote

# What a file's extension says of its format; compressions may follow those of line formats.
EXTENSIONS: dict[str, tuple[str, ...]] = {
    "parquet": (".parquet", ".pq"),
    "arrow": (".arrow", ".arrows", ".ipc", ".feather"),
    "json": (".jsonl", ".ndjson", ".json"),
    "csv": (".csv", ".tsv"),
    "txt": (".txt", ".text"),
}
COMPRESSIONS: dict[str, str] = {".gz": "gz", ".zst": "zst", ".zstd": "zst"}
COMPRESSIBLE = ("json", "csv", "txt")

T = TypeVar("T")
DataFiles = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


@dataclass(frozen=True, kw_only=True)
class FileRef:
    """One file as it was when it was resolved.

    path: absolute path or URL. num_bytes: size at rest. identity: changes when the content does (mtime in ns; an object's etag).
    """

    path: str
    num_bytes: int
    identity: str
    storage_options: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)  # may hold credentials: never shown

    @property
    def remote(self) -> bool:
        return is_remote(self.path)

    @property
    def digest(self) -> str:
        return digest(self.path, self.num_bytes, self.identity)


def format_of(path: str) -> str | None:
    """The format that a path's extension names, None where it names none."""
    name = path.rstrip("/").rpartition("/")[2].lower()
    stem, dot, last = name.rpartition(".")
    compressed = f"{dot}{last}" in COMPRESSIONS
    if compressed:
        name = stem
    for kind, endings in EXTENSIONS.items():
        if name.endswith(endings) and (not compressed or kind in COMPRESSIBLE):
            return kind
    return None


def compression_of(path: str) -> str | None:
    """ "gz", "zst" or None, by the extension; whether the content agrees is checked when it is read."""
    return COMPRESSIONS.get(os.path.splitext(path.lower())[1])


def resolve(
    data_files: DataFiles, storage_options: Mapping[str, Any] | None = None, *, extensions: Iterable[str] | None = None
) -> list[FileRef]:
    """Every file that `data_files` names: paths, globs, folders and fsspec URLs, in the order given, naturally sorted within each.

    A folder stands for the data files below it: those whose format (a key of EXTENSIONS) is in `extensions`, by default any of them; names
    that begin with "." or "_" are left out. Raises MissingFileError for what is not there, SourceError for a file named twice,
    ConfigError for an empty list.
    """
    patterns = [data_files] if isinstance(data_files, str | os.PathLike) else list(data_files)
    if not patterns:
        raise ConfigError(at="data_files", problem="names no file", fix="Give a path, a glob, a folder, a URL, or a list of them.")
    kinds = tuple(EXTENSIONS) if extensions is None else tuple(extensions)
    found: dict[str, FileRef] = {}
    for pattern in patterns:
        if not isinstance(pattern, str | os.PathLike) or not os.fspath(pattern):
            raise ConfigError(at="data_files", problem=f"{pattern!r} is not a path", fix="Give a path, a glob, a folder or a URL.")
        text = os.fspath(pattern)
        files = _resolve_remote(text, storage_options, kinds) if is_remote(text) else _resolve_local(text, kinds)
        for file in files:
            if file.path in found:
                raise SourceError(
                    at=file.path,
                    problem=f"named twice in data_files (again by {text!r})",
                    fix="Name every file once; to see rows more often, give the dataset more epochs or weight.",
                )
            found[file.path] = file
    return list(found.values())


def natural(path: str) -> list[tuple[int, int, str]]:
    """Sort key under which part-2 comes before part-10."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"([0-9]+)", path) if part]


def read_range(file: FileRef, start: int, stop: int) -> bytes:
    """Bytes `start` to `stop` of the file at rest. Raises SourceError where it has changed or cannot be read. Thread safe."""
    if not file.remote:
        with LocalFile(file) as local:
            return local.pread(start, stop)
    fs: Any
    fs, name = filesystem(file.path, dict(file.storage_options or {}))
    data = reading(file, lambda: fs.cat_file(name, start=start, end=stop))
    if len(data) != stop - start:
        raise changed(file)
    return bytes(data)


def open_binary(file: FileRef) -> Any:
    """A seekable binary file object of one's own. Raises SourceError where the file is gone or changed."""
    if not file.remote:
        with LocalFile(file):
            return open(file.path, "rb")
    fs, name = filesystem(file.path, dict(file.storage_options or {}))
    if isinstance(fs, MemoryFileSystem):  # it hands every caller the same file object, whose cursor threads would share
        return io.BytesIO(reading(file, lambda: fs.cat_file(name)))
    return reading(file, lambda: fs.open(name, "rb"))


class LocalFile:
    """A local file open for positional reads, which share no cursor; refuses a file that changed since it was resolved."""

    def __init__(self, file: FileRef) -> None:
        self.file = file
        self._descriptor = -1
        self._descriptor = reading(file, lambda: os.open(file.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0)))
        status = os.fstat(self._descriptor)
        if status.st_size != file.num_bytes or str(status.st_mtime_ns) != file.identity:
            self.close()
            raise changed(file)

    def pread(self, start: int, stop: int) -> bytes:
        """The bytes, all of them: a short read is asked for again, an early end is an error."""
        first = reading(self.file, lambda: os.pread(self._descriptor, stop - start, start))
        if len(first) == stop - start:
            return first
        data = bytearray(stop - start)
        view, have = memoryview(data), 0
        while have < len(data):
            count = self.readinto(view[have:], start + have)
            if not count:
                raise changed(self.file)
            have += count
        return bytes(data)

    def readinto(self, view: memoryview, offset: int) -> int:
        return reading(self.file, lambda: os.preadv(self._descriptor, [view], offset))

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> LocalFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def reading(file: FileRef, call: Callable[[], T]) -> T:
    """`call()`, with failures of the file system told as SourceErrors that name the file."""
    try:
        return call()
    except FileNotFoundError as error:
        raise MissingFileError(at=file.path, problem="was there when the source was made, and is gone") from error
    except OSError as error:
        raise SourceError(at=file.path, problem=f"cannot be read: {error.strerror or error}") from error


def changed(file: FileRef) -> SourceError:
    return SourceError(at=file.path, problem="changed after the source was made", fix="Make the source again.")


def _resolve_local(text: str, kinds: tuple[str, ...]) -> list[FileRef]:
    path = os.path.abspath(os.path.expanduser(text.removeprefix("file://")))
    if os.path.isdir(path):
        inside = [os.path.join(root, name) for root, _, names in os.walk(path) for name in names]
        return [_local(name) for name in _data_files(path, text, inside, kinds)]
    if os.path.exists(path):  # first, so that a file called data[1].txt can be named
        return [_local(path)]
    if glob.has_magic(path):
        matches = [name for name in glob.glob(path, recursive=True) if os.path.isfile(name)]
        if not matches:
            raise MissingFileError(at=text, problem="the pattern matches no file", have=_neighbours(path), fix="Correct the pattern.")
        return [_local(name) for name in sorted(matches, key=natural)]
    near = _neighbours(path)
    hint = did_you_mean(os.path.basename(path), near)
    raise MissingFileError(at=text, problem="no such file or folder", have=near, fix=hint or "Check the path.")


def _local(path: str) -> FileRef:
    status = os.stat(path)
    return FileRef(path=path, num_bytes=status.st_size, identity=str(status.st_mtime_ns))


def _neighbours(path: str) -> list[str]:
    """Names in the nearest folder above `path` that exists, without magic in its own name; a few, for a message."""
    folder = os.path.dirname(path)
    while glob.has_magic(folder) or not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    names = sorted((name for name in os.listdir(folder) if not name.startswith(".")), key=natural)
    return [*names[:8], "..."] if len(names) > 8 else names


def _data_files(folder: str, text: str, inside: Iterable[str], kinds: tuple[str, ...]) -> list[str]:
    """The data files among `inside`, sorted; names that begin with "." or "_" are bookkeeping of whoever wrote the folder."""
    kept = []
    for name in inside:
        parts = name[len(folder) :].strip("/").split("/")
        if not any(part.startswith((".", "_")) for part in parts) and format_of(name) in kinds:
            kept.append(name)
    if not kept:
        endings = [ending for kind in kinds for ending in EXTENSIONS[kind]]
        raise MissingFileError(at=text, problem=f"the folder holds no data file ({' '.join(endings)})", fix="Give the files, or a glob.")
    return sorted(kept, key=natural)


def _resolve_remote(text: str, storage_options: Mapping[str, Any] | None, kinds: tuple[str, ...]) -> list[FileRef]:
    fs: Any
    fs, name = filesystem(text, dict(storage_options or {}))
    here = FileRef(path=text, num_bytes=0, identity="")

    def ref(found: str) -> FileRef:
        info = reading(here, lambda: fs.info(found))
        url = fs.unstrip_protocol(found)
        size = info.get("size")
        if size is None:
            raise SourceError(at=url, problem="the server does not tell its size", fix="Copy the file to storage that does.")
        return FileRef(path=url, num_bytes=int(size), identity=_identity(info), storage_options=storage_options)

    if glob.has_magic(name):
        matches = reading(here, lambda: fs.glob(name, detail=True))
        names = [found for found, info in matches.items() if info.get("type") != "directory"]
        if not names:
            raise MissingFileError(at=text, problem="the pattern matches no file", fix="Correct the pattern.")
        return [ref(found) for found in sorted(names, key=natural)]
    if reading(here, functools.partial(_isdir, fs, name)):
        inside = reading(here, lambda: fs.find(name))
        return [ref(found) for found in _data_files(name, text, inside, kinds)]
    if not reading(here, lambda: fs.exists(name)):
        raise MissingFileError(at=text, problem="no such file or folder", fix="Check the URL.")
    return [ref(name)]


def _isdir(fs: fsspec.AbstractFileSystem, name: str) -> bool:
    return bool(fs.isdir(name)) and not bool(fs.isfile(name))


def _identity(info: Mapping[str, Any]) -> str:
    """What the store itself changes with the content, else every fact it gives."""
    for key in ("etag", "ETag", "generation", "md5Hash", "md5", "checksum"):
        if info.get(key):
            return f"{key}:{info[key]}"
    for key in ("mtime", "LastModified", "last_modified", "updated", "modified", "created"):
        if info.get(key):
            return f"{key}:{info[key]}"
    return digest({key: str(value) for key, value in sorted(info.items())})
