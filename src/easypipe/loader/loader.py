"""The loader: global batch `t` is rows `t * batch_size` onward, made ahead by threads, laid out on
the mesh.

batch    global, the same whoever reads it; a process makes only its rows of it. Steps (steps.py) says which rows
row      counted over the whole run (rows.py)
position a row's place in the order of reading (order.py)
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cached_property, partial
from typing import Any

import numpy as np

from easypipe.core.config import digest
from easypipe.core.errors import ConfigError, PlacementError, StateError
from easypipe.loader.collate import CollateConfig, known_width, row_width, with_asked
from easypipe.loader.config import LoadStageConfig
from easypipe.loader.explain import Decoder, ExplainedBatch, choose, explain_rows
from easypipe.loader.order import ReadingOrder
from easypipe.loader.placement import Placement, local_mesh, make_mesh
from easypipe.loader.prefetch import InOrder, Prefetcher
from easypipe.loader.row_transforms import MappedRows, RowTransform, transforms_of
from easypipe.loader.rows.planned import Rows
from easypipe.loader.rows.ranks import RankRows
from easypipe.loader.state import LoaderState
from easypipe.loader.steps import Steps

__all__ = ["AsyncDataLoader", "Batches", "LoadStageConfig", "Loader"]


class Loader:
    """Batches `{column: Int32[batch, slots]}`: NumPy arrays, or jax.Arrays where there is a mesh.

    With `accumulation_steps` A above 1 they are Int32[A, batch / A, slots].

    Law (determinism): batch `t` is byte-equal for any number of processes, workers and batches in
    flight. Law (exact resume): after `restore(state)` with the state taken after batch n, iteration
    yields batch n + 1 onward. Every `iter(loader)` starts at the first batch, the one after
    `restore` at the restored one. `next(loader)` is the next batch of one iteration that the loader
    keeps, which no other one moves. `state()` belongs to the newest iteration.
    rows: PlannedRows or StoredRows. decoder, remember: for `explain`, the tokenizer of each
    dataset, and what keeps the plan's checkpoints.
    seed: of the permutations of `shuffle_buffer_size` and `group_by_length`; without them, it
    changes nothing. Raises PlacementError where batch and mesh do not fit, ConfigError where
    `num_epochs` is not that of the rows.
    """

    def __init__(
        self,
        rows: Rows,
        config: LoadStageConfig | None = None,
        *,
        seed: int = 0,
        collate: CollateConfig | None = None,
        name: str = "loader",
        decoder: Decoder | None = None,
        remember: Callable[[], None] | None = None,
    ) -> None:
        self.rows = rows
        self.config = config or LoadStageConfig()
        self.collate = collate or CollateConfig()
        self.batch_size = self.config.batch_size
        self.accumulation_steps = self.config.accumulation_steps
        self.name = name
        self._decoder = decoder
        self._remember = remember
        self._seed = seed
        if rows.num_epochs != self.config.num_epochs:
            raise ConfigError(
                at="load.num_epochs",
                problem=f"{self.config.num_epochs}, but the rows are counted over {rows.num_epochs}",
                fix=f"Set num_epochs={rows.num_epochs}, or make the rows for {self.config.num_epochs}.",
            )
        self._order = ReadingOrder(rows, self.config, self.collate, seed)
        self._steps = Steps(self.batch_size, self.config.batch_size_schedule)
        self._placements = self._place()
        self._width = self._fixed_width()
        self._yielded = 0  # batches before the next one of the newest iteration
        self._restored: LoaderState | None = None  # for the next iteration
        self._kept: Iterator[dict[str, Any]] | None = None  # of `next(loader)`, once it has begun
        self._kept_entry: LoaderState | None = None  # where it begins
        self._entry: LoaderState | None = None  # of the newest iteration
        self._newest = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        entry, self._restored = self._restored, None
        return self._begin(entry)

    def __next__(self) -> dict[str, Any]:
        """The next batch of the iteration that the loader keeps: begun at the first batch or, after
        `restore`, at the restored one.
        """
        if self._kept is None:
            entry, self._kept_entry = self._kept_entry, None
            self._kept = self._begin(entry)
        return next(self._kept)

    def _begin(self, entry: LoaderState | None) -> Iterator[dict[str, Any]]:
        self._entry = entry
        self._yielded = 0 if entry is None else entry.batch
        self._newest += 1
        return Batches(self, self._yielded, self._newest, self._counted())

    def __len__(self) -> int:
        """Batches from the first to the last. Raises TypeError where they never end."""
        num_rows = self.rows.num_rows
        self.remember()
        if num_rows is None:
            raise TypeError(
                "this loader never ends, so it has no len(): its num_epochs is None, or its mixture restarts. "
                "Count steps instead (max_steps), or set num_epochs and a stop_strategy that ends."
            )
        steps = self._counted()
        return steps.full(num_rows) if self.config.drop_last else steps.needed(num_rows)

    def rows_of(self, step: int) -> range:
        """The rows, counted over the run, whose positions batch `step` (from 0) holds: fewer than
        its size where it is a short last one, which on a mesh is filled up with rows of padding
        behind them; none behind the end. Raises StateError for a step before the one at which the
        run was changed (`restore`), whose rows this loader cannot know.
        """
        steps = self._counted()
        self._check_step(step, steps)
        start, size = steps.start(step), steps.size(step)
        count = self.rows.available(start, start + size)
        return range(start, start + (0 if count < size and self.config.drop_last else count))

    def map_rows(self, transform: RowTransform, *, version: str) -> Loader:
        """A loader over the same rows, each changed by `transform(columns, key)`: token dropout,
        masking at random and the like.

        columns: Int32[slots] each: `input_ids` and `loss_mask`, which it may write to or return
        anew, `segment_ids` and `position_ids`, which it may read. Labels are made from what it
        leaves. key: 64 random bits that depend on the seed, the epoch and the row alone, so that
        batches do not depend on processes, workers, or where a run was resumed. version: names what
        the function does; the states of a loader carry it, and are refused by a loader whose
        transforms are others. The cost is one call for every row.
        """
        return self._twin(MappedRows(self.rows, transform, version, self._seed), self.config)

    def of_rank(self, rank: int, world_size: int) -> Loader:
        """A loader over the rows `rank`, `rank + world_size`, ...: batch t of all ranks together is
        batch t of one that is world_size times as large. For programs that have ranks and no mesh.
        With drop_last every rank has as many batches.
        """
        return self._twin(
            RankRows(self.rows, rank, world_size, even=self.config.drop_last), self.config
        )

    @property
    def seed(self) -> int:
        """Of the order, given or drawn."""
        return self._seed

    def copy(self, config: LoadStageConfig | None = None) -> Loader:
        """A loader over the same rows that goes its own way, from the first batch; with other
        options where a config is given.
        """
        return self._twin(self.rows, config or self.config)

    def batch(self, step: int) -> dict[str, Any]:
        """Batch `step` (from 0) as the iteration would yield it, made in this thread. Raises
        IndexError where there is none.
        """
        made = self._make(step, lambda stage: None, self._counted()) if self.rows_of(step) else None
        if made is None:
            raise IndexError(f"{self.name}: there is no batch {step}")
        return made

    def explain(self, step: int, row: int | None = None) -> ExplainedBatch:
        """Which documents stand in batch `step` (from 0; metrics.jsonl calls it step + 1), or in
        one `row` of it: dataset, file, row, tokens, slots, and the text with its masked parts.
        Found from the plan alone: it does not matter what was read before, or where.

        Costs milliseconds where a plan checkpoint stands near, else the scan of the plan up to
        there, once; see docs/seeing.md. Raises PlanError for a batch or a row that is not there.
        """
        steps = self._counted()
        count = len(self.rows_of(step)) if step >= 0 else 0
        chosen = choose(step, row, count)
        start = steps.start(step)
        explained = explain_rows(
            self.rows, step, self._order.rows(start, start + count), chosen, self._decoder
        )
        self.remember()
        return explained

    def remember(self) -> None:
        """Keeps what was planned so far beside the token cache, so that a later process finds rows
        near it. `len` and `explain` do too.
        """
        if self._remember is not None:
            self._remember()

    def state(self) -> LoaderState:
        """The state after the batch that was last yielded, whatever is in flight."""
        return self.state_at(self._yielded)

    def state_at(self, batch: int) -> LoaderState:
        """The state after the first `batch` batches, computed from the plan: `restore` goes there
        without reading what stands before.
        """
        row = self._row(batch)
        return LoaderState(
            batch=batch,
            row=row,
            components=self._components,
            config=self._words,
            hint=self.rows.hint(self._order.first(row)),
            changes=() if self._entry is None else self._entry.changes,
        )

    def restore(
        self,
        state: LoaderState | str | bytes | Mapping[str, Any],
        allow_changed: Collection[str] = (),
    ) -> None:
        """Makes the next iteration go on behind `state`, given as it is or as its JSON.

        allow_changed: components ("sources", "tokenizer", "config", "plan") that may be others than
        when it was saved. Rows are then counted on from the state's own row in what there is now,
        and this state and all later ones record the change. Raises StateError naming what changed
        since.
        """
        if not isinstance(state, LoaderState):
            state = LoaderState.from_json(state)
        saved, state = state, state.check(self._components, self._words, allow_changed)
        if state.hint is not None:
            self.rows.seek(state.hint)
        if state is not saved and self.rows.available(state.row - 1, state.row) == 0 < state.row:
            raise StateError(
                at="loader state",
                problem=f"it stands at row {state.row}, and there are fewer rows now",
                fix="Start a new run.",
            )
        steps = self._counted(state)
        short = steps.start(state.batch) - state.row
        if short and self.rows.available(state.row, state.row + 1):
            raise StateError(
                at="loader state",
                problem=f"that run had ended with a batch short of {short} rows, and now there are more",
                fix="Restore an earlier state, or set drop_last=True in runs that are to be prolonged.",
            )
        self._restored = self._entry = self._kept_entry = state
        self._yielded, self._kept = state.batch, None
        self._newest += 1  # an iteration under way no longer moves `state()`

    def _counted(self, entry: LoaderState | None = None) -> Steps:
        """How the newest iteration counts, or one that begins at `entry`."""
        entry = entry or self._entry
        if entry is None or not entry.changes:
            return self._steps
        return Steps(self.batch_size, self.config.batch_size_schedule, entry.begin)

    def _twin(self, rows: Rows, config: LoadStageConfig, seed: int | None = None) -> Loader:
        options: dict[str, Any] = {"decoder": self._decoder, "remember": self._remember}
        return Loader(
            rows,
            config,
            seed=self._seed if seed is None else seed,
            collate=self.collate,
            name=self.name,
            **options,
        )

    def _ended(self) -> None:
        """The newest iteration has met the end of the data."""

    def _check_step(self, step: int, steps: Steps) -> None:
        if step < 0:
            raise IndexError(f"{self.name}: there is no batch {step}")
        if step < steps.begin.batch:
            raise StateError(
                at=self.name,
                problem=f"batch {step} stood before batch {steps.begin.batch}, at which this run went on with something changed",
                fix="Ask a loader that is made as this one was then.",
            )

    def _row(self, batch: int) -> int:
        """The row behind the first `batch` batches."""
        if self._entry is not None and batch == self._entry.batch:
            # what stands before it may lie in a window that this process never looks at
            return self._entry.row
        steps = self._counted()
        if batch == steps.begin.batch:
            return steps.begin.row
        self._check_step(batch, steps)
        # of the last of them, which may be a short one
        start, stop = steps.start(batch - 1), steps.start(batch)
        return start + self.rows.available(start, stop)

    @cached_property
    def _settings(self) -> dict[str, Any]:
        """What decides the content of batches, and nothing that does not: mesh, micro-batches,
        workers and buffers are free to change.
        """
        schedule, transforms = self.config.batch_size_schedule, transforms_of(self.rows)
        return {
            "batch_size": self.batch_size,
            "drop_last": self.config.drop_last,
            **self._order.settings,
            **self.collate.settings,
            **({"batch_size_schedule": [list(point) for point in schedule]} if schedule else {}),
            **(
                {"row_transforms": [list(transform) for transform in transforms]}
                if transforms
                else {}
            ),
        }

    @cached_property
    def _words(self) -> dict[str, Any]:
        """The settings, and what the rows are made of, for whoever reads a refusal."""
        return {**self._settings, **self.rows.words}

    @cached_property
    def _components(self) -> dict[str, str]:
        return {**self.rows.identity, "config": digest(self._settings)}

    def _place(self) -> dict[int, Placement]:
        """Where batches of every size go; nothing without a mesh."""
        mesh = self.config.mesh
        if mesh is None:
            if not self.config.prefetch_to_device:
                return {}
            mesh = local_mesh()
        mesh = make_mesh(mesh)
        fixed = self.rows.seq_length is not None or self.collate.padding == "max_length"
        place = partial(
            Placement,
            mesh,
            self.config.partition_spec,
            fixed_width=fixed,
            accumulation_steps=self.accumulation_steps,
        )
        return {size: place(size) for size in self._steps.sizes}

    def _fixed_width(self) -> int | None:
        """Slots of every batch, where they can be known before the rows are."""
        known = known_width(self.collate, self.rows.seq_length)
        shared = any(
            len(placement.local_rows) < size for size, placement in self._placements.items()
        )
        if known is None and shared and not self.rows.lengths_are_free:
            raise PlacementError(
                at="padding",
                problem="the longest row of a global batch is known only to the processes that read it",
                fix="Set padding='max_length' and max_length, or pack the rows.",
            )
        return known

    def _make(
        self, batch: int, enter: Callable[[str], None], steps: Steps | None = None
    ) -> dict[str, Any] | None:
        """Batch number `batch` as this process sees it, or None past the last. Any thread, any
        order.
        """
        steps = self._steps if steps is None else steps
        start, size = steps.start(batch), steps.size(batch)
        stage = "plan"
        try:
            enter(stage)
            count = self.rows.available(start, start + size)
            if count == 0 or (count < size and self.config.drop_last):
                return None
            rows = self._order.rows(start, start + count)
            width = self._width
            if width is None:
                stage = "lengths"
                enter(stage)
                width = row_width(self.rows.lengths(rows), self.collate)
            placement = self._placements.get(size)
            pieces = self.accumulation_steps
            if count < size and (placement is not None or pieces > 1):
                rows = np.concatenate([rows, np.full(size - count, -1, dtype=np.int64)])
            if pieces > 1:
                rows = rows.reshape(-1, pieces).T.reshape(-1)  # micro-batch after micro-batch
            if placement is not None and not placement.whole:
                rows = rows[placement.local_rows]
            if self._width is not None and self.rows.seq_length is None:
                stage = "lengths"
                enter(stage)
                # raises where one of this process's rows does not fit
                row_width(self.rows.lengths(rows), self.collate)
            stage = "gather"
            enter(stage)
            made = self.rows.batch(rows, width)
            made = with_asked(made, self.collate)
            if pieces > 1:
                made = {
                    name: column.reshape(pieces, -1, *column.shape[1:])
                    for name, column in made.items()
                }
            if placement is None:
                return made
            stage = "place"
            enter(stage)
            return placement.place(made)
        except Exception as error:
            error.add_note(
                f"{self.name}: batch {batch}, rows {start}:{start + size}, stage {stage!r}"
            )
            raise


AsyncDataLoader = Loader  # the name that EasyDeL's API uses


class Batches(Iterator[dict[str, Any]]):
    """One iteration over a loader. `close()` ends its threads; so does dropping it, as a `break`
    out of a for loop does.
    """

    def __init__(self, loader: Loader, start: int, number: int, steps: Steps) -> None:
        settings = loader.config
        self._loader = weakref.ref(loader)  # which may keep this iteration
        self._number = number
        self._index = start
        # of these rows, whatever pass the loader goes to meanwhile
        make = partial(copy.copy(loader)._make, steps=steps)
        if settings.prefetch_enabled:
            self._made: Prefetcher[dict[str, Any]] | InOrder[dict[str, Any]] = Prefetcher(
                make,
                start,
                workers=settings.prefetch_workers,
                ahead=settings.prefetch_buffer_size,
                stall_timeout_s=settings.stall_timeout_s,
                name=loader.name,
            )
        else:
            self._made = InOrder(make, start)

    def __next__(self) -> dict[str, Any]:
        try:
            batch = next(self._made)
        except StopIteration:
            if (loader := self._newest_of()) is not None:
                loader._ended()
            raise
        self._index += 1
        if (loader := self._newest_of()) is not None:
            loader._yielded = self._index
        return batch

    def close(self) -> None:
        self._made.close()

    def _newest_of(self) -> Loader | None:
        """The loader, while this is its newest iteration."""
        loader = self._loader()
        return loader if loader is not None and loader._newest == self._number else None
