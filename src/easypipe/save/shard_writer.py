"""Arrow batches into one file of a format, with a codec that exists there."""

from __future__ import annotations

import contextlib
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from easypipe.core.errors import ConfigError
from easypipe.core.schema import SOURCE
from easypipe.save.parquet_lists import ListsWriter, holds_lists_of_integers

Format = Literal["parquet", "arrow", "jsonl"]
Compression = Literal["none", "gzip", "lz4", "zstd"]

# format -> codec -> file extension; the first codec is the default. Arrow files without compression
# are the ones that can be memory-mapped.
CODECS: dict[str, dict[str, str]] = {
    "parquet": {"zstd": ".parquet", "gzip": ".parquet", "lz4": ".parquet", "none": ".parquet"},
    "arrow": {"none": ".arrow", "lz4": ".arrow", "zstd": ".arrow"},
    "jsonl": {"none": ".jsonl", "gzip": ".jsonl.gz", "zstd": ".jsonl.zst"},
}


class BatchWriter(Protocol):
    def __call__(self, batch: pa.RecordBatch) -> None: ...


def check_codec(format: str, compression: str | None) -> str:
    """The codec to use. Raises ConfigError where the format has no such one."""
    codecs = CODECS[format]
    if compression is None:
        return next(iter(codecs))
    if compression not in codecs:
        raise ConfigError(
            at="compression",
            problem=f"{format} files cannot be compressed with {compression}",
            have=codecs,
            fix="Choose one of these.",
        )
    return compression


@contextlib.contextmanager
def open_writer(
    sink: Path | pa.NativeFile, format: str, compression: str, schema: pa.Schema
) -> Iterator[BatchWriter]:
    """Writes a file, or to a sink that stays open.

    Each batch becomes one row group (parquet), record batch (arrow), or run of lines (jsonl, UTF-8,
    one object a line).
    """
    if format == "parquet" and holds_lists_of_integers(schema):
        with _binary_sink(sink) as file:
            lists = ListsWriter(file, schema, compression)
            yield lists.write
            lists.close()
    elif format == "parquet":
        # Tokens are nearly uniform words: a dictionary costs time and makes files larger. Names of
        # datasets are the opposite.
        dictionary: Any = [SOURCE] if SOURCE in schema.names else False
        parquet = pq.ParquetWriter(
            sink, schema, compression=compression, use_dictionary=dictionary, write_statistics=False
        )
        with parquet:
            yield lambda batch: parquet.write_batch(batch, row_group_size=max(1, batch.num_rows))
    elif format == "arrow":
        options = pa.ipc.IpcWriteOptions(compression=None if compression == "none" else compression)
        with _binary_sink(sink) as file, pa.ipc.new_file(file, schema, options=options) as arrow:
            yield lambda batch: arrow.write_batch(batch)
    else:
        check_json(schema)
        with _binary_sink(sink) as file, _packed(file, compression) as text:
            yield lambda batch: text.write(_lines(batch))


def check_json(schema: pa.Schema) -> None:
    """Raises ConfigError for a column that JSON cannot hold."""
    for field in schema:
        inner = field.type
        while (
            pa.types.is_list(inner)
            or pa.types.is_large_list(inner)
            or pa.types.is_dictionary(inner)
        ):
            inner = inner.value_type
        plain = (
            pa.types.is_integer(inner)
            or pa.types.is_floating(inner)
            or pa.types.is_boolean(inner)
            or pa.types.is_null(inner)
        )
        nested = pa.types.is_struct(inner)
        if not (plain or nested or pa.types.is_string(inner) or pa.types.is_large_string(inner)):
            raise ConfigError(
                at="format",
                problem=f"JSON cannot hold column {field.name!r} of type {field.type}",
                fix="Save as parquet or arrow.",
            )


def _binary_sink(sink: Path | pa.NativeFile) -> contextlib.AbstractContextManager[Any]:
    return pa.OSFile(str(sink), "wb") if isinstance(sink, Path) else contextlib.nullcontext(sink)


@contextlib.contextmanager
def _packed(file: Any, compression: str) -> Iterator[Any]:
    if compression == "none":
        yield file
    elif compression == "gzip":
        # no date: same rows, same bytes
        with gzip.GzipFile(
            filename="", fileobj=file, mode="wb", compresslevel=6, mtime=0
        ) as packed:
            yield packed
    else:
        with zstandard.ZstdCompressor().stream_writer(file, closefd=False) as packed:
            yield packed


def _lines(batch: pa.RecordBatch) -> bytes:
    # JSON is text: a Python object for every row is its price, whoever wants speed saves parquet or
    # arrow
    rows = batch.to_pylist()
    return "".join(
        json.dumps(row, ensure_ascii=False, separators=(",", ":"), allow_nan=False) + "\n"
        for row in rows
    ).encode()


def row_bytes(batch: pa.RecordBatch) -> np.ndarray:
    """Int64[rows]: bytes of each row's values before compression; nested columns count by their
    mean.
    """
    total = np.zeros(batch.num_rows, dtype=np.int64)
    for column in batch.columns:
        total += _value_bytes(column) if len(column) else 0
    return total


def _value_bytes(column: pa.Array) -> np.ndarray:
    kind = column.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        width = _width(kind.value_type)
        if width is not None:
            lengths = np.diff(column.offsets.to_numpy())
            return lengths.astype(np.int64) * width + 8
    elif (
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
    ):
        wide = (
            np.int64
            if pa.types.is_large_string(kind) or pa.types.is_large_binary(kind)
            else np.int32
        )
        offsets = np.frombuffer(
            column.buffers()[1], wide, len(column) + 1, column.offset * np.dtype(wide).itemsize
        )
        return np.diff(offsets).astype(np.int64) + 8
    elif _width(kind) is not None:
        return np.full(len(column), _width(kind), dtype=np.int64)
    return np.full(len(column), -(-column.nbytes // max(1, len(column))), dtype=np.int64)


def _width(kind: pa.DataType) -> int | None:
    try:
        return -(-kind.bit_width // 8)
    except ValueError:
        return None
