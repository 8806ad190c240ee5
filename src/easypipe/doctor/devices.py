"""Checks of a run on the devices of this machine: placement of batches, memory of a step."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import jax
import numpy as np

from easypipe.core.errors import ConfigError
from easypipe.doctor.check import Check, Failed, Skipped
from easypipe.doctor.data import Sample
from easypipe.run import ROW_LENGTH, RunConfig, plan_on
from easypipe.train.parallel.mesh import make_mesh
from easypipe.train.plan.topology import Topology

# The least fraction of a device's memory that must stay free: a tighter step fails on a longer
# batch.
HEADROOM = 0.05


def device_checks(run: RunConfig, sample: Sample) -> Sequence[Check]:
    return [
        Check("batches lie on their devices", partial(batches_lie_on_their_devices, run, sample)),
        Check("memory headroom", partial(memory_headroom, run)),
    ]


def batches_lie_on_their_devices(run: RunConfig, sample: Sample) -> str:
    """Checks that every device of the run's mesh holds only its own rows and slots of a batch."""
    mesh = make_mesh(run.train.mesh, at="train.mesh")
    placed = next(iter(sample.loader(dataclasses.replace(sample.load, mesh=mesh))))
    for name, host in sample.batches[0].items():
        array = placed[name]
        if array.shape != host.shape:
            raise Skipped("the sample makes no full batch")
        if array.sharding.device_set != set(mesh.devices.flat):
            raise Failed(f"{name} lies on {array.sharding.device_set}, the mesh is {mesh}")
        for shard in array.addressable_shards:
            # of float64 and int64 a device holds the 32 bits
            own = host[shard.index].astype(jax.dtypes.canonicalize_dtype(host.dtype))
            if not np.array_equal(shard.data, own):
                raise Failed(f"{shard.device} holds other values of {name} than {shard.index}")
    sizes = " ".join(f"{axis}={size}" for axis, size in mesh.shape.items() if size > 1)
    return f"{mesh.size} device{'s' * (mesh.size > 1)}{sizes and f': {sizes}'}"


def memory_headroom(run: RunConfig) -> str:
    """Checks that a step of the whole model, as XLA compiles it, leaves some memory free."""
    devices = jax.devices()
    if jax.process_count() > 1:
        raise Skipped("devices of several processes: `easypipe plan --topology` tells")
    try:
        plan = plan_on(run, Topology("this machine", devices))
    except ConfigError as error:
        if error.at != ROW_LENGTH:
            raise
        raise Skipped(str(error)) from error
    taken, there = plan.memory.peak, (devices[0].memory_stats() or {}).get("bytes_limit")
    if devices[0].platform == "cpu":
        there = _free_memory() // len(devices)
    if there is None:
        raise Skipped(f"a step takes {taken / 1e6:,.0f} MB; the memory of the device is not known")
    says = f"a step takes {taken / 1e6:,.0f} MB of the {there / 1e6:,.0f} MB of a device"
    if plan.memory.refused or taken > there * (1 - HEADROOM):
        advice = "; ".join(plan.advice) or "a smaller batch, or more devices"
        raise Failed(f"{says}, less than {HEADROOM:.0%} is left. What helps: {advice}")
    return f"{says}: {1 - taken / there:.0%} is left"


def _free_memory() -> int:
    """Returns how many bytes of the machine's memory a program may use."""
    known = Path("/proc/meminfo")
    free = re.search(r"MemAvailable:\s+(\d+) kB", known.read_text()) if known.exists() else None
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return total if free is None else int(free[1]) * 1024
