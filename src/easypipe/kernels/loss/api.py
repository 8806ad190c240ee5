"""The public functions of the loss: cross entropy, token log-probs and entropy, without all logits.

T tokens · D width · V vocabulary
"""
# ruff: noqa: F722  (shapes in annotations are jaxtyping's, not Python)

from __future__ import annotations

from typing import Literal, NamedTuple, TypedDict, Unpack, cast, overload

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from easypipe.core.schema import IGNORE
from easypipe.kernels.loss import differentiable, reference, sharded
from easypipe.kernels.loss.checks import Call, Request, checked
from easypipe.kernels.loss.choice import Implementation, LossSharding, Rule
from easypipe.kernels.loss.stats import Layout, LogitStats, token_losses

__all__ = [
    "Implementation",
    "LossSharding",
    "LossWithTokens",
    "Reduction",
    "Rule",
    "TokenStats",
    "fused_cross_entropy",
    "fused_linear_cross_entropy",
    "sequence_log_probs",
    "token_entropy",
    "token_log_probs",
]

Reduction = Literal["mean", "sum", "none"]


class TokenStats(NamedTuple):
    """Statistics of every token, in the shape of the labels; no gradient passes through them.

    They are float32, or float64 for float64 inputs.

    Attributes:
        lse: log sum_v exp z, in nats; also for ignored tokens.
        log_probs: log p(label), in nats; 0 if the token does not count.
        correct: Whether no token is likelier than the label (a tie counts); False if the token does
            not count.
        counted: Whether the label is a token of the vocabulary and not ignore_index.
    """

    lse: Float[Array, " *tokens"]
    log_probs: Float[Array, " *tokens"]
    correct: Bool[Array, " *tokens"]
    counted: Bool[Array, " *tokens"]


class LossWithTokens(NamedTuple):
    loss: Float[Array, " *tokens"]
    tokens: TokenStats


class _CommonOptions(TypedDict, total=False):
    ignore_index: int
    logit_soft_cap: float | None
    sharding: LossSharding | None
    implementation: Implementation | None


class _LogitsOptions(_CommonOptions, total=False):
    weights: Array | None
    z_loss: float
    label_smoothing: float
    reduction: Reduction


class _HeadOptions(TypedDict, total=False):
    bias: Array | None
    temperature: float
    layout: Layout | None
    float32_logits: bool


class _LogProbOptions(_CommonOptions, _HeadOptions, total=False):
    pass


class _Options(_LogitsOptions, _HeadOptions, total=False):
    rule: Rule | None
    chunk_size: int | None


@overload
def fused_linear_cross_entropy(
    hidden: Array,
    lm_head: Array,
    labels: Array,
    *,
    with_tokens: Literal[False] = False,
    **options: Unpack[_Options],
) -> Array: ...
@overload
def fused_linear_cross_entropy(
    hidden: Array,
    lm_head: Array,
    labels: Array,
    *,
    with_tokens: Literal[True],
    **options: Unpack[_Options],
) -> LossWithTokens: ...
def fused_linear_cross_entropy(
    hidden: Float[Array, "*tokens D"],
    lm_head: Float[Array, "D V"] | Float[Array, "V D"],
    labels: Int[Array, "*tokens"],
    *,
    bias: Float[Array, " V"] | None = None,
    weights: Float[Array, "*tokens"] | None = None,
    ignore_index: int = IGNORE,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    logit_soft_cap: float | None = None,
    temperature: float = 1.0,
    reduction: Reduction = "mean",
    with_tokens: bool = False,
    layout: Layout | None = None,
    sharding: LossSharding | None = None,
    implementation: Implementation | None = None,
    rule: Rule | None = None,
    chunk_size: int | None = None,
    float32_logits: bool = False,
) -> Array | LossWithTokens:
    """Returns the cross entropy of `softmax(cap(hidden @ lm_head + bias) / temperature)`, in nats.

    Per token, with ε = label_smoothing and lse the log-sum-exp of its logits, it is `(1-ε)·nll +
    ε·mean over the vocabulary of -log p + z_loss·lse²`. A token does not count if its label is
    `ignore_index`, or, under jit, outside [0, V).

    Products are taken in the dtype of the inputs (bfloat16, float32 or float64; the wider one if
    they differ) and accumulated in float32 (float64); gradients have the dtype of their input. It
    is differentiable once, in reverse mode, in hidden, lm_head, bias and weights. It works under
    jit, remat, scan, inside shard_map (on the device's own part) and on arrays that the compiler
    partitions.

    Args:
        hidden: The hidden states.
        lm_head: The head, in the given `layout`.
        labels: Token ids, in the leading shape of `hidden`.
        bias: Added to the logits.
        weights: Multiply the loss of each token; None means 1.
        ignore_index: The label of tokens that do not count.
        z_loss: The weight of lse².
        label_smoothing: ε above.
        logit_soft_cap: c of `cap(x) = c·tanh(x/c)`; None for no cap.
        temperature: `hidden` and `bias` are divided by it in their dtypes, so implementations need
            not handle it; lse and log p are those of the divided logits.
        reduction: "sum"; "mean", which divides by the summed weights of the tokens that count (the
            mean is 0 if they sum to 0); "none", every token's loss, 0 if it does not count.
        with_tokens: Returns `LossWithTokens(loss, TokenStats(lse, log_probs, correct, counted))`.
        layout: "dv" for an lm_head [D, V], "vd" for [V, D] (tied embeddings); None takes the one
            that fits; a square head needs an explicit one.
        sharding: How the arguments are sharded over the mesh of `jax.set_mesh`; without it the
            compiler decides, correctly but slowly.
        implementation: "reference" holds all logits; "chunked" is plain XLA; "pallas_tpu" and
            "pallas_gpu" are for these devices. None takes "pallas_tpu" if the program is lowered
            for a TPU, "pallas_gpu" for CUDA, and "chunked" elsewhere. It also takes "chunked" if
            these refuse: float64, several devices without `sharding`, a shard_map around it with
            check_vma=True.
        rule: "fast" computes the gradient in the forward pass, with the logits of `chunk_size`
            tokens (or of all, if there are fewer) in memory in the dtype of the inputs. "strict"
            holds no more than a tile and recomputes. None takes "fast" for "mean" and "sum" while
            256 tokens' logits take at most 2 GiB, otherwise "strict".
        chunk_size: Tokens per device. None takes 4096 on TPU and CUDA and 1024 elsewhere, or fewer
            if their logits would take more than 2 GiB. Under "strict", it is the number of tokens
            in the tiles of "chunked".
        float32_logits: The logits are never rounded to the dtype of the inputs, so the rule is
            "strict". Without it, "fast" rounds them, and on CUDA "strict" does too (elsewhere
            "strict" keeps float32 anyway). On CUDA this option halves the number of tokens in a
            slab.

    Returns:
        float32 (float64 for float64 inputs).

    Raises:
        ConfigError: Shapes and dtypes do not fit, the layout is ambiguous, a label is outside the
            vocabulary (only outside jit), an option is out of range or without effect, the mesh
            lacks a sharding, or an implementation cannot run. The message names every reason.
    """
    call = checked(
        Request(
            at="fused_linear_cross_entropy",
            hidden=hidden,
            lm_head=lm_head,
            labels=labels,
            bias=bias,
            weights=weights,
            ignore_index=ignore_index,
            z_loss=z_loss,
            label_smoothing=label_smoothing,
            soft_cap=logit_soft_cap,
            temperature=temperature,
            reduction=reduction,
            layout=layout,
            sharding=sharding,
            implementation=implementation,
            rule=rule,
            chunk_size=chunk_size,
            float32_logits=float32_logits,
        )
    )
    return _loss(call, with_tokens)


@overload
def fused_cross_entropy(
    logits: Array,
    labels: Array,
    *,
    with_tokens: Literal[False] = False,
    **options: Unpack[_LogitsOptions],
) -> Array: ...
@overload
def fused_cross_entropy(
    logits: Array, labels: Array, *, with_tokens: Literal[True], **options: Unpack[_LogitsOptions]
) -> LossWithTokens: ...
def fused_cross_entropy(
    logits: Float[Array, "*tokens V"],
    labels: Int[Array, "*tokens"],
    *,
    weights: Float[Array, "*tokens"] | None = None,
    ignore_index: int = IGNORE,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    logit_soft_cap: float | None = None,
    reduction: Reduction = "mean",
    with_tokens: bool = False,
    sharding: LossSharding | None = None,
    implementation: Implementation | None = None,
) -> Array | LossWithTokens:
    """Returns the loss of fused_linear_cross_entropy for callers that have the logits.

    Nothing of the logits' size is made except their gradient, which has their dtype. Options are as
    there; `sharding.vocab` is that of the last dimension of the logits, and `sharding.embed` is not
    used. "pallas_tpu" is not an implementation here: on TPU, XLA's own row kernels run.

    Raises:
        ConfigError: As there.
    """
    call = checked(
        Request(
            at="fused_cross_entropy",
            hidden=logits,
            lm_head=None,
            labels=labels,
            weights=weights,
            ignore_index=ignore_index,
            z_loss=z_loss,
            label_smoothing=label_smoothing,
            soft_cap=logit_soft_cap,
            reduction=reduction,
            sharding=sharding,
            implementation=implementation,
        )
    )
    return _loss(call, with_tokens)


def token_log_probs(
    hidden: Float[Array, "*tokens D"],
    lm_head: Float[Array, "D V"] | Float[Array, "V D"],
    labels: Int[Array, "*tokens"],
    *,
    bias: Float[Array, " V"] | None = None,
    ignore_index: int = IGNORE,
    logit_soft_cap: float | None = None,
    temperature: float = 1.0,
    layout: Layout | None = None,
    sharding: LossSharding | None = None,
    implementation: Implementation | None = None,
    float32_logits: bool = True,
) -> Float[Array, "*tokens"]:
    """Returns log p(label) of every token, in nats, or 0 if it does not count.

    It is differentiable, by the rule "strict". It is for losses that are not a weighted sum of
    cross entropies, such as those of preferences (Rafailov et al., DPO, 2023). Arguments, dtypes
    and errors are those of fused_linear_cross_entropy, but here `float32_logits` is the default: a
    log-ratio is a small difference of two of these, and the rounding of bfloat16 logits would be as
    large as it.
    """
    call = checked(
        Request(
            at="token_log_probs",
            hidden=hidden,
            lm_head=lm_head,
            labels=labels,
            bias=bias,
            ignore_index=ignore_index,
            soft_cap=logit_soft_cap,
            temperature=temperature,
            layout=layout,
            sharding=sharding,
            implementation=implementation,
            float32_logits=float32_logits,
        )
    )
    return jnp.where(call.counted, _stats(call).log_prob, 0.0)


def token_entropy(
    hidden: Float[Array, "*tokens D"],
    lm_head: Float[Array, "D V"] | Float[Array, "V D"],
    labels: Int[Array, "*tokens"],
    *,
    bias: Float[Array, " V"] | None = None,
    ignore_index: int = IGNORE,
    logit_soft_cap: float | None = None,
    temperature: float = 1.0,
    layout: Layout | None = None,
    sharding: LossSharding | None = None,
    implementation: Literal["reference", "chunked"] | None = None,
) -> Float[Array, "*tokens"]:
    """Returns the entropy of the model's prediction at every token, in nats.

    It is `-sum p log p` over the vocabulary, or 0 if the label does not count. No gradient passes
    through it. It takes one more product of hidden states and head than the loss, by XLA on every
    device; no more than a tile of it exists at a time. Arguments, dtypes and errors are those of
    fused_linear_cross_entropy; the kernels "pallas_tpu" and "pallas_gpu" do not compute it.
    """
    call = checked(
        Request(
            at="token_entropy",
            hidden=jax.lax.stop_gradient(hidden),
            lm_head=jax.lax.stop_gradient(lm_head),
            labels=labels,
            bias=None if bias is None else jax.lax.stop_gradient(bias),
            ignore_index=ignore_index,
            soft_cap=logit_soft_cap,
            temperature=temperature,
            layout=layout,
            sharding=sharding,
            implementation=implementation,
            entropy=True,
        )
    )
    plan = call.plan
    if plan.is_reference:
        found = reference.entropy(call.inputs, layout=plan.layout, soft_cap=plan.soft_cap)
    else:
        found = sharded.entropy(call.inputs, plan)
    return jnp.where(call.counted, found, 0.0)


def sequence_log_probs(
    hidden: Float[Array, "*batch S D"],
    lm_head: Array,
    labels: Int[Array, "*batch S"],
    **options: Unpack[_LogProbOptions],
) -> Float[Array, "*batch"]:
    """Returns the sum of `token_log_probs` over each sequence, with its options.

    If the prompt's labels are `ignore_index`, it is log p(response).
    """
    return token_log_probs(hidden, lm_head, labels, **options).sum(axis=-1)


def _stats(call: Call) -> LogitStats:
    """Returns the stats, differentiable."""
    plan = call.plan
    if plan.is_reference:
        return reference.stats(call.inputs, layout=plan.layout, soft_cap=plan.soft_cap)
    return cast("LogitStats", differentiable.logit_stats(call.inputs, plan))  # custom_vjp hides it


def _loss(call: Call, with_tokens: bool) -> Array | LossWithTokens:
    """Returns the reduced loss of a call, by its rule, with the tokens' statistics if asked for."""
    weights = call.weights
    if call.reduction == "mean":
        # divided before the products, not after: a bfloat16 gradient is then rounded once
        total = weights.sum()
        weights = weights / jnp.where(total == 0, 1, total)
    if call.rule == "fast":
        loss, stats = cast(
            "tuple[Array, LogitStats]",
            differentiable.weighted_sum(call.inputs, weights, call.objective, call.plan),
        )
    else:
        stats = _stats(call)
        losses = weights * token_losses(stats, call.objective)
        loss = losses if call.reduction == "none" else losses.sum()
    if not with_tokens:
        return loss
    stats = jax.lax.stop_gradient(stats)
    log_probs = jnp.where(call.counted, stats.log_prob, 0.0)
    correct = call.counted & (stats.target >= stats.best)
    return LossWithTokens(loss, TokenStats(stats.lse, log_probs, correct, call.counted))
