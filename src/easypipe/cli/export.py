"""`easypipe export`: writes the model of a run as a folder or file that other programs open."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

import typer

from easypipe.cli.show import say
from easypipe.core.errors import require

Run = Annotated[
    Path,
    typer.Argument(
        metavar="RUN",
        help="The output folder of a run that has saved a checkpoint.",
        show_default=False,
    ),
]
Step = Annotated[
    int | None,
    typer.Option("--step", help="The step of the checkpoint to use. Default: the newest."),
]
Check = Annotated[
    bool,
    typer.Option(
        "--check",
        help="Open OUT with transformers (and PEFT; with --gguf: with llama-cpp-python), and "
        "compare logits (or greedy tokens), tokens of texts and conversations, and the "
        "tokens that end generation with those of the run. The exit code is 1 if they differ.",
    ),
]

Out = Annotated[
    Path,
    typer.Argument(
        metavar="OUT", help="The folder to write; with --gguf, the file.", show_default=False
    ),
]


def export(
    run: Run,
    out: Out,
    step: Step = None,
    adapters: Annotated[
        bool,
        typer.Option(
            "--adapters",
            help="Write only the adapters of train.lora, for PEFT, instead of merging them into "
            "the model.",
        ),
    ] = False,
    gguf: Annotated[
        bool, typer.Option("--gguf", help="Write one GGUF file for llama.cpp instead of a folder.")
    ] = False,
    dtype: Annotated[
        Literal["float32", "float16", "bfloat16"] | None,
        typer.Option(
            help="The dtype of matrices in the GGUF file. Default: that of the run's parameters."
        ),
    ] = None,
    check: Check = False,
) -> None:
    """Write the model of RUN to OUT, for transformers or llama.cpp. OUT includes the tokenizer."""
    require(dtype is None or gguf, "--dtype", "has no effect without --gguf", "Leave it out.")
    if gguf:
        _export_gguf(run, out, step, adapters, dtype, check)
        return
    if check:
        from easypipe.interop.exported import check_needed

        check_needed(adapters=adapters)
    from easypipe.train import save_pretrained  # loads jax, only if a model is read
    from easypipe.train.finished import load_trained
    from easypipe.train.model.pretrained.peft import save_adapters

    trained = load_trained(run, step)
    if adapters:
        written = save_adapters(trained.model, out, base=trained.base)
    else:
        written = save_pretrained(
            trained.model, out, tokenizer=trained.tokenizer, **trained.seen.options()
        )
    what = (
        "adapters"
        if adapters
        else "model"
        if trained.tokenizer
        else "model, without a tokenizer (the run names none)"
    )
    say(f"{what} of step {trained.step}: {written}")
    if check:
        from easypipe.interop.exported import differences

        equal = "logits, tokens and ends" if trained.tokenizer else "logits (no tokenizer is known)"
        _tell("transformers", differences(trained, written, adapters=adapters), equal)


def _export_gguf(
    run: Path,
    out: Path,
    step: int | None,
    adapters: bool,
    dtype: Literal["float32", "float16", "bfloat16"] | None,
    check: bool,
) -> None:
    """Writes the model as a GGUF file, and checks it if asked to."""
    require(
        not adapters,
        "--adapters",
        "a GGUF file contains a whole model",
        "Leave it out: the adapters are then merged.",
    )
    from easypipe.train.finished import load_trained
    from easypipe.train.model.pretrained.gguf import needed_gguf, save_gguf

    needed_gguf()
    if check:
        from easypipe.interop.gguf import needed_llama_cpp

        needed_llama_cpp()
    trained = load_trained(run, step)
    written = save_gguf(
        trained.model, out, tokenizer=trained.tokenizer, dtype=dtype, **trained.seen.options()
    )
    say(f"model of step {trained.step}: {written}")
    if check:
        from easypipe.interop.gguf import gguf_differences

        _tell("llama.cpp", gguf_differences(trained, written), "greedy tokens, texts and ends")


def _tell(program: str, differences: Iterable[str], equal: str) -> None:
    """Prints the differences that a check found, and exits with code 1 if there are any."""
    found = list(differences)
    for difference in found:
        say(f"differs: {difference}")
    if found:
        raise typer.Exit(1)
    say(f"{program} opens it as it was trained: equal {equal}")
