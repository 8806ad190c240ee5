"""PlanReport: what a run would do and notes on it, only from lengths, weights and row counts.

In this file:
    step: One batch. A run has as many as are requested, or as the data has.
    draw: A document taken for the run; a dataset that is drawn more often than it has documents
        begins its next epoch.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from easypipe.core.errors import CacheError, ConfigError, require
from easypipe.core.protocols import PipelineContext, ShardedSource, info_of
from easypipe.core.schema import LOSS_MASK, SEGMENT_IDS
from easypipe.core.values import JsonObject
from easypipe.loader.config import MOST_EPOCHS, LoadStageConfig
from easypipe.loader.steps import Begin, Steps
from easypipe.plan.plan_stats import PlanStats
from easypipe.plan.windows import Plan
from easypipe.stages.load.stage import LoadStage, as_planned
from easypipe.stages.mix.mixture import Mixture, planned_of
from easypipe.stages.reports.cuts import cut_by, length_beyond
from easypipe.stages.reports.shares import (
    StepShares,
    asked_between,
    documents_drawn,
    far_from_asked,
    late_stages,
    shares_by_step,
    unlike_weights,
)
from easypipe.stages.tokenize.documents import (
    cached_of,
    require_tokens,
    token_info,
)


@dataclass(frozen=True, kw_only=True)
class DatasetPlan:
    """One dataset over the run.

    Attributes:
        documents, tokens: The size of the dataset, including the EOS that packing adds.
        requested: The share by the weights; the mean over the run if they follow the step.
        realised: document_share or token_share, depending on the unit of the weights (mix.unit).
        document_share, token_share: Its shares of the documents and tokens of the run.
        drawn: Documents of the run. A document that is cut counts with the part in the run's rows;
            a dataset with any token there has at least 1.
        epochs: How often each document is drawn on average.
        tokens_placed: Tokens in the run's rows.
        documents_truncated, tokens_truncated: Documents longer than a row and the tokens they lose.
            These, and dropped or empty documents, are counted by whole windows of the plan.
        documents_dropped, tokens_dropped: Documents longer than a row that are left out.
        documents_empty: Documents without a token.
        rejected: Source rows that did not become a document, by reason.
        tokens_cut: Tokens of the whole dataset that were left out when it was tokenized: by
            max_length, `length` or cuts between turns.
        cache_bytes: The size of its token cache on this disk.
    """

    name: str
    documents: int
    tokens: int
    requested: float = 1.0
    realised: float = 1.0
    document_share: float = 1.0
    token_share: float = 1.0
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
    """What a run of `steps` batches over `rows` rows would do.

    Args:
        unit: What weights and realized shares count: documents ("rows"), or "tokens".
        steps_available: Batches of the data; None if it never ends.
        sizes: The sizes of the batches in order, as (steps, rows of each).
        rows_left_over: Rows at the end of the data that do not fill a batch.
        seq_lengths: The slots of rows in each part of a run that changed them; else ().
        slots: Tokens and padding; `fill` is the share that holds tokens.
        saved_bytes: Bytes that save() would write before compression, for one epoch; None without
            save().
        prepared: Datasets that were tokenized for this report.
        notes: What to know before starting.
    """

    name: str
    unit: str = "rows"
    datasets: tuple[DatasetPlan, ...] = ()
    steps: int
    steps_available: int | None
    batch_size: int
    sizes: tuple[tuple[int, int], ...] = ()
    rows: int
    rows_left_over: int
    seq_length: int | None = None
    seq_lengths: tuple[int, ...] = ()
    slots: int = 0
    padding: int = 0
    fill: float = 1.0
    cache_bytes: int = 0
    saved_bytes: int | None = None
    prepared: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    by_step: tuple[StepShares, ...] = ()  # if requested

    def to_json(self) -> JsonObject:
        """Returns the report as plain dicts, lists and numbers."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        """Returns the report as a readable table."""
        head = ["dataset", "documents", "tokens", f"asked ({self.unit})", "realised", "of tokens"]
        head += ["drawn", "epochs", "cache"]
        lines = [head]
        for d in self.datasets:
            counts = [f"{count:,}" for count in (d.documents, d.tokens)]
            shares = [f"{share:.4%}" for share in (d.requested, d.realised, d.token_share)]
            drawn = [f"{d.drawn:,}", f"{d.epochs:.3f}", megabytes(d.cache_bytes)]
            lines.append([d.name, *counts, *shares, *drawn])
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = [
            "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])])
            for line in lines
        ]
        ends = "never ends"
        if self.steps_available is not None:
            ends = f"the data gives {self.steps_available:,}"
        slots = "documents as rows"
        if self.seq_length is not None:
            slots = f"of {row_lengths(self)} slots, {self.fill:.3%} filled"
        sizes = f" of {self.batch_size:,} rows"
        if len(self.sizes) > 1:
            sizes = ": " + ", ".join(f"{steps:,} of {rows:,} rows" for steps, rows in self.sizes)
        saved = ""
        if self.saved_bytes is not None:
            saved = f", {megabytes(self.saved_bytes)} to save, before compression"
        text += [
            f"steps   {self.steps:,}{sizes} ({ends})",
            f"rows    {self.rows:,} {slots}; {self.rows_left_over:,} left over at the end",
            f"tokens  {self.slots - self.padding:,}, and {self.padding:,} slots of padding",
            f"disk    {megabytes(self.cache_bytes)} of token cache{saved}",
        ]
        return "\n".join(text + [f"note    {note}" for note in self.notes])


def row_lengths(plan: PlanReport) -> str:
    """Returns the slots of a row as text; in a run that changed them, those of each part."""
    return " or ".join(f"{length:,}" for length in plan.seq_lengths or (plan.seq_length or 0,))


class Asked(NamedTuple):
    """What a report should contain.

    Attributes:
        steps: The steps of the run; None: as many as the data has.
        prepare: Whether to tokenize what is not tokenized yet; False raises CacheError instead.
        saves: Whether to report what save() would write.
        by_step: Whether to report what each part of the run draws; this plans every window again.
        begin: The step and row at which a run continues; earlier steps are not counted.
    """

    steps: int | None = None
    prepare: bool = True
    saves: bool = False
    by_step: bool = False
    begin: Begin = Begin()


def plan_report(
    name: str, source: ShardedSource, load: LoadStageConfig, context: PipelineContext, asked: Asked
) -> PlanReport:
    """Returns the report of a run that reads `source` with the options `load`.

    Raises:
        ConfigError: The data never ends, and no steps are given.
        StageOrderError: The rows are text.
    """
    began = time.perf_counter()
    require(
        asked.steps is None or asked.steps >= 1,
        "steps",
        f"{asked.steps} steps are not a run",
        "Give at least 1.",
    )
    if SEGMENT_IDS in source.schema.names and planned_of(source) is None:
        report = _stored(name, source, load, asked)
    else:
        require_tokens(name, source, "plan")
        require(
            not context.config.streaming,
            "streaming",
            "streamed data is not counted before it is read, and a plan needs the counts",
            "Leave it out to plan over the token cache.",
        )
        report = _planned(name, source, load, context, asked)
    return dataclasses.replace(
        report,
        fill=1 - report.padding / report.slots if report.slots else 1.0,
        cache_bytes=sum(dataset.cache_bytes for dataset in report.datasets),
        seconds=time.perf_counter() - began,
    )


def _planned(
    name: str, source: ShardedSource, load: LoadStageConfig, context: PipelineContext, asked: Asked
) -> PlanReport:
    """Reports on rows that are planned over token caches."""
    # weights that follow the step need the number of rows of a step
    source = LoadStage(load).process({name: source}, context)[name]
    planned = as_planned(name, source, context, stage="plan")
    mixture, packed = planned.mixture, planned.packing is not None
    prepared = require_prepared(mixture, prepare=asked.prepare)
    num_epochs = None if mixture.restarts else load.num_epochs
    plan = planned.plan(num_epochs)
    run = _Run.of(load, plan.num_rows, asked)
    start, stop = run.reached.start, run.reached.stop
    _require_few_passes(mixture, plan, stop)
    drawn = documents_drawn(plan, start)
    # Rows are read in ascending order, so that each window is counted once.
    strange = far_from_asked(mixture, plan, run.counted, run.steps)
    drawn, stats = documents_drawn(plan, stop) - drawn, plan.stats(stop, start)
    mixture.remember(plan)
    requested = asked_between(mixture, start, stop)
    datasets = _datasets(mixture, plan, stats, drawn.tolist(), requested)
    notes = [f"{', '.join(prepared)}: tokenized for this report"] if prepared else []
    notes += run.notes(name)
    notes += [note for d in datasets for note in _dataset_notes(d, mixture, plan, run.steps)]
    notes += _mixture_notes(mixture, stats, whole=run.steps == run.available)
    if packed and planned.rows(num_epochs).hold and not mixture.paired:
        notes += _continued_notes(mixture, stats)
    notes += [*strange, *late_stages(plan, run.counted, run.steps)]
    if (said := unlike_weights(mixture, plan, requested)) is not None:
        notes.append(said)
    saved = None
    if asked.saves:
        saved = sum(cache.total_tokens * cache.buffers().id_bytes for cache in mixture.prepare())
        if packed and not mixture.endless:
            saved = planned.prepare().shards[0].num_bytes
    return dataclasses.replace(
        run.report(name),
        unit=mixture.spec.unit,
        datasets=datasets,
        seq_length=None if plan.spec.pack is None else plan.spec.pack.seq_length,
        slots=stats.slots,
        padding=stats.padding,
        saved_bytes=saved,
        notes=tuple(notes),
        prepared=prepared,
        by_step=shares_by_step(plan, mixture, run.counted, run.steps) if asked.by_step else (),
    )


def _require_few_passes(mixture: Mixture, plan: Plan, rows: int) -> None:
    """Checks that planning `rows` rows takes at most minutes."""
    pack, caches = plan.spec.pack, mixture.prepare()
    tokens = sum(cache.total_tokens for cache in caches)
    documents = sum(cache.num_docs for cache in caches)
    passes = rows / max(documents, 1) if pack is None else rows * pack.seq_length / max(tokens, 1)
    require(
        passes <= MOST_EPOCHS,
        "steps",
        f"they are about {passes:.3g} passes over this data, too many to plan and count",
        f"Give steps for at most {MOST_EPOCHS:,} passes.",
    )


def _stored(name: str, source: ShardedSource, load: LoadStageConfig, asked: Asked) -> PlanReport:
    """Reports on rows that were saved packed, which their manifest counts."""
    per_epoch = 0
    for shard in source.shards:
        if shard.num_rows is None:
            raise ConfigError(
                at=shard.name,
                problem="its rows cannot be counted",
                fix="Save it as parquet or arrow.",
            )
        per_epoch += shard.num_rows
    run = _Run.of(load, None if load.num_epochs is None else per_epoch * load.num_epochs, asked)
    info, rows = token_info(source), len(run.reached)
    length = None if info is None else info.seq_length
    counted = info_of(source).num_tokens
    tokens = counted or 0
    placed, slots = tokens * rows // per_epoch if per_epoch else 0, rows * (length or 0)
    num_bytes = sum(shard.num_bytes for shard in source.shards)
    dataset = DatasetPlan(
        name=name,
        documents=per_epoch,
        tokens=tokens,
        drawn=rows,
        epochs=rows / per_epoch if per_epoch else 0.0,
        tokens_placed=placed,
        cache_bytes=num_bytes,
    )
    notes = [
        *run.notes(name),
        "rows are packed already: documents are rows here, and tokens of a part of an epoch are "
        "estimated from their mean",
        *([] if counted is not None else ["how many tokens these rows hold was not recorded"]),
    ]
    return dataclasses.replace(
        run.report(name),
        datasets=(dataset,),
        seq_length=length,
        slots=slots,
        padding=slots - placed if counted is not None else 0,
        saved_bytes=num_bytes if asked.saves else None,
        notes=tuple(notes),
    )


def require_prepared(mixture: Mixture, *, prepare: bool) -> tuple[str, ...]:
    """Opens or makes the token caches, and returns the names of the datasets that had none.

    Raises:
        CacheError: A cache is missing, and `prepare` is False.
    """
    missing = [name for name, part in mixture.parts.items() if not _stands(part)]
    if missing and not prepare:
        first, others = cached_of(mixture.parts[missing[0]]), ", ".join(missing[1:])
        kept = first is None or not first.writer.folder.temporary
        raise CacheError(
            at=f"dataset {missing[0]!r}",
            problem="is not tokenized yet" + (f", nor are {others}" if others else ""),
            fix="Run `easypipe prepare` first, or allow preparing."
            if kept
            else "Allow preparing: its tokens are not kept for another process.",
        )
    mixture.prepare()
    return tuple(missing)


def is_prepared(source: ShardedSource) -> bool:
    """Whether every token cache that `source` reads exists."""
    planned = planned_of(source)
    return all(map(_stands, planned.mixture.parts.values() if planned else [source]))


def _stands(source: ShardedSource) -> bool:
    """Whether the source's token cache, if easypipe makes it, is complete."""
    cached = cached_of(source)
    return cached is None or cached.writer.is_filled()


@dataclass(frozen=True)
class _Run:
    """The steps of `counted` up to `steps`, over the rows `reached` of the data.

    The data has `available` batches, and `left_over` rows after the last one.
    """

    load: LoadStageConfig
    counted: Steps
    steps: int
    reached: range
    available: int | None
    left_over: int
    asked: int | None

    @classmethod
    def of(cls, load: LoadStageConfig, num_rows: int | None, asked: Asked) -> _Run:
        """Counts the steps and rows of a run over `num_rows` rows (None: endless)."""
        counted = Steps(load.batch_size, load.batch_size_schedule, asked.begin)
        available, left_over, steps = None, 0, asked.steps
        if num_rows is not None:
            there = counted.full(num_rows) if load.drop_last else counted.needed(num_rows)
            available = max(asked.begin.batch, there)
            steps = available if steps is None else min(steps, available)
            left_over = max(0, num_rows - counted.start(available))
        if steps is None:
            raise ConfigError(
                at="steps",
                problem="this data never ends",
                fix="Say how many steps, or set train.steps.",
            )
        stop = counted.start(steps) if num_rows is None else min(num_rows, counted.start(steps))
        reached = range(min(asked.begin.row, stop), stop)
        return cls(load, counted, steps, reached, available, left_over, asked.steps)

    def report(self, name: str) -> PlanReport:
        """Returns a report of what is known without reading the data."""
        begin = self.counted.begin.batch
        return PlanReport(
            name=name,
            steps=self.steps - begin,
            steps_available=None if self.available is None else self.available - begin,
            batch_size=self.load.batch_size,
            sizes=self.counted.counts(self.steps),
            rows=len(self.reached),
            rows_left_over=self.left_over,
        )

    def notes(self, name: str) -> Iterator[str]:
        """Yields notes on how the steps fit the data."""
        load, size = self.load, self.load.batch_size
        if self.asked is not None and self.available is not None and self.asked > self.available:
            yield (
                f"{self.asked:,} steps are asked for, the data ends after {self.available:,}: "
                "raise load.num_epochs, or set it to null (and raise mix.max_epochs, if it is set)"
            )
        if self.left_over and self.steps == self.available:
            yield (
                f"{self.left_over:,} rows at the end fill no batch of {size:,} "
                "and are left out (load.drop_last)"
            )
        if self.steps == 0:
            yield (
                f"{name!r} fills no batch of {size:,}: nothing would be trained; set "
                "load.batch_size lower, or load.num_epochs to null for passes without end"
            )
        shuffled, grouped = load.shuffle_buffer_size, (load.group_by_length or 0) * size
        for rows, what in (
            (shuffled, f"a block of {shuffled or 0:,} shuffled rows"),
            (grouped, f"a window of {grouped:,} rows grouped by length"),
        ):
            if rows and self.reached.stop % rows and self.steps != self.available:
                yield f"the run ends inside {what}; it is counted as if they were in order"


def _datasets(
    mixture: Mixture,
    plan: Plan,
    stats: PlanStats,
    drawn: Sequence[float],
    requested: Mapping[str, float],
) -> tuple[DatasetPlan, ...]:
    """Returns the report of each dataset; `drawn` counts documents in the rows of `stats`."""
    found, placed = [], stats.slots - stats.padding
    for dataset, cache, documents in zip(plan.datasets, mixture.prepare(), drawn, strict=True):
        counts, part = cache.manifest.counts, stats.datasets[dataset.name]
        document_share = documents / sum(drawn) if documents else 0.0
        token_share = part.tokens_placed / placed if placed else 0.0
        whole = max(round(documents), int(part.tokens_placed > 0))
        found.append(
            DatasetPlan(
                name=dataset.name,
                documents=dataset.num_docs,
                tokens=dataset.total_tokens,
                requested=requested[dataset.name],
                realised=token_share if mixture.spec.unit == "tokens" else document_share,
                document_share=document_share,
                token_share=token_share,
                drawn=whole,
                epochs=whole / dataset.num_docs if dataset.num_docs else 0.0,
                tokens_placed=part.tokens_placed,
                tokens_truncated=part.tokens_truncated,
                tokens_dropped=part.tokens_dropped,
                documents_truncated=part.docs_truncated,
                documents_dropped=part.docs_dropped,
                documents_empty=part.docs_empty,
                rejected=dict(counts.rejects),
                tokens_cut=counts.truncated,
                cache_bytes=sum(
                    {part.file: part.num_bytes for part in cache.manifest.parts}.values()
                ),
            )
        )
    return tuple(found)


def _dataset_notes(d: DatasetPlan, mixture: Mixture, plan: Plan, steps: int) -> list[str]:
    """Returns notes on one dataset."""
    length = None if plan.spec.pack is None else plan.spec.pack.seq_length
    cap = dict(zip(mixture.parts, plan.spec.caps, strict=True))[d.name]
    gone = d.documents_dropped and not d.tokens_placed
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in d.rejected.items())
    cuts = dict(zip(mixture.parts, mixture.prepare(), strict=True))[d.name].manifest.counts
    beyond = length_beyond(mixture.parts[d.name], cuts)
    each = ", more than once a step: fewer or shorter rows are faster" if d.epochs > steps else ""
    again = ", counted in each pass" if d.epochs > 1 else ""
    notes = (
        (
            steps and d.never_drawn and not d.documents_dropped,
            f"{d.name} is never drawn in this run, its share is {d.requested:.3g}: "
            "raise its weight, give more steps, or leave it out",
        ),
        (gone, f"no document of {d.name} has a place in this run: all that are drawn are dropped"),
        (d.epochs > 1 and not gone, f"{d.name} is read {d.epochs:.2f} times{each}"),
        (
            cap is not None and len(mixture.parts) > 1 and d.epochs >= cap,
            f"{d.name} leaves the mixture after {cap} passes (mix.max_epochs), "
            "the others go on by their weights",
        ),
        (
            d.documents_dropped,
            f"{d.name}: {d.documents_dropped:,} documents of {d.tokens_dropped:,} tokens are "
            f"longer than {length} and dropped{again}",
        ),
        (
            d.documents_truncated,
            f"{d.name}: {d.documents_truncated:,} documents are cut at {length}, "
            f"{d.tokens_truncated:,} tokens are lost{again}",
        ),
        (
            d.documents_empty,
            f"{d.name}: {d.documents_empty:,} documents without tokens "
            "have no place in a packed row",
        ),
        (
            d.tokens_cut,
            f"{d.name}: {cut_by(cuts)} {d.tokens_cut:,} tokens when it was prepared",
        ),
        (
            beyond is not None,
            f"{d.name}: no document is longer than max_length ({beyond}), so it has no effect",
        ),
        (
            sum(d.rejected.values()),
            f"{d.name}: rows of the source that became no document: {reasons}",
        ),
    )
    return [note for holds, note in notes if holds]


def _mixture_notes(mixture: Mixture, stats: PlanStats, *, whole: bool) -> list[str]:
    """Returns notes on the mixture.

    `whole` says that the run reaches the end of the data, except rows that do not fill a batch.
    """
    found = []
    if whole and mixture.spec.stop == "first_exhausted":
        found += [
            f"{name}: {part.unreached:,} of {part.passes * part.num_docs:,} documents are not "
            "reached: another dataset ends the mixture before"
            for name, part in stats.datasets.items()
            if part.unreached
        ]
    if len(mixture.parts) > 1 and mixture.spec.stop == "all_exhausted":
        found.append(
            "stop_strategy all_exhausted draws every document of an epoch once: "
            "weights say how early, not how often"
        )
    return found


def _continued_notes(mixture: Mixture, stats: PlanStats) -> list[str]:
    """Returns notes on datasets with loss masks if their documents are cut at the ends of rows."""
    found = []
    for (name, part), cache in zip(stats.datasets.items(), mixture.prepare(), strict=True):
        pieces = part.segments - part.docs_placed
        if pieces > 0 and LOSS_MASK in cache.schema.names:
            found.append(
                f"{name}: {pieces:,} pieces go on with a document of another row; those whose "
                "document begins with a prompt have no targets (the ledger's 'without their "
                "prompt'): raise pack.seq_length, or set pack.train_continued"
            )
    return found


def megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"


def joined(
    reports: Sequence[PlanReport], which: Sequence[str], notes: Sequence[str] = ()
) -> PlanReport:
    """Joins the reports of the parts of a run whose data changed between them.

    Counts are added, and `requested` is the mean over the rows of all parts. Other values (sizes of
    datasets, batches and files) are those of the last part.

    Args:
        reports: The reports of the parts.
        which: The steps of each part, in words.
        notes: Additional notes.
    """
    last, datasets = reports[-1], _joined_datasets(reports)
    said: dict[str, list[str]] = {}
    for report, steps in zip(reports, which, strict=True):
        for note in report.notes:
            said.setdefault(note, []).append(steps)
    told = [
        # a note on a stage of a schedule already names its steps
        note if len(of) == len(reports) or note.startswith("steps ") else f"{', '.join(of)}: {note}"
        for note, of in said.items()
    ]
    before = sum(report.steps for report in reports[:-1])
    lengths = tuple(dict.fromkeys(r.seq_length for r in reports if r.rows and r.seq_length))
    sizes = itertools.groupby((one for r in reports for one in r.sizes), lambda one: one[1])
    slots, padding = (
        sum(each) for each in zip(*((r.slots, r.padding) for r in reports), strict=True)
    )
    return dataclasses.replace(
        last,
        datasets=datasets,
        steps=before + last.steps,
        steps_available=None if last.steps_available is None else before + last.steps_available,
        sizes=tuple((sum(steps for steps, _ in same), size) for size, same in sizes),
        rows=sum(report.rows for report in reports),
        seq_lengths=lengths if len(lengths) > 1 else (),
        slots=slots,
        padding=padding,
        fill=1 - padding / slots if slots else 1.0,
        cache_bytes=sum(dataset.cache_bytes for dataset in datasets),
        prepared=tuple(dict.fromkeys(name for report in reports for name in report.prepared)),
        notes=(*notes, *told),
        seconds=sum(report.seconds for report in reports),
        by_step=tuple(one for report in reports for one in report.by_step),
    )


def _joined_datasets(reports: Sequence[PlanReport]) -> tuple[DatasetPlan, ...]:
    """Joins the datasets of all parts; those of the last part come first."""
    rows, by_tokens = sum(report.rows for report in reports), reports[-1].unit == "tokens"
    parts: dict[str, list[tuple[int, DatasetPlan]]] = {  # each with the rows of the part
        dataset.name: [] for report in reversed(reports) for dataset in report.datasets
    }
    for report in reports:
        for dataset in report.datasets:
            parts[dataset.name].append((report.rows, dataset))
    added = {
        name: {key: sum(dataclasses.asdict(one)[key] for _, one in found) for key in _COUNTS}
        for name, found in parts.items()
    }
    drawn, placed = (
        max(1, sum(counts[key] for counts in added.values())) for key in ("drawn", "tokens_placed")
    )
    datasets = []
    for name, found in parts.items():
        counts = added[name]
        documents, tokens = counts["drawn"] / drawn, counts["tokens_placed"] / placed
        joined_one = dataclasses.replace(
            found[-1][1],
            requested=sum(one.requested * count for count, one in found) / max(1, rows),
            realised=tokens if by_tokens else documents,
            document_share=documents,
            token_share=tokens,
            **counts,
        )
        datasets.append(joined_one)
    return tuple(datasets)


# the counts of a dataset that add up over the parts of a run
_COUNTS = ["drawn", "epochs", "tokens_placed", "tokens_truncated", "tokens_dropped"]
_COUNTS.extend(["documents_truncated", "documents_dropped", "documents_empty"])
