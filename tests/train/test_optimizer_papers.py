"""Optimizers that are ours, or optax's with a mend, against their papers' algorithms written out in
NumPy, in float64.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from easypipe.train.optim.config import DEFAULTS, OptimizerConfig
from easypipe.train.optim.optimizers import make_optimizer, make_schedule

STEPS, WARMUP = 12, 4


def trajectory(config: OptimizerConfig, start: np.ndarray, grads: np.ndarray, dtype=jnp.float64):
    """(the trained parameters after every step, those to evaluate) for gradients that are given."""
    with jax.enable_x64(dtype == jnp.float64):
        optimizer = make_optimizer(config, STEPS, {"w": True})
        params = {"w": jnp.asarray(start, dtype)}
        state = optimizer.init(params)
        trained, evaluated = [], []

        @jax.jit
        def step(params, state, gradient):
            updates, state = optimizer.update({"w": gradient}, state, params)
            return optax.apply_updates(params, updates), state

        for gradient in grads:
            params, state = step(params, state, jnp.asarray(gradient, dtype))
            trained.append(np.asarray(params["w"], np.float64))
            evaluated.append(np.asarray(optimizer.eval_params(state, params)["w"], np.float64))
        return np.stack(trained), np.stack(evaluated)


def rates(config: OptimizerConfig) -> np.ndarray:
    """Of the steps, in float64: the warm-up rises to the peak, and the peak stays."""
    peak = config.learning_rate
    return np.asarray([peak * min(1.0, (k + 1) / (config.warmup_steps + 1)) for k in range(STEPS)])


def given(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return random.normal(size=(3, 5)), random.normal(size=(STEPS, 3, 5)) + 0.5


def constant(name: str, **options) -> OptimizerConfig:
    return OptimizerConfig(
        name=name, schedule="constant", warmup_steps=WARMUP, clip_norm=None, **options
    )


def test_adan_is_the_algorithm_of_the_paper():
    """Xie et al., 2022, algorithm 1 with the bias corrections and the decay of the authors' code
    (no_prox). Their paper's beta is our 1 - beta: its weight of the difference, (1 - 0.08), is our
    beta2."""
    b1, b2, b3, eps, decay = 0.98, 0.92, 0.99, 1e-8, 0.02
    config = constant(
        "adan", learning_rate=0.01, beta1=b1, beta2=b2, beta3=b3, epsilon=eps, weight_decay=decay
    )
    x, grads = given()
    got, _ = trajectory(config, x, grads)
    mean, change, square, before = np.zeros_like(x), np.zeros_like(x), np.zeros_like(x), grads[0]
    for t, (rate, gradient) in enumerate(zip(rates(config), grads, strict=True), 1):
        difference = gradient - before
        mean = b1 * mean + (1 - b1) * gradient
        change = b2 * change + (1 - b2) * difference
        square = b3 * square + (1 - b3) * (gradient + b2 * difference) ** 2
        direction = (mean / (1 - b1**t) + b2 * change / (1 - b2**t)) / (
            np.sqrt(square / (1 - b3**t)) + eps
        )
        x = x - rate * (direction + decay * x)
        before = gradient
        np.testing.assert_allclose(got[t - 1], x, rtol=1e-6, atol=1e-8)


def test_schedule_free_is_the_algorithm_of_the_paper():
    """Defazio et al., 2024, algorithm 1, with the weights of the authors' code: the square of the
    largest rate so far. Decay at y.
    """
    b1, b2, eps, decay = 0.9, 0.95, 1e-8, 0.1
    config = constant(
        "schedule_free", learning_rate=0.05, beta1=b1, beta2=b2, epsilon=eps, weight_decay=decay
    )
    start, grads = given()
    got, averages = trajectory(config, start, grads)
    x, z, square, largest, weights = start, start, np.zeros_like(start), 0.0, 0.0
    for t, (rate, gradient) in enumerate(zip(rates(config), grads, strict=True), 1):
        y = (1 - b1) * z + b1 * x
        square = b2 * square + (1 - b2) * gradient**2
        z = z - rate * (gradient / (np.sqrt(square / (1 - b2**t)) + eps) + decay * y)
        largest = max(largest, rate)
        weights += largest**2
        share = largest**2 / weights
        x = (1 - share) * x + share * z
        np.testing.assert_allclose(averages[t - 1], x, rtol=1e-6, atol=1e-8)
        np.testing.assert_allclose(got[t - 1], (1 - b1) * z + b1 * x, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("name", "theirs", "options"),
    [
        ("adamw", optax.adamw, ("beta1", "beta2", "epsilon")),
        ("nadamw", optax.nadamw, ("beta1", "beta2", "epsilon")),
        ("lamb", optax.lamb, ("beta1", "beta2", "epsilon")),
        ("lion", optax.lion, ("beta1", "beta2")),
        ("ademamix", optax.contrib.ademamix, ("beta1", "beta2", "beta3", "alpha")),
    ],
)
def test_those_of_optax_are_what_they_are_called(name, theirs, options):
    config = constant(name, learning_rate=0.01, weight_decay=0.2)
    start, grads = given()
    trained, _ = trajectory(config, start, grads)
    with jax.enable_x64(True):
        rate = jnp.asarray(rates(config))
        chosen = [DEFAULTS[name][option] for option in options]
        optimizer = theirs(lambda step: rate[step], *chosen, weight_decay=0.2)
        params = jnp.asarray(start)
        state = optimizer.init(params)
        for gradient, found in zip(grads, trained, strict=True):
            updates, state = optimizer.update(jnp.asarray(gradient), state, params)
            params = optax.apply_updates(params, updates)
            np.testing.assert_allclose(found, params, rtol=0, atol=1e-7)


@pytest.mark.parametrize("zeros", [0, 2])
def test_prodigy_is_the_algorithm_of_the_paper_also_where_the_first_gradients_are_zero(zeros):
    """Mishchenko and Defazio, 2023, algorithm 4 with Adam's bias corrections. While no gradient was
    seen there is no estimate, and as in the authors' code nothing moves."""
    b1, b2, eps, decay, first = 0.9, 0.999, 1e-8, 0.1, 1e-6
    b3 = np.sqrt(b2)
    config = constant(
        "prodigy", learning_rate=1.0, beta1=b1, beta2=b2, epsilon=eps, weight_decay=decay
    )
    start, grads = given()
    grads[:zeros] = 0.0
    got, _ = trajectory(config, start, grads)
    x, mean, square, total, progress, d = (
        start,
        np.zeros_like(start),
        np.zeros_like(start),
        np.zeros_like(start),
        0.0,
        first,
    )
    for t, (schedule, gradient) in enumerate(zip(rates(config), grads, strict=True), 1):
        rate = d * schedule * np.sqrt(1 - b2**t) / (1 - b1**t)
        mean = b1 * mean + (1 - b1) * d * gradient
        square = b2 * square + (1 - b2) * (d * gradient) ** 2
        total = b3 * total + rate * d * gradient / first
        progress = b3 * progress + rate * d / first * (gradient * (start - x)).sum()
        if np.abs(total).sum() > 0:
            d = max(d, progress / np.abs(total).sum())
            x = x - rate * (mean / (np.sqrt(square) + d * eps) + decay * x)
        np.testing.assert_allclose(got[t - 1], x, rtol=1e-6, atol=1e-8)
    assert d > first
    assert not np.array_equal(x, start)


@pytest.mark.parametrize("name", DEFAULTS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_zero_gradients_and_half_precision_leave_finite_parameters_that_move(name, dtype):
    """The first gradients are zero, as those of a batch without a target; a later one is, too."""
    start, grads = given()
    grads[[0, 1, 6]] = 0.0
    optimizer = make_optimizer(
        OptimizerConfig(name=name, learning_rate=1.0 if name == "prodigy" else 0.05),
        STEPS,
        {"w": True},
    )
    params = {"w": jnp.asarray(start, dtype)}
    state = optimizer.init(params)
    shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state)

    @jax.jit
    def step(params, state, gradient):
        updates, state = optimizer.update(
            {"w": gradient}, state, params, obj_fn=lambda p: (p["w"].astype(jnp.float32) ** 2).sum()
        )
        return optax.apply_updates(params, updates), state

    for gradient in grads:
        params, state = step(params, state, jnp.asarray(gradient, dtype))
        assert jax.tree.all(
            jax.tree.map(
                lambda leaf: bool(jnp.isfinite(leaf.astype(jnp.float32)).all()), (params, state)
            )
        )
    assert params["w"].dtype == dtype
    assert shapes == jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state)
    assert name == "prodigy" or not np.array_equal(params["w"], jnp.asarray(start, dtype))


@pytest.mark.parametrize(
    "name", ["cosine", "linear", "wsd", "polynomial", "inverse_sqrt", "constant", "one_cycle"]
)
def test_a_schedule_takes_the_integers_of_python_and_those_of_a_device(name):
    schedule = make_schedule(
        OptimizerConfig(schedule=name, learning_rate=0.5, warmup_steps=WARMUP), STEPS
    )
    rates = [float(schedule(k)) for k in range(STEPS + 1)]
    assert np.isfinite(rates).all()
    assert min(rates) > 0
    np.testing.assert_allclose(rates, jax.vmap(schedule)(jnp.arange(STEPS + 1)), rtol=1e-6)
