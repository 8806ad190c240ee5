"""Makes batches from stored rows: which columns, how wide and padded, and the only label shift.

`labels[t]` is the token at `t + 1` if that token is in the same segment and a target (its
`loss_mask` is 1), else -100. So the last token of every segment, padding, and a token before a
masked one have no label; the first token of a segment is never a target. A stored row, in files and
caches, has token columns without labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from easypipe.core.aligned import LOOK_AHEAD_WEIGHT, LOSS_WEIGHTS
from easypipe.core.config import config
from easypipe.core.errors import ConfigError, SourceError, require
from easypipe.core.jit import jit
from easypipe.core.schema import (
    ATTENTION_MASK,
    IGNORE,
    INPUT_IDS,
    LABELS,
    LOOK_AHEAD,
    LOSS_MASK,
    POSITION_IDS,
    SEGMENT_IDS,
)
from easypipe.core.values import Array, Int32, Integers, JsonObject, UInt8
from easypipe.transforms.tokenizer.config import PaddingSide, check_padding

BATCH_COLUMNS = (INPUT_IDS, LABELS, SEGMENT_IDS, POSITION_IDS)

_NO_MASK = np.empty((0, 0), dtype=np.uint8)
_AT_REST = (INPUT_IDS, SEGMENT_IDS, POSITION_IDS, LOSS_MASK, LOOK_AHEAD)


@config
class CollateConfig:
    """How rows become one rectangle.

    Packed rows all have `seq_length` slots and need no padding.

    Args:
        padding: "longest" (or True) pads to the longest row of the global batch, "max_length" to
            `max_length`; False does not pad, and a batch of rows of several lengths is an error.
        padding_side: As in TokenizerConfig.
        pad_to_multiple_of: As in TokenizerConfig.
        length_buckets: As in TokenizerConfig; only widths.
    """

    padding: Literal["longest", "max_length"] | bool = "longest"
    max_length: int | None = None  # width of rows for padding "max_length"
    padding_side: PaddingSide = "right"
    pad_to_multiple_of: int | None = None
    length_buckets: tuple[int, ...] = ()
    attention_mask: bool = False  # add the column attention_mask: 1 for a token, 0 for padding
    segment_ids: bool = True  # False leaves this column out of batches

    def check(self) -> None:
        require(
            self.max_length is None or self.max_length >= 1,
            "max_length",
            f"{self.max_length} is not a row length",
            "Give at least 1.",
        )
        require(
            self.padding != "max_length" or self.max_length is not None,
            "max_length",
            "padding='max_length' needs it",
            "Set max_length, or padding='longest'.",
        )
        check_padding(self)

    @property
    def settings(self) -> JsonObject:
        """The options that decide the content of batches, for the states of loaders.

        An option that older states lack is left out if it has its default value.
        """
        return {
            "padding": self.padding,
            "max_length": self.max_length,
            "attention_mask": self.attention_mask,
            **({} if self.segment_ids else {"segment_ids": False}),
            **self.shaping,
        }

    @property
    def shaping(self) -> JsonObject:
        """The options that are set and have no effect on packed rows."""
        side = {"padding_side": "left"} if self.padding_side == "left" else {}
        multiple = (
            {}
            if self.pad_to_multiple_of is None
            else {"pad_to_multiple_of": self.pad_to_multiple_of}
        )
        return (
            side
            | multiple
            | ({"length_buckets": list(self.length_buckets)} if self.length_buckets else {})
        )


def collate(rows: Mapping[str, Integers], *, attention_mask: bool = False) -> dict[str, Int32]:
    """Makes a batch from stored rows.

    Other columns, [rows, slots, ...], belong to tokens and stay with them; loss weights belong to
    labels and are shifted with them.

    Args:
        rows: `input_ids` and `segment_ids`, integers [rows, slots]; `loss_mask` unless every token
            is a target; `position_ids`, which are otherwise counted from each segment's start;
            `look_ahead`, integers [rows], the label of each row's last slot, or -100.
        attention_mask: Adds the column `attention_mask`.

    Returns:
        Int32[rows, slots] `input_ids`, `labels`, `segment_ids` and `position_ids`, all freshly
        allocated, C-contiguous and 64-byte aligned.

    Raises:
        ValueError: The columns differ in shape.
    """
    shape = rows[INPUT_IDS].shape
    values = {name: column for name, column in rows.items() if name not in _AT_REST}
    for name, column in rows.items():
        of_rows = name in (LOOK_AHEAD, LOOK_AHEAD_WEIGHT)
        if column.shape[: None if name in _AT_REST else 2] != (shape[:1] if of_rows else shape):
            raise ValueError(f"column {name!r} has shape {column.shape}, input_ids {shape}")
    batch = fresh_columns(BATCH_COLUMNS, *shape)
    batch[INPUT_IDS][:] = rows[INPUT_IDS]
    batch[SEGMENT_IDS][:] = rows[SEGMENT_IDS]
    if POSITION_IDS in rows:
        batch[POSITION_IDS][:] = rows[POSITION_IDS]
    else:
        count_positions(batch[SEGMENT_IDS], batch[POSITION_IDS])
    mask = np.ascontiguousarray(rows[LOSS_MASK], dtype=np.uint8) if LOSS_MASK in rows else _NO_MASK
    shift_labels(batch[INPUT_IDS], batch[SEGMENT_IDS], mask, batch[LABELS])
    if LOOK_AHEAD in rows:
        # If it is not -100, the row is full, and it belongs to the last token, which only the
        # padding of a wider batch may follow.
        known = np.flatnonzero(rows[LOOK_AHEAD] != IGNORE)
        last = np.count_nonzero(batch[SEGMENT_IDS][known], axis=1) - 1
        batch[LABELS][known, last] = rows[LOOK_AHEAD][known]
    if values:
        last = np.count_nonzero(batch[SEGMENT_IDS], axis=1) - 1
        batch |= with_label_weights(values, batch[LABELS], last)
    return with_attention_mask(batch) if attention_mask else batch


def with_asked(batch: dict[str, Int32], rule: CollateConfig) -> dict[str, Int32]:
    """Returns the columns that `rule` requests, padded on its padding_side."""
    if rule.padding_side == "left" and batch[SEGMENT_IDS].size:
        # slots after the last token; 0 in a row without tokens
        segments = batch[SEGMENT_IDS]
        padding = np.argmax(segments[:, ::-1] > 0, axis=1)
        # slots that would be before the first take the last slot, which is padding
        slots = np.maximum(np.arange(segments.shape[1]) - padding[:, None], -1)
        for column in batch.values():
            column[:] = column[np.arange(len(segments))[:, None], slots]
    if rule.attention_mask:
        batch = with_attention_mask(batch)
    return (
        batch
        if rule.segment_ids
        else {name: column for name, column in batch.items() if name != SEGMENT_IDS}
    )


def with_label_weights(
    values: Mapping[str, Array], labels: Int32, last: Integers
) -> dict[str, Array]:
    """Returns columns of tokens as those of a batch.

    Loss weights are shifted like labels, and are 0 if there is no label.

    Args:
        values: The columns of tokens.
        labels: Int32[rows, slots].
        last: Int[rows], the last token of each row.
    """
    found = {name: column for name, column in values.items() if name != LOOK_AHEAD_WEIGHT}
    if (weights := values.get(LOSS_WEIGHTS)) is None:
        return found
    shifted = np.zeros(labels.shape, np.float32)
    shifted[:, :-1] = weights[:, 1:]
    if (ahead := values.get(LOOK_AHEAD_WEIGHT)) is not None and labels.size:
        shifted[np.arange(len(labels)), last] = ahead  # if the row is full, it has a label
    shifted[labels == IGNORE] = 0
    return {**found, LOSS_WEIGHTS: shifted}


def with_attention_mask(batch: dict[str, Int32]) -> dict[str, Int32]:
    mask = fresh_columns((ATTENTION_MASK,), *batch[SEGMENT_IDS].shape)[ATTENTION_MASK]
    np.greater(batch[SEGMENT_IDS], 0, out=mask, casting="unsafe")
    return batch | {ATTENTION_MASK: mask}


def fresh_columns(names: Sequence[str], num_rows: int, num_slots: int) -> dict[str, Int32]:
    """Returns uninitialized Int32[num_rows, num_slots] arrays, contiguous and 64-byte aligned.

    All are in one new allocation. The memory is never reused: `jax.device_put` on a CPU device
    does not copy aligned host memory, so a refilled buffer would change a batch that is still in
    use.
    """
    column = num_rows * num_slots
    # in int32s, rounded up so that every column starts at a multiple of 64 bytes
    stride = -(-column // 16) * 16
    raw = np.empty(stride * len(names) + 16, dtype=np.int32)
    first = -(address(raw) // 4) % 16
    if stride == column:
        return dict(
            zip(
                names,
                raw[first : first + stride * len(names)].reshape(len(names), num_rows, num_slots),
                strict=True,
            )
        )
    return {
        name: raw[first + i * stride : first + i * stride + column].reshape(num_rows, num_slots)
        for i, name in enumerate(names)
    }


def as_stack(columns: Mapping[str, Int32]) -> Int32 | None:
    """Returns columns of one `fresh_columns` allocation as one Int32[columns, rows, slots].

    Nothing is copied. It returns None for any other columns.
    """
    first, *others = columns.values()
    memory, row_shape = first.base, first.shape
    if not isinstance(memory, np.ndarray):
        return None
    start = before = address(first)
    stride = address(others[0]) - start if others else first.nbytes
    if stride < first.nbytes:
        return None
    for column in others:
        here = address(column)
        if here - before != stride or column.base is not memory or column.shape != row_shape:
            return None
        before = here
    offset = start - address(memory)
    if stride == first.nbytes:
        return memory[offset // 4 : offset // 4 + first.size * len(columns)].reshape(
            len(columns), *row_shape
        )
    return np.ndarray(
        (len(columns), *row_shape),
        np.int32,
        buffer=memory.data,
        offset=offset,
        strides=(stride, *first.strides),
    )


def address(array: NDArray[np.generic]) -> int:
    return array.__array_interface__["data"][0]  # `array.ctypes.data` costs several times as much


def row_width(lengths: Integers, rule: CollateConfig, describe_row: str = "row") -> int:
    """Returns the slots of a batch whose rows hold `lengths` tokens.

    Raises:
        SourceError: A row does not fit the rule.
    """
    longest = int(lengths.max(initial=0))
    if rule.padding == "max_length":
        assert rule.max_length is not None
        width = rule.max_length
    else:
        width = int(alone_widths(np.array([longest]), rule)[0])
    if longest > width:
        name, cut, more = (
            ("length_buckets", f"Truncate when tokenizing (max_length={width})", "add a bucket of")
            if rule.length_buckets
            # it is set: the tokens came from elsewhere, or the tokenizer has truncation=False
            else ("max_length", "Shorten the rows where tokens are made", "raise max_length to")
        )
        raise SourceError(
            at=f"{describe_row} {int(lengths.argmax())} of the batch",
            problem=f"{longest} tokens do not fit {name} {width}",
            fix=f"{cut}, pack the rows, or {more} {longest}.",
        )
    if rule.padding is False and int(lengths.min(initial=longest)) != longest:
        raise SourceError(
            at=f"{describe_row} {int(lengths.argmin())} of the batch",
            problem=f"{int(lengths.min())} tokens, another row has {longest}, and padding is False",
            fix="Set padding='longest' or 'max_length', or pack the rows.",
        )
    return width


def alone_widths(lengths: Integers, rule: CollateConfig) -> Integers:
    """Returns the slots that each row of `lengths` tokens would have in a separate batch.

    A row too long for all buckets gets the width of the last bucket.
    """
    if rule.length_buckets:
        buckets = np.array(rule.length_buckets)
        return buckets[np.minimum(np.searchsorted(buckets, lengths), buckets.size - 1)]
    multiple = rule.pad_to_multiple_of or 1
    return -(-lengths // multiple) * multiple


def known_width(rule: CollateConfig, seq_length: int | None) -> int | None:
    """Returns the slots of every batch if they are known before its rows are read; else None.

    Args:
        rule: How rows are padded.
        seq_length: The slots of packed rows; None if rows are not packed.

    Raises:
        ConfigError: The rows are packed, so `rule` would have no effect.
    """
    if seq_length is None:
        return rule.max_length if rule.padding == "max_length" else None
    require(
        rule.padding != "max_length" or rule.max_length == seq_length,
        "collate.max_length",
        f"{rule.max_length}, but every row has {seq_length} slots already",
        "Leave padding at 'longest' for packed rows.",
    )
    for name, value in rule.shaping.items():
        raise ConfigError(
            at=name,
            problem=f"{value!r}, but the rows are packed: each has {seq_length} slots already",
            fix="Leave it out, or do not pack.",
        )
    return seq_length


@jit
def shift_labels(ids: Int32, segments: Int32, mask: UInt8, labels: Int32) -> None:
    """Writes `labels`, Int32[R, T], from `ids` and `segments`, Int32[R, T].

    `mask` is UInt8[R, T], or UInt8[0, 0] if every token is a target.
    """
    masked = mask.shape[0] > 0
    num_slots = ids.shape[1]
    for r in range(ids.shape[0]):
        for t in range(num_slots - 1):
            same = (segments[r, t] == segments[r, t + 1]) & (segments[r, t] > 0)
            labels[r, t] = ids[r, t + 1] if same else IGNORE
        if num_slots > 0:
            labels[r, num_slots - 1] = IGNORE
        if masked:
            for t in range(num_slots - 1):
                if mask[r, t + 1] == 0:
                    labels[r, t] = IGNORE


@jit
def count_positions(segments: Int32, positions: Int32) -> None:
    """Writes `positions`, Int32[R, T], counted from 0 within each segment; 0 in padding."""
    for r in range(segments.shape[0]):
        count = 0
        for t in range(segments.shape[1]):
            if segments[r, t] == 0 or t == 0 or segments[r, t] != segments[r, t - 1]:
                count = 0
            else:
                count += 1
            positions[r, t] = count
