"""The four sums over the vocabulary on a TPU: one pass, no logits beyond a tile.

Grid (part p, block of tokens i, block of columns j, rows k of the token block). A block of tokens
(with the whole width) stays in VMEM while the head streams past it, so the head is read once for
each block of tokens, and the larger the block, the fewer bytes are moved. Each part takes its own
share of the columns; on a chip of two TensorCores the two parts run side by side ("parallel"), and
their sums are merged outside, as those of vocabulary shards are.

T tokens · D width · V vocabulary · B tokens that stay · R rows of a tile · C columns of a tile
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from easypipe.kernels.loss.stats import Inputs, Layout, LogitStats, vocab_size
from easypipe.kernels.loss.tpu.blocks import SLACK, Blocks, cdiv, forward_vmem, sizes_of
from easypipe.kernels.loss.tpu.common import (
    LOWEST,
    Interpret,
    Refs,
    head_block,
    logits,
    named_call,
    shape_like,
)

BEST, TOTAL, TARGET, SUM = range(4)  # rows of the result
ROWS = 8  # of float32 that a TPU stores together


def stats(
    inputs: Inputs, layout: Layout, soft_cap: float | None, blocks: Blocks, interpret: Interpret
) -> LogitStats:
    """`Kernel.stats` of stats.py."""
    rows_P8T = _parts(inputs, layout, soft_cap, blocks, interpret)
    best_PT, total_PT = rows_P8T[:, BEST], rows_P8T[:, TOTAL]
    best_T = best_PT.max(axis=0)
    log_sum_T = jnp.log((total_PT * jnp.exp(best_PT - best_T)).sum(axis=0))
    return LogitStats(
        log_sum_T, rows_P8T[:, TARGET].sum(axis=0), rows_P8T[:, SUM].sum(axis=0), best_T
    )


def _parts(
    inputs: Inputs, layout: Layout, soft_cap: float | None, blocks: Blocks, interpret: Interpret
) -> Array:
    """[parts, 8, T] float32: a row each of best, sum of exp(z - best), target and sum of z."""
    hidden, lm_head, bias, labels = inputs
    (tokens, width), vocab = hidden.shape, vocab_size(lm_head, layout)
    num_columns = cdiv(vocab, blocks.columns)
    per_part = cdiv(num_columns, blocks.parts)

    # a part may end with blocks beyond the vocabulary: they read the last one again, and are masked
    def column_block(p: Array, i: Array, j: Array, k: Array) -> Array:
        return jnp.minimum(p * per_part + j, num_columns - 1)

    stays = pl.BlockSpec(
        (blocks.tokens, width), lambda p, i, j, k: (i, 0), pipeline_mode=pl.Buffered(1)
    )
    of_tokens = pl.BlockSpec((1, blocks.tokens), lambda p, i, j, k: (0, i))
    columns = pl.BlockSpec((1, blocks.columns), lambda *at: (0, column_block(*at)))
    given = {
        "hidden": (hidden, stays),
        "head": (lm_head, pl.BlockSpec(*head_block(layout, width, blocks.columns, column_block))),
        "labels": (labels.astype(jnp.int32)[None, :], of_tokens),
    }
    if bias is not None:
        given["bias"] = bias.astype(jnp.float32)[None, :], columns

    def kernel(given: Refs, results: Refs, _: Refs) -> None:
        part, column_block, rows_index = pl.program_id(0), pl.program_id(2), pl.program_id(3)
        rows = pl.ds(pl.multiple_of(rows_index * blocks.rows, blocks.rows), blocks.rows)
        first_column = (part * per_part + column_block) * blocks.columns
        out_ref = results["out"]

        @pl.when(column_block == 0)
        def _start():
            row = jax.lax.broadcasted_iota(jnp.int32, (ROWS, blocks.rows), 0)
            out_ref[0, :, rows] = jnp.where(row == BEST, LOWEST, 0.0)

        bias_1C = given["bias"][...] if "bias" in given else None
        z_RC = logits(given["hidden"][rows, :], given["head"][...], bias_1C, layout, soft_cap)
        column_RC = first_column + jax.lax.broadcasted_iota(jnp.int32, z_RC.shape, 1)
        labels_R1 = given["labels"][:, rows].T
        hit_RC = column_RC == labels_R1  # in a column beyond the vocabulary z is 0 below
        seen_RC = z_RC
        if vocab % blocks.columns or vocab // blocks.columns % blocks.parts:
            inside_RC = column_RC < vocab
            seen_RC, z_RC = jnp.where(inside_RC, z_RC, LOWEST), jnp.where(inside_RC, z_RC, 0.0)
        state_R8 = out_ref[0, :, rows].T
        old_R1, total_R1, target_R1, sum_R1 = (state_R8[:, i : i + 1] for i in range(4))
        best_R1 = jnp.maximum(old_R1, seen_RC.max(axis=1, keepdims=True))
        kept_R1 = total_R1 * jnp.exp(old_R1 - best_R1)
        total_R1 = kept_R1 + jnp.exp(seen_RC - best_R1).sum(axis=1, keepdims=True)
        target_R1 = target_R1 + jnp.where(hit_RC, z_RC, 0.0).sum(axis=1, keepdims=True)
        new_R8 = sum_R1 + z_RC.sum(axis=1, keepdims=True)
        place_R8 = jax.lax.broadcasted_iota(jnp.int32, state_R8.shape, 1)
        for place, number_R1 in ((TARGET, target_R1), (TOTAL, total_R1), (BEST, best_R1)):
            new_R8 = jnp.where(place_R8 == place, number_R1, new_R8)
        out_ref[0, :, rows] = new_R8.T

    vmem = forward_vmem(blocks, sizes_of(tokens, width, vocab, hidden.dtype)) + SLACK
    sums = pl.BlockSpec((1, ROWS, blocks.tokens), lambda p, i, j, k: (p, 0, i))
    return named_call(
        kernel,
        "loss_stats",
        grid=(
            blocks.parts,
            cdiv(tokens, blocks.tokens),
            per_part,
            blocks.tokens // blocks.rows,
        ),
        inputs=given,
        outputs={"out": (shape_like((blocks.parts, ROWS, tokens), jnp.float32, hidden), sums)},
        scratch={},
        cores=True,
        vmem=vmem,
        interpret=interpret,
    )["out"]
