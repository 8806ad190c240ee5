"""Aligned columns: lists with numbers for every token of `input_ids`, and their neutral values.

The loss mask is also one; it is handled elsewhere, because it decides the labels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from easypipe.core.errors import SourceError, place
from easypipe.core.schema import INPUT_IDS, is_list
from easypipe.core.values import Array, Int64

# the weight of each token as a target; in batches, the weight of each label
LOSS_WEIGHTS = "loss_weights"
# only in rows of strategy "concat", one number per row: the weight of `look_ahead`
LOOK_AHEAD_WEIGHT = "look_ahead_weight"
# in batches, if requested: the number of the dataset that each token came from
SOURCE_IDS = "source_ids"
# the values of tokens in datasets without such a column, where these are not 0
NEUTRAL = {LOSS_WEIGHTS: 1.0}


@dataclass(frozen=True, kw_only=True)
class AlignedColumn:
    """A column with numbers for every token.

    Args:
        name: The name of the column.
        dtype: NumPy's name of their type.
        width: How many numbers each token has; 0 means one number that is not in a list.
    """

    name: str
    dtype: str
    width: int = 0

    @property
    def kind(self) -> np.dtype[Any]:
        return np.dtype(self.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one token's value."""
        return (self.width,) if self.width else ()

    @property
    def num_bytes(self) -> int:
        """The bytes of one token's value."""
        return self.kind.itemsize * max(1, self.width)

    @property
    def field(self) -> pa.Field:
        """The Arrow field of the stored column."""
        value = pa.from_numpy_dtype(self.kind)
        one = pa.list_(value, self.width) if self.width else value
        return pa.field(self.name, pa.large_list(one), nullable=False)

    def empty(self, num_rows: int, num_slots: int) -> Array:
        """Returns zeros for the slots of rows, in new contiguous memory."""
        return np.zeros((num_rows, num_slots, *self.shape), self.kind)

    def lists(self, offsets: Int64, values: Array) -> pa.LargeListArray:
        """Returns `values[offsets[i] : offsets[i + 1]]` as lists of `field`."""
        inner = pa.array(np.ascontiguousarray(values).reshape(-1))
        if self.width:
            inner = pa.FixedSizeListArray.from_arrays(inner, self.width)
        return pa.LargeListArray.from_arrays(pa.array(offsets), inner)


# for answers that were judged one by one: 1 if the answer is desirable (train.preference: kto)
DESIRABLE = AlignedColumn(name="desirable", dtype="uint8")


def column_of(field: pa.Field, width: int | None, at: str) -> AlignedColumn:
    """Returns how a column of lists is stored.

    Args:
        field: The Arrow field of the column.
        width: How many numbers each token has by the config; None: the type decides.
        at: Where the column is, for errors.

    Raises:
        SourceError: The type does not hold numbers for every token.
    """
    inner, own = field.type.value_type if is_list(field.type) else pa.null(), 0
    if is_list(inner):
        own = inner.list_size if pa.types.is_fixed_size_list(inner) else width or 0
        inner = inner.value_type if own else pa.null()
    number = pa.types.is_integer(inner) or pa.types.is_floating(inner) or pa.types.is_boolean(inner)
    if not number or (width or own) != own or (own and field.name == LOSS_WEIGHTS):
        raise SourceError(
            at=place(at, column=field.name),
            problem=f"holds {field.type}, but an aligned column holds a number for every token, or "
            f"lists of one length{'' if width is None else f', here {width}'}",
            fix="Give lists as long as input_ids. For lists in lists, name the length of the inner "
            f"lists: aligned_columns: {{{field.name}: 8}}.",
        )
    kind = np.dtype(inner.to_pandas_dtype()).name
    # Arrow packs bools into bits, and kernels copy bytes
    kind = "float32" if field.name == LOSS_WEIGHTS else "uint8" if kind == "bool" else kind
    return AlignedColumn(name=field.name, dtype=kind, width=own)


def numbers_of(lists: pa.LargeListArray) -> pa.Array:
    """Returns the numbers within lists, or within fixed-size lists in lists, without a copy."""
    values = lists.values
    return values.values if isinstance(values, pa.FixedSizeListArray) else values


def values_of(lists: pa.LargeListArray) -> Array:
    """Returns the values of a stored column, from its first list on: [tokens(, width)]."""
    values, flat = lists.values, numbers_of(lists).to_numpy()
    inner = isinstance(values, pa.FixedSizeListArray)
    return flat.reshape(-1, values.type.list_size) if inner else flat


def flat_values(
    column: AlignedColumn, lists: pa.Array, offsets: Int64, at: Callable[[int], str]
) -> Array:
    """Returns the values of all rows of a column: [tokens] or [tokens, width].

    Args:
        column: The column to make.
        lists: Its lists, one for each row.
        offsets: Int64[n + 1], where the tokens of each row begin.
        at: Returns where row i is, for errors.

    Raises:
        SourceError: A row has not as many values as tokens, or an invalid value; the error names
            the first such row.
    """

    def check(right: Array, said: Callable[[int], str]) -> None:
        if not right.all():
            row = int(np.argmin(right))
            raise SourceError(
                at=f"{at(row)}, column {column.name!r}",
                problem=said(row),
                fix=f"Give as many values as the row has {INPUT_IDS}, or leave the row out.",
            )

    def each(right: Array) -> Array:
        """Returns for every row whether `right` holds for all of its tokens."""
        wrong = np.concatenate([[0], np.cumsum(~right)])
        return wrong[offsets[1:]] == wrong[offsets[:-1]]

    sizes, tokens = _lengths(lists), np.diff(offsets)
    check(sizes == tokens, lambda i: f"{sizes[i]} values, and the row has {tokens[i]} tokens")
    values = lists.flatten()
    if column.width:
        inner, wanted = _lengths(values), column.width
        check(
            each(np.equal(inner, wanted)),
            lambda i: f"one of its tokens does not have {wanted} values",
        )
        values = values.flatten()
    valid = _valid(values).reshape(-1, max(1, column.width))
    check(each(np.asarray(valid.all(axis=1))), lambda i: "a null among its values")
    found = values.to_numpy(zero_copy_only=False).astype(column.kind, copy=False)
    if column.name == LOSS_WEIGHTS:
        right = np.asarray(np.isfinite(found) & (found >= 0))
        check(each(right), lambda i: "a weight that is below 0, or not a number")
    return found.reshape(-1, *column.shape)


def _lengths(lists: pa.Array) -> Int64:
    """Returns the length of every list; -1 for null."""
    if isinstance(lists, pa.FixedSizeListArray):
        sizes = np.full(len(lists), lists.type.list_size, np.int64)
    else:
        sizes = np.diff(lists.offsets.to_numpy()).astype(np.int64)
    return np.where(_valid(lists), sizes, -1)


def _valid(values: pa.Array) -> Array:
    return values.is_valid().to_numpy(zero_copy_only=False)
