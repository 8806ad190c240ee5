"""Rows by number: what a loader asks for, and the rows that a plan lays out over token caches.

row    counted over the whole run, all epochs; the same on every process
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from easypipe.cache.blocks import ROOM
from easypipe.cache.reader import TokenCache
from easypipe.core.config import digest
from easypipe.core.errors import CacheError, PlanError, place
from easypipe.core.schema import (
    IGNORE,
    INPUT_IDS,
    LABELS,
    LOOK_AHEAD,
    LOSS_MASK,
    POSITION_IDS,
    SEGMENT_IDS,
)
from easypipe.loader.collate import BATCH_COLUMNS, fresh_columns, shift_labels
from easypipe.loader.rows.gather import NO_CHECKS, eos_ids, tables, write_rows
from easypipe.loader.rows.look_ahead import join_segments, last_labels
from easypipe.loader.rows.pairs import open_pairs
from easypipe.loader.staged import staged_rows
from easypipe.loader.state import MAX_DATASETS, SHORT
from easypipe.plan.spec import choices, in_words
from easypipe.plan.windows import Plan, Window, WindowState

AT_REST = (INPUT_IDS, SEGMENT_IDS, POSITION_IDS)

_NO_LABELS = np.empty((0, 0), dtype=np.int32)
_NO_MASK = np.empty((0, 0), dtype=np.uint8)


class Rows(Protocol):
    """Rows that can be made in any order, on any thread.

    Law: what a row holds depends on its number alone. A row number of -1 stands for a row of
    padding: no segment, no label.
    """

    seq_length: int | None  # slots of every row; None: a row has the length of its document
    pad_token_id: int
    num_epochs: int | None  # that the rows are counted over; None: without end
    lengths_are_free: bool  # `lengths` reads integers only, never the rows themselves

    @property
    def num_rows(self) -> int | None:
        """Rows of the whole run; None where they never end. May have to look at the whole plan."""
        ...

    @property
    def identity(self) -> Mapping[str, str]:
        """A digest per component of the data: `sources`, `tokenizer`, `plan`."""
        ...

    @property
    def words(self) -> Mapping[str, Any]:
        """What `identity` is made of, as far as it is short, so that a refused state can say what
        changed; {} where nothing has a name.
        """
        ...

    def available(self, start: int, stop: int) -> int:
        """How many of the rows `start` to `stop` there are: all of them, or as many as stand before
        the end.
        """
        ...

    def lengths(self, rows: NDArray[np.int64]) -> NDArray[np.int32]:
        """Tokens of each row, 0 for -1."""
        ...

    def epochs(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The pass over the data that each row belongs to, from 0; 0 for -1 and where there are no
        passes.
        """
        ...

    def gather(
        self, rows: NDArray[np.int64], width: int | None = None
    ) -> dict[str, NDArray[np.int32]]:
        """Columns at rest, Int32[n, width], in new memory: input_ids, segment_ids, position_ids,
        and loss_mask where a dataset has one.

        Rows of strategy "stream" have look_ahead too, Int32[n].
        width: None for `seq_length`, or the longest of these rows.
        """
        ...

    def batch(self, rows: NDArray[np.int64], width: int) -> dict[str, NDArray[np.int32]]:
        """`collate(gather(rows, width))`, in one pass where that is faster."""
        ...

    def hint(self, row: int) -> Any:
        """JSON that lets a later process find `row` without looking at what stands before it; None
        where it needs none.
        """
        ...

    def seek(self, hint: Any) -> None:
        """Takes what `hint` gave, in this process or another. Changes speed only."""
        ...


def default_width(rows: Rows, numbers: NDArray[np.int64]) -> int:
    return int(rows.lengths(numbers).max(initial=0)) if rows.seq_length is None else rows.seq_length


class PlannedRows:
    """The rows of a plan, their tokens copied from memory-mapped caches, or fetched for it where a
    cache is in a bucket.

    plan: over the datasets of `caches`, in that order. eos_token_id: follows a document whose piece
    in the plan is one longer than its stored tokens, one id for all or one for each dataset; None
    where nothing is added. seq_length: the plan's, None where every document is a row of its own.
    joined: rows of a stream are one segment each, over the ends of documents. train_continued:
    pieces that go on with a document of another row keep the targets that its mask says; else those
    of a document that begins with a prompt have none, but in a stream. Thread safe. Raises
    PlanError where plan and caches do not belong together; reading raises CacheError naming dataset
    and document where a cache does not hold what the plan asks for.
    """

    lengths_are_free = True

    def __init__(
        self,
        plan: Plan,
        caches: Sequence[TokenCache],
        eos_token_id: int | Sequence[int] | None,
        pad_token_id: int,
        seq_length: int | None,
        *,
        joined: bool = False,
        train_continued: bool = False,
    ) -> None:
        if len(plan.datasets) != len(caches):
            raise PlanError(
                at="plan", problem=f"{len(plan.datasets)} datasets, but {len(caches)} token caches"
            )
        for dataset, cache in zip(plan.datasets, caches, strict=True):
            if dataset.num_docs != cache.num_docs:
                raise PlanError(
                    at=f"plan.{dataset.name}",
                    problem=f"planned over {dataset.num_docs} documents, the token cache has {cache.num_docs}",
                    fix="Make the plan from this cache.",
                )
        planned = None if plan.spec.pack is None else plan.spec.pack.seq_length
        if planned != seq_length:
            raise PlanError(
                at="seq_length",
                problem=f"{seq_length}, but the plan lays rows of {planned}",
                fix=f"Give {planned}.",
            )
        self._streams = plan.spec.pack is not None and plan.spec.pack.strategy == "stream"
        if joined and not self._streams:
            raise PlanError(
                at="joined",
                problem="only rows of strategy 'stream' go over the ends of documents",
                fix="Leave it out.",
            )
        self.joined = joined
        self._asked = train_continued
        self.hold = not (train_continued or self._streams)
        self.plan = plan
        self.seq_length = seq_length
        self.pad_token_id = pad_token_id
        self.num_epochs = plan.spec.num_epochs
        self._caches = tuple(caches)  # they own the memory that the tables point to
        self._tables = tables([cache.buffers() for cache in caches])
        self._eos = eos_ids(eos_token_id, len(caches))
        self._masked = any(LOSS_MASK in cache.schema.names for cache in caches)
        self._paired = any(cache.pairs for cache in caches)
        self._end: int | None = None  # rows of the run, once the scan has met the end

    @property
    def caches(self) -> tuple[TokenCache, ...]:
        """One for each dataset of the plan."""
        return self._caches

    @property
    def num_rows(self) -> int | None:
        return self.plan.num_rows

    @property
    def identity(self) -> Mapping[str, str]:
        several = self._eos.tolist()
        eos = several[0] if len(set(several)) == 1 else several
        more = [
            name
            for name, said in (("joined", self.joined), ("train_continued", self._asked))
            if said
        ]
        return {
            "sources": digest(
                [
                    [d.name, c.fingerprint]
                    for d, c in zip(self.plan.datasets, self._caches, strict=True)
                ]
            ),
            "tokenizer": digest(
                [c.tokenizer_fingerprint for c in self._caches], eos, self.pad_token_id
            ),
            "plan": digest(self.plan.fingerprint, *more) if more else self.plan.fingerprint,
        }

    @property
    def words(self) -> Mapping[str, Any]:
        caches = zip(self.plan.datasets, self._caches, strict=True)
        each = {
            f"dataset {dataset.name}": digest(cache.fingerprint, cache.tokenizer_fingerprint)[
                :SHORT
            ]
            for dataset, cache in caches
        }
        return (each if len(each) <= MAX_DATASETS else {}) | in_words(choices(self.plan.spec))

    def available(self, start: int, stop: int) -> int:
        if self._end is None and self.plan.ends:
            try:
                self.plan.window_at(stop - 1)
            except PlanError:
                self._end = self.plan.num_rows  # known by now: looking for the row has met the end
        return stop - start if self._end is None else max(0, min(stop, self._end) - start)

    def lengths(self, rows: NDArray[np.int64]) -> NDArray[np.int32]:
        real = np.flatnonzero(rows >= 0)
        pieces = self.plan.pieces(rows[real])
        return np.bincount(real[pieces.row], weights=pieces.length, minlength=len(rows)).astype(
            np.int32
        )

    def epochs(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.array(
            [0 if row < 0 else self.plan.window_at(row).state.epoch for row in rows.tolist()],
            dtype=np.int64,
        )

    def gather(
        self, rows: NDArray[np.int64], width: int | None = None
    ) -> dict[str, NDArray[np.int32]]:
        width = default_width(self, rows) if width is None else width
        columns = fresh_columns(AT_REST, len(rows), width)
        mask, ahead = self._write(rows, columns, _NO_LABELS)
        if self._masked:
            columns[LOSS_MASK] = mask.astype(np.int32)
        return columns | {LOOK_AHEAD: ahead} if self._streams else columns

    def batch(self, rows: NDArray[np.int64], width: int) -> dict[str, NDArray[np.int32]]:
        columns = fresh_columns(BATCH_COLUMNS, len(rows), width)
        _, ahead = self._write(rows, columns, columns[LABELS])
        if self._streams:
            columns[LABELS][:, width - 1] = ahead
        return columns

    def hint(self, row: int) -> Any:
        return self.plan.state_at(row).to_json()

    def seek(self, hint: Any) -> None:
        self.plan.resume(WindowState.from_json(hint))

    def _write(
        self,
        rows: NDArray[np.int64],
        columns: Mapping[str, NDArray[np.int32]],
        labels: NDArray[np.int32],
    ) -> tuple[NDArray[np.uint8], NDArray[np.int32]]:
        """Fills the columns; the loss mask, UInt8[0, 0] where no dataset has one, and Int32[R] the
        labels of last slots, of streams.
        """
        ids, segments, positions = columns[INPUT_IDS], columns[SEGMENT_IDS], columns[POSITION_IDS]
        mask = np.empty(ids.shape, dtype=np.uint8) if self._masked else _NO_MASK
        ahead = np.full(len(rows) if self._streams else 0, IGNORE, dtype=np.int32)
        done = np.zeros(len(rows), dtype=np.bool_)
        want_labels = labels.size > 0
        shift = want_labels and not (self.joined or self._paired)
        todo = (
            np.empty((2, ROOM), np.int64)
            if any(cache.pending for cache in self._caches)
            else NO_CHECKS
        )
        left = 0
        while left < len(rows):  # one turn for every window that the rows stand in
            row = int(rows[left])
            window = self.plan.window_at(row if row >= 0 else int(rows.max(initial=0)))
            layout = window.layout
            view = (window.first_row, layout.first_piece, layout.table, window.dataset, window.doc)
            with staged_rows(self._caches, window, rows):
                into = (ids, labels, segments, positions, mask, todo)
                rule = (self._eos, self.pad_token_id, self.hold, shift)
                left, bad, count = write_rows(view, rows, done, self._tables, *rule, *into)
                while count and bad < 0:
                    self._check(todo[:, :count])
                    left, bad, count = write_rows(view, rows, done, self._tables, *rule, *into)
                if bad >= 0:
                    raise self._not_there(window, int(bad), ids.shape[1])
                if self._streams:
                    behind = (self._tables, self._eos, self.joined, self.seq_length, ahead, todo)
                    while count := last_labels(view, window.length, rows, *behind):
                        self._check(todo[:, :count])
        if self.joined:
            join_segments(segments, positions)
        if self._paired:
            open_pairs(segments, positions, mask)
        if want_labels and not shift:
            shift_labels(ids, segments, mask, labels)
        return mask, ahead

    def _check(self, touched: NDArray[np.int64]) -> None:
        """touched: Int64[2, n], parts over all datasets, and blocks of them. Raises CacheError
        where one is damaged.
        """
        first = self._tables.first_part
        dataset = np.searchsorted(first, touched[0], side="right") - 1
        for i in np.unique(dataset).tolist():
            here = touched[:, dataset == i]
            self._caches[i].check(here - np.array([[first[i]], [0]]))

    def _not_there(self, window: Window, piece: int, width: int) -> CacheError:
        _, slot, draw, start, length = window.layout.table[:, piece].tolist()
        dataset, doc = int(window.dataset[draw]), int(window.doc[draw])
        cache = self._caches[dataset]
        name = self.plan.datasets[dataset].name
        if not 0 <= doc < cache.num_docs:
            problem = f"the cache has {cache.num_docs} documents"
            where = ""
        else:
            file, row = cache.where(doc)
            where = f" ({place(file, row=row)})"
            stored = int(cache.lengths(np.array([doc]))[0])
            problem = f"tokens {start}:{start + length} at slot {slot} of {width} were planned, {stored} are stored"
        return CacheError(
            at=f"dataset {name!r}, document {doc}{where}",
            problem=problem,
            fix="Plan and cache do not belong together: make the plan anew from this cache.",
        )
