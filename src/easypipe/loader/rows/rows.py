"""Rows and RowReader, the protocols of what a loader batches; rows that repeat in every pass.

row     a row of the whole run, over all epochs; the same on every process
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from easypipe.core.aligned import SOURCE_IDS, AlignedColumn
from easypipe.core.errors import ConfigError, require
from easypipe.core.ledger import Ledger
from easypipe.core.values import Int32, Int64, Json
from easypipe.loader.state import LoaderState

MOST_IDS = 1 << 31  # ids of batches are int32


class Mark(Protocol):
    """A position in an iteration, if only its reader can describe it."""

    def hint(self) -> Any:
        """Returns what `Rows.hint` returns.

        It is collective if several processes read their own streams.
        """
        ...

    def ledger(self) -> Ledger:
        """Returns the ledger of what was read up to here."""
        ...


@dataclass(frozen=True)
class Share:
    """The part of the batches that one process makes, for rows that are read forward.

    Args:
        local: For each batch size, Int64[n], which of its rows are made here; all rows for a size
            that is missing.
        workers: The number of threads that may make rows before a batch needs them.
    """

    local: Mapping[int, Int64] = field(default_factory=dict[int, Int64])
    workers: int = 0


class RowReader(Protocol):
    """The rows as one iteration reads them.

    Law: the content of a row depends only on its number. A row number of -1 means a row of padding,
    without segments or labels. Rows with numbers are read in any order, on any thread; others batch
    by batch.
    """

    def available(self, start: int, stop: int) -> int:
        """Returns how many of the rows `start` to `stop` exist.

        It is all of them, or those before the end.
        """
        ...

    def lengths(self, rows: Int64) -> Int32:
        """Returns the number of tokens of each row, 0 for -1."""
        ...

    def epochs(self, rows: Int64) -> Int64:
        """Returns the pass over the data that each row belongs to, counted from 0.

        It is 0 for -1 and if there are no passes.
        """
        ...

    def gather(self, rows: Int64, width: int | None = None) -> dict[str, Int32]:
        """Returns stored columns, in new memory.

        Args:
            rows: Int64[n].
            width: The slots; None for `seq_length`, or the longest of these rows.

        Returns:
            Int32[n, width] input_ids, segment_ids, position_ids, and loss_mask if a dataset has
            one. Rows of strategy "concat" also have look_ahead, Int32[n].
        """
        ...

    def batch(self, rows: Int64, width: int) -> dict[str, Int32]:
        """Returns `collate(gather(rows, width))`, in one pass if that is faster."""
        ...

    def arrange(self, rows: Int64) -> Int64:
        """Returns consecutive rows in the order in which a batch has them."""
        return rows

    def whole(self) -> RowReader:
        """Returns the reader of the same rows of all ranks."""
        return self

    def positions(self, own: Int64) -> Int64:
        """Returns where positions among this rank's rows are among the rows of all ranks."""
        return own

    def mark(self, row: int) -> Mark | None:
        """Returns the position after the first `row` rows; None if the number is enough.

        These rows are not requested again.
        """
        return None

    def finish(self, row: int, left_out: int) -> Mark | None:
        """Returns the mark at the end; after row `row`, `left_out` rows do not fill a batch."""
        return None

    def check_some_batch(self) -> None:
        """Raises an error if an iteration from the first row must not end without a batch."""

    def close(self, *, wait: bool = True) -> None:
        """Ends the threads that read; with `wait`, it waits until their current reads are done."""


class Rows(Protocol):
    """The rows from which batches are made; `open` returns the reader of one iteration.

    Attributes:
        seq_length: The slots of every row; None if a row has the length of its document.
        pad_token_id: The token id in padding.
        num_epochs: The epochs that the rows are counted over; None: endless.
        lengths_are_free: Whether `lengths` reads only integers, never the rows themselves.
        by_number: Whether a row is found without reading those before it.
        transforms: (name, version) of each row transform, in order.
        source_names: The datasets numbered by the column `source_ids` of batches; () without that
            column.
        step_sizes: (step, rows of a training step from there on), if the weights of datasets follow
            the step; () otherwise.
        vocab_size: All token ids are below it.
        shuffle_buffer_factor: How many batches of rows are permuted together if the loader's
            shuffle_buffer_size is None; None permutes no rows.
        world_size: Over how many ranks the rows of a batch are divided.
        unversioned: Why the sources of another loader cannot be compared with these, such as
            "dataset 'a': m:f has no version"; () if they can.
    """

    seq_length: int | None
    pad_token_id: int
    num_epochs: int | None
    lengths_are_free: bool = True
    by_number: bool = True
    transforms: tuple[tuple[str, str], ...] = ()
    source_names: tuple[str, ...] = ()
    step_sizes: tuple[tuple[int, int], ...] = ()
    vocab_size: int = MOST_IDS
    shuffle_buffer_factor: int | None = None
    world_size: int = 1
    unversioned: tuple[str, ...] = ()

    @property
    def num_rows(self) -> int | None:
        """The number of rows of the whole run; None if they never end.

        This may have to scan the whole plan.

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
        """The short parts from which `identity` is made.

        The error about a changed state uses them to say what changed. It is {} if nothing has a
        name.
        """
        return {}

    @property
    def settings(self) -> Json:
        """More settings that decide which rows are in a batch, for the states of loaders."""
        return {}

    def with_source_ids(self, wanted: bool = True) -> Rows:
        """Returns the same rows, with the column `source_ids` in their batches, or without it.

        Raises:
            ConfigError: The rows do not know their datasets.
        """
        raise ConfigError(
            at="load.source_ids",
            problem="rows that were saved packed do not say which dataset a token is of",
            fix="Load the datasets that were packed, or leave it out.",
        )

    def open(self, state: LoaderState | None = None, share: Share | None = None) -> RowReader:
        """Returns a reader of the rows after `state`, or from the first one on.

        Raises:
            StateError: The state's hint does not belong to these rows.
        """
        ...

    def hint(self, row: int) -> Any:
        """Returns JSON that lets a later process find `row` without what comes before it.

        None means that it is not needed.
        """
        return None

    def ledger(self) -> Ledger:
        """Returns the ledger of rows that are read forward, before anything was read.

        Raises:
            ConfigError: The rows have numbers.
        """
        raise ConfigError(
            at="ledger",
            problem="these rows have numbers: where everything went follows from the plan",
            fix="Ask Pipeline.ledger().",
        )


def require_no_source_ids(aligned: Sequence[AlignedColumn]) -> None:
    """Raises ConfigError if a dataset has a column of the name of ours."""
    require(
        SOURCE_IDS not in [column.name for column in aligned],
        "load.source_ids",
        f"a dataset has a column {SOURCE_IDS!r} of its own",
        "Rename that column, or leave it out.",
    )


class NumberedRows(Rows, RowReader, Protocol):
    """Rows with numbers, which are their own reader. They are thread-safe."""

    def open(self, state: LoaderState | None = None, share: Share | None = None) -> RowReader:
        return self


class RepeatedRows(NumberedRows, Protocol):
    """The rows of a counted dataset, pass after pass."""

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
