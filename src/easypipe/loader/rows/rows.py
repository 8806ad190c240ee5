"""Rows and RowReader, the protocols of what a loader batches; rows that repeat pass after pass.

row     counted over the whole run, all epochs; the same on every process
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from easypipe.core.errors import ConfigError
from easypipe.core.ledger import Ledger
from easypipe.core.values import Int32, Int64, Json
from easypipe.loader.state import LoaderState


class Mark(Protocol):
    """What lies behind so many rows of an iteration, where only its reader can tell."""

    def hint(self) -> Any:
        """Returns what `Rows.hint` returns.

        It is collective where several processes read their own streams.
        """
        ...

    def ledger(self) -> Ledger:
        """Returns where everything went that was read up to here."""
        ...


@dataclass(frozen=True)
class Share:
    """The part of the batches that one process makes, for rows that are read forward.

    Args:
        local: By the size of a batch, Int64[n], which of its rows are made here; all rows where a
            size is missing.
        workers: The threads that may make ahead what no batch asked for; 0 for none.
    """

    local: Mapping[int, Int64] = field(default_factory=dict[int, Int64])
    workers: int = 0


class RowReader(Protocol):
    """The rows as one iteration reads them.

    Law: what a row holds depends on its number alone. A row number of -1 stands for a row of
    padding: no segment, no label. Rows with numbers are read in any order, on any thread; others
    batch after batch.
    """

    def available(self, start: int, stop: int) -> int:
        """Returns how many of the rows `start` to `stop` there are.

        It is all of them, or as many as stand before the end.
        """
        ...

    def lengths(self, rows: Int64) -> Int32:
        """Returns the tokens of each row, 0 for -1."""
        ...

    def epochs(self, rows: Int64) -> Int64:
        """Returns the pass over the data that each row belongs to, from 0.

        It is 0 for -1 and where there are no passes.
        """
        ...

    def gather(self, rows: Int64, width: int | None = None) -> dict[str, Int32]:
        """Returns columns at rest, in new memory.

        Args:
            rows: Int64[n].
            width: The slots; None for `seq_length`, or the longest of these rows.

        Returns:
            Int32[n, width] input_ids, segment_ids, position_ids, and loss_mask where a dataset has
            one. Rows of strategy "concat" have look_ahead too, Int32[n].
        """
        ...

    def batch(self, rows: Int64, width: int) -> dict[str, Int32]:
        """Returns `collate(gather(rows, width))`, in one pass where that is faster."""
        ...

    def arrange(self, rows: Int64) -> Int64:
        """Returns neighbouring rows in the order in which they stand in a batch."""
        return rows

    def mark(self, row: int) -> Mark | None:
        """Returns what stands behind the first `row` rows; None where the number tells it.

        None of these rows is asked for again.
        """
        return None

    def finish(self, row: int, left_out: int) -> Mark | None:
        """Returns the mark at the end of the data; `left_out` rows more do not fill a batch."""
        return None

    def check_some_batch(self) -> None:
        """Raises where an iteration that gave no batch from the first row on is a mistake."""

    def close(self, *, wait: bool = True) -> None:
        """Ends the threads that read; with `wait`, it waits until their reads at hand are done."""


class Rows(Protocol):
    """What batches are made of; `open` gives the reader of one iteration.

    Attributes:
        seq_length: The slots of every row; None where a row has the length of its document.
        pad_token_id: The token id in padding.
        num_epochs: The epochs that the rows are counted over; None without end.
        lengths_are_free: Whether `lengths` reads integers only, never the rows themselves.
        by_number: Whether a row is found without reading those before it.
        transforms: (name, version) of each row transform, the first one first.
        source_names: The datasets that the column `source_ids` of batches numbers; () where batches
            have no such column.
    """

    seq_length: int | None
    pad_token_id: int
    num_epochs: int | None
    lengths_are_free: bool = True
    by_number: bool = True
    transforms: tuple[tuple[str, str], ...] = ()
    source_names: tuple[str, ...] = ()

    @property
    def num_rows(self) -> int | None:
        """The rows of the whole run; None where they never end.

        This may have to look at the whole plan.

        Raises:
            TypeError: The rows are not counted before they are read.
        """
        ...

    @property
    def identity(self) -> Mapping[str, str]:
        """A digest per component of the data: `sources`, `tokenizer`, `plan`."""
        ...

    @property
    def words(self) -> Json:
        """What `identity` is made of, as far as it is short.

        A refused state can say with it what changed. It is {} where nothing has a name.
        """
        return {}

    @property
    def settings(self) -> Json:
        """Further settings that decide which rows stand in a batch, for the states of loaders."""
        return {}

    def open(self, state: LoaderState | None = None, share: Share | None = None) -> RowReader:
        """Returns a reader of the rows behind `state`, or from the first one on.

        Raises:
            StateError: The state's hint is not one of these rows.
        """
        ...

    def hint(self, row: int) -> Any:
        """Returns JSON that lets a later process find `row` without what stands before it.

        None means that none is needed.
        """
        return None

    def ledger(self) -> Ledger:
        """Returns the ledger of rows that are read forward, where nothing was read yet.

        Raises:
            ConfigError: The rows have numbers.
        """
        raise ConfigError(
            at="ledger",
            problem="these rows have numbers: where everything went follows from the plan",
            fix="Ask Pipeline.ledger().",
        )


class NumberedRows(Rows, RowReader, Protocol):
    """Rows with numbers, which are their own reader. Thread safe."""

    def open(self, state: LoaderState | None = None, share: Share | None = None) -> RowReader:
        return self


class RepeatedRows(NumberedRows, Protocol):
    """The rows of a dataset whose rows are counted, pass behind pass."""

    @property
    def rows_each(self) -> int:
        """The rows of one pass."""
        ...

    @property
    def num_rows(self) -> int | None:
        if self.num_epochs is None:
            return None if self.rows_each else 0
        return self.rows_each * self.num_epochs

    def available(self, start: int, stop: int) -> int:
        total = self.num_rows
        return stop - start if total is None else max(0, min(stop, total) - start)

    def epochs(self, rows: Int64) -> Int64:
        return np.maximum(rows, 0) // max(self.rows_each, 1)


def default_width(reader: RowReader, rows: Int64, seq_length: int | None) -> int:
    return int(reader.lengths(rows).max(initial=0)) if seq_length is None else seq_length
