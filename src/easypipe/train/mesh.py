"""The mesh of a run, and batches laid out on it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from easypipe.core.errors import ConfigError, PlacementError, TrainError
from easypipe.train.axes import BATCH_AXES, MESH_AXES
from easypipe.train.config import check_mesh_axes


def make_mesh(axes: Mapping[str, int] | None = None, *, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of all `devices` (default: every device of the run) with the axes data, fsdp and tensor.

    axes: devices along each axis; an axis not named has 1; one may be -1, the devices that remain. Default: all along data.
    Raises ConfigError for an unknown axis and for sizes that do not use every device exactly once.
    """
    devices = list(jax.devices() if devices is None else devices)
    given = {"data": -1} if axes is None else dict(axes)
    check_mesh_axes(given)
    sizes = {axis: given.get(axis, 1) for axis in MESH_AXES}
    fixed = math.prod(size for size in sizes.values() if size != -1)
    wanted = ", ".join(f"{axis}: {size}" for axis, size in sizes.items())
    if len(devices) % fixed or (-1 not in sizes.values() and fixed != len(devices)):
        raise ConfigError(
            at="mesh",
            problem=f"{{{wanted}}} does not fit {len(devices)} {devices[0].platform} device{'s' if len(devices) != 1 else ''}",
            fix=f"Let the sizes multiply to {len(devices)}; {{data: -1}} uses them all.",
        )
    shape = tuple(len(devices) // fixed if size == -1 else size for size in sizes.values())
    return jax.make_mesh(shape, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES), devices=devices)


def batch_shards(mesh: Mesh) -> int:
    """Over how many devices the rows of a batch are spread."""
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def check_batch_size(batch_size: int, mesh: Mesh, accumulate_steps: int = 1, at: str = "batch_size") -> None:
    """Raises PlacementError where micro-batches do not divide over the devices that share them."""
    shards = batch_shards(mesh)
    if batch_size % (shards * accumulate_steps):
        unit = shards * accumulate_steps
        below, above = batch_size // unit * unit, -(-batch_size // unit) * unit
        axes = ", ".join(f"{axis} {mesh.shape[axis]}" for axis in BATCH_AXES)
        raise PlacementError(
            at=at,
            problem=f"{batch_size} rows do not divide by the mesh ({axes}) times accumulate_steps {accumulate_steps}",
            fix=f"Use {' or '.join(str(n) for n in (below, above) if n)} rows.",
        )


def place_batch(batch: Mapping[str, Any], mesh: Mesh, *, rows: int | None = None, in_micro_batches: bool = False) -> dict[str, jax.Array]:
    """The arrays of `batch`, rows spread over data and fsdp; those that lie there already are passed on untouched.

    batch: [B, ...] NumPy arrays or jax.Arrays of the global batch. rows: pad to this many with slots that train nothing (0, and -100
    for labels).
    in_micro_batches: arrays are [A, B/A, ...], and their second axis is spread.
    Raises PlacementError for rows that do not divide, TrainError for arrays of which other processes hold parts.
    """
    axis = 1 if in_micro_batches else 0
    sharding = NamedSharding(mesh, PartitionSpec(*(None,) * axis, BATCH_AXES))
    placed = {}
    for name, value in batch.items():
        if rows is not None and value.shape[0] < rows:
            value = _padded(name, value, rows)
        if isinstance(value, jax.Array) and value.sharding == sharding:
            placed[name] = value
            continue
        if value.shape[axis] % batch_shards(mesh):
            check_batch_size(value.shape[axis], mesh, at=f"batch.{name}")
        if jax.process_count() > 1:
            raise TrainError(
                at=f"batch.{name}",
                problem="a host array, or one laid out for another mesh, in a run of several processes",
                fix="Give the loader this run's mesh: LoadStageConfig(mesh=make_mesh(...)).",
            )
        placed[name] = jax.device_put(value, sharding)
    return placed


def _padded(name: str, value: Any, rows: int) -> np.ndarray:
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        raise TrainError(at=f"batch.{name}", problem="a short batch that other processes hold parts of", fix="Set drop_last: true.")
    missing = rows - value.shape[0]
    fill = -100 if name == "labels" else 0
    return np.concatenate([np.asarray(value), np.full((missing, *value.shape[1:]), fill, value.dtype)])
