"""Sources of token documents, made when read or cached; rejects rows of text, mixed tokenizers."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypedDict, TypeGuard, Unpack

import pyarrow as pa

from easypipe.cache.bad_rows import OnError, bad_row
from easypipe.cache.encoder import EncodedDocuments
from easypipe.cache.folder import CacheFolder, folder_of
from easypipe.cache.location import cache_folder_of
from easypipe.cache.manifest import TokenizerIdentity
from easypipe.cache.reader import TokenCache, cache_schema
from easypipe.cache.writer import CacheWriter
from easypipe.core.aligned import LOSS_WEIGHTS, AlignedColumn, column_of
from easypipe.core.config import digest
from easypipe.core.errors import ConfigError, StageOrderError, require, require_known
from easypipe.core.protocols import (
    PipelineContext,
    ProgressListener,
    Scan,
    Shard,
    ShardedSource,
    Source,
    SourceInfo,
    TokenInfo,
    Turns,
    bad_of,
    by_row,
    info_of,
    place_of,
    select,
)
from easypipe.core.schema import HAS_EOS, INPUT_IDS, SEGMENT_IDS
from easypipe.core.values import attribute_of
from easypipe.sources.splits import PartialSource
from easypipe.stages.config import datasets_of, tokenizer_config_of
from easypipe.stages.source.config import TOKEN_COLUMNS
from easypipe.stages.tokenize.encoders import (
    PromptRows,
    RowForm,
    TextColumn,
    TextEncoder,
)
from easypipe.stages.tokenize.imported import TokenEncoder
from easypipe.transforms.chat.render import turns_of
from easypipe.transforms.tokenizer.tokenizer import Tokenizer, load_tokenizer

log = logging.getLogger("easypipe")


class WriterOptions(TypedDict, total=False):
    """The options that are passed on to CacheWriter."""

    on_error: OnError
    max_bad_rows: int | None
    num_workers: int | None
    progress: ProgressListener


class EncodedSource(Source):
    """The documents that an encoder makes from a source; `materialize` caches their tokens."""

    source: ShardedSource
    writer: CacheWriter[Any]  # its encoder decides what rows are
    # whether the text of a document may continue in another one, or may have lost its end
    continues: bool

    @property
    def schema(self) -> pa.Schema:
        encoder = self.writer.encoder
        return cache_schema(
            encoder.tokenizer_identity.vocab_size,
            loss_mask=encoder.masked,
            aligned=encoder.aligned,
        )

    @property
    def below(self) -> ShardedSource:
        """The source whose rows are encoded."""
        return self.source

    @property
    def shards(self) -> Sequence[Shard]:
        return self.source.shards

    def read(self, shard: int, start: int, stop: int) -> pa.RecordBatch:
        batch, rejects = self.scan(shard, start, stop)
        bad = next(bad_of(rejects), None)
        if bad is not None and self.writer.on_error == "error":
            at = place_of(self.source, shard, bad.row)
            raise bad_row(f"{at}, column {self.writer.encoder.label!r}", bad)
        return batch

    def scan(self, shard: int, start: int, stop: int) -> Scan:
        documents = self.documents(shard, start, stop)
        return Scan(documents.batch, documents.rejects)

    def documents(
        self, shard: int, start: int, stop: int, audit_key: str | None = None
    ) -> EncodedDocuments:
        """Returns what `scan` returns, and what was counted at the same time.

        Args:
            audit_key: As in `encode_texts`.
        """
        encoder = self.writer.encoder
        rows = encoder.read(self.source, shard, start, stop)
        made = encoder.encode(rows, at=self.shards[shard].name, audit_key=audit_key)
        return dataclasses.replace(made, rejects=by_row((*rows.rejects, *made.rejects)))

    def materialize(self) -> TokenCache:
        """Returns the token cache of all rows, opened or made; see CacheWriter.fill."""
        return self.writer.fill()


class TokenizedShardedSource(EncodedSource):
    """The documents of a source of text, as rows of `cache_schema`, with its row numbers.

    Law: `read` returns the same rows as `materialize().read`. Rows without text are rejected; with
    on_error="error", `read` raises an error at the first of them. It is thread-safe.
    """

    def __init__(
        self,
        source: ShardedSource,
        tokenizer: Tokenizer,
        *,
        dataset: str,
        cache_dir: Path | CacheFolder,
        content_field: str = "text",
        batch_size: int = 1000,
        keep: Sequence[str] = (),
        form: RowForm | None = None,
        **options: Unpack[WriterOptions],
    ) -> None:
        """Makes the source without opening files or reading rows.

        Args:
            source: The source of text.
            dataset: The name of the dataset.
            cache_dir: The folder of the token cache, as a local path or a CacheFolder.
            content_field: The column of text, if no form is given.
            batch_size: How many texts are encoded at a time; affects memory and speed, not tokens.
            keep: Columns that are saved with the tokens; a bad value in one makes the row bad.
            form: The form of the rows; None: text in the column `content_field`.
            options: As in CacheWriter.

        Raises:
            SourceError: `content_field` is not a column of text.
        """
        self.form: RowForm = form or TextColumn(content_field)
        self.form.require(source, dataset)
        self.keep, self.tokenizer, folder = tuple(keep), tokenizer, folder_of(cache_dir)
        self.continues = self.form.continues
        columns = list(dict.fromkeys([*self.form.columns, *keep]))
        self.source = select(source, columns)
        self.encoder = TextEncoder(
            self.form, tokenizer, dataset=dataset, memo=folder.local, batch_size=batch_size
        )
        self.writer = CacheWriter(
            source=self.source, encoder=self.encoder, dataset=dataset, folder=folder, **options
        )

    @property
    def info(self) -> SourceInfo:
        return dataclasses.replace(
            info_of(self.source),
            tokens=self.encoder.tokenizer_identity.tokens,
            pairs=self.form.pairs,
            aligned=tuple(column.name for column in self.encoder.aligned),
            extra_columns=self.keep,
        )

    @property
    def fingerprint(self) -> str:
        recipe = self.form.recipe(self.tokenizer, refuted=False)
        return digest("tokenized", self.source.fingerprint, recipe, self.writer.on_error)


class ImportedTokens(EncodedSource):
    """The documents of a source of tokens; it reads nothing until `materialize()`."""

    def __init__(
        self,
        name: str,
        source: ShardedSource,
        encoder: TokenEncoder,
        folder: CacheFolder,
        **options: Unpack[WriterOptions],
    ) -> None:
        self.source = source
        self.encoder = encoder
        self.continues = HAS_EOS in self.encoder.columns
        self.writer = CacheWriter(
            source=source,
            encoder=self.encoder,
            dataset=name,
            folder=folder,
            stage="adopt",
            **options,
        )

    @property
    def info(self) -> SourceInfo:
        aligned = tuple(column.name for column in self.encoder.aligned)
        tokens = self.encoder.tokens
        return dataclasses.replace(info_of(self.source), tokens=tokens, aligned=aligned)

    @property
    def fingerprint(self) -> str:
        # Only the key: in streaming the rows, from which ranges follow, are not counted.
        return digest(self.encoder.key(), self.source.fingerprint)


class Documents(ShardedSource, Protocol):
    """Token documents in a token cache: tokenized on the first call, opened on later ones."""

    def materialize(self) -> TokenCache: ...


def is_documents(source: ShardedSource) -> TypeGuard[Documents]:
    """Returns whether a source has token documents in a cache."""
    # isinstance with a protocol would read properties, which may open files
    return callable(getattr(type(source), "materialize", None))


def tokenized_of(source: ShardedSource) -> TokenizedShardedSource | None:
    """Returns the source if it tokenizes text, else None."""
    return source if isinstance(source, TokenizedShardedSource) else None


def prompts_of(source: ShardedSource) -> PromptRows | None:
    """Returns how the rows of a source are rendered, if they are prompts or conversations."""
    tokenized = tokenized_of(source)
    form = None if tokenized is None else tokenized.form
    return form if isinstance(form, PromptRows) else None


def cached_of(source: ShardedSource) -> EncodedSource | None:
    """Returns the source if easypipe makes its token cache; None for a user's source."""
    return source if isinstance(source, EncodedSource) else None


def require_documents(
    name: str, source: ShardedSource, context: PipelineContext, *, stage: str
) -> Documents:
    """Returns the token documents of a source; rows of tokens are imported.

    Raises:
        StageOrderError: The rows are text.
        ConfigError: The rows are already packed.
    """
    require(
        SEGMENT_IDS not in source.schema.names,
        stage,
        f"the rows of dataset {name!r} are packed already",
        f"Leave out {stage}() and load them as they are, or start from documents.",
    )
    own = datasets_of(context).get(name)
    if is_documents(source):
        require(
            own is None or set(own.aligned) <= set(info_of(source).aligned),
            f"datasets.{name}.aligned_columns",
            "has no effect on a source that makes documents itself",
            "Leave it out.",
        )
        return source
    require_tokens(name, source, stage)
    tokens = token_info(source) or _named_tokenizer(name, context)
    folder = cache_folder_of(name, own, source, context)
    aligned = aligned_columns(name, source, context)
    # With "error" reading raises at a bad row; rows without tokens are not bad.
    options: WriterOptions = {"progress": context.progress, "on_error": "skip"}
    tolerant = own is not None and own.on_error != "error"
    if own is not None and tolerant:
        options |= {"on_error": own.on_error, "max_bad_rows": own.max_bad_rows}
    encoder = TokenEncoder(source, tokens, aligned, name, tolerant=tolerant)
    return ImportedTokens(name, source, encoder, folder, **options)


def require_tokens(name: str, source: ShardedSource, stage: str) -> None:
    """Raises StageOrderError for rows of text."""
    if INPUT_IDS not in source.schema.names:
        raise StageOrderError(
            at="",
            problem=f"Call tokenize() before {stage}(): dataset {name!r} has no column "
            f"{INPUT_IDS!r}",
        )


def aligned_of(source: ShardedSource) -> tuple[AlignedColumn, ...]:
    """Returns the aligned columns of a source, without the loss mask."""
    return tuple(
        column_of(source.schema.field(name), None, name) for name in info_of(source).aligned
    )


def aligned_columns(
    name: str, source: ShardedSource, context: PipelineContext
) -> tuple[AlignedColumn, ...]:
    """Returns the aligned columns of a source of tokens.

    They are the columns that the config names, else those that the folder was saved with.

    Raises:
        ConfigError: There is no such column, or loss_weights is a column and not named.
        SourceError: A column does not hold values of tokens.
    """
    own = datasets_of(context).get(name)
    named = {} if own is None else own.aligned
    at = f"datasets.{name}.aligned_columns"
    have = [column for column in source.schema.names if column not in TOKEN_COLUMNS]
    for column in named:
        require_known(column, have, at, f"no column {column!r}")
    chosen = named or dict.fromkeys(info_of(source).aligned)
    require(
        LOSS_WEIGHTS not in have or LOSS_WEIGHTS in chosen,
        at,
        f"does not name the column {LOSS_WEIGHTS!r}, which weighs the tokens of the loss",
        f"Add it, or rename the column: format_fields: {{{LOSS_WEIGHTS}: not_used}}.",
    )
    return tuple(
        column_of(source.schema.field(column), width, f"dataset {name!r}")
        for column, width in chosen.items()
    )


def _named_tokenizer(name: str, context: PipelineContext) -> TokenInfo:
    """Returns the tokenizer that the config names, for tokens without a known tokenizer.

    Raises:
        ConfigError: The config names none.
    """
    chosen = tokenizer_config_of(name, context)
    if chosen is None:
        raise ConfigError(
            at=f"datasets.{name}.tokenizer",
            problem="unknown tokenizer for column 'input_ids'",
            fix="Name the tokenizer that made them.",
        )
    return TokenizerIdentity.of(load_tokenizer(chosen)).tokens


def holds_pairs(source: ShardedSource) -> bool | None:
    """Returns whether a source of tokens, mixed and packed or not, holds preference pairs.

    It is None if its rows were made earlier.
    """
    # PlannedSource is defined in a package above this file.
    mixture = attribute_of(source, "mixture")
    if mixture is not None:
        return bool(mixture.paired)
    return info_of(source).pairs if is_documents(source) else None


def same_kind(parts: Mapping[str, Documents]) -> None:
    """Raises ConfigError if some datasets hold pairs and others do not.

    A loss is either for pairs or for tokens.
    """
    paired = [name for name, source in parts.items() if info_of(source).pairs]
    others = [name for name in parts if name not in paired]
    if paired and others:
        problem = f"dataset {paired[0]!r} holds pairs of answers, and {others[0]!r} does not"
        raise ConfigError(at="mix", problem=problem, fix="Train on them in two runs.")


def token_info(source: ShardedSource) -> TokenInfo | None:
    """Returns what is known of a source's tokenizer; None if nothing is."""
    return info_of(source).tokens


def tokenizer_of(source: ShardedSource) -> Tokenizer | None:
    """Returns the tokenizer that a source runs; None for data that was already tokenized."""
    tokenized = tokenized_of(source)
    return None if tokenized is None else tokenized.tokenizer


def trained_turns(source: ShardedSource) -> Turns | None:
    """Returns how the conversations of a source are rendered, mixed and packed or not.

    If there are several templates, it returns the first, with the tokens that end turns in any of
    them. It returns None if the source holds no conversations.

    Raises:
        HostileTemplateError: A template exceeded its limits.
    """
    if isinstance(source, PartialSource):
        return trained_turns(source.source)
    mixture = attribute_of(source, "mixture")
    found: dict[str, Turns] = {}
    for part in [source] if mixture is None else mixture.parts.values():
        if (told := info_of(part).turns) is not None:
            found.setdefault(told.template, told)
        tokenizer, prompts = tokenizer_of(part), prompts_of(part)
        template = None if prompts is None else prompts.engine.template
        if tokenizer is not None and template is not None and template.source not in found:
            found[template.source] = turns_of(template, tokenizer)
    if not found:
        return None
    stops = dict.fromkeys(number for turns in found.values() for number in turns.stop_token_ids)
    return Turns(next(iter(found)), tuple(stops))


def same_tokenizer(parts: Mapping[str, Documents], *, allow: bool) -> None:
    """Checks that the tokens of all datasets mean the same.

    Args:
        parts: The datasets by name.
        allow: Whether to warn instead of raising an error.

    Raises:
        ConfigError: They do not; the error names the first two datasets that differ.
    """
    first: tuple[str, TokenInfo] | None = None
    for name, source in parts.items():
        info = token_info(source)
        if info is None:
            continue
        if first is None:
            first = (name, info)
        elif first[1].tokenizer_fingerprint != info.tokenizer_fingerprint:
            problem = (
                f"datasets {first[0]!r} and {name!r} have different tokenizers, "
                f"{first[1].tokenizer!r} and {info.tokenizer!r}"
            )
            if first[1].tokenizer == info.tokenizer:
                problem += ", with other files or another add_special_tokens"
            require(
                allow,
                "mix",
                problem,
                "Give them one tokenizer, or set mix.allow_mixed_tokenizers=True.",
            )
            log.warning(
                "mix: %s: equal ids mean different tokens, and each document ends with its own "
                "tokenizer's EOS",
                problem,
            )


def warn_of_left_columns(stage: str, data: Mapping[str, ShardedSource]) -> None:
    """Warns of extra columns that `stage` drops."""
    for name, source in data.items():
        columns = info_of(source).extra_columns
        if columns:
            log.warning(
                "dataset %s: %s() leaves columns behind, save() before it writes them: %s",
                name,
                stage,
                ", ".join(columns),
            )
