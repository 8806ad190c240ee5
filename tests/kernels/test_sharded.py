"""The loss on a mesh of eight devices: values, gradients and gradient *ratios* (a wrong collective scales a gradient).

The devices are made in a process of their own, because a process fixes its number of devices when jax starts.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

PROGRAM = """
import sys
import jax, jax.numpy as jnp, numpy as np
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_enable_x64", True)
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from easypipe.core.errors import ConfigError
from easypipe.kernels.api import LossSharding, fused_linear_cross_entropy

T, D, V = 44, 16, 24                                    # 44 tokens divide by no more than 4 devices: padding is met
rng = np.random.default_rng(0)
hidden, head, labels = rng.normal(size=(T, D)), rng.normal(size=(D, V)), rng.integers(0, V, T)
labels[::3] = -100

def run(implementation, sharding, *arrays):
    def loss(hidden, head, labels):
        out = fused_linear_cross_entropy(hidden, head, labels, z_loss=1e-2, implementation=implementation, chunk_size=3, sharding=sharding)
        return out.loss_sum * 0.3, out
    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(*arrays)

want = jax.tree.map(np.asarray, run("reference", None, hidden, head, labels))
for shape in [(2, 2, 2), (1, 2, 4), (8, 1, 1), (1, 8, 1), (1, 1, 8), (4, 1, 2)]:
    mesh = jax.make_mesh(shape, ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    with jax.set_mesh(mesh):
        placed = (hidden, jax.device_put(head, NamedSharding(mesh, P("fsdp", "tensor"))), labels)
        for sharding in (LossSharding(), None):
            got = run("chunked", sharding, *placed)
            for ours, theirs in zip(jax.tree.leaves(jax.tree.map(np.asarray, got)), jax.tree.leaves(want)):
                np.testing.assert_allclose(ours, theirs, rtol=1e-11, atol=1e-11)
                assert abs(np.vdot(ours, theirs) / np.vdot(theirs, theirs) - 1) < 1e-11, (shape, sharding)
        d_head = run("chunked", LossSharding(), *placed)[1][1]
        assert d_head.sharding.is_equivalent_to(placed[1].sharding, 2), d_head.sharding

mesh = jax.make_mesh((1, 1, 8), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
with jax.set_mesh(mesh):
    try:
        run("chunked", LossSharding(), hidden, head[:, :23], np.minimum(labels, 22))
    except ConfigError as error:
        assert "sharding.vocab: a vocabulary of 23 does not divide over 8 devices. Make the vocabulary 24" in str(error), error
    else:
        raise AssertionError("an uneven vocabulary was accepted")
print("all equal")
"""


@pytest.mark.slow
def test_sharded_values_and_gradient_ratios():
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM)],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "all equal" in done.stdout
