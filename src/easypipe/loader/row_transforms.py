"""Random changes to single rows, the same for any number of processes and workers.

row     a row of the whole run (rows.py)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from easypipe.core.errors import SourceError, require
from easypipe.core.identity import dotted_name
from easypipe.core.random import fold
from easypipe.core.schema import INPUT_IDS, LOSS_MASK, POSITION_IDS, SEGMENT_IDS
from easypipe.core.values import Int32, Int64, Integers
from easypipe.loader.collate import collate
from easypipe.loader.rows.ranks import DerivedRows, innermost
from easypipe.loader.rows.rows import RowReader, Rows

CHANGEABLE = (INPUT_IDS, LOSS_MASK)


class RowTransform(Protocol):
    """A function of one row and of random bits.

    Law: its result depends only on its arguments. Several threads call it at the same time.
    """

    def __call__(self, columns: dict[str, Int32], key: int, /) -> Mapping[str, Integers] | None:
        """Changes one row.

        Args:
            columns: Int32[slots] each: `input_ids` and `loss_mask` to write to, `segment_ids` and
                `position_ids` to read.
            key: 64 random bits, for example for `np.random.Generator(np.random.PCG64(key))`.

        Returns:
            New arrays for one or both of the first two columns, or None.
        """
        ...


class MappedRows(DerivedRows):
    """The rows of another Rows, each changed by one function.

    The key of a row is `fold(seed, "row_transform", n, epoch, row)`, where n counts the transforms
    below this one. Reading raises a SourceError that names the row if the function's result is not
    a column of it, or has a value that is no id of the vocabulary, or neither 0 nor 1 in the mask.

    Raises:
        ConfigError: `transform` is not callable, or `version` is empty.
    """

    def __init__(self, rows: Rows, transform: RowTransform, version: str, seed: int) -> None:
        require(
            callable(transform),
            "map_rows",
            f"{transform!r} is not a function",
            "Give a function of (columns, key).",
        )
        require(
            isinstance(version, str) and version,
            "map_rows.version",
            f"{version!r} is not a version",
            "Give text, and change it when the function changes.",
        )
        self._transform, self._seed = transform, seed
        self._named = _name(transform), version
        super().__init__(rows, rows.num_epochs)

    def _take(self, below: Rows) -> None:
        super()._take(below)
        self.transforms = (*below.transforms, self._named)

    def arrange(self, rows: Int64) -> Int64:
        return self._reader.arrange(rows)

    def whole(self) -> RowReader:
        return self._reader.whole()

    def positions(self, own: Int64) -> Int64:
        return self._reader.positions(own)

    def gather(self, rows: Int64, width: int | None = None) -> dict[str, Int32]:
        columns = self._reader.gather(rows, width)
        columns.setdefault(LOSS_MASK, (columns[SEGMENT_IDS] > 0).astype(np.int32))
        epochs = self._reader.epochs(rows)
        # the function takes one row
        for i, (row, epoch) in enumerate(zip(rows.tolist(), epochs.tolist(), strict=True)):
            if row < 0:
                continue
            one = {name: columns[name][i] for name in (*CHANGEABLE, SEGMENT_IDS, POSITION_IDS)}
            one[SEGMENT_IDS].flags.writeable = one[POSITION_IDS].flags.writeable = False
            try:
                key = fold(
                    self._seed,
                    "row_transform",
                    len(self.transforms) - 1,
                    epoch,
                    innermost(self.below, row)[1],
                )
                made = self._transform(one, key)
            except Exception as error:
                error.add_note(
                    f"row transform {self.transforms[-1][0]!r}, epoch {epoch}, row {row}"
                )
                raise
            # the function may also have changed columns in place
            for name, values in (
                {name: one[name] for name in CHANGEABLE} | dict(made or {})
            ).items():
                columns[name][i] = self._checked(name, values, columns[INPUT_IDS].shape[1], row)
        return columns

    def batch(self, rows: Int64, width: int) -> dict[str, Int32]:
        return collate(self.gather(rows, width))

    def _checked(self, name: str, values: Any, width: int, row: int) -> Integers:
        array, at = np.asarray(values), f"row transform {self.transforms[-1][0]!r}, row {row}"
        if name not in CHANGEABLE or array.shape != (width,) or array.dtype.kind not in "iub":
            what = f"column {name!r}, {array.dtype} of shape {array.shape}"
            raise SourceError(
                at=at,
                problem=f"returned {what}",
                fix=f"Return integers of shape ({width},) for {' and '.join(CHANGEABLE)}, or None.",
            )
        most = 1 if name == LOSS_MASK else self.vocab_size - 1
        outside = array[(array < 0) | (array > most)]
        if outside.size:
            raise SourceError(
                at=at,
                problem=f"returned {int(outside[0])} in column {name!r}",
                fix=f"Return integers from 0 to {most} for it.",
            )
        return array


def _name(function: Any) -> str:
    return dotted_name(function, type(function).__name__)
