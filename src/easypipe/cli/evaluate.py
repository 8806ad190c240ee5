"""`easypipe eval`: evaluates a model on tasks of lm-eval."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from easypipe.cli.export import Step
from easypipe.cli.show import say
from easypipe.core.visible import visible


def evaluate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="RUN_OR_MODEL",
            help="The folder of a run or of a model, or the Hub name of a model.",
        ),
    ],
    tasks: Annotated[str, typer.Option(help="Names of lm-eval tasks, separated by commas.")],
    include_path: Annotated[
        Path | None,
        typer.Option(
            exists=True, file_okay=False, help="A folder with more tasks, as lm-eval YAML files."
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="An option of the evaluation: limit, num_fewshot, chat, batch_size or max_length "
            "(see easypipe config train.callbacks.lm_eval); may be repeated.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Also write the results to this JSON file.", dir_okay=False)
    ] = None,
    step: Step = None,
) -> None:
    """Evaluate a model on tasks of lm-eval, and print the scores.

    lm-eval is the Language Model Evaluation Harness.
    """
    from easypipe.cli.writing import load
    from easypipe.core.config import apply_overrides, from_dict
    from easypipe.core.storage import commit_bytes
    from easypipe.core.values import JsonObject
    from easypipe.train.callbacks.config import LmEvalConfig

    names = [name.strip() for name in tasks.split(",") if name.strip()]
    values: JsonObject = {"tasks": names, "include_path": include_path and str(include_path)}
    config = from_dict(LmEvalConfig, apply_overrides(values, overrides or ()))
    from easypipe.train.model.harness import check_needed, scores  # loads jax

    check_needed()
    found = scores(config, *load(model, None, step))
    for task, results in found.items():
        numbers = {name: value for name, value in results.items() if isinstance(value, float)}
        for name, value in numbers.items():
            error = results.get(name.replace(",", "_stderr,", 1))
            more = f" ± {error:.4f}" if isinstance(error, float) else ""
            if "_stderr," not in name:
                say(visible(f"{task} {name.removesuffix(',none')}: {value:.6f}{more}"))
    if out is not None:
        commit_bytes(out, (json.dumps(found, indent=1, default=str) + "\n").encode())
