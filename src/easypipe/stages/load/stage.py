"""The load stage: packed rows, or documents, become a Loader."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from easypipe.cache.reader import TokenCache
from easypipe.core.aligned import SOURCE_IDS
from easypipe.core.config import digest
from easypipe.core.errors import ConfigError, require
from easypipe.core.protocols import BaseStage, PipelineContext, ShardedSource
from easypipe.core.schema import SEGMENT_IDS
from easypipe.core.values import Arguments, Int32
from easypipe.loader.collate import CollateConfig
from easypipe.loader.config import LoadStageConfig, check_streams, default_streams
from easypipe.loader.loader import Loader
from easypipe.loader.rows.planned import PlannedRows
from easypipe.loader.rows.rows import Rows
from easypipe.loader.rows.stored import StoredRows
from easypipe.loader.streams import spec as streams
from easypipe.loader.streams.rows import StreamRows
from easypipe.plan.buckets import bucket_widths, length_counts
from easypipe.stages.config import datasets_of, settings_of, tokenizer_config_of
from easypipe.stages.decoding import decoder_of
from easypipe.stages.load.forward import ForwardDocuments
from easypipe.stages.mix.mixture import Mixture, planned_of
from easypipe.stages.mix.stage import MixedShardedSource
from easypipe.stages.pack.stage import PackedShardedSource, mixture_of, packed_of
from easypipe.stages.tokenize.documents import (
    aligned_columns,
    require_documents,
    require_tokens,
    token_info,
    tokenized_of,
    tokenizer_of,
)
from easypipe.transforms.tokenizer.config import TokenizerConfig

DOCUMENTS_AT_A_TIME = 1 << 20  # whose lengths are looked at, where all are

__all__ = ["LoadStage", "LoadStageConfig", "require_a_batch"]


class LoadStage(BaseStage):
    """Passes packed rows on, and tokens as documents; `open` is what `Pipeline.build()` calls."""

    config: LoadStageConfig

    @property
    def name(self) -> str:
        return "load"

    def process(
        self, data: dict[str, ShardedSource], context: PipelineContext
    ) -> dict[str, ShardedSource]:
        """Raises StageOrderError for text, ConfigError for a policy that packed rows have not."""
        found = {name: _with_policy(name, source, context) for name, source in data.items()}
        return {name: _stepped(source, self.config) for name, source in found.items()}

    def open(self, name: str, source: ShardedSource, context: PipelineContext) -> Loader:
        """The loader over one dataset. Tokenizes what is not tokenized yet, and plans as far as the
        first batch needs; all of it where a document that is longer than a row is an error. In
        streaming it reads no rows.
        """
        options, streaming = self._options(name, source), settings_of(context).streaming
        decoder = remember = None
        if streaming:
            rows = _stream_rows(name, source, context, options)
            seed = rows.spec.plan.seed
        else:
            rows, seed = self._rows(name, source, context, options.num_epochs), context.seed
            require_a_batch(name, rows, options)
            decoder = decoder_of(source)
        if options.source_ids:
            rows = _with_source_ids(rows)
        if isinstance(rows, PlannedRows):
            mixture, plan = mixture_of(name, source, context, stage="load"), rows.plan
            remember = partial(mixture.remember, plan)
            if (
                plan.spec.pack is not None
                and plan.spec.pack.oversize == "error"
                and rows.num_rows is not None
            ):
                remember()
        return Loader(
            rows,
            options,
            seed=seed,
            collate=self._collate(name, source, context, None if streaming else rows),
            name=f"loader of {name!r}",
            decoder=decoder,
            remember=remember,
        )

    def _options(self, name: str, source: ShardedSource) -> LoadStageConfig:
        """The config, with no number of epochs where the mixture has none, and with what packing
        says of the order of rows.
        """
        options = self.config
        packed, planned = packed_of(source), planned_of(source)
        factor = None if packed is None else packed.config.shuffle_buffer_factor
        if factor is not None and options.shuffle_buffer_size is None:
            options = dataclasses.replace(options, shuffle_buffer_size=factor * options.batch_size)
        if planned is None or not planned.mixture.restarts:
            return options
        if options.num_epochs not in (1, None):
            why = (
                "never ends"
                if planned.mixture.endless
                else "is drawn once, until mix.max_epochs ends it"
            )
            raise ConfigError(
                at="load.num_epochs",
                problem=f"{options.num_epochs}, but {name!r} {why}: its stop_strategy is 'restart'",
                fix="Leave it out, or set mix.stop_strategy to 'first_exhausted' or "
                "'all_exhausted'.",
            )
        return dataclasses.replace(options, num_epochs=None)

    def _rows(
        self, name: str, source: ShardedSource, context: PipelineContext, num_epochs: int | None
    ) -> Rows:
        if (packed := packed_of(source)) is not None:
            return packed.rows(num_epochs)
        info = token_info(source)
        # packed and saved: in the order in which the rows stand, which packing has shuffled
        if SEGMENT_IDS in source.schema.names:
            return StoredRows(
                source,
                seq_length=None if info is None else info.seq_length,
                pad_token_id=0 if info is None or info.pad_token_id is None else info.pad_token_id,
                num_epochs=num_epochs,
                tokenizer_fingerprint="" if info is None else info.tokenizer_fingerprint,
                aligned=aligned_columns(name, source, context),
            )
        return mixture_of(name, source, context, stage="load").documents(num_epochs)

    def _collate(
        self, name: str, source: ShardedSource, context: PipelineContext, rows: Rows | None
    ) -> CollateConfig:
        packed, planned = packed_of(source), planned_of(source)
        parts = {name: source} if planned is None else planned.mixture.parts
        first, origin = next(iter(parts.items()))
        options = _tokenizer_options(first, origin, context)
        rule: Arguments = {}
        if packed is not None:
            rule["segment_ids"] = packed.config.include_segment_ids
        if options is not None:
            rule |= {
                "attention_mask": options.return_attention_mask,
                # these three are refused where rows are packed
                "padding_side": options.padding_side,
                "pad_to_multiple_of": options.pad_to_multiple_of,
                "length_buckets": _widths(options.length_buckets, rows),
            }
            if (
                packed is None and SEGMENT_IDS not in source.schema.names
            ):  # else rows are full already
                rule |= {
                    "padding": options.padding,
                    "max_length": options.max_length if options.padding == "max_length" else None,
                }
        return CollateConfig(**rule)


def _with_policy(name: str, source: ShardedSource, context: PipelineContext) -> ShardedSource:
    """Rows of tokens as documents that have the bad-row policy of their dataset; packed rows as
    they are: nobody counts which of them are bad.
    """
    require_tokens(name, source, "load")
    if planned_of(source) is not None:
        return source
    if SEGMENT_IDS not in source.schema.names:
        return require_documents(name, source, context, stage="load")
    own = datasets_of(context).get(name)
    asked = own and ("max_bad_rows" if own.max_bad_rows is not None else "on_error")
    require(
        own is None or (own.max_bad_rows is None and own.on_error != "quarantine"),
        f"datasets.{name}.{asked}",
        "has no effect on rows that are packed already: they are read where they lie",
        "Leave it out, or give the documents that were packed.",
    )
    return source


def _with_source_ids(rows: Rows) -> PlannedRows | StreamRows:
    """The rows with the number of each token's dataset."""
    if not isinstance(rows, PlannedRows | StreamRows):
        raise ConfigError(
            at="load.source_ids",
            problem="rows that were saved packed do not say which dataset a token is of",
            fix="Load the datasets that were packed, or leave it out.",
        )
    require(
        SOURCE_IDS not in [column.name for column in rows.aligned],
        "load.source_ids",
        f"a dataset has a column {SOURCE_IDS!r} of its own",
        "Rename that column, or leave it out.",
    )
    return rows.with_source_ids()


def _tokenizer_options(
    name: str, source: ShardedSource, context: PipelineContext
) -> TokenizerConfig | None:
    """Of the tokenizer that made the documents; of tokens that were made before, of the one that
    the config names.
    """
    tokenizer = tokenizer_of(source)
    if tokenizer is not None:
        return tokenizer.config
    named = tokenizer_config_of(name, context)
    return named if isinstance(named, TokenizerConfig) else None


def _widths(buckets: int | Sequence[int], rows: Rows | None) -> tuple[int, ...]:
    """The widths of batches. rows: None where they are read forward."""
    if not isinstance(buckets, int):
        return tuple(buckets)
    if isinstance(rows, PlannedRows):
        if rows.seq_length is not None:
            return (buckets,)  # refused by the loader: such rows have one width
        return bucket_widths(
            length_counts(piece for cache in rows.caches for piece in _lengths_of(cache)), buckets
        )
    why = (
        "lengths are not known before rows are read"
        if rows is None
        else "the lengths of saved rows are not recorded"
    )
    raise ConfigError(
        at="length_buckets",
        problem=f"{buckets} widths cannot be chosen: {why}",
        fix="Give the widths: [128, 256, 512].",
    )


def _lengths_of(cache: TokenCache) -> Iterator[Int32]:
    for start in range(0, cache.num_docs, DOCUMENTS_AT_A_TIME):
        yield cache.lengths(np.arange(start, min(cache.num_docs, start + DOCUMENTS_AT_A_TIME)))


def _stepped(source: ShardedSource, options: LoadStageConfig) -> ShardedSource:
    """The source; where its weights follow the training step, one that knows how many rows a step
    has.
    """
    planned, packed = planned_of(source), packed_of(source)
    mixture = None if planned is None else planned.mixture.for_load(options)
    if planned is None or mixture is None or mixture is planned.mixture:
        return source
    if packed is None:
        return MixedShardedSource(mixture)
    return PackedShardedSource(mixture, packed.config)


def require_a_batch(name: str, rows: Rows, options: LoadStageConfig) -> None:
    """A loader that never yields is a mistake, and training on it ends before it begins."""
    needed = options.batch_size if options.drop_last else 1
    num_rows = rows.open().available(0, needed)
    if not num_rows and isinstance(rows, PlannedRows):
        rows.plan.check_that_some_document_fits()
    require(
        num_rows >= needed,
        "load.batch_size",
        f"{options.batch_size}, but {name!r} has {num_rows} rows: no batch is ever full",
        f"Give at most {num_rows}, or set drop_last=False."
        if num_rows
        else "Give the dataset rows.",
    )


def _stream_rows(
    name: str, source: ShardedSource, context: PipelineContext, config: LoadStageConfig
) -> StreamRows:
    """The rows of `source`, read forward. Reads none of them."""
    packed = packed_of(source)
    require(
        SEGMENT_IDS not in source.schema.names or packed is not None,
        "streaming",
        f"the rows of dataset {name!r} are packed already: they are counted, and read "
        "where they lie",
        "Leave streaming out.",
    )
    mixture = mixture_of(name, source, context, stage="load")
    spec, pad = _stream_spec(mixture, packed, context, config)
    tokens = [token_info(part) for part in mixture.parts.values()]
    prints = ["" if info is None else info.tokenizer_fingerprint for info in tokens]
    workers = [
        part.writer.num_workers
        for part in map(tokenized_of, mixture.parts.values())
        if part is not None
    ]
    return StreamRows(
        [ForwardDocuments(part, documents, context) for part, documents in mixture.parts.items()],
        spec,
        {
            "sources": digest([[part, one.fingerprint] for part, one in mixture.parts.items()]),
            "tokenizer": digest(prints, spec.eos, pad),
        },
        pad_token_id=pad,
        aligned=mixture.aligned,
        # of one stage, so all say the same
        workers=next((count for count in workers if count is not None), None),
        name=f"loader of {name!r}",
    )


def _stream_spec(
    mixture: Mixture,
    packed: PackedShardedSource | None,
    context: PipelineContext,
    config: LoadStageConfig,
) -> tuple[streams.StreamSpec, int]:
    """What decides the rows of a stream beside its data; and the token that fills them up."""
    sizes = [config.batch_size, *(size for _, size in config.batch_size_schedule)]
    num_streams = settings_of(context).num_streams or default_streams(*sizes)
    check_streams(num_streams, config)
    schedule = mixture.steps
    if schedule is not None:  # its steps are those of every stream
        schedule = dataclasses.replace(
            schedule,
            batch_sizes=tuple((step, size // num_streams) for step, size in schedule.batch_sizes),
        )
    shuffle, docs = mixture.spec.order.shuffle, config.shuffle_buffer_size
    pad, eos, pack = mixture.pad_token_id, None, None
    if packed is not None:
        pad, eos, pack = packed.pad_token_id, packed.eos_token_ids, packed.config.spec()
        eos = packed.eos_token_id if len(set(eos)) < 2 else eos
    plan = dataclasses.replace(
        mixture.spec,
        num_epochs=config.num_epochs,
        window_docs=streams.WINDOW_DOCS if docs is None else docs,
        window_tokens=streams.window_tokens(pack) if docs is None else None,
        pack=pack,
        schedule=schedule,
    )
    return streams.StreamSpec(
        plan=plan,
        num_streams=num_streams,
        shuffle=shuffle,
        shuffle_window=shuffle or docs is not None,
        eos=eos,
        joined=packed is not None and packed.joined,
        train_continued=packed is not None and packed.config.train_continued,
    ), pad
