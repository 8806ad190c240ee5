"""Which rows are in which batch, computed from batch sizes, which may change by step.

step    the number of a batch, counted from 0: one batch is one training step
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple


class Begin(NamedTuple):
    """The place where counting begins: batch `batch` starts at row `row`."""

    batch: int = 0
    row: int = 0


class Steps:
    """The rows of every batch; the batch size may change.

    Args:
        batch_size: The rows of a batch from step 0 on.
        schedule: (step, rows of a batch from that step on), in ascending order.
        begin: (0, 0), or where a run continues after its config was changed.
    """

    def __init__(
        self, batch_size: int, schedule: Sequence[tuple[int, int]] = (), begin: Begin | None = None
    ) -> None:
        points = [(0, batch_size), *schedule]
        self.begin = begin or Begin()
        self._first = [step for step, _ in points]
        self._sizes = [size for _, size in points]
        self.sizes = tuple(sorted(set(self._sizes)))  # of all batches, each once
        # the rows before the first step of each point, as if counted from step 0
        self._rows = [0]
        for (step, size), (after, _) in itertools.pairwise(points):
            self._rows.append(self._rows[-1] + (after - step) * size)
        self._skip = 0
        self._skip = self.begin.row - self.start(self.begin.batch)

    def at(self, step: int) -> tuple[int, int]:
        """Returns the first row of batch `step`, and its size."""
        i = bisect_right(self._first, step) - 1
        size = self._sizes[i]
        return self._skip + self._rows[i] + (step - self._first[i]) * size, size

    def size(self, step: int) -> int:
        return self.at(step)[1]

    def start(self, step: int) -> int:
        """Returns the first row of batch `step`."""
        return self.at(step)[0]

    def counts(self, stop: int) -> tuple[tuple[int, int], ...]:
        """Returns (how many batches, rows of each) from the first batch to `stop`, in order."""
        first = self.begin.batch
        edges = [first, *(step for step in self._first if first < step < stop), max(first, stop)]
        counts = [(end - begin, self.size(begin)) for begin, end in itertools.pairwise(edges)]
        return tuple(one for one in counts if one[0])

    def full(self, num_rows: int) -> int:
        """Returns how many batches `num_rows` rows fill, from the first on."""
        i, left = self._point(num_rows)
        return self._first[i] + left // self._sizes[i]

    def needed(self, num_rows: int) -> int:
        """Returns how many batches `num_rows` rows need; the last may not be full."""
        i, left = self._point(num_rows)
        return self._first[i] - -left // self._sizes[i]

    def _point(self, num_rows: int) -> tuple[int, int]:
        """Returns the point after which the rows end, and how many of them come after it."""
        rows = max(num_rows - self._skip, 0)
        i = bisect_right(self._rows, rows) - 1
        return i, rows - self._rows[i]
