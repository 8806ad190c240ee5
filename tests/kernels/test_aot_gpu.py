"""The loss, compiled for an H200 that is not there: which kernels are in it, what it holds, what it sends.

Needs jax's CUDA wheels (4.4 GB): `nox -s aot_gpu` installs them and runs this file; elsewhere it is skipped. XLA cannot try out its
products here, so nothing is said about time.
"""

from __future__ import annotations

import importlib.metadata
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from aot import Program, array, arrays
from easypipe.kernels import pallas_gpu
from easypipe.kernels.api import LossSharding, fused_linear_cross_entropy
from easypipe.kernels.stats import Inputs

INSTALLED = {distribution.name for distribution in importlib.metadata.distributions()}
PLUGIN = next((version for version in (13, 12) if f"jax-cuda{version}-plugin" in INSTALLED), None)
pytestmark = pytest.mark.skipif(PLUGIN is None, reason="no compiler for CUDA here (run `nox -s aot_gpu`)")

MIB = 1 << 20
SHAPES = [(4096, 4096, 128256), (16384, 2048, 248320), (32768, 4096, 128256), (8192, 2048, 32768), (16383, 1000, 50257)]
FACTS = f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 150754820096
  shared_memory_per_block_optin: 232448
  cuda_compute_capability {{ major: 9 }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
runtime_version {{ major: {PLUGIN} minor: 0 patch: 0 }}
device_description_str: "NVIDIA H200"
"""


def h200(**axes: int) -> Mesh:
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # else the plugin refuses a machine without a driver
    count = int(np.prod(list(axes.values())))
    topology = topologies.get_topology_desc(platform="cuda", topology_name="", target_config=FACTS, topology=f"1x1x{count}")
    return Mesh(np.array(topology.devices).reshape(*axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


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
def test_the_default_holds_pallas_kernels_and_keeps_its_promise_of_memory(rule, tokens, width, vocab, layout):
    mesh = h200(one=1)
    head = (width, vocab) if layout == "dv" else (vocab, width)
    arguments = array(mesh, (tokens, width), jnp.bfloat16), array(mesh, head, jnp.bfloat16), array(mesh, (tokens,), jnp.int32)
    program = compiled(mesh, loss_and_gradients(rule, layout), *arguments)
    print(f"{rule} {layout} {tokens} x {width} x {vocab}: {program.temp_bytes / MIB:.1f} MiB of temporaries")
    kernels = set(re.findall(r"easypipe_row_\w+", program.text))
    of_logits = [shape for _, shape in arrays(program.text) if sorted(shape) == sorted((tokens, vocab)) and shape not in (head, head[::-1])]
    if rule == "strict":
        assert kernels == {"easypipe_row_stats", "easypipe_row_gradients"}
        assert of_logits == []
        assert program.temp_bytes <= 0.3 * 1024 * MIB
    else:
        chunk = min(4096, tokens)
        assert kernels == {"easypipe_row_step"}
        assert tokens == chunk or of_logits == []
        if vocab % 8:
            return  # XLA copies the logits of such a vocabulary into whole vectors, forward and backward: pad the vocabulary instead
        assert program.temp_bytes <= 1.1 * (2 * chunk * vocab + (4 * width * vocab if tokens > chunk else 0))


@pytest.mark.parametrize("layout", ["vd", "dv"])
def test_the_fused_forward_pass_compiles_for_hopper(layout):
    tokens, width, vocab = 4096, 2048, 128256
    mesh = h200(one=1)
    head = (width, vocab) if layout == "dv" else (vocab, width)
    arguments = array(mesh, (tokens, width), jnp.bfloat16), array(mesh, head, jnp.bfloat16), array(mesh, (tokens,), jnp.int32)

    def stats(hidden, head, labels):
        return pallas_gpu.stats(Inputs(hidden, head, None, labels), layout=layout, soft_cap=None, block={"fused_splits": 33})

    program = compiled(mesh, stats, *arguments)
    print(f"fused forward {layout}: {program.temp_bytes / MIB:.1f} MiB of temporaries")
    assert "easypipe_fused_stats" in program.text
    assert program.temp_bytes <= 4 * MIB


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
    sent = [size for _, size in program.collectives]
    print(f"{rule}: {program.collectives}, {program.temp_bytes / MIB:.1f} MiB of temporaries")
    reduced = tokens * width * 4  # the sum of d_hidden over the shards, the one collective that belongs to a gradient
    assert sum(size for size in sent if size < tokens * width) <= 16 * tokens * 2
    assert sum(size for size in sent if size >= tokens * width) <= reduced
