"""A tile of logits and its gradient in VMEM, recomputed: what every schedule of the backward pass
on a TPU is made of.

T tokens · D width · V vocabulary · R rows of a tile · C columns of a block
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, Ref
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from easypipe.kernels.loss.stats import Layout, soft_cap_slope
from easypipe.kernels.loss.tpu.blocks import COLUMN_STEP, Blocks
from easypipe.kernels.loss.tpu.common import Interpret, in_steps, logits, product


class Problem(NamedTuple):
    """What the kernel is compiled for."""

    tokens: int
    width: int
    vocab: int
    layout: Layout
    soft_cap: float | None
    has_bias: bool
    split: bool  # the gradient of hidden is two halves of a float32; else it is float32
    blocks: Blocks
    dtype: jnp.dtype  # of the products
    head_dtype: jnp.dtype  # of the head's gradient
    vmem: int  # bytes
    interpret: Interpret

    @property
    def state_dtype(self) -> DTypeLike:
        return jnp.bfloat16 if self.split else jnp.float32


class Tile(NamedTuple):
    """The references of a tile."""

    hidden: Ref  # [R, D]
    head: Ref  # [D, C] or [C, D]
    known: Ref  # [8, R] float32
    bias: Ref | None  # [1, C]
    d_head: Ref | None  # float32 like head
    d_bias: Ref | None  # [1, 1, C] float32
    dz: Ref  # [R, C] in the dtype of the products
    dz_turned: Ref | None = None  # [C, R], for the layout "vd"


class At(NamedTuple):
    """Where in the problem a step stands."""

    column_block: Array
    tile: Array
    first_width: Array | int = 0  # of the part of the width that the state holds
    adds_nothing: Array | bool = False  # to the head's gradient: nothing is in it yet
    bias_adds_nothing: Array | bool = False
    begins: Array | bool = True  # the tile: later steps do the rest of its width


def scratch(problem: Problem, head_shape: tuple[int, int]) -> dict[str, object]:
    rows, columns = problem.blocks.back_rows, problem.blocks.back_columns
    found: dict[str, object] = {
        "sum": pltpu.VMEM(head_shape, jnp.float32),
        "dz": pltpu.VMEM((rows, columns), problem.dtype),
    }
    if problem.layout == "vd":
        found["dz_turned"] = pltpu.VMEM((columns, rows), problem.dtype)
    return found


def tile_dz(refs: Tile, at: At, problem: Problem) -> None:
    """The tile's logits and their gradient, which goes to refs.dz."""
    rows, columns = problem.blocks.back_rows, problem.blocks.back_columns

    if (d_head := refs.d_head) is not None:

        @pl.when(at.adds_nothing)
        def _start():
            d_head[...] = jnp.zeros(d_head.shape, d_head.dtype)

    # What lies beyond the arrays was never loaded and may be NaN, which a product would spread: it
    # becomes 0.
    if problem.tokens % rows:

        @pl.when(at.tile == problem.tokens // rows)
        def _rows_beyond():
            row = jax.lax.broadcasted_iota(jnp.int32, refs.hidden.shape, 0)
            refs.hidden[...] = jnp.where(row < problem.tokens % rows, refs.hidden[...], 0)

    if problem.vocab % columns:

        @pl.when(at.column_block == problem.vocab // columns)
        def _columns_beyond():
            column = jax.lax.broadcasted_iota(jnp.int32, refs.head.shape, problem.layout.index("v"))
            refs.head[...] = jnp.where(column < problem.vocab % columns, refs.head[...], 0)

    known_R8 = refs.known[...].T
    label_R1, lse_R1, g_lse_R1, g_target_R1, g_sum_R1 = (known_R8[:, i : i + 1] for i in range(5))

    def logits_to_dz(part: pl.Slice, _: None) -> None:
        head = refs.head[:, part] if problem.layout == "dv" else refs.head[part, :]
        bias_1S = None if refs.bias is None else refs.bias[:, part]
        z_RS = logits(refs.hidden[...], head, bias_1S, problem.layout, problem.soft_cap)
        first = at.column_block * columns + part.start
        column_RS = first + jax.lax.broadcasted_iota(jnp.int32, z_RS.shape, 1)
        hit_RS = column_RS == label_R1.astype(jnp.int32)
        dx_RS = jnp.exp(z_RS - lse_R1) * g_lse_R1 + g_sum_R1 + jnp.where(hit_RS, g_target_R1, 0.0)
        dx_RS = dx_RS * soft_cap_slope(z_RS, problem.soft_cap)
        inside = column_RS < problem.vocab if problem.vocab % columns else None
        if problem.tokens % rows:
            row_RS = at.tile * rows + jax.lax.broadcasted_iota(jnp.int32, z_RS.shape, 0)
            inside = (
                row_RS < problem.tokens if inside is None else inside & (row_RS < problem.tokens)
            )
        if inside is not None:
            dx_RS = jnp.where(inside, dx_RS, 0.0)
        if refs.d_bias is not None:
            sum_1S = jnp.where(at.bias_adds_nothing, 0.0, refs.d_bias[0, :, part])
            refs.d_bias[0, :, part] = sum_1S + dx_RS.sum(axis=0, keepdims=True)
        refs.dz[:, part] = dx_RS.astype(refs.dz.dtype)
        if refs.dz_turned is not None:
            refs.dz_turned[part, :] = dx_RS.T.astype(refs.dz.dtype)

    in_steps(columns, COLUMN_STEP, logits_to_dz, None)


def add_to_head(refs: Tile, width: pl.Slice) -> None:
    """The tile's share in `width` of the head's gradient."""
    assert refs.d_head is not None
    if refs.dz_turned is None:  # layout "dv"
        refs.d_head[width, :] += product(refs.hidden[:, width], refs.dz[...], 0, 0)
    else:
        refs.d_head[:, width] += product(refs.dz_turned[...], refs.hidden[:, width], 1, 0)


def of_hidden(refs: Tile, width: pl.Slice, layout: Layout) -> Array:
    """The tile's share in `width` of the hidden states' gradient, float32."""
    return (
        product(refs.dz[...], refs.head[width, :], 1, 1)
        if layout == "dv"
        else product(refs.dz[...], refs.head[:, width], 1, 0)
    )
