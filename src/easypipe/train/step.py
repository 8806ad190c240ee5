"""Compiles the training step, its sums over micro-batches and counts, and the evaluation step.

B rows of a batch · A micro-batches
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import optax
from flax import linen
from jaxtyping import PyTree

from easypipe.core.errors import require
from easypipe.core.values import Arguments
from easypipe.train.losses.loss import AsSums, LossFn, LossOutput
from easypipe.train.model.flops import segment_sums
from easypipe.train.optim.optimizers import Optimizer
from easypipe.train.parallel.mesh import TOKEN_AXES, constrain
from easypipe.train.state import ModelLayout, TrainState, abstract_state, gradient_places, shardings

MORE = "more/"  # prefix of the names of further metrics of a loss

Metrics = dict[str, jax.Array]
TrainStep = Callable[[TrainState, Mapping[str, jax.Array]], tuple[TrainState, Metrics]]
Gradients = Callable[[PyTree, PyTree, PyTree], tuple[PyTree, LossOutput, PyTree]]
EvalStep = Callable[
    [Mapping[str, jax.Array], Mapping[str, jax.Array], Mapping[str, jax.Array]], LossOutput
]


def make_train_step(
    layout: ModelLayout,
    optimizer: Optimizer,
    schedule: optax.Schedule | None,
    loss: LossFn,
    *,
    accumulate_steps: int = 1,
    curvature_loss: LossFn | None = None,
    windows: Sequence[int | None] = (None,),
) -> TrainStep:
    """Returns the compiled step `(state, batch) -> (state, metrics)`.

    It consumes (donates) the state.

    The batch has [B, ...] arrays, B a multiple of accumulate_steps times the devices that share the
    rows. Micro-batch a holds the rows r with r % A == a, so that cutting moves no row between
    devices; a loader may already have cut them this way, to [A, B/A, ...]. Losses and gradients are
    summed over tokens and divided once by the number of targets (or by the sum of their
    loss_weights, if the batch has these). So every A results in the same update, up to rounding.

    The metrics are scalars on the device: loss, nll (Float32, nats per token; they differ by
    z-loss), grad_norm (Float32, before clipping), param_norm (Float32, after the step),
    learning_rate (Float32), updates (Int32, steps not skipped so far), more/<name> for what the
    loss reports besides (LossOutput.more and .ratios), num_targets, num_tokens (Int32, slots
    outside padding), num_slots, seq_length (Int32), attended (Float32, see flops.segment_sums).

    Law (non-finite steps): if the loss or grad_norm is not finite, the state is returned bit for
    bit unchanged. That includes parameters, moments, random counts, and `step`, which counts
    updates, so that the schedule does not advance.

    Call the step inside `state.on(layout.mesh)`.

    Args:
        layout: The layout of the model.
        optimizer: The optimizer.
        schedule: The learning rate by step; None if it is not known, and then not in the metrics.
        loss: The loss that is differentiated.
        accumulate_steps: A, the number of micro-batches.
        curvature_loss: The loss that an optimizer with an objective (sophia) differentiates twice,
            on the first micro-batch; default: `loss`.
        windows: The attention window of each layer, for `attended`.
    """
    places, summed = shardings(abstract_state(layout, optimizer)), gradient_places(layout)
    gradients = _gradients(layout, AsSums(loss), summed, micro=accumulate_steps > 1)
    curvature = AsSums(curvature_loss or loss)

    def objective(params: PyTree, rest: PyTree, batch: PyTree) -> jax.Array:
        out = curvature(layout.merge(params, rest), batch)
        return out.loss_sum / out.divisor

    def step(state: TrainState, batch: Mapping[str, jax.Array]) -> tuple[TrainState, Metrics]:
        grads, out, rest = _accumulate(gradients, state, batch, accumulate_steps)
        scale = 1 / out.divisor
        grads = jax.tree.map(lambda g: g * scale, grads)
        cast = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, state.params)
        extra = {}
        if optimizer.needs_objective:
            first = jax.tree.map(lambda array: array[0], _micro_batches(batch, accumulate_steps))
            extra["obj_fn"] = partial(objective, rest=state.rest, batch=first)
        updates, moments = optimizer.update(cast, state.optimizer, state.params, **extra)
        num_targets = out.num_targets
        if out.weight_sum is not None:  # if all weights are 0, nothing is predicted
            num_targets = jnp.where(out.weight_sum <= 0, 0, num_targets)
        metrics = {
            "loss": out.loss_sum * scale,
            "nll": out.nll_sum * scale,
            "grad_norm": optax.tree.norm(grads),
            "num_targets": num_targets,
            **{f"{MORE}{name}": value * scale for name, value in out.more.items()},
            **{f"{MORE}{name}": top / below for name, (top, below) in out.ratios.items()},
            **_count(batch, windows),
        }
        if schedule is not None:
            metrics["learning_rate"] = jnp.asarray(schedule(state.step), jnp.float32)
        params = optax.apply_updates(state.params, updates)
        moved = TrainState(params, rest, moments, state.step + 1)
        sound = jnp.isfinite(metrics["loss"]) & jnp.isfinite(metrics["grad_norm"])
        # The selection is elementwise, so that it is fused into the update and no array is read or
        # written an extra time for it.
        state = jax.tree.map(lambda new, old: jnp.where(sound, new, old), moved, state)
        return state, metrics | {
            "updates": state.step,
            "param_norm": optax.tree.norm(state.params).astype(jnp.float32),
        }

    return jax.jit(step, donate_argnums=0, out_shardings=(places, None))


def _gradients(layout: ModelLayout, loss: AsSums, places: PyTree, *, micro: bool) -> Gradients:
    """Returns a function that computes the gradients of the summed loss, sharded as `places`.

    The function returns (gradients, the sums of the loss, the updated untrained arrays).

    Args:
        layout: The layout of the model.
        loss: The loss.
        places: The sharding of each gradient.
        micro: Whether a batch is one of several micro-batches. One without targets then adds no
            gradient, which would be 0 / 0 for a loss that returns means.
    """

    def sums(
        params: PyTree, rest: PyTree, batch: PyTree
    ) -> tuple[jax.Array, tuple[LossOutput, PyTree]]:
        model = layout.merge(params, rest)
        out = loss(model, batch)
        return out.loss_sum, (out, layout.split(model)[1])

    def gradients(params: PyTree, rest: PyTree, batch: PyTree) -> tuple[PyTree, LossOutput, PyTree]:
        (_, (out, rest)), grads = jax.value_and_grad(sums, has_aux=True)(params, rest, batch)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        if loss.of_means and micro:
            grads = jax.tree.map(lambda g: jnp.where(out.num_targets > 0, g, 0), grads)
        return jax.lax.with_sharding_constraint(grads, places), _float32(out), rest

    return gradients


def make_eval_step(layout: ModelLayout, loss: LossFn) -> EvalStep:
    """Returns the compiled `(params, rest, batch) -> LossOutput` of sums.

    Dropout and the like are off.

    Call it inside `state.on(mesh)`.
    """
    added = AsSums(loss)

    def step(params: PyTree, rest: PyTree, batch: PyTree) -> LossOutput:
        model = layout.merge(params, rest)
        model.set_attributes(deterministic=True, use_running_average=True, raise_if_not_found=False)
        with linen.intercept_methods(_without_dropout):  # of a bridged module
            return _float32(added(model, batch))

    return jax.jit(step)


def _without_dropout(
    call: Callable[..., PyTree],
    args: Sequence[PyTree],
    options: Arguments,
    context: linen.module.InterceptorContext,
) -> PyTree:
    """Calls a method of a Linen module, in which nothing is dropped, however it was told to."""
    module = context.module
    if context.method_name == "__call__" and isinstance(module, linen.Dropout):
        return args[0] if args else options["inputs"]
    if isinstance(module, linen.MultiHeadDotProductAttention):
        object.__setattr__(module, "dropout_rate", 0.0)  # frozen, and bound for this call alone
    return call(*args, **options)


def _micro_batches(batch: Mapping[str, jax.Array], pieces: int) -> dict[str, jax.Array]:
    """Cuts [B, ...] arrays into [A, B/A, ...], unless the loader has already cut the batch."""

    def cut(array: jax.Array) -> jax.Array:
        micro = array.reshape(array.shape[0] // pieces, pieces, *array.shape[1:]).swapaxes(0, 1)
        return constrain(micro, *(None, *TOKEN_AXES, *[None] * micro.ndim)[: micro.ndim])

    # Labels of sequences that are no tokens have as many dimensions before they are cut.
    is_cut = _tokens(batch).ndim == 3 and len(_tokens(batch)) == pieces
    return dict(batch) if is_cut else jax.tree.map(cut, dict(batch))


def _accumulate(
    gradients: Gradients, state: TrainState, batch: Mapping[str, jax.Array], pieces: int
) -> tuple[PyTree, LossOutput, PyTree]:
    """Returns gradients, sums of the loss, and untrained arrays after all micro-batches."""
    if pieces == 1:
        return gradients(state.params, state.rest, batch)

    def one(carry: PyTree, micro: PyTree) -> tuple[PyTree, None]:
        grads, out, rest = carry
        more, added, rest = gradients(state.params, rest, micro)
        return (jax.tree.map(jnp.add, grads, more), jax.tree.map(jnp.add, out, added), rest), None

    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), state.params)
    micro = _micro_batches(batch, pieces)
    first = jax.tree.map(lambda array: array[0], micro)
    nothing = jax.tree.map(
        lambda out: jnp.zeros(out.shape, out.dtype),
        jax.eval_shape(gradients, state.params, state.rest, first)[1],
    )
    (grads, out, rest), _ = jax.lax.scan(one, (zeros, nothing, state.rest), micro)
    return grads, out, rest


def _float32(out: LossOutput) -> LossOutput:
    return out._replace(
        loss_sum=out.loss_sum.astype(jnp.float32),
        num_targets=out.num_targets.astype(jnp.int32),
        nll_sum=out.nll_sum.astype(jnp.float32),
        more={name: value.astype(jnp.float32) for name, value in out.more.items()},
    )


def _tokens(batch: Mapping[str, jax.Array]) -> jax.Array:
    """Returns the array that is counted as tokens: input_ids, [..., B, S].

    Rows of something else (images) count as one token each, by their labels [..., B].
    """
    if "input_ids" in batch:
        return batch["input_ids"]
    require(
        "labels" in batch,
        "batch",
        "has neither input_ids nor labels",
        "Name what is to be predicted `labels`.",
        have=sorted(batch),
    )
    return batch["labels"][..., None]


def _count(batch: Mapping[str, jax.Array], windows: Sequence[int | None]) -> Metrics:
    """Returns the counts of a batch: num_tokens, attended, num_slots and seq_length."""
    ids = _tokens(batch)
    segment_ids = batch.get("segment_ids", jnp.ones_like(ids))
    position_ids = batch.get(
        "position_ids", jnp.broadcast_to(jnp.arange(ids.shape[-1], dtype=jnp.int32), ids.shape)
    )
    num_tokens, attended = segment_sums(segment_ids, position_ids, windows)
    sizes = {"num_slots": jnp.int32(ids.size), "seq_length": jnp.int32(ids.shape[-1])}
    return {"num_tokens": num_tokens, "attended": attended, **sizes}
