"""`easypipe masks`: its options, and the printing of what previews/masks.py finds."""

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
from easypipe.cli.show import require_one, say, write_page

if TYPE_CHECKING:
    from easypipe.previews.masks import ConversationMask
Messages = Annotated[
    Path | None,
    typer.Option(
        exists=True,
        dir_okay=False,
        help="A file of conversations, JSON or JSON lines. Default: built-in samples.",
    ),
]
RolesToTrain = Annotated[
    list[str] | None,
    typer.Option(
        help="A role whose turns are trained on, instead of --train-on; may be repeated. "
        "'': train only on messages that are marked by their own train or weight."
    ),
]
SpecialToken = Annotated[
    list[str] | None,
    typer.Option(
        help="A special token, for a template without a tokenizer; may be repeated. "
        "Default: words that look like one, such as <|end|> or [INST]."
    ),
]
Source = Annotated[
    str,
    typer.Argument(
        metavar="TOKENIZER_OR_TEMPLATE",
        help="A tokenizer.json, its folder or Hub name; or a .jinja file or the name of a "
        "built-in template.",
    ),
]


def masks(
    source: Source,
    messages: Messages = None,
    train_on: Annotated[
        Literal["all", "completion", "assistant", "last_assistant"] | None,
        typer.Option(help="Which turns are trained on. Default: those of the assistant."),
    ] = None,
    roles_to_train: RolesToTrain = None,
    train_on_eos: Annotated[
        Literal["turn", "last", "none"],
        typer.Option(
            help="Whether the token that ends a turn is trained on: for every turn that is trained "
            "on, for the last, or for none."
        ),
    ] = "turn",
    reasoning: Annotated[
        Literal["keep", "mask", "per_turn"],
        typer.Option(
            help="Train on the reasoning of messages, mask it, or make a sample for each turn that "
            "is trained on."
        ),
    ] = "keep",
    chat_template: Annotated[
        str | None, typer.Option(help="Use this template instead of the tokenizer's own.")
    ] = None,
    special_token: SpecialToken = None,
    html: Html = None,
    as_json: AsJson = False,
) -> None:
    """Show which tokens are trained on with a chat template. It prints conversations, in which text
    that is trained on is green; masked text is dim and in ⟦ ⟧. It says whether the mask is proven;
    the exit code is 1 if that of a conversation of --messages is not.
    """
    require_one(as_json, html)
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
