"""Losses of answers that are judged one by one: Kahneman-Tversky optimization, and unpaired APO.

In every row a segment is a prompt and its answer. Labels are -100 on prompts, and the column
`desirable` is 1 on the tokens of desirable answers.

B batch · S sequence · N segments of a row, 0 being padding
"""
# ruff: noqa: F722  (shapes in annotations are jaxtyping's, not Python)

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jax.nn import sigmoid
from jaxtyping import Bool, Float

from easypipe.core.aligned import DESIRABLE
from easypipe.core.schema import IGNORE
from easypipe.train.config import PreferenceConfig
from easypipe.train.losses.loss import Batch, LanguageModel, LossOutput
from easypipe.train.losses.preference import (
    COLUMNS,
    REFERENCE,
    REFERENCE_ELSEWHERE,
    by_segment,
    log_probs,
)


def answer_losses(
    ratios: Float[Array, "*answers"],
    desirable: Bool[Array, "*answers"],
    kl: Float[Array, ""],
    config: PreferenceConfig,
) -> Float[Array, "*answers"]:
    """Returns the loss of each answer, by TRL's formulas.

    They are Ethayarajh et al., 2024, equation 8, and D'Oosterlinck et al., 2024, equation 7.

    Args:
        ratios: The log-ratio of each answer to the reference, in nats.
        desirable: Whether each answer is desirable.
        kl: The estimated divergence of the model from its reference; 0 for apo_zero_unpaired.
        config: The options of the loss.
    """
    weights = jnp.where(desirable, config.desirable_weight, config.undesirable_weight)
    better = config.beta * (ratios - kl)
    return weights * (1 - sigmoid(jnp.where(desirable, better, -better)))


def unpaired_loss(config: PreferenceConfig) -> Callable[[LanguageModel, Batch], LossOutput]:
    """Returns the loss named by `config.loss`, for `Trainer(loss=...)`.

    Its sums are over answers: `num_targets` is their number. `ratios` has reward_desirable and
    reward_undesirable, the means of β times the log-ratios, and kl.
    """

    def loss(model: LanguageModel, batch: Batch) -> LossOutput:
        ratios_BN, is_answer = _ratios(model, batch, REFERENCE)
        desirable = by_segment(batch[DESIRABLE.name].astype(jnp.int32), batch["segment_ids"]) > 0
        kl, count = jnp.zeros(()), jnp.ones(())
        if config.loss == "kto":
            elsewhere = answers_elsewhere(batch)
            if REFERENCE_ELSEWHERE in batch:
                elsewhere[REFERENCE_ELSEWHERE] = batch[REFERENCE_ELSEWHERE]
            found, there = _ratios(model, elsewhere, REFERENCE_ELSEWHERE)
            kl, count = jnp.where(there, found, 0.0).sum(), there.sum()
            kl = jax.lax.stop_gradient(jnp.maximum(kl / jnp.maximum(count, 1), 0.0))
        losses = answer_losses(ratios_BN, desirable[:, 1:], kl, config)
        total = jnp.where(is_answer, losses, 0.0).sum()
        rewards = jax.lax.stop_gradient(config.beta * ratios_BN)
        means = {"kl": (kl * count, count)} if config.loss == "kto" else {}
        for name, side in (("desirable", True), ("undesirable", False)):
            here = is_answer & (desirable[:, 1:] == side)
            means[f"reward_{name}"] = jnp.where(here, rewards, 0.0).sum(), here.sum()
        nll, number = jax.lax.stop_gradient(total), is_answer.sum(dtype=jnp.int32)
        return LossOutput(total, number, nll, {}, None, means)

    return loss


def answers_elsewhere(batch: Batch) -> dict[str, Array]:
    """Returns the same rows with each prompt followed by the answer of the next prompt of its row.

    The last prompt is followed by the first answer. A row with one answer has no targets.
    """
    given = {name: batch[name] for name in COLUMNS}
    return jax.vmap(_turned)(given)


def _turned(row: dict[str, Array]) -> dict[str, Array]:
    """Does `answers_elsewhere` for one row."""
    segments, positions = row["segment_ids"], row["position_ids"]
    slots = jnp.arange(len(segments), dtype=jnp.int32)  # int64 would change the dtype of the sums
    # The label of a slot is the next token, so an answer begins after the first slot with a label.
    labelled = (row["labels"] != IGNORE) & (segments > 0)
    sizes = jnp.zeros(len(segments) + 2, jnp.int32).at[segments].add(1)
    prompts = jnp.full(len(segments) + 2, len(segments), jnp.int32)
    prompts = prompts.at[segments].min(jnp.where(labelled, positions + 1, len(segments)))
    prompts = jnp.minimum(prompts, sizes)
    begins = jnp.full(len(segments) + 2, len(segments), jnp.int32).at[segments].min(slots)
    count = segments.max()
    numbers = jnp.arange(len(segments) + 2)
    following = jnp.where(numbers < count, numbers + 1, 1)
    there = (numbers >= 1) & (numbers <= count)
    lengths = jnp.where(there, prompts + (sizes - prompts)[following], 0)
    ends = jnp.cumsum(lengths)
    own = jnp.searchsorted(ends, slots, side="right")
    filled = slots < ends[-1]
    own = jnp.where(filled, own, 0)
    place = jnp.where(filled, slots - (ends - lengths)[own], 0)
    of_prompt = place < prompts[own]
    other = following[own]
    source = jnp.where(
        of_prompt, begins[own] + place, begins[other] + prompts[other] + place - prompts[own]
    )
    source = jnp.clip(source, 0, len(slots) - 1)
    ids = jnp.where(filled, row["input_ids"][source], 0)
    trained = jnp.roll(labelled, 1)[source]  # whether a token was a target in its old place
    is_target = filled & jnp.roll(trained, -1) & (place + 1 < lengths[own]) & (count > 1)
    return {
        "input_ids": ids,
        "labels": jnp.where(is_target, jnp.roll(ids, -1), IGNORE),
        "segment_ids": jnp.where(filled, own, 0).astype(segments.dtype),
        "position_ids": place.astype(positions.dtype),
    }


def _ratios(model: LanguageModel, batch: Batch, reference: str) -> tuple[Array, Array]:
    """Returns the log-ratio of every answer, and whether the answer exists: each [B, N - 1]."""
    ratios_BS = log_probs(model, batch)
    if reference in batch:
        ratios_BS = ratios_BS - batch[reference]
    counts = by_segment((batch["labels"] != IGNORE).astype(jnp.int32), batch["segment_ids"])
    return by_segment(ratios_BS, batch["segment_ids"])[:, 1:], counts[:, 1:] > 0
