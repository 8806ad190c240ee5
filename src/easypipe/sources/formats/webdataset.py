"""WebDataset tars, plain or compressed: members with one name, up to its first dot, are a row."""

from __future__ import annotations

import io
import tarfile
from functools import partial
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from easypipe.core.errors import SchemaError, place, raising
from easypipe.core.values import Array, DType, Int64
from easypipe.sources.base import FileSource, Rows, Survey
from easypipe.sources.files import RangeFile
from easypipe.sources.formats.members import (
    BYTES,
    INTEGER,
    JSON_TEXT,
    SELECT,
    TEXT,
    Kind,
    cuts_of,
    npy_header,
    rows_of,
    spans,
    unread,
)
from easypipe.sources.refs import FileRef

KEY = "__key__"
BLOCK = 512  # bytes of a tar's block
HEADER_BYTES = 1 << 14  # bytes that are read at a time to find members
PICKLED = ("pkl", "pickle", "pyd", "pth", "pt")
KINDS: dict[str, Kind] = {
    **dict.fromkeys(("txt", "text", "transcript"), TEXT),
    **dict.fromkeys(("cls", "cls2", "index", "inx", "id"), INTEGER),
    **dict.fromkeys(("json", "jsn"), JSON_TEXT),
}


class _Tar(NamedTuple):
    """The content of a tar: the keys of rows, and places and kinds of members by column."""

    keys: list[str]
    places: dict[str, Int64]  # by column: [rows, 2], where a member begins and ends; -1: none
    kinds: dict[str, Kind]


class WebDatasetShardedSource(FileSource):
    """The rows of WebDataset tars: `__key__`, and a column for each extension.

    Options are those of FileSource. Text (txt, text, transcript), integers (cls, cls2, index, inx,
    id), JSON (json, jsn) and arrays of one dimension (npy) have their types; all others are bytes.
    A row without a member has a null there. Reasons of rejects: unparsable, invalid_utf8.
    """

    kind = "webdataset"

    def _survey(self, file: FileRef) -> Survey:
        """Groups the members of a tar into rows and columns."""
        keys, members, ended = self._members(file)
        kinds: dict[str, Kind] = {}
        places: dict[str, Int64] = {}
        for row, name, begin, end in members:
            if name not in places:
                last = name.rpartition(".")[2]
                is_read = self.columns is None or name in self.columns
                if last in PICKLED:
                    if is_read:
                        raise unread(file, name, f"a member of pickled data ({name})")
                    continue
                places[name], kinds[name] = np.full((len(keys), 2), -1), KINDS.get(last, BYTES)
                if last == "npy" and is_read:
                    kinds[name] = _array_kind(file, name, self._plain.fetch(file, begin, end))
            if places[name][row, 0] >= 0:
                problem = f"two members of one name ({keys[row]}.{name})"
                raise file.error(problem, "Rename one.", row=row)
            places[name][row] = begin, end
        ends = np.zeros(len(keys), np.int64)
        for row, _, _, end in members:
            ends[row] = end
        schema = {KEY: pa.large_string()} | {name: kind.type for name, kind in kinds.items()}
        return Survey(
            num_rows=len(keys),
            total_rows=len(keys),
            cuts=cuts_of(ends),
            schema=pa.schema(list(schema.items())),
            detail=_Tar(keys, places, kinds),
            ended=ended,
        )

    def _rows(
        self, file: FileRef, survey: Survey, fields: pa.Schema, start: int, stop: int
    ) -> Rows:
        tar: _Tar = survey.detail
        names = [name for name in fields.names if name != KEY]
        keys = [key.encode() for key in tar.keys[start:stop]]
        columns: dict[str, tuple[Kind, list[bytes | None]]] = {KEY: (TEXT, [*keys])}
        columns |= {name: (tar.kinds[name], [None] * len(keys)) for name in names}
        wanted = [
            (*tar.places[name][row], name, row - start)
            for row in range(start, stop)
            for name in names
            if tar.places[name][row, 0] >= 0
        ]
        wanted.sort()  # as they lie in the file
        edges = np.array([one[:2] for one in wanted], np.int64).reshape(-1, 2)
        found = spans(self._plain, file, edges[:, 0], edges[:, 1])
        for (*_, name, row), data in zip(wanted, found, strict=True):
            columns[name][1][row] = data
        return rows_of(columns, start, stop)

    def _members(self, file: FileRef) -> tuple[list[str], list[tuple[int, str, int, int]], bool]:
        """Reads the headers of a tar.

        Returns:
            The keys of the rows; (row, column, begin, end) of each member; whether the end mark is
            there.
        """
        keys: list[str] = []
        members: list[tuple[int, str, int, int]] = []
        fetch = partial(self._plain.fetch, file)
        opened = io.BufferedReader(RangeFile(fetch, file.num_bytes), HEADER_BYTES)
        try:
            with tarfile.open(fileobj=opened, mode="r:") as tar:
                while (one := tar.next()) is not None:
                    tar.members = []  # pyright: ignore[reportAttributeAccessIssue]  # it would grow
                    key, column = _key_and_column(one.name)
                    if not column or not (one.isreg() or one.islnk() or one.issym()):
                        continue
                    if one.issparse() or not one.isreg():
                        problem = f"member {one.name!r} is a {_NOT_READ[one.isreg()]}"
                        fix = "Pack it again: tar --dereference --hard-dereference, not --sparse."
                        raise file.error(problem, fix)
                    if not keys or keys[-1] != key:
                        keys.append(key)
                    end = one.offset_data + one.size
                    members.append((len(keys) - 1, column, one.offset_data, end))
                behind = self._plain.fetch(file, tar.offset, tar.offset + BLOCK)
        except (tarfile.TarError, UnicodeError, ValueError) as error:
            problem = f"not a tar file, or truncated: {error}"
            raise file.error(problem, "Copy it again.") from error
        if behind.strip(b"\0"):
            problem = f"damaged: no member begins at byte {tar.offset}"
            raise file.error(problem, "Copy it again.")
        return keys, members, bool(behind)


_NOT_READ = ("link, which has no bytes of its own", "sparse file, whose holes are not stored")


def _key_and_column(name: str) -> tuple[str, str]:
    """Returns the row and the column of a member; column "" if it holds no value of a row."""
    folder, slash, last = name.rpartition("/")
    stem, _, extension = last.partition(".")
    top = name.partition("/")[0]  # folders `__...__` hold notes of the tar's writer
    notes = len(top) > 3 and top.startswith("__") and top.endswith("__")
    return folder + slash + stem, extension.lower() if stem and not notes else ""


def _array_kind(file: FileRef, name: str, first: bytes) -> Kind:
    """Returns the kind of a column of arrays, whose dtype is that of the first array.

    Raises:
        SchemaError: The array cannot be read.
    """
    at, on = place(file.path, column=name), (ValueError, TypeError, pa.ArrowException)
    with raising(SchemaError, at, "its first array cannot be read", SELECT, on):
        array = _array(None, first)
        kind = pa.large_list(pa.from_numpy_dtype(array.dtype))
        pa.array([array], kind)
    return Kind(kind, partial(_array, array.dtype))


def _array(dtype: DType | None, data: bytes) -> Array:
    """Returns the array in an .npy file; raises ValueError if it has other dimensions or dtype."""
    own, shape, _, start = npy_header(data)
    if len(shape) != 1 or dtype not in (None, own):
        raise ValueError(f"an array of {len(shape)} dimensions, {own}")
    if own.hasobject:
        raise ValueError("pickled objects are not read")
    stop = start + shape[0] * own.itemsize
    if stop > len(data):
        raise ValueError(f"{len(data)} bytes, its header says {stop}: truncated")
    return np.frombuffer(data[start:stop], own)
