"""Token caches in memory, plans over them, and the slow, obvious way to lay out and label a row."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from easypipe.cache.reader import Buffers, cache_schema
from easypipe.core.config import digest
from easypipe.core.schema import (
    IGNORE,
    INPUT_IDS,
    LABELS,
    LOSS_MASK,
    POSITION_IDS,
    SEGMENT_BREAK,
    SEGMENT_IDS,
    token_dtype,
)
from easypipe.loader.rows.planned import PlannedRows
from easypipe.plan.mix import integer_weights
from easypipe.plan.order import OrderConfig
from easypipe.plan.pack import PackSpec
from easypipe.plan.windows import Plan, PlanDataset, PlanSpec

EOS, PAD = 1, 0


class MemoryCache:
    """What a loader uses of a TokenCache, over arrays in several parts. docs: ids each; masks: 0
    and 1 each (of pairs, a 2), or None.
    """

    comes_and_goes = False
    aligned = ()
    pending = False
    aligned = ()

    def __init__(
        self,
        docs: Sequence[np.ndarray],
        *,
        vocab_size: int = 1000,
        masks: Sequence[np.ndarray] | None = None,
        parts: int = 3,
    ) -> None:
        self.docs, self.masks = [np.asarray(d) for d in docs], masks
        self.vocab_size = vocab_size
        self.num_docs = len(docs)
        self.pairs = masks is not None and any(
            (np.asarray(mask) == SEGMENT_BREAK).any() for mask in masks
        )
        self.fingerprint = digest(
            [d.tolist() for d in self.docs],
            None if masks is None else [np.asarray(m).tolist() for m in masks],
        )
        self.tokenizer_fingerprint = "words"
        self.eos_token_id = EOS
        edges = sorted({0, self.num_docs, *(self.num_docs * i // parts for i in range(parts))})
        dtype = token_dtype(vocab_size)
        self._kept: list[np.ndarray] = []
        ids, offsets, flags, eos = [], [], [], []
        for a, b in itertools.pairwise(edges):
            here = self.docs[a:b]
            ids.append(
                self._keep(np.concatenate(here).astype(dtype) if here else np.empty(0, dtype))
            )
            offsets.append(
                self._keep(
                    np.concatenate([[0], np.cumsum([len(d) for d in here])]).astype(np.int64)
                )
            )
            flags.append(
                0
                if masks is None
                else self._keep(
                    np.concatenate([np.asarray(m) for m in masks[a:b]]).astype(np.uint8)
                )
            )
            eos.append(self._keep(np.array([len(d) > 0 and d[-1] == EOS for d in here], np.uint8)))
        self._buffers = Buffers(
            first_doc=np.array(edges, np.int64),
            ids_address=np.array(ids, np.uint64),
            offsets_address=np.array(offsets, np.uint64),
            mask_address=np.array(flags, np.uint64),
            eos_address=np.array(eos, np.uint64),
            file_address=np.zeros(len(ids), np.uint64),
            checked_address=np.zeros(len(ids), np.uint64),
            id_bytes=dtype.itemsize,
        )

    def _keep(self, array: np.ndarray) -> int:
        self._kept.append(array)
        return array.ctypes.data

    @property
    def schema(self) -> pa.Schema:
        return cache_schema(self.vocab_size, loss_mask=self.masks is not None)

    def buffers(self) -> Buffers:
        return self._buffers

    def lengths(self, docs: np.ndarray) -> np.ndarray:
        return np.array([len(self.docs[d]) for d in docs], np.int32)

    def has_eos(self, docs: np.ndarray) -> np.ndarray:
        return np.array([len(self.docs[d]) > 0 and self.docs[d][-1] == EOS for d in docs], bool)

    def where(self, doc: int) -> tuple[str, int]:
        return "memory.jsonl", doc


def some_docs(
    lengths: Sequence[int], *, seed: int = 0, vocab_size: int = 1000, eos_every: int = 4
) -> list[np.ndarray]:
    """Ids from 2 up; every `eos_every`-th document ends with EOS already."""
    random = np.random.Generator(np.random.PCG64(seed))
    docs = [random.integers(2, vocab_size, n) for n in lengths]
    for doc in docs[::eos_every]:
        doc[-1:] = EOS
    return docs


def plan_rows(
    caches: Sequence[Any],
    *,
    seq_length: int | None = 64,
    strategy: str = "greedy",
    seed: int = 5,
    weights: Sequence[float] | None = None,
    stop: str = "all_exhausted",
    num_epochs: int | None = 1,
    window: int = 16,
    shuffle: bool = True,
    eos: int | None = EOS,
    shuffle_packed: bool = True,
    joined: bool = False,
    train_continued: bool = False,
) -> PlannedRows:
    def lengths(cache: Any):
        return lambda docs: (
            cache.lengths(docs) + (0 if eos is None else (~cache.has_eos(docs)).astype(np.int32))
        )

    names = [f"d{i}" for i in range(len(caches))]
    counted = [lengths(cache) for cache in caches]
    datasets = [
        PlanDataset(name, c.num_docs, int(of(np.arange(c.num_docs)).sum()), c.fingerprint, of)
        for name, c, of in zip(names, caches, counted, strict=True)
    ]
    shares = integer_weights(dict(zip(names, weights or [1.0] * len(names), strict=True)))
    spec = PlanSpec(
        seed=seed,
        weights=tuple(shares),
        stop=stop,
        num_epochs=num_epochs,
        order=OrderConfig(shuffle=shuffle),
        pack=None
        if seq_length is None
        else PackSpec(seq_length=seq_length, strategy=strategy, shuffle_rows=shuffle_packed),
        window_docs=window,
    )
    options = {"joined": joined, "train_continued": train_continued}
    return PlannedRows(Plan(datasets, spec), caches, eos_token_id=eos, pad_token_id=PAD, **options)


def slow_rows(rows: PlannedRows, numbers: Sequence[int], width: int) -> dict[str, np.ndarray]:
    """The oracle of PlannedRows.gather: one token at a time, from the plan's own address of each
    row.
    """
    names = (INPUT_IDS, SEGMENT_IDS, POSITION_IDS, LOSS_MASK)
    out = {name: np.zeros((len(numbers), width), np.int32) for name in names}
    out[INPUT_IDS][:] = PAD
    for r, number in enumerate(numbers):
        if number < 0:
            continue
        pieces = rows.plan.locate(number).pieces
        for n in range(len(pieces.row)):
            cache = rows.caches[pieces.dataset[n]]
            doc = int(pieces.doc[n])
            ids = [*cache.docs[doc].tolist(), EOS]
            flags = (
                [1] * len(cache.docs[doc])
                if cache.masks is None
                else [int(f) for f in cache.masks[doc]]
            )
            flags.append(flags[-1] if flags else 1)
            if rows.hold and pieces.start[n] > 0 and flags[0] == 0:
                flags = [0] * len(flags)
            for i in range(pieces.length[n]):
                slot = pieces.slot[n] + i
                out[INPUT_IDS][r, slot] = ids[pieces.start[n] + i]
                out[LOSS_MASK][r, slot] = flags[pieces.start[n] + i]
                out[SEGMENT_IDS][r, slot] = pieces.segment[n]
                out[POSITION_IDS][r, slot] = i
    return out


def slow_labels(rows: dict[str, np.ndarray]) -> np.ndarray:
    ids, segments = rows[INPUT_IDS], rows[SEGMENT_IDS]
    labels = np.full_like(ids, IGNORE)
    for r in range(ids.shape[0]):
        for t in range(ids.shape[1] - 1):
            if (
                segments[r, t]
                and segments[r, t] == segments[r, t + 1]
                and rows[LOSS_MASK][r, t + 1]
            ):
                labels[r, t] = ids[r, t + 1]
    return labels


__all__ = [
    "EOS",
    "LABELS",
    "PAD",
    "MemoryCache",
    "plan_rows",
    "slow_labels",
    "slow_rows",
    "some_docs",
]
