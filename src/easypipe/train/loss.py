"""The loss of a batch, as sums that micro-batches and processes add up.

B batch · S sequence · D width · V vocabulary
"""
# ruff: noqa: F722  (shapes in annotations are jaxtyping's, not Python)

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from easypipe.core.schema import IGNORE
from easypipe.kernels.api import Implementation, LossSharding, Rule, fused_linear_cross_entropy
from easypipe.train.axes import BATCH_AXES, on_mesh, rules, vocab_axes
from easypipe.train.mesh_config import axes_of


class LossOutput(NamedTuple):
    """Sums over tokens, so that micro-batches and processes add up exactly; divide by `num_targets` once, at the end."""

    loss_sum: Float[Array, ""]  # what is differentiated: cross entropy, smoothed, plus the z-loss; float32 (float64 for float64 inputs)
    num_targets: Int[Array, ""]  # labels that are not IGNORE; int32
    nll_sum: Float[Array, ""]  # cross entropy alone, in nats, for perplexity; carries no gradient


def loss_sums(
    model: Any,
    batch: Mapping[str, Array],
    *,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    implementation: Implementation | None = None,
    rule: Rule | None = None,
    chunk_size: int | None = None,
) -> LossOutput:
    """Token-weighted sums of the loss of a batch: `(loss_sum, num_targets, nll_sum)`, see LossOutput.

    `model` has Decoder's `hidden` and `lm_head`; where its head is [V, D], its attribute `lm_head_layout` is "vd";
    where its logits are capped, `logit_soft_cap` is by how much.
    `batch` holds `input_ids` and `labels`, Int[B, S], and, where rows are packed, `segment_ids` and `position_ids`. Labels are already
    shifted (collate did it), and -100 where a slot is not trained. A label outside the vocabulary makes the loss NaN, because a
    compiled program cannot raise. Options, and what is raised, as in fused_linear_cross_entropy.
    """
    hidden_BSD = model.hidden(batch["input_ids"], batch.get("segment_ids"), batch.get("position_ids"))
    out = fused_linear_cross_entropy(
        hidden_BSD,
        model.lm_head(),
        batch["labels"],
        z_loss=z_loss,
        label_smoothing=label_smoothing,
        logit_soft_cap=getattr(model, "logit_soft_cap", None),
        reduction="sum",
        with_tokens=True,
        layout=getattr(model, "lm_head_layout", "dv"),
        sharding=_sharding() if on_mesh() and implementation != "reference" else None,
        implementation=implementation,
        rule=rule,
        chunk_size=chunk_size,
    )
    num_targets = (batch["labels"] != IGNORE).sum(dtype=jnp.int32)
    outside = num_targets - out.tokens.counted.sum(dtype=jnp.int32)
    return LossOutput(jnp.where(outside > 0, jnp.nan, out.loss), num_targets, -out.tokens.log_probs.sum())


def _sharding() -> LossSharding:
    """How hidden states and head lie on this run's mesh; a head that is divided as the rows are is gathered first."""
    return LossSharding(tokens=BATCH_AXES, embed=axes_of(rules()["embed"]), vocab=vocab_axes(), sequence=("sequence",))
