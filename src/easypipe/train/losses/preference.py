"""Losses of preference pairs, DPO and its relatives; the copy of the reference model that they use.

Batches are made from pairs by the pipeline: in every row, segments 1 and 2 are one pair's answers,
chosen first, 3 and 4 the next pair's, and so on; labels are -100 on prompts. The log-probability of
each token under the model before training is in the column `reference_log_probs`.

A micro-batches · B batch · S sequence · N segments of a row, 0 being padding
"""
# ruff: noqa: F722  (shapes in annotations are jaxtyping's, not Python)

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.nn import log_sigmoid, relu, sigmoid
from jaxtyping import Float, Shaped

from easypipe.core.schema import IGNORE
from easypipe.kernels.loss.api import token_log_probs
from easypipe.train.config import WITHOUT_REFERENCE, PreferenceConfig, PreferenceLoss
from easypipe.train.losses.loss import (
    Batch,
    LanguageModel,
    LossOutput,
    hidden_and_head,
    hidden_of,
    loss_sharding,
)
from easypipe.train.model.decoder import Decoder
from easypipe.train.state import ModelLayout

REFERENCE = "reference_log_probs"
REFERENCE_ELSEWHERE = "reference_log_probs_elsewhere"  # for answers under other prompts
COLUMNS = ("input_ids", "labels", "segment_ids", "position_ids")  # of a batch of pairs

Arrays = Mapping[str, Array]


def log_probs(model: LanguageModel, batch: Batch) -> Float[Array, "B S"]:
    """Returns log p of every label, in nats, float32; 0 in slots without a label.

    `model` and `batch` are as for `loss_sums`. The logits never exist as a whole.
    """
    arrays, of_model = hidden_and_head(model, batch)
    return token_log_probs(*arrays, sharding=loss_sharding(), **of_model)


def scores(model: LanguageModel, batch: Batch) -> Float[Array, "B S"]:
    """Returns a reward model's score of each answer, at its last token; 0 elsewhere; float32."""
    assert isinstance(model, Decoder)
    segments = batch["segment_ids"]
    hidden = hidden_of(model, batch)
    behind = jnp.pad(segments[:, 1:], ((0, 0), (0, 1)))
    return jnp.where((segments > 0) & (segments != behind), model.scores(hidden), 0.0)


class Pairs(NamedTuple):
    """Many pairs of answers to a prompt.

    Attributes:
        chosen: The log-ratio of each chosen answer to the reference, in nats, summed over its
            tokens.
        rejected: The same for each rejected answer.
        chosen_tokens: The number of tokens of each chosen answer.
        rejected_tokens: The number of tokens of each rejected answer.
    """

    chosen: Array
    rejected: Array
    chosen_tokens: Array
    rejected_tokens: Array

    @property
    def delta(self) -> Array:
        return self.chosen - self.rejected

    @property
    def means(self) -> tuple[Array, Array]:
        """The log-ratios of each answer, divided by its number of tokens."""
        return self.chosen / self.chosen_tokens, self.rejected / self.rejected_tokens


def _smoothed(margins: Array, config: PreferenceConfig) -> Array:
    """Mitchell, 2023: a share ε of the pairs is assumed to be in the wrong order."""
    wrong = config.label_smoothing
    return -(1 - wrong) * log_sigmoid(margins) - wrong * log_sigmoid(-margins)


def _sigmoid(pairs: Pairs, config: PreferenceConfig) -> Array:
    """Rafailov et al., 2023, equation 7."""
    return _smoothed(config.beta * pairs.delta, config)


def _hinge(pairs: Pairs, config: PreferenceConfig) -> Array:
    """Zhao et al., 2023 (SLiC)."""
    return relu(1 - config.beta * pairs.delta)


def _ipo(pairs: Pairs, config: PreferenceConfig) -> Array:
    """Azar et al., 2023, equation 17, with means over tokens."""
    chosen, rejected = pairs.means
    return (chosen - rejected - 1 / (2 * config.beta)) ** 2


def _robust(pairs: Pairs, config: PreferenceConfig) -> Array:
    """Chowdhury et al., 2024: an unbiased estimate of the loss without the wrong pairs."""
    wrong, margins = config.label_smoothing, config.beta * pairs.delta
    right = -(1 - wrong) * log_sigmoid(margins) + wrong * log_sigmoid(-margins)
    return right / (1 - 2 * wrong)


def _exo_pair(pairs: Pairs, config: PreferenceConfig) -> Array:
    """Ji et al., 2024, equation 16."""
    wrong, margins = config.label_smoothing, config.beta * pairs.delta
    chosen = sigmoid(margins) * (log_sigmoid(margins) - math.log1p(-wrong))
    return chosen + sigmoid(-margins) * (log_sigmoid(-margins) - math.log(wrong))


def _nca_pair(pairs: Pairs, config: PreferenceConfig) -> Array:
    """Chen et al., 2024."""
    chosen, rejected = config.beta * pairs.chosen, config.beta * pairs.rejected
    return -log_sigmoid(chosen) - 0.5 * log_sigmoid(-chosen) - 0.5 * log_sigmoid(-rejected)


def _bco_pair(pairs: Pairs, config: PreferenceConfig) -> Array:
    """Jung et al., 2024, without a shift of the rewards."""
    return -log_sigmoid(config.beta * pairs.chosen) - log_sigmoid(-config.beta * pairs.rejected)


def _sppo_hard(pairs: Pairs, config: PreferenceConfig) -> Array:
    """Wu et al., 2024, equation 4.7, for a winner that always wins."""
    half = 0.5 / config.beta
    return (pairs.chosen - half) ** 2 + (pairs.rejected + half) ** 2


def _apo_zero(pairs: Pairs, config: PreferenceConfig) -> Array:
    """D'Oosterlinck et al., 2024, equation 7."""
    return sigmoid(-config.beta * pairs.chosen) + sigmoid(config.beta * pairs.rejected)


def _apo_down(pairs: Pairs, config: PreferenceConfig) -> Array:
    """D'Oosterlinck et al., 2024, equation 8."""
    return sigmoid(config.beta * pairs.chosen) + sigmoid(-config.beta * pairs.delta)


def _sigmoid_norm(pairs: Pairs, config: PreferenceConfig) -> Array:
    """`_sigmoid` with means over tokens (Lambert et al., 2024)."""
    chosen, rejected = pairs.means
    return -log_sigmoid(config.beta * (chosen - rejected))


def _orpo(pairs: Pairs, config: PreferenceConfig) -> Array:
    """Hong et al., 2024, equations 4 to 7.

    It is the chosen answer's own loss, a mean over its tokens, plus β times the loss of the odds
    ratio.
    """
    chosen, rejected = pairs.means
    odds = chosen - rejected - (_log1mexp(chosen) - _log1mexp(rejected))
    return -chosen - config.beta * log_sigmoid(odds)


def _simpo(pairs: Pairs, config: PreferenceConfig) -> Array:
    """Meng et al., 2024, equation 6."""
    chosen, rejected = pairs.means
    margin = 0.5 if config.margin is None else config.margin
    return _smoothed(config.beta * (chosen - rejected) - margin, config)


def _reward(pairs: Pairs, config: PreferenceConfig) -> Array:
    """Bradley and Terry, 1952; Ouyang et al., 2022, equation 1, of scores instead of ratios."""
    return -log_sigmoid(pairs.delta)


def _log1mexp(x: Array) -> Array:
    """Returns log(1 - e^x) for x below 0, by whichever form is accurate."""
    x = jnp.minimum(x, -1e-6)  # the odds of a certain answer are infinite
    near = x > -math.log(2)
    small, large = jnp.where(near, x, -1.0), jnp.where(near, -1.0, x)
    return jnp.where(near, jnp.log(-jnp.expm1(small)), jnp.log1p(-jnp.exp(large)))


# The loss of a pair, by the option `loss`; the formulas are those of TRL 1.16.
LOSSES: Mapping[PreferenceLoss, Callable[[Pairs, PreferenceConfig], Array]] = {
    "sigmoid": _sigmoid,
    "hinge": _hinge,
    "ipo": _ipo,
    "robust": _robust,
    "exo_pair": _exo_pair,
    "nca_pair": _nca_pair,
    "bco_pair": _bco_pair,
    "sppo_hard": _sppo_hard,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
    "sigmoid_norm": _sigmoid_norm,
    "orpo": _orpo,
    "simpo": _simpo,
    "reward": _reward,
}


def preference_loss(config: PreferenceConfig) -> Callable[[LanguageModel, Batch], LossOutput]:
    """Returns the loss of pairs named by `config.loss`, for `Trainer(loss=...)`.

    Its sums are over pairs: `num_targets` is their number. `more` has reward_margin, the difference
    of the rewards of the chosen and the rejected answer, and reward_accuracy, the number of
    positive differences. A reward is β times the log-ratio of an answer (orpo and simpo: β times
    the mean log-probability of its tokens; reward: its score). Without the column
    `reference_log_probs` the reference is uniform.
    """

    def loss(model: LanguageModel, batch: Batch) -> LossOutput:
        ratios_BS = (scores if config.scores else log_probs)(model, batch)
        if REFERENCE in batch:
            ratios_BS = ratios_BS - batch[REFERENCE]
        ratios_BN = by_segment(ratios_BS, batch["segment_ids"])
        counts_BN = by_segment(
            (batch["labels"] != IGNORE).astype(jnp.float32), batch["segment_ids"]
        )
        is_pair = (counts_BN[:, 1::2] > 0) & (counts_BN[:, 2::2] > 0)
        # Slots without a pair get numbers for which every formula has a finite gradient.
        ratios, counts = (
            jnp.where(jnp.repeat(is_pair, 2, axis=1), values[:, 1:], other)
            for values, other in ((ratios_BN, -1.0), (counts_BN, 1.0))
        )
        pairs = Pairs(ratios[:, ::2], ratios[:, 1::2], counts[:, ::2], counts[:, 1::2])
        total = jnp.where(is_pair, LOSSES[config.loss](pairs, config), 0.0).sum()
        by_tokens = config.loss in WITHOUT_REFERENCE and not config.scores
        chosen, rejected = pairs.means if by_tokens else (pairs.chosen, pairs.rejected)
        beta = 1.0 if config.scores else config.beta
        seen = jax.lax.stop_gradient(beta * (chosen - rejected))
        more = {
            "reward_margin": jnp.where(is_pair, seen, 0.0).sum(),
            "reward_accuracy": (is_pair & (seen > 0)).sum().astype(jnp.float32),
        }
        return LossOutput(total, is_pair.sum(dtype=jnp.int32), jax.lax.stop_gradient(total), more)

    return loss


class Reference:
    """The model before training, which computes the reference log-probability of each label.

    Args:
        layout: The layout of the model that is trained. Only a copy of the trained parameters is
            kept; for a run with adapters, only of the adapters.
        elsewhere: Makes further rows from those of a batch; they are evaluated too.
    """

    def __init__(
        self, layout: ModelLayout, elsewhere: Callable[[Arrays], Arrays] | None = None
    ) -> None:
        self._params: Arrays | None = None

        def run(params: Arrays, rest: Arrays, batch: Arrays) -> Array:
            model: Any = layout.merge(params, rest)
            model.set_attributes(
                deterministic=True, use_running_average=True, raise_if_not_found=False
            )
            return log_probs(model, batch)

        self.live = run  # not compiled, to be traced by others

        def in_micro_batches(params: Arrays, rest: Arrays, batch: Arrays) -> Array:
            return jax.lax.map(lambda micro: run(params, rest, micro), batch)

        self._run, self._run_micro = jax.jit(run), jax.jit(in_micro_batches)
        self._elsewhere = elsewhere and (jax.jit(elsewhere), jax.jit(jax.vmap(elsewhere)))

    def keep(self, params: Arrays) -> None:
        """Copies the trained parameters of the first state, which a step would consume."""
        self._params = jax.tree.map(jnp.copy, dict(params))

    def added(self, rest: Arrays, batch: Arrays) -> dict[str, Array]:
        """Returns the batch with the column `reference_log_probs`.

        It is Float32, with the shape of the labels, [B, S] or [A, B/A, S].

        Args:
            rest: The untrained arrays of the model.
            batch: The batch, on the mesh.
        """
        micro = batch["input_ids"].ndim == 3
        run = self._run_micro if micro else self._run
        added = {**batch, REFERENCE: run(*self.kept(rest, batch))}
        if self._elsewhere is not None:
            others = self._elsewhere[micro](batch)
            added[REFERENCE_ELSEWHERE] = run(*self.kept(rest, others))
        return added

    def kept(self, rest: Arrays, batch: Arrays) -> tuple[Arrays, Arrays, Arrays]:
        """Returns the arguments of `live`."""
        assert self._params is not None, "keep() comes first"
        return self._params, rest, {name: batch[name] for name in COLUMNS if name in batch}


def by_segment(values: Shaped[Array, "B S ..."], segments: Array) -> Shaped[Array, "B N ..."]:
    """Returns sums over each segment.

    N has a column for padding, then two for every pair that a row could hold.
    """
    num_segments = 1 + 2 * -(-segments.shape[1] // 2)
    return jax.vmap(lambda row, ids: jax.ops.segment_sum(row, ids, num_segments))(values, segments)
