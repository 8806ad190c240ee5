"""Makes optimizers (table DIRECTIONS), learning rate schedules, groups, and averages of parameters.

A test compares the table with the Literal of the configuration. Every optimizer is composed in the
same way: clip · its own direction · decoupled weight decay · per-group scale · learning rate.

k step, from 0 · W warm-up steps · N steps of the run · C cool-down steps · p peak · f final
fraction
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree
from optax import contrib

from easypipe.core.errors import ConfigError, did_you_mean
from easypipe.train.optim.config import OptimizerConfig, check_warmup, cooldown_steps
from easypipe.train.optim.soap import scale_by_soap

ONE_CYCLE_START = 1 / 25  # of the peak (Smith and Topin, 2018)


def make_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Returns the learning rate of every step, counted from 0.

    Warm-up: p (k + 1) / (W + 1), so that no step has rate 0. Then, with j = k - W and M = N - W:

    - cosine: half a cosine from p to f p over M (Loshchilov and Hutter, 2017).
    - linear, polynomial: p (f + (1 - f) (1 - j / M)^power).
    - inverse_sqrt: p sqrt(T / (T + j)), T = max(W, 1) (Vaswani et al., 2017).
    - constant: p.
    - wsd: constant with a cool-down (Hu et al., MiniCPM, 2024).
    - one_cycle: half a cosine up from p / 25 over W, half a cosine down over M (Smith and Topin,
      2018).

    Cool-down: from the rate at N - C down to f p over the last C steps.

    Raises:
        ConfigError: Warm-up and cool-down leave no step between them.
    """
    check_warmup(config, steps)
    peak, warmup = float(config.numbers()["learning_rate"]), config.warmup_steps
    final = config.end_fraction
    name = config.chosen_schedule
    main = MAIN[name](config, peak, final, steps - warmup)
    if name == "one_cycle":

        def rise(k: jax.typing.ArrayLike) -> jax.Array:
            return peak - (1 - ONE_CYCLE_START) * peak * 0.5 * (1 + jnp.cos(jnp.pi * k / warmup))

        up: optax.Schedule = rise
    else:
        up = optax.linear_schedule(peak / (warmup + 1), peak, warmup)
    cooling = cooldown_steps(config, steps)
    parts, borders = [up, main], [warmup]
    if cooling:
        top = float(cast("float", main(steps - warmup - cooling)))
        parts.append(
            functools.partial(_cool, top, final * peak, cooling, config.cooldown_shape or "linear")
        )
        borders.append(steps - cooling)
    return optax.join_schedules(parts, borders)


def _cool(
    top: float, bottom: float, cooling: int, shape: str, k: jax.typing.ArrayLike
) -> jax.Array:
    share = jnp.clip(k / cooling, 0.0, 1.0)
    remaining = {
        "linear": 1 - share,
        "cosine": 0.5 * (1 + jnp.cos(jnp.pi * share)),
        "sqrt": 1 - jnp.sqrt(share),
    }[shape]
    return bottom + (top - bottom) * remaining


def _inverse_sqrt(config: OptimizerConfig, peak: float, final: float, steps: int) -> optax.Schedule:
    start = max(config.warmup_steps, 1)
    # optax also evaluates it for steps below 0; that value is not used.
    return lambda k: peak * jnp.sqrt(start / (start + jnp.maximum(k, 0)))


def _cosine(_: OptimizerConfig, peak: float, final: float, steps: int) -> optax.Schedule:
    return optax.cosine_decay_schedule(peak, steps, alpha=final)


def _constant(_: OptimizerConfig, peak: float, *__: float) -> optax.Schedule:
    return optax.constant_schedule(peak)


# (config, peak, final fraction, steps after the warm-up) -> schedule
MAIN: dict[str, Callable[[OptimizerConfig, float, float, int], optax.Schedule]] = {
    "cosine": _cosine,
    "linear": lambda _, peak, final, steps: optax.linear_schedule(peak, final * peak, steps),
    "wsd": _constant,
    "polynomial": lambda config, peak, final, steps: optax.polynomial_schedule(
        peak, final * peak, config.chosen_power, steps
    ),
    "inverse_sqrt": _inverse_sqrt,
    "constant": _constant,
    "one_cycle": _cosine,
}


Arrays = dict[str, jax.Array]  # a flat dict of parameters, or of values for them
Numbers = Mapping[str, float]  # OptimizerConfig.numbers()


@dataclass(frozen=True)
class Optimizer:
    """An optax transformation, and what a trainer must know about it.

    `init` and `update` are called like those of optax.

    Attributes:
        transformation: The optax transformation.
        needs_objective: Whether `update` takes `obj_fn`, params -> loss (for sophia's curvature).
        average: (state, params) -> the weights to evaluate; None if those are the trained ones.
        frozen: Names of parameters that no step changes, not even by rounding.
    """

    transformation: optax.GradientTransformation
    needs_objective: bool = False
    average: Callable[[optax.OptState, Arrays], Arrays] | None = None
    frozen: frozenset[str] = frozenset()

    def init(self, params: Arrays) -> optax.OptState:
        return self.transformation.init(params)

    def update(
        self, updates: Arrays, state: optax.OptState, params: Arrays, **extra: PyTree
    ) -> tuple[Arrays, optax.OptState]:
        whole = optax.with_extra_args_support(self.transformation)
        found = whole.update(updates, state, params, **extra)
        moves, after = cast("tuple[Arrays, optax.OptState]", found)
        # A parameter of -0.0 remains what it is if -0.0 is added, and becomes 0.0 with 0.0.
        return moves | {name: jnp.full_like(moves[name], -0.0) for name in self.frozen}, after

    def eval_params(self, state: optax.OptState, params: Arrays) -> Arrays:
        """Returns the parameters to evaluate and export.

        They are an average (schedule_free, ema_decay), or `params`.
        """
        if self.average is None:
            return params
        averages = self.average(cast("tuple[optax.OptState, ...]", state)[-1], params)
        return averages | {name: params[name] for name in self.frozen}


class Roles(NamedTuple):
    """The roles of parameters, by name."""

    decays: Mapping[str, bool]  # matrices, to which weight decay and SOAP apply
    hidden: Mapping[str, bool]  # matrices between hidden layers, to which muon applies
    stacked: Collection[str]  # names of those whose first dimension counts layers


def make_optimizer(
    config: OptimizerConfig,
    steps: int,
    decays: Mapping[str, bool],
    hidden: Mapping[str, bool] | None = None,
    stacked: Collection[str] = (),
) -> Optimizer:
    """Returns the complete transformation over a flat dict of parameters.

    Args:
        config: The options of the optimizer.
        steps: The number of steps of the run.
        decays: Whether each parameter is a matrix, to which weight decay and SOAP apply.
        hidden: Whether each parameter is a matrix between hidden layers, to which muon applies (not
            embeddings and not the head, which get AdamW); default: as `decays`.
        stacked: The names of parameters whose first dimension counts layers. Each layer of them is
            a parameter of its own to lamb and adafactor.

    Raises:
        ConfigError: A group matches no parameter.
    """
    roles = Roles(decays, decays if hidden is None else hidden, stacked)
    frozen = frozenset(name for name, scale in _groups(config, decays)[0].items() if scale == 0)
    whole = dataclasses.replace(_without_average(config, steps, roles), frozen=frozen)
    if config.ema_decay is None:
        return whole
    chain = optax.chain(whole.transformation, running_average(config.ema_decay))
    return dataclasses.replace(whole, transformation=chain, average=_averaged)


def _without_average(config: OptimizerConfig, steps: int, roles: Roles) -> Optimizer:
    """Returns the transformation of `make_optimizer` without the running average of ema_decay."""
    scales, weight_decays = _groups(config, roles.decays)
    schedule, numbers = make_schedule(config, steps), config.numbers()
    clip = [] if config.clip_norm is None else [optax.clip_by_global_norm(config.clip_norm)]
    scale = _by_name(lambda name, update, _: update * scales[name], lambda name: scales[name] != 1)
    if config.name == "prodigy":
        return Optimizer(optax.chain(*clip, _prodigy(numbers, schedule, weight_decays), scale))
    whole = optax.chain(
        DIRECTIONS[config.name](numbers, roles),
        _by_name(
            lambda name, update, param: update + weight_decays[name] * param,
            lambda name: weight_decays[name] != 0,
        ),
        *([_by_layer(optax.scale_by_trust_ratio(), roles)] if config.name == "lamb" else []),
        scale,
        optax.scale_by_learning_rate(schedule),
    )
    if config.name == "schedule_free":
        chain = optax.chain(*clip, _averaging(numbers, schedule, whole))
        return Optimizer(chain, average=contrib.schedule_free_eval_params)
    return Optimizer(optax.chain(*clip, whole), needs_objective=config.name == "sophia")


def _groups(
    config: OptimizerConfig, decays: Mapping[str, bool]
) -> tuple[dict[str, float], dict[str, float]]:
    """Returns the learning rate scale and the weight decay of every parameter.

    Raises:
        ConfigError: A group matches no parameter that an earlier group has not taken.
    """
    scales, weight_decays, taken = {}, {}, set()
    for name, is_matrix in decays.items():
        fitting = (
            i for i, group in enumerate(config.groups) if fnmatch.fnmatchcase(name, group.match)
        )
        at = next(fitting, None)
        group = None if at is None else config.groups[at]
        taken.add(at)
        scales[name] = 1.0 if group is None else group.learning_rate_scale
        weight_decays[name] = config.numbers()["weight_decay"] if is_matrix else 0.0
        if group is not None and group.weight_decay is not None:
            weight_decays[name] = group.weight_decay
    for i, group in enumerate(config.groups):
        if i not in taken:
            earlier = any(fnmatch.fnmatchcase(name, group.match) for name in decays)
            problem = (
                f"{group.match!r} fits "
                f"{'only parameters that an earlier group has' if earlier else 'no parameter'}"
            )
            raise ConfigError(
                at=f"train.optimizer.groups[{i}].match",
                problem=problem,
                have=sorted(decays),
                fix=did_you_mean(group.match, list(decays)),
            )
    return scales, weight_decays


def _by_name(
    change: Callable[[str, jax.Array, jax.Array], jax.Array], changes: Callable[[str], bool]
) -> optax.GradientTransformation:
    """Applies `change(name, update, parameter)` to the updates that `changes` selects."""

    def apply(updates: Arrays, params: Arrays) -> Arrays:
        return {
            name: change(name, update, params[name]) if changes(name) else update
            for name, update in updates.items()
        }

    return optax.stateless(apply)  # pyright: ignore[reportArgumentType]  (of flat dicts alone)


def _by_layer(whole: optax.GradientTransformation, roles: Roles) -> optax.GradientTransformation:
    """Applies a transformation without a state to every layer of stacked parameters by itself."""

    def one(update: jax.Array, param: jax.Array) -> jax.Array:
        return cast("jax.Array", whole.update(update, whole.init(param), param)[0])

    def change(name: str, update: jax.Array, param: jax.Array) -> jax.Array:
        return (jax.vmap(one) if name in roles.stacked else one)(update, param)

    return _by_name(change, lambda _: True)


def _sophia(n: Numbers, roles: Roles) -> optax.GradientTransformation:
    """Sophia-H (Liu et al., 2023, algorithm 1).

    It estimates the curvature's diagonal by Hutchinson's method.
    """
    sophia = contrib.sophia(
        1.0,
        b1=n["beta1"],
        b2=n["beta2"],
        eps=n["epsilon"],
        weight_decay=0.0,
        gamma=n["gamma"],
        update_interval=int(n["update_interval"]),
    )
    # optax exports only the complete descent: this reverts its sign.
    return optax.chain(sophia, optax.scale(-1.0))


def _muon(n: Numbers, roles: Roles) -> optax.GradientTransformation:
    """Muon (Jordan et al., 2024) for hidden matrices, AdamW for the rest.

    Steps have AdamW's size (0.2 RMS, Liu et al., 2025), so that one learning rate serves both.
    """

    def dimensions(params: optax.Params) -> optax.Params:
        return jax.tree.map(lambda _: contrib.MuonDimensionNumbers(-2, -1), params)

    def match(updates: optax.Updates, params: optax.Params | None) -> optax.Updates:
        return jax.tree.map(lambda u: u * (0.2 * max(u.shape[-2:]) ** 0.5), updates)

    orthogonal = contrib.scale_by_muon(
        ns_steps=int(n["newton_schulz_steps"]),
        beta=n["momentum"],
        weight_dimension_numbers=dimensions,
    )
    both: dict[Hashable, optax.GradientTransformation] = {
        "muon": optax.chain(orthogonal, optax.stateless(match)),
        "adam": _adam(n, roles),
    }
    labels = {name: "muon" if is_hidden else "adam" for name, is_hidden in roles.hidden.items()}
    return optax.partition(both, labels)


def _averaging(
    n: Numbers, schedule: optax.Schedule, whole: optax.GradientTransformation
) -> optax.GradientTransformation:
    """Wraps `whole` in schedule-free averaging.

    optax counts these steps from 1, the schedule counts from 0. The sums are at least float32, as
    in the checkpoints of earlier versions, which trained bfloat16 parameters too.
    """
    averaging = contrib.schedule_free(whole, lambda taken: schedule(taken - 1), b1=n["beta1"])

    def init(params: optax.Params) -> optax.OptState:
        state = cast("contrib.ScheduleFreeState", averaging.init(params))
        wide = (
            _at_least_float32(cast("jax.Array", one))
            for one in (state.b1, state.weight_sum, state.max_lr)
        )
        return state._replace(**dict(zip(("b1", "weight_sum", "max_lr"), wide, strict=True)))

    return optax.GradientTransformationExtraArgs(init, averaging.update)


class AverageState(NamedTuple):
    """A running average of the parameters, by name, in at least float32."""

    average: optax.Params
    taken: jax.Array  # Int32[], updates made


def running_average(decay: float) -> optax.GradientTransformation:
    """Returns a transformation that averages the updated parameters.

    It passes the updates on unchanged.

    The average weights the first steps less, so that the initial parameters do not last in it.
    """

    def init(params: optax.Params) -> AverageState:
        # These are copies, because a step consumes the parameters.
        return AverageState(
            jax.tree.map(lambda p: jnp.copy(_at_least_float32(p)), params), jnp.int32(0)
        )

    def update(
        updates: optax.Updates, state: AverageState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, AverageState]:
        assert params is not None
        kept = jnp.minimum(decay, (1 + state.taken) / (10 + state.taken))
        moved = optax.apply_updates(params, updates)
        average = jax.tree.map(
            lambda a, p: kept * a + (1 - kept) * p.astype(a.dtype), state.average, moved
        )
        return updates, AverageState(average, state.taken + 1)

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]  (its own state)


def _averaged(state: optax.OptState, params: Arrays) -> Arrays:
    average = cast("Arrays", cast("AverageState", state).average)
    return {name: average[name].astype(param.dtype) for name, param in params.items()}


def _prodigy(
    n: Numbers, schedule: optax.Schedule, weight_decays: Mapping[str, float]
) -> optax.GradientTransformation:
    """Prodigy (Mishchenko and Defazio, 2023), which finds its rate d itself.

    Weight decay is multiplied by the rate that moves the parameters, d * schedule. While all
    gradients are zero, d cannot be estimated (0 / 0): as in the authors' code, nothing moves. The
    state is at least float32: d grows by sums of what bfloat16 would round away.
    """
    beta1, beta2 = n["beta1"], n["beta2"]
    inner = contrib.prodigy(schedule, betas=(beta1, beta2), eps=n["epsilon"])

    def init(params: optax.Params) -> optax.OptState:
        return inner.init(jax.tree.map(_at_least_float32, params))

    def update(
        updates: Arrays, state: contrib.ProdigyState, params: Arrays
    ) -> tuple[Arrays, contrib.ProdigyState]:
        taken = state.count + 1
        rate = state.estim_lr * schedule(state.count) * jnp.sqrt(1 - beta2**taken)
        rate = rate / (1 - beta1**taken)
        wide = (jax.tree.map(_at_least_float32, tree) for tree in (updates, state, params))
        moved, after = cast("tuple[Arrays, contrib.ProdigyState]", inner.update(*wide))
        has_estimate = optax.tree.norm(after.grad_sum, ord=1) > 0
        after = after._replace(estim_lr=jnp.where(has_estimate, after.estim_lr, state.estim_lr))
        decayed = {name: u - rate * weight_decays[name] * params[name] for name, u in moved.items()}
        return {
            name: jnp.where(has_estimate, u, 0.0).astype(updates[name].dtype)
            for name, u in decayed.items()
        }, after

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]  (of flat dicts alone)


def _at_least_float32(array: jax.Array) -> jax.Array:
    """Returns a float32 copy of an array in half precision, and other arrays themselves."""
    if not jnp.issubdtype(array.dtype, jnp.floating):
        return array
    return array.astype(jnp.promote_types(array.dtype, jnp.float32))


def _adam(n: Numbers, roles: Roles, *, nesterov: bool = False) -> optax.GradientTransformation:
    return optax.scale_by_adam(n["beta1"], n["beta2"], n["epsilon"], nesterov=nesterov)


DIRECTIONS: dict[str, Callable[[Numbers, Roles], optax.GradientTransformation]] = {
    "adamw": _adam,
    "nadamw": functools.partial(_adam, nesterov=True),
    "lion": lambda n, _: optax.scale_by_lion(n["beta1"], n["beta2"]),
    "sophia": _sophia,
    "muon": _muon,
    # Without momentum, relative to the size of the parameter, with updates of at most unit size
    # (Shazeer and Stern, 2018).
    "adafactor": lambda n, roles: optax.chain(
        optax.scale_by_factored_rms(decay_rate=n["decay_rate"], epsilon=n["epsilon"]),
        _by_layer(
            optax.chain(optax.clip_by_block_rms(1.0), optax.scale_by_param_block_rms()), roles
        ),
    ),
    # Adam without momentum, which the averaging replaces (Defazio et al., 2024).
    "schedule_free": lambda n, _: optax.scale_by_adam(0.0, n["beta2"], n["epsilon"]),
    "ademamix": lambda n, _: contrib.scale_by_ademamix(
        n["beta1"], n["beta2"], n["beta3"], n["alpha"], n["epsilon"]
    ),
    "adan": lambda n, _: scale_by_adan(
        b1=n["beta1"], b2=n["beta2"], b3=n["beta3"], eps=n["epsilon"]
    ),
    "lamb": _adam,
    "soap": lambda n, roles: scale_by_soap(
        roles.decays,
        b1=n["beta1"],
        b2=n["beta2"],
        eps=n["epsilon"],
        update_interval=int(n["update_interval"]),
        max_dim=int(n["max_precondition_dim"]),
    ),
}


class AdanState(NamedTuple):
    """The state of Adan by parameter name, in the dtype of the parameters.

    The fields have the names of optax.
    """

    m: optax.Params  # average of the gradients
    v: optax.Params  # average of their differences
    n: optax.Params  # average of the squares of `gradient + b2 * difference`
    g: optax.Params  # the last gradient
    t: jax.Array  # Int32[], updates made


def scale_by_adan(*, b1: float, b2: float, b3: float, eps: float) -> optax.GradientTransformation:
    """Adan: `(m + b2 v) / (sqrt(n) + eps)`, each average divided by its bias.

    The first difference is 0.
    """

    def init(params: optax.Params) -> AdanState:
        m, v, n, g = (jax.tree.map(jnp.zeros_like, params) for _ in range(4))
        return AdanState(m, v, n, g, jnp.int32(0))

    def update(
        updates: optax.Updates, state: AdanState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, AdanState]:
        del params
        t = state.t + 1
        difference = jax.tree.map(
            lambda g, last: jnp.where(state.t == 0, 0, g - last), updates, state.g
        )
        m = optax.tree.update_moment(updates, state.m, b1, 1)
        v = optax.tree.update_moment(difference, state.v, b2, 1)
        n = optax.tree.update_moment(
            jax.tree.map(lambda g, d: g + b2 * d, updates, difference), state.n, b3, 2
        )
        means = (
            optax.tree.bias_correction(moment, decay, t)
            for moment, decay in ((m, b1), (v, b2), (n, b3))
        )
        direction = jax.tree.map(lambda m, v, n: (m + b2 * v) / (jnp.sqrt(n) + eps), *means)
        return direction, AdanState(m, v, n, updates, t)

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]  (its own state)
