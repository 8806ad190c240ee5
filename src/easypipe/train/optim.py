"""Names in the configuration → Optax transformations. The tables list what runs; config.py's Literals are the same lists."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import optax

from easypipe.train.config import OptimizerConfig, check_warmup


def make_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Learning rate of every step, counted from 0. Raises ConfigError where the warm-up does not end before `steps`."""
    check_warmup(config, steps)
    return SCHEDULES[config.schedule](config, steps)


def make_optimizer(config: OptimizerConfig, steps: int, decays: Mapping[str, bool]) -> optax.GradientTransformation:
    """The whole transformation: clipping, the optimizer, weight decay where `decays[parameter]` says so, the schedule."""
    optimizer = OPTIMIZERS[config.name](config, make_schedule(config, steps), decays)
    if config.clip_norm is None:
        return optimizer
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), optimizer)


def _cosine(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Linear from peak / (warmup + 1), so that no step is spent at 0, then half a cosine down to peak * final_fraction."""
    peak, warmup = config.learning_rate, config.warmup_steps
    return optax.warmup_cosine_decay_schedule(peak / (warmup + 1), peak, warmup, steps, peak * config.final_fraction)


def _adamw(config: OptimizerConfig, schedule: optax.Schedule, decays: Mapping[str, bool]) -> optax.GradientTransformation:
    return optax.adamw(schedule, b1=config.beta1, b2=config.beta2, eps=config.epsilon, weight_decay=config.weight_decay, mask=dict(decays))


SCHEDULES: dict[str, Callable[[OptimizerConfig, int], optax.Schedule]] = {"cosine": _cosine}
OPTIMIZERS: dict[str, Callable[[OptimizerConfig, optax.Schedule, Mapping[str, bool]], Any]] = {"adamw": _adamw}
