"""What `import easypipe.kernels` exports, for type checkers and editors; __init__.py loads it when it is first used."""

from easypipe.kernels.loss.api import (
    LossWithTokens,
    TokenStats,
    fused_cross_entropy,
    fused_linear_cross_entropy,
    sequence_log_probs,
    token_log_probs,
)
from easypipe.kernels.loss.choice import LossSharding

__all__ = [
    "LossSharding",
    "LossWithTokens",
    "TokenStats",
    "fused_cross_entropy",
    "fused_linear_cross_entropy",
    "sequence_log_probs",
    "token_log_probs",
]
