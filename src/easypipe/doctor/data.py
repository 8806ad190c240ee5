"""Checks of a config's data on its first rows: resume, conservation, packing, tokens, masks."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path

import numpy as np

from easypipe.cache.reader import TokenCache
from easypipe.core.errors import EasypipeError, LedgerError
from easypipe.core.protocols import ProgressListener, silent
from easypipe.core.schema import (
    IGNORE,
    INPUT_IDS,
    LABELS,
    LOSS_MASK,
    POSITION_IDS,
    ROW_NUMBER,
    SEGMENT_IDS,
)
from easypipe.core.values import Batch
from easypipe.doctor.check import Check, Failed, Skipped
from easypipe.history import host_load
from easypipe.jobs import chain
from easypipe.loader.config import LoadStageConfig
from easypipe.loader.loader import Loader
from easypipe.loader.state import LoaderState
from easypipe.pipeline import Pipeline
from easypipe.previews.samples import looked_at
from easypipe.stages.config import PipelineConfig
from easypipe.stages.tokenize.documents import TokenizedShardedSource

BATCHES = 6  # the number of batches that are checked
STOPS = (0, 1, 2, 4)  # batches after which a loader is stopped, and another one continues


class Sample:
    """The first `rows` rows of each dataset of `config`, prepared in `folder` on first use."""

    def __init__(
        self, config: PipelineConfig, folder: Path, rows: int, progress: ProgressListener = silent
    ) -> None:
        self._config, self.folder, self._rows, self._progress = config, folder, rows, progress
        self._refused: EasypipeError | None = None

    @cached_property
    def pipeline(self) -> Pipeline:
        """The rows, prepared once; if that fails, it is not tried again."""
        if self._refused is not None:
            raise self._refused
        try:
            return self._prepared("sample", self._config)
        except EasypipeError as error:
            self._refused = error
            raise

    @cached_property
    def batches(self) -> list[Batch]:
        """The first BATCHES batches, each a dict of arrays."""
        found = [dict(batch) for batch in itertools.islice(self.loader(), BATCHES)]
        if not found:
            raise Skipped(f"the first {self._rows} rows of each dataset make no batch")
        return found

    @property
    def load(self) -> LoadStageConfig:
        """How batches are made of the sample: not on a device and without micro-batches."""
        return dataclasses.replace(host_load(self._config), drop_last=False, accumulation_steps=1)

    def loader(self, load: LoadStageConfig | None = None) -> Loader:
        return self.pipeline.copy().load(load or self.load).loader()

    def elsewhere(self, name: str) -> Sample:
        """Returns the same rows, prepared in another folder, perhaps by another process."""
        return Sample(self._config, self.folder / name, self._rows)

    def again(self) -> Pipeline:
        """Returns the same rows, prepared another time."""
        return self._prepared("again", self._config)

    def by_reference(self) -> Pipeline:
        """Returns the same rows, prepared with the `tokenizers` library only."""
        datasets = tuple(
            dataclasses.replace(
                one, tokenizer_kwargs={**(one.tokenizer_kwargs or {}), "backend": "tokenizers"}
            )
            for one in self._config.datasets
        )
        changed = dataclasses.replace(self._config, datasets=datasets)
        return self._prepared("reference", changed)

    def _prepared(self, name: str, config: PipelineConfig) -> Pipeline:
        # a weight schedule counts the rows of training steps
        config = dataclasses.replace(looked_at(config, self.folder / name), load=self.load)
        made = chain(
            config,
            progress=self._progress,
            save=False,
            first_rows=self._rows,
        )
        made.prepare()
        return made


def data_checks(sample: Sample) -> Sequence[Check]:
    parts: dict[str, Callable[[Sample], str]] = {
        "no row is lost": no_row_is_lost,
        "tokens are the reference's": tokens_are_the_references,
        "preparing again changes nothing": preparing_again_changes_nothing,
        "rows are well formed": rows_are_well_formed,
        "masks": masks,
        "resume": resume,
    }
    return [Check(name, partial(try_out, sample)) for name, try_out in parts.items()]


def no_row_is_lost(sample: Sample) -> str:
    """Checks that the ledger balances, and that every row is either a document or rejected."""
    try:
        sample.pipeline.ledger().check()
    except LedgerError as error:
        raise Failed(f"{error.at}: {error.problem}") from error
    total = 0
    for name, source in _tokenized(sample.pipeline).items():
        cache, below = source.materialize(), source.source
        for number, shard in enumerate(below.shards):
            rows = shard.num_rows or 0
            scan = source.scan(number, 0, rows)
            out = {int(reject.row) for reject in scan.rejects if reject.count == 1}
            several = sum(reject.count for reject in scan.rejects if reject.count > 1)
            kept = set(cache.read(number, 0, rows).column(ROW_NUMBER).to_pylist())
            lost = sorted(set(range(rows)) - kept - out)
            if len(lost) > several:
                raise Failed(f"dataset {name}, {shard.name}, row {lost[0]}: no document, no reject")
            total += rows
    return f"{total:,} rows"


def tokens_are_the_references(sample: Sample) -> str:
    return compare(sample.pipeline, sample.by_reference(), "by the `tokenizers` library")


def preparing_again_changes_nothing(sample: Sample) -> str:
    return compare(sample.pipeline, sample.again(), "prepared another time")


def rows_are_well_formed(sample: Sample) -> str:
    """Checks that segments are contiguous and numbered from 1, and positions restart in each."""
    for n, batch in enumerate(sample.batches):
        if SEGMENT_IDS not in batch:
            raise Skipped("rows are not packed")
        for r, segments in enumerate(np.asarray(batch[SEGMENT_IDS])):
            where, used = f"batch {n}, row {r}", segments > 0
            starts = np.flatnonzero(np.diff(segments, prepend=0) * used)
            if not np.array_equal(segments[starts], np.arange(1, len(starts) + 1)):
                raise Failed(f"{where}: segments come as {segments[starts].tolist()}")
            first = np.zeros(len(segments), np.int64)
            first[starts] = starts
            expected = np.arange(len(segments)) - np.maximum.accumulate(first)
            wrong = used & (np.asarray(batch[POSITION_IDS])[r] != expected)
            if POSITION_IDS in batch and wrong.any():
                raise Failed(f"{where}, slot {int(wrong.argmax())}: positions do not restart there")
    return f"{len(sample.batches)} batches"


def masks(sample: Sample) -> str:
    """Checks that a label is the next token of its segment, and that masks allow every label."""
    targets = 0
    if any(source.materialize().pairs for source in sample.pipeline.tokenized().values()):
        raise Skipped("pairs are trained by their own rule")
    for n, batch in enumerate(sample.batches):
        if LABELS not in batch or SEGMENT_IDS not in batch:
            raise Skipped("batches have no labels of packed rows")
        ids, segments, labels = (np.asarray(batch[c]) for c in (INPUT_IDS, SEGMENT_IDS, LABELS))
        trained = labels[:, :-1] != IGNORE
        same = (segments[:, :-1] == segments[:, 1:]) & (segments[:, :-1] > 0)
        wrong = trained & (~same | (labels[:, :-1] != ids[:, 1:]))
        if wrong.any():
            row, slot = map(int, np.argwhere(wrong)[0])
            raise Failed(
                f"batch {n}, row {row}, slot {slot}: the label is {labels[row, slot]}, and the "
                f"next token of the segment is {ids[row, slot + 1] if same[row, slot] else 'none'}"
            )
        for row, explained in enumerate(sample.loader().explain(n).rows):
            for one in explained.segments:
                found = int(trained[row, one.slot_start : one.slot_stop - 1].sum())
                open_to = one.slot_stop - one.slot_start - one.masked_tokens
                # The first token of a segment is not a label; a piece may lack its prompt.
                if found > open_to or (found < open_to - 1 and not one.is_part):
                    raise Failed(
                        f"batch {n}, row {row}, {one.title}: {found} targets, but its loss mask "
                        f"trains {open_to} tokens"
                    )
        targets += int(trained.sum())
    return f"{targets:,} targets"


def resume(sample: Sample) -> str:
    """Checks that a stopped and restored loader yields the same batches as an uninterrupted one."""
    reference = sample.batches
    stops = [one for one in STOPS if one < len(reference)]
    for stop in stops:
        first = sample.loader()
        for _ in itertools.islice(first, stop):
            pass
        second = sample.loader()
        second.restore(LoaderState.from_json(first.state().to_json()))
        rest = iter(second)
        for n, expected in enumerate(reference[stop:], stop):
            batch = next(rest, None)
            if batch is None:
                raise Failed(f"stopped after batch {stop}: it ends before batch {n}")
            for name, values in expected.items():
                if not np.array_equal(values, batch[name]):
                    raise Failed(f"stopped after batch {stop}: batch {n} has another {name}")
    return f"stopped after {', '.join(map(str, stops))} of {len(reference)} batches"


def compare(first: Pipeline, second: Pipeline, how: str) -> str:
    """Returns how many documents both pipelines have, with equal tokens and loss masks.

    `how` says how the second was made.

    Raises:
        Failed: A document or its mask differs.
        Skipped: The rows hold tokens already.
    """
    count = 0
    others: Mapping[str, TokenCache] = {
        name: source.materialize() for name, source in second.tokenized().items()
    }
    for name, source in _tokenized(first).items():
        cache, other = source.materialize(), others[name]
        for doc in range(max(cache.num_docs, other.num_docs)):
            if doc >= min(cache.num_docs, other.num_docs):
                raise Failed(f"dataset {name}: {cache.num_docs} documents, {other.num_docs} {how}")
            a, b = cache.tokens(doc), other.tokens(doc)
            if not np.array_equal(a, b):
                at = next(i for i, (x, y) in enumerate(itertools.zip_longest(a, b)) if x != y)
                file, row = cache.where(doc)
                here, there = a[at : at + 4].tolist(), b[at : at + 4].tolist()
                raise Failed(
                    f"dataset {name}, {file}, row {row}, token {at}: {here} here, {there} {how}"
                )
        for shard, info in enumerate(cache.shards):
            rows = info.num_rows or 0
            kept, wanted = cache.read(shard, 0, rows), other.read(shard, 0, rows)
            if LOSS_MASK in kept.schema.names and not kept.column(LOSS_MASK).equals(
                wanted.column(LOSS_MASK)
            ):
                raise Failed(f"dataset {name}, {info.name}: another loss mask {how}")
        count += cache.num_docs
    return f"{count:,} documents"


def _tokenized(pipeline: Pipeline) -> Mapping[str, TokenizedShardedSource]:
    """Returns the sources that the pipeline tokenizes, by dataset.

    Raises:
        Skipped: There is none.
    """
    found = pipeline.tokenized()
    if not found:
        raise Skipped("no dataset is tokenized here: the rows hold tokens already")
    return found
