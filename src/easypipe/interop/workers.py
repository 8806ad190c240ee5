"""Which of a torch DataLoader's workers this process is, asked without loading torch where nobody else has."""

from __future__ import annotations

import sys
from typing import Any


def torch_worker() -> tuple[int, int]:
    """(number of this worker, how many there are); (0, 1) in any process that is none."""
    data: Any = sys.modules.get("torch.utils.data")
    info = None if data is None else data.get_worker_info()
    return (0, 1) if info is None else (info.id, info.num_workers)
