"""The loss of logits that are at hand, row by row, in plain XLA: the row functions of stats.Kernel.

C tokens · V vocabulary
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from easypipe.kernels.loss.stats import (
    Cotangents,
    Layout,
    LogitStats,
    Objective,
    accumulator_dtype,
    logit_gradients,
    loss_gradient_inputs,
    soft_capped,
)


def row_stats(logits: Array, labels: Array, *, soft_cap: float | None) -> LogitStats:
    z_CV = _capped(logits, soft_cap)
    best_C = z_CV.max(axis=-1)
    log_sum_C = jnp.log(jnp.exp(z_CV - best_C[:, None]).sum(axis=-1))
    is_local_C = (labels >= 0) & (labels < logits.shape[1])
    # One element a row is picked from the logits as they lie: a sum over `hit * z` would be one
    # more pass over all of them.
    target_C = jnp.take_along_axis(logits, jnp.where(is_local_C, labels, 0)[:, None], axis=1)[:, 0]
    return LogitStats(
        log_sum_C,
        jnp.where(is_local_C, _capped(target_C, soft_cap), 0.0),
        z_CV.sum(axis=-1),
        best_C,
    )


def row_gradients(
    logits: Array, labels: Array, lse: Array, g: Cotangents, *, soft_cap: float | None
) -> Array:
    hit_CV = jnp.arange(logits.shape[1], dtype=labels.dtype) == labels[:, None]
    dx_CV = logit_gradients(_capped(logits, soft_cap), hit_CV, lse, g, soft_cap)
    return dx_CV.astype(logits.dtype)


def row_step(
    logits: Array, labels: Array, weights: Array, *, objective: Objective, soft_cap: float | None
) -> tuple[Array, LogitStats]:
    stats = row_stats(logits, labels, soft_cap=soft_cap)
    shift, cotangents = loss_gradient_inputs(stats, weights, objective)
    return row_gradients(logits, labels, shift, cotangents, soft_cap=soft_cap), stats


def row_options(hidden: Array, lm_head: Array, layout: Layout) -> dict[str, object]:
    return {}


def _capped(logits: Array, soft_cap: float | None) -> Array:
    return soft_capped(logits.astype(accumulator_dtype(logits)), soft_cap)
