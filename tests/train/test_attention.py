"""Every backend of attention gives what "xla" gives, in value and gradient; the fused ones are
interpreted here, and compiled for a TPU.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import forked
import kernel_costs
from aot import array, compiled, tpu_mesh
from easypipe.core.errors import ConfigError
from easypipe.train.model import attention
from easypipe.train.model.attention import Scores, attend, choose
from easypipe.train.model.decoder import ModelConfig

ALL = os.environ.get("EASYPIPE_AOT") == "all"  # nox -s aot_tpu
FUSED = ("splash", "triton")
CASES = {
    "plain": {},
    "window": {"window": 20, "soft_cap": 3.0, "scale": 0.5},
    "whole": {"window": 20, "windowed": False},
}


def arrays(seed=0, batch=4, slots=200, heads=4, key_heads=2, width=16):
    rng = np.random.default_rng(seed)
    query, key, value, pull = (
        jnp.asarray(rng.normal(size=(batch, slots, n, width)), jnp.float32)
        for n in (heads, key_heads, key_heads, heads)
    )
    segments = np.zeros((batch, slots), np.int32)
    (
        segments[0, :100],
        segments[0, 100:130],
        segments[1, :],
        segments[2, :30],
        segments[2, 30:190],
    ) = 1, 2, 1, 1, 2
    return (query, key, value), jnp.asarray(segments), pull


def value_and_gradients(backend, case, given):
    """The mixed values and the gradients of query, key and value; whether the layer has the window
    is traced, as in a scan.
    """
    (query, key, value), segments, pull = given
    case = dict(case)
    traced = case.pop("windowed", True)

    @jax.jit
    def run(query, key, value, windowed):
        mix = lambda q, k, v: attend(q, k, v, segments, Scores(windowed=windowed, **case), backend)  # noqa: E731
        mixed, vjp = jax.vjp(mix, query, key, value)
        return mixed, *vjp(pull.astype(mixed.dtype))

    return [np.asarray(result, np.float64) for result in run(query, key, value, jnp.bool_(traced))]


def check(backend, case, given):
    ours, theirs = (
        value_and_gradients(backend, case, given),
        value_and_gradients("xla", case, given),
    )
    for name, a, b in zip(("mixed", "query", "key", "value"), ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-4, err_msg=f"{backend} {name}")
        # a wrong collective scales a gradient
        assert abs(np.vdot(a, b) / np.vdot(b, b) - 1) < 1e-5, (backend, name)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend", FUSED)
def test_a_fused_backend_gives_what_xla_gives(backend, case):
    """Rows of 200 slots, padding and several segments, two query heads for each key head."""
    check(backend, CASES[case], arrays())


def test_no_block_begins_outside_of_its_array():
    given, segments, _ = arrays(batch=4, heads=6)

    def run(*given):
        return attend(*given, segments, backend="triton").sum()

    assert not kernel_costs.beyond(jax.grad(run, (0, 1, 2)), *given)


@pytest.mark.parametrize("backend", FUSED)
def test_half_precision_keeps_its_dtype_and_is_as_near_as_that_allows(backend):
    (query, key, value), segments, _ = arrays()
    mix = jax.jit(lambda *given: attend(*given, segments, backend=backend))
    ours, exact = (
        mix(*(array.astype(jnp.bfloat16) for array in (query, key, value))),
        attend(query, key, value, segments, backend="xla"),
    )
    assert ours.dtype == jnp.bfloat16
    assert jnp.linalg.norm(ours - exact) < 0.01 * jnp.linalg.norm(exact)


def test_wide_heads_have_smaller_blocks():
    check("triton", {}, arrays(width=256, heads=2, key_heads=1))


def test_on_eight_devices():
    """Heads and queries divided, with more devices than key heads; rows divided, and heads that do
    not divide.
    """
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}
    ran = forked.run([sys.executable, __file__], env=env)
    assert ran.returncode == 0, ran.stderr[-3000:]


def test_what_cannot_run_is_refused_by_name_and_never_chosen(monkeypatch):
    with pytest.raises(
        ConfigError,
        match=r"attention: 'triton' supports heads of width 16, 32, 64, 128, 256, and these have 4",
    ):
        ModelConfig(num_heads=4, hidden_size=16, num_kv_heads=4, attention="triton")
    with pytest.raises(ConfigError, match="'splash' supports bfloat16 and float32, not float64"):
        choose("splash", 64, jnp.dtype("float64"))
    assert choose(None, 64, jnp.float32) == "xla"  # on CPU
    monkeypatch.setattr(attention, "platform_at_hand", lambda: "cuda")
    assert choose(None, 64, jnp.bfloat16) == "triton"
    assert choose(None, 80, jnp.bfloat16) == "xla"
    with pytest.raises(
        ConfigError,
        match=r"model\.attention: 'splash' is for tpu, and this program is for cuda.*here 'triton'",
    ):
        choose("splash", 64, jnp.bfloat16)
    monkeypatch.setattr(attention, "platform_at_hand", lambda: "tpu")
    assert choose(None, 80, jnp.bfloat16) == "splash"


@pytest.mark.parametrize("generation", ["v5e", "v5p", "v6e"] if ALL else ["v5p"])
@pytest.mark.parametrize("width", [64, 128, 256] if ALL else [128])
def test_for_tpus_splash_is_compiled_and_no_scores_exist(generation, width):
    mesh = tpu_mesh(generation, data=1, fsdp=2, sequence=1, tensor=2)
    row = ("data", "fsdp")

    def step(query, key, value, segments, windowed):
        def mix(q, k, v):
            return (
                attend(q, k, v, segments, Scores(512, windowed, soft_cap=50.0))
                .astype(jnp.float32)
                .sum()
            )

        return jax.grad(mix, (0, 1, 2))(query, key, value)

    heads = [array(mesh, (4, 2048, n, width), "bfloat16", row, None, "tensor") for n in (8, 2, 2)]
    program = compiled(
        step, mesh, *heads, array(mesh, (4, 2048), "int32", row), array(mesh, (), "bool")
    )
    assert "splash_mha" in program.text
    assert program.largest_array_bytes < 2 * 4 * 2048 * 2048  # of one head's scores in float32


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    for shape, case, given in (
        ((1, 1, 4, 2), "window", arrays()),
        ((2, 2, 2, 1), "plain", arrays(heads=3, key_heads=3)),
    ):
        axes = ("data", "fsdp", "tensor", "sequence")
        with jax.set_mesh(jax.make_mesh(shape, axes, axis_types=(jax.sharding.AxisType.Auto,) * 4)):
            for backend in FUSED:
                check(backend, CASES[case], given)
