"""The readable oracle: every kernel here is checked against this file in value and gradient, in
float64.

T tokens · D width · V vocabulary.  logits_TV never exists outside this file.
"""
# ruff: noqa: F722  (shapes in annotations are jaxtyping's, not Python)

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from easypipe.kernels.loss.stats import (
    Cotangents,
    Gradients,
    Inputs,
    Layout,
    LogitStats,
    accumulator_dtype,
    soft_cap_slope,
    soft_capped,
)


def refusals(
    hidden: Any, lm_head: Any, bias: Any, *, layout: Layout, soft_cap: float | None
) -> list[str]:
    """None: whatever the others run is checked against this."""
    return []


def stats(
    inputs: Inputs, *, layout: Layout, soft_cap: float | None, block: None = None
) -> LogitStats:
    """Kernel.stats, differentiable by jax itself: a second opinion on every `gradients`. Leading
    shapes other than [T] will do.
    """
    return stats_of_logits(_logits(inputs, layout), inputs.labels, soft_cap=soft_cap)


def stats_of_logits(
    logits: Float[Array, "T V"], labels: Int[Array, " T"], *, soft_cap: float | None
) -> LogitStats:
    z_TV = soft_capped(logits.astype(accumulator_dtype(logits)), soft_cap)
    hit_TV = _hits(labels, z_TV)
    best_T = jax.lax.stop_gradient(z_TV.max(axis=-1))
    return LogitStats(
        jax.nn.logsumexp(z_TV - best_T[..., None], axis=-1),
        jnp.where(hit_TV, z_TV, 0.0).sum(axis=-1),
        z_TV.sum(axis=-1),
        best_T,
    )


def gradients(
    inputs: Inputs,
    lse: Float[Array, " T"],
    g: Cotangents,
    *,
    layout: Layout,
    soft_cap: float | None,
    block: None = None,
    grad_dtype: DTypeLike | None = None,
) -> Gradients:
    """Kernel.gradients, the formula as it stands there."""
    hidden, lm_head, bias, labels = inputs
    z_TV = soft_capped(_logits(inputs, layout), soft_cap)
    hit_TV = _hits(labels, z_TV)
    dz_TV = (
        jnp.exp(z_TV - lse[:, None]) * g.lse[:, None]
        + jnp.where(hit_TV, g.target[:, None], 0.0)
        + g.sum[:, None]
    )
    exact_TV = dz_TV * soft_cap_slope(z_TV, soft_cap)
    dx_TV = exact_TV.astype(jnp.result_type(hidden, lm_head))
    dtype = accumulator_dtype(hidden, lm_head)
    d_hidden = jnp.einsum(f"tv,{layout}->td", dx_TV, lm_head, preferred_element_type=dtype)
    d_lm_head = jnp.einsum(f"td,tv->{layout}", hidden, dx_TV, preferred_element_type=dtype)
    d_bias = None if bias is None else exact_TV.sum(axis=0).astype(grad_dtype or bias.dtype)
    return Gradients(
        d_hidden.astype(grad_dtype or hidden.dtype),
        d_lm_head.astype(grad_dtype or lm_head.dtype),
        d_bias,
    )


def _logits(inputs: Inputs, layout: Layout) -> Array:
    hidden, lm_head, bias, _ = inputs
    x_TV = jnp.einsum(
        f"...d,{layout}->...v",
        hidden,
        lm_head,
        preferred_element_type=accumulator_dtype(hidden, lm_head),
    )
    return x_TV if bias is None else x_TV + bias


def _hits(labels: Array, logits: Array) -> Array:
    return jnp.arange(logits.shape[-1], dtype=labels.dtype) == labels[..., None]
