"""Encoders: what a dataset's rows are before they are tokens (text, or what a prompt writes)."""

from __future__ import annotations

from typing import Protocol

from easypipe.cache.ranges import recipe_of
from easypipe.core.config import digest
from easypipe.core.errors import ConfigError
from easypipe.core.protocols import ShardedSource
from easypipe.stages.source.config import PROMPT_OPTIONS, DatasetConfig
from easypipe.stages.tokenize.engine import PromptEngine
from easypipe.stages.tokenize.prompt_rows import PromptRows
from easypipe.stages.tokenize.text_rows import Texts, read_texts, require_text
from easypipe.transforms.chat.messages import is_json, is_messages, is_text
from easypipe.transforms.prompt.config import PromptConfig
from easypipe.transforms.tokenizer.lengths import Lengths
from easypipe.transforms.tokenizer.tokenizer import Tokenizer


class RowForm(Protocol):
    """How rows are read as texts. Law: row-wise; what a row becomes depends on the row alone."""

    columns: tuple[str, ...]  # of the source, that are read
    label: str  # how errors and manifests call them
    masked: bool  # documents carry a loss_mask
    pairs: bool  # every document is two answers
    raw: bool  # no template wrote the texts: special tokens are put around them
    lengths: Lengths | None  # what cuts documents in place of max_length

    def require(self, source: ShardedSource, dataset: str) -> None:
        """Raises SourceError where a column is missing or of a type that cannot be it. Reads no
        rows.
        """
        ...

    def recipe(self, tokenizer: Tokenizer, *, refuted: bool) -> str:
        """Digest of everything that decides tokens but the rows."""
        ...

    def read(self, source: ShardedSource, shard: int, start: int, stop: int) -> Texts: ...


class TextColumn:
    """One column of text; every token is trained.

    blanks: texts of white space alone are documents too.
    """

    pairs, raw = False, True

    def __init__(
        self, content_field: str, lengths: Lengths | None = None, *, blanks: bool = False
    ) -> None:
        self.columns, self.label = (content_field,), content_field
        self.lengths, self._blanks = lengths, blanks
        self.masked = lengths is not None and lengths.masks

    def require(self, source: ShardedSource, dataset: str) -> None:
        require_text(source, self.label, dataset)

    def recipe(self, tokenizer: Tokenizer, *, refuted: bool) -> str:
        recipe = recipe_of(tokenizer, self.label, refuted=refuted)
        return recipe if self.lengths is None else digest(recipe, self.lengths.identity)

    def read(self, source: ShardedSource, shard: int, start: int, stop: int) -> Texts:
        return read_texts(source, shard, start, stop, self.label, blanks=self._blanks)


def form_of(
    dataset: DatasetConfig,
    at: str,
    source: ShardedSource,
    tokenizer: Tokenizer,
    room: int | None = None,
) -> RowForm:
    """The form of a DatasetConfig's rows, from its options and the type of its column. Reads no
    rows, but of a file of examples.

    room: as in PromptRows.

    Raises SourceError where content_field is no column, ConfigError where an option has no effect
    on such rows, TokenizerError where the tokenizer has no chat template.
    """
    prompt, inside = dataset.prompt, f"{at}.prompt"
    if prompt is None:
        prompt, inside = _prompt_of(dataset, at, source), at
    try:
        engine = PromptEngine(tokenizer, prompt, length=dataset.length)
    except ConfigError as error:
        if dataset.prompt is None and error.at == "template":
            error = ConfigError(
                at="chat_template", problem=error.problem, have=error.have, fix=error.fix
            )
        raise error.under(
            at if error.at == "tokenizer" or error.at.startswith("length.") else inside
        ) from None
    if prompt.format_type == "text":
        return TextColumn(prompt.inputs[0], engine.lengths, blanks=dataset.text_unit == "file")
    return PromptRows(engine, source.schema.names, room)


def _prompt_of(dataset: DatasetConfig, at: str, source: ShardedSource) -> PromptConfig:
    """What the options of a DatasetConfig without `prompt` say in its words."""
    if dataset.prompt_field is not None:
        return PromptConfig(
            format_type="prompt_completion",
            input_columns=(dataset.prompt_field,),
            label_column=dataset.completion_field,
            train_on=dataset.train_on,
        )
    column = dataset.content_field
    if column not in source.schema.names:
        require_text(source, column, str(dataset.name))
    kind = source.schema.field(column).type
    given = [name for name in PROMPT_OPTIONS if getattr(dataset, name) is not None]
    if not (
        is_messages(kind) or is_json(kind) or (is_text(kind) and (given or column == "messages"))
    ):
        if given:
            raise ConfigError(
                at=f"{at}.{given[0]}",
                problem=f"has no effect on column {column!r}, which holds {kind}",
                fix="Name a column of messages.",
            )
        return PromptConfig(format_type="text", input_columns=(column,))
    return PromptConfig(
        input_columns=(column,),
        template=dataset.chat_template,
        train_on=dataset.train_on,
        tools_column=dataset.tools_field,
        template_date=dataset.template_date,
        train_empty_thinking=dataset.train_empty_thinking,
    )
