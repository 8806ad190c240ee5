"""The label of a row's last slot where its document goes on in the next row (strategy concat).

joined   a row is one segment: the token behind a document is the first of the next
"""

from __future__ import annotations

import numpy as np

from easypipe.cache.address import int64_at, uint8_at, uint16_at, uint32_at
from easypipe.cache.blocks import INDEX, note
from easypipe.core.jit import jit
from easypipe.core.schema import IGNORE
from easypipe.loader.rows.gather import part_of


@jit
def last_labels(window, length_of, rows, tables, eos, joined, num_slots, out, todo):
    """Writes Int32[R] `out`, the label of slot `num_slots - 1`, for those of `rows` (Int64[R]) that
    stand in the window.

    -100 where the row is not full, nothing follows, or what follows is no target. window, tables,
    eos: as in gather.write_rows.
    length_of: Int32[draws], tokens of every document of the window with an EOS that is added.
    Returns how many blocks of `todo` have to be checked first, as `write_rows` does; where there is
    one, the call is to be repeated.
    """
    first_row, first_piece, table, dataset_of, doc_of = window
    first_part, first_doc, ids_at, offsets_at, mask_at, id_bytes, file_at, checked_at = tables
    unchecked, checking = np.int64(0), todo.shape[1] > 0
    for r in range(rows.shape[0]):
        row = rows[r] - first_row
        if rows[r] < 0 or row < 0 or row >= first_piece.shape[0] - 1:
            continue
        out[r] = IGNORE
        last = first_piece[row + 1] - 1
        draw, slot, length = (
            np.int64(table[2, last]),
            np.int64(table[1, last]),
            np.int64(table[4, last]),
        )
        at = np.int64(table[3, last]) + length
        if slot + length < num_slots:
            continue
        if at >= length_of[draw]:
            at = 0
            draw += 1
            while joined and draw < length_of.shape[0] and length_of[draw] == 0:
                draw += 1
            if not joined or draw == length_of.shape[0]:
                continue
        d, doc = dataset_of[draw], doc_of[draw]
        part, before = part_of(first_part, first_doc, d, doc)
        if checking and checked_at[part] != 0 and uint8_at(checked_at[part])[0] == 0:
            if unchecked < todo.shape[1]:
                todo[0, unchecked], todo[1, unchecked] = part, INDEX
                unchecked += 1
            continue
        offsets, local = int64_at(offsets_at[part]), doc - before
        place, end = offsets[local] + at, offsets[local + 1]
        stored = place < end  # else it is the EOS that was added
        if checking and checked_at[part] != 0 and end > offsets[local]:
            width, token = id_bytes[d], place if stored else end - 1
            here = np.int64(ids_at[part]) + token * width
            unchecked = note(checked_at[part], file_at[part], here, width, part, todo, unchecked)
            if mask_at[part] != 0:
                unchecked = note(
                    checked_at[part],
                    file_at[part],
                    np.int64(mask_at[part]) + token,
                    1,
                    part,
                    todo,
                    unchecked,
                )
        if (
            mask_at[part] != 0
            and end > offsets[local]
            and uint8_at(mask_at[part])[place if stored else end - 1] == 0
        ):
            continue
        if not stored:
            out[r] = eos[d]
        elif id_bytes[d] == 2:
            out[r] = uint16_at(ids_at[part])[place]
        else:
            out[r] = uint32_at(ids_at[part])[place]
    return unchecked


@jit
def join_segments(segments, positions):
    """Makes one segment of each row of Int32[R, T] `segments` and counts its `positions`
    through.
    """
    for r in range(segments.shape[0]):
        for t in range(segments.shape[1]):
            if segments[r, t] > 0:
                segments[r, t] = 1
                positions[r, t] = t
