"""The loss of a batch as sums: fused, from logits, of classes, or a user's own; weights of labels.

B batch · S sequence · D width · V vocabulary
"""
# ruff: noqa: F722  (shapes in annotations are jaxtyping's, not Python)

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypedDict, Unpack, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from easypipe.core.aligned import LOSS_WEIGHTS
from easypipe.core.config import to_dict
from easypipe.core.errors import ConfigError, require
from easypipe.core.schema import IGNORE
from easypipe.core.values import Arguments, attribute_of
from easypipe.kernels.loss.api import (
    Implementation,
    LossSharding,
    Rule,
    fused_linear_cross_entropy,
    token_entropy,
)
from easypipe.kernels.loss.choice import misplaced, platform_name
from easypipe.train.config import DistillConfig, LossConfig
from easypipe.train.losses.distill import drawn
from easypipe.train.losses.measures import Measures
from easypipe.train.model.classifier import Classifier
from easypipe.train.model.decoder import Decoder
from easypipe.train.model.noise import noise_of
from easypipe.train.parallel.config import axes_of
from easypipe.train.parallel.mesh import BATCH_AXES, on_mesh, rules, vocab_axes

logger = logging.getLogger("easypipe")


# Names that every line of metrics.jsonl has; the loss itself measures `nll` and `ppl`.
RECORDED = frozenset({
    "step", "loss", "ppl", "grad_norm", "param_norm", "skipped", "learning_rate", "num_tokens",
    "num_targets", "fill", "trained_share", "tokens_per_second", "mfu", "mfu_palm", "data_wait",
    "peak_memory", "eval",
})  # fmt: skip


class LossOutput(NamedTuple):
    """Sums of a loss over tokens, which add up exactly over micro-batches and processes.

    Divide by `divisor` once, at the end.

    Attributes:
        loss_sum: The sum that is differentiated: the smoothed cross entropy plus the z-loss;
            float32 (float64 for float64 inputs).
        num_targets: The number of labels that are not IGNORE; int32.
        nll_sum: The cross entropy alone, in nats, for perplexity; it carries no gradient.
        more: Further sums by name, which records hold divided by `divisor`.
        weight_sum: The sum of `loss_weights` over the targets, which weight the other sums; None:
            each target counts once.
        ratios: Sums with divisors of their own, whose quotients records hold (losses/measures.py).
    """

    loss_sum: Float[Array, ""]
    num_targets: Int[Array, ""]
    nll_sum: Float[Array, ""]
    more: Mapping[str, Array] = {}
    weight_sum: Float[Array, ""] | None = None
    ratios: Mapping[str, tuple[Array, Array]] = {}

    @property
    def divisor(self) -> Array:
        """The divisor that turns the sums into means; 1 if there is no target."""
        count = self.num_targets if self.weight_sum is None else self.weight_sum
        return jnp.where(count > 0, count, 1).astype(jnp.float32)


NOTHING = Measures()

Batch = Mapping[str, Array]
Loss = LossOutput | Array | tuple[Array, Mapping[str, Array]]
LossFn = Callable[[Any, Batch], Loss]  # (module, batch) -> loss


@runtime_checkable
class LanguageModel(Protocol):
    """The protocol of models for the fused loss: Decoder, and modules with the same two methods.

    If the head is [V, D], the attribute `lm_head_layout` is "vd"; if logits are capped,
    `logit_soft_cap` is the cap.
    """

    def hidden(
        self, input_ids: Array, segment_ids: Array | None = None, position_ids: Array | None = None
    ) -> Array: ...

    def lm_head(self) -> Array: ...


def hidden_of(model: LanguageModel, batch: Batch) -> Float[Array, "B S D"]:
    """Returns the hidden states of a batch, with noise if the batch has noise columns."""
    taken = batch["input_ids"], batch.get("segment_ids"), batch.get("position_ids")
    noise = noise_of(batch)
    if noise is None:
        return model.hidden(*taken)
    assert isinstance(model, Decoder)  # the trainer refuses other models
    return model.hidden(*taken, noise=noise)


def hidden_and_head(model: LanguageModel, batch: Batch) -> tuple[tuple[Array, ...], Arguments]:
    """Returns the inputs of the fused loss for a model and a batch.

    Returns:
        (hidden states, head, labels), and the options of the fused loss that follow from the model.
    """
    hidden_BSD = hidden_of(model, batch)
    cap, layout = (
        attribute_of(model, "logit_soft_cap"),
        attribute_of(model, "lm_head_layout") or "dv",
    )
    return (hidden_BSD, model.lm_head(), batch["labels"]), {"logit_soft_cap": cap, "layout": layout}


class AsSums:
    """Turns a user's loss into one that returns sums.

    Micro-batches, processes and the batches of an evaluation add them up.

    Args:
        loss: A function of (module, batch), called while it is traced. It returns one of three: a
            scalar, the mean over the batch's targets; `(scalar, {name: scalar})`, with further
            means, which records hold under their names; or a LossOutput of sums. Targets are labels
            that are not -100. A mean is multiplied by their number. With means, `nll` (and with it
            `ppl`) is reported only if the loss returns one under that name.

    Attributes:
        of_means: Whether the loss returned means when it was last called. The gradient of a
            micro-batch without targets may then be 0 / 0, and is dropped.
        knows_nll: Whether the loss returned nll when it was last called.

    Raises:
        ConfigError: When called: the loss returned none of the three.
    """

    def __init__(self, loss: LossFn) -> None:
        require(
            callable(loss),
            "loss",
            f"{loss!r} cannot be called",
            "Give a function of (module, batch), or a mapping of options.",
        )
        self._loss, self.of_means, self.knows_nll = loss, False, True

    def __call__(self, model: nnx.Module, batch: Batch) -> LossOutput:
        """Calls the loss, and returns its means as sums."""
        out = self._loss(model, batch)
        self.of_means, self.knows_nll = not isinstance(out, LossOutput), True
        if isinstance(out, LossOutput):
            _check_names([*out.more, *out.ratios], RECORDED | {"nll"})
            return out
        pair = isinstance(out, tuple) and len(out) == 2 and isinstance(out[1], Mapping)
        mean, means = out if pair else (out, {})
        require(
            "labels" in batch,
            "loss",
            "returned a mean, but the batch has no labels, so the number of targets is not known",
            "Give a LossOutput of sums, with num_targets.",
            have=sorted(batch),
        )
        count = num_targets(batch)
        total = _sum_of(mean, count, "")
        more = {
            str(name): jax.lax.stop_gradient(_sum_of(value, count, str(name)))
            for name, value in means.items()
        }
        _check_names(more, RECORDED)
        self.knows_nll = "nll" in more
        return LossOutput(total, count, more.pop("nll", jnp.full((), jnp.nan)), more)


def _check_names(given: Collection[str], recorded: frozenset[str]) -> None:
    """Checks that no further value of a loss has the name of one that every record has."""
    if taken := sorted(recorded.intersection(given)):
        raise ConfigError(
            at=f"loss, {taken[0]!r}",
            problem="is the name of a value that every record has",
            have=sorted(given),
            fix="Give it another name.",
        )


def num_targets(batch: Batch) -> Int[Array, ""]:
    """Returns the number of labels that are not IGNORE."""
    return (batch["labels"] != IGNORE).sum(dtype=jnp.int32)


def _sum_of(mean: object, count: Array, name: str) -> Array:
    """Returns a mean over `count` targets as a sum; 0 if there are none.

    Args:
        mean: The mean that the loss returned.
        count: The number of targets.
        name: The name of a further mean; "" for the loss itself.

    Raises:
        ConfigError: `mean` is not a real scalar.
    """
    is_number = isinstance(mean, Array | np.ndarray | np.generic | float | int)
    array = jnp.asarray(mean if is_number else jnp.nan)
    # An integer or a boolean has no gradient: as a loss it would not train anything.
    floats = jnp.issubdtype(array.dtype, jnp.floating) or bool(name)
    if not is_number or array.shape or jnp.iscomplexobj(array) or not floats:
        what = f"{array.dtype} of shape {array.shape}" if is_number else type(mean).__name__
        fix = (
            "A loss returns a scalar, the mean over the batch's targets; (scalar, {name: "
            "scalar}); "
            "or a LossOutput of sums."
        )
        raise ConfigError(
            at=f"loss, {name!r}" if name else "loss",
            problem=f"gave {what}",
            fix="Give a scalar, the mean over the batch's targets." if name else fix,
        )
    dtype = jnp.promote_types(array.dtype, jnp.float32)
    return jnp.where(count > 0, array.astype(dtype), 0) * count


class FusedOptions(TypedDict, total=False):
    """Options of the fused loss that do not change its value."""

    implementation: Implementation | None
    rule: Rule | None
    chunk_size: int | None


def loss_sums(
    model: LanguageModel,
    batch: Batch,
    *,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    measures: Measures = NOTHING,
    distill: DistillConfig | None = None,
    **options: Unpack[FusedOptions],
) -> LossOutput:
    """Returns the token-weighted sums of the loss of a batch, by the fused loss.

    Args:
        model: The model.
        batch: `input_ids` and `labels`, Int[B, S], and, if rows are packed, `segment_ids` and
            `position_ids`. Labels are already shifted (collate did it), and are -100 in slots
            without a target. A label outside the vocabulary makes the loss NaN, because a compiled
            program cannot raise. With `loss_weights`, Float[B, S], every target counts by its
            weight.
        z_loss: The weight of the z-loss.
        label_smoothing: The share of each target that is spread over the vocabulary.
        measures: The measures that are added to `ratios`.
        distill: Moves targets for which the batch has a teacher towards it; `ratios` then have kl,
            their mean divergence.
        **options: Options of fused_linear_cross_entropy, whose errors this raises.
    """
    arrays, of_model = hidden_and_head(model, batch)
    weights, weight_sum = target_weights(batch)
    sharding = loss_sharding() if options.get("implementation") != "reference" else None
    pull = drawn(arrays, of_model, batch, distill, weights, sharding) if distill else None
    out = fused_linear_cross_entropy(
        *arrays,
        weights=pull.label_weights if pull else weights,
        z_loss=z_loss,
        label_smoothing=label_smoothing,
        reduction="sum",
        with_tokens=True,
        sharding=sharding,
        **options,
        **of_model,
    )
    count = num_targets(batch)
    outside = count - out.tokens.counted.sum(dtype=jnp.int32)
    loss = jnp.where(outside > 0, jnp.nan, out.loss)
    log_probs = out.tokens.log_probs if weights is None else out.tokens.log_probs * weights
    entropies = None
    if "entropy" in measures.names:
        entropies = token_entropy(*arrays, sharding=loss_sharding(), **of_model)
    ratios = measures.of(batch, out.tokens.log_probs, out.tokens.correct, entropies)
    if pull:
        loss, ratios = loss + pull.loss_sum, {**ratios, "kl": pull.kl}
    return LossOutput(loss, count, -log_probs.sum(), {}, weight_sum, ratios)


def target_weights(batch: Batch) -> tuple[Array | None, Array | None]:
    """Returns (the weight of every label, their sum); Nones if each counts once."""
    if LOSS_WEIGHTS not in batch:
        return None, None
    weights = jnp.where(batch["labels"] != IGNORE, batch[LOSS_WEIGHTS], 0).astype(jnp.float32)
    return weights, weights.sum()


def loss_sharding() -> LossSharding | None:
    """Returns the sharding of hidden states and head on the current mesh; None without a mesh.

    A head that is divided like the rows is gathered first.
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
    model: Callable[..., Array],
    batch: Batch,
    *,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    measures: Measures = NOTHING,
    num_tokens: int | None = None,
) -> LossOutput:
    """Does what loss_sums does, for a module that returns logits; all logits are held at once.

    The module is called with `input_ids`, and with segment_ids and position_ids if its call has
    such parameters. It returns [B, S, V].

    Args:
        model: The module.
        batch: As for loss_sums.
        z_loss: The weight of the z-loss.
        label_smoothing: The share of each target that is spread over the vocabulary.
        measures: The measures that are added to `ratios`.
        num_tokens: The vocabulary size of the data's tokenizer, if known.

    Raises:
        ConfigError: While this is traced: the output has another shape, or there are fewer logits
            than `num_tokens`.
    """
    names = {"segment_ids", "position_ids"}.intersection(call_names(model), batch)
    taken = {name: batch[name] for name in names}
    made: object = model(batch["input_ids"], **taken)
    expected = batch["labels"].shape
    if not isinstance(made, Array) or made.shape[:-1] != expected or made.ndim != len(expected) + 1:
        gave = f"shape {made.shape}" if isinstance(made, Array) else type(made).__name__
        raise ConfigError(
            at=f"model {_own_type(model).__name__}",
            problem=f"gave {gave} for input_ids of shape {expected}",
            fix="Return logits alone, Float[batch, seq, vocab]; a loss of your own, "
            "Trainer(loss=...), may take other outputs.",
        )
    require(
        num_tokens is None or made.shape[-1] >= num_tokens,
        f"model {_own_type(model).__name__}",
        f"gives {made.shape[-1]} logits, and the tokenizer of the data has {num_tokens} tokens",
        "Give at least one logit for each token.",
    )
    logits_BSV = made.astype(jnp.float32)
    weights, weight_sum = target_weights(batch)
    out = _sums(logits_BSV, batch["labels"], z_loss, label_smoothing, weights)
    if measures.names:
        labels_BS1 = jnp.maximum(batch["labels"], 0)[..., None]
        log_probs_BSV = jax.lax.stop_gradient(jax.nn.log_softmax(logits_BSV))
        log_probs_BS1 = jnp.take_along_axis(log_probs_BSV, labels_BS1, axis=-1)
        correct_BS = log_probs_BS1[..., 0] >= log_probs_BSV.max(axis=-1)
        entropies_BS = None
        if "entropy" in measures.names:
            entropies_BS = jax.scipy.special.entr(jnp.exp(log_probs_BSV)).sum(axis=-1)
        ratios = measures.of(batch, log_probs_BS1[..., 0], correct_BS, entropies_BS)
        out = out._replace(ratios=ratios)
    return out._replace(weight_sum=weight_sum)


def classification_sums(
    model: Callable[..., Array],
    batch: Batch,
    *,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    class_weights: Sequence[float] | None = None,
) -> LossOutput:
    """Returns the sums of the loss of a classifier over rows.

    The module returns the logits of N classes, [B, N], for `pixel_values`, [B, H, W, C]; `labels`
    are Int[B]. Rows with label -100 do not count. `ratios` has accuracy: the share of the other
    rows whose label's logit is the largest one.

    Args:
        model: The module.
        batch: The batch.
        z_loss: The weight of the z-loss.
        label_smoothing: The share of each target that is spread over the classes.
        class_weights: A weight for each class. Loss and nll are then means weighted by the labels'
            weights, and smoothing weighs each class, as in torch's CrossEntropyLoss(weight=...).
            Accuracy still counts rows.
    """
    labels_B = batch["labels"]
    logits_BN = model(batch["pixel_values"]).astype(jnp.float32)
    hits_B = jnp.argmax(logits_BN, axis=-1) == labels_B
    weights_B = each_N = weight_sum = None
    if class_weights is not None:
        each_N = jnp.asarray(class_weights, jnp.float32)
        counted_B = labels_B != IGNORE
        weights_B = jnp.where(counted_B, jnp.take(each_N, labels_B, mode="clip"), 0.0)
        weight_sum = weights_B.sum()
    out = _sums(logits_BN, labels_B, z_loss, label_smoothing, weights_B, each_N)
    accuracy = hits_B.sum().astype(jnp.float32), out.num_targets.astype(jnp.float32)
    return out._replace(ratios={"accuracy": accuracy}, weight_sum=weight_sum)


def _sums(
    logits_BSV: Array,
    labels_BS: Array,
    z_loss: float,
    label_smoothing: float,
    weights_BS: Array | None = None,
    class_weights_V: Array | None = None,
) -> LossOutput:
    """Returns the sums of a loss from all logits.

    Args:
        logits_BSV: The logits.
        labels_BS: The labels.
        z_loss: The weight of the z-loss.
        label_smoothing: The share of each target that is spread over the vocabulary.
        weights_BS: The weights of the labels.
        class_weights_V: The weights of the classes over which smoothing spreads; None: all have the
            label's own weight.
    """
    vocab = logits_BSV.shape[-1]
    counted_BS = labels_BS != IGNORE
    outside = (counted_BS & ((labels_BS < 0) | (labels_BS >= vocab))).any()
    lse_BS = jax.nn.logsumexp(logits_BSV, axis=-1)
    labels_BS1 = jnp.clip(labels_BS, 0, vocab - 1)[..., None]
    nll_BS = lse_BS - jnp.take_along_axis(logits_BSV, labels_BS1, axis=-1)[..., 0]
    own_BS = 1.0 if weights_BS is None else weights_BS
    nll_BS = smooth_BS = nll_BS * own_BS
    if label_smoothing:
        if class_weights_V is None:
            even_BS = (lse_BS - logits_BSV.mean(-1)) * own_BS
        else:
            even_BS = ((lse_BS[..., None] - logits_BSV) * class_weights_V).mean(-1)
        smooth_BS = (1 - label_smoothing) * nll_BS + label_smoothing * even_BS
    loss_BS = smooth_BS + z_loss * lse_BS**2 * own_BS
    loss = jnp.where(counted_BS, loss_BS, 0).sum()
    nll = jax.lax.stop_gradient(jnp.where(counted_BS, nll_BS, 0).sum())
    return LossOutput(jnp.where(outside, jnp.nan, loss), counted_BS.sum(dtype=jnp.int32), nll)


def call_names(model: object) -> list[str]:
    """Returns the parameter names of a model's call.

    For a bridged Linen module they are the parameter names of that module.
    """
    return list(inspect.signature(_own_type(model).__call__).parameters)


def _own_type(model: object) -> Callable[..., Any]:
    return type(model.to_nnx__module if isinstance(model, nnx.bridge.ToNNX) else model)


def default_loss(
    model: nnx.Module,
    config: LossConfig,
    platform: str,
    measures: Measures = NOTHING,
    class_weights: Sequence[float] | None = None,
    distill: DistillConfig | None = None,
    num_tokens: Callable[[], int | None] = lambda: None,
) -> tuple[Callable[..., LossOutput], Callable[..., LossOutput]]:
    """Returns (the loss of a module, the same loss with a second derivative).

    It is the fused loss for a module with `hidden` and `lm_head`, otherwise a loss of its logits.

    Args:
        model: The module, which may be abstract.
        config: The options of the loss.
        platform: The platform of the devices on which it will run, by its name in jax.
        measures: The measures of the targets.
        class_weights: A weight for each class of a classifier.
        distill: How the model is moved towards a teacher; refused for a loss of logits.
        num_tokens: Returns the vocabulary size of the data's tokenizer; called only for logits.

    Raises:
        ConfigError: An option has no effect on this loss, or cannot run on the platform.
    """
    options = {key: value for key, value in to_dict(config).items() if value is not None}
    require(
        class_weights is None or isinstance(model, Classifier),
        "train.class_weights",
        "are of the classes of a classifier, and this model predicts tokens",
        "Leave them out; a column loss_weights weighs tokens.",
    )
    if isinstance(model, LanguageModel):
        return _fused(options, platform, measures, distill)
    require(
        distill is None,
        "train.distill",
        "has no effect on a module without `hidden` and `lm_head`",
        "Leave it out, or give the module these two.",
    )
    for option in ("implementation", "rule", "chunk_size"):
        require(
            option not in options,
            f"train.loss.{option}",
            "has no effect on a module without `hidden` and `lm_head`, whose logits are all held",
            "Leave it out, or give the module these two.",
        )
    if isinstance(model, Classifier):
        sums = functools.partial(_of_classes(model, measures, class_weights), **options)
        return sums, sums
    if "segment_ids" not in call_names(model):
        logger.warning(
            "model: %s takes no segment_ids: documents that are packed into one row see each other",
            _own_type(model).__name__,
        )
    sums = functools.partial(
        logits_loss_sums, measures=measures, num_tokens=num_tokens(), **options
    )
    return sums, sums


def _fused(
    options: Arguments, platform: str, measures: Measures, distill: DistillConfig | None
) -> tuple[Callable[..., LossOutput], Callable[..., LossOutput]]:
    """Does what `default_loss` does, for a module with `hidden` and `lm_head`."""
    implementation = options.get("implementation")
    if (reason := misplaced(implementation, {platform_name(platform)})) is not None:
        raise ConfigError(
            at="train.loss.implementation",
            problem=f"{implementation!r} cannot run: {reason}",
            fix="Leave it out: the fastest for the device is chosen.",
        )
    # A Pallas kernel has no second derivative; the plain XLA loss has.
    twice = {"implementation": "chunked", **options}
    sums = functools.partial(loss_sums, distill=distill)
    return functools.partial(sums, measures=measures, **options), functools.partial(sums, **twice)


def _of_classes(
    model: Classifier, measures: Measures, weights: Sequence[float] | None
) -> Callable[..., LossOutput]:
    """Returns the loss of a classifier.

    Raises:
        ConfigError: The numbers of weights and classes differ, or measures of tokens are named.
    """
    require(
        not measures.names,
        "train.measure",
        "is of tokens, and has no effect on classes, whose accuracy is always measured",
        "Leave it out.",
    )
    count = model.config.num_classes
    require(
        weights is None or len(weights) == count,
        "train.class_weights",
        f"{len(weights or ())} weights, and there are {count} classes",
        "Give one for each, in the order of their numbers.",
    )
    return functools.partial(classification_sums, class_weights=weights)
