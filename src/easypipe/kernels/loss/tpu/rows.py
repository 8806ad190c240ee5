"""The sums and gradients of rows of given logits, on a TPU.

Each logit is read once, and its gradient is written over it, once.

R rows with their whole vocabulary stay in VMEM for two passes, one for the four sums and one for
the gradient. In XLA the two passes read the logits two or three times from HBM.

C tokens · V vocabulary · R rows at once · S columns at once
"""
# ruff: noqa: F722  (shapes in annotations are jaxtyping's, not Python)

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, Ref
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Float, Int

from easypipe.kernels.loss.stats import (
    Cotangents,
    LogitStats,
    Objective,
    loss_gradient_inputs,
    soft_cap_slope,
    soft_capped,
)
from easypipe.kernels.loss.tpu.blocks import RESERVED, device_of, row_block
from easypipe.kernels.loss.tpu.common import LOWEST, Interpret, in_steps, shape_like
from easypipe.kernels.tuning import table as tuning

COLUMN_STEP = 2048
NUMBERS = 8  # numbers per token, passed in and returned: as many as a TPU stores together
_Sums = tuple[Array, Array, Array, Array]  # the running sums of some rows


class _Known(NamedTuple):
    """The numbers that are known about a token: float32[C] each, or float32[R, 1] in the kernel."""

    label: Array
    lse: Array | float = 0.0
    g_lse: Array | float = 0.0
    g_target: Array | float = 0.0
    g_sum: Array | float = 0.0
    weight: Array | float = 0.0


def row_stats(
    logits: Float[Array, "C V"],
    labels: Int[Array, " C"],
    *,
    soft_cap: float | None,
    interpret: Interpret = False,
) -> LogitStats:
    """Returns Kernel.row_stats; reads the logits once."""

    def kernel(logits_ref: Ref, known_ref: Ref, out_ref: Ref) -> None:
        out_ref[...] = _packed(_stats(logits_ref, _known(known_ref).label, soft_cap), out_ref)

    (numbers,) = _call(kernel, "loss_row_stats", logits, _Known(labels), ("stats",), interpret)
    return _unpacked(numbers)


def row_gradients(
    logits: Float[Array, "C V"],
    labels: Int[Array, " C"],
    lse: Float[Array, " C"],
    g: Cotangents,
    *,
    soft_cap: float | None,
    interpret: Interpret = False,
) -> Float[Array, "C V"]:
    """Returns Kernel.row_gradients; reads the logits once and writes to the same place once."""

    def kernel(logits_ref: Ref, known_ref: Ref, dx_ref: Ref) -> None:
        _put_gradient(logits_ref, dx_ref, _known(known_ref), soft_cap)

    known = _Known(labels, lse, *g)
    return _call(kernel, "loss_row_gradients", logits, known, ("dx",), interpret)[0]


def row_step(
    logits: Float[Array, "C V"],
    labels: Int[Array, " C"],
    weights: Float[Array, " C"],
    *,
    objective: Objective,
    soft_cap: float | None,
    interpret: Interpret = False,
) -> tuple[Float[Array, "C V"], LogitStats]:
    """Returns Kernel.row_step; reads the logits once and writes to the same place once."""

    def kernel(logits_ref: Ref, known_ref: Ref, dx_ref: Ref, out_ref: Ref) -> None:
        known = _known(known_ref)
        stats = _stats(logits_ref, known.label, soft_cap)
        out_ref[...] = _packed(stats, out_ref)
        shift, g = loss_gradient_inputs(stats, jnp.asarray(known.weight), objective)
        _put_gradient(logits_ref, dx_ref, _Known(known.label, shift, *g), soft_cap)

    known = _Known(labels, weight=weights)
    dx, numbers = _call(kernel, "loss_row_step", logits, known, ("dx", "stats"), interpret)
    return dx, _unpacked(numbers)


def _call(
    kernel: Callable[..., None],
    name: str,
    logits: Array,
    known: _Known,
    results: tuple[str, ...],
    interpret: Interpret,
) -> list[Array]:
    """Calls `kernel(logits_ref, known_ref, *refs of the results)` for some rows at once.

    `results` are "dx", in place of the logits, and "stats", float32[C, 8].
    """
    (tokens, vocab), device = logits.shape, device_of(tuning.device_kind())
    rows = min(tokens, row_block(device, vocab, logits.dtype))
    columns = [jnp.broadcast_to(jnp.asarray(one, jnp.float32), tokens) for one in known]
    nothing = jnp.zeros(tokens, jnp.float32)
    known_C8 = jnp.stack([*columns, nothing, nothing], axis=1)
    whole = pl.BlockSpec((rows, vocab), lambda i: (i, 0))
    narrow = pl.BlockSpec((rows, NUMBERS), lambda i: (i, 0))
    outputs = {
        "dx": (whole, shape_like(logits.shape, logits.dtype, logits)),
        "stats": (narrow, shape_like(known_C8.shape, jnp.float32, logits)),
    }
    return pl.pallas_call(
        kernel,
        out_shape=[outputs[result][1] for result in results],
        grid=(pl.cdiv(tokens, rows),),
        in_specs=[whole, narrow],
        out_specs=[outputs[result][0] for result in results],
        # jax's interpreter has no alias here: it returns aliased arrays that end within a block
        # with the whole block.
        input_output_aliases={0: 0} if "dx" in results and not interpret else {},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=device.vmem - RESERVED
        ),
        interpret=interpret,
        name=name,
    )(logits, known_C8)


def _known(known_ref: Ref) -> _Known:
    return _Known(*(known_ref[:, i : i + 1] for i in range(len(_Known._fields))))


def _packed(stats: LogitStats, out_ref: Ref) -> Array:
    place = jax.lax.broadcasted_iota(jnp.int32, out_ref.shape, 1)
    packed = stats.best
    for i, number in reversed(list(enumerate(stats[:3]))):
        packed = jnp.where(place == i, number, packed)
    return packed


def _unpacked(numbers: Array) -> LogitStats:
    return LogitStats(*(numbers[:, i] for i in range(4)))


def _stats(logits_ref: Ref, label_R1: Array, soft_cap: float | None) -> LogitStats:
    """Returns the four sums of some rows, [R, 1] each, by an online log-sum-exp over columns."""

    def add(part: pl.Slice, running: _Sums) -> _Sums:
        best_R1, total_R1, target_R1, sum_R1 = running
        z_RS, hit_RS = _tile(logits_ref, part, label_R1, soft_cap)
        top_R1 = jnp.maximum(best_R1, z_RS.max(axis=1, keepdims=True))
        total_R1 = total_R1 * jnp.exp(best_R1 - top_R1) + jnp.exp(z_RS - top_R1).sum(
            axis=1, keepdims=True
        )
        target_R1 = target_R1 + jnp.where(hit_RS, z_RS, 0.0).sum(axis=1, keepdims=True)
        return top_R1, total_R1, target_R1, sum_R1 + z_RS.sum(axis=1, keepdims=True)

    zero_R1 = jnp.zeros_like(label_R1)
    start = zero_R1 + LOWEST, zero_R1, zero_R1, zero_R1
    best_R1, total_R1, target_R1, sum_R1 = in_steps(logits_ref.shape[1], COLUMN_STEP, add, start)
    return LogitStats(jnp.log(total_R1), target_R1, sum_R1, best_R1)


def _put_gradient(logits_ref: Ref, dx_ref: Ref, known: _Known, soft_cap: float | None) -> None:
    def put(part: pl.Slice, _: None) -> None:
        z_RS, hit_RS = _tile(logits_ref, part, known.label, soft_cap)
        dz_RS = (
            jnp.exp(z_RS - known.lse) * known.g_lse
            + known.g_sum
            + jnp.where(hit_RS, known.g_target, 0.0)
        )
        dx_ref[:, part] = (dz_RS * soft_cap_slope(z_RS, soft_cap)).astype(dx_ref.dtype)

    in_steps(logits_ref.shape[1], COLUMN_STEP, put, None)


def _tile(
    logits_ref: Ref, part: pl.Slice, label_R1: Array, soft_cap: float | None
) -> tuple[Array, Array]:
    z_RS = soft_capped(logits_ref[:, part].astype(jnp.float32), soft_cap)
    column_RS = part.start + jax.lax.broadcasted_iota(jnp.int32, z_RS.shape, 1)
    return z_RS, column_RS == label_R1.astype(jnp.int32)
