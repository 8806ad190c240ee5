"""`easypipe explain`: which documents stand in a batch, from the config alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.text import Text

from easypipe.cli.configs import described
from easypipe.cli.plan import AsJson
from easypipe.cli.prepare import ConfigFile, Overrides
from easypipe.cli.show import console, progress
from easypipe.core.errors import ConfigError
from easypipe.loader.explain import ExplainedBatch, ExplainedRow, Segment

MASKED = ("⟦", "⟧")


def explain(
    config: ConfigFile,
    step: Annotated[int, typer.Option(min=0, help="The batch, counted from 0: metrics.jsonl calls it step + 1.")],
    row: Annotated[int | None, typer.Option(min=0, help="One row of it, counted from 0; else all.")] = None,
    characters: Annotated[int, typer.Option(min=0, help="Most characters shown of a document; 0 shows all.")] = 240,
    as_json: AsJson = False,
    overrides: Overrides = None,
) -> None:
    """Show which documents stand in a batch of CONFIG.YAML: dataset, file, row, tokens, and their text; what is masked is in ⟦ ⟧."""
    run = described(config, overrides or [], needs_seed=True)
    if run.data.streaming:
        problem = "its batches are found only by reading what stands before them"
        raise ConfigError(at="streaming", problem=problem, fix="Run without it, and every batch can be explained.")
    if as_json:
        typer.echo(json.dumps(run.pipeline().load(run.load).loader().explain(step, row).to_json()))
        return
    with progress() as listener:
        explained = run.pipeline(progress=listener).load(run.load).loader().explain(step, row)
    for line in shown(explained, characters):
        console.print(line, soft_wrap=True)


def shown(explained: ExplainedBatch, characters: int) -> Iterator[Text]:
    yield Text(f"batch {explained.step} (metrics.jsonl calls it step {explained.step + 1})")
    for row in explained.rows:
        yield _row(row)
        for segment in row.segments:
            yield _segment(segment)
            if segment.spans is not None:
                yield _text(segment, characters)
    for note in explained.notes:
        yield Text(f"note: {note}")


def _row(row: ExplainedRow) -> Text:
    window = "" if row.window is None else f", window {row.window}"
    return Text(
        f"row {row.row}: row {row.number:,} of the run, epoch {row.epoch}{window}; {len(row.segments)} segments, "
        f"{row.padding} of {row.slots} slots padding",
        style="bold",
    )


def _segment(s: Segment) -> Text:
    of = f" of {s.document_tokens}" if s.document_tokens is not None else ""
    eos = " and EOS" if s.ends_with_eos else ""
    masked = f", {s.masked_tokens} masked" if s.masked_tokens else ""
    dataset = f"{s.dataset}, " if s.dataset else ""
    return Text(
        f"  [{s.segment}] slots {s.slot_start}:{s.slot_stop}  {dataset}{s.file}, row {s.row}, "
        f"tokens {s.token_start}:{s.token_stop}{of}{eos}{masked}",
        style="cyan",
    )


def _text(segment: Segment, characters: int) -> Text:
    """The first characters of a segment, line ends shown as they would be typed; masked parts dim and in brackets."""
    text, left = Text("      "), characters or None
    for span in segment.spans or ():
        if left == 0:
            break
        part = repr(span.text if left is None else span.text[:left])[1:-1]
        left = None if left is None else max(0, left - len(span.text))
        text.append(part.join(MASKED) if span.masked else part, style="dim" if span.masked else "")
    return text.append(" …") if left == 0 else text
