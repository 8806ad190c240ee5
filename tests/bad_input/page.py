"""Writes docs/bad_input.md: every case of bad input, and what easypipe said of it when this ran.

python tests/bad_input/page.py
"""

from __future__ import annotations

import html
import os
import re
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["HF_HUB_OFFLINE"] = "1"

from bad_input import KINDS
from bad_input.case import Answer, Case, expect, try_out, warm_up

PAGE = Path(__file__).parents[2] / "docs" / "bad_input.md"
LONGEST = 400  # characters of a message that are shown
ACCEPTED = "*is accepted*"
PIPE = "\\|"  # in a table
HEAD = """# Bad input

This page lists what easypipe says about wrong input: the place, the cause, and what to do. A place
is a file with its row (from 0) and line (from 1), or the path of a key in the config. Every line is
a case of the tests, which run `easypipe prepare` unless the line names something else. No case
takes longer than a moment, and none changes a file that was there.

`python tests/bad_input/page.py` writes this page.
"""


def cell(text: str) -> str:
    """As one cell of a table, and no more of it than one wants to read."""
    text = re.sub(r"(.)\1{40,}", r"\1\1\1...", " ".join(text.split()))
    # what is another one in every run: keys of a cache, temporary names, ports
    text = re.sub(r"\.tmp-\w+-[0-9a-f]{8}-", ".tmp-...-", text)
    text = re.sub(r"\b(?:[0-9a-f]{32}|[0-9a-f]{2}/[0-9a-f]{32})\b", "...", text)
    text = re.sub(r"127\.0\.0\.1:\d+", "127.0.0.1:PORT", text)
    text = text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."
    return text.replace("|", PIPE)


def shown(case: Case, answer: Answer) -> str:
    if case.says is None:
        return ACCEPTED
    said = cell(answer.said)
    if PIPE in said:  # the backslash would be shown in backticks
        said = html.escape(said.replace(PIPE, "|"), quote=False)
        return f"<code>{said.replace('|', '&#124;')}</code>"
    fence = "``" if "`" in said else "`"
    return f"{fence} {said} {fence}" if fence == "``" else f"`{said}`"


def line(case: Case, said: str) -> str:
    return f"| {cell(case.what)} | {said} |"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        warm_up(Path(folder))
    parts = [HEAD]
    for kind, cases in KINDS.items():
        rows = [f"## {kind}\n", "| what is wrong | what easypipe says |", "| --- | --- |"]
        for case in cases:
            with tempfile.TemporaryDirectory(prefix="easypipe-bad-input-") as folder:
                answer = try_out(case, Path(folder).resolve())
            expect(case, answer)
            rows.append(line(case, shown(case, answer)))
        parts.append("\n".join(rows) + "\n")
    PAGE.write_text("\n".join(parts), encoding="utf-8")


if __name__ == "__main__":
    os.environ["EASYPIPE_CACHE"] = tempfile.mkdtemp(prefix="easypipe-bad-input-")
    main()
