"""Which dimension of which array lies on which mesh axis: the only place that knows.

Mesh axes are `data` (replicas), `fsdp` (replicas that share the parameters), `sequence` (parts of a
row), `tensor` (parts of a layer). Parameters name their dimensions by meaning ("embed", "heads",
...); `rules()` turns meanings into mesh axes where the arrays are born. Without a mesh all lives on
one device.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec as P

from easypipe.train.parallel.config import BATCH_AXES, MESH_AXES, RULES, Axes, axes_of

__all__ = [
    "BATCH_AXES",
    "MESH_AXES",
    "TOKEN_AXES",
    "constrain",
    "fitting",
    "on_mesh",
    "partitioned",
    "rules",
    "under",
    "vocab_axes",
]

TOKEN_AXES = (BATCH_AXES, "sequence")  # of the rows of a batch and of their slots

_rules: contextvars.ContextVar[Mapping[str, Axes]] = contextvars.ContextVar(
    "easypipe_axis_rules", default=RULES
)


def rules() -> Mapping[str, Axes]:
    """Meaning of a dimension → mesh axes, as in the innermost `under`; else RULES."""
    return _rules.get()


@contextlib.contextmanager
def under(rules: Mapping[str, Axes] | None) -> Iterator[None]:
    """Where these rules hold; None: those that hold already."""
    token = _rules.set(_rules.get() if rules is None else rules)
    try:
        with nnx.logical_axis_rules(tuple(_rules.get().items())):
            yield
    finally:
        _rules.reset(token)


def on_mesh() -> bool:
    """True inside `jax.set_mesh` of a mesh with all of MESH_AXES."""
    return set(MESH_AXES) <= set(jax.sharding.get_abstract_mesh().axis_names)


def partitioned(init: Callable[..., Array], *axes: str | None) -> Callable[..., Array]:
    """`init` for a parameter whose dimensions mean `axes`: born sharded by `rules()` on a mesh, and
    always labelled with them.
    """
    return nnx.with_metadata(
        init, out_sharding=axes, sharding_rules=tuple(rules().items()), eager_sharding=on_mesh()
    )


def vocab_axes() -> tuple[str, ...]:
    """The axes over which logits are divided: those of the vocabulary that do not divide the
    rows.
    """
    return tuple(axis for axis in axes_of(rules()["vocab"]) if axis not in BATCH_AXES)


def constrain(array: Array, *axes: str | Sequence[str] | None) -> Array:
    """`array` laid out over `axes`, one entry a dimension; unchanged without a mesh.

    A dimension that its axes do not divide stays whole: this is for activations, whose batch may be
    small (sampling, evaluation); training batches are checked where they are placed.
    """
    if not on_mesh():
        return array
    return jax.lax.with_sharding_constraint(
        array, P(*(fitting(size, names) for size, names in zip(array.shape, axes, strict=True)))
    )


def fitting(size: int, axes: str | Sequence[str] | None) -> tuple[str, ...] | None:
    """`axes` of the mesh in `jax.set_mesh`, where together they divide a dimension of `size`; else
    None.
    """
    shape = jax.sharding.get_abstract_mesh().shape
    names = (axes,) if isinstance(axes, str) else tuple(axes or ())
    return names if names and size % math.prod(shape[name] for name in names) == 0 else None
