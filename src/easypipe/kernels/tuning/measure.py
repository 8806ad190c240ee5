"""Measures block sizes for `easypipe kernels tune`, and rejects those with wrong values.

T tokens · D width · V vocabulary
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from easypipe.core.errors import ConfigError, require
from easypipe.kernels.loss import choice, reference
from easypipe.kernels.loss.api import fused_linear_cross_entropy
from easypipe.kernels.loss.stats import Cotangents, Inputs
from easypipe.kernels.loss.tpu.blocks import block_candidates, device_of, sizes_of
from easypipe.kernels.tuning.table import Entry, blocks_for, bucket, device_kind

CHUNK_TOKENS = (128, 256, 512, 1024, 2048, 4096)
REFERENCE_TOKENS = 128  # the reference holds the logits of this many tokens at once
ROUNDING = {"bfloat16": 0.05, "float32": 1e-3}
"""How far an array may be from the reference, as a share of its norm. Rounding errs by a tenth of
this; a block that is read twice, left out or shifted errs by far more."""


Arguments = tuple[jax.Array, jax.Array, jax.Array]  # hidden [T, D], lm_head [D, V], labels [T]
Values = tuple[jax.Array, jax.Array, jax.Array]  # mean loss, d_hidden, d_lm_head


@dataclass(frozen=True)
class Trial:
    """One choice of block sizes: its time, or why it does not run."""

    blocks: Mapping[str, int]
    ms: float | None
    failure: str | None = None


def tune(
    tokens: int,
    width: int,
    vocab: int,
    dtype: str,
    *,
    repeats: int = 5,
    on_trial: Callable[[Trial], None] = lambda trial: None,
) -> Entry:
    """Returns the fastest blocks of the default implementation, forward and backward, as an entry.

    A choice is timed after its values agree with the reference. The least of `repeats` runs counts:
    other load on the machine can only add to it. Raises ConfigError for sizes below 1 or an unknown
    dtype, and if no blocks run and return right values.
    """
    for at, value in (
        ("tokens", tokens),
        ("width", width),
        ("vocab", vocab),
        ("repeats", repeats),
    ):
        require(
            value >= 1,
            at,
            f"{value} is below 1",
            "Give the sizes of one device's share of the loss.",
        )
    require(
        dtype in ("bfloat16", "float32"),
        "dtype",
        f"{dtype!r} is not an option",
        "Give that of the model.",
        have=("bfloat16", "float32"),
    )
    name: choice.Implementation = choice.FAVOURITES.get(choice.platform_at_hand(), "chunked")
    arguments = _arguments(tokens, width, vocab, dtype)
    wanted = _wanted(*arguments)
    trials = []
    for blocks in _candidates(name, tokens, width, vocab, dtype):
        trials.append(_tried(name, blocks, arguments, wanted, repeats))
        on_trial(trials[-1])
    ran = [(trial.ms, trial.blocks) for trial in trials if trial.ms is not None]
    if not ran:
        reasons = "; ".join(sorted({trial.failure or "" for trial in trials}))
        raise ConfigError(
            at="kernels tune",
            problem=f"{name} does not run with any blocks: {reasons}",
            fix="Give sizes that fit the device.",
        )
    ms, blocks = min(ran, key=lambda one: one[0])
    sizes = {"tokens": bucket(tokens), "width": bucket(width), "vocab": bucket(vocab)}
    return Entry(
        device=device_kind(),
        implementation=name,
        **sizes,
        dtype=dtype,
        blocks=dict(blocks),
        source="measured",
        ms=round(ms, 3),
    )


def _tried(
    name: choice.Implementation,
    blocks: Mapping[str, int],
    arguments: Arguments,
    wanted: Values,
    repeats: int,
) -> Trial:
    """Checks and times one choice of blocks."""
    try:
        step = _step(name, blocks)
        if problem := _problem(step(*arguments), wanted, arguments[1].dtype.name):
            return Trial(blocks, None, problem)
        return Trial(blocks, _milliseconds(step, arguments, repeats))
    # these blocks are too large for the device or its compiler
    except (ConfigError, ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
        return Trial(blocks, None, str(error).strip().splitlines()[0][:200])


def _problem(found: Values, wanted: Values, dtype: str) -> str | None:
    """Returns which value differs from the reference by more than rounding, or None."""
    for what, ours, exact in zip(("loss", "d_hidden", "d_lm_head"), found, wanted, strict=True):
        ours, exact = ours.astype(jnp.float32), exact.astype(jnp.float32)
        error = float(jnp.linalg.norm(ours - exact) / jnp.linalg.norm(exact))
        if not error <= ROUNDING[dtype]:  # true for nan, too
            return f"wrong values: {what} differs from the reference by {error:.1%}"
    return None


@jax.jit
def _wanted(hidden: jax.Array, lm_head: jax.Array, labels: jax.Array) -> Values:
    """Returns the mean loss and its gradients by the reference.

    It takes some tokens at a time, so that the logits of all tokens never exist at once.
    """
    count = labels.shape[0]
    pieces = -(-count // REFERENCE_TOKENS)

    def some(d_head: jax.Array, start: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        place = start + jnp.arange(REFERENCE_TOKENS)
        # the weight of a token; it is 0 past the end, where the last token is read
        inside = (place < count).astype(jnp.float32) / count
        inputs = Inputs(
            hidden.at[place].get(mode="clip"), lm_head, None, labels.at[place].get(mode="clip")
        )
        stats = reference.stats(inputs, layout="dv", soft_cap=None)
        grads = reference.gradients(
            inputs,
            stats.lse,
            Cotangents(inside, -inside, 0 * inside),
            grad_dtype=jnp.float32,
            layout="dv",
            soft_cap=None,
        )
        return d_head + grads.lm_head, (((stats.lse - stats.target) * inside).sum(), grads.hidden)

    starts = jnp.arange(pieces) * REFERENCE_TOKENS
    d_head, (losses, d_hidden) = jax.lax.scan(some, jnp.zeros(lm_head.shape, jnp.float32), starts)
    return losses.sum(), d_hidden.reshape(-1, hidden.shape[1])[:count], d_head


def _candidates(
    name: choice.Implementation, tokens: int, width: int, vocab: int, dtype: str
) -> Iterator[Mapping[str, int]]:
    """Yields the blocks that are worth measuring for an implementation."""
    if name == "chunked":
        yield from (
            {"chunk_tokens": count}
            for count in CHUNK_TOKENS
            if count == CHUNK_TOKENS[0] or count < 2 * tokens
        )
    elif name == "pallas_tpu":
        sizes = sizes_of(tokens, width, vocab, dtype)
        yield from (
            blocks._asdict() for blocks in block_candidates(device_of(device_kind()), sizes)
        )
    else:
        # jax releases sometimes drop a backend of Pallas, so it is imported where it runs
        from easypipe.kernels.loss.gpu import kernel as gpu

        start = blocks_for(
            device_kind(), name, tokens, width, vocab, dtype, default=lambda: gpu.DEFAULT_BLOCKS
        )
        yield start
        yield from gpu.neighbours(start)


def _step(name: choice.Implementation, blocks: Mapping[str, int]) -> Callable[..., Values]:
    """Returns a function of the mean loss and its gradients.

    It is *fast* for "chunked", whose blocks are its chunks, and *strict* for kernels, whose blocks
    are tiles.
    """
    if name == "chunked":

        def mean_loss(hidden: jax.Array, lm_head: jax.Array, labels: jax.Array) -> jax.Array:
            return fused_linear_cross_entropy(
                hidden,
                lm_head,
                labels,
                layout="dv",
                implementation="chunked",
                rule="fast",
                chunk_size=blocks["chunk_tokens"],
            )

        def fast(hidden: jax.Array, lm_head: jax.Array, labels: jax.Array) -> Values:
            loss = jax.value_and_grad(mean_loss, argnums=(0, 1))
            value, grads = loss(hidden, lm_head, labels)
            return value, *grads

        return jax.jit(fast)
    kernel = choice.kernel(name)

    def strict(hidden: jax.Array, lm_head: jax.Array, labels: jax.Array) -> Values:
        inputs = Inputs(hidden, lm_head, None, labels)
        stats = kernel.stats(inputs, layout="dv", soft_cap=None, block=blocks)
        share = jnp.full_like(stats.lse, 1 / labels.shape[0])
        g = Cotangents(share, -share, 0 * share)
        grads = kernel.gradients(inputs, stats.lse, g, layout="dv", soft_cap=None, block=blocks)
        return ((stats.lse - stats.target) * share).sum(), grads.hidden, grads.lm_head

    return jax.jit(strict)


def _arguments(tokens: int, width: int, vocab: int, dtype: str) -> Arguments:
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.standard_normal((tokens, width), np.float32), jnp.dtype(dtype))
    lm_head = jnp.asarray(
        rng.standard_normal((width, vocab), np.float32) / np.sqrt(width), jnp.dtype(dtype)
    )
    return hidden, lm_head, jnp.asarray(rng.integers(0, vocab, tokens), jnp.int32)


def _milliseconds(step: Callable[..., Values], arguments: Arguments, repeats: int) -> float:
    jax.block_until_ready(step(*arguments))  # compiles
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(step(*arguments))
        times.append(time.perf_counter() - start)
    return min(times) * 1e3
