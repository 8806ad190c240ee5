# pyright: strict
"""Text of others as it is shown to people: nothing in it steers a terminal or hides."""

from __future__ import annotations

import unicodedata

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
