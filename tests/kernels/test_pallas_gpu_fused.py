"""The fused forward pass for Hopper, under the interpreter of Mosaic GPU, which looks for races; and what it refuses."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from easypipe.kernels import pallas_gpu_fused as fused

PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu
from easypipe.kernels import pallas_gpu_fused as fused, reference
from easypipe.kernels.stats import Inputs

rng = np.random.default_rng(0)
tokens, width, vocab = 256, 128, 384
interpret = plgpu.InterpretGPUParams(detect_races=True)
for layout, soft_cap, splits in [("vd", None, 2), ("dv", 4.0, 5)]:
    hidden = jnp.asarray(rng.normal(size=(tokens, width)), jnp.bfloat16)
    head = jnp.asarray(rng.normal(size=(vocab, width) if layout == "vd" else (width, vocab)), jnp.bfloat16)
    labels = jnp.asarray(rng.integers(-1, vocab + 1, tokens), jnp.int32)
    ours = fused.stats(hidden, head, labels, layout=layout, soft_cap=soft_cap, splits=splits, interpret=interpret)
    wide = hidden.astype(jnp.float32), head.astype(jnp.float32)
    exact = reference.stats(Inputs(*wide, None, labels), layout=layout, soft_cap=soft_cap)
    for value, wanted in zip(ours, exact, strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-3)
print("all equal")
"""


@pytest.mark.skipif(not hasattr(plgpu, "InterpretGPUParams"), reason="jax 0.11.2 and newer interpret Mosaic GPU kernels")
def test_the_fused_sums_equal_the_reference():
    # A process of its own: the interpreter runs the warpgroups of a block in XLA's threads, which must be no fewer; cores may be.
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert "all equal" in done.stdout, done.stderr


def test_what_the_fused_kernel_cannot_take_is_named():
    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    assert [reason for reason in fused.refusals(array(512, 128), array(128, 256), None, layout="dv") if "jax" not in reason] == []
    reasons = fused.refusals(array(500, 100, dtype=jnp.float32), array(250, 100), array(250), layout="vd")
    for part in ("tokens 500", "width 100", "vocabulary 250", "not float32", "bias"):
        assert any(part in reason for reason in reasons), reasons
