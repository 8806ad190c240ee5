from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from easypipe.core.aligned import LOSS_WEIGHTS
from easypipe.core.config import from_dict
from easypipe.core.errors import ConfigError, SourceError
from easypipe.core.schema import (
    ATTENTION_MASK,
    IGNORE,
    INPUT_IDS,
    LABELS,
    LOSS_MASK,
    POSITION_IDS,
    SEGMENT_IDS,
)
from easypipe.loader.collate import BATCH_COLUMNS, CollateConfig, collate, fresh_columns, row_width
from laws import assert_labels, assert_rows_well_formed


@st.composite
def packed_rows(draw, max_rows: int = 5, max_slots: int = 24):
    """Rows of segments from 1, padding behind them, and a loss mask or none."""
    num_rows, num_slots = draw(st.integers(0, max_rows)), draw(st.integers(1, max_slots))
    segments = np.zeros((num_rows, num_slots), np.int32)
    for r in range(num_rows):
        slot, segment = 0, 1
        while slot < num_slots and draw(st.booleans()):
            length = draw(st.integers(1, num_slots - slot))
            segments[r, slot : slot + length] = segment
            slot, segment = slot + length, segment + 1
    ids = np.asarray(
        draw(
            st.lists(
                st.integers(0, 99_999), min_size=num_rows * num_slots, max_size=num_rows * num_slots
            )
        ),
        np.int32,
    )
    rows = {
        INPUT_IDS: np.where(segments > 0, ids.reshape(num_rows, num_slots), 7).astype(np.int32),
        SEGMENT_IDS: segments,
    }
    if draw(st.booleans()):
        bits = draw(
            st.lists(st.booleans(), min_size=num_rows * num_slots, max_size=num_rows * num_slots)
        )
        rows[LOSS_MASK] = (
            np.asarray(bits, bool).reshape(num_rows, num_slots) & (segments > 0)
        ).astype(np.int32)
    return rows


def reference(rows):
    """collate() in plain NumPy: what it must equal."""
    ids, segments = rows[INPUT_IDS], rows[SEGMENT_IDS]
    after = np.roll(segments, -1, axis=1)
    target = (segments == after) & (segments > 0)
    if LOSS_MASK in rows:
        target &= np.roll(rows[LOSS_MASK], -1, axis=1) == 1
    target[:, -1:] = False
    slots = np.broadcast_to(np.arange(segments.shape[1]), segments.shape)
    starts = np.where(np.diff(segments, axis=1, prepend=-1) != 0, slots, 0)
    positions = np.where(segments > 0, slots - np.maximum.accumulate(starts, axis=1), 0)
    return {
        INPUT_IDS: ids,
        LABELS: np.where(target, np.roll(ids, -1, axis=1), IGNORE).astype(np.int32),
        SEGMENT_IDS: segments,
        POSITION_IDS: positions.astype(np.int32),
    }


@given(rows=packed_rows(), with_mask=st.booleans())
def test_collate_equals_its_reference(rows, with_mask):
    batch = collate(rows, attention_mask=with_mask)
    assert list(batch) == [*BATCH_COLUMNS, *([ATTENTION_MASK] if with_mask else [])]
    for name, expected in reference(rows).items():
        assert batch[name].dtype == np.int32
        np.testing.assert_array_equal(batch[name], expected, err_msg=name)
    if with_mask:
        np.testing.assert_array_equal(
            batch[ATTENTION_MASK], (rows[SEGMENT_IDS] > 0).astype(np.int32)
        )
    assert_rows_well_formed(batch, pad_token_id=7)
    assert_labels(batch, rows.get(LOSS_MASK))


def test_the_edges_by_hand():
    rows = {
        INPUT_IDS: np.array([[5, 6, 7, 8, 9, 0]], np.int32),
        SEGMENT_IDS: np.array([[1, 1, 1, 2, 2, 0]], np.int32),
        LOSS_MASK: np.array([[1, 0, 1, 1, 1, 0]], np.int32),
    }
    batch = collate(rows)
    # 5 stands before the masked 6; 6 before the target 7; 7 ends its segment; 8 before 9; 9 ends
    # its segment; padding
    assert batch[LABELS].tolist() == [[IGNORE, 7, IGNORE, 9, IGNORE, IGNORE]]
    assert batch[POSITION_IDS].tolist() == [[0, 1, 2, 0, 1, 0]]


@given(rows=packed_rows(max_rows=3), other=st.integers(0, 99_999))
def test_a_segment_never_sees_another(rows, other):
    """Isolation: rewriting one segment changes no label of the others."""
    before = collate(rows)[LABELS]
    for r in range(rows[SEGMENT_IDS].shape[0]):
        for segment in range(1, rows[SEGMENT_IDS][r].max(initial=0) + 1):
            changed = {name: values.copy() for name, values in rows.items()}
            here = rows[SEGMENT_IDS][r] == segment
            changed[INPUT_IDS][r, here] = other
            after = collate(changed)[LABELS]
            np.testing.assert_array_equal(after[r, ~here], before[r, ~here])


@given(
    names=st.lists(st.sampled_from("abcd"), min_size=1, max_size=4, unique=True),
    rows=st.integers(1, 9),
    slots=st.integers(1, 70),
)
def test_columns_are_fresh_contiguous_and_aligned(names, rows, slots):
    columns, again = fresh_columns(names, rows, slots), fresh_columns(names, rows, slots)
    for i, name in enumerate(names):
        column = columns[name]
        assert column.shape == (rows, slots)
        assert column.dtype == np.int32
        assert column.flags.c_contiguous
        assert column.flags.writeable
        assert column.ctypes.data % 64 == 0
        column[:] = i
        again[name][:] = -1
    for i, name in enumerate(names):
        assert (columns[name] == i).all(), "columns overlap"


def test_columns_of_other_shapes_are_refused():
    rows = {INPUT_IDS: np.zeros((2, 4), np.int32), SEGMENT_IDS: np.zeros((2, 5), np.int32)}
    with pytest.raises(
        ValueError, match=r"column 'segment_ids' has shape \(2, 5\), input_ids \(2, 4\)"
    ):
        collate(rows)


def test_the_width_of_rows_that_are_documents():
    lengths = np.array([3, 9, 0, 5], np.int32)
    assert row_width(lengths, CollateConfig()) == 9
    assert row_width(lengths, CollateConfig(padding=True)) == 9
    assert row_width(lengths, CollateConfig(padding="max_length", max_length=16)) == 16
    assert row_width(np.array([4, 4]), CollateConfig(padding=False)) == 4
    cut = "Truncate when tokenizing (max_length=8), pack the rows, or add a bucket of"
    long = "Shorten the rows where tokens are made, pack the rows, or raise max_length to"
    for rule, name, fix in (
        (CollateConfig(padding="max_length", max_length=8), "max_length", long),
        (CollateConfig(length_buckets=(4, 8)), "length_buckets", cut),
    ):
        with pytest.raises(SourceError) as caught:
            row_width(lengths, rule)
        assert str(caught.value) == f"row 1 of the batch: 9 tokens do not fit {name} 8. {fix} 9."
    with pytest.raises(
        SourceError,
        match=r"row 2 of the batch: 0 tokens, another row has 9, and padding is "
        r"False.*padding='longest'",
    ):
        row_width(lengths, CollateConfig(padding=False))


def test_bad_collate_configs():
    with pytest.raises(ConfigError, match="max_length: padding='max_length' needs it"):
        CollateConfig(padding="max_length")
    with pytest.raises(ConfigError, match="max_length: 0 is not a row length"):
        CollateConfig(max_length=0)
    with pytest.raises(ConfigError, match="padding"):
        from_dict(CollateConfig, {"padding": "shortest"})


def test_loss_weights_stand_where_labels_do() -> None:
    rows: Any = {
        INPUT_IDS: np.array([[1, 2, 3, 4]]),
        SEGMENT_IDS: np.array([[1, 1, 2, 2]]),
        LOSS_MASK: np.array([[1, 1, 1, 0]]),
        LOSS_WEIGHTS: np.array([[0.5, 2.0, 3.0, 4.0]], np.float32),
    }
    batch = collate(rows)
    assert batch[LABELS].tolist() == [[2, -100, -100, -100]]
    assert batch[LOSS_WEIGHTS].tolist() == [[2.0, 0.0, 0.0, 0.0]]
