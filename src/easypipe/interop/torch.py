"""Loaders and streams of rows as torch IterableDatasets; checks whether workers can share them."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from easypipe.core.errors import ConfigError, StateError, require
from easypipe.core.values import Item, Json
from easypipe.interop.workers import torch_worker
from easypipe.loader.epochs import EpochLoader
from easypipe.loader.loader import Loader
from easypipe.loader.rows.items import ForwardRows
from easypipe.loader.rows.ranks import DerivedRows

try:
    # It is not imported by name, because this file has the same name, and types are checked without
    # torch.
    torch: Any = importlib.import_module("torch")
    data: Any = importlib.import_module("torch.utils.data")
except ImportError as error:
    raise ImportError(
        "torch is not installed. Install it with: pip install 'easypipe[torch]'"
    ) from error

STATE_KEY = "easypipe"
Tensors = Any  # a tensor, or a dict or tuple of them: types are checked without torch


class TorchBatches(data.IterableDataset):
    """The batches of a loader as torch tensors.

    `DataLoader(TorchBatches(loader), batch_size=None)`

    Integers become int64, which torch's embeddings and losses need; floats are unchanged. The
    loader's threads make batches ahead, so use `num_workers=0`.

    Law: with W workers, worker w returns batches w, w + W, ..., so that the DataLoader, which asks
    the workers in turn, yields every batch once and in order. Workers need a loader with numbered
    batches (not one of streams) in host memory.

    Law (exact resume): after `load_state_dict(state)`, with the state that `state_dict` returned
    after batch n, the next batch is n + 1. Each of several workers saves and restores its own
    state, as with torchdata's StatefulDataLoader.

    Persistent workers begin the next pass with every iteration, even if the one before was
    abandoned: a worker does not know how far the others came.
    """

    def __init__(self, loader: Loader) -> None:
        super().__init__()
        self._loader = loader.copy()
        self._yielded = 0  # batches before the next one of this process, if there are workers
        self._within = False  # whether this worker is in a pass
        self._restored_by: int | None = None  # the process that loaded a state
        # the process whose workers read last, which they tell it through memory that they share
        self._read_for = torch.zeros(1, dtype=torch.int64).share_memory_()

    def __iter__(self) -> Iterator[Tensors]:
        worker, workers = torch_worker()
        require(
            self._restored_by in (None, os.getpid()),
            "num_workers",
            "a worker, but the state was loaded in the process that started it, which "
            "reads no batch",
            "Set num_workers=0, or use torchdata's StatefulDataLoader, whose workers load "
            "their own.",
        )
        if data.get_worker_info() is not None:
            self._read_for[0] = os.getppid()
        else:
            self._forget_workers()
        if workers == 1:
            for batch in self._loader:
                yield _tensors(batch)
            return
        loader = self._by_number(workers)
        if self._within:
            self._end()
        self._within = True
        step = self._yielded + (worker - self._yielded) % workers
        while len(loader.rows_of(step)):
            batch = _tensors(loader.batch(step))
            self._yielded = step + 1
            yield batch
            step += workers
        self._end()

    def _forget_workers(self) -> None:
        if self._read_for.item() == os.getpid():
            self._read_for[0] = 0

    def _end(self) -> None:
        self._yielded, self._within = 0, False
        self._loader._ended()

    def set_epoch(self, epoch: int) -> None:
        """Makes pass `epoch` the next iteration.

        Worker processes need it, because they end with a pass and do not count passes.

        Raises:
            ConfigError: The loader has no passes; loaders of data modules, factories and builders
                do.
        """
        if not isinstance(self._loader, EpochLoader):
            raise ConfigError(
                at="set_epoch",
                problem="this loader begins at its first batch every time",
                fix="Give an EpochLoader.",
            )
        self._forget_workers()
        self._loader.set_epoch(epoch)

    def __len__(self) -> int:
        """Returns the number of batches of a pass.

        Raises:
            TypeError: The batches never end.
        """
        return len(self._loader)

    def state_dict(self) -> Json:
        """Returns the state after the last batch yielded by this process, as JSON.

        Raises:
            StateError: Workers of this process read the batches, and it does not know how far.
        """
        if data.get_worker_info() is None and self._read_for.item() == os.getpid():
            raise StateError(
                at="state_dict",
                problem="workers read the batches, and this process does not know how far they are",
                fix="Set num_workers=0, or use torchdata's StatefulDataLoader, which asks them.",
            )
        if torch_worker()[1] == 1:
            return {STATE_KEY: self._loader.state().to_json()}
        return {STATE_KEY: self._by_number(torch_worker()[1]).state_at(self._yielded).to_json()}

    def load_state_dict(self, state_dict: Json) -> None:
        """Makes the next iteration continue after the state.

        Raises:
            StateError: The state does not belong to this loader.
        """
        if STATE_KEY not in state_dict:
            raise StateError(
                at="state_dict",
                problem=f"not a state of an easypipe loader: it has {sorted(state_dict)}",
                fix="Give state_dict().",
            )
        self._forget_workers()
        self._loader.restore(state_dict[STATE_KEY])
        self._yielded, self._restored_by = self._loader.state().batch, os.getpid()
        self._within = False

    def _by_number(self, workers: int) -> Loader:
        """Returns the loader, if worker processes can share it.

        Raises:
            ConfigError: They cannot.
        """
        loader = self._loader
        rows = loader.rows.below if isinstance(loader.rows, DerivedRows) else loader.rows
        if not rows.by_number or isinstance(rows, ForwardRows):
            problem, fix = (
                "streams are read forward, so workers would all read everything",
                "Set num_workers=0: the loader has threads.",
            )
        elif loader.config.mesh is not None or loader.config.prefetch_to_device:
            problem, fix = (
                "its batches lie on devices, which processes do not share",
                "Set num_workers=0, or leave mesh out.",
            )
        else:
            return loader
        raise ConfigError(at="num_workers", problem=f"{workers} workers, but {problem}", fix=fix)


class TorchRows(data.IterableDataset):
    """The rows of an iterable as torch tensors.

    `DataLoader(TorchRows(StreamingPreprocessedDataset(...)), num_workers=4)`

    A StreamingPreprocessedDataset divides its rows over the workers itself. Any other iterable must
    be read by one process (num_workers=0), because each worker would read all of it: with workers,
    iterating raises ConfigError.
    """

    def __init__(self, rows: Iterable[Item]) -> None:
        super().__init__()
        self._rows = rows

    def __iter__(self) -> Iterator[Tensors]:
        workers = torch_worker()[1]
        # an iterable may be of any class, so its method is looked up
        require(
            workers <= 1 or hasattr(self._rows, "sharded"),
            "num_workers",
            f"{workers} workers would each read all of {type(self._rows).__name__}",
            "Set num_workers=0, or give a StreamingPreprocessedDataset.",
        )
        return map(_tensors, self._rows)


def _tensors(batch: Item) -> Tensors:
    if isinstance(batch, Mapping):
        return {name: _tensor(values) for name, values in batch.items()}
    return (
        tuple(_tensor(values) for values in batch) if isinstance(batch, tuple) else _tensor(batch)
    )


def _tensor(values: ArrayLike) -> Tensors:
    if isinstance(values, list):  # a list of texts, which cannot be a tensor
        return values
    array = np.asarray(values)
    tensor = torch.from_numpy(np.array(array) if not array.flags.writeable else array)
    return (
        tensor
        if tensor.is_floating_point() or tensor.dtype == torch.bool
        else tensor.to(torch.int64)
    )


__all__ = ["TorchBatches", "TorchRows"]
