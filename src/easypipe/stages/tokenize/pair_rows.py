"""Encodes preference pairs: one document of both answers, the chosen one first.

Where the second begins, the loss mask is SEGMENT_BREAK (loader/rows/gather.py makes two segments of
it). An answer that is left out takes the other one with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from easypipe.cache.encoder import EncodedDocuments
from easypipe.cache.manifest import total
from easypipe.core.protocols import Reject
from easypipe.core.schema import HAS_EOS, INPUT_IDS, LOSS_MASK, ROW_NUMBER, SEGMENT_BREAK
from easypipe.stages.tokenize.text_rows import Texts
from easypipe.stages.tokenize.token_rows import encode_texts
from easypipe.transforms.tokenizer.lengths import Lengths
from easypipe.transforms.tokenizer.tokenizer import Tokenizer


def encode_pairs(
    texts: Texts,
    tokenizer: Tokenizer,
    *,
    batch_size: int,
    at: str,
    raw: bool,
    audit_key: str | None = None,
    lengths: Lengths | None = None,
) -> EncodedDocuments:
    """As `encode_texts`, of texts that are the answers in turn: two of each row."""

    def encoded(wanted: NDArray[np.bool_], audit_key: str | None) -> list[EncodedDocuments]:
        half = np.arange(len(texts.rows)) % 2
        return [
            encode_texts(
                _some(texts, np.flatnonzero(wanted & (half == side))),
                tokenizer,
                batch_size=batch_size,
                at=at,
                raw=raw,
                audit_key=audit_key,
                lengths=lengths,
            )
            for side in (0, 1)
        ]

    every = np.ones(len(texts.rows), np.bool_)
    documents = encoded(every, audit_key)
    rejects: dict[int, Reject] = {}
    for side in documents:
        rejects = {reject.row: reject for reject in side.rejects} | rejects
    if rejects:  # the other halves of these were counted, which must not be
        documents = encoded(~np.isin(texts.rows, list(rejects)), None)
    return _joined(documents, tuple(rejects[row] for row in sorted(rejects)))


def _some(texts: Texts, which: NDArray[np.int64]) -> Texts:
    assert texts.spans is not None
    assert texts.ends is not None
    return Texts(
        texts=texts.texts.take(pa.array(which)),
        rows=texts.rows[which],
        rejects=(),
        spans=[texts.spans[i] for i in which.tolist()],
        ends=texts.ends[which],
        lost=None if texts.lost is None else texts.lost[which],
        cut_by=texts.cut_by,
    )


def _joined(documents: Sequence[EncodedDocuments], rejects: tuple[Reject, ...]) -> EncodedDocuments:
    """One document of the two of every row; both have the same rows."""
    chosen, rejected = (side.batch for side in documents)
    lists = [
        [batch.column(name) for batch in (chosen, rejected)] for name in (INPUT_IDS, LOSS_MASK)
    ]
    starts = [np.asarray(column.offsets.to_numpy(), np.int64) for column in lists[0]]
    sizes = [np.diff(edges) for edges in starts]
    offsets = np.concatenate([[0], np.cumsum(sizes[0] + sizes[1])]).astype(np.int64)
    begins = [offsets[:-1], offsets[:-1] + sizes[0]]
    merged = []
    for sides in lists:
        values = [side.values.to_numpy() for side in sides]
        out = np.empty(int(offsets[-1]), values[0].dtype)
        for value, begin, size, edges in zip(values, begins, sizes, starts, strict=True):
            out[np.repeat(begin - edges[:-1], size) + np.arange(len(value))] = value
        merged.append(out)
    ids, mask = merged
    mask[begins[1]] = SEGMENT_BREAK
    columns = {
        INPUT_IDS: pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(ids)),
        # packing adds none: it would end one answer of the two
        HAS_EOS: pa.array(np.ones(chosen.num_rows, np.uint8)),
        ROW_NUMBER: chosen.column(ROW_NUMBER),
        LOSS_MASK: pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(mask)),
    }
    both = total(side.counts for side in documents)
    return EncodedDocuments(
        batch=pa.RecordBatch.from_arrays(
            [columns[field.name] for field in chosen.schema], schema=chosen.schema
        ),
        counts=replace(both, docs=chosen.num_rows, trained=int((mask == 1).sum())),
        rejects=rejects,
    )
