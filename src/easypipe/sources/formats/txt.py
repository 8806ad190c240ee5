"""Text files, plain or compressed: lines, paragraphs or whole files as rows of column `text`."""

from __future__ import annotations

from typing import Any, Literal, Unpack, get_args

import numpy as np
import pyarrow as pa

from easypipe.core.errors import require_option
from easypipe.core.protocols import left_out
from easypipe.sources.base import FileOptions, Rows
from easypipe.sources.files import DataFiles
from easypipe.sources.formats.records import BOM, Layout, Records, RecordSource, read_head
from easypipe.sources.formats.scanners import (
    BLANK,
    GOOD,
    MORE,
    flag_blank,
    gather_text,
    split_lines,
    split_paragraphs,
)
from easypipe.sources.refs import FileRef
from easypipe.sources.schemas import text_array

TEXT = "text"
SCHEMA = pa.schema([pa.field(TEXT, pa.large_string())])

TextUnit = Literal["line", "paragraph", "file"]


class TextShardedSource(RecordSource):
    """The rows of text files, in the column `text`.

    Other options are those of FileSource. Reasons of rejects: blank_line (benign; lines of only
    white space), invalid_utf8.

    Args:
        text_unit: What a row is: a `line`, without its line break; a `paragraph`, the lines between
            two blank ones, with the line breaks inside it; or a whole `file`, without its byte
            order mark.
    """

    kind = "txt"

    def __init__(
        self, data_files: DataFiles, *, text_unit: TextUnit = "line", **options: Unpack[FileOptions]
    ) -> None:
        require_option(text_unit, get_args(TextUnit), "text_unit")
        self._unit: TextUnit = text_unit
        super().__init__(data_files, **options)

    def _lay_out(self, file: FileRef) -> Layout:
        unit = self._unit
        return Layout(
            key="txt" if unit == "line" else f"txt {unit}s",
            split=_SPLITS[unit],
            start=len(BOM) if read_head(file, 16, self._plain).startswith(BOM) else 0,
            schema=lambda facts: SCHEMA,
            parse=_whole if unit == "file" else parse_lines,
            lines=unit == "line",
        )

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


def _whole(piece: Records, fields: pa.Schema) -> Rows:
    """Returns texts unchanged, including blank ones."""
    return _gathered(piece, np.full(len(piece.starts), GOOD, np.uint8))


def parse_lines(piece: Records, fields: pa.Schema) -> Rows:
    flags = np.empty(len(piece.starts), np.uint8)
    flag_blank(piece.data, piece.starts, piece.ends, flags)
    return _gathered(piece, flags)


def _gathered(piece: Records, flags: np.ndarray) -> Rows:
    """Returns the GOOD texts as rows, and the BLANK ones as rejects."""
    good = np.flatnonzero(flags == GOOD)
    out = np.empty(int((piece.ends - piece.starts)[good].sum()), np.uint8)
    offsets = np.empty(len(good) + 1, np.int64)
    gather_text(piece.data, piece.starts, piece.ends, flags, out, offsets)
    text = text_array(offsets, out)
    blank = np.flatnonzero(flags == BLANK) + piece.row
    return Rows(
        pa.table({TEXT: text}),
        good.astype(np.int64) + piece.row,
        list(left_out(blank, "blank_line", "a blank line")),
    )
