"""Adan: Nesterov momentum from differences of gradients (Xie et al., 2022, algorithm 1).

optax.scale_by_adan weighs the difference by 1 - b2 = 0.08; the paper, whose beta is 1 - b2, and its
authors' code weigh it by b2 = 0.92.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax


class AdanState(NamedTuple):
    """By parameter name, in the dtype of the parameters. The fields are named as optax names
    them.
    """

    m: optax.Params  # average of the gradients
    v: optax.Params  # average of their differences
    n: optax.Params  # average of the squares of `gradient + b2 * difference`
    g: optax.Params  # the last gradient
    t: jax.Array  # Int32[], updates made


def scale_by_adan(*, b1: float, b2: float, b3: float, eps: float) -> optax.GradientTransformation:
    """`(m + b2 v) / (sqrt(n) + eps)`, each average divided by its bias; the first difference is
    0.
    """

    def init(params: optax.Params) -> AdanState:
        m, v, n, g = (jax.tree.map(jnp.zeros_like, params) for _ in range(4))
        return AdanState(m, v, n, g, jnp.int32(0))

    def update(
        updates: optax.Updates, state: AdanState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, AdanState]:
        del params
        t = state.t + 1
        difference = jax.tree.map(
            lambda g, last: jnp.where(state.t == 0, 0, g - last), updates, state.g
        )
        m = optax.tree.update_moment(updates, state.m, b1, 1)
        v = optax.tree.update_moment(difference, state.v, b2, 1)
        n = optax.tree.update_moment(
            jax.tree.map(lambda g, d: g + b2 * d, updates, difference), state.n, b3, 2
        )
        means = (
            optax.tree.bias_correction(moment, decay, t)
            for moment, decay in ((m, b1), (v, b2), (n, b3))
        )
        direction = jax.tree.map(lambda m, v, n: (m + b2 * v) / (jnp.sqrt(n) + eps), *means)
        return direction, AdanState(m, v, n, updates, t)

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]  (its own state)
