"""The loss kernels of TPUs (v5e, v5p, v6e, tpu7x), in Pallas. Forward, backward and rows stand in
files of their own; here is the door.

*strict*: no logits beyond a tile in VMEM. 8·T·D·V FLOPs, forward and backward; bytes: see
blocks.py. Besides its results the backward pass has 2·T·D bytes in HBM (for bfloat16),
and on two TensorCores one block of columns of the head's gradient in float32. Beyond 256 MiB of
these it has none, and 10·T·D·V FLOPs. *fast*: the matrix products are XLA's
(chunked.py); between them `row_step` turns a chunk of logits into its gradient, in place, in one
reading and one writing.

T tokens · D width · V vocabulary · C tokens of a chunk
"""
# ruff: noqa: F722  (shapes in annotations are jaxtyping's, not Python)

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from easypipe.core.errors import ConfigError
from easypipe.kernels.loss.rows import row_options
from easypipe.kernels.loss.stats import (
    Cotangents,
    Gradients,
    Inputs,
    Layout,
    LogitStats,
    ShapedArray,
    vocab_size,
)
from easypipe.kernels.loss.tpu import backward, forward
from easypipe.kernels.loss.tpu.blocks import (
    TOO_SMALL,
    UNKNOWN,
    Blocks,
    as_blocks,
    device_of,
    fitted,
    plan_blocks,
    refused_blocks,
    rounded,
    sizes_of,
)
from easypipe.kernels.loss.tpu.common import Interpret
from easypipe.kernels.loss.tpu.rows import row_gradients, row_stats, row_step
from easypipe.kernels.tuning import table as tuning

__all__ = [
    "VECTOR",
    "gradients",
    "refusals",
    "row_gradients",
    "row_options",
    "row_stats",
    "row_step",
    "stats",
]

NAME = "pallas_tpu"
DTYPES = ("bfloat16", "float32")
VECTOR = 1
MOST_COLUMNS = 1 << 24  # column ids travel as float32


def refusals(hidden: ShapedArray, lm_head: ShapedArray, *, layout: Layout) -> list[str]:
    """Every reason why these arguments cannot run on any TPU from v5e on, or on the one that is
    compiled for where that is an older one.
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
    """Kernel.stats. `interpret`: True or pltpu.InterpretParams, to run without a TPU."""
    inputs, layout, _ = _as_it_lies(inputs, layout)
    return forward.stats(inputs, layout, soft_cap, _blocks(block, inputs, layout), interpret)


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
    """Kernel.gradients; sums are kept in float32 (to one unit in its last place) in between."""
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
    """Those given, refused where they are wrong; else those of the tuning table for the device that
    is compiled for; else as planned.
    """
    kind = tuning.device_kind()
    device = device_of(kind)
    (tokens, width), dtype = inputs.hidden.shape, inputs.hidden.dtype
    vocab = vocab_size(inputs.lm_head, layout)
    sizes = sizes_of(tokens, width, vocab, dtype, grad_dtype)
    if given is not None:
        blocks = given if isinstance(given, Blocks) else as_blocks(given)
        if reasons := refused_blocks(blocks, device, sizes):
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
    """`(inputs, layout, whether lm_head was transposed)`. A TPU stores a matrix with that dimension
    last which needs less padding to tiles of 8 by 128; read so, nothing is copied: the transpose
    here is but another name for the same bytes."""
    rows, columns = inputs.lm_head.shape
    if rounded(rows, 8) * rounded(columns) <= rounded(columns, 8) * rounded(rows):
        return inputs, layout, False
    return inputs._replace(lm_head=inputs.lm_head.T), "vd" if layout == "dv" else "dv", True
