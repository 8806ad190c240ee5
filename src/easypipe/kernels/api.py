"""The one door to the loss: hidden states and head in, token-weighted sums out. Full logits exist nowhere.

T tokens · D width · V vocabulary
"""
# ruff: noqa: F722  (shapes in annotations are jaxtyping's, not Python)

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from easypipe.core.errors import ConfigError, did_you_mean
from easypipe.core.schema import IGNORE
from easypipe.kernels import chunked, reference
from easypipe.kernels.chunked import LossSharding

__all__ = ["DEFAULT_CHUNK_SIZE", "Implementation", "LossOutput", "LossSharding", "fused_linear_cross_entropy"]

Implementation = Literal["auto", "reference", "chunked"]
DEFAULT_CHUNK_SIZE = (
    512  # on CPU at (4096, 1024, 50257): 14 % of the naive loss's memory, 0.8 of its time; 256 is as fast, 1024 is not faster
)


class LossOutput(NamedTuple):
    """Sums over tokens, so that micro-batches and processes add up exactly; divide by `num_targets` once, at the end."""

    loss_sum: Float[Array, ""]  # what is differentiated: cross entropy plus the z-loss term; float32 (float64 for float64 inputs)
    num_targets: Int[Array, ""]  # labels that are not IGNORE; int32
    nll_sum: Float[Array, ""]  # cross entropy alone, in nats, for perplexity; carries no gradient


def fused_linear_cross_entropy(
    hidden: Float[Array, "T D"],
    lm_head: Float[Array, "D V"],
    labels: Int[Array, " T"],
    *,
    z_loss: float = 0.0,
    implementation: Implementation = "auto",
    chunk_size: int = DEFAULT_CHUNK_SIZE,
    sharding: LossSharding | None = None,
) -> LossOutput:
    """Cross entropy of `softmax(hidden @ lm_head)` against `labels`, summed over the tokens whose label is not IGNORE (-100).

    Products are taken in the dtype of the inputs and accumulated in float32 (float64 for float64 inputs); gradients have the
    dtype of their input. Differentiable once, in reverse mode, in `hidden` and `lm_head`. A label outside [0, V) that is not
    IGNORE gives NaN, because a value cannot raise inside a compiled program.

    `implementation`: "reference" holds the T x V logits; "chunked" holds those of `chunk_size` tokens (per device, where
    `sharding` is given); "auto" is the fastest that runs here, which is "chunked".
    `sharding` says how the arguments lie on the mesh of `jax.set_mesh`; without it the compiler decides, rightly but slowly.

    Raises ConfigError for shapes that do not fit together, an unknown implementation, a sharding that the mesh lacks, a negative
    z_loss or a chunk_size below 1.
    """
    _check(hidden, lm_head, labels, z_loss, implementation, chunk_size)
    if sharding is not None and implementation == "reference":
        raise ConfigError(
            at="sharding", problem="the reference knows no sharding", fix="Leave it None, or choose implementation 'chunked'."
        )
    if implementation == "reference":
        nll_T, loss_T = reference.cross_entropy(hidden, lm_head, labels, z_loss)
        loss_sum, nll_sum = loss_T.sum(), nll_T.sum()
    else:
        sums: Any = chunked.loss_sums(hidden, lm_head, labels, float(z_loss), chunk_size, sharding)  # custom_vjp hides its type
        loss_sum, nll_sum = sums
    num_targets = (labels != IGNORE).sum(dtype=jnp.int32)
    return LossOutput(loss_sum, num_targets, jax.lax.stop_gradient(nll_sum))


def _check(hidden: Array, lm_head: Array, labels: Array, z_loss: float, implementation: str, chunk_size: int) -> None:
    if hidden.ndim != 2 or lm_head.ndim != 2 or labels.ndim != 1 or hidden.shape != (labels.shape[0], lm_head.shape[0]):
        raise ConfigError(
            at="fused_linear_cross_entropy",
            problem=f"shapes do not fit: hidden {hidden.shape}, lm_head {lm_head.shape}, labels {labels.shape}",
            fix="Give hidden [T, D], lm_head [D, V] and labels [T]; reshape [B, S, D] to [B * S, D].",
        )
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise ConfigError(at="labels", problem=f"dtype {labels.dtype} is no integer", fix="Give token ids as int32.")
    if implementation not in get_args(Implementation):
        options = get_args(Implementation)
        raise ConfigError(
            at="implementation", problem=f"{implementation!r} is not an option", have=options, fix=did_you_mean(implementation, options)
        )
    if z_loss < 0:
        raise ConfigError(at="z_loss", problem=f"{z_loss} is negative", fix="Give 0 for none; 1e-4 is usual.")
    if chunk_size < 1:
        raise ConfigError(
            at="chunk_size", problem=f"{chunk_size} tokens are no chunk", fix=f"Give at least 1; {DEFAULT_CHUNK_SIZE} is usual."
        )
