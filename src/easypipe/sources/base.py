"""FileSource, the base of all file formats: columns (unknown ones are refused), types, reopening.

Law (stateless reads): schema and rows follow from the files alone. Whatever a read leaves open or
in memory only makes the next read faster.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Self, TypedDict, get_args

import numpy as np
import pyarrow as pa

from easypipe.core import jit
from easypipe.core.class_names import classes_of
from easypipe.core.config import digest
from easypipe.core.errors import (
    SchemaError,
    SourceError,
    did_you_mean,
    place,
    require,
    require_option,
    require_rows,
)
from easypipe.core.protocols import Reject, Scan, Shard, Source, SourceInfo, bad_of, by_row
from easypipe.core.remote import StorageOptions
from easypipe.core.schema import ROW_NUMBER, with_row_numbers, without_row_numbers
from easypipe.core.text import not_utf8
from easypipe.core.threads import each
from easypipe.core.values import Int64
from easypipe.sources.files import DataFiles, resolve
from easypipe.sources.formats.streams import PlainBytes
from easypipe.sources.partitions import constant, partition_schema
from easypipe.sources.refs import FileRef, compression_of
from easypipe.sources.schemas import column, has_strings, reconcile

OnError = Literal["error", "skip", "quarantine"]

# Part of every fingerprint and shard identity: it is raised when a change of the readers changes
# the rows of a file.
READER_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Survey:
    """The result of examining one file.

    Args:
        num_rows: The physical records; None if they are not counted. For the head of a file
            (FileRef.head_bytes), the records of that head.
        total_rows: The physical records of the whole file; None if they are not counted.
        cuts: As in Shard.
        schema: Every column of the file, in plain types (schemas.plain_type).
        detail: Whatever the format needs to find rows again.
        ended: False if the file has no end mark, so that an unknown number of rows may be missing.
    """

    num_rows: int | None
    total_rows: int | None
    cuts: tuple[int, ...]
    schema: pa.Schema
    detail: Any = None
    ended: bool = True


class Rows(NamedTuple):
    """The rows of a range, as a format reads them.

    Attributes:
        table: The rows.
        numbers: Int64[rows], ascending, their physical row numbers; None means all of the range.
        rejects: The rejected rows.
    """

    table: pa.Table
    numbers: Int64 | None = None
    rejects: Sequence[Reject] = ()


class FileOptions(TypedDict, total=False):
    """The keyword options of every FileSource, which explains them."""

    columns: Sequence[str] | None
    on_error: OnError
    storage_options: StorageOptions
    index_dir: str | os.PathLike[str] | None


class FileSource(Source):
    """The rows of one or many files of one format, one shard per file.

    A subclass names its `kind`, a key of EXTENSIONS, examines a file (`_survey`) and reads rows of
    it (`_rows`). What it keeps between reads is shared by its copies, and must be thread-safe.

    Files are opened when `schema`, `shards` or rows are first asked for. Law: for one set of files
    every batch has exactly `schema`. It is safe to use from many threads at once.

    Args:
        data_files: Paths, globs, folders or URLs (sources/files.py).
        columns: Names to read, in this order; None reads all.
        on_error: "error" raises SourceError at the first bad row; "skip" and "quarantine" return
            the good rows and list the bad ones in `scan(...).rejects` (the caller counts or writes
            them). The schema then has `__row_number__`, as it always has for text formats.
        storage_options: Passed to fsspec.
        index_dir: The folder in which indexes of line files are kept between runs; None keeps them
            in memory only.

    Raises:
        SourceError: No file has a column that is asked for; the error lists the columns that exist.
    """

    kind: str
    checks_text: ClassVar[bool] = True
    # whether rows may be missing from a batch even if nothing is wrong (blank lines)
    numbered: ClassVar[bool] = False
    fetches: ClassVar[bool] = False  # whether `fetched` fetches files that are not compressed

    def __init__(
        self,
        data_files: DataFiles,
        *,
        columns: Sequence[str] | None = None,
        on_error: OnError = "error",
        storage_options: StorageOptions = None,
        index_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        require_option(on_error, get_args(OnError), "on_error")
        self.on_error = on_error
        self.columns = _names(columns)
        self.files: tuple[FileRef, ...] = tuple(
            resolve(data_files, storage_options, extensions=[self.kind])
        )
        self._plain = PlainBytes()
        first = self.files[0]
        self.waits = self.fetches and first.remote and compression_of(first.path) is None
        self._index_dir = None if index_dir is None else Path(index_dir)
        self._lock = threading.Lock()
        self._opened: _Opened | None = None

    def _survey(self, file: FileRef) -> Survey:
        """Counts rows and reads the schema of a file.

        Raises:
            SourceError: The file as a whole cannot be read.
        """
        raise NotImplementedError

    def _rows(
        self, file: FileRef, survey: Survey, fields: pa.Schema, start: int, stop: int
    ) -> Rows:
        """Reads rows `start` to `stop`.

        Args:
            file: The file.
            survey: What `_survey` returned for it.
            fields: The columns to return, in types that merge_types returned; columns of a type
                that converts to them are accepted.
            start: The first row.
            stop: The row after the last one.
        """
        raise NotImplementedError

    def _line(self, file: FileRef, survey: Survey, row: int) -> int | None:
        """Returns the line of the file, from 1, at which a row begins; None if that is unknown."""
        return None

    @property
    def schema(self) -> pa.Schema:
        return self._open().schema

    @property
    def shards(self) -> Sequence[Shard]:
        return self._open().shards

    @property
    def info(self) -> SourceInfo:
        return SourceInfo(checks_text=self.checks_text)

    @property
    def fingerprint(self) -> str:
        """A digest of format, options and every file's path, size and identity; opens no file."""
        return digest(
            "files",
            READER_VERSION,
            self.kind,
            self._options(),
            [file.digest for file in self.files],
        )

    def shard_identity(self, shard: int) -> str:
        """Returns a digest of everything that decides the rows of one shard.

        These are its file, the reading options, and the common schema of all files, with the names
        of classes.
        """
        schema = [
            [field.name, str(field.type), *filter(None, [classes_of(field)])]
            for field in self.schema
        ]
        return digest(
            "file",
            READER_VERSION,
            self.kind,
            self._options(),
            self.files[shard].digest,
            schema,
        )

    def head(self, num_bytes: int, files: int | None = None) -> FileSource:
        """Returns a source of the heads of the files, for a first look at the data.

        Formats of records (lines, JSON, CSV) keep the records that end within the first plain
        bytes; a file without a whole record there has no row. Other formats know their rows from a
        footer, and keep them all. `num_rows` of a shard counts what can be read here; `total_rows`
        counts the whole file.

        Args:
            num_bytes: The plain bytes of a head.
            files: Takes only this many files; None takes all.
        """
        clone = self.reopened()
        clone.files = tuple(
            dataclasses.replace(file, head_bytes=num_bytes) for file in self.files[:files]
        )
        return clone

    def reopened(self) -> Self:
        """Returns a source of the same files that has not examined any of them yet."""
        clone = copy.copy(self)
        clone._lock, clone._opened = threading.Lock(), None
        return clone

    @property
    def files_cut(self) -> int:
        """How many files have no end mark."""
        return sum(not survey.ended for survey in self._open().surveys)

    def total_rows(self, shard: int) -> int | None:
        """Returns the rows of the whole file; None if only its head was ever read."""
        return self._open().surveys[shard].total_rows

    def select(self, columns: Sequence[str]) -> FileSource:
        """Returns a source of the same rows with only `columns`.

        No other column is read, and faults in other columns do not spoil a row.
        """
        clone = copy.copy(self)
        clone.columns = _names(columns)
        try:
            opened = self._open()
        except SchemaError:
            # Files that conflict in other columns may agree in these, so they are opened again.
            clone._lock = threading.Lock()
            return clone
        clone._opened = clone._only(opened)
        return clone

    def scan(self, shard: int, start: int, stop: int) -> Scan:
        """Returns rows `start` to `stop` of a shard, with the rejected rows.

        Raises:
            SourceError: The file cannot be read; a row is bad, and `on_error` is "error".
        """
        opened = self._open()
        file, survey = self.files[shard], opened.surveys[shard]
        require_rows(start, stop, survey.num_rows, file.path)
        fields = opened.fields[shard]
        if start == stop:
            return Scan(_empty(opened.schema), ())
        table, numbers, rejects = self._rows(file, survey, fields, start, stop)
        if numbers is None:
            numbers = np.arange(start, stop, dtype=np.int64)
        found = dict(zip(table.column_names, table.columns, strict=True))
        arrays = [self._column(file, field, found, len(numbers)) for field in opened.data]
        bad = _not_utf8(opened.data, arrays)
        if bad:
            rejects = by_row(
                (*rejects, *(_invalid(int(numbers[i]), why) for i, why in bad.items()))
            )
            keep = np.ones(len(numbers), bool)
            keep[list(bad)] = False
            arrays = [array.filter(pa.array(keep)) for array in arrays]
            numbers = numbers[keep]
        if rejects and self.on_error == "error":
            for reject in bad_of(rejects):
                raise self._refusal(file, survey, reject)
        if ROW_NUMBER in opened.schema.names:
            arrays.append(pa.array(numbers))
        return Scan(pa.record_batch(arrays, schema=opened.schema), tuple(rejects))

    def _column(
        self, file: FileRef, field: pa.Field, found: Mapping[str, pa.ChunkedArray], rows: int
    ) -> pa.Array:
        """Returns a column of `rows` rows: one of those `found`, or a value that the folders name.

        `rows` is given separately, because a table without columns forgets how many rows it has.
        """
        name, kind = field.name, field.type
        if name not in found:
            return constant(dict(file.partitions).get(name), rows, kind)
        try:
            return column(found[name].chunks, kind)
        except pa.ArrowException as error:
            raise file.error(
                f"cannot be read as {kind}, which it has in other files or rows: {error}",
                "Rewrite the file, or give it a dataset of its own; a source in Python may leave "
                "the column out with columns=[...].",
                column=name,
            ) from error

    def _refusal(self, file: FileRef, survey: Survey, reject: Reject) -> SourceError:
        return SourceError(
            at=place(file.path, row=reject.row, line=self._line(file, survey, reject.row)),
            problem=reject.detail or reject.reason,
            fix="Correct the file, or read it with on_error='skip' or 'quarantine'.",
        )

    def _options(self) -> list[Any]:
        return [
            None if self.columns is None else list(self.columns),
            "error" if self.on_error == "error" else "tolerant",
        ]

    def _open(self) -> _Opened:
        with self._lock:
            if self._opened is None:
                self._opened = self._look()
            return self._opened

    def _look(self) -> _Opened:
        """Examines all files at once, and merges their schemas."""

        def one(file: FileRef) -> Survey:
            if file.num_bytes == 0:
                raise file.error("is empty (0 bytes)", "Remove it from data_files.")
            return self._survey(file)

        most = os.cpu_count() or 1
        if self.files[0].remote:
            most = 16
            if self.fetches:
                jit.ahead()
        surveys = each(one, self.files, most, "index")
        found = [
            without_row_numbers(_with_partitions(file, survey.schema))
            for file, survey in zip(self.files, surveys, strict=True)
        ]
        wanted = [
            (file.path, _project(schema, self.columns))
            for file, schema in zip(self.files, found, strict=True)
        ]
        data = reconcile(wanted)
        if not any(survey.schema.names for survey in surveys):
            raise self._no_columns(surveys)
        shards = [
            Shard(
                name=file.path, num_rows=survey.num_rows, cuts=survey.cuts, num_bytes=file.num_bytes
            )
            for file, survey in zip(self.files, surveys, strict=True)
        ]
        return self._only(
            _Opened(surveys=surveys, data=data, schema=data, shards=shards, fields=[])
        )

    def _only(self, opened: _Opened) -> _Opened:
        """Returns the result of `_look`, narrowed to `columns`."""
        data = opened.data
        if self.columns is not None:
            self._require(data, opened.surveys)
            data = pa.schema([data.field(name) for name in self.columns])
        names = [{*survey.schema.names} for survey in opened.surveys]  # each call makes a list
        fields = [pa.schema([field for field in data if field.name in had]) for had in names]
        numbered = self.numbered or self.on_error != "error"
        schema = with_row_numbers(data) if numbered else data
        return dataclasses.replace(opened, data=data, schema=schema, fields=fields)

    def _no_columns(self, surveys: Sequence[Survey]) -> SourceError:
        """Returns the error for files without any column: no row is good, or there are no rows."""
        for file, survey in zip(self.files, surveys, strict=True):
            if survey.num_rows:
                head = min(survey.num_rows, 1000)
                rows = self._rows(file, survey, pa.schema([]), 0, head)
                for reject in bad_of(rows.rejects):
                    return self._refusal(file, survey, reject)
                if rows.numbers is None or len(rows.numbers):  # otherwise they are blank lines
                    problem = "has rows, but columns cannot be determined from them"
                    fix = "Check its first row: JSON has no NaN or Infinity, and objects need keys."
                    return file.error(problem, fix)
        return self.files[0].error(
            "has no row from which columns can be determined", "Give files with rows."
        )

    def _require(self, data: pa.Schema, surveys: Sequence[Survey]) -> None:
        """Raises SchemaError for a column of `columns` that no file has."""
        for name in self.columns or ():
            if name not in data.names:
                pairs = zip(self.files, surveys, strict=True)
                have = list(
                    dict.fromkeys(
                        n
                        for file, survey in pairs
                        for n in _with_partitions(file, survey.schema).names
                    )
                )
                at = self.files[0].path + (
                    f" (and {len(self.files) - 1} more)" if len(self.files) > 1 else ""
                )
                raise SchemaError(
                    at=at, problem=f"no column {name!r}", have=have, fix=did_you_mean(name, have)
                )


@dataclass(frozen=True, kw_only=True)
class _Opened:
    """The facts that are known once every file was examined.

    Attributes:
        surveys: One for each file.
        data: The columns, without ROW_NUMBER.
        schema: The columns, with ROW_NUMBER if rows are numbered.
        shards: One for each file.
        fields: For each file, the fields of `data` that the file itself has.
    """

    surveys: list[Survey]
    data: pa.Schema
    schema: pa.Schema
    shards: list[Shard]
    fields: list[pa.Schema]


def _names(columns: Sequence[str] | None) -> tuple[str, ...] | None:
    """Returns `columns` as a tuple; raises ConfigError if it is not a list of different names."""
    if columns is None:
        return None
    names = tuple(columns) if not isinstance(columns, str) else ()
    require(
        names
        and all(isinstance(name, str) for name in names)
        and len(set(names)) == len(names)
        and ROW_NUMBER not in names,
        "columns",
        f"expected different column names, got {columns!r}",
        "Write columns=['text'].",
    )
    return names


def _project(schema: pa.Schema, columns: tuple[str, ...] | None) -> pa.Schema:
    return (
        schema
        if columns is None
        else pa.schema([field for field in schema if field.name in columns])
    )


def _with_partitions(file: FileRef, schema: pa.Schema) -> pa.Schema:
    """Returns the columns of a file and those that its folders name; the file's own win."""
    return pa.schema(
        [
            *schema,
            *(
                field
                for field in partition_schema(file.partitions)
                if field.name not in schema.names
            ),
        ]
    )


def _empty(schema: pa.Schema) -> pa.RecordBatch:
    return pa.record_batch([pa.nulls(0, field.type) for field in schema], schema=schema)


def _not_utf8(schema: pa.Schema, arrays: Sequence[pa.Array]) -> dict[int, str]:
    """Returns the first column that is not UTF-8, by the position of each such row."""
    bad: dict[int, str] = {}
    for field, array in zip(schema, arrays, strict=True):
        if has_strings(field.type):
            for row in not_utf8(array):
                bad.setdefault(row, field.name)
    return bad


def _invalid(row: int, name: str) -> Reject:
    return Reject(row=row, reason="invalid_utf8", detail=f"column {name!r} is not UTF-8")
