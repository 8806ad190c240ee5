"""What a run measures besides the loss: accuracy, entropy, bits per byte of targets, by dataset.

B batch · S sequence · N datasets · V vocabulary
"""
# ruff: noqa: F722  (shapes in annotations are jaxtyping's, not Python)

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int32

from easypipe.core.aligned import LOSS_WEIGHTS, SOURCE_IDS
from easypipe.core.schema import IGNORE
from easypipe.train.config import Measure
from easypipe.train.parallel.mesh import constrain

# Pairs of a sum and its divisor: numbers, or arrays of N, one for each dataset.
Ratios = Mapping[str, tuple[Array, Array]]


class Measures(NamedTuple):
    """Which measures are taken of a batch.

    Attributes:
        names: The measures, by their names in `train.measure`.
        num_sources: The number of datasets that are measured separately, 0 for none.
        token_bytes: Int32[V], the number of bytes of text of each token.
    """

    names: Sequence[Measure] = ()
    num_sources: int = 0
    token_bytes: Int32[np.ndarray, " V"] | None = None

    def told(self, sources: Sequence[str]) -> tuple[str, ...]:
        """Returns the names under which records hold the measures of these datasets."""
        each = tuple(name for name in self.names if name != "sources")
        kinds = ("share", "nll", *each)
        return (*each, *(f"{kind}/{source}" for kind in kinds for source in sources))

    def of(
        self,
        batch: Mapping[str, Array],
        log_probs: Float[Array, "B S"],
        correct: Bool[Array, "B S"],
        entropies: Float[Array, "B S"] | None,
    ) -> Ratios:
        """Measures a batch: sums over the targets, with their divisors.

        Args:
            batch: The batch, with labels, and with `source_ids` if datasets are measured
                separately.
            log_probs: log p of every label.
            correct: Whether no token is likelier than the label.
            entropies: The entropy of the prediction at every label, if it is measured.

        Returns:
            The ratios by name; names of measures by dataset end in "/".
        """
        labels = batch["labels"]
        counted = labels != IGNORE
        weights = jnp.where(counted, batch.get(LOSS_WEIGHTS, jnp.ones((), jnp.float32)), 0.0)
        nll = -jnp.where(counted, log_probs, 0.0) * weights
        each = {}
        if "token_accuracy" in self.names:
            each["token_accuracy"] = jnp.where(correct, weights, 0.0), weights
        if entropies is not None:
            each["entropy"] = jnp.where(counted, entropies, 0.0) * weights, weights
        if self.token_bytes is not None:
            sizes = jnp.asarray(self.token_bytes)[jnp.where(counted, labels, 0)] * weights
            each["bits_per_byte"] = jnp.where(sizes > 0, nll, 0.0) / math.log(2), sizes
        found = {name: (top.sum(), below.sum()) for name, (top, below) in each.items()}
        if self.num_sources:
            one_of_each = batch[SOURCE_IDS][..., None] == jnp.arange(self.num_sources)

            def by_source(values: Array) -> Float[Array, " N"]:
                sums = jnp.where(one_of_each, values[..., None], 0.0).sum((0, 1))
                return constrain(sums, None)

            found["share/"] = by_source(weights), weights.sum()
            for name, (top, below) in {"nll": (nll, weights), **each}.items():
                found[f"{name}/"] = by_source(top), by_source(below)
        return found


def named(
    quotients: Mapping[str, float | Sequence[float]], sources: Sequence[str]
) -> Iterator[tuple[str, float]]:
    """Yields (name, quotient) as records name them: `nll/<dataset>` and so on."""
    for name, value in quotients.items():
        if isinstance(value, Sequence):
            yield from ((name + source, one) for source, one in zip(sources, value, strict=False))
        else:
            yield name, value
