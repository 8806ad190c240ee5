"""The training state as one pytree: how parameters are divided over the mesh, and which decay.

The model's arrays are held flat, by dotted name ("layers.gate.kernel"), so that the optimizer, the
checkpoint and error messages all speak of the same names. A ModelLayout knows shapes, dtypes and
shardings before any array exists.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Generator, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx, traverse_util
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from easypipe.core.errors import did_you_mean, require
from easypipe.train.optim.optimizers import Optimizer
from easypipe.train.parallel.config import RULES, Axes, axes_of
from easypipe.train.parallel.mesh import rules as rules_here
from easypipe.train.parallel.mesh import under

Arrays = dict[str, jax.Array]
Abstract = Mapping[str, jax.ShapeDtypeStruct]  # by name, with shardings
Path = tuple[Hashable, ...]
_HEADS = ("head", "score", "classifier", "logits")  # names of heads, without labels


class TrainState(NamedTuple):
    """What a run trains. The same structure also holds abstract arrays or shardings.

    Attributes:
        params: Arrays that the optimizer updates, by name.
        rest: The other arrays of the model, by name (dropout keys, frozen parameters, ...).
        optimizer: The state of the optimizer.
        step: Int32[], the number of steps taken.
    """

    params: PyTree
    rest: PyTree
    optimizer: PyTree
    step: PyTree


@dataclass(frozen=True)
class ModelLayout:
    """The split of a model into named arrays, with shape, dtype and sharding of each.

    Attributes:
        graph: The model without its arrays.
        paths: The place of each named array in the model.
        params: The abstract arrays that are trained, by name.
        rest: The other abstract arrays, by name.
        key_impls: The implementation of each random key in `rest`, by its name in
            jax.random.key_impl. Keys are held as their uint32 data, which every checkpoint format
            accepts.
        decays: Whether weight decay applies to each parameter: True for matrices.
        hidden: Whether each parameter is a matrix that is neither an embedding nor the head.
        stacked: Names of parameters whose first dimension counts layers.
        frozen: Names in `rest` of parameters that are not trained. Checkpoints leave them out.
        trained: The type of nnx.Variable that `params` holds.
        mesh: The mesh on which the arrays are.
        spread: Mesh axes that also divide the optimizer state (ZeRO-1: Rajbhandari et al., 2020).
    """

    graph: nnx.GraphDef[nnx.Module]
    paths: Mapping[str, Path]
    params: Abstract
    rest: Abstract
    key_impls: Mapping[str, Any]
    decays: Mapping[str, bool]  # True for matrices
    hidden: Mapping[str, bool]
    stacked: frozenset[str]
    frozen: frozenset[str]
    trained: type[nnx.Variable[jax.Array]]
    mesh: Mesh
    spread: tuple[str, ...] = ()

    def merge(self, params: Mapping[str, jax.Array], rest: Mapping[str, jax.Array]) -> nnx.Module:
        """Returns the module that consists of these arrays."""
        arrays = {**params, **rest}
        for name, impl in self.key_impls.items():
            arrays[name] = jax.random.wrap_key_data(arrays[name], impl=impl)
        by_path = {self.paths[name]: value for name, value in arrays.items()}
        return nnx.merge(self.graph, traverse_util.unflatten_dict(by_path))

    def split(self, model: nnx.Module) -> tuple[Arrays, Arrays]:
        """Returns (params, rest), the named arrays of a module of this layout."""
        _, params, rest = nnx.split(model, self.trained, ...)
        return _arrays(params), _arrays(rest)

    def without_frozen(self, named: Mapping[str, PyTree]) -> dict[str, PyTree]:
        """Drops frozen parameters from the names that `flatten` returned, as checkpoints do."""
        left_out = {f"rest/{name}" for name in self.frozen}
        return {name: value for name, value in named.items() if name not in left_out}


def layout_of(
    model: nnx.Module,
    mesh: Mesh,
    trained: type[nnx.Variable[jax.Array]] = nnx.Param,
    *,
    spread: tuple[str, ...] = (),
) -> ModelLayout:
    """Returns the layout of `model`, whose arrays may be abstract (nnx.eval_shape).

    Args:
        model: The model.
        mesh: The mesh for its arrays.
        trained: The type of variable that is trained; nnx.LoRAParam if only adapters are.
        spread: Mesh axes that also divide the optimizer state; see ModelLayout.

    Raises:
        ConfigError: A dimension has an unknown label, or does not divide by its mesh axes.
    """
    graph, *parts = nnx.split(model, trained, ...)
    params, rest = ({}, {})
    paths, key_impls, decays, hidden = {}, {}, {}, {}
    stacked, frozen = set(), set()
    for arrays, part in zip((params, rest), parts, strict=True):
        for path, variable in nnx.to_flat_state(part):
            name, value, spec = _name(path), variable.get_value(), PartitionSpec()
            paths[name] = path
            if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
                key_impls[name] = _key_impl(value)
                value = jax.eval_shape(jax.random.key_data, value)
            else:
                spec = _spec(name, variable, value.shape, mesh)
            arrays[name] = jax.ShapeDtypeStruct(
                value.shape, value.dtype, sharding=NamedSharding(mesh, spec)
            )
            if arrays is params:
                decays[name] = _is_matrix(name, variable, value.shape)
                hidden[name] = decays[name] and not _is_outer(name, variable)
                stacked |= {name} if _labels(variable)[:1] == ("layers",) else set()
            elif isinstance(variable, nnx.Param):
                frozen.add(name)
    return ModelLayout(
        graph=graph,
        paths=paths,
        params=params,
        rest=rest,
        key_impls=key_impls,
        decays=decays,
        hidden=hidden,
        stacked=frozenset(stacked),
        frozen=frozenset(frozen),
        trained=trained,
        mesh=mesh,
        spread=spread,
    )


@contextlib.contextmanager
def on(mesh: Mesh, rules: Mapping[str, Axes] | None = None) -> Generator[None, None, None]:
    """Sets the mesh, and the rules of dimension labels, to build or trace models in.

    Args:
        mesh: The mesh to which PartitionSpecs refer.
        rules: Mesh axes by dimension label; None: the rules that already apply.
    """
    with jax.set_mesh(mesh), under(rules):
        yield


def abstract_state(layout: ModelLayout, optimizer: Optimizer) -> TrainState:
    """Returns shape, dtype and sharding of every array of the state, to compile or restore against.

    A moment has the sharding of its parameter; a factored moment keeps the axes of the dimensions
    that it has. All are divided over `layout.spread` too, if a dimension allows it. Counters are on
    every device.
    """
    params = dict(layout.params)

    def placed(path: tuple[PyTree, ...], leaf: PyTree) -> jax.ShapeDtypeStruct:
        keys, spec = _keys(path).split("/"), PartitionSpec()
        if keys[-1] in params:
            from_the_right = not {"v_col", "right", "right_basis"}.isdisjoint(keys)
            spec = _moment_spec(leaf.shape, params[keys[-1]], from_the_right=from_the_right)
        where = NamedSharding(layout.mesh, _spread(spec, leaf.shape, layout))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

    moments = jax.tree_util.tree_map_with_path(placed, jax.eval_shape(optimizer.init, params))
    everywhere = NamedSharding(layout.mesh, PartitionSpec())
    step = jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere)
    return TrainState(params, dict(layout.rest), moments, step)


def gradient_places(layout: ModelLayout) -> dict[str, NamedSharding]:
    """Returns the shardings of the summed gradients, by parameter.

    They are those of the moments, so that each device sums the gradients that it applies.
    """
    return {
        name: NamedSharding(layout.mesh, _spread(_spec_of(leaf), leaf.shape, layout))
        for name, leaf in layout.params.items()
    }


@dataclass(frozen=True)
class Beginning:
    """How a new state is made. Equal objects make the same state with the same compiled program.

    Attributes:
        build: A function that builds the model.
        layout: The layout of the model.
        optimizer: The optimizer whose state is to be initialized.
        made_of: A digest of everything that decides `build` and `optimizer`; None if that is not
            known.
        places: The shardings of the state's arrays, in their order.
    """

    build: Callable[[], nnx.Module] = field(compare=False)
    layout: ModelLayout = field(compare=False)
    optimizer: Optimizer = field(compare=False)
    made_of: str | None = None
    places: tuple[jax.sharding.Sharding, ...] = ()

    def program(self) -> Callable[[], TrainState]:
        """Returns the compiled program that computes the state."""
        layout, optimizer = self.layout, self.optimizer

        def born() -> TrainState:
            params, rest = layout.split(self.build())
            return TrainState(params, rest, optimizer.init(params), jnp.int32(0))

        return jax.jit(born, out_shardings=shardings(abstract_state(layout, optimizer)))


# This cache holds programs, never arrays.
_known_program = functools.lru_cache(maxsize=8)(Beginning.program)


def init_state(
    build: Callable[[], nnx.Module],
    layout: ModelLayout,
    optimizer: Optimizer,
    made_of: str | None = None,
) -> TrainState:
    """Makes a new state, each array directly with its sharding.

    No device ever holds more than its part.

    Call it inside `on(mesh)`.

    Args:
        build: A function that builds the model.
        layout: The layout of the model.
        optimizer: The optimizer whose state is initialized.
        made_of: See Beginning; with it, the program is compiled only once in a process.
    """
    begins = Beginning(build, layout, optimizer)
    if made_of is None:
        return begins.program()()
    places = jax.tree.leaves(shardings(abstract_state(layout, optimizer)))
    return _known_program(replace(begins, made_of=made_of, places=(*places,)))()


def state_from(model: nnx.Module, layout: ModelLayout, optimizer: Optimizer) -> TrainState:
    """Makes a new state from copies of the arrays of `model`.

    They are copied because a step consumes its arrays.
    """
    copies = jax.tree.map(jnp.copy, layout.split(model))
    places = shardings((dict(layout.params), dict(layout.rest)))
    params, rest = jax.device_put(copies, places)
    return state_around(params, rest, layout, optimizer)


def state_around(
    params: Arrays, rest: Arrays, layout: ModelLayout, optimizer: Optimizer
) -> TrainState:
    """Makes a new state that owns these arrays, which have the shardings of `layout`."""
    fresh = jax.jit(
        lambda params: (optimizer.init(params), jnp.int32(0)),
        out_shardings=shardings(abstract_state(layout, optimizer)[2:]),
    )
    return TrainState(params, rest, *fresh(params))


def shardings(abstract: PyTree) -> PyTree:
    """Returns the same tree with the sharding of each abstract array in its place."""
    return jax.tree.map(lambda leaf: leaf.sharding, abstract)


def flatten(tree: PyTree) -> dict[str, PyTree]:
    """Returns the leaves of a tree by name, with "/" between the keys of a path.

    A TrainState has the names `params/...`, `rest/...`, `optimizer/...` and `step`, as checkpoints
    do.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {_keys(path): leaf for path, leaf in leaves}


def unflatten(named: Mapping[str, PyTree], like: PyTree) -> PyTree:
    """The inverse of `flatten`, for a tree of the same structure as `like`."""
    return jax.tree.unflatten(jax.tree.structure(like), [named[name] for name in flatten(like)])


def _keys(path: tuple[PyTree, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _spec_of(leaf: jax.ShapeDtypeStruct) -> PartitionSpec:
    assert isinstance(leaf.sharding, NamedSharding)
    return leaf.sharding.spec


def _moment_spec(
    shape: tuple[int, ...], of: jax.ShapeDtypeStruct, *, from_the_right: bool
) -> PartitionSpec:
    """Returns the PartitionSpec of a moment of the parameter `of`.

    Each dimension of the moment takes the axes of the first dimension of the same size that is not
    yet taken. A moment may lack dimensions (Adafactor's rows and columns) or repeat one (SOAP's m x
    m). For a square parameter both dimensions fit.

    Args:
        shape: The shape of the moment.
        of: The parameter.
        from_the_right: Whether dimensions are matched from the last one to the first.
    """
    turn, spec = -1 if from_the_right else 1, _spec_of(of)
    sizes = of.shape[::turn]
    over = (*spec, *[None] * (len(sizes) - len(spec)))[::turn]
    axes, taken = [], 0
    for size in shape[::turn]:
        fits = size in sizes[taken:]
        taken = sizes.index(size, taken) + 1 if fits else taken
        axes.append(over[taken - 1] if fits else None)
    return PartitionSpec(*axes[::turn])


def _spread(spec: PartitionSpec, shape: tuple[int, ...], layout: ModelLayout) -> PartitionSpec:
    """Adds `layout.spread` to `spec`, for the dimension with the largest part that divides by it.

    Returns `spec` unchanged if no dimension does.
    """

    def ways(axes: tuple[str, ...]) -> int:
        return math.prod(layout.mesh.shape[axis] for axis in axes)

    axes = [axes_of(entry) for entry in (*spec, *[None] * (len(shape) - len(spec)))]
    parts = [size // ways(over) for size, over in zip(shape, axes, strict=True)]
    fitting = [i for i, part in enumerate(parts) if part % ways(layout.spread) == 0]
    if ways(layout.spread) == 1 or not fitting or {*layout.spread} & {*sum(axes, ())}:
        return spec
    best = max(fitting, key=lambda i: parts[i])
    axes[best] = (*axes[best], *layout.spread)
    return PartitionSpec(*(over or None for over in axes))


def _name(path: Path) -> str:
    return ".".join(map(str, path))


def _arrays(state: nnx.State[Hashable, nnx.Variable[jax.Array]]) -> Arrays:
    values = {_name(path): variable.get_value() for path, variable in nnx.to_flat_state(state)}
    return {
        name: jax.random.key_data(v) if jnp.issubdtype(v.dtype, jax.dtypes.prng_key) else v
        for name, v in values.items()
    }


def _key_impl(key: PyTree) -> Any:
    """Returns the implementation of a random key, which may be abstract."""
    found: list[Any] = []
    # key_impl accepts tracers, but no abstract keys.
    jax.eval_shape(lambda traced: found.append(jax.random.key_impl(traced)), key)
    return found[0]


def _labels(variable: nnx.Variable[jax.Array]) -> tuple[Axes, ...]:
    """Returns the label of each dimension of a variable; () if it has none."""
    metadata = variable.get_metadata()
    keys = ("out_sharding", "sharding_names", "sharding")
    return tuple(next(filter(None, map(metadata.get, keys)), ()))


def _is_matrix(name: str, variable: nnx.Variable[jax.Array], shape: tuple[int, ...]) -> bool:
    """Whether a parameter has two dimensions or more, without that of stacked layers.

    Scales and biases are recognized by name, for models without labels.
    """
    stacked = _labels(variable).count("layers")
    return len(shape) - stacked >= 2 and name.rpartition(".")[2] not in ("scale", "bias")


def _is_outer(name: str, variable: nnx.Variable[jax.Array]) -> bool:
    """Whether a parameter is an embedding or a head, by its labels or else by its name.

    An attention has an `out` of its own, so `out` and `output` are heads only of the whole model.
    """
    labels, parts = _labels(variable), name.lower().split(".")
    if any(labels):
        return "vocab" in labels
    inside = any("embed" in part or part in _HEADS or part.endswith("_head") for part in parts)
    return inside or parts[0] in ("out", "output")


def _spec(
    name: str, variable: nnx.Variable[jax.Array], shape: tuple[int, ...], mesh: Mesh
) -> PartitionSpec:
    """Returns the PartitionSpec for the labels of a parameter's dimensions.

    A parameter without labels is replicated on every device.

    Raises:
        ConfigError: A label is unknown, or a dimension does not divide by its mesh axes.
    """
    chosen = {meaning: over for meaning, over in rules_here().items() if over != RULES.get(meaning)}
    rules = dict(variable.get_metadata().get("sharding_rules") or RULES) | chosen
    rules |= {axis: axis for axis in mesh.axis_names}
    axes: list[Axes] = []
    for dimension, label in enumerate(_labels(variable)):
        axis = rules.get(label) if isinstance(label, str) else label
        require(
            not isinstance(label, str) or label in rules,
            f"model.{name}",
            f"dimension {dimension} is labelled {label!r}",
            did_you_mean(str(label), [*rules]),
            have=[*rules],
        )
        over = axes_of(axis)
        parts = math.prod(mesh.shape[part] for part in over)
        require(
            shape[dimension] % parts == 0,
            f"model.{name}",
            f"dimension {dimension} ({label}) of {shape} does not divide by mesh axis "
            f"{axis!r} of {parts}",
            f"Choose a multiple of {parts}, or a smaller mesh.{' or mesh.'.join(over)}.",
        )
        axes.append(axis)
    return PartitionSpec(*axes)
