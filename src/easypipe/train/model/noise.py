"""Noise on the embeddings of tokens during training (NEFTune: Jain et al., 2023).

A micro-batches · B rows · S slots of a row · D width
"""
# ruff: noqa: F722  (shapes in annotations are jaxtyping's, not Python)

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Float, Int, UInt32

from easypipe.core.random import fold
from easypipe.train.parallel.mesh import TOKEN_AXES, constrain

# Columns of a training batch; evaluation batches do not have them.
SEEDS, SIZES = "noise_seeds", "noise_sizes"


class Noise(NamedTuple):
    """The noise that is added to the embeddings of a batch."""

    seeds: UInt32[Array, " B"]  # one for the noise of each row
    sizes: Float[Array, "B S"]  # the largest noise of a slot, times the root of D; 0 on padding

    def added(self, x: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
        """Returns `x` with uniform noise within the size of each slot added to its numbers."""
        width = x.shape[-1]

        def row(seed: Array, sizes: Array) -> Array:
            shape = (*sizes.shape, width)
            drawn = jax.random.uniform(jax.random.key(seed), shape, jnp.float32, -1.0, 1.0)
            return drawn * (sizes[:, None] * width**-0.5)

        noise = constrain(jax.vmap(row)(*self), *TOKEN_AXES, None)
        return (x + noise).astype(x.dtype)


def noise_of(batch: Mapping[str, Array]) -> Noise | None:
    """Returns the noise of a batch, or None."""
    return Noise(batch[SEEDS], batch[SIZES]) if SEEDS in batch else None


NoiseOfStep = Callable[[int, Mapping[str, Array]], dict[str, Array]]


def noise_columns(alpha: float, seed: int) -> NoiseOfStep:
    """Returns a compiled function that makes the columns of `noise_of` for the batch of a step.

    The noise of a row follows from `seed`, the step and the row's number in the batch, whatever
    micro-batches it is cut into. Its size is `alpha / sqrt(L·D)`, L being the tokens of the
    document: in a packed row each document has the noise that it would have in a row of its own.
    """
    key = jax.random.key(fold(seed, "neftune") % 2**32)

    def columns(step: int, batch: Mapping[str, Array]) -> dict[str, Array]:
        ids = batch["input_ids"]
        segments = batch.get("segment_ids", jnp.ones_like(ids))
        seeds = jax.random.bits(jax.random.fold_in(key, step), (ids[..., 0].size,))
        if ids.ndim == 3:  # micro-batch a holds the rows r with r % A == a
            seeds = seeds.reshape(ids.shape[1], ids.shape[0]).T
        sizes = alpha * jax.lax.rsqrt(jnp.maximum(_lengths(segments), 1).astype(jnp.float32))
        axes = (*[None] * (ids.ndim - 2), *TOKEN_AXES)
        return {
            SEEDS: constrain(seeds, *axes[:-1]),
            SIZES: constrain(jnp.where(segments > 0, sizes, 0.0), *axes),
        }

    return jax.jit(columns)


def abstract_columns(ids: jax.ShapeDtypeStruct) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the abstract columns of `noise_columns` for a batch of tokens with this shape."""
    assert isinstance(ids.sharding, NamedSharding)
    *rows, _ = ids.sharding.spec
    of_rows = NamedSharding(ids.sharding.mesh, PartitionSpec(*rows))
    return {
        SEEDS: jax.ShapeDtypeStruct(ids.shape[:-1], jnp.uint32, sharding=of_rows),
        SIZES: jax.ShapeDtypeStruct(ids.shape, jnp.float32, sharding=ids.sharding),
    }


def _lengths(segments: Int[Array, "*rows S"]) -> Int[Array, "*rows S"]:
    """Returns the number of tokens of each slot's document."""

    def row(ids: Array) -> Array:
        return jnp.zeros(len(ids) + 1, jnp.int32).at[ids].add(1)[ids]

    return jnp.vectorize(row, signature="(s)->(s)")(segments)
