"""Writes Arrow batches into one file: parquet, arrow or jsonl, with a codec of that format."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from easypipe.core.errors import ConfigError, require
from easypipe.core.schema import SOURCE, is_list
from easypipe.save.parquet_lists import ListsWriter, holds_lists_of_integers

JSON_HOLDERS = (is_list, pa.types.is_dictionary)
JSON_VALUES = (
    pa.types.is_integer,
    pa.types.is_floating,
    pa.types.is_boolean,
    pa.types.is_null,
    pa.types.is_string,
    pa.types.is_large_string,
)


@contextlib.contextmanager
def open_writer(
    sink: Path | pa.NativeFile, format: str, compression: str, schema: pa.Schema
) -> Generator[Callable[[pa.RecordBatch], None], None, None]:
    """Opens a file, or a sink that stays open, and yields a function that writes a batch.

    Each batch becomes one row group (parquet), record batch (arrow), or run of lines (jsonl, UTF-8,
    one object per line).
    """
    if format == "parquet" and holds_lists_of_integers(schema):
        with _binary_sink(sink) as file:
            lists = ListsWriter(file, schema, compression)
            yield lists.write
            lists.close()
    elif format == "parquet":
        # Tokens are distributed nearly uniformly: a dictionary costs time and makes files larger.
        # Names of datasets are the opposite.
        dictionary = [SOURCE] if SOURCE in schema.names else False
        options: Any = {"use_dictionary": dictionary, "write_statistics": False}
        with (
            _binary_sink(sink) as file,
            pq.ParquetWriter(file, schema, compression=compression, **options) as parquet,
        ):
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
        require(
            _fits_json(field.type),
            "format",
            f"JSON cannot hold column {field.name!r} of type {field.type}",
            "Save as parquet or arrow.",
        )


def _fits_json(kind: pa.DataType) -> bool:
    if any(holds(kind) for holds in JSON_HOLDERS):
        return _fits_json(kind.value_type)
    if pa.types.is_struct(kind):
        return all(_fits_json(field.type) for field in kind)
    # readers of JSON take whole numbers above 2^63 for floating-point ones
    return not pa.types.is_uint64(kind) and any(fits(kind) for fits in JSON_VALUES)


def _binary_sink(sink: Path | pa.NativeFile) -> contextlib.AbstractContextManager[Any]:
    return (
        pa.OSFile(os.fsencode(sink), "wb")
        if isinstance(sink, Path)
        else contextlib.nullcontext(sink)
    )


@contextlib.contextmanager
def _packed(file: Any, compression: str) -> Generator[Any, None, None]:
    """Yields a file that compresses what is written to it."""
    if compression == "none":
        yield file
    elif compression == "gzip":
        # without a date, so that the same rows make the same bytes
        with gzip.GzipFile(
            filename="", fileobj=file, mode="wb", compresslevel=6, mtime=0
        ) as packed:
            yield packed
    else:
        with zstandard.ZstdCompressor().stream_writer(file, closefd=False) as packed:
            yield packed


def _lines(batch: pa.RecordBatch) -> bytes:
    """Returns a batch as lines of JSON."""
    # Text needs a Python object for every row: for speed there are parquet and arrow.
    rows = batch.to_pylist()
    try:
        return "".join(
            json.dumps(row, ensure_ascii=False, separators=(",", ":"), allow_nan=False) + "\n"
            for row in rows
        ).encode()
    except ValueError:
        odd = next(name for row in rows for name, value in row.items() if not _is_json(value))
        raise ConfigError(
            at="format",
            problem=f"JSON cannot hold column {odd!r}: it has a NaN or an infinity",
            fix="Save as parquet or arrow.",
        ) from None


def _is_json(value: object) -> bool:
    """Whether a value holds neither NaN nor infinity."""
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        return False
    return True
