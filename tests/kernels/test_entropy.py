"""Temperature in the loss, and the entropy of what is expected: against the textbook in float64."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from easypipe.core.errors import ConfigError
from easypipe.kernels.loss import chunked
from easypipe.kernels.loss.api import fused_linear_cross_entropy, token_entropy, token_log_probs
from easypipe.kernels.loss.stats import Inputs
from loss_support import IGNORE, Case, case, oracle

WAYS = {
    "reference": {"implementation": "reference"},
    "fast": {"implementation": "chunked", "rule": "fast", "chunk_size": 4},
    "strict": {"implementation": "chunked", "rule": "strict"},
}
GRID = [*itertools.product((0.25, 1.0, 3.0), (None, 2.0), (False, True))]  # temperature, cap, bias


def log_probs_of(given: Case, cap: float | None, warmth: float) -> np.ndarray:
    x = given.hidden @ given.head + (0.0 if given.bias is None else given.bias)
    z = (x if cap is None else cap * np.tanh(x / cap)) / warmth
    z -= z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def floats(given: Case) -> dict[str, np.ndarray]:
    found = {"hidden": given.hidden, "head": given.head, "bias": given.bias}
    return {name: array for name, array in found.items() if array is not None}


@pytest.mark.parametrize("way", WAYS)
def test_logits_are_divided_by_the_temperature(way: str) -> None:
    """Value and all gradients, beside cap, bias, weights, z-loss and smoothing."""
    with jax.enable_x64(True):
        for warmth, cap, bias in GRID:
            given = case(bias=bias)
            options = {
                "z_loss": 0.1,
                "label_smoothing": 0.2,
                "logit_soft_cap": cap,
                "temperature": warmth,
            }

            def ours(arrays, given=given, options=options):
                return fused_linear_cross_entropy(
                    arrays["hidden"],
                    arrays["head"],
                    given.labels,
                    bias=arrays.get("bias"),
                    weights=given.weights,
                    **options,
                    **WAYS[way],
                )

            want = oracle(given, **options)
            loss, grads = jax.jit(jax.value_and_grad(ours))(floats(given))
            np.testing.assert_allclose(loss, want.loss, rtol=1e-10, atol=1e-12)
            for name, grad in grads.items():
                np.testing.assert_allclose(grad, want.grads[name], rtol=1e-10, atol=1e-12)


def test_log_probs_have_a_temperature_too() -> None:
    with jax.enable_x64(True):
        given = case(bias=False)
        own = np.maximum(given.labels, 0)[:, None]
        want = np.take_along_axis(log_probs_of(given, 2.0, 0.5), own, axis=-1)[:, 0]
        run = functools.partial(token_log_probs, temperature=0.5, logit_soft_cap=2.0)
        got = jax.jit(run)(given.hidden, given.head, given.labels)
        np.testing.assert_allclose(got, np.where(given.labels == IGNORE, 0, want), rtol=1e-11)


def test_a_temperature_of_numpy_or_jax_divides_as_a_float_does() -> None:
    """bfloat16 hidden states divided by a scalar that has a dtype would be float32."""
    given = case(bias=False)
    hidden, head = (array.astype(jnp.bfloat16) for array in (given.hidden, given.head))
    run = functools.partial(fused_linear_cross_entropy, hidden, head, given.labels)
    want = run(temperature=0.7, logit_soft_cap=2.0)
    for kind in (np.float32, np.float64, jnp.float32):
        assert run(temperature=kind(0.7), logit_soft_cap=kind(2.0)) == want


def test_a_kernel_divides_them_as_xla_does() -> None:
    """The kernels of TPUs, in the interpreter; the door divides before any of them."""
    random = np.random.default_rng(0)
    hidden, head = (
        random.normal(size=shape).astype(np.float32) for shape in ((128, 64), (64, 256))
    )
    labels = random.integers(0, 256, 128).astype(np.int32)

    def loss(hidden, head, **how):
        return fused_linear_cross_entropy(hidden, head, labels, temperature=0.7, **how)

    def both(**how):
        return jax.jit(jax.value_and_grad(functools.partial(loss, **how), argnums=(0, 1)))

    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()):
        ours = both(implementation="pallas_tpu", rule="strict")(hidden, head)
    exact = both(implementation="reference")(hidden, head)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(exact), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("implementation", ["reference", "chunked"])
@pytest.mark.parametrize("layout", ["dv", "vd"])
def test_entropy_is_that_of_the_textbook(implementation, layout) -> None:
    with jax.enable_x64(True):
        for warmth, cap, bias in GRID:
            given = case(bias=bias, size=4.0)
            arrays = floats(given)
            log_p = log_probs_of(given, cap, warmth)
            want = np.where(given.labels == IGNORE, 0.0, -(np.exp(log_p) * log_p).sum(-1))
            got = jax.jit(
                lambda arrays, given=given, cap=cap, warmth=warmth: token_entropy(
                    arrays["hidden"],
                    arrays["head"] if layout == "dv" else arrays["head"].T,
                    given.labels,
                    bias=arrays.get("bias"),
                    logit_soft_cap=cap,
                    temperature=warmth,
                    layout=layout,
                    implementation=implementation,
                )
            )(arrays)
            np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("block", [(1, 1), (4, 5), (5, 19), (64, 64)])
def test_tiles_of_any_size_have_the_same_entropy(block) -> None:
    with jax.enable_x64(True):
        given = case(size=20.0)  # the largest logit of a row is met late
        inputs = Inputs(given.hidden, given.head, given.bias, given.labels)
        log_p = log_probs_of(given, None, 1.0)
        run = functools.partial(chunked.spread, layout="dv", soft_cap=None, block=block)
        found = jax.jit(lambda inputs: run(inputs).entropy)(inputs)
        np.testing.assert_allclose(found, -(np.exp(log_p) * log_p).sum(-1), rtol=1e-9, atol=1e-12)


def test_logits_far_from_zero_and_even_ones() -> None:
    """In float32: all alike have the log of the vocabulary, an offset changes nothing."""
    hidden, labels = jnp.ones((3, 1)), jnp.zeros(3, jnp.int32)
    for offset in (0.0, 1e4, -1e4):
        got = token_entropy(hidden, jnp.full((1, 5000), offset), labels)
        np.testing.assert_allclose(got, np.log(5000), rtol=1e-6)
    sharp = jnp.zeros((1, 5000)).at[0, 4999].set(1e4)
    np.testing.assert_allclose(token_entropy(hidden, sharp, labels), 0, atol=1e-6)


def test_no_logits_stand_in_memory_and_no_gradient_passes() -> None:
    shapes = ((4096, 16), (16, 32768))
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    labels = jax.ShapeDtypeStruct((4096,), jnp.int32)
    compiled = jax.jit(token_entropy).lower(*arrays, labels).compile()
    found = compiled.memory_analysis()
    assert found is not None
    assert found.temp_size_in_bytes < 4096 * 32768 * 4 / 8
    given = case()
    grads = jax.jit(jax.grad(lambda h, w: token_entropy(h, w, given.labels).sum(), argnums=(0, 1)))(
        given.hidden, given.head
    )
    assert not any(np.asarray(one).any() for one in grads)


def test_what_cannot_be_is_refused_by_name() -> None:
    hidden, head, labels = jnp.ones((8, 6)), jnp.ones((6, 19)), jnp.zeros(8, jnp.int32)
    for warmth in (0.0, -1.0, float("inf"), float("nan"), "hot"):
        with pytest.raises(ConfigError, match=r"temperature: .* is not a positive number"):
            fused_linear_cross_entropy(hidden, head, labels, temperature=warmth)  # pyright: ignore[reportArgumentType]
    for name in ("pallas_tpu", "pallas_gpu"):
        message = f"implementation: '{name}' is not an option [(]have: reference, chunked"
        with pytest.raises(ConfigError, match=message):
            token_entropy(hidden, head, labels, implementation=name)  # pyright: ignore[reportArgumentType]
