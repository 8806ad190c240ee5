"""Stats and gradients of arguments that lie over a mesh. Every collective is written out; no
autodiff passes through.

A custom_vjp *inside* `shard_map(check_vma=False)` gave a right loss and half of the head's gradient
at tensor=2. So the rules of differentiation stand outside (loss.py), and forward and backward are
two shard_maps.

Collectives: the stats of the vocabulary's shards, 16 bytes per token and shard, by one all-gather;
the gradient of the hidden states, summed over the vocabulary; those of head and bias, summed over
the tokens, scattered over the axes along which the head lies. Besides, the compiler gathers the
head along `embed` before it is used, as for any layer.

T tokens of all shards, maybe as batch x sequence · D width · V vocabulary
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as P

from easypipe.kernels.loss import chunked, rows
from easypipe.kernels.loss.choice import ANYWHERE, Plan, by_platform, chunk_tokens, kernel
from easypipe.kernels.loss.stats import (
    Cotangents,
    Gradients,
    Inputs,
    LogitStats,
    Objective,
    about_best,
    accumulator_dtype,
    loss_cotangents,
    merge_shards,
    vocab_size,
)

# of the hidden states' gradient that are summed over the vocabulary's shards at once
SUM_BYTES = 8 << 20


def stats(inputs: Inputs, plan: Plan) -> LogitStats:
    """The stats over the whole vocabulary, of the shape of the labels."""

    def on_device(inputs: Inputs) -> LogitStats:
        def run(platform: str, name: str, inputs: Inputs) -> LogitStats:
            return kernel(name).stats(
                inputs, layout=plan.layout, soft_cap=plan.soft_cap, **_own_options(plan, name)
            )

        local = by_platform(plan, run, _flat(inputs, plan))
        return _shaped(merge_shards(local, plan.vocab_axes()), inputs.labels)

    return _over_tokens(on_device, inputs, (), plan, lambda tokens, _: _of_stats(tokens))


def gradients(inputs: Inputs, lse: Array, g: Cotangents, plan: Plan) -> Gradients:
    """Kernel.gradients over all shards. Sums over shards are taken in the dtypes of the results, so
    that no float32 copy of them stands.
    """

    def on_device(inputs: Inputs, lse: Array, *g: Array) -> Gradients:
        def run(platform: str, name: str, inputs: Inputs, lse: Array, g: Cotangents) -> Gradients:
            return kernel(name).gradients(
                inputs,
                lse,
                g,
                layout=plan.layout,
                soft_cap=plan.soft_cap,
                **_own_options(plan, name),
            )

        grads = by_platform(
            plan,
            run,
            _flat(inputs, plan),
            lse.reshape(-1),
            Cotangents(*(array.reshape(-1) for array in g)),
        )
        grads = grads._replace(
            hidden=_summed(grads.hidden, plan.vocab_axes()).reshape(inputs.hidden.shape)
        )
        return _reduced(grads, inputs, plan)

    return _over_tokens(on_device, inputs, (lse, *g), plan, lambda _, grads: grads)


def stats_and_gradients(
    inputs: Inputs, weights: Array, objective: Objective, plan: Plan
) -> tuple[LogitStats, Gradients]:
    """The stats, and the gradients of `sum_t weights[t] * loss[t]`: *fast*; by `stats` and
    `gradients` where a kernel has no rows.
    """

    def on_device(inputs: Inputs, weights: Array) -> tuple[LogitStats, Gradients]:
        def run(platform: str, name: str, flat: Inputs, weights: Array):
            module: Any = kernel(name)
            options: Any = {"layout": plan.layout, "soft_cap": plan.soft_cap}
            if name == "chunked" or hasattr(module, "row_step"):
                merged, grads = chunked.loss_gradients(
                    flat,
                    weights,
                    **options,
                    objective=objective,
                    chunk_size=chunk_tokens(plan, platform, flat.hidden, flat.lm_head),
                    kernel=module,
                    vocab_axes=plan.vocab_axes(),
                    grad_dtype=accumulator_dtype(flat.hidden, flat.lm_head)
                    if plan.summed_axes(inputs.labels.ndim)
                    else None,
                    vocab_block=chunked.VOCAB_BLOCK if platform == ANYWHERE else None,
                )
            else:
                merged = merge_shards(module.stats(flat, **options), plan.vocab_axes())
                about = about_best(
                    merged.best, merged.log_sum, loss_cotangents(merged.lse, weights, objective)
                )
                grads = module.gradients(flat, *about, **options)
            return merged, grads._replace(hidden=_summed(grads.hidden, plan.vocab_axes()))

        merged, grads = by_platform(
            plan, run, _flat(inputs, plan), weights.reshape(-1), alike=False
        )
        grads = grads._replace(hidden=grads.hidden.reshape(inputs.hidden.shape))
        return _shaped(merged, inputs.labels), _reduced(grads, inputs, plan)

    return _over_tokens(
        on_device, inputs, (weights,), plan, lambda tokens, grads: (_of_stats(tokens), grads)
    )


def row_stats(logits: Array, labels: Array, plan: Plan) -> LogitStats:
    """`stats`, of logits [..., V] that are at hand."""

    def on_device(logits: Array, labels: Array) -> LogitStats:
        def run(platform: str, name: str, logits: Array, labels: Array) -> LogitStats:
            return getattr(kernel(name), "row_stats", rows.row_stats)(
                logits, labels, soft_cap=plan.soft_cap
            )

        local = by_platform(
            plan,
            run,
            logits.reshape(-1, logits.shape[-1]),
            _local_ids(labels, logits.shape[-1], plan),
        )
        return _shaped(merge_shards(local, plan.vocab_axes()), labels)

    leading = plan.token_axes(labels.ndim)
    return _on_mesh(
        on_device,
        (logits, labels),
        (P(*leading, plan.vocab_axes() or None), P(*leading)),
        _of_stats(P(*leading)),
        labels,
        plan,
    )


def row_gradients(logits: Array, labels: Array, lse: Array, g: Cotangents, plan: Plan) -> Array:
    """The gradient of the logits, in their dtype. No collective: every shard holds what it
    needs.
    """

    def on_device(logits: Array, labels: Array, lse: Array, *g: Array) -> Array:
        def run(platform: str, name: str, *arguments: Any) -> Array:
            return getattr(kernel(name), "row_gradients", rows.row_gradients)(
                *arguments, soft_cap=plan.soft_cap
            )

        labels_T, g_T = (
            _local_ids(labels, logits.shape[-1], plan),
            Cotangents(*(array.reshape(-1) for array in g)),
        )
        return by_platform(
            plan, run, logits.reshape(-1, logits.shape[-1]), labels_T, lse.reshape(-1), g_T
        ).reshape(logits.shape)

    leading = plan.token_axes(labels.ndim)
    whole = P(*leading, plan.vocab_axes() or None)
    return _on_mesh(
        on_device, (logits, labels, lse, *g), (whole, *(P(*leading),) * 5), whole, labels, plan
    )


def _over_tokens(
    on_device: Callable[..., Any],
    inputs: Inputs,
    per_token: tuple[Array, ...],
    plan: Plan,
    out_specs: Callable[[P, Gradients], Any],
) -> Any:
    """`on_device(inputs, *per_token)` on every device. `out_specs`: from how tokens and how
    gradients lie.
    """
    if plan.sharding is None:
        return on_device(inputs, *per_token)
    leading = plan.token_axes(inputs.labels.ndim)
    tokens, bias = P(*leading), None if inputs.bias is None else P(plan.vocab_axes() or None)
    head, d_head = (
        {"d": axes, "v": plan.vocab_axes() or None}
        for axes in (None, _scattered(inputs, plan) or None)
    )
    specs: Any = Inputs(P(*leading, None), P(*(head[axis] for axis in plan.layout)), bias, tokens)  # pyright: ignore[reportArgumentType]
    grads: Any = Gradients(P(*leading, None), P(*(d_head[axis] for axis in plan.layout)), bias)  # pyright: ignore[reportArgumentType]
    in_specs = (specs, *(tokens for _ in per_token))
    return _on_mesh(
        on_device, (inputs, *per_token), in_specs, out_specs(tokens, grads), inputs.labels, plan
    )


def _on_mesh(
    on_device: Callable[..., Any],
    arrays: tuple[Any, ...],
    in_specs: Any,
    out_specs: Any,
    labels: Array,
    plan: Plan,
) -> Any:
    """shard_map, where there is a sharding. Tokens that do not divide over their devices are
    padded, and cut off the results.
    """
    if plan.sharding is None:
        return on_device(*arrays)
    mesh, leading = jax.sharding.get_abstract_mesh(), plan.token_axes(labels.ndim)
    padding = [
        (0, -size % math.prod(mesh.shape[axis] for axis in axes or ()))
        for size, axes in zip(labels.shape, leading, strict=True)
    ]
    ragged = any(more for _, more in padding)

    # what is padded counts for nothing: its weight and its cotangents are 0
    def pad(spec: P, array: Array) -> Array:
        return (
            jnp.pad(array, padding + [(0, 0)] * (array.ndim - len(padding)))
            if _of_tokens(spec, leading)
            else array
        )

    def cut(spec: P, array: Array) -> Array:
        return (
            array[tuple(slice(0, size) for size in labels.shape)]
            if _of_tokens(spec, leading)
            else array
        )

    if ragged:
        arrays = jax.tree.map(pad, in_specs, arrays, is_leaf=lambda leaf: isinstance(leaf, P))
    # Every collective is written out, so replication need not be inferred (check_vma).
    results = jax.shard_map(on_device, in_specs=in_specs, out_specs=out_specs, check_vma=False)(
        *arrays
    )
    return (
        jax.tree.map(cut, out_specs, results, is_leaf=lambda leaf: isinstance(leaf, P))
        if ragged
        else results
    )


def _summed(d_hidden: Array, axes: tuple[str, ...]) -> Array:
    """Over the vocabulary's shards, [T, D], in its own dtype; a slab of tokens at a time, in place:
    a second array would be large.
    """
    if not axes:
        return d_hidden
    tokens, row = d_hidden.shape[0], d_hidden.shape[1] * d_hidden.dtype.itemsize
    slabs, size = chunked.chunk_shape(tokens, max(1, SUM_BYTES // row))
    if slabs == 1:
        return jax.lax.psum(d_hidden, axes)

    def one(i: Array, d_hidden: Array) -> Array:
        first = jnp.minimum(i * size, tokens - size)  # the last slab is moved back to lie inside
        slab = jax.lax.dynamic_slice_in_dim(d_hidden, first, size)
        summed = jax.lax.psum(slab, axes)
        if tokens % size:  # what it has of the one before is summed already
            summed = jnp.where((first + jnp.arange(size) >= i * size)[:, None], summed, slab)
        return jax.lax.dynamic_update_slice_in_dim(d_hidden, summed, first, axis=0)

    return jax.lax.fori_loop(0, slabs, one, d_hidden)


def _of_stats(tokens: P) -> Any:
    return LogitStats(*(tokens,) * 4)  # pyright: ignore[reportArgumentType]


def _of_tokens(spec: P, leading: tuple[tuple[str, ...] | None, ...]) -> bool:
    return P(*tuple(spec)[: len(leading)]) == P(*leading)


def _flat(inputs: Inputs, plan: Plan) -> Inputs:
    """Hidden states [T, D], and labels [T] as column ids of this shard."""
    labels_T = _local_ids(inputs.labels, vocab_size(inputs.lm_head, plan.layout), plan)
    return inputs._replace(
        hidden=inputs.hidden.reshape(-1, inputs.hidden.shape[-1]), labels=labels_T
    )


def _local_ids(labels: Array, vocab_on_device: int, plan: Plan) -> Array:
    first = jax.lax.axis_index(plan.vocab_axes()) * vocab_on_device if plan.vocab_axes() else 0
    return jnp.where(labels < 0, -1, labels - first).reshape(-1)


def _shaped(stats: LogitStats, labels: Array) -> LogitStats:
    return LogitStats(*(array.reshape(labels.shape) for array in stats))


def _scattered(inputs: Inputs, plan: Plan) -> tuple[str, ...]:
    """The axes over which the head's gradient is scattered while it is summed over the tokens."""
    if plan.sharding is None:
        return ()
    summed = plan.summed_axes(inputs.labels.ndim)
    mesh, width = jax.sharding.get_abstract_mesh(), inputs.hidden.shape[-1]
    divides = width % math.prod(mesh.shape[axis] for axis in plan.sharding.embed) == 0
    return tuple(axis for axis in plan.sharding.embed if axis in summed) if divides else ()


def _reduced(grads: Gradients, inputs: Inputs, plan: Plan) -> Gradients:
    """The gradients of head and bias summed over the tokens, in the dtypes of head and bias."""
    if plan.sharding is None:
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


def _own_options(plan: Plan, name: str) -> dict[str, Any]:
    """What one implementation alone is told under *strict*: a chunk_size is the tile's number of
    tokens too, logits may be float32.
    """
    if name == "chunked" and plan.chunk_size is not None:
        return {"block": (plan.chunk_size, chunked.TILE[1])}
    return {"float32_logits": True} if name == "pallas_gpu" and plan.float32_logits else {}
