"""`easypipe masks`: what a chat template trains of conversations, proven or why not."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from easypipe.cli.arguments import AsJson, Html
from easypipe.cli.explain import text_line
from easypipe.cli.preview import TRAINED
from easypipe.cli.show import say, write_page

if TYPE_CHECKING:
    from easypipe.previews.masks import ConversationMask
Messages = Annotated[
    Path | None,
    typer.Option(
        exists=True,
        dir_okay=False,
        help="Conversations to look at, JSON or one in each line; else samples.",
    ),
]
RolesToTrain = Annotated[
    list[str] | None,
    typer.Option(
        help="Whose turns are trained, in place of --train-on; may be given several times. "
        "'': nobody's but those of messages that say so by train or weight."
    ),
]
SpecialToken = Annotated[
    list[str] | None,
    typer.Option(
        help="What a template alone writes as a special token; may be given several times. "
        "Without it, what looks like one."
    ),
]
Source = Annotated[
    str,
    typer.Argument(
        metavar="TOKENIZER_OR_TEMPLATE",
        help="A tokenizer.json, its folder or Hub name; or a .jinja file, or a built-in "
        "template's name.",
    ),
]


def masks(
    source: Source,
    messages: Messages = None,
    train_on: Annotated[
        Literal["all", "completion", "assistant", "last_assistant"] | None,
        typer.Option(help="Which turns are trained; else the assistant's."),
    ] = None,
    roles_to_train: RolesToTrain = None,
    train_on_eos: Annotated[
        Literal["turn", "last", "none"],
        typer.Option(help="Of which trained turns the end is trained."),
    ] = "turn",
    reasoning: Annotated[
        Literal["keep", "mask", "per_turn"],
        typer.Option(
            help="Train what messages think; mask it; or make a sample for each trained turn."
        ),
    ] = "keep",
    chat_template: Annotated[
        str | None, typer.Option(help="Another template than the tokenizer's own.")
    ] = None,
    special_token: SpecialToken = None,
    html: Html = None,
    as_json: AsJson = False,
) -> None:
    """Show which tokens of conversations a chat template trains. What is trained is green, what is
    masked dim and in ⟦ ⟧, and it tells whether that is proven. Ends with 1 where one of --messages
    is not.
    """
    from easypipe.previews.masks import masks as find
    from easypipe.previews.masks import masks_page
    from easypipe.transforms.chat.conversations import conversations_of

    rows = None if messages is None else [row for _, row in conversations_of(messages)]
    found = find(
        source,
        rows,
        train_on=train_on,
        roles_to_train=roles_to_train and [role for role in roles_to_train if role],
        train_on_eos=train_on_eos,
        reasoning=reasoning,
        chat_template=chat_template,
        special_tokens=special_token,
    )
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(one) for one in found]))
    elif html is not None:
        write_page(html, masks_page(found, f"easypipe masks {source}"))
    else:
        _show(found)
    if rows is not None and any(one.reason is not None for one in found):
        raise typer.Exit(1)


def _show(found: Sequence[ConversationMask]) -> None:
    from rich.text import Text

    for one in found:
        say(Text(one.title, style="bold").append(f" ({one.form})" if one.form else ""))
        if one.pieces:
            parts = [(piece.text, piece.masked, None) for piece in one.pieces]
            say(text_line(parts, 0, TRAINED))
