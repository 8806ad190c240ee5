from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from easypipe.core.errors import ConfigError
from easypipe.train.config import OptimizerConfig
from easypipe.train.optim.optimizers import make_optimizer, make_schedule


def test_schedule_warms_up_from_its_first_step_and_ends_at_the_final_fraction():
    schedule = make_schedule(
        OptimizerConfig(learning_rate=1.0, warmup_steps=4, final_fraction=0.1), 20
    )
    np.testing.assert_allclose(
        [float(schedule(k)) for k in range(5)], [0.2, 0.4, 0.6, 0.8, 1.0], rtol=1e-6
    )
    for step in (5, 12, 19, 20):
        expected = 0.1 + 0.9 * (1 + math.cos(math.pi * (step - 4) / 16)) / 2
        assert float(schedule(step)) == pytest.approx(expected, rel=1e-5)


def test_no_warm_up_starts_at_the_peak():
    assert float(make_schedule(OptimizerConfig(learning_rate=0.5), 10)(0)) == 0.5


def test_a_warm_up_that_never_ends_is_refused():
    with pytest.raises(ConfigError, match="Give at most 4"):
        make_schedule(OptimizerConfig(warmup_steps=5), 5)
    make_schedule(OptimizerConfig(warmup_steps=4), 5)


@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_updates_are_those_of_the_paper(clip_norm):
    config = OptimizerConfig(
        learning_rate=0.1,
        warmup_steps=1,
        beta1=0.8,
        beta2=0.9,
        epsilon=1e-6,
        weight_decay=0.3,
        clip_norm=clip_norm,
    )
    optimizer, schedule = (
        make_optimizer(config, 8, {"w": True, "scale": False}),
        make_schedule(config, 8),
    )
    random = np.random.default_rng(0)
    ours = {"w": random.normal(size=(3, 2)), "scale": random.normal(size=2)}
    theirs = {name: jnp.asarray(value, jnp.float32) for name, value in ours.items()}
    state = optimizer.init(theirs)
    first, second = ({name: np.zeros_like(value) for name, value in ours.items()} for _ in range(2))
    for step in range(5):
        grads = {name: random.normal(size=value.shape) for name, value in ours.items()}
        updates, state = optimizer.update(
            {n: jnp.asarray(g, jnp.float32) for n, g in grads.items()}, state, theirs
        )
        theirs = optax.apply_updates(theirs, updates)
        norm = math.sqrt(sum(float((g * g).sum()) for g in grads.values()))
        scale = 1.0 if clip_norm is None else min(1.0, clip_norm / norm)
        for name in ours:
            gradient = grads[name] * scale
            first[name] = 0.8 * first[name] + 0.2 * gradient
            second[name] = 0.9 * second[name] + 0.1 * gradient**2
            towards = (first[name] / (1 - 0.8 ** (step + 1))) / (
                np.sqrt(second[name] / (1 - 0.9 ** (step + 1))) + 1e-6
            )
            decay = 0.3 * ours[name] if name == "w" else 0.0
            ours[name] = ours[name] - float(schedule(step)) * (towards + decay)
    for name, value in ours.items():
        np.testing.assert_allclose(theirs[name], value, rtol=2e-4, atol=1e-5)
