"""Plain text: every line is a row with one column, `text`. Plain, .gz or .zst."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

from easypipe.core.protocols import Reject
from easypipe.sources import records
from easypipe.sources.base import FileSource, Rows, Survey
from easypipe.sources.files import FileRef
from easypipe.sources.records import Found, Layout, RecordReader, Records
from easypipe.sources.scanners import BLANK, GOOD, flag_blank, gather_text, split_lines
from easypipe.sources.streams import check_compression

TEXT = "text"
BOM = b"\xef\xbb\xbf"


class TextFormat:
    name = "txt"
    numbered = True

    def __init__(self) -> None:
        self._records = RecordReader()

    def survey(self, file: FileRef, columns: tuple[str, ...] | None, index_dir: Path | None) -> Survey:
        check_compression(file)
        head = records.read_head(file, len(BOM))
        layout = Layout(name="txt", split=split_lines, start=len(BOM) if head == BOM else 0)
        index = records.kept_index(file, index_dir, layout.name, lambda: records.index_records(file, layout, None, dict))
        schema = pa.schema([pa.field(TEXT, pa.large_string())])
        return Survey(num_rows=index.num_rows, cuts=index.cuts(), schema=schema, detail=Found(layout, index))

    def rows(self, file: FileRef, survey: Survey, fields: pa.Schema, start: int, stop: int) -> Rows:
        chunks, numbers, rejects = self._records.parsed(file, survey.detail, start, stop, _lines)
        return Rows(pa.table({TEXT: pa.chunked_array(chunks, pa.large_string())}), numbers, rejects)

    def line(self, file: FileRef, survey: Survey, row: int) -> int | None:
        return row + 1

    def raw(self, file: FileRef, survey: Survey, row: int) -> str | None:
        return self._records.text(file, survey.detail, row)


class TextShardedSource(FileSource):
    """Lines of text files, without their line breaks, in the column `text`. Options are those of FileSource.

    Reasons of rejects: blank_line (benign; white space only), invalid_utf8.
    """

    reader = TextFormat


def _lines(piece: Records) -> tuple[pa.Array, np.ndarray, list[Reject]]:
    flags = np.empty(len(piece.starts), np.uint8)
    flag_blank(piece.data, piece.starts, piece.ends, flags)
    good = np.flatnonzero(flags == GOOD)
    out = np.empty(int((piece.ends - piece.starts)[good].sum()), np.uint8)
    offsets = np.empty(len(good) + 1, np.int64)
    gather_text(piece.data, piece.starts, piece.ends, flags, out, offsets)
    text = pa.Array.from_buffers(pa.large_string(), len(good), [None, pa.py_buffer(offsets), pa.py_buffer(out)])
    blank = np.flatnonzero(flags == BLANK) + piece.row
    rejects = [Reject(row=row, reason="blank_line", detail="a blank line", benign=True) for row in blank.tolist()]
    return text, good.astype(np.int64) + piece.row, rejects
