"""The kernels for NVIDIA GPUs against the reference in float64: interpreted on a CPU, compiled on a
GPU (tests/test_cuda.py says how); and the program that is lowered for CUDA.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from easypipe.kernels.loss import chunked, reference
from easypipe.kernels.loss.gpu import kernel as pallas_gpu
from easypipe.kernels.loss.gpu.rows import RowBlock
from easypipe.kernels.loss.stats import Cotangents, Inputs, Objective, loss_cotangents

INTERPRET = jax.default_backend() == "cpu"
# slabs of 8 tokens or columns, groups of 128 tokens, rows in several steps
SMALL = {"slab_mib": 0, "row_columns": 64}
H200 = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")


def inputs(tokens, width, vocab, layout, bias, dtype, seed=0):
    rng = np.random.default_rng(seed)
    head = rng.normal(size=(width, vocab) if layout == "dv" else (vocab, width))
    labels = rng.integers(-1, vocab + 1, tokens)  # some beyond either end: columns of another shard
    # ignored tokens: all three are 0
    cotangents = rng.normal(size=(3, tokens)) * (rng.random(tokens) < 0.8)
    arrays = (rng.normal(size=(tokens, width)).astype(dtype), head.astype(dtype))
    bias_V = rng.normal(size=vocab).astype(dtype) if bias else None
    return Inputs(*arrays, bias_V, labels.astype(np.int32)), Cotangents(
        *cotangents.astype(np.float32)
    )


def wide(arrays) -> Any:
    return jax.tree.map(
        lambda a: a.astype(np.float64) if jnp.issubdtype(a.dtype, jnp.floating) else a, arrays
    )


def exactly(arrays, cotangents, **options) -> Any:
    """Statistics and gradients of the reference in float64."""

    def both(given, g):
        stats = reference.stats(given, **options)
        return stats, reference.gradients(given, stats.lse, g, **options)

    with jax.enable_x64(True):
        return jax.jit(both)(wide(arrays), wide(cotangents))


def error(ours, exact):
    """Of the whole array, relative to it."""
    exact = np.asarray(exact, np.float64)
    return np.linalg.norm(np.asarray(ours, np.float64) - exact) / max(1e-30, np.linalg.norm(exact))


# tokens, width, vocab: one slab is everything; two whole slabs; a rest of whole vectors and one of
# less, in both directions
CASES = [
    (3, 5, 7, "vd", True, None, jnp.float32),
    (256, 16, 264, "dv", False, 3.0, jnp.bfloat16),
    (203, 8, 333, "vd", True, 3.0, jnp.bfloat16),
    (203, 8, 333, "dv", False, None, jnp.float32),
]


@pytest.mark.parametrize(("tokens", "width", "vocab", "layout", "bias", "soft_cap", "dtype"), CASES)
def test_the_strict_kernels_equal_the_reference(
    tokens, width, vocab, layout, bias, soft_cap, dtype
):
    with jax.enable_x64(True):
        arrays, cotangents = inputs(tokens, width, vocab, layout, bias, dtype)
        options = {"layout": layout, "soft_cap": soft_cap}
        exact, wanted = exactly(arrays, cotangents, **options)
        rounding = 1e-5 if dtype == jnp.float32 else 2e-2
        run = options | {"block": SMALL, "interpret": INTERPRET}
        ours = jax.jit(functools.partial(pallas_gpu.stats, **run))(arrays)
        for value, target in zip(ours, exact, strict=True):
            assert value.shape == (tokens,)
            assert value.dtype == jnp.float32
            np.testing.assert_allclose(
                value,
                target,
                rtol=rounding,
                atol=rounding * float(np.abs(exact.best).max() + vocab**0.5),
            )
        gradients = jax.jit(functools.partial(pallas_gpu.gradients, **run))(
            arrays, ours.lse, cotangents
        )
        for like, value, target in zip(
            (arrays[0], arrays[1], arrays[2]), gradients, wanted, strict=True
        ):
            assert (value is None) == (like is None)
            if value is not None and like is not None:
                assert value.dtype == dtype
                assert value.shape == like.shape
                assert (
                    error(value, target) < (1e-4 if dtype == jnp.float32 else 5e-2)
                    or np.linalg.norm(target) < 1e-6
                )


@pytest.mark.parametrize("vocab", [264, 333])
def test_float32_logits_are_not_rounded(vocab):
    """bfloat16 logits of 8 err by 0.03 each; from float32 ones the target is right to the rounding
    of float32.
    """
    arrays, cotangents = inputs(100, 64, vocab, "vd", True, jnp.bfloat16)
    options = {"layout": "vd", "soft_cap": None}
    exact, wanted = exactly(arrays, cotangents, **options)
    run = {"block": SMALL, "interpret": INTERPRET, **options}
    errors = {}
    for wish in (False, True):

        def both(arrays, cotangents, wish=wish):
            found = pallas_gpu.stats(arrays, **run, float32_logits=wish)
            options = run | {"float32_logits": wish, "grad_dtype": jnp.float32}
            return found, pallas_gpu.gradients(arrays, found.lse, cotangents, **options)

        found, gradients = jax.jit(both)(arrays, cotangents)
        errors[wish] = (
            error(found.target, exact.target),
            error(gradients.hidden, wanted.hidden),
            error(gradients.lm_head, wanted.lm_head),
        )
    assert errors[True][0] < 1e-5 < 1e-4 < errors[False][0]
    assert errors[True][1] < errors[False][1]
    assert errors[True][2] < errors[False][2]


def test_the_head_gradient_is_rounded_once_however_small_the_slabs_are():
    """Groups of tokens that each add their rounded share would differ by a unit in the last place
    of bfloat16: 0.004.
    """
    arrays, cotangents = inputs(256, 16, 72, "vd", False, jnp.bfloat16)
    lse = np.full(256, 6.0, np.float32)
    run = functools.partial(pallas_gpu.gradients, layout="vd", soft_cap=None, interpret=INTERPRET)
    small, large = (
        jax.jit(functools.partial(run, block={**SMALL, "slab_mib": mib}))(arrays, lse, cotangents)
        for mib in (0, 256)
    )
    assert pallas_gpu.Problem(256, 16, 72, "vd", 2, 2, 2, 0).backward_slabs().group == 128
    assert error(small.lm_head, large.lm_head) < 1e-4
    assert error(small.hidden, large.hidden) < 1e-4


@pytest.mark.parametrize(("vocab", "soft_cap"), [(1, None), (64, 5.0), (200, None)])
def test_the_rows_equal_those_of_xla(vocab, soft_cap):
    rng = np.random.default_rng(vocab)
    logits = (rng.normal(size=(7, vocab)) * 8).astype(np.float32)
    labels = rng.integers(-1, vocab + 1, 7).astype(np.int32)
    weights = np.array([1, 0, 2, 0.5, 1, 1, 0], np.float32)
    objective = Objective(z_loss=0.01, label_smoothing=0.1, vocab=vocab)
    options = {
        "block": RowBlock(columns=64, num_warps=4),
        "interpret": INTERPRET,
        "soft_cap": soft_cap,
    }

    @jax.jit
    def program(logits, labels, weights):
        given = logits, labels, weights
        ours = pallas_gpu.row_step(*given, objective=objective, **options)
        wanted = chunked.row_step(*given, objective=objective, soft_cap=soft_cap)
        lse = ours[1].lse
        g = loss_cotangents(lse, weights, objective)
        apart = pallas_gpu.row_gradients(logits, labels, lse, g, **options)
        return ours, wanted, pallas_gpu.row_stats(logits, labels, **options), apart

    (dx, stats), (wanted_dx, wanted), alone, apart = program(logits, labels, weights)
    for value, target in zip((dx, *stats), (wanted_dx, *wanted), strict=True):
        np.testing.assert_allclose(value, target, rtol=2e-5, atol=2e-5)
    assert not np.asarray(dx)[np.asarray(weights) == 0].any(), (
        "a token without weight has no gradient, not even a small one"
    )
    np.testing.assert_allclose(alone, stats, rtol=1e-6)
    np.testing.assert_allclose(apart, dx, rtol=1e-6, atol=1e-7)


def test_float32_gradients_are_given_where_they_are_asked_for():
    arrays, cotangents = inputs(16, 4, 24, "vd", True, jnp.bfloat16)
    run = functools.partial(
        pallas_gpu.gradients,
        layout="vd",
        soft_cap=None,
        grad_dtype=jnp.float32,
        interpret=INTERPRET,
    )
    gradients = jax.eval_shape(run, arrays, cotangents[0], cotangents)
    assert {value.dtype for value in gradients} == {jnp.dtype("float32")}


def temporary_bytes(problem: pallas_gpu.Problem) -> int:
    """What the slabs of one pass take at once, at most; beside it stand cuBLAS's workspace and a
    few numbers per token.
    """
    group, columns, group_columns = problem.backward_slabs()
    sums = 4 * group * problem.width if group == problem.tokens else 0
    first = sums + columns * problem.column_bytes(problem.tokens, 2, problem.beside)
    second = problem.group_bytes(group)
    second += group_columns * problem.column_bytes(group, 1, problem.beside)
    forward = problem.token_slab() * problem.vocab * problem.logit
    return max(forward, first, second if group_columns else 0)


SHAPES = [
    (4096, 4096, 128256),
    (16384, 2048, 248320),
    (32768, 4096, 128256),
    (8192, 2048, 32768),
    (16384, 1000, 50257),
]
SHAPES += [(131072, 4096, 128256), (65536, 8192, 128256), (1 << 21, 512, 32000)]


@pytest.mark.parametrize(("tokens", "width", "vocab"), SHAPES)
@pytest.mark.parametrize("layout", ["dv", "vd"])
def test_a_slab_keeps_within_its_budget_and_is_never_all_of_the_logits(
    tokens, width, vocab, layout
):
    budget = pallas_gpu.DEFAULT_BLOCKS["slab_mib"] << 20
    shape = tokens, width, vocab, layout, 2
    half = pallas_gpu.Problem(*shape, logit=2, beside=2, budget=budget)
    assert temporary_bytes(half) <= budget
    assert temporary_bytes(half._replace(logit=4, beside=6)) <= budget, "float32 logits"
    slabs = half.backward_slabs()
    assert max(tokens * slabs.columns, slabs.group * slabs.group_columns) <= tokens * vocab / 2
    assert half.token_slab() <= tokens / 2 + 1


def test_a_refusal_names_every_reason():
    half, double = (
        jax.ShapeDtypeStruct((4, 4), jnp.bfloat16),
        jax.ShapeDtypeStruct((4, 4), np.float64),
    )
    assert pallas_gpu.refusals(half, half, layout="dv") == []
    reasons = pallas_gpu.refusals(double, half, layout="dv")
    assert len(reasons) == 2
    assert "float64" in reasons[0]
    assert "cast one" in reasons[1]


@pytest.mark.parametrize("layout", ["dv", "vd"])
def test_the_program_for_cuda_holds_the_kernels_and_no_logits(layout):
    tokens, width, vocab = 512, 64, 2048

    def loss(hidden, head, labels):
        stats = pallas_gpu.stats(Inputs(hidden, head, None, labels), layout=layout, soft_cap=None)
        cotangents = loss_cotangents(stats.lse, jnp.ones(tokens), Objective(vocab=vocab))
        return stats.lse - stats.target, pallas_gpu.gradients(
            Inputs(hidden, head, None, labels), stats.lse, cotangents, layout=layout, soft_cap=None
        )

    shapes = [(tokens, width), (width, vocab) if layout == "dv" else (vocab, width)]
    arguments = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes] + [
        jax.ShapeDtypeStruct((tokens,), jnp.int32)
    ]
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=H200)  # newer jax asks for the device
    with jax.sharding.use_abstract_mesh(mesh):
        checks = [jax.export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")]
        text = jax.export.export(jax.jit(loss), platforms=["cuda"], disabled_checks=checks)(
            *arguments
        ).mlir_module()
    assert "easypipe_row_stats" in text
    assert "easypipe_row_gradients" in text
    assert re.findall(rf"tensor<({tokens}x{vocab}|{vocab}x{tokens})x", text) == []
