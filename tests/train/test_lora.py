"""Low-rank adapters: what is trained, what is kept, what is written, and that a run with them
resumes bit for bit.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import forked
from easypipe.core.errors import ConfigError, StateError
from easypipe.train import state as states
from easypipe.train.config import CheckpointConfig, OptimizerConfig
from easypipe.train.model.config import LoraConfig
from easypipe.train.model.decoder import Decoder, ModelConfig, param_count
from easypipe.train.model.flops import adapter_flops, matmul_params
from easypipe.train.model.lora import LoraLinear, adapters, add_lora, fingerprint, merge_lora
from easypipe.train.parallel.mesh import make_mesh
from easypipe.train.trainer import Trainer
from train.hf_support import CONFIGS, tensors, write_model
from train.runs import VOCAB, Arithmetic, Tiny, numbers, settings

MESH = make_mesh(devices=jax.devices()[:1])
SHAPE = ModelConfig(
    vocab_size=VOCAB,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
)
IDS = jnp.arange(11, dtype=jnp.int32)[None]
call = nnx.jit(lambda module, ids: module(ids))


def moved(module: nnx.Module, config: LoraConfig, size: float = 0.1) -> nnx.Module:
    """`module` with adapters that do something."""
    adapted = add_lora(nnx.clone(module), config, 0)
    for i, linear in enumerate(adapters(adapted).values()):
        linear.lora_b[...] = size * jax.random.normal(jax.random.key(i), linear.lora_b.shape)
    return adapted


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return Decoder(SHAPE, nnx.Rngs(3))


def test_a_new_adapter_changes_nothing_and_a_merged_one_computes_the_same(decoder: Decoder) -> None:
    want = np.asarray(call(decoder, IDS))
    np.testing.assert_array_equal(call(add_lora(nnx.clone(decoder), LoraConfig(), 0), IDS), want)
    adapted = moved(decoder, LoraConfig(rank=3))
    assert isinstance(adapted, Decoder)
    got, merged = np.asarray(call(adapted, IDS)), merge_lora(adapted)
    assert np.abs(got - want).max() > 0.01
    assert not adapters(merged)
    assert jax.tree.structure(nnx.state(merged)) == jax.tree.structure(nnx.state(decoder))
    np.testing.assert_allclose(call(merged, IDS), got, atol=1e-5)
    np.testing.assert_array_equal(call(decoder, IDS), want)  # what was given stays as it was
    assert merge_lora(decoder) is decoder


def test_first_values_follow_from_seed_and_name_alone(decoder: Decoder) -> None:
    one = add_lora(nnx.clone(decoder), LoraConfig(rank=2), 5)
    other = add_lora(nnx.clone(decoder), LoraConfig(rank=2, targets=("query",)), 5)
    assert list(adapters(other)) == ["layers.query"]
    np.testing.assert_array_equal(
        adapters(one)["layers.query"].lora_a[...], adapters(other)["layers.query"].lora_a[...]
    )
    drawn = [adapter.lora_a[...] for adapter in adapters(one).values()]
    assert len(drawn) == 7
    assert not any(np.array_equal(a, b) for a, b in itertools.combinations(drawn, 2))
    again = add_lora(nnx.clone(decoder), LoraConfig(rank=2), 6)
    assert not np.array_equal(
        adapters(one)["layers.query"].lora_a[...], adapters(again)["layers.query"].lora_a[...]
    )


@pytest.mark.parametrize(
    ("changes", "scale", "names"),
    [
        ({"rank": 4, "alpha": 6.0}, 1.5, 7),
        ({"rank": 4, "alpha": 6.0, "rank_stabilized": True}, 3.0, 7),
        ({"rank": 2, "alpha": 2.0, "targets": ["query", "layers.value"]}, 1.0, 2),
        ({"rank": 2, "alpha": 2.0, "targets": ["layers.[gd]*"]}, 1.0, 2),
    ],
)
def test_options_decide_size_scale_and_place(
    decoder: Decoder, changes: dict, scale: float, names: int
) -> None:
    config = LoraConfig(**changes)
    found = adapters(moved(decoder, config))
    assert len(found) == names
    for linear in found.values():
        assert linear.lora_a.shape[-1] == linear.lora_b.shape[-2] == config.rank
    one = next(iter(found.values()))
    layer = jax.tree.map(lambda leaf: leaf[0], one)
    x = jax.random.normal(jax.random.key(9), (3, layer.kernel.shape[0]))
    with jax.default_matmul_precision("highest"):
        want = x @ (layer.kernel[...] + scale * layer.lora_a[...] @ layer.lora_b[...])
        np.testing.assert_allclose(layer(x), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"targets": ["qery"]},
            r"targets\[0\]: no projection fits 'qery' \(have: layers.down, .*\)\. Did you mean "
            r"'query'\?",
        ),
        (
            {"targets": ["query", "q_proj"]},
            r"targets\[1\]: .* What others call 'q_proj' is 'query' here",
        ),
        ({"targets": ["head"]}, "'head' takes no adapter: its matrix goes into the loss whole"),
        ({"targets": []}, "targets: names nothing to train"),
        ({"rank": 9}, r"rank: 9, but layers.key is \[16, 8\]\. Give at most 8"),
        ({"rank": 0}, "rank: 0 is too small"),
        ({"alpha": 0.0}, "alpha: 0.0 is not a positive number"),
    ],
)
def test_bad_options_are_refused(
    decoder: Decoder, changes: dict, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        Trainer(SHAPE, settings(tmp_path, lora=changes), Arithmetic(), mesh=MESH)


def test_a_projection_that_computes_something_else_gets_no_adapter() -> None:
    class Doubled(nnx.Linear):
        def __call__(self, inputs: jax.Array) -> jax.Array:
            return 2 * super().__call__(inputs)

    class Both(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.odd, self.plain = Doubled(4, 4, rngs=rngs), nnx.Linear(4, 4, rngs=rngs)

    module = add_lora(Both(nnx.Rngs(0)), LoraConfig(rank=2), 0)
    assert list(adapters(module)) == ["plain"]
    assert type(module.odd) is Doubled
    with pytest.raises(ConfigError, match=r"no projection fits 'odd' \(have: plain\)"):
        add_lora(Both(nnx.Rngs(0)), LoraConfig(rank=2, targets=["odd"]), 0)


def test_a_module_has_one_adapter_at_most(decoder: Decoder) -> None:
    with pytest.raises(
        ConfigError, match=r"has an adapter already\. Merge it first: merge_lora\(module\)"
    ):
        add_lora(moved(decoder, LoraConfig(rank=1)), LoraConfig(rank=1), 0)


def test_the_fingerprint_tells_order_and_bits() -> None:
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    swapped = values.copy()
    swapped[0, 0], swapped[2, 3] = swapped[2, 3], swapped[0, 0]
    nudged = np.nextafter(values, np.float32(100))
    seen = [
        fingerprint({"w": jnp.asarray(v)})["w"]
        for v in (values, swapped, nudged, values.T, values.astype(jnp.bfloat16))
    ]
    assert len(set(seen)) == 5
    for i in range(values.size):  # the sign of each number
        turned = values.copy()
        turned.view(np.uint32).flat[i] ^= np.uint32(1 << 31)
        assert fingerprint({"w": jnp.asarray(turned)})["w"] != seen[0]


def trainer(folder: Path, model: object = SHAPE, **changes: object) -> Trainer:
    changes = {
        "lora": LoraConfig(rank=2),
        "steps": 6,
        "checkpoint": CheckpointConfig(every=2),
        **changes,
    }
    return Trainer(model, settings(folder, **changes), Arithmetic(), mesh=MESH)  # type: ignore[arg-type]


def test_adapters_alone_are_trained_and_kept(tmp_path: Path) -> None:
    """By bytes: the optimizer and the checkpoint hold what the adapters need, and nothing of the
    frozen model.
    """
    run = trainer(tmp_path / "lora")
    count = sum(leaf.size for leaf in run.layout.params.values())
    with states.on(MESH):
        state = run.fresh()
    assert set(state.params) == {
        f"layers.{n}.lora_{ab}"
        for n in ("query", "key", "value", "output", "gate", "up", "down")
        for ab in "ab"
    }
    moments = sum(leaf.nbytes for leaf in jax.tree.leaves(state.optimizer))
    assert 2 * 4 * count <= moments <= 2 * 4 * count + 64  # two moments of float32, and counters
    result = run.run()
    assert result.first["loss"] > result.last["loss"] + 0.05
    plain = Decoder(SHAPE, nnx.Rngs(0))
    before, after = nnx.state(plain), nnx.state(result.model)
    for path, variable in nnx.to_flat_state(before):
        np.testing.assert_array_equal(
            variable.get_value(), dict(nnx.to_flat_state(after))[path].get_value()
        )
    assert param_count(result.model) == param_count(plain) + count
    kept = json.loads((result.checkpoint / "arrays" / "_METADATA").read_text())["tree_metadata"]
    assert {key.split("'")[1] for key in kept} == set(
        run.layout.without_frozen(states.flatten(state))
    )
    assert not any("kernel" in key or "embedding" in key for key in kept)


def test_flops_are_those_of_the_program_that_is_compiled(tmp_path: Path) -> None:
    """A frozen matrix has no gradient, the head neither: that product is not in the program."""
    wide = ModelConfig(
        vocab_size=4096,
        hidden_size=32,
        intermediate_size=64,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
    )
    run = trainer(tmp_path, wide)
    batch = {
        name: jax.ShapeDtypeStruct(array.shape, array.dtype)
        for name, array in Arithmetic().batch(1).items()
    }
    with states.on(MESH):
        program = run.train_step.lower(
            states.abstract_state(run.layout, run.optimizer), batch
        ).compile()  # type: ignore[attr-defined]
    slots = batch["input_ids"].size
    adapted = sum(leaf.size for leaf in run.layout.params.values())
    counted = slots * (6 * matmul_params(wide) + adapter_flops(wide, adapted))
    assert (
        counted < program.cost_analysis()["flops"] < 1.2 * counted < 6 * matmul_params(wide) * slots
    )


@pytest.mark.parametrize("kind", ["config", "module"])
def test_a_run_with_adapters_resumes_bit_for_bit(
    tmp_path: Path, decoder: Decoder, kind: str
) -> None:
    model = SHAPE if kind == "config" else decoder
    whole = [
        json.loads(line)
        for line in trainer(tmp_path / "whole", model).run().metrics.read_text().splitlines()
    ]
    stopped = trainer(tmp_path / "two", model)
    stopped.callbacks = (
        lambda event: (
            event.control.stop("enough") if event.kind == "step" and event.step == 3 else None
        ),
    )
    stopped.run()
    second = trainer(tmp_path / "two", model).run()
    assert second.resumed_from is not None
    assert 2 < second.resumed_from < 6
    again = [json.loads(line) for line in second.metrics.read_text().splitlines()]
    assert numbers(again) == numbers(whole)
    with pytest.raises(StateError, match=r"has adapters of other weights: embedding, .* differ"):
        trainer(tmp_path / "two", Decoder(SHAPE, nnx.Rngs(99)), resume_changes=("model",)).run()


EIGHT = """
import sys
import jax
jax.config.update("jax_num_cpu_devices", 8)
from flax import nnx
from jax.sharding import PartitionSpec as P
from easypipe.train.model.config import LoraConfig
from easypipe.train.model.pretrained.config import PretrainedConfig
from easypipe.train.trainer import Trainer
from train.runs import Arithmetic, settings

model, folder = sys.argv[1:]
def run(name, **changes):
    named = PretrainedConfig(pretrained=model, param_dtype="bfloat16")
    return Trainer(named, settings(f"{folder}/{name}", steps=3, **changes), Arithmetic()).run()
lora = LoraConfig(rank=2)
one = run("one", lora=lora, mesh={"data": 8})
cube = run("cube", lora=lora, mesh={"data": 2, "fsdp": 2, "tensor": 2}, accumulate_steps=2)
gate = cube.model.layers.gate
assert gate.kernel.get_value().sharding.spec == P(None, "fsdp", "tensor") and gate.kernel.dtype == "bfloat16"
assert gate.lora_a.get_value().sharding.spec == P(None, "fsdp", None), gate.lora_a.get_value().sharding
assert gate.lora_b.get_value().sharding.spec == P(None, None, "tensor")
assert gate.lora_a.dtype == "float32"
assert abs(one.last["loss"] - cube.last["loss"]) < 2e-3, (one.last, cube.last)
assert one.last["loss"] < one.first["loss"] - 0.1
again = run("cube", lora=lora, mesh={"fsdp": 4, "tensor": 2}, accumulate_steps=2)
assert again.resumed_from == 3
for a, b in zip(jax.tree.leaves(nnx.state(again.model)), jax.tree.leaves(nnx.state(cube.model)), strict=True):
    assert (jax.device_get(a) == jax.device_get(b)).all()
print("all equal")
"""


@pytest.mark.slow
def test_on_eight_devices_adapters_lie_as_what_they_adapt(tmp_path: Path) -> None:
    """With a base in bfloat16, accumulation, and a checkpoint that is opened on another mesh; in a
    process of its own.
    """
    model = write_model(tmp_path / "model", CONFIGS["llama3"], tensors(CONFIGS["llama3"]))
    tests = str(Path(__file__).parents[1])
    env = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")]),
    }
    arguments = [sys.executable, "-c", EIGHT, str(model), str(tmp_path)]
    done = forked.run(arguments, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "all equal" in done.stdout


@pytest.mark.parametrize("optimizer", ["muon", "schedule_free"])
def test_any_module_and_optimizer(tmp_path: Path, optimizer: str) -> None:
    config = OptimizerConfig(name=optimizer, learning_rate=0.03)  # type: ignore[arg-type]
    result = trainer(
        tmp_path, Tiny, lora=LoraConfig(rank=2, targets=("layers.*",)), optimizer=config, steps=20
    ).run()
    assert result.first["loss"] > result.last["loss"] + 0.01
    assert isinstance(result.model.layers[0], LoraLinear)
    assert isinstance(merge_lora(result.model).layers[1], nnx.Linear)
