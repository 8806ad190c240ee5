"""Options of a run whose effect no other test looks at on its own."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from flax import nnx

from easypipe.core.config import from_dict
from easypipe.core.errors import ConfigError
from easypipe.train import state as states
from easypipe.train.config import LossConfig
from easypipe.train.model.decoder import Decoder, ModelConfig
from easypipe.train.parallel.mesh import make_mesh, place_batch
from easypipe.train.trainer import Trainer
from train.runs import Arithmetic, Tiny, settings

MESH = make_mesh({"data": 1}, devices=jax.devices()[:1])
SHAPE = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 4,
}


def trainer(folder, model=Tiny, **changes):
    return Trainer(model, settings(folder, **changes), Arithmetic(), mesh=MESH)


def test_seed_draws_other_parameters(tmp_path):
    with states.on(MESH):
        drawn = [
            np.asarray(
                trainer(tmp_path, ModelConfig(**SHAPE), seed=seed).fresh().params["embedding"]
            )
            for seed in (0, 1, 0)
        ]
    assert np.array_equal(drawn[0], drawn[2])
    assert not np.array_equal(drawn[0], drawn[1])


def test_loss_options_change_the_program_that_is_compiled(tmp_path):
    def program(**options) -> str:
        run = trainer(tmp_path, loss=LossConfig(**options))
        with states.on(MESH):
            abstract = states.abstract_state(run.layout, run.optimizer)
            return run.train_step.lower(
                abstract, place_batch(Arithmetic().batch(1), MESH)
            ).as_text()  # type: ignore[attr-defined]

    default = program(implementation="chunked")
    programs = [
        program(implementation="reference"),
        program(implementation="chunked", rule="strict"),
        program(chunk_size=16),
    ]
    assert len({default, *programs}) == 4


def test_a_loss_for_other_devices_is_refused_when_the_trainer_is_made(tmp_path):
    with pytest.raises(
        ConfigError,
        match=r"^train\.loss\.implementation: 'pallas_gpu' cannot run: it is for cuda, and the "
        r"devices .* are cpu",
    ):
        trainer(tmp_path, ModelConfig(**SHAPE), loss=LossConfig(implementation="pallas_gpu"))
    trainer(tmp_path, ModelConfig(**SHAPE), loss=LossConfig())


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("vocab_size", 40),
        ("hidden_size", 20),
        ("intermediate_size", 28),
        ("num_layers", 3),
        ("num_heads", 8),
        ("num_kv_heads", 4),
        ("head_dim", 6),
    ],
)
def test_sizes_are_those_of_the_parameters(option, value):
    def shapes(**changes):
        model = nnx.eval_shape(lambda: Decoder(ModelConfig(**SHAPE | changes), nnx.Rngs(0)))
        return [leaf.shape for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))]

    width = SHAPE["head_dim"]
    heads, kv_heads = SHAPE["num_heads"], SHAPE["num_kv_heads"]
    new = {
        "num_heads": {value * width},
        "num_kv_heads": {value * width},
        "head_dim": {value * heads, value * kv_heads},
    }.get(option, {value})
    changed = [
        shape
        for shape, plain in zip(shapes(**{option: value}), shapes(), strict=True)
        if shape != plain
    ]
    assert changed
    assert all(new & set(shape) for shape in changed)


def test_numbers_of_the_model_change_its_logits():
    ids = np.arange(24, dtype=np.int32)[None] % 32
    base = {**SHAPE, "rope_scaling": {"kind": "linear", "factor": 2.0}}

    def logits(**changes):
        return np.asarray(
            nnx.jit(Decoder.__call__)(
                Decoder(from_dict(ModelConfig, base | changes), nnx.Rngs(0)), ids
            )
        )

    plain = logits()
    for changes in (
        {"rope_theta": 100.0},
        {"norm_epsilon": 0.1},
        {"rope_scaling": {"kind": "linear", "factor": 4.0}},
    ):
        assert np.abs(logits(**changes) - plain).max() > 1e-4, changes
