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
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from easypipe.core.config import to_dict
from easypipe.core.errors import ConfigError
from easypipe.core.schema import IGNORE
from easypipe.kernels.loss.api import Implementation, LossSharding, Rule, fused_linear_cross_entropy
from easypipe.kernels.loss.choice import misplaced, platform_name
from easypipe.train.config import LossConfig
from easypipe.train.model.classifier import Classifier
from easypipe.train.parallel.axes import BATCH_AXES, on_mesh, rules, vocab_axes
from easypipe.train.parallel.config import axes_of

logger = logging.getLogger("easypipe")


# What a line of metrics.jsonl has of its own; `nll` and `ppl` are measured by the loss.
RECORDED = frozenset({
    "step", "loss", "ppl", "grad_norm", "param_norm", "skipped", "learning_rate", "num_tokens", "num_targets", "fill", "trained_share",
    "tokens_per_second", "mfu", "mfu_palm", "data_wait", "peak_memory", "eval",
})  # fmt: skip


class LossOutput(NamedTuple):
    """Sums over tokens, so that micro-batches and processes add up exactly; divide by `num_targets`
    once, at the end.
    """

    # what is differentiated: cross entropy, smoothed, plus the z-loss; float32 (float64 for float64
    # inputs)
    loss_sum: Float[Array, ""]
    num_targets: Int[Array, ""]  # labels that are not IGNORE; int32
    nll_sum: Float[Array, ""]  # cross entropy alone, in nats, for perplexity; carries no gradient
    # further sums by name, which records tell divided by `num_targets`
    more: Mapping[str, Array] = {}


Loss = LossOutput | Array | tuple[Array, Mapping[str, Array]]
LossFn = Callable[[Any, Mapping[str, Array]], Loss]


class AsSums:
    """A loss of one's own as one that gives sums, which is what micro-batches, processes and the
    batches of an evaluation add up.

    loss: of (module, batch), called while it is traced. It gives one of three:
    a scalar, the mean over the batch's targets;
    `(scalar, {name: scalar})`, further means over them, which records tell under their names;
    a LossOutput of sums.
    Targets are labels that are not -100. A mean is multiplied by their number. Of means, `nll` (and
    with it `ppl`) is told only where the loss gives one under that name. Calling raises ConfigError
    for what is none of the three.
    of_means: whether it gave means when it was last called: of a micro-batch without targets such a
    gradient may be 0 / 0, and is none.
    """

    def __init__(self, loss: LossFn) -> None:
        self._loss, self.of_means = loss, False

    def __call__(self, model: Any, batch: Mapping[str, Array]) -> LossOutput:
        out: Any = self._loss(model, batch)
        self.of_means = not isinstance(out, LossOutput)
        if isinstance(out, LossOutput):
            return out
        mean, told = (
            out
            if isinstance(out, tuple) and len(out) == 2 and isinstance(out[1], Mapping)
            else (out, {})
        )
        num_targets = _num_targets(batch)
        total = _sum_of(mean, num_targets, "")
        more = {
            str(name): jax.lax.stop_gradient(_sum_of(value, num_targets, str(name)))
            for name, value in told.items()
        }
        if taken := sorted(more.keys() & RECORDED):
            problem = "is the name of something that every record has"
            raise ConfigError(
                at=f"loss, {taken[0]!r}", problem=problem, have=sorted(more), fix="Give it another."
            )
        return LossOutput(total, num_targets, more.pop("nll", jnp.full((), jnp.nan)), more)


def _sum_of(mean: Any, count: Array, name: str) -> Array:
    """A mean over `count` targets as a sum; 0 where there are none."""
    array = (
        jnp.asarray(mean)
        if isinstance(mean, Array | np.ndarray | np.generic | float | int)
        else None
    )
    if array is None or array.shape or jnp.iscomplexobj(array):
        problem = f"gave {type(mean).__name__ if array is None else f'{array.dtype} of shape {array.shape}'}"
        if name:
            raise ConfigError(
                at=f"loss, {name!r}",
                problem=problem,
                fix="Give a scalar, the mean over the batch's targets.",
            )
        ways = "a scalar, the mean over the batch's targets; (scalar, {name: scalar}); or a LossOutput of sums"
        raise ConfigError(at="loss", problem=problem, fix=f"A loss gives {ways}.")
    return (
        jnp.where(count > 0, array.astype(jnp.promote_types(array.dtype, jnp.float32)), 0) * count
    )


def _num_targets(batch: Mapping[str, Array]) -> Array:
    if "labels" not in batch:
        problem = (
            "gave a mean, and without labels in the batch it is not known over how many targets"
        )
        raise ConfigError(
            at="loss",
            problem=problem,
            have=sorted(batch),
            fix="Give a LossOutput of sums, with num_targets.",
        )
    return (batch["labels"] != IGNORE).sum(dtype=jnp.int32)


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
    """Token-weighted sums of the loss of a batch: `(loss_sum, num_targets, nll_sum)`, see
    LossOutput.

    `model` has Decoder's `hidden` and `lm_head`; where its head is [V, D], its attribute
    `lm_head_layout` is "vd"; where its logits are capped, `logit_soft_cap` is by how much.
    `batch` holds `input_ids` and `labels`, Int[B, S], and, where rows are packed, `segment_ids` and
    `position_ids`. Labels are already shifted (collate did it), and -100 where a slot is not
    trained. A label outside the vocabulary makes the loss NaN, because a compiled program cannot
    raise. Options, and what is raised, as in fused_linear_cross_entropy.
    """
    hidden_BSD = model.hidden(
        batch["input_ids"], batch.get("segment_ids"), batch.get("position_ids")
    )
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
    return LossOutput(
        jnp.where(outside > 0, jnp.nan, out.loss), num_targets, -out.tokens.log_probs.sum()
    )


def loss_sharding() -> LossSharding | None:
    """How hidden states and head lie on this run's mesh, None without one; a head that is divided
    as the rows are is gathered first.
    """
    if not on_mesh():
        return None
    return LossSharding(
        tokens=BATCH_AXES,
        embed=axes_of(rules()["embed"]),
        vocab=vocab_axes(),
        sequence=("sequence",),
    )


def logits_loss_sums(
    model: Any, batch: Mapping[str, Array], *, z_loss: float = 0.0, label_smoothing: float = 0.0
) -> LossOutput:
    """As loss_sums, of a module that gives logits, [B, S, V], for `input_ids`; all logits are held.

    It is given segment_ids and position_ids too where its call names them.
    """
    taken = {
        name: batch[name]
        for name in call_names(model)
        if name in ("segment_ids", "position_ids") and name in batch
    }
    logits_BSV = model(batch["input_ids"], **taken).astype(jnp.float32)
    return _sums(logits_BSV, batch["labels"], z_loss, label_smoothing)


def classification_sums(
    model: Any, batch: Mapping[str, Array], *, z_loss: float = 0.0, label_smoothing: float = 0.0
) -> LossOutput:
    """As logits_loss_sums, of a module that gives logits of classes, [B, N], for `pixel_values`,
    [B, H, W, C]; `labels` are Int[B].

    Rows with label -100 do not count. `more` has accuracy: how many of the others have their
    label's logit as the largest one.
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
    target_BS = jnp.take_along_axis(
        logits_BSV, jnp.clip(labels_BS, 0, vocab - 1)[..., None], axis=-1
    )[..., 0]
    nll_BS = lse_BS - target_BS
    smooth_BS = (
        nll_BS
        if label_smoothing == 0
        else (1 - label_smoothing) * nll_BS + label_smoothing * (lse_BS - logits_BSV.mean(-1))
    )
    loss_BS = smooth_BS + z_loss * lse_BS**2
    loss = jnp.where(counted_BS, loss_BS, 0).sum()
    nll = jax.lax.stop_gradient(jnp.where(counted_BS, nll_BS, 0).sum())
    return LossOutput(jnp.where(outside, jnp.nan, loss), counted_BS.sum(dtype=jnp.int32), nll)


def call_names(model: Any) -> list[str]:
    """Names of what `model` takes when it is called; of a Linen module behind its bridge, that
    module's.
    """
    return list(
        inspect.signature(type(getattr(model, "to_nnx__module", model)).__call__).parameters
    )


def default_loss(
    model: Any, config: LossConfig, platform: str
) -> tuple[Callable[..., LossOutput], Callable[..., LossOutput]]:
    """(loss, the same with a second derivative) of a module: fused, where it has `hidden` and
    `lm_head`, else of its logits.

    `platform`: of the devices that it will run on, as jax names it. Raises ConfigError for options
    of the fused loss that a module's logits leave without effect, and for an implementation that is
    for other devices.
    """
    options = {key: value for key, value in to_dict(config).items() if value is not None}
    if hasattr(model, "hidden") and hasattr(model, "lm_head"):
        if (reason := misplaced(config.implementation, {platform_name(platform)})) is not None:
            problem = f"{config.implementation!r} cannot run: {reason}"
            raise ConfigError(
                at="train.loss.implementation",
                problem=problem,
                fix="Leave it out: the fastest for the device is chosen.",
            )
        # A Pallas kernel has no second derivative; the plain XLA loss has.
        twice = options | {"implementation": options.get("implementation") or "chunked"}
        return functools.partial(loss_sums, **options), functools.partial(loss_sums, **twice)
    for option in ("implementation", "rule", "chunk_size"):
        if option in options:
            problem = "has no effect on a module without `hidden` and `lm_head`, whose logits are all held"
            raise ConfigError(
                at=f"train.loss.{option}",
                problem=problem,
                fix="Leave it out, or give the module these two.",
            )
    if isinstance(model, Classifier):
        plain = functools.partial(classification_sums, **options)
        return plain, plain
    if "segment_ids" not in call_names(model):
        kind = type(getattr(model, "to_nnx__module", model)).__name__
        logger.warning(
            "model: %s takes no segment_ids: documents that are packed into one row see each other",
            kind,
        )
    plain = functools.partial(logits_loss_sums, **options)
    return plain, plain
