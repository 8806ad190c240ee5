"""Workers of torch's DataLoader: how datasets share rows among them, without loading torch."""

from __future__ import annotations

import sys
from typing import Any

from easypipe.core.values import Dataset


def _torch_data() -> Any:
    """Returns torch.utils.data if it is already loaded, else None."""
    return sys.modules.get("torch.utils.data")


def known_to_torch(kind: type) -> None:
    """Registers `kind` as an iterable dataset for torch's DataLoader, if torch is loaded."""
    if (data := _torch_data()) is not None:
        data.IterableDataset.register(kind)


def torch_worker() -> tuple[int, int]:
    """Returns (number of this DataLoader worker, how many there are).

    It is (0, 1) in a process that is not a worker.
    """
    info = None if (data := _torch_data()) is None else data.get_worker_info()
    return (0, 1) if info is None else (info.id, info.num_workers)


def shares_rows(rows: Dataset) -> bool:
    """Returns whether a dataset gives each of a DataLoader's workers different rows.

    torch requires that of its iterable datasets; those of `datasets` do it.
    """
    return (data := _torch_data()) is not None and isinstance(rows, data.IterableDataset)
