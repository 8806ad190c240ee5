"""Loads the model of `easypipe generate` and `eval`; chats, and prints text in a harmless form."""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from easypipe.cli.show import say
from easypipe.core.errors import ConfigError, require
from easypipe.core.visible import visible

if TYPE_CHECKING:
    from easypipe.train.model.writing import Loaded, Writer  # loads jax


def show_text(text: str) -> None:
    """Prints a model's text, with characters that would control a terminal escaped."""
    say(visible(text, keep="\n\t"))


def talk(writer: Writer, system: str | None) -> None:
    """Answers every line that is typed, until the input ends."""
    said = [] if system is None else [{"role": "system", "content": system}]
    for number in itertools.count(1):
        if sys.stdin.isatty():
            typer.echo("> ", nl=False)
        line = sys.stdin.readline()
        if not line:
            return
        if not line.strip():
            continue
        said.append({"role": "user", "content": line.rstrip("\n")})
        prompt = writer.opened([(f"line {number}", {"messages": said})])
        (answer,) = writer.written(prompt, whole=False)
        said.append({"role": "assistant", "content": answer})
        show_text(answer)


def load(
    name: str,
    tokenizer: str | None,
    step: int | None,
    dtype: Literal["float32", "bfloat16"] | None = None,
) -> Loaded:
    """Loads the model of a run, or a published one.

    Raises:
        ConfigError: A step is given for a model without checkpoints, or no tokenizer is known.
    """
    from easypipe.train import load_pretrained
    from easypipe.train.checkpoint.files import CHECKPOINTS
    from easypipe.train.finished import load_trained
    from easypipe.train.model.pretrained.config import PretrainedConfig
    from easypipe.train.model.pretrained.files import end_tokens
    from easypipe.train.model.pretrained.save import Seen
    from easypipe.train.model.writing import Loaded

    if (Path(os.path.expanduser(name)) / CHECKPOINTS).is_dir():
        require(dtype is None, "--dtype", f"has no effect on the run {name}", "Leave it out.")
        trained = load_trained(name, step)
        decoder, own, seen = trained.model, trained.tokenizer, trained.seen
    else:
        require(
            step is None,
            "--step",
            f"{name} is not a run that has checkpoints",
            "Leave it out, or give a run's folder.",
        )
        decoder = load_pretrained(name, dtype=dtype or "float32")
        _, folder = PretrainedConfig(pretrained=name).resolved()
        own = str(folder) if (folder / "tokenizer.json").is_file() else None
        seen = Seen(stop_token_ids=end_tokens(folder))
    if (chosen := tokenizer or own) is None:
        raise ConfigError(
            at="--tokenizer",
            problem=f"{name} names no tokenizer",
            fix="Give the tokenizer that made its tokens.",
        )
    return Loaded(decoder, chosen, seen)
