"""The device mesh of a run: whether sizes fit it, what its rules mean, batches placed on it.

Mesh axes are `data` (replicas), `fsdp` (replicas that share the parameters), `sequence` (parts of a
row), `tensor` (parts of a layer). Parameters name their dimensions by meaning ("embed", "heads",
...); `rules()` turns meanings into mesh axes when the arrays are created. Without a mesh everything
is on one device.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax import Array
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding
from jax.sharding import PartitionSpec as P

from easypipe.core.errors import ConfigError, PlacementError, TrainError, require
from easypipe.core.schema import IGNORE, LABELS
from easypipe.core.values import Columns, Settings
from easypipe.train.parallel.config import (
    BATCH_AXES,
    MESH_AXES,
    RULES,
    Axes,
    MeshConfig,
    axes_of,
    mesh_config,
)


def make_mesh(
    mesh: MeshConfig | Settings | str | None = None,
    *,
    devices: Sequence[Any] | None = None,
    at: str = "mesh",
) -> Mesh:
    """Returns a mesh of all `devices` with the axes data, fsdp, sequence and tensor.

    Under the preset hybrid, devices that are neighbours along any axis except data are joined by
    fast links.

    Args:
        mesh: A MeshConfig, the name of a preset, or sizes by axis; one of them may be -1, for the
            remaining devices. Default: all along data.
        devices: The devices; default: every device of the run.
        at: The key path for error messages.

    Raises:
        ConfigError: An axis or preset is unknown, or the sizes do not use every device exactly
            once.
    """
    config = mesh_config(mesh, at)
    devices = list(jax.devices() if devices is None else devices)
    groups = _groups(devices) if config.preset == "hybrid" else {0: len(devices)}
    sizes = _fitted(config, devices, groups, at)
    kinds = (AxisType.Auto,) * len(MESH_AXES)
    if len(groups) == 1:
        return jax.make_mesh(tuple(sizes.values()), MESH_AXES, axis_types=kinds, devices=devices)
    across = tuple(len(groups) if axis == "data" else 1 for axis in MESH_AXES)
    within = tuple(size // ways for size, ways in zip(sizes.values(), across, strict=True))
    by_process = _slices(devices) is None
    grid = mesh_utils.create_hybrid_device_mesh(
        within, across, devices, process_is_granule=by_process
    )
    return Mesh(grid, MESH_AXES, axis_types=kinds)


def _slices(devices: Sequence[Any]) -> list[int] | None:
    """Returns the slice of each device, or None if the platform does not have several slices.

    Slices are TPU slices, or GPUs that one fabric joins.
    """
    found = [getattr(device, "slice_index", 0) for device in devices]  # not every platform has it
    return found if len(set(found)) > 1 else None


def _groups(devices: Sequence[Any]) -> dict[int, int]:
    """Returns the number of devices in each group that fast links join.

    A group is a slice, or a process if the platform has no slices; all TPUs are one group then.
    """
    slices = _slices(devices)
    if slices is None and devices[0].platform == "tpu":
        return {0: len(devices)}
    return Counter(slices or [device.process_index for device in devices])


def _fitted(
    config: MeshConfig, devices: Sequence[Any], groups: Mapping[int, int], at: str
) -> dict[str, int]:
    """Returns the number of devices of every axis.

    Raises:
        ConfigError: The sizes do not multiply to the number of devices, or do not fit the groups.
    """
    sizes, count = config.sizes(slow=len(groups)), len(devices)
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if count % fixed or (-1 not in sizes.values() and fixed != count):
        fitting, rest = {}, count
        # A suggestion near the given sizes, with the rest along data.
        for axis in ("tensor", "sequence", "fsdp"):
            most = max(1, min(sizes[axis], rest))
            fitting[axis] = max(n for n in range(1, most + 1) if rest % n == 0)
            rest //= fitting[axis]
        such = _named({"data": rest, **{axis: n for axis, n in reversed(fitting.items()) if n > 1}})
        raise ConfigError(
            at=at,
            problem=f"{_named(sizes)} does not fit {count} {devices[0].platform} "
            f"device{'s' if count != 1 else ''}",
            fix=f"Let the sizes multiply to {count}, such as {such}; {{data: -1}} uses them all.",
        )
    sizes = {axis: count // fixed if size == -1 else size for axis, size in sizes.items()}
    each = sorted(set(groups.values()))
    require(
        len(each) <= 1,
        f"{at}.preset",
        f"hybrid needs hosts of one size, but these have {', '.join(map(str, each))} devices",
        "Choose another preset, or hosts of one kind.",
    )
    require(
        sizes["data"] % len(groups) == 0,
        f"{at}.data",
        f"hybrid puts data across {len(groups)} hosts or slices, and {_named(sizes)} has "
        f"{sizes['data']} along it",
        f"Let fsdp x sequence x tensor divide the {count // len(groups)} devices of one.",
    )
    return sizes


def _named(sizes: Mapping[str, int]) -> str:
    return f"{{{', '.join(f'{axis}: {size}' for axis, size in sizes.items())}}}"


def checked_mesh(mesh: Mesh) -> Mesh:
    """Returns a mesh from elsewhere if it has the axes of `make_mesh`.

    Raises:
        ConfigError: It lacks an axis.
    """
    if missing := [axis for axis in MESH_AXES if axis not in mesh.axis_names]:
        problem = f"has no axis {', '.join(missing)}"
        raise ConfigError(
            at="mesh",
            problem=problem,
            have=mesh.axis_names,
            fix="Make it with easypipe.train.parallel.mesh.make_mesh.",
        )
    return mesh


def batch_shards(mesh: Mesh) -> int:
    """Returns the number of devices over which the rows of a batch are divided."""
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def check_batch_size(
    batch_size: int, mesh: Mesh, accumulate_steps: int = 1, at: str = "batch_size"
) -> None:
    """Checks that micro-batches divide evenly over the devices that share their rows.

    Raises:
        PlacementError: They do not divide evenly.
    """
    shards = batch_shards(mesh)
    if batch_size % (shards * accumulate_steps):
        unit = shards * accumulate_steps
        below, above = batch_size // unit * unit, -(-batch_size // unit) * unit
        axes = ", ".join(f"{axis} {mesh.shape[axis]}" for axis in BATCH_AXES)
        raise PlacementError(
            at=at,
            problem=f"{batch_size} rows do not divide by the mesh ({axes}) times accumulate_steps "
            f"{accumulate_steps}",
            fix=f"Use {' or '.join(str(n) for n in (below, above) if n)} rows.",
        )


def check_row_length(slots: int, mesh: Mesh, at: str = "seq_length") -> None:
    """Checks that rows of this many slots divide evenly over the devices that share a row.

    Raises:
        PlacementError: They do not divide evenly.
    """
    parts = mesh.shape["sequence"]
    if slots % parts:
        problem = f"rows of {slots} slots do not divide over mesh axis 'sequence' of {parts}"
        raise PlacementError(
            at=at,
            problem=problem,
            fix=f"Choose a seq_length that {parts} divides, or a smaller axis.",
        )


def place_batch(
    batch: Columns, mesh: Mesh, *, rows: int | None = None, in_micro_batches: bool = False
) -> dict[str, jax.Array]:
    """Puts the arrays of `batch` on the mesh, rows over data and fsdp, slots over sequence.

    Arrays that already have that sharding are returned unchanged.

    Args:
        batch: [B, ...] NumPy arrays or jax.Arrays of the global batch.
        mesh: The mesh.
        rows: Pad to this many rows with slots that do not count in the loss (0, and -100 for
            labels).
        in_micro_batches: Whether arrays are [A, B/A, ...], whose second axis is then divided.

    Raises:
        PlacementError: Rows or slots do not divide evenly.
        TrainError: A value is not an array of numbers, or other processes hold parts of an array
            that would have to move.
    """
    axis = 1 if in_micro_batches else 0
    placed = {}
    for name, value in batch.items():
        at = f"batch.{name}"
        _check_column(at, value, axis)
        over = ["sequence"] * (value.ndim > axis + 1)
        where = NamedSharding(mesh, PartitionSpec(*[None] * axis, BATCH_AXES, *over))
        if rows is not None and value.shape[0] < rows:
            value = _padded(name, value, rows)
        if isinstance(value, jax.Array) and _lies(value.sharding, where, value.ndim):
            placed[name] = value
            continue
        if value.shape[axis] % batch_shards(mesh):
            check_batch_size(value.shape[axis], mesh, at=at)
        if over:
            check_row_length(value.shape[axis + 1], mesh, at=at)
        if jax.process_count() > 1:
            problem = (
                "a host array, or one laid out for another mesh, in a run of several processes"
            )
            fix = "Give the loader this run's mesh: LoadStageConfig(mesh=make_mesh(...))."
            raise TrainError(at=at, problem=problem, fix=fix)
        placed[name] = jax.device_put(value, where)
    return placed


def _check_column(at: str, value: object, axis: int) -> None:
    """Checks that a value of a batch is an array of numbers whose dimension `axis` is rows.

    Raises:
        TrainError: It is not.
    """
    what = type(value).__name__
    if isinstance(value, jax.Array | np.ndarray):
        if value.ndim > axis and (isinstance(value, jax.Array) or value.dtype.kind not in "OSUMm"):
            return
        what = f"{value.dtype} of shape {value.shape}"
    problem = f"{what}, not an array of numbers in rows"
    raise TrainError(at=at, problem=problem, fix="Let the loader yield such arrays alone.")


def _lies(found: Sharding, wanted: NamedSharding, ndim: int) -> bool:
    """Returns whether a sharding is equivalent to the wanted one on the same mesh."""
    on_mesh = isinstance(found, NamedSharding) and found.mesh == wanted.mesh
    return on_mesh and found.is_equivalent_to(wanted, ndim)


def _padded(name: str, value: jax.Array | np.ndarray, rows: int) -> np.ndarray:
    """Pads an array to `rows` rows.

    Raises:
        TrainError: Other processes hold parts of it.
    """
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        problem = "a short batch that other processes hold parts of"
        raise TrainError(at=f"batch.{name}", problem=problem, fix="Set drop_last: true.")
    missing = [(0, rows - len(value)), *[(0, 0)] * (value.ndim - 1)]
    return np.pad(value, missing, constant_values=IGNORE if name == LABELS else 0)


TOKEN_AXES = (BATCH_AXES, "sequence")  # mesh axes of the rows of a batch and of their slots

_rules: contextvars.ContextVar[Mapping[str, Axes]] = contextvars.ContextVar(
    "easypipe_axis_rules", default=RULES
)


def rules() -> Mapping[str, Axes]:
    """Returns the mesh axes of each meaning of a dimension.

    The innermost `under` sets them; the default is RULES.
    """
    return _rules.get()


@contextlib.contextmanager
def under(rules: Mapping[str, Axes] | None) -> Generator[None, None, None]:
    """Sets the rules inside a `with` block; None keeps those that already apply."""
    token = _rules.set(_rules.get() if rules is None else rules)
    try:
        with nnx.logical_axis_rules(tuple(_rules.get().items())):
            yield
    finally:
        _rules.reset(token)


def on_mesh() -> bool:
    """Returns whether a mesh with all of MESH_AXES is set (`jax.set_mesh`)."""
    return set(MESH_AXES) <= set(jax.sharding.get_abstract_mesh().axis_names)


def partitioned(init: Callable[..., Array], *axes: str | None) -> Callable[..., Array]:
    """Returns `init` for a parameter; `axes` are the meanings of its dimensions.

    On a mesh the parameter is created sharded by `rules()`; it is always labelled with `axes`.
    """
    return nnx.with_metadata(
        init, out_sharding=axes, sharding_rules=tuple(rules().items()), eager_sharding=on_mesh()
    )


def vocab_axes() -> tuple[str, ...]:
    """Returns the axes over which logits are divided.

    They are those of the vocabulary that do not divide rows.
    """
    return tuple(axis for axis in axes_of(rules()["vocab"]) if axis not in BATCH_AXES)


def constrain(array: Array, *axes: str | Sequence[str] | None) -> Array:
    """Constrains `array` to a sharding over `axes`, one entry per dimension.

    It does nothing without a mesh.

    A dimension that its axes do not divide stays whole. This is for activations, whose batch may be
    small (sampling, evaluation); training batches are checked when they are placed.
    """
    if not on_mesh():
        return array
    return jax.lax.with_sharding_constraint(
        array, P(*(fitting(size, names) for size, names in zip(array.shape, axes, strict=True)))
    )


def fitting(size: int, axes: str | Sequence[str] | None) -> tuple[str, ...] | None:
    """Returns `axes` of the current mesh if they divide a dimension of `size`, or None."""
    shape = jax.sharding.get_abstract_mesh().shape
    names = (axes,) if isinstance(axes, str) else tuple(axes or ())
    return names if names and size % math.prod(shape[name] for name in names) == 0 else None
