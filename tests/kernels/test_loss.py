"""Losses and their gradients against an oracle in NumPy, float64 (loss_support.py): the whole grid
of options, ragged sizes, edges.
"""

from __future__ import annotations

import functools
import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from easypipe.core.errors import ConfigError
from easypipe.kernels.loss import chunked, reference
from easypipe.kernels.loss.api import (
    fused_cross_entropy,
    fused_linear_cross_entropy,
    sequence_log_probs,
    token_log_probs,
)
from easypipe.kernels.loss.stats import Cotangents, Inputs, Objective
from loss_support import IGNORE, Case, case, oracle
from strategies import examples

WAYS = [
    {"implementation": "reference"},
    {"implementation": "chunked", "rule": "fast"},
    {"implementation": "chunked", "rule": "strict"},
]
NAMES = ["reference", "fast", "strict"]


def ours(given: Case, *, cotangent=1.0, layout="dv", dtype=np.float64, jit=True, **options):
    """Loss and gradients as the api gives them, by the names of the oracle."""
    floats = {
        name: jnp.asarray(array, dtype)
        for name, array in given._asdict().items()
        if name != "labels" and array is not None
    }
    if layout == "vd":
        floats["head"] = floats["head"].T

    def loss(floats):
        rest = {name: floats[name] for name in ("bias", "weights") if name in floats}
        out = fused_linear_cross_entropy(
            floats["hidden"],
            floats["head"],
            given.labels,
            layout=layout,
            with_tokens=True,
            **rest,
            **options,
        )
        return (out.loss * cotangent).sum(), out

    (_, out), grads = (jax.jit if jit else lambda f: f)(jax.value_and_grad(loss, has_aux=True))(
        floats
    )
    if layout == "vd":
        grads["head"] = grads["head"].T
    return out, grads


def assert_equal(out, grads, want, rtol=1e-11):
    np.testing.assert_allclose(out.loss, want.loss, rtol=rtol, atol=rtol)
    np.testing.assert_allclose(out.tokens.lse, want.lse, rtol=rtol)
    np.testing.assert_allclose(out.tokens.log_probs, want.log_probs, rtol=rtol, atol=rtol)
    np.testing.assert_array_equal(out.tokens.correct, want.correct)
    for name, grad in grads.items():
        np.testing.assert_allclose(
            grad,
            want.grads[name],
            rtol=rtol,
            atol=rtol * (1 + np.abs(want.grads[name]).max(initial=0)),
            err_msg=name,
        )


def test_the_oracle_is_the_textbook_formula():
    with jax.enable_x64(True):
        given = case()

        def textbook(hidden, head, bias, weights):
            z_TV = 3.0 * jnp.tanh((hidden @ head + bias) / 3.0) / 0.7
            log_p = jax.nn.log_softmax(z_TV)
            z_T = jax.nn.logsumexp(z_TV, axis=-1)
            kept = given.labels != IGNORE
            nll = -log_p[jnp.arange(len(kept)), jnp.where(kept, given.labels, 0)]
            losses = jnp.where(kept, 0.8 * nll - 0.2 * log_p.mean(-1) + 0.1 * z_T**2, 0.0)
            return (weights * losses).sum() / jnp.where(kept, weights, 0.0).sum()

        arguments = given.hidden, given.head, given.bias, given.weights
        loss, grads = jax.jit(jax.value_and_grad(textbook, argnums=(0, 1, 2, 3)))(
            *map(jnp.asarray, arguments)
        )
        options = {"z_loss": 0.1, "label_smoothing": 0.2, "logit_soft_cap": 3.0}
        want = oracle(given, **options, temperature=0.7)
        np.testing.assert_allclose(want.loss, loss, rtol=1e-12)
        for grad, name in zip(grads, ("hidden", "head", "bias", "weights"), strict=True):
            np.testing.assert_allclose(want.grads[name], grad, rtol=1e-10, atol=1e-14)


GRID = list(
    itertools.product((0.0, 0.1), (0.0, 0.2), (None, 3.0), (False, True), ("mean", "sum", "none"))
)


@pytest.mark.parametrize("way", WAYS, ids=NAMES)
def test_the_grid_of_options(way):
    """Without jit: the operations of one combination are those of the next, so that hundreds cost
    seconds.
    """
    with jax.enable_x64(True), jax.disable_jit():
        for number, (z_loss, label_smoothing, cap, bias, reduction) in enumerate(GRID):
            if reduction == "none" and way.get("rule") == "fast":
                continue
            # jax's own derivatives: a sample of them will do
            if way["implementation"] == "reference" and number % 5:
                continue
            # weights and layout: every pair with every other option
            parity = number.bit_count() % 2 == 1
            given = case(bias=bias, weights=parity)
            options = {
                "z_loss": z_loss,
                "label_smoothing": label_smoothing,
                "logit_soft_cap": cap,
                "reduction": reduction,
            }
            cotangent = np.linspace(-1, 2, 13) if reduction == "none" else -0.37
            extra = {} if way["implementation"] == "reference" or number % 4 else {"chunk_size": 8}
            layout = "vd" if number % 3 == 0 else "dv"
            assert_equal(
                *ours(
                    given, cotangent=cotangent, layout=layout, jit=False, **options, **way, **extra
                ),
                oracle(given, cotangent=cotangent, **options),
            )


@pytest.mark.parametrize("way", WAYS[1:], ids=NAMES[1:])
@examples(4)
@given(
    tokens=st.integers(1, 40),
    width=st.integers(1, 9),
    vocab=st.integers(2, 50),
    chunk_size=st.integers(1, 48),
    ignored=st.sampled_from([0.0, 0.4, 1.0]),
    options=st.fixed_dictionaries(
        {
            "z_loss": st.sampled_from([0.0, 0.1]),
            "label_smoothing": st.sampled_from([0.0, 0.2]),
            "logit_soft_cap": st.sampled_from([None, 3.0]),
            "reduction": st.sampled_from(["mean", "sum"]),
        }
    ),
)
def test_any_shape(way, tokens, width, vocab, chunk_size, ignored, options):
    with jax.enable_x64(True):
        given = case(tokens, width, vocab, ignored=ignored, seed=tokens)
        assert_equal(
            *ours(given, layout="vd", chunk_size=chunk_size, **options, **way),
            oracle(given, **options),
        )


@pytest.mark.parametrize(
    ("block", "hidden_bytes"), [((8, 16), 0), ((5, 7), 1 << 30)], ids=["two passes", "one pass"]
)
def test_strict_tiles_of_any_size(block, hidden_bytes, monkeypatch):
    """In bfloat16, whose sums in float32 decide over one pass or two; labels of other shards among
    them.
    """
    monkeypatch.setattr(chunked, "HIDDEN_BYTES", hidden_bytes)
    given = case()
    cotangents = Cotangents(
        *(np.random.default_rng(i).normal(size=13).astype(np.float32) for i in range(3))
    )
    labels = np.array([-1, 19, 25, *given.labels[3:]], np.int32)
    for layout, bias, cap in (("dv", given.bias, None), ("vd", None, 3.0)):
        head = given.head if layout == "dv" else given.head.T
        arrays = [
            None if array is None else array.astype(jnp.bfloat16)
            for array in (given.hidden, head, bias)
        ]

        def both(inputs, cotangents, layout=layout, cap=cap):
            """Statistics and gradients of the tiles, and of the reference."""
            options = {"layout": layout, "soft_cap": cap, "block": block}
            want = reference.stats(inputs, layout=layout, soft_cap=cap)
            return [
                (
                    module.stats(inputs, **options),
                    module.gradients(inputs, want.lse, cotangents, **options),
                )
                for module in (chunked, reference)
            ]

        (stats, grads), (want, want_grads) = jax.jit(both)(Inputs(*arrays, labels), cotangents)
        for ours_, theirs in zip(stats, want, strict=True):
            np.testing.assert_allclose(ours_, theirs, rtol=1e-6, atol=1e-6)
        for ours_, theirs in zip(jax.tree.leaves(grads), jax.tree.leaves(want_grads), strict=True):
            assert ours_.dtype == theirs.dtype == jnp.bfloat16
            np.testing.assert_allclose(
                *(np.asarray(g, np.float32) for g in (ours_, theirs)), rtol=2**-7, atol=1e-5
            )


@pytest.mark.parametrize(("vocab_block", "vector"), [(None, 1), (7, 1), (19, 1), (None, 8)])
@pytest.mark.parametrize("chunk_size", [6, 13])
def test_the_head_gradient_is_whole_whatever_its_blocks(vocab_block, vector, chunk_size):
    with jax.enable_x64(True):
        given = case()
        hidden, head, labels, bias, weights = given
        run = functools.partial(
            chunked.loss_gradients,
            layout="dv",
            soft_cap=None,
            objective=Objective(0.1, 0.2, 19),
            chunk_size=chunk_size,
            vocab_block=vocab_block,
            # rows are XLA's; 19 columns are two vectors of 8 and a rest
            kernel=SimpleNamespace(**vars(chunked) | {"VECTOR": vector}),
        )
        _, grads = jax.jit(run)(
            Inputs(hidden, head, bias, labels), np.where(labels == IGNORE, 0.0, weights)
        )
        want = oracle(given, z_loss=0.1, label_smoothing=0.2, reduction="sum").grads
        for name, grad in zip(("hidden", "head", "bias"), grads, strict=True):
            np.testing.assert_allclose(grad, want[name], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("chunk_size", [6, 13])
def test_shares_of_a_sum_over_devices_have_the_dtype_that_it_is_added_in(chunk_size):
    given = case()
    arrays = (jnp.asarray(one, jnp.bfloat16) for one in (given.hidden, given.head, given.bias))
    weights = jnp.asarray(np.where(given.labels == IGNORE, 0.0, given.weights), jnp.float32)
    run = functools.partial(
        chunked.loss_gradients,
        Inputs(*arrays, given.labels),
        weights,
        layout="dv",
        soft_cap=None,
        objective=Objective(0.0, 0.0, 19),
        chunk_size=chunk_size,
        kernel=chunked,
    )
    alone, share = run()[1], run(grad_dtype=jnp.float32)[1]
    assert {grad.dtype for grad in jax.tree.leaves(alone)} == {jnp.dtype(jnp.bfloat16)}
    assert share.lm_head.dtype == share.bias.dtype == jnp.float32
    for rounded, exact in zip(alone[1:], share[1:], strict=True):
        assert not np.array_equal(rounded.astype(jnp.float32), exact)
        np.testing.assert_allclose(rounded.astype(jnp.float32), exact, rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize("kernel", [chunked, reference])
def test_gradients_have_the_dtype_of_their_input_or_the_one_that_is_asked_for(kernel):
    given = case()
    arrays = (jnp.asarray(one, jnp.bfloat16) for one in (given.hidden, given.head, given.bias))
    each = jnp.ones(given.labels.shape)
    run = functools.partial(kernel.gradients, layout="dv", soft_cap=None)
    arguments = Inputs(*arrays, given.labels), each, Cotangents(each, each, each)
    for asked in (None, jnp.float32):
        grads = jax.eval_shape(functools.partial(run, grad_dtype=asked), *arguments)
        assert {grad.dtype for grad in grads} == {jnp.dtype(asked or jnp.bfloat16)}


@pytest.mark.parametrize("way", WAYS, ids=NAMES)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_all_ignored_gives_zero_and_zero_gradients(way, reduction):
    out, grads = ours(
        case(ignored=1.0),
        dtype=np.float32,
        z_loss=0.1,
        label_smoothing=0.1,
        reduction=reduction,
        **way,
    )
    assert float(out.loss) == 0.0
    assert not np.asarray(out.tokens.counted).any()
    assert all(not np.asarray(grads[name]).any() for name in ("hidden", "head", "bias", "weights"))


@pytest.mark.parametrize("way", WAYS, ids=NAMES)
def test_no_tokens_at_all(way):
    out, grads = ours(case(0), dtype=np.float32, **way)
    assert (float(out.loss), grads["hidden"].shape) == (0.0, (0, 5))
    assert not np.asarray(grads["head"]).any()


@pytest.mark.parametrize("way", WAYS[1:], ids=NAMES[1:])
def test_ignored_rows_do_not_reach_the_result(way):
    given = case()
    noise = np.where((given.labels == IGNORE)[:, None], 1e3, 0.0)
    (out, grads), (other, other_grads) = (
        ours(g, dtype=np.float32, **way)
        for g in (given, given._replace(hidden=given.hidden + noise))
    )
    np.testing.assert_array_equal(out.loss, other.loss)
    np.testing.assert_array_equal(grads["head"], other_grads["head"])


@pytest.mark.parametrize("way", WAYS[1:], ids=NAMES[1:])
def test_large_logits_neither_overflow_nor_lose_the_target(way):
    given = case(size=100.0, bias=False)
    out, grads = ours(given, dtype=np.float32, **way)
    want, want_grads = ours(given, dtype=np.float32, implementation="reference")
    assert np.isfinite(out.loss)
    np.testing.assert_allclose(out.loss, want.loss, rtol=1e-5)
    np.testing.assert_allclose(grads["head"], want_grads["head"], rtol=1e-4, atol=1e-4)


def naive(hidden, head, labels):
    """What one writes without thinking of memory: logits in the dtype of the inputs, the rest in
    float32.
    """
    log_p = jax.nn.log_softmax((hidden @ head).astype(jnp.float32))
    kept = labels != IGNORE
    nll = -jnp.take_along_axis(log_p, jnp.where(kept, labels, 0)[:, None], axis=1)[:, 0]
    return jnp.where(kept, nll, 0.0).sum() / kept.sum()


@pytest.mark.parametrize(("rule", "chunk_size"), [("fast", 4096), ("fast", 128), ("strict", 64)])
def test_bfloat16_gradients_err_no_more_than_the_naive_program(rule, chunk_size):
    given = case(512, 64, 1000, bias=False, weights=False)
    hidden, head = (jnp.asarray(array, jnp.bfloat16) for array in (given.hidden / 8, given.head))
    exact = oracle(
        given._replace(hidden=np.asarray(hidden, np.float64), head=np.asarray(head, np.float64))
    )

    def error(loss):
        value, grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(hidden, head)
        assert value.dtype == jnp.float32
        assert {grad.dtype for grad in grads} == {jnp.dtype(jnp.bfloat16)}
        wants = exact.grads["hidden"], exact.grads["head"]
        off = [
            np.linalg.norm(np.asarray(g, np.float64) - want) / np.linalg.norm(want)
            for g, want in zip(grads, wants, strict=True)
        ]
        return abs(float(value) / float(exact.loss) - 1), *off

    mine = error(
        lambda h, w: fused_linear_cross_entropy(
            h, w, given.labels, implementation="chunked", rule=rule, chunk_size=chunk_size
        )
    )
    theirs = error(lambda h, w: naive(h, w, given.labels))
    assert mine[0] < 1e-4
    for ours_, naive_ in zip(mine[1:], theirs[1:], strict=True):
        # fast does the same roundings, in another order; jax 0.12 differs by 0.2 %
        assert ours_ <= naive_ * 1.005, (mine, theirs)
    if rule == "strict":
        assert mine[0] < 1e-6, "logits in float32"


@pytest.mark.parametrize("way", [*WAYS, {}], ids=[*NAMES, "default"])
def test_a_label_outside_the_vocabulary_is_refused_outside_jit_and_ignored_inside(way):
    given = case(weights=False)
    labels = given.labels.copy()
    labels[[2, 5]] = 19, -1
    within, without = (
        given._replace(labels=array)
        for array in (labels, np.where((labels < 0) | (labels > 18), IGNORE, labels))
    )
    hidden, head = jnp.asarray(given.hidden, jnp.float32), jnp.asarray(given.head, jnp.float32)
    with pytest.raises(
        ConfigError,
        match=r"labels: 2 outside the vocabulary of 19, the first 19 at \[2\] \(ignore_index is "
        r"-100\)",
    ):
        fused_linear_cross_entropy(hidden, head, labels, **way)
    loss = jax.jit(lambda labels: fused_linear_cross_entropy(hidden, head, labels, **way))
    np.testing.assert_array_equal(loss(within.labels), loss(without.labels))


@pytest.mark.parametrize("beyond", [2**32 + 3, -(2**32) + 3, 2**32 - 100])
def test_a_label_that_int32_does_not_hold_is_no_token(beyond):
    """2**32 + 3 in 32 bits is 3."""
    with jax.enable_x64(True):
        given = case(weights=False, bias=False)
        labels, without = (
            np.where(np.arange(13) == 2, np.int64(index), given.labels)
            for index in (beyond, IGNORE)
        )
        hidden, head = jnp.asarray(given.hidden), jnp.asarray(given.head)
        loss = jax.jit(lambda labels: fused_linear_cross_entropy(hidden, head, labels))
        np.testing.assert_array_equal(loss(labels), loss(without))
        with pytest.raises(
            ConfigError,
            match=rf"labels: 1 outside the vocabulary of 19, the first {beyond} at \[2\]",
        ):
            fused_linear_cross_entropy(hidden, head, labels)


def test_ignore_index_may_be_a_token_of_the_vocabulary():
    given = case(bias=False, weights=False)
    padded = np.where(given.labels == IGNORE, 0, np.maximum(given.labels, 1))
    hidden, head = jnp.asarray(given.hidden), jnp.asarray(given.head)
    loss = jax.jit(fused_linear_cross_entropy, static_argnames="ignore_index")
    want = loss(hidden, head, np.where(padded == 0, IGNORE, padded))
    assert float(loss(hidden, head, padded, ignore_index=0)) == float(want)
    of_jax = fused_linear_cross_entropy(hidden, head, padded, ignore_index=jnp.int32(0))
    assert float(of_jax) == pytest.approx(float(want), rel=1e-6)


@pytest.mark.parametrize("implementation", ["reference", "chunked"])
def test_the_loss_of_logits_is_that_of_their_factors(implementation):
    with jax.enable_x64(True), jax.disable_jit():
        for number, (z_loss, label_smoothing, cap, bias, reduction) in enumerate(GRID):
            given = case(bias=bias, weights=number.bit_count() % 2 == 1)
            options = {
                "z_loss": z_loss,
                "label_smoothing": label_smoothing,
                "logit_soft_cap": cap,
                "reduction": reduction,
            }
            cotangent = np.linspace(-1, 2, 13) if reduction == "none" else -0.37

            def loss(logits, given=given, options=options, cotangent=cotangent):
                out = fused_cross_entropy(
                    logits,
                    given.labels,
                    weights=given.weights,
                    with_tokens=True,
                    implementation=implementation,
                    **options,
                )
                return (out.loss * cotangent).sum(), out

            logits = jnp.asarray(
                given.hidden @ given.head + (0.0 if given.bias is None else given.bias)
            )
            (_, out), d_logits = jax.value_and_grad(loss, has_aux=True)(logits)
            assert_equal(
                out,
                {"hidden": d_logits @ given.head.T, "head": given.hidden.T @ d_logits},
                oracle(given, cotangent=cotangent, **options),
            )


def test_log_probs_for_preferences():
    """DPO (Rafailov et al., 2023, eq. 7) by sequence_log_probs, and by jax's own log_softmax."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        hidden, head = (
            jnp.asarray(rng.normal(size=(4, 6, 5))),
            jnp.asarray(rng.normal(size=(5, 19))),
        )
        labels = rng.integers(0, 19, (4, 6))
        labels[:, :2] = IGNORE

        def dpo(log_probs):
            return -jax.nn.log_sigmoid(0.3 * (log_probs[:2] - log_probs[2:])).sum()

        def textbook(hidden, head):
            log_p = jnp.take_along_axis(
                jax.nn.log_softmax(hidden @ head), np.maximum(labels, 0)[..., None], axis=-1
            )[..., 0]
            return dpo(jnp.where(labels == IGNORE, 0.0, log_p).sum(-1))

        want = jax.jit(jax.value_and_grad(textbook, argnums=(0, 1)))(hidden, head)
        for implementation in ("chunked", "reference"):
            got = jax.jit(
                jax.value_and_grad(
                    lambda h, w, i=implementation: dpo(
                        sequence_log_probs(h, w, labels, implementation=i)
                    ),
                    argnums=(0, 1),
                )
            )(hidden, head)
            for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-13)
        assert jax.eval_shape(lambda: token_log_probs(hidden, head, labels)).shape == (4, 6)


@pytest.mark.parametrize("way", WAYS[1:], ids=NAMES[1:])
def test_remat_scan_and_vmap(way):
    with jax.enable_x64(True):
        given = case(bias=False, weights=False)
        head = jnp.asarray(given.head)

        def loss(hidden, labels):
            return fused_linear_cross_entropy(hidden, head, labels, chunk_size=8, **way)

        want = oracle(given)
        hiddens, labels = jnp.stack([given.hidden, 2 * given.hidden]), jnp.stack([given.labels] * 2)

        def summed(hiddens):
            return jax.lax.scan(
                lambda total, xs: (total + jax.checkpoint(loss)(*xs), None), 0.0, (hiddens, labels)
            )[0]

        grads = jax.jit(jax.grad(summed))(hiddens)
        np.testing.assert_allclose(grads[0], want.grads["hidden"], rtol=1e-10, atol=1e-13)
        np.testing.assert_allclose(
            jax.jit(jax.vmap(jax.grad(loss)))(hiddens, labels), grads, rtol=1e-10, atol=1e-13
        )
