"""The loss, compiled for an H200 that is not there: which kernels are in it, what it holds, what it
sends.

Needs jax's CUDA wheels (4.4 GB): `nox -s aot_gpu` installs them and runs this file; elsewhere it is
skipped. XLA cannot try out its products here, so nothing is said about time.
"""

from __future__ import annotations

import importlib.metadata
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from aot import Program, array, check_collectives
from easypipe.kernels.loss.api import LossSharding, fused_linear_cross_entropy
from easypipe.train.model.attention import Scores, attend
from easypipe.train.model.config import TRITON_WIDTHS
from easypipe.train.plan.hlo import arrays
from easypipe.train.plan.topology import topology

INSTALLED = {distribution.name for distribution in importlib.metadata.distributions()}
PLUGIN = next((version for version in (13, 12) if f"jax-cuda{version}-plugin" in INSTALLED), None)
pytestmark = pytest.mark.skipif(
    PLUGIN is None, reason="no compiler for CUDA here (run `nox -s aot_gpu`)"
)

MIB = 1 << 20
SHAPES = [
    (4096, 4096, 128256),
    (16384, 2048, 248320),
    (32768, 4096, 128256),
    (8192, 2048, 32768),
    (16383, 1000, 50257),
]
SHAPES += [(131072, 4096, 128256), (65536, 8192, 128256)]


def h200(**axes: int) -> Mesh:
    there = topology(f"h200:{math.prod(axes.values())}")
    return Mesh(
        np.array(there.devices).reshape(*axes.values()),
        tuple(axes),
        axis_types=(AxisType.Auto,) * len(axes),
    )


def compiled(mesh, function, *arguments) -> Program:
    with jax.set_mesh(mesh):
        program = jax.jit(function).lower(*arguments).compile()
    text, memory = program.as_text(), program.memory_analysis()
    assert text is not None
    assert memory is not None
    return Program(text, memory.temp_size_in_bytes)


def loss_and_gradients(rule, layout, **options):
    def loss(hidden, head, labels):
        return fused_linear_cross_entropy(hidden, head, labels, rule=rule, layout=layout, **options)

    return jax.value_and_grad(loss, argnums=(0, 1))


@pytest.mark.parametrize("layout", ["vd", "dv"])
@pytest.mark.parametrize(("tokens", "width", "vocab"), SHAPES)
@pytest.mark.parametrize("rule", ["strict", "fast"])
def test_the_default_holds_pallas_kernels_and_keeps_its_promise_of_memory(
    rule, tokens, width, vocab, layout
):
    mesh = h200(one=1)
    head = (width, vocab) if layout == "dv" else (vocab, width)
    arguments = (
        array(mesh, (tokens, width), jnp.bfloat16),
        array(mesh, head, jnp.bfloat16),
        array(mesh, (tokens,), jnp.int32),
    )
    program = compiled(mesh, loss_and_gradients(rule, layout), *arguments)
    print(
        f"{rule} {layout} {tokens} x {width} x {vocab}: {program.temp_bytes / MIB:.1f} MiB of "
        "temporaries"
    )
    kernels = set(re.findall(r"easypipe_row_\w+", program.text))
    of_logits = [
        shape
        for _, shape in arrays(program.text)
        if sorted(shape) == sorted((tokens, vocab)) and shape not in (head, head[::-1])
    ]
    if rule == "strict":
        assert kernels == {"easypipe_row_stats", "easypipe_row_gradients"}
        assert of_logits == []
        assert program.temp_bytes <= 0.3 * 1024 * MIB
    else:
        chunk = min(4096, tokens)
        assert kernels == (
            {"easypipe_row_stats", "easypipe_row_gradients"} if vocab % 8 else {"easypipe_row_step"}
        )
        assert tokens == chunk or of_logits == []
        assert program.temp_bytes <= 1.1 * (
            2 * chunk * vocab + (4 * width * vocab if tokens > chunk else 0)
        )


@pytest.mark.parametrize("rule", ["strict", "fast"])
def test_two_shards_of_the_vocabulary_send_sixteen_bytes_a_token(rule):
    tokens, width, vocab = 8192, 2048, 32768
    mesh = h200(data=1, fsdp=1, tensor=2)
    arguments = (
        array(mesh, (tokens, width), jnp.bfloat16),
        array(mesh, (width, vocab), jnp.bfloat16, None, "tensor"),
        array(mesh, (tokens,), jnp.int32),
    )
    program = compiled(mesh, loss_and_gradients(rule, "dv", sharding=LossSharding()), *arguments)
    assert "easypipe_row_gradients" in program.text
    print(f"{rule}: {program.collectives}, {program.temp_bytes / MIB:.1f} MiB of temporaries")
    check_collectives(program, (tokens, width, vocab), 2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("width", TRITON_WIDTHS)
def test_attention_is_a_kernel_forward_and_two_backward(width, dtype):
    """Every width fits the registers and the shared memory of a multiprocessor, or Triton refuses
    it here; no scores exist.
    """
    mesh = h200(data=1, fsdp=2, sequence=1, tensor=2)
    row = ("data", "fsdp")

    def step(query, key, value, segments, windowed):
        def mix(q, k, v):
            return (
                attend(q, k, v, segments, Scores(512, windowed, soft_cap=50.0))
                .astype(jnp.float32)
                .sum()
            )

        return jax.grad(mix, (0, 1, 2))(query, key, value)

    heads = [array(mesh, (4, 2048, n, width), dtype, row, None, "tensor") for n in (8, 2, 2)]
    program = compiled(
        mesh, step, *heads, array(mesh, (4, 2048), "int32", row), array(mesh, (), "bool")
    )
    for name in ("easypipe_attention", "easypipe_attention_d_query", "easypipe_attention_d_key"):
        assert name in program.text
    assert max(math.prod(shape) for _, shape in arrays(program.text)) < 4 * 2048 * 2048
