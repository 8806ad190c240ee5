"""Learning rates over the steps of a run: config → optax.Schedule.

k step, from 0 · W warm-up steps · N steps of the run · C cool-down steps · p peak · f final
fraction
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import cast

import jax
import jax.numpy as jnp
import optax

from easypipe.train.optim.config import OptimizerConfig, check_warmup, cooldown_steps

ONE_CYCLE_START = 1 / 25  # of the peak (Smith and Topin, 2018)


def make_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Learning rate of every step, counted from 0. Raises ConfigError where the warm-up and
    cool-down leave no step.

    Warm-up: p (k + 1) / (W + 1), so that no step is spent at 0. Then, with j = k - W and M = N - W:
    cosine  half a cosine from p to f p over M (Loshchilov and Hutter, 2017) · linear, polynomial  p
    (f + (1 - f) (1 - j / M)^power) inverse_sqrt  p sqrt(T / (T + j)), T = max(W, 1) (Vaswani et
    al., 2017) · constant  p · wsd  constant with a cool-down (Hu et al., MiniCPM, 2024) · one_cycle
    half a cosine up from p / 25 over W, half a cosine down over M (Smith and Topin, 2018).
    Cool-down: from the rate at N - C down to f p over the last C steps.
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
    # below 0 it is asked, and not used
    return lambda k: peak * jnp.sqrt(start / (start + jnp.maximum(k, 0)))


# config, peak, final fraction, steps behind the warm-up -> schedule
MAIN: dict[str, Callable[[OptimizerConfig, float, float, int], optax.Schedule]] = {
    "polynomial": lambda config, peak, final, steps: optax.polynomial_schedule(
        peak, final * peak, config.chosen_power, steps
    ),
    "linear": lambda _, peak, final, steps: optax.linear_schedule(peak, final * peak, steps),
    "cosine": lambda _, peak, final, steps: optax.cosine_decay_schedule(peak, steps, alpha=final),
    "constant": lambda _, peak, *__: optax.constant_schedule(peak),
    "inverse_sqrt": _inverse_sqrt,
}
MAIN |= {"one_cycle": MAIN["cosine"], "wsd": MAIN["constant"]}
