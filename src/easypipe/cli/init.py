"""`easypipe init`: writes a commented config as a starting point, and the schema for editors."""

from __future__ import annotations

import os
import re
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from easypipe.cli.keys import SCHEMA, find
from easypipe.cli.show import say
from easypipe.core.errors import require

HEAD = f"# yaml-language-server: $schema={SCHEMA.name}\n"


class Kind(Enum):
    """The kinds of runs that have a template."""

    pretrain = "pretrain"
    sft = "sft"
    dpo = "dpo"
    classify = "classify"


def init(
    kind: Annotated[
        Kind, typer.Argument(metavar="pretrain|sft|dpo|classify", help="The kind of run.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE",
            help="The file to write. Default: pretrain.yaml, sft.yaml, dpo.yaml or classify.yaml.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite a file that exists.")] = False,
) -> None:
    """Write a commented config as a starting point. It also writes easypipe.schema.json into the
    same folder, with which editors complete and check the config.
    """
    from easypipe.core.storage import commit_bytes

    path = Path(os.path.expanduser(out or f"{kind.value}.yaml"))
    fix = "Give another name with --out, or --force to overwrite it."
    require(force or not path.exists(), str(path), "exists already", fix)
    commit_bytes(path, config_text(kind.value).encode())
    commit_bytes(path.parent / SCHEMA.name, SCHEMA.read_bytes())
    say(f"wrote {path} and {path.parent / SCHEMA.name}")
    say(f"Change its paths, then: easypipe plan {path}, and easypipe train {path}")


def config_text(kind: str) -> str:
    """Returns a template in which keys without a comment get their meaning as a comment, once."""
    text = (SCHEMA.parent / f"{kind}.yaml").read_text(encoding="utf-8")
    within: list[tuple[int, str]] = []  # the sections of the line, with their indentation
    lines, told = [], set[str]()
    for line in text.splitlines():
        key = re.match(r"( *(?:- )?)(\w+):", line)
        if key is not None:
            depth = len(key[1])
            within = [(indent, name) for indent, name in within if indent < depth]
            within.append((depth, key[2]))
            comment = _meaning(".".join(name for _, name in within))
            if " #" not in line and comment not in told:
                told.add(comment)
                line += comment
        lines.append(line)
    return HEAD + "\n".join(lines) + "\n"


def _meaning(path: str) -> str:
    """Returns the first sentence of a key's description as a comment, if it is short."""
    node = find(path)
    words = "" if node is None else re.split(r"(?<!\.)\. ", node["description"])[0].rstrip(".")
    return f"  # {words}" if words and len(words) < 80 else ""
