"""`easypipe discover`: shows what a dataset holds, and a config; options set columns and roles."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from easypipe.cli.arguments import AsJson, Html
from easypipe.cli.show import require_one, say, write_page
from easypipe.core.errors import ConfigError, moved, require

if TYPE_CHECKING:
    from easypipe.discovery.findings import Discovery
    from easypipe.discovery.proposal import Proposal

# The exit code if the findings are printed, but a part has no config because columns or roles must
# be chosen first.
UNDECIDED = 3
EXAMPLES = {"--column": "prompt=question", "--role": "bot=assistant"}


Columns = Annotated[
    list[str] | None,
    typer.Option(
        "--column",
        metavar="PART=COLUMN",
        help=f"Use a column as a part of rows, such as {EXAMPLES['--column']}; may be repeated.",
    ),
]
Roles = Annotated[
    list[str] | None,
    typer.Option(
        "--role",
        metavar="NAME=ROLE",
        help=f"Map a speaker's name to a role, such as {EXAMPLES['--role']}; may be repeated.",
    ),
]


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
            help="The file format, if the file names do not show it; huggingface for a Hub dataset"
            " owner/name.",
        ),
    ] = None,
    split: Annotated[str | None, typer.Option(help="Inspect only this split.")] = None,
    subset: Annotated[
        str | None, typer.Option(help="Inspect only this configuration of a Hub dataset.")
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of a Hub dataset.")
    ] = None,
    rows: Annotated[int, typer.Option(min=0, help="How many example rows to show.")] = 2,
    count: Annotated[
        bool, typer.Option("--count", help="Count rows even if the files must be read for it.")
    ] = False,
    columns: Columns = None,
    roles: Roles = None,
    html: Html = None,
    as_json: AsJson = False,
    cache_dir: Annotated[
        Path | None, typer.Option(help="The folder where row counts of files are stored.")
    ] = None,
) -> None:
    """Inspect the data at PATH, and propose a config for it. It shows splits, columns, types, row
    counts, and what kind of data the rows are.

    The exit code is 3 if a part has no proposed config because a choice must be made first.
    """
    require_one(as_json, html)
    from easypipe.discovery.discover import discover as look

    options: Any = {"type": kind, "split": split, "subset": subset, "revision": revision}
    found = look(path, **options, sample_rows=rows, count=count, cache_dir=cache_dir)
    decisions = _decisions(columns, "--column"), _decisions(roles, "--role")
    proposals = list(_proposals(found, *decisions))
    if html is not None:
        from easypipe.discovery.page import page

        write_page(html, page(found, proposals))
    elif as_json:
        shown = found.to_json()
        for part, made in zip(shown["parts"], proposals, strict=True):
            part["refused" if isinstance(made, ConfigError) else "proposal"] = str(made)
        typer.echo(json.dumps(shown, default=str))
    else:
        _show(found, proposals)
    if any(isinstance(made, ConfigError) for made in proposals):
        raise typer.Exit(UNDECIDED)


def _show(found: Discovery, proposals: Sequence[Proposal | ConfigError]) -> None:
    """Prints the findings, and the proposed config of each part."""
    say(str(found))
    for part, made in zip(found.parts, proposals, strict=True):
        of = f" ({part.files[0]})" if part.files else ""
        first = ", decide first" if isinstance(made, ConfigError) else ""
        say(f"\nTo read {part.name}{of}{first}:", style="bold")
        say(str(made).rstrip())


def _proposals(
    found: Discovery, columns: dict[str, str], roles: dict[str, str]
) -> Iterator[Proposal | ConfigError]:
    """Yields the proposal for each part, or the error that says why there is none."""
    from easypipe.discovery.proposal import propose
    from easypipe.transforms.columns.kinds import OPTIONS

    for part in found.parts:
        try:
            yield propose(part, columns=columns or None, roles=roles or None, typed=True)
        except ConfigError as error:
            name, dot, part_of = error.at.partition(".")
            at = f"{OPTIONS[name]}{dot and ' '}{part_of}" if name in OPTIONS else error.at
            yield moved(error, at)


def _decisions(texts: list[str] | None, option: str) -> dict[str, str]:
    """Returns the decisions `name=meaning` of an option."""
    decided: dict[str, str] = {}
    for text in texts or ():
        name, equals, meaning = text.partition("=")
        require(
            name and equals and meaning,
            option,
            f"{text!r} decides nothing",
            f"Write {option} {EXAMPLES[option]}.",
        )
        decided[name] = meaning
    return decided
