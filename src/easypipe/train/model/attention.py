"""Attention over packed rows, for every layer: choice of the backend, masks, KV cache.

Backends: "xla" holds all scores and runs everywhere; "splash" (TPU) and "triton" (NVIDIA) hold a
block of them. All obey the isolation law: no slot sees another segment, in value or gradient.

B batch · S sequence · H query heads · K key and value heads · G query heads of a key head · h head
width
"""
# ruff: noqa: F722  (shapes in annotations are jaxtyping's, not Python)

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int, PyTree

from easypipe.core.errors import ConfigError
from easypipe.kernels.loss.choice import missing, platform_at_hand
from easypipe.train.model.config import TRITON_WIDTHS, AttentionBackend, ModelConfig
from easypipe.train.parallel.config import axes_of
from easypipe.train.parallel.mesh import BATCH_AXES, TOKEN_AXES, constrain, fitting, on_mesh, rules

logger = logging.getLogger("easypipe")

# The preferred backend by platform; on others "xla".
FAVOURITES: dict[str, AttentionBackend] = {"tpu": "splash", "cuda": "triton"}
SLOTS = 128  # the fused kernels need row lengths of a multiple of this; rows are padded to it


class Scores(NamedTuple):
    """How the attention scores of a layer are computed.

    Attributes:
        window: The most slots that a slot sees, the nearest ones; None: all.
        windowed: Whether this layer has that window. It may be traced, so that one compiled layer
            serves both kinds.
        scale: The factor of the scores; None for h^-1/2.
        soft_cap: c: scores become c·tanh(score/c).
    """

    window: int | None = None
    windowed: Bool[Array, ""] | bool = True
    scale: float | None = None
    soft_cap: float | None = None

    def scale_for(self, query: Array) -> float:
        return float(query.shape[-1] ** -0.5) if self.scale is None else self.scale


def attend(
    query_BSHh: Float[Array, "B S H h"],
    key_BSKh: Float[Array, "B S K h"],
    value_BSKh: Float[Array, "B S K h"],
    segment_ids: Int[Array, "B S"],
    scores: Scores | None = None,
    backend: AttentionBackend | None = None,
) -> Float[Array, "B S H h"]:
    """Returns each query's mean of the values it may see, weighted by its attention.

    The weights are softmax(cap(query·key·scale)).

    Scores are float32. A slot sees the slots of its own segment that are not after it, itself
    included. Segments are contiguous; padding (id 0) sees padding.

    Args:
        query_BSHh: The queries.
        key_BSKh: The keys.
        value_BSKh: The values.
        segment_ids: The segment of each slot; 0 is padding.
        scores: How scores are computed; default: without window and cap.
        backend: None takes the platform's preferred backend, or "xla" if that cannot run.

    Raises:
        ConfigError: The given backend cannot run.
    """
    scores = scores or Scores()
    backend = choose(backend, query_BSHh.shape[-1], query_BSHh.dtype)
    if backend == "xla":
        mask_BSS = segment_mask(segment_ids)
        if scores.window is not None:
            length = segment_ids.shape[1]
            mask_BSS &= _near(length, jnp.where(scores.windowed, scores.window, length))
        # Every query needs the keys of its whole row.
        if on_mesh() and jax.sharding.get_abstract_mesh().shape["sequence"] > 1:
            query_BSHh = constrain(query_BSHh, *TOKEN_AXES, head_axes(), None)
            key_BSKh, value_BSKh = (
                constrain(array, BATCH_AXES, None, head_axes(), None)
                for array in (key_BSKh, value_BSKh)
            )
        return _xla(query_BSHh, key_BSKh, value_BSKh, mask_BSS, scores)
    fused = _splash if backend == "splash" else _triton
    length = segment_ids.shape[1]
    shards = jax.sharding.get_abstract_mesh().shape.get("sequence", 1) if on_mesh() else 1
    missing = -length % (SLOTS * shards)
    query, key, value = query_BSHh, key_BSKh, value_BSKh
    if missing:
        query, key, value = (
            jnp.pad(array, ((0, 0), (0, missing), (0, 0), (0, 0))) for array in (query, key, value)
        )
        # The padding is a segment of its own that no slot sees.
        segment_ids = jnp.pad(segment_ids, ((0, 0), (0, missing)), constant_values=-1)
    mixed = fused(query, key, value, segment_ids, scores)
    return mixed[:, :length] if missing else mixed


class KVCache(NamedTuple):
    """The keys and values of every layer: slot t of a row holds those of its token t.

    No token sees the slots after its own, whatever they hold.
    """

    keys: Float[Array, "L B C K h"]
    values: Float[Array, "L B C K h"]

    @classmethod
    def empty(cls, config: ModelConfig, rows: int, slots: int) -> KVCache:
        """Returns a cache of zeros, with rows and heads divided over the mesh.

        It has 2·L·B·C·K·h numbers of `config.dtype`.
        """
        shape = (config.num_layers, rows, slots, config.num_kv_heads, config.head_width)
        zeros = jnp.zeros(shape, config.dtype)
        laid = constrain(zeros, None, BATCH_AXES, None, head_axes() if on_mesh() else None, None)
        return cls(laid, laid)

    def written(
        self,
        layer: Int[Array, ""],
        position_ids: Int[Array, "B T"],
        key_BTKh: Float[Array, "B T K h"],
        value_BTKh: Float[Array, "B T K h"],
    ) -> KVCache:
        """Returns the cache with the keys and values of some tokens written in one layer."""
        at = (layer, jnp.arange(position_ids.shape[0])[:, None], position_ids)
        return KVCache(self.keys.at[at].set(key_BTKh), self.values.at[at].set(value_BTKh))


def attend_cached(
    query_BTHh: Float[Array, "B T H h"],
    key_BCKh: Float[Array, "B C K h"],
    value_BCKh: Float[Array, "B C K h"],
    position_ids: Int[Array, "B T"],
    scores: Scores,
) -> Float[Array, "B T H h"]:
    """Does what `attend` does, for tokens of rows whose keys and values are in a cache.

    Each row is one segment, and each cached token has the slot of its position.

    Args:
        query_BTHh: The queries of the tokens.
        key_BCKh: The cached keys.
        value_BCKh: The cached values.
        position_ids: The position of each token in its row.
        scores: How scores are computed.
    """
    slots = key_BCKh.shape[1]
    ago_BTC = position_ids[:, :, None] - jnp.arange(slots)
    reach = slots if scores.window is None else jnp.where(scores.windowed, scores.window, slots)
    mask_BTC = (ago_BTC >= 0) & (ago_BTC < reach)
    return _xla(query_BTHh, key_BCKh, value_BCKh, mask_BTC, scores)


def choose(backend: AttentionBackend | None, head_width: int, dtype: DTypeLike) -> AttentionBackend:
    """Returns the backend that will run on the current platform.

    If the platform's preferred backend cannot run, "xla" runs instead, with a warning.

    Raises:
        ConfigError: The given backend cannot run.
    """
    platform = platform_at_hand()
    wanted = FAVOURITES.get(platform, "xla") if backend is None else backend
    if wanted == "xla":
        return wanted
    own = next(name for name, favourite in FAVOURITES.items() if favourite == wanted)
    problem = None
    if platform not in (own, "cpu"):
        problem = f"{wanted!r} is for {own}, and this program is for {platform}"
    elif jnp.dtype(dtype).itemsize > 4:
        problem = f"{wanted!r} supports bfloat16 and float32, not {jnp.dtype(dtype).name}"
    elif wanted == "triton" and head_width not in TRITON_WIDTHS:
        problem = (
            f"'triton' supports heads of width {', '.join(map(str, TRITON_WIDTHS))}, and this "
            f"model's have {head_width}"
        )
    elif (reason := missing(f"easypipe.kernels.attention.{wanted}")) is not None:
        problem = f"{wanted!r} cannot run: {reason}"
    if problem is None:
        if platform == "cpu":
            _warn_once(
                f"attention {wanted!r} is interpreted on cpu: right, and far slower than 'xla'"
            )
        return wanted
    if backend is None:
        _warn_once(f"attention runs by 'xla', which holds all scores: {problem}")
        return "xla"
    favourite = FAVOURITES.get(platform, "xla")
    fix = "Leave attention out, and the fastest that can run is taken" + (
        f" (here {favourite!r})." if favourite != wanted else "."
    )
    raise ConfigError(at="model.attention", problem=problem, fix=fix)


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning("%s", message)


def head_axes() -> tuple[str, ...]:
    """Returns the mesh axes over which heads are divided.

    They are those of the rules that divide neither rows nor slots.
    """
    return tuple(
        axis for axis in axes_of(rules()["heads"]) if axis not in (*BATCH_AXES, "sequence")
    )


def segment_mask(segment_ids: Int[Array, "B S"]) -> Bool[Array, "B S S"]:
    """Returns True if query slot s may see key slot t: same segment, t not after s.

    Padding sees padding, so that no row of the mask is empty.
    """
    causal_SS = jnp.tril(jnp.ones((segment_ids.shape[1],) * 2, dtype=bool))
    return (segment_ids[:, :, None] == segment_ids[:, None, :]) & causal_SS


def _near(length: int, window: Int[Array, ""]) -> Bool[Array, "S S"]:
    """Returns True if key slot t is less than `window` before query slot s.

    Segments are contiguous, so slots count like positions.
    """
    index_S = jnp.arange(length)
    return index_S[:, None] - index_S[None, :] < window


def _xla(
    query_BSHh: Array,
    key_BSKh: Array,
    value_BSKh: Array,
    mask_BSS: Array,
    scores: Scores,
) -> Array:
    """Attention by XLA, which holds all scores."""
    soft_cap = scores.soft_cap
    if soft_cap is None:
        return jax.nn.dot_product_attention(
            query_BSHh, key_BSKh, value_BSKh, mask=mask_BSS[:, None], scale=scores.scale
        )
    batch, length, heads, head = query_BSHh.shape
    grouped_BSKGh = query_BSHh.reshape(batch, length, key_BSKh.shape[2], -1, head)
    scores_BKGST = jnp.einsum(
        "bskgh,btkh->bkgst", grouped_BSKGh, key_BSKh, preferred_element_type=jnp.float32
    )
    scores_BKGST = soft_cap * jnp.tanh(scores_BKGST * (scores.scale_for(query_BSHh) / soft_cap))
    shares_BKGST = jax.nn.softmax(
        jnp.where(mask_BSS[:, None, None], scores_BKGST, -jnp.inf), axis=-1
    )
    mixed_BSKGh = jnp.einsum("bkgst,btkh->bskgh", shares_BKGST.astype(value_BSKh.dtype), value_BSKh)
    return mixed_BSKGh.reshape(batch, length, heads, head)


def _splash(query: Array, key: Array, value: Array, segment_ids: Array, scores: Scores) -> Array:
    """Attention by the splash kernel of TPUs, each device on its own rows and heads."""
    from easypipe.kernels.attention import splash as kernels

    where = _Layout(query, key)
    make = functools.partial(
        kernels.make_kernel,
        where.local_heads,
        segment_ids.shape[1],
        where.shards,
        soft_cap=scores.soft_cap,
        interpret=platform_at_hand() == "cpu",
    )
    window, windowed = scores.window, scores.windowed

    def run(kernel: kernels.splash.SplashAttentionKernel) -> Array:
        local = functools.partial(kernels.attention, scale=scores.scale_for(query))
        specs = (
            where.query,
            where.key,
            where.key,
            where.slots,
            where.row,
            kernels.kernel_specs(kernel, where.sequence),
        )
        return where.over(local, specs)(
            query, where.repeated(key), where.repeated(value), segment_ids, segment_ids, kernel
        )

    if window is None or isinstance(windowed, bool):
        return run(make(window=window if windowed is True else None))
    return jax.lax.cond(windowed, lambda: run(make(window=window)), lambda: run(make(window=None)))


def _triton(query: Array, key: Array, value: Array, segment_ids: Array, scores: Scores) -> Array:
    """Attention by the Triton kernel of NVIDIA GPUs, each device on its own rows and heads."""
    from easypipe.kernels.attention import triton as kernels

    where = _Layout(query, key)
    slots = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)
    first, last = runs(segment_ids)
    if scores.window is not None:
        reach = jnp.where(scores.windowed, scores.window, slots.size) - 1
        first, last = jnp.maximum(first, slots - reach), jnp.minimum(last, slots + reach)
    options = kernels.Options(scores.scale_for(query), scores.soft_cap, platform_at_hand() == "cpu")

    def local(query: Array, key: Array, value: Array, *runs: Array) -> Array:
        return kernels.attention(query, key, value, kernels.Runs(*runs), options)

    specs = (where.query, where.key, where.key, P(where.sequence), where.slots, where.row)
    return where.over(local, specs)(
        query, where.repeated(key), where.repeated(value), slots, first, last
    )


def runs(segment_ids: Int[Array, "B S"]) -> tuple[Int[Array, "B S"], Int[Array, "B S"]]:
    """Returns the first and the last slot of every slot's segment."""
    slots = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)
    changes = segment_ids[:, 1:] != segment_ids[:, :-1]
    begins = jnp.pad(changes, ((0, 0), (1, 0)), constant_values=True)
    ends = jnp.pad(changes, ((0, 0), (0, 1)), constant_values=True)
    first = jax.lax.cummax(jnp.where(begins, slots, 0), axis=1)
    return first, jax.lax.cummin(jnp.where(ends, slots, slots.size - 1), axis=1, reverse=True)


class _Layout:
    """The sharding of the arrays of attention: rows over the batch axes, queries over `sequence`.

    Heads are divided by the rules. The compiler cannot divide a kernel, so each device runs it on
    its own part; keys and values of a row are gathered over `sequence`.
    """

    def __init__(self, query_BSHh: Array, key_BSKh: Array) -> None:
        batch, _, heads, _ = query_BSHh.shape
        self.mesh = on_mesh()
        shape = jax.sharding.get_abstract_mesh().shape if self.mesh else {}
        rows, over = (
            (fitting(batch, BATCH_AXES), fitting(heads, head_axes())) if self.mesh else (None, None)
        )
        parts = math.prod(shape[axis] for axis in over or ())
        self.sequence = "sequence" if shape.get("sequence", 1) > 1 else None
        self.shards = shape["sequence"] if self.sequence else 1
        self.local_heads = heads // parts
        # With fewer key heads than devices, each device gets a copy of one.
        self.copies = 1 if key_BSKh.shape[2] % parts == 0 else heads // key_BSKh.shape[2]
        self.query, self.key = P(rows, self.sequence, over, None), P(rows, None, over, None)
        self.slots, self.row = P(rows, self.sequence), P(rows, None)

    def repeated(self, key_BSKh: Array) -> Array:
        return key_BSKh if self.copies == 1 else jnp.repeat(key_BSKh, self.copies, axis=2)

    def over(
        self, function: Callable[..., Array], specs: tuple[PyTree, ...]
    ) -> Callable[..., Array]:
        """Returns `function` in the form in which each device runs it on its own part."""
        # Every axis that divides an input also divides the result, or is an axis over which it is
        # summed (keys and values). So autodiff through shard_map is correct here; it is not if a
        # result is replicated.
        return (
            jax.shard_map(function, in_specs=specs, out_specs=self.query, check_vma=False)
            if self.mesh
            else function
        )
