"""Training on preferences: of two answers to one prompt, the one that was chosen shall become likelier than the one that was rejected.

Batches are what the pipeline makes of pairs: in every row, segments 1 and 2 are one pair's answers, chosen first, 3 and 4 the next
pair's, and so on; labels are -100 on prompts. How likely the model was to give each before training stands in `reference_log_probs`.

B batch · S sequence · N segments of a row, 0 being padding
"""
# ruff: noqa: F722  (shapes in annotations are jaxtyping's, not Python)

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from easypipe.core.errors import ConfigError
from easypipe.core.protocols import BatchLoader
from easypipe.core.schema import IGNORE
from easypipe.kernels.api import LossSharding, token_log_probs
from easypipe.train.axes import on_mesh
from easypipe.train.loss import LossOutput

REFERENCE = "reference_log_probs"


def segment_log_probs(model: Any, batch: Mapping[str, Array]) -> tuple[Float[Array, "B N"], Float[Array, "B N"]]:
    """(log p of the labels of every segment, in nats; how many labels it has), Float32. N is S + 1 or one more: segments of one token.

    `model` and `batch` as for `loss_sums`; the logits never exist as a whole.
    """
    segments = batch["segment_ids"]
    hidden_BSD = model.hidden(batch["input_ids"], segments, batch.get("position_ids"))
    log_probs_BS = token_log_probs(
        hidden_BSD,
        model.lm_head(),
        batch["labels"],
        logit_soft_cap=getattr(model, "logit_soft_cap", None),
        layout=getattr(model, "lm_head_layout", "dv"),
        sharding=LossSharding() if on_mesh() else None,
    )
    num_segments = num_columns(segments.shape[1])
    add = jax.vmap(lambda values, ids: jax.ops.segment_sum(values, ids, num_segments))
    return add(log_probs_BS, segments), add((batch["labels"] != IGNORE).astype(jnp.float32), segments)


def num_columns(seq_length: int) -> int:
    """N: a column for padding, then two for every pair that a row could hold."""
    return 1 + 2 * -(-seq_length // 2)


def preference_loss(*, beta: float = 0.1, label_smoothing: float = 0.0) -> Callable[[Any, Mapping[str, Array]], LossOutput]:
    """Direct preference optimization (Rafailov et al., 2023, equation 7), for `Trainer(loss=...)`.

    Of each pair, with r the log-ratio log p(answer) - log p_reference(answer) of each answer, summed over its tokens:
    `-(1-ε)·log σ(β(r_chosen - r_rejected)) - ε·log σ(-β(r_chosen - r_rejected))`. ε: the share of preferences that is thought to be wrong
    (Mitchell, 2023). Sums are over pairs: `num_targets` is their number. Without the column `reference_log_probs` the reference is uniform.
    Raises ConfigError for a beta that is not positive, and an ε outside [0, 0.5).
    """
    if not beta > 0:
        raise ConfigError(at="beta", problem=f"{beta} is no positive number", fix="0.1 is usual.")
    if not 0 <= label_smoothing < 0.5:
        raise ConfigError(at="label_smoothing", problem=f"{label_smoothing} is outside [0, 0.5)", fix="0.0 is usual.")

    def loss(model: Any, batch: Mapping[str, Array]) -> LossOutput:
        log_probs_BN, counts_BN = segment_log_probs(model, batch)
        ratios_BN = log_probs_BN - batch[REFERENCE] if REFERENCE in batch else log_probs_BN
        margins = beta * (ratios_BN[:, 1::2] - ratios_BN[:, 2::2])
        is_pair = (counts_BN[:, 1::2] > 0) & (counts_BN[:, 2::2] > 0)
        each = -(1 - label_smoothing) * jax.nn.log_sigmoid(margins) - label_smoothing * jax.nn.log_sigmoid(-margins)
        total = jnp.where(is_pair, each, 0.0).sum()
        return LossOutput(total, is_pair.sum(dtype=jnp.int32), jax.lax.stop_gradient(total))

    return loss


class WithReference:
    """A loader whose batches carry `reference_log_probs`, Float32[B, N] (or [A, B/A, N]): what `model`, which stays as it is, gives them.

    model: an nnx.Module on the mesh; one forward pass a batch. State, length and everything else are those of `loader`, so a run resumes
    as it does without.
    """

    def __init__(self, loader: BatchLoader, model: nnx.Module) -> None:
        self._loader = loader
        graph, self._arrays = nnx.split(model)

        def run(arrays: Any, batch: Mapping[str, Array]) -> Array:
            return segment_log_probs(nnx.merge(graph, arrays), batch)[0]

        self._run = jax.jit(run)
        self._run_micro = jax.jit(lambda arrays, batch: jax.lax.map(lambda micro: run(arrays, micro), batch))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        batches: Any = iter(self._loader)
        with contextlib.closing(batches) if hasattr(batches, "close") else contextlib.nullcontext():
            for batch in batches:
                run = self._run if batch["input_ids"].ndim == 2 else self._run_micro
                yield {**batch, REFERENCE: run(self._arrays, dict(batch))}

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
