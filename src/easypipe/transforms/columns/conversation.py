"""Chat: a transform that writes conversations as a column of text, by a chat template."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from easypipe.core.config import digest
from easypipe.core.errors import place, require, require_columns
from easypipe.core.schema import ROW_NUMBER, is_list
from easypipe.transforms.chat.columns import is_messages, is_text, values_of
from easypipe.transforms.chat.conversations import wrong_messages, wrong_tools
from easypipe.transforms.chat.pool import Asked
from easypipe.transforms.chat.render import (
    HostileTemplateError,
    load_chat_template,
)
from easypipe.transforms.chat.spans import Rendered
from easypipe.transforms.columns.base import ColumnTransform, Rows, overlaid
from easypipe.transforms.refused import Refused
from easypipe.transforms.tokenizer.config import TokenizerConfig
from easypipe.transforms.tokenizer.tokenizer import load_tokenizer


class Chat(ColumnTransform):
    """A transform that writes conversations as text by a chat template.

    `Chat("my-tokenizer") >> FilterNonEmpty("text")`

    The result is text, so the loss counts every token of it. For a loss on the assistant's turns
    alone, leave this out and name the column of messages as the dataset's content_field.

    Args:
        tokenizer: The tokenizer whose template and special tokens are used.
        messages: The column of conversations.
        tools: The column of their tools, if there is one.
        into: The column of text.
        chat_template: Another template, as a file or its text.
        template_date: The day for templates that ask for today's date.

    Raises:
        TokenizerError: There is no template, or it goes beyond its limits.
    """

    def __init__(
        self,
        tokenizer: TokenizerConfig | str,
        *,
        messages: str = "messages",
        tools: str | None = None,
        into: str = "text",
        chat_template: str | Path | None = None,
        template_date: str | None = None,
    ) -> None:
        require(
            into and into != ROW_NUMBER,
            "Chat.into",
            f"{into!r} cannot name a column",
            'Write into="text".',
        )
        self.messages, self.tools = messages, tools
        self.into = self.makes = into
        self.reads = (messages,) if tools is None else (messages, tools)
        self.template = load_chat_template(
            load_tokenizer(tokenizer),
            chat_template=chat_template,
            train_on="all",
            date=template_date,
        )

    @property
    def fingerprint(self) -> str:
        return digest(
            "chat to text", 2, self.template.fingerprint, self.messages, self.tools, self.into
        )

    def columns(self, before: pa.Schema) -> pa.Schema:
        for name in self.reads or ():
            require_columns([name], before.names, str(self))
            kind = before.field(name).type
            inside = kind.value_type if is_list(kind) else kind  # null: [] in every row
            if not (is_messages(kind) or is_text(kind) or pa.types.is_null(inside)):
                raise self.error(
                    f"column {name!r} holds {kind}, not lists of objects",
                    "Give [{role, content}, ...].",
                )
        return overlaid(before, {self.into: pa.large_string()})

    def rows(self, rows: Rows) -> Rows:
        conversations = values_of(rows.batch.column(self.messages), keep=("role", "content"))
        tools = (
            [None] * len(conversations)
            if self.tools is None
            else values_of(rows.batch.column(self.tools), keep=())
        )
        asked: list[Asked | Refused] = []
        for talk, tool in zip(conversations, tools, strict=True):  # a template renders whole rows
            wrong = wrong_messages(talk) or wrong_tools(tool)
            row = {"messages": talk, "tools": tool or None}
            asked.append(row if wrong is None else Refused(*wrong))
        try:
            made = self.template.render(asked)
        except HostileTemplateError as error:
            at = place(str(self), row=int(rows.numbers[error.row]))
            raise type(error)(
                at=at, problem=f"{error.at}: {error.problem}", fix=error.fix
            ) from None
        pairs = zip(rows.numbers.tolist(), made, strict=True)
        failed = [one.of_row(number) for number, one in pairs if isinstance(one, Refused)]
        texts = pa.array(
            [one.text if isinstance(one, Rendered) else None for one in made], pa.large_string()
        )
        good = texts.is_valid().to_numpy(zero_copy_only=False)
        return self.overlaid(rows, {self.into: texts}).kept(good, failed)

    narrow = ColumnTransform.narrow  # it uses `reads`; named here for readers of this class

    def __repr__(self) -> str:
        return f"Chat({self.template.origin!r})"
