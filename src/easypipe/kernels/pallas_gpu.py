"""The strict loss on NVIDIA GPUs: the logits are computed slab by slab, twice, and no more than a slab of them ever exists.

The products are cuBLAS's (through XLA); between them stand the row kernels of pallas_gpu_rows.py. A slab is a bounded piece of the logits
in the dtype of the inputs:

- forward: a slab is some tokens x all columns. Only rows of `hidden` are sliced, so nothing is copied, and a row's sums are whole.
- backward: a slab is a group of tokens x some columns. Then the group's share of the head's gradient is final for these columns, and
  d_hidden adds up in float32, [group, D]. All tokens are one group unless that sum would be too large; with several groups the head's
  gradient is read, added to and rounded once for each. XLA slices a head of layout "vd" inside the products. Of layout "dv" it copies the
  slab's columns, of the head and of its gradient, 8·D·V bytes in all: "vd" is the faster one here.

FLOPs: 8·T·D·V, the least with recomputation. Temporaries: `temporary_bytes` of the block sizes, and cuBLAS's workspace (32 MiB on Hopper).

T tokens · D width · V vocabulary · N tokens or columns of a slab · G tokens of a group
"""
# ruff: noqa: F722  (shapes in annotations are jaxtyping's, not Python)

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from easypipe.kernels import pallas_gpu_rows as rows
from easypipe.kernels.pallas_gpu_rows import RowBlock, row_gradients, row_stats, row_step
from easypipe.kernels.stats import Cotangents, Gradients, Inputs, Layout, LogitStats, vocab_size
from easypipe.kernels.tuning import blocks_for, device_kind

__all__ = ["DEFAULT_BLOCKS", "gradients", "neighbours", "refusals", "row_gradients", "row_options", "row_stats", "row_step", "stats"]

MIB = 1 << 20
DEFAULT_BLOCKS: Mapping[str, int] = {
    "slab_mib": 256,  # all temporaries but cuBLAS's workspace; with it 288 MiB, under the 0.3 GiB promised. A table may only say less
    "row_columns": RowBlock().columns,
    "row_warps": RowBlock().num_warps,
    "fused_splits": 0,  # 0: slabs in the forward pass too; else pallas_gpu_fused.py with so many spans, where it takes the arguments
}
ALIGN = 128  # where a slab cannot be even, it is a multiple of this: whole tiles for the products
VECTOR = 8  # elements of 16 bytes in half precision: rows must start at such a multiple for the widest loads
DTYPES = ("bfloat16", "float16", "float32")


def refusals(hidden: Any, lm_head: Any, bias: Any, *, layout: Layout, soft_cap: float | None) -> list[str]:
    """Every reason why these arguments cannot run here (see stats.Kernel)."""
    del bias, layout, soft_cap  # any of them runs
    reasons = []
    for name, array in (("hidden", hidden), ("lm_head", lm_head)):
        if jnp.dtype(array.dtype).name not in DTYPES:
            reasons.append(f"{name} is {jnp.dtype(array.dtype).name}; the row kernels take {', '.join(DTYPES)} and compute in float32")
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
) -> LogitStats:
    """The four sums (see stats.Kernel)."""
    hidden, lm_head, bias, labels = inputs
    sizes = _blocks(block, hidden, lm_head, layout)
    if sizes["fused_splits"]:
        from easypipe.kernels import pallas_gpu_fused as fused  # a second to import, and seldom asked for

        if not fused.refusals(hidden, lm_head, bias, layout=layout):
            return fused.stats(hidden, lm_head, labels, layout=layout, soft_cap=soft_cap, splits=sizes["fused_splits"])
    row_block = _row_block(sizes)
    asked = hidden.shape[0]
    hidden, (labels,) = _whole_vectors(hidden, (labels,))
    budget = _budget(sizes, hidden, asked)
    (num_tokens, width), vocab = hidden.shape, vocab_size(lm_head, layout)

    def sums(logits_NV: Array, labels_N: Array) -> Array:
        return jnp.stack(rows.row_stats(logits_NV, labels_N, soft_cap=soft_cap, block=row_block, interpret=interpret))

    def some_tokens(sums_4T: Array, hidden: Array, start: Any, size: int) -> Array:
        logits_NV = _logits(jax.lax.dynamic_slice_in_dim(hidden, start, size), lm_head, bias, layout)
        sums_4N = sums(logits_NV, jax.lax.dynamic_slice_in_dim(labels, start, size))
        return jax.lax.dynamic_update_slice_in_dim(sums_4T, sums_4N, start, axis=1)

    def some_columns(sums_4T: Array, hidden: Array, first: Any, count: int) -> Array:
        head_N, bias_N = _columns(lm_head, bias, first, count, layout)
        lse_T, target_T, sum_T, best_T = sums(_logits(hidden, head_N, bias_N, layout), labels - first)
        return jnp.stack([jnp.logaddexp(sums_4T[0], lse_T), sums_4T[1] + target_T, sums_4T[2] + sum_T, jnp.maximum(sums_4T[3], best_T)])

    if vocab % VECTOR == 0:
        size = slab_tokens(num_tokens, vocab, hidden.dtype.itemsize, budget)
        sums_4T = _pieces(num_tokens, size, some_tokens, jax.lax.empty((4, num_tokens), jnp.float32), hidden)
    else:  # XLA would copy all of the head into one of whole vectors: cut it into slabs that are, and a narrow last one
        nothing_4T = jnp.broadcast_to(jnp.asarray([[rows.LOWEST], [0], [0], [rows.LOWEST]], jnp.float32), (4, num_tokens))
        columns = slab_columns(num_tokens, width, vocab, hidden.dtype.itemsize, layout, budget)
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
) -> Gradients:
    """The gradients of the three sums (see stats.Kernel)."""
    hidden, lm_head, bias, labels = inputs
    sizes = _blocks(block, hidden, lm_head, layout)
    asked, per_token = hidden.shape[0], (labels, lse, *g)
    hidden, per_token = _whole_vectors(hidden, per_token)
    num_tokens, width = hidden.shape
    vocab, axis = vocab_size(lm_head, layout), 1 if layout == "dv" else 0
    row_block = _row_block(sizes)
    group, columns = group_and_columns(num_tokens, width, vocab, hidden.dtype.itemsize, layout, _budget(sizes, hidden, asked))

    def of_group(carry: tuple[Array, Array, Array | None], hidden: Array, start: Any, size: int) -> tuple[Array, Array, Array | None]:
        d_hidden, d_head, d_bias = carry
        hidden_GD = jax.lax.dynamic_slice_in_dim(hidden, start, size)
        labels_G, lse_G, *g_G = (jax.lax.dynamic_slice_in_dim(array, start, size) for array in per_token)

        def slab(carry: tuple[Array, Array, Array | None], hidden_GD: Array, first: Any, count: int) -> tuple[Array, Array, Array | None]:
            d_hidden_GD, d_head, d_bias = carry
            head_N, bias_N = _columns(lm_head, bias, first, count, layout)
            logits_GN = _logits(hidden_GD, head_N, bias_N, layout)
            dx_GN = rows.row_gradients(
                logits_GN, labels_G - first, lse_G, Cotangents(*g_G), soft_cap=soft_cap, block=row_block, interpret=interpret
            )
            d_hidden_GD += jnp.einsum("gn,dn->gd" if axis else "gn,nd->gd", dx_GN, head_N, preferred_element_type=jnp.float32)
            product = "gd,gn->dn" if axis else "gn,gd->nd"
            factors = (hidden_GD, dx_GN) if axis else (dx_GN, hidden_GD)
            d_head_N = jnp.einsum(product, *factors, preferred_element_type=d_head.dtype)
            if group < num_tokens:
                d_head_N += jax.lax.dynamic_slice_in_dim(d_head, first, count, axis)
            d_head = jax.lax.dynamic_update_slice_in_dim(d_head, d_head_N, first, axis)
            if d_bias is not None:
                sum_N = jax.lax.dynamic_slice_in_dim(d_bias, first, count) + dx_GN.sum(axis=0, dtype=jnp.float32)
                d_bias = jax.lax.dynamic_update_slice_in_dim(d_bias, sum_N, first, axis=0)
            return d_hidden_GD, d_head, d_bias

        sums = jnp.zeros((size, width), jnp.float32), d_head, d_bias
        d_hidden_GD, d_head, d_bias = _pieces(vocab, columns, slab, sums, hidden_GD)
        return jax.lax.dynamic_update_slice_in_dim(d_hidden, d_hidden_GD.astype(d_hidden.dtype), start, axis=0), d_head, d_bias

    start_head = jnp.zeros if group < num_tokens else jax.lax.empty
    empty = (
        jax.lax.empty(hidden.shape, grad_dtype or hidden.dtype),
        start_head(lm_head.shape, grad_dtype or lm_head.dtype),
        None if bias is None else jnp.zeros(bias.shape, jnp.float32),
    )
    d_hidden, d_head, d_bias = _pieces(num_tokens, group, of_group, empty, hidden)
    if d_bias is not None and bias is not None:
        d_bias = d_bias.astype(grad_dtype or bias.dtype)
    return Gradients(d_hidden[:asked], d_head, d_bias)


def row_options(hidden: Array, lm_head: Array, layout: Layout) -> dict[str, Any]:
    """What the table says of the row kernels, for the logits of these arguments (see stats.RowKernel)."""
    return {"block": _row_block(_blocks(None, hidden, lm_head, layout))}


def neighbours(blocks: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """What `easypipe kernels tune` tries beside `blocks`, one change at a time."""
    yield {**blocks, "slab_mib": DEFAULT_BLOCKS["slab_mib"] // 2}
    yield from ({**blocks, "row_columns": columns} for columns in (4096, 16384))
    yield from ({**blocks, "row_warps": warps} for warps in (8, 16))
    yield from ({**blocks, "fused_splits": splits} for splits in (8, 16, 33))  # 33 x 16 groups of 256 tokens are four waves of 132 blocks


def slab_tokens(num_tokens: int, vocab: int, itemsize: int, budget: int) -> int:
    """Tokens of a slab in the forward pass: as many as fit, and no more than half, so that a slab is never all of the logits."""
    return _even(num_tokens, min(budget // (vocab * itemsize), -(-num_tokens // 2)))


def slab_columns(num_tokens: int, width: int, vocab: int, itemsize: int, layout: Layout, budget: int) -> int:
    """Columns of a slab in the forward pass of a vocabulary of no whole vectors; also no more than half."""
    return _even(vocab, min(budget // _column_bytes(num_tokens, width, itemsize, layout), -(-vocab // 2)))


def group_and_columns(num_tokens: int, width: int, vocab: int, itemsize: int, layout: Layout, budget: int) -> tuple[int, int]:
    """`(tokens of a group, columns of a slab)` of the backward pass: groups no more than need be, then columns for the rest of the budget.

    The sum of d_hidden may take half of the budget: a larger one would leave slabs so narrow that reading and writing it, 8·D bytes per
    token and slab, costs more than adding the head's gradient once more.
    """
    most = max(ALIGN, budget // 2 // (4 * width))
    group = _even(num_tokens, most) if num_tokens > most else num_tokens
    left = budget - _group_bytes(group, num_tokens, width, itemsize)
    return group, _even(vocab, min(left // _column_bytes(group, width, itemsize, layout), -(-vocab // 2)))


def temporary_bytes(num_tokens: int, width: int, vocab: int, itemsize: int, layout: Layout, budget: int) -> int:
    """What the slabs of one pass take at once, at most; beside it stand cuBLAS's workspace and a few numbers per token."""
    group, columns = group_and_columns(num_tokens, width, vocab, itemsize, layout, budget)
    backward = _group_bytes(group, num_tokens, width, itemsize) + columns * _column_bytes(group, width, itemsize, layout)
    return max(slab_tokens(num_tokens, vocab, itemsize, budget) * vocab * itemsize, backward)


def _group_bytes(group: int, num_tokens: int, width: int, itemsize: int) -> int:
    """The float32 sum of d_hidden, and the group's rows of hidden where there is more than one group: the loop over slabs holds a copy."""
    return group * width * (4 + (itemsize if group < num_tokens else 0))


def _column_bytes(group: int, width: int, itemsize: int, layout: Layout) -> int:
    """A column of the slab; for "dv" also of the head and of its gradient, which lie strided in their arrays and are copied."""
    return itemsize * (group + (2 * width if layout == "dv" else 0))


def _even(total: int, most: int) -> int:
    """The size of pieces of `total`: at most `most` (or ALIGN), and even where a few more pieces make it so, so that none is left over."""
    most = max(min(ALIGN, -(-total // 2)), most)
    fewest = -(-total // most)
    for pieces in range(fewest, fewest + fewest // 4 + 2):
        if total % pieces == 0 and (total // pieces) % VECTOR == 0:
            return total // pieces
    step = next((step for step in (ALIGN, VECTOR) if most >= step), 1)
    return most // step * step


def _blocks(block: Mapping[str, int] | None, hidden: Array, lm_head: Array, layout: Layout) -> Mapping[str, int]:
    if block is not None:
        return {**DEFAULT_BLOCKS, **block}
    num_tokens, width = hidden.shape
    shape = num_tokens, width, vocab_size(lm_head, layout)
    return {**DEFAULT_BLOCKS, **blocks_for(device_kind(), "pallas_gpu", *shape, hidden.dtype, default=dict)}


def _row_block(sizes: Mapping[str, int]) -> RowBlock:
    return RowBlock(sizes["row_columns"], sizes["row_warps"])


def _whole_vectors(hidden: Array, per_token: tuple[Array, ...]) -> tuple[Array, tuple[Array, ...]]:
    """Tokens to a multiple of VECTOR, by some without cotangents: else XLA would pad every slab. It copies `hidden` then."""
    missing = -hidden.shape[0] % VECTOR
    if missing == 0:
        return hidden, per_token
    return jnp.pad(hidden, ((0, missing), (0, 0))), tuple(jnp.pad(array, (0, missing)) for array in per_token)


def _budget(sizes: Mapping[str, int], hidden: Array, asked: int) -> int:
    copied = hidden.size * hidden.dtype.itemsize if hidden.shape[0] != asked else 0
    return max(0, min(sizes["slab_mib"], DEFAULT_BLOCKS["slab_mib"]) * MIB - copied)


def _columns(lm_head: Array, bias: Array | None, first: Any, count: int, layout: Layout) -> tuple[Array, Array | None]:
    head_N = jax.lax.dynamic_slice_in_dim(lm_head, first, count, 1 if layout == "dv" else 0)
    return head_N, None if bias is None else jax.lax.dynamic_slice_in_dim(bias, first, count)


def _logits(hidden_ND: Array, head: Array, bias: Array | None, layout: Layout) -> Array:
    """x = hidden @ head + bias, in the dtype of the inputs (accumulated in float32 by the product)."""
    logits = jnp.einsum("td,dv->tv" if layout == "dv" else "td,vd->tv", hidden_ND, head, preferred_element_type=hidden_ND.dtype)
    return logits if bias is None else (logits + bias).astype(hidden_ND.dtype)


def _pieces(total: int, size: int, body: Callable[[Any, Array, Any, int], Any], carry: Any, operand: Array) -> Any:
    """`carry = body(carry, operand, start, count)` over [0, total) in pieces of `size`, the last ones shorter."""
    whole, rest = divmod(total, size)
    if whole == 1:
        carry = body(carry, operand, 0, size)
    elif whole:
        carry = jax.lax.fori_loop(0, whole, lambda i, carry: body(carry, operand, i * size, size), carry)
    for count in (rest // VECTOR * VECTOR, rest % VECTOR):  # whole vectors first: XLA would pad what is not, and hold it twice
        if count:  # the barrier keeps these logits from being computed before the loop, where they would lie beside every slab
            carry, operand = jax.lax.optimization_barrier((carry, operand))
            carry = body(carry, operand, total - rest, count)
            rest -= count
    return carry
