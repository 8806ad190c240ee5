"""The readable oracle: every kernel here is checked against this file in value and gradient, in float64.

T tokens · D width · V vocabulary.  logits_TV never exists outside this file.
"""
# ruff: noqa: F722  (shapes in annotations are jaxtyping's, not Python)

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from easypipe.core.schema import IGNORE


def accumulator_dtype(hidden: Array, lm_head: Array) -> jnp.dtype:
    """float32, or float64 where an input is: sums over tokens and vocabulary are never taken in half precision."""
    return jnp.promote_types(jnp.promote_types(hidden.dtype, lm_head.dtype), jnp.float32)


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
