"""`easypipe parity`: compares tokens and masks with those of transformers."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from easypipe.cli.arguments import ConfigFile, Overrides
from easypipe.cli.show import say

MOST_SHOWN = 10  # most differing rows of a dataset that are printed


def parity(
    config: ConfigFile,
    against: Annotated[
        Literal["transformers"], typer.Option(help="The library to compare with.")
    ] = "transformers",
    rows: Annotated[
        int, typer.Option(min=1, help="How many rows of each dataset to compare, from its first.")
    ] = 100,
    overrides: Overrides = None,
) -> None:
    """Compare the tokens of CONFIG.YAML with those of transformers. It compares the first rows of
    each dataset, and also their masks if the chat template has generation markers. Rows that differ
    are shown with their first different token; the exit code is then 1. It needs easypipe[check].
    """
    from easypipe.cli.configs import described
    from easypipe.previews.parity import parity as compared

    differs = False
    for one in compared(described(config, overrides or []).data, rows):
        masks = f", masks of {one.masks}" if one.masks else ""
        say(f"{one.dataset}: {one.rows} texts{masks} compared, {len(one.differences)} differ")
        for difference in one.differences[:MOST_SHOWN]:
            say(f"  differs: {difference}", style="yellow")
        if len(one.differences) > MOST_SHOWN:
            say(f"  and {len(one.differences) - MOST_SHOWN} more")
        for note in one.notes:
            say(f"  note: {note}")
        differs = differs or bool(one.differences)
    if differs:
        raise typer.Exit(1)
