"""Distillation: moves the model at each target towards the likeliest tokens of a teacher.

The teacher's ids and log-probs are columns of the batch, next to the tokens.

B batch · S sequence · K tokens of the teacher · D width · V vocabulary
"""
# ruff: noqa: F722  (shapes in annotations are jaxtyping's, not Python)

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.scipy.special import logsumexp
from jaxtyping import Bool, Float, Int

from easypipe.core.errors import ConfigError, require
from easypipe.core.schema import IGNORE
from easypipe.core.values import Arguments
from easypipe.kernels.loss.api import LossSharding, token_log_probs
from easypipe.train.config import DistillConfig
from easypipe.train.parallel.mesh import constrain, vocab_axes

# hidden states and columns of the head that are multiplied at once, in numbers
GATHERED = 1 << 25
# by how much a teacher's probabilities may sum to more than 1, due to 16-bit rounding
ROUNDING = 0.02


class Teacher(NamedTuple):
    """The tokens that a teacher predicts for every label, with their log-probs."""

    ids: Int[Array, "B S K"]
    log_probs: Float[Array, "B S K"]
    known: Bool[Array, "B S"]  # whether there is a label, and the teacher has values for it


class Drawn(NamedTuple):
    """What distillation adds to the loss of a batch."""

    label_weights: Float[Array, "B S"]  # the weights of the labels' losses
    loss_sum: Float[Array, ""]  # weighted divergences, over the targets
    kl: tuple[Array, Array]  # their sum without the weight of distillation, and its divisor


def drawn(
    arrays: tuple[Array, ...],
    of_model: Arguments,
    batch: Mapping[str, Array],
    config: DistillConfig,
    weights: Float[Array, "B S"] | None,
    sharding: LossSharding | None,
) -> Drawn:
    """Returns what distillation adds to the loss of a batch.

    Args:
        arrays: Hidden states, head and labels.
        of_model: The layout of the head and the soft cap of the logits.
        batch: The batch, which has the teacher's columns.
        config: How the model is moved towards the teacher.
        weights: A weight for every label; None: each counts once.
        sharding: How the head is sharded, as for token_log_probs.
    """
    teacher = teacher_of(batch, config)
    each = jnp.ones((), jnp.float32) if weights is None else weights
    known = jnp.where(teacher.known, each, 0.0)
    hidden, head, labels = arrays
    found = divergences(hidden, head, labels, teacher, sharding=sharding, **of_model)
    total = (found * known).sum()
    kl = jax.lax.stop_gradient(total), known.sum()
    return Drawn(each - config.weight * known, config.weight * total, kl)


def teacher_of(batch: Mapping[str, Array], config: DistillConfig) -> Teacher:
    """Returns the teacher's columns of a batch, shifted like labels.

    Raises:
        ConfigError: The batch has no such columns, or their types or shapes do not fit.
    """
    columns: list[Array] = []
    for key, name in (("ids", config.ids), ("log_probs", config.log_probs)):
        at, fix = f"train.distill.{key}", "Name it in aligned_columns of every dataset."
        require(name in batch, at, f"the batches have no column {name!r}", fix, have=sorted(batch))
        column = batch[name]
        integers = jnp.issubdtype(column.dtype, jnp.integer)
        if integers != (key == "ids") or column.shape[:-1] != batch["labels"].shape:
            raise ConfigError(
                at=at,
                problem=f"column {name!r} is {column.dtype} of shape {column.shape}",
                fix="Give as many integers (ids) and floats (log-probs) for every token.",
            )
        # the last slot's label, if it has one, is in the next row
        columns.append(jnp.pad(column[:, 1:], ((0, 0), (0, 1), (0, 0))))
    ids, log_probs = columns
    require(
        ids.shape == log_probs.shape,
        "train.distill",
        f"{ids.shape[-1]} ids of the teacher for a token, and {log_probs.shape[-1]} log-probs",
        "Give as many of both.",
    )
    log_probs = log_probs.astype(jnp.float32)
    return Teacher(ids, log_probs, (batch["labels"] != IGNORE) & (log_probs != 0).any(-1))


def divergences(
    hidden: Float[Array, "B S D"],
    head: Float[Array, "D V"] | Float[Array, "V D"],
    labels: Int[Array, "B S"],
    teacher: Teacher,
    *,
    layout: Literal["dv", "vd"],
    logit_soft_cap: float | None = None,
    sharding: LossSharding | None = None,
) -> Float[Array, "B S"]:
    """Returns KL(teacher || model) at every label in nats, float32; 0 if the teacher has no values.

    The sum runs over the teacher's K tokens, with all others as one: `sum_k p_k log(p_k / q_k) + P
    log(P / Q)`, with P and Q what is left of 1. It is never more than the divergence over the whole
    vocabulary. It is NaN if an id is not a token, and if the p_k sum to more than 1.
    """
    places: Arguments = {"layout": layout, "logit_soft_cap": logit_soft_cap}
    own = token_log_probs(hidden, head, labels, sharding=sharding, **places)
    ids = jnp.concatenate([teacher.ids, jnp.maximum(labels, 0)[..., None]], -1)
    logits = _logits(hidden, head, ids.astype(jnp.int32), vd=layout == "vd")
    if logit_soft_cap is not None:
        logits = logit_soft_cap * jnp.tanh(logits / logit_soft_cap)
    # the label's log p and logit determine the log-sum-exp of all, with its gradient
    log_q = logits[..., :-1] - logits[..., -1:] + own[..., None]
    given = jnp.where(teacher.known[..., None], teacher.log_probs, -jnp.inf)
    likely, p = given > -jnp.inf, jnp.exp(given)
    each = jnp.where(likely, p * (jnp.where(likely, given, 0.0) - log_q), 0.0)
    total = p.sum(-1)
    left = jnp.maximum(1 - total, 0.0)
    of_model = logsumexp(jnp.where(likely, log_q, -1e30), axis=-1)
    rest = left * (
        jnp.log(jnp.maximum(left, 1e-30)) - jnp.log1p(-jnp.exp(jnp.minimum(of_model, -1e-6)))
    )
    found = jnp.where(total > 1 + ROUNDING, jnp.nan, each.sum(-1) + jnp.where(left > 0, rest, 0.0))
    return jnp.where(teacher.known, found, 0.0)


def _logits(
    hidden: Float[Array, "B S D"], head: Array, ids: Int[Array, "B S K"], *, vd: bool
) -> Float[Array, "B S K"]:
    """Returns the logits of some tokens, computed in pieces of the sequence; NaN for other ids."""
    table = constrain(head, vocab_axes(), None) if vd else constrain(head, None, vocab_axes())
    size = head.shape[0 if vd else 1]
    ids = jnp.where(ids < 0, size, ids)  # a negative id would count from the end

    @jax.checkpoint
    def piece(given: tuple[Array, Array]) -> Array:
        part, wanted = given
        rows = jnp.take(table, wanted, axis=0 if vd else 1, mode="fill", fill_value=jnp.nan)
        form = "bsd,bskd->bsk" if vd else "bsd,dbsk->bsk"
        return jnp.einsum(form, part, rows, preferred_element_type=jnp.float32)

    batch, slots, width = hidden.shape
    pieces = _pieces(slots, batch * width * ids.shape[-1])
    if pieces == 1:
        return piece((hidden, ids))
    cut = [
        jnp.moveaxis(array.reshape(batch, pieces, slots // pieces, array.shape[-1]), 1, 0)
        for array in (hidden, ids)
    ]
    return jnp.moveaxis(jax.lax.map(piece, (cut[0], cut[1])), 0, 1).reshape(ids.shape)


def _pieces(slots: int, numbers: int) -> int:
    """Returns the fewest equal pieces of a sequence that each gather at most GATHERED numbers.

    Args:
        slots: The length of the sequence; as many pieces as that are returned if no number fits.
        numbers: How many numbers a slot gathers.
    """
    fitting: Sequence[int] = [
        n for n in range(1, slots + 1) if slots % n == 0 and slots // n * numbers <= GATHERED
    ]
    return fitting[0] if fitting else slots
