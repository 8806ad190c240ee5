"""What the api refuses, what it picks where nothing is said, and what the compiled program
holds.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas

from easypipe.core.errors import ConfigError
from easypipe.kernels.loss import choice, chunked
from easypipe.kernels.loss.api import (
    LossSharding,
    fused_cross_entropy,
    fused_linear_cross_entropy,
    token_log_probs,
)
from easypipe.train.model import attention

HIDDEN, HEAD = np.ones((8, 6), np.float32), np.ones((6, 19), np.float32)
LABELS = np.zeros(8, np.int32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"labels": np.zeros(3, np.int32)},
            r"labels \(3,\) do not fit hidden \(8, 6\): give hidden \[T, n\] and labels \[T\]",
        ),
        (
            {"labels": np.zeros(8, np.float32)},
            "labels: dtype float32 is not an integer: give token ids as int32",
        ),
        (
            {"lm_head": np.ones((7, 19), np.float32)},
            r"lm_head \(7, 19\) has no dimension of the width 6 of hidden",
        ),
        (
            {"lm_head": np.ones((6, 6), np.float32)},
            r"layout: lm_head \(6, 6\) is square, so it fits both ways: say 'dv' for \[D, V\] or "
            r"'vd'",
        ),
        (
            {"layout": "vd"},
            r"layout: lm_head \(6, 19\) read as 'vd' does not fit the width 6 of hidden",
        ),
        ({"layout": "vx"}, r"layout: 'vx' is not an option \(have: dv, vd\)"),
        (
            {"lm_head": np.ones(6, np.float32)},
            r"lm_head \(6,\) is not a matrix: give \[D, V\] or \[V, D\]",
        ),
        ({"bias": np.ones(6, np.float32)}, r"bias \(6,\) does not fit a vocabulary of 19"),
        ({"weights": np.ones(3, np.float32)}, r"weights \(3,\) do not fit labels \(8,\)"),
        (
            {"hidden": HIDDEN.astype(np.float16)},
            "hidden: dtype float16 is not one of bfloat16, float32, float64",
        ),
        ({"lm_head": HEAD.astype(np.float16)}, "lm_head: dtype float16 is not one of bfloat16"),
        ({"bias": np.ones(19, np.float16)}, "bias: dtype float16 is not one of bfloat16"),
        ({"z_loss": -1.0}, r"z_loss: -1.0 is not a number from 0 up \(1e-4 is usual\)"),
        ({"label_smoothing": 1.0}, r"label_smoothing: 1.0 is outside \[0, 1\)"),
        ({"logit_soft_cap": 0.0}, "logit_soft_cap: 0.0 is not a positive number"),
        ({"z_loss": None}, "z_loss: None is not a number from 0 up"),
        ({"label_smoothing": "much"}, r"label_smoothing: much is outside \[0, 1\)"),
        ({"chunk_size": 0}, "chunk_size: 0 tokens are not a chunk: give an integer above 0"),
        (
            {"chunk_size": 8.5},
            "chunk_size: 8.5 tokens are not a chunk: give an integer above 0",
        ),
        (
            {"ignore_index": None},
            r"ignore_index: None is not a label: give an int of 32 bits \(-100 is usual\)",
        ),
        ({"ignore_index": 1 << 40}, "ignore_index: 1099511627776 is not a label"),
        ({"ignore_index": jnp.array(0.5)}, "ignore_index: 0.5 is not a label"),
        (
            {"weights": np.ones(8, np.complex64)},
            "weights: dtype complex64 is not real: give float32",
        ),
        ({"reduction": "avg"}, r"reduction: 'avg' is not an option \(have: mean, sum, none\)"),
        ({"rule": "quick"}, r"rule: 'quick' is not an option \(have: fast, strict\)"),
        (
            {"implementation": "chunkd"},
            "implementation: 'chunkd' is not an option .* Did you mean 'chunked'?",
        ),
        (
            {"rule": "fast", "reduction": "none"},
            "rule: 'fast' needs a scalar loss, and reduction is 'none': choose 'strict', or reduce",
        ),
        (
            {"implementation": "reference", "rule": "fast"},
            "rule: the reference implementation does not use it: leave it None, or choose implementation 'chunked'",
        ),
        (
            {"implementation": "reference", "sharding": LossSharding()},
            "sharding: the reference implementation does not use it",
        ),
        (
            {"implementation": "pallas_gpu", "rule": "strict", "chunk_size": 8},
            "chunk_size: 'pallas_gpu' has none under the rule 'strict'",
        ),
        (
            {"sharding": LossSharding()},
            r"sharding.tokens: no mesh axis named 'data' \(have: none\): call under "
            r"jax.set_mesh\(mesh\)",
        ),
        (
            {"sharding": LossSharding(tokens=("a",), vocab=("a",))},
            "sharding: tokens and vocab both lie over a",
        ),
        (
            {"sharding": LossSharding(sequence=("s",))},
            r"sharding.sequence: labels \(8,\) have no sequence: give hidden \[B, S, D\]",
        ),
    ],
)
def test_bad_arguments_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        fused_linear_cross_entropy(
            **{"hidden": HIDDEN, "lm_head": HEAD, "labels": LABELS, **change}
        )


def test_a_refusal_names_every_reason_at_once():
    with pytest.raises(ConfigError) as error:
        fused_linear_cross_entropy(
            HIDDEN,
            HEAD,
            LABELS,
            z_loss=-1.0,
            reduction="avg",
            bias=np.ones(3, np.float32),
            chunk_size=0,
        )
    assert [part.split(":")[0].split(" ")[0] for part in error.value.problem.split("; ")] == [
        "bias",
        "z_loss",
        "chunk_size",
        "reduction",
    ]
    with (
        jax.enable_x64(True),
        pytest.raises(
            ConfigError,
            match=r"'pallas_gpu' cannot run: hidden is float64.*; .* lm_head is float64",
        ),
    ):
        fused_linear_cross_entropy(
            HIDDEN.astype(np.float64),
            HEAD.astype(np.float64),
            LABELS,
            implementation="pallas_gpu",
        )
    with pytest.raises(ConfigError, match="'pallas_tpu' is not an option"):
        fused_cross_entropy(HIDDEN, LABELS, implementation="pallas_tpu")


def test_a_traced_number_is_refused_by_its_name():
    with pytest.raises(ConfigError, match=r"z_loss: .*float32\[\].* is not a number from 0 up"):
        jax.jit(lambda z_loss: fused_linear_cross_entropy(HIDDEN, HEAD, LABELS, z_loss=z_loss))(
            1e-4
        )


@pytest.mark.parametrize(
    ("implementation", "platform"), [("pallas_tpu", "tpu"), ("pallas_gpu", "cuda")]
)
def test_a_kernel_for_devices_that_are_not_here_is_refused_where_it_would_run_at_once(
    implementation, platform
):
    """Under jit it is not: what is traced here may be lowered for such a device."""
    with pytest.raises(
        ConfigError,
        match=f"'{implementation}' cannot run: it is for {platform}, and the devices at hand are "
        "cpu: leave it",
    ):
        fused_linear_cross_entropy(HIDDEN, HEAD, LABELS, implementation=implementation)
    jax.eval_shape(
        lambda hidden: fused_linear_cross_entropy(
            hidden, HEAD, LABELS, implementation=implementation
        ),
        HIDDEN,
    )


def test_every_recommended_call_runs():
    square = np.ones((6, 6), np.float32)
    for layout in ("dv", "vd"):
        fused_linear_cross_entropy(HIDDEN, square, LABELS, layout=layout)
    fused_linear_cross_entropy(HIDDEN, HEAD, LABELS, rule="strict", reduction="none")
    fused_linear_cross_entropy(HIDDEN, HEAD, LABELS, rule="fast", implementation="chunked")


def test_mixed_dtypes_run_in_the_wider():
    loss, grads = jax.value_and_grad(fused_linear_cross_entropy, argnums=(0, 1))(
        HIDDEN.astype(jnp.bfloat16), HEAD, LABELS
    )
    assert [loss.dtype, *(grad.dtype for grad in grads)] == [jnp.float32, jnp.bfloat16, jnp.float32]


def h200_at_hand():
    """Newer jax asks which GPU, seeing none."""
    h200 = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=h200))


def lowered(platform, dtype=jnp.bfloat16, shape=(512, 256, 1024), **options):
    tokens, width, vocab = shape
    arguments = ((tokens, width), dtype), ((width, vocab), dtype), ((tokens,), jnp.int32)
    step = jax.jit(
        jax.value_and_grad(
            lambda *a: fused_linear_cross_entropy(*a, **{"reduction": "mean", **options}).sum(),
            argnums=(0, 1),
        )
    )
    return (
        step.trace(*(jax.ShapeDtypeStruct(*a) for a in arguments))
        .lower(lowering_platforms=(platform,))
        .as_text()
    )


@pytest.mark.parametrize(
    "options", [{}, {"rule": "strict"}, {"reduction": "none"}], ids=["fast", "strict", "none"]
)
def test_the_default_is_the_kernel_of_the_platform_that_is_lowered_for(options):
    """Not of the one that this process runs on: traced here, without any device, for each."""
    calls = {}
    for platform in ("tpu", "cuda", "cpu"):
        with h200_at_hand() if platform == "cuda" else contextlib.nullcontext():
            calls[platform] = re.findall(r"custom_call @([\w$.]*)", lowered(platform, **options))
    assert "tpu_custom_call" in calls["tpu"]
    assert any("triton" in name or "mosaic_gpu" in name for name in calls["cuda"])
    assert not [
        name for name in calls["cpu"] if "triton" in name or "tpu" in name or "mosaic" in name
    ]


def test_under_a_mesh_the_loss_is_traced_for_its_platform_alone():
    """Its devices are those that the program is for, as attention takes it to be."""
    arguments = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((512, 256), (256, 1024))]
    arguments.append(jax.ShapeDtypeStruct((512,), jnp.int32))

    def traced() -> str:
        step = jax.value_and_grad(fused_linear_cross_entropy, argnums=(0, 1))
        return str(jax.make_jaxpr(step)(*arguments))

    anywhere = traced()
    assert "platform_index" in anywhere
    assert "pallas_call" in anywhere
    with jax.set_mesh(jax.make_mesh((1,), ("data",))):
        here = traced()
    assert "platform_index" not in here
    assert "pallas_call" not in here


def test_logits_that_are_given_have_a_kernel_except_in_float64():
    def traced(dtype: jax.typing.DTypeLike) -> str:
        given = jax.ShapeDtypeStruct((512, 1024), dtype), jax.ShapeDtypeStruct((512,), jnp.int32)
        return str(jax.make_jaxpr(jax.value_and_grad(fused_cross_entropy))(*given))

    assert "pallas_call" in traced(jnp.bfloat16)
    with jax.enable_x64(True):
        assert "pallas_call" not in traced(jnp.float64)


def test_what_a_kernel_refuses_runs_in_xla_and_says_so(monkeypatch, caplog):
    with jax.enable_x64(True):
        assert "custom_call @tpu" not in lowered("tpu", jnp.float64)
        assert "triton" not in lowered("cuda", jnp.float64)
        assert not caplog.records, "no GPU is at hand, so none is missed"
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        lowered("cuda", jnp.float64)
    assert caplog.messages[0].startswith(
        "fused_linear_cross_entropy: pallas_gpu cannot run, so XLA's own operations do: hidden is "
        "float64"
    )


def without_pallas_triton(monkeypatch):
    """As a jax that has dropped it: every module that stands on it must be imported anew, and
    cannot.
    """
    monkeypatch.setitem(sys.modules, "jax.experimental.pallas.triton", None)
    monkeypatch.delattr(pallas, "triton", raising=False)
    for name in ("loss.gpu.kernel", "loss.gpu.rows", "attention.triton"):
        monkeypatch.delitem(sys.modules, f"easypipe.kernels.{name}", raising=False)


def test_a_jax_without_a_kernels_backend_loses_that_kernel_and_no_other(monkeypatch, caplog):
    without_pallas_triton(monkeypatch)
    loss = fused_linear_cross_entropy(HIDDEN, HEAD, LABELS)
    assert loss == pytest.approx(np.log(19), rel=1e-6)
    assert "tpu_custom_call" in lowered("tpu")
    assert "custom_call @triton" not in lowered("cuda")
    with pytest.raises(
        ConfigError,
        match=r"'pallas_gpu' cannot run: jax [\d.]+ does not have what it is written with "
        r"\(.*triton",
    ):
        fused_linear_cross_entropy(HIDDEN, HEAD, LABELS, implementation="pallas_gpu", rule="fast")
    assert not caplog.records, "no GPU is at hand, so none is missed"
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    jax.eval_shape(fused_linear_cross_entropy, HIDDEN, HEAD, LABELS)
    assert "pallas_gpu cannot run, so XLA's own operations do: jax " in caplog.messages[0]


def test_attention_without_pallas_triton_runs_by_xla_and_says_so(monkeypatch, caplog):
    without_pallas_triton(monkeypatch)
    attention._warn_once.cache_clear()
    monkeypatch.setattr(attention, "platform_at_hand", lambda: "cuda")
    assert attention.choose(None, 64, jnp.bfloat16) == "xla"
    assert (
        "attention runs by 'xla', which holds all scores: 'triton' cannot run: jax "
        in caplog.messages[0]
    )
    with pytest.raises(ConfigError, match=r"model\.attention: 'triton' cannot run: jax .*triton"):
        attention.choose("triton", 64, jnp.bfloat16)


@pytest.mark.parametrize("rule", [None, "strict"])
def test_float32_logits_are_strict_and_float32_on_cuda(rule):
    """The slabs of a bfloat16 loss for CUDA: in bfloat16, and in float32 where that is asked
    for.
    """
    with h200_at_hand():
        slab = {
            name: lowered("cuda", rule=rule or "strict", float32_logits=wish)
            for name, wish in (("own", False), ("float32", True))
        }
    logits = {
        name: set(re.findall(r"-> tensor<(?:\d+x1024|512x\d+)x(bf16|f32)>", text))
        for name, text in slab.items()
    }
    products = {
        name: re.findall(r"dot_general .*-> tensor<[\dx]+x(bf16|f32)>", text)
        for name, text in slab.items()
    }
    assert "f32" in logits["float32"]
    # the logits of both passes
    assert products["own"].count("bf16") - products["float32"].count("bf16") == 2
    with pytest.raises(
        ConfigError,
        match=r"rule: 'fast' rounds the logits .* float32_logits is set: choose 'strict'",
    ):
        lowered("cuda", rule="fast", float32_logits=True)


def test_log_probs_come_from_float32_logits():
    def products(**options):
        arguments = (
            jnp.zeros((64, 32), jnp.bfloat16),
            jnp.zeros((32, 256), jnp.bfloat16),
            jnp.zeros(64, jnp.int32),
        )
        return str(
            jax.make_jaxpr(
                functools.partial(token_log_probs, implementation="pallas_gpu", **options)
            )(*arguments)
        )

    assert "preferred_element_type=float32" in products()
    assert "preferred_element_type=bfloat16" not in products()
    assert "preferred_element_type=bfloat16" in products(float32_logits=False)


def test_the_rule_and_the_chunk_are_those_that_fit(monkeypatch):
    assert choice.fast_fits(128_256, 2)
    assert choice.fast_fits(248_320, 4)
    assert not choice.fast_fits(1 << 23, 2)
    plan = choice.Plan((("cpu", "chunked"),), "dv", None)
    heads = [
        jax.ShapeDtypeStruct((8, vocab), jnp.bfloat16)
        for vocab in (50257, 128_256, 248_320, 1 << 20)
    ]
    hidden = jax.ShapeDtypeStruct((9999, 8), jnp.bfloat16)
    assert [choice.chunk_tokens(plan, "cuda", hidden, head) for head in heads] == [
        4096,
        4096,
        4096,
        1024,
    ]
    assert choice.chunk_tokens(plan, "cpu", hidden, heads[0]) == 1024
    assert "1024x8192" in lowered("cpu", shape=(2048, 8, 8192))
    monkeypatch.setattr(choice, "LOGITS_BYTES", 1 << 20)
    assert "x8192" not in lowered("cpu", shape=(2048, 1, 8192)).replace("1x8192", ""), (
        "the logits of 256 tokens do not fit: strict"
    )


def shapes_in(program: str) -> set[tuple[int, ...]]:
    return {
        tuple(int(size) for size in shape.split(","))
        for shape in re.findall(r"\w+\[([\d,]+)\]", program)
    }


def compiled(with_gradient=True, shape=(4096, 64, 16384), **options):
    tokens, width, vocab = shape
    arguments = (
        ((tokens, width), jnp.float32),
        ((width, vocab), jnp.float32),
        ((tokens,), jnp.int32),
    )

    def loss(*arguments):
        return fused_linear_cross_entropy(*arguments, **options)

    step = jax.value_and_grad(loss, argnums=(0, 1)) if with_gradient else loss
    return jax.jit(step).lower(*(jax.ShapeDtypeStruct(*a) for a in arguments)).compile()


@pytest.mark.parametrize("with_gradient", [False, True])
def test_no_buffer_of_tokens_by_vocabulary_exists(with_gradient):
    tokens, _, vocab = shape = 4096, 64, 16384
    naive = compiled(with_gradient, shape, implementation="reference")
    assert any(np.prod(found) == tokens * vocab for found in shapes_in(naive.as_text())), (
        "the search itself must be able to find one"
    )
    for options in (
        {"rule": "fast"},
        {"rule": "strict"},
        {"rule": "fast", "chunk_size": 256},
        {"rule": "strict", "chunk_size": 100},
    ):
        ours = compiled(with_gradient, shape, implementation="chunked", **options)
        assert not [
            found for found in shapes_in(ours.as_text()) if np.prod(found) >= tokens * vocab
        ], options
        assert (
            ours.memory_analysis().temp_size_in_bytes
            <= 0.15 * naive.memory_analysis().temp_size_in_bytes
        ), options


@pytest.mark.parametrize("shape", [(4096, 1024, 50257), (8192, 2048, 32768), (32768, 4096, 128256)])
def test_temporaries_at_real_shapes(shape):
    """float32, where XLA on CPU has the products without copies: the gradient of the head is then
    the result itself.
    """
    _, width, vocab = shape
    for chunk in (512, 1024, 2048):
        fast = (
            compiled(shape=shape, implementation="chunked", rule="fast", chunk_size=chunk)
            .memory_analysis()
            .temp_size_in_bytes
        )
        assert fast <= 1.1 * (4 * chunk * vocab) + 2 * 4 * width * chunked.VOCAB_BLOCK, fast / 2**20
    assert (
        compiled(shape=shape, implementation="chunked", rule="strict")
        .memory_analysis()
        .temp_size_in_bytes
        <= 0.3 * 2**30
    )
