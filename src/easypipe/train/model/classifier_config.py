"""The shape of a classifier of images. No jax here: a configuration is read and checked on machines
that only look at data.
"""

from __future__ import annotations

from typing import Literal

from easypipe.core.config import ListOf, config
from easypipe.core.errors import ConfigError


@config
class ClassifierConfig:
    """A small network that tells classes of images apart, untrained. The defaults have 19,000
    parameters for ten classes of grey images.

    kind: "convnet": for each of hidden_sizes a 3 x 3 convolution with so many channels and a
    pooling that halves both sides, then the mean
        over what is left of the image; "mlp": all pixels through layers that are so wide.
    """

    kind: Literal["convnet", "mlp"] = "convnet"
    hidden_sizes: ListOf[int] = (32, 64)
    num_classes: int | None = None  # None: those of the data, filled in by the run
    # height, width, channels; None: the data's, filled in by the run
    image_shape: tuple[int, int, int] | None = None

    def check(self) -> None:
        for i, size in enumerate(self.hidden_sizes):
            if size < 1:
                raise ConfigError(
                    at=f"hidden_sizes[{i}]", problem=f"{size} is not a size", fix="Give at least 1."
                )
        if self.kind == "convnet" and not self.hidden_sizes:
            raise ConfigError(
                at="hidden_sizes",
                problem="a convnet without convolutions",
                fix="Give at least one size.",
            )
        if self.num_classes is not None and self.num_classes < 2:
            raise ConfigError(
                at="num_classes",
                problem=f"{self.num_classes} leaves nothing to tell apart",
                fix="Give at least 2.",
            )
        if self.image_shape is not None and min(self.image_shape) < 1:
            raise ConfigError(
                at="image_shape",
                problem=f"{self.image_shape} is no (height, width, channels)",
                fix="Give sizes from 1.",
            )
        if self.kind == "convnet" and self.image_shape is not None:
            side, most = min(self.image_shape[:2]), len(self.hidden_sizes)
            if side < 1 << most:
                problem = f"{most} halvings leave nothing of a side of {side} pixels"
                raise ConfigError(
                    at="hidden_sizes",
                    problem=problem,
                    fix=f"Give at most {side.bit_length() - 1} sizes, or larger images.",
                )
