"""What a run would do, told before it does anything: from lengths, weights and row counts alone.

step  one batch. A run has as many as it asks for, or as the data gives
draw  a document taken for the run; a dataset that is drawn more often than it has documents begins
its next epoch
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from easypipe.core.errors import CacheError, ConfigError, StageOrderError
from easypipe.core.protocols import PipelineContext, ShardedSource
from easypipe.core.schema import INPUT_IDS, SEGMENT_IDS
from easypipe.loader.config import LoadStageConfig
from easypipe.loader.steps import Begin, Steps
from easypipe.plan.plan_stats import PlanStats
from easypipe.plan.windows import Plan
from easypipe.save.saved import SavedSource
from easypipe.stages.load.stage import LoadStage
from easypipe.stages.mix.mixture import Mixture
from easypipe.stages.mix.stage import MixedShardedSource
from easypipe.stages.pack.stage import PackedShardedSource, single
from easypipe.stages.reports.shares import (
    StepShares,
    asked_between,
    documents_drawn,
    far_from_asked,
    late_stages,
    shares_by_step,
    unlike_weights,
)
from easypipe.stages.tokenize.import_tokens import ImportedTokens
from easypipe.stages.tokenize.stage import TokenizedShardedSource
from easypipe.stages.tokenize.tokens import token_info


@dataclass(frozen=True, kw_only=True)
class DatasetPlan:
    """One dataset over the run.

    documents, tokens: what the dataset holds, the EOS that packing adds counted. requested: the
    share that the weights ask for, over the run where they follow the step. document_share,
    token_share: what it has of the documents and tokens of the run; `realised` is the one of these
    that the weights are about (mix.unit). drawn, epochs: documents of the run, and how often that
    is each one; of a document that is cut the part counts that stands in the run's rows, and a
    dataset of which any token does has at least one.
    rejected: source rows that became no document, by reason. tokens_cut: what the tokenizer's
    max_length cut off, of the whole dataset. The other counts are of the run: tokens_placed stand
    in its rows; documents longer than a row are documents_dropped or documents_truncated (with
    tokens_dropped, tokens_truncated); documents_empty have no token; all three are counted by whole
    windows of the plan. cache_bytes: its token cache on this disk.
    """

    name: str
    documents: int
    tokens: int
    requested: float
    realised: float
    document_share: float
    token_share: float
    drawn: int
    epochs: float
    tokens_placed: int
    tokens_truncated: int = 0
    tokens_dropped: int = 0
    documents_truncated: int = 0
    documents_dropped: int = 0
    documents_empty: int = 0
    rejected: Mapping[str, int] = field(default_factory=dict)
    tokens_cut: int = 0
    cache_bytes: int = 0

    @property
    def never_drawn(self) -> bool:
        return self.drawn == 0


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """A run of `steps` batches over `rows` rows.

    unit: what weights and realised shares are of: documents ("rows"), or "tokens".
    steps_available: batches that the data gives; None where it never ends. rows_left_over: rows at
    the end of the data that fill no batch. slots = tokens + padding, `fill` is the part of them
    that holds tokens. saved_bytes: what save() would write before compression, of one epoch; None
    without save(). prepared: datasets that had to be tokenized for this report. notes: what to know
    before starting.
    """

    name: str
    unit: str
    datasets: tuple[DatasetPlan, ...]
    steps: int
    steps_available: int | None
    batch_size: int
    rows: int
    rows_left_over: int
    seq_length: int | None
    slots: int
    padding: int
    fill: float
    cache_bytes: int
    saved_bytes: int | None
    prepared: tuple[str, ...]
    notes: tuple[str, ...]
    seconds: float
    by_step: tuple[StepShares, ...] = ()  # where they were asked for

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists and numbers."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        """A table for people."""
        head = (
            "dataset",
            "documents",
            "tokens",
            f"asked ({self.unit})",
            "realised",
            "of tokens",
            "drawn",
            "epochs",
            "cache",
        )
        lines = [head] + [
            (
                d.name, f"{d.documents:,}", f"{d.tokens:,}", f"{d.requested:.4%}", f"{d.realised:.4%}", f"{d.token_share:.4%}",
                f"{d.drawn:,}", f"{d.epochs:.3f}", _megabytes(d.cache_bytes),
            )
            for d in self.datasets
        ]  # fmt: skip
        widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
        pad = [str.ljust, *[str.rjust] * (len(head) - 1)]
        text = [
            "  ".join(to(value, width) for to, value, width in zip(pad, line, widths, strict=True))
            for line in lines
        ]
        ends = (
            "never ends"
            if self.steps_available is None
            else f"the data gives {self.steps_available:,}"
        )
        slots = (
            "documents as rows"
            if self.seq_length is None
            else f"of {self.seq_length:,} slots, {self.fill:.3%} filled"
        )
        text += [
            f"steps   {self.steps:,} of {self.batch_size:,} rows ({ends})",
            f"rows    {self.rows:,} {slots}; {self.rows_left_over:,} left over at the end",
            f"tokens  {self.slots - self.padding:,}, and {self.padding:,} slots of padding",
            f"disk    {_megabytes(self.cache_bytes)} of token cache"
            + (
                ""
                if self.saved_bytes is None
                else f", {_megabytes(self.saved_bytes)} to save, before compression"
            ),
        ]
        return "\n".join(text + [f"note    {note}" for note in self.notes])


def plan_report(
    name: str,
    source: ShardedSource,
    load: LoadStageConfig,
    context: PipelineContext,
    *,
    steps: int | None = None,
    prepare: bool = True,
    saves: bool = False,
    by_step: bool = False,
    begin: Begin | None = None,
) -> PlanReport:
    """The report of a run that reads `source` as `load` says.

    steps: of the run; None takes what the data gives. prepare: tokenize what is not tokenized yet;
    else that raises CacheError. by_step: also what each part of the run draws, which plans every
    window once more. begin: the step and the row at which a run goes on with this source; what
    stood before them is not counted.
    Raises ConfigError where the data never ends and no steps are given, StageOrderError for text.
    """
    began, begin = time.perf_counter(), begin or Begin()
    if steps is not None and steps < 1:
        raise ConfigError(at="steps", problem=f"{steps} steps are no run", fix="Give at least 1.")
    if SEGMENT_IDS in source.schema.names and not isinstance(source, PackedShardedSource):
        return _stored(name, source, load, steps, saves, began, begin)
    if INPUT_IDS not in source.schema.names:
        raise StageOrderError(
            at="",
            problem=f"Call tokenize() before plan(): dataset {name!r} has no column {INPUT_IDS!r}",
        )
    if context.config.streaming:
        problem = "nothing is counted before it is read, so there is nothing to plan from"
        raise ConfigError(
            at="streaming", problem=problem, fix="Leave it out to plan over the token cache."
        )
    # weights that follow the step ask how many rows one has
    source = LoadStage(load).process({name: source}, context)[name]
    planned = isinstance(source, MixedShardedSource | PackedShardedSource)
    mixture = source.mixture if planned else single(name, source, context, stage="plan")
    prepared = require_prepared(mixture, prepare=prepare)
    num_epochs = None if mixture.restarts else load.num_epochs
    plan = (
        source.plan(num_epochs)
        if isinstance(source, PackedShardedSource)
        else mixture.plan(None, num_epochs=num_epochs)
    )
    run = _Run.of(load, plan.num_rows, steps, begin)
    first = min(begin.row, run.rows)
    before, drawn = plan.stats(first), documents_drawn(plan, first)
    # ascending rows: each window is counted once
    strange = far_from_asked(mixture, plan, run.counted, run.steps)
    drawn, tally = documents_drawn(plan, run.rows) - drawn, plan.stats(run.rows)
    mixture.remember(plan)
    datasets = _datasets(mixture, plan, before, tally, drawn, range(first, run.rows))
    notes = [
        *run.notes(name, load),
        *_notes(datasets, mixture, plan, tally, whole=run.steps == run.available),
        *strange,
        *late_stages(plan, run.counted, run.steps),
    ]
    if (
        said := unlike_weights(
            mixture, plan, {dataset.name: dataset.requested for dataset in datasets}
        )
    ) is not None:
        notes.append(said)
    if prepared:
        notes.insert(0, f"{', '.join(prepared)}: tokenized for this report")
    slots, padding = tally.slots - before.slots, tally.padding - before.padding
    saved = None
    if saves:
        packed = isinstance(source, PackedShardedSource) and not mixture.endless
        saved = (
            source.shards[0].num_bytes
            if packed
            else sum(cache.total_tokens * cache.buffers().id_bytes for cache in mixture.caches)
        )
    return PlanReport(
        name=name,
        unit=mixture.unit,
        datasets=datasets,
        steps=run.steps - begin.batch,
        steps_available=None if run.available is None else run.available - begin.batch,
        batch_size=load.batch_size,
        rows=run.rows - first,
        rows_left_over=run.left_over,
        seq_length=None if plan.spec.pack is None else plan.spec.pack.seq_length,
        slots=slots,
        padding=padding,
        fill=1 - padding / slots if slots else 1.0,
        cache_bytes=sum(dataset.cache_bytes for dataset in datasets),
        saved_bytes=saved,
        prepared=prepared,
        notes=tuple(notes),
        seconds=time.perf_counter() - began,
        by_step=shares_by_step(plan, mixture, run.counted, run.steps) if by_step else (),
    )


def require_prepared(mixture: Mixture, *, prepare: bool) -> tuple[str, ...]:
    """Opens or makes the token caches; the names of those that were made. Raises CacheError where
    one is missing and `prepare` is False.
    """
    missing = [name for name, part in mixture.parts.items() if not _stands(part)]
    if missing and not prepare:
        raise CacheError(
            at=f"dataset {missing[0]!r}",
            problem="is not tokenized yet"
            + (f", nor are {', '.join(missing[1:])}" if missing[1:] else ""),
            fix="Run `easypipe prepare` first, or allow preparing.",
        )
    _ = mixture.caches
    return tuple(missing)


def is_prepared(source: ShardedSource) -> bool:
    """Whether no token cache that `source` reads has to be made first."""
    mixture = getattr(source, "mixture", None)
    return all(
        _stands(part)
        for part in (mixture.parts.values() if isinstance(mixture, Mixture) else [source])
    )


def _stands(source: ShardedSource) -> bool:
    """Whether its token cache can be opened as it is. A source of one's own that does not say where
    that is has to know itself.
    """
    return not isinstance(source, TokenizedShardedSource | ImportedTokens) or (
        source.writer.is_filled()
    )


@dataclass(frozen=True)
class _Run:
    """The steps and rows of `counted` up to `steps` and `rows`; `available` batches are there, and
    `left_over` rows behind the last.
    """

    counted: Steps
    steps: int
    rows: int
    available: int | None
    left_over: int
    asked: int | None

    @classmethod
    def of(
        cls, load: LoadStageConfig, num_rows: int | None, asked: int | None, begin: Begin
    ) -> _Run:
        counted = Steps(load.batch_size, load.batch_size_schedule, begin)
        if num_rows is None:
            if asked is None:
                raise ConfigError(
                    at="steps",
                    problem="this data never ends",
                    fix="Say how many steps, or set train.steps.",
                )
            return cls(counted, asked, counted.start(asked), None, 0, asked)
        available = max(
            begin.batch, counted.full(num_rows) if load.drop_last else counted.needed(num_rows)
        )
        steps = available if asked is None else min(asked, available)
        left_over = max(0, num_rows - counted.start(available))
        return cls(counted, steps, min(num_rows, counted.start(steps)), available, left_over, asked)

    def notes(self, name: str, load: LoadStageConfig) -> list[str]:
        found = []
        if self.asked is not None and self.available is not None and self.asked > self.available:
            ends = f"{self.asked:,} steps are asked for, the data ends after {self.available:,}"
            found.append(f"{ends}: raise load.num_epochs, or set it to null")
        if self.left_over and self.steps == self.available:
            found.append(
                f"{self.left_over:,} rows at the end fill no batch of {load.batch_size:,} and are left out (load.drop_last)"
            )
        if self.steps == 0:
            found.append(
                f"{name!r} fills no batch of {load.batch_size:,}: nothing would be trained"
            )
        grouped = None if load.group_by_length is None else load.group_by_length * load.batch_size
        shuffled = load.shuffle_buffer_size
        for size, what in (
            (shuffled, "a block of {:,} shuffled rows"),
            (grouped, "a window of {:,} rows grouped by length"),
        ):
            if size is not None and self.rows % size and self.steps != self.available:
                found.append(
                    f"the run ends inside {what.format(size)}; it is counted as if they were in order"
                )
        return found


def _datasets(
    mixture: Mixture,
    plan: Plan,
    before: PlanStats,
    tally: PlanStats,
    drawn: NDArray[np.float64],
    rows: range,
) -> tuple[DatasetPlan, ...]:
    """before, tally: of the rows before `rows`, and of these too. drawn: Float64[k], documents of
    `rows`.
    """
    requested, found = asked_between(mixture, rows.start, rows.stop), []
    placed = sum(part.tokens_placed for part in tally.datasets.values()) - sum(
        part.tokens_placed for part in before.datasets.values()
    )
    for i, (name, cache) in enumerate(zip(mixture.parts, mixture.caches, strict=True)):
        counts, dataset = cache.manifest.counts, plan.datasets[i]
        own = {
            key: getattr(tally.datasets[name], key) - getattr(before.datasets[name], key)
            for key in _COUNTED
        }
        documents, tokens = (
            float(drawn[i] / drawn.sum()) if drawn.any() else 0.0,
            own["tokens_placed"] / placed if placed else 0.0,
        )
        whole = max(round(drawn[i]), int(own["tokens_placed"] > 0))
        found.append(
            DatasetPlan(
                name=name,
                documents=dataset.num_docs,
                tokens=dataset.total_tokens,
                requested=requested[name],
                realised=tokens if mixture.unit == "tokens" else documents,
                document_share=documents,
                token_share=tokens,
                drawn=whole,
                epochs=whole / dataset.num_docs if dataset.num_docs else 0.0,
                tokens_placed=own["tokens_placed"],
                tokens_truncated=own["tokens_truncated"],
                tokens_dropped=own["tokens_dropped"],
                documents_truncated=own["docs_truncated"],
                documents_dropped=own["docs_dropped"],
                documents_empty=own["docs_empty"],
                rejected=dict(counts.rejects),
                tokens_cut=counts.truncated,
                cache_bytes=sum(
                    {part.file: part.num_bytes for part in cache.manifest.parts}.values()
                ),
            )
        )
    return tuple(found)


_COUNTED = (
    "tokens_placed",
    "tokens_truncated",
    "tokens_dropped",
    "docs_truncated",
    "docs_dropped",
    "docs_empty",
)


def _notes(
    datasets: Sequence[DatasetPlan], mixture: Mixture, plan: Plan, tally: PlanStats, *, whole: bool
) -> list[str]:
    """whole: the run goes to the end of the data, but for rows that fill no batch."""
    found = []
    length = None if plan.spec.pack is None else plan.spec.pack.seq_length
    caps = dict(zip(mixture.parts, plan.spec.caps, strict=True))
    for d in datasets:
        if d.never_drawn:
            found.append(
                f"{d.name} is never drawn in this run, its share is {d.requested:.3g}: raise its weight, or leave it out"
            )
        if d.epochs > 1:
            found.append(f"{d.name} is read {d.epochs:.2f} times")
        cap = caps.get(d.name)
        if cap is not None and len(datasets) > 1 and d.epochs >= cap:
            found.append(
                f"{d.name} leaves the mixture after {cap} passes (mix.max_epochs), the others go on by their weights"
            )
        if d.documents_dropped:
            found.append(
                f"{d.name}: {d.documents_dropped:,} documents of {d.tokens_dropped:,} tokens are longer than {length} and dropped"
            )
        if d.documents_truncated:
            found.append(
                f"{d.name}: {d.documents_truncated:,} documents are cut at {length}, {d.tokens_truncated:,} tokens are lost"
            )
        if d.documents_empty:
            found.append(
                f"{d.name}: {d.documents_empty:,} documents without tokens have no place in a packed row"
            )
        if d.tokens_cut:
            found.append(
                f"{d.name}: max_length of the tokenizer cut off {d.tokens_cut:,} tokens when it was prepared"
            )
        if sum(d.rejected.values()):
            reasons = ", ".join(f"{reason} {count:,}" for reason, count in d.rejected.items())
            found.append(f"{d.name}: rows of the source that became no document: {reasons}")
    if whole and mixture.stop == "first_exhausted":
        for name, part in tally.datasets.items():
            if part.unreached:
                every = part.draws + part.unreached
                found.append(
                    f"{name}: {part.unreached:,} of {every:,} documents are not reached: another dataset ends the mixture before"
                )
    if len(datasets) > 1 and mixture.stop == "all_exhausted":
        found.append(
            "stop_strategy all_exhausted draws every document of an epoch once: weights say how early, not how often"
        )
    return found


def _stored(
    name: str,
    source: ShardedSource,
    load: LoadStageConfig,
    steps: int | None,
    saves: bool,
    began: float,
    begin: Begin,
) -> PlanReport:
    """Rows that were saved packed: how many there are and what they hold stands in their
    manifest.
    """
    per_epoch = 0
    for shard in source.shards:
        if shard.num_rows is None:
            raise ConfigError(
                at=shard.name,
                problem="its rows cannot be counted",
                fix="Save it as parquet or arrow.",
            )
        per_epoch += shard.num_rows
    run = _Run.of(
        load, None if load.num_epochs is None else per_epoch * load.num_epochs, steps, begin
    )
    info = token_info(source)
    length = None if info is None else info.seq_length
    full = isinstance(source, SavedSource)
    tokens = sum(shard.num_tokens for shard in source.manifest.shards) if full else 0
    rows = run.rows - min(begin.row, run.rows)
    slots = rows * (length or 0)
    placed = tokens * rows // per_epoch if per_epoch else 0
    num_bytes = sum(shard.num_bytes for shard in source.shards)
    dataset = DatasetPlan(
        name=name, documents=per_epoch, tokens=tokens, requested=1.0, realised=1.0, document_share=1.0, token_share=1.0, drawn=rows,
        epochs=rows / per_epoch if per_epoch else 0.0, tokens_placed=placed, cache_bytes=num_bytes,
    )  # fmt: skip
    notes = run.notes(name, load)
    notes.append(
        "rows are packed already: documents are rows here, and tokens of a part of an epoch are estimated from their mean"
    )
    if not full:
        notes.append("nobody recorded how many tokens these rows hold")
    return PlanReport(
        name=name,
        unit="rows",
        datasets=(dataset,),
        steps=run.steps - begin.batch,
        steps_available=None if run.available is None else run.available - begin.batch,
        batch_size=load.batch_size,
        rows=rows,
        rows_left_over=run.left_over,
        seq_length=length,
        slots=slots,
        padding=slots - placed if full and slots else 0,
        fill=placed / slots if full and slots else 1.0,
        cache_bytes=num_bytes,
        saved_bytes=num_bytes if saves else None,
        prepared=(),
        notes=tuple(notes),
        seconds=time.perf_counter() - began,
    )


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"


def joined(
    reports: Sequence[PlanReport], which: Sequence[str], notes: Sequence[str] = ()
) -> PlanReport:
    """One report of a run whose parts were planned one by one, its data having changed between
    them.

    which: the steps of each part, in words. Counts add up; of what is no count (what a dataset
    holds, sizes of batches and files) the last part tells. requested: the mean over the rows of all
    parts.
    """
    last, rows = reports[-1], sum(report.rows for report in reports)
    names = list(
        dict.fromkeys(dataset.name for report in reversed(reports) for dataset in report.datasets)
    )
    parts = {
        name: [(report, one) for report in reports for one in report.datasets if one.name == name]
        for name in names
    }
    added = {
        name: {
            key: sum(getattr(one, key) for _, one in found) for key in ("drawn", "epochs", *_ADDED)
        }
        for name, found in parts.items()
    }
    drawn, placed = (
        max(1, sum(counts[key] for counts in added.values())) for key in ("drawn", "tokens_placed")
    )
    datasets = []
    for name, found in parts.items():
        counts, requested = (
            added[name],
            sum(one.requested * report.rows for report, one in found) / max(1, rows),
        )
        documents, tokens = counts["drawn"] / drawn, counts["tokens_placed"] / placed
        shares = {"requested": requested, "document_share": documents, "token_share": tokens}
        realised = tokens if last.unit == "tokens" else documents
        datasets.append(dataclasses.replace(found[-1][1], **counts, **shares, realised=realised))
    slots, padding = (
        sum(report.slots for report in reports),
        sum(report.padding for report in reports),
    )
    before = sum(report.steps for report in reports[:-1])
    said: dict[str, list[str]] = {}
    for report, steps in zip(reports, which, strict=True):
        for note in report.notes:
            said.setdefault(note, []).append(steps)
    told = [
        note if len(of) == len(reports) else f"{', '.join(of)}: {note}" for note, of in said.items()
    ]
    return dataclasses.replace(
        last,
        datasets=tuple(datasets),
        steps=before + last.steps,
        steps_available=None if last.steps_available is None else before + last.steps_available,
        rows=rows,
        slots=slots,
        padding=padding,
        fill=1 - padding / slots if slots else 1.0,
        cache_bytes=sum(dataset.cache_bytes for dataset in datasets),
        prepared=tuple(dict.fromkeys(name for report in reports for name in report.prepared)),
        notes=(*notes, *told),
        seconds=sum(report.seconds for report in reports),
        by_step=tuple(one for report in reports for one in report.by_step),
    )


_ADDED = (
    "tokens_placed", "tokens_truncated", "tokens_dropped", "documents_truncated", "documents_dropped", "documents_empty",
)  # fmt: skip
