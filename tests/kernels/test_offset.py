"""What is added to all logits of a token changes nothing: losses and gradients are exact to
rounding under an offset of 1e5, where float32 has steps of 0.008. The oracle is softmax in NumPy,
float64, of the very logits."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from easypipe.kernels.loss import chunked, reference
from easypipe.kernels.loss.api import (
    fused_cross_entropy,
    fused_linear_cross_entropy,
    token_log_probs,
)
from easypipe.kernels.loss.gpu import kernel as pallas_gpu
from easypipe.kernels.loss.gpu.rows import RowBlock
from easypipe.kernels.loss.stats import (
    Inputs,
    LogitStats,
    Objective,
    about_best,
    loss_cotangents,
    merged,
)
from easypipe.kernels.loss.tpu import kernel as pallas_tpu

TOKENS, VOCAB, OFFSET = 8, 300, 1e5
OBJECTIVE = Objective(vocab=VOCAB)


def given(offset: float = OFFSET) -> tuple[np.ndarray, np.ndarray]:
    """Float32[T, V] logits around `offset`, and labels."""
    random = np.random.default_rng(3)
    logits = (4 * random.normal(size=(TOKENS, VOCAB)) + offset).astype(np.float32)
    return logits, random.integers(0, VOCAB, TOKENS).astype(np.int32)


def oracle(offset: float = OFFSET) -> tuple[np.ndarray, np.ndarray]:
    """(loss of every token, gradient of their sum in the logits)."""
    logits, labels = given(offset)
    z = np.asarray(logits, np.float64)
    z -= z.max(axis=1, keepdims=True)
    p = np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)
    rows_T = np.arange(TOKENS)
    loss = -np.log(p[rows_T, labels])
    p[rows_T, labels] -= 1.0
    return loss, p


def near(found, wanted) -> None:
    np.testing.assert_allclose(np.asarray(found, np.float64), wanted, rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize(
    "way",
    [{"implementation": "reference"}, {"implementation": "chunked"}],
    ids=["reference", "chunked"],
)
def test_of_logits(way):
    logits, labels = given()
    losses, grad = oracle()

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def summed(logits):
        out = fused_cross_entropy(logits, labels, reduction="sum", with_tokens=True, **way)
        return out.loss, out.tokens

    (loss, tokens), found = summed(logits)
    near(found, grad)
    near(loss, losses.sum())
    near(tokens.log_probs, -losses)


@pytest.mark.parametrize(
    "way",
    [
        {"implementation": "reference"},
        {"implementation": "chunked", "rule": "fast"},
        {"implementation": "chunked", "rule": "strict"},
    ],
    ids=["reference", "fast", "strict"],
)
@pytest.mark.parametrize("layout", ["dv", "vd"])
def test_of_hidden_states_that_pick_a_row_of_the_head(way, layout):
    """So that products are exact, and the head's gradient is that of the logits."""
    logits, labels = given()
    losses, grad = oracle()

    eye = np.eye(TOKENS, dtype=np.float32)

    @jax.jit
    @jax.value_and_grad
    def loss(head):
        return fused_linear_cross_entropy(eye, head, labels, layout=layout, reduction="sum", **way)

    value, found = loss(logits if layout == "dv" else logits.T)
    near(found if layout == "dv" else found.T, grad)
    near(value, losses.sum())
    run = functools.partial(token_log_probs, layout="dv", implementation=way["implementation"])
    near(jax.jit(run)(eye, logits, labels), -losses)


@pytest.mark.parametrize("offset", [OFFSET, -OFFSET])
@pytest.mark.parametrize("name", ["xla", "tpu", "gpu"])
def test_of_the_rows_of_every_kernel(name, offset):
    logits, labels = given(offset)
    losses, grad = oracle(offset)
    kernel, options = {
        "xla": (chunked, {}),
        "tpu": (pallas_tpu, {"interpret": True}),
        "gpu": (pallas_gpu, {"interpret": True, "block": RowBlock(columns=64, num_warps=4)}),
    }[name]
    weights = np.ones(TOKENS, np.float32)

    @jax.jit
    def program(logits, labels):
        dx, stats = kernel.row_step(
            logits, labels, weights, objective=OBJECTIVE, soft_cap=None, **options
        )
        about = about_best(
            stats.best, stats.log_sum, loss_cotangents(stats.lse, weights, OBJECTIVE)
        )
        apart = kernel.row_gradients(logits, labels, *about, soft_cap=None, **options)
        return dx, stats.log_prob, apart

    dx, log_prob, apart = program(logits, labels)
    near(dx, grad)
    near(-log_prob, losses)
    near(apart, grad)


@pytest.mark.parametrize(
    "kernel",
    [reference, chunked, pallas_tpu, pallas_gpu],
    ids=["reference", "chunked", "tpu", "gpu"],
)
def test_of_the_stats_and_gradients_of_every_kernel(kernel):
    logits, labels = given()
    losses, grad = oracle()
    inputs = Inputs(np.eye(TOKENS, dtype=np.float32), logits, None, labels)
    options = {"layout": "dv", "soft_cap": None} | (
        {"interpret": True} if kernel in (pallas_tpu, pallas_gpu) else {}
    )

    @jax.jit
    def program(inputs):
        stats = kernel.stats(inputs, **options)
        cotangents = loss_cotangents(stats.lse, np.ones(TOKENS, np.float32), OBJECTIVE)
        about = about_best(stats.best, stats.log_sum, cotangents)
        return stats.log_prob, kernel.gradients(inputs, *about, **options).lm_head

    log_prob, found = program(inputs)
    near(-log_prob, losses)
    near(found, grad)


def test_of_parts_of_the_vocabulary():
    logits, labels = given()
    losses, _ = oracle()

    @jax.jit
    def whole(logits, labels):
        parts = [
            chunked.row_stats(part, labels - first, soft_cap=None)
            for first, part in ((0, logits[:, :100]), (100, logits[:, 100:]))
        ]
        found: LogitStats = merged(parts)
        return found.log_prob

    near(-whole(logits, labels), losses)
