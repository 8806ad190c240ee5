"""The optimizer SOAP, which Optax lacks: Adam in the eigenbasis of Shampoo's preconditioner.

Vyas et al., 2024, algorithm 3.

m, n the two sides of a matrix · Q_L, Q_R their bases · leading dimensions (stacked layers) are
matrices of their own
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

Arrays = dict[str, jax.Array]


class SoapState(NamedTuple):
    """The state of SOAP by parameter name.

    `left` and `right` hold only the preconditioned sides.
    """

    steps: jax.Array  # Int32[], steps seen
    mu: Arrays  # first moments, in the parameter's own basis
    nu: Arrays  # second moments, in the rotated one
    # Float[..., m, m], averages of G G^T; these four are at least float32, as decompositions need
    # it
    left: Arrays
    right: Arrays  # Float[..., n, n], averages of G^T G
    left_basis: Arrays  # Float[..., m, m], columns are basis vectors
    right_basis: Arrays


def scale_by_soap(
    matrices: Mapping[str, bool],
    *,
    b1: float,
    b2: float,
    eps: float,
    update_interval: int,
    max_dim: int,
) -> optax.GradientTransformation:
    """Returns the transformation for a flat dict of parameters.

    The parameters that `matrices` marks are preconditioned on each of their last two sides, if that
    is at most `max_dim` long. The first step measures the bases and moves nothing, as in the
    authors' code. Every `update_interval` steps each basis is updated by one power iteration and a
    QR decomposition. Its vectors are sorted by their eigenvalues, and the second moments are
    reordered with them.
    """

    def side(name: str, array: jax.Array, axis: int) -> bool:
        return matrices[name] and array.ndim >= 2 and 1 < array.shape[axis] <= max_dim

    def init(params: Arrays) -> SoapState:
        zeros = jax.tree.map(jnp.zeros_like, params)
        left = {name: _square(p, -2) for name, p in params.items() if side(name, p, -2)}
        right = {name: _square(p, -1) for name, p in params.items() if side(name, p, -1)}
        copies = [jax.tree.map(jnp.copy, tree) for tree in (zeros, zeros, left, left, right, right)]
        mu, nu, left, left_basis, right, right_basis = copies
        return SoapState(jnp.int32(0), mu, nu, left, right, left_basis, right_basis)

    def update(
        updates: Arrays, state: SoapState, params: Arrays | None = None
    ) -> tuple[Arrays, SoapState]:
        del params
        first = state.steps == 0
        bases = state.left_basis, state.right_basis
        moved = jnp.maximum(state.steps, 1).astype(jnp.float32)  # updates, this one included
        keep = jnp.where(first, 0.0, 1.0)
        mu = jax.tree.map(
            lambda m, g: keep.astype(g.dtype) * (b1 * m + (1 - b1) * g), state.mu, updates
        )
        turned = {name: _turn(g, name, *bases) for name, g in updates.items()}
        nu = jax.tree.map(
            lambda v, g: keep.astype(g.dtype) * (b2 * v + (1 - b2) * g * g), state.nu, turned
        )
        step = {}
        for name, m in mu.items():
            root = jnp.sqrt(nu[name] / (1 - b2**moved)) + eps
            scaled = _turn(m / (1 - b1**moved), name, *bases) / root
            step[name] = _turn(scaled, name, *bases, back=True).astype(m.dtype)
        nu = jax.tree.map(lambda v, before: v.astype(before.dtype), nu, state.nu)
        left, right = (
            {name: b2 * a + (1 - b2) * _gram(updates[name], axis) for name, a in old.items()}
            for old, axis in ((state.left, -2), (state.right, -1))
        )
        which = jnp.where(first, 0, jnp.where(state.steps % update_interval == 0, 1, 2))
        ways = _measured, _turned, lambda left, right, *kept: kept
        left_basis, right_basis, nu = jax.lax.switch(which, ways, left, right, *bases, nu)
        return step, SoapState(state.steps + 1, mu, nu, left, right, left_basis, right_basis)

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]  (of flat dicts)


def _square(array: jax.Array, axis: int) -> jax.Array:
    shape = (*array.shape[:-2], array.shape[axis], array.shape[axis])
    return jnp.zeros(shape, jnp.promote_types(array.dtype, jnp.float32))


def _measured(
    left: Arrays, right: Arrays, _left: Arrays, _right: Arrays, nu: Arrays
) -> tuple[Arrays, Arrays, Arrays]:
    """Returns the eigenbases of the preconditioners, for the first step."""
    return jax.tree.map(_eigenbasis, left), jax.tree.map(_eigenbasis, right), nu


def _turned(
    left: Arrays, right: Arrays, left_basis: Arrays, right_basis: Arrays, nu: Arrays
) -> tuple[Arrays, Arrays, Arrays]:
    """Returns the bases after one more power iteration, and reordered second moments."""
    lefts, rights, moments = {}, {}, dict(nu)
    for name, a in left.items():
        lefts[name], order = _power_step(a, left_basis[name])
        moments[name] = jnp.take_along_axis(moments[name], order[..., :, None], axis=-2)
    for name, a in right.items():
        rights[name], order = _power_step(a, right_basis[name])
        moments[name] = jnp.take_along_axis(moments[name], order[..., None, :], axis=-1)
    return lefts, rights, moments


def _turn(
    array: jax.Array, name: str, left: Arrays, right: Arrays, *, back: bool = False
) -> jax.Array:
    """Returns Q_L^T A Q_R, or Q_L A Q_R^T with `back`."""
    if name in left:
        array = jnp.einsum(
            "...ij,...jk->...ik" if back else "...ji,...jk->...ik", left[name], array
        )
    if name in right:
        array = jnp.einsum(
            "...ij,...kj->...ik" if back else "...ij,...jk->...ik", array, right[name]
        )
    return array


def _gram(array: jax.Array, axis: int) -> jax.Array:
    """Returns G G^T for the left side, axis -2, or G^T G for the right side."""
    return jnp.einsum("...ik,...jk->...ij" if axis == -2 else "...ki,...kj->...ij", array, array)


def _eigenbasis(symmetric: jax.Array) -> jax.Array:
    return jnp.linalg.eigh(symmetric)[1][..., ::-1]  # largest eigenvalue first


def _power_step(symmetric: jax.Array, basis: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Takes one power iteration towards the eigenbasis.

    Returns:
        (the new basis, the order into which its vectors were sorted, Int[..., k]).
    """
    product = jnp.einsum("...ij,...jk->...ik", symmetric, basis)
    eigenvalues = jnp.einsum("...ik,...ik->...k", basis, product)
    order = jnp.argsort(-eigenvalues, axis=-1)
    return jnp.linalg.qr(jnp.take_along_axis(product, order[..., None, :], axis=-1))[0], order
