"""Bad rows of a preparation: their error budget, its message, and the file of quarantined rows."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from typing import Literal

import pyarrow as pa

from easypipe.cache.folder import CacheFolder
from easypipe.cache.manifest import Counts
from easypipe.cache.ranges import Record
from easypipe.core import storage
from easypipe.core.errors import BudgetError, SourceError, place
from easypipe.core.protocols import Reject, ShardedSource, raw_of
from easypipe.transforms.refused import advice

OnError = Literal["error", "skip", "quarantine"]
RAW_CHARACTERS = 1 << 16  # characters of a bad row that the quarantine file holds


class ErrorBudget:
    """Charges the bad rows of one dataset in their order; benign ones are free.

    Args:
        dataset: The name of the dataset.
        label: The name of the encoded content, for errors.
        on_error: "error" stops at the first bad row.
        max_bad_rows: How many bad rows may be skipped; None allows any number.
    """

    def __init__(
        self, dataset: str, label: str, on_error: OnError, max_bad_rows: int | None
    ) -> None:
        self.dataset, self.label, self.on_error = dataset, label, on_error
        self.max_bad_rows, self.bad = max_bad_rows, 0
        self.reasons = Counter[str]()  # of the bad rows
        self._first = ""  # where the first rejected row is, and why it was rejected

    def charge(self, record: Record) -> None:
        """Charges the bad rows of a range.

        Raises:
            SourceError: There is a bad row, and `on_error` is "error"; it names the row.
            BudgetError: There are more bad rows than allowed; it names the first row too many.
        """
        for reject in record.rejects:
            if not self._first:
                at = place(record.shard_name, row=reject.row)
                self._first = f"; the first is {at}: {reject.detail or reject.reason}"
            if reject.benign:
                continue
            self.reasons[reject.reason] += reject.count
            allowed = 0 if self.on_error == "error" else self.max_bad_rows
            left = reject.count if allowed is None else allowed - self.bad
            self.bad += min(reject.count, left + 1)
            at = place(record.shard_name, row=reject.row + left, column=self.label)
            if self.on_error == "error":
                error = bad_row(at, reject)
                error.add_note(f"while tokenizing dataset {self.dataset!r}")
                raise error
            if left < reject.count:
                raise BudgetError(
                    at=at,
                    problem=f"bad row number {self.bad} of dataset {self.dataset!r} "
                    f"({reject.reason}: {reject.detail}), and max_bad_rows is {self.max_bad_rows}",
                    fix="Correct the rows, or raise max_bad_rows.",
                )

    def require_documents(self, counts: Counts) -> None:
        """Raises SourceError if no row became a document."""
        if counts.docs:
            return
        found = counts.rejects
        reasons = ", ".join(f"{reason} {count}" for reason, count in found.items())
        most = max(found, key=found.__getitem__, default="")
        raise SourceError(
            at=place(f"dataset {self.dataset!r}", column=self.label),
            problem=f"not one of {counts.rows} rows became a document: "
            f"{reasons or 'there are no rows'}{self._first}",
            fix=f"{advice(most, 'Check the column that is named and the files')}.",
        )


def bad_row(at: str, reject: Reject) -> SourceError:
    """Returns the error that names a bad row and what to do about it."""
    return SourceError(
        at=at,
        problem=f"{reject.reason}: {reject.detail}",
        fix=f"{advice(reject.reason)}, or set on_error to 'skip' or 'quarantine'.",
    )


def write_quarantine(
    folder: CacheFolder,
    key: str,
    dataset: str,
    records: Iterable[Record],
    source: ShardedSource,
    column: str,
) -> tuple[str, str]:
    """Writes the bad rows into a file next to the manifest `key`.

    It has one JSON object a line: dataset, file, row, reason, detail, raw. Benign rows are not
    among them.

    Args:
        folder: The cache folder.
        key: The key of the manifest.
        dataset: The name of the dataset.
        records: The records of all ranges, in order.
        source: The rows, from which the bad ones are read again.
        column: The column whose value is shown.

    Returns:
        (name of the file, its checksum).
    """
    name = f"{key}.quarantine.jsonl"
    path = folder.at("manifests", name)
    with (
        storage.commit_file(path, folder.options) as (temporary, stamp),
        # half of a surrogate pair becomes the escape that JSON has for it
        open(temporary, "w", encoding="utf-8", errors="backslashreplace") as out,
    ):
        for record in records:
            for reject in (each for each in record.rejects if not each.benign):
                for row in range(reject.row, reject.row + reject.count):
                    line = {
                        "dataset": dataset,
                        "file": record.shard_name,
                        "row": row,
                        "reason": reject.reason,
                        "detail": reject.detail,
                        "raw": raw_row(source, record.part.shard, row, column)
                        if reject.reason != "null"
                        else raw_of(source, record.part.shard, row) or "null",
                    }
                    out.write(json.dumps(line, ensure_ascii=False) + "\n")
    return name, stamp().checksum


def raw_row(source: ShardedSource, shard: int, row: int, column: str) -> str | None:
    """Returns a bad row for people to look at.

    That is the row as it is in its file if the source can tell, otherwise its value as JSON.
    """
    raw = raw_of(source, shard, row)
    if raw is None:
        batch = source.read(shard, row, row + 1)
        if batch.num_rows:
            value = batch.column(column)[0]
            text = isinstance(value, pa.StringScalar | pa.LargeStringScalar)
            data = value.as_buffer() if text else None
            shown = (
                value.as_py()
                if data is None
                else data.to_pybytes().decode("utf-8", "backslashreplace")
            )
            raw = json.dumps(shown, ensure_ascii=False, default=str)
    return raw if raw is None or len(raw) <= RAW_CHARACTERS else raw[:RAW_CHARACTERS] + "…"
