"""The load stage: makes a Loader, fills in defaults, picks streamed chunks to audit."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from threading import Semaphore

import numpy as np

from easypipe.cache.encoder import EncodedDocuments
from easypipe.cache.manifest import Counts
from easypipe.cache.reader import TokenCache
from easypipe.cache.verify import same_tokenizer_again
from easypipe.core.aligned import values_of
from easypipe.core.config import digest, fields_of
from easypipe.core.errors import ConfigError, SourceError, TokenizerError, require
from easypipe.core.protocols import (
    BaseStage,
    PipelineContext,
    Reject,
    Shard,
    ShardedSource,
    Source,
    Sources,
    bad_of,
    fetched,
    info_of,
    innermost,
    place_of,
    scan,
    unit_of,
)
from easypipe.core.schema import HAS_EOS, INPUT_IDS, LOSS_MASK, SEGMENT_IDS
from easypipe.core.values import Arguments, Int32
from easypipe.loader.collate import CollateConfig
from easypipe.loader.config import LoadStageConfig, check_streams, default_streams
from easypipe.loader.explain import Decoder, Decodes
from easypipe.loader.loader import Loader
from easypipe.loader.rows.planned import PlannedRows
from easypipe.loader.rows.rows import MOST_IDS, Rows
from easypipe.loader.rows.stored import StoredRows
from easypipe.loader.streams import spec as streams
from easypipe.loader.streams.feed import Loaded
from easypipe.loader.streams.rows import StreamRows
from easypipe.plan.buckets import bucket_widths, length_counts
from easypipe.stages.config import datasets_of, settings_of, tokenizer_config_of
from easypipe.stages.mix.config import restarts
from easypipe.stages.mix.mixture import PlannedSource, planned_of
from easypipe.stages.mix.stage import MixedShardedSource
from easypipe.stages.pack.stage import mixture_of
from easypipe.stages.tokenize.documents import (
    Documents,
    aligned_columns,
    cached_of,
    require_documents,
    require_tokens,
    token_info,
    tokenized_of,
    tokenizer_of,
)
from easypipe.stages.tokenize.token_rows import AUDITED_BYTES, AUDITED_SHARE
from easypipe.transforms.refused import advice
from easypipe.transforms.tokenizer.config import TokenizerConfig

log = logging.getLogger("easypipe")

DOCUMENTS_AT_A_TIME = 1 << 20  # how many lengths are read at a time, if all are read

__all__ = ["DocumentsStage", "LoadStage", "LoadStageConfig", "require_a_batch"]


class DocumentsStage(BaseStage):
    """Tokens as documents for a chain without mix() and pack(), before load() makes them.

    Their tokenizer and aligned columns are then known, and they are prepared. Packed rows, and
    tokens whose tokenizer neither they nor the config names, are passed on unchanged.
    """

    @property
    def name(self) -> str:
        return "documents"

    def process(self, data: Sources, context: PipelineContext) -> Sources:
        return {
            name: source
            if token_info(source) is None and tokenizer_config_of(name, context) is None
            else _with_policy(name, source, context)
            for name, source in data.items()
        }


class LoadStage(BaseStage):
    """The load stage; `process` passes packed rows and token documents on, `open` makes the loader.

    `Pipeline.build()` calls `open`.
    """

    config: LoadStageConfig

    @property
    def name(self) -> str:
        return "load"

    def process(self, data: Sources, context: PipelineContext) -> Sources:
        """Passes packed rows on, and tokens as documents.

        Raises:
            StageOrderError: A dataset holds text.
            ConfigError: A dataset has a bad-row policy that packed rows cannot have.
        """
        found = {name: _with_policy(name, source, context) for name, source in data.items()}
        return {name: _stepped(source, self.config) for name, source in found.items()}

    def open(self, name: str, source: ShardedSource, context: PipelineContext) -> Loader:
        """Returns the loader over one dataset.

        It tokenizes what is not tokenized yet, and plans as far as the first batch needs, or
        everything if a document longer than a row is an error. In streaming it reads no rows.
        """
        streaming = settings_of(context).streaming
        # Packed rows that were saved are read in the stored order, which packing has shuffled.
        saved = SEGMENT_IDS in source.schema.names and planned_of(source) is None
        planned = None if saved else as_planned(name, source, context, stage="load")
        options = self._options(name, planned)
        parts = {name: source} if planned is None else planned.mixture.parts
        packed = planned is None or planned.packing is not None
        tokenizer = _tokenizer_options(parts, context, packed=packed)
        decoder = remember = None
        if streaming:
            rows = _stream_rows(name, planned, context, options)
            rows.unversioned = _unversioned(parts)
            seed = rows.spec.plan.seed
        else:
            rows: Rows = (
                _stored_rows(name, source, context, options.num_epochs)
                if planned is None
                else planned.rows(options.num_epochs)
            )
            seed = context.seed
            require_a_batch(name, rows, options)
            decoder = decoder_of(source)
        infos = [info for part in parts.values() if (info := token_info(part)) is not None]
        rows.vocab_size = min(MOST_IDS, max((info.vocab_size for info in infos), default=MOST_IDS))
        if planned is not None:
            rows.shuffle_buffer_factor = planned.shuffle_buffer_factor
        if options.source_ids:
            rows = rows.with_source_ids()
        if isinstance(rows, PlannedRows) and planned is not None:
            remember = partial(planned.mixture.remember, rows.plan)
            if (
                planned.packing is not None
                and planned.packing.oversize == "error"
                and rows.num_rows is not None
            ):
                remember()
        return Loader(
            rows,
            options,
            seed=seed,
            collate=_collate(tokenizer, planned, None if streaming else rows),
            name=f"loader of {name!r}",
            decoder=decoder,
            remember=remember,
            recount=partial(self._recounted, name, source, context),
        )

    def _recounted(
        self,
        name: str,
        source: ShardedSource,
        context: PipelineContext,
        config: LoadStageConfig,
        seed: int,
    ) -> Rows:
        """Returns the rows of a loader with other training steps, which weights may follow."""
        rows = LoadStage(config).open(name, _stepped(source, config), context).rows
        return rows.with_seed(seed) if isinstance(rows, StreamRows) else rows

    def _options(self, name: str, planned: PlannedSource | None) -> LoadStageConfig:
        """Returns the config with the options that the mixture and packing decide.

        A mixture that restarts has no epochs.
        """
        options = self.config
        if planned is None or not planned.mixture.restarts:
            return options
        if options.num_epochs not in (1, None):
            raise restarts(options.num_epochs, repr(name), endless=planned.mixture.endless)
        return dataclasses.replace(options, num_epochs=None)


def _unversioned(parts: Mapping[str, ShardedSource]) -> tuple[str, ...]:
    """Returns why states of a stream can be restored in no other loader, and warns of it."""
    found = tuple(
        f"dataset {part!r}: {why}"
        for part, source in parts.items()
        for info in [info_of(source)]
        for why in info.unversioned or ([] if info.cacheable else ["its rows have no version"])
    )
    if found:
        log.warning(
            "streaming: no state of this run can be restored in another process, nor in another "
            "loader of this one, because nothing tells whether the rows are the same: %s. Give it "
            "a version (version=..., or its attribute `version`), and change it whenever the "
            "rows change.",
            "; ".join(found),
        )
    return found


def as_planned(
    name: str, source: ShardedSource, context: PipelineContext, *, stage: str
) -> PlannedSource:
    """Returns the source if its rows are planned, else its documents in the order of a plan."""
    planned = planned_of(source)
    if planned is not None:
        return planned
    return MixedShardedSource(mixture_of(name, source, context, stage=stage))


def _stored_rows(
    name: str, source: ShardedSource, context: PipelineContext, num_epochs: int | None
) -> StoredRows:
    """Returns the rows of a saved, packed source."""
    info = info_of(source).tokens
    return StoredRows(
        source,
        seq_length=None if info is None else info.seq_length,
        pad_token_id=0 if info is None else info.pad_token_id or 0,
        num_epochs=num_epochs,
        tokenizer_fingerprint="" if info is None else info.tokenizer_fingerprint,
        aligned=aligned_columns(name, source, context),
    )


def _collate(
    options: TokenizerConfig | None, planned: PlannedSource | None, rows: Rows | None
) -> CollateConfig:
    """Returns how rows become batches; `rows` is None if they are read forward."""
    rule: Arguments = {"segment_ids": planned is None or planned.include_segment_ids}
    if options is not None:
        rule |= {
            "attention_mask": options.return_attention_mask,
            # These three options are invalid for packed rows.
            "padding_side": options.padding_side,
            "pad_to_multiple_of": options.pad_to_multiple_of,
            "length_buckets": _widths(options.length_buckets, rows),
        }
        if planned is not None and planned.packing is None:  # other rows are already full
            rule |= {
                "padding": options.padding,
                "max_length": options.max_length if options.padding == "max_length" else None,
            }
    return CollateConfig(**rule)


def _with_policy(name: str, source: ShardedSource, context: PipelineContext) -> ShardedSource:
    """Returns rows of tokens as documents that have the bad-row policy of their dataset.

    Packed rows are returned unchanged: bad ones among them are not counted.
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
        "has no effect on rows that are packed already: they are read in place",
        "Leave it out, or give the documents that were packed.",
    )
    return source


def _tokenizer_options(
    parts: Mapping[str, ShardedSource], context: PipelineContext, *, packed: bool
) -> TokenizerConfig | None:
    """Returns the options of the tokenizer that made the documents.

    For data that was already tokenized, it is the tokenizer that the config names.

    Raises:
        ConfigError: Datasets of a mixture differ in an option that is one for a whole batch.
    """
    first: tuple[str, TokenizerConfig] | None = None
    for name, source in parts.items():
        tokenizer = tokenizer_of(source)
        options = tokenizer_config_of(name, context) if tokenizer is None else tokenizer.config
        if not isinstance(options, TokenizerConfig):
            continue
        first = first or (name, options)
        ours, theirs = (_of_batches(one, packed=packed) for one in (options, first[1]))
        for option, value in ours.items():
            require(
                value == theirs[option],
                f"datasets.{name}.tokenizer.{option}",
                f"{value!r}, but dataset {first[0]!r} has {theirs[option]!r}, and batches hold "
                "rows of both",
                "Give all datasets the same, or set it in default_tokenizer alone.",
            )
    return first and first[1]


def _of_batches(options: TokenizerConfig, *, packed: bool) -> Arguments:
    """Returns the options of a tokenizer that decide the shape and the columns of batches."""
    names = ("return_attention_mask", "padding_side", "pad_to_multiple_of", "length_buckets")
    found = {name: fields_of(options)[name] for name in names}
    if not packed:
        found["padding"] = "longest" if options.padding is True else options.padding
        found["max_length"] = options.max_length if options.padding == "max_length" else None
    return found


def _widths(buckets: int | Sequence[int], rows: Rows | None) -> tuple[int, ...]:
    """Returns the widths of batches; `rows` is None if they are read forward."""
    if not isinstance(buckets, int):
        return tuple(buckets)
    if isinstance(rows, PlannedRows):
        if rows.seq_length is not None:
            return (buckets,)  # the loader raises an error, because such rows have one width
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
    """Yields the lengths of all documents, some at a time."""
    for start in range(0, cache.num_docs, DOCUMENTS_AT_A_TIME):
        yield cache.lengths(np.arange(start, min(cache.num_docs, start + DOCUMENTS_AT_A_TIME)))


def _stepped(source: ShardedSource, options: LoadStageConfig) -> ShardedSource:
    """Returns the source; if its weights follow the step, it gets the number of rows of a step."""
    planned = planned_of(source)
    mixture = None if planned is None else planned.mixture.for_load(options)
    if planned is None or mixture is None or mixture is planned.mixture:
        return source
    return planned.over(mixture)


def require_a_batch(name: str, rows: Rows, options: LoadStageConfig) -> None:
    """Raises ConfigError for a loader that would never yield a batch.

    Training on it would end without a step.
    """
    needed = options.batch_size if options.drop_last else 1
    num_rows = rows.open().available(0, needed)
    if not num_rows and isinstance(rows, PlannedRows):
        rows.plan.check_that_some_document_fits()
    passes = options.num_epochs or 1
    there = f"{num_rows} rows" + f" in {passes} passes" * (passes > 1)
    require(
        num_rows >= needed,
        "load.batch_size",
        f"{options.batch_size}, but {name!r} has {there}: no batch is ever full",
        f"Give at most {num_rows}, set num_epochs to null for passes without end, or "
        "drop_last=False."
        if num_rows
        else "Give the dataset rows.",
    )


def _stream_rows(
    name: str, planned: PlannedSource | None, context: PipelineContext, config: LoadStageConfig
) -> StreamRows:
    """Returns the rows of `planned`, to be read forward; it reads none of them."""
    if planned is None:
        raise ConfigError(
            at="streaming",
            problem=f"the rows of dataset {name!r} are packed already: they are counted, and read "
            "where they lie",
            fix="Leave streaming out.",
        )
    spec, pad, mixture = (
        _stream_spec(planned, context, config),
        planned.pad_token_id,
        planned.mixture,
    )
    tokens = [info_of(part).tokens for part in mixture.parts.values()]
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
        # all parts belong to one stage, so they have the same number of workers
        workers=next((count for count in workers if count is not None), None),
        name=f"loader of {name!r}",
    )


def _stream_spec(
    planned: PlannedSource, context: PipelineContext, config: LoadStageConfig
) -> streams.StreamSpec:
    """Returns everything except the data that decides the rows of a stream."""
    mixture = planned.mixture
    sizes = [config.batch_size, *(size for _, size in config.batch_size_schedule)]
    num_streams = settings_of(context).num_streams or default_streams(*sizes)
    check_streams(num_streams, config)
    schedule = mixture.steps
    if schedule is not None:  # the steps count the rows of every stream
        schedule = dataclasses.replace(
            schedule,
            batch_sizes=tuple((step, size // num_streams) for step, size in schedule.batch_sizes),
        )
    shuffle, docs = mixture.spec.order.shuffle, config.shuffle_buffer_size
    eos, pack = planned.eos_token_ids, planned.packing
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
        eos=planned.eos_token_id if len(set(eos)) < 2 else eos,
        joined=planned.joined,
        train_continued=planned.train_continued,
    )


def decoder_of(source: ShardedSource) -> Decoder:
    """Returns a function from a dataset's name to its tokenizer.

    For saved rows, which no longer belong to known datasets, any name can be used.
    """
    planned = planned_of(source)
    parts = {} if planned is None else planned.mixture.parts

    def decoder(dataset: str) -> Decodes:
        part: ShardedSource = parts.get(dataset, source)
        own = tokenizer_of(part)
        if own is not None:
            return own
        info = token_info(part)
        if info is None:
            raise TokenizerError(
                at=f"dataset {dataset!r}" if dataset else "rows",
                problem="unknown tokenizer for column 'input_ids'",
            )
        return same_tokenizer_again(info.tokenizer, info.tokenizer_fingerprint)

    return functools.cache(decoder)


NAMED_ROWS = 64  # the places of at most this many bad rows of a chunk are kept


class ForwardDocuments:
    """The documents of one dataset for streams, tokenized as they are read.

    It implements loader.streams.feed.Forward. If bad rows are skipped, the loader counts them
    against `max_bad_rows`.

    Raises:
        SourceError: A row is bad, and on_error is "error".
    """

    def __init__(self, name: str, source: Documents, context: PipelineContext) -> None:
        self.name, self._source = name, source
        dataset = datasets_of(context).get(name)
        self._on_error = "error" if dataset is None else dataset.on_error
        self.max_bad_rows = None if dataset is None else dataset.max_bad_rows
        self._warned = False  # of the first bad row that is left out
        inner = innermost(source)
        self.unit, self.waits = unit_of(source), isinstance(inner, Source) and inner.waits

    @property
    def shards(self) -> Sequence[Shard]:
        """The shards of the source.

        Raises:
            SourceError: The end of a shard is unknown.
        """
        shards, files = self._source.shards, info_of(innermost(self._source))
        for shard in shards:
            if shard.num_rows is None and not files.uncounted:
                raise SourceError(
                    at=shard.name,
                    problem="its rows cannot be counted, nor read forward",
                    fix="Give files, or rows in memory.",
                )
        return shards

    def load(self, shard: int, start: int, stop: int, turns: Semaphore) -> Loaded:
        """Reads and encodes rows `start` to `stop` of a shard, as soon as `turns` admits it."""
        here, span = self._source.shards[shard], (shard, start, stop)
        try:
            with fetched(self._source, *span) if self.waits else nullcontext(), turns:
                found = self._documents(*span)
            bad = self._bad(shard, found.rejects)
        except Exception as error:
            at = f"{here.name}, {self.unit} {start}:{stop}"
            error.add_note(f"while streaming dataset {self.name!r}, {at}")
            raise
        batch, column = found.batch, found.batch.column(INPUT_IDS)
        offsets = np.asarray(column.offsets.to_numpy(), np.int64)
        first, last = int(offsets[0]), int(offsets[-1])
        rejects = Counter[str]()
        for reject in found.rejects:
            rejects[reject.reason] += reject.count
        # rows that became documents
        made = batch.num_rows - found.counts.lengths.get("pieces", 0)
        # Some sources do not report the rows that they leave out.
        if self.unit == "records" and here.num_rows is not None:
            rejects["other"] += stop - start - made - rejects.total()
        mask = (
            batch.column(LOSS_MASK).values.to_numpy()[first:last]
            if LOSS_MASK in batch.schema.names
            else None
        )
        return Loaded(
            ids=column.values.to_numpy()[first:last],
            offsets=offsets - first,
            has_eos=batch.column(HAS_EOS).to_numpy().astype(np.bool_),
            mask=None if mask is None else mask.astype(np.uint8),
            counts=replace(found.counts, rows=made + rejects.total(), rejects=+rejects),
            values={
                name: values_of(batch.column(name))[first:last]
                for name in info_of(self._source).aligned
            },
            num_bad=0 if self.max_bad_rows is None else len(bad),
            bad=tuple(
                (place_of(self._source, shard, reject.row), f"{reject.reason}: {reject.detail}")
                for reject in bad[:NAMED_ROWS]
            ),
            ended=here.num_rows is not None
            or (isinstance(self._source, Source) and self._source.at_end(shard, stop)),
        )

    def _documents(self, shard: int, start: int, stop: int) -> EncodedDocuments:
        encoded = cached_of(self._source)
        if encoded is not None:
            return encoded.documents(shard, start, stop, self._audit_key(shard, start, stop))
        batch, rejects = scan(self._source, shard, start, stop)
        return EncodedDocuments(batch, Counts(docs=batch.num_rows), rejects)

    def _audit_key(self, shard: int, start: int, stop: int) -> str | None:
        """Returns a key for chunks that are audited with the reference encoder, else None.

        The position of a chunk decides; enough are chosen to check about a thousandth of all text.
        """
        at, plain = self._source.shards[shard], stop - start
        if at.num_rows:  # if the range counts bytes, they are the bytes of the file
            plain = at.num_bytes * plain // at.num_rows
        key = digest("audit a chunk", at.name, start)
        return (
            None if int(key, 16) % max(1, AUDITED_SHARE * AUDITED_BYTES // max(1, plain)) else key
        )

    def _bad(self, shard: int, rejects: Sequence[Reject]) -> list[Reject]:
        """Returns the bad rows among `rejects`; raises at the first if on_error is "error"."""
        bad = list(bad_of(rejects))
        if not bad:
            return bad
        at = place_of(self._source, shard, bad[0].row)
        said = f"{bad[0].reason}: {bad[0].detail}"
        if self._on_error == "error":
            raise SourceError(
                at=at,
                problem=said,
                fix=f"{advice(bad[0].reason)}, or set on_error to 'skip'.",
            )
        if not self._warned:
            self._warned = True
            log.warning(
                "dataset %s: on_error is %r: bad rows are left out and counted; the first that was "
                "read is %s: %s",
                self.name,
                self._on_error,
                at,
                said,
            )
        return bad
