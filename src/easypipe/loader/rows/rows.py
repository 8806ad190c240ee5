"""Rows and their readers: the two protocols between a loader and what it makes batches of.

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
        """As `Rows.hint`. Collective where several processes read their own streams."""
        ...

    def ledger(self) -> Ledger:
        """Where everything went that was read up to here."""
        ...


@dataclass(frozen=True)
class Share:
    """What of the batches one process makes, for rows that are read forward.

    local: by the size of a batch, Int64[n], which of its rows are made here; all where it lacks
    one. workers: threads that may make ahead what no batch asked for; 0 for none.
    """

    local: Mapping[int, Int64] = field(default_factory=dict[int, Int64])
    workers: int = 0


class RowReader(Protocol):
    """Rows as one iteration reads them.

    Law: what a row holds depends on its number alone. A row number of -1 stands for a row of
    padding: no segment, no label. Rows with numbers are read in any order, on any thread; others
    batch after batch.
    """

    def available(self, start: int, stop: int) -> int:
        """How many of the rows `start` to `stop` there are: all of them, or as many as stand before
        the end.
        """
        ...

    def lengths(self, rows: Int64) -> Int32:
        """Tokens of each row, 0 for -1."""
        ...

    def epochs(self, rows: Int64) -> Int64:
        """The pass over the data that each row belongs to, from 0; 0 for -1 and where there are no
        passes.
        """
        ...

    def gather(self, rows: Int64, width: int | None = None) -> dict[str, Int32]:
        """Columns at rest, Int32[n, width], in new memory: input_ids, segment_ids, position_ids,
        and loss_mask where a dataset has one.

        Rows of strategy "concat" have look_ahead too, Int32[n].
        width: None for `seq_length`, or the longest of these rows.
        """
        ...

    def batch(self, rows: Int64, width: int) -> dict[str, Int32]:
        """`collate(gather(rows, width))`, in one pass where that is faster."""
        ...

    def arrange(self, rows: Int64) -> Int64:
        """Neighbouring rows, in the order in which they stand in a batch."""
        return rows

    def mark(self, row: int) -> Mark | None:
        """What stands behind the first `row` rows, none of which is asked for again; None where the
        number tells it.
        """
        return None

    def finish(self, row: int, left_out: int) -> Mark | None:
        """As `mark`, at the end of the data: `left_out` rows more do not fill a batch."""
        return None

    def check_some_batch(self) -> None:
        """Raises where an iteration that gave no batch from the first row on is a mistake."""

    def close(self, *, wait: bool = True) -> None:
        """Ends the threads that read; wait: until what they have at hand is done."""


class Rows(Protocol):
    """What batches are made of; `open` gives the reader of one iteration."""

    seq_length: int | None  # slots of every row; None: a row has the length of its document
    pad_token_id: int
    num_epochs: int | None  # that the rows are counted over; None: without end
    lengths_are_free: bool = True  # `lengths` reads integers only, never the rows themselves
    by_number: bool = True  # whether a row is found without reading those before it
    transforms: tuple[tuple[str, str], ...] = ()  # (name, version) of each, the first one first
    # the datasets that the column `source_ids` of their batches numbers; () where they have none
    source_names: tuple[str, ...] = ()

    @property
    def num_rows(self) -> int | None:
        """Rows of the whole run; None where they never end. May have to look at the whole plan.
        Raises TypeError where they are not counted before they are read.
        """
        ...

    @property
    def identity(self) -> Mapping[str, str]:
        """A digest per component of the data: `sources`, `tokenizer`, `plan`."""
        ...

    @property
    def words(self) -> Json:
        """What `identity` is made of, as far as it is short, so that a refused state can say what
        changed; {} where nothing has a name.
        """
        return {}

    @property
    def settings(self) -> Json:
        """What else decides which rows stand in a batch, for the states of loaders."""
        return {}

    def open(self, state: LoaderState | None = None, share: Share | None = None) -> RowReader:
        """A reader of the rows behind `state`, or from the first one on. Raises StateError where
        the state's hint is none of these rows.
        """
        ...

    def hint(self, row: int) -> Any:
        """JSON that lets a later process find `row` without looking at what stands before it; None
        where it needs none.
        """
        return None

    def ledger(self) -> Ledger:
        """Of rows that are read forward, where nothing was read yet."""
        raise ConfigError(
            at="ledger",
            problem="these rows have numbers: where everything went follows from the plan",
            fix="Ask Pipeline.ledger().",
        )


class NumberedRows(Rows, RowReader, Protocol):
    """Rows with numbers, which read themselves: thread safe."""

    def open(self, state: LoaderState | None = None, share: Share | None = None) -> RowReader:
        return self


class RepeatedRows(NumberedRows, Protocol):
    """Rows of a dataset whose rows are counted, pass behind pass."""

    @property
    def rows_each(self) -> int:
        """Rows of one pass."""
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
