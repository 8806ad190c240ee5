"""Finds the documents of a batch from its number, with their text and the part that it holds.

step     a batch, counted from 0
row      a row of the batch, counted from 0; `number` is its row of the run
segment  consecutive tokens of one document in a row, numbered from 1 as in `segment_ids`
masked   said of a token that is not a target: its loss_mask is 0
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from easypipe.core.aligned import DESIRABLE
from easypipe.core.errors import ConfigError, PlanError, TokenizerError
from easypipe.core.schema import INPUT_IDS, LOSS_MASK, SEGMENT_IDS
from easypipe.core.values import Bools, Int32, Int64, JsonObject
from easypipe.core.visible import visible
from easypipe.loader.rows.planned import PlannedRows
from easypipe.loader.rows.ranks import innermost
from easypipe.loader.rows.rows import Rows
from easypipe.loader.rows.stored import StoredRows


class Decodes(Protocol):
    """A tokenizer, as far as it decodes."""

    def decode(self, ids: Sequence[int], /) -> str: ...


# Maps a dataset to the tokenizer of its tokens; raises TokenizerError if there is none.
Decoder = Callable[[str], Decodes]


@dataclass(frozen=True, kw_only=True)
class Span:
    """The text of consecutive tokens that are all masked, or all unmasked."""

    text: str
    masked: bool


@dataclass(frozen=True, kw_only=True)
class Segment:
    """The document tokens in slots `slot_start` to `slot_stop` of a row.

    For packed rows that were saved, file and row are those of the saved shard, and the dataset is
    known if mix.provenance saved it.

    Args:
        dataset: The dataset that the document came from.
        file: The file that it came from.
        row: Its row in the file.
        document: Its number within the dataset; None for saved rows.
        token_start: The first of its `document_tokens` stored tokens in this row.
        token_stop: The token after the last one in this row.
        ends_with_eos: Whether one more token follows, which packing added.
        desirable: The verdict on its answer; None if the rows have none.
        spans: The decoded text; None if there is no tokenizer.
    """

    segment: int
    slot_start: int
    slot_stop: int
    dataset: str
    file: str
    row: int
    document: int | None
    token_start: int
    token_stop: int
    document_tokens: int | None
    ends_with_eos: bool
    masked_tokens: int
    desirable: bool | None
    ids: tuple[int, ...]
    spans: tuple[Span, ...] | None

    @property
    def is_part(self) -> bool:
        """Whether the segment is not the whole document."""
        return (
            self.document_tokens is not None
            and self.token_stop - self.token_start < self.document_tokens
        )

    @property
    def title(self) -> str:
        """One line that says where the segment is, and where it came from."""
        of = f" of {self.document_tokens}" if self.document_tokens is not None else ""
        eos = " and EOS" if self.ends_with_eos else ""
        masked = f", {self.masked_tokens} masked" if self.masked_tokens else ""
        dataset = f"{self.dataset}, " if self.dataset else ""
        verdict = {True: ", desirable", False: ", not desirable", None: ""}[self.desirable]
        return visible(
            f"[{self.segment}] slots {self.slot_start}:{self.slot_stop}  {dataset}{self.file}, row "
            f"{self.row}, "
            f"tokens {self.token_start}:{self.token_stop}{of}{eos}{masked}{verdict}"
        )

    @property
    def text(self) -> str | None:
        return None if self.spans is None else "".join(span.text for span in self.spans)


@dataclass(frozen=True, kw_only=True)
class ExplainedRow:
    """Row `row` of the batch, which is row `number` of the run.

    `window` is a window of the plan; None for saved rows.
    """

    row: int
    number: int
    epoch: int
    window: int | None
    slots: int
    padding: int
    segments: tuple[Segment, ...]

    @property
    def title(self) -> str:
        """One line that says which row of the run it is, and how full it is."""
        window = "" if self.window is None else f", window {self.window}"
        return (
            f"row {self.row}: row {self.number:,} of the run, epoch {self.epoch}{window}; "
            f"{len(self.segments)} segments, "
            f"{self.padding} of {self.slots} slots padding"
        )


@dataclass(frozen=True, kw_only=True)
class ExplainedBatch:
    """The documents of batch `step`, row by row."""

    step: int
    rows: tuple[ExplainedRow, ...]
    notes: tuple[str, ...] = ()  # what is not known, and why

    def to_json(self) -> JsonObject:
        """Returns plain dicts, lists and numbers."""
        return dataclasses.asdict(self)


# Takes a segment and its slots, and returns what is known about it without its tokens.
_Place = Callable[[int, slice], JsonObject]


def explain_rows(
    rows: Rows,
    step: int,
    numbers: Int64,
    chosen: Sequence[int],
    decoder: Decoder | None,
) -> ExplainedBatch:
    """Explains the rows `chosen` of a batch.

    Args:
        rows: The rows of the loader.
        step: The number of the batch.
        numbers: Int64[n], the row of the run of every row of the batch.
        chosen: The rows of the batch to explain.
        decoder: The tokenizer of each dataset; None: without text.

    Raises:
        ConfigError: The rows do not say where they come from.
    """
    notes: list[str] = []
    texts = _Texts(decoder, notes)
    return ExplainedBatch(
        step=step,
        rows=tuple(_row(rows, row, int(numbers[row]), texts) for row in chosen),
        notes=tuple(notes),
    )


def _row(rows: Rows, row: int, number: int, texts: _Texts) -> ExplainedRow:
    # Transforms never change which document a token belongs to.
    """Explains one row of a batch, which is row `number` of the run."""
    laid, there = innermost(rows, number)
    if isinstance(laid, PlannedRows):
        epoch, window, starts, place = _planned(laid, there)
    elif isinstance(laid, StoredRows):
        starts = []
        epoch, window, place = _stored(laid, there)
    else:
        raise ConfigError(
            at="explain", problem=f"rows of {type(rows).__name__} do not say where they come from"
        )
    columns = {
        name: values[0]
        for name, values in rows.open().gather(np.array([number], dtype=np.int64)).items()
    }
    ids, segments = columns[INPUT_IDS], columns[SEGMENT_IDS]
    masked = (columns[LOSS_MASK] == 0) if LOSS_MASK in columns else np.zeros(len(ids), np.bool_)
    verdicts = columns.get(DESIRABLE.name)
    begins = np.diff(segments, prepend=-1, append=-1) != 0
    begins[starts] = True  # in "concat" rows of one segment, documents begin within it
    edges = np.flatnonzero(begins)
    made = []
    for start, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        segment = int(segments[start])
        if segment:
            about = place(segment, slice(start, stop))
            here = ids[start:stop]
            made.append(
                Segment(
                    segment=segment,
                    slot_start=start,
                    slot_stop=stop,
                    masked_tokens=int(masked[start:stop].sum()),
                    desirable=None if verdicts is None else bool(verdicts[start] > 0),
                    ids=tuple(here.tolist()),
                    spans=texts.spans(about["dataset"], here, masked[start:stop]),
                    **about,
                )
            )
    padding = int((segments == 0).sum())
    return ExplainedRow(
        row=row,
        number=number,
        epoch=epoch,
        window=window,
        slots=len(ids),
        padding=padding,
        segments=tuple(made),
    )


def _planned(rows: PlannedRows, number: int) -> tuple[int, int, list[int], _Place]:
    """Returns (epoch, window, slots at which pieces begin, place) of a row of a plan."""
    found = rows.plan.locate(number)
    pieces = found.pieces

    def place(segment: int, slots: slice) -> JsonObject:
        at = int(np.searchsorted(pieces.slot, slots.start, side="right")) - 1
        dataset, doc, length = (int(of[at]) for of in (pieces.dataset, pieces.doc, pieces.length))
        # further than the piece's start if a pair's second half begins here
        start = int(pieces.start[at]) + slots.start - int(pieces.slot[at])
        stop = start + slots.stop - slots.start
        assert stop <= pieces.start[at] + length, "the plan says what is gathered"
        cache = rows.caches[dataset]
        file, row = cache.where(doc)
        stored = int(cache.lengths(np.array([doc]))[0])
        return {
            "dataset": rows.plan.datasets[dataset].name,
            "file": file,
            "row": row,
            "document": doc,
            "token_start": start,
            "token_stop": min(stop, stored),
            "document_tokens": stored,
            "ends_with_eos": stop > stored,
        }

    return found.epoch, found.window, pieces.slot.tolist(), place


def _stored(rows: StoredRows, number: int) -> tuple[int, None, _Place]:
    """Returns (epoch, None, place) of a saved row."""
    epoch, file, row, datasets = rows.where(number)

    def place(segment: int, slots: slice) -> JsonObject:
        length = slots.stop - slots.start
        return {
            "dataset": datasets[segment - 1] if segment <= len(datasets) else "",
            "file": file,
            "row": row,
            "document": None,
            "token_start": 0,
            "token_stop": length,
            "document_tokens": None,
            "ends_with_eos": False,
        }

    return epoch, None, place


class _Texts:
    """Decodes text if there is a tokenizer; otherwise it adds one note for each dataset."""

    def __init__(self, decoder: Decoder | None, notes: list[str]) -> None:
        self._decoder, self._notes = decoder, notes
        self._known: dict[str, Decodes | None] = {}

    def spans(self, dataset: str, ids: Int32, masked: Bools) -> tuple[Span, ...] | None:
        tokenizer = self._tokenizer(dataset)
        if tokenizer is None:
            return None
        edges = [0, *(np.flatnonzero(np.diff(masked)) + 1).tolist(), len(ids)]
        return tuple(
            Span(text=tokenizer.decode(ids[a:b].tolist()), masked=bool(masked[a]))
            for a, b in itertools.pairwise(edges)
            if a < b
        )

    def _tokenizer(self, dataset: str) -> Decodes | None:
        if dataset not in self._known:
            self._known[dataset] = None
            if self._decoder is None:
                self._notes.append("no text: this loader has no tokenizer")
            else:
                try:
                    self._known[dataset] = self._decoder(dataset)
                except TokenizerError as error:
                    self._notes.append(f"no text: {error}")
        return self._known[dataset]


def choose(step: int, row: int | None, count: int) -> list[int]:
    """Returns the requested rows of the batch: `row`, or all.

    Raises:
        PlanError: The batch or the row does not exist.
    """
    if step < 0 or count == 0:
        raise PlanError(
            at=f"step {step}",
            problem="steps count from 0" if step < 0 else "the data ends before it",
        )
    if row is not None and not 0 <= row < count:
        raise PlanError(
            at=f"step {step}, row {row}",
            problem=f"the batch has {count} rows, counted from 0",
            fix=f"Give 0 to {count - 1}.",
        )
    return list(range(count)) if row is None else [row]
