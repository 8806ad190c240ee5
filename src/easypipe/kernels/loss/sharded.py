"""Stats, entropy and gradients of arguments that are sharded over a mesh, with all collectives.

No autodiff passes through: a custom_vjp *inside* `shard_map(check_vma=False)` returned the right
loss but half of the head's gradient at tensor=2. So the rules of differentiation are outside
(differentiable.py), and forward and backward are two shard_maps.

The collectives are these. The stats of the vocabulary's shards, 16 bytes per token and shard, take
one all-gather. The gradient of the hidden states is summed over the vocabulary. The gradients of
head and bias are summed over the tokens and scattered over the axes of the head. In addition, the
compiler gathers the head along `embed` before it is used, as for any layer.

`inputs.hidden` may be the logits themselves, without lm_head: then every shard holds everything
that its gradient needs.

T tokens of all shards, perhaps as batch x sequence · D width · V vocabulary
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from easypipe.core.values import Arguments
from easypipe.kernels.loss import chunked
from easypipe.kernels.loss.choice import (
    ANYWHERE,
    Implementation,
    Plan,
    by_platform,
    chunk_tokens,
    kernel,
)
from easypipe.kernels.loss.stats import (
    Cotangents,
    Gradients,
    Inputs,
    LogitStats,
    Objective,
    accumulator_dtype,
    merge_shards,
    spread_over_shards,
    vocab_size,
)

# This many bytes of the hidden states' gradient are summed over the vocabulary's shards at once.
SUM_BYTES = 8 << 20

Result = TypeVar("Result")
Tree = TypeVar("Tree")


def stats(inputs: Inputs, plan: Plan) -> LogitStats:
    """Returns the stats over the whole vocabulary, in the shape of the labels."""

    def on_device(inputs: Inputs) -> LogitStats:
        def run(platform: str, name: Implementation, flat: Inputs) -> LogitStats:
            if flat.lm_head is None:
                return kernel(name).row_stats(flat.hidden, flat.labels, soft_cap=plan.soft_cap)
            return kernel(name).stats(flat, **_options(plan, name))

        local = by_platform(plan, run, _flat(inputs, plan))
        return _shaped(merge_shards(local, plan.vocab_axes()), inputs.labels)

    return _on_mesh(on_device, inputs, (), plan, lambda tokens, _: _of_stats(tokens))


def entropy(inputs: Inputs, plan: Plan) -> Array:
    """Returns -sum_v p log p over the whole vocabulary, in the shape of the labels, by XLA."""

    def on_device(inputs: Inputs) -> Array:
        local = chunked.spread(_flat(inputs, plan), **_options(plan, "chunked"))
        return spread_over_shards(local, plan.vocab_axes()).entropy.reshape(inputs.labels.shape)

    return _on_mesh(on_device, inputs, (), plan, lambda tokens, _: tokens)


def gradients(inputs: Inputs, lse: Array, g: Cotangents, plan: Plan) -> Gradients:
    """Returns the gradients of Kernel.gradients over all shards.

    Sums over shards are taken in the dtypes of the results, so that they have no float32 copy.
    """

    def on_device(inputs: Inputs, lse: Array, *g: Array) -> Gradients:
        def run(
            platform: str, name: Implementation, flat: Inputs, lse: Array, g: Cotangents
        ) -> Gradients:
            if flat.lm_head is not None:
                return kernel(name).gradients(flat, lse, g, **_options(plan, name))
            logits, labels = flat.hidden, flat.labels
            dx = kernel(name).row_gradients(logits, labels, lse, g, soft_cap=plan.soft_cap)
            return Gradients(dx, None, None)  # pyright: ignore[reportArgumentType]  (no head)

        flat_g = Cotangents(*(array.reshape(-1) for array in g))
        grads = by_platform(plan, run, _flat(inputs, plan), lse.reshape(-1), flat_g)
        return _reduced(_summed(grads, inputs, plan), inputs, plan)

    return _on_mesh(on_device, inputs, (lse, *g), plan, lambda _, grads: grads)


def stats_and_gradients(
    inputs: Inputs, weights: Array, objective: Objective, plan: Plan
) -> tuple[LogitStats, Gradients]:
    """Returns the stats, and the gradients of `sum_t weights[t] * loss[t]`: the rule *fast*."""
    is_summed = bool(plan.summed_axes(inputs.labels.ndim))

    def on_device(inputs: Inputs, weights: Array) -> tuple[LogitStats, Gradients]:
        def run(platform: str, name: Implementation, flat: Inputs, weights: Array):
            dtype = accumulator_dtype(flat.hidden, flat.lm_head)
            merged, grads = chunked.loss_gradients(
                flat,
                weights,
                layout=plan.layout,
                soft_cap=plan.soft_cap,
                objective=objective,
                chunk_size=chunk_tokens(plan, platform, flat.hidden, flat.lm_head),
                kernel=kernel(name),
                vocab_axes=plan.vocab_axes(),
                grad_dtype=dtype if is_summed else None,
                vocab_block=chunked.VOCAB_BLOCK if platform == ANYWHERE else None,
            )
            return merged, _summed(grads, inputs, plan)

        flat = _flat(inputs, plan)
        merged, grads = by_platform(plan, run, flat, weights.reshape(-1), alike=False)
        return _shaped(merged, inputs.labels), _reduced(grads, inputs, plan)

    return _on_mesh(
        on_device, inputs, (weights,), plan, lambda tokens, grads: (_of_stats(tokens), grads)
    )


def _on_mesh(
    on_device: Callable[..., Result],
    inputs: Inputs,
    per_token: tuple[Array, ...],
    plan: Plan,
    out_specs: Callable[[P, Gradients], PyTree],
) -> Result:
    """Calls `on_device(inputs, *per_token)` on every device.

    Tokens that do not divide over their devices are padded, and the padding is cut off the results.
    `out_specs` makes the specs of the results from those of tokens and gradients.
    """
    if plan.sharding is None:
        return on_device(inputs, *per_token)
    mesh, labels = jax.sharding.get_abstract_mesh(), inputs.labels
    leading, vocab = plan.token_axes(labels.ndim), plan.vocab_axes() or None
    tokens = P(*leading)
    if inputs.lm_head is None:
        given = grads = P(*leading, vocab), None, None
    else:
        bias = None if inputs.bias is None else P(vocab)
        head, d_head = (
            P(*({"d": axes, "v": vocab}[axis] for axis in plan.layout))
            for axes in (None, _scattered(inputs, plan) or None)
        )
        given, grads = (P(*leading, None), head, bias), (P(*leading, None), d_head, bias)
    in_specs = (Inputs(*given, tokens), *(tokens for _ in per_token))  # pyright: ignore[reportArgumentType]  (a tree of specs)
    results = out_specs(tokens, Gradients(*grads))  # pyright: ignore[reportArgumentType]  (the same)
    arrays = (inputs, *per_token)
    # Every collective is written out, so replication need not be inferred (check_vma).
    run = jax.shard_map(on_device, in_specs=in_specs, out_specs=results, check_vma=False)
    padding = [
        (0, -size % math.prod(mesh.shape[axis] for axis in axes or ()))
        for size, axes in zip(labels.shape, leading, strict=True)
    ]
    if not any(more for _, more in padding):
        return run(*arrays)

    def of_tokens(change: Callable[[Array], Array], specs: PyTree, arrays: Tree) -> Tree:
        def one(spec: P, array: Array) -> Array:
            return change(array) if P(*tuple(spec)[: len(leading)]) == tokens else array

        return jax.tree.map(one, specs, arrays, is_leaf=lambda leaf: isinstance(leaf, P))

    # Padding does not count: its weight and its cotangents are 0.
    def pad(array: Array) -> Array:
        return jnp.pad(array, padding + [(0, 0)] * (array.ndim - len(padding)))

    def cut(array: Array) -> Array:
        return array[tuple(slice(0, size) for size in labels.shape)]

    return of_tokens(cut, results, run(*of_tokens(pad, in_specs, arrays)))


def _summed(grads: Gradients, inputs: Inputs, plan: Plan) -> Gradients:
    """Sums the gradient of the hidden states over the vocabulary's shards, in its own dtype.

    It takes a slab of tokens at a time, in place, as a second array would be large. The gradient of
    logits, which are sharded, is not summed.
    """
    d_hidden, axes = grads.hidden, plan.vocab_axes()

    def slab_sum(i: Array, d_hidden: Array) -> Array:
        first = jnp.minimum(i * size, tokens - size)  # the last slab is moved back to be inside
        slab = jax.lax.dynamic_slice_in_dim(d_hidden, first, size)
        summed = jax.lax.psum(slab, axes)
        if tokens % size:  # the rows that it shares with the slab before it are summed already
            summed = jnp.where((first + jnp.arange(size) >= i * size)[:, None], summed, slab)
        return jax.lax.dynamic_update_slice_in_dim(d_hidden, summed, first, axis=0)

    if axes and inputs.lm_head is not None:
        tokens, row = d_hidden.shape[0], d_hidden.shape[1] * d_hidden.dtype.itemsize
        slabs, size = chunked.chunk_shape(tokens, max(1, SUM_BYTES // row))
        if slabs == 1:
            d_hidden = jax.lax.psum(d_hidden, axes)
        else:
            d_hidden = jax.lax.fori_loop(0, slabs, slab_sum, d_hidden)
    return grads._replace(hidden=d_hidden.reshape(inputs.hidden.shape))


def _of_stats(tokens: P) -> LogitStats:
    return LogitStats(*(tokens,) * 4)  # pyright: ignore[reportArgumentType]  (a tree of specs)


def _flat(inputs: Inputs, plan: Plan) -> Inputs:
    """Returns hidden states [T, D] (or logits [T, V]), and labels [T] as columns of this shard."""
    hidden, head, first = inputs.hidden, inputs.lm_head, 0
    if plan.vocab_axes():
        columns = hidden.shape[-1] if head is None else vocab_size(head, plan.layout)
        first = jax.lax.axis_index(plan.vocab_axes()) * columns
    labels_T = jnp.where(inputs.labels < 0, -1, inputs.labels - first).reshape(-1)
    return inputs._replace(hidden=hidden.reshape(-1, hidden.shape[-1]), labels=labels_T)


def _shaped(stats: LogitStats, labels: Array) -> LogitStats:
    return LogitStats(*(array.reshape(labels.shape) for array in stats))


def _scattered(inputs: Inputs, plan: Plan) -> tuple[str, ...]:
    """Returns the axes over which the head's gradient is scattered while it is summed."""
    if plan.sharding is None:
        return ()
    summed = plan.summed_axes(inputs.labels.ndim)
    mesh, width = jax.sharding.get_abstract_mesh(), inputs.hidden.shape[-1]
    divides = width % math.prod(mesh.shape[axis] for axis in plan.sharding.embed) == 0
    return tuple(axis for axis in plan.sharding.embed if axis in summed) if divides else ()


def _reduced(grads: Gradients, inputs: Inputs, plan: Plan) -> Gradients:
    """Sums the gradients of head and bias over the tokens, in the dtypes of head and bias."""
    if plan.sharding is None or inputs.lm_head is None:
        return grads
    summed = plan.summed_axes(inputs.labels.ndim)
    scattered = _scattered(inputs, plan)
    d_lm_head, d_bias = grads.lm_head, grads.bias
    for axis in scattered:
        d_lm_head = jax.lax.psum_scatter(
            d_lm_head, axis, scatter_dimension=plan.layout.index("d"), tiled=True
        )
    rest = tuple(axis for axis in summed if axis not in scattered)
    d_lm_head = (jax.lax.psum(d_lm_head, rest) if rest else d_lm_head).astype(inputs.lm_head.dtype)
    if d_bias is not None and inputs.bias is not None:
        d_bias = (jax.lax.psum(d_bias, summed) if summed else d_bias).astype(inputs.bias.dtype)
    return Gradients(grads.hidden, d_lm_head, d_bias)


def _options(plan: Plan, name: Implementation) -> Arguments:  # keyword arguments of any type
    """Returns the keyword arguments of one implementation under *strict*.

    A chunk_size is also the tile's number of tokens, and logits may be float32.
    """
    options: Arguments = {"layout": plan.layout, "soft_cap": plan.soft_cap}
    if name == "chunked" and plan.chunk_size is not None:
        options["block"] = plan.chunk_size, chunked.TILE[1]
    if name == "pallas_gpu" and plan.float32_logits:
        options["float32_logits"] = True
    return options
