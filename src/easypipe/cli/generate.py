"""`easypipe generate`: a look at what a model writes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from easypipe.cli.export import Step
from easypipe.cli.show import say
from easypipe.core.errors import ConfigError, require

Dtype = Annotated[
    Literal["float32", "bfloat16"],
    typer.Option(help="Of a model's weights and products; a run has its own."),
]
TokenizerName = Annotated[
    str | None,
    typer.Option(help="A tokenizer.json, its folder or a Hub name; else the model's own."),
]


def generate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="RUN_OR_MODEL", help="A run's folder; or a model's folder or Hub name."
        ),
    ],
    prompts: Annotated[
        list[str], typer.Argument(metavar="PROMPT...", help="What it goes on from.")
    ],
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens to add to each prompt, at most.")
    ] = 64,
    temperature: Annotated[
        float, typer.Option(help="0: the likeliest token every time; 1: the model's own odds.")
    ] = 0.8,
    top_k: Annotated[
        int | None, typer.Option(help="Draw from the k likeliest tokens only.")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            help="Draw from the likeliest tokens that have this share of the odds together."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of what is drawn.")] = 0,
    dtype: Dtype = "float32",
    tokenizer: TokenizerName = None,
    step: Step = None,
) -> None:
    """Write on from each PROMPT with the model of a run, or a published one, to what ends a turn or
    a text.
    """
    from easypipe.train.model.generate import generate as write  # jax
    from easypipe.transforms.tokenizer.tokenizer import load_tokenizer

    decoder, own, ends = _load(model, step, dtype)
    name = tokenizer or own
    if name is None:
        raise ConfigError(
            at="--tokenizer",
            problem=f"{model} names no tokenizer",
            fix="Give the one that made its tokens.",
        )
    loaded = load_tokenizer(name)
    begun = list(map(loaded.reference_encode, prompts))
    start = [] if loaded.eos_token_id is None else [loaded.eos_token_id]
    lines = write(
        decoder,
        [ids or start for ids in begun],
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        eos_token_id=[*ends, *start],
        seed=seed,
    )
    for ids, line in zip(begun, lines, strict=True):
        say(loaded.decode([*ids, *line]))


def _load(name: str, step: int | None, dtype: Any) -> tuple[Any, str | None, tuple[int, ...]]:
    """The model, the name of its tokenizer, and the tokens that end what it writes."""
    from easypipe.train import load_pretrained
    from easypipe.train.checkpoint.files import CHECKPOINTS
    from easypipe.train.finished import load_trained
    from easypipe.train.model.pretrained.config import PretrainedConfig
    from easypipe.train.model.pretrained.files import end_tokens

    if (Path(name).expanduser() / CHECKPOINTS).is_dir():
        trained = load_trained(name, step)
        return trained.model, trained.tokenizer, trained.seen.stop_token_ids
    require(
        step is None,
        "--step",
        f"{name} is no run that has checkpoints",
        "Leave it out, or give a run's folder.",
    )
    decoder = load_pretrained(name, dtype=dtype)
    _, folder = PretrainedConfig(pretrained=name).resolved()
    return (
        decoder,
        str(folder) if (folder / "tokenizer.json").is_file() else None,
        end_tokens(folder),
    )
