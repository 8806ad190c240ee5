"""The readable oracle: every kernel here is checked against this file in value and gradient, in float64.

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

from easypipe.core.schema import IGNORE
from easypipe.kernels.stats import Gradients, Layout, LogitStats, accumulator_dtype, soft_cap_slope, soft_capped


def refusals(hidden: Any, lm_head: Any, bias: Any, *, layout: Layout, soft_cap: float | None) -> list[str]:
    """None: whatever the others run is checked against this."""
    return []


def stats(
    hidden: Float[Array, "T D"],
    lm_head: Array,
    bias: Float[Array, " V"] | None,
    labels: Int[Array, " T"],
    *,
    layout: Layout,
    soft_cap: float | None,
    block: None = None,
) -> LogitStats:
    """Kernel.stats, differentiable by jax itself: a second opinion on every `gradients`."""
    z_TV = soft_capped(_logits(hidden, lm_head, bias, layout), soft_cap)
    hit_TV = _hits(labels, z_TV)
    best_T = jax.lax.stop_gradient(z_TV.max(axis=-1))
    return LogitStats(jax.nn.logsumexp(z_TV, axis=-1), jnp.where(hit_TV, z_TV, 0.0).sum(axis=-1), z_TV.sum(axis=-1), best_T)


def gradients(
    hidden: Float[Array, "T D"],
    lm_head: Array,
    bias: Float[Array, " V"] | None,
    labels: Int[Array, " T"],
    lse: Float[Array, " T"],
    g_lse: Float[Array, " T"],
    g_target: Float[Array, " T"],
    g_sum: Float[Array, " T"],
    *,
    layout: Layout,
    soft_cap: float | None,
    block: None = None,
    grad_dtype: DTypeLike | None = None,
) -> Gradients:
    """Kernel.gradients, the formula as it stands there."""
    z_TV = soft_capped(_logits(hidden, lm_head, bias, layout), soft_cap)
    dz_TV = jnp.exp(z_TV - lse[:, None]) * g_lse[:, None] + jnp.where(_hits(labels, z_TV), g_target[:, None], 0.0) + g_sum[:, None]
    exact_TV = dz_TV * soft_cap_slope(z_TV, soft_cap)
    dx_TV = exact_TV.astype(jnp.result_type(hidden, lm_head))
    dtype = accumulator_dtype(hidden, lm_head)
    d_hidden = jnp.einsum(f"tv,{layout}->td", dx_TV, lm_head, preferred_element_type=dtype)
    d_lm_head = jnp.einsum(f"td,tv->{layout}", hidden, dx_TV, preferred_element_type=dtype)
    d_bias = None if bias is None else exact_TV.sum(axis=0).astype(grad_dtype or bias.dtype)
    return Gradients(d_hidden.astype(grad_dtype or hidden.dtype), d_lm_head.astype(grad_dtype or lm_head.dtype), d_bias)


def _logits(hidden: Array, lm_head: Array, bias: Array | None, layout: Layout) -> Array:
    x_TV = jnp.einsum(f"td,{layout}->tv", hidden, lm_head, preferred_element_type=accumulator_dtype(hidden, lm_head))
    return x_TV if bias is None else x_TV + bias


def _hits(labels: Array, logits: Array) -> Array:
    return jnp.arange(logits.shape[1], dtype=labels.dtype) == labels[:, None]


def cross_entropy(
    hidden: Float[Array, "T D"], lm_head: Float[Array, "D V"], labels: Int[Array, " T"], z_loss: float
) -> tuple[Float[Array, " T"], Float[Array, " T"]]:
    """Per-token `(nll, loss)`: `nll = lse - target`, `loss = nll + z_loss * lse**2`; both 0 where the label is IGNORE.

    The second term keeps the log-partition near 0 (z-loss: Chowdhery et al., PaLM, 2022, section 5).
    """
    logits_TV = jnp.einsum("td,dv->tv", hidden, lm_head, preferred_element_type=accumulator_dtype(hidden, lm_head))
    lse_T = jax.nn.logsumexp(logits_TV, axis=-1)
    is_target_T = labels != IGNORE
    index_T = jnp.where(is_target_T, jnp.where(labels < 0, logits_TV.shape[1], labels), 0)  # a negative index would wrap around
    target_T = jnp.take_along_axis(logits_TV, index_T[:, None], axis=-1, mode="fill", fill_value=jnp.nan)[:, 0]
    nll_T = jnp.where(is_target_T, lse_T - target_T, 0.0)
    return nll_T, nll_T + z_loss * jnp.where(is_target_T, lse_T, 0.0) ** 2
