"""`easypipe plan`: what a run would do, before it does anything."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from easypipe.cli.configs import described
from easypipe.cli.prepare import ConfigFile, Overrides
from easypipe.cli.show import console, progress

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def plan(
    config: ConfigFile,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of the run; else train.steps, else what the data gives.")] = None,
    as_json: AsJson = False,
    prepare: Annotated[bool, typer.Option("--prepare/--no-prepare", help="Tokenize what is not tokenized yet, or refuse.")] = True,
    overrides: Overrides = None,
) -> None:
    """Tell what a run of CONFIG.YAML would do: steps, shares, epochs, fill, losses, disk. Reads lengths, not tokens."""
    run = described(config, overrides or [])
    if as_json:
        typer.echo(json.dumps(run.pipeline().plan(steps or run.steps, prepare=prepare).to_json(), indent=1))
        return
    with progress() as listener:
        report = run.pipeline(progress=listener).plan(steps or run.steps, prepare=prepare)
    console.print(str(report), highlight=False, markup=False, soft_wrap=True)
