"""Runs on eight devices, in a process that has them. `python test_mesh_runs.py FOLDER` prints what it saw as JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def measure(folder: Path) -> dict:
    import jax

    jax.config.update("jax_num_cpu_devices", 8)
    import numpy as np
    from flax import nnx

    from easypipe.core.errors import EasypipeError
    from easypipe.train import state as states
    from easypipe.train.axes import partitioned
    from easypipe.train.config import CheckpointConfig
    from easypipe.train.mesh import check_batch_size, make_mesh, place_batch
    from easypipe.train.metrics import read_metrics
    from easypipe.train.model import ModelConfig
    from easypipe.train.trainer import Trainer
    from train.runs import Arithmetic, Tiny, settings

    model = ModelConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_layers=2, num_heads=2, num_kv_heads=2)
    saw: dict = {"refused": {}, "losses": {}}

    def run(name, mesh, loader, *, stop=None, **changes):
        def listener(event):
            if event.kind == "step" and event.step == stop:
                raise KeyboardInterrupt

        config = settings(folder / name, steps=6, checkpoint=CheckpointConfig(every=3), mesh=mesh, **changes)
        trainer = Trainer(Tiny, config, loader, listener=listener)
        try:
            trainer.run()
        except KeyboardInterrupt:
            return
        saw["losses"][name] = [[r["loss"], r["grad_norm"]] for r in read_metrics(folder / name / "metrics.jsonl")]

    class Odd(nnx.Module):
        def __init__(self, rngs):
            self.weight = nnx.Param(partitioned(nnx.initializers.zeros, "vocab", None)(rngs.params(), (33, 4), "float32"))

    class Placed(Arithmetic):
        """Batches that lie on the mesh already, as easypipe's loader makes them."""

        def __iter__(self):
            for batch in super().__iter__():
                yield place_batch(batch, make_mesh(cube))

    cube = {"data": 2, "fsdp": 2, "tensor": 2}
    run("data", {"data": 8}, Arithmetic())
    run("cube", cube, Placed())
    run("pieces", {"data": -1, "tensor": 2}, Arithmetic(), accumulate_steps=2)
    run("moved", cube, Arithmetic(), stop=4)
    run("moved", {"data": 4, "tensor": 2}, Arithmetic())

    trainer = Trainer(model, settings(folder / "look", mesh=cube), Arithmetic())
    with states.on(trainer.mesh):
        state = states.init_state(trainer.origin.build, trainer.layout, trainer.optimizer)
    saw["shapes"] = {
        name: [list(leaf.shape), list(leaf.addressable_shards[0].data.shape)] for name, leaf in states.flatten(state).items() if leaf.ndim
    }
    with states.on(trainer.mesh):
        batch = place_batch(Arithmetic().batch(1), trainer.mesh)
        after, _ = trainer.train_step(state, batch)
    saw["rows"] = sorted({str(shard.index[0]) for shard in batch["labels"].addressable_shards})
    saw["consumed"] = all(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))
    saw["same_places"] = states.shardings(after) == states.shardings(states.abstract_state(trainer.layout, trainer.optimizer))
    whole = Trainer(Tiny, settings(folder / "tiny", mesh=cube), Arithmetic())
    module = Tiny(nnx.Rngs(0))
    with states.on(whole.mesh):
        moved = states.state_from(module, whole.layout, whole.optimizer)
    saw["moved_in"] = [list(moved.params["table.embedding"].addressable_shards[0].data.shape), int(np.prod(module.table.embedding.shape))]

    def refusal(name, call):
        try:
            call()
        except EasypipeError as error:
            saw["refused"][name] = str(error)

    refusal("product", lambda: make_mesh({"data": 3}))
    refusal("remain", lambda: make_mesh({"data": -1, "tensor": 3}))
    refusal("fewer", lambda: make_mesh({"data": 4}))
    refusal("batch", lambda: Trainer(model, settings(folder / "x", mesh={"data": 8}), Arithmetic(batch_size=12)))
    refusal("vocab", lambda: Trainer(ModelConfig(vocab_size=33), settings(folder / "x", mesh={"tensor": 8}), Arithmetic()))
    refusal("width", lambda: Trainer(Odd, settings(folder / "x", mesh={"tensor": 8}), Arithmetic()))
    refusal("placed", lambda: place_batch(Arithmetic(batch_size=6).batch(1), make_mesh({"data": 8})))
    check_batch_size(16, make_mesh({"data": 8}))
    return saw


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    print(json.dumps(measure(Path(sys.argv[1]))))
    sys.exit()


@pytest.fixture(scope="module")
def saw(tmp_path_factory):
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path_factory.mktemp("runs"))],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", ["cube", "pieces", "moved"])
def test_the_curve_does_not_depend_on_the_mesh(saw, name):
    for ours, theirs in zip(saw["losses"][name], saw["losses"]["data"], strict=True):
        assert ours == pytest.approx(theirs, rel=2e-4)


def test_parameters_and_moments_are_born_in_parts(saw):
    shapes = saw["shapes"]
    assert shapes["params/layers.gate.kernel"] == [[2, 16, 32], [2, 8, 16]]
    assert shapes["params/embedding"] == [[32, 16], [16, 8]]
    for name, (whole, part) in shapes.items():
        _, _, parameter = name.rpartition("/")
        assert [whole, part] == shapes[f"params/{parameter}"], name
    assert sum(name.startswith("optimizer") for name in shapes) == 2 * sum(name.startswith("params") for name in shapes)


def test_a_step_consumes_its_state_and_leaves_the_next_in_the_same_places(saw):
    assert saw["consumed"]
    assert saw["same_places"]


def test_rows_are_spread_over_data_and_fsdp(saw):
    assert saw["rows"] == ["slice(0, 2, None)", "slice(2, 4, None)", "slice(4, 6, None)", "slice(6, 8, None)"]


def test_a_module_made_elsewhere_is_laid_out(saw):
    assert saw["moved_in"] == [[16, 4], 32 * 8]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "product",
            "mesh: {data: 3, fsdp: 1, sequence: 1, tensor: 1} does not fit 8 cpu devices. Let the sizes multiply to 8, such as {data: 8}",
        ),
        (
            "remain",
            "mesh: {data: -1, fsdp: 1, sequence: 1, tensor: 3} does not fit 8 cpu devices. Let the sizes multiply to 8",
        ),
        ("fewer", "mesh: {data: 4, fsdp: 1, sequence: 1, tensor: 1} does not fit 8 cpu devices."),
        ("batch", "batch_size: 12 rows do not divide by the mesh (data 8, fsdp 1) times accumulate_steps 1. Use 8 or 16 rows."),
        ("vocab", "vocab_size: 33 does not divide over the 8 devices of mesh axis 'tensor'."),
        ("width", "model.weight: dimension 0 (vocab) of (33, 4) does not divide by mesh axis 'tensor' of 8. Choose a multiple of 8"),
        ("placed", "batch.input_ids: 6 rows do not divide by the mesh (data 8, fsdp 1) times accumulate_steps 1. Use 8 rows."),
    ],
)
def test_what_does_not_fit_says_so(saw, name, message):
    assert saw["refused"][name].startswith(message)
