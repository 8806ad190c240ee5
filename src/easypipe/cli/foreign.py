"""`easypipe import`: converts a config of axolotl, TRL or LLaMA-Factory to one of easypipe."""

from __future__ import annotations

import os
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from easypipe.cli.init import HEAD
from easypipe.cli.keys import SCHEMA
from easypipe.cli.show import say
from easypipe.core.errors import require


class Tool(Enum):
    """The tools whose configs can be read."""

    axolotl = "axolotl"
    trl = "trl"
    llamafactory = "llamafactory"


def import_foreign(
    tool: Annotated[
        Tool,
        typer.Argument(metavar="axolotl|trl|llamafactory", help="The tool that the config is for."),
    ],
    config: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", exists=True, dir_okay=False, help="The YAML file of that tool."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="OUT.YAML",
            help="The file to write. Default: print to the terminal.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite a file that exists.")] = False,
) -> None:
    """Convert a config of another tool to one of easypipe. Keys without an equivalent are listed
    with their lines. With --out it also writes easypipe.schema.json into that folder, with which
    editors complete and check the config.
    """
    from easypipe.core.storage import commit_bytes
    from easypipe.interop.foreign.tools import import_config, lines_left, written

    out = None if out is None else Path(os.path.expanduser(out))
    fix = "Give another name, or --force to overwrite it."
    require(out is None or force or not out.exists(), "--out", f"{out} exists already", fix)
    made = import_config(tool.value, config)
    text = written(made, tool.value, config)
    if out is None:
        typer.echo(text, nl=False)
        return
    commit_bytes(out, f"{HEAD}{text}".encode())
    commit_bytes(out.parent / SCHEMA.name, SCHEMA.read_bytes())
    say(f"wrote {out}: {len(made.carried)} keys are carried, {len(made.left)} need a look:")
    for line in lines_left(made, config):
        say(f"  {line}", style="yellow")
    say(f"Then: easypipe preview {out}, and easypipe plan {out}")
