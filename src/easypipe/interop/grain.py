"""A loader for Grain: an IterDataset of its batches, and a MapDataset of rows or batches.

Grain is only the interface here: the plan, the threads and the state are easypipe's. docs/grain.md
explains why.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from easypipe.core.errors import ConfigError, StateError, require
from easypipe.core.values import Batch, JsonObject
from easypipe.loader.collate import with_asked
from easypipe.loader.loader import Loader

try:
    import grain  # loads jax
except ImportError as error:
    raise ImportError(
        "Grain is not installed. Install it with: pip install 'easypipe[grain]'"
    ) from error

STATE_KEY = "easypipe"


class LoaderDataset(grain.IterDataset[Batch]):
    """The batches of a loader as a `grain.IterDataset`.

    It can be iterated over, or get Grain's transformations. Every iterator starts at the loader's
    first batch.
    """

    def __init__(self, loader: Loader) -> None:
        super().__init__()
        self._loader = loader

    def __iter__(self) -> LoaderIterator:
        return LoaderIterator(self._loader)

    def __str__(self) -> str:
        return f"LoaderDataset({self._loader.name})"


class LoaderIterator(grain.DatasetIterator[Batch]):
    """A loader's iterator as a `grain.DatasetIterator`.

    Orbax and training loops written for Grain save and restore it.

    Law (exact resume): after `set_state(state)`, with the state that `get_state` returned after
    batch n, the next batch is n + 1, also for another number of processes and workers.
    """

    def __init__(self, loader: Loader) -> None:
        super().__init__()
        self._loader = loader.copy()
        self._batches: Any = None  # until the first batch is requested

    def __next__(self) -> Batch:
        """Returns the next batch.

        Raises:
            ValueError: The iterator is closed.
        """
        self.start_prefetch()
        return next(self._batches)

    def get_state(self) -> JsonObject:
        """Returns `{"easypipe": JSON}`: the loader's state, always of the same type and shape."""
        return {STATE_KEY: self._loader.state().to_json()}

    def set_state(self, state: JsonObject) -> None:
        """Makes the next batch the one after the state.

        Raises:
            StateError: The state does not belong to this loader.
        """
        if STATE_KEY not in state:
            raise StateError(
                at="grain state",
                problem=f"not a state of an easypipe loader: it has {sorted(state)}",
                fix="Restore what get_state() returned.",
            )
        self._loader.restore(state[STATE_KEY])
        self._end()

    def start_prefetch(self) -> None:
        """Starts the loader's threads, unless they are running."""
        if self._closed:
            raise ValueError(f"{self} is closed")
        if self._batches is None:
            self._batches = iter(self._loader)

    def close(self) -> None:
        """Ends the loader's threads."""
        self._end()
        super().close()

    def __str__(self) -> str:
        return f"LoaderIterator({self._loader.name})"

    # grain.experimental.get_next_index and set_next_index call these two.

    def _get_next_index(self) -> int:
        return self._loader.state().batch

    def _set_next_index(self, index: int) -> None:
        require(
            self._loader.rows.by_number,
            "next index",
            f"{index}, but streams are read forward: batches cannot be read by number",
            "Keep get_state() where the iteration is to go on, and give it to set_state(); "
            "or leave streaming out.",
        )
        self.set_state({STATE_KEY: self._loader.state_at(index).to_json()})

    def _end(self) -> None:
        if self._batches is not None:
            self._batches.close()
            self._batches = None


class RowsByNumber:
    """A random-access source of single rows, in the order of the plan.

    A row is `{column: Int32[slots]}` with labels.
    """

    def __init__(self, loader: Loader) -> None:
        loader = by_number(loader)
        self._rows, self._collate, self._name = loader.rows, loader.collate, loader.name
        self._reader = loader.rows.open()
        self._length = counted(loader, lambda: loader.rows.num_rows)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        if not 0 <= index < len(self):
            raise IndexError(f"{self._name}: there is no row {index}")
        return self._getitems([index])[0]

    def _getitems(self, indices: Sequence[int]) -> list[dict[str, np.ndarray]]:
        """Returns the rows that Grain requests; rows of equal length are read together."""
        numbers = np.asarray(indices, dtype=np.int64)
        if self._rows.seq_length is None:
            return [
                self._read(numbers[i : i + 1], int(length))[0]
                for i, length in enumerate(self._reader.lengths(numbers))
            ]
        return self._read(numbers, self._rows.seq_length)

    def _read(self, numbers: np.ndarray, width: int) -> list[dict[str, np.ndarray]]:
        batch = self._reader.batch(numbers, width)
        batch = with_asked(batch, self._collate)
        return [{name: column[i] for name, column in batch.items()} for i in range(len(numbers))]

    def __repr__(self) -> str:
        return f"RowsByNumber({self._name})"


class BatchesByNumber:
    """A random-access source of a loader's batches, as NumPy arrays."""

    def __init__(self, loader: Loader) -> None:
        loader = by_number(loader)
        here = dataclasses.replace(
            loader.config, mesh=None, partition_spec=None, prefetch_to_device=False
        )
        self._loader = loader.copy(here)
        self._length = counted(loader, lambda: len(loader))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return self._loader.batch(index)

    def __repr__(self) -> str:
        return f"BatchesByNumber({self._loader.name})"


def map_dataset(source: RowsByNumber | BatchesByNumber) -> Any:
    """Returns a `grain.MapDataset` over single rows or batches.

    It supports `ds[i]`, `len(ds)`, `.map()`, `.batch()`, `.to_iter_dataset()` and so on. Use
    Grain's read threads, not its worker processes, because mapped files cannot be pickled.
    """
    return grain.MapDataset.source(source)  # pyright: ignore[reportArgumentType]


def by_number(loader: Loader) -> Loader:
    """Returns the loader.

    Raises:
        ConfigError: Its rows have no numbers.
    """
    require(
        loader.rows.by_number,
        "as_grain",
        "streams are read forward, so their rows have no numbers",
        "Leave streaming out, or use LoaderDataset, which iterates.",
    )
    return loader


def counted(loader: Loader, count: Callable[[], int | None]) -> int:
    """Returns how many rows or batches there are.

    Raises:
        ConfigError: They never end, but a MapDataset needs a length.
    """
    if loader.rows.num_rows is None:
        raise ConfigError(
            at="as_grain",
            problem="rows without end cannot be a MapDataset, which has a length",
            fix="Set num_epochs and a stop_strategy that ends, or use LoaderDataset, which "
            "iterates.",
        )
    number = count()
    assert number is not None
    return number


__all__ = ["BatchesByNumber", "LoaderDataset", "LoaderIterator", "RowsByNumber", "map_dataset"]
