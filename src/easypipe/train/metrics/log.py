"""metrics.jsonl, written and read: one JSON object for each logged step, in step order.

Law: the values of `loss`, `nll`, `grad_norm` and `learning_rate` are float32s written so that they
read back bit for bit, and a run that was killed and resumed leaves the same ones as a run that was
not. (Times and rates differ, of course.)
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from xxhash import xxh3_128

from easypipe.core.closing import Closeable
from easypipe.core.errors import StorageError, raising
from easypipe.core.storage import commit_bytes
from easypipe.core.values import Json

Record = dict[str, Any]
# in train.output_dir, each a MetricsFile
METRICS = "metrics.jsonl"
ROLLBACKS = "rollbacks.jsonl"
SAMPLES = "samples.jsonl"

logger = logging.getLogger("easypipe")


class MetricsFile(Closeable):
    """Appends records; opening it cuts what stands there to the step that the run goes on from."""

    def __init__(
        self, path: Path, *, after_step: int, write: bool = True, digest: str | None = None
    ) -> None:
        """Keeps the lines up to and including `after_step`.

        Args:
            path: The file.
            after_step: The step that the run goes on from.
            write: False in all processes of a run but one.
            digest: `digest()` of when that step was saved, where it is known: other lines are
                warned of, and kept.

        Raises StorageError where the file is not one of metrics, or cannot be written.
        """
        self.path = path
        kept = (
            [record for record in read_metrics(path) if record["step"] <= after_step]
            if path.exists()
            else []
        )
        self.last: Record | None = kept[-1] if kept else None
        self.first: Record | None = kept[0] if kept else None
        self._file = None
        self._lines = xxh3_128()
        if not write:
            return
        lines = "".join(_line(record) for record in kept).encode()
        self._lines.update(lines)
        if digest not in (None, self._lines.hexdigest()):
            logger.warning(
                "%s: damaged: up to step %d it has not the lines that the checkpoint was saved "
                "with; the run goes on after those that are there (%d)",
                path,
                after_step,
                len(kept),
            )
        commit_bytes(path, lines)
        with raising(StorageError, path, "cannot be written"):
            self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115  (closed by close)

    def append(self, record: Record) -> None:
        """One line, handed to the operating system at once, so that it survives the death of this
        process.
        """
        self.last = record
        self.first = self.first or record
        if self._file is None:
            return
        fix = "Check space and permissions."
        with raising(StorageError, self.path, "cannot be written", fix):
            line = _line(record)
            self._file.write(line)
            self._file.flush()
        self._lines.update(line.encode())

    def digest(self) -> str | None:
        """Of all lines; None where this process does not write them."""
        return None if self._file is None else self._lines.hexdigest()

    def sync(self) -> None:
        """Returns once the lines are on the disk: before a checkpoint that counts on them is
        committed.
        """
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def read_metrics(path: str | Path) -> list[Record]:
    """All that `each_record` gives."""
    return list(each_record(path))


def each_record(path: str | Path) -> Iterator[Record]:
    """The records of a metrics.jsonl, one after the other.

    A last line that a killed process left half written is not one.

    Raises StorageError naming the line that is no record.
    """
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip(b"\n"):
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                yield record
            elif line.endswith(b"\n"):  # as every finished line does
                raise StorageError(
                    at=f"{path}, line {number}",
                    problem="not a metrics record",
                    fix="Move the file away and run again.",
                )


def perplexity(nll: float) -> float | None:
    """exp(nll); None beyond what a float holds."""
    return math.exp(nll) if nll < 700 else None


def _line(record: Json) -> str:
    return json.dumps(record, allow_nan=False) + "\n"
