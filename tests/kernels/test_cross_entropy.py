"""Every implementation against the reference, in value and gradient, in float64; and what the compiled program may hold."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from easypipe.core.errors import ConfigError
from easypipe.core.schema import IGNORE
from easypipe.kernels import chunked, reference
from easypipe.kernels.api import LossSharding, fused_linear_cross_entropy
from strategies import examples

WIDTH, VOCAB = 6, 19
FAST = ["chunked"]


def inputs(tokens, *, ignored=0.3, seed=0, dtype=np.float64, width=WIDTH, vocab=VOCAB):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, vocab, tokens)
    labels[rng.random(tokens) < ignored] = IGNORE
    hidden, head = rng.normal(size=(tokens, width)), rng.normal(size=(width, vocab))
    return jnp.asarray(hidden, dtype), jnp.asarray(head, dtype), jnp.asarray(labels, jnp.int32)


def value_and_grad(implementation, *, z_loss=0.0, chunk_size=4, cotangent=1.0):
    def loss(hidden, head, labels):
        out = fused_linear_cross_entropy(hidden, head, labels, z_loss=z_loss, implementation=implementation, chunk_size=chunk_size)
        return out.loss_sum * cotangent, out

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))


def assert_agree(ours, theirs, rtol):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert a.dtype == b.dtype
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * (np.abs(b).max(initial=0) + 1e-30))


def test_the_reference_is_the_textbook_formula():
    with jax.enable_x64(True):
        hidden, head, labels = inputs(9)
        logits = np.asarray(hidden) @ np.asarray(head)
        log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        kept = np.asarray(labels) != IGNORE
        want = -log_p[np.arange(9), np.where(kept, labels, 0)] * kept
        lse = np.log(np.exp(logits).sum(-1)) * kept
        nll, loss = reference.cross_entropy(hidden, head, labels, 0.1)
        np.testing.assert_allclose(nll, want, rtol=1e-12)
        np.testing.assert_allclose(loss, want + 0.1 * lse**2, rtol=1e-12)


@pytest.mark.parametrize("implementation", FAST)
@examples(15)
@given(
    tokens=st.integers(1, 21),
    chunk_size=st.integers(1, 24),
    z_loss=st.sampled_from([0.0, 1e-2]),
    ignored=st.sampled_from([0.0, 0.4, 1.0]),
    cotangent=st.sampled_from([1.0, -0.37]),
)
def test_values_and_gradients_equal_the_reference(implementation, tokens, chunk_size, z_loss, ignored, cotangent):
    with jax.enable_x64(True):
        arrays = inputs(tokens, ignored=ignored, seed=tokens)
        ours = value_and_grad(implementation, z_loss=z_loss, chunk_size=chunk_size, cotangent=cotangent)(*arrays)
        assert_agree(ours, value_and_grad("reference", z_loss=z_loss, cotangent=cotangent)(*arrays), rtol=1e-12)


@pytest.mark.parametrize("implementation", FAST)
@pytest.mark.parametrize("vocab", [5, 16, 17, 37])
def test_the_head_gradient_is_whole_whatever_its_column_blocks(implementation, vocab, monkeypatch):
    monkeypatch.setattr(chunked, "VOCAB_BLOCK", 16)
    with jax.enable_x64(True):
        arrays = inputs(11, vocab=vocab)
        assert_agree(value_and_grad(implementation, z_loss=1e-2)(*arrays), value_and_grad("reference", z_loss=1e-2)(*arrays), rtol=1e-12)


@pytest.mark.parametrize("implementation", ["reference", *FAST])
def test_all_ignored_gives_zero_and_zero_gradients(implementation):
    hidden, head, _ = inputs(7, dtype=np.float32)
    labels = jnp.full(7, IGNORE, jnp.int32)
    (loss, out), grads = value_and_grad(implementation, z_loss=1e-3)(hidden, head, labels)
    assert (float(loss), float(out.nll_sum), int(out.num_targets)) == (0.0, 0.0, 0)
    assert all(not np.asarray(grad).any() for grad in grads)


@pytest.mark.parametrize("implementation", FAST)
def test_no_tokens_at_all(implementation):
    (loss, out), grads = value_and_grad(implementation)(*inputs(0, dtype=np.float32))
    assert float(loss) == 0.0
    assert int(out.num_targets) == 0
    assert grads[0].shape == (0, WIDTH)
    assert not np.asarray(grads[1]).any()


@pytest.mark.parametrize("implementation", FAST)
def test_ignored_rows_do_not_reach_the_result(implementation):
    hidden, head, labels = inputs(10, dtype=np.float32)
    noise = jnp.where((labels == IGNORE)[:, None], 1e3, 0.0)
    ours, theirs = value_and_grad(implementation)(hidden, head, labels), value_and_grad(implementation)(hidden + noise, head, labels)
    np.testing.assert_array_equal(ours[0][0], theirs[0][0])
    np.testing.assert_array_equal(ours[1][1], theirs[1][1])


@pytest.mark.parametrize("implementation", FAST)
def test_bfloat16_inputs_are_summed_in_float32(implementation):
    arrays = inputs(64, width=32, vocab=128, dtype=jnp.bfloat16)
    exact = [array.astype(jnp.float32) if array.dtype == jnp.bfloat16 else array for array in arrays]
    (loss, out), grads = value_and_grad(implementation, chunk_size=16)(*arrays)
    (want, _), want_grads = value_and_grad("reference")(*exact)
    assert loss.dtype == out.nll_sum.dtype == jnp.float32
    assert all(grad.dtype == jnp.bfloat16 for grad in grads)
    np.testing.assert_allclose(loss, want, rtol=1e-5)  # the same products, added in another order
    for grad, want_grad in zip(grads, want_grads, strict=True):  # bfloat16 has 8 bits; the terms are rounded to it before the product
        np.testing.assert_allclose(grad.astype(jnp.float32), want_grad, rtol=0.02, atol=0.02 * float(jnp.abs(want_grad).max()))


@pytest.mark.parametrize("implementation", FAST)
def test_large_logits_neither_overflow_nor_lose_the_target(implementation):
    hidden, head, labels = inputs(8, dtype=np.float32)
    ours, theirs = value_and_grad(implementation)(hidden * 100, head, labels), value_and_grad("reference")(hidden * 100, head, labels)
    assert np.isfinite(ours[0][0])
    assert_agree(ours, theirs, rtol=1e-5)


@pytest.mark.parametrize("implementation", ["reference", *FAST])
@pytest.mark.parametrize("label", [VOCAB, VOCAB + 5, -1])
def test_a_label_outside_the_vocabulary_is_nan_not_a_number_that_looks_right(implementation, label):
    hidden, head, labels = inputs(8, dtype=np.float32)
    out = fused_linear_cross_entropy(hidden, head, labels.at[3].set(label), implementation=implementation, chunk_size=4)
    assert np.isnan(out.loss_sum)


def test_nll_sum_leaves_the_z_loss_out_and_carries_no_gradient():
    hidden, head, labels = inputs(12, dtype=np.float32)
    plain = fused_linear_cross_entropy(hidden, head, labels)
    with_z = fused_linear_cross_entropy(hidden, head, labels, z_loss=0.1)
    np.testing.assert_allclose(with_z.nll_sum, plain.loss_sum, rtol=1e-6)
    assert with_z.loss_sum > plain.loss_sum + 0.1
    for implementation in ("reference", "chunked"):
        grad = jax.grad(lambda h, name=implementation: fused_linear_cross_entropy(h, head, labels, implementation=name).nll_sum)(hidden)
        assert not np.asarray(grad).any()


def shapes_in(program: str) -> set[tuple[int, ...]]:
    return {tuple(int(size) for size in shape.split(",")) for shape in re.findall(r"\w+\[([\d,]+)\]", program)}


@pytest.mark.parametrize("with_gradient", [False, True])
def test_no_buffer_of_tokens_by_vocabulary_exists(with_gradient):
    tokens, width, vocab, chunk = 4096, 64, 16384, 256
    arguments = (
        jax.ShapeDtypeStruct((tokens, width), jnp.float32),
        jax.ShapeDtypeStruct((width, vocab), jnp.float32),
        jax.ShapeDtypeStruct((tokens,), jnp.int32),
    )

    def program(implementation):
        def loss(hidden, head, labels):
            return fused_linear_cross_entropy(hidden, head, labels, implementation=implementation, chunk_size=chunk).loss_sum

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)) if with_gradient else loss).lower(*arguments).compile()

    naive, fused = program("reference"), program("chunked")
    assert any(np.prod(shape) == tokens * vocab for shape in shapes_in(naive.as_text())), "the search itself must be able to find one"
    assert not [shape for shape in shapes_in(fused.as_text()) if np.prod(shape) >= tokens * vocab]
    assert fused.memory_analysis().temp_size_in_bytes <= 0.15 * naive.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": jnp.zeros(3, jnp.int32)}, r"shapes do not fit: hidden \(8, 6\), lm_head \(6, 19\), labels \(3,\)"),
        ({"labels": jnp.zeros(8)}, "labels: dtype float32 is no integer"),
        (
            {"implementation": "chunkd"},
            r"implementation: 'chunkd' is not an option \(have: auto, reference, chunked\)\. Did you mean 'chunked'\?",
        ),
        ({"z_loss": -1.0}, "z_loss: -1.0 is negative"),
        ({"chunk_size": 0}, "chunk_size: 0 tokens are no chunk"),
        ({"sharding": LossSharding()}, r"sharding.tokens: no mesh axis named 'data' \(have: none\)\. Call under jax.set_mesh"),
        ({"sharding": LossSharding(), "implementation": "reference"}, "sharding: the reference knows no sharding"),
    ],
)
def test_bad_arguments_are_refused(change, message):
    hidden, head, labels = inputs(8, dtype=np.float32)
    with pytest.raises(ConfigError, match=message):
        fused_linear_cross_entropy(**{"hidden": hidden, "lm_head": head, "labels": labels, **change})
