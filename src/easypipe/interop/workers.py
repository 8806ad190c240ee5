"""What torch's DataLoader is told, and asked, without loading torch where nobody else has."""

from __future__ import annotations

import sys
from typing import Any

from easypipe.core.values import Dataset


def _torch_data() -> Any:
    """torch.utils.data where somebody has loaded it, else None."""
    return sys.modules.get("torch.utils.data")


def known_to_torch(kind: type) -> None:
    """Makes objects of `kind` iterable datasets to torch's DataLoader, where torch is loaded."""
    if (data := _torch_data()) is not None:
        data.IterableDataset.register(kind)


def torch_worker() -> tuple[int, int]:
    """(number of this DataLoader worker, how many there are).

    (0, 1) in any process that is none.
    """
    info = None if (data := _torch_data()) is None else data.get_worker_info()
    return (0, 1) if info is None else (info.id, info.num_workers)


def shares_rows(rows: Dataset) -> bool:
    """Whether it gives each of a DataLoader's workers rows of its own.

    torch asks that of its iterable datasets: those of `datasets` do.
    """
    return (data := _torch_data()) is not None and isinstance(rows, data.IterableDataset)
