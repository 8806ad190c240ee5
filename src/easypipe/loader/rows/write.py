"""Writes rows of windows as tokens and labels or masks: the only place where batches are filled."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from easypipe.core.aligned import AlignedColumn
from easypipe.core.schema import (
    INPUT_IDS,
    LABELS,
    LOOK_AHEAD,
    LOSS_MASK,
    POSITION_IDS,
    SEGMENT_IDS,
)
from easypipe.core.values import Int32, Int64, UInt8, UInt64
from easypipe.loader.collate import BATCH_COLUMNS, fresh_columns, shift_labels
from easypipe.loader.rows.aligned import OF_SOURCES, ValueWriter
from easypipe.loader.rows.gather import (
    NO_CHECKS,
    Tables,
    join_segments,
    open_pairs,
    write_rows,
)
from easypipe.plan.window import View

AT_REST = (INPUT_IDS, SEGMENT_IDS, POSITION_IDS)

_ROOM = 256  # the most blocks to check that are noted at a time: a batch seldom has more

_NO_LABELS = np.empty((0, 0), dtype=np.int32)
_NO_MASK = np.empty((0, 0), dtype=np.uint8)


class Tokens(Protocol):
    """The tokens of windows that RowWriter reads."""

    @property
    def masked(self) -> bool:
        """Whether some tokens are not targets."""
        ...

    def window_at(self, row: int) -> tuple[View, Tables]:
        """Returns the window of a row (any for -1), and where its documents are."""
        ...

    def pinned(self, view: View, rows: Int64) -> contextlib.AbstractContextManager[None]:
        """Holds the tokens of the rows in memory."""
        ...

    @property
    def aligned(self) -> Sequence[AlignedColumn]:
        """The aligned columns."""
        ...

    def values_at(self, row: int) -> Mapping[str, UInt64]:
        """Returns where each column's values begin in the parts of the tables of a row's window."""
        ...

    @property
    def unchecked(self) -> bool:
        """Whether blocks of the files must be checked on first use."""
        ...

    def check(self, touched: Int64) -> None:
        """Checks blocks of the files.

        Args:
            touched: Int64[2, n], parts of the tables, and blocks of them.

        Raises:
            CacheError: A block is damaged.
        """
        ...

    def missing(self, view: View, piece: int, width: int) -> Exception:
        """Returns the error for a missing piece of the window."""
        ...


@dataclass(frozen=True)
class RowWriter:
    """Writes tokens into rows.

    Args:
        eos: Int64[datasets], as `gather.eos_ids` returns them.
        pad_token_id: The token id in padding.
        hold: Whether held pieces have no targets.
        seq_length: The slots of every row; None if a row is a document.
        runs: Whether the rows are those of strategy "concat", in which a document continues in the
            next row.
        joined: Whether each of those rows is one segment, across the ends of documents.
        paired: Whether documents are two segments.
        source_ids: Whether rows have the column `source_ids`.
    """

    eos: Int64
    pad_token_id: int
    hold: bool
    seq_length: int | None = None
    runs: bool = False
    joined: bool = False
    paired: bool = False
    source_ids: bool = False

    def gather(self, tokens: Tokens, rows: Int64, width: int) -> dict[str, Int32]:
        """Returns stored columns (RowReader.gather)."""
        columns = fresh_columns(AT_REST, len(rows), width)
        values = self._values(tokens, rows, width)
        mask, ahead = self._write(tokens, rows, columns, values)
        if tokens.masked:
            columns[LOSS_MASK] = mask.astype(np.int32)
        if values is not None:
            columns |= values.at_rest()
        return columns | {LOOK_AHEAD: ahead} if self.runs else columns

    def batch(self, tokens: Tokens, rows: Int64, width: int) -> dict[str, Int32]:
        """Returns the columns of a batch (RowReader.batch)."""
        columns = fresh_columns(BATCH_COLUMNS, len(rows), width)
        values = self._values(tokens, rows, width)
        _, ahead = self._write(tokens, rows, columns, values)
        if self.runs:
            columns[LABELS][:, -1] = ahead
        return columns if values is None else columns | values.of_batch(columns[LABELS])

    def _values(self, tokens: Tokens, rows: Int64, width: int) -> ValueWriter | None:
        columns = (*tokens.aligned, OF_SOURCES) if self.source_ids else tokens.aligned
        if not columns:
            return None
        return ValueWriter(columns, len(rows), width, runs=self.runs, joined=self.joined)

    def _write(
        self,
        tokens: Tokens,
        rows: Int64,
        columns: Mapping[str, Int32],
        values: ValueWriter | None,
    ) -> tuple[UInt8, Int32]:
        """Fills the columns.

        Returns:
            The loss mask, UInt8[0, 0] if no dataset has one; and, for runs, Int32[R], the labels of
            last slots.
        """
        ids, segments, positions = (columns[name] for name in AT_REST)
        labels = columns.get(LABELS, _NO_LABELS)
        mask = np.empty(ids.shape, dtype=np.uint8) if tokens.masked else _NO_MASK
        ahead = np.empty(len(rows) if self.runs else 0, dtype=np.int32)
        done = np.zeros(len(rows), dtype=np.bool_)
        shift = LABELS in columns and not (self.joined or self.paired)
        todo = np.empty((2, _ROOM), np.int64) if tokens.unchecked else NO_CHECKS
        behind = (self.runs, self.joined, self.seq_length or 0)
        rule = (self.eos, self.pad_token_id, self.hold, shift, behind)
        into = (ids, labels, segments, positions, mask, ahead)
        left = 0
        while left < len(rows):  # one iteration for every window of the rows
            row = int(rows[left])
            row = row if row >= 0 else int(rows.max())
            view, tables = tokens.window_at(row)
            # These are plain tuples, because numba inspects the fields of a named tuple in every
            # call (2 us).
            given = (view[:], rows, done, tables[:], rule, into, todo)
            with tokens.pinned(view, rows):
                left, bad, count = write_rows(*given)
                while count and bad < 0:
                    tokens.check(todo[:, :count])
                    left, bad, count = write_rows(*given)
                if bad >= 0:
                    raise tokens.missing(view, int(bad), ids.shape[1])
                if values is not None:
                    check = tokens.check if tokens.unchecked else None
                    values.write(view, rows, tables, tokens.values_at(row), check)
        if self.joined:
            join_segments(segments, positions)
        if self.paired:
            open_pairs(segments, positions, mask)
        if LABELS in columns and not shift:
            shift_labels(ids, segments, mask, labels)
        return mask, ahead
