"""FileSource: what all file formats share, so that a format only counts rows and reads ranges.

Law (stateless reads): schema and rows follow from the files alone. What a read opened or remembered
only makes the next one quicker.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Self, TypedDict, get_args

import numpy as np
import pyarrow as pa

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
from easypipe.core.schema import ROW_NUMBER, with_row_numbers
from easypipe.core.text import not_utf8
from easypipe.core.threads import Threads
from easypipe.core.values import Int64
from easypipe.sources.files import DataFiles, resolve
from easypipe.sources.formats.streams import PlainBytes
from easypipe.sources.partitions import constant, partition_schema
from easypipe.sources.refs import FileRef
from easypipe.sources.schemas import column, has_strings, reconcile

OnError = Literal["error", "skip", "quarantine"]

# Part of every fingerprint and shard identity: raise it when reading changes what rows come out of
# the same file.
READER_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What one look over a file tells.

    num_rows: physical records, None where they are not counted; of a head (FileRef.head_bytes)
    those that it holds, while its file has `total_rows`, None where nobody has counted them. cuts:
    as Shard.cuts. schema: every column of the file, in plain types (schemas.plain_type).
    detail: whatever the format needs in order to find rows again. ended: False where the file stops
    without the mark of its end, so that rows may be missing that nobody can count.
    """

    num_rows: int | None
    total_rows: int | None
    cuts: tuple[int, ...]
    schema: pa.Schema
    detail: Any = None
    ended: bool = True


class Rows(NamedTuple):
    """Rows of a range as a format reads them. `numbers` (Int64[rows], ascending) are their physical
    row numbers; None: all of the range.
    """

    table: pa.Table
    numbers: Int64 | None = None
    rejects: Sequence[Reject] = ()


class FileOptions(TypedDict, total=False):
    """What every FileSource takes beside its files; see there."""

    columns: Sequence[str] | None
    on_error: OnError
    storage_options: StorageOptions
    index_dir: str | os.PathLike[str] | None


class FileSource(Source):
    """Rows of one or many files of one format. One shard per file. A
    subclass names its `kind`, as EXTENSIONS has it, looks over a file (`_survey`) and reads rows of
    it (`_rows`); what it remembers between reads is shared by copies of it, and thread safe.

    columns: names to read, in this order; None reads all. A column that no file has is a
    SourceError that lists those there are.
    on_error: "error" raises SourceError at the first bad row; "skip" and "quarantine" return the
    good rows and list the bad ones in
      `scan(...).rejects` (the caller counts or writes them). The schema then has `__row_number__`,
      as it always has for text formats.
    index_dir: where indexes of line files are kept between runs; None keeps them in memory only.

    Files are opened when `schema`, `shards` or rows are first asked for. Law: for one set of files
    every batch has exactly `schema`. Safe to use from many threads at once.
    """

    kind: str
    checks_text: ClassVar[bool] = True
    # rows may be missing from a batch even where nothing is wrong (blank lines)
    numbered: ClassVar[bool] = False

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
        self._index_dir = None if index_dir is None else Path(index_dir)
        self._lock = threading.Lock()
        self._opened: _Opened | None = None

    def _survey(self, file: FileRef) -> Survey:
        """Counts rows and reads the schema. Raises SourceError where the file as a whole cannot be
        read.
        """
        raise NotImplementedError

    def _rows(
        self, file: FileRef, survey: Survey, fields: pa.Schema, start: int, stop: int
    ) -> Rows:
        """Rows `start` to `stop`; the table holds `fields` (columns of the file, in types that
        merge_types gave) or plain kin of them.
        """
        raise NotImplementedError

    def _line(self, file: FileRef, survey: Survey, row: int) -> int | None:
        """The line of the file, from 1, at which a row begins; None where it has no lines."""
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
        """Digest of format, options and every file's path, size and identity. Opens no file."""
        return digest(
            "files",
            READER_VERSION,
            self.kind,
            self._options(),
            [file.digest for file in self.files],
        )

    def shard_identity(self, shard: int) -> str:
        """Digest of all that decides the rows of one shard: its file, the reading options, and the
        schema that the files have together.
        """
        schema = [[field.name, str(field.type)] for field in self.schema]
        return digest(
            "file",
            READER_VERSION,
            self.kind,
            self._options(),
            self.files[shard].digest,
            schema,
        )

    def head(self, num_bytes: int, files: int | None = None) -> FileSource:
        """The same files, or the first `files` of them, as far as can be told without reading them
        through: of those that are records (lines, JSON, CSV) the records that end within so many
        first plain bytes. Others know their rows from a footer, and keep them all.

        A file that has no whole record there has no row. Shards have `num_rows` of what can be read
        here; `total_rows` tells the file's.
        """
        twin = self.reopened()
        twin.files = tuple(
            dataclasses.replace(file, head_bytes=num_bytes) for file in self.files[:files]
        )
        return twin

    def reopened(self) -> Self:
        """The same files, of which nothing is known yet."""
        twin = copy.copy(self)
        twin._lock, twin._opened = threading.Lock(), None
        return twin

    @property
    def files_cut(self) -> int:
        """Files that stop without the mark of their end."""
        return sum(not survey.ended for survey in self._open().surveys)

    def total_rows(self, shard: int) -> int | None:
        """Rows of the whole file; None for a head whose file nobody has counted."""
        return self._open().surveys[shard].total_rows

    def select(self, columns: Sequence[str]) -> FileSource:
        """The same rows with only `columns`: no other column is read, and what is wrong in another
        column spoils no row.
        """
        twin = copy.copy(self)
        twin.columns = _names(columns)
        try:
            opened = self._open()
        except SchemaError:
            # files that differ in other columns may agree in these, which opening them anew tells
            twin._lock = threading.Lock()
            return twin
        twin._opened = twin._only(opened)
        return twin

    def scan(self, shard: int, start: int, stop: int) -> Scan:
        """Rows `start` to `stop` of a shard, and those refused; with on_error="error" a bad row
        raises SourceError instead.
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
        arrays = [
            self._column(file, opened.data, name, table, len(numbers)) for name in opened.data.names
        ]
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
        self, file: FileRef, data: pa.Schema, name: str, table: pa.Table, rows: int
    ) -> pa.Array:
        """`rows` is told apart, because a table without columns forgets how many it has."""
        kind = data.field(name).type
        if name not in table.column_names:
            return constant(dict(file.partitions).get(name), rows, kind)
        try:
            return column(table.column(name).chunks, kind)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise file.error(
                f"cannot be read as {kind}, which it has in other files or rows: {error}",
                f"Leave {name!r} out with columns=[...], or rewrite the file.",
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
        def one(file: FileRef) -> Survey:
            if file.num_bytes == 0:
                raise file.error("is empty (0 bytes)", "Remove it from data_files.")
            return self._survey(file)

        workers = min(len(self.files), 16 if self.files[0].remote else (os.cpu_count() or 1))
        with Threads(workers, thread_name_prefix="easypipe-index") as pool:
            surveys = list(pool.map(one, self.files))  # which, after a failure, starts no more
        found = [
            _with_partitions(file, survey.schema)
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
        """What was found, narrowed to `columns`."""
        data = opened.data
        if self.columns is not None:
            self._require(data, opened.surveys)
            data = pa.schema([data.field(name) for name in self.columns])
        fields = [
            pa.schema([field for field in data if field.name in survey.schema.names])
            for survey in opened.surveys
        ]
        numbered = self.numbered or self.on_error != "error"
        schema = with_row_numbers(data) if numbered else data
        return dataclasses.replace(opened, data=data, schema=schema, fields=fields)

    def _no_columns(self, surveys: Sequence[Survey]) -> SourceError:
        """Files without any column: what is wrong with their first row, or that there is none."""
        for file, survey in zip(self.files, surveys, strict=True):
            if survey.num_rows:
                head = min(survey.num_rows, 1000)
                rows = self._rows(file, survey, pa.schema([]), 0, head)
                for reject in bad_of(rows.rejects):
                    return self._refusal(file, survey, reject)
                if rows.numbers is None or len(rows.numbers):  # else they are blank lines
                    problem = "has rows, but none from which columns could be known"
                    fix = "Check its first row: JSON has no NaN or Infinity, and objects need keys."
                    return file.error(problem, fix)
        return self.files[0].error(
            "holds no row from which columns could be known", "Give files with rows."
        )

    def _require(self, data: pa.Schema, surveys: Sequence[Survey]) -> None:
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
    """What is known once every file was looked over. data: columns without ROW_NUMBER; fields:
    those of `data` that each file has.
    """

    surveys: list[Survey]
    data: pa.Schema
    schema: pa.Schema
    shards: list[Shard]
    fields: list[pa.Schema]


def _names(columns: Sequence[str] | None) -> tuple[str, ...] | None:
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
    """The columns of a file and those that its folders name; where both do, the file's own are
    read.
    """
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
    """Rows (by position) in which some string is no UTF-8, with the first column it is so in."""
    bad: dict[int, str] = {}
    for field, array in zip(schema, arrays, strict=True):
        if has_strings(field.type):
            for row in not_utf8(array):
                bad.setdefault(row, field.name)
    return bad


def _invalid(row: int, name: str) -> Reject:
    return Reject(row=row, reason="invalid_utf8", detail=f"column {name!r} is not UTF-8")
