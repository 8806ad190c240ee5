"""Flash attention over packed rows on NVIDIA GPUs (Pallas, Triton), both ways; its block sizes.

Dao, FlashAttention-2, 2023. Segments are contiguous, so a query sees one run of slots,
`first[q]..q`, and a key is seen by the run `k..last[k]`. The two numbers express segments, the
causal mask and the window; blocks outside a run are never read.

B batch · Q query slots of this device · S slots of the row · H query heads · K key and value heads
· G = H / K · h head width
"""
# ruff: noqa: F722  (shapes in annotations are jaxtyping's, not Python)

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, Ref
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Float, Int

from easypipe.core.values import Arguments

NEVER = -1e30  # means -inf: inf - inf would be nan in a row that has met no key yet
LOG2_E = math.log2(math.e)


class Runs(NamedTuple):
    """The run of slots that each query sees.

    Slots are counted from the start of the row, on every device.

    Attributes:
        slot_Q: The slots of the queries of this device.
        first_BQ: The first slot that a query sees; the last is its own.
        last_BS: The last slot that sees a key; the first is its own.
    """

    slot_Q: Int[Array, " Q"]
    first_BQ: Int[Array, "B Q"]
    last_BS: Int[Array, "B S"]


class Options(NamedTuple):
    scale: float
    soft_cap: float | None
    interpret: bool


class Way(NamedTuple):
    """How a kernel runs.

    Attributes:
        warps: The warps of a program.
        stages: The steps of its loop whose blocks are in shared memory at once.
    """

    warps: int
    stages: int


class Blocks(NamedTuple):
    """The slots of a block, of queries and of keys, and how each kernel runs."""

    slots: int
    forward: Way
    d_query: Way
    d_key: Way


def blocks_of(query: Array) -> Blocks:
    """Returns the blocks by the bytes of a head.

    Those of at most 512 bytes were the fastest on an H200 in bfloat16 (heads of 64, 128 and 256
    numbers, 4,096 slots); larger ones fit its 227 KiB of shared memory but are not timed.
    """
    head_bytes = query.shape[-1] * query.dtype.itemsize
    if head_bytes <= 128:
        return Blocks(64, Way(4, 2), Way(4, 3), Way(4, 3))
    if head_bytes <= 256:
        return Blocks(64, Way(4, 3), Way(4, 2), Way(4, 2))
    if head_bytes <= 512:
        return Blocks(64, Way(4, 3), Way(4, 2), Way(8, 1))
    return Blocks(32, Way(8, 2), Way(8, 2), Way(8, 2))


_Kept = tuple[Array, Array, Array, Runs, Array, Array]  # query, key, value, runs, mixed, lse


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def attention(
    query_BQHh: Float[Array, "B Q H h"],
    key_BSKh: Float[Array, "B S K h"],
    value_BSKh: Float[Array, "B S K h"],
    runs: Runs,
    options: Options,
) -> Float[Array, "B Q H h"]:
    """Returns softmax attention over `runs`, in the dtype of the query, summed in float32.

    Q and S are multiples of 128; h is a power of two from 16.
    """
    return _forward(query_BQHh, key_BSKh, value_BSKh, runs, options)[0]


def _attention_forward(
    query: Array, key: Array, value: Array, runs: Runs, options: Options
) -> tuple[Array, _Kept]:
    # The results are named, so that a remat policy can keep them: then the backward pass does not
    # run a forward kernel again.
    mixed, lse = (
        checkpoint_name(array, "attention") for array in _forward(query, key, value, runs, options)
    )
    return mixed, (query, key, value, runs, mixed, lse)


def _attention_backward(
    options: Options, kept: _Kept, d_mixed: Array
) -> tuple[Array, Array, Array, None]:
    query, key, value, runs, mixed, lse_BHQ = kept
    delta_BHQ = jnp.einsum("bqhd,bqhd->bhq", mixed, d_mixed, preferred_element_type=jnp.float32)
    arrays = (query, key, value, d_mixed, lse_BHQ, delta_BHQ)
    d_key, d_value = _key_gradients(*arrays, runs, options)
    return _query_gradient(*arrays, runs, options), d_key, d_value, None


attention.defvjp(_attention_forward, _attention_backward)


def _forward(
    query: Array, key: Array, value: Array, runs: Runs, options: Options
) -> tuple[Array, Array]:
    """Returns the mixed values, and the log-sum-exp of the scores in units of log 2: [B, H, Q]."""
    batch, queries, heads, _ = query.shape
    blocks = blocks_of(query)
    spec = _Specs(query, key, blocks.slots)
    kernel = functools.partial(_forward_kernel, options=options, keys=blocks.slots)
    return pl.pallas_call(
        kernel,
        name="easypipe_attention",
        grid=(queries // blocks.slots, batch, heads),
        in_specs=[
            spec.query_block(),
            spec.all_keys(),
            spec.all_keys(),
            spec.slots_block(),
            spec.first_block(),
        ],
        out_specs=[spec.query_block(), spec.sums_block()],
        out_shape=[
            jax.ShapeDtypeStruct(query.shape, query.dtype),
            jax.ShapeDtypeStruct((batch, heads, queries), jnp.float32),
        ],
        **_how(options, blocks.forward),
    )(query, key, value, runs.slot_Q, runs.first_BQ)


def _forward_kernel(
    query_ref: Ref,
    key_ref: Ref,
    value_ref: Ref,
    slot_ref: Ref,
    first_ref: Ref,
    mixed_ref: Ref,
    lse_ref: Ref,
    *,
    options: Options,
    keys: int,
) -> None:
    """Computes one block of queries: walks over the blocks of keys that one of them sees."""
    query, slot, first = query_ref[...], slot_ref[...], first_ref[...]
    rows, width = query.shape

    def block(index: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        mixed, highest, total = carry
        at = pl.ds(index * keys, keys)
        score = _scores(query, key_ref[at, :], slot, first, index * keys, options)[0]
        higher = jnp.maximum(highest, score.max(axis=1))
        share, kept = jnp.exp2(score - higher[:, None]), jnp.exp2(highest - higher)
        value = value_ref[at, :]
        mixed = mixed * kept[:, None] + plgpu.dot(share.astype(value.dtype), value)
        return mixed, higher, total * kept + share.sum(axis=1)

    nothing = (
        jnp.zeros((rows, width), jnp.float32),
        jnp.full((rows,), NEVER, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
    )
    start, stop = jax.lax.div(first.min(), keys), jax.lax.div(slot.max(), keys) + 1
    mixed, highest, total = jax.lax.fori_loop(start, stop, block, nothing)
    mixed_ref[...] = (mixed / total[:, None]).astype(mixed_ref.dtype)
    lse_ref[...] = highest + jnp.log2(total)


def _query_gradient(
    query: Array,
    key: Array,
    value: Array,
    d_mixed: Array,
    lse: Array,
    delta: Array,
    runs: Runs,
    options: Options,
) -> Array:
    """Returns the gradient of the queries, by blocks of queries."""
    batch, queries, heads, _ = query.shape
    blocks = blocks_of(query)
    rows = blocks.slots
    spec = _Specs(query, key, rows)
    kernel = functools.partial(_query_gradient_kernel, options=options, keys=rows)
    of_queries = [spec.query_block(), spec.sums_block(), spec.sums_block()]
    return pl.pallas_call(
        kernel,
        name="easypipe_attention_d_query",
        grid=(queries // rows, batch, heads),
        in_specs=[
            spec.query_block(),
            spec.all_keys(),
            spec.all_keys(),
            *of_queries,
            spec.slots_block(),
            spec.first_block(),
        ],
        out_specs=spec.query_block(),
        out_shape=jax.ShapeDtypeStruct(query.shape, query.dtype),
        **_how(options, blocks.d_query),
    )(query, key, value, d_mixed, lse, delta, runs.slot_Q, runs.first_BQ)


def _query_gradient_kernel(
    query_ref: Ref,
    key_ref: Ref,
    value_ref: Ref,
    d_mixed_ref: Ref,
    lse_ref: Ref,
    delta_ref: Ref,
    slot_ref: Ref,
    first_ref: Ref,
    d_query_ref: Ref,
    *,
    options: Options,
    keys: int,
) -> None:
    """Computes the gradient of one block of queries, over the blocks of keys that they see."""
    query, slot, first = query_ref[...], slot_ref[...], first_ref[...]
    d_mixed, lse, delta = d_mixed_ref[...], lse_ref[...], delta_ref[...]

    def block(index: Array, d_query: Array) -> Array:
        at = pl.ds(index * keys, keys)
        key = key_ref[at, :]
        score, slope = _scores(query, key, slot, first, index * keys, options)
        d_share = plgpu.dot(d_mixed, value_ref[at, :], trans_b=True)
        d_score = jnp.exp2(score - lse[:, None]) * (d_share - delta[:, None]) * slope
        return d_query + plgpu.dot(d_score.astype(key.dtype), key)

    start, stop = jax.lax.div(first.min(), keys), jax.lax.div(slot.max(), keys) + 1
    d_query = jax.lax.fori_loop(start, stop, block, jnp.zeros(query.shape, jnp.float32))
    d_query_ref[...] = d_query.astype(d_query_ref.dtype)


def _key_gradients(
    query: Array,
    key: Array,
    value: Array,
    d_mixed: Array,
    lse: Array,
    delta: Array,
    runs: Runs,
    options: Options,
) -> tuple[Array, Array]:
    """Returns the gradients of keys and values, by blocks of keys."""
    batch, slots, key_heads, width = key.shape
    queries, group = query.shape[1], query.shape[2] // key_heads
    blocks = blocks_of(query)
    rows = blocks.slots
    block = pl.BlockSpec((None, rows, None, width), lambda i, b, k: (b, i, k, 0))
    of_group = pl.BlockSpec((None, queries, None, group, width), lambda i, b, k: (b, 0, k, 0, 0))
    sums = pl.BlockSpec((None, None, group, queries), lambda i, b, k: (b, k, 0, 0))
    row, last = (
        pl.BlockSpec((None, queries), lambda i, b, k: (b, 0)),
        pl.BlockSpec((None, rows), lambda i, b, k: (b, i)),
    )
    grouped = (array.reshape(batch, queries, key_heads, group, width) for array in (query, d_mixed))
    scalars = (array.reshape(batch, key_heads, group, queries) for array in (lse, delta))
    return pl.pallas_call(
        functools.partial(_key_gradients_kernel, options=options, rows=rows, group=group),
        name="easypipe_attention_d_key",
        grid=(slots // rows, batch, key_heads),
        in_specs=[
            block,
            block,
            of_group,
            of_group,
            sums,
            sums,
            pl.BlockSpec((queries,), lambda i, b, k: (0,)),
            row,
            last,
        ],
        out_specs=[block, block],
        out_shape=[
            jax.ShapeDtypeStruct(key.shape, key.dtype),
            jax.ShapeDtypeStruct(value.shape, value.dtype),
        ],
        **_how(options, blocks.d_key),
    )(key, value, *grouped, *scalars, runs.slot_Q, runs.first_BQ, runs.last_BS)


def _key_gradients_kernel(
    key_ref: Ref,
    value_ref: Ref,
    query_ref: Ref,
    d_mixed_ref: Ref,
    lse_ref: Ref,
    delta_ref: Ref,
    slot_ref: Ref,
    first_ref: Ref,
    last_ref: Ref,
    d_key_ref: Ref,
    d_value_ref: Ref,
    *,
    options: Options,
    rows: int,
    group: int,
) -> None:
    """Computes the gradients of one block of keys, over all queries of its group that see it."""
    key, value = key_ref[...], value_ref[...]
    # the first slot of this block of keys, and of this device's queries
    begin, offset = pl.program_id(0) * rows, slot_ref[0]
    queries = slot_ref.shape[0]

    def block(turn: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        d_key, d_value = carry
        member, index = jax.lax.div(turn, count), start + jax.lax.rem(turn, count)
        at = pl.ds(index * rows, rows)
        query, d_mixed = query_ref[at, member, :], d_mixed_ref[at, member, :]
        lse, delta = lse_ref[member, at], delta_ref[member, at]
        score, slope = _scores(query, key, slot_ref[at], first_ref[at], begin, options)
        share = jnp.exp2(score - lse[:, None])
        d_value += plgpu.dot(share.astype(d_mixed.dtype), d_mixed, trans_a=True)
        d_score = share * (plgpu.dot(d_mixed, value, trans_b=True) - delta[:, None]) * slope
        d_key += plgpu.dot(d_score.astype(query.dtype), query, trans_a=True)
        return d_key, d_value

    start = jnp.clip(jax.lax.div(begin - offset, rows), 0, queries // rows)
    stop = jnp.clip(jax.lax.div(last_ref[...].max() - offset + rows, rows), start, queries // rows)
    count = stop - start
    nothing = (jnp.zeros(key.shape, jnp.float32), jnp.zeros(value.shape, jnp.float32))
    d_key, d_value = jax.lax.fori_loop(0, group * count, block, nothing)
    d_key_ref[...], d_value_ref[...] = (
        d_key.astype(d_key_ref.dtype),
        d_value.astype(d_value_ref.dtype),
    )


def _scores(
    query: Array, key: Array, slot: Array, first: Array, begin: Array | int, options: Options
) -> tuple[Array, Array | float]:
    """Returns scores in units of log 2, and their derivative by query·key, in nats.

    A score is NEVER if a query does not see a key.
    """
    score, slope = plgpu.dot(query, key, trans_b=True) * options.scale, options.scale
    if options.soft_cap is not None:
        bent = jnp.tanh(score / options.soft_cap)
        score, slope = options.soft_cap * bent, options.scale * (1 - bent * bent)
    place = begin + jnp.arange(key.shape[0], dtype=jnp.int32)
    sees = (place[None, :] >= first[:, None]) & (place[None, :] <= slot[:, None])
    return jnp.where(sees, score * LOG2_E, NEVER), slope


class _Specs:
    """The blocks of a grid over (blocks of queries, rows of the batch, query heads)."""

    def __init__(self, query: Array, key: Array, rows: int) -> None:
        _, _, heads, self.width = query.shape
        _, self.slots, key_heads, _ = key.shape
        self.rows, self.group = rows, heads // key_heads

    def query_block(self) -> pl.BlockSpec:
        return pl.BlockSpec((None, self.rows, None, self.width), lambda i, b, h: (b, i, h, 0))

    def all_keys(self) -> pl.BlockSpec:
        return pl.BlockSpec(
            (None, self.slots, None, self.width),
            lambda i, b, h: (b, 0, jax.lax.div(h, self.group), 0),
        )

    def sums_block(self) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, self.rows), lambda i, b, h: (b, h, i))

    def slots_block(self) -> pl.BlockSpec:
        return pl.BlockSpec((self.rows,), lambda i, b, h: (i,))

    def first_block(self) -> pl.BlockSpec:
        return pl.BlockSpec((None, self.rows), lambda i, b, h: (b, i))


def _how(options: Options, way: Way) -> Arguments:  # keyword arguments of two types
    return {
        "compiler_params": plgpu.CompilerParams(num_warps=way.warps, num_stages=way.stages),
        "interpret": options.interpret,
    }
