"""The order of rows in batches: permuted within blocks, grouped by length within windows.

It is computed from positions and lengths. Where ranks divide the rows, it is the order of all
their rows, so that it does not depend on how many there are.

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

    In a window of W batches of B rows (of all ranks together), the rows of its whole batches are
    sorted by the slots that each needs; rows with equal needs stay in order. They are cut into
    batches, which are permuted. Rows that do not fill a batch stay at the end, so drop_last leaves
    out the same rows.

    Raises:
        ConfigError: Rows should be grouped by length, but all have the same width.
    """

    def __init__(self, rows: Rows, config: LoadStageConfig, rule: CollateConfig, seed: int) -> None:
        self._rule, self._world = rule, rows.world_size
        self._batch = config.batch_size * self._world
        block, factor = config.shuffle_buffer_size, rows.shuffle_buffer_factor
        if block is None and factor is not None:
            block = factor * self._batch
        # if rows are read forward, documents are shuffled, not rows
        self._block = block if rows.by_number else None
        self._shuffle_key = None if self._block is None else fold(seed, "loader", "shuffle")
        self._settings = {"shuffle_buffer_size": block, **rows.settings}
        if self._world > 1 and (self._block or config.group_by_length):
            # before, each rank permuted its own rows
            self._settings |= {"order_of_ranks": "all rows"}
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

        From `row` on, nothing before that row is read. Rows are counted as this rank does.
        """
        position = row * self._world
        for size in (self._window, self._block):
            position = position // size * size if size else position
        return position // self._world

    def rows(self, reader: RowReader, start: int, stop: int) -> Int64:
        """Returns the rows at the rank's positions `start` to `stop`, without those after the end.

        There must be at least one.
        """
        positions, whole = reader.positions(np.arange(start, stop, dtype=np.int64)), reader.whole()
        if not self._window:
            return reader.arrange(self._shuffled(whole, positions))
        parts: list[Int64] = []
        for n in range(positions[0] // self._window, positions[-1] // self._window + 1):
            rows, places = self._grouped(whole, n), positions - n * self._window
            parts.append(rows[places[(places >= 0) & (places < len(rows))]])
        return np.concatenate(parts)

    def _grouped(self, reader: RowReader, window: int) -> Int64:
        """Returns the rows of a window in order."""
        known = self._known.get(window)
        if known is not None:
            return known
        start = window * self._window
        stop = start + reader.available(start, start + self._window)
        rows = self._shuffled(reader, np.arange(start, stop, dtype=np.int64))
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

    def _shuffled(self, reader: RowReader, positions: Int64) -> Int64:
        size = self._block
        if size is None or self._shuffle_key is None:
            return positions
        rows = np.empty_like(positions)
        for block in range(positions[0] // size, positions[-1] // size + 1):
            here = positions // size == block
            length = reader.available(block * size, (block + 1) * size)
            rows[here] = block * size + permute(
                positions[here] - block * size, length, fold(self._shuffle_key, block)
            )
        return rows
