"""The trainer: model, optimizer, step, checkpoints, metrics.

Names are loaded when first used: jax comes with them, and the configuration of a run is read
without it.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "initialize": "easypipe.train.parallel.distributed",
    "load_pretrained": "easypipe.train.model.pretrained.load",
    "save_pretrained": "easypipe.train.model.pretrained.save",
}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
