"""Streaming: batches from data that nobody has counted or cached, in an order that no number of
hosts or workers changes.

stream   one of S canonical streams; it gives R = batch_size / S neighbouring rows of every batch:
rows s·R to (s + 1)·R share    the ranges of every dataset that a stream reads (streaming_read.py); they follow from the files, S and the seed
window   documents of a stream that are drawn, shuffled and packed together (streaming_window.py); a
row never holds two state    of a stream: what its next window depends on (streaming_state.py); of the loader: that of every stream, and the batch

Row r of stream s stands in batch r // R; where batch_size_schedule changes the size, R is that of
the step. Streams that have ended hand their places in the batch to the others (plan/turns.py), so
that a pass over finite data ends where no stream has a row more: the last batch is filled up with
rows of padding (segment 0, labels -100), or left out with drop_last. A process reads the streams
that its rows belong to. Where the data ends, it has to know when the others end, and reads all.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from easypipe.core.config import digest
from easypipe.core.errors import (
    ConfigError,
    PlacementError,
    PlanError,
    SourceError,
    StallError,
    StateError,
)
from easypipe.core.ledger import Ledger
from easypipe.loader.collate import CollateConfig, known_width
from easypipe.loader.config import LoadStageConfig, check_streams
from easypipe.loader.placement import Placement, gather_bytes, local_mesh
from easypipe.loader.prefetch import InOrder, Prefetcher
from easypipe.loader.state import LoaderState
from easypipe.loader.steps import Steps
from easypipe.loader.streaming_books import Books, ledger_of
from easypipe.loader.streaming_make import After, Job, Maker, Numbered, Shape
from easypipe.loader.streaming_read import Forward
from easypipe.loader.streaming_spec import StreamSpec
from easypipe.loader.streaming_state import StreamState
from easypipe.plan.pack import nothing_fits
from easypipe.plan.spec import in_words

log = logging.getLogger("easypipe")


class StreamLoader:
    """Batches `{column: Int32[batch, slots]}` made forward: NumPy arrays, or jax.Arrays where there
    is a mesh.

    With `accumulation_steps` A above 1 they are Int32[A, batch / A, slots].

    Laws: as of Loader. Batch `t` is byte-equal for any number of processes, threads and batches in
    flight; after `restore(state)` with the state after batch n, iteration yields batch n + 1
    onward, at the cost of at most one window of each stream. On several processes `state()` of
    endless data is collective: each process knows its own streams, so all call it after the same
    batch.
    sources: the datasets, in the order of `spec.weights`. identity: digests of sources and
    tokenizer. workers: threads that read. Raises ConfigError where streams do not divide the batch,
    PlacementError where batch and mesh do not fit.
    """

    can_change = False  # whether a state may be restored where something changed

    def __init__(
        self,
        sources: Sequence[Forward],
        spec: StreamSpec,
        config: LoadStageConfig | None = None,
        *,
        identity: Mapping[str, str],
        pad_token_id: int,
        collate: CollateConfig | None = None,
        workers: int | None = None,
        name: str = "loader",
    ) -> None:
        self.config = config or LoadStageConfig()
        self.collate = collate or CollateConfig()
        self.spec, self.name, self.batch_size = spec, name, self.config.batch_size
        self.accumulation_steps = self.config.accumulation_steps
        check_streams(spec.num_streams, self.config)
        schedule = self.config.batch_size_schedule
        self._steps = Steps(self.batch_size, schedule)
        shapes = {size: self._shape(size) for size in self._steps.sizes}
        own = sorted(
            {
                int(row) // (size // spec.num_streams)
                for size, shape in shapes.items()
                for row in shape.local
            }
        )
        if spec.last_epoch is not None and len(own) < spec.num_streams:
            log.warning(
                "%s: the data ends after %d epochs, so every process reads all %d streams to know where they end, not only its own %d; "
                "with num_epochs=None and a number of steps each reads its own alone",
                name, spec.last_epoch, spec.num_streams, len(own),
            )  # fmt: skip
            own = list(range(spec.num_streams))
        self.job = Job(
            sources=tuple(sources),
            spec=spec,
            collate=self.collate,
            steps=self._steps,
            shapes=shapes,
            own=tuple(own),
            accumulation_steps=self.accumulation_steps,
            width=self._fixed_width(shapes),
            pad_token_id=pad_token_id,
            drop_last=self.config.drop_last,
            workers=workers or _cores(),
            ahead=self.config.prefetch_workers
            if self.config.prefetch_enabled and self.config.prefetch_workers > 1
            else 0,
            name=name,
        )
        self._identity = dict(identity)
        self._restored: After | None = None
        self._kept: Iterator[dict[str, Any]] | None = None  # of `next(loader)`, once it has begun
        self._kept_entry = After(0, ())  # where it begins
        self._latest = After(0, ())
        self._newest = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        entry, self._restored = self._restored or After(0, ()), None
        return self._begin(entry)

    def __next__(self) -> dict[str, Any]:
        """The next batch of the iteration that the loader keeps: begun at the first batch or, after
        `restore`, at the restored one.
        """
        if self._kept is None:
            self._kept = self._begin(self._kept_entry)
        return next(self._kept)

    def _begin(self, entry: After) -> Iterator[dict[str, Any]]:
        self._latest = entry
        self._newest += 1
        return StreamBatches(self, entry, self._newest)

    def __len__(self) -> int:
        raise TypeError(
            "a streaming loader has no len(): its rows are not counted before they are read. "
            "Count steps instead (max_steps), or leave streaming out."
        )

    def copy(self, seed: int | None = None) -> StreamLoader:
        """A loader over the same data that goes its own way, from the first batch; in the order of
        another seed where one is given.
        """
        spec = self.spec if seed is None else dataclasses.replace(self.spec, seed=seed)
        return StreamLoader(self.job.sources, spec, self.config, **self._options)

    def state(self) -> LoaderState:
        """The state after the batch that was last yielded, whatever is in flight. Collective on
        several processes that read their own.
        """
        known = {state.number: state.state.to_text() for state in self._latest.streams}
        if not known:
            return self._state(0, None)
        if len(known) < self.spec.num_streams:
            known = self._of_all(known)
        return self._state(
            self._latest.batch, [known[number] for number in range(self.spec.num_streams)]
        )

    def restore(
        self,
        state: LoaderState | str | bytes | Mapping[str, Any],
        allow_changed: Collection[str] = (),
    ) -> None:
        """Makes the next iteration go on behind `state`, given as it is or as its JSON. Raises
        StateError naming what changed since.

        allow_changed: refused by ConfigError where it names anything, unlike Loader's.
        """
        if allow_changed:
            raise ConfigError(
                at="allow_changed",
                problem="a stream cannot be entered at another place than where its files were left",
                fix="Start a new run, or leave streaming out.",
            )
        if not isinstance(state, LoaderState):
            state = LoaderState.from_json(state)
        try:
            state.check(self._components, self._words)
        except StateError as error:
            error.fix = "Restore into the pipeline that saved it, or start a new run: a stream cannot be entered at another place."
            raise
        texts = state.hint or []
        if len(texts) != (self.spec.num_streams if state.batch else 0):
            raise StateError(
                at="loader state",
                problem=f"{len(texts)} streams after batch {state.batch}",
                fix="Restore another state.",
            )
        streams = [
            Numbered(number, StreamState.from_text(text, len(self.job.sources)))
            for number, text in enumerate(texts)
        ]
        self._restored = self._latest = self._kept_entry = After(state.batch, tuple(streams))
        self._kept = None
        self._newest += 1

    def explain(self, step: int, row: int | None = None) -> Any:
        """Raises ConfigError: only a plan knows what stands at a step that was not read."""
        place = f"step {step}" if row is None else f"row {row} of step {step}"
        raise ConfigError(
            at="streaming",
            problem=f"a stream cannot tell what stands in {place} without reading up to it",
            fix="Leave streaming out: the same data from the token cache can be explained.",
        )

    def ledger(self) -> Ledger:
        """Where everything went that the newest iteration has read in this process up to its last
        batch, from counters.
        """
        return ledger_of(
            self._latest.books or Books(), [source.name for source in self.job.sources], self.spec
        )

    def _ended(self) -> None:
        """The newest iteration has met the end of the data."""

    @property
    def _options(self) -> dict[str, Any]:
        job = self.job
        known = {"pad_token_id": job.pad_token_id, "workers": job.workers, "name": self.name}
        return {"identity": self._identity, "collate": self.collate, **known}

    def _state(self, batch: int, hint: list[str] | None) -> LoaderState:
        return LoaderState(
            batch=batch,
            row=self._steps.start(batch),
            components=self._components,
            config=self._words,
            hint=hint,
        )

    def _of_all(self, known: dict[int, str]) -> dict[int, str]:
        """The states of all processes' streams."""
        room = 24 + 48 * len(self.job.sources)
        table = b"".join(
            known.get(number, "").encode().ljust(room) for number in range(self.spec.num_streams)
        )
        found = dict(known)
        for other in gather_bytes(table):
            texts = [other[i : i + room].decode().strip() for i in range(0, len(other), room)]
            found |= {
                number: text for number, text in enumerate(texts) if text and number not in found
            }
        return found

    @cached_property
    def _settings(self) -> dict[str, Any]:
        schedule = self.config.batch_size_schedule
        return {
            "streaming": True,
            "batch_size": self.batch_size,
            "num_streams": self.spec.num_streams,
            "drop_last": self.config.drop_last,
            "shuffle_buffer_size": self.config.shuffle_buffer_size,
            **self.collate.settings,
            **({"batch_size_schedule": [list(point) for point in schedule]} if schedule else {}),
        }

    @cached_property
    def _words(self) -> dict[str, Any]:
        """The settings, and the choices of the streams, for whoever reads a refusal."""
        return {**self._settings, **in_words(self.spec.choices())}

    @cached_property
    def _components(self) -> dict[str, str]:
        return {**self._identity, "plan": self.spec.fingerprint(), "config": digest(self._settings)}

    def _shape(self, size: int) -> Shape:
        """Where batches of `size` rows go, and which rows of them this process has."""
        mesh, pieces = self.config.mesh, self.config.accumulation_steps
        if mesh is None and self.config.prefetch_to_device:
            mesh = local_mesh()
        # micro-batch after micro-batch
        rows = np.arange(size, dtype=np.int64).reshape(-1, pieces).T.reshape(-1)
        placement = None
        if mesh is not None:
            fixed = self.spec.pack is not None or self.collate.padding == "max_length"
            placement = Placement(
                mesh, self.config.partition_spec, size, fixed_width=fixed, accumulation_steps=pieces
            )
            rows = rows[placement.local_rows]
        local = np.sort(rows)
        order = None if pieces == 1 else np.searchsorted(local, rows)
        return Shape(placement=placement, local=local, order=order)

    def _fixed_width(self, shapes: Mapping[int, Shape]) -> int | None:
        known = known_width(
            self.collate, None if self.spec.pack is None else self.spec.pack.seq_length
        )
        if known is None and any(len(shape.local) < size for size, shape in shapes.items()):
            raise PlacementError(
                at="padding",
                problem="the longest row of a global batch is known only to the processes that read it",
                fix="Set padding='max_length' and max_length, or pack the rows.",
            )
        return known


def _cores() -> int:
    """Cores that this process may use; not every system tells which those are."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def _no_batch(loader: StreamLoader, books: Books | None) -> SourceError | PlanError:
    """Training would end before it begins, as if the data had."""
    books = books or Books()
    if loader.spec.pack is not None and books.all_dropped:
        return nothing_fits(books.all_dropped, loader.spec.pack)
    entries = ledger_of(books, [source.name for source in loader.job.sources], loader.spec).entries
    read = [
        f"{one.dataset!r}: {', '.join(f'{count} {what}' for what, count in one.out.items()) or 'no row'}"
        for one in entries
        if (one.stage, one.unit) == ("stream", "rows")
    ]
    fix = "Check the columns that are named and the files; with drop_last=False a batch need not be full."
    return SourceError(
        at=loader.name,
        problem=f"not one batch came of what was read, of {'; '.join(read)}",
        fix=fix,
    )


class StreamBatches(Iterator[dict[str, Any]]):
    """One iteration over a StreamLoader. `close()` ends its threads; so does dropping it."""

    def __init__(self, loader: StreamLoader, entry: After, number: int) -> None:
        settings = loader.config
        self._loader, self._number = loader, number
        self._none_yet = entry.batch == 0
        maker = Maker(loader.job, entry)
        self._maker = maker
        self._end = weakref.finalize(self, maker.close)
        if settings.prefetch_enabled:
            self._made: Any = Prefetcher(
                maker.make,
                entry.batch,
                workers=1,  # what a stream gives next depends on what it gave before
                ahead=settings.prefetch_buffer_size,
                stall_timeout_s=settings.stall_timeout_s,
                name=loader.name,
            )
        else:
            self._made = InOrder(maker.make, entry.batch)

    def __next__(self) -> dict[str, Any]:
        newest = self._loader._newest == self._number
        try:
            batch, after = next(self._made)
        except StopIteration:
            if newest and self._maker.last is not None:
                self._loader._latest = self._loader._latest._replace(books=self._maker.last)
            self._end()
            if self._none_yet:
                raise _no_batch(self._loader, self._maker.last) from None
            if newest:
                self._loader._ended()
            raise
        except StallError:
            self._maker.abandoned = True  # whoever hangs is not waited for
            self._end()
            raise
        # Ctrl-C as well: whoever gets no batch gets no further one, and no thread stays behind
        except BaseException:
            self._end()
            raise
        self._none_yet = False
        if newest:
            self._loader._latest = after
        return batch

    def close(self) -> None:
        self._made.close()
        self._end()
