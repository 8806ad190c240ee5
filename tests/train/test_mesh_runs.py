"""Runs on eight devices, in a process that has them. `python test_mesh_runs.py FOLDER` prints what
it saw as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

import forked

MORE = (
    {"preset": "fsdp", "tensor": 2},
    {"preset": "hybrid", "fsdp": 4},
    {"preset": "hybrid", "tensor": 2},
    {"sequence": -1, "data": 2},
)
SCATTERED = {
    "data": 2,
    "fsdp": 2,
    "tensor": 2,
    "axis_rules": {"vocab": "fsdp", "embed": "tensor", "heads": None, "mlp": ["fsdp", "data"]},
}
SCATTERED_NAMES = ("embedding", "layers.gate.kernel", "layers.query.kernel")


def measure(folder: Path) -> dict:
    import jax

    jax.config.update("jax_num_cpu_devices", 8)
    import numpy as np
    from flax import nnx

    from easypipe.core.errors import EasypipeError
    from easypipe.run import RunConfig, inputs_of, prepare
    from easypipe.train import state as states
    from easypipe.train.config import CheckpointConfig
    from easypipe.train.losses.loss import loss_sums
    from easypipe.train.metrics.log import read_metrics
    from easypipe.train.model.decoder import Decoder, ModelConfig
    from easypipe.train.parallel.config import PRESETS, mesh_config
    from easypipe.train.parallel.mesh import check_batch_size, make_mesh, partitioned, place_batch
    from easypipe.train.trainer import Trainer
    from pipelines import config
    from train.runs import Arithmetic, Tiny, settings

    model = ModelConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_layers=2,
        num_heads=2,
        num_kv_heads=2,
    )
    saw: dict = {"refused": {}, "losses": {}}

    def run(name, mesh, loader, *, stop=None, **changes):
        def listener(event):
            if event.kind == "step" and event.step == stop:
                raise KeyboardInterrupt

        config = settings(
            folder / name, steps=6, checkpoint=CheckpointConfig(every=3), mesh=mesh, **changes
        )
        trainer = Trainer(Tiny, config, loader, listener=listener)
        try:
            trainer.run()
        except KeyboardInterrupt:
            return
        saw["losses"][name] = [
            [r["loss"], r["grad_norm"]] for r in read_metrics(folder / name / "metrics.jsonl")
        ]

    def held(trainer):
        """Bytes of a device after a step: of parameters and of the optimizer's state, and of all
        devices' worth of the latter.
        """
        with states.on(trainer.mesh, trainer.rules):
            state = trainer.fresh()
            state, _ = trainer.train_step(state, place_batch(Arithmetic().batch(1), trainer.mesh))
        own = [
            sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(part))
            for part in (state.params, state.optimizer)
        ]
        return [*own, sum(leaf.nbytes for leaf in jax.tree.leaves(state.optimizer))]

    def decoded(mesh):
        """Loss, and gradients by name, of packed rows whose segments lie across the devices that
        share a row.
        """
        told = mesh_config({"data": 1} if mesh == "one" else mesh)
        mesh = make_mesh(told, devices=jax.devices()[:1] if mesh == "one" else None)
        shape = ModelConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=32,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            sliding_window=5,
            global_every=2,
        )
        random = np.random.default_rng(0)
        segments = np.array(
            [
                [1] * 5 + [2] * 9 + [0] * 2,
                [1] * 12 + [2] * 4,
                [1] * 16,
                [1] * 3 + [2] * 3 + [3] * 10,
            ],
            np.int32,
        )
        ids, labels = random.integers(0, 32, (2, *segments.shape)).astype(np.int32)
        labels = np.where(segments == 0, -100, labels).astype(np.int32)
        starts = np.maximum.accumulate(
            np.where(np.diff(segments, prepend=-1) != 0, np.arange(16), 0), axis=1
        )
        batch = {
            "input_ids": ids,
            "labels": labels,
            "segment_ids": segments,
            "position_ids": (np.arange(16) - starts).astype(np.int32),
        }
        with states.on(mesh, told.rules):
            layout = states.layout_of(nnx.eval_shape(lambda: Decoder(shape, nnx.Rngs(0))), mesh)
            params, rest = jax.device_put(
                layout.split(Decoder(shape, nnx.Rngs(0))),
                states.shardings((dict(layout.params), dict(layout.rest))),
            )
            loss = jax.jit(
                jax.value_and_grad(
                    lambda params, batch: loss_sums(layout.merge(params, rest), batch).loss_sum
                )
            )
            placed = place_batch(batch, mesh)
            value, grads = loss(params, placed)
        parts = [
            list(placed["labels"].addressable_shards[0].data.shape),
            *(str(layout.params[n].sharding.spec) for n in SCATTERED_NAMES),
        ]
        return (
            float(value),
            {name: np.asarray(grad).ravel().tolist() for name, grad in grads.items()},
            parts,
        )

    class Odd(nnx.Module):
        def __init__(self, rngs):
            self.weight = nnx.Param(
                partitioned(nnx.initializers.zeros, "vocab", None)(
                    rngs.params(), (33, 4), "float32"
                )
            )

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

    run("zero1", "zero1", Arithmetic())
    run("rows in parts", {"data": 2, "sequence": 2, "tensor": 2}, Placed(), accumulate_steps=2)
    saw["presets"] = {name: list(make_mesh(name).shape.values()) for name in PRESETS}
    saw["more"] = [list(make_mesh(mesh).shape.values()) for mesh in MORE]
    saw["held"] = {
        name: held(Trainer(Tiny, settings(folder / "held", mesh=name), Arithmetic()))
        for name in ("dp", "zero1")
    }
    saw["decoder"] = [
        decoded(mesh) for mesh in ("one", {"data": 2, "sequence": 2, "tensor": 2}, SCATTERED)
    ]

    trainer = Trainer(model, settings(folder / "look", mesh=cube), Arithmetic())
    with states.on(trainer.mesh):
        state = states.init_state(trainer.origin.build, trainer.layout, trainer.optimizer)
    saw["shapes"] = {
        name: [list(leaf.shape), list(leaf.addressable_shards[0].data.shape)]
        for name, leaf in states.flatten(state).items()
        if leaf.ndim
    }
    with states.on(trainer.mesh):
        batch = place_batch(Arithmetic().batch(1), trainer.mesh)
        after, _ = trainer.train_step(state, batch)
    saw["rows"] = sorted({str(shard.index[0]) for shard in batch["labels"].addressable_shards})
    saw["consumed"] = all(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))
    saw["same_places"] = states.shardings(after) == states.shardings(
        states.abstract_state(trainer.layout, trainer.optimizer)
    )
    whole = Trainer(Tiny, settings(folder / "tiny", mesh=cube), Arithmetic())
    module = Tiny(nnx.Rngs(0))
    with states.on(whole.mesh):
        moved = states.state_from(module, whole.layout, whole.optimizer)
    saw["moved_in"] = [
        list(moved.params["table.embedding"].addressable_shards[0].data.shape),
        int(np.prod(module.table.embedding.shape)),
    ]

    def refusal(name, call):
        try:
            call()
        except EasypipeError as error:
            saw["refused"][name] = str(error)

    refusal("product", lambda: make_mesh({"data": 3}))
    refusal("remain", lambda: make_mesh({"data": -1, "tensor": 3}))
    refusal("fewer", lambda: make_mesh({"data": 4}))
    refusal(
        "batch",
        lambda: Trainer(model, settings(folder / "x", mesh={"data": 8}), Arithmetic(batch_size=12)),
    )
    refusal(
        "vocab",
        lambda: Trainer(
            ModelConfig(vocab_size=33, num_heads=8),
            settings(folder / "x", mesh={"tensor": 8}),
            Arithmetic(),
        ),
    )
    refusal("width", lambda: Trainer(Odd, settings(folder / "x", mesh={"tensor": 8}), Arithmetic()))
    refusal("rows in parts", lambda: place_batch(Arithmetic().batch(1), make_mesh({"sequence": 8})))
    rows = RunConfig(
        data=config(folder, pack={"seq_length": 36}),
        train=settings(folder / "x", mesh={"sequence": 8}),
    )
    refusal("rows of a config", lambda: prepare(rows))
    # 3 rows are not divided by the 8 devices of the config's mesh
    three = config(folder, pack={"seq_length": 36}, load={"batch_size": 3}, cache_dir=folder / "c")
    alone = RunConfig(data=three, train=settings(folder / "x", mesh="dp"))
    refusal("batch of a config", lambda: inputs_of(alone))
    one = make_mesh({"data": 1}, devices=jax.devices()[:1])
    saw["own mesh"] = len(next(iter(inputs_of(alone, mesh=one).train))["input_ids"])
    # 2 heads of 8 numbers: their columns would divide, they do not
    few = ModelConfig(vocab_size=32, hidden_size=16, num_heads=2)
    refusal("heads", lambda: Trainer(few, settings(folder / "x", mesh="tp"), Arithmetic()))
    refusal(
        "axes",
        lambda: Trainer(
            Tiny, settings(folder / "x"), Arithmetic(), mesh=jax.make_mesh((8,), ("data",))
        ),
    )
    refusal(
        "placed", lambda: place_batch(Arithmetic(batch_size=6).batch(1), make_mesh({"data": 8}))
    )
    check_batch_size(16, make_mesh({"data": 8}))
    return saw


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    print(json.dumps(measure(Path(sys.argv[1]))))
    sys.exit()


@pytest.fixture(scope="module")
def saw(tmp_path_factory):
    command = [sys.executable, __file__, str(tmp_path_factory.mktemp("runs"))]
    done = forked.run(command, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", ["cube", "pieces", "moved", "zero1", "rows in parts"])
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
    assert sum(name.startswith("optimizer") for name in shapes) == 2 * sum(
        name.startswith("params") for name in shapes
    )


def test_a_step_consumes_its_state_and_leaves_the_next_in_the_same_places(saw):
    assert saw["consumed"]
    assert saw["same_places"]


def test_rows_are_spread_over_data_and_fsdp(saw):
    assert saw["rows"] == [
        "slice(0, 2, None)",
        "slice(2, 4, None)",
        "slice(4, 6, None)",
        "slice(6, 8, None)",
    ]


def test_presets_are_meshes(saw):
    assert saw["presets"] == {
        "dp": [8, 1, 1, 1],
        "fsdp": [1, 8, 1, 1],
        "zero1": [8, 1, 1, 1],
        "tp": [1, 1, 1, 8],
        "hybrid": [1, 8, 1, 1],
    }
    assert saw["more"] == [[1, 4, 1, 2], [2, 4, 1, 1], [1, 4, 1, 2], [2, 1, 4, 1]]


def test_zero1_divides_the_state_of_the_optimizer_and_nothing_else(saw):
    whole, parts = saw["held"]["dp"], saw["held"]["zero1"]
    assert whole[0] == parts[0], "parameters are on every device"
    assert whole[1] == whole[2], "and so are moments under dp"
    assert parts[1] < 1.1 * whole[1] / 8


@pytest.mark.parametrize("which", [1, 2])
def test_a_decoder_of_packed_rows_has_the_loss_and_gradients_of_one_device(saw, which):
    (loss, grads, _), (ours, parts, _) = saw["decoder"][0], saw["decoder"][which]
    assert ours == pytest.approx(loss, rel=1e-6)
    for name, values in grads.items():
        assert parts[name] == pytest.approx(values, rel=1e-4, abs=1e-4), name


def test_a_mesh_of_ones_own_goes_before_that_of_the_config(saw):
    assert "data.load.batch_size: 3" in saw["refused"]["batch of a config"]
    assert saw["own mesh"] == 3


def test_rows_lie_in_parts_and_parameters_where_the_rules_say(saw):
    assert saw["decoder"][1][2][0] == [2, 8]
    assert saw["decoder"][2][2][1:] == [
        "P('fsdp', 'tensor')",
        "P(None, 'tensor', ('fsdp', 'data'))",
        "P(None, 'tensor', None)",
    ]


def test_a_module_made_elsewhere_is_laid_out(saw):
    assert saw["moved_in"] == [[16, 4], 32 * 8]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "product",
            "mesh: {data: 3, fsdp: 1, sequence: 1, tensor: 1} does not fit 8 cpu devices. Let the "
            "sizes multiply to 8, such as {data: 8}",
        ),
        (
            "remain",
            "mesh: {data: -1, fsdp: 1, sequence: 1, tensor: 3} does not fit 8 cpu devices. Let the "
            "sizes multiply to 8",
        ),
        ("fewer", "mesh: {data: 4, fsdp: 1, sequence: 1, tensor: 1} does not fit 8 cpu devices."),
        (
            "batch",
            "batch_size: 12 rows do not divide by the mesh (data 8, fsdp 1) times accumulate_steps "
            "1. Use 8 or 16 rows.",
        ),
        ("vocab", "model.vocab_size: 33 does not divide over the 8 devices of mesh axis 'tensor'."),
        (
            "width",
            "model.weight: dimension 0 (vocab) of (33, 4) does not divide by mesh axis 'tensor' of "
            "8. Choose a multiple of 8",
        ),
        (
            "rows in parts",
            "batch.input_ids: rows of 12 slots do not divide over mesh axis 'sequence' of 8. "
            "Choose a seq_length that 8 divides",
        ),
        (
            "rows of a config",
            "data.pack.seq_length: rows of 36 slots do not divide over mesh axis 'sequence' of 8. "
            "Choose a seq_length that 8 divides",
        ),
        (
            "heads",
            "model.num_heads: 2 does not divide over the 8 devices of mesh axis 'tensor'. Give "
            "axis 'tensor' one of [1, 2]",
        ),
        (
            "axes",
            "mesh: has no axis fsdp, sequence, tensor (have: data). Make it with "
            "easypipe.train.parallel.mesh.make_mesh.",
        ),
        (
            "placed",
            "batch.input_ids: 6 rows do not divide by the mesh (data 8, fsdp 1) times "
            "accumulate_steps 1. Use 8 rows.",
        ),
    ],
)
def test_what_does_not_fit_says_so(saw, name, message):
    assert saw["refused"][name].startswith(message)
