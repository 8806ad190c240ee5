"""EpochLoader, a loop over epochs: each iteration is the next pass; where a stream's pass ends.

pass   one reading of the data, counted from 0, each in a different order; with `num_epochs` N, an
       iteration is N passes, p to p + N - 1
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Collection, Iterator
from functools import cache
from typing import Any, Self

from easypipe.core.errors import require
from easypipe.core.random import fold
from easypipe.core.values import Batch, Json
from easypipe.loader.config import LoadStageConfig
from easypipe.loader.loader import After, Loader
from easypipe.loader.row_transforms import RowTransform
from easypipe.loader.rows.ranks import PassRows
from easypipe.loader.state import LoaderState
from easypipe.loader.streams.rows import StreamRows

# the attributes of a loader that describe the current pass
MOVED = ("rows", "_order", "_seed", "_latest", "_entry", "_restored", "_kept_entry")


class EpochLoader(Loader):
    """A Loader whose iterations are passes, like the data loaders of other libraries.

    It is for `for epoch in range(n): for batch in loader:`.

    Law: after an iteration that reached the end of the data comes the next pass; an abandoned pass
    is started again. The orders of all passes follow from the seed, so they are the same on every
    rank and in every new process. `state()` contains the pass, and restoring it continues in that
    pass; the state after a pass is the one before the next. `len()`, `rows`, `explain` and `batch`
    are those of the current pass, or of the one that the next iteration begins; `ledger()` is that
    of the newest iteration, also after the end of its pass.

    `loader(epoch)` is the Loader of a pass, which always begins at its first batch. Loaders made
    from this one (`copy`, `map_rows`, `of_rank`) count their own passes, from the first one on.

    Args:
        make: Makes the Loader of a pass; those of all passes have the same config.
    """

    # One iteration chains this many passes, each with its own last batch. It ends after a pass
    # whose number, counted from 1, is a multiple of this, wherever it began.
    _together = 1

    def __init__(self, make: Callable[[int], Loader]) -> None:
        self._made = make
        self._told: Callable[[int], None] = lambda epoch: None
        first = make(0)
        super().__init__(first.rows, first.config, seed=first.seed, **first._options)
        self._first_seed, self.epoch = first.seed, 0

    @property
    def seed(self) -> int:
        """The seed of the order of the first pass; those of the others are derived from it."""
        return self._first_seed

    def loader(self, epoch: int) -> Loader:
        """Returns the loader of a pass.

        Raises:
            ConfigError: `epoch` is negative.
        """
        require(epoch >= 0, "epoch", f"there is no pass {epoch}", "They count from 0.")
        return self._made(epoch)

    def set_epoch(self, epoch: int) -> None:
        """Makes pass `epoch` the next iteration, from its first batch."""
        self._enter(self.loader(epoch), epoch)

    def counted_by(self, passes: dict[Any, int], key: Any) -> Self:
        """Begins at pass `passes[key]` (0 if there is no entry), and keeps that entry up to date.

        After each finished pass, the next one is written there. This is for code that makes a new
        loader on every request.
        """
        if epoch := passes.get(key, 0):
            self.set_epoch(epoch)
        self._told = lambda epoch: passes.update({key: epoch})
        return self

    def restore(
        self,
        state: LoaderState | str | bytes | Json,
        allow_changed: Collection[str] = (),
    ) -> None:
        """Restores the loader of the state's pass and continues in it (`Loader.restore`)."""
        if not isinstance(state, LoaderState):
            state = LoaderState.from_json(state)
        loader = self.loader(state.epoch)
        loader.restore(state, allow_changed)
        self._enter(loader, state.epoch)

    def __next__(self) -> Batch:
        """Returns the next batch of the loader's own iteration.

        The end of a pass raises StopIteration; after it, the next call continues with the pass that
        an iteration would begin.
        """
        try:
            return super().__next__()
        except StopIteration:
            self._kept = None
            raise

    def copy(self, config: LoadStageConfig | None = None) -> EpochLoader:
        return self._each(lambda one: one.copy(config))

    def map_rows(self, transform: RowTransform, *, version: str) -> EpochLoader:
        return self._each(lambda one: one.map_rows(transform, version=version))

    def of_rank(self, rank: int, world_size: int) -> EpochLoader:
        return self._each(lambda one: one.of_rank(rank, world_size))

    def _each(self, change: Callable[[Loader], Loader]) -> EpochLoader:
        other = EpochLoader(lambda epoch: change(self._made(epoch)))
        other._together = self._together
        return other

    def _begin(self, entry: LoaderState | None, *, holding: bool = True) -> Iterator[Batch]:
        first = super()._begin(entry, holding=holding)
        return first if self._together == 1 else _chain(self, first, holding)

    def _state(self, after: After) -> LoaderState:
        return dataclasses.replace(super()._state(after), epoch=self.epoch)

    def _ended(self) -> None:
        kept, epoch = self._kept, self.epoch + (self.config.num_epochs or 1)
        self.set_epoch(epoch)
        self._kept = kept
        self._told(epoch)

    def _enter(self, loader: Loader, epoch: int) -> None:
        """Takes over the position of `loader`, the loader of pass `epoch`."""
        for name in MOVED:
            # Both are Loaders, so the attributes of one fit the other.
            setattr(self, name, getattr(loader, name))
        self.epoch, self._kept = epoch, None
        self._newest += 1
        for known in ("_settings", "_words", "_components"):
            # cached properties of the previous pass
            vars(self).pop(known, None)


def _chain(loader: EpochLoader, first: Iterator[Batch], holding: bool) -> Iterator[Batch]:
    """Yields the batches of `first` and of the following passes, to the end of the iteration.

    `first` is the newest iteration over a pass. The chain moves the loader as long as it is the
    newest.
    """
    kept, make, together = weakref.ref(loader), loader._made, loader._together
    epoch, number = loader.epoch, loader._newest
    del loader

    def batches() -> Iterator[Batch]:
        nonlocal epoch, number
        following = first
        while True:
            yield from following
            epoch += 1
            if epoch % together == 0:
                return
            moved = kept()
            if moved is not None and (moved.epoch, moved._newest) == (epoch, number + 1):
                following, number = Loader._begin(moved, None, holding=holding), moved._newest
            else:
                following = iter(make(epoch))
            del moved

    return batches()


def passes_over(
    build: Callable[[int | None], Loader], num_epochs: int | None
) -> Callable[[int], Loader]:
    """Returns a function that makes the Loader of every pass over one dataset.

    Args:
        build: Makes the loader over a number of passes; None for an endless one.
        num_epochs: The passes of one iteration.
    """

    @cache
    def endless() -> tuple[Loader, int]:
        """Returns the endless loader, and the rows of one pass."""
        return build(None), build(1).rows.num_rows or 0

    def make(epoch: int) -> Loader:
        if epoch == 0:
            return build(num_epochs)
        loader, rows_each = endless()
        return loader._clone(
            PassRows(loader.rows, epoch, num_epochs, rows_each),
            dataclasses.replace(loader.config, num_epochs=num_epochs),
            seed_of_epoch(loader.seed, epoch),
        )

    return make


def passes_of_streams(first: Loader, together: int) -> EpochLoader:
    """Returns the passes over data that is read forward; one iteration has `together` passes.

    Args:
        first: The Loader of the first pass.
        together: The passes that one iteration chains.
    """
    rows = first.rows
    assert isinstance(rows, StreamRows), "other rows are counted"

    def make(epoch: int) -> Loader:
        seed = seed_of_epoch(first.seed, epoch)
        return first._clone(rows.with_seed(seed), first.config, seed)

    loader = EpochLoader(make)
    loader._together = together
    return loader


def seed_of_epoch(seed: int, epoch: int) -> int:
    """Returns the seed of the order of a pass; for the first pass it is `seed` itself."""
    return seed if epoch == 0 else fold(seed, "epoch", epoch) >> 1


__all__ = ["EpochLoader", "passes_of_streams", "passes_over", "seed_of_epoch"]
