"""Values of aligned columns, and the dataset, of each token of a row, joined over datasets.

Loss weights belong to labels, other values to tokens: a weight is shifted with the label that its
token becomes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from easypipe.cache.address import uint8_at
from easypipe.cache.blocks import ROOM, note
from easypipe.core.aligned import (
    LOOK_AHEAD_WEIGHT,
    LOSS_WEIGHTS,
    NEUTRAL,
    SOURCE_IDS,
    AlignedColumn,
)
from easypipe.core.errors import require
from easypipe.core.jit import jit
from easypipe.core.values import Array, Int32, Int64, Integer, UInt8, UInt64
from easypipe.loader.collate import with_label_weights
from easypipe.loader.rows.gather import (
    NO_CHECKS,
    Tables,
    TablesFields,
    ViewFields,
    copy,
    find,
    token_behind,
)
from easypipe.plan.window import View

NONE_BEHIND = np.empty((0, 0), np.uint8)
# It has no stored values: the window provides them.
OF_SOURCES = AlignedColumn(name=SOURCE_IDS, dtype="uint16")


def joined_columns(
    each: Sequence[tuple[str, Sequence[AlignedColumn]]],
) -> tuple[AlignedColumn, ...]:
    """Returns the aligned columns of mixed datasets, by name.

    Raises:
        ConfigError: The columns of the datasets differ.
    """
    found: dict[str, tuple[str, AlignedColumn]] = {}
    for dataset, columns in each:
        for column in columns:
            first, known = found.setdefault(column.name, (dataset, column))
            require(
                known == column,
                f"datasets.{dataset}.aligned_columns",
                f"{column.name!r} holds {_said(column)}, and in dataset {first!r} {_said(known)}",
                "Give them one type.",
            )
    for dataset, columns in each:
        have = [column.name for column in columns]
        for name, (first, _) in found.items():
            require(
                name in have or name in NEUTRAL,
                f"datasets.{dataset}.aligned_columns",
                f"dataset {first!r} has {name!r}, and dataset {dataset!r} has not",
                "Give it the column too, or train on them in two runs.",
                have,
            )
    return tuple(column for _, column in found.values())


def _said(column: AlignedColumn) -> str:
    return f"{column.dtype}{f' x {column.width}' if column.width else ''}"


class ValueWriter:
    """Collects the values of aligned columns for `num_rows` rows of `num_slots` slots.

    They are zeros in padding and, except for weights, at an added EOS.

    Args:
        columns: The aligned columns.
        runs: Whether the rows are those of strategy "concat".
        joined: Whether each of those rows is one segment.
    """

    def __init__(
        self,
        columns: Sequence[AlignedColumn],
        num_rows: int,
        num_slots: int,
        *,
        runs: bool,
        joined: bool,
    ) -> None:
        self.columns, self._joined = columns, joined
        self.values = {column.name: column.empty(num_rows, num_slots) for column in columns}
        # the weights of the labels of last slots
        weighted = runs and LOSS_WEIGHTS in self.values
        self.behind = np.ones(num_rows if weighted else 0, np.float32)

    def write(
        self,
        view: View,
        rows: Int64,
        tables: Tables,
        values: Mapping[str, UInt64],
        check: Callable[[Int64], None] | None,
    ) -> None:
        """Writes the values of those of `rows` that are in the window.

        Args:
            view: The window.
            rows: Int64[R].
            tables: Where the documents are.
            values: For each column, where the values of each part begin; 0 if its dataset has no
                such column.
            check: As `Tokens.check`; None if everything was checked.
        """
        todo = NO_CHECKS if check is None else np.empty((2, ROOM), np.int64)
        for column in self.columns:
            weights = column.name == LOSS_WEIGHTS
            out = self.values[column.name]
            if column is OF_SOURCES:
                _write_sources(view[:], rows, out)
                continue
            ahead = self.behind[:, None].view(np.uint8) if weights else NONE_BEHIND
            where = values.get(column.name, np.zeros(len(tables.ids), np.uint64))
            rule = (_neutral(column), weights, self._joined, out.shape[1])
            flat = out.reshape(len(out), -1).view(np.uint8)
            # plain tuples, as in write.py
            given = (view[:], rows, tables[:], where, rule, (flat, ahead), todo)
            while count := _write(*given):
                assert check is not None
                check(todo[:, :count])

    def at_rest(self) -> dict[str, Array]:
        """Returns the stored columns: each value at the slot of its token."""
        ahead = {LOOK_AHEAD_WEIGHT: self.behind} if len(self.behind) else {}
        return {**self.values, **ahead}

    def of_batch(self, labels: Int32) -> dict[str, Array]:
        """Returns the columns of a batch with these labels."""
        last = np.full(len(labels), labels.shape[1] - 1)
        return with_label_weights(self.at_rest(), labels, last)


def copy_values(
    column: AlignedColumn,
    documents: tuple[Int32, Int64, Int64],
    tables: Tables,
    addresses: UInt64,
) -> Array:
    """Returns the values of whole documents that are in memory: [total] or [total, width].

    Args:
        column: The aligned column.
        documents: For each document its dataset, its number there, and where its tokens begin in
            the result.
        tables: Where the documents are.
        addresses: Where the values of each part begin.
    """
    out = column.empty(1, int(documents[2][-1]))[0]
    flat = out.reshape(-1).view(np.uint8)
    _copy(documents, tables, addresses, _neutral(column), NO_CHECKS, flat)
    return out


def _neutral(column: AlignedColumn) -> UInt8:
    """Returns, as bytes, the value of a token of a dataset without the column."""
    fill = np.full(max(1, column.width), NEUTRAL.get(column.name, 0), column.kind)
    return fill.view(np.uint8)


@jit
def _write(
    view: ViewFields,
    rows: Int64,
    tables: TablesFields,
    addresses: UInt64,
    rule: tuple[UInt8, bool, bool, int],
    into: tuple[UInt8, UInt8],
    todo: Int64,
) -> Integer:
    """Copies bytes of values.

    Args:
        view: The fields of a View.
        tables: The fields of a Tables.
        rule: (UInt8[size], the value of a token without such a column; whether an added EOS has the
            value of the token before it; joined; slots of a row).
        into: UInt8[R, slots * size] and, if the weights of labels after rows are needed, UInt8[R,
            size].

    Returns:
        How many blocks of `todo` must be checked first; if it is not 0, the call must be repeated.
    """
    view, tables = View(*view), Tables(*tables)
    fill, repeat, joined, num_slots = rule
    out, ahead = into
    size, unchecked = fill.shape[0], np.int64(0)
    for r in range(rows.shape[0]):
        row = rows[r] - view.first_row
        if rows[r] < 0 or row < 0 or row >= view.first_piece.shape[0] - 1:
            continue
        for n in range(view.first_piece[row], view.first_piece[row + 1]):
            slot, start = np.int64(view.table[1, n]), np.int64(view.table[3, n])
            length = np.int64(view.table[4, n])
            draw: np.int32 | np.int64 = view.table[2, n]
            part, first, end, unchecked = find(
                tables, view.dataset[draw], view.doc[draw], todo, unchecked
            )
            if part < 0:
                continue
            begin = first + start
            copied = min(length, end - begin)
            here = out[r, slot * size : (slot + copied) * size]
            unchecked = _take(tables, part, addresses, (begin, fill), here, todo, unchecked)
            if length > copied and repeat:  # an added EOS follows them
                last = out[r, (slot + copied) * size : (slot + length) * size]
                token = end - 1 if end > first else np.int64(-1)
                unchecked = _take(tables, part, addresses, (token, fill), last, todo, unchecked)
        if ahead.shape[0] > 0:
            draw, at = token_behind(view, row, joined, num_slots)
            if draw >= 0:
                part, first, end, unchecked = find(
                    tables, view.dataset[draw], view.doc[draw], todo, unchecked
                )
                token = min(first + at, end - 1) if end > first else np.int64(-1)
                if part >= 0:
                    unchecked = _take(
                        tables, part, addresses, (token, fill), ahead[r], todo, unchecked
                    )
    return unchecked


@jit
def _write_sources(view: ViewFields, rows: Int64, out: NDArray[np.uint16]) -> None:
    """Writes UInt16[R, T], the dataset of every token of those rows that are in the window."""
    view = View(*view)
    for r in range(rows.shape[0]):
        row = rows[r] - view.first_row
        if rows[r] < 0 or row < 0 or row >= view.first_piece.shape[0] - 1:
            continue
        for n in range(view.first_piece[row], view.first_piece[row + 1]):
            slot = np.int64(view.table[1, n])
            out[r, slot : slot + view.table[4, n]] = view.dataset[view.table[2, n]]


@jit
def _copy(
    documents: tuple[Int32, Int64, Int64],
    tables: Tables,
    addresses: UInt64,
    fill: UInt8,
    todo: Int64,
    out: UInt8,
) -> None:
    dataset, docs, offsets = documents
    size = fill.shape[0]
    for n in range(docs.shape[0]):
        part, begin, _, _ = find(tables, dataset[n], docs[n], todo, 0)
        here = out[offsets[n] * size : offsets[n + 1] * size]
        _take(tables, part, addresses, (begin, fill), here, todo, 0)


@jit
def _take(
    tables: Tables,
    part: Integer,
    addresses: UInt64,
    which: tuple[np.int64, UInt8],
    out: UInt8,
    todo: Int64,
    unchecked: Integer,
) -> Integer:
    """Copies the values of tokens from a first one on, as many as `out` (UInt8) has room for.

    `which` is (the first token of the part, -1 for none; UInt8[size], the value without a column).
    """
    token, fill = which
    size, address = fill.shape[0], addresses[part]
    if address == 0 or token < 0:
        for i in range(out.shape[0]):
            out[i] = fill[i % size]
        return unchecked
    if todo.shape[1] > 0 and tables.checked[part] != 0:
        here = np.int64(address) + token * size
        unchecked = note(
            tables.checked[part], tables.file[part], here, out.shape[0], part, todo, unchecked
        )
    copy(uint8_at(address), token * size, out)
    return unchecked
