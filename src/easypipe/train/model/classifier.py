"""The image classifier: images to logits of classes.

B rows · H, W height and width · C channels · N classes
"""
# ruff: noqa: F722  (shapes in annotations are jaxtyping's, not Python)

from __future__ import annotations

import itertools
import math

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from easypipe.core.errors import require
from easypipe.train.model.config import ClassifierConfig


class Classifier(nnx.Module):
    """A small network that classifies images, see ClassifierConfig; all in float32.

    Raises:
        ConfigError: num_classes or image_shape is not known.
    """

    def __init__(self, config: ClassifierConfig, rngs: nnx.Rngs) -> None:
        for name, value in (
            ("num_classes", config.num_classes),
            ("image_shape", config.image_shape),
        ):
            require(
                value is not None,
                f"model.{name}",
                "not known",
                "Set it, or train through a run, which asks the data.",
            )
        assert config.image_shape is not None
        assert config.num_classes is not None
        self.config = config
        convolves = config.kind == "convnet"
        sizes = [
            config.image_shape[2] if convolves else math.prod(config.image_shape),
            *config.hidden_sizes,
        ]
        pairs = itertools.pairwise(sizes)
        self.layers = nnx.List(
            [
                nnx.Conv(a, b, (3, 3), rngs=rngs) if convolves else nnx.Linear(a, b, rngs=rngs)
                for a, b in pairs
            ]
        )
        self.out = nnx.Linear(sizes[-1], config.num_classes, rngs=rngs)

    def __call__(self, pixels: Float[Array, "B H W C"]) -> Float[Array, "B N"]:
        convolves = self.config.kind == "convnet"
        x = pixels if convolves else pixels.reshape(pixels.shape[0], -1)
        for layer in self.layers:
            x = nnx.relu(layer(x))
            x = nnx.max_pool(x, (2, 2), (2, 2)) if convolves else x
        return self.out(jnp.mean(x, axis=(1, 2)) if convolves else x)
