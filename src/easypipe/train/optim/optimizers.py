"""Names in the configuration → Optax transformations. The table lists what runs; optim_config.py's
Literal is the same list.

Every optimizer is put together in one way: clip · its own direction · decoupled weight decay ·
per-group scale · learning rate.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from easypipe.core.errors import ConfigError, did_you_mean
from easypipe.train.optim.adan import scale_by_adan
from easypipe.train.optim.config import OptimizerConfig
from easypipe.train.optim.schedules import make_schedule
from easypipe.train.optim.soap import scale_by_soap


@dataclass(frozen=True)
class Optimizer:
    """A transformation, and what a trainer must know about it. Called as optax calls it: `init`,
    `update`.
    """

    transformation: optax.GradientTransformation
    needs_objective: bool = False  # update takes `obj_fn`, params -> loss (sophia's curvature)
    averages: bool = False  # the weights to evaluate are not those that are trained (schedule_free)

    def init(self, params: Any) -> Any:
        return self.transformation.init(params)

    def update(self, updates: Any, state: Any, params: Any, **extra: Any) -> tuple[Any, Any]:
        return optax.with_extra_args_support(self.transformation).update(
            updates, state, params, **extra
        )

    def eval_params(self, state: Any, params: Any) -> Any:
        """The parameters to evaluate and to keep: for schedule_free its averages, else those
        trained.
        """
        return contrib.schedule_free_eval_params(state[-1], params) if self.averages else params


def make_optimizer(
    config: OptimizerConfig,
    steps: int,
    decays: Mapping[str, bool],
    hidden: Mapping[str, bool] | None = None,
) -> Optimizer:
    """The whole transformation over a flat dict of parameters.

    decays: True for matrices, which weight decay and SOAP are for. hidden: True for those between
    hidden layers, which muon is for (not embeddings, not the head, which get AdamW); default: as
    `decays`. Raises ConfigError for a group that fits no parameter.
    """
    scales, weight_decays = _groups(config, decays)
    schedule = make_schedule(config, steps)
    clip = [] if config.clip_norm is None else [optax.clip_by_global_norm(config.clip_norm)]
    decay = _decay(weight_decays)
    if config.name == "prodigy":
        return Optimizer(
            optax.chain(*clip, _prodigy(config, schedule, weight_decays), _scale(scales))
        )
    direction = DIRECTIONS[config.name](config, decays, decays if hidden is None else hidden)
    after = [optax.scale_by_trust_ratio()] if config.name == "lamb" else []
    whole = optax.chain(
        direction, decay, *after, _scale(scales), optax.scale_by_learning_rate(schedule)
    )
    if config.name == "schedule_free":
        return Optimizer(optax.chain(*clip, _averaging(config, schedule, whole)), averages=True)
    return Optimizer(optax.chain(*clip, whole), needs_objective=config.name == "sophia")


def _groups(
    config: OptimizerConfig, decays: Mapping[str, bool]
) -> tuple[dict[str, float], dict[str, float]]:
    """(learning rate scale, weight decay) of every parameter."""
    scales, weight_decays, taken = {}, {}, set()
    for name, is_matrix in decays.items():
        at = next(
            (i for i, group in enumerate(config.groups) if fnmatch.fnmatchcase(name, group.match)),
            None,
        )
        group = None if at is None else config.groups[at]
        taken.add(at)
        scales[name] = 1.0 if group is None else group.learning_rate_scale
        own = config.value("weight_decay") if is_matrix else 0.0
        weight_decays[name] = (
            own if group is None or group.weight_decay is None else group.weight_decay
        )
    for i, group in enumerate(config.groups):
        if i not in taken:
            earlier = any(fnmatch.fnmatchcase(name, group.match) for name in decays)
            problem = f"{group.match!r} fits {'only parameters that an earlier group has' if earlier else 'no parameter'}"
            raise ConfigError(
                at=f"train.optimizer.groups[{i}].match",
                problem=problem,
                have=sorted(decays),
                fix=did_you_mean(group.match, list(decays)),
            )
    return scales, weight_decays


def _decay(weight_decays: Mapping[str, float]) -> optax.GradientTransformation:
    def add(updates: Any, params: Any) -> Any:
        return {
            name: u + weight_decays[name] * params[name] if weight_decays[name] else u
            for name, u in updates.items()
        }

    return optax.stateless(add)


def _scale(scales: Mapping[str, float]) -> optax.GradientTransformation:
    def scale(updates: Any, params: Any) -> Any:
        return {name: u if scales[name] == 1.0 else u * scales[name] for name, u in updates.items()}

    return optax.stateless(scale)


def _adam(
    config: OptimizerConfig, decays: Mapping[str, bool], hidden: Mapping[str, bool]
) -> optax.GradientTransformation:
    return optax.scale_by_adam(
        config.value("beta1"),
        config.value("beta2"),
        config.value("epsilon"),
        nesterov=config.name == "nadamw",
    )


def _lion(
    config: OptimizerConfig, decays: Mapping[str, bool], hidden: Mapping[str, bool]
) -> optax.GradientTransformation:
    return optax.scale_by_lion(config.value("beta1"), config.value("beta2"))


def _sophia(
    config: OptimizerConfig, decays: Mapping[str, bool], hidden: Mapping[str, bool]
) -> optax.GradientTransformation:
    """Sophia-H: the curvature's diagonal by Hutchinson's estimator (Liu et al., 2023, algorithm
    1).
    """
    sophia = contrib.sophia(
        1.0,
        b1=config.value("beta1"),
        b2=config.value("beta2"),
        eps=config.value("epsilon"),
        weight_decay=0.0,
        gamma=config.value("gamma"),
        update_interval=config.value("update_interval"),
    )
    # optax exports the whole descent only: this takes its sign back
    return optax.chain(sophia, optax.scale(-1.0))


def _muon(
    config: OptimizerConfig, decays: Mapping[str, bool], hidden: Mapping[str, bool]
) -> optax.GradientTransformation:
    """Muon (Jordan et al., 2024) for hidden matrices, AdamW for the rest; steps have AdamW's size
    (0.2 RMS, Liu et al., 2025), so that one learning rate serves both."""

    def dimensions(params: Any) -> Any:
        return jax.tree.map(lambda _: contrib.MuonDimensionNumbers(-2, -1), params)

    def match(updates: Any, params: Any) -> Any:
        return jax.tree.map(lambda u: u * (0.2 * max(u.shape[-2:]) ** 0.5), updates)

    orthogonal = contrib.scale_by_muon(
        ns_steps=config.value("newton_schulz_steps"),
        beta=config.value("momentum"),
        weight_dimension_numbers=dimensions,
    )
    labels = {name: "muon" if hidden[name] else "adam" for name in decays}
    return optax.partition(
        {
            "muon": optax.chain(orthogonal, optax.stateless(match)),
            "adam": _adam(config, decays, hidden),
        },
        labels,
    )


def _adafactor(
    config: OptimizerConfig, decays: Mapping[str, bool], hidden: Mapping[str, bool]
) -> optax.GradientTransformation:
    """Without momentum, relative to the size of the parameter, updates of at most unit size
    (Shazeer and Stern, 2018).
    """
    return optax.chain(
        optax.scale_by_factored_rms(
            decay_rate=config.value("decay_rate"), epsilon=config.value("epsilon")
        ),
        optax.clip_by_block_rms(1.0),
        optax.scale_by_param_block_rms(),
    )


def _schedule_free(
    config: OptimizerConfig, decays: Mapping[str, bool], hidden: Mapping[str, bool]
) -> optax.GradientTransformation:
    """Adam without momentum, which the averaging replaces (Defazio et al., 2024)."""
    return optax.scale_by_adam(0.0, config.value("beta2"), config.value("epsilon"))


def _averaging(
    config: OptimizerConfig, schedule: optax.Schedule, whole: optax.GradientTransformation
) -> optax.GradientTransformation:
    """Averages what `whole` does. optax counts these steps from 1, the schedule counts from 0; and
    in the dtype of bfloat16 parameters the sum of the weights would stop at 256 equal ones."""
    averaging = contrib.schedule_free(
        whole, lambda taken: schedule(taken - 1), b1=config.value("beta1")
    )

    def init(params: Any) -> Any:
        state: Any = averaging.init(params)
        scalars = {
            name: _at_least_float32(getattr(state, name)) for name in ("b1", "weight_sum", "max_lr")
        }
        return state._replace(**scalars)

    return optax.GradientTransformationExtraArgs(init, averaging.update)


def _ademamix(
    config: OptimizerConfig, decays: Mapping[str, bool], hidden: Mapping[str, bool]
) -> optax.GradientTransformation:
    return contrib.scale_by_ademamix(
        config.value("beta1"),
        config.value("beta2"),
        config.value("beta3"),
        config.value("alpha"),
        config.value("epsilon"),
    )


def _adan(
    config: OptimizerConfig, decays: Mapping[str, bool], hidden: Mapping[str, bool]
) -> optax.GradientTransformation:
    return scale_by_adan(
        b1=config.value("beta1"),
        b2=config.value("beta2"),
        b3=config.value("beta3"),
        eps=config.value("epsilon"),
    )


def _soap(
    config: OptimizerConfig, decays: Mapping[str, bool], hidden: Mapping[str, bool]
) -> optax.GradientTransformation:
    return scale_by_soap(
        decays,
        b1=config.value("beta1"),
        b2=config.value("beta2"),
        eps=config.value("epsilon"),
        update_interval=config.value("update_interval"),
        max_dim=config.value("max_precondition_dim"),
    )


def _prodigy(
    config: OptimizerConfig, schedule: optax.Schedule, weight_decays: Mapping[str, float]
) -> optax.GradientTransformation:
    """Prodigy (Mishchenko and Defazio, 2023) finds its rate d by itself; decay is of the rate that
    moves the parameters, d * schedule.

    While all gradients were zero, d cannot be estimated (0 / 0): as in the authors' code nothing
    moves. The state is float32 at least: d grows by sums of what bfloat16 would round away.
    """
    beta1, beta2 = config.value("beta1"), config.value("beta2")
    inner = contrib.prodigy(schedule, betas=(beta1, beta2), eps=config.value("epsilon"))

    def init(params: Any) -> Any:
        return inner.init(jax.tree.map(_at_least_float32, params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        taken = state.count + 1
        rate: Any = (
            state.estim_lr * schedule(state.count) * jnp.sqrt(1 - beta2**taken) / (1 - beta1**taken)
        )
        moved: Any
        after: Any
        moved, after = inner.update(
            *(jax.tree.map(_at_least_float32, tree) for tree in (updates, state, params))
        )
        has_estimate = optax.tree.norm(after.grad_sum, ord=1) > 0
        after = after._replace(estim_lr=jnp.where(has_estimate, after.estim_lr, state.estim_lr))
        decayed = {name: u - rate * weight_decays[name] * params[name] for name, u in moved.items()}
        return {
            name: jnp.where(has_estimate, u, 0.0).astype(updates[name].dtype)
            for name, u in decayed.items()
        }, after

    return optax.GradientTransformation(init, update)


def _at_least_float32(array: Any) -> Any:
    """A copy in float32, where `array` is in half precision; else the array itself."""
    return (
        array.astype(jnp.promote_types(array.dtype, jnp.float32))
        if jnp.issubdtype(array.dtype, jnp.floating)
        else array
    )


Direction = Callable[
    [OptimizerConfig, Mapping[str, bool], Mapping[str, bool]], optax.GradientTransformation
]
DIRECTIONS: dict[str, Direction] = {
    "adamw": _adam,
    "nadamw": _adam,
    "lion": _lion,
    "sophia": _sophia,
    "muon": _muon,
    "adafactor": _adafactor,
    "schedule_free": _schedule_free,
    "ademamix": _ademamix,
    "adan": _adan,
    "lamb": _adam,
    "soap": _soap,
}
