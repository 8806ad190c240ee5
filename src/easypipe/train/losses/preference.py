"""Direct preference optimization: the chosen of two answers to a prompt shall become likelier.

Batches are what the pipeline makes of pairs: in every row, segments 1 and 2 are one pair's answers,
chosen first, 3 and 4 the next pair's, and so on; labels are -100 on prompts. How likely the model
was to give each token before training stands in the column `reference_log_probs`.

A micro-batches · B batch · S sequence · N segments of a row, 0 being padding
"""
# ruff: noqa: F722  (shapes in annotations are jaxtyping's, not Python)

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from easypipe.core.schema import IGNORE
from easypipe.kernels.loss.api import token_log_probs
from easypipe.train.config import PreferenceConfig
from easypipe.train.losses.loss import (
    Batch,
    LanguageModel,
    LossOutput,
    hidden_and_head,
    loss_sharding,
)
from easypipe.train.state import ModelLayout

REFERENCE = "reference_log_probs"

Arrays = Mapping[str, Array]


def log_probs(model: LanguageModel, batch: Batch) -> Float[Array, "B S"]:
    """log p of every label, in nats, 0 where there is none; float32.

    `model` and `batch` as for `loss_sums`; no logits exist as a whole.
    """
    arrays, of_model = hidden_and_head(model, batch)
    return token_log_probs(*arrays, sharding=loss_sharding(), **of_model)


def preference_loss(config: PreferenceConfig) -> Callable[[LanguageModel, Batch], LossOutput]:
    """Direct preference optimization (Rafailov et al., 2023, equation 7), for `Trainer(loss=...)`.

    Of each pair, with r the log-ratio log p(answer) - log p_reference(answer) of each answer,
    summed over its tokens, and β = beta: `-(1-ε)·log σ(β(r_chosen - r_rejected)) - ε·log
    σ(-β(r_chosen - r_rejected))`, ε = label_smoothing (Mitchell, 2023). Sums are over
    pairs: `num_targets` is their number; `more` has reward_margin, β(r_chosen - r_rejected), and
    reward_accuracy, how many are positive. Without the column `reference_log_probs` the reference
    is uniform.
    """
    beta, smoothing = config.beta, config.label_smoothing

    def loss(model: LanguageModel, batch: Batch) -> LossOutput:
        ratios_BS = log_probs(model, batch)
        if REFERENCE in batch:
            ratios_BS = ratios_BS - batch[REFERENCE]
        ratios_BN = _by_segment(ratios_BS, batch["segment_ids"])
        counts_BN = _by_segment(
            (batch["labels"] != IGNORE).astype(jnp.float32), batch["segment_ids"]
        )
        margins = beta * (ratios_BN[:, 1::2] - ratios_BN[:, 2::2])
        is_pair = (counts_BN[:, 1::2] > 0) & (counts_BN[:, 2::2] > 0)
        each = -(1 - smoothing) * jax.nn.log_sigmoid(margins) - smoothing * jax.nn.log_sigmoid(
            -margins
        )
        total = jnp.where(is_pair, each, 0.0).sum()
        seen = jax.lax.stop_gradient(margins)
        more = {
            "reward_margin": jnp.where(is_pair, seen, 0.0).sum(),
            "reward_accuracy": (is_pair & (seen > 0)).sum().astype(jnp.float32),
        }
        return LossOutput(total, is_pair.sum(dtype=jnp.int32), jax.lax.stop_gradient(total), more)

    return loss


class Reference:
    """The model as it was before training, which says how likely each label was to it.

    layout: of the model that is trained. Only what is trained is kept a second time: of a run with
    adapters, the adapters.
    """

    def __init__(self, layout: ModelLayout) -> None:
        self._params: Arrays | None = None

        def run(params: Arrays, rest: Arrays, batch: Arrays) -> Array:
            model: Any = layout.merge(params, rest)
            model.set_attributes(
                deterministic=True, use_running_average=True, raise_if_not_found=False
            )
            return log_probs(model, batch)

        def in_micro_batches(params: Arrays, rest: Arrays, batch: Arrays) -> Array:
            return jax.lax.map(lambda micro: run(params, rest, micro), batch)

        self._run, self._run_micro = jax.jit(run), jax.jit(in_micro_batches)

    def keep(self, params: Arrays) -> None:
        """Copies the trained parameters of the state before the first step, which that step would
        consume.
        """
        self._params = jax.tree.map(jnp.copy, dict(params))

    def added(self, rest: Arrays, batch: Arrays) -> dict[str, Array]:
        """The batch, with `reference_log_probs`: Float32, of the shape of its labels, [B, S] or [A,
        B/A, S]. rest: what is not trained.
        """
        assert self._params is not None, "keep() comes first"
        given = {
            name: batch[name]
            for name in ("input_ids", "labels", "segment_ids", "position_ids")
            if name in batch
        }
        run = self._run if given["input_ids"].ndim == 2 else self._run_micro
        return {**batch, REFERENCE: run(self._params, rest, given)}


def _by_segment(values: Float[Array, "B S"], segments: Array) -> Float[Array, "B N"]:
    """Sums over each segment.

    N: a column for padding, then two for every pair that a row could hold.
    """
    num_segments = 1 + 2 * -(-segments.shape[1] // 2)
    return jax.vmap(lambda row, ids: jax.ops.segment_sum(row, ids, num_segments))(values, segments)
