"""The readable oracle of loss, gradient and entropy; every kernel is compared with it.

T tokens · D width · V vocabulary. logits_TV never exists outside this file.
"""
# ruff: noqa: F722  (shapes in annotations are jaxtyping's, not Python)

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from easypipe.kernels.loss.stats import (
    Cotangents,
    Gradients,
    Inputs,
    Layout,
    LogitStats,
    accumulator_dtype,
    logit_gradients,
    soft_capped,
)


def stats(
    inputs: Inputs, *, layout: Layout, soft_cap: float | None, block: None = None
) -> LogitStats:
    """Returns the sums of Kernel.stats, differentiable by jax itself.

    So it checks every `gradients` independently. Leading shapes other than [T] are allowed.
    """
    z_TV = soft_capped(_logits(inputs, layout), soft_cap)
    best_T = jax.lax.stop_gradient(z_TV.max(axis=-1))
    return LogitStats(
        jax.nn.logsumexp(z_TV - best_T[..., None], axis=-1),
        jnp.where(_hits(inputs.labels, z_TV), z_TV, 0.0).sum(axis=-1),
        z_TV.sum(axis=-1),
        best_T,
    )


def entropy(inputs: Inputs, *, layout: Layout, soft_cap: float | None) -> Float[Array, "*tokens"]:
    """Returns -sum_v p log p of every token, in nats."""
    z_TV = soft_capped(_logits(inputs, layout), soft_cap)
    return jax.scipy.special.entr(jax.nn.softmax(z_TV)).sum(axis=-1)


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
    """Returns the gradients, by the formula of Kernel.gradients as it is written there."""
    hidden, lm_head, bias, labels = inputs
    z_TV = soft_capped(_logits(inputs, layout), soft_cap)
    exact_TV = logit_gradients(z_TV, _hits(labels, z_TV), lse, g, soft_cap)
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
    """Returns x in float32 (float64); it is `hidden` itself if there is no head."""
    hidden, lm_head, bias, _ = inputs
    if lm_head is None:
        return hidden.astype(accumulator_dtype(hidden))
    x_TV = jnp.einsum(
        f"...d,{layout}->...v",
        hidden,
        lm_head,
        preferred_element_type=accumulator_dtype(hidden, lm_head),
    )
    return x_TV if bias is None else x_TV + bias


def _hits(labels: Array, logits: Array) -> Array:
    return jnp.arange(logits.shape[-1], dtype=labels.dtype) == labels[..., None]
