"""Which dimension of which array lies on which mesh axis: the only place that knows.

Mesh axes are `data` (replicas), `fsdp` (replicas that share the parameters), `tensor` (parts of a layer). Parameters name their dimensions
by meaning ("embed", "heads", ...); RULES turns meanings into mesh axes where the arrays are born. Without a mesh all lives on one device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec as P

MESH_AXES = ("data", "fsdp", "tensor")
BATCH_AXES = ("data", "fsdp")
RULES = (("embed", "fsdp"), ("heads", "tensor"), ("mlp", "tensor"), ("vocab", "tensor"), ("layers", None))


def on_mesh() -> bool:
    """True inside `jax.set_mesh` of a mesh with all of MESH_AXES."""
    return set(MESH_AXES) <= set(jax.sharding.get_abstract_mesh().axis_names)


def partitioned(init: Callable[..., Array], *axes: str | None) -> Callable[..., Array]:
    """`init` for a parameter whose dimensions mean `axes`: born sharded by RULES on a mesh, and always labelled with them."""
    return nnx.with_metadata(init, out_sharding=axes, sharding_rules=RULES, eager_sharding=on_mesh())


def constrain(array: Array, *axes: str | Sequence[str] | None) -> Array:
    """`array` laid out over `axes`, one entry a dimension; unchanged without a mesh.

    A dimension that its axes do not divide stays whole: this is for activations, whose batch may be small (sampling, evaluation);
    training batches are checked where they are placed.
    """
    if not on_mesh():
        return array
    return jax.lax.with_sharding_constraint(array, P(*(fitting(size, names) for size, names in zip(array.shape, axes, strict=True))))


def fitting(size: int, axes: str | Sequence[str] | None) -> tuple[str, ...] | None:
    """`axes` of the mesh in `jax.set_mesh`, where together they divide a dimension of `size`; else None."""
    shape = jax.sharding.get_abstract_mesh().shape
    names = (axes,) if isinstance(axes, str) else tuple(axes or ())
    return names if names and size % math.prod(shape[name] for name in names) == 0 else None
