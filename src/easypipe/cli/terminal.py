"""The terminal that everything is printed on, and the bars that move on it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.segment import Segment
from rich.table import Column

from easypipe.core.visible import visible


class Terminal(Console):
    """A console on which text of others is only text: it is no markup, and what would steer a
    terminal is spelled out. Everything that commands print goes through one.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render(self, renderable: RenderableType, options: Any = None) -> Iterator[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else visible(text, keep=_KEPT), style, control)


_KEPT = "\n\t\u200c\u200d"  # joiners are part of how words and emoji are written


def progress_bars(console: Console, behind: str, last: str = "") -> Progress:
    """Bars with what stands behind their counts and behind their times. Where the terminal is too
    narrow, text goes on in the next line: nothing is cut.
    """
    return Progress(
        SpinnerColumn(finished_text="[green]✓"),
        TextColumn("{task.description}", markup=False, table_column=Column(overflow="fold")),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn(behind, table_column=Column(overflow="fold")),
        TimeElapsedColumn(),
        TextColumn(last, table_column=Column(overflow="fold")),
        console=console,
    )
