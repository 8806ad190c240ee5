"""Kinds of byte strings (text, integer, JSON ...) as columns, for MDS and WebDataset."""

from __future__ import annotations

import io
import json
import tokenize
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from easypipe.core.errors import SchemaError, place
from easypipe.core.protocols import Reject
from easypipe.core.schema import is_json
from easypipe.core.values import Array, DType, Int64
from easypipe.sources.base import Rows
from easypipe.sources.formats.streams import PlainBytes
from easypipe.sources.refs import FileRef, changed
from easypipe.sources.schemas import JSON, json_array

CUT_BYTES = 1 << 20  # cuts of a shard are at least this many plain bytes apart
WINDOW_BYTES = 4 << 20  # plain bytes that are read at a time
SELECT = "Select other columns, or write the data without it."


Value = str | np.generic | Array


@dataclass(frozen=True)
class Kind:
    """A kind of value that byte strings hold.

    Args:
        type: The Arrow type of the column.
        decode: Returns the value; raises ValueError, IndexError or OverflowError if the bytes hold
            something else. None: the bytes are the text or the value.
    """

    type: pa.DataType
    decode: Callable[[bytes], Value] | None = None


def _checked_json(data: bytes) -> str:
    text = data.decode()  # given bytes, it would accept other encodings too
    json.loads(text)
    return text


TEXT = Kind(pa.large_string())
BYTES = Kind(pa.large_binary())
INTEGER = Kind(pa.int64(), lambda data: np.int64(int(data)))
FLOAT = Kind(pa.float64(), lambda data: np.float64(float(data)))
JSON_TEXT = Kind(JSON, _checked_json)


def npy_header(data: bytes) -> tuple[DType, tuple[int, ...], bool, int]:
    """Reads the header of an .npy file: dtype, shape, whether in Fortran order, and its length.

    Raises:
        ValueError: It is damaged.
    """
    stream = io.BytesIO(data)
    version = np.lib.format.read_magic(stream)
    first = version == (1, 0)
    read = np.lib.format.read_array_header_1_0 if first else np.lib.format.read_array_header_2_0
    try:
        shape, fortran, dtype = read(stream)
    except (tokenize.TokenError, SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError(f"its header is not a dict: {error}") from None
    if min(shape, default=0) < 0:
        raise ValueError(f"its shape is {shape}")
    return dtype, shape, fortran, stream.tell()


def cuts_of(ends: Int64) -> tuple[int, ...]:
    """Returns the rows at which to cut a shard whose rows end at these plain bytes."""
    windows = np.append(0, ends[:-1]) // CUT_BYTES
    return (0, *(np.flatnonzero(np.diff(windows)) + 1).tolist())


def spans(plain: PlainBytes, file: FileRef, begins: Int64, ends: Int64) -> Iterator[bytes]:
    """Yields the plain bytes of each span.

    Args:
        plain: The plain bytes of the source's files.
        file: The file.
        begins: Int64[n], ascending, where the spans begin.
        ends: Int64[n], where they end.

    Raises:
        SourceError: The file is shorter.
    """
    data, at = b"", 0
    for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
        if not data or end > at + len(data):
            at = begin
            data = plain.fetch(file, at, min(max(end, at + WINDOW_BYTES), int(ends[-1])))
        if end > at + len(data):
            raise changed(file)
        yield data[begin - at : end - at]


def rows_of(
    columns: Mapping[str, tuple[Kind, Sequence[bytes | None]]], start: int, stop: int
) -> Rows:
    """Returns rows `start` to `stop`; rows with a value that its column cannot hold are rejects.

    Args:
        columns: The kind and the byte strings (None: null) of each column.
        start: The first row.
        stop: The row after the last one.
    """
    arrays: dict[str, pa.Array] = {}
    bad: dict[int, Reject] = {}
    for name, (kind, values) in columns.items():
        if kind.decode is None:
            arrays[name] = pa.array(values, pa.large_binary()).view(kind.type)
            continue
        found: list[Value | None] = []
        for row, value in enumerate(values, start):
            try:
                found.append(None if value is None else kind.decode(value))
            except (ValueError, IndexError, OverflowError, RecursionError) as error:
                found.append(None)
                why = f"column {name!r} cannot be read: {error}"
                bad.setdefault(row, Reject(row=row, reason="unparsable", detail=why))
        arrays[name] = (
            json_array([None if one is None else str(one) for one in found])
            if is_json(kind.type)
            else pa.array(found, kind.type)
        )
    numbers = np.setdiff1d(np.arange(start, stop), list(bad))
    table = pa.table(arrays)
    if bad:
        table = table.take(pa.array(numbers - start))
    return Rows(table, numbers, [bad[row] for row in sorted(bad)])


def unread(file: FileRef, column: str, kind: str) -> SchemaError:
    """Returns the error for a column that cannot be read, to be raised if it is asked for.

    Args:
        file: The file.
        column: The name of the column.
        kind: The kind that cannot be read, for the message.
    """
    return SchemaError(
        at=place(file.path, column=column),
        problem=f"{kind} is not read"
        + (": reading it would run code of the file" if "pickle" in kind else ""),
        fix=SELECT,
    )
