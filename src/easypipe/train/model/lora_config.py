"""What is trained in place of a model's matrices. No jax here."""

from __future__ import annotations

import math

from easypipe.core.config import ListOf, config
from easypipe.core.errors import ConfigError


@config
class LoraConfig:
    """Low-rank adapters (Hu et al., 2021): a projection W becomes W + scale·A·B, and A and B alone
    are trained; all else is frozen.

    A is [inputs, rank], drawn evenly from ±inputs^-1/2; B is [rank, outputs], zero at first, so
    that training begins at the model itself. Both are float32, whatever W is. Optimizer state and
    checkpoints hold nothing of what is frozen.
    """

    rank: int = 8
    # scale is alpha / rank: with it fixed, the rank can be changed and the learning rate stays
    alpha: float = 16.0
    # scale is alpha / sqrt(rank) instead (Kalajdzievski, 2023): for ranks of 64 and more
    rank_stabilized: bool = False
    # projections, by name ("layers.query"), its last part ("query") or a pattern; "*": all
    targets: ListOf[str] = ("*",)

    def check(self) -> None:
        if self.rank < 1:
            raise ConfigError(at="rank", problem=f"{self.rank} is no rank", fix="8 is usual.")
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise ConfigError(
                at="alpha",
                problem=f"{self.alpha} is not a positive number",
                fix="Twice the rank is usual.",
            )
        if not self.targets:
            raise ConfigError(
                at="targets",
                problem="names nothing to train",
                fix='Give names of projections, or ["*"] for all.',
            )

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)
