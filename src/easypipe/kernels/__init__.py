"""Loss kernels behind one api.

Names are loaded when first used: jax comes with them, and who prepares data needs none.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "LossSharding": "easypipe.kernels.loss.choice",
    "LossWithTokens": "easypipe.kernels.loss.api",
    "TokenStats": "easypipe.kernels.loss.api",
    "fused_cross_entropy": "easypipe.kernels.loss.api",
    "fused_linear_cross_entropy": "easypipe.kernels.loss.api",
    "sequence_log_probs": "easypipe.kernels.loss.api",
    "token_log_probs": "easypipe.kernels.loss.api",
}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
