"""`easypipe export`: the model of a run, as a folder that other programs open."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from easypipe.cli.show import say

Run = Annotated[
    Path,
    typer.Argument(
        metavar="RUN",
        help="The output folder of a run that has saved a checkpoint.",
        show_default=False,
    ),
]
Step = Annotated[int | None, typer.Option("--step", help="Of which checkpoint; else the newest.")]


def export(
    run: Run,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The new folder.", show_default=False)],
    step: Step = None,
    adapters: Annotated[
        bool,
        typer.Option(
            "--adapters", help="Only the adapters of train.lora, for PEFT; else they are merged."
        ),
    ] = False,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Open OUT with transformers (and PEFT), and compare with the run: logits, tokens "
            "of texts and conversations, what ends generation. Differences end it with exit 1.",
        ),
    ] = False,
) -> None:
    """Write the model of RUN to OUT, for transformers. Its tokenizer goes with it."""
    if check:
        from easypipe.interop.exported import check_needed

        check_needed(adapters=adapters)
    from easypipe.train import save_pretrained  # jax, only where a model is read
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

        found = list(differences(trained, written, adapters=adapters))
        for difference in found:
            say(f"differs: {difference}")
        if found:
            raise typer.Exit(1)
        equal = "logits, tokens and ends" if trained.tokenizer else "logits (no tokenizer is known)"
        say(f"transformers opens it as it was trained: equal {equal}")
