"""Guesses from the heads of text files whether a line, a paragraph or a file is a document."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence

from easypipe.core.errors import SourceError
from easypipe.sources.formats.records import read_head
from easypipe.sources.formats.txt import TextUnit
from easypipe.sources.refs import FileRef

HEAD_BYTES, HEADS = 1 << 16, 8  # bytes read from each of the first files, and how many files
# If there are at least this many files, each file of at most DOCUMENT_BYTES may be a document.
SEVERAL_FILES = 4
DOCUMENT_BYTES = 1 << 20
# Paragraphs with at least this many lines on average are assumed to be wrapped.
WRAPPED = 1.5


def guess_text_unit(files: Sequence[FileRef]) -> tuple[TextUnit, str]:
    """Returns (the guessed unit, why).

    Args:
        files: Text files, ready to be read; those after the first few are only counted.
    """
    runs = [run for file in files[:HEADS] for run in _runs(file)]
    lines = sum(runs)
    if lines <= len(files[:HEADS]):
        return "line", "no file has several lines of text"
    if len(runs) <= len(files[:HEADS]):
        return "line", "no blank lines stand between its lines; text_unit: file keeps line breaks"
    size = int(statistics.median(file.num_bytes for file in files))
    if len(files) >= SEVERAL_FILES and size <= DOCUMENT_BYTES:
        return "file", f"{len(files):,} files of about {size:,} bytes, with several paragraphs each"
    if lines / len(runs) >= WRAPPED:
        return (
            "paragraph",
            f"blank lines stand between runs of {lines / len(runs):.1f} lines on average",
        )
    return "line", "blank lines stand between single lines: each paragraph is a line"


def _runs(file: FileRef) -> list[int]:
    """Returns how many lines each paragraph of the file's head has.

    The result is empty if the file cannot be read; other code reports that.
    """
    try:
        head = read_head(file, HEAD_BYTES)
    except SourceError:
        return []
    lines = [bool(line.strip()) for line in head.splitlines()]
    return [sum(1 for _ in run) for full, run in itertools.groupby(lines) if full]
