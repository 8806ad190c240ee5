"""`easypipe generate`: its options, how prompts are read, and how answers are printed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from easypipe.cli.export import Step
from easypipe.core.errors import require

Dtype = Annotated[
    Literal["float32", "bfloat16"] | None,
    typer.Option(
        help="The dtype of weights and matrix products of a published model. Default: float32."
    ),
]
TokenizerName = Annotated[
    str | None,
    typer.Option(
        help="A tokenizer.json, its folder or a Hub name. Default: the model's own tokenizer."
    ),
]


def generate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="RUN_OR_MODEL",
            help="The folder of a run or of a model, or the Hub name of a model.",
        ),
    ],
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT...", help="The texts to continue.")
    ] = None,
    messages: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="Answer the conversations in this file: JSON of one or of a list, or JSON lines.",
        ),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Chat: each line that you type is answered.")
    ] = False,
    system: Annotated[str | None, typer.Option(help="The system prompt of --chat.")] = None,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="Generate at most this many tokens for each prompt.")
    ] = 64,
    temperature: Annotated[
        float,
        typer.Option(
            help="Sampling temperature. 0: always take the most probable token; 1: the model's own"
            " probabilities."
        ),
    ] = 0.8,
    top_k: Annotated[
        int | None, typer.Option(help="Sample only from the k most probable tokens.")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            help="Sample only from the most probable tokens whose probabilities add up to this."
        ),
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(
            help="Sample only from tokens with at least this fraction of the highest probability."
        ),
    ] = None,
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1: tokens that have occurred become less probable.")
    ] = 1.0,
    stop: Annotated[
        list[str] | None, typer.Option(help="Stop before this text; may be repeated.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    dtype: Dtype = None,
    tokenizer: TokenizerName = None,
    step: Step = None,
) -> None:
    """Generate text from each PROMPT with a model. The model is that of a run or a published one;
    generation stops at a token that ends a turn or a text. With --messages or --chat, the model
    answers conversations in its chat template.
    """
    ways = [bool(prompts), messages is not None, chat]
    require(
        sum(ways) == 1,
        "PROMPT",
        "no prompt is given" if not any(ways) else "is given together with another kind of prompt",
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
