"""Writes and reads metrics.jsonl, one JSON object for each logged step; checks it on resume.

Law: the values of `loss`, `nll`, `grad_norm` and `learning_rate` are float32s, written so that they
are read back bit for bit. A run that was killed and resumed leaves the same values as a run that
was not. (Times and rates differ, of course.)
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

from xxhash import xxh3_128

from easypipe.core.closing import Closeable
from easypipe.core.errors import StorageError, raising
from easypipe.core.storage import commit_bytes, endless_refused
from easypipe.core.values import Json, JsonValue

Record = dict[str, Any]
# Files in train.output_dir, each a MetricsFile.
METRICS = "metrics.jsonl"
ROLLBACKS = "rollbacks.jsonl"
SAMPLES = "samples.jsonl"
LM_EVAL = "lm_eval.jsonl"

logger = logging.getLogger("easypipe")


class MetricsFile(Closeable):
    """A file of records, one JSON object a line, to which a run appends.

    Opening it drops the lines after the step from which the run continues.

    Args:
        path: The file.
        after_step: The step from which the run continues.
        write: Whether this process writes; True in one process of a run.
        digest: The `digest()` when that step was saved, if it is known. If the lines differ, a
            warning is logged and they are kept.

    Attributes:
        path: The file.
        first: The first record; None if there is none.
        last: The last record; None if there is none.

    Raises:
        StorageError: The file is not a metrics file, or cannot be written.
    """

    def __init__(
        self, path: Path, *, after_step: int, write: bool = True, digest: str | None = None
    ) -> None:
        self.path = path
        kept: list[Record] = []
        try:
            for record in each_record(path) if path.exists() else ():
                if record["step"] <= after_step:
                    kept.append(record)  # noqa: PERF401  (what comes before an error is kept)
        except StorageError:
            # Lines after those of the checkpoint were not synced: after a power failure, a file
            # system may leave anything there.
            if digest != xxh3_128(_bytes(kept)).hexdigest():
                raise
        self.last: Record | None = kept[-1] if kept else None
        self.first: Record | None = kept[0] if kept else None
        self._file = None
        self._lines = xxh3_128()
        if not write:
            return
        lines = _bytes(kept)
        self._lines.update(lines)
        if digest not in (None, self._lines.hexdigest()):
            logger.warning(
                "%s: damaged: up to step %d it lacks lines that the checkpoint was saved "
                "with; the run continues after those that are there (%d)",
                path,
                after_step,
                len(kept),
            )
        commit_bytes(path, lines)
        with raising(StorageError, path, "cannot be written"):
            self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115  (closed by close)

    def append(self, record: Record) -> None:
        """Appends one line, and flushes it so that it survives a kill of this process."""
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
        """Returns the digest of all lines; None if this process does not write them."""
        return None if self._file is None else self._lines.hexdigest()

    def sync(self) -> None:
        """Returns after the lines are on the disk.

        A checkpoint that counts on them is committed only after that.
        """
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def read_metrics(path: str | Path) -> list[Record]:
    """Returns the list of records that `each_record` yields."""
    return list(each_record(path))


def each_record(path: str | Path) -> Iterator[Record]:
    """Yields the records of a metrics.jsonl.

    A last line that a killed process left incomplete is skipped.

    Raises:
        StorageError: A line is not a record; the message names it.
    """
    for _, _, record in records_from(path, 0, 0):
        yield record


def records_from(path: str | Path, at: int, lines: int) -> Iterator[tuple[int, int, Record]]:
    """Yields the records after byte `at`, where `lines` lines end, as `each_record` does.

    Each comes with the byte at which it ends, and the number of lines up to there.
    """
    with open(endless_refused(path), "rb") as file:
        file.seek(at)
        for number, line in enumerate(file, start=lines + 1):
            at += len(line)
            if not line.strip(b"\n"):
                continue
            try:
                record = _DECODER.decode(line.decode())
            except (ValueError, OverflowError, RecursionError):
                record = None
            if _is_record(record):
                yield at, number, record
            elif line.endswith(b"\n"):  # a finished line
                raise StorageError(
                    at=f"{path}, line {number}",
                    problem="not a metrics record",
                    fix="Move the file away and run again.",
                )


def _finite(kind: type[float], text: str) -> float:
    """Returns a number of a line, as an int or a float; a run writes null for what is not finite.

    Raises:
        ValueError: It is NaN or infinite, as 1e999 is.
        OverflowError: No float holds the int.
    """
    if not math.isfinite(value := kind(text)):
        raise ValueError(f"{text} is not finite")
    return value


_FLOAT = partial(_finite, float)
_DECODER = json.JSONDecoder(
    parse_constant=_FLOAT, parse_float=_FLOAT, parse_int=partial(_finite, int)
)


def _is_record(value: JsonValue) -> TypeGuard[Record]:
    """Returns whether a value has what readers of a record need: a step, and losses."""
    if not isinstance(value, dict) or not isinstance(value.get("step"), int):
        return False
    evals = value.get("eval", {})
    losses = [value, *evals.values()] if isinstance(evals, dict) else [None]
    return all(
        isinstance(one, dict) and isinstance(one.get("loss"), int | float | None) for one in losses
    )


def perplexity(nll: float) -> float | None:
    """Returns exp(nll); None if a float cannot hold it."""
    return math.exp(nll) if nll < 700 else None


def _bytes(records: Iterable[Record]) -> bytes:
    return "".join(map(_line, records)).encode()


def _line(record: Json) -> str:
    return json.dumps(record, allow_nan=False) + "\n"
