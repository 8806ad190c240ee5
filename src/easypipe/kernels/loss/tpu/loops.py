"""Small things that the TPU kernels share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from easypipe.kernels.loss.stats import Layout, soft_capped

LOWEST = -1e30  # of a masked logit: finite, so that no difference of two of them is NaN


def in_steps(size: int, step: int, do: Callable[[Any, Any], Any], carry: Any) -> Any:
    """`carry = do(pl.ds(start, step), carry)` for all of `size`, in a loop of the device (unrolled,
    it takes minutes to compile).
    """
    whole, rest = divmod(size, step)
    if whole > 1:
        carry = jax.lax.fori_loop(
            0, whole, lambda i, carry: do(pl.ds(pl.multiple_of(i * step, step), step), carry), carry
        )
    elif whole:
        carry = do(pl.ds(0, step), carry)
    return do(pl.ds(whole * step, rest), carry) if rest else carry


def logits(
    hidden_RD: Array, head: Array, bias_1C: Array | None, layout: Layout, soft_cap: float | None
) -> Array:
    """z of a tile, float32."""
    x_RC = product(hidden_RD, head, 1, layout.index("d"))
    return soft_capped(x_RC if bias_1C is None else x_RC + bias_1C, soft_cap)


def product(a: Array, b: Array, over_a: int, over_b: int) -> Array:
    """Contracts dimension `over_a` of `a` with `over_b` of `b`, into float32. Products of float32
    are exact, not passes in bfloat16.
    """
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    return jax.lax.dot_general(
        a,
        b,
        (((over_a,), (over_b,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def shape_like(shape: tuple[int, ...], dtype: DTypeLike, array: Array) -> jax.ShapeDtypeStruct:
    """A result that varies over the mesh axes over which `array` does, inside a shard_map that
    checks them.
    """
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(array).manual_axis_type)
