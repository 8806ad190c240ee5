"""LogitStats and the Kernel protocol: sums per token and their dtype; soft cap, smoothing, z-loss.

T tokens · D width · V vocabulary, the columns that this device holds · C tokens of one chunk

    x[t, v] = hidden[t] @ head[:, v] + bias[v]
    z = cap(x),  cap(x) = soft_cap * tanh(x / soft_cap), or x

Everything that a loss needs from the logits is a function of four sums over z. So a kernel computes
these and their gradient, and needs no losses, weights or meshes; api.py writes the losses on top
and sharded.py merges the shards.

Law (one meaning). For every implementation module, `stats` and `gradients` equal those of
reference.py, up to rounding:
1. ragged T, V and D are masked inside; any T, V, D >= 1 is right.
2. labels are local column ids; one outside [0, V) hits no column: its `target` is 0, and it adds
  nothing to a gradient.
3. a row whose three cotangents are 0 contributes exactly 0, for finite inputs.
4. products in the dtype of the inputs, accumulated in float32 (float64 for float64 inputs); dx is
  rounded to the dtype of the inputs before its two products; gradients are rounded once, at the
  end.
"""
# ruff: noqa: F722  (shapes in annotations are jaxtyping's, not Python)

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from easypipe.core.values import Arguments

ShapedArray = Array | jax.ShapeDtypeStruct
Layout = Literal["dv", "vd"]  # how lm_head is stored: [D, V], or [V, D] like an embedding table


class LogitStats(NamedTuple):
    """Sums over the local columns, in float32, or float64 for float64 inputs.

    A leading shape other than [T] is that of the labels.

    Attributes:
        log_sum: log sum_v exp(z - best): lse without the digits that a large offset of the logits
            would round off.
        target: z[t, labels[t]]; 0 if labels[t] is not a local column.
        sum: sum_v z, for label smoothing.
        best: max_v z; it carries no gradient: the cotangent of log_sum is that of lse.
    """

    log_sum: Float[Array, " T"]
    target: Float[Array, " T"]
    sum: Float[Array, " T"]
    best: Float[Array, " T"]

    @property
    def lse(self) -> Array:
        """The log-sum-exp, log sum_v exp z, Float[T]."""
        return self.best + self.log_sum

    @property
    def log_prob(self) -> Array:
        """The log-probability of the label, Float[T].

        It is exact to rounding, whatever is added to all logits of a token.
        """
        return (self.target - self.best) - self.log_sum


class Inputs(NamedTuple):
    """The arrays from which logits are made, and the labels with which they are compared.

    An implementation receives [T]; the api takes any leading shape.
    """

    hidden: Float[Array, "T D"]  # the logits themselves, [T, V], if there is no lm_head
    lm_head: Array  # [D, V] or [V, D], by `layout`; None in sharded.py: see `hidden`
    bias: Float[Array, " V"] | None
    labels: Int[Array, " T"]  # int32; -1 if a token does not count


class Cotangents(NamedTuple):
    """The cotangents of a token's `lse`, `target` and `sum`, in float32.

    All three are 0 if the token does not count.
    """

    lse: Float[Array, " T"]
    target: Float[Array, " T"]
    sum: Float[Array, " T"]


class Gradients(NamedTuple):
    hidden: Float[Array, "T D"]
    lm_head: Array  # in the layout of lm_head
    bias: Float[Array, " V"] | None  # None if there is no bias


class Objective(NamedTuple):
    """The loss of one token.

    It is `(1 - eps) * (lse - target) + eps * (lse - sum / vocab) + z_loss * lse**2`.
    """

    z_loss: float = 0.0
    # eps: the share of the target that is spread evenly over the whole vocabulary (Szegedy et al.,
    # 2016, section 7)
    label_smoothing: float = 0.0
    vocab: int = 0  # columns over all shards


class Kernel(Protocol):
    """A module that computes the loss.

    It may take further keyword arguments with defaults (such as `interpret`). Modules without row
    kernels of their own use those of XLA.
    """

    # `block: Any`: each implementation has sizes of its own
    VECTOR: int
    """The vocabulary is cut after its last multiple of this many columns under *fast*; the
    stats of the two pieces are merged."""

    def refusals(
        self,
        hidden: ShapedArray,
        lm_head: ShapedArray,
        *,
        layout: Layout,
    ) -> list[str]:
        """Returns every reason why these arguments cannot run here; empty if they can.

        No device is queried.
        """
        ...

    def stats(
        self, inputs: Inputs, *, layout: Layout, soft_cap: float | None, block: Any = None
    ) -> LogitStats:
        """Returns the four sums.

        `block` holds the sizes of the implementation's own tiles; None takes them from its table.
        """
        ...

    def gradients(
        self,
        inputs: Inputs,
        lse: Float[Array, " T"],
        g: Cotangents,
        *,
        layout: Layout,
        soft_cap: float | None,
        block: Any = None,
        grad_dtype: DTypeLike | None = None,
    ) -> Gradients:
        """Returns the gradients; `lse` is over all shards.

        Any shift may replace lse, with `g.lse` scaled by exp(shift - lse): see `about_best`.

            dz[t, v] = exp(z[t, v] - lse[t]) * g.lse[t] + [v == labels[t]] * g.target[t] + g.sum[t]
            dx       = dz * (1 - (z / soft_cap)**2), or dz
            d_hidden = dx @ head.T        d_head = hidden.T @ dx        d_bias = sum_t dx

        Results have the dtype of their input; `grad_dtype` sets that of all three.
        """
        ...

    def row_stats(
        self, logits: Float[Array, "C V"], labels: Int[Array, " C"], *, soft_cap: float | None
    ) -> LogitStats:
        """Returns the four sums of given logits.

        The logits are x above (the bias added, not capped), in the dtype of the inputs. This and
        the next two methods serve *fast* and fused_cross_entropy.
        """
        ...

    def row_gradients(
        self,
        logits: Float[Array, "C V"],
        labels: Int[Array, " C"],
        lse: Float[Array, " C"],
        g: Cotangents,
        *,
        soft_cap: float | None,
    ) -> Float[Array, "C V"]:
        """Returns dx in the dtype of the logits and, if the compiler allows it, in their buffer."""
        ...

    def row_step(
        self,
        logits: Float[Array, "C V"],
        labels: Int[Array, " C"],
        weights: Float[Array, " C"],
        *,
        objective: Objective,
        soft_cap: float | None,
    ) -> tuple[Float[Array, "C V"], LogitStats]:
        """Returns both at once: `row_stats`, and dx of `sum_t weights[t] * loss[t]`.

        The loss is that of `objective` (cotangents: `loss_cotangents`). This is for a vocabulary on
        one device.
        """
        ...

    def row_options(self, hidden: Array, lm_head: Array, layout: Layout) -> Arguments:
        """Returns further keyword arguments of the three row methods, from the kernel's table.

        They are those for the logits of these arguments.
        """
        ...


class Spread(NamedTuple):
    """The parts of the entropy of a token, over some columns or all."""

    best: Float[Array, " T"]  # max_v z
    terms: Float[Array, " T"]  # sum_v exp(z - best)
    below: Float[Array, " T"]  # sum_v exp(z - best) * (z - best), at most 0

    @property
    def entropy(self) -> Array:
        """The entropy in nats, Float[T], which is -sum_v p log p.

        Nothing in the sum is larger than the result.
        """
        return jnp.log(self.terms) - self.below / self.terms

    def about(self, best: Array) -> Spread:
        """Returns the same with a larger `best`; parts must have the same `best` to be added up."""
        moved = self.best - best
        weight = jnp.exp(moved)
        return Spread(best, self.terms * weight, (self.below + moved * self.terms) * weight)


def accumulator_dtype(*arrays: Array) -> jnp.dtype:
    """Returns float32, or float64 if an input is float64.

    Sums over tokens and vocabulary are never taken in half precision.
    """
    return jnp.result_type(jnp.float32, *(array.dtype for array in arrays))


def vocab_size(lm_head: ShapedArray, layout: Layout) -> int:
    return lm_head.shape[layout.index("v")]


def soft_capped(x: Array, soft_cap: float | None) -> Array:
    """Returns z of x: smooth, and within ±soft_cap (Gemma Team, Gemma 2, 2024, section 2)."""
    return x if soft_cap is None else soft_cap * jnp.tanh(x / soft_cap)


def soft_cap_slope(z: Array, soft_cap: float | None) -> Array | float:
    """Returns dz / dx, from z."""
    return 1.0 if soft_cap is None else 1.0 - (z / soft_cap) ** 2


def logit_gradients(
    z: Array, is_label: Array, lse: Array, g: Cotangents, soft_cap: float | None
) -> Array:
    """Returns dx of z (see Kernel.gradients); `lse` and `g` are [T]."""
    g_lse, g_target, g_sum = (array[:, None] for array in g)
    dz = jnp.exp(z - lse[:, None]) * g_lse + jnp.where(is_label, g_target, 0.0) + g_sum
    return dz * soft_cap_slope(z, soft_cap)


def token_losses(stats: LogitStats, objective: Objective) -> Array:
    """Returns the loss of every token, unweighted, in nats.

    The z-loss keeps lse near 0 (Chowdhery et al., PaLM, 2022, section 5).
    """
    eps = objective.label_smoothing
    loss = stats.log_sum + (1.0 - eps) * (stats.best - stats.target)
    if eps:
        loss = loss + eps * (stats.best - stats.sum / objective.vocab)
    return loss + objective.z_loss * stats.lse**2 if objective.z_loss else loss


def loss_cotangents(lse: Array, weights: Array, objective: Objective) -> Cotangents:
    """Returns the cotangents of `sum_t weights[t] * token_losses[t]`.

    They are exactly 0 for tokens with weight 0.
    """
    eps = objective.label_smoothing
    return Cotangents(
        weights * (1.0 + 2.0 * objective.z_loss * lse),
        -(1.0 - eps) * weights,
        -eps / objective.vocab * weights,
    )


def about_best(best: Array, log_sum: Array, g: Cotangents) -> tuple[Array, Cotangents]:
    """Returns a shift and cotangents for `gradients` in place of `lse` and `g`.

    exp(z - best) * exp(-log_sum) is exp(z - lse), but lse itself would be rounded, by 0.004 at 1e5.
    """
    return best, g._replace(lse=g.lse * jnp.exp(-log_sum))


def loss_gradient_inputs(
    stats: LogitStats, weights: Array, objective: Objective
) -> tuple[Array, Cotangents]:
    """Returns the arguments of `gradients` for `sum_t weights[t] * token_losses[t]`."""
    g = loss_cotangents(stats.lse, weights, objective)
    return about_best(stats.best, stats.log_sum, g)


def merge_shards(stats: LogitStats, axes: tuple[str, ...]) -> LogitStats:
    """Returns the stats over all shards of the vocabulary, from each shard's own.

    It costs one all-gather of 16 bytes per token and shard.
    """
    if not axes:
        return stats
    return _over_parts(*jax.lax.all_gather(jnp.stack(stats), axes, axis=1))


def spread_over_shards(spread: Spread, axes: tuple[str, ...]) -> Spread:
    """Returns the spread over all shards of the vocabulary, from each shard's own."""
    if not axes:
        return spread
    parts = Spread(*jax.lax.all_gather(jnp.stack(spread), axes, axis=1))
    best = parts.best.max(axis=0)
    moved = parts.about(best)
    return Spread(best, moved.terms.sum(axis=0), moved.below.sum(axis=0))


def merged(parts: list[LogitStats]) -> LogitStats:
    """Returns the stats over all columns, from those of their parts."""
    return parts[0] if len(parts) == 1 else _over_parts(*map(jnp.stack, zip(*parts, strict=True)))


def _over_parts(log_sum: Array, target: Array, total: Array, best: Array) -> LogitStats:
    highest = best.max(axis=0)
    return LogitStats(
        jax.nn.logsumexp(log_sum + (best - highest), axis=0),
        target.sum(axis=0),
        total.sum(axis=0),
        highest,
    )


def varying_axes(array: Array) -> frozenset[str]:
    """Returns the mesh axes over which `array` varies inside a shard_map that checks them.

    Such a shard_map has `check_vma`; elsewhere there are no such axes.
    """
    return frozenset(jax.typeof(array).manual_axis_type.varying)


def varying_like(value: Array, *arrays: Array) -> Array:
    """Returns `value`, varying over all mesh axes over which any of `arrays` varies.

    The carry of a loop must have the same type at start and end.
    """
    missing = tuple(
        sorted(frozenset[str]().union(*map(varying_axes, arrays)) - varying_axes(value))
    )
    return jax.lax.pcast(value, missing, to="varying") if missing else value
