"""`easypipe train`: prepares data, trains from the last checkpoint, prints losses and samples."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from easypipe.cli.arguments import ConfigFile, Overrides
from easypipe.cli.show import console, progress, quality, say, show_report, training
from easypipe.core.errors import ConfigError, require

if TYPE_CHECKING:
    from easypipe.core.values import Json
    from easypipe.run import RunConfig
    from easypipe.train.trainer import TrainResult


def train(
    config: ConfigFile,
    overrides: Overrides = None,
    samples: Annotated[
        int,
        typer.Option(
            min=0,
            help="How many texts to generate after training; a run on conversations needs --prompt"
            " for it.",
        ),
    ] = 3,
    prompt: Annotated[
        str, typer.Option(help="The prompt of these texts. Default: the beginning of a document.")
    ] = "",
) -> None:
    """Train the model of CONFIG.YAML. The same command again resumes a stopped run from its last
    checkpoint, with the next batch.
    """
    from easypipe.cli.configs import of_images

    if of_images(config, overrides or []):
        require(
            not prompt,
            "--prompt",
            "is the beginning of generated texts, but this run is on images",
            "Leave it out.",
        )
        _train_classifier(config, overrides or [])
        return
    run = load(config, overrides or [])
    result = run_training(run)
    show_result(run, result, samples, prompt)


def _train_classifier(config: Path, overrides: list[str]) -> None:
    from easypipe.compat import classify

    run = classify.ClassifyConfig.load(config, overrides)
    with training() as heard:
        show_measured(classify.train(run, listener=heard))


def load(config: Path, overrides: list[str]) -> RunConfig:
    """Reads the config of a run."""
    from easypipe.run import RunConfig  # loads jax, only if something is trained

    return RunConfig.load(config, overrides)


def run_training(run: RunConfig) -> TrainResult:
    """Prepares the data of a run, and trains it with progress on the terminal."""
    from easypipe import run as runs
    from easypipe.train.parallel.distributed import initialize, is_first

    initialize(run.train.distributed)
    # Several processes would print the same to one terminal.
    console().quiet = console().quiet or not is_first()
    with progress() as listener:
        prepared = runs.prepare(run, progress=listener)
    show_report(prepared.report)
    with training() as heard:
        return runs.train(run, prepared, listener=heard)


def show_result(run: RunConfig, result: TrainResult, samples: int, prompt: str = "") -> None:
    """Prints the result of a run, and texts by its model."""
    from easypipe.train.parallel.distributed import several

    show_measured(result)
    preference = run.train.preference
    if not samples or several() or (preference is not None and preference.scores):
        return
    if result.seen.chat_template is not None and not prompt:
        say(f"talk to it: easypipe generate {result.output_dir} --chat")
        return
    begin = f"begin with {prompt!r}" if prompt else "begin as documents do"
    say(f"texts by the model, which {begin}:")
    for text in sample(run, result, samples, prompt):
        say(f"  » {text!r}")


def show_measured(result: TrainResult) -> None:
    """Prints the losses, and where the files of the run are."""
    first, last = result.first, result.last
    resumed = f" (resumed from step {result.resumed_from})" if result.resumed_from else ""
    say(
        f"trained {result.steps} steps{resumed}: loss {_loss(first)} at first, {_loss(last)} at "
        "last",
    )
    for name, seen in last.get("eval", {}).items():
        say(f"held out {name}: loss {seen['loss']:.4f}, {quality(seen)}")
    for what, where in (
        ("metrics", result.metrics),
        ("loss plot", result.plot),
        ("checkpoint", result.checkpoint),
    ):
        say(f"{what}: {where.absolute()}")


def _loss(record: Json) -> str:
    return "not finite" if record["loss"] is None else f"{record['loss']:.4f}"


def sample(run: RunConfig, result: TrainResult, count: int, prompt: str = "") -> list[str]:
    """Returns short texts by the model, each beginning with `prompt`.

    Without a prompt they begin with the end-of-text token, after which documents begin. A model of
    conversations answers the prompt.

    Raises:
        ConfigError: The run has no tokenizer.
    """
    from easypipe.train.model.writing import Loaded, Writer

    name = result.tokenizer
    if name is None:
        raise ConfigError(
            at="data.default_tokenizer",
            problem="names no tokenizer to write samples with",
            fix="Set it, or --samples 0.",
        )
    options = {"max_new_tokens": 40, "temperature": 0.8, "top_k": 50, "seed": run.train.seed}
    writer = Writer(Loaded(result.model, name, result.seen), {**options, "stop": ()})
    if result.seen.chat_template is not None:
        asked = {"messages": [{"role": "user", "content": prompt}]}
        return writer.written(writer.opened([("--prompt", asked)] * count), whole=False)
    return writer.written([prompt] * count, whole=True)
