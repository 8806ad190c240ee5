"""CSV (and TSV, by extension): a header, then records; quoted fields may hold line breaks. Plain,
.gz or .zst.

Every column is text as it stands in the file: a type guessed from some rows would not hold for the
others.
"""

from __future__ import annotations

import csv
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pc

from easypipe.core.errors import SourceError
from easypipe.core.protocols import Reject, left_out
from easypipe.sources.base import FileSource, Rows, Survey
from easypipe.sources.files import COMPRESSIONS, FileRef
from easypipe.sources.formats import records
from easypipe.sources.formats.records import Found, Layout, RecordReader, Records
from easypipe.sources.formats.scanners import split_csv
from easypipe.sources.formats.streams import check_compression

BOM = b"\xef\xbb\xbf"
HEADER_BYTES = 1 << 20  # a header is looked for in so many first bytes


@dataclass(frozen=True)
class _Found(Found):
    header: list[str]
    delimiter: str


class CsvFormat:
    name = "csv"
    numbered = True

    def __init__(self) -> None:
        self._records = RecordReader()

    def survey(
        self, file: FileRef, columns: tuple[str, ...] | None, index_dir: Path | None
    ) -> Survey:
        check_compression(file)
        delimiter = _delimiter(file.path)
        split = partial(_split, ord(delimiter))
        header, start = _header(file, delimiter, split)
        layout = Layout(name="csv", split=split, start=start)
        index = records.kept_index(
            file,
            index_dir,
            [layout.name, delimiter],
            lambda: records.index_records(file, layout, None, dict),
        )
        schema = pa.schema([pa.field(name, pa.large_string()) for name in header])
        return Survey(
            num_rows=index.num_rows,
            total_rows=index.total_rows,
            cuts=index.cuts(),
            schema=schema,
            detail=_Found(layout, index, header, delimiter),
        )

    def rows(self, file: FileRef, survey: Survey, fields: pa.Schema, start: int, stop: int) -> Rows:
        found: _Found = survey.detail
        tables, numbers, rejects = self._records.parsed(
            file, found, start, stop, lambda piece: _parse(piece, found, fields.names)
        )
        return Rows(pa.concat_tables(tables), numbers, rejects)

    def line(self, file: FileRef, survey: Survey, row: int) -> int | None:
        return self._records.line(file, survey.detail, row)

    def raw(self, file: FileRef, survey: Survey, row: int) -> str | None:
        return self._records.text(file, survey.detail, row)


class CsvShardedSource(FileSource):
    """Records of CSV (comma) and .tsv (tab) files with a header line; every column is large_string.
    Options are those of FileSource.

    Row 0 is the first record behind the header. Reasons of rejects: blank_line (benign),
    wrong_fields, invalid_utf8.
    """

    reader = CsvFormat


def _parse(
    piece: Records, found: _Found, names: list[str]
) -> tuple[pa.Table, np.ndarray, list[Reject]]:
    filled = piece.ends > piece.starts
    rejects = list(left_out(np.flatnonzero(~filled) + piece.row, "blank_line", "a blank line"))
    rows = np.flatnonzero(filled)
    table, bad = _block(piece, rows, found, names)
    if table is None:  # some record is cut otherwise than the scanner cuts it: each is read alone
        tables, bad = [], []
        for i in range(len(rows)):
            alone, wrong = _block(piece, rows[i : i + 1], found, names)
            if alone is None:
                wrong = [(0, "its quotes do not close")]
            else:
                tables.append(alone)
            bad += [(i, why) for _, why in wrong]
        table = (
            pa.concat_tables(tables)
            if tables
            else pa.schema([(name, pa.large_string()) for name in names]).empty_table()
        )
    rejects += [
        Reject(row=piece.row + int(rows[i]), reason="wrong_fields", detail=why) for i, why in bad
    ]
    rejects.sort(key=lambda reject: reject.row)
    kept = np.delete(rows, [i for i, _ in bad]) if bad else rows
    return table, kept.astype(np.int64) + piece.row, rejects


def _block(
    piece: Records, rows: np.ndarray, found: _Found, names: list[str]
) -> tuple[pa.Table | None, list[tuple[int, str]]]:
    """The records `rows` of a piece as a table, and (which, why) of those with a wrong number of
    fields; None where they do not add up.
    """
    bad: list[tuple[int, str]] = []

    def refuse(row: pc.InvalidRow) -> str:
        bad.append(
            (
                int(row.number) - 1,
                f"{row.actual_columns} fields, the header has {row.expected_columns}",
            )
        )
        return "skip"

    if not len(rows):
        return pa.schema([(name, pa.large_string()) for name in names]).empty_table(), []
    first, last = rows[0], rows[-1]
    if len(rows) == last - first + 1:
        text = piece.data[piece.starts[first] : piece.ends[last]].tobytes()
    else:
        text = b"\n".join([piece.record(int(i)) for i in rows])
    # the reader drops a byte order mark, so it is given one: a field may begin with that character
    text = BOM + text + b"\n"
    read = pc.ReadOptions(use_threads=False, block_size=len(text) + 64, column_names=found.header)
    parse = pc.ParseOptions(
        delimiter=found.delimiter,
        newlines_in_values=True,
        ignore_empty_lines=False,
        invalid_row_handler=refuse,
    )
    kinds = {name: pa.large_string() for name in found.header}
    convert = pc.ConvertOptions(
        check_utf8=False, column_types=kinds, include_columns=names, strings_can_be_null=False
    )
    try:
        table = pc.read_csv(
            pa.BufferReader(text), read_options=read, parse_options=parse, convert_options=convert
        )
    except pa.ArrowInvalid:
        return None, []
    return (table, bad) if table.num_rows + len(bad) == len(rows) else (None, [])


def _header(file: FileRef, delimiter: str, split: records.Splitter) -> tuple[list[str], int]:
    """Column names, and the plain offset of the first record behind them."""
    head = records.read_head(file, HEADER_BYTES)
    at = len(BOM) if head.startswith(BOM) else 0
    starts, ends = np.empty(1, np.int64), np.empty(1, np.int64)
    while at < len(head):
        count, consumed, _ = split(
            records.frozen(head[at:]), len(head) < HEADER_BYTES, starts, ends
        )
        if not count:
            break
        record = head[at + int(starts[0]) : at + int(ends[0])]
        at += consumed
        if record:
            try:
                names = next(csv.reader([record.decode()], delimiter=delimiter, strict=True))
            except (UnicodeDecodeError, csv.Error) as error:
                raise SourceError(
                    at=f"{file.path}, header",
                    problem=f"cannot be read: {error}",
                    fix="Check the file.",
                ) from error
            for name in names:
                if not name.strip() or names.count(name) > 1:
                    problem = (
                        f"column {name!r} stands twice" if name.strip() else "a column has no name"
                    )
                    raise SourceError(
                        at=f"{file.path}, header",
                        problem=problem,
                        have=names,
                        fix="Give every column a name of its own.",
                    )
            return names, at
    raise SourceError(
        at=file.path,
        problem=f"no header line in its first {HEADER_BYTES} bytes",
        fix="Check that it is CSV.",
    )


def _split(
    delimiter: int, data: np.ndarray, final: bool, starts: np.ndarray, ends: np.ndarray
) -> tuple[int, int, int]:
    return split_csv(data, delimiter, final, starts, ends)


def _delimiter(path: str) -> str:
    stem, ending = os.path.splitext(path.lower())
    return (
        "\t" if (os.path.splitext(stem)[1] if ending in COMPRESSIONS else ending) == ".tsv" else ","
    )
