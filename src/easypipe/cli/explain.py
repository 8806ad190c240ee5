"""`easypipe explain`: prints which documents are in a batch, and the start of each one's text."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from easypipe.cli.arguments import AsJson, ConfigFile, Overrides
from easypipe.cli.show import progress, say

if TYPE_CHECKING:
    from rich.text import Text

    from easypipe.loader.explain import ExplainedBatch

MASKED = ("⟦", "⟧")
# The greatest step: an endless plan is searched up to it, at about a million steps a second.
MAX_STEP = 1_000_000_000


def explain(
    config: ConfigFile,
    step: Annotated[
        int,
        typer.Option(
            min=0,
            max=MAX_STEP,
            help="The batch, counted from 0; metrics.jsonl counts steps from 1.",
        ),
    ],
    row: Annotated[
        int | None, typer.Option(min=0, help="Show only this row of the batch, counted from 0.")
    ] = None,
    characters: Annotated[
        int,
        typer.Option(
            min=0, help="Show at most this many characters of each document; 0 shows all."
        ),
    ] = 240,
    as_json: AsJson = False,
    overrides: Overrides = None,
) -> None:
    """Show which documents a batch of CONFIG.YAML contains. For each it shows dataset, file, row,
    tokens and text, with masked text in ⟦ ⟧.
    """
    from easypipe.cli.configs import described
    from easypipe.history import loader_at
    from easypipe.train.record import recorded_steps

    run = described(config, overrides or [], needs_seed=True)
    run.refuse_streaming(
        "its batches are found only by reading all the batches before them",
        "for the batches of a run over the token cache",
    )
    ends = None if run.output_dir is None else recorded_steps(run.output_dir)
    beyond = ends if ends is not None and step >= ends else None
    if as_json:
        with run.placed():
            found = loader_at(run.output_dir, run.loaded, step).explain(step, row)
        more = {} if beyond is None else {"run_ends_after": beyond}
        typer.echo(json.dumps(found.to_json() | more))
        return
    with run.placed(), progress() as listener:
        loader = loader_at(
            run.output_dir, functools.partial(run.loaded, progress=listener), step, listener
        )
        explained = loader.explain(step, row)
    if beyond is not None:
        span = f"{beyond:,} steps (0 to {beyond - 1:,})"
        say(f"the run in {run.output_dir} ends after {span}: this is what it would read next")
    for line in shown(explained, characters):
        say(line)


def shown(explained: ExplainedBatch, characters: int) -> Iterator[Text]:
    """Yields the lines that show an explained batch."""
    from rich.text import Text

    yield Text(f"batch {explained.step} (metrics.jsonl calls it step {explained.step + 1})")
    for row in explained.rows:
        yield Text(row.title, style="bold")
        for segment in row.segments:
            yield Text(f"  {segment.title}", style="cyan")
            if segment.spans is not None:
                yield text_line(
                    [(span.text, span.masked, None) for span in segment.spans], characters
                )
    for note in explained.notes:
        yield Text(f"note: {note}")


def text_line(
    parts: Sequence[tuple[str, bool, str | None]], characters: int, trained: str = ""
) -> Text:
    """Returns the first characters of a document, line ends shown as escapes.

    Args:
        parts: (text, masked, the role that begins to speak). Masked parts are dim and in brackets.
        characters: The most characters to show; 0 shows all.
        trained: The style of parts that are not masked.
    """
    from rich.text import Text

    text, left = Text("      "), characters or None
    for words, masked, role in parts:
        if left == 0:
            break
        if role is not None:
            text.append(f"‹{role}›", style="magenta")
        part = repr(words if left is None else words[:left])[1:-1]
        left = None if left is None else max(0, left - len(words))
        text.append(part.join(MASKED) if masked else part, style="dim" if masked else trained)
    cut = 0 < characters < sum(len(words) for words, _, _ in parts)
    return text.append(" …") if cut else text
