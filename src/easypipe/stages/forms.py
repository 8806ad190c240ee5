"""What a dataset's rows are before they are tokens: a column of text, conversations, or prompts with completions."""

from __future__ import annotations

from typing import Any, Protocol

from easypipe.core.errors import ConfigError
from easypipe.core.protocols import ShardedSource
from easypipe.stages.chat_rows import ChatForm, PairForm
from easypipe.stages.ranges import recipe_of
from easypipe.stages.text_rows import Texts, is_text, read_texts, require_text
from easypipe.stages.token_rows import Documents, encode_texts
from easypipe.transforms.chat import load_chat_template
from easypipe.transforms.messages import is_messages
from easypipe.transforms.tokenizer import Tokenizer

TOOLS = "tools"  # the column that holds them, where a dataset names none


class RowForm(Protocol):
    """How rows are read and encoded. Law: row-wise; what a row becomes depends on the row alone.

    columns: those of the source that are read. label: how errors and manifests call them. masked: documents carry a loss_mask.
    """

    columns: tuple[str, ...]
    label: str
    masked: bool

    def require(self, source: ShardedSource, dataset: str) -> None:
        """Raises SourceError where a column is missing or of a type that cannot be it. Reads no rows."""
        ...

    def recipe(self, tokenizer: Tokenizer, *, refuted: bool) -> str:
        """Digest of everything that decides tokens but the rows."""
        ...

    def read(self, source: ShardedSource, shard: int, start: int, stop: int) -> Texts: ...

    def encode(self, texts: Texts, tokenizer: Tokenizer, *, batch_size: int, at: str, audit_key: str | None = None) -> Documents: ...


class TextForm:
    """One column of text; every token is trained."""

    masked = False

    def __init__(self, content_field: str) -> None:
        self.columns, self.label = (content_field,), content_field

    def require(self, source: ShardedSource, dataset: str) -> None:
        require_text(source, self.label, dataset)

    def recipe(self, tokenizer: Tokenizer, *, refuted: bool) -> str:
        return recipe_of(tokenizer, self.label, refuted=refuted)

    def read(self, source: ShardedSource, shard: int, start: int, stop: int) -> Texts:
        return read_texts(source, shard, start, stop, self.label)

    def encode(self, texts: Texts, tokenizer: Tokenizer, *, batch_size: int, at: str, audit_key: str | None = None) -> Documents:
        return encode_texts(texts, tokenizer, batch_size=batch_size, at=at, audit_key=audit_key)


def form_of(dataset: Any, at: str, source: ShardedSource, tokenizer: Tokenizer) -> RowForm:
    """The form of a DatasetConfig's rows, from its options and the type of its column. Reads no rows.

    Raises ConfigError where an option has no effect on such rows, TokenizerError where the tokenizer has no chat template.
    """
    if dataset.prompt_field is not None:
        return PairForm(dataset.prompt_field, dataset.completion_field, dataset.train_on or "completion")
    column = dataset.content_field
    kind = source.schema.field(column).type if column in source.schema.names else None
    given = [name for name in ("train_on", "chat_template", "template_date", "tools_field") if getattr(dataset, name) is not None]
    if kind is None or not (is_messages(kind) or (is_text(kind) and (given or column == "messages"))):
        if given and kind is not None:
            raise ConfigError(
                at=f"{at}.{given[0]}", problem=f"has no effect on column {column!r}, which holds {kind}", fix="Name a column of messages."
            )
        return TextForm(column)
    tools = dataset.tools_field
    if tools is None and TOOLS in source.schema.names:
        tools = TOOLS
    try:
        template = load_chat_template(
            tokenizer, chat_template=dataset.chat_template, train_on=dataset.train_on or "assistant", date=dataset.template_date
        )
    except ConfigError as error:
        raise error.under(at) from None
    policy = tokenizer.special.policy
    if policy == "escape":
        raise ConfigError(
            at=f"{at}.tokenizer",
            problem=f"special_strings='escape' is for raw text, and {column!r} holds conversations, whose template writes special tokens",
            fix="Set special_strings='error', which looks into the messages.",
        )
    return ChatForm(template, column, tools, refuse=tokenizer.special.strings if policy == "error" else ())
