"""The loader: global batch `t` is rows `t * batch_size` onward, made ahead by threads, laid out on the mesh.

batch    global, the same whoever reads it; a process makes only its rows of it
row      counted over the whole run (rows.py)
position a row's place in the order of reading; another than its number only within a block of `shuffle_buffer_size`
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from easypipe.core.config import config, digest
from easypipe.core.errors import ConfigError, PlacementError, StateError
from easypipe.core.random import fold
from easypipe.loader.collate import CollateConfig, row_width, with_attention_mask
from easypipe.loader.placement import Placement, check_axes, local_mesh
from easypipe.loader.prefetch import InOrder, Prefetcher
from easypipe.loader.rows import Rows
from easypipe.loader.state import LoaderState
from easypipe.plan.order import permute


@config
class LoadStageConfig:
    """How rows become batches, and where the batches go.

    batch_size: rows of the global batch, over all processes.
    prefetch_enabled: make batches ahead in `prefetch_workers` threads, at most `prefetch_buffer_size` of them; else each is made when it
        is asked for, and nothing watches for a stall. One thread lays out some hundred million slots a second; more help slow reads.
    shuffle_buffer_size: rows are permuted within consecutive blocks of this many, keyed by the seed; None keeps the order of the plan.
        Blocks are counted over the whole run, so one may hold the end of an epoch and the start of the next.
    drop_last: leave out a last batch that is not full. False yields it: smaller without a mesh, on a mesh filled up with rows of padding
        (segment 0, labels -100), which weigh nothing.
    prefetch_to_device: without a mesh, put batches on a one-axis mesh of this process's devices; with a mesh they always go there.
    num_epochs: passes over the data; None goes on forever.
    mesh: `{axis: size}`, one size may be -1, or a jax Mesh. partition_spec: how batches lie on it; None splits rows over its axes `data`
        and `fsdp`.
    stall_timeout_s: how long one batch may take before StallError names the stage it is in.
    """

    batch_size: int = 8
    prefetch_enabled: bool = True
    prefetch_workers: int = 1
    prefetch_buffer_size: int = 8
    shuffle_buffer_size: int | None = None
    drop_last: bool = True
    prefetch_to_device: bool = False
    num_epochs: int | None = 1
    mesh: Any = None
    partition_spec: Any = None
    stall_timeout_s: float = 300.0

    def check(self) -> None:
        for name in ("batch_size", "prefetch_workers", "prefetch_buffer_size", "shuffle_buffer_size", "num_epochs"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(at=name, problem=f"{value} is too few", fix="Give at least 1.")
        if not self.stall_timeout_s > 0:
            raise ConfigError(at="stall_timeout_s", problem=f"{self.stall_timeout_s} is no time to wait", fix="Give seconds above 0.")
        if isinstance(self.mesh, Mapping):
            check_axes(self.mesh)
        if self.partition_spec is not None and self.mesh is None and not self.prefetch_to_device:
            raise ConfigError(at="partition_spec", problem="there is no mesh to lie on", fix="Set mesh, for example {'data': -1}.")


class Loader:
    """Batches `{column: Int32[batch, slots]}`: NumPy arrays, or jax.Arrays where there is a mesh.

    Law (determinism): batch `t` is byte-equal for any number of processes, workers and batches in flight. Law (exact resume): after
    `restore(state)` with the state taken after batch n, iteration yields batch n + 1 onward.
    Every `iter(loader)` starts at the first batch, the one after `restore` at the restored one. `state()` belongs to the newest iteration.
    rows: PlannedRows or StoredRows. seed: of the permutation within `shuffle_buffer_size`; without it, it changes nothing.
    Raises PlacementError where batch and mesh do not fit, ConfigError where `num_epochs` is not that of the rows.
    """

    def __init__(
        self,
        rows: Rows,
        config: LoadStageConfig | None = None,
        *,
        seed: int = 0,
        collate: CollateConfig | None = None,
        name: str = "loader",
    ) -> None:
        self.rows = rows
        self.config = config or LoadStageConfig()
        self.collate = collate or CollateConfig()
        self.batch_size = self.config.batch_size
        self.name = name
        if rows.num_epochs != self.config.num_epochs:
            raise ConfigError(
                at="load.num_epochs",
                problem=f"{self.config.num_epochs}, but the rows are counted over {rows.num_epochs}",
                fix=f"Set num_epochs={rows.num_epochs}, or make the rows for {self.config.num_epochs}.",
            )
        self._shuffle_key = None if self.config.shuffle_buffer_size is None else fold(seed, "loader", "shuffle")
        self._placement = self._place()
        self._width = self._fixed_width()
        self._yielded = 0  # batches before the next one of the newest iteration
        self._restored: LoaderState | None = None  # for the next iteration
        self._entry: LoaderState | None = None  # of the newest iteration
        self._newest = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self._entry, self._restored = self._restored, None
        self._yielded = 0 if self._entry is None else self._entry.batch
        self._newest += 1
        return Batches(self, self._yielded, self._newest)

    def __len__(self) -> int:
        """Batches from the first to the last. Raises TypeError where they never end."""
        num_rows = self.rows.num_rows
        if num_rows is None:
            raise TypeError(
                "this loader never ends, so it has no len(): its num_epochs is None, or its mixture restarts. "
                "Count steps instead (max_steps), or set num_epochs and a stop_strategy that ends."
            )
        return num_rows // self.batch_size if self.config.drop_last else -(-num_rows // self.batch_size)

    def state(self) -> LoaderState:
        """The state after the batch that was last yielded, whatever is in flight."""
        row = self._row()
        hint = self.rows.hint(self._first(row))
        return LoaderState(batch=self._yielded, row=row, components=self._components, config=self._settings, hint=hint)

    def restore(self, state: LoaderState | str | bytes | Mapping[str, Any]) -> None:
        """Makes the next iteration go on behind `state`, given as it is or as its JSON. Raises StateError naming what changed since."""
        if not isinstance(state, LoaderState):
            state = LoaderState.from_json(state)
        state.check(self._components, self._settings)
        if state.hint is not None:
            self.rows.seek(state.hint)
        short = state.batch * self.batch_size - state.row
        if short and self.rows.available(state.row, state.row + 1):
            raise StateError(
                at="loader state",
                problem=f"that run had ended with a batch short of {short} rows, and now there are more",
                fix="Restore an earlier state, or set drop_last=True in runs that are to be prolonged.",
            )
        self._restored = self._entry = state
        self._yielded = state.batch
        self._newest += 1  # an iteration under way no longer moves `state()`

    def _row(self) -> int:
        """The row behind the batch last yielded."""
        if self._entry is not None and self._yielded == self._entry.batch:
            return self._entry.row  # what stands before it may lie in a window that this process never looks at
        last = (self._yielded - 1) * self.batch_size  # its first row; it may be a short one
        return last + self.rows.available(last, last + self.batch_size) if self._yielded else 0

    @cached_property
    def _settings(self) -> dict[str, Any]:
        """What decides the content of batches, and nothing that does not: mesh, workers and buffers are free to change."""
        return {
            "batch_size": self.batch_size,
            "drop_last": self.config.drop_last,
            "shuffle_buffer_size": self.config.shuffle_buffer_size,
            "shuffle_key": self._shuffle_key,
            "padding": self.collate.padding,
            "max_length": self.collate.max_length,
            "attention_mask": self.collate.attention_mask,
        }

    @cached_property
    def _components(self) -> dict[str, str]:
        return {**self.rows.identity, "config": digest(self._settings)}

    def _place(self) -> Placement | None:
        mesh = self.config.mesh
        if mesh is None:
            if not self.config.prefetch_to_device:
                return None
            mesh = local_mesh()
        fixed = self.rows.seq_length is not None or self.collate.padding == "max_length"
        return Placement(mesh, self.config.partition_spec, self.batch_size, fixed_width=fixed)

    def _fixed_width(self) -> int | None:
        """Slots of every batch, where they can be known before the rows are."""
        packed = self.rows.seq_length
        if packed is not None:
            if self.collate.padding == "max_length" and self.collate.max_length != packed:
                raise ConfigError(
                    at="collate.max_length",
                    problem=f"{self.collate.max_length}, but every row has {packed} slots already",
                    fix="Leave padding at 'longest' for packed rows.",
                )
            return packed
        if self.collate.padding == "max_length":
            return self.collate.max_length
        if self._placement is not None and not self.rows.lengths_are_free and len(self._placement.local_rows) < self.batch_size:
            raise PlacementError(
                at="padding",
                problem="the longest row of a global batch is known only to the processes that read it",
                fix="Set padding='max_length' and max_length, or pack the rows.",
            )
        return None

    def _first(self, row: int) -> int:
        """The first row of the block that is permuted with `row`: nothing before it is read from here on."""
        size = self.config.shuffle_buffer_size
        return row if size is None else row // size * size

    def _make(self, batch: int, enter: Callable[[str], None]) -> dict[str, Any] | None:
        """Batch number `batch` as this process sees it, or None past the last. Any thread, any order."""
        start = batch * self.batch_size
        stage = "plan"
        try:
            enter(stage)
            count = self.rows.available(start, start + self.batch_size)
            if count == 0 or (count < self.batch_size and self.config.drop_last):
                return None
            rows = self._order(start, start + count)
            width = self._width
            if width is None:
                stage = "lengths"
                enter(stage)
                width = row_width(self.rows.lengths(rows), self.collate)
            if self._placement is not None:
                padding = np.full(self.batch_size - count, -1, dtype=np.int64)
                rows = np.concatenate([rows, padding])[self._placement.local_rows]
            if self._width is not None and self.rows.seq_length is None:
                stage = "lengths"
                enter(stage)
                row_width(self.rows.lengths(rows), self.collate)  # raises where one of this process's rows does not fit
            stage = "gather"
            enter(stage)
            made = self.rows.batch(rows, width)
            if self.collate.attention_mask:
                made = with_attention_mask(made)
            if self._placement is None:
                return made
            stage = "place"
            enter(stage)
            return self._placement.place(made)
        except Exception as error:
            error.add_note(f"{self.name}: batch {batch}, rows {start}:{start + self.batch_size}, stage {stage!r}")
            raise

    def _order(self, start: int, stop: int) -> NDArray[np.int64]:
        """The rows that stand at positions `start` to `stop`."""
        size = self.config.shuffle_buffer_size
        positions = np.arange(start, stop, dtype=np.int64)
        if size is None or self._shuffle_key is None:
            return positions
        rows = np.empty_like(positions)
        for block in range(start // size, -(-stop // size)):
            here = positions // size == block
            length = self.rows.available(block * size, (block + 1) * size)
            rows[here] = block * size + permute(positions[here] - block * size, length, fold(self._shuffle_key, block))
        return rows


AsyncDataLoader = Loader  # the name that EasyDeL's API uses


class Batches(Iterator[dict[str, Any]]):
    """One iteration over a loader. `close()` ends its threads; so does dropping it, as a `break` out of a for loop does."""

    def __init__(self, loader: Loader, start: int, number: int) -> None:
        settings = loader.config
        self._loader = loader
        self._number = number
        self._index = start
        make = loader._make
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
        batch = next(self._made)
        self._index += 1
        if self._loader._newest == self._number:
            self._loader._yielded = self._index
        return batch

    def close(self) -> None:
        self._made.close()
