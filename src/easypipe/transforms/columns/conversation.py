"""Conversations as one column of text among others, for chains of transforms."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from easypipe.core.config import digest
from easypipe.core.errors import ConfigError, SourceError, place
from easypipe.core.protocols import Reject, Transform
from easypipe.core.schema import ROW_NUMBER
from easypipe.transforms.chat.conversations import BadJson, wrong_messages
from easypipe.transforms.chat.messages import is_messages, is_text, values_of
from easypipe.transforms.chat.render import HostileTemplateError, Refused, load_chat_template
from easypipe.transforms.columns.base import ColumnTransform, Rows, require_columns
from easypipe.transforms.columns.columns import kept
from easypipe.transforms.prompt.fields import EMPTY
from easypipe.transforms.tokenizer.tokenizer import TokenizerConfig, load_tokenizer


class Chat(ColumnTransform):
    """Conversations written out as text by a chat template: `Chat("my-tokenizer") >>
    FilterNonEmpty("text")`.

    tokenizer: whose template, and whose special tokens. chat_template: another one, as a file or
    its text. template_date: the day that
        templates are told which ask for today's.
    messages: the column of conversations. tools: the column of their tools, if there is one. into:
    the column of text. What comes out is text, so every token of it is trained. For a loss on the
    assistant's turns alone leave this out and name the column of messages as the dataset's
    content_field. Raises TokenizerError where there is no template, or where it goes beyond its
    limits.
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
        if not into or into == ROW_NUMBER:
            raise ConfigError(
                at="Chat.into", problem=f"{into!r} cannot name a column", fix='Write into="text".'
            )
        self.messages, self.tools, self.into = messages, tools, into
        self.template = load_chat_template(
            load_tokenizer(tokenizer),
            chat_template=chat_template,
            train_on="all",
            date=template_date,
        )

    @property
    def fingerprint(self) -> str:
        return digest(
            "chat to text", self.template.fingerprint, self.messages, self.tools, self.into
        )

    def columns(self, before: pa.Schema) -> pa.Schema:
        for name in self._reads:
            require_columns([name], before, str(self))
            kind = before.field(name).type
            if not is_messages(kind) and not is_text(kind) and not pa.types.is_null(kind):
                raise SourceError(
                    at=str(self),
                    problem=f"column {name!r} holds {kind}, not lists of objects",
                    fix="Give [{role, content}, ...].",
                )
        after = [
            pa.field(field.name, pa.large_string() if field.name == self.into else field.type)
            for field in before
        ]
        return pa.schema(
            after if self.into in before.names else [*after, pa.field(self.into, pa.large_string())]
        )

    def rows(self, rows: Rows) -> Rows:
        schema = self.columns(rows.batch.schema)
        talks = values_of(rows.batch.column(self.messages), keep=("role", "content"))
        tools: list[Any] = (
            [None] * len(talks)
            if self.tools is None
            else values_of(rows.batch.column(self.tools), keep=())
        )
        good, failed = np.ones(len(talks), np.bool_), []
        for i, talk in enumerate(talks):  # templates know rows
            wrong = wrong_messages(talk) or (
                ("not_json", f"tools: {tools[i]}") if isinstance(tools[i], BadJson) else None
            )
            if wrong is not None:
                good[i] = False
                failed.append(
                    Reject(
                        row=int(rows.numbers[i]),
                        reason=wrong[0],
                        detail=wrong[1],
                        benign=wrong[0] == EMPTY,
                    )
                )
        whole = np.flatnonzero(good)
        try:
            rendered = self.template.render(
                [{"messages": talks[i], "tools": tools[i] or None} for i in whole]
            )
        except HostileTemplateError as error:
            at = place(str(self), row=int(rows.numbers[whole[error.row]]))
            raise type(error)(
                at=at, problem=f"{error.at}: {error.problem}", fix=error.fix
            ) from None
        texts: list[str | None] = [None] * len(talks)
        for i, made in zip(whole.tolist(), rendered, strict=True):
            if isinstance(made, Refused):
                good[i] = False
                failed.append(
                    Reject(
                        row=int(rows.numbers[i]),
                        reason=made.reason,
                        detail=made.detail,
                        benign=made.reason == EMPTY,
                    )
                )
            else:
                texts[i] = made.text
        column = pa.array(texts, pa.large_string())
        arrays = [column if name == self.into else rows.batch.column(name) for name in schema.names]
        result = kept(Rows(pa.RecordBatch.from_arrays(arrays, schema=schema), rows.numbers), good)
        return Rows(
            result.batch, result.numbers, tuple(sorted(failed, key=lambda reject: reject.row))
        )

    def narrow(
        self, columns: Sequence[str], before: pa.Schema
    ) -> tuple[Transform, Sequence[str] | None]:
        return self, list(
            dict.fromkeys([*(name for name in columns if name != self.into), *self._reads])
        )

    @property
    def _reads(self) -> tuple[str, ...]:
        return (self.messages,) if self.tools is None else (self.messages, self.tools)

    def __repr__(self) -> str:
        return f"Chat({self.template.origin!r})"
