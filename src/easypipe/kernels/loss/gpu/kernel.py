"""The strict loss on NVIDIA GPUs, by slabs of logits: their sizes and tuning, dtypes, refusals.

cuBLAS computes the products (through XLA); between them run the row kernels of rows.py. A slab is a
bounded piece of the logits, in the dtype of the inputs, or in float32 with `float32_logits`:

- forward: a slab is some tokens x all columns. Only rows of `hidden` are sliced, so nothing is
  copied, and a row's sums are whole.
- backward: a slab is all tokens x some columns. The head's gradient is final for these columns;
  d_hidden is accumulated in float32, [T, D]. If that sum would be too large, d_hidden has a pass of
  its own, over groups of tokens; rounding the head's gradient once for each group instead would
  make its error, at four groups, up to 1.8 times that of the naive program. XLA slices a head of
  layout "vd" inside the products. For layout "dv" it copies the slab's columns of the head and of
  its gradient, 8·D·V bytes in all: "vd" is faster here.

FLOPs: 8·T·D·V, the least with recomputation; 10 if d_hidden has its own pass. Temporaries:
`slab_mib` of the block sizes, and cuBLAS's workspace (32 MiB on Hopper).

T tokens · D width · V vocabulary · N tokens or columns of a slab · G tokens of a group
"""
# ruff: noqa: F722  (shapes in annotations are jaxtyping's, not Python)

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, TypeVar

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
    ShapedArray,
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

Start = Array | int
Carry = TypeVar("Carry")
MIB = 1 << 20
DEFAULT_BLOCKS: Mapping[str, int] = {
    # All temporaries except cuBLAS's workspace; with it they are 288 MiB, under the promised 0.3
    # GiB. A table may only lower this.
    "slab_mib": 256,
    "row_columns": RowBlock().columns,
    "row_warps": RowBlock().num_warps,
}
# if slabs cannot be even, their size is a multiple of this: whole tiles for the products
ALIGN = 128
# This many elements of half precision are 16 bytes: rows must start at such a multiple for the
# widest loads.
VECTOR = 8
DTYPES = ("bfloat16", "float16", "float32")


def refusals(hidden: ShapedArray, lm_head: ShapedArray, *, layout: Layout) -> list[str]:
    """Returns every reason why these arguments cannot run here (see stats.Kernel)."""
    reasons = []
    for name, array in (("hidden", hidden), ("lm_head", lm_head)):
        if jnp.dtype(array.dtype).name not in DTYPES:
            reasons.append(
                f"{name} is {jnp.dtype(array.dtype).name}; the row kernels take "
                f"{', '.join(DTYPES)} and compute in float32"
            )
    if hidden.dtype != lm_head.dtype:
        reasons.append(
            f"hidden is {jnp.dtype(hidden.dtype).name} and lm_head "
            f"{jnp.dtype(lm_head.dtype).name}; cast one to the other's dtype"
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
    """Returns the four sums (see stats.Kernel).

    With `float32_logits` the products' float32 sums are not rounded to the dtype of the inputs.
    """
    hidden, lm_head, bias, labels = inputs
    sizes = _blocks(block, hidden, lm_head, layout)
    row_block = _row_block(sizes)
    asked = hidden.shape[0]
    hidden, (labels,) = _whole_vectors(hidden, (labels,))
    problem, dtype = _problem(sizes, hidden, lm_head, layout, asked, float32_logits)
    num_tokens, vocab = problem.tokens, problem.vocab

    def sums(logits_NV: Array, labels_N: Array) -> Array:
        return jnp.stack(
            rows.row_stats(
                logits_NV, labels_N, soft_cap=soft_cap, block=row_block, interpret=interpret
            )
        )

    def some_tokens(sums_4T: Array, hidden: Array, start: Start, size: int) -> Array:
        logits_NV = _logits(
            jax.lax.dynamic_slice_in_dim(hidden, start, size), lm_head, bias, layout, dtype
        )
        sums_4N = sums(logits_NV, jax.lax.dynamic_slice_in_dim(labels, start, size))
        return jax.lax.dynamic_update_slice_in_dim(sums_4T, sums_4N, start, axis=1)

    def some_columns(sums_4T: Array, hidden: Array, first: Start, count: int) -> Array:
        head_N, bias_N = _columns(lm_head, bias, first, count, layout)
        found_4T = sums(_logits(hidden, head_N, bias_N, layout, dtype), labels - first)
        return jnp.stack(merged([LogitStats(*sums_4T), LogitStats(*found_4T)]))

    if vocab % VECTOR == 0:
        unset_4T = jax.lax.empty((4, num_tokens), jnp.float32)
        sums_4T = _pieces(num_tokens, problem.token_slab(), some_tokens, unset_4T, hidden)
    # XLA would copy the whole head into one padded to whole vectors, so it is cut into slabs of
    # whole vectors, and a narrow last one.
    else:
        nothing_4T = jnp.broadcast_to(
            jnp.asarray([[rows.LOWEST], [0], [0], [rows.LOWEST]], jnp.float32), (4, num_tokens)
        )
        sums_4T = _pieces(vocab, problem.column_slab(), some_columns, nothing_4T, hidden)
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
    """Returns the gradients of the three sums (see stats.Kernel); options as in `stats`."""
    hidden, lm_head, bias, labels = inputs
    sizes = _blocks(block, hidden, lm_head, layout)
    asked, per_token = hidden.shape[0], (labels, lse, *g)
    hidden, per_token = _whole_vectors(hidden, per_token)
    problem, dtype = _problem(sizes, hidden, lm_head, layout, asked, float32_logits)
    num_tokens, width, vocab = problem[:3]
    axis, row_block, passes = layout.index("v"), _row_block(sizes), problem.backward_slabs()

    def over_columns(
        sums: _Sums, hidden_GD: Array, per_token_G: tuple[Array, ...], columns: int
    ) -> _Sums:
        """Accumulates, for some tokens and by slabs, the gradients that have a place in `sums`."""
        labels_G, lse_G, *g_G = per_token_G

        def slab(sums: _Sums, hidden_GD: Array, first: Start, count: int) -> _Sums:
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
                    f"gv,{layout}->gd", dx_GN, head_N, preferred_element_type=jnp.float32
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

    def of_group(d_hidden: Array, hidden: Array, start: Start, size: int) -> Array:
        per_token_G = tuple(jax.lax.dynamic_slice_in_dim(array, start, size) for array in per_token)
        hidden_GD = jax.lax.dynamic_slice_in_dim(hidden, start, size)
        sums = over_columns(
            _Sums(zeros((size, width)), None, None), hidden_GD, per_token_G, passes.group_columns
        )
        assert sums.hidden is not None
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
        # The passes run in turn, because their slabs share the budget.
        hidden, sums = jax.lax.optimization_barrier((hidden, sums))
        d_hidden = _pieces(
            num_tokens,
            passes.group,
            of_group,
            jax.lax.empty(hidden.shape, grad_dtype or hidden.dtype),
            hidden,
        )
    assert sums.head is not None
    return Gradients(d_hidden[:asked].astype(grad_dtype or hidden.dtype), sums.head, sums.bias)


class _Sums(NamedTuple):
    """Gradients that are being summed; None for one that another pass computes."""

    hidden: Array | None  # float32[G, D]
    head: Array | None
    bias: Array | None


class Slabs(NamedTuple):
    """The slabs of the backward pass.

    Attributes:
        group: The tokens whose d_hidden is accumulated at once; if these are not all tokens,
            d_hidden has a pass of its own.
        columns: The columns of a slab of all tokens.
        group_columns: The columns of a slab of a group, in that pass of its own; 0 if there is no
            such pass.
    """

    group: int
    columns: int
    group_columns: int


class Problem(NamedTuple):
    """The sizes that decide the slabs.

    No slab is more than half of the logits, so that it is never all of them.

    Attributes:
        item: The bytes of a number of the inputs.
        logit: The bytes of one logit.
        beside: The bytes of one logit, and of the rounded dx that exists with it in the backward
            pass.
        budget: The bytes of all temporaries.
    """

    tokens: int
    width: int
    vocab: int
    layout: Layout
    item: int
    logit: int
    beside: int
    budget: int

    def token_slab(self) -> int:
        """Returns the tokens of a slab in the forward pass."""
        return _even(
            self.tokens, min(self.budget // (self.vocab * self.logit), -(-self.tokens // 2))
        )

    def column_slab(self) -> int:
        """Returns the columns of a forward slab, for a vocabulary that is not in whole vectors."""
        return self.columns(self.budget, self.column_bytes(self.tokens, 2, self.logit))

    def backward_slabs(self) -> Slabs:
        """Returns the slabs of one pass, or of two if the sum of d_hidden is large.

        It is large if it would take more than half of the budget, so that slabs would be narrow.
        """
        most = max(ALIGN, self.budget // 2 // (4 * self.width))
        group = _even(self.tokens, most) if self.tokens > most else self.tokens
        whole = self.column_bytes(self.tokens, 2, self.beside)
        if group == self.tokens:
            return Slabs(group, self.columns(self.budget - 4 * group * self.width, whole), 0)
        rest = self.budget - self.group_bytes(group)
        of_group = self.columns(rest, self.column_bytes(group, 1, self.beside))
        return Slabs(group, self.columns(self.budget, whole), of_group)

    def columns(self, room: int, each: int) -> int:
        return _even(self.vocab, min(room // each, -(-self.vocab // 2)))

    def group_bytes(self, group: int) -> int:
        """Returns the bytes of the float32 sum of d_hidden and of the group's rows of hidden.

        The loop over slabs holds a copy of these rows.
        """
        return group * self.width * (4 + self.item)

    def column_bytes(self, tokens: int, strided: int, logit: int) -> int:
        """Returns the bytes of a column of the slab.

        For "dv" they include the copies of a column of `strided` arrays like the head, whose
        columns are strided.
        """
        copies = strided * self.width * self.item if self.layout == "dv" else 0
        return logit * tokens + copies


def row_options(hidden: Array, lm_head: Array, layout: Layout) -> dict[str, RowBlock]:
    """Returns the table's row-kernel options for the logits of these arguments.

    See stats.Kernel.
    """
    return {"block": _row_block(_blocks(None, hidden, lm_head, layout))}


def neighbours(blocks: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Yields what `easypipe kernels tune` tries besides `blocks`, one change at a time."""
    yield {**blocks, "slab_mib": DEFAULT_BLOCKS["slab_mib"] // 2}
    yield from ({**blocks, "row_columns": columns} for columns in (2048, 8192))
    yield from ({**blocks, "row_warps": warps} for warps in (4, 16))


def _even(total: int, most: int) -> int:
    """Returns the size of pieces of `total`: at most `most` (or VECTOR).

    The pieces are equal if a few more of them make that possible, so that none is left over.
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
    """Pads the tokens to a multiple of VECTOR, without cotangents; it then copies `hidden`.

    Otherwise XLA would pad every slab.
    """
    missing = -hidden.shape[0] % VECTOR
    if missing == 0:
        return hidden, per_token
    return jnp.pad(hidden, ((0, missing), (0, 0))), tuple(
        jnp.pad(array, (0, missing)) for array in per_token
    )


def _problem(
    sizes: Mapping[str, int],
    hidden: Array,
    lm_head: Array,
    layout: Layout,
    asked: int,
    float32_logits: bool,
) -> tuple[Problem, jnp.dtype]:
    """Returns the problem, and the dtype of its logits.

    `asked` is the number of tokens of `hidden` before it was padded to whole vectors.
    """
    item = hidden.dtype.itemsize
    copied = hidden.size * item if hidden.shape[0] != asked else 0
    budget = max(0, min(sizes["slab_mib"], DEFAULT_BLOCKS["slab_mib"]) * MIB - copied)
    dtype = jnp.dtype(jnp.float32) if float32_logits else hidden.dtype
    beside = item if dtype == hidden.dtype else dtype.itemsize + item
    (tokens, width), vocab = hidden.shape, vocab_size(lm_head, layout)
    problem = Problem(tokens, width, vocab, layout, item, dtype.itemsize, beside, budget)
    return problem, dtype


def _columns(
    lm_head: Array, bias: Array | None, first: Start, count: int, layout: Layout
) -> tuple[Array, Array | None]:
    head_N = jax.lax.dynamic_slice_in_dim(lm_head, first, count, layout.index("v"))
    return head_N, None if bias is None else jax.lax.dynamic_slice_in_dim(bias, first, count)


def _logits(
    hidden_ND: Array, head: Array, bias: Array | None, layout: Layout, dtype: DTypeLike
) -> Array:
    """Returns x = hidden @ head + bias, in `dtype` (accumulated in float32 by the product)."""
    logits = jnp.einsum(f"td,{layout}->tv", hidden_ND, head, preferred_element_type=dtype)
    return logits if bias is None else (logits + bias).astype(dtype)


def _pieces(
    total: int,
    size: int,
    body: Callable[[Carry, Array, Start, int], Carry],
    carry: Carry,
    operand: Array,
) -> Carry:
    """Computes `carry = body(carry, operand, start, count)` over [0, total) in pieces of `size`.

    The last pieces are shorter.
    """
    whole, rest = divmod(total, size)
    if whole == 1:
        carry = body(carry, operand, 0, size)
    elif whole:
        carry = jax.lax.fori_loop(
            0, whole, lambda i, carry: body(carry, operand, i * size, size), carry
        )
    # Whole vectors come first: XLA would pad other pieces, and hold them twice.
    for count in (rest // VECTOR * VECTOR, rest % VECTOR):
        # The barrier keeps these logits from being computed before the loop, where they would exist
        # together with every slab.
        if count:
            carry, operand = jax.lax.optimization_barrier((carry, operand))
            carry = body(carry, operand, total - rest, count)
            rest -= count
    return carry
