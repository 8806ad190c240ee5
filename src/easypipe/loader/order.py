"""The order of rows in batches: permuted within blocks, grouped by length within windows.

It is computed from positions and lengths.

position a row's place in the order of reading
block    `shuffle_buffer_size` consecutive positions
window   `group_by_length` consecutive batches
"""

from __future__ import annotations

import numpy as np

from easypipe.core.errors import ConfigError
from easypipe.core.random import fold
from easypipe.core.values import Int64, JsonObject
from easypipe.loader.collate import CollateConfig, alone_widths
from easypipe.loader.config import LoadStageConfig
from easypipe.loader.rows.rows import RowReader, Rows
from easypipe.plan.order import permute

# The order of this many windows is kept: near the end of a window, threads make batches of two.
KEPT_WINDOWS = 4


class ReadingOrder:
    """The order of a loader's rows. It is thread-safe.

    Law: the row at a position depends only on rows, config and seed.

    In a window of W batches of B rows, the rows of its whole batches are sorted by the slots that
    each needs; rows with equal needs stay in order. They are cut into batches, which are permuted.
    Rows that do not fill a batch stay at the end, so drop_last leaves out the same rows.

    Raises:
        ConfigError: Rows should be grouped by length, but all have the same width.
    """

    def __init__(self, rows: Rows, config: LoadStageConfig, rule: CollateConfig, seed: int) -> None:
        self._rule, self._batch = rule, config.batch_size
        # if rows are read forward, documents are shuffled, not rows
        self._block = config.shuffle_buffer_size if rows.by_number else None
        self._shuffle_key = None if self._block is None else fold(seed, "loader", "shuffle")
        self._settings = {"shuffle_buffer_size": config.shuffle_buffer_size, **rows.settings}
        if rows.by_number:
            self._settings |= {"shuffle_key": self._shuffle_key}
        self._groups = config.group_by_length
        self._window = (self._groups or 0) * self._batch
        self._group_key = fold(seed, "loader", "groups")
        self._known: dict[int, Int64] = {}
        if self._groups is not None and (
            rows.seq_length is not None or rule.padding == "max_length"
        ):
            why = "padding is 'max_length'" if rows.seq_length is None else "the rows are packed"
            problem = f"{self._groups}, but {why}: every row has as many slots"
            raise ConfigError(at="load.group_by_length", problem=problem, fix="Leave it out.")

    @property
    def settings(self) -> JsonObject:
        """The settings that decide the order, for the states of loaders."""
        groups = (
            {}
            if self._groups is None
            else {"group_by_length": self._groups, "group_key": self._group_key}
        )
        return {**self._settings, **groups}

    def first(self, row: int) -> int:
        """Returns the first row of the window and the block within which `row` is moved.

        From `row` on, nothing before that row is read.
        """
        for size in (self._window, self._block):
            row = row // size * size if size else row
        return row

    def rows(self, reader: RowReader, start: int, stop: int) -> Int64:
        """Returns the rows at positions `start` to `stop`, without those after the end.

        There must be at least one.
        """
        if not self._window:
            return reader.arrange(self._shuffled(reader, start, stop))
        size = self._window
        parts = [
            self._grouped(reader, n)[max(start - n * size, 0) : stop - n * size]
            for n in range(start // size, -(-stop // size))
        ]
        return np.concatenate(parts)

    def _grouped(self, reader: RowReader, window: int) -> Int64:
        """Returns the rows of a window in order."""
        known = self._known.get(window)
        if known is not None:
            return known
        start = window * self._window
        rows = self._shuffled(reader, start, start + reader.available(start, start + self._window))
        batches = len(rows) // self._batch
        if batches:
            whole = rows[: batches * self._batch]
            by_width = whole[
                np.argsort(alone_widths(reader.lengths(whole), self._rule), kind="stable")
            ]
            places = permute(np.arange(batches), batches, fold(self._group_key, window))
            rows = np.concatenate(
                [by_width.reshape(batches, -1)[places].reshape(-1), rows[batches * self._batch :]]
            )
        self._known[window] = rows  # two threads may both compute it, with equal results
        for old in list(self._known)[:-KEPT_WINDOWS]:
            self._known.pop(old, None)
        return rows

    def _shuffled(self, reader: RowReader, start: int, stop: int) -> Int64:
        size = self._block
        positions = np.arange(start, stop, dtype=np.int64)
        if size is None or self._shuffle_key is None:
            return positions
        rows = np.empty_like(positions)
        for block in range(start // size, -(-stop // size)):
            here = positions // size == block
            length = reader.available(block * size, (block + 1) * size)
            rows[here] = block * size + permute(
                positions[here] - block * size, length, fold(self._shuffle_key, block)
            )
        return rows
