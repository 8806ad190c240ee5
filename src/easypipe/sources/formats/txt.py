"""Plain text: lines, paragraphs or whole files are rows with one column, `text`. Plain, .gz or
.zst.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Unpack, get_args

import numpy as np
import pyarrow as pa

from easypipe.core.errors import require_option
from easypipe.core.protocols import Reject, left_out
from easypipe.sources.base import FileOptions, FileSource, Rows, Survey
from easypipe.sources.files import DataFiles, FileRef
from easypipe.sources.formats import records
from easypipe.sources.formats.records import Found, Layout, RecordReader, Records
from easypipe.sources.formats.scanners import (
    BLANK,
    GOOD,
    MORE,
    flag_blank,
    gather_text,
    split_lines,
    split_paragraphs,
)
from easypipe.sources.formats.streams import check_compression

TEXT = "text"
BOM = b"\xef\xbb\xbf"

TextUnit = Literal["line", "paragraph", "file"]


class TextFormat:
    name = "txt"
    numbered = True

    def __init__(self, unit: TextUnit = "line") -> None:
        self._unit: TextUnit = unit
        self._records = RecordReader()

    def survey(
        self, file: FileRef, columns: tuple[str, ...] | None, index_dir: Path | None
    ) -> Survey:
        check_compression(file)
        head = records.read_head(file, len(BOM))
        # names the index of a file too
        name = "txt" if self._unit == "line" else f"txt {self._unit}s"
        layout = Layout(name=name, split=_SPLITS[self._unit], start=len(BOM) if head == BOM else 0)
        index = records.kept_index(
            file, index_dir, layout.name, lambda: records.index_records(file, layout, None, dict)
        )
        schema = pa.schema([pa.field(TEXT, pa.large_string())])
        return Survey(
            num_rows=index.num_rows,
            total_rows=index.total_rows,
            cuts=index.cuts(),
            schema=schema,
            detail=Found(layout, index),
        )

    def rows(self, file: FileRef, survey: Survey, fields: pa.Schema, start: int, stop: int) -> Rows:
        parse = _whole if self._unit == "file" else _lines
        chunks, numbers, rejects = self._records.parsed(file, survey.detail, start, stop, parse)
        return Rows(pa.table({TEXT: pa.chunked_array(chunks, pa.large_string())}), numbers, rejects)

    def line(self, file: FileRef, survey: Survey, row: int) -> int | None:
        return row + 1 if self._unit == "line" else self._records.line(file, survey.detail, row)

    def raw(self, file: FileRef, survey: Survey, row: int) -> str | None:
        return self._records.text(file, survey.detail, row)


class TextShardedSource(FileSource):
    """Rows of text files, in the column `text`. Other options are those of FileSource.

    text_unit: what a row is. A `line`, without its line break; a `paragraph`, the lines between two
    that are blank, with the
      line breaks inside it; or a whole `file`, every character of it (a byte order mark is none).

    Reasons of rejects: blank_line (benign; lines of white space only), invalid_utf8.
    """

    reader = TextFormat

    def __init__(
        self, data_files: DataFiles, *, text_unit: TextUnit = "line", **options: Unpack[FileOptions]
    ) -> None:
        super().__init__(data_files, **options)
        require_option(text_unit, get_args(TextUnit), "text_unit")
        self._format, self._unit = TextFormat(text_unit), text_unit

    def _options(self) -> list[Any]:
        return [*super()._options(), *([] if self._unit == "line" else [self._unit])]


def _split_file(
    data: np.ndarray, final: bool, starts: np.ndarray, ends: np.ndarray
) -> tuple[int, int, int]:
    if not final or not len(data):
        return 0, 0, MORE
    starts[0], ends[0] = 0, len(data)
    return 1, len(data), MORE


_SPLITS: dict[str, Any] = {"line": split_lines, "paragraph": split_paragraphs, "file": _split_file}


def _whole(piece: Records) -> tuple[pa.Array, np.ndarray, list[Reject]]:
    """Texts as they are, those of white space too."""
    return _gathered(piece, np.full(len(piece.starts), GOOD, np.uint8))


def _lines(piece: Records) -> tuple[pa.Array, np.ndarray, list[Reject]]:
    flags = np.empty(len(piece.starts), np.uint8)
    flag_blank(piece.data, piece.starts, piece.ends, flags)
    return _gathered(piece, flags)


def _gathered(piece: Records, flags: np.ndarray) -> tuple[pa.Array, np.ndarray, list[Reject]]:
    good = np.flatnonzero(flags == GOOD)
    out = np.empty(int((piece.ends - piece.starts)[good].sum()), np.uint8)
    offsets = np.empty(len(good) + 1, np.int64)
    gather_text(piece.data, piece.starts, piece.ends, flags, out, offsets)
    text = pa.Array.from_buffers(
        pa.large_string(), len(good), [None, pa.py_buffer(offsets), pa.py_buffer(out)]
    )
    blank = np.flatnonzero(flags == BLANK) + piece.row
    return (
        text,
        good.astype(np.int64) + piece.row,
        list(left_out(blank, "blank_line", "a blank line")),
    )
