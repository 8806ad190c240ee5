"""easypipe: raw text in, trained model out; a data pipeline and trainer for JAX in which order is arithmetic.

Names are loaded when first used, so that `import easypipe` stays quick and does not load jax.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOME: dict[str, str] = {}

__all__ = ["__version__", *sorted(_HOME)]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'easypipe' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
