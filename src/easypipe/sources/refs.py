"""FileRef: a file and its identity; which files of a folder count, formats, errors on a change."""

from __future__ import annotations

import contextlib
import glob
import logging
import os
import re
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from easypipe.core import remote
from easypipe.core.config import digest
from easypipe.core.errors import EasypipeError, MissingFileError, SourceError, StorageError, place
from easypipe.core.remote import StorageOptions
from easypipe.core.storage import is_remote
from easypipe.sources.partitions import partition_values

log = logging.getLogger("easypipe")

# The extensions of each format; for line formats, a compression's extension may follow.
EXTENSIONS: dict[str, tuple[str, ...]] = {
    "parquet": (".parquet", ".pq"),
    "arrow": (".arrow", ".arrows", ".ipc", ".feather"),
    "json": (".jsonl", ".ndjson", ".json"),
    "csv": (".csv", ".tsv"),
    "txt": (".txt", ".text"),
    "mds": (".mds",),
}
# Read only if a file is named, or with type=: a .bin in a folder of text may hold anything.
TOKEN_EXTENSIONS: dict[str, tuple[str, ...]] = {
    "tokens": (".npy", ".bin"),
    "arrayrecord": (".array_record", ".arrayrecord"),
}
# These too are read only if a file is named, or with type=: not every .tar is a WebDataset.
ARCHIVE_EXTENSIONS: dict[str, tuple[str, ...]] = {"webdataset": (".tar",)}
ALL_EXTENSIONS = {**EXTENSIONS, **TOKEN_EXTENSIONS, **ARCHIVE_EXTENSIONS}
COMPRESSIONS: dict[str, str] = {".gz": "gz", ".zst": "zst", ".zstd": "zst", ".bz2": "bz2"}
COMPRESSIBLE = ("json", "csv", "txt", "mds", "webdataset")


@dataclass(frozen=True, kw_only=True)
class FileRef:
    """One file as it was when it was resolved.

    Args:
        path: Its absolute path or URL, without credentials.
        num_bytes: Its size as stored.
        identity: A text that changes when the content does (mtime in ns; an object's etag).
        partitions: The values in the names of its folders (`lang=en/`), which are constant columns
            of its rows.
        url: The address to read from, if that is not `path`; it may be signed, so it is never
            shown.
        storage_options: Passed to fsspec; they may hold credentials, so they are never shown.
        local_copy: A copy on this machine, which is read instead.
        head_bytes: For a file of records, reads only the records that end within this many first
            plain bytes.
    """

    path: str
    num_bytes: int
    identity: str
    partitions: tuple[tuple[str, str | int | None], ...] = ()
    url: str | None = field(default=None, compare=False, repr=False)
    storage_options: StorageOptions = field(default=None, compare=False, repr=False)
    local_copy: FileRef | None = field(default=None, compare=False, repr=False)
    head_bytes: int | None = None

    @property
    def address(self) -> str:
        return self.url or self.path

    @property
    def here(self) -> FileRef:
        """The file to open: the copy on this machine if there is one."""
        return self.local_copy or self

    @property
    def remote(self) -> bool:
        return is_remote(self.here.path)

    def beside(self, name: str) -> str | None:
        """Returns the address of the file `name` in the same folder.

        It is None if the address of this file is signed: a signature is for one file alone.
        """
        plain = plain_name(self.address)
        query = self.address.removeprefix(plain)
        same = plain_name(self.path) + query == self.path
        return f"{plain.rpartition('/')[0]}/{name}{query}" if same else None

    @property
    def digest(self) -> str:
        parts: list[Any] = [self.path, self.num_bytes, self.identity]
        parts += [[list(pair) for pair in self.partitions]] if self.partitions else []
        return digest(*parts, *(() if self.head_bytes is None else ("head", self.head_bytes)))

    def error(
        self,
        problem: str,
        fix: str | None = None,
        *,
        have: Iterable[object] | None = None,
        row: int | None = None,
        column: str | None = None,
    ) -> SourceError:
        """Returns an error about the file, or about a row or column of it."""
        at = place(self.path, row=row, column=column)
        return SourceError(at=at, problem=problem, have=have, fix=fix)


def format_of(path: str) -> str | None:
    """Returns the format that a path's extension names; None if it names none."""
    name = plain_name(path).rstrip("/").rpartition("/")[2].lower()
    stem, dot, last = name.rpartition(".")
    if ".array" in name:
        name = re.sub(r"-\d+-of-\d+$", "", name)  # name.array_record-00000-of-00004, as in TFDS
    compressed = f"{dot}{last}" in COMPRESSIONS
    if compressed:
        name = stem
    for kind, endings in ALL_EXTENSIONS.items():
        if name.endswith(endings) and (not compressed or kind in COMPRESSIBLE):
            return kind
    return None


def compression_of(path: str) -> str | None:
    """Returns "gz", "zst", "bz2" or None, by the extension.

    Whether the content agrees is checked when it is read.
    """
    return COMPRESSIONS.get(os.path.splitext(plain_name(path).lower())[1])


def plain_name(path: str) -> str:
    """Returns `path` without the query and fragment of a URL, which would hide the extension."""
    return re.split(r"[?#]", path, maxsplit=1)[0] if remote.is_http(path) else path


def data_files_in(
    folder: str, text: str, inside: Iterable[str], kinds: tuple[str, ...]
) -> list[str]:
    """Returns the data files of a folder, naturally sorted.

    Names that begin with "." or "_" are left out, because writers keep their own records under such
    names. A warning names files of data that are packed in a way that is not read.

    Args:
        folder: The folder.
        text: The folder as the user named it, for the error.
        inside: The paths of all files in it.
        kinds: The formats of data files.

    Raises:
        MissingFileError: There is no data file.
    """
    kept: list[str] = []
    packed: list[str] = []
    for name in inside:
        parts = name[len(folder) :].strip("/").split("/")
        if any(part.startswith((".", "_")) for part in parts):
            continue
        if format_of(name) in kinds:
            kept.append(name)
        elif format_of(name) is None and format_of(os.path.splitext(name)[0]) in kinds:
            packed.append(name)
    if packed:
        log.warning(
            "%s: left out %d files that are packed in a way that is not read, such as %s. Unpack "
            "them to read them too.",
            text,
            len(packed),
            min(packed, key=natural),
        )
    if any(format_of(name) == "mds" for name in kept):  # the index of MDS is not data
        kept = [name for name in kept if not name.endswith("/index.json")]
    if not kept:
        endings = [ending for kind in kinds for ending in ALL_EXTENSIONS[kind]]
        other = next((kind for kind in map(format_of, inside) if kind is not None), None)
        raise MissingFileError(
            at=text,
            problem=f"the folder holds no data file ({' '.join(endings)})",
            fix="Give the files, or a glob."
            if other is None
            else f"It has files that are read with type={other!r}.",
        )
    return sorted(kept, key=natural)


def fixed_part(pattern: str) -> str:
    """Returns the folders of a pattern before the first one with a wildcard."""
    parts = pattern.split("/")
    return "/".join(parts[: next(i for i, part in enumerate(parts) if glob.has_magic(part))])


def partitioned(files: list[FileRef], root: str) -> list[FileRef]:
    """Returns the files with the values that their folders below `root` have in their names."""
    values = partition_values([file.path for file in files], root)
    return [
        replace(file, partitions=value) if value else file
        for file, value in zip(files, values, strict=True)
    ]


def natural(path: str) -> list[tuple[int, int, str]]:
    """Returns a sort key under which part-2 comes before part-10."""
    return [
        (0, int(part), "") if part.isdecimal() else (1, 0, part)
        for part in re.split(r"([0-9]+)", path)
        if part
    ]


@contextlib.contextmanager
def reading(file: FileRef) -> Generator[None]:
    """Turns failures of the file system into SourceErrors that name the file, for the block."""
    try:
        yield
    except FileNotFoundError as error:
        raise MissingFileError(
            at=file.path, problem="was there when the source was made, and is gone"
        ) from error
    except StorageError as error:
        raise file.error(error.problem, error.fix) from None
    except OSError as error:
        if isinstance(error, EasypipeError):
            raise
        raise file.error(
            f"cannot be read: {error.strerror or error}", "Check the path and permissions."
        ) from error


def changed(file: FileRef) -> SourceError:
    """Returns the error for a file that changed after the source was made."""
    return file.error("changed after the source was made", "Make the source again.")
