"""`easypipe quickstart`: from the text that every Python brings to a trained model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from easypipe.cli.prepare import Overrides
from easypipe.cli.project import CONFIG, TOKENIZER, VOCAB_SIZE, training_texts, write_project
from easypipe.cli.show import console, say
from easypipe.cli.train import load, run_training, show_result


def quickstart(
    output_dir: Annotated[Path, typer.Option("--output-dir", help="The project folder.")] = Path(
        "easypipe-quickstart"
    ),
    overrides: Overrides = None,
) -> None:
    """Write a small project, train a tokenizer and a model of a few million parameters. Stopped and
    run again, it goes on.
    """
    began = Path.cwd()
    folder = output_dir.expanduser().absolute()
    written = write_project(folder)
    say(f"project: {folder} ({'written' if written else 'found'})")
    # the paths of the config are relative to it, as they are for `easypipe train quickstart.yaml`
    os.chdir(folder)
    try:
        train_tokenizer(folder)
        run = load(Path(CONFIG), overrides or [])
        result = run_training(run)
        say(
            f"everything is in {folder}: {CONFIG} and README.md say what to change",
        )
        show_result(run, result, 3, prompt="def ")
    finally:
        os.chdir(began)


def train_tokenizer(folder: Path) -> None:
    """Trains the project's tokenizer where it is not there yet."""
    if (folder / TOKENIZER / "tokenizer.json").exists():  # written last, in one piece
        return
    from easypipe.transforms.tokenizer.bpe import train_bpe

    with console.status(f"training a byte-level BPE tokenizer with {VOCAB_SIZE:,} tokens"):
        train_bpe(training_texts(folder), VOCAB_SIZE, [], folder / TOKENIZER)
    say(f"tokenizer: {TOKENIZER}/ ({VOCAB_SIZE:,} tokens, byte-level BPE)")
