"""Rows of logits that are at hand, on NVIDIA GPUs (Pallas through Triton): their four sums, and dx
in their place.

One program per row, which it walks in blocks of columns; all arithmetic in float32. The gradient
needs lse, so a row is read twice and written once. `row_step` does both in one program: one row per
multiprocessor is in flight (that is what 32 warps force), 132 rows of 128,256 bf16 are 34 MB, and
the second walk goes backwards, so it finds in the 60 MB of level-2 cache of an H200 what the first
one left there. Its traffic in device memory is then one read and one write of the logits, the least
possible.

C tokens of a chunk · V vocabulary
"""
# ruff: noqa: F722  (shapes in annotations are jaxtyping's, not Python)

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Float, Int

from easypipe.kernels.loss.stats import (
    Cotangents,
    LogitStats,
    Objective,
    about_best,
    loss_cotangents,
)

LOWEST = -1e30  # stands for -inf: inf - inf would be nan in a row that has met no column yet


class RowBlock(NamedTuple):
    """How a row is walked. The values are those of the arithmetic above; a table for the device may
    say better.
    """

    columns: int = 8192  # a power of two: what one step of the walk holds in registers
    num_warps: int = 32


def row_stats(
    logits: Float[Array, "C V"],
    labels: Int[Array, " C"],
    *,
    soft_cap: float | None,
    block: RowBlock | None = None,
    interpret: bool = False,
) -> LogitStats:
    """The four sums over each row of z = cap(logits), in float32; reads the logits once."""
    kernel = functools.partial(_stats_kernel, soft_cap=soft_cap, columns=_columns(block, logits))
    return LogitStats(
        *_call(kernel, "easypipe_row_stats", logits, (labels,), 4, None, block, interpret)
    )


def row_gradients(
    logits: Float[Array, "C V"],
    labels: Int[Array, " C"],
    lse: Float[Array, " C"],
    g: Cotangents,
    *,
    soft_cap: float | None,
    block: RowBlock | None = None,
    interpret: bool = False,
) -> Float[Array, "C V"]:
    """dx (see stats.Kernel.gradients) in the buffer of the logits; reads and writes them once."""
    kernel = functools.partial(
        _gradients_kernel, soft_cap=soft_cap, columns=_columns(block, logits)
    )
    return _call(
        kernel,
        "easypipe_row_gradients",
        logits,
        (labels, lse, *g),
        0,
        logits.dtype,
        block,
        interpret,
    )[0]


def row_step(
    logits: Float[Array, "C V"],
    labels: Int[Array, " C"],
    weights: Float[Array, " C"],
    *,
    objective: Objective,
    soft_cap: float | None,
    block: RowBlock | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "C V"], LogitStats]:
    """`row_stats`, and dx of `sum_t weights[t] * loss[t]` in the buffer of the logits, by one
    kernel.
    """
    kernel = functools.partial(
        _step_kernel, objective=objective, soft_cap=soft_cap, columns=_columns(block, logits)
    )
    scalars = (labels, weights.astype(jnp.float32))
    dx, *sums = _call(
        kernel, "easypipe_row_step", logits, scalars, 4, logits.dtype, block, interpret
    )
    return dx, LogitStats(*sums)


def _call(
    kernel: Any,
    name: str,
    logits: Array,
    scalars: tuple[Array, ...],
    num_sums: int,
    in_place: Any,
    block,
    interpret: bool,
) -> Any:
    """`kernel(logits_ref, *scalar refs, [dx_ref], *sum refs)` for every row; the refs are whole
    arrays in device memory.
    """
    rows = logits.shape[0]
    outputs = [jax.ShapeDtypeStruct(logits.shape, in_place)] if in_place is not None else []
    outputs += [jax.ShapeDtypeStruct((rows,), jnp.float32)] * num_sums
    num_warps = (block or RowBlock()).num_warps
    return pl.pallas_call(
        kernel,
        out_shape=outputs,
        grid=(rows,),
        input_output_aliases={0: 0} if in_place is not None else {},
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=1),
        interpret=interpret,
        name=name,
    )(logits, *scalars)


def _columns(block: RowBlock | None, logits: Array) -> int:
    """Columns of a block: a power of two, no more than the row needs."""
    return min((block or RowBlock()).columns, pl.next_power_of_2(max(16, logits.shape[1])))


def _stats_kernel(
    logits_ref,
    labels_ref,
    log_sum_ref,
    target_ref,
    sum_ref,
    best_ref,
    *,
    soft_cap: float | None,
    columns: int,
) -> None:
    row = pl.program_id(0)
    stats = _walk_stats(logits_ref, row, labels_ref[row], soft_cap, columns)
    for ref, value in zip((log_sum_ref, target_ref, sum_ref, best_ref), stats, strict=True):
        ref[row] = value


def _gradients_kernel(
    logits_ref,
    labels_ref,
    lse_ref,
    g_lse_ref,
    g_target_ref,
    g_sum_ref,
    dx_ref,
    *,
    soft_cap: float | None,
    columns: int,
) -> None:
    row = pl.program_id(0)
    cotangents = Cotangents(g_lse_ref[row], g_target_ref[row], g_sum_ref[row])
    _walk_gradients(
        logits_ref, dx_ref, row, labels_ref[row], lse_ref[row], cotangents, soft_cap, columns
    )


def _step_kernel(
    logits_ref,
    labels_ref,
    weights_ref,
    dx_ref,
    log_sum_ref,
    target_ref,
    sum_ref,
    best_ref,
    *,
    objective: Objective,
    soft_cap: float | None,
    columns: int,
) -> None:
    row = pl.program_id(0)
    label = labels_ref[row]
    stats = _walk_stats(logits_ref, row, label, soft_cap, columns)
    for ref, value in zip((log_sum_ref, target_ref, sum_ref, best_ref), stats, strict=True):
        ref[row] = value
    shift, cotangents = about_best(
        stats.best, stats.log_sum, loss_cotangents(stats.lse, weights_ref[row], objective)
    )
    _walk_gradients(logits_ref, dx_ref, row, label, shift, cotangents, soft_cap, columns)


def _walk_stats(logits_ref, row, label, soft_cap: float | None, columns: int) -> LogitStats:
    """Online log-sum-exp (Milakov & Gimelshein, 2018): the running maximum is one number, so the
    terms are rescaled where it grows.
    """
    vocab = logits_ref.shape[1]
    blocks = pl.cdiv(vocab, columns)

    def step(i: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        best, terms_B, sums_B, x_B = carry
        i = i.astype(jnp.int32)  # 64 bits wide where jax_enable_x64 is set
        # in flight while this block is worked on
        following_B = _load(logits_ref, row, i + 1, columns)
        z_B, here_B = capped(x_B, soft_cap), _ids(i, columns) < vocab
        higher = jnp.maximum(best, jnp.max(jnp.where(here_B, z_B, LOWEST)))
        terms_B = terms_B * jnp.exp(best - higher) + jnp.where(here_B, jnp.exp(z_B - higher), 0.0)
        return higher, terms_B, sums_B + jnp.where(here_B, z_B, 0.0), following_B

    zeros_B = jnp.zeros(columns, jnp.float32)
    # not 0: jax 0.12 refuses a slice that it knows to reach past the end, though the mask reads
    # nothing there
    first = row - row
    start = jnp.float32(LOWEST), zeros_B, zeros_B, _load(logits_ref, row, first, columns)
    best, terms_B, sums_B, _ = jax.lax.fori_loop(0, blocks, step, start)
    is_local = (label >= 0) & (label < vocab)
    x_label = plgpu.load(logits_ref.at[row, jnp.where(is_local, label, 0)]).astype(jnp.float32)
    target = jnp.where(is_local, capped(x_label, soft_cap), 0.0)
    return LogitStats(jnp.log(jnp.sum(terms_B)), target, jnp.sum(sums_B), best)


def _walk_gradients(
    logits_ref, dx_ref, row, label, lse, g: Cotangents, soft_cap: float | None, columns: int
) -> None:
    """The last block first: it was read last, so it is still in the cache."""
    vocab = logits_ref.shape[1]
    blocks = pl.cdiv(vocab, columns)

    def step(done: Array, _: None) -> None:
        i = blocks - 1 - done.astype(jnp.int32)
        ids_B = _ids(i, columns)
        z_B = capped(_load(logits_ref, row, i, columns), soft_cap)
        dz_B = jnp.exp(z_B - lse) * g.lse + jnp.where(ids_B == label, g.target, 0.0) + g.sum
        if soft_cap is not None:
            dz_B = dz_B * (1.0 - (z_B * (1.0 / soft_cap)) ** 2)
        plgpu.store(
            dx_ref.at[row, pl.ds(i * columns, columns)],
            dz_B.astype(dx_ref.dtype),
            mask=ids_B < vocab,
        )

    jax.lax.fori_loop(0, blocks, step, None)


def _ids(block, columns: int) -> Array:
    return block * columns + jnp.arange(columns, dtype=jnp.int32)


def _load(logits_ref, row, block, columns: int) -> Array:
    """Columns of one block in float32, 0 past the end of the row (a block past the end is all 0 and
    reads nothing).
    """
    mask = _ids(block, columns) < logits_ref.shape[1]
    x_B = plgpu.load(logits_ref.at[row, pl.ds(block * columns, columns)], mask=mask, other=0.0)
    return x_B.astype(jnp.float32)


def capped(x: Array, soft_cap: float | None) -> Array:
    """soft_cap * tanh(x / soft_cap); tanh by exp, which the device has an instruction for (absolute
    error in z below 1e-6 * soft_cap).
    """
    if soft_cap is None:
        return x
    return soft_cap - (2.0 * soft_cap) / (jnp.exp(x * (2.0 / soft_cap)) + 1.0)
