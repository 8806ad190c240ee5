"""Cross entropy a chunk of tokens at a time, in plain XLA. The forward pass also takes the gradients.

The loss is a sum, so its cotangent is one scalar: the gradients for cotangent 1 can be taken while a chunk's logits are at hand, and
scaled later. Nothing is recomputed (6·T·D·V FLOPs, as the naive loss) and no more than one chunk of logits lives at a time.
(The idea: Hsu et al., Liger Kernel, 2024, section 3.2.)

T tokens · D width · V vocabulary · C tokens of a chunk · N chunks
"""
# ruff: noqa: F722  (shapes in annotations are jaxtyping's, not Python)

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as P
from jaxtyping import Float, Int

from easypipe.core.errors import ConfigError
from easypipe.core.schema import IGNORE
from easypipe.kernels.stats import accumulator_dtype

VOCAB_BLOCK = 8192  # columns of the head's gradient that are updated at once


class LossSharding(NamedTuple):
    """The mesh axes over which the arguments of the loss lie; all of them axes of the mesh in `jax.set_mesh`."""

    tokens: tuple[str, ...] = ("data", "fsdp")  # dimension T of hidden and labels
    embed: tuple[str, ...] = ("fsdp",)  # dimension D of lm_head; its gradient comes out sharded so
    vocab: tuple[str, ...] = ("tensor",)  # dimension V of lm_head


class _Gradients(NamedTuple):
    hidden: Array  # Float[T, D], accumulator dtype, for cotangent 1
    lm_head: Array  # Float[D, V]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def loss_sums(
    hidden: Float[Array, "T D"],
    lm_head: Float[Array, "D V"],
    labels: Int[Array, " T"],
    z_loss: float,
    chunk_size: int,
    sharding: LossSharding | None,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """`(loss_sum, nll_sum)` of reference.cross_entropy. Only `loss_sum` passes a gradient on; the api stops that of `nll_sum`."""
    loss_sum, nll_sum, _ = _run(hidden, lm_head, labels, z_loss, chunk_size, sharding, with_gradients=False)
    return loss_sum, nll_sum


def _forward(hidden: Array, lm_head: Array, labels: Array, z_loss: float, chunk_size: int, sharding: LossSharding | None):
    loss_sum, nll_sum, gradients = _run(hidden, lm_head, labels, z_loss, chunk_size, sharding, with_gradients=True)
    # Empty arrays carry the input dtypes to the backward pass: a residual must be an array.
    return (loss_sum, nll_sum), (gradients, jnp.empty(0, hidden.dtype), jnp.empty(0, lm_head.dtype))


def _backward(z_loss: float, chunk_size: int, sharding: LossSharding | None, residuals, cotangents):
    gradients, like_hidden, like_lm_head = residuals
    scale = cotangents[0]
    return (gradients.hidden * scale).astype(like_hidden.dtype), (gradients.lm_head * scale).astype(like_lm_head.dtype), None


loss_sums.defvjp(_forward, _backward)


def _run(
    hidden: Array, lm_head: Array, labels: Array, z_loss: float, chunk_size: int, sharding: LossSharding | None, *, with_gradients: bool
) -> tuple[Array, Array, _Gradients | None]:
    if sharding is None:
        return _local(hidden, lm_head, labels, z_loss, chunk_size, vocab_axes=(), with_gradients=with_gradients)
    mesh = jax.sharding.get_abstract_mesh()
    _check_mesh(sharding, mesh, lm_head.shape[1])
    num_tokens, width = hidden.shape
    padding = -num_tokens % math.prod(mesh.shape[axis] for axis in sharding.tokens)
    hidden, labels = _pad(hidden, labels, padding)
    scatter = sharding.embed if width % math.prod(mesh.shape[axis] for axis in sharding.embed) == 0 else ()

    def on_device(hidden_TD: Array, lm_head_DV: Array, labels_T: Array):
        loss_sum, nll_sum, gradients = _local(
            hidden_TD, lm_head_DV, labels_T, z_loss, chunk_size, vocab_axes=sharding.vocab, with_gradients=with_gradients
        )
        loss_sum, nll_sum = jax.lax.psum((loss_sum, nll_sum), sharding.tokens)
        if gradients is None:
            return loss_sum, nll_sum, None
        d_lm_head = gradients.lm_head
        for axis in sharding.tokens:
            if axis in scatter:
                d_lm_head = jax.lax.psum_scatter(d_lm_head, axis, scatter_dimension=0, tiled=True)
            else:
                d_lm_head = jax.lax.psum(d_lm_head, axis)
        return loss_sum, nll_sum, _Gradients(jax.lax.psum(gradients.hidden, sharding.vocab), d_lm_head)

    scattered = tuple(axis for axis in sharding.tokens if axis in scatter)
    tokens = P(sharding.tokens, None)
    gradient_specs: Any = _Gradients(tokens, P(scattered, sharding.vocab)) if with_gradients else None  # pyright: ignore[reportArgumentType]
    # No autodiff passes through this shard_map: every collective above is written out, so replication need not be inferred
    # (a custom_vjp *inside* one with check_vma=False returned half of dW).
    loss_sum, nll_sum, gradients = jax.shard_map(
        on_device,
        in_specs=(tokens, P(None, sharding.vocab), P(sharding.tokens)),
        out_specs=(P(), P(), gradient_specs),
        check_vma=False,
    )(hidden, lm_head, labels)
    if gradients is not None:
        gradients = gradients._replace(hidden=gradients.hidden[:num_tokens])
    return loss_sum, nll_sum, gradients


def _local(
    hidden: Array, lm_head: Array, labels: Array, z_loss: float, chunk_size: int, *, vocab_axes: tuple[str, ...], with_gradients: bool
) -> tuple[Array, Array, _Gradients | None]:
    """Sums over the tokens given, of a vocabulary spread over `vocab_axes`; the gradients are this device's share."""
    num_tokens, width = hidden.shape
    vocab = lm_head.shape[1]
    dtype = accumulator_dtype(hidden, lm_head)
    num_chunks, chunk = chunk_shape(num_tokens, chunk_size)
    hidden, labels = _pad(hidden, labels, num_chunks * chunk - num_tokens)
    first_id = jax.lax.axis_index(vocab_axes) * vocab if vocab_axes else 0
    last_id = vocab * (jax.lax.axis_size(vocab_axes) if vocab_axes else 1)

    def step(carry: tuple[Array, Array, Array | None], xs: tuple[Array, Array]):
        loss_sum, nll_sum, d_lm_head = carry
        hidden_CD, labels_C = xs
        is_target_C = labels_C != IGNORE
        logits_CV = jnp.einsum("cd,dv->cv", hidden_CD, lm_head, preferred_element_type=dtype)
        hit_CV = jax.lax.broadcasted_iota(labels_C.dtype, logits_CV.shape, 1) == (labels_C - first_id)[:, None]
        peak_C = _across(jax.lax.pmax, logits_CV.max(axis=-1), vocab_axes)
        exp_CV = jnp.exp(logits_CV - peak_C[:, None])
        sum_C = _across(jax.lax.psum, exp_CV.sum(axis=-1), vocab_axes)
        lse_C = peak_C + jnp.log(sum_C)
        target_C = _across(jax.lax.psum, jnp.where(hit_CV, logits_CV, 0.0).sum(axis=-1), vocab_axes)
        in_vocab_C = (labels_C >= 0) & (labels_C < last_id)
        nll_C = jnp.where(is_target_C, jnp.where(in_vocab_C, lse_C - target_C, jnp.nan), 0.0)
        loss_C = nll_C + z_loss * jnp.where(is_target_C, lse_C, 0.0) ** 2
        sums = loss_sum + loss_C.sum(), nll_sum + nll_C.sum()
        if d_lm_head is None:
            return (*sums, None), None
        # d loss / d logits = softmax · (1 + 2·z·lse) - onehot, and 0 for ignored tokens
        weight_C = jnp.where(is_target_C, (1.0 + 2.0 * z_loss * lse_C) / sum_C, 0.0)
        d_logits_CV = exp_CV * weight_C[:, None] - jnp.where(hit_CV, 1.0, 0.0)
        d_logits_CV = d_logits_CV.astype(jnp.promote_types(hidden.dtype, lm_head.dtype))
        d_hidden_CD = jnp.einsum("cv,dv->cd", d_logits_CV, lm_head, preferred_element_type=dtype)
        return (*sums, _add_product(d_lm_head, hidden_CD, d_logits_CV)), d_hidden_CD

    zero = jnp.zeros((), dtype)
    start = (zero, zero, jnp.zeros((width, vocab), dtype) if with_gradients else None)
    chunks = hidden.reshape(num_chunks, chunk, width), labels.reshape(num_chunks, chunk)
    (loss_sum, nll_sum, d_lm_head), d_hidden = jax.lax.scan(step, start, chunks)
    if d_lm_head is None or d_hidden is None:
        return loss_sum, nll_sum, None
    return loss_sum, nll_sum, _Gradients(d_hidden.reshape(-1, width)[:num_tokens], d_lm_head)


def _add_product(d_lm_head: Array, hidden_CD: Array, d_logits_CV: Array) -> Array:
    """`d_lm_head + hidden_CD.T @ d_logits_CV`, a block of columns at a time: at once, the product would be a second array of D x V."""
    vocab = d_lm_head.shape[1]
    blocks, rest = divmod(vocab, VOCAB_BLOCK)

    def add(total_DV: Array, start: int | Array, size: int) -> Array:
        columns_CB = jax.lax.dynamic_slice_in_dim(d_logits_CV, start, size, axis=1)
        product_DB = jnp.einsum("cd,cb->db", hidden_CD, columns_CB, preferred_element_type=total_DV.dtype)
        total_DB = jax.lax.dynamic_slice_in_dim(total_DV, start, size, axis=1)
        return jax.lax.dynamic_update_slice_in_dim(total_DV, total_DB + product_DB, start, axis=1)

    if blocks:
        d_lm_head = jax.lax.fori_loop(0, blocks, lambda i, total_DV: add(total_DV, i * VOCAB_BLOCK, VOCAB_BLOCK), d_lm_head)
    return add(d_lm_head, blocks * VOCAB_BLOCK, rest) if rest else d_lm_head


def chunk_shape(num_tokens: int, chunk_size: int) -> tuple[int, int]:
    """`(chunks, tokens of a chunk)`: as few chunks as hold all tokens, of even size, so that little is padded."""
    num_chunks = max(1, -(-num_tokens // chunk_size))
    return num_chunks, max(1, -(-num_tokens // num_chunks))


def _pad(hidden: Array, labels: Array, count: int) -> tuple[Array, Array]:
    if count == 0:
        return hidden, labels
    return jnp.pad(hidden, ((0, count), (0, 0))), jnp.pad(labels, (0, count), constant_values=IGNORE)


def _across(collective, values: Array, axes: tuple[str, ...]) -> Array:
    return collective(values, axes) if axes else values


def _check_mesh(sharding: LossSharding, mesh: jax.sharding.AbstractMesh, vocab: int) -> None:
    for field, axes in sharding._asdict().items():
        for axis in axes:
            if axis not in mesh.axis_names:
                fix = "Call under jax.set_mesh(mesh), with axes of that mesh."
                raise ConfigError(at=f"sharding.{field}", problem=f"no mesh axis named {axis!r}", have=mesh.axis_names, fix=fix)
    parts = math.prod(mesh.shape[axis] for axis in sharding.vocab)
    if vocab % parts:
        fix = f"Make the vocabulary {vocab + -vocab % parts}, or shard it over fewer devices."
        raise ConfigError(at="sharding.vocab", problem=f"a vocabulary of {vocab} does not divide over {parts} devices", fix=fix)
