"""Whole outputs: what reports, pages and commands say of rich cases, word for word.

    EASYPIPE_TOLD=write pytest tests/stages/test_discover.py   # writes what is told now; read the diff

A file here is one output. A fault in any word, number, order or condition of it is seen, also one
that nobody thought of.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path


def assert_told(name: str, text: str, **unlike: object) -> None:
    """Asserts that `text` is the output of that name.

    Args:
        name: The name of its file here.
        text: The output.
        unlike: What differs from run to run, by the word that stands for it.
    """
    for word, value in unlike.items():
        text = text.replace(str(value), word)
    path = Path(__file__).with_name(f"{name}.txt")
    if os.environ.get("EASYPIPE_TOLD") == "write":
        path.write_text(text, encoding="utf-8")
    kept = path.read_text(encoding="utf-8")
    assert text == kept, "\n".join(difflib.unified_diff(kept.split("\n"), text.split("\n"), n=1))
