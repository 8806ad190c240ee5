"""The loss in plain XLA, by pieces of logits and their rounding; it runs where no kernel can.

*strict* (`stats`, `gradients`): tiles of tokens x vocabulary, recomputed for the gradient. It takes
8·T·D·V FLOPs forward and backward, or 10 if a float32 gradient of all hidden states would not fit
HIDDEN_BYTES. No more than a tile of logits exists at a time.

*fast* (`loss_gradients`): C tokens with their whole vocabulary. The loss is a weighted sum over
tokens, so its gradient can be computed while the logits of a chunk exist. Nothing is recomputed: it
takes 6·T·D·V FLOPs, like the naive loss. With T <= C that chunk is all the logits. (The idea is
from Hsu et al., Liger Kernel, 2024, section 3.2.)

T tokens · D width · V vocabulary · C tokens of a chunk or tile · B columns of a tile
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from easypipe.core.values import Arguments
from easypipe.kernels.loss.stats import (
    Cotangents,
    Gradients,
    Inputs,
    Kernel,
    Layout,
    LogitStats,
    Objective,
    ShapedArray,
    Spread,
    accumulator_dtype,
    logit_gradients,
    loss_gradient_inputs,
    merge_shards,
    merged,
    soft_capped,
    varying_like,
    vocab_size,
)

__all__ = [
    "VECTOR",
    "gradients",
    "loss_gradients",
    "refusals",
    "row_gradients",
    "row_options",
    "row_stats",
    "row_step",
    "stats",
]

Carry = TypeVar("Carry")
Sums = TypeVar("Sums", LogitStats, Spread)
LOWEST = -1e30  # means -inf, which cannot be subtracted from itself
TILE = (1024, 4096)  # tokens and columns of a strict tile: 16 MiB of float32 logits
# The most bytes of a float32 gradient of the hidden states, if these are not float32 themselves.
HIDDEN_BYTES = 64 << 20
# Columns of the head's gradient that are updated at once, if XLA cannot add a product in place.
VOCAB_BLOCK = 1024


VECTOR = 1


def refusals(hidden: ShapedArray, lm_head: ShapedArray, *, layout: Layout) -> list[str]:
    """Returns no reasons: XLA runs everywhere."""
    return []


def stats(
    inputs: Inputs, *, layout: Layout, soft_cap: float | None, block: tuple[int, int] | None = None
) -> LogitStats:
    """Returns Kernel.stats by an online log-sum-exp over tiles of the vocabulary.

    Milakov and Gimelshein, 2018.
    """
    tiles = _Tiles(inputs, layout, soft_cap, block)

    def of_tokens(i: Array) -> LogitStats:
        def columns(
            j: Array, running: tuple[Array, Array, Array, Array]
        ) -> tuple[Array, Array, Array, Array]:
            best_C, sum_exp_C, target_C, sum_C = running
            z_CB, hit_CB, _, fresh_B = tiles.logits(i, j)
            top_C = jnp.maximum(best_C, jnp.where(fresh_B, z_CB, -jnp.inf).max(axis=-1))
            exp_CB = jnp.where(fresh_B, jnp.exp(z_CB - top_C[:, None]), 0.0)
            return (
                top_C,
                sum_exp_C * jnp.exp(best_C - top_C) + exp_CB.sum(axis=-1),
                target_C + jnp.where(hit_CB & fresh_B, z_CB, 0.0).sum(axis=-1),
                sum_C + jnp.where(fresh_B, z_CB, 0.0).sum(axis=-1),
            )

        zero_C = tiles.zeros((tiles.C,))
        best_C, sum_exp_C, target_C, sum_C = _loop(
            tiles.columns, columns, (zero_C - jnp.inf, zero_C, zero_C, zero_C)
        )
        return LogitStats(jnp.log(sum_exp_C), target_C, sum_C, best_C)

    return _by_tokens(tiles, LogitStats, of_tokens)


def spread(
    inputs: Inputs, *, layout: Layout, soft_cap: float | None, block: tuple[int, int] | None = None
) -> Spread:
    """Returns the parts of entropies, by the same walk as `stats`."""
    tiles = _Tiles(inputs, layout, soft_cap, block)

    def of_tokens(i: Array) -> Spread:
        def columns(j: Array, running: Spread) -> Spread:
            z_CB, _, _, fresh_B = tiles.logits(i, j)
            best_C = jnp.maximum(running.best, jnp.where(fresh_B, z_CB, -jnp.inf).max(axis=-1))
            gap_CB = z_CB - best_C[:, None]
            exp_CB = jnp.where(fresh_B, jnp.exp(gap_CB), 0.0)
            _, terms_C, below_C = running.about(best_C)
            terms_C = terms_C + exp_CB.sum(axis=-1)
            return Spread(best_C, terms_C, below_C + (exp_CB * gap_CB).sum(axis=-1))

        zero_C = tiles.zeros((tiles.C,))
        start = Spread(zero_C + LOWEST, zero_C, zero_C)
        return _loop(tiles.columns, columns, start)

    return _by_tokens(tiles, Spread, of_tokens)


def _by_tokens(tiles: _Tiles, kind: type[Sums], of_tokens: Callable[[Array], Sums]) -> Sums:
    """Returns the results of `of_tokens` for each row of tiles, for all tokens."""

    def put(i: Array, out: Sums) -> Sums:
        both = zip(out, of_tokens(i), strict=True)
        return kind(*(_put(whole, piece, tiles.first_token(i), 0) for whole, piece in both))

    return _loop(tiles.tokens, put, kind(*(tiles.zeros((tiles.T,)) for _ in kind._fields)))


def gradients(
    inputs: Inputs,
    lse: Array,
    g: Cotangents,
    *,
    layout: Layout,
    soft_cap: float | None,
    block: tuple[int, int] | None = None,
    grad_dtype: DTypeLike | None = None,
) -> Gradients:
    """Returns Kernel.gradients.

    One pass over the tiles computes both gradients if the float32 sums of d_hidden fit; otherwise
    each has a pass of its own.
    """
    hidden, lm_head, bias, _ = inputs
    tiles = _Tiles(inputs, layout, soft_cap, block)
    cotangents = tuple(array.astype(tiles.dtype) for array in (lse, *g))
    hidden_dtype = jnp.dtype(grad_dtype or hidden.dtype)
    one_pass = hidden_dtype == tiles.dtype or hidden.size * tiles.dtype.itemsize <= HIDDEN_BYTES

    def columns(
        j: Array, out: tuple[Array | None, Array, Array | None]
    ) -> tuple[Array | None, Array, Array | None]:
        d_hidden, d_lm_head, d_bias = out

        def tokens(
            i: Array, running: tuple[Array | None, Array, Array]
        ) -> tuple[Array | None, Array, Array]:
            d_hidden, block_DB, bias_B = running
            dx_CB, exact_CB = tiles.d_logits(i, j, cotangents)
            if d_hidden is not None:
                rows_CD = tiles.token_rows(d_hidden, i) + tiles.d_hidden(dx_CB, j)
                d_hidden = _put(d_hidden, rows_CD, tiles.first_token(i), 0)
            return d_hidden, block_DB + tiles.d_head(dx_CB, i), bias_B + exact_CB.sum(axis=0)

        start = d_hidden, tiles.zeros(tiles.head_block(j).shape), tiles.zeros((tiles.B,))
        d_hidden, block_DB, bias_B = _loop(tiles.tokens, tokens, start)
        d_lm_head = tiles.put_fresh(d_lm_head, block_DB, j, tiles.vocab_axis)
        if d_bias is not None:
            d_bias = tiles.put_fresh(d_bias, bias_B, j, 0)
        return d_hidden, d_lm_head, d_bias

    def hidden_alone(i: Array, d_hidden: Array) -> Array:
        def add(j: Array, rows_CD: Array) -> Array:
            return rows_CD + tiles.d_hidden(tiles.d_logits(i, j, cotangents, every_row=True)[0], j)

        rows_CD = _loop(tiles.columns, add, tiles.zeros((tiles.C, hidden.shape[1])))
        return _put(d_hidden, rows_CD.astype(hidden_dtype), tiles.first_token(i), 0)

    d_lm_head = tiles.zeros(lm_head.shape, grad_dtype or lm_head.dtype)
    d_bias = None if bias is None else tiles.zeros(bias.shape, grad_dtype or bias.dtype)
    d_hidden = tiles.zeros(hidden.shape) if one_pass else None
    d_hidden, d_lm_head, d_bias = _loop(tiles.columns, columns, (d_hidden, d_lm_head, d_bias))
    if d_hidden is None:
        d_hidden = _loop(tiles.tokens, hidden_alone, tiles.zeros(hidden.shape, hidden_dtype))
    return Gradients(d_hidden.astype(hidden_dtype), d_lm_head, d_bias)


class _Tiles:
    """The arguments, cut into tiles of C tokens x B columns.

    The last tile of a ragged dimension is moved back to be inside, so that nothing is padded or
    copied; its `fresh` rows or columns are those that no earlier tile had.
    """

    def __init__(
        self, inputs: Inputs, layout: Layout, soft_cap: float | None, block: tuple[int, int] | None
    ) -> None:
        self.hidden, self.lm_head, self.bias, self.labels = hidden, lm_head, _, _ = inputs
        self.layout, self.soft_cap = layout, soft_cap
        self.dtype = accumulator_dtype(hidden, lm_head)
        self.vocab_axis = layout.index("v")
        self.T, self.V = hidden.shape[0], vocab_size(lm_head, layout)
        (self.tokens, self.C), (self.columns, self.B) = (
            chunk_shape(size, most)
            for size, most in zip((self.T, self.V), block or TILE, strict=True)
        )

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike | None = None) -> Array:
        return varying_like(jnp.zeros(shape, dtype or self.dtype), self.hidden)

    def first_token(self, i: Array) -> Array:
        return jnp.minimum(i * self.C, self.T - self.C)

    def first_column(self, j: Array) -> Array:
        return jnp.minimum(j * self.B, self.V - self.B)

    def token_rows(self, array: Array, i: Array) -> Array:
        return jax.lax.dynamic_slice_in_dim(array, self.first_token(i), self.C, axis=0)

    def head_block(self, j: Array) -> Array:
        return jax.lax.dynamic_slice_in_dim(
            self.lm_head, self.first_column(j), self.B, axis=self.vocab_axis
        )

    def fresh_columns(self, j: Array) -> Array:
        return self.first_column(j) + jnp.arange(self.B) >= j * self.B

    def put_fresh(self, whole: Array, piece: Array, j: Array, axis: int) -> Array:
        old = jax.lax.dynamic_slice_in_dim(whole, self.first_column(j), self.B, axis)
        fresh = jnp.expand_dims(
            self.fresh_columns(j), [other for other in range(whole.ndim) if other != axis]
        )
        return _put(
            whole, jnp.where(fresh, piece.astype(whole.dtype), old), self.first_column(j), axis
        )

    def logits(self, i: Array, j: Array) -> tuple[Array, Array, Array, Array]:
        """Returns z[C, B], where a label is, and the fresh rows [C, 1] and columns [B]."""
        x_CB = jnp.einsum(
            f"cd,{self.layout}->cv",
            self.token_rows(self.hidden, i),
            self.head_block(j),
            preferred_element_type=self.dtype,
        )
        if self.bias is not None:
            x_CB = x_CB + jax.lax.dynamic_slice_in_dim(
                self.bias, self.first_column(j), self.B
            ).astype(self.dtype)
        hit_CB = (
            self.first_column(j) + jnp.arange(self.B) == self.token_rows(self.labels, i)[:, None]
        )
        fresh_C1 = (self.first_token(i) + jnp.arange(self.C) >= i * self.C)[:, None]
        return soft_capped(x_CB, self.soft_cap), hit_CB, fresh_C1, self.fresh_columns(j)

    def d_logits(
        self, i: Array, j: Array, cotangents: tuple[Array, ...], *, every_row: bool = False
    ) -> tuple[Array, Array]:
        """Returns dx[C, B] in the dtype of the products, and its value before rounding.

        It is 0 for elements of earlier tiles.
        """
        lse_C, *g_C = (self.token_rows(array, i) for array in cotangents)
        z_CB, hit_CB, fresh_C1, fresh_B = self.logits(i, j)
        fresh_CB = fresh_B if every_row else fresh_C1 & fresh_B
        dx_CB = logit_gradients(z_CB, hit_CB, lse_C, Cotangents(*g_C), self.soft_cap)
        exact_CB = jnp.where(fresh_CB, dx_CB, 0.0)
        return exact_CB.astype(jnp.result_type(self.hidden, self.lm_head)), exact_CB

    def d_hidden(self, dx_CB: Array, j: Array) -> Array:
        return jnp.einsum(
            f"cv,{self.layout}->cd", dx_CB, self.head_block(j), preferred_element_type=self.dtype
        )

    def d_head(self, dx_CB: Array, i: Array) -> Array:
        return jnp.einsum(
            f"cd,cv->{self.layout}",
            self.token_rows(self.hidden, i),
            dx_CB,
            preferred_element_type=self.dtype,
        )


def loss_gradients(
    inputs: Inputs,
    weights: Array,
    *,
    layout: Layout,
    soft_cap: float | None,
    objective: Objective,
    chunk_size: int,
    kernel: Kernel,
    vocab_axes: tuple[str, ...] = (),
    grad_dtype: DTypeLike | None = None,
    vocab_block: int | None = None,
) -> tuple[LogitStats, Gradients]:
    """Returns the stats over all shards, and the gradients of `sum_t weights[t] * loss[t]`.

    This is the whole of *fast*, forward and backward.

    Args:
        kernel: The kernel whose rows are used.
        vocab_axes: The manual mesh axes over which the vocabulary is sharded; `d_hidden` is this
            shard's share.
        grad_dtype: The dtype of the gradients of head and bias.
        vocab_block: See VOCAB_BLOCK.
    """
    hidden, lm_head, bias, labels = inputs
    num_tokens, dtype = hidden.shape[0], accumulator_dtype(hidden, lm_head)
    num_chunks, chunk = chunk_shape(num_tokens, chunk_size)
    head_dtype, axis = jnp.dtype(grad_dtype or lm_head.dtype), layout.index("v")
    options = {**kernel.row_options(hidden, lm_head, layout), "soft_cap": soft_cap}
    pieces = _pieces(lm_head, bias, layout, kernel.VECTOR)

    def rows(
        logits: list[Array], labels: list[Array], weights_C: Array
    ) -> tuple[list[Array], LogitStats]:
        """Returns dx of every piece of the vocabulary, and the stats over all of them."""
        if len(pieces) == 1 and not vocab_axes:
            dx_CV, stats = kernel.row_step(
                logits[0], labels[0], weights_C, objective=objective, **options
            )
            return [dx_CV], stats
        both = list(zip(logits, labels, strict=True))
        stats = merged([kernel.row_stats(*piece, **options) for piece in both])
        stats = merge_shards(stats, vocab_axes)
        shift, g = loss_gradient_inputs(stats, weights_C, objective)
        return [kernel.row_gradients(*piece, shift, g, **options) for piece in both], stats

    def one(
        hidden_CD: Array, labels_C: Array, weights_C: Array
    ) -> tuple[LogitStats, Array, list[Array]]:
        logits = [_chunk_logits(hidden_CD, piece.head, piece.bias, layout) for piece in pieces]
        locals_C = [labels_C - piece.first for piece in pieces]
        dx, stats = rows(logits, locals_C, weights_C)
        products = [
            jnp.einsum(f"cv,{layout}->cd", dx_CV, piece.head, preferred_element_type=dtype)
            for dx_CV, piece in zip(dx, pieces, strict=True)
        ]
        return stats, functools.reduce(jnp.add, products).astype(hidden.dtype), dx

    def gradients(d_hidden: Array, d_heads: list[Array], d_biases: list[Array]) -> Gradients:
        d_bias = None if bias is None else _joined(d_biases, 0).astype(grad_dtype or bias.dtype)
        return Gradients(
            d_hidden, _joined([d_head.astype(head_dtype) for d_head in d_heads], axis), d_bias
        )

    # There is no sum over chunks, so no float32 gradient of the head in addition to the returned
    # one.
    if num_chunks == 1:
        stats, d_hidden, dx = one(hidden, labels, weights)
        d_heads = [
            jnp.einsum(f"cd,cv->{layout}", hidden, dx_CV, preferred_element_type=head_dtype)
            for dx_CV in dx
        ]
        return stats, gradients(d_hidden, d_heads, [dx_CV.sum(axis=0, dtype=dtype) for dx_CV in dx])

    def step(i: Array, out: _Chunks) -> _Chunks:
        all_stats, all_hidden, d_heads, d_biases = out
        # The last chunk is moved back to be inside; tokens that were seen already have weight 0.
        first = jnp.minimum(i * chunk, num_tokens - chunk)
        fresh_C = first + jnp.arange(chunk) >= i * chunk
        hidden_CD, labels_C, weights_C, old_CD = (
            jax.lax.dynamic_slice_in_dim(array, first, chunk)
            for array in (hidden, labels, weights, all_hidden)
        )
        stats, d_hidden_CD, dx = one(hidden_CD, labels_C, jnp.where(fresh_C, weights_C, 0.0))
        d_biases = [
            total + dx_CV.sum(axis=0, dtype=dtype)
            for total, dx_CV in zip(d_biases, dx, strict=False)
        ]
        d_hidden = _put(all_hidden, jnp.where(fresh_C[:, None], d_hidden_CD, old_CD), first, 0)
        d_heads = [
            _add_product(total, hidden_CD, dx_CV, layout, vocab_block)
            for total, dx_CV in zip(d_heads, dx, strict=True)
        ]
        put = (_put(whole, piece, first, 0) for whole, piece in zip(all_stats, stats, strict=True))
        return LogitStats(*put), d_hidden, d_heads, d_biases

    def zeros(shape: tuple[int, ...], of: DTypeLike) -> Array:
        return varying_like(jnp.zeros(shape, of), hidden)

    sums = (
        [zeros(piece.head.shape, dtype) for piece in pieces],
        [zeros(piece.bias.shape, dtype) for piece in pieces if piece.bias is not None],
    )
    start = (
        LogitStats(*(zeros((num_tokens,), dtype) for _ in LogitStats._fields)),
        zeros(hidden.shape, hidden.dtype),
        *sums,
    )
    stats, d_hidden, d_heads, d_biases = _loop(num_chunks, step, start)
    return stats, gradients(d_hidden, d_heads, d_biases)


# stats, d_hidden, d_heads, d_biases
_Chunks = tuple[LogitStats, Array, list[Array], list[Array]]


class _Piece(NamedTuple):
    """Some columns of the vocabulary."""

    first: int
    head: Array
    bias: Array | None


def _pieces(lm_head: Array, bias: Array | None, layout: Layout, vector: int) -> list[_Piece]:
    """Returns the vocabulary, cut after its last whole vector.

    Otherwise cuBLAS would pad logits, head and gradient of a piece.
    """
    axis, vocab = layout.index("v"), vocab_size(lm_head, layout)
    cuts = sorted({0, vocab // vector * vector, vocab})
    return [
        _Piece(
            a, jax.lax.slice_in_dim(lm_head, a, b, axis=axis), None if bias is None else bias[a:b]
        )
        for a, b in itertools.pairwise(cuts)
    ]


def _joined(arrays: list[Array], axis: int) -> Array:
    return arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays, axis)


def _chunk_logits(hidden_CD: Array, lm_head: Array, bias: Array | None, layout: Layout) -> Array:
    """Returns x in the dtype of the inputs, rounded once: half the memory of float32 logits."""
    dtype = jnp.result_type(hidden_CD, lm_head)
    if bias is None:
        return jnp.einsum(f"cd,{layout}->cv", hidden_CD, lm_head, preferred_element_type=dtype)
    x_CV = jnp.einsum(
        f"cd,{layout}->cv",
        hidden_CD,
        lm_head,
        preferred_element_type=accumulator_dtype(hidden_CD, lm_head),
    )
    return (x_CV + bias).astype(dtype)


def _add_product(
    d_lm_head: Array, hidden_CD: Array, dx_CV: Array, layout: Layout, vocab_block: int | None
) -> Array:
    """Returns `d_lm_head + hidden_CD.T @ dx_CV`.

    If the product would be a second array of D x V, it takes a block of columns at a time.
    """
    axis = layout.index("v")
    vocab = d_lm_head.shape[axis]
    blocks, size = chunk_shape(vocab, vocab_block or vocab)

    def add(j: Array, total: Array) -> Array:
        first = jnp.minimum(j * size, vocab - size)
        fresh_B = first + jnp.arange(size) >= j * size
        columns_CB = jnp.where(fresh_B, jax.lax.dynamic_slice_in_dim(dx_CV, first, size, axis=1), 0)
        product = jnp.einsum(
            f"cd,cv->{layout}", hidden_CD, columns_CB, preferred_element_type=total.dtype
        )
        return _put(
            total, jax.lax.dynamic_slice_in_dim(total, first, size, axis) + product, first, axis
        )

    if blocks == 1:
        return d_lm_head + jnp.einsum(
            f"cd,cv->{layout}", hidden_CD, dx_CV, preferred_element_type=d_lm_head.dtype
        )
    return _loop(blocks, add, d_lm_head)


def chunk_shape(size: int, most: int, multiple: int = 128) -> tuple[int, int]:
    """Returns `(pieces, size of a piece)`: as few pieces as `most` allows, of even size.

    The size is a multiple of 128 if there are several.
    """
    pieces = max(1, -(-size // most))
    even = -(-size // pieces)
    return pieces, min(
        even if pieces == 1 else max(1, min(most, -(-even // multiple) * multiple)), size
    )


def _put(whole: Array, piece: Array, first: Array, axis: int) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(whole, piece, first, axis)


def _loop(count: int, body: Callable[[Array, Carry], Carry], start: Carry) -> Carry:
    """Runs fori_loop; a single iteration is inlined, so that constants reach the compiler."""
    return body(jnp.int32(0), start) if count == 1 else jax.lax.fori_loop(0, count, body, start)


def row_stats(logits: Array, labels: Array, *, soft_cap: float | None) -> LogitStats:
    z_CV = _capped(logits, soft_cap)
    best_C = z_CV.max(axis=-1)
    log_sum_C = jnp.log(jnp.exp(z_CV - best_C[:, None]).sum(axis=-1))
    is_local_C = (labels >= 0) & (labels < logits.shape[1])
    # One element of each row is picked directly from the logits: a sum over `hit * z` would be
    # another pass over all of them.
    target_C = jnp.take_along_axis(logits, jnp.where(is_local_C, labels, 0)[:, None], axis=1)[:, 0]
    return LogitStats(
        log_sum_C,
        jnp.where(is_local_C, _capped(target_C, soft_cap), 0.0),
        z_CV.sum(axis=-1),
        best_C,
    )


def row_gradients(
    logits: Array, labels: Array, lse: Array, g: Cotangents, *, soft_cap: float | None
) -> Array:
    hit_CV = jnp.arange(logits.shape[1], dtype=labels.dtype) == labels[:, None]
    dx_CV = logit_gradients(_capped(logits, soft_cap), hit_CV, lse, g, soft_cap)
    return dx_CV.astype(logits.dtype)


def row_step(
    logits: Array, labels: Array, weights: Array, *, objective: Objective, soft_cap: float | None
) -> tuple[Array, LogitStats]:
    stats = row_stats(logits, labels, soft_cap=soft_cap)
    shift, cotangents = loss_gradient_inputs(stats, weights, objective)
    return row_gradients(logits, labels, shift, cotangents, soft_cap=soft_cap), stats


def row_options(hidden: Array, lm_head: Array, layout: Layout) -> Arguments:
    return {}


def _capped(logits: Array, soft_cap: float | None) -> Array:
    return soft_capped(logits.astype(accumulator_dtype(logits)), soft_cap)
