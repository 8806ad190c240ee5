"""The Loader: batch t is rows t * batch_size onward, made ahead; its length, state and restore.

batch    the global batch, the same for every process; a process makes only its own rows. Steps
         (steps.py) says which rows a batch has
row      a row of the whole run (rows.py)
position a row's place in the order of reading (order.py)
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np

from easypipe.core.config import digest, fields_of
from easypipe.core.errors import PlacementError, StallError, StateError, require
from easypipe.core.ledger import Ledger
from easypipe.core.values import Batch, Int32, Int64, Json, JsonObject
from easypipe.loader.collate import CollateConfig, known_width, row_width, with_asked
from easypipe.loader.config import LoadStageConfig
from easypipe.loader.explain import Decoder, ExplainedBatch, choose, explain_rows
from easypipe.loader.order import ReadingOrder
from easypipe.loader.placement import Placement, local_mesh, make_mesh
from easypipe.loader.prefetch import InOrder, Prefetcher
from easypipe.loader.row_transforms import MappedRows, RowTransform
from easypipe.loader.rows.items import ForwardRows
from easypipe.loader.rows.ranks import PassRows, RankRows, chain_of, check_rank
from easypipe.loader.rows.rows import Mark, RowReader, Rows, Share
from easypipe.loader.state import LoaderState
from easypipe.loader.steps import Steps

__all__ = ["AsyncDataLoader", "Batches", "LoadStageConfig", "Loader"]


class After(NamedTuple):
    """The position after the first `batch` batches.

    Attributes:
        batch: The number of batches.
        row: The number of rows before the next batch.
        mark: The mark of the reader that made the batches; None if the number is enough.
    """

    batch: int
    row: int
    mark: Mark | None = None


class Loader:
    """Batches `{column: Int32[batch, slots]}`: NumPy arrays, or jax.Arrays on a mesh.

    With `accumulation_steps` A above 1 they are Int32[A, batch / A, slots].

    Law (determinism): batch `t` is byte-equal for any number of processes, workers and batches in
    flight. Law (exact resume): after `restore(state)` with the state taken after batch n, iteration
    continues with batch n + 1. Every `iter(loader)` starts at the first batch, or after `restore`
    at the restored one. `next(loader)` is the next batch of the loader's own iteration, which other
    iterations do not move. `state()` belongs to the newest iteration.

    Args:
        rows: PlannedRows, StoredRows, or StreamRows. StreamRows are read forward: a batch is
            unknown until it is reached, and restoring reads at most one window of each stream
            again. On several processes `state()` of endless streams is collective: each process
            knows only its own streams, so all must call it after the same batch.
        seed: The seed of the permutations of `shuffle_buffer_size` and `group_by_length`.
        decoder: The tokenizer of each dataset, for `explain`.
        remember: Saves the plan's checkpoints, for `explain`.
        recount: Makes the rows of (config, seed), for copies whose training steps have other sizes
            if weights follow the step.

    Raises:
        PlacementError: Batch and mesh do not fit.
        ConfigError: `num_epochs` is not that of the rows.
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
        recount: Callable[[LoadStageConfig, int], Rows] | None = None,
    ) -> None:
        self.rows = rows
        self.config = config or LoadStageConfig()
        self.collate = collate or CollateConfig()
        self.batch_size = self.config.batch_size
        self.accumulation_steps = self.config.accumulation_steps
        self.name = name
        self._decoder = decoder
        self._remember = remember
        self._recount = recount
        self._seed = seed
        require(
            rows.num_epochs == self.config.num_epochs,
            "load.num_epochs",
            f"{self.config.num_epochs}, but the rows are counted over {rows.num_epochs}",
            f"Set num_epochs={rows.num_epochs}, or make the rows for {self.config.num_epochs}.",
        )
        self._order = ReadingOrder(rows, self.config, self.collate, seed)
        self._steps = Steps(self.batch_size, self.config.batch_size_schedule)
        self._placements = self._place()
        self._local = {size: self._rows_here(size) for size in self._steps.sizes}
        self._width = self._fixed_width()
        self._latest = After(0, 0)  # the position after the last batch of the newest iteration
        self._mark: Mark | None = None  # how far that iteration has read, also after its end
        self._end: Mark | None = None  # the end that an iteration of this object reached
        self._restored: LoaderState | None = None  # where the next iteration begins
        self._kept: Iterator[Batch] | None = None  # the iteration of `next(loader)`, once started
        self._kept_entry: LoaderState | None = None  # where that iteration begins
        self._entry: LoaderState | None = None  # where the newest iteration began
        self._newest = 0  # the number of the newest iteration

    def __iter__(self) -> Iterator[Batch]:
        entry, self._restored = self._restored, None
        return self._begin(entry)

    def __next__(self) -> Batch:
        """Returns the next batch of the loader's own iteration (after `restore`, from the restored
        batch on).
        """
        if self._kept is None:
            entry, self._kept_entry = self._kept_entry, None
            self._kept = self._begin(entry, holding=False)
        return next(self._kept)

    def _begin(self, entry: LoaderState | None, *, holding: bool = True) -> Iterator[Batch]:
        """Begins an iteration.

        Args:
            entry: The state to begin at; None for the first batch.
            holding: Whether the iteration references this loader; the loader's own iteration must
                not.
        """
        self._entry, self._mark = entry, None
        self._latest = After(0, 0) if entry is None else After(entry.batch, entry.row)
        self._newest += 1
        return Batches(self, entry, self._counted(), holding=holding)

    @property
    def source_names(self) -> tuple[str, ...]:
        """The datasets numbered by `source_ids` of batches, from 0; () without that column."""
        return self.rows.source_names

    @property
    def can_change(self) -> bool:
        """Whether a state may be restored after a change."""
        return self.rows.by_number

    def __len__(self) -> int:
        """Returns the number of batches from the first to the last.

        Raises:
            TypeError: The batches never end, or are not counted before they are read.
        """
        num_rows = self.rows.num_rows
        self.remember()
        if num_rows is None:
            raise TypeError(
                "this loader never ends, so it has no len(): its num_epochs is None, or its "
                "mixture restarts. "
                "Count steps instead (max_steps), or set num_epochs and a stop_strategy that ends."
            )
        steps = self._counted()
        return steps.full(num_rows) if self.config.drop_last else steps.needed(num_rows)

    def rows_of(self, step: int) -> range:
        """Returns the range of positions, in rows of the run, that batch `step` (from 0) holds.

        A short last batch has fewer than its size; on a mesh rows of padding follow them. After the
        end the range is empty.

        Raises:
            StateError: The step is before the one at which the run was changed (`restore`), so this
                loader cannot know its rows.
            ConfigError: The rows are read forward.
        """
        steps = self._counted()
        reader = self._by_number(f"step {step}")
        self._check_step(step, steps)
        start, size = steps.start(step), steps.size(step)
        count = reader.available(start, start + size)
        return range(start, start + (0 if count < size and self.config.drop_last else count))

    def map_rows(self, transform: RowTransform, *, version: str) -> Loader:
        """Returns a loader over the same rows, each changed by `transform(columns, key)`.

        This is for token dropout, random masking and similar changes. Labels are made after the
        function was applied. The cost is one call for every row.

        Args:
            transform: A function of (columns, key). columns: Int32[slots] each: `input_ids` and
                `loss_mask`, which it may change in place or return as new arrays, and `segment_ids`
                and `position_ids`, which it may read. key: 64 random bits that depend only on the
                seed, the epoch and the row, so that batches do not depend on processes, workers, or
                where a run was resumed.
            version: A name for what the function does. A loader's states record it, and a loader
                with different transforms cannot restore them.
        """
        return self._clone(MappedRows(self.rows, transform, version, self._seed), self.config)

    def of_rank(self, rank: int, world_size: int) -> Loader:
        """Returns a loader over the rows `rank`, `rank + world_size`, ...

        Batch t of all ranks together is batch t of a loader whose batches are world_size times as
        large, also where rows are shuffled or grouped by length, and weights follow the step (of
        streams, if both have the same `num_streams`). This is for programs with ranks and without a
        mesh. With drop_last all ranks have equally many batches.

        Raises:
            ConfigError: There is no such rank.
        """
        check_rank(rank, world_size)
        rows = self._stepped(self.config, world_size)
        return self._clone(
            RankRows(rows, rank, world_size, even=self.config.drop_last), self.config
        )

    @property
    def seed(self) -> int:
        """The seed of the order, given or drawn."""
        return self._seed

    def copy(self, config: LoadStageConfig | None = None) -> Loader:
        """Returns a loader over the same data with its own iterations, from the first batch.

        It is the one that the pipeline makes with these options, except that copies of streams keep
        their `num_streams`.

        Args:
            config: Its options; None takes those of this loader.

        Raises:
            ConfigError: A copy cannot have such options; the error names the one that decides how
                the rows were made.
        """
        config = config or self.config
        if not self.rows.by_number:
            self._require_same(config, "shuffle_buffer_size", "of the windows of a stream")
        if self.rows.world_size > 1:
            self._require_same(config, "drop_last", "of how rows were divided over ranks")
        rows = self._stepped(config, 1)
        if config.source_ids != bool(rows.source_names):
            rows = rows.with_source_ids(config.source_ids)
        return self._clone(rows, config)

    def _require_same(self, config: LoadStageConfig, name: str, why: str) -> None:
        own, asked = (fields_of(one)[name] for one in (self.config, config))
        require(
            own == asked,
            f"load.{name}",
            f"{asked!r}, but a copy keeps the {own!r} {why}",
            f"Give {own!r}, or set it in load().",
        )

    def _stepped(self, config: LoadStageConfig, ranks: int) -> Rows:
        """Returns the rows; weights that follow the training step count steps of `config` anew.

        Args:
            config: The options of one rank.
            ranks: How many times as many ranks as now share a step.
        """
        world = self.rows.world_size * ranks
        own = ((0, config.batch_size), *config.batch_size_schedule)
        every = tuple((step, size * world) for step, size in own)
        if self.rows.step_sizes in ((), every):
            return self.rows
        derived = [*chain_of(self.rows)]
        require(
            self._recount is not None and not any(isinstance(one, PassRows) for one in derived),
            "mix.weight_schedule",
            f"counts steps of {self.rows.step_sizes[0][1]} rows, and such a step has {every[0][1]}",
            f"Call load() with a batch_size of {every[0][1]} for these rows.",
        )
        assert self._recount is not None
        whole = replace(
            config,
            batch_size=every[0][1],
            batch_size_schedule=every[1:],
            num_epochs=self.rows.num_epochs,
            source_ids=bool(self.rows.source_names),
        )
        rows = self._recount(whole, self._seed)
        for one in reversed(derived):
            rows = one.over(rows)
        return rows

    def batch(self, step: int) -> Batch:
        """Makes batch `step` (from 0) in this thread, as the iteration would yield it.

        Raises:
            IndexError: There is no such batch.
        """
        made = None
        if self.rows_of(step):
            made = self._make(self.rows.open(), self._counted(), step, lambda stage: None)
        if made is None:
            raise IndexError(f"{self.name}: there is no batch {step}")
        return made[0]

    def explain(self, step: int, row: int | None = None) -> ExplainedBatch:
        """Returns which documents are in batch `step`, or in one `row` of it.

        For each it says dataset, file, row, tokens, slots, and the text with its masked parts. It
        is computed only from the plan and does not depend on what was read before. This takes
        milliseconds if a plan checkpoint is near, else one scan of the plan up to there; see
        docs/seeing.md.

        Args:
            step: The batch, from 0; metrics.jsonl calls it step + 1.
            row: The row of the batch; None for all rows.

        Raises:
            PlanError: There is no such batch or row.
            ConfigError: The rows are read forward.
        """
        reader = self._by_number(f"step {step}" if row is None else f"row {row} of step {step}")
        count = len(self.rows_of(step)) if step >= 0 else 0
        chosen = choose(step, row, count)
        start = self._counted().start(step)
        numbers = self._order.rows(reader, start, start + count)
        explained = explain_rows(self.rows, step, numbers, chosen, self._decoder)
        self.remember()
        return explained

    def remember(self) -> None:
        """Saves what was planned so far in the cache folder.

        A later process then finds rows near it quickly. `len` and `explain` do this too.
        """
        if self._remember is not None:
            self._remember()

    def ledger(self) -> Ledger:
        """Returns the ledger of what the newest iteration has read in this process.

        It covers what was read up to the last batch, from counters.

        Raises:
            ConfigError: The rows have numbers, so their ledger follows from the plan
                (`Pipeline.ledger`).
        """
        return self.rows.ledger() if self._mark is None else self._mark.ledger()

    def state(self) -> LoaderState:
        """Returns the state after the last yielded batch, regardless of batches in flight."""
        return self._state(self._latest)

    def state_at(self, batch: int) -> LoaderState:
        """Returns the state after the first `batch` batches, computed from the plan.

        `restore` continues from it without reading what comes before.

        Raises:
            ConfigError: The rows are read forward.
        """
        return self._state(After(batch, self._row(batch)))

    def _state(self, after: After) -> LoaderState:
        entry = self._entry
        if after.mark is not None:
            hint = after.mark.hint()
        elif entry is not None and entry.batch == after.batch and entry.hint is not None:
            hint = entry.hint
        else:
            hint = self.rows.hint(self._order.first(after.row))
        return LoaderState(
            batch=after.batch,
            row=after.row,
            components=self._components,
            config=self._words,
            hint=hint,
            changes=() if entry is None else entry.changes,
        )

    def restore(
        self,
        state: LoaderState | str | bytes | Json,
        allow_changed: Collection[str] = (),
    ) -> None:
        """Makes the next iteration continue after `state`.

        Args:
            state: A state, or its JSON.
            allow_changed: Components ("sources", "tokenizer", "config", "plan") that may have
                changed since it was saved. Counting then continues from the state's row in the
                current data, and this state and all later ones record the change.

        Raises:
            StateError: Something else changed since the state was saved; the message names it.
            ConfigError: `allow_changed` has an unknown name, or the rows are read forward.
        """
        require(
            not allow_changed or self.can_change,
            "allow_changed",
            "a stream can continue only where its files were left",
            "Start a new run, or leave streaming out.",
        )
        if not isinstance(state, LoaderState):
            state = LoaderState.from_json(state)
        saved = state
        try:
            state = state.check(self._components, self._words, allow_changed)
        except StateError as error:
            if not self.can_change:
                error.fix = (
                    "Restore into the pipeline that saved it, or start a new run: a "
                    "stream "
                    "cannot start at another place."
                )
            self._tell_unversioned(error, saved)
            raise
        reader = self.rows.open(state)
        # no digest tells how many rows a stream has
        unknown = state is not saved or isinstance(self.rows, ForwardRows)
        if unknown and reader.available(state.row - 1, state.row) == 0 < state.row:
            raise StateError(
                at="loader state",
                problem=f"it is at row {state.row}, and there are fewer rows now",
                fix="Start a new run.",
            )
        short = self._counted(state).start(state.batch) - state.row
        if short and self.can_change and reader.available(state.row, state.row + 1):
            raise StateError(
                at="loader state",
                problem=f"that run had ended with a batch short of {short} rows, and now there are "
                "more",
                fix="Restore an earlier state, or set drop_last=True in runs that are to be "
                "prolonged.",
            )
        self._restored = self._entry = self._kept_entry = state
        self._latest, self._mark, self._kept = After(state.batch, state.row), None, None
        self._newest += 1  # an iteration in progress no longer moves `state()`

    def _tell_unversioned(self, error: StateError, saved: LoaderState) -> None:
        """Says in an error about a changed state if nothing tells whether the sources changed."""
        told, sources = "; ".join(self.rows.unversioned), saved.components.get("sources")
        if not told or sources is None or sources == self._components["sources"]:
            return
        others = saved.changed({**self._components, "sources": sources}, self._words)[1]
        problem = f"nothing tells whether the sources are those of this state: {told}"
        error.problem = f"{problem}; {others}" if others else problem
        error.fix = "Give it a version, and start a new run, whose states can be restored."

    def _by_number(self, place: str) -> RowReader:
        """Returns a reader of rows that are found by number.

        Raises:
            ConfigError: The content of `place` is unknown until it is read.
        """
        require(
            self.rows.by_number,
            "streaming",
            f"a stream cannot tell what stands in {place} without reading up to it",
            "Leave streaming out: the same data from the token cache can be explained.",
        )
        return self.rows.open()

    def _counted(self, entry: LoaderState | None = None) -> Steps:
        """Returns how batches are counted by the newest iteration, or by one begun at `entry`."""
        entry = entry or self._entry
        if entry is None or not entry.changes:
            return self._steps
        return Steps(self.batch_size, self.config.batch_size_schedule, entry.begin)

    @property
    def _options(self) -> JsonObject:
        return {
            "collate": self.collate,
            "name": self.name,
            "decoder": self._decoder,
            "remember": self._remember,
            "recount": self._recount,
        }

    def _clone(self, rows: Rows, config: LoadStageConfig, seed: int | None = None) -> Loader:
        return Loader(rows, config, seed=self._seed if seed is None else seed, **self._options)

    def _ended(self) -> None:
        """Is called at the end of the newest iteration; a subclass may go to the next pass."""

    def _check_step(self, step: int, steps: Steps) -> None:
        if step < 0:
            raise IndexError(f"{self.name}: there is no batch {step}")
        if step < steps.begin.batch:
            raise StateError(
                at=self.name,
                problem=f"batch {step} comes before batch {steps.begin.batch}, from which this "
                "run continued with changes",
                fix="Ask a loader that is made with the options of that time.",
            )

    def _row(self, batch: int) -> int:
        """Returns the row after the first `batch` batches."""
        reader = self._by_number(f"batch {batch}")
        if self._entry is not None and batch == self._entry.batch:
            # earlier rows may be in a window that this process never plans
            return self._entry.row
        steps = self._counted()
        if batch == steps.begin.batch:
            return steps.begin.row
        self._check_step(batch, steps)
        # the rows of the last of them, which may be a short batch
        start, stop = steps.start(batch - 1), steps.start(batch)
        return start + reader.available(start, stop)

    @cached_property
    def _settings(self) -> JsonObject:
        """The settings that decide the content of batches, and no others.

        Mesh, micro-batches, workers and buffers may change.
        """
        schedule, transforms = self.config.batch_size_schedule, self.rows.transforms
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
    def _words(self) -> JsonObject:
        """The settings, and what the rows are made of, for the messages about changed states."""
        return {**self._settings, **self.rows.words}

    @cached_property
    def _components(self) -> dict[str, str]:
        return {**self.rows.identity, "config": digest(self._settings)}

    def _place(self) -> dict[int, Placement]:
        """Returns the placement of batches of every size; {} without a mesh."""
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

    def _rows_here(self, size: int) -> Int64 | None:
        """Returns the rows of a batch of `size` that this process makes, in order; None for all."""
        placement, pieces = self._placements.get(size), self.accumulation_steps
        if pieces == 1 and (placement is None or placement.whole):
            return None
        # micro-batch after micro-batch
        rows = np.arange(size, dtype=np.int64).reshape(-1, pieces).T.reshape(-1)
        return rows if placement is None else rows[placement.local_rows]

    def _fixed_width(self) -> int | None:
        """Returns the slots of every batch if they are known before rows are read; else None.

        Raises:
            PlacementError: Several processes share a batch and none of them knows its width.
        """
        known = known_width(self.collate, self.rows.seq_length)
        shared = any(
            len(placement.local_rows) < size for size, placement in self._placements.items()
        )
        if known is None and shared and not self.rows.lengths_are_free:
            raise PlacementError(
                at="padding",
                problem="the longest row of a global batch is known only to the processes that "
                "read it",
                fix="Set padding='max_length' and max_length, or pack the rows.",
            )
        return known

    def _make(
        self, reader: RowReader, steps: Steps, batch: int, enter: Callable[[str], None]
    ) -> tuple[Batch, After] | None:
        """Makes this process's part of batch number `batch`; `enter` is called with each stage.

        If rows have numbers, any thread may call this, in any order.

        Returns:
            The batch and the position after it, or None after the last.
        """
        start, size = steps.at(batch)
        stage = "plan" if self.rows.by_number else "read"
        try:
            enter(stage)
            count = reader.available(start, start + size)
            if count == 0 or (count < size and self.config.drop_last):
                self._end = reader.finish(start, count)
                return None
            rows = self._order.rows(reader, start, start + count)
            width = self._width
            if width is None:
                stage = "lengths"
                enter(stage)
                width = row_width(reader.lengths(rows), self.collate)
            placement, here = self._placements.get(size), self._local[size]
            if count < size and (
                placement is not None or here is not None or not self.rows.by_number
            ):
                rows = np.concatenate([rows, np.full(size - count, -1, dtype=np.int64)])
            if here is not None:
                rows = rows[here]
            if self._width is not None and self.rows.seq_length is None:
                stage = "lengths"
                enter(stage)
                # raises an error if one of this process's rows does not fit
                row_width(reader.lengths(rows), self.collate)
            stage = "gather"
            enter(stage)
            made = with_asked(reader.batch(rows, width), self.collate)
            if (pieces := self.accumulation_steps) > 1:
                made = _cut(made, pieces)
            if placement is not None:
                stage = "place"
                enter(stage)
                made = placement.place(made)
            behind = start + (count if self.rows.by_number else size)
            return made, After(batch + 1, behind, reader.mark(behind))
        except Exception as error:
            error.add_note(
                f"{self.name}: batch {batch}, rows {start}:{start + size}, stage {stage!r}"
            )
            raise


def _cut(batch: dict[str, Int32], pieces: int) -> dict[str, Int32]:
    """Returns a batch whose rows are cut into `pieces` micro-batches."""
    if not isinstance(batch, Mapping):  # a user's collator, or rows that are tuples
        cut = _cut({f"{i}": column for i, column in enumerate(batch)}, pieces)
        return tuple(cut.values())  # pyright: ignore[reportReturnType]
    return {name: column.reshape(pieces, -1, *column.shape[1:]) for name, column in batch.items()}


AsyncDataLoader = Loader  # the name that EasyDeL's API uses


class Batches(Iterator[Batch]):
    """One iteration over a loader.

    `close()` ends its threads; so does dropping the iteration, for example with a `break` in a for
    loop.
    """

    def __init__(
        self, loader: Loader, entry: LoaderState | None, steps: Steps, *, holding: bool
    ) -> None:
        settings = loader.config
        # The loader's own iteration must not reference the loader. Any other does, to report its
        # end even if nothing else references the loader:
        # `for batch in module.train_dataloader()`.
        self._loader = weakref.ref(loader)
        self._held = loader if holding else None
        self._number = loader._newest
        start = 0 if entry is None else entry.batch
        self._none_yet = start == 0
        # makes batches of these rows, even if the loader goes to another pass
        self._maker = copy.copy(loader)
        workers = settings.prefetch_workers if settings.prefetch_enabled else 0
        local = {
            size: np.arange(size) if rows is None else rows for size, rows in loader._local.items()
        }
        self._reader = loader.rows.open(entry, Share(local, workers if workers > 1 else 0))
        self._ending = weakref.finalize(self, self._reader.close)
        make = partial(self._maker._make, self._reader, steps)
        self._made: Prefetcher[tuple[Batch, After]] | InOrder[tuple[Batch, After]]
        if settings.prefetch_enabled:
            self._made = Prefetcher(
                make,
                start,
                # one worker if what is read next depends on what was read before
                workers=workers if loader.rows.by_number else 1,
                ahead=settings.prefetch_buffer_size,
                stall_timeout_s=settings.stall_timeout_s,
                name=loader.name,
            )
        else:
            self._made = InOrder(make, start)

    def __next__(self) -> Batch:
        try:
            batch, after = next(self._made)
        except StopIteration:
            self._ending()
            loader = self._newest_of()
            if loader is not None:
                loader._mark = self._maker._end
            if self._none_yet:
                self._reader.check_some_batch()
            if loader is not None:
                loader._ended()
            raise
        except StallError:
            if self._ending.detach() is not None:
                self._reader.close(wait=False)  # a read that hangs is not waited for
            raise
        # also on Ctrl-C: no batch follows, and no thread is left running
        except BaseException:
            self._ending()
            raise
        self._none_yet = False
        if (loader := self._newest_of()) is not None:
            loader._latest, loader._mark = after, after.mark
        return batch

    def close(self) -> None:
        self._made.close()
        self._ending()

    def _newest_of(self) -> Loader | None:
        """Returns the loader while this is its newest iteration, else None."""
        loader = self._loader()
        return loader if loader is not None and loader._newest == self._number else None
