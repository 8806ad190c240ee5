"""The strict loss on NVIDIA GPUs: the logits are computed slab by slab, twice, and no more than a
slab of them ever exists.

The products are cuBLAS's (through XLA); between them stand the row kernels of rows.py. A
slab is a bounded piece of the logits in the dtype of the inputs, or in float32 where
`float32_logits` asks for it:

- forward: a slab is some tokens x all columns. Only rows of `hidden` are sliced, so nothing is
  copied, and a row's sums are whole.
- backward: a slab is all tokens x some columns. The head's gradient is final for these columns;
  d_hidden adds up in float32, [T, D].
  Where that sum would be too large, d_hidden has a pass of its own, over groups of tokens; rounding
  the head's gradient once for each group instead would make its error, at four groups, up to 1.8
  times that of the naive program. XLA slices a head of layout "vd" inside the products. Of layout
  "dv" it copies the slab's columns, of the head and of its gradient, 8·D·V bytes in all: "vd" is
  the faster here.

FLOPs: 8·T·D·V, the least with recomputation; 10 where d_hidden has its own pass. Temporaries:
`temporary_bytes` of the block sizes, and cuBLAS's workspace (32 MiB on Hopper).

T tokens · D width · V vocabulary · N tokens or columns of a slab · G tokens of a group
"""
# ruff: noqa: F722  (shapes in annotations are jaxtyping's, not Python)

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from easypipe.kernels.loss.gpu import rows as rows
from easypipe.kernels.loss.gpu.rows import RowBlock, row_gradients, row_stats, row_step
from easypipe.kernels.loss.stats import (
    Cotangents,
    Gradients,
    Inputs,
    Layout,
    LogitStats,
    merged,
    vocab_size,
)
from easypipe.kernels.tuning.table import blocks_for, device_kind

__all__ = [
    "DEFAULT_BLOCKS",
    "gradients",
    "neighbours",
    "refusals",
    "row_gradients",
    "row_options",
    "row_stats",
    "row_step",
    "stats",
]

MIB = 1 << 20
DEFAULT_BLOCKS: Mapping[str, int] = {
    # all temporaries but cuBLAS's workspace; with it 288 MiB, under the 0.3 GiB promised. A table
    # may only say less
    "slab_mib": 256,
    "row_columns": RowBlock().columns,
    "row_warps": RowBlock().num_warps,
}
ALIGN = 128  # where a slab cannot be even, it is a multiple of this: whole tiles for the products
# elements of 16 bytes in half precision: rows must start at such a multiple for the widest loads
VECTOR = 8
DTYPES = ("bfloat16", "float16", "float32")


def refusals(
    hidden: Any, lm_head: Any, bias: Any, *, layout: Layout, soft_cap: float | None
) -> list[str]:
    """Every reason why these arguments cannot run here (see stats.Kernel)."""
    del bias, layout, soft_cap  # any of them runs
    reasons = []
    for name, array in (("hidden", hidden), ("lm_head", lm_head)):
        if jnp.dtype(array.dtype).name not in DTYPES:
            reasons.append(
                f"{name} is {jnp.dtype(array.dtype).name}; the row kernels take {', '.join(DTYPES)} and compute in float32"
            )
    if hidden.dtype != lm_head.dtype:
        reasons.append(
            f"hidden is {jnp.dtype(hidden.dtype).name} and lm_head {jnp.dtype(lm_head.dtype).name}; cast one to the other's dtype"
        )
    return reasons


def stats(
    inputs: Inputs,
    *,
    layout: Layout,
    soft_cap: float | None,
    block: Mapping[str, int] | None = None,
    interpret: bool = False,
    float32_logits: bool = False,
) -> LogitStats:
    """The four sums (see stats.Kernel). `float32_logits`: the products' float32 sums are not
    rounded to the dtype of the inputs.
    """
    hidden, lm_head, bias, labels = inputs
    sizes = _blocks(block, hidden, lm_head, layout)
    row_block = _row_block(sizes)
    asked = hidden.shape[0]
    hidden, (labels,) = _whole_vectors(hidden, (labels,))
    budget = _budget(sizes, hidden, asked)
    (num_tokens, width), vocab = hidden.shape, vocab_size(lm_head, layout)
    dtype = jnp.dtype(jnp.float32) if float32_logits else hidden.dtype

    def sums(logits_NV: Array, labels_N: Array) -> Array:
        return jnp.stack(
            rows.row_stats(
                logits_NV, labels_N, soft_cap=soft_cap, block=row_block, interpret=interpret
            )
        )

    def some_tokens(sums_4T: Array, hidden: Array, start: Any, size: int) -> Array:
        logits_NV = _logits(
            jax.lax.dynamic_slice_in_dim(hidden, start, size), lm_head, bias, layout, dtype
        )
        sums_4N = sums(logits_NV, jax.lax.dynamic_slice_in_dim(labels, start, size))
        return jax.lax.dynamic_update_slice_in_dim(sums_4T, sums_4N, start, axis=1)

    def some_columns(sums_4T: Array, hidden: Array, first: Any, count: int) -> Array:
        head_N, bias_N = _columns(lm_head, bias, first, count, layout)
        found_4T = sums(_logits(hidden, head_N, bias_N, layout, dtype), labels - first)
        return jnp.stack(merged([LogitStats(*sums_4T), LogitStats(*found_4T)]))

    if vocab % VECTOR == 0:
        size = slab_tokens(num_tokens, vocab, dtype.itemsize, budget)
        sums_4T = _pieces(
            num_tokens, size, some_tokens, jax.lax.empty((4, num_tokens), jnp.float32), hidden
        )
    # XLA would copy all of the head into one of whole vectors: cut it into slabs that are, and a
    # narrow last one
    else:
        nothing_4T = jnp.broadcast_to(
            jnp.asarray([[rows.LOWEST], [0], [0], [rows.LOWEST]], jnp.float32), (4, num_tokens)
        )
        columns = slab_columns(
            num_tokens, width, vocab, hidden.dtype.itemsize, layout, budget, dtype.itemsize
        )
        sums_4T = _pieces(vocab, columns, some_columns, nothing_4T, hidden)
    return LogitStats(*sums_4T[:, :asked])


def gradients(
    inputs: Inputs,
    lse: Float[Array, " T"],
    g: Cotangents,
    *,
    layout: Layout,
    soft_cap: float | None,
    block: Mapping[str, int] | None = None,
    grad_dtype: DTypeLike | None = None,
    interpret: bool = False,
    float32_logits: bool = False,
) -> Gradients:
    """The gradients of the three sums (see stats.Kernel); `float32_logits` as in `stats`."""
    hidden, lm_head, bias, labels = inputs
    sizes = _blocks(block, hidden, lm_head, layout)
    asked, per_token = hidden.shape[0], (labels, lse, *g)
    hidden, per_token = _whole_vectors(hidden, per_token)
    num_tokens, width = hidden.shape
    vocab, axis = vocab_size(lm_head, layout), 1 if layout == "dv" else 0
    row_block = _row_block(sizes)
    dtype = jnp.dtype(jnp.float32) if float32_logits else hidden.dtype
    item = hidden.dtype.itemsize
    # dx is rounded beside the float32 slab
    slab_item = item if dtype == hidden.dtype else dtype.itemsize + item
    passes = backward_slabs(
        num_tokens, width, vocab, item, layout, _budget(sizes, hidden, asked), slab_item
    )

    def over_columns(
        sums: _Sums, hidden_GD: Array, per_token_G: tuple[Array, ...], columns: int
    ) -> _Sums:
        """Of some tokens, by slabs: the gradients that `sums` has a place for."""
        labels_G, lse_G, *g_G = per_token_G

        def slab(sums: _Sums, hidden_GD: Array, first: Any, count: int) -> _Sums:
            d_hidden_GD, d_head, d_bias = sums
            head_N, bias_N = _columns(lm_head, bias, first, count, layout)
            dx_GN = rows.row_gradients(
                _logits(hidden_GD, head_N, bias_N, layout, dtype),
                labels_G - first,
                lse_G,
                Cotangents(*g_G),
                soft_cap=soft_cap,
                block=row_block,
                interpret=interpret,
            ).astype(hidden.dtype)
            if d_hidden_GD is not None:
                d_hidden_GD += jnp.einsum(
                    "gn,dn->gd" if axis else "gn,nd->gd",
                    dx_GN,
                    head_N,
                    preferred_element_type=jnp.float32,
                )
            if d_head is not None:
                product, factors = (
                    ("gd,gn->dn", (hidden_GD, dx_GN)) if axis else ("gn,gd->nd", (dx_GN, hidden_GD))
                )
                d_head_N = jnp.einsum(product, *factors, preferred_element_type=d_head.dtype)
                d_head = jax.lax.dynamic_update_slice_in_dim(d_head, d_head_N, first, axis)
            if d_bias is not None:
                d_bias_N = dx_GN.sum(axis=0, dtype=jnp.float32).astype(d_bias.dtype)
                d_bias = jax.lax.dynamic_update_slice_in_dim(d_bias, d_bias_N, first, axis=0)
            return _Sums(d_hidden_GD, d_head, d_bias)

        return _pieces(vocab, columns, slab, sums, hidden_GD)

    def of_group(d_hidden: Array, hidden: Array, start: Any, size: int) -> Array:
        per_token_G = tuple(jax.lax.dynamic_slice_in_dim(array, start, size) for array in per_token)
        hidden_GD = jax.lax.dynamic_slice_in_dim(hidden, start, size)
        sums = over_columns(
            _Sums(zeros((size, width)), None, None), hidden_GD, per_token_G, passes.group_columns
        )
        return jax.lax.dynamic_update_slice_in_dim(
            d_hidden, sums.hidden.astype(d_hidden.dtype), start, axis=0
        )

    zeros = functools.partial(jnp.zeros, dtype=jnp.float32)
    one_pass = passes.group == num_tokens
    d_head = jax.lax.empty(lm_head.shape, grad_dtype or lm_head.dtype)
    d_bias = None if bias is None else jax.lax.empty(bias.shape, grad_dtype or bias.dtype)
    sums = over_columns(
        _Sums(zeros(hidden.shape) if one_pass else None, d_head, d_bias),
        hidden,
        per_token,
        passes.columns,
    )
    d_hidden = sums.hidden
    if d_hidden is None:
        # one pass after the other: their slabs share the budget
        hidden, sums = jax.lax.optimization_barrier((hidden, sums))
        d_hidden = _pieces(
            num_tokens,
            passes.group,
            of_group,
            jax.lax.empty(hidden.shape, grad_dtype or hidden.dtype),
            hidden,
        )
    return Gradients(d_hidden[:asked].astype(grad_dtype or hidden.dtype), sums.head, sums.bias)


class _Sums(NamedTuple):
    """Gradients in the making; None for one that another pass computes."""

    hidden: Any  # float32[G, D]
    head: Any
    bias: Any


class Slabs(NamedTuple):
    """Of the backward pass."""

    # tokens whose d_hidden adds up at once; where these are not all, d_hidden has a pass of its own
    group: int
    columns: int  # of a slab of all tokens
    group_columns: int  # of a slab of a group, in that pass of its own; 0 where there is none


def row_options(hidden: Array, lm_head: Array, layout: Layout) -> dict[str, Any]:
    """What the table says of the row kernels, for the logits of these arguments (see
    stats.RowKernel).
    """
    return {"block": _row_block(_blocks(None, hidden, lm_head, layout))}


def neighbours(blocks: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """What `easypipe kernels tune` tries beside `blocks`, one change at a time."""
    yield {**blocks, "slab_mib": DEFAULT_BLOCKS["slab_mib"] // 2}
    yield from ({**blocks, "row_columns": columns} for columns in (4096, 16384))
    yield from ({**blocks, "row_warps": warps} for warps in (8, 16))


def slab_tokens(num_tokens: int, vocab: int, itemsize: int, budget: int) -> int:
    """Tokens of a slab in the forward pass: as many as fit, and no more than half, so that a slab
    is never all of the logits.
    """
    return _even(num_tokens, min(budget // (vocab * itemsize), -(-num_tokens // 2)))


def slab_columns(
    num_tokens: int,
    width: int,
    vocab: int,
    itemsize: int,
    layout: Layout,
    budget: int,
    slab_item: int | None = None,
) -> int:
    """Columns of a slab in the forward pass of a vocabulary of no whole vectors; also no more than
    half.

    `slab_item`: bytes that one logit of the slab takes; None: `itemsize`, those of one number of
    the inputs.
    """
    return _even(
        vocab,
        min(
            budget // _column_bytes(num_tokens, 2 * width, itemsize, layout, slab_item),
            -(-vocab // 2),
        ),
    )


def backward_slabs(
    num_tokens: int,
    width: int,
    vocab: int,
    itemsize: int,
    layout: Layout,
    budget: int,
    slab_item: int | None = None,
) -> Slabs:
    """Of the backward pass: one, unless the sum of d_hidden would take more than half of the
    budget, so that slabs would be narrow.

    `slab_item` as in `slab_columns`, of a logit and what stands beside it.
    """
    most = max(ALIGN, budget // 2 // (4 * width))
    group = _even(num_tokens, most) if num_tokens > most else num_tokens

    def columns(tokens: int, sums: int, factors: int) -> int:
        return _even(
            vocab,
            min(
                (budget - sums)
                // _column_bytes(tokens, factors * width, itemsize, layout, slab_item),
                -(-vocab // 2),
            ),
        )

    if group == num_tokens:
        return Slabs(group, columns(num_tokens, 4 * group * width, 2), 0)
    return Slabs(
        group, columns(num_tokens, 0, 2), columns(group, _group_bytes(group, width, itemsize), 1)
    )


def temporary_bytes(
    num_tokens: int,
    width: int,
    vocab: int,
    itemsize: int,
    layout: Layout,
    budget: int,
    *,
    float32_logits: bool = False,
) -> int:
    """What the slabs of one pass take at once, at most; beside it stand cuBLAS's workspace and a
    few numbers per token.
    """
    logit, slab_item = (
        (4, 4 + itemsize) if float32_logits and itemsize < 4 else (itemsize, itemsize)
    )
    group, columns, group_columns = backward_slabs(
        num_tokens, width, vocab, itemsize, layout, budget, slab_item
    )
    sums = 4 * group * width if group == num_tokens else 0
    first = sums + columns * _column_bytes(num_tokens, 2 * width, itemsize, layout, slab_item)
    second = _group_bytes(group, width, itemsize) + group_columns * _column_bytes(
        group, width, itemsize, layout, slab_item
    )
    return max(
        slab_tokens(num_tokens, vocab, logit, budget) * vocab * logit,
        first,
        second if group_columns else 0,
    )


def _group_bytes(group: int, width: int, itemsize: int) -> int:
    """The float32 sum of d_hidden and the group's rows of hidden, of which the loop over slabs
    holds a copy.
    """
    return group * width * (4 + itemsize)


def _column_bytes(
    tokens: int, strided: int, itemsize: int, layout: Layout, slab_item: int | None
) -> int:
    """A column of the slab; for "dv" also `strided` numbers, of the head and of its gradient, which
    lie strided in their arrays: copies.
    """
    return (slab_item or itemsize) * tokens + (itemsize * strided if layout == "dv" else 0)


def _even(total: int, most: int) -> int:
    """The size of pieces of `total`: at most `most` (or VECTOR), and even where a few more pieces
    make it so, so that none is left over.
    """
    most = max(min(VECTOR, -(-total // 2)), most)
    fewest = -(-total // most)
    for pieces in range(fewest, fewest + fewest // 4 + 2):
        if total % pieces == 0 and (total // pieces) % VECTOR == 0:
            return total // pieces
    step = next((step for step in (ALIGN, VECTOR) if most >= step), 1)
    return most // step * step


def _blocks(
    block: Mapping[str, int] | None, hidden: Array, lm_head: Array, layout: Layout
) -> Mapping[str, int]:
    if block is not None:
        return {**DEFAULT_BLOCKS, **block}
    num_tokens, width = hidden.shape
    shape = num_tokens, width, vocab_size(lm_head, layout)
    return blocks_for(
        device_kind(), "pallas_gpu", *shape, hidden.dtype, default=lambda: DEFAULT_BLOCKS
    )


def _row_block(sizes: Mapping[str, int]) -> RowBlock:
    return RowBlock(sizes["row_columns"], sizes["row_warps"])


def _whole_vectors(hidden: Array, per_token: tuple[Array, ...]) -> tuple[Array, tuple[Array, ...]]:
    """Tokens to a multiple of VECTOR, by some without cotangents: else XLA would pad every slab. It
    copies `hidden` then.
    """
    missing = -hidden.shape[0] % VECTOR
    if missing == 0:
        return hidden, per_token
    return jnp.pad(hidden, ((0, missing), (0, 0))), tuple(
        jnp.pad(array, (0, missing)) for array in per_token
    )


def _budget(sizes: Mapping[str, int], hidden: Array, asked: int) -> int:
    copied = hidden.size * hidden.dtype.itemsize if hidden.shape[0] != asked else 0
    return max(0, min(sizes["slab_mib"], DEFAULT_BLOCKS["slab_mib"]) * MIB - copied)


def _columns(
    lm_head: Array, bias: Array | None, first: Any, count: int, layout: Layout
) -> tuple[Array, Array | None]:
    head_N = jax.lax.dynamic_slice_in_dim(lm_head, first, count, 1 if layout == "dv" else 0)
    return head_N, None if bias is None else jax.lax.dynamic_slice_in_dim(bias, first, count)


def _logits(
    hidden_ND: Array, head: Array, bias: Array | None, layout: Layout, dtype: DTypeLike
) -> Array:
    """x = hidden @ head + bias, in `dtype` (accumulated in float32 by the product)."""
    logits = jnp.einsum(
        "td,dv->tv" if layout == "dv" else "td,vd->tv",
        hidden_ND,
        head,
        preferred_element_type=dtype,
    )
    return logits if bias is None else (logits + bias).astype(dtype)


def _pieces(
    total: int, size: int, body: Callable[[Any, Array, Any, int], Any], carry: Any, operand: Array
) -> Any:
    """`carry = body(carry, operand, start, count)` over [0, total) in pieces of `size`, the last
    ones shorter.
    """
    whole, rest = divmod(total, size)
    if whole == 1:
        carry = body(carry, operand, 0, size)
    elif whole:
        carry = jax.lax.fori_loop(
            0, whole, lambda i, carry: body(carry, operand, i * size, size), carry
        )
    # whole vectors first: XLA would pad what is not, and hold it twice
    for count in (rest // VECTOR * VECTOR, rest % VECTOR):
        # the barrier keeps these logits from being computed before the loop, where they would lie
        # beside every slab
        if count:
            carry, operand = jax.lax.optimization_barrier((carry, operand))
            carry = body(carry, operand, total - rest, count)
            rest -= count
    return carry
