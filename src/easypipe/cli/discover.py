"""`easypipe discover`: what is in a dataset, and a config that would read it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from easypipe.cli.plan import AsJson
from easypipe.cli.show import say
from easypipe.core.errors import ConfigError
from easypipe.discovery.discover import discover as look
from easypipe.discovery.findings import Discovery
from easypipe.discovery.proposal import Proposal

# exit code: all that was found is printed, but of some part no config, as columns or roles are to
# be decided first
UNDECIDED = 3


def discover(
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH", help="A file, glob, folder or URL, or hf://datasets/owner/name."
        ),
    ],
    kind: Annotated[
        str | None,
        typer.Option(
            "--type",
            metavar="TYPE",
            help="The format, where names do not tell it; huggingface for owner/name.",
        ),
    ] = None,
    split: Annotated[str | None, typer.Option(help="Look at this split alone.")] = None,
    subset: Annotated[
        str | None, typer.Option(help="Look at this configuration of a dataset of the Hub alone.")
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of a dataset of the Hub.")
    ] = None,
    rows: Annotated[int, typer.Option(min=0, help="How many rows are shown.")] = 2,
    count: Annotated[
        bool, typer.Option("--count", help="Count rows where that means to read the files.")
    ] = False,
    columns: Annotated[
        list[str] | None,
        typer.Option(
            "--column",
            metavar="PART=COLUMN",
            help="Decide for a column: prompt=question; may be repeated.",
        ),
    ] = None,
    roles: Annotated[
        list[str] | None,
        typer.Option(
            "--role", metavar="NAME=ROLE", help="Say who speaks: bot=assistant; may be repeated."
        ),
    ] = None,
    as_json: AsJson = False,
    cache_dir: Annotated[
        Path | None, typer.Option(help="Where indexes of counted files are kept.")
    ] = None,
) -> None:
    """Tell what PATH holds: splits, columns, types, rows, what kind of rows they are, and the
    config that would read them.

    Exit code 3: all is told, but of some part no config, as something has to be decided first.
    """
    options: dict[str, Any] = {
        "type": kind,
        "split": split,
        "subset": subset,
        "revision": revision,
        "sample_rows": rows,
        "count": count,
        "cache_dir": cache_dir,
    }
    found = look(path, **options)
    decided = {
        "columns": dict(_decision(text, "--column prompt=question") for text in columns or ())
        or None,
        "roles": dict(_decision(text, "--role bot=assistant") for text in roles or ()) or None,
    }
    proposals = _proposals(found, decided)
    if as_json:
        shown = found.to_json()
        for part, made in zip(shown["parts"], proposals, strict=True):
            part["refused" if isinstance(made, ConfigError) else "proposal"] = str(made)
        typer.echo(json.dumps(shown, default=str))
    else:
        say(str(found))
        for part, made in zip(found.parts, proposals, strict=True):
            refused = isinstance(made, ConfigError)
            of = f" ({part.files[0]})" if part.files else ""
            say(f"\nTo read {part.name}{of}{', decide first' if refused else ''}:", style="bold")
            say(str(made).rstrip())
    if any(isinstance(made, ConfigError) for made in proposals):
        raise typer.Exit(UNDECIDED)


def _proposals(found: Discovery, decided: dict[str, Any]) -> list[Proposal | ConfigError]:
    """Of every part what is proposed, or the error that says why nothing is."""
    made: list[Proposal | ConfigError] = []
    for part in found.parts:
        try:
            made.append(part.propose(**decided))
        except ConfigError as error:
            made.append(error)
    return made


def _decision(text: str, example: str) -> tuple[str, str]:
    slot, equals, column = text.partition("=")
    if not equals or not slot or not column:
        raise ConfigError(
            at=example.split()[0], problem=f"{text!r} decides nothing", fix=f"Write {example}."
        )
    return slot, column
