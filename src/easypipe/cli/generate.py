"""`easypipe generate`: its options and their checks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from easypipe.cli.export import Step
from easypipe.core.errors import require

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
        list[str] | None, typer.Argument(metavar="PROMPT...", help="What it goes on from.")
    ] = None,
    messages: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="Answer the conversations of this file: JSON, or one in each line.",
        ),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Talk: each line that you type is answered.")
    ] = False,
    system: Annotated[
        str | None, typer.Option(help="What --chat says to the model before all else.")
    ] = None,
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
    min_p: Annotated[
        float | None,
        typer.Option(help="Draw from tokens with this share of the likeliest one's odds."),
    ] = None,
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1, tokens that were written are less likely.")
    ] = 1.0,
    stop: Annotated[
        list[str] | None, typer.Option(help="End before this text; may be given several times.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of what is drawn.")] = 0,
    dtype: Dtype = "float32",
    tokenizer: TokenizerName = None,
    step: Step = None,
) -> None:
    """Write on from each PROMPT with a model. It is that of a run or a published one, and writes to
    what ends a turn or a text. With --messages or --chat it answers conversations by its chat
    template.
    """
    ways = [bool(prompts), messages is not None, chat]
    require(
        sum(ways) == 1,
        "PROMPT",
        "none is given" if not any(ways) else "is given beside another way to ask",
        "Give prompts, or --messages FILE, or --chat.",
    )
    require(system is None or chat, "--system", "has no effect without --chat", "Leave it out.")
    options = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "stop": tuple(stop or ()),
        "seed": seed,
    }
    from easypipe.cli.writing import load, show_text, talk
    from easypipe.train.model.writing import Writer
    from easypipe.transforms.chat.conversations import conversations_of

    writer = Writer(load(model, tokenizer, step, dtype), options)
    if chat:
        talk(writer, system)
        return
    texts = prompts or []
    if messages is not None:
        texts = writer.opened(conversations_of(messages))
    for text in writer.written(texts, whole=messages is None):
        show_text(text)
