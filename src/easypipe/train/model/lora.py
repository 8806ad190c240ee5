"""Low-rank adapters: which projections get them, how they are computed, and merged back.

I inputs of a projection · O outputs · r rank; projections that are stacked for a scan over layers
have one dimension more in front.
"""
# ruff: noqa: F722  (shapes in annotations are jaxtyping's, not Python)

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from easypipe.core.errors import ConfigError, did_you_mean, require
from easypipe.core.random import fold
from easypipe.train.model.config import LoraConfig
from easypipe.train.model.decoder import Decoder
from easypipe.train.model.pretrained.families import PROJECTIONS

Module = TypeVar("Module", bound=nnx.Module)
_ADAPTER = ("lora_a", "lora_b", "lora")
# Projections of the decoder that are never called, and why.
_UNCALLED = {"head": "its matrix goes into the loss whole"}


class LoraLinear(nnx.Linear):
    """A projection with an adapter: `x·W + bias + scale·(x·A)·B`, in the dtype of the projection.

    The arrays of the projection keep their names; `lora_a` Float32[..., I, r] and `lora_b`
    Float32[..., r, O] are nnx.LoRAParam, sharded like W's own dimensions.
    """

    def __init__(self, linear: nnx.Linear, config: LoraConfig, key: Array) -> None:
        _take(self, linear)
        *stacked, inputs, outputs = self.kernel.shape
        *in_front, input_axis, output_axis = _labels(self.kernel)
        bound = inputs**-0.5  # as in PEFT: Kaiming's uniform with a = sqrt(5)
        first = jax.random.uniform(key, (*stacked, inputs, config.rank), jnp.float32, -bound, bound)
        self.lora_a = _adapter(first, (*in_front, input_axis, None))
        self.lora_b = _adapter(
            jnp.zeros((*stacked, config.rank, outputs), jnp.float32), (*in_front, None, output_axis)
        )
        self.lora = config

    def __call__(
        self, inputs: Float[Array, "... I"], out_sharding: jax.sharding.Sharding | None = None
    ) -> Float[Array, "... O"]:
        whole = super().__call__(inputs, out_sharding)
        inputs = inputs.astype(whole.dtype)
        low = inputs @ self.lora_a[...].astype(whole.dtype)
        return whole + self.lora.scale * (low @ self.lora_b[...].astype(whole.dtype))


def add_lora(module: Module, config: LoraConfig, seed: int) -> Module:
    """Replaces the projections in `module` that match `config.targets` by LoraLinear.

    Args:
        module: The module, which is changed in place.
        config: The options of the adapters.
        seed: The initial values depend only on it and on the projection's name.

    Returns:
        `module` itself.

    Raises:
        ConfigError: A target matches no projection (the message lists all of them), or a projection
            is smaller than the rank or has an adapter already.
    """
    found = dict(_projections(module))
    named = {name for name in found if name not in _UNCALLED}
    chosen: set[str] = set()
    for i, target in enumerate(config.targets):
        fitting = {
            name
            for name in named
            if fnmatch.fnmatchcase(name, target)
            or fnmatch.fnmatchcase(name.rpartition(".")[2], target)
        }
        if not fitting:
            raise _no_target(f"targets[{i}]", target, sorted(named))
        chosen |= fitting
    for name in sorted(chosen):
        parent, key, linear = found[name]
        require(
            not isinstance(linear, LoraLinear),
            "targets",
            f"{name} has an adapter already",
            "Merge it first: merge_lora(module).",
        )
        most = min(linear.kernel.shape[-2:])
        require(
            config.rank <= most,
            "rank",
            f"{config.rank}, but {name} is {list(linear.kernel.shape[-2:])}",
            f"Give at most {most}, or leave {name} out of targets.",
        )
        _put(
            parent,
            key,
            LoraLinear(linear, config, jax.random.key(fold(seed, "lora", name) % 2**32)),
        )
    return module


def merge_lora(module: Module) -> Module:
    """Returns a module without adapters that computes the same.

    Every W + scale·A·B is added in float32 and rounded to the dtype of W. Rows of new tokens
    replace those in table and head. `module` is not changed, and shares all arrays that have no
    adapter. A module without adapters is returned unchanged.
    """
    if not has_lora(module):
        return module
    module = nnx.clone(module, variables=False)
    if isinstance(module, Decoder) and (new := module.added) is not None:
        module.embedding = _with(module.embedding, new.in_table)
        if new.lm_head is not None:
            module.head.kernel = _with(module.head.kernel, new.in_head)
        module.added = None
    for _, (parent, key, linear) in list(_projections(module)):
        if isinstance(linear, LoraLinear):
            plain = nnx.Linear(1, 1, rngs=nnx.Rngs(0))  # everything in it is replaced
            _take(plain, linear, without=_ADAPTER)
            a, b, scale = linear.lora_a[...], linear.lora_b[...], linear.lora.scale
            merged = linear.kernel.replace(_merged(linear.kernel[...], a, b, scale))
            plain.kernel = cast("nnx.Param[Array]", merged)
            _put(parent, key, plain)
    return module


@jax.jit
def _merged(
    kernel: Float[Array, "... I O"],
    a: Float[Array, "... I r"],
    b: Float[Array, "... r O"],
    scale: float,
) -> Float[Array, "... I O"]:
    added = jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
    return (kernel.astype(jnp.float32) + scale * added).astype(kernel.dtype)


def _with(variable: nnx.Param[Array], put: Callable[[Array], Array]) -> nnx.Param[Array]:
    """Returns the parameter with `put` applied to its array."""
    return cast("nnx.Param[Array]", variable.replace(put(variable[...])))


def has_lora(module: nnx.Module) -> bool:
    """Whether a module has adapters, or trained rows of new tokens."""
    new = isinstance(module, Decoder) and module.added is not None
    return new or any(isinstance(linear, LoraLinear) for _, (_, _, linear) in _projections(module))


def adapters(module: nnx.Module) -> dict[str, LoraLinear]:
    """Returns the projections that have an adapter, by dotted name."""
    return {
        name: linear
        for name, (_, _, linear) in _projections(module)
        if isinstance(linear, LoraLinear)
    }


def fingerprint(arrays: Mapping[str, Array]) -> dict[str, int]:
    """Returns a number for the bits of every array.

    By it, adapters recognize the weights to which they belong.

    It is the same on every mesh.
    """
    return {name: int(value) for name, value in jax.device_get(_fingerprint(dict(arrays))).items()}


@jax.jit
def _fingerprint(arrays: dict[str, Array]) -> dict[str, Array]:
    def one(array: Array) -> Array:
        kind = {1: jnp.uint8, 2: jnp.uint16}.get(array.dtype.itemsize, jnp.uint32)
        bits = jax.lax.bitcast_convert_type(array, kind).astype(jnp.uint32)
        place = jnp.uint32(0)
        # Each place has an odd factor of its own, so that the order of the numbers matters.
        for dimension in range(bits.ndim):
            place = place * jnp.uint32(0x9E3779B1) + jax.lax.broadcasted_iota(
                jnp.uint32, bits.shape, dimension
            )
        # Integers wrap, so the order of the sum does not matter.
        return jnp.sum(bits * (2 * place + 1), dtype=jnp.uint32)

    return {name: one(array) for name, array in arrays.items()}


def _projections(
    module: nnx.Module,
) -> Iterator[tuple[str, tuple[nnx.Pytree, Hashable, nnx.Linear]]]:
    """Yields (dotted name, (owner, its key, projection)) for every nnx.Linear in `module`."""
    owners = {path: node for path, node in nnx.iter_graph(module) if isinstance(node, nnx.Pytree)}
    for path, node in owners.items():
        # A subclass that computes something else is none: its adapter would not compute that.
        if isinstance(node, nnx.Linear) and path and type(node).__call__ in _CALLS:
            yield ".".join(str(key) for key in path), (owners[path[:-1]], path[-1], node)


_CALLS = nnx.Linear.__call__, LoraLinear.__call__


def _put(owner: Any, key: Hashable, value: nnx.Module) -> None:  # an owner is a module or a list
    if isinstance(key, str):
        setattr(owner, key, value)
    else:
        owner[key] = value


def _take(target: nnx.Module, source: nnx.Module, without: tuple[str, ...] = ()) -> None:
    """Sets every attribute of `source` on `target`."""
    # A module holds everything that its constructor set.
    for name, value in vars(source).items():
        if not name.startswith("_pytree__") and name not in without:
            setattr(target, name, value)


def _adapter(value: Array, labels: tuple[str | None, ...]) -> nnx.LoRAParam[Array]:
    """Returns the parameter of an adapter, labelled for its sharding if there are labels."""
    return (
        nnx.LoRAParam(value, out_sharding=labels, eager_sharding=False)
        if any(labels)
        else nnx.LoRAParam(value)
    )


def _labels(kernel: nnx.Variable[Array]) -> tuple[str | None, ...]:
    labels = kernel.get_metadata().get("out_sharding")
    return tuple(labels or [None] * len(kernel.shape))


def _no_target(at: str, target: str, named: list[str]) -> ConfigError:
    """Returns the error for a target that matches no projection."""
    theirs = {their.rpartition(".")[2]: ours for ours, their in PROJECTIONS.items()}
    if target in _UNCALLED:
        return ConfigError(
            at=at,
            problem=f"{target!r} takes no adapter: {_UNCALLED[target]}",
            have=named,
            fix="Leave it out.",
        )
    if target in theirs:
        fix = f"What others call {target!r} is {theirs[target]!r} here."
    else:
        fix = did_you_mean(target, [*named, *(name.rpartition(".")[2] for name in named)])
    return ConfigError(at=at, problem=f"no projection fits {target!r}", have=named, fix=fix)
