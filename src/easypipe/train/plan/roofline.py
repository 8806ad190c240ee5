"""How fast a training step can be at best: what it computes, moves and sends, by the rates of the
device's data sheet.

Williams, Waterman & Patterson, Roofline, 2009.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from easypipe.train.metrics.peak import Device
from easypipe.train.model.config import ModelConfig
from easypipe.train.model.flops import flops_per_step, matmul_params, palm_flops_per_step


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """Seconds of a step, on every device at once; FLOPs of a step, over all devices."""

    flops: int  # exact: see flops_per_step; rows full of one document each
    palm_flops: int  # see palm_flops_per_step
    # with what is computed again (remat), and what attention computes and hides
    executed_flops: float
    compute_s: float  # executed_flops at the devices' peak
    memory_s: float  # the least that is read and written of HBM
    link_s: float  # what is sent, over all links of a device together
    best_s: float  # all three at once
    worst_s: float  # one after the other
    mfu_at_best: float  # flops / (best_s x peak)
    mfu_at_worst: float
    palm_mfu_at_best: float  # beyond 1 where attention skips what this convention counts
    slots_per_s_at_best: float


def roofline(
    config: ModelConfig,
    device: Device,
    mesh: Mapping[str, int],
    shape: tuple[int, int, int],
    attention: str,
    held: int,
    sent: float,
) -> Roofline:
    """shape: rows of a step over all devices, slots of a row, micro-batches. held: bytes of
    parameters and moments on a device. sent: bytes a step that a device sends.
    """
    batch_size, seq_length, accumulate_steps = shape
    devices, slots = math.prod(mesh.values()), batch_size * seq_length
    flops = flops_per_step(config, [seq_length] * batch_size)
    products = 6 * matmul_params(config) * slots
    scores = flops - products
    # it takes the products of all pairs, and a causal mask hides half of them
    hidden = scores if attention == "xla" else 0
    # of the layers' products
    forward = 2 * (matmul_params(config) - config.hidden_size * config.vocabulary) * slots
    mixing = (scores + hidden) / 3
    again = {"none": 0.0, "dots": mixing if attention == "xla" else 0.0, "full": forward + mixing}[
        config.remat
    ]
    executed = flops + hidden + again
    compute_s = executed / (devices * device.flops)
    memory_s = _least_traffic(config, mesh, slots, accumulate_steps, held) / device.memory_rate
    link_s = sent / device.link_rate
    best, worst, peak = (
        max(compute_s, memory_s, link_s),
        compute_s + memory_s + link_s,
        devices * device.flops,
    )
    palm = palm_flops_per_step(config, slots, seq_length)
    return Roofline(
        flops=flops,
        palm_flops=palm,
        executed_flops=executed,
        compute_s=compute_s,
        memory_s=memory_s,
        link_s=link_s,
        best_s=best,
        worst_s=worst,
        mfu_at_best=flops / (best * peak),
        mfu_at_worst=flops / (worst * peak),
        palm_mfu_at_best=palm / (best * peak),
        slots_per_s_at_best=slots / best,
    )


def _least_traffic(
    config: ModelConfig, mesh: Mapping[str, int], slots: int, accumulate_steps: int, held: int
) -> float:
    """Bytes of HBM on a device: the state and float32 gradients written and read once; of every
    pass, the weights, and each layer's input written once and read once."""
    itemsize = 2 if config.dtype == "bfloat16" else 4
    passes = 3 if config.remat == "full" else 2
    weights = passes * accumulate_steps * matmul_params(config) / mesh["tensor"] * itemsize
    streams = (
        2
        * passes
        * config.num_layers
        * slots
        / (math.prod(mesh.values()) / mesh["tensor"])
        * config.hidden_size
        * itemsize
    )
    gradients = 2 * 4 * matmul_params(config) / (mesh["fsdp"] * mesh["tensor"])
    return 2 * held + gradients + weights + streams
