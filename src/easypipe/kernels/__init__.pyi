"""What `import easypipe.kernels` exports and from where; `__init__.py` loads each
name when it is first used.
"""

from easypipe.kernels.loss.api import (
    LossWithTokens,
    TokenStats,
    fused_cross_entropy,
    fused_linear_cross_entropy,
    sequence_log_probs,
    token_entropy,
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
    "token_entropy",
    "token_log_probs",
]
