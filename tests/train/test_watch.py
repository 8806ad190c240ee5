from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from easypipe.core import storage
from easypipe.core.config import from_dict
from easypipe.core.errors import ConfigError, StateError, TrainError
from easypipe.train import state as states
from easypipe.train.checkpoint import checkpoint
from easypipe.train.checkpoint.checkpoint import Checkpoints
from easypipe.train.config import CheckpointConfig, OptimizerConfig, SpikeConfig, TrainingConfig
from easypipe.train.events import Callback, TrainEvent
from easypipe.train.metrics.log import read_metrics
from easypipe.train.parallel.mesh import make_mesh, place_batch
from easypipe.train.record import read_changes
from easypipe.train.report.page import write_report
from easypipe.train.spike_guard import SpikeGuard
from easypipe.train.trainer import Trainer
from train.runs import Arithmetic, Tiny, numbers, settings

MESH = make_mesh({"data": 1}, devices=jax.devices()[:1])


class Shaken(Arithmetic):
    """Batches of `bad_steps` have labels outside the vocabulary; those of `odd_steps` teach
    something else, at a high loss.
    """

    def __init__(self, bad_steps=(), odd_steps=(), **how):
        super().__init__(**how)
        self.bad_steps, self.odd_steps = bad_steps, odd_steps

    def batch(self, t):
        batch = super().batch(t)
        if t in self.bad_steps:
            batch["labels"][0, 0] = 37
        if t in self.odd_steps:
            batch["labels"] = np.where(
                batch["labels"] >= 0, (batch["labels"] * 7 + 11) % 32, -100
            ).astype(np.int32)
        return batch


def trainer(folder, train, *, listener=lambda event: None, **changes):
    return Trainer(Tiny, settings(folder, **changes), train, listener=listener, mesh=MESH)


def lines(folder):
    return numbers(read_metrics(folder / "metrics.jsonl"))


def kept_of(folder, step):
    """What the checkpoint of a step has besides arrays, without what differs from run to run: its
    folder, and lines that hold times.
    """
    with Checkpoints(folder / "checkpoints", keep=None) as checkpoints:
        found = checkpoints.run(step)
    apart = {"train": found["train"] | {"output_dir": None}}
    return found | apart | {"lines": found["lines"]["rollbacks.jsonl"]}


def test_a_step_that_is_not_finite_leaves_the_state_as_it_was(tmp_path):
    run = trainer(tmp_path, Shaken())
    with states.on(MESH):
        state = run.fresh()
        state, _ = run.train_step(state, place_batch(Shaken().batch(1), MESH))
        before = jax.device_get(states.flatten(state))
        state, measured = run.train_step(state, place_batch(Shaken((2,)).batch(2), MESH))
        after = jax.device_get(states.flatten(state))
        assert math.isnan(float(measured["loss"]))
        assert int(measured["updates"]) == int(after["step"]) == 1
        assert before.keys() == after.keys()
        assert all(np.array_equal(before[name], after[name]) for name in before)
        state, measured = run.train_step(state, place_batch(Shaken().batch(3), MESH))
    assert int(measured["updates"]) == 2
    assert not np.array_equal(
        before["params/table.embedding"], jax.device_get(state.params["table.embedding"])
    )


def test_skipped_steps_are_counted_and_the_others_are_those_of_a_run_without_them(tmp_path, caplog):
    result = trainer(tmp_path / "shaken", Shaken((3, 4, 7))).run()
    records = lines(tmp_path / "shaken")
    assert [r["step"] for r in records if r["loss"] is None] == [3, 4, 7]
    assert [r["skipped"] for r in records] == [0, 0, 1, 2, 2, 2, 3, 3, 3, 3, 3, 3]
    assert caplog.text.count("skipped, its loss is not finite at learning rate") == 3
    assert result.plot.exists()

    class Without(Arithmetic):
        def __iter__(self):
            for t in (1, 2, 5, 6, 8, 9, 10, 11, 12):
                yield self.batch(t)

    trainer(tmp_path / "without", Without(), steps=9, optimizer=settings("x").optimizer).run()
    sound = [r for r in records if r["loss"] is not None]
    # the schedules end elsewhere
    assert [r["loss"] for r in sound[:4]] == [r["loss"] for r in lines(tmp_path / "without")[:4]]


def test_too_many_in_a_row_stop_the_run(tmp_path):
    with pytest.raises(
        TrainError,
        match=r"step 6: 3 steps in a row were skipped: the loss is not finite at learning rate "
        r".*Lower train\.",
    ):
        trainer(tmp_path, Shaken((2, 4, 5, 6)), max_nonfinite=3).run()


def test_an_update_that_loses_the_parameters_stops_the_run_before_it_is_saved(tmp_path):
    """Loss and gradient are finite, what the optimizer makes of them is not: skipping every later
    step would not help.
    """
    breaks = optax.stateless(
        lambda updates, params: jax.tree.map(lambda u: -0.1 * u / (jnp.abs(u).max() > 0), updates)
    )
    late = optax.chain(optax.scale_by_schedule(lambda k: jnp.where(k < 2, 1.0, 0.0)), breaks)
    config = settings(tmp_path, optimizer=OptimizerConfig(), checkpoint=CheckpointConfig(every=1))
    with pytest.raises(
        TrainError,
        match=r"^step 3: its update left parameters that are not finite\. Lower train\.optimizer\.",
    ):
        Trainer(Tiny, config, Arithmetic(), mesh=MESH, optimizer=late).run()
    with Checkpoints(tmp_path / "checkpoints", keep=None) as checkpoints:
        assert checkpoints.latest() == 2


SPIKES = SpikeConfig(window=4, threshold=6.0, patience=2)
ROUGH = {"odd_steps": (14, 15, 20), "bad_steps": (9, 24, 25)}


class Stop(Exception):
    pass


@pytest.fixture(scope="module")
def rough(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rough")
    events = []
    trainer(folder, Shaken(**ROUGH), steps=30, spikes=SPIKES, listener=events.append).run()
    return folder, events


def test_the_time_of_going_back_is_none_of_training(tmp_path, monkeypatch):
    """Of a clock on which going back takes a quarter of an hour, and a look at it a millisecond."""
    clock, went_back = [0.0], []

    def now():
        clock[0] += 1e-3
        return clock[0]

    def listener(event):
        if event.kind == "rollback":
            clock[0] += 1000.0
            went_back.append(event.step)

    monkeypatch.setattr("easypipe.train.metrics.meter.time", SimpleNamespace(perf_counter=now))
    shaken = Shaken(odd_steps=(14, 15))
    trainer(tmp_path, shaken, steps=18, spikes=SPIKES, listener=listener).run()
    assert went_back == [15]
    rates = [one["tokens_per_second"] for one in read_metrics(tmp_path / "metrics.jsonl")]
    assert min(rate for rate in rates if rate is not None) > 100
    assert any(rates[16:])


def test_a_spike_rolls_back_and_skips_the_window(rough):
    folder, events = rough
    assert [(e.step, e.record["to"]) for e in events if e.kind == "rollback"] == [
        (15, 12),
        (25, 21),
    ]
    records = lines(folder)
    assert [r["step"] for r in records] == list(range(1, 31))
    # 9 was skipped, 13 to 15 were undone; the save that was due at 20, in doubt, was made at 21
    assert [records[i - 1]["skipped"] for i in (8, 9, 15, 16)] == [0, 1, 1, 4]
    books = read_metrics(folder / "rollbacks.jsonl")
    assert [(b["step"], b["to"], b["batch_of_step"]) for b in books if b["step"] == 15] == [
        (15, 12, s) for s in (13, 14, 15)
    ]
    assert records[-1]["loss"] < 1.2 * records[12]["loss"]


def test_the_report_of_a_run_that_went_back_tells_where_and_what_it_skipped(rough, tmp_path):
    text = write_report(rough[0], tmp_path / "page.html").read_text()
    rows = re.findall(
        r"<tr>(.*?)</tr>", text[text.index("<h2>Roll-backs</h2>") : text.index("<h2>Mixture</h2>")]
    )
    cells = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in rows]
    assert [cell[:3] for cell in cells if cell] == [["15", "12", str(i)] for i in (13, 14, 15)] + [
        ["25", "21", str(i)] for i in range(22, 26)
    ]
    assert re.search(r"<td>steps skipped, not finite</td><td[^>]*>\d+</td>", text)
    (numbers,) = json.loads(re.search(r'id="numbers">(.*?)</script>', text)[1])
    assert [mark["step"] for mark in numbers["marks"] if mark["kind"] == "roll-back"] == [
        *range(13, 16),
        *range(22, 26),
    ]


@pytest.mark.parametrize("stop", [9, 15, 20, 25])
def test_stopped_anywhere_a_rough_run_goes_on_bit_for_bit(rough, tmp_path, stop):
    def listener(event):
        if event.kind == "step" and event.step == stop:
            raise Stop

    with pytest.raises(Stop):
        trainer(tmp_path, Shaken(**ROUGH), steps=30, spikes=SPIKES, listener=listener).run()
    trainer(tmp_path, Shaken(**ROUGH), steps=30, spikes=SPIKES).run()
    assert lines(tmp_path) == lines(rough[0])
    assert (tmp_path / "rollbacks.jsonl").read_bytes() == (
        rough[0] / "rollbacks.jsonl"
    ).read_bytes()
    assert kept_of(tmp_path, 30) == kept_of(rough[0], 30)


def test_the_good_checkpoint_is_kept_and_the_documents_are_told(tmp_path):
    class Explaining(Shaken):
        def explain(self, step):  # of batch `step`, counted from 0
            place = {"dataset": "d", "file": "f.txt", "row": step, "token_start": 0}
            row = SimpleNamespace(row=0, segments=[SimpleNamespace(**place, token_stop=9)])
            return SimpleNamespace(rows=[row])

    def listener(event):
        if event.kind == "rollback":
            assert (tmp_path / "checkpoints/12").is_dir()

    loader = Explaining(odd_steps=(14, 15))
    trainer(
        tmp_path,
        loader,
        steps=16,
        spikes=SPIKES,
        listener=listener,
        checkpoint=CheckpointConfig(every=4, keep=1),
    ).run()
    place = {"row_of_batch": 0, "dataset": "d", "file": "f.txt", "token_start": 0, "token_stop": 9}
    assert read_metrics(tmp_path / "rollbacks.jsonl") == [
        {"step": 15, "to": 12, "batch_of_step": step, "documents": [{**place, "row": step - 1}]}
        for step in (13, 14, 15)
    ]


def test_lines_are_on_the_disk_before_a_checkpoint_that_counts_on_them(tmp_path, monkeypatch):
    """When a checkpoint gets its name, all lines up to its step are synced."""
    fsync, synced, seen = os.fsync, {}, []
    files = [tmp_path / "metrics.jsonl", tmp_path / "rollbacks.jsonl"]

    def recorded(descriptor):
        fsync(descriptor)
        found = os.fstat(descriptor)
        synced[found.st_ino] = found.st_size

    def struck(event, path):
        if event == "rename" and Path(path).parent == tmp_path / "checkpoints":
            step = int(Path(path).name)
            told = [file.read_bytes()[: synced.get(file.stat().st_ino, 0)] for file in files]
            seen.append((step, *(told.count(b"\n") for told in told)))

    monkeypatch.setattr(os, "fsync", recorded)
    storage.set_fault_hook(struck)
    try:
        trainer(tmp_path, Shaken(odd_steps=(14, 15)), steps=16, spikes=SPIKES).run()
    finally:
        storage.set_fault_hook(None)
    assert [step for step, _, _ in seen] == [4, 8, 12, 16]
    assert all(lines >= step for step, lines, _ in seen)
    assert seen[-1][2] == 3


def test_a_run_goes_on_under_other_rules_only_where_they_are_named(tmp_path):
    trainer(tmp_path, Shaken(), steps=4, spikes=SPIKES).run()
    wider = SpikeConfig(window=5, threshold=6.0, patience=2)
    allowed = ["train.steps"]
    for changes, told in (
        ({"spikes": None}, "train.spikes: nothing here"),
        ({"spikes": wider}, "train.spikes.window: 5 here, 4 in the checkpoint"),
        (
            {"spikes": SPIKES, "checkpoint": CheckpointConfig(every=2)},
            "train.checkpoint.every: 2 here, 4 in the checkpoint",
        ),
        ({"spikes": SPIKES, "on_nonfinite": "stop"}, "train.on_nonfinite: stop here, skip in"),
    ):
        with pytest.raises(StateError, match=rf"belongs to another run: .*{told}") as error:
            trainer(tmp_path, Shaken(), steps=8, resume_changes=allowed, **changes).run()
        assert f"train.resume_changes=[train.steps,{told.partition(':')[0]}]" in str(error.value)
    allowed = ["train.steps", "train.spikes"]
    trainer(tmp_path, Shaken(), steps=8, spikes=wider, resume_changes=allowed).run()
    assert read_changes(tmp_path)[-1]["changed"]["train.spikes.window"] == "was 4, is 5"
    # the spike guard may go, and later come
    trainer(tmp_path, Shaken(), steps=12, resume_changes=allowed).run()
    trainer(tmp_path, Shaken(), steps=16, spikes=SPIKES, resume_changes=allowed).run()
    assert [one["step"] for one in read_changes(tmp_path)] == [4, 8, 12]


def test_a_batch_is_told_at_its_first_roll_back_and_callbacks_see_what_it_went_back_to(tmp_path):
    seen = {}

    class Looks(Callback):
        def on_dispatch(self, event):
            event.control.look()

        def on_look(self, event):
            seen[event.step] = np.asarray(event.model().table.embedding[...])

    config = settings(tmp_path, steps=20, spikes=SPIKES)
    loader = Shaken(odd_steps=(14, 15, 16, 17))
    Trainer(Tiny, config, loader, callbacks=[Looks()], mesh=MESH).run()
    lines = read_metrics(tmp_path / "rollbacks.jsonl")
    assert [(one["step"], one["to"], one["batch_of_step"]) for one in lines] == [
        *((15, 12, batch) for batch in (13, 14, 15)),
        *((17, 12, batch) for batch in (16, 17)),
    ]
    assert [*seen] == [*range(1, 21)]
    assert np.array_equal(seen[15], seen[12])
    assert np.array_equal(seen[17], seen[12])
    assert not np.array_equal(seen[16], seen[12])


def test_a_run_that_spikes_for_ever_stops(tmp_path):
    loader = Shaken(odd_steps=range(9, 40))
    with pytest.raises(
        TrainError,
        match=r"the loss left its range again after 2 roll-backs\. Lower "
        r"train\.optimizer\.learning_rate",
    ):
        trainer(
            tmp_path,
            loader,
            steps=30,
            spikes=SpikeConfig(window=4, threshold=6.0, patience=2, max_rollbacks=2),
        ).run()


def test_a_run_without_a_checkpoint_goes_back_to_its_start(tmp_path):
    trainer(tmp_path, Shaken(bad_steps=(2, 3)), steps=8, spikes=SPIKES).run()
    assert lines(tmp_path)[3]["skipped"] == 3


def test_a_run_goes_back_to_its_own_start_or_not_at_all(tmp_path):
    def run(seed: int, stop: int | None = None) -> None:
        def listener(event: TrainEvent) -> None:
            if event.kind == "step" and event.step == stop:
                event.control.stop("enough")

        loader = Shaken(bad_steps=(4, 5))
        config = settings(tmp_path, steps=8, spikes=SPIKES)
        Trainer(Tiny(nnx.Rngs(seed)), config, loader, listener=listener, mesh=MESH).run()

    run(0, stop=1)
    with pytest.raises(
        StateError,
        match=r"began with other weights, to which its reference or a roll-back returns: layers",
    ):
        run(1)
    run(0)
    assert lines(tmp_path)[-1]["step"] == 8


def test_the_limit_is_robust(caplog):
    watch = SpikeGuard(TrainingConfig(output_dir="x", spikes=SpikeConfig(window=5, threshold=2.0)))
    record = {"grad_norm": 1.0, "param_norm": 1.0}
    for step, loss in enumerate([1.0, 2.0, 3.0, 4.0, 500.0], start=1):
        assert watch.limit() is None
        watch.judge({"step": step, "loss": loss, **record})
    assert watch.limit() == pytest.approx(3.0 + 2.0 * 1.4826 * 1.0)
    assert not caplog.records
    watch.judge({"step": 6, "loss": 6.0, **record})
    assert caplog.messages == ["step 6: loss 6 is above 5.965, what the last 5 steps allow"]


def test_where_the_patience_is_as_many_steps_as_may_be_skipped_the_run_goes_back():
    spikes = SpikeConfig(patience=3)
    guard = SpikeGuard(TrainingConfig(output_dir="x", spikes=spikes, max_nonfinite=3))
    record = {"loss": None, "grad_norm": 1.0, "param_norm": 1.0}
    assert [guard.judge({"step": step, **record}) for step in (1, 2, 3)] == [False, False, True]


def trailing(flags):
    """How many at the end are True."""
    return next((n for n, flag in enumerate(reversed(flags)) if not flag), len(flags))


@pytest.mark.parametrize("seed", range(40))
def test_a_guard_judges_as_its_rules_say_also_where_it_was_saved_at_every_step(seed):
    """Against lists of all that was, of any losses; each step is judged by a guard that was made
    anew from what the one before it keeps in a checkpoint.
    """
    random = np.random.default_rng(seed)
    window, patience, most = (int(random.integers(2, 5)) for _ in range(3))
    spikes = SpikeConfig(window=window, threshold=4.0, patience=patience, max_rollbacks=most)
    limit = patience + int(random.integers(3))
    config = TrainingConfig(output_dir="x", spikes=spikes, max_nonfinite=limit)
    kept = SpikeGuard(config).state()
    sound, bad, skipped, rollbacks = [], [], [], 0
    for step in range(1, 60):
        loss, grad_norm, param_norm = float(random.normal(9, 1)), 1.0, 1.0
        kind = random.choice(["spike", "loss", "gradient", "parameters"] + ["sound"] * 4)
        loss = None if kind == "loss" else 900.0 if kind == "spike" else loss
        record = {
            "step": step,
            "loss": loss,
            "grad_norm": None if kind == "gradient" else grad_norm,
            "param_norm": None if kind == "parameters" else param_norm,
        }
        highest = math.inf
        if len(sound) >= window:
            middle = np.median(sound[-window:])
            away = np.median(np.abs(np.array(sound[-window:]) - middle))
            highest = middle + 4.0 * 1.4826 * away
        skipped.append(kind in ("loss", "gradient"))
        bad.append(kind not in ("sound", "spike") or loss > highest)
        sound += [] if bad[-1] else [loss]
        back = trailing(bad) >= patience
        rollbacks += back
        ends = rollbacks > most if back else trailing(skipped) >= limit
        guard = SpikeGuard(config)
        guard.restore(json.loads(json.dumps(kept)), step - 1, ())
        if ends:
            with pytest.raises(TrainError):
                guard.judge(record)
            return
        assert guard.judge(record) == back
        if back:
            bad, skipped = [], []
        assert guard.in_doubt == (trailing(bad) > 0)
        kept = guard.state()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"on_nonfinite": "ignore"}, "on_nonfinite: "),
        ({"max_nonfinite": 0}, "max_nonfinite: 0 is too small. Give at least 1."),
        (
            {"max_nonfinite": 4, "on_nonfinite": "stop"},
            "max_nonfinite: has no effect with on_nonfinite: stop",
        ),
        ({"spikes": {"window": 1}}, "spikes.window: 1 is too small. Give at least 2."),
        ({"spikes": {"threshold": 0.0}}, "spikes.threshold: 0.0 is not a positive number"),
        ({"spikes": {"patience": 0}}, "spikes.patience: 0 is too small. Give at least 1."),
        (
            {"spikes": {"max_rollbacks": 0}},
            "spikes.max_rollbacks: 0 is too small. Give at least 1.",
        ),
        (
            {"spikes": {}, "max_nonfinite": 2},
            "max_nonfinite: 2 steps, but spikes.patience waits for 3 bad ones. Give at least 3",
        ),
        (
            {"spikes": {"patience": 11}},
            "spikes.patience: 11 bad steps, but the run stops after 10 that are not finite.",
        ),
    ],
)
def test_bad_values_are_refused(values, message):
    with pytest.raises(ConfigError) as error:
        from_dict(TrainingConfig, {"output_dir": "out", **values})
    assert str(error.value).startswith(message)


def test_what_is_saved_in_doubt_is_not_gone_back_to(tmp_path):
    """A callback asks for a checkpoint at a step of the calendar that is bad: it is saved, and the
    good one stays the one before it.
    """
    went_back = []

    class Asks(Callback):
        def __call__(self, event):
            if event.kind == "dispatch" and event.step == 12:
                event.control.save()
            if event.kind == "rollback":
                went_back.append((event.step, event.record["to"]))

    config = settings(
        tmp_path, steps=16, spikes=SPIKES, checkpoint=CheckpointConfig(every=4, keep=9)
    )
    Trainer(Tiny, config, Shaken(odd_steps=(12, 13)), callbacks=[Asks()], mesh=MESH).run()
    assert went_back == [(13, 8)]


def test_a_checkpoint_of_another_format_is_refused_by_its_number(tmp_path, monkeypatch):
    arrays = {"a": jnp.zeros(3)}
    monkeypatch.setattr(checkpoint, "FORMAT", checkpoint.FORMAT + 1)
    with Checkpoints(tmp_path, keep=None) as newer:
        newer.save(1, arrays, {"step": 1})
    monkeypatch.undo()
    with (
        Checkpoints(tmp_path, keep=None) as ours,
        pytest.raises(StateError, match=rf"format {checkpoint.FORMAT + 1}, this version reads"),
    ):
        ours.run(1)


@pytest.mark.parametrize(("saved", "good"), [((4, 6, 8), 4), ((6, 8), 8)])
def test_a_run_goes_back_to_no_checkpoint_that_is_gone(saved: tuple[int, ...], good: int) -> None:
    config = TrainingConfig(output_dir="x", spikes=SPIKES)
    before = SpikeGuard(config)
    before.good = 4
    guard = SpikeGuard(config)
    guard.restore(json.loads(json.dumps(before.state())), 8, saved)
    assert guard.good == good
