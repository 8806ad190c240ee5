"""PlannedRows: rows of a plan over token caches, whose files stay mapped while tokens are copied.

row    a row of the whole run, over all epochs; the same on every process
"""

from __future__ import annotations

import bisect
import contextlib
import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from easypipe.cache.blocks import noted
from easypipe.cache.reader import TokenCache, pin
from easypipe.core.config import digest
from easypipe.core.errors import CacheError, PlanError, place
from easypipe.core.schema import LOSS_MASK
from easypipe.core.values import Int32, Int64, Json, UInt64
from easypipe.loader.rows.aligned import joined_columns
from easypipe.loader.rows.gather import Tables, eos_ids, tables
from easypipe.loader.rows.rows import (
    NumberedRows,
    RowReader,
    Share,
    default_width,
    require_no_source_ids,
)
from easypipe.loader.rows.write import RowWriter
from easypipe.loader.state import MAX_DATASETS, SHORT, LoaderState
from easypipe.plan.spec import choices, in_words
from easypipe.plan.window import View
from easypipe.plan.windows import Plan, WindowState

_STAYS = contextlib.nullcontext()


class PlannedRows(NumberedRows):
    """The rows of a plan, with tokens copied from memory-mapped caches. They are thread-safe.

    If a cache is in a bucket, the tokens are fetched for the batch. If a cache does not hold what
    the plan needs, reading raises a CacheError that names dataset and document.

    Args:
        plan: The plan over the datasets of `caches`, in that order.
        caches: The token caches.
        eos_token_id: The id that follows a document whose piece in the plan is one longer than its
            stored tokens: one for all datasets or one for each; None adds none.
        pad_token_id: The token id in padding.
        joined: Whether "concat" rows are one segment each, across the ends of documents.
        train_continued: Whether pieces that continue a document from another row keep the targets
            of its mask. Otherwise, those of a document that begins with a prompt have none, except
            in "concat" rows.

    Raises:
        PlanError: Plan and caches do not belong together.
    """

    def __init__(
        self,
        plan: Plan,
        caches: Sequence[TokenCache],
        eos_token_id: int | Sequence[int] | None,
        pad_token_id: int,
        *,
        joined: bool = False,
        train_continued: bool = False,
    ) -> None:
        if len(plan.datasets) != len(caches):
            problem = f"{len(plan.datasets)} datasets, but {len(caches)} token caches"
            raise PlanError(at="plan", problem=problem)
        for dataset, cache in zip(plan.datasets, caches, strict=True):
            if dataset.num_docs != cache.num_docs:
                raise PlanError(
                    at=f"plan.{dataset.name}",
                    problem=f"planned over {dataset.num_docs} documents, the token cache has "
                    f"{cache.num_docs}",
                    fix="Make the plan from this cache.",
                )
        runs = plan.spec.pack is not None and plan.spec.pack.concat
        if joined and not runs:
            raise PlanError(
                at="joined",
                problem="only rows of strategy 'concat' go over the ends of documents",
                fix="Leave it out.",
            )
        self.joined = joined
        self.train_continued = train_continued
        self.hold = not (train_continued or runs)
        self.plan = plan
        self.seq_length = None if plan.spec.pack is None else plan.spec.pack.seq_length
        self.pad_token_id = pad_token_id
        self.num_epochs = plan.spec.num_epochs
        if plan.spec.schedule is not None:
            self.step_sizes = plan.spec.schedule.batch_sizes
        # one cache per dataset of the plan; they own the memory that the tables point to
        self.caches = tuple(caches)
        self._tables = tables([cache.buffers() for cache in caches])
        self._writer = RowWriter(
            eos=eos_ids(eos_token_id, len(caches)),
            pad_token_id=pad_token_id,
            hold=self.hold,
            seq_length=self.seq_length,
            runs=runs,
            joined=joined,
            paired=any(cache.pairs for cache in caches),
        )
        self.masked = any(LOSS_MASK in cache.schema.names for cache in caches)
        self._paged = any(cache.comes_and_goes for cache in caches)
        self._unchecked = True
        self.aligned = joined_columns(
            [(one.name, cache.aligned) for one, cache in zip(plan.datasets, caches, strict=True)]
        )
        self._values = {
            column.name: np.concatenate([cache.values(column.name) for cache in caches])
            for column in self.aligned
        }
        self._end: int | None = None  # rows of the run, once the scan has reached the end

    def with_source_ids(self, wanted: bool = True) -> PlannedRows:
        require_no_source_ids(self.aligned)
        other = copy.copy(self)
        other.source_names = tuple(d.name for d in self.plan.datasets) if wanted else ()
        other._writer = dataclasses.replace(self._writer, source_ids=wanted)
        return other

    @property
    def num_rows(self) -> int | None:
        return self.plan.num_rows

    @property
    def identity(self) -> Mapping[str, str]:
        several = self._writer.eos.tolist()
        eos = several[0] if len(set(several)) == 1 else several
        more = [
            name
            for name, said in (("joined", self.joined), ("train_continued", self.train_continued))
            if said
        ]
        return {
            "sources": digest(
                [
                    [d.name, c.fingerprint]
                    for d, c in zip(self.plan.datasets, self.caches, strict=True)
                ],
                *self.aligned,
            ),
            "tokenizer": digest(
                [c.tokenizer_fingerprint for c in self.caches], eos, self.pad_token_id
            ),
            "plan": digest(self.plan.fingerprint, *more) if more else self.plan.fingerprint,
        }

    @property
    def words(self) -> Json:
        caches = zip(self.plan.datasets, self.caches, strict=True)
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
                self._end = self.plan.num_rows  # now known: the search has reached the end
        return stop - start if self._end is None else max(0, min(stop, self._end) - start)

    def lengths(self, rows: Int64) -> Int32:
        real = np.flatnonzero(rows >= 0)
        pieces = self.plan.pieces(rows[real])
        return np.bincount(real[pieces.row], weights=pieces.length, minlength=len(rows)).astype(
            np.int32
        )

    def epochs(self, rows: Int64) -> Int64:
        return np.array(
            [0 if row < 0 else self.plan.window_at(row).state.epoch for row in rows.tolist()],
            dtype=np.int64,
        )

    def gather(self, rows: Int64, width: int | None = None) -> dict[str, Int32]:
        width = default_width(self, rows, self.seq_length) if width is None else width
        return self._writer.gather(self, rows, width)

    def batch(self, rows: Int64, width: int) -> dict[str, Int32]:
        return self._writer.batch(self, rows, width)

    def open(self, state: LoaderState | None = None, share: Share | None = None) -> RowReader:
        if state is not None and state.hint is not None:
            self.plan.resume(WindowState.from_json(state.hint))
        return self

    def hint(self, row: int) -> Any:
        return self.plan.state_at(row).to_json()

    # The methods below implement write.Tokens.

    def window_at(self, row: int) -> tuple[View, Tables]:
        return self.plan.window_at(max(row, 0)).view, self._tables

    def values_at(self, row: int) -> Mapping[str, UInt64]:
        return self._values

    def pinned(self, view: View, rows: Int64) -> contextlib.AbstractContextManager[None]:
        """Pins the documents of the rows, and those after them.

        The first token of the document after a row may be a label.
        """
        if not self._paged:
            return _STAYS
        here = rows - view.first_row
        here = here[(here >= 0) & (here < view.first_piece.size - 1)]
        spans = zip(view.first_piece[here], view.first_piece[here + 1], strict=True)
        pieces = [np.empty(0, np.int32), *(view.table[2, a:b] for a, b in spans)]
        draws = np.unique(np.concatenate(pieces))
        full = np.flatnonzero(view.length > 0)
        behind = np.searchsorted(full, draws, side="right")
        draws = np.union1d(draws, full[behind[behind < full.size]])
        return pin(self.caches, view.dataset[draws], view.doc[draws])

    @property
    def unchecked(self) -> bool:
        if self._unchecked:  # once it is False, it stays False
            self._unchecked = any(cache.pending for cache in self.caches)
        return self._unchecked

    def check(self, touched: Int64) -> None:
        for part, blocks in noted(touched).items():
            dataset = bisect.bisect_right(self._tables.first_part, part) - 1
            self.caches[dataset].check(part - int(self._tables.first_part[dataset]), blocks)

    def missing(self, view: View, piece: int, width: int) -> CacheError:
        _, slot, draw, start, length = view.table[:, piece].tolist()
        dataset, doc = int(view.dataset[draw]), int(view.doc[draw])
        cache = self.caches[dataset]
        name = self.plan.datasets[dataset].name
        if not 0 <= doc < cache.num_docs:
            problem = f"the cache has {cache.num_docs} documents"
            where = ""
        else:
            file, row = cache.where(doc)
            where = f" ({place(file, row=row)})"
            stored = int(cache.lengths(np.array([doc]))[0])
            problem = (
                f"tokens {start}:{start + length} at slot {slot} of {width} were planned, "
                f"{stored} are stored"
            )
        return CacheError(
            at=f"dataset {name!r}, document {doc}{where}",
            problem=problem,
            fix="Plan and cache do not belong together: make the plan again from this cache.",
        )
