"""The loss of a batch, as sums that micro-batches and processes add up.

B batch · S sequence · D width · V vocabulary
"""
# ruff: noqa: F722  (shapes in annotations are jaxtyping's, not Python)

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from easypipe.core.config import to_dict
from easypipe.core.errors import ConfigError
from easypipe.core.schema import IGNORE
from easypipe.kernels.api import Implementation, LossSharding, Rule, fused_linear_cross_entropy
from easypipe.kernels.choice import misplaced, platform_name
from easypipe.train.axes import BATCH_AXES, on_mesh, rules, vocab_axes
from easypipe.train.classifier import Classifier
from easypipe.train.config import LossConfig
from easypipe.train.mesh_config import axes_of

logger = logging.getLogger("easypipe")


class LossOutput(NamedTuple):
    """Sums over tokens, so that micro-batches and processes add up exactly; divide by `num_targets` once, at the end."""

    loss_sum: Float[Array, ""]  # what is differentiated: cross entropy, smoothed, plus the z-loss; float32 (float64 for float64 inputs)
    num_targets: Int[Array, ""]  # labels that are not IGNORE; int32
    nll_sum: Float[Array, ""]  # cross entropy alone, in nats, for perplexity; carries no gradient
    more: Mapping[str, Array] = {}  # further sums by name, which records tell divided by `num_targets`


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
        sharding=loss_sharding() if implementation != "reference" else None,
        implementation=implementation,
        rule=rule,
        chunk_size=chunk_size,
    )
    num_targets = (batch["labels"] != IGNORE).sum(dtype=jnp.int32)
    outside = num_targets - out.tokens.counted.sum(dtype=jnp.int32)
    return LossOutput(jnp.where(outside > 0, jnp.nan, out.loss), num_targets, -out.tokens.log_probs.sum())


def loss_sharding() -> LossSharding | None:
    """How hidden states and head lie on this run's mesh, None without one; a head that is divided as the rows are is gathered first."""
    if not on_mesh():
        return None
    return LossSharding(tokens=BATCH_AXES, embed=axes_of(rules()["embed"]), vocab=vocab_axes(), sequence=("sequence",))


def logits_loss_sums(model: Any, batch: Mapping[str, Array], *, z_loss: float = 0.0, label_smoothing: float = 0.0) -> LossOutput:
    """As loss_sums, of a module that gives logits, [B, S, V], for `input_ids`; all logits are held.

    It is given segment_ids and position_ids too where its call names them.
    """
    taken = {name: batch[name] for name in call_names(model) if name in ("segment_ids", "position_ids") and name in batch}
    logits_BSV = model(batch["input_ids"], **taken).astype(jnp.float32)
    return _sums(logits_BSV, batch["labels"], z_loss, label_smoothing)


def classification_sums(model: Any, batch: Mapping[str, Array], *, z_loss: float = 0.0, label_smoothing: float = 0.0) -> LossOutput:
    """As logits_loss_sums, of a module that gives logits of classes, [B, N], for `pixel_values`, [B, H, W, C]; `labels` are Int[B].

    Rows with label -100 do not count. `more` has accuracy: how many of the others have their label's logit as the largest one.
    """
    logits_BN = model(batch["pixel_values"]).astype(jnp.float32)
    hits_B = (jnp.argmax(logits_BN, axis=-1) == batch["labels"]) & (batch["labels"] != IGNORE)
    out = _sums(logits_BN, batch["labels"], z_loss, label_smoothing)
    return out._replace(more={"accuracy": hits_B.sum().astype(jnp.float32)})


def _sums(logits_BSV: Array, labels_BS: Array, z_loss: float, label_smoothing: float) -> LossOutput:
    vocab = logits_BSV.shape[-1]
    counted_BS = labels_BS != IGNORE
    outside = (counted_BS & ((labels_BS < 0) | (labels_BS >= vocab))).any()
    lse_BS = jax.nn.logsumexp(logits_BSV, axis=-1)
    target_BS = jnp.take_along_axis(logits_BSV, jnp.clip(labels_BS, 0, vocab - 1)[..., None], axis=-1)[..., 0]
    nll_BS = lse_BS - target_BS
    smooth_BS = nll_BS if label_smoothing == 0 else (1 - label_smoothing) * nll_BS + label_smoothing * (lse_BS - logits_BSV.mean(-1))
    loss_BS = smooth_BS + z_loss * lse_BS**2
    loss = jnp.where(counted_BS, loss_BS, 0).sum()
    nll = jax.lax.stop_gradient(jnp.where(counted_BS, nll_BS, 0).sum())
    return LossOutput(jnp.where(outside, jnp.nan, loss), counted_BS.sum(dtype=jnp.int32), nll)


def call_names(model: Any) -> list[str]:
    """Names of what `model` takes when it is called; of a Linen module behind its bridge, that module's."""
    return list(inspect.signature(type(getattr(model, "to_nnx__module", model)).__call__).parameters)


def default_loss(model: Any, config: LossConfig, platform: str) -> tuple[Callable[..., LossOutput], Callable[..., LossOutput]]:
    """(loss, the same with a second derivative) of a module: fused, where it has `hidden` and `lm_head`, else of its logits.

    `platform`: of the devices that it will run on, as jax names it. Raises ConfigError for options of the fused loss that a module's
    logits leave without effect, and for an implementation that is for other devices.
    """
    options = {key: value for key, value in to_dict(config).items() if value is not None}
    if hasattr(model, "hidden") and hasattr(model, "lm_head"):
        if (reason := misplaced(config.implementation, {platform_name(platform)})) is not None:
            problem = f"{config.implementation!r} cannot run: {reason}"
            raise ConfigError(at="train.loss.implementation", problem=problem, fix="Leave it out: the fastest for the device is chosen.")
        # A Pallas kernel has no second derivative; the plain XLA loss has.
        twice = options | {"implementation": options.get("implementation") or "chunked"}
        return functools.partial(loss_sums, **options), functools.partial(loss_sums, **twice)
    for option in ("implementation", "rule", "chunk_size"):
        if option in options:
            problem = "has no effect on a module without `hidden` and `lm_head`, whose logits are all held"
            raise ConfigError(at=f"train.loss.{option}", problem=problem, fix="Leave it out, or give the module these two.")
    if isinstance(model, Classifier):
        plain = functools.partial(classification_sums, **options)
        return plain, plain
    if "segment_ids" not in call_names(model):
        kind = type(getattr(model, "to_nnx__module", model)).__name__
        logger.warning("model: %s takes no segment_ids: documents that are packed into one row see each other", kind)
    plain = functools.partial(logits_loss_sums, **options)
    return plain, plain
