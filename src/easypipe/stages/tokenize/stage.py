"""The tokenize stage: sources of text become sources of token documents, tokenized when they are
read or, once, into the token cache.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from easypipe.cache.folder import CacheFolder, folder_of
from easypipe.cache.location import TemporaryFolder, cache_folder_of
from easypipe.cache.ranges import Range, ranges_of
from easypipe.cache.reader import TokenCache, cache_schema
from easypipe.core.config import digest
from easypipe.core.errors import ConfigError, SourceError, did_you_mean, place
from easypipe.core.protocols import (
    BaseStage,
    PipelineContext,
    ProgressListener,
    Reject,
    Scan,
    Shard,
    ShardedDataSource,
    ShardedSource,
    silent,
)
from easypipe.core.schema import INPUT_IDS, ROW_NUMBER
from easypipe.sources.limit import select
from easypipe.stages.cache_writer import OnError, manifest_key, pending, prepare, prepare_part
from easypipe.stages.source.columns import kept_columns
from easypipe.stages.tokenize.config import TokenizeStageConfig
from easypipe.stages.tokenize.encoders import RowForm, TextForm, form_of
from easypipe.stages.tokenize.token_rows import Documents
from easypipe.transforms.refused import advice
from easypipe.transforms.tokenizer.config import TokenizerConfig
from easypipe.transforms.tokenizer.options import with_options
from easypipe.transforms.tokenizer.tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger("easypipe")


class TokenizedShardedSource(ShardedDataSource):
    """The documents of a source of text, as rows of `cache_schema` with the row numbers of that
    source; implements ScanningSource.

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
        on_error: OnError = "error",
        max_bad_rows: int | None = None,
        num_workers: int | None = None,
        batch_size: int = 1000,
        progress: ProgressListener = silent,
        keep: Sequence[str] = (),
        form: RowForm | None = None,
    ) -> None:
        """Arguments as in `prepare`. keep: columns that are saved beside the tokens; a row in which
        one is bad is bad.

        Raises SourceError where `content_field` is no column of text; reads no rows.
        """
        self.form: RowForm = form or TextForm(content_field)
        self.form.require(source, dataset)
        self.keep = tuple(keep)
        self.source = select(source, list(dict.fromkeys([*self.form.columns, *keep])))
        self.tokenizer = tokenizer
        self.dataset = dataset
        self.content_field = self.form.label
        self.on_error: OnError = on_error
        self._folder = folder_of(cache_dir)  # holds a temporary one
        self._batch_size = batch_size
        self._progress = progress
        self._options: dict[str, Any] = {
            "dataset": dataset,
            "form": self.form,
            "cache_dir": self._folder,
            "on_error": on_error,
            "max_bad_rows": max_bad_rows,
            "num_workers": num_workers,
            "batch_size": batch_size,
            "ranges_of": self._ranges_of,
        }
        self._ranges: tuple[str, Sequence[Range]] | None = None
        self._lock = threading.Lock()
        self._cache: TokenCache | None = None
        # called with the key of a token cache that materialize() made
        self.when_made: Callable[[str], None] = lambda key: None

    @property
    def schema(self) -> pa.Schema:
        return cache_schema(self.tokenizer.vocab_size, loss_mask=self.form.masked)

    @property
    def shards(self) -> Sequence[Shard]:
        return self.source.shards

    @property
    def fingerprint(self) -> str:
        return digest(
            "tokenized",
            self.source.fingerprint,
            self.form.recipe(self.tokenizer, refuted=False),
            self.on_error,
        )

    def read(self, shard: int, start: int, stop: int) -> pa.RecordBatch:
        batch, rejects = self.scan(shard, start, stop)
        bad = next((reject for reject in rejects if not reject.benign), None)
        if bad is not None and self.on_error == "error":
            raise SourceError(
                at=place(self.shards[shard].name, row=bad.row, column=self.content_field),
                problem=f"{bad.reason}: {bad.detail}",
                fix=f"{advice(bad.reason)}, or set on_error to 'skip' or 'quarantine'.",
            )
        return batch

    def scan(self, shard: int, start: int, stop: int) -> Scan:
        documents, rejects = self.documents(shard, start, stop)
        return Scan(documents.batch, rejects)

    def documents(
        self, shard: int, start: int, stop: int, audit_key: str | None = None
    ) -> tuple[Documents, tuple[Reject, ...]]:
        """What `scan` gives, with what was counted on the way. audit_key: as in `encode_texts`."""
        texts = self.form.read(self.source, shard, start, stop)
        at = self.shards[shard].name
        documents = self.form.encode(
            texts, self.tokenizer, batch_size=self._batch_size, at=at, audit_key=audit_key
        )
        return documents, tuple(
            sorted((*texts.rejects, *documents.rejects), key=lambda reject: reject.row)
        )

    @property
    def folder(self) -> CacheFolder:
        """That its token cache is in."""
        return self._folder

    @property
    def cache_path(self) -> Path | str:
        """Where the manifest of its token cache stands, or will. Reads no rows."""
        recipe = self.form.recipe(
            self.tokenizer, refuted=self.tokenizer.refuted(self._folder.local)
        )
        return self._folder.manifest(
            manifest_key(
                self._ranges_of(self.source, recipe), self.on_error, self._options["max_bad_rows"]
            )
        )

    def _ranges_of(self, source: ShardedSource, recipe: str) -> Sequence[Range]:
        """Remembered: thousands of shards are cut once in a process, and not again for every part
        of them.
        """
        if self._ranges is None or self._ranges[0] != recipe:
            self._ranges = recipe, ranges_of(source, recipe)
        return self._ranges[1]

    def materialize(self) -> TokenCache:
        """The token cache of all rows: opened, finished or made on the first call, the same object
        afterwards. See `prepare` for errors.
        """
        with self._lock:
            if self._cache is None:
                self._cache = prepare(
                    self.source, self.tokenizer, progress=self._progress, **self._options
                )
                if self.kept:
                    self.when_made(self._cache.manifest.key)
            return self._cache

    @property
    def num_workers(self) -> int | None:
        """Ranges that are tokenized at a time; None: one per core."""
        return self._options["num_workers"]

    @property
    def kept(self) -> bool:
        """Whether the token cache outlives this process, so that others may make parts of it."""
        return not isinstance(self._folder, TemporaryFolder)

    def pending(self) -> tuple[list[int], int]:
        """(numbers of the ranges of rows that are not tokenized yet, how many ranges there are).
        Reads no text.
        """
        return pending(self.source, self.tokenizer, **self._options)

    def prepare_part(self, part: Sequence[int]) -> int:
        """Tokenizes the ranges that `part` numbers, so that `materialize` finds them done, here or
        elsewhere. Returns how many rows.
        """
        if not self.kept:
            raise ConfigError(
                at=f"datasets.{self.dataset}.cache_enabled",
                problem="its tokens are not kept, so no other process could take up this part",
                fix="Set cache_enabled and tokenize.cache_tokenized, and give its functions a version.",
            )
        return prepare_part(
            self.source, self.tokenizer, part=part, progress=self._progress, **self._options
        )


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
        datasets = {dataset.name: (i, dataset) for i, dataset in enumerate(context.config.datasets)}
        kept = _kept_columns(data, datasets, stage)
        loaded: dict[str, Tokenizer] = {}
        pack = getattr(context.config, "pack", None)
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
    dataset: Any,
    stage: TokenizeStageConfig,
    context: PipelineContext,
) -> TokenizerConfig:
    own = None if dataset is None else dataset.tokenizer
    wide = getattr(context.config, "default_tokenizer", None)
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
