"""What a run trains, as one pytree with a place on the mesh for every array.

The model's arrays are held flat, by dotted name ("layers.gate.kernel"), so that the optimizer, the
checkpoint and error messages all speak of the same names. A StateLayout knows shapes, dtypes and
shardings before any array exists.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from easypipe.core.errors import ConfigError, did_you_mean
from easypipe.train.optim.optimizers import Optimizer
from easypipe.train.parallel.axes import rules as rules_here
from easypipe.train.parallel.axes import under
from easypipe.train.parallel.config import RULES, Axes, axes_of

Arrays = dict[str, jax.Array]
Path = tuple[Any, ...]


class TrainState(NamedTuple):
    """params: Arrays, what the optimizer moves. rest: Arrays, what else the model has (dropout
    keys, ..., parameters that are frozen).
    step: Int32[], steps taken.

    The same shape holds abstract arrays and shardings.
    """

    params: Any
    rest: Any
    optimizer: Any
    step: Any


@dataclass(frozen=True)
class ModelLayout:
    """How a model comes apart into named arrays and together again, and where each lies."""

    graph: nnx.GraphDef
    paths: Mapping[str, Path]
    params: Mapping[str, jax.ShapeDtypeStruct]  # with shardings
    rest: Mapping[str, jax.ShapeDtypeStruct]
    # random keys are held as their uint32 data, which every checkpoint format takes
    key_impls: Mapping[str, Any]
    decays: Mapping[str, bool]  # True for matrices
    hidden: Mapping[str, bool]  # True for matrices that are neither an embedding nor the head
    # of `rest`: parameters that are not trained, which checkpoints leave out
    frozen: frozenset[str]
    trained: type[nnx.Variable]  # params are the variables of this type
    mesh: Mesh
    # mesh axes over which optimizer state is divided besides (ZeRO-1: Rajbhandari et al., 2020)
    spread: tuple[str, ...] = ()

    def merge(self, params: Mapping[str, jax.Array], rest: Mapping[str, jax.Array]) -> nnx.Module:
        """The module these arrays make up."""
        nested: dict[Any, Any] = {}
        for name, value in (*params.items(), *rest.items()):
            node = nested
            *parents, last = self.paths[name]
            for key in parents:
                node = node.setdefault(key, {})
            impl = self.key_impls.get(name)
            node[last] = value if impl is None else jax.random.wrap_key_data(value, impl=impl)
        return nnx.merge(self.graph, nested)

    def split(self, model: nnx.Module) -> tuple[Arrays, Arrays]:
        """(params, rest) of a module of this layout."""
        _, params, rest = nnx.split(model, self.trained, ...)
        return _arrays(params), _arrays(rest)

    def without_frozen(self, named: Mapping[str, Any]) -> dict[str, Any]:
        """What `flatten` gave, as a checkpoint holds it."""
        return {
            name: value
            for name, value in named.items()
            if name.removeprefix("rest/") not in self.frozen
        }


def layout_of(
    model: nnx.Module,
    mesh: Mesh,
    trained: type[nnx.Variable] = nnx.Param,
    *,
    spread: tuple[str, ...] = (),
) -> ModelLayout:
    """The layout of `model`, whose arrays may be abstract (nnx.eval_shape). Raises ConfigError for
    a sharding that cannot be.

    trained: nnx.LoRAParam where only adapters move. spread: see ModelLayout.
    """
    graph, params, rest = nnx.split(model, trained, ...)
    variables = {
        _name(path): (path, variable)
        for path, variable in (*nnx.to_flat_state(params), *nnx.to_flat_state(rest))
    }
    values = {name: variable.get_value() for name, (_, variable) in variables.items()}
    key_impls = {
        name: _key_impl(value)
        for name, value in values.items()
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    }
    abstract = {}
    for name, (_, variable) in variables.items():
        value = (
            jax.eval_shape(jax.random.key_data, values[name]) if name in key_impls else values[name]
        )
        spec = PartitionSpec() if name in key_impls else _spec(name, variable, value.shape, mesh)
        abstract[name] = jax.ShapeDtypeStruct(
            value.shape, value.dtype, sharding=NamedSharding(mesh, spec)
        )
    names = [_name(path) for path, _ in nnx.to_flat_state(params)]
    decays = {name: _is_matrix(name, variables[name][1], abstract[name].shape) for name in names}
    return ModelLayout(
        graph=graph,
        paths={name: path for name, (path, _) in variables.items()},
        params={name: abstract[name] for name in names},
        rest={name: value for name, value in abstract.items() if name not in names},
        key_impls=key_impls,
        decays=decays,
        hidden={
            name: is_matrix and not _is_vocabulary(name, variables[name][1])
            for name, is_matrix in decays.items()
        },
        frozen=frozenset(
            _name(path)
            for path, variable in nnx.to_flat_state(rest)
            if isinstance(variable, nnx.Param)
        ),
        trained=trained,
        mesh=mesh,
        spread=spread,
    )


@contextlib.contextmanager
def on(mesh: Mesh, rules: Mapping[str, Axes] | None = None) -> Iterator[None]:
    """Where models are built and steps are traced: PartitionSpecs and the names of `rules` mean
    this mesh; None: the rules that hold.
    """
    with jax.set_mesh(mesh), under(rules):
        yield


def abstract_state(layout: ModelLayout, optimizer: Optimizer) -> TrainState:
    """Shape, dtype and sharding of every array of the state: what to compile against and what to
    restore into.

    A moment lies where its parameter lies; a factored one keeps the axes of the dimensions that it
    has; all are divided over `layout.spread` besides, where a dimension can be; counters are on
    every device.
    """
    everywhere = NamedSharding(layout.mesh, PartitionSpec())
    params = dict(layout.params)

    def placed(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
        keys = [getattr(key, "key", getattr(key, "name", None)) for key in path]
        of = params.get(str(keys[-1])) if keys else None
        spec = (
            PartitionSpec()
            if of is None
            else _moment_spec(
                leaf.shape,
                of,
                from_the_right=not {"v_col", "right", "right_basis"}.isdisjoint(keys),
            )
        )
        return jax.ShapeDtypeStruct(
            leaf.shape,
            leaf.dtype,
            sharding=NamedSharding(layout.mesh, _spread(spec, leaf.shape, layout)),
        )

    moments = jax.tree_util.tree_map_with_path(placed, jax.eval_shape(optimizer.init, params))
    return TrainState(
        params, dict(layout.rest), moments, jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere)
    )


def gradient_places(layout: ModelLayout) -> dict[str, NamedSharding]:
    """Where gradients are summed: as moments lie, so that each device sums what it updates."""
    return {
        name: NamedSharding(layout.mesh, _spread(leaf.sharding.spec, leaf.shape, layout))  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
        for name, leaf in layout.params.items()
    }


def init_state(
    build: Callable[[], nnx.Module], layout: ModelLayout, optimizer: Optimizer
) -> TrainState:
    """A new state, every array born where it belongs: no device ever holds more than its part. Call
    inside `on(mesh)`.
    """

    def born() -> TrainState:
        params, rest = layout.split(build())
        return TrainState(params, rest, optimizer.init(params), jnp.int32(0))

    return jax.jit(born, out_shardings=shardings(abstract_state(layout, optimizer)))()


def state_from(model: nnx.Module, layout: ModelLayout, optimizer: Optimizer) -> TrainState:
    """A new state around the arrays that `model` has; they are copied, because steps consume what
    they are given.
    """
    params, rest = jax.tree.map(jnp.copy, layout.split(model))
    params, rest = jax.device_put(
        (params, rest), shardings((dict(layout.params), dict(layout.rest)))
    )
    return state_around(params, rest, layout, optimizer)


def state_around(
    params: Arrays, rest: Arrays, layout: ModelLayout, optimizer: Optimizer
) -> TrainState:
    """A new state of these arrays, which lie as `layout` says; it owns them."""
    fresh = jax.jit(
        lambda params: (optimizer.init(params), jnp.int32(0)),
        out_shardings=shardings(abstract_state(layout, optimizer)[2:]),
    )
    return TrainState(params, rest, *fresh(params))


def shardings(abstract: Any) -> Any:
    """The same tree with the sharding in place of each array."""
    return jax.tree.map(lambda leaf: leaf.sharding, abstract)


def flatten(state: TrainState) -> dict[str, Any]:
    """name → array: `params/...`, `rest/...`, `optimizer/...`, `step`. What checkpoints hold."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def unflatten(named: Mapping[str, Any], like: TrainState) -> TrainState:
    """The inverse of `flatten`, for a state of the same structure as `like`."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(like)
    return jax.tree.unflatten(
        treedef,
        [named[jax.tree_util.keystr(path, simple=True, separator="/")] for path, _ in leaves],
    )


def _moment_spec(shape: tuple[int, ...], of: Any, *, from_the_right: bool) -> PartitionSpec:
    """Where a moment of the parameter `of` lies: each of its dimensions as the first dimension of
    that size which is not yet taken.

    A moment may lack dimensions (Adafactor's rows and columns) or repeat one (SOAP's m x m). Of a
    square parameter either fits.
    """
    turn = -1 if from_the_right else 1
    dimensions = list(
        zip(
            of.shape,
            (*of.sharding.spec, *[None] * (len(of.shape) - len(of.sharding.spec))),
            strict=True,
        )
    )[::turn]
    axes: list[Any] = []
    for size in shape[::turn]:
        at = next((i for i, (known, _) in enumerate(dimensions) if known == size), None)
        axes.append(None if at is None else dimensions[at][1])
        dimensions = dimensions if at is None else dimensions[at + 1 :]
    return PartitionSpec(*axes[::turn])


def _spread(spec: PartitionSpec, shape: tuple[int, ...], layout: ModelLayout) -> PartitionSpec:
    """`spec`, and over `layout.spread` along the largest part of a dimension that divides by it;
    where none does, `spec`.
    """
    ways = math.prod(layout.mesh.shape[axis] for axis in layout.spread)
    axes = [axes_of(entry) for entry in (*spec, *[None] * (len(shape) - len(spec)))]
    parts = [
        size // math.prod(layout.mesh.shape[axis] for axis in over)
        for size, over in zip(shape, axes, strict=True)
    ]
    best = max(
        (i for i, part in enumerate(parts) if part % ways == 0),
        key=lambda i: parts[i],
        default=None,
    )
    if ways == 1 or best is None or any(axis in over for over in axes for axis in layout.spread):
        return spec
    axes[best] = (*axes[best], *layout.spread)
    return PartitionSpec(*(over or None for over in axes))


def _name(path: Path) -> str:
    return ".".join(str(key) for key in path)


def _arrays(state: nnx.State) -> Arrays:
    values = {_name(path): variable.get_value() for path, variable in nnx.to_flat_state(state)}
    return {
        name: jax.random.key_data(v) if jnp.issubdtype(v.dtype, jax.dtypes.prng_key) else v
        for name, v in values.items()
    }


def _key_impl(key: Any) -> Any:
    found: list[Any] = []
    # takes no abstract keys, but tracers
    jax.eval_shape(lambda traced: found.append(jax.random.key_impl(traced)), key)
    return found[0]


def _labels(variable: nnx.Variable) -> tuple[Any, ...]:
    metadata: Any = variable.get_metadata()
    return tuple(
        metadata.get("out_sharding")
        or metadata.get("sharding_names")
        or metadata.get("sharding")
        or ()
    )


def _is_matrix(name: str, variable: nnx.Variable, shape: tuple[int, ...]) -> bool:
    """Two dimensions or more, not counting the one along which layers are stacked; by name, where
    nothing says which that is.
    """
    stacked = sum(label == "layers" for label in _labels(variable))
    return len(shape) - stacked >= 2 and name.rpartition(".")[2] not in ("scale", "bias")


def _is_vocabulary(name: str, variable: nnx.Variable) -> bool:
    """An embedding or a head: labelled so, or, where nothing is labelled, called so."""
    labels = _labels(variable)
    return (
        "vocab" in labels
        if any(labels)
        else any(part in name.lower() for part in ("embed", "lm_head"))
    )


def _spec(name: str, variable: nnx.Variable, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """The labels of the parameter's dimensions, as mesh axes; a parameter without labels lies whole
    on every device.
    """
    chosen = {meaning: over for meaning, over in rules_here().items() if over != RULES.get(meaning)}
    rules = dict(variable.get_metadata().get("sharding_rules") or RULES) | chosen
    axes: list[Any] = []
    for dimension, label in enumerate(_labels(variable)):
        axis = (
            label
            if label is None or label in mesh.axis_names or isinstance(label, tuple)
            else rules.get(label, _UNKNOWN)
        )
        if axis is _UNKNOWN:
            known = [*rules, *mesh.axis_names]
            raise ConfigError(
                at=f"model.{name}",
                problem=f"dimension {dimension} is labelled {label!r}",
                have=known,
                fix=did_you_mean(str(label), known),
            )
        over = axes_of(axis)  # pyright: ignore[reportArgumentType]
        parts = math.prod(mesh.shape[part] for part in over)
        if shape[dimension] % parts:
            raise ConfigError(
                at=f"model.{name}",
                problem=f"dimension {dimension} ({label}) of {shape} does not divide by mesh axis {axis!r} of {parts}",
                fix=f"Choose a multiple of {parts}, or a smaller mesh.{' or mesh.'.join(over)}.",
            )
        axes.append(axis)
    return PartitionSpec(*axes)


_UNKNOWN = object()
