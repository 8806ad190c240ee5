# pyright: strict
"""Text of others as it is shown to people: nothing in it steers a terminal or hides."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

# control, format and surrogate characters; separators of lines and paragraphs
_UNSEEN = ("Cc", "Cf", "Cs", "Zl", "Zp")


def visible(text: str, *, keep: str = "") -> str:
    """The text with every character spelled out (`\\u{1b}`) that is not seen, that would steer a
    terminal, or that would turn the order of the rest. keep: characters that stay."""
    if text.isprintable():
        return text
    return "".join(
        c if c in keep or unicodedata.category(c) not in _UNSEEN else f"\\u{{{ord(c):x}}}"
        for c in text
    )


def bytes_text(count: float) -> str:
    """`312 MB`: three digits, in units of 1000."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.4g} TB"


def first_of(names: Sequence[str], most: int = 8, between: str = ", ") -> str:
    """The first few in one line, and how many there are besides."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return between.join(names[:most]) + more
