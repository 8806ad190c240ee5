"""The tokenize stage: text sources become token sources, through the token cache or on the fly."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack

import pyarrow as pa

from easypipe.cache.bad_rows import OnError, bad_row
from easypipe.cache.encoder import EncodedDocuments, documents_hash
from easypipe.cache.folder import CacheFolder, folder_of
from easypipe.cache.location import cache_folder_of
from easypipe.cache.manifest import FORMAT, TokenizerIdentity
from easypipe.cache.reader import TokenCache, cache_schema
from easypipe.cache.writer import CacheWriter
from easypipe.core.config import digest
from easypipe.core.errors import ConfigError, did_you_mean, place
from easypipe.core.protocols import (
    BaseStage,
    PipelineContext,
    ProgressListener,
    Scan,
    Shard,
    ShardedSource,
    Source,
    SourceInfo,
    TokenInfo,
    info_of,
    select,
)
from easypipe.core.schema import INPUT_IDS, ROW_NUMBER
from easypipe.stages.config import datasets_of, settings_of
from easypipe.stages.source.columns import kept_columns
from easypipe.stages.source.config import DatasetConfig
from easypipe.stages.tokenize.config import TokenizeStageConfig
from easypipe.stages.tokenize.encoders import RowForm, TextColumn, form_of
from easypipe.stages.tokenize.pair_rows import encode_pairs
from easypipe.stages.tokenize.text_rows import Texts
from easypipe.stages.tokenize.token_rows import encode_texts, sample_of
from easypipe.transforms.tokenizer.config import TokenizerConfig
from easypipe.transforms.tokenizer.options import with_options
from easypipe.transforms.tokenizer.tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger("easypipe")

SAMPLE_ROWS = 256  # of the data, compared with the reference before the fast backend is used on it
SAMPLE_BYTES = 64 << 10


class WriterOptions(TypedDict, total=False):
    """Those of CacheWriter."""

    on_error: OnError
    max_bad_rows: int | None
    num_workers: int | None
    progress: ProgressListener


class TextEncoder:
    """Rows of text, in whatever form, to what the cache stores; implements
    cache.encoder.RowEncoder.

    batch_size: texts encoded at a time; decides memory and speed, never tokens.
    """

    def __init__(self, form: RowForm, tokenizer: Tokenizer, batch_size: int = 1000) -> None:
        self.form, self.tokenizer, self._batch_size = form, tokenizer, batch_size
        self.columns, self.label = form.columns, form.label
        self.masked, self.pairs = form.masked, form.pairs

    @property
    def tokenizer_identity(self) -> TokenizerIdentity:
        return TokenizerIdentity(
            name=self.tokenizer.name,
            fingerprint=self.tokenizer.fingerprint,
            vocab_size=self.tokenizer.vocab_size,
            bos_token_id=self.tokenizer.bos_token_id,
            eos_token_id=self.tokenizer.eos_token_id,
            pad_token_id=self.tokenizer.pad_token_id,
        )

    @property
    def backend(self) -> str:
        return self.tokenizer.backend.name

    def key(self, memo: Path) -> str:
        return self.form.recipe(self.tokenizer, refuted=self.tokenizer.refuted(memo))

    def manifest_key(self, ranges: Sequence[str], *choices: object) -> str:
        return digest("manifest", FORMAT, list(ranges), *choices)

    def read(self, source: ShardedSource, shard: int, start: int, stop: int) -> Texts:
        return self.form.read(source, shard, start, stop)

    def prove(self, rows: Texts, dataset: str, memo: Path) -> None:
        """The fast backend is used on a dataset only once it agreed with the reference on some of
        it.
        """
        sample = sample_of(rows.texts, SAMPLE_ROWS, SAMPLE_BYTES)
        backend = self.tokenizer.prove(sample, of=f"dataset {dataset}", memo=memo)
        logger.debug("dataset %s: tokenizing with %s: %s", dataset, self.tokenizer.name, backend)

    def encode(self, rows: Texts, at: str, audit_key: str | None = None) -> EncodedDocuments:
        form = self.form
        return (encode_pairs if form.pairs else encode_texts)(
            rows,
            self.tokenizer,
            batch_size=self._batch_size,
            at=at,
            raw=form.raw,
            audit_key=audit_key,
            lengths=form.lengths,
        )

    def content(self, batch: pa.RecordBatch) -> str:
        return documents_hash(batch)


class TokenizedShardedSource(Source):
    """The documents of a source of text, as rows of `cache_schema` with the row numbers of that
    source.

    Law: `read` gives the rows that `materialize().read` gives. Rows without text are rejects; with
    on_error="error" `read` raises at the first of them. Thread safe.
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
        """Opens nothing, and reads no rows.

        Args:
            cache_dir: Of the token cache: a folder of this machine, or a CacheFolder.
            batch_size: Texts encoded at a time; decides memory and speed, never tokens.
            keep: Columns that are saved beside the tokens; a row in which one is bad is bad.
            form: What the rows are; None: text in the column `content_field`.
            options: As in CacheWriter.

        Raises:
            SourceError: `content_field` is no column of text.
        """
        self.form: RowForm = form or TextColumn(content_field)
        self.form.require(source, dataset)
        self.keep = tuple(keep)
        self.source = select(source, list(dict.fromkeys([*self.form.columns, *keep])))
        self.tokenizer = tokenizer
        self.encoder = TextEncoder(self.form, tokenizer, batch_size)
        self.writer = CacheWriter(
            source=self.source,
            encoder=self.encoder,
            dataset=dataset,
            folder=folder_of(cache_dir),
            **options,
        )

    @property
    def schema(self) -> pa.Schema:
        return cache_schema(self.tokenizer.vocab_size, loss_mask=self.form.masked)

    @property
    def info(self) -> SourceInfo:
        below, tokens = info_of(self.source), tokens_of(self.tokenizer)
        return dataclasses.replace(below, tokens=tokens, pairs=self.form.pairs)

    @property
    def below(self) -> ShardedSource:
        return self.source

    @property
    def shards(self) -> Sequence[Shard]:
        return self.source.shards

    @property
    def fingerprint(self) -> str:
        recipe = self.form.recipe(self.tokenizer, refuted=False)
        return digest("tokenized", self.source.fingerprint, recipe, self.writer.on_error)

    def read(self, shard: int, start: int, stop: int) -> pa.RecordBatch:
        batch, rejects = self.scan(shard, start, stop)
        bad = next((reject for reject in rejects if not reject.benign), None)
        if bad is not None and self.writer.on_error == "error":
            at = place(self.shards[shard].name, row=bad.row, column=self.form.label)
            raise bad_row(at, bad)
        return batch

    def materialize(self) -> TokenCache:
        """The token cache of all rows: opened, finished or made; see CacheWriter.fill."""
        return self.writer.fill()

    def scan(self, shard: int, start: int, stop: int) -> Scan:
        documents = self.documents(shard, start, stop)
        return Scan(documents.batch, documents.rejects)

    def documents(
        self, shard: int, start: int, stop: int, audit_key: str | None = None
    ) -> EncodedDocuments:
        """What `scan` gives, with what was counted on the way. audit_key: as in `encode_texts`."""
        rows = self.encoder.read(self.source, shard, start, stop)
        made = self.encoder.encode(rows, at=self.shards[shard].name, audit_key=audit_key)
        rejects = sorted((*rows.rejects, *made.rejects), key=lambda reject: reject.row)
        return dataclasses.replace(made, rejects=tuple(rejects))


class TokenizeStage(BaseStage):
    """Every dataset gets its tokenizer: its own, else the stage's default_tokenizer, else the
    pipeline's. Tokens pass through.
    """

    @property
    def name(self) -> str:
        return "tokenize"

    def process(
        self, data: dict[str, ShardedSource], context: PipelineContext
    ) -> dict[str, ShardedSource]:
        """Raises ConfigError where a dataset has no tokenizer, TokenizerError where it does not
        load, SourceError for a missing column.
        """
        stage: TokenizeStageConfig = self.config or TokenizeStageConfig()
        datasets = {
            name: (i, dataset) for i, (name, dataset) in enumerate(datasets_of(context).items())
        }
        kept = _kept_columns(data, datasets, stage)
        loaded: dict[str, Tokenizer] = {}
        pack = settings_of(context).pack
        room = pack.seq_length if pack is not None and pack.holds else None
        result: dict[str, ShardedSource] = {}
        for name, source in data.items():
            if INPUT_IDS in source.schema.names:
                logger.info(
                    "dataset %s: holds %s already, tokenize() leaves it as it is", name, INPUT_IDS
                )
                result[name] = source
                continue
            number, dataset = datasets.get(name, (None, None))
            chosen = _with_length(_choose(name, number, dataset, stage, context), stage.max_length)
            key = digest(chosen)
            if key not in loaded:
                loaded[key] = load_tokenizer(chosen)
            options: dict[str, Any] = (
                {}
                if dataset is None
                else {k: getattr(dataset, k) for k in ("on_error", "max_bad_rows")}
            )
            if dataset is not None:
                options["form"] = form_of(dataset, f"datasets[{number}]", source, loaded[key], room)
            result[name] = TokenizedShardedSource(
                source,
                loaded[key],
                dataset=name,
                cache_dir=cache_folder_of(dataset, source, context, keep=stage.cache_tokenized),
                num_workers=stage.num_workers,
                batch_size=stage.batch_size,
                progress=context.progress,
                keep=kept[name],
                **options,
            )
        return result


def _choose(
    name: str,
    number: int | None,
    dataset: DatasetConfig | None,
    stage: TokenizeStageConfig,
    context: PipelineContext,
) -> TokenizerConfig:
    own = None if dataset is None else dataset.tokenizer
    wide = settings_of(context).default_tokenizer
    chosen = next(
        (tokenizer for tokenizer in (own, stage.default_tokenizer, wide) if tokenizer is not None),
        None,
    )
    if chosen is None:
        raise ConfigError(
            at="default_tokenizer" if number is None else f"datasets[{number}].tokenizer",
            problem=f"dataset {name!r} has no tokenizer",
            fix="Set it here, or default_tokenizer on the pipeline or on TokenizeStageConfig.",
        )
    try:
        return with_options(chosen, None if dataset is None else dataset.tokenizer_kwargs)
    except ConfigError as error:
        raise error.under(f"datasets[{number}].tokenizer_kwargs") from None


def _kept_columns(
    data: Mapping[str, ShardedSource], datasets: Mapping[str, Any], stage: TokenizeStageConfig
) -> dict[str, tuple[str, ...]]:
    """The columns of each dataset of text that stay beside its tokens. Raises ConfigError for a
    name that no dataset knows.
    """
    texts = {name: source for name, source in data.items() if INPUT_IDS not in source.schema.names}
    have = list(
        dict.fromkeys(
            column
            for source in texts.values()
            for column in source.schema.names
            if column != ROW_NUMBER
        )
    )
    for i, column in enumerate(stage.remove_columns or ()):
        if column not in have:
            at = f"tokenize.remove_columns[{i}]"
            raise ConfigError(
                at=at,
                problem=f"no dataset has a column {column!r}",
                have=have,
                fix=did_you_mean(column, have),
            )
    kept = {}
    for name, source in texts.items():
        number, dataset = datasets.get(name, (None, None))
        own = () if dataset is None else dataset.additional_fields
        kept[name] = kept_columns(name, source, own, stage.remove_columns, at=f"datasets[{number}]")
    return kept


def _with_length(tokenizer: TokenizerConfig, max_length: int | None) -> TokenizerConfig:
    if max_length is None or tokenizer.max_length is not None:
        return tokenizer
    values = {name: getattr(tokenizer, name) for name in tokenizer.__dataclass_fields__}  # pyright: ignore[reportAttributeAccessIssue]
    return TokenizerConfig(**{**values, "max_length": max_length})


def tokens_of(tokenizer: Tokenizer) -> TokenInfo:
    return TokenInfo(
        tokenizer=tokenizer.name,
        tokenizer_fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        seq_length=None,
    )
