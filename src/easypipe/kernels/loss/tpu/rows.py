"""Logits that are at hand, to their gradient, on a TPU: each is read once and its gradient is
written over it, once.

R rows with their whole vocabulary stay in VMEM while they are passed twice: once for the four sums,
once for the gradient. In XLA the two passes are two or three readings of the logits from HBM.

C tokens · V vocabulary · R rows at once · S columns at once
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from easypipe.kernels.loss.stats import (
    Cotangents,
    LogitStats,
    Objective,
    about_best,
    loss_cotangents,
    soft_cap_slope,
    soft_capped,
)
from easypipe.kernels.loss.tpu.blocks import RESERVED, Device, row_block
from easypipe.kernels.loss.tpu.loops import LOWEST, in_steps, shape_like

COLUMN_STEP = 2048
NUMBERS = 8  # per token, given and returned: as many as a TPU stores together


class _Given(NamedTuple):
    """Float32[R, 1] each."""

    label: Array
    lse: Array
    g_lse: Array
    g_target: Array
    g_sum: Array
    weight: Array


def row_stats(
    logits: Array, labels: Array, soft_cap: float | None, device: Device, interpret: Any
) -> LogitStats:
    _, stats = _call(
        "loss_row_stats",
        logits,
        {"label": labels},
        None,
        soft_cap,
        device,
        interpret,
        with_stats=True,
        with_gradient=False,
    )
    return stats


def row_gradients(
    logits: Array,
    labels: Array,
    lse: Array,
    g: Cotangents,
    soft_cap: float | None,
    device: Device,
    interpret: Any,
) -> Array:
    known = {"label": labels, "lse": lse, "g_lse": g.lse, "g_target": g.target, "g_sum": g.sum}
    dx, _ = _call(
        "loss_row_gradients",
        logits,
        known,
        None,
        soft_cap,
        device,
        interpret,
        with_stats=False,
        with_gradient=True,
    )
    return dx


def row_step(
    logits: Array,
    labels: Array,
    weights: Array,
    objective: Objective,
    soft_cap: float | None,
    device: Device,
    interpret: Any,
) -> tuple[Array, LogitStats]:
    known = {"label": labels, "weight": weights}
    return _call(
        "loss_row_step",
        logits,
        known,
        objective,
        soft_cap,
        device,
        interpret,
        with_stats=True,
        with_gradient=True,
    )


def _call(
    name: str,
    logits: Array,
    known: dict[str, Array],
    objective,
    soft_cap,
    device: Device,
    interpret,
    *,
    with_stats: bool,
    with_gradient: bool,
) -> Any:
    tokens, vocab = logits.shape
    rows = row_block(device, vocab, logits.dtype)
    if tokens < rows:
        rows = tokens
    nothing = jnp.zeros(tokens, jnp.float32)
    columns = [known.get(field, nothing).astype(jnp.float32) for field in _Given._fields]
    known_C8 = jnp.stack([*columns, nothing, nothing], axis=1)
    whole, narrow = (
        pl.BlockSpec((rows, vocab), lambda i: (i, 0)),
        pl.BlockSpec((rows, NUMBERS), lambda i: (i, 0)),
    )
    out_specs, out_shape = [], []
    if with_gradient:
        out_specs.append(whole)
        out_shape.append(shape_like(logits.shape, logits.dtype, logits))
    if with_stats:
        out_specs.append(narrow)
        out_shape.append(shape_like(known_C8.shape, jnp.float32, logits))

    def kernel(logits_ref, known_ref, *out_refs):
        given = _Given(*(known_ref[:, i : i + 1] for i in range(len(_Given._fields))))
        if with_stats:
            stats = _stats(logits_ref, given.label, soft_cap)
            place = jax.lax.broadcasted_iota(jnp.int32, known_ref.shape, 1)
            packed = jnp.where(
                place == 0,
                stats.log_sum,
                jnp.where(place == 1, stats.target, jnp.where(place == 2, stats.sum, stats.best)),
            )
            out_refs[-1][...] = packed
            if objective is not None:
                shift, g = about_best(
                    stats.best, stats.log_sum, loss_cotangents(stats.lse, given.weight, objective)
                )
                given = given._replace(lse=shift, g_lse=g.lse, g_target=g.target, g_sum=g.sum)
        if with_gradient:
            _gradient(logits_ref, out_refs[0], given, soft_cap)

    results = pl.pallas_call(
        kernel,
        out_shape=out_shape,
        grid=(pl.cdiv(tokens, rows),),
        in_specs=[whole, narrow],
        out_specs=out_specs,
        # Not in jax's interpreter, which returns aliased arrays that end within a block with the
        # whole block.
        input_output_aliases={0: 0} if with_gradient and not interpret else {},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=device.vmem - RESERVED
        ),
        interpret=interpret,
        name=name,
    )(logits, known_C8)
    dx = results[0] if with_gradient else None
    if not with_stats:
        return dx, None
    numbers = results[-1]
    return dx, LogitStats(*(numbers[:, i] for i in range(4)))


def _stats(logits_ref: Any, label_R1: Array, soft_cap: float | None) -> LogitStats:
    def add(part, running):
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


def _gradient(logits_ref: Any, dx_ref: Any, given: _Given, soft_cap: float | None) -> None:
    def put(part, _):
        z_RS, hit_RS = _tile(logits_ref, part, given.label, soft_cap)
        dz_RS = (
            jnp.exp(z_RS - given.lse) * given.g_lse
            + given.g_sum
            + jnp.where(hit_RS, given.g_target, 0.0)
        )
        dx_ref[:, part] = (dz_RS * soft_cap_slope(z_RS, soft_cap)).astype(dx_ref.dtype)

    in_steps(logits_ref.shape[1], COLUMN_STEP, put, None)


def _tile(
    logits_ref: Any, part: Any, label_R1: Array, soft_cap: float | None
) -> tuple[Array, Array]:
    z_RS = soft_capped(logits_ref[:, part].astype(jnp.float32), soft_cap)
    column_RS = part.start + jax.lax.broadcasted_iota(jnp.int32, z_RS.shape, 1)
    return z_RS, column_RS == label_R1.astype(jnp.int32)
