"""Sums over the ranges of a dataset, in their order, and its budget of bad rows."""

from __future__ import annotations

from collections import Counter
from typing import Literal

from easypipe.cache.manifest import Counts, Part
from easypipe.cache.ranges import Range, Record
from easypipe.core.errors import BudgetError, SourceError, place
from easypipe.core.protocols import Reject
from easypipe.transforms.refused import advice

OnError = Literal["error", "skip", "quarantine"]


class Totals:
    """Sums over the records in order, and the budget of bad rows."""

    def __init__(
        self, dataset: str, content_field: str, on_error: OnError, max_bad_rows: int | None
    ) -> None:
        self.dataset, self.content_field, self.on_error, self.max_bad_rows = (
            dataset,
            content_field,
            on_error,
            max_bad_rows,
        )
        self.rows = self.bad = self.text_bytes = 0
        self.sums: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.lengths: Counter[str] = Counter()
        self.first: str | None = None  # where the first row is that became nothing, and why
        self.trained: int | None = None
        self.parts: list[Part] = []
        self.encoders: set[str] = set()

    def add(self, piece: Range, record: Record) -> None:
        for reject in record.rejects:
            self.reasons[reject.reason] += reject.count
            self.first = (
                self.first
                or f"{place(record.shard_name, row=reject.row)}: {reject.detail or reject.reason}"
            )
            if not reject.benign:
                self.bad += 1
                self._charge(record.shard_name, reject)
        self.rows += piece.stop - piece.start
        self.text_bytes += record.text_bytes
        self.encoders.add(record.encoder)
        self.sums.update(
            {
                name: getattr(record, name)
                for name in (
                    "docs",
                    "tokens",
                    "encoded",
                    "added",
                    "truncated",
                    "special",
                    "escaped",
                    "lost",
                )
            }
        )
        self.lengths.update(record.lengths)
        if record.trained is not None:
            self.trained = (self.trained or 0) + record.trained
        self.parts.append(record.part(piece.shard))

    def counts(self) -> Counts:
        s = self.sums
        return Counts(rows=self.rows, docs=s["docs"], rejects=dict(sorted(self.reasons.items())), encoded=s["encoded"],
                      added=s["added"], truncated=s["truncated"], tokens=s["tokens"], trained=self.trained,
                      special=s["special"], escaped=s["escaped"], lost=s["lost"], lengths=dict(sorted(self.lengths.items())))  # fmt: skip

    def require_documents(self) -> None:
        if not self.sums["docs"]:
            reasons = (
                ", ".join(f"{reason} {count}" for reason, count in sorted(self.reasons.items()))
                or "there is none"
            )
            most = max(self.reasons, key=self.reasons.__getitem__, default="")
            first = f"; the first is {self.first}" if self.first else ""
            raise SourceError(
                at=place(f"dataset {self.dataset!r}", column=self.content_field),
                problem=f"not one of {self.rows} rows became a document: {reasons}{first}",
                fix=f"{advice(most, 'Check the column that is named and the files')}.",
            )

    def _charge(self, file: str, reject: Reject) -> None:
        at = place(file, row=reject.row, column=self.content_field)
        if self.on_error == "error":
            fix = f"{advice(reject.reason)}, or set on_error to 'skip' or 'quarantine'."
            raise SourceError(at=at, problem=f"{reject.reason}: {reject.detail}", fix=fix)
        if self.max_bad_rows is not None and self.bad > self.max_bad_rows:
            raise BudgetError(
                at=at,
                problem=f"bad row number {self.bad} ({reject.reason}: {reject.detail}), and max_bad_rows is {self.max_bad_rows}",
                fix="Correct the rows, or raise max_bad_rows.",
            )
