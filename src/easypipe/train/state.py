"""What a run trains, as one pytree with a place on the mesh for every array.

The model's arrays are held flat, by dotted name ("layers.gate.kernel"), so that the optimizer, the
checkpoint and error messages all speak of the same names. A ModelLayout knows shapes, dtypes and
shardings before any array exists.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping
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


class TrainState(NamedTuple):
    """params: Arrays, what the optimizer moves.

    rest: Arrays, what else the model has (dropout keys, ..., parameters that are frozen).
    step: Int32[], steps taken.

    The same shape holds abstract arrays and shardings.
    """

    params: PyTree
    rest: PyTree
    optimizer: PyTree
    step: PyTree


@dataclass(frozen=True)
class ModelLayout:
    """How a model comes apart into named arrays and together again, and where each lies."""

    graph: nnx.GraphDef
    paths: Mapping[str, Path]
    params: Abstract
    rest: Abstract
    # random keys are held as their uint32 data, which every checkpoint format takes
    key_impls: Mapping[str, Any]  # as jax.random.key_impl names them
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
        arrays = {**params, **rest}
        for name, impl in self.key_impls.items():
            arrays[name] = jax.random.wrap_key_data(arrays[name], impl=impl)
        by_path = {self.paths[name]: value for name, value in arrays.items()}
        return nnx.merge(self.graph, traverse_util.unflatten_dict(by_path))

    def split(self, model: nnx.Module) -> tuple[Arrays, Arrays]:
        """(params, rest) of a module of this layout."""
        _, params, rest = nnx.split(model, self.trained, ...)
        return _arrays(params), _arrays(rest)

    def without_frozen(self, named: Mapping[str, PyTree]) -> dict[str, PyTree]:
        """What `flatten` gave, as a checkpoint holds it."""
        left_out = {f"rest/{name}" for name in self.frozen}
        return {name: value for name, value in named.items() if name not in left_out}


def layout_of(
    model: nnx.Module,
    mesh: Mesh,
    trained: type[nnx.Variable] = nnx.Param,
    *,
    spread: tuple[str, ...] = (),
) -> ModelLayout:
    """The layout of `model`, whose arrays may be abstract (nnx.eval_shape).

    Raises ConfigError for a sharding that cannot be.

    trained: nnx.LoRAParam where only adapters move. spread: see ModelLayout.
    """
    graph, *parts = nnx.split(model, trained, ...)
    params, rest = ({}, {})
    paths, key_impls, decays, hidden, frozen = {}, {}, {}, {}, set()
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
                hidden[name] = decays[name] and not _is_vocabulary(name, variable)
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
        frozen=frozenset(frozen),
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
    """Where gradients are summed: as moments lie, so that each device sums what it updates."""
    return {
        name: NamedSharding(layout.mesh, _spread(_spec_of(leaf), leaf.shape, layout))
        for name, leaf in layout.params.items()
    }


@dataclass(frozen=True)
class Beginning:
    """How a new state is made. Two that are equal make the same one, by one compiled program.

    made_of: all that `build` and `optimizer` follow from; None where that is not known.
    """

    build: Callable[[], nnx.Module] = field(compare=False)
    layout: ModelLayout = field(compare=False)
    optimizer: Optimizer = field(compare=False)
    made_of: str | None = None
    places: tuple[jax.sharding.Sharding, ...] = ()  # of its arrays, in their order

    def program(self) -> Callable[[], TrainState]:
        """What computes the state."""
        layout, optimizer = self.layout, self.optimizer

        def born() -> TrainState:
            params, rest = layout.split(self.build())
            return TrainState(params, rest, optimizer.init(params), jnp.int32(0))

        return jax.jit(born, out_shardings=shardings(abstract_state(layout, optimizer)))


# holds programs, never arrays
_known_program = functools.lru_cache(maxsize=8)(Beginning.program)


def init_state(
    build: Callable[[], nnx.Module],
    layout: ModelLayout,
    optimizer: Optimizer,
    made_of: str | None = None,
) -> TrainState:
    """A new state, every array born where it belongs: no device ever holds more than its part.

    made_of: see Beginning. Call inside `on(mesh)`.
    """
    begins = Beginning(build, layout, optimizer)
    if made_of is None:
        return begins.program()()
    places = jax.tree.leaves(shardings(abstract_state(layout, optimizer)))
    return _known_program(replace(begins, made_of=made_of, places=(*places,)))()


def state_from(model: nnx.Module, layout: ModelLayout, optimizer: Optimizer) -> TrainState:
    """A new state around the arrays that `model` has; they are copied, because steps consume what
    they are given.
    """
    copies = jax.tree.map(jnp.copy, layout.split(model))
    places = shardings((dict(layout.params), dict(layout.rest)))
    params, rest = jax.device_put(copies, places)
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


def shardings(abstract: PyTree) -> PyTree:
    """The same tree with the sharding in place of each array."""
    return jax.tree.map(lambda leaf: leaf.sharding, abstract)


def flatten(tree: PyTree) -> dict[str, PyTree]:
    """name → leaf.

    Of a TrainState `params/...`, `rest/...`, `optimizer/...`, `step`: what checkpoints hold.
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
    """Where a moment of the parameter `of` lies: each of its dimensions as the first dimension of
    that size which is not yet taken.

    A moment may lack dimensions (Adafactor's rows and columns) or repeat one (SOAP's m x m). Of a
    square parameter either fits.
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
    """`spec`, and over `layout.spread` along the largest part of a dimension that divides by it;
    where none does, `spec`.
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


def _arrays(state: nnx.State) -> Arrays:
    values = {_name(path): variable.get_value() for path, variable in nnx.to_flat_state(state)}
    return {
        name: jax.random.key_data(v) if jnp.issubdtype(v.dtype, jax.dtypes.prng_key) else v
        for name, v in values.items()
    }


def _key_impl(key: PyTree) -> Any:
    found: list[Any] = []
    # takes no abstract keys, but tracers
    jax.eval_shape(lambda traced: found.append(jax.random.key_impl(traced)), key)
    return found[0]


def _labels(variable: nnx.Variable) -> tuple[Axes, ...]:
    metadata = variable.get_metadata()
    keys = ("out_sharding", "sharding_names", "sharding")
    return tuple(next(filter(None, map(metadata.get, keys)), ()))


def _is_matrix(name: str, variable: nnx.Variable, shape: tuple[int, ...]) -> bool:
    """Two dimensions or more, not counting the one along which layers are stacked; by name, where
    nothing says which that is.
    """
    stacked = _labels(variable).count("layers")
    return len(shape) - stacked >= 2 and name.rpartition(".")[2] not in ("scale", "bias")


def _is_vocabulary(name: str, variable: nnx.Variable) -> bool:
    """An embedding or a head: labelled so, or, where nothing is labelled, called so."""
    labels = _labels(variable)
    named = "embed" in name.lower() or "lm_head" in name.lower()
    return "vocab" in labels if any(labels) else named


def _spec(name: str, variable: nnx.Variable, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """The labels of the parameter's dimensions, as mesh axes; a parameter without labels lies whole
    on every device.
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
