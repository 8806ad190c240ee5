"""`easypipe preview`: prints the first samples as the model sees them, in colour, or as a page."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from easypipe.cli.arguments import AsJson, ConfigFile, Html, Overrides
from easypipe.cli.explain import text_line
from easypipe.cli.show import progress, require_one, say, write_page

if TYPE_CHECKING:
    from rich.text import Text

    from easypipe.previews.preview import Preview

TRAINED = "green"


def preview(
    config: ConfigFile,
    n: Annotated[int, typer.Option("-n", min=1, help="How many samples to show.")] = 5,
    html: Html = None,
    rows: Annotated[
        int,
        typer.Option(min=1, help="Make the samples from at most this many rows of each dataset."),
    ] = 200,  # previews.samples.FIRST_ROWS
    characters: Annotated[
        int,
        typer.Option(
            min=0, help="Show at most this many characters of each document; 0 shows all."
        ),
    ] = 2000,
    as_json: AsJson = False,
    overrides: Overrides = None,
) -> None:
    """Show samples of CONFIG.YAML, and which text is trained on. That text is green; masked text is
    dim and in ⟦ ⟧. Where a speaker begins, ‹ › name them; cuts are marked.
    """
    require_one(as_json, html)
    from easypipe.cli.configs import described
    from easypipe.previews.samples import preview as look

    run = described(config, overrides or [])
    if as_json:
        with run.placed():
            typer.echo(json.dumps(look(run.data, n, first_rows=rows).to_json()))
        return
    with run.placed(), progress() as listener:
        made = look(run.data, n, first_rows=rows, progress=listener)
    if html is not None:
        write_page(html, made.to_html(f"easypipe preview {config.name}"))
        return
    for line in shown(made, characters):
        say(line)


def shown(made: Preview, characters: int) -> Iterator[Text]:
    """Yields the lines that show a preview."""
    from rich.text import Text

    yield (
        Text("trained ", style=TRAINED)
        .append("⟦masked⟧", style="dim")
        .append(" ‹who begins to speak›", style="magenta")
    )
    for sample in made.samples:
        yield Text(sample.title, style="bold")
        for segment in sample.segments:
            yield Text(f"  {segment.title}", style="cyan")
            for cut in segment.cuts:
                yield Text(f"      cut: {cut}", style="yellow")
            if segment.pieces is not None:
                yield text_line(
                    [(piece.text, piece.masked, piece.role) for piece in segment.pieces],
                    characters,
                    TRAINED,
                )
    for note in made.notes:
        yield Text(f"note: {note}")
