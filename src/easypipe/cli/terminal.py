"""The console: text from users is shown unchanged; progress bars wrap long text, never cut it."""

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
    """A console that shows text unchanged.

    The text is not read as markup, and characters that would control a terminal are escaped.
    Everything that commands print goes through a Terminal.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render(self, renderable: RenderableType, options: Any = None) -> Iterator[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else visible(text, keep=_KEPT), style, control)


_KEPT = "\n\t\u200c\u200d"  # joiners belong to the spelling of words and emoji


def progress_bars(console: Console, behind: str, last: str = "") -> Progress:
    """Returns progress bars, in which text too long for the terminal is wrapped, never cut.

    Args:
        console: The terminal.
        behind: The format of the text after the counts.
        last: The format of the text after the times.
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
