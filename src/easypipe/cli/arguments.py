"""Arguments and options that several commands share, completion, and the examples in `--help`.

Commands import what they need when they are called, so that `easypipe --help` and completion are
fast.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from easypipe.cli.keys import complete_key


def examples(*lines: str) -> str:
    """Returns the end of a command's --help.

    Its first character makes typer keep the lines as they are.
    """
    return "\b\nExamples:\n" + "\n".join(f"  easypipe {line}" for line in lines)


def complete_config(incomplete: str) -> list[str]:
    """Returns YAML files and folders that begin with what was typed."""
    typed = Path(incomplete)
    folder, begun = (typed, "") if incomplete.endswith("/") else (typed.parent, typed.name)
    try:
        near = sorted(path for path in folder.expanduser().iterdir() if path.name.startswith(begun))
    except (OSError, RuntimeError):  # RuntimeError: unknown home folder
        return []
    prefix = incomplete.removesuffix(begun)
    hidden = begun.startswith(".")
    shown = (path for path in near if hidden or not path.name.startswith("."))
    return [
        f"{prefix}{path.name}" + "/" * path.is_dir()
        for path in shown
        if path.is_dir() or path.suffix in (".yaml", ".yml")
    ]


Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY.PATH=VALUE",
        help="Override a value of the config; may be repeated.",
        autocompletion=complete_key,
    ),
]
ConfigFile = Annotated[
    Path,
    typer.Argument(
        metavar="CONFIG.YAML",
        help="A run config (sections data, model, train, eval) or a pipeline config.",
        autocompletion=complete_config,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Html = Annotated[
    Path | None,
    typer.Option("--html", metavar="OUT.HTML", help="Write a self-contained HTML page instead."),
]
