"""Which implementation of the loss runs on which platform, by which rule, on how many tokens.

The platform is the one that the program is *lowered* for, not the one it is traced on. It is the
platform of the mesh in `jax.set_mesh`, because the program is for its devices. Without a mesh a
default survives jit and `jax.export(platforms=["cuda"])`: every candidate is traced, and
`jax.lax.platform_dependent` keeps the one that the platform needs.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar, cast

import jax
from jax import Array
from jaxtyping import PyTree

from easypipe.kernels.loss.stats import Kernel, Layout, vocab_size
from easypipe.kernels.tuning.table import blocks_for, device_kind

Implementation = Literal["reference", "chunked", "pallas_tpu", "pallas_gpu"]
Rule = Literal["fast", "strict"]
MODULES: dict[Implementation, str] = {
    "reference": "easypipe.kernels.loss.reference",
    "chunked": "easypipe.kernels.loss.chunked",
    "pallas_tpu": "easypipe.kernels.loss.tpu.kernel",
    "pallas_gpu": "easypipe.kernels.loss.gpu.kernel",
}
# The default implementation by platform; elsewhere it is "chunked".
FAVOURITES: dict[str, Implementation] = {"tpu": "pallas_tpu", "cuda": "pallas_gpu"}
Result = TypeVar("Result")
ANYWHERE = "cpu"  # means every platform without a favourite

CHUNK_TOKENS = {"tpu": 4096, "cuda": 4096, ANYWHERE: 1024}
"""Tokens of a chunk under *fast*. Adding a chunk's product to a float32 gradient of the head reads
and writes that gradient: this takes about 245/C of the time of the three products on an H200, so C
is 4096 there. On CPU at (4096, 1024, 50257), 1024 tokens need 9 % of the naive loss's memory and
0.9 of the time of 512; more are no faster."""
# The most bytes of the logits of one chunk under *fast*; a chunk has fewer tokens if they would not
# fit.
LOGITS_BYTES = 2 << 30
FEWEST_TOKENS = 256  # the fewest of a chunk: below this, *strict* is both smaller and faster


@dataclass(frozen=True)
class LossSharding:
    """The mesh axes over which the arguments of the loss are sharded.

    All of them are axes of the mesh in `jax.set_mesh`.

    Args:
        tokens: The axes of the first dimension of hidden and labels.
        embed: The axes of dimension D of lm_head; its gradient is sharded in the same way.
        vocab: The axes of dimension V of lm_head.
        sequence: The axes of the second dimension of hidden and labels, if they are batched; it may
            share axes with vocab.
    """

    tokens: tuple[str, ...] = ("data", "fsdp")
    embed: tuple[str, ...] = ("fsdp",)
    vocab: tuple[str, ...] = ("tensor",)
    sequence: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """The part of a call that is not arrays; it is static under jit."""

    # (platform, implementation) pairs; the last is for every platform not named
    candidates: tuple[tuple[str, Implementation], ...]
    layout: Layout
    soft_cap: float | None
    sharding: LossSharding | None = None
    chunk_size: int | None = None
    # only for "pallas_gpu", whose strict logits are rounded without it; the others have float32
    float32_logits: bool = False

    @property
    def is_reference(self) -> bool:
        return self.candidates[-1][1] == "reference"

    def vocab_axes(self) -> tuple[str, ...]:
        return _dividing(self.sharding.vocab) if self.sharding else ()

    def token_axes(self, ndim: int) -> tuple[tuple[str, ...] | None, ...]:
        """Returns the mesh axes of every dimension of the labels.

        Axes that the sequence shares with the vocabulary are left out: they are gathered before the
        logits.
        """
        if self.sharding is None:
            return (None,) * ndim
        sequence = tuple(axis for axis in self.sharding.sequence if axis not in self.sharding.vocab)
        return (_dividing(self.sharding.tokens) or None, _dividing(sequence) or None)[:ndim]

    def summed_axes(self, ndim: int) -> tuple[str, ...]:
        """Returns the mesh axes over which gradients of head and bias are summed."""
        return tuple(axis for axes in self.token_axes(ndim) for axis in axes or ())


def _dividing(axes: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the axes that divide something: an axis of one device needs no collective."""
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(axis for axis in axes if mesh.shape[axis] > 1)


def kernel(name: Implementation) -> Kernel:
    """Returns the module of an implementation.

    It is imported when first asked for: Pallas takes half a second.
    """
    return cast("Kernel", importlib.import_module(MODULES[name]))


def missing(module: str) -> str | None:
    """Returns why a module of kernels cannot be imported, or None.

    jax releases sometimes drop a backend of Pallas.
    """
    try:
        importlib.import_module(module)
    except ImportError as error:
        return f"jax {jax.__version__} does not have what it is written with ({error})"
    return None


def by_platform(
    plan: Plan, run: Callable[..., Result], *arrays: PyTree, alike: bool = True
) -> Result:
    """Returns `run(platform, implementation, *arrays)` of the candidate for the platform.

    The platform is the one that the program is lowered for: that of the mesh in `jax.set_mesh`, if
    there is one, or any.

    Args:
        plan: The plan with the candidates.
        run: The function to call.
        arrays: Its arrays.
        alike: Whether `run` depends only on the implementation, so that what several platforms
            share is traced once.
    """
    branches: dict[str, Callable[..., Result]] = {}
    known: dict[tuple[str, ...], Callable[..., Result]] = {}
    for platform, name in plan.candidates:
        key = (name,) if alike else (platform, name)
        branches[platform] = known.setdefault(key, functools.partial(run, platform, name))
    default = branches.pop(plan.candidates[-1][0])
    if jax.sharding.get_abstract_mesh().abstract_device is not None:
        return branches.get(platform_at_hand(), default)(*arrays)
    if len(known) == 1:
        return default(*arrays)
    return jax.lax.platform_dependent(*arrays, default=default, **branches)


def candidates(
    refusals: Mapping[str, list[str]], implementation: Implementation | None
) -> tuple[tuple[str, Implementation], ...]:
    """Returns the implementations that may run, as (platform, implementation).

    It is the requested implementation. Otherwise it is each platform's favourite, unless that
    refuses, and "chunked".
    """
    own = tuple(item for item in FAVOURITES.items() if item[1] == implementation)
    if own:
        return own
    if implementation is not None:
        return tuple((platform, implementation) for platform in (*FAVOURITES, ANYWHERE))
    return (
        *((at, "chunked" if refusals.get(name) else name) for at, name in FAVOURITES.items()),
        (ANYWHERE, "chunked"),
    )


def platform_at_hand() -> str:
    """Returns the platform of the mesh in `jax.set_mesh`, else of the default device.

    The program may be lowered for another one.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return platform_name(jax.default_backend() if device is None else device.platform)


def platform_name(platform: str) -> str:
    """Returns the platform's name in lowering; devices and backends call CUDA "gpu"."""
    return "cuda" if platform == "gpu" else platform


def misplaced(implementation: str | None, platforms: Collection[str]) -> str | None:
    """Returns why an implementation cannot run on any device of `platforms`, or None."""
    wanted = next(
        (platform for platform, name in FAVOURITES.items() if name == implementation), None
    )
    if wanted is None or wanted in platforms:
        return None
    return f"it is for {wanted}, and the devices at hand are {' and '.join(sorted(platforms))}"


def chunk_tokens(plan: Plan, platform: str, hidden: Array, lm_head: Array) -> int:
    """Returns the tokens of a chunk under *fast*, on this device.

    Only XLA's chunks can be tuned (`easypipe kernels tune`): a kernel's chunks are as large as
    fits.
    """
    if plan.chunk_size is not None:
        return plan.chunk_size
    vocab, count = vocab_size(lm_head, plan.layout), CHUNK_TOKENS[platform]
    if platform == ANYWHERE:
        (tokens, width), default = hidden.shape, {"chunk_tokens": count}
        count = blocks_for(
            device_kind(), "chunked", tokens, width, vocab, lm_head.dtype, default=lambda: default
        )["chunk_tokens"]
    fitting = LOGITS_BYTES // (vocab * lm_head.dtype.itemsize)
    return min(count, max(128, fitting // 128 * 128))


def fast_fits(vocab_on_device: int, itemsize: int) -> bool:
    """Returns whether *fast* is the default for a scalar loss.

    It is the default if a chunk that is large enough to be useful fits LOGITS_BYTES.
    """
    return vocab_on_device * itemsize * FEWEST_TOKENS <= LOGITS_BYTES


def devices_without_sharding(*arrays: Array) -> int:
    """Returns the devices among which the compiler itself would have to split a kernel.

    It can split only XLA's own operations. The devices are those in the mesh of the arguments or of
    `jax.set_mesh`, unless shard_map has split them already.
    """
    meshes = [jax.typeof(array).sharding.mesh for array in arrays] + [
        jax.sharding.get_abstract_mesh()
    ]
    return max(
        math.prod(mesh.shape[axis] for axis in mesh.axis_names if axis not in mesh.manual_axes)
        for mesh in meshes
    )
