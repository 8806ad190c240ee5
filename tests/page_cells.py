"""The tables of a page of HTML, as a reader sees them."""

from __future__ import annotations

import html
import re


def cells(page: str) -> list[list[str]]:
    """Every cell of every row of every table, in order."""
    body = page[page.index("<body") :]
    return [
        [
            html.unescape(re.sub(r"<[^>]+>", "", cell))
            for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL)
        ]
        for row in re.findall(r"<tr>(.*?)</tr>", body, re.DOTALL)
    ]
