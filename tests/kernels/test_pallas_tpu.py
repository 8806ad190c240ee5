"""The TPU kernels without a TPU: jax's interpreter runs them, on two cores where they use two,
looks for races and fills what was never written with NaN; the reference in float64 says what they
should give."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from easypipe.core.errors import ConfigError
from easypipe.kernels.loss import chunked, reference
from easypipe.kernels.loss.api import fused_linear_cross_entropy
from easypipe.kernels.loss.stats import Cotangents, Inputs, Objective
from easypipe.kernels.loss.tpu import kernel as pallas_tpu
from easypipe.kernels.loss.tpu.blocks import V5E, V7X, Blocks, plan_blocks, sizes_of
from strategies import examples

SIDE = 128  # the smallest tile


def inputs(
    tokens: int,
    width: int,
    vocab: int,
    dtype: Any,
    *,
    layout: str = "dv",
    bias: bool = False,
    seed: int = 0,
):
    """Hidden, head, bias, labels (some of them no local column), and three cotangents, 0 for some
    tokens.
    """
    rng = np.random.default_rng(seed)
    hidden = rng.normal(size=(tokens, width)).astype(dtype)
    head = (rng.normal(size=(width, vocab)) / np.sqrt(width)).astype(dtype)
    labels = rng.integers(-3, vocab + 3, size=tokens).astype(np.int32)
    cotangents = (
        rng.normal(size=(3, tokens)) * np.array([[1.0], [1.0], [0.01]]) * (rng.random(tokens) < 0.8)
    )
    offsets = rng.normal(size=vocab).astype(dtype) if bias else None
    return (
        hidden,
        head if layout == "dv" else head.T,
        offsets,
        labels,
        [g.astype(np.float32) for g in cotangents],
    )


def blocks(
    parts=1, tokens=256, columns=SIDE, back_width=SIDE, back_rows=SIDE, back_columns=256, resident=0
) -> Blocks:
    return Blocks(
        parts, tokens, SIDE, columns, parts, back_rows, back_columns, back_width, resident
    )


def apart(parts: int) -> Blocks:
    return blocks(parts, back_width=0)._replace(own_tokens=256, own_columns=SIDE)


def watched(parts: int, **options: Any) -> pltpu.InterpretParams:
    return pltpu.InterpretParams(
        detect_races=True, num_cores_or_threads=parts, uninitialized_memory="nan", **options
    )


def no_races() -> bool:
    # the only place where jax says it
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    return not interpret_pallas_call.races.races_found


def close(ours: Any, exact: Any, tolerance: float) -> None:
    exact = np.asarray(exact, np.float64)
    np.testing.assert_allclose(
        np.asarray(ours, np.float64),
        exact,
        rtol=tolerance,
        atol=tolerance * np.abs(exact).max(initial=1.0),
    )


def check(
    tokens,
    width,
    vocab,
    dtype,
    block,
    *,
    layout: Any = "dv",
    soft_cap: float | None = None,
    bias: bool = False,
    interpret: Any = None,
):
    hidden, head, offsets, labels, cotangents = inputs(
        tokens, width, vocab, dtype, layout=layout, bias=bias
    )
    interpret = interpret or watched(max(block.parts, block.back_parts))
    options: Any = {"layout": layout, "soft_cap": soft_cap}
    with jax.enable_x64(True):
        exact_inputs = [
            None if array is None else array.astype(np.float64) for array in (hidden, head, offsets)
        ]
        exact_g = Cotangents(*(g.astype(np.float64) for g in cotangents))

        def both(given, g):
            stats = reference.stats(given, **options)
            return stats, reference.gradients(given, stats.lse, g, **options)

        exact, exact_grads = jax.jit(both)(Inputs(*exact_inputs, labels), exact_g)
        lse = np.asarray(exact.lse, np.float32)
    given = Inputs(hidden, head, offsets, labels)
    run = options | {"block": block, "interpret": interpret}
    ours = jax.jit(functools.partial(pallas_tpu.stats, **run))(given)
    for one, other in zip(ours, exact, strict=True):
        assert one.dtype == jnp.float32
        close(one, other, 2e-6)
    gradients = jax.jit(functools.partial(pallas_tpu.gradients, **run))
    for one, other, like in zip(
        gradients(given, lse, Cotangents(*cotangents)), exact_grads, given[:3], strict=True
    ):
        if like is None:
            assert one is None
        else:
            assert one.dtype == like.dtype
            assert one.shape == like.shape
            close(one, other, 2e-6 if dtype == jnp.float32 else 8e-3)
    assert no_races()


@pytest.mark.parametrize(
    ("tokens", "width", "vocab", "dtype", "block", "options"),
    [
        pytest.param(
            130,
            256,
            200,
            jnp.float32,
            blocks(tokens=SIDE, back_columns=SIDE),
            {"bias": True},
            id="ragged, streaming",
        ),
        pytest.param(
            256,
            96,
            200,
            jnp.bfloat16,
            blocks(back_width=96, resident=1),
            {"layout": "vd", "soft_cap": 2.0},
            id="resident",
        ),
        pytest.param(
            200,
            128,
            250,
            jnp.bfloat16,
            blocks(2, back_columns=SIDE),
            {"layout": "vd", "bias": True},
            id="two cores",
        ),
        pytest.param(300, 96, 200, jnp.bfloat16, apart(1), {"bias": True}, id="apart"),
        pytest.param(
            380,
            128,
            300,
            jnp.bfloat16,
            apart(2),
            {"layout": "vd", "soft_cap": 2.0},
            id="apart, two cores",
        ),
    ],
)
def test_stats_and_gradients(tokens, width, vocab, dtype, block, options):
    check(tokens, width, vocab, dtype, block, **options)


@examples(1)
@given(
    tokens=st.integers(1, 300),
    width=st.integers(1, 200),
    vocab=st.integers(2, 400),
    device=st.sampled_from([V5E, V7X]),
)
def test_any_shape_with_the_blocks_that_are_planned(tokens, width, vocab, device):
    check(
        tokens,
        width,
        vocab,
        jnp.float32,
        plan_blocks(device, sizes_of(tokens, width, vocab, jnp.float32)),
        interpret=watched(1),
    )


def test_gradients_in_float32_where_they_are_asked_for():
    hidden, head, bias, labels, cotangents = inputs(128, 64, 256, jnp.bfloat16, bias=True)
    arguments = (
        Inputs(hidden, head, bias, labels),
        np.full(128, 6.0, np.float32),
        Cotangents(*cotangents),
    )
    options: Any = {"layout": "dv", "soft_cap": None, "grad_dtype": jnp.float32}
    run = functools.partial(
        pallas_tpu.gradients, **options, block=blocks(back_width=64), interpret=watched(1)
    )
    ours = jax.jit(run)(*arguments)
    exact = jax.jit(functools.partial(reference.gradients, **options))(*arguments)
    for own, other in zip(ours, exact, strict=True):
        assert own.dtype == jnp.float32
        close(own, other, 1e-5)


def test_tokens_without_a_cotangent_add_nothing():
    hidden, head, _, labels, _ = inputs(130, 64, 256, jnp.float32)
    zero = np.zeros(130, np.float32)
    options: Any = {
        "layout": "dv",
        "soft_cap": None,
        "block": blocks(back_width=64),
        "interpret": watched(1),
    }
    grads = jax.jit(functools.partial(pallas_tpu.gradients, **options))(
        Inputs(hidden, head, None, labels), zero, Cotangents(zero, zero, zero)
    )
    assert not np.asarray(grads.hidden).any()
    assert not np.asarray(grads.lm_head).any()


def test_the_sum_over_columns_is_kept_in_float32_between_them():
    """A bfloat16 that 1,000 small numbers are added to one at a time would stand still."""
    from easypipe.kernels.loss.tpu.backward import _joined, _split, _State

    x = jnp.asarray(np.random.default_rng(1).normal(size=(64, 128)), jnp.float32)
    high, low = _split(x)
    again = _joined(_State(high, low, None), slice(None))
    np.testing.assert_array_equal(high, x.astype(jnp.bfloat16))
    units = np.abs(np.asarray(again).view(np.int32) - np.asarray(x).view(np.int32))
    assert units.max() <= 1
    ties = jnp.asarray(np.arange(0x3F808000, 0x3F908000, 0x10000, dtype=np.int32).view(np.float32))[
        None
    ]
    again = _joined(_State(*_split(ties), None), slice(None))
    assert np.abs(np.asarray(again).view(np.int32) - np.asarray(ties).view(np.int32)).max() == 1


@pytest.mark.parametrize(
    ("tokens", "vocab", "dtype", "soft_cap"),
    [(20, 5000, jnp.bfloat16, None), (9, 130, jnp.float32, 2.0)],
)
def test_rows(tokens, vocab, dtype, soft_cap):
    rng = np.random.default_rng(2)
    logits = (rng.normal(size=(tokens, vocab)) * 3).astype(dtype)
    labels = rng.integers(-3, vocab + 3, size=tokens).astype(np.int32)
    weights = rng.random(tokens).astype(np.float32)
    objective, interpret = Objective(1e-2, 0.1, vocab), watched(1)

    def program(module, logits, labels, weights, **options):
        return module.row_step(
            logits, labels, weights, objective=objective, soft_cap=soft_cap, **options
        )

    exact_dx, exact = jax.jit(functools.partial(program, chunked))(
        logits.astype(np.float32), labels, weights
    )
    dx, stats = jax.jit(functools.partial(program, pallas_tpu, interpret=interpret))(
        logits, labels, weights
    )
    alone = jax.jit(
        functools.partial(pallas_tpu.row_stats, soft_cap=soft_cap, interpret=interpret)
    )(logits, labels)
    for one, two, other in zip(stats, alone, exact, strict=True):
        close(one, other, 2e-6)
        np.testing.assert_array_equal(one, two)
    assert dx.dtype == dtype
    close(dx, exact_dx, 1e-6 if dtype == jnp.float32 else 5e-3)
    g = Cotangents(*(rng.normal(size=tokens).astype(np.float32) for _ in range(3)))
    dx = jax.jit(
        functools.partial(pallas_tpu.row_gradients, soft_cap=soft_cap, interpret=interpret)
    )(logits, labels, stats.lse, g)
    exact_dx = jax.jit(functools.partial(chunked.row_gradients, soft_cap=soft_cap))(
        logits.astype(np.float32), labels, stats.lse, g
    )
    close(dx, exact_dx, 1e-6 if dtype == jnp.float32 else 5e-3)
    assert no_races()


@pytest.mark.parametrize("rule", ["strict", "fast"])
def test_behind_the_api(rule):
    """Kernels, custom_vjp and losses together; every TPU kernel that is met runs in the
    interpreter.
    """
    hidden, head, _, labels, _ = inputs(128, 64, 256, jnp.float32)
    labels = np.where((labels < 0) | (labels >= 256), np.int32(-100), labels)

    def loss(hidden, head, **how):
        return fused_linear_cross_entropy(
            hidden, head, labels, z_loss=1e-2, label_smoothing=0.1, **how
        )

    with pltpu.force_tpu_interpret_mode(watched(1)):
        ours = jax.jit(
            jax.value_and_grad(
                functools.partial(loss, implementation="pallas_tpu", rule=rule), argnums=(0, 1)
            )
        )(hidden, head)
    exact = jax.jit(
        jax.value_and_grad(functools.partial(loss, implementation="reference"), argnums=(0, 1))
    )(hidden, head)
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(exact), strict=True):
        close(one, other, 2e-6)


def test_refusals_name_every_reason():
    hidden, head = (
        jax.ShapeDtypeStruct((8, 16), jnp.float64),
        jax.ShapeDtypeStruct((16, 1 << 24), jnp.bfloat16),
    )
    reasons = pallas_tpu.refusals(hidden, head, layout="dv")
    assert len(reasons) == 2
    assert "bfloat16 and float64" in reasons[0]
    assert "16777216" in reasons[1]
    wide = (
        jax.ShapeDtypeStruct((8, 1 << 20), jnp.bfloat16),
        jax.ShapeDtypeStruct((1 << 20, 256), jnp.bfloat16),
    )
    (reason,) = pallas_tpu.refusals(*wide, layout="dv")
    assert "no tile of width 1048576 fits 64 MiB of VMEM" in reason
    fine = (
        jax.ShapeDtypeStruct((8, 16), jnp.bfloat16),
        jax.ShapeDtypeStruct((16, 256), jnp.bfloat16),
    )
    assert pallas_tpu.refusals(*fine, layout="dv") == []


def test_blocks_that_do_not_fit_the_problem_are_refused():
    hidden, head, _, labels, _ = inputs(300, 64, 300, jnp.float32)
    wrong = blocks(2, tokens=200, back_width=48)
    with pytest.raises(ConfigError) as caught:
        pallas_tpu.stats(
            Inputs(hidden, head, None, labels), layout="dv", soft_cap=None, block=wrong
        )
    for reason in (
        "not a multiple of rows",
        "does not divide a width of 64",
        "3 tiles of 128 tokens are not equal shares for 2 cores",
    ):
        assert reason in str(caught.value)
    with pytest.raises(ConfigError, match=r"forward needs [\d.]+ MiB of VMEM; there are 64"):
        pallas_tpu.stats(
            Inputs(hidden, head, None, labels),
            layout="dv",
            soft_cap=None,
            block=blocks(tokens=1 << 20, back_width=64),
        )
    with pytest.raises(
        ConfigError,
        match="own_tokens needs back_width 0, a multiple of back_rows 128, and own_columns of 128",
    ):
        pallas_tpu.stats(
            Inputs(hidden, head, None, labels),
            layout="dv",
            soft_cap=None,
            block=apart(1)._replace(own_tokens=200),
        )
    with pytest.raises(
        ConfigError,
        match="resident needs back_parts 1, back_width 64 and back_rows that divide 300 tokens",
    ):
        pallas_tpu.stats(
            Inputs(hidden, head, None, labels), layout="dv", soft_cap=None, block=blocks(resident=1)
        )


def test_an_old_tpu_is_refused(monkeypatch):
    monkeypatch.setattr(pallas_tpu.tuning, "device_kind", lambda: "TPU v4")
    fine = (
        jax.ShapeDtypeStruct((8, 16), jnp.bfloat16),
        jax.ShapeDtypeStruct((16, 256), jnp.bfloat16),
    )
    (reason,) = pallas_tpu.refusals(*fine, layout="dv")
    assert "TPU v4 has 16 MiB of VMEM" in reason


def test_a_vocabulary_too_wide_for_a_row_is_refused():
    with pytest.raises(ConfigError, match="rows of a vocabulary of 4194304 do not fit 64 MiB"):
        pallas_tpu.row_stats(
            jax.ShapeDtypeStruct((8, 1 << 22), jnp.bfloat16), jnp.zeros(8, jnp.int32), soft_cap=None
        )


def test_a_label_beyond_the_vocabulary_meets_no_padding_column():
    """Of 200 columns in tiles of 128, 56 are padding: a label of 200 to 255 belongs to another
    shard, or to nobody.
    """
    hidden, head, _, _, _ = inputs(16, 128, 200, jnp.float32)
    labels = np.arange(198, 214, dtype=np.int32) + np.array([0, 0] + [3] * 14, np.int32)
    given, options = Inputs(hidden, head, None, labels), {"layout": "dv", "soft_cap": None}
    run = options | {"block": blocks(), "interpret": True}
    ours = jax.jit(functools.partial(pallas_tpu.stats, **run))(given)
    assert (np.asarray(ours.target)[:2] != 0).all()
    assert not np.asarray(ours.target)[2:].any()
    g = Cotangents(*np.array([[0.0], [1.0], [0.0]], np.float32).repeat(16, axis=1))
    found = jax.jit(functools.partial(pallas_tpu.gradients, **run))(given, ours.lse, g)
    assert not np.asarray(found.hidden)[2:].any()
    wanted = jax.jit(functools.partial(reference.gradients, **options))(given, ours.lse, g)
    close(found.lm_head, wanted.lm_head, 2e-6)
