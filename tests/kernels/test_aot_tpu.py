"""The loss compiled for TPUs that are not there: no logits in memory, temporaries, collectives,
kernels.

The normal run compiles a few programs; `nox -s aot_tpu` sets EASYPIPE_AOT=all and compiles every
generation with every shape.
"""

from __future__ import annotations

import os
import re
from typing import Any

import jax
import pytest

from aot import GENERATIONS, Program, array, check_collectives, compiled, tpu_mesh
from easypipe.kernels.loss.api import LossSharding, fused_linear_cross_entropy
from easypipe.kernels.loss.choice import CHUNK_TOKENS

ALL = os.environ.get("EASYPIPE_AOT") == "all"
GIB = 1 << 30
SMALL, LARGE = (8192, 2048, 32_768), (32_768, 4096, 128_256)
# more hidden states than one backward pass may hold sums of
LARGER = (131_072, 4096, 128_256), (65_536, 8192, 128_256)
FEW_STRICT = [("v5e", SMALL, 1), ("v5p", SMALL, 4), ("tpu7x", LARGE, 4)]
FEW_FAST = [("v5p", SMALL, 1), ("v6e", SMALL, 4)]
EVERY = [
    (generation, shape, shards)
    for generation in GENERATIONS
    for shape in (SMALL, LARGE)
    for shards in (1, 4)
]


def loss_program(
    generation: str,
    shape: tuple[int, int, int],
    shards: int,
    rule: Any,
    layout: str = "dv",
    implementation: Any = None,
) -> Program:
    """Value and gradients of the mean loss, tokens replicated and the vocabulary over `shards`
    devices.
    """
    tokens, width, vocab = shape
    mesh = tpu_mesh(generation, tensor=shards)
    sharding = LossSharding(tokens=(), embed=(), vocab=("tensor",)) if shards > 1 else None
    head = {"d": (width, None), "v": (vocab, "tensor")}
    (first, first_axis), (second, second_axis) = (head[axis] for axis in layout)

    def loss(hidden, lm_head, labels):
        return fused_linear_cross_entropy(
            hidden, lm_head, labels, rule=rule, sharding=sharding, implementation=implementation
        )

    arguments = (
        array(mesh, (tokens, width), "bfloat16"),
        array(mesh, (first, second), "bfloat16", first_axis, second_axis),
        array(mesh, (tokens,), "int32"),
    )
    return compiled(jax.value_and_grad(loss, argnums=(0, 1)), mesh, *arguments)


def relaid_bytes(program: Program, width: int, vocab: int) -> int:
    """Of a copy of the head that nothing asks for: jax 0.12's libtpu may let the SparseCore of a
    tpu7x tile it anew before the loop.
    """
    relaid = re.compile(
        rf"sparse-core.* = bf16\[{width},{vocab}\]{{\d,\d:T\(16,128\)\(2,1\)}} call-done\("
    )
    return 2 * width * vocab if relaid.search(program.text) else 0


def apart_bytes(program: Program, tokens: int, width: int) -> int:
    """Of a chunk's d_hidden, which jax 0.12's libtpu writes down before it is put where it belongs,
    while all hidden states lie in VMEM.
    """
    in_vmem = f"bf16[{tokens},{width}]{{1,0:T(8,128)(2,1)S(1)}}"
    loops = [
        line for line in program.text.splitlines() if " while(" in line and f"f32[{width}," in line
    ]
    return (
        2 * min(tokens, CHUNK_TOKENS["tpu"]) * width
        if any(in_vmem in line for line in loops)
        else 0
    )


@pytest.mark.parametrize(("generation", "shape", "shards"), EVERY if ALL else FEW_STRICT)
def test_strict(generation, shape, shards):
    tokens, _, vocab = shape
    program = loss_program(
        generation, shape, shards, "strict", layout="vd" if shards == 1 else "dv"
    )
    assert program.kernels == {"loss_stats", "loss_gradients"}
    assert program.largest_array_bytes < tokens * vocab // shards * 2  # of logits in bfloat16
    assert program.temp_bytes <= 0.3 * GIB
    check_collectives(program, shape, shards)


@pytest.mark.parametrize(
    ("generation", "shape"),
    [(one, shape) for one in GENERATIONS for shape in LARGER] if ALL else [("v5p", LARGER[0])],
)
def test_strict_holds_its_promise_of_memory_at_any_number_of_tokens(generation, shape):
    program = loss_program(generation, shape, 1, "strict")
    assert program.kernels == {"loss_stats", "loss_gradients_of_head", "loss_gradients_of_hidden"}
    # an argument or a result
    assert program.largest_array_bytes <= 2 * shape[1] * max(shape[0], shape[2])
    assert program.temp_bytes <= 0.05 * GIB


@pytest.mark.parametrize(("generation", "shape", "shards"), EVERY if ALL else FEW_FAST)
def test_fast(generation, shape, shards):
    """It is the default of a scalar loss."""
    tokens, width, vocab = shape
    program = loss_program(generation, shape, shards, None)
    assert program.kernels == (
        {"loss_row_step"} if shards == 1 else {"loss_row_stats", "loss_row_gradients"}
    )
    assert program.largest_array_bytes < tokens * vocab // shards * 2  # of logits in bfloat16
    chunk, local = CHUNK_TOKENS["tpu"], vocab // shards
    extra = (
        relaid_bytes(program, width, local) + apart_bytes(program, tokens, width)
        if jax.__version_info__ >= (0, 12)
        else 0
    )
    assert program.temp_bytes <= 1.1 * (2 * chunk * local + 4 * width * local) + extra
    check_collectives(program, shape, shards)


@pytest.mark.parametrize(
    ("generation", "shape", "layout"),
    [("v5e", (256, 768, 2049), "dv"), ("v5p", (256, 576, 2048), "vd")],
)
def test_a_head_that_lies_transposed_is_not_copied(generation, shape, layout):
    """A TPU stores [768, 2049] with 768 last, which needs less padding."""
    _, width, vocab = shape
    program = loss_program(generation, shape, 1, "strict", layout, "pallas_tpu")
    copied = [
        line
        for line in program.text.splitlines()
        if f"[{width},{vocab}]" in line.split(" copy(")[0] and " copy(" in line
    ]
    assert copied == []


def test_tokens_and_head_that_are_sharded_over_data():
    """FSDP: the head is gathered before it is used, its gradient is scattered; of the loss itself
    go 16 bytes per token and shard.
    """
    mesh = tpu_mesh("v5e", fsdp=2, tensor=2)
    tokens, width, vocab = 4096, 1024, 32_768
    sharding = LossSharding(tokens=("fsdp",), embed=("fsdp",), vocab=("tensor",))

    def loss(hidden, lm_head, labels):
        return fused_linear_cross_entropy(hidden, lm_head, labels, rule="strict", sharding=sharding)

    arguments = (
        array(mesh, (tokens, width), "bfloat16", "fsdp"),
        array(mesh, (width, vocab), "bfloat16", "fsdp", "tensor"),
        array(mesh, (tokens,), "int32", "fsdp"),
    )
    program = compiled(jax.value_and_grad(loss, argnums=(0, 1)), mesh, *arguments)
    assert program.kernels == {"loss_stats", "loss_gradients"}
    assert program.largest_array_bytes < tokens // 2 * vocab // 2 * 2
    small = [(kind, size) for kind, size in program.collectives if 1024 < size <= 1 << 20]
    assert small == [("all-gather", 16 * 2 * tokens // 2)]
