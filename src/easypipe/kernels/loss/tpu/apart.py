"""The gradients on a TPU in two passes, one for each: the schedule *apart* of
backward.py.

Whatever the order of the tiles, one pass over them has half-finished float32 sums of the smaller of
the two gradients in HBM: 2·D bytes for each token (or column) beside the bfloat16 of the result.
Where these are more than may stand there, the logits are computed once
more: 8·T·D·V FLOPs for the backward pass instead of 6, and every sum is finished in VMEM.

- of the head: a block of columns stays beside its gradient while the tokens stream past. Grid
  (block of columns j, tile k).
- of the hidden states: a block of tokens stays beside its gradient while the head streams past.
  Grid (block i, columns j, rows k of it).
On two TensorCores each takes a part of the blocks that stay.

T tokens · D width · V vocabulary · B tokens that stay · R rows of a tile · C columns of a block
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from easypipe.kernels.loss.tpu.blocks import WIDTH_STEP, cdiv
from easypipe.kernels.loss.tpu.forward import ROWS
from easypipe.kernels.loss.tpu.loops import in_steps, shape_like
from easypipe.kernels.loss.tpu.tiles import (
    At,
    Problem,
    Refs,
    add_to_head,
    head_block,
    of_hidden,
    scratch,
    tile_dz,
)


def gradients(
    hidden: Array,
    lm_head: Array,
    known_8T: Array,
    bias_1V: Array | None,
    problem: Problem,
    head_dtype: Any,
    interpret: Any,
) -> tuple[Array, Array, Array | None]:
    """(of hidden, of the head, of the bias as float32[1, 1, V]); `known_8T` is what
    backward.py knows of the tokens.
    """
    arguments = [hidden, lm_head, known_8T] + ([] if bias_1V is None else [bias_1V])
    d_head, *d_bias = _of_head(arguments, problem, head_dtype, interpret)
    return _of_hidden(arguments, problem, interpret), d_head, d_bias[0] if d_bias else None


def _of_head(
    arguments: list[Array], problem: Problem, head_dtype: Any, interpret: Any
) -> list[Array]:
    hidden, lm_head, *_ = arguments
    rows, columns = problem.blocks.back_rows, problem.blocks.back_columns
    head_shape, head_index = head_block(problem, lambda j, k: j)
    head_spec = pl.BlockSpec(head_shape, head_index, pipeline_mode=pl.Buffered(1))
    in_specs = [
        pl.BlockSpec((rows, problem.width), lambda j, k: (k, 0)),
        head_spec,
        pl.BlockSpec((ROWS, rows), lambda j, k: (0, k)),
    ]
    out_specs, out_shape = [head_spec], [shape_like(lm_head.shape, head_dtype, hidden)]
    if problem.has_bias:
        in_specs.append(pl.BlockSpec((1, columns), lambda j, k: (0, j)))
        out_specs.append(pl.BlockSpec((1, 1, columns), lambda j, k: (0, 0, j)))
        out_shape.append(shape_like((1, 1, problem.vocab), jnp.float32, hidden))

    def kernel(hidden_ref, head_ref, known_ref, *refs):
        bias_ref, *refs = refs if problem.has_bias else (None, *refs)
        d_head_ref, *refs = refs
        d_bias_ref, *refs = refs if problem.has_bias else (None, *refs)
        sum_ref, *dz_refs = refs
        block, tile = pl.program_id(0), pl.program_id(1)
        tile_refs = Refs(hidden_ref, head_ref, known_ref, bias_ref, sum_ref, d_bias_ref, *dz_refs)
        tile_dz(
            tile_refs, At(block, tile, adds_nothing=tile == 0, bias_adds_nothing=tile == 0), problem
        )
        in_steps(
            problem.width,
            WIDTH_STEP,
            lambda part, _: add_to_head(tile_refs, part, problem.layout),
            None,
        )

        @pl.when(tile == pl.num_programs(1) - 1)
        def _finish():
            d_head_ref[...] = sum_ref[...].astype(d_head_ref.dtype)

    return pl.pallas_call(
        kernel,
        out_shape=out_shape,
        grid=(cdiv(problem.vocab, columns), cdiv(problem.tokens, rows)),
        in_specs=in_specs,
        out_specs=out_specs,
        scratch_shapes=scratch(problem, head_shape, hidden.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=problem.vmem
        ),
        interpret=interpret,
        name="loss_gradients_of_head",
    )(*arguments)


def _of_hidden(arguments: list[Array], problem: Problem, interpret: Any) -> Array:
    hidden = arguments[0]
    rows, columns, stay = (
        problem.blocks.back_rows,
        problem.blocks.own_columns,
        problem.blocks.own_tokens,
    )
    problem = problem._replace(blocks=problem.blocks._replace(back_columns=columns))
    head_shape, head_index = head_block(problem, lambda i, j, k: j)
    tokens_spec = pl.BlockSpec(
        (stay, problem.width), lambda i, j, k: (i, 0), pipeline_mode=pl.Buffered(1)
    )
    in_specs = [
        tokens_spec,
        pl.BlockSpec(head_shape, head_index),
        pl.BlockSpec((ROWS, stay), lambda i, j, k: (0, i)),
    ]
    if problem.has_bias:
        in_specs.append(pl.BlockSpec((1, columns), lambda i, j, k: (0, j)))

    def kernel(hidden_ref, head_ref, known_ref, *refs):
        bias_ref, *refs = refs if problem.has_bias else (None, *refs)
        d_hidden_ref, sum_ref, dz_ref = refs
        block, column_block, k = (pl.program_id(axis) for axis in range(3))
        window = pl.ds(pl.multiple_of(k * rows, rows), rows)
        tile_refs = Refs(
            hidden_ref.at[window], head_ref, known_ref.at[:, window], bias_ref, None, None, dz_ref
        )
        tile_dz(tile_refs, At(column_block, block * (stay // rows) + k), problem)

        def add(part, _) -> None:
            before = jnp.where(column_block == 0, 0.0, sum_ref[window, part])
            sum_ref[window, part] = before + of_hidden(tile_refs, part, problem.layout)

        in_steps(problem.width, WIDTH_STEP, add, None)

        @pl.when(column_block == pl.num_programs(1) - 1)
        def _finish():
            d_hidden_ref[window, :] = sum_ref[window, :].astype(d_hidden_ref.dtype)

    return pl.pallas_call(
        kernel,
        out_shape=shape_like(hidden.shape, jnp.bfloat16 if problem.split else jnp.float32, hidden),
        grid=(cdiv(problem.tokens, stay), cdiv(problem.vocab, columns), stay // rows),
        in_specs=in_specs,
        out_specs=tokens_spec,
        scratch_shapes=[
            pltpu.VMEM((stay, problem.width), jnp.float32),
            pltpu.VMEM((rows, columns), hidden.dtype),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=problem.vmem,
        ),
        interpret=interpret,
        name="loss_gradients_of_hidden",
    )(*arguments)
