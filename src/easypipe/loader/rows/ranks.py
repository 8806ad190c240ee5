"""Rows that are a selection of other rows: those of one rank, and those of one pass.

Ranks are for programs that share data by rank and size instead of a mesh; passes are for loops over
epochs (epochs.py).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Self

import numpy as np

from easypipe.core.config import digest
from easypipe.core.errors import require
from easypipe.core.ledger import Ledger
from easypipe.core.values import Int32, Int64, Json
from easypipe.loader.rows.rows import Mark, RowReader, Rows, Share
from easypipe.loader.state import LoaderState


def check_rank(rank: int, world_size: int) -> None:
    """Checks that `rank` is one of `world_size` ranks.

    Raises:
        ConfigError: There is no such rank.
    """
    whole = isinstance(rank, int | np.integer) and isinstance(world_size, int | np.integer)
    require(
        whole and world_size >= 1 and 0 <= rank < world_size,
        "rank",
        f"there is no rank {rank!r} of {world_size!r}",
        f"Ranks count from 0 to {max(world_size, 1) - 1}." if whole else "Give whole numbers.",
    )


class DerivedRows(Rows, RowReader):
    """The rows of `below` with other numbers: row n is row `first + n` of those."""

    def __init__(self, below: Rows, num_epochs: int | None, *, first: int = 0) -> None:
        self.num_epochs, self._first = num_epochs, first
        self._take(below)

    def _take(self, below: Rows) -> None:
        self.below = below
        self.seq_length, self.pad_token_id = below.seq_length, below.pad_token_id
        self.lengths_are_free, self.by_number = below.lengths_are_free, below.by_number
        self.transforms, self.source_names = below.transforms, below.source_names
        self.unversioned = below.unversioned
        self.step_sizes, self.vocab_size = below.step_sizes, below.vocab_size
        self.shuffle_buffer_factor, self.world_size = below.shuffle_buffer_factor, below.world_size
        self._reader = below.open()

    def over(self, below: Rows) -> Self:
        """Returns the same selection of other rows."""
        other = copy.copy(self)
        other._take(below)
        return other

    def with_source_ids(self, wanted: bool = True) -> Self:
        return self.over(self.below.with_source_ids(wanted))

    def row_below(self, row: Any) -> Any:
        """Returns the number in `below` of a row; takes a number or an array of numbers."""
        return self._first + row

    def first_below(self, row: int) -> int:
        """Returns the first row in `below` that `row` or a later one needs, on any rank."""
        return self._first + row

    def _own(self, total: int) -> int:
        """Returns how many of these rows are among the first `total` rows of `below`."""
        return total - self._first

    @property
    def num_rows(self) -> int | None:
        total = self.below.num_rows
        return None if total is None else self._own(total)

    @property
    def identity(self) -> Mapping[str, str]:
        return self.below.identity

    @property
    def words(self) -> Json:
        return self.below.words

    @property
    def settings(self) -> Json:
        return self.below.settings

    def open(self, state: LoaderState | None = None, share: Share | None = None) -> RowReader:
        opened = copy.copy(self)
        whole = None if share is None else Share(workers=share.workers)
        below = state if state is None else replace(state, row=self.first_below(state.row))
        opened._reader = self.below.open(below, whole)
        return opened

    def available(self, start: int, stop: int) -> int:
        first = self.first_below(start)
        there = first + self._reader.available(first, self.first_below(stop))
        return max(0, self._own(there) - start)

    def lengths(self, rows: Int64) -> Int32:
        return self._reader.lengths(self._there(rows))

    def epochs(self, rows: Int64) -> Int64:
        return self._reader.epochs(self._there(rows))

    def gather(self, rows: Int64, width: int | None = None) -> dict[str, Int32]:
        return self._reader.gather(self._there(rows), width)

    def batch(self, rows: Int64, width: int) -> dict[str, Int32]:
        return self._reader.batch(self._there(rows), width)

    def mark(self, row: int) -> Mark | None:
        return self._reader.mark(self.first_below(row))

    def finish(self, row: int, left_out: int) -> Mark | None:
        return self._reader.finish(self.first_below(row), left_out)

    def check_some_batch(self) -> None:
        self._reader.check_some_batch()

    def close(self, *, wait: bool = True) -> None:
        self._reader.close(wait=wait)

    def hint(self, row: int) -> Any:
        return self.below.hint(self.first_below(row))

    def ledger(self) -> Ledger:
        return self.below.ledger()

    def _there(self, rows: Int64) -> Int64:
        return np.where(rows < 0, rows, self.row_below(rows))


class RankRows(DerivedRows):
    """The rows at positions `rank`, `rank + world_size`, ... of the order of other rows.

    Each row belongs to one rank, and batch t of all ranks together is positions `t * world_size *
    batch_size` onward. So the rows of a batch do not depend on the number of ranks. Rows keep the
    numbers that they have in `below`, because they are permuted before they are divided.

    Args:
        even: Whether to leave out up to world_size - 1 last rows, so that all ranks have equally
            many; otherwise the first ranks may have one more.

    """

    def __init__(self, rows: Rows, rank: int, world_size: int, *, even: bool) -> None:
        self._step, self._rank, self._even = world_size, rank, even
        super().__init__(rows, rows.num_epochs)

    def _take(self, below: Rows) -> None:
        super()._take(below)
        self.world_size = below.world_size * self._step

    def first_below(self, row: int) -> int:
        return row * self._step

    def whole(self) -> RowReader:
        return self._reader.whole()

    def positions(self, own: Int64) -> Int64:
        return self._reader.positions(own * self._step + self._rank)

    @property
    def identity(self) -> Mapping[str, str]:
        below = self.below.identity
        # all ranks have one identity: any of them may save the state
        return {**below, "plan": digest("ranks", below["plan"], self._step, self._even)}

    @property
    def words(self) -> Json:
        return {**self.below.words, "world_size": self._step}

    def _own(self, total: int) -> int:
        return (total + (0 if self._even else self._step - 1 - self._rank)) // self._step


class PassRows(DerivedRows):
    """The rows of passes `epoch` to `epoch + num_epochs - 1` of endless rows.

    A pass has `rows_each` rows. With num_epochs None the passes never end.
    """

    def __init__(self, endless: Rows, epoch: int, num_epochs: int | None, rows_each: int) -> None:
        super().__init__(endless, num_epochs, first=epoch * rows_each)
        self._epoch, self._each = epoch, rows_each

    @property
    def num_rows(self) -> int | None:
        return None if self.num_epochs is None else self._each * self.num_epochs

    @property
    def identity(self) -> Mapping[str, str]:
        below = self.below.identity
        return {**below, "plan": digest("pass", below["plan"], self._epoch, self.num_epochs)}

    @property
    def words(self) -> Json:
        return {**self.below.words, "pass": self._epoch}

    def _own(self, total: int) -> int:
        most = self.num_rows
        return super()._own(total) if most is None else min(super()._own(total), most)


def chain_of(rows: Rows) -> Iterator[DerivedRows]:
    """Yields the selections that rows are, the outermost first."""
    while isinstance(rows, DerivedRows):
        yield rows
        rows = rows.below


def innermost(rows: Rows, row: int) -> tuple[Rows, int]:
    """Returns the innermost rows, and the number of row `row` there.

    They are the same for any number of ranks and passes.
    """
    while isinstance(rows, DerivedRows):
        rows, row = rows.below, rows.row_below(row)
    return rows, row
