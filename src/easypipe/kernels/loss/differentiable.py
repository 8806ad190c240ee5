"""The rules by which the loss is differentiated; its arithmetic is plain jax, in api.py.

*strict*: the stats are differentiated by recomputing the logits, whatever the stats are used for.
*fast*: the loss is `sum_t weights[t] * loss[t]`, so its gradient is known up to one scalar when it
is computed. Therefore the forward pass of a differentiated program computes it
(stats_and_gradients), and the backward pass scales it.

T tokens · D width · V vocabulary
"""

from __future__ import annotations

import functools

import jax
from jax import Array

from easypipe.kernels.loss import sharded
from easypipe.kernels.loss.choice import Plan
from easypipe.kernels.loss.stats import (
    Cotangents,
    Gradients,
    Inputs,
    LogitStats,
    Objective,
    about_best,
    token_losses,
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def logit_stats(inputs: Inputs, plan: Plan) -> LogitStats:
    """Returns the stats of `inputs`, differentiable in hidden, lm_head and bias (*strict*).

    `best` passes no gradient on. If the inputs are logits, nothing of their size is kept except the
    logits themselves and their gradient, which has their dtype.
    """
    return sharded.stats(inputs, plan)


def _stats_forward(inputs: Inputs, plan: Plan) -> tuple[LogitStats, tuple[Inputs, Array, Array]]:
    stats = sharded.stats(inputs, plan)
    return stats, (inputs, stats.best, stats.log_sum)


def _stats_backward(
    plan: Plan, residuals: tuple[Inputs, Array, Array], g: LogitStats
) -> tuple[Inputs]:
    inputs, best, log_sum = residuals
    shift, cotangents = about_best(best, log_sum, Cotangents(g.log_sum, g.target, g.sum))
    return (_cotangent(sharded.gradients(inputs, shift, cotangents, plan)),)


logit_stats.defvjp(_stats_forward, _stats_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def weighted_sum(
    inputs: Inputs, weights: Array, objective: Objective, plan: Plan
) -> tuple[Array, LogitStats]:
    """Returns `sum_t weights[t] * loss[t]`, and the stats, which pass no gradient on.

    The sum is differentiable in all inputs and weights (*fast*).
    """
    stats = sharded.stats(inputs, plan)
    return (weights * token_losses(stats, objective)).sum(), stats


def _sum_forward(inputs: Inputs, weights: Array, objective: Objective, plan: Plan):
    stats, grads = sharded.stats_and_gradients(inputs, weights, objective, plan)
    losses = token_losses(stats, objective)
    return ((weights * losses).sum(), stats), (grads, losses)


def _sum_backward(
    objective: Objective,
    plan: Plan,
    residuals: tuple[Gradients, Array],
    g: tuple[Array, LogitStats],
):
    grads, losses = residuals
    scaled = jax.tree.map(lambda array: (array * g[0]).astype(array.dtype), grads)
    return _cotangent(scaled), losses * g[0]


weighted_sum.defvjp(_sum_forward, _sum_backward)


def _cotangent(grads: Gradients) -> Inputs:
    return Inputs(grads.hidden, grads.lm_head, grads.bias, None)  # pyright: ignore[reportArgumentType]  (labels are integers)
