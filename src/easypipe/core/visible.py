# pyright: strict
"""Makes untrusted text safe to show; writes sizes as `312 MB`; shows the start of a long list."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

# control, format and surrogate characters; separators of lines and paragraphs
_UNSEEN = ("Cc", "Cf", "Cs", "Zl", "Zp")


def visible(text: str, *, keep: str = "") -> str:
    """Returns the text with every misleading character spelled out (`\\u{1b}`).

    These are characters that are invisible, control a terminal, or reorder other characters.

    Args:
        text: Any text.
        keep: Characters that stay unchanged.
    """
    if text.isprintable():
        return text
    return "".join(
        c if c in keep or unicodedata.category(c) not in _UNSEEN else f"\\u{{{ord(c):x}}}"
        for c in text
    )


def bytes_text(count: float) -> str:
    """Returns a size such as `312 MB`: three digits, in units of 1000."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.4g} TB"


def first_of(names: Sequence[str], most: int = 8, between: str = ", ") -> str:
    """Joins the first few names, and says how many more there are.

    Args:
        names: Any number of names.
        most: How many of them are shown.
        between: The text between two names.
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return between.join(names[:most]) + more
