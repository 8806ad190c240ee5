"""What is measured, and that measuring holds nothing up."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from easypipe.train import engine as engines
from easypipe.train.events import Callback, TrainEvent
from easypipe.train.losses.loss import loss_sums
from easypipe.train.metrics import devices
from easypipe.train.metrics import meter as meters
from easypipe.train.metrics.log import read_metrics
from easypipe.train.metrics.meter import WINDOW_STEPS, Meter, peak_memory
from easypipe.train.model.config import LoraConfig
from easypipe.train.model.decoder import ModelConfig
from easypipe.train.model.flops import (
    adapter_flops,
    flops_from_sums,
    flops_per_step,
    palm_flops_per_step,
)
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
    monkeypatch.setattr(engines, "peak_flops", lambda device: 1e12)
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


TOLD = ("loss", "nll", "grad_norm", "param_norm", "num_targets", "updates")  # by every step


@dataclass(frozen=True)
class OnDevice:
    """A number of a step that is through, or still under way."""

    value: float
    ready: bool

    def tolist(self) -> float:
        return self.value

    def is_ready(self) -> bool:
        return self.ready

    def copy_to_host_async(self) -> None:
        pass


def test_rates_are_sums_over_the_last_steps(monkeypatch):
    """By a clock of whole seconds: steps and batches take any time, each is read behind the next
    one, and all counts anew from the end of an evaluation.
    """
    random, now = np.random.default_rng(0), 0
    monkeypatch.setattr(meters, "time", SimpleNamespace(perf_counter=lambda: now))

    def passing() -> Iterator[dict]:
        nonlocal now
        while True:
            now += int(random.integers(1, 9))
            yield {}

    meter = Meter(lambda host: (3 * host["num_tokens"], host["num_slots"]), 10)
    batches, ready, waited, unread = passing(), True, 0, None
    ends = []  # (time, seconds waited until then, tokens) of each step
    for step in range(1, 5 * WINDOW_STEPS):
        before = now
        meter.next_batch(batches)
        waited += (now - before) * ready  # a device at work waits for nothing
        ready = bool(random.integers(2))
        sizes = {"num_tokens": int(random.integers(1, 90)), "num_slots": 90}
        values = dict.fromkeys(TOLD, 1.0) | sizes
        measured = {name: OnDevice(value, ready) for name, value in values.items()}
        meter.push(measured)
        next(batches)
        if unread is not None:
            meter.read(step - 1, unread)
            ends.append((now, waited, unread["num_tokens"].value))
        unread = measured
        if step % 37 == 0:
            next(batches)
            meter.restart()
            ends = [(now, waited, 0)]
        rates, last = meter.rates(), ends[-WINDOW_STEPS - 1 :]
        if len(last) < 2:
            assert rates["tokens_per_second"] is rates["mfu"] is rates["data_wait"] is None
            continue
        seconds, tokens = last[-1][0] - last[0][0], sum(one[2] for one in last[1:])
        assert rates["tokens_per_second"] == pytest.approx(tokens / seconds)
        assert rates["mfu"] == pytest.approx(3 * tokens / seconds / 10)
        assert rates["mfu_palm"] == pytest.approx(90 * (len(last) - 1) / seconds / 10)
        assert rates["data_wait"] == pytest.approx((last[-1][1] - last[0][1]) / seconds)


def test_adapters_cost_more_by_either_count(tmp_path, monkeypatch):
    """Of tokens by the exact one, of slots by that of PaLM; a step of a second here."""
    now = 0
    monkeypatch.setattr(meters, "time", SimpleNamespace(perf_counter=lambda: now))
    monkeypatch.setattr(engines, "peak_flops", lambda device: 1e12)
    config = settings(tmp_path, lora=LoraConfig(rank=2))
    run = Trainer(MODEL, config, Arithmetic(), mesh=MESH)
    sizes = {"num_tokens": 30, "num_slots": 96, "seq_length": LENGTH, "attended": 77}
    values = dict.fromkeys(TOLD, 1.0) | sizes
    meter = run.meter()
    for now in (1, 2):
        meter.read(now, {name: OnDevice(value, True) for name, value in values.items()})
    rates, adapted = meter.rates(), sum(leaf.size for leaf in run.layout.params.values())
    more = adapter_flops(MODEL, adapted)
    assert rates["mfu"] == pytest.approx((flops_from_sums(MODEL, 30, 77) + 30 * more) / 1e12)
    palm = palm_flops_per_step(MODEL, 96, LENGTH) + 96 * more
    assert rates["mfu_palm"] == pytest.approx(palm / 1e12)


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


@pytest.mark.parametrize("kind", ["evaluation", "look"])
def test_the_time_of_an_evaluation_is_none_of_training(kind, tmp_path, monkeypatch):
    """By a clock that counts its readings, on which an evaluation takes a million: rates count
    from behind it.
    """
    now = 0

    def clock() -> int:
        nonlocal now
        now += 1
        return now

    monkeypatch.setattr(meters, "time", SimpleNamespace(perf_counter=clock))

    def hold_up() -> None:
        nonlocal now
        now += 10**6

    class Looks(Callback):
        def on_dispatch(self, event: TrainEvent) -> None:
            if event.step == 3:
                event.control.look()

        def on_look(self, event: TrainEvent) -> None:
            hold_up()

    class Held(Arithmetic):
        def batch(self, t: int) -> dict:
            hold_up()
            return super().batch(t)

    config = settings(tmp_path, steps=6, eval_every=3)
    evals, callbacks = ({"held": Held(2)}, []) if kind == "evaluation" else (None, [Looks()])
    Trainer(Tiny, config, Arithmetic(), evals, mesh=MESH, callbacks=callbacks).run()
    assert now > 10**6
    rates = [one["tokens_per_second"] for one in read_metrics(tmp_path / "metrics.jsonl")[3:5]]
    told = [rate for rate in rates if rate]
    assert told, "no rate was told behind the evaluation"
    assert min(told) > 1


@pytest.mark.parametrize("known", sorted(devices._DEVICES))
def test_a_device_is_known_by_the_longest_name_that_fits(known: str) -> None:
    for kind in (known, f"{known} 80GB HBM3"):
        assert devices.known_device(kind) is devices._DEVICES[known]
