"""Rows of any dataset (images, tuples, dicts), by number or iterated, batched by a collator.

The loader, its order, its threads and its states are the same as for text: this is another kind of
Rows. A row may hold anything: only the collator knows columns, lengths and labels.

row     a row of the whole run; row r of a dataset of n is number `r % n` in the order of pass
        `r // n`
key     64 random bits of a row, for collators that draw (masks, crops); they depend only on seed,
        pass and row
"""

from __future__ import annotations

import functools
import itertools
import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import numpy as np

from easypipe.core.config import digest
from easypipe.core.errors import ConfigError, SourceError, require
from easypipe.core.identity import dotted_name
from easypipe.core.random import fold
from easypipe.core.schema import IGNORE, LABELS
from easypipe.core.values import Array, Collate, Dataset, Int32, Int64, Item, attribute_of
from easypipe.loader.rows.rows import NumberedRows, RepeatedRows
from easypipe.plan.order import OrderConfig, documents

log = logging.getLogger("easypipe")


@runtime_checkable
class KeyedCollator(Protocol):
    """A collator that draws random numbers.

    It is called with `keys`, 64 bits for each row, and must not use other randomness.
    """

    def __call__(self, rows: Sequence[Item], *, keys: Sequence[int] | None = None) -> Any: ...

    @property
    def draws(self) -> bool: ...


class _Unsized(NumberedRows):
    """The common part of Rows with widths that only the collator knows."""

    seq_length: int | None = None
    pad_token_id = 0
    num_epochs: int | None
    _collate: Collate
    _seed: int
    _name: str

    def numbers(self, rows: Int64) -> Int64:
        """Returns which rows of the dataset are at these rows of the run."""
        return rows

    def lengths(self, rows: Int64) -> Int32:
        return np.zeros(len(rows), np.int32)

    def gather(self, rows: Int64, width: int | None = None) -> dict[str, Int32]:
        """Raises an error: the rows have no stored columns.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            at=self._name,
            problem="its rows are made into columns by a collator, so they cannot be inspected "
            "or changed",
            fix="Change rows in the dataset or in the collator.",
        )

    def _collated(self, items: list[Item], rows: Int64, shown: Int64) -> Any:
        """Returns the batch of `items`, which are rows `shown`: the real ones among `rows`.

        Rows of -1 come last and are filled with padding. If all are, `shown` is any row: it has the
        columns. An error of the collator gets a note with the rows' numbers in the dataset.
        """
        keys: dict[str, list[int]] = {}
        if isinstance(self._collate, KeyedCollator) and self._collate.draws:
            pairs = zip(self.epochs(shown).tolist(), shown.tolist(), strict=True)
            keys["keys"] = [fold(self._seed, "row", self._name, epoch, row) for epoch, row in pairs]
        try:
            batch = self._collate(items, **keys)
        except Exception as error:
            numbers = ", ".join(map(str, self.numbers(shown).tolist()))
            error.add_note(f"{self._name}: the rows of the batch are {numbers}")
            raise
        real = int(np.count_nonzero(rows >= 0))
        if real == len(rows):
            return batch
        filled = _filled(batch, real, len(rows) - real)
        labels = filled.get(LABELS) if isinstance(filled, dict) else None
        if labels is None or labels.dtype.kind != "i":
            _warn_of_zeros(self._name)
        return filled


class ItemRows(_Unsized, RepeatedRows):
    """The rows of a map-style dataset (`len()` and `dataset[i]`).

    Their order is that in which a Pipeline reads a dataset of the same name. It is thread-safe if
    `dataset[i]` and the collator are. Restoring a state detects a changed length, fingerprint (if
    the dataset has one, like those of `datasets`), collator, seed or order. Rows are not hashed,
    because reading one may mean decoding an image. Errors of the dataset get a note with the row's
    number.

    Args:
        dataset: The dataset.
        collate: A function from a list of rows to a batch: a dict of arrays, or a tuple of them. If
            its attribute `draws` is true, it also gets `keys` (KeyedCollator).
        seed: The seed of the order and of the keys.
        shuffle: Whether every pass has a new keyed permutation; False keeps the order.
        num_epochs: The number of passes; None: endless.
        name: The name of the dataset.
    """

    def __init__(
        self,
        dataset: Dataset,
        collate: Collate,
        *,
        seed: int = 0,
        shuffle: bool = False,
        num_epochs: int | None = 1,
        name: str = "dataset1",
    ) -> None:
        self._dataset, self._collate, self._seed, self._name = dataset, collate, seed, name
        self._order = OrderConfig(shuffle=shuffle)
        self._key = np.array([fold(seed, "order", name)], np.uint64)
        self.num_epochs = num_epochs

    @property
    def rows_each(self) -> int:
        return self._size

    @cached_property
    def _size(self) -> int:
        return len(self._dataset)

    @property
    def identity(self) -> Mapping[str, str]:
        return {
            "sources": digest("items", self._size, fingerprint_of(self._dataset)),
            "tokenizer": digest("collator", describe_collator(self._collate)),
            "plan": digest("items", self._name, self._seed, self._order.shuffle),
        }

    def batch(self, rows: Int64, width: int) -> Any:
        shown = rows[rows >= 0] if rows.max() >= 0 else np.zeros(1, np.int64)
        items = []
        # each read calls the user's own code, row by row
        for number in self.numbers(shown).tolist():
            try:
                items.append(self._dataset[number])
            except Exception as error:
                error.add_note(f"{self._name}: row {number}")
                raise
        return self._collated(items, rows, shown)

    def numbers(self, rows: Int64) -> Int64:
        if not rows.size:
            return rows
        first, size = int(rows.min()), np.array([self._size])
        stop = int(rows.max()) + 1
        order = documents(
            self._order, size, self._key, 0, np.array([first]), np.array([stop - first])
        )
        return order[rows - first]


class ForwardRows(_Unsized):
    """The rows of a dataset that can only be iterated over, each time from its start.

    Reading is exact, and fast if rows are requested in order. A later row is reached by reading the
    rows in between, an earlier one by starting again. It is thread-safe; one thread reads at a
    time.

    Args:
        dataset: An object whose `iter()` begins at the first row and yields the same rows every
            time.
        collate: As for ItemRows.
        seed: As for ItemRows.
        name: As for ItemRows.
        epoch: The number of this pass, for datasets with `set_epoch`, such as those that shuffle.

    Raises:
        ConfigError: The dataset is an iterator.
    """

    num_epochs: int | None = 1

    def __init__(
        self,
        dataset: Iterable[Item],
        collate: Collate,
        *,
        seed: int = 0,
        name: str = "dataset1",
        epoch: int = 0,
    ) -> None:
        require(
            not isinstance(dataset, Iterator),
            "dataset",
            f"{type(dataset).__name__} can be read once, and every iteration begins anew",
            "Give what makes the iterator: a dataset, or a class with __iter__.",
        )
        self._dataset, self._collate, self._seed = dataset, collate, seed
        self._name, self._epoch = name, epoch
        self._lock = threading.Lock()
        self._ahead: list[Item] = []  # rows from `_first` on that were read and not yet returned
        self._first = 0
        self._seen = 0  # rows that are known to exist
        self._total: int | None = None  # once the end was seen
        self._items: Iterator[Item] | None = None

    @property
    def num_rows(self) -> int | None:
        """The number of rows; to count them, they must be read to the end once."""
        with self._lock:
            while self._total is None:
                self._reach(self._first + len(self._ahead) + 1024, keep=False)
            return self._total

    @property
    def identity(self) -> Mapping[str, str]:
        return {
            "sources": digest("forward", fingerprint_of(self._dataset)),
            "tokenizer": digest("collator", describe_collator(self._collate)),
            "plan": digest(
                "forward", self._name, self._seed, *([self._epoch] if self._epoch else [])
            ),
        }

    def available(self, start: int, stop: int) -> int:
        with self._lock:
            if self._total is None and stop > self._seen:
                self._seek(start)
                self._reach(stop)
            return stop - start if self._total is None else max(0, min(stop, self._total) - start)

    def epochs(self, rows: Int64) -> Int64:
        return np.full(len(rows), self._epoch, np.int64)

    def batch(self, rows: Int64, width: int) -> Any:
        with self._lock:
            # padding alone takes its shapes from a row that is kept, or else from the first one
            kept = self._first if self._ahead else 0
            shown = rows[rows >= 0] if rows.max() >= 0 else np.array([kept])
            self._seek(int(shown.min()))
            self._reach(int(shown.max()) + 1)
            items = [self._ahead[row - self._first] for row in shown.tolist()]
        return self._collated(items, rows, shown)

    def _seek(self, row: int) -> None:
        """Makes `row` the first one that is kept, or the end if the rows end before it."""
        if self._items is None or row < self._first:
            if (set_epoch := attribute_of(self._dataset, "set_epoch")) is not None:
                set_epoch(self._epoch)
            self._items, self._ahead, self._first = iter(self._dataset), [], 0
        self._reach(row, keep=False)
        row = min(row, self._first + len(self._ahead))  # the rows may have ended before it
        del self._ahead[: row - self._first]
        self._first = row

    def _reach(self, stop: int, keep: bool = True) -> None:
        if self._items is None:
            self._seek(0)
        assert self._items is not None
        while (missing := stop - self._first - len(self._ahead)) > 0:
            more = list(itertools.islice(self._items, min(missing, 1024)))
            self._ahead += more
            self._seen = max(self._seen, self._first + len(self._ahead))
            if len(more) < min(missing, 1024):
                self._total = self._first + len(self._ahead)
                return
            if not keep:
                self._first, self._ahead = self._first + len(self._ahead), []


def fingerprint_of(dataset: Dataset) -> str:
    """Returns the type of a dataset and its own fingerprint, if it has one."""
    own = attribute_of(dataset, "fingerprint", "_fingerprint")
    return f"{type(dataset).__qualname__}:{own if isinstance(own, str) else ''}"


def describe_collator(collate: Collate) -> str:
    """Describes a collator of this package by its options, any other by its name."""
    own = attribute_of(collate, "recipe")
    if own is not None:
        return digest(own)
    return dotted_name(collate, type(collate).__qualname__)


@functools.cache
def _warn_of_zeros(name: str) -> None:
    """Warns, once for each dataset, of padding that looks like rows of data."""
    log.warning(
        "%s: rows of zeros fill its last batch, and no integer column %r tells a loss which they "
        "are. Set drop_last=True, or count only the rows of Loader.rows_of(step).",
        name,
        LABELS,
    )


def _filled(batch: Any, real: int, missing: int) -> Any:
    if isinstance(batch, Mapping):
        return {name: _padded(name, column, real, missing) for name, column in batch.items()}
    if isinstance(batch, tuple):
        return tuple(_padded("", column, real, missing) for column in batch)
    raise SourceError(
        at="batch",
        problem=f"the collator made {type(batch).__name__}, which cannot be padded to a batch",
        fix="Make a dict of arrays, or set drop_last.",
    )


def _padded(name: str, column: Any, real: int, missing: int) -> Array:
    column = np.asarray(column)[:real]
    fill = IGNORE if name == LABELS and column.dtype.kind == "i" else 0
    return np.concatenate([column, np.full((missing, *column.shape[1:]), fill, column.dtype)])
