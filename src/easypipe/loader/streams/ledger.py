"""The ledger of a streaming loader, from what this process has read since its iteration began."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from easypipe.core.ledger import Ledger
from easypipe.core.values import Int64
from easypipe.loader.streams.feed import StreamCounts
from easypipe.loader.streams.spec import StreamSpec
from easypipe.plan.plan_stats import COUNTERS, FIELDS, DrawStats

LEFT_OUT = "left out, for want of a full batch"


@dataclass
class StreamTotals:
    """The counters of a stream, or of all streams of a process.

    The last four are only kept for all streams of a process together.

    Args:
        datasets: What was read and drawn of each dataset.
        table: Int64[datasets, COUNTERS], what was drawn (plan/plan_stats.py).
        packed_rows: The number of rows in windows.
        rows_given: The number of rows in batches.
        rows_before: The number of rows in windows made again that were returned before the state.
        rows_left_out: The number of rows that are not in a batch.
        padding_rows: The number of rows of padding.
    """

    datasets: tuple[StreamCounts, ...]
    table: Int64
    packed_rows: int = 0
    rows_given: int = 0
    rows_before: int = 0
    rows_left_out: int = 0
    padding_rows: int = 0

    @classmethod
    def total(cls, count: int, parts: Iterable[StreamTotals] = ()) -> StreamTotals:
        """Returns the sum of the current counters of several streams.

        `count` is the number of datasets.
        """
        whole = cls(
            tuple(StreamCounts() for _ in range(count)), np.zeros((count, COUNTERS), np.int64)
        )
        for part in parts:
            for mine, other in zip(whole.datasets, part.datasets, strict=True):
                mine.update(other)
            whole.table += part.table
            whole.packed_rows += part.packed_rows
        return whole

    @property
    def all_dropped(self) -> int:
        """The number of documents drawn, if all were longer than a row and left out; else 0."""
        known = dict(zip(FIELDS, self.table.sum(axis=0).tolist(), strict=True))
        return known["draws"] if known["draws"] == known["docs_dropped"] else 0


def ledger_of(totals: StreamTotals, names: Sequence[str], spec: StreamSpec) -> Ledger:
    """Returns the ledger of a streaming loader.

    It balances what is in files with what was read or not; rows with documents or rejects;
    documents with those drawn, waiting or left at an epoch's end; tokens with those placed,
    truncated or dropped; and packed rows with those in batches, waiting or left out.
    """
    ledger = Ledger()
    stage = "mix" if spec.plan.pack is None else "pack"
    for name, counts, line in zip(names, totals.datasets, totals.table.tolist(), strict=True):
        _add_read(ledger, name, counts)
        drawn = DrawStats(**dict(zip(FIELDS, line, strict=True)))
        _add_drawn(ledger, name, counts, drawn, stage)
    placed = int(totals.table[:, FIELDS.index("tokens_placed")].sum())
    if spec.plan.pack is not None:
        slots = totals.packed_rows * spec.plan.pack.seq_length
        out = {"tokens": placed, "padding": slots - placed}
        ledger.add("pack", "stream", "slots", into={"slots": slots}, out=out)
        ledger.facts["pack.stream.fill"] = placed / slots if slots else 1.0
    known = {
        "in batches": totals.rows_given,
        "before the state": totals.rows_before,
        LEFT_OUT: totals.rows_left_out,
    }
    out = {**known, "waiting": totals.packed_rows - sum(known.values())}
    ledger.add("load", "stream", "rows", into={"made": totals.packed_rows}, out=out)
    ledger.facts |= {
        "stream.rows": totals.packed_rows,
        "stream.rows of padding": totals.padding_rows,
    }
    return ledger


def _add_read(ledger: Ledger, name: str, counts: StreamCounts) -> None:
    """Adds the balances from files to documents."""
    shares, left_at_ends = counts.of("shares"), counts.of("shares left")
    for unit, left in counts.unread().items():
        out = {
            "read": counts["shares read", unit],
            "before the state": counts["shares before", unit],
            "unread when their epoch ended": left_at_ends[unit],
            "unread so far": left - left_at_ends[unit],
        }
        ledger.add("files", name, unit, into={"of the passes begun": shares[unit]}, out=out)
    counts.made.enter(ledger, name, streamed=True)


def _add_drawn(
    ledger: Ledger, name: str, counts: StreamCounts, part: DrawStats, stage: str
) -> None:
    """Adds the balances from documents to labels."""
    out = {
        "drawn": part.draws,
        "waiting": counts["drawn", "waiting"],
        "left at the end of an epoch": counts["drawn", "left"],
        "before the state": counts["drawn", "again"],
    }
    read = {"read": counts["read", "documents"]}
    ledger.add("mix", name, "documents", into=read, out=out)
    part.enter(ledger, stage, name, counts["drawn", "EOS"])
    placed, starts = part.tokens_placed, part.segments
    out = {"targets or masked": placed - starts, "segment starts": starts}
    ledger.add("labels", name, "tokens", into={"placed": placed}, out=out)
