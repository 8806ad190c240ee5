"""What is measured, and that measuring holds nothing up."""

from __future__ import annotations

import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from easypipe.train import trainer as trainers
from easypipe.train.losses.loss import loss_sums
from easypipe.train.metrics.log import read_metrics
from easypipe.train.metrics.meter import peak_memory
from easypipe.train.model.decoder import ModelConfig
from easypipe.train.model.flops import flops_per_step, palm_flops_per_step
from easypipe.train.parallel.mesh import make_mesh
from easypipe.train.trainer import Trainer
from train.runs import LENGTH, ROWS, Arithmetic, Tiny, settings

MESH = make_mesh({"data": 1}, devices=jax.devices()[:1])
MODEL = ModelConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    sliding_window=4,
)


def test_utilisation_is_told_both_ways(tmp_path, monkeypatch):
    """Of a device whose peak is known: here one is made up, which no data sheet of a CPU gives."""
    monkeypatch.setattr(trainers, "peak_flops", lambda device: 1e12)
    Trainer(MODEL, settings(tmp_path, steps=5), Arithmetic(), mesh=MESH).run()
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert records[0]["mfu"] is records[0]["mfu_palm"] is None
    batches = [Arithmetic().batch(t) for t in (2, 3, 4, 5)]
    lengths = [n for batch in batches for n in (batch["segment_ids"] > 0).sum(1)]
    seconds = sum(lengths) / records[-1]["tokens_per_second"]
    assert records[-1]["mfu"] == pytest.approx(
        flops_per_step(MODEL, lengths) / seconds / 1e12, rel=1e-5
    )
    assert records[-1]["mfu_palm"] == pytest.approx(
        palm_flops_per_step(MODEL, 4 * ROWS * LENGTH, LENGTH) / seconds / 1e12, rel=1e-5
    )


def test_norm_of_the_parameters_after_the_step(tmp_path):
    result = Trainer(Tiny, settings(tmp_path, steps=3), Arithmetic(), mesh=MESH).run()
    leaves = jax.tree.leaves(nnx.state(result.model, nnx.Param))
    assert result.last["param_norm"] == pytest.approx(
        np.sqrt(sum(float(jnp.square(leaf).sum()) for leaf in leaves)), rel=1e-5
    )
    assert result.last["peak_memory"] == peak_memory(jax.local_devices())


def test_peak_memory_is_that_of_the_fullest_device_that_tells():
    devices = [
        SimpleNamespace(memory_stats=lambda stats=stats: stats)
        for stats in (None, {"peak_bytes_in_use": 3}, {"peak_bytes_in_use": 7}, {})
    ]
    assert peak_memory(devices) == 7
    assert peak_memory(devices[:1]) is None


def test_a_step_is_dispatched_while_the_one_before_it_still_runs(tmp_path):
    """What a slow step measured is read when the next one is under way, and handing steps out takes
    no time of theirs.
    """

    def slow(module, batch):
        out = loss_sums(module, batch)
        square = jnp.full((700, 700), 1e-9) * out.loss_sum
        return out._replace(
            loss_sum=out.loss_sum
            + 0 * jax.lax.fori_loop(0, 6, lambda i, x: jnp.tanh(x @ x), square).sum()
        )

    run = Trainer(
        Tiny, settings(tmp_path, steps=6, log_every=1), Arithmetic(), loss=slow, mesh=MESH
    )
    step, handing_s, was_running, measured_of = run.train_step, [], [], {}

    def watched(state, batch):
        began = time.perf_counter()
        state, measured = step(state, batch)
        handing_s.append(time.perf_counter() - began)
        measured_of[len(handing_s)] = measured
        return state, measured

    def listener(event):
        if event.kind == "step" and event.step < 4:  # a save settles step 4
            was_running.append(
                event.step + 1 in measured_of and not measured_of[event.step + 1]["loss"].is_ready()
            )

    run.train_step, run.listener = watched, listener
    began = time.perf_counter()
    run.run()
    each_s = (time.perf_counter() - began - handing_s[0]) / 6
    assert was_running == [True, True, True], (handing_s, each_s)
    assert sorted(handing_s[1:])[2] < 0.3 * each_s


def test_the_time_of_an_evaluation_is_none_of_training(tmp_path, monkeypatch):
    """An evaluation of half a second between two steps of milliseconds: rates count from behind
    it.
    """
    run = Trainer(
        Tiny,
        settings(tmp_path, steps=6, eval_every=3),
        Arithmetic(),
        {"held": Arithmetic(2)},
        mesh=MESH,
    )
    evaluate = run.evaluate

    def slowly(step, state):
        time.sleep(0.5)
        return evaluate(step, state)

    monkeypatch.setattr(run, "evaluate", slowly)
    run.run()
    waited = [
        1 / rate * ROWS * LENGTH
        for rate in (
            record["tokens_per_second"] for record in read_metrics(tmp_path / "metrics.jsonl")[3:5]
        )
        if rate
    ]
    assert waited, "no rate was told behind the evaluation"
    assert max(waited) < 0.4
