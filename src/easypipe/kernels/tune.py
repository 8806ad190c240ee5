"""Measures block sizes on the device at hand: what `easypipe kernels tune` runs. See tuning.py for the table.

T tokens · D width · V vocabulary
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from easypipe.core.errors import ConfigError
from easypipe.kernels import choice
from easypipe.kernels.api import fused_linear_cross_entropy
from easypipe.kernels.pallas_tpu_blocks import block_candidates, device_of, sizes_of
from easypipe.kernels.stats import Cotangents, Inputs
from easypipe.kernels.tuning import Entry, blocks_for, bucket, device_kind

CHUNK_TOKENS = (128, 256, 512, 1024, 2048, 4096)


@dataclass(frozen=True)
class Trial:
    """One choice of block sizes: its time, or why it does not run."""

    blocks: Mapping[str, int]
    ms: float | None
    failure: str | None = None


def tune(
    tokens: int, width: int, vocab: int, dtype: str, *, repeats: int = 5, on_trial: Callable[[Trial], None] = lambda trial: None
) -> Entry:
    """The fastest blocks, forward and backward, of the implementation that is the default on this device, as an entry of the table.

    The least of `repeats` runs counts: what else the machine does only ever adds. Raises ConfigError for sizes below 1, an unknown dtype,
    and where no blocks run at all.
    """
    for name, value in (("tokens", tokens), ("width", width), ("vocab", vocab), ("repeats", repeats)):
        if value < 1:
            raise ConfigError(at=name, problem=f"{value} is below 1", fix="Give the sizes of one device's share of the loss.")
    if dtype not in ("bfloat16", "float32"):
        raise ConfigError(at="dtype", problem=f"{dtype!r} is not an option", have=("bfloat16", "float32"), fix="Give that of the model.")
    name = choice.FAVOURITES.get(choice.platform_at_hand(), "chunked")
    trials = [
        _tried(name, blocks, tokens, width, vocab, dtype, repeats, on_trial) for blocks in _candidates(name, tokens, width, vocab, dtype)
    ]
    ran = [(trial.ms, trial.blocks) for trial in trials if trial.ms is not None]
    if not ran:
        reasons = "; ".join(sorted({trial.failure or "" for trial in trials}))
        raise ConfigError(at="kernels tune", problem=f"{name} runs with no blocks at all: {reasons}", fix="Give sizes that fit the device.")
    ms, blocks = min(ran, key=lambda one: one[0])
    key = {"device": device_kind(), "implementation": name, "tokens": bucket(tokens), "width": bucket(width), "vocab": bucket(vocab)}
    return Entry(**key, dtype=dtype, blocks=dict(blocks), source="measured", ms=round(ms, 3))


def _tried(name: str, blocks: Mapping[str, int], tokens: int, width: int, vocab: int, dtype: str, repeats: int, on_trial) -> Trial:
    try:
        trial = Trial(blocks, _milliseconds(_step(name, blocks), _arguments(tokens, width, vocab, dtype), repeats))
    except (
        ConfigError,
        ValueError,
        NotImplementedError,
        jax.errors.JaxRuntimeError,
    ) as error:  # too large for the device, or for the compiler
        trial = Trial(blocks, None, str(error).strip().splitlines()[0][:200])
    on_trial(trial)
    return trial


def _candidates(name: str, tokens: int, width: int, vocab: int, dtype: str) -> Iterator[Mapping[str, int]]:
    if name == "chunked":
        yield from ({"chunk_tokens": count} for count in CHUNK_TOKENS if count == CHUNK_TOKENS[0] or count < 2 * tokens)
    elif name == "pallas_tpu":
        sizes = sizes_of(tokens, width, vocab, dtype)
        yield from (blocks._asdict() for blocks in block_candidates(device_of(device_kind()), sizes))
    else:
        module = choice.kernel(name)
        start = {**module.DEFAULT_BLOCKS, **blocks_for(device_kind(), name, tokens, width, vocab, dtype, default=dict)}
        yield start
        yield from module.neighbours(start)


def _step(name: str, blocks: Mapping[str, int]) -> Callable[..., Any]:
    """Forward and backward: *fast* for "chunked", whose blocks are its chunks; *strict* for kernels, whose blocks are their tiles."""
    if name == "chunked":

        def loss(hidden, lm_head, labels):
            chunk = blocks["chunk_tokens"]
            return fused_linear_cross_entropy(hidden, lm_head, labels, layout="dv", implementation="chunked", rule="fast", chunk_size=chunk)

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    kernel = choice.kernel(name)

    def both(hidden, lm_head, labels):
        options: Any = {"layout": "dv", "soft_cap": None, "block": blocks}
        inputs = Inputs(hidden, lm_head, None, labels)
        stats = kernel.stats(inputs, **options)
        ones = jnp.ones_like(stats.lse)
        return stats, kernel.gradients(inputs, stats.lse, Cotangents(ones, -ones, 0 * ones), **options)

    return jax.jit(both)


def _arguments(tokens: int, width: int, vocab: int, dtype: str) -> tuple[jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.standard_normal((tokens, width), np.float32), jnp.dtype(dtype))
    lm_head = jnp.asarray(rng.standard_normal((width, vocab), np.float32) / np.sqrt(width), jnp.dtype(dtype))
    return hidden, lm_head, jnp.asarray(rng.integers(0, vocab, tokens), jnp.int32)


def _milliseconds(step: Callable[..., Any], arguments: tuple[jax.Array, ...], repeats: int) -> float:
    jax.block_until_ready(step(*arguments))  # compiles
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(step(*arguments))
        times.append(time.perf_counter() - start)
    return min(times) * 1e3
