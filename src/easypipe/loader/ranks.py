"""The rows of one rank, for programs that share data by rank and size in place of a mesh."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from easypipe.core.config import digest
from easypipe.core.errors import ConfigError
from easypipe.loader.rows import Rows


def check_rank(rank: int, world_size: int) -> None:
    """Raises ConfigError where there is no such rank."""
    if world_size < 1 or not 0 <= rank < world_size:
        fix = f"Ranks count from 0 to {max(world_size, 1) - 1}."
        raise ConfigError(at="rank", problem=f"there is no rank {rank} of {world_size}", fix=fix)


class RankRows:
    """The rows `rank`, `rank + world_size`, ... of other rows: each row belongs to one rank, and batch t of all ranks together is rows
    `t * world_size * batch_size` onward, so what is trained on does not depend on how many ranks there are.

    even: leave out up to world_size - 1 last rows, so that every rank has as many; else the first ranks may have one more.
    """

    def __init__(self, rows: Rows, rank: int, world_size: int, *, even: bool) -> None:
        check_rank(rank, world_size)
        self.below, self._rank, self._ranks, self._even = rows, rank, world_size, even
        self.seq_length, self.pad_token_id = rows.seq_length, rows.pad_token_id
        self.num_epochs, self.lengths_are_free = rows.num_epochs, rows.lengths_are_free

    @property
    def num_rows(self) -> int | None:
        total = self.below.num_rows
        return None if total is None else self._own(total)

    @property
    def identity(self) -> Mapping[str, str]:
        below = self.below.identity
        return {**below, "plan": digest("ranks", below["plan"], self._ranks, self._even)}  # one for all ranks: any may save the state

    @property
    def words(self) -> Mapping[str, Any]:
        return self.below.words

    def available(self, start: int, stop: int) -> int:
        first = start * self._ranks
        return max(0, self._own(first + self.below.available(first, stop * self._ranks)) - start)

    def lengths(self, rows: NDArray[np.int64]) -> NDArray[np.int32]:
        return self.below.lengths(self._there(rows))

    def epochs(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        return self.below.epochs(self._there(rows))

    def gather(self, rows: NDArray[np.int64], width: int | None = None) -> dict[str, NDArray[np.int32]]:
        return self.below.gather(self._there(rows), width)

    def batch(self, rows: NDArray[np.int64], width: int) -> Any:
        return self.below.batch(self._there(rows), width)

    def hint(self, row: int) -> Any:
        return self.below.hint(row * self._ranks)

    def seek(self, hint: Any) -> None:
        self.below.seek(hint)

    def row_below(self, row: int) -> int:
        """Which of the rows below a row of this rank is."""
        return row * self._ranks + self._rank

    def _own(self, total: int) -> int:
        """How many of the first `total` rows are this rank's."""
        return total // self._ranks if self._even else (total + self._ranks - 1 - self._rank) // self._ranks

    def _there(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.where(rows < 0, rows, rows * self._ranks + self._rank)
