"""A JSON file that is one array of objects: its elements are found by a scanner, so that ranges are
read without loading the whole.

Elements are handed to the parser of JSON lines, with line breaks inside them turned to spaces.
"""

from __future__ import annotations

from easypipe.sources.formats.records import Layout
from easypipe.sources.formats.scanners import split_elements


def array_layout(head: bytes, start: int) -> Layout | None:
    """The layout of a file whose first bytes are `head`; None where the first character from
    `start` on opens no array.
    """
    text = head[start:]
    opening = len(text) - len(text.lstrip(b" \t\r\n"))
    if text[opening : opening + 1] != b"[":
        return None
    return Layout(
        name="jsonarray", split=split_elements, start=start + opening, lead=1, closes=True
    )
