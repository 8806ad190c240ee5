"""What torch's DataLoader is told, and asked, without loading torch where nobody else has."""

from __future__ import annotations

import sys
from typing import Any


def known_to_torch(kind: type) -> None:
    """Objects of `kind` are iterable datasets to torch's DataLoader, where somebody has loaded
    it.
    """
    data: Any = sys.modules.get("torch.utils.data")
    if data is not None:
        data.IterableDataset.register(kind)


def torch_worker() -> tuple[int, int]:
    """Which of a DataLoader's workers this process is: (number of this worker, how many there are);
    (0, 1) in any process that is none.
    """
    data: Any = sys.modules.get("torch.utils.data")
    info = None if data is None else data.get_worker_info()
    return (0, 1) if info is None else (info.id, info.num_workers)


def shares_rows(data: Any) -> bool:
    """Whether it gives each of a DataLoader's workers rows of its own, as torch asks of its
    iterable datasets: those of `datasets` do.
    """
    torch: Any = sys.modules.get("torch.utils.data")
    return torch is not None and isinstance(data, torch.IterableDataset)
