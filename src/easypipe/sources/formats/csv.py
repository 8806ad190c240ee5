"""CSV and TSV files, plain or compressed: delimiter, header, quoted fields with line breaks.

Every column is the text in the file: a type guessed from some rows might not fit the others.
"""

from __future__ import annotations

import csv
import os
from collections import Counter
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.csv as pc

from easypipe.core.errors import SourceError, raising
from easypipe.core.protocols import Reject, by_row, left_out
from easypipe.core.schema import offsets_of
from easypipe.core.text import not_utf8
from easypipe.sources.base import Rows
from easypipe.sources.formats.records import (
    BOM,
    Layout,
    Records,
    RecordSource,
    Splitter,
    frozen,
    read_head,
)
from easypipe.sources.formats.scanners import split_csv
from easypipe.sources.formats.streams import PlainBytes
from easypipe.sources.refs import COMPRESSIONS, FileRef, plain_name
from easypipe.sources.schemas import text_array

HEADER_BYTES = 1 << 20  # the header must end within this many first bytes

_AS_ASCII = bytes(range(128)) + b"x" * 128


class CsvShardedSource(RecordSource):
    """The records of CSV (comma) and .tsv (tab) files with a header line; all columns are text.

    Options are those of FileSource. Row 0 is the first record after the header. Reasons of rejects:
    blank_line (benign), wrong_fields, invalid_utf8.
    """

    kind = "csv"

    def _lay_out(self, file: FileRef) -> Layout:
        delimiter = _delimiter(file.path)
        split = partial(split_csv, ord(delimiter))
        header, start = _header(file, delimiter, split, self._plain)
        schema = pa.schema([pa.field(name, pa.large_string()) for name in header])
        return Layout(
            key=["csv", delimiter],
            split=split,
            start=start,
            schema=lambda facts: schema,
            parse=partial(_parse, header, delimiter),
        )


def _parse(header: list[str], delimiter: str, piece: Records, fields: pa.Schema) -> Rows:
    """Returns the rows of some records, and the rejects among them.

    Args:
        header: The names of all columns.
        delimiter: The separator of fields.
        piece: The records.
        fields: The columns to return.
    """
    block = partial(_block, header, delimiter, fields.names)
    filled = piece.ends > piece.starts
    rejects = list(left_out(np.flatnonzero(~filled) + piece.row, "blank_line", "a blank line"))
    rows = np.flatnonzero(filled)
    tables: list[pa.Table] = []
    bad: list[tuple[int, str]] = []
    pending = [(0, len(rows))]
    while pending:
        first, last = pending.pop()
        table, wrong = block(piece, rows[first:last])
        if table is not None:
            tables.append(table)
        elif last - first == 1:
            wrong = [(0, "its quotes do not close")]
        else:  # pyarrow splits a record differently from the scanner
            middle = (first + last) // 2
            pending += [(middle, last), (first, middle)]  # the first half is looked at first
        bad += [(first + i, why) for i, why in wrong]
    table = pa.concat_tables(tables) if tables else fields.empty_table()
    rejects += [
        Reject(row=piece.row + int(rows[i]), reason="wrong_fields", detail=why) for i, why in bad
    ]
    kept = np.delete(rows, [i for i, _ in bad]) if bad else rows
    return Rows(table, kept.astype(np.int64) + piece.row, by_row(rejects))


def _block(
    header: list[str], delimiter: str, names: list[str], piece: Records, rows: np.ndarray
) -> tuple[pa.Table | None, list[tuple[int, str]]]:
    """Returns some records as a table, and (which, why) of those with a wrong number of fields.

    The table is None if the reader found another number of records.

    Args:
        header: The names of all columns.
        delimiter: The separator of fields.
        names: The columns to return.
        piece: Records of the file.
        rows: Int64[n], the numbers of the records within `piece`.
    """
    if not len(rows):
        return pa.schema([(name, pa.large_string()) for name in names]).empty_table(), []
    read = partial(_read, header, delimiter, names)
    text, bad = _text(piece, rows), []
    # The reader does not tell of a wrong row that is not UTF-8. As ASCII it has the same fields.
    if not_utf8(text_array(offsets_of([len(text)]), text)):
        table, bad = read(text.translate(_AS_ASCII), len(rows))
        if table is None or len(bad) == len(rows):
            return table, bad
        if bad:
            rows = np.delete(rows, [i for i, _ in bad])
            text = _text(piece, rows)
    table, others = read(text, len(rows))
    return table, bad or others


def _text(piece: Records, rows: np.ndarray) -> bytes:
    """Returns some records of `piece` with line breaks between them."""
    first, last = rows[0], rows[-1]
    if len(rows) == last - first + 1:
        return piece.data[piece.starts[first] : piece.ends[last]].tobytes()
    return b"\n".join([piece.record(int(i)) for i in rows])


def _read(
    header: list[str], delimiter: str, names: list[str], text: bytes, count: int
) -> tuple[pa.Table | None, list[tuple[int, str]]]:
    """Returns what `_block` returns, of the text of `count` records."""
    bad: list[tuple[int, str]] = []

    def refuse(row: pc.InvalidRow) -> str:
        bad.append(
            (
                int(row.number) - 1,
                f"{row.actual_columns} fields, the header has {row.expected_columns}",
            )
        )
        return "skip"

    # The reader drops a byte order mark: one is put in front, because a field may begin with one.
    text = BOM + text + b"\n"
    read = pc.ReadOptions(use_threads=False, block_size=len(text) + 64, column_names=header)
    parse = pc.ParseOptions(
        delimiter=delimiter,
        newlines_in_values=True,
        ignore_empty_lines=False,
        invalid_row_handler=refuse,
    )
    kinds = {name: pa.large_string() for name in header}
    convert = pc.ConvertOptions(
        check_utf8=False, column_types=kinds, include_columns=names, strings_can_be_null=False
    )
    try:
        table = pc.read_csv(
            pa.BufferReader(text), read_options=read, parse_options=parse, convert_options=convert
        )
    except pa.ArrowInvalid:
        return None, []
    return (table, bad) if table.num_rows + len(bad) == count else (None, [])


def _header(
    file: FileRef, delimiter: str, split: Splitter, plain: PlainBytes
) -> tuple[list[str], int]:
    """Returns the column names, and the plain offset of the first record after them."""
    head = read_head(file, HEADER_BYTES, plain)
    at = len(BOM) if head.startswith(BOM) else 0
    starts, ends = np.empty(1, np.int64), np.empty(1, np.int64)
    while at < len(head):
        count, consumed, _ = split(frozen(head[at:]), len(head) < HEADER_BYTES, starts, ends)
        if not count:
            break
        record = head[at + int(starts[0]) : at + int(ends[0])]
        at += consumed
        if record:
            with raising(
                SourceError,
                f"{file.path}, header",
                "cannot be read",
                "Check the file.",
                (UnicodeDecodeError, csv.Error),
            ):
                names = next(csv.reader([record.decode()], delimiter=delimiter, strict=True))
            for name, count in Counter(names).items():
                if not name.strip() or count > 1:
                    problem = (
                        f"column {name!r} appears twice" if name.strip() else "a column has no name"
                    )
                    raise SourceError(
                        at=f"{file.path}, header",
                        problem=problem,
                        have=names,
                        fix="Give every column a name of its own.",
                    )
            return names, at
    raise file.error(f"no header line in its first {HEADER_BYTES} bytes", "Check that it is CSV.")


def _delimiter(path: str) -> str:
    stem, ending = os.path.splitext(plain_name(path).lower())
    return (
        "\t" if (os.path.splitext(stem)[1] if ending in COMPRESSIONS else ending) == ".tsv" else ","
    )
