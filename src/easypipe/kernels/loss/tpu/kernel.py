"""The loss kernels of TPUs (v5e to tpu7x) as the api calls them: refusals, and the forward pass.

*strict*: no logits exist beyond a tile in VMEM. It takes 8·T·D·V FLOPs, forward and backward; for
bytes, see blocks.py. In addition to its results the backward pass has 2·T·D bytes in HBM (for
bfloat16), and on two TensorCores one block of columns of the head's gradient in float32. If these
would be more than 256 MiB it has none of them, and takes 10·T·D·V FLOPs. *fast*: XLA computes the
matrix products (chunked.py). Between them `row_step` turns a chunk of logits into its gradient, in
place, with one read and one write.

Forward. Grid (part p, block of tokens i, block of columns j, rows k of the token block). A block of
tokens (with the whole width) stays in VMEM while the head streams past it. So the head is read once
for each block of tokens, and larger blocks move fewer bytes. Each part takes its own share of the
columns; on a chip of two TensorCores the two parts run side by side ("parallel"), and their sums
are merged outside, like those of vocabulary shards.

T tokens · D width · V vocabulary · B tokens that stay · R rows of a tile · C columns of a tile
"""
# ruff: noqa: F722  (shapes in annotations are jaxtyping's, not Python)

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.typing import DTypeLike
from jaxtyping import Float

from easypipe.core.errors import ConfigError
from easypipe.kernels.loss.chunked import row_options as row_options  # of the Kernel protocol
from easypipe.kernels.loss.stats import (
    Cotangents,
    Gradients,
    Inputs,
    Layout,
    LogitStats,
    ShapedArray,
    vocab_size,
)
from easypipe.kernels.loss.tpu import backward
from easypipe.kernels.loss.tpu.blocks import (
    SLACK,
    TOO_SMALL,
    UNKNOWN,
    Blocks,
    as_blocks,
    cdiv,
    device_of,
    fitted,
    forward_vmem,
    plan_blocks,
    refused_blocks,
    rounded,
    sizes_of,
)
from easypipe.kernels.loss.tpu.common import (
    LOWEST,
    ROWS,
    Interpret,
    Refs,
    head_block,
    logits,
    named_call,
    shape_like,
)
from easypipe.kernels.loss.tpu.rows import row_gradients as row_gradients
from easypipe.kernels.loss.tpu.rows import row_stats as row_stats
from easypipe.kernels.loss.tpu.rows import row_step as row_step
from easypipe.kernels.tuning import table as tuning

NAME = "pallas_tpu"
DTYPES = ("bfloat16", "float32")
VECTOR = 1
MOST_COLUMNS = 1 << 24  # column ids travel as float32


def refusals(hidden: ShapedArray, lm_head: ShapedArray, *, layout: Layout) -> list[str]:
    """Returns every reason why these arguments cannot run on any TPU from v5e on.

    An older TPU as the compilation target is a reason too.
    """
    reasons = []
    tokens, width = hidden.shape
    dtypes = {jnp.dtype(array.dtype).name for array in (hidden, lm_head)}
    if len(dtypes) > 1 or not dtypes <= set(DTYPES):
        reasons.append(
            f"hidden and lm_head are {' and '.join(sorted(dtypes))}: it takes both in "
            f"{' or both in '.join(DTYPES)}"
        )
    if vocab_size(lm_head, layout) >= MOST_COLUMNS:
        reasons.append(
            f"a vocabulary of {vocab_size(lm_head, layout)} on one device is not below "
            f"{MOST_COLUMNS}"
        )
    kind = tuning.device_kind()
    if kind.startswith(TOO_SMALL):
        reasons.append(f"{kind} has 16 MiB of VMEM: it takes TPU v5e and newer")
    if not reasons:
        try:
            plan_blocks(
                UNKNOWN,
                sizes_of(tokens, width, vocab_size(lm_head, layout), hidden.dtype, jnp.float32),
            )
        except ConfigError as error:
            reasons.append(str(error))
    return reasons


def stats(
    inputs: Inputs,
    *,
    layout: Layout,
    soft_cap: float | None,
    block: Mapping[str, int] | Blocks | None = None,
    interpret: Interpret = False,
) -> LogitStats:
    """Returns Kernel.stats.

    `interpret` is True or pltpu.InterpretParams, to run without a TPU.
    """
    inputs, layout, _ = _as_it_lies(inputs, layout)
    return forward_stats(inputs, layout, soft_cap, _blocks(block, inputs, layout), interpret)


def gradients(
    inputs: Inputs,
    lse: Float[Array, " T"],
    g: Cotangents,
    *,
    layout: Layout,
    soft_cap: float | None,
    block: Mapping[str, int] | Blocks | None = None,
    grad_dtype: DTypeLike | None = None,
    interpret: Interpret = False,
) -> Gradients:
    """Returns Kernel.gradients; sums in between are float32 (to one unit in its last place)."""
    inputs, layout, turned = _as_it_lies(inputs, layout)
    blocks = _blocks(block, inputs, layout, grad_dtype)
    grads = backward.gradients(inputs, lse, g, layout, soft_cap, grad_dtype, blocks, interpret)
    return grads._replace(lm_head=grads.lm_head.T) if turned else grads


def _blocks(
    given: Mapping[str, int] | Blocks | None,
    inputs: Inputs,
    layout: Layout,
    grad_dtype: DTypeLike | None = None,
) -> Blocks:
    """Returns the given blocks, or those of the tuning table, or planned ones.

    The table is searched for the device of the compilation.

    Raises:
        ConfigError: The given blocks cannot run.
    """
    kind = tuning.device_kind()
    device = device_of(kind)
    (tokens, width), dtype = inputs.hidden.shape, inputs.hidden.dtype
    vocab = vocab_size(inputs.lm_head, layout)
    sizes = sizes_of(tokens, width, vocab, dtype, grad_dtype)
    if given is not None:
        blocks = given if isinstance(given, Blocks) else as_blocks(given)
        if reasons := [*refused_blocks(blocks, device, sizes)]:
            raise ConfigError(
                at="pallas_tpu.blocks",
                problem="; ".join(reasons),
                fix="Leave them None: they are planned for the device.",
            )
        return blocks
    found = tuning.blocks_for(
        kind,
        NAME,
        tokens,
        width,
        vocab,
        dtype,
        default=lambda: plan_blocks(device, sizes)._asdict(),
    )
    return fitted(as_blocks(found), device, sizes)


def _as_it_lies(inputs: Inputs, layout: Layout) -> tuple[Inputs, Layout, bool]:
    """Returns `(inputs, layout, whether lm_head was transposed)`.

    A TPU stores last the dimension of a matrix that needs less padding to tiles of 8 by 128. If it
    is read that way, nothing is copied: the transpose here is only another name for the same bytes.
    """
    rows, columns = inputs.lm_head.shape
    if rounded(rows, 8) * rounded(columns) <= rounded(columns, 8) * rounded(rows):
        return inputs, layout, False
    return inputs._replace(lm_head=inputs.lm_head.T), "vd" if layout == "dv" else "dv", True


BEST, TOTAL, TARGET, SUM = range(4)  # rows of the result


def forward_stats(
    inputs: Inputs, layout: Layout, soft_cap: float | None, blocks: Blocks, interpret: Interpret
) -> LogitStats:
    """Returns Kernel.stats of stats.py."""
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
    """Returns [parts, 8, T] float32: a row each of best, sum of exp(z - best), target and sum
    of z.
    """
    hidden, lm_head, bias, labels = inputs
    (tokens, width), vocab = hidden.shape, vocab_size(lm_head, layout)
    num_columns = cdiv(vocab, blocks.columns)
    per_part = cdiv(num_columns, blocks.parts)

    # A part may end with blocks beyond the vocabulary: they read the last block again and are
    # masked.
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
