"""What the loss kernels agree on: four numbers per token, their gradient, and a law.

T tokens · D width · V vocabulary, the columns that this device holds · C tokens of one chunk

    x[t, v] = hidden[t] @ head[:, v] + bias[v]          z = cap(x),  cap(x) = soft_cap * tanh(x / soft_cap), or x

Everything that a loss wants of the logits is a function of four sums over z. So a kernel computes
these and their gradient, without knowing of losses, weights or meshes; api.py writes the losses on
top and sharded.py puts the shards together.

Law (one meaning). For every implementation module, `stats` and `gradients` equal those of
reference.py, up to rounding:
1. ragged T, V and D are masked inside; any T, V, D >= 1 is right.
2. labels are local column ids; one outside [0, V) hits no column: its `target` is 0, and it adds
  nothing to a gradient.
3. a row whose three cotangents are 0 contributes exactly 0, for finite inputs.
4. products in the dtype of the inputs, accumulated in float32 (float64 for float64 inputs); dx is
  rounded to the dtype of the inputs
   before its two products; gradients are rounded once, at the end.
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
Layout = Literal["dv", "vd"]  # of lm_head: [D, V], or [V, D] as an embedding table lies


class LogitStats(NamedTuple):
    """Sums over the local columns; float32, float64 for float64 inputs.

    A leading shape other than [T] is that of the labels.
    """

    # log sum_v exp(z - best): lse without what a large offset of the logits would round away
    log_sum: Float[Array, " T"]
    target: Float[Array, " T"]  # z[t, labels[t]]; 0 where labels[t] is no local column
    sum: Float[Array, " T"]  # sum_v z, for label smoothing
    # max_v z; carries no gradient: the cotangent of log_sum is that of lse
    best: Float[Array, " T"]

    @property
    def lse(self) -> Array:
        """log sum_v exp z, Float[T]."""
        return self.best + self.log_sum

    @property
    def log_prob(self) -> Array:
        """log p(label), Float[T]: exact to rounding whatever is added to all logits of a token."""
        return (self.target - self.best) - self.log_sum


class Inputs(NamedTuple):
    """What logits are made of, and what they are held against.

    An implementation gets [T]; the door takes any leading shape.
    """

    hidden: Float[Array, "T D"]  # the logits themselves, [T, V], where there is no lm_head
    lm_head: Array  # [D, V] or [V, D], as `layout` says; None in sharded.py: see `hidden`
    bias: Float[Array, " V"] | None
    labels: Int[Array, " T"]  # int32; -1 where a token does not count


class Cotangents(NamedTuple):
    """Of a token's `lse`, `target` and `sum`, in float32; all three are 0 where the token does not
    count.
    """

    lse: Float[Array, " T"]
    target: Float[Array, " T"]
    sum: Float[Array, " T"]


class Gradients(NamedTuple):
    hidden: Float[Array, "T D"]
    lm_head: Array  # in the layout of lm_head
    bias: Float[Array, " V"] | None  # None where there is no bias


class Objective(NamedTuple):
    """The loss of one token: `(1 - eps) * (lse - target) + eps * (lse - sum / vocab) + z_loss *
    lse**2`.
    """

    z_loss: float = 0.0
    # eps: what the target shares evenly with the whole vocabulary (Szegedy et al., 2016, section 7)
    label_smoothing: float = 0.0
    vocab: int = 0  # columns over all shards


class Kernel(Protocol):
    """A module that computes the loss.

    It may take further keyword arguments with defaults (such as `interpret`). The rows of XLA
    (rows.py) serve those that have none of their own.
    """

    # `block: Any`: each implementation has sizes of its own
    VECTOR: int
    """The vocabulary is cut after its last multiple of so many columns under *fast*; the stats of
    the two pieces are merged."""

    def refusals(
        self,
        hidden: ShapedArray,
        lm_head: ShapedArray,
        *,
        layout: Layout,
    ) -> list[str]:
        """Every reason why these arguments cannot run here; empty where they can.

        No device is asked.
        """
        ...

    def stats(
        self, inputs: Inputs, *, layout: Layout, soft_cap: float | None, block: Any = None
    ) -> LogitStats:
        """The four sums. `block`: sizes of the implementation's own tiles; None: from its table."""
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
        """`lse` is over all shards.

        Any shift will do in its place, with `g.lse` scaled by exp(shift - lse): see `about_best`.

            dz[t, v] = exp(z[t, v] - lse[t]) * g.lse[t] + [v == labels[t]] * g.target[t] + g.sum[t]
            dx       = dz * (1 - (z / soft_cap)**2), or dz
            d_hidden = dx @ head.T        d_head = hidden.T @ dx        d_bias = sum_t dx

        Results have the dtype of their input; `grad_dtype` sets that of all three.
        """
        ...

    def row_stats(
        self, logits: Float[Array, "C V"], labels: Int[Array, " C"], *, soft_cap: float | None
    ) -> LogitStats:
        """The four sums of logits that are at hand: x above (the bias added, not capped), in the
        dtype of the inputs. This and the next two serve *fast* and fused_cross_entropy.
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
        """dx, in the dtype of the logits and, where the compiler allows it, in their buffer."""
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
        """Both at once: `row_stats`, then dx of `sum_t weights[t] * loss[t]`, the loss of
        `objective` (cotangents: `loss_cotangents`). For a vocabulary on one device.
        """
        ...

    def row_options(self, hidden: Array, lm_head: Array, layout: Layout) -> Arguments:
        """Further keyword arguments of the three, by the kernel's table, for the logits of these
        arguments.
        """
        ...


class Spread(NamedTuple):
    """What the entropy of a token is made of; of some columns, or of all."""

    best: Float[Array, " T"]  # max_v z
    terms: Float[Array, " T"]  # sum_v exp(z - best)
    below: Float[Array, " T"]  # sum_v exp(z - best) * (z - best), at most 0

    @property
    def entropy(self) -> Array:
        """-sum_v p log p in nats, Float[T]: nothing in it is larger than the result."""
        return jnp.log(self.terms) - self.below / self.terms

    def about(self, best: Array) -> Spread:
        """The same with a larger `best`, of which all parts that are added up have one."""
        moved = self.best - best
        weight = jnp.exp(moved)
        return Spread(best, self.terms * weight, (self.below + moved * self.terms) * weight)


def accumulator_dtype(*arrays: Array) -> jnp.dtype:
    """float32, or float64 where an input is: sums over tokens and vocabulary are never taken in
    half precision.
    """
    return jnp.result_type(jnp.float32, *(array.dtype for array in arrays))


def vocab_size(lm_head: ShapedArray, layout: Layout) -> int:
    return lm_head.shape[layout.index("v")]


def soft_capped(x: Array, soft_cap: float | None) -> Array:
    """z of x: smooth, and within ±soft_cap (Gemma Team, Gemma 2, 2024, section 2)."""
    return x if soft_cap is None else soft_cap * jnp.tanh(x / soft_cap)


def soft_cap_slope(z: Array, soft_cap: float | None) -> Array | float:
    """dz / dx, from z."""
    return 1.0 if soft_cap is None else 1.0 - (z / soft_cap) ** 2


def logit_gradients(
    z: Array, is_label: Array, lse: Array, g: Cotangents, soft_cap: float | None
) -> Array:
    """dx of z (see Kernel.gradients); `lse` and `g` are [T]."""
    g_lse, g_target, g_sum = (array[:, None] for array in g)
    dz = jnp.exp(z - lse[:, None]) * g_lse + jnp.where(is_label, g_target, 0.0) + g_sum
    return dz * soft_cap_slope(z, soft_cap)


def token_losses(stats: LogitStats, objective: Objective) -> Array:
    """The loss of every token, unweighted, in nats; the z-loss keeps lse near 0 (Chowdhery et al.,
    PaLM, 2022, section 5).
    """
    eps = objective.label_smoothing
    loss = stats.log_sum + (1.0 - eps) * (stats.best - stats.target)
    if eps:
        loss = loss + eps * (stats.best - stats.sum / objective.vocab)
    return loss + objective.z_loss * stats.lse**2 if objective.z_loss else loss


def loss_cotangents(lse: Array, weights: Array, objective: Objective) -> Cotangents:
    """Those of `sum_t weights[t] * token_losses[t]`; exactly 0 where the weight is."""
    eps = objective.label_smoothing
    return Cotangents(
        weights * (1.0 + 2.0 * objective.z_loss * lse),
        -(1.0 - eps) * weights,
        -eps / objective.vocab * weights,
    )


def about_best(best: Array, log_sum: Array, g: Cotangents) -> tuple[Array, Cotangents]:
    """`lse` and `g` for `gradients`: exp(z - best) * exp(-log_sum) is exp(z - lse), of which lse
    would be rounded, by 0.004 at 1e5.
    """
    return best, g._replace(lse=g.lse * jnp.exp(-log_sum))


def loss_gradient_inputs(
    stats: LogitStats, weights: Array, objective: Objective
) -> tuple[Array, Cotangents]:
    """What `gradients` takes for `sum_t weights[t] * token_losses[t]`."""
    g = loss_cotangents(stats.lse, weights, objective)
    return about_best(stats.best, stats.log_sum, g)


def merge_shards(stats: LogitStats, axes: tuple[str, ...]) -> LogitStats:
    """The stats over all shards of the vocabulary, from each shard's own: one all-gather of 16
    bytes per token and shard.
    """
    if not axes:
        return stats
    return _over_parts(*jax.lax.all_gather(jnp.stack(stats), axes, axis=1))


def spread_over_shards(spread: Spread, axes: tuple[str, ...]) -> Spread:
    """That of all shards of the vocabulary, from each shard's own."""
    if not axes:
        return spread
    parts = Spread(*jax.lax.all_gather(jnp.stack(spread), axes, axis=1))
    best = parts.best.max(axis=0)
    moved = parts.about(best)
    return Spread(best, moved.terms.sum(axis=0), moved.below.sum(axis=0))


def merged(parts: list[LogitStats]) -> LogitStats:
    """The stats over all columns, from those of parts of them."""
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
    """The mesh axes over which `array` varies inside a shard_map that checks them (`check_vma`);
    none elsewhere.
    """
    return frozenset(jax.typeof(array).manual_axis_type.varying)


def varying_like(value: Array, *arrays: Array) -> Array:
    """`value`, varying over the mesh axes over which any of `arrays` does: a loop's start must
    match its end.
    """
    missing = tuple(
        sorted(frozenset[str]().union(*map(varying_axes, arrays)) - varying_axes(value))
    )
    return jax.lax.pcast(value, missing, to="varying") if missing else value
