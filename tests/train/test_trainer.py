from __future__ import annotations

import gc
import logging
import math
import re
import shutil
import signal
import threading
import weakref
from operator import attrgetter

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from easypipe.core.errors import ConfigError, PlacementError, StateError, TrainError
from easypipe.train import state as states
from easypipe.train.checkpoint.differences import differences
from easypipe.train.config import CheckpointConfig, LossConfig, OptimizerConfig
from easypipe.train.losses.loss import loss_sums
from easypipe.train.metrics.devices import out_of_memory
from easypipe.train.metrics.log import read_metrics
from easypipe.train.model.config import LoraConfig
from easypipe.train.model.decoder import Decoder, ModelConfig
from easypipe.train.model.pretrained import origin
from easypipe.train.parallel.mesh import make_mesh
from easypipe.train.signals import Interrupted, StopSignals
from easypipe.train.trainer import Trainer
from train.runs import LENGTH, ROWS, Arithmetic, Tiny, numbers, settings

MESH = make_mesh({"data": 1}, devices=jax.devices()[:1])
STEPS = 12


def trainer(folder, *, model=Tiny, train=None, evals=None, listener=lambda event: None, **changes):
    # not `or`, which would ask an endless loader for its length
    train = Arithmetic() if train is None else train
    return Trainer(model, settings(folder, **changes), train, evals, listener=listener, mesh=MESH)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One whole run, looked at by many tests."""
    folder = tmp_path_factory.mktemp("finished")
    events = []
    held = {"held": Arithmetic(3, seed=9, last=3)}
    result = trainer(folder, evals=held, eval_every=5, listener=events.append).run()
    return folder, result, events


def test_a_run_leaves_metrics_plot_checkpoints_and_a_better_model(finished):
    folder, result, _ = finished
    records = read_metrics(folder / "metrics.jsonl")
    assert [r["step"] for r in records] == list(range(1, STEPS + 1))
    assert (result.first, result.last, result.resumed_from) == (records[0], records[-1], None)
    assert result.last["loss"] < 0.7 * result.first["loss"]
    assert [r["step"] for r in records if "eval" in r] == [5, 10, 12]
    assert all(r["ppl"] == math.exp(r["nll"]) for r in records)
    assert records[0]["tokens_per_second"] is None
    assert all(
        r["tokens_per_second"] > 0 and 0 <= r["data_wait"] <= 1 and r["mfu"] is None
        for r in records[1:]
    )
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["12", "8"]
    for r, t in zip(records, range(1, STEPS + 1), strict=True):
        batch = Arithmetic().batch(t)
        tokens = (batch["segment_ids"] > 0).sum()
        assert (r["fill"], r["trained_share"]) == (
            tokens / (ROWS * LENGTH),
            (batch["labels"] != -100).sum() / tokens,
        )
    assert result.output_dir == folder
    assert result.checkpoint.is_dir()
    assert result.plot.read_bytes()[:4] == b"\x89PNG"
    assert result.model.hidden(np.zeros((1, 3), np.int32)).shape == (1, 3, 8)


def test_equal_runs_begin_by_one_program_and_others_by_their_own(tmp_path, monkeypatch):
    built = []

    class Counted(Decoder):
        def __init__(self, *arguments, **options):
            built.append(self)
            super().__init__(*arguments, **options)

    monkeypatch.setattr(origin, "Decoder", Counted)
    model = {"vocab_size": 32, "hidden_size": 8, "num_layers": 1, "num_heads": 1, "num_kv_heads": 1}

    def begun(sizes=(), own=None, **changes):
        """The first state, and how often a module was built for it."""
        options = settings(tmp_path, **{"optimizer": OptimizerConfig()} | changes)
        config = ModelConfig(**model | dict(sizes))
        run = Trainer(config, options, Arithmetic(), mesh=MESH, optimizer=own)
        built.clear()
        with states.on(run.mesh, run.rules):
            return states.flatten(run.fresh()), len(built)

    (first, once), (again, never) = begun(), begun()
    assert (once, never) == (1, 0)
    jax.tree.map(np.testing.assert_array_equal, first, again)
    array = weakref.ref(again.pop("params/embedding"))
    del again
    gc.collect()
    assert array() is None, "what is kept holds no array"
    other, once = begun(seed=1)
    assert once == 1
    assert not np.array_equal(other["params/embedding"], first["params/embedding"])
    changes = [
        {"sizes": {"tie_embeddings": True}},
        {"own": optax.sgd(0.1)},
        {"own": optax.sgd(0.1)},
        {"optimizer": OptimizerConfig(name="lion")},
        {"steps": 13},
        {"lora": LoraConfig(rank=2, targets=["*"])},
        {"mesh": {"data": 1, "axis_rules": {"embed": None}}},
        {"accumulate_steps": 2},  # no matter of the first state
    ]
    assert [begun(**one)[1] for one in changes] == [1, 1, 1, 1, 1, 1, 1, 0]


def test_listeners_hear_the_run_in_order(finished):
    _, _, events = finished
    kinds = [(e.kind, e.step) for e in events if e.kind in ("start", "checkpoint", "end")]
    assert kinds == [
        ("start", 0),
        ("checkpoint", 4),
        ("checkpoint", 8),
        ("checkpoint", 12),
        ("end", 12),
    ]
    assert [e.record["batches"] for e in events if e.kind == "eval"] == [1, 2, 3] * 3


class Weightless(Arithmetic):
    """The same; no label counts."""

    def batch(self, t):
        known = super().batch(t)
        return {**known, "loss_weights": np.zeros(known["labels"].shape, np.float32)}


class Weighted(Arithmetic):
    """The same; some labels count more than others."""

    def batch(self, t):
        batch = super().batch(t)
        random = np.random.default_rng(t)
        weights = random.choice([0, 0.5, 3 * t], batch["labels"].shape)
        return batch | {"loss_weights": weights.astype(np.float32)}


def exact_loss(model, loader):
    """(mean over all targets of all batches, their number), in float64."""
    total, weight, targets = 0.0, 0.0, 0
    for t in range(1, len(loader) + 1):
        batch = loader.batch(t)
        logits = np.asarray(model.hidden(batch["input_ids"]), np.float64) @ np.asarray(
            model.lm_head(), np.float64
        )
        logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        rows, slots = np.nonzero(batch["labels"] != -100)
        weights = batch.get("loss_weights", np.ones(batch["labels"].shape))[rows, slots]
        total -= (weights * logp[rows, slots, batch["labels"][rows, slots]]).sum()
        weight, targets = weight + weights.sum(), targets + len(rows)
    return total / weight, targets


def test_evaluation_weighs_tokens_and_takes_the_short_last_batch(finished):
    _, result, _ = finished
    loss, targets = exact_loss(result.model, Arithmetic(3, seed=9, last=3))
    assert result.last["eval"]["held"]["num_targets"] == targets
    assert result.last["eval"]["held"]["loss"] == pytest.approx(loss, rel=1e-5)


def test_several_held_out_sets_are_each_evaluated_whole(tmp_path):
    held = {
        "uneven": Arithmetic(3, seed=9, last=1),
        "one": Arithmetic(1, seed=5, last=2),
        "even": Arithmetic(2, seed=6),
        "weighted": Weighted(3, seed=7),
    }
    options = {"steps": 4, "eval_every": 2, "loss": LossConfig(z_loss=0.1)}
    result = trainer(tmp_path, evals=held, **options).run()
    assert [list(r["eval"]) for r in read_metrics(tmp_path / "metrics.jsonl") if "eval" in r] == [
        list(held),
        list(held),
    ]
    for name, loader in held.items():
        nll, targets = exact_loss(result.model, loader)
        found = result.last["eval"][name]
        assert (found["num_targets"], found["nll"]) == (targets, pytest.approx(nll, rel=1e-5))
        assert found["ppl"] == pytest.approx(math.exp(nll), rel=1e-5)
        assert found["loss"] > 1.01 * nll


def test_a_finished_run_is_not_run_again(finished, tmp_path):
    folder, result, _ = finished
    shutil.copytree(folder, tmp_path / "run")
    loader = Arithmetic()
    again = trainer(
        tmp_path / "run", train=loader, evals={"held": Arithmetic(3)}, eval_every=5
    ).run()
    assert (again.resumed_from, loader.t) == (STEPS, STEPS)
    same = attrgetter("steps", "first", "last", "tokenizer", "seen")  # that tell of all its steps
    assert same(again) == same(result)
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == (folder / "metrics.jsonl").read_bytes()


class Stop(Exception):
    pass


class Counted(Arithmetic):
    def state(self):
        return {0: self.t}


@pytest.mark.parametrize("stop", [1, 4, 7, 8, 11])
def test_stopped_anywhere_the_curve_goes_on_bit_for_bit(finished, tmp_path, stop):
    folder, _, _ = finished

    def listener(event):
        if event.kind == "step" and event.step == stop:
            raise Stop

    held = {"held": Arithmetic(3, seed=9, last=3)}
    with pytest.raises(Stop):
        trainer(tmp_path, evals=held, eval_every=5, listener=listener).run()
    result = trainer(tmp_path, evals={"held": Arithmetic(3, seed=9, last=3)}, eval_every=5).run()
    assert result.resumed_from == (None if stop < 4 else (stop - 1) // 4 * 4 or None)
    assert numbers(read_metrics(tmp_path / "metrics.jsonl")) == numbers(
        read_metrics(folder / "metrics.jsonl")
    )


def test_dropout_and_micro_batches_resume_bit_for_bit(tmp_path):
    def dropping(rngs):
        return Tiny(rngs, dropout=0.3)

    def listener(event):
        if event.kind == "step" and event.step == 6:
            raise Stop

    how = {"model": dropping, "accumulate_steps": 2, "steps": 9}
    trainer(tmp_path / "whole", **how).run()
    with pytest.raises(Stop):
        trainer(tmp_path / "cut", **how, listener=listener).run()
    assert trainer(tmp_path / "cut", **how).run().resumed_from == 4
    whole, cut = (
        numbers(read_metrics(tmp_path / name / "metrics.jsonl")) for name in ("whole", "cut")
    )
    assert whole == cut


def test_handlers_of_signals_are_a_run_s_while_it_runs():
    def handlers():
        return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    before = handlers()
    with StopSignals() as stop:
        assert all(one == stop._receive for one in handlers())
    assert (handlers(), stop.received) == (before, None)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_leaves_with_its_code(finished, tmp_path, signum):
    folder, _, _ = finished
    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]

    def listener(event):
        if event.kind == "step" and event.step == 6:
            signal.raise_signal(signum)

    with pytest.raises(
        Interrupted,
        match=rf"step 7: stopped by {signum.name}, saved in .*Run the same command again",
    ) as stopped:
        trainer(tmp_path, listener=listener).run()
    assert stopped.value.exit_code == 128 + signum
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert trainer(tmp_path).run().resumed_from == 7
    whole, cut = (read_metrics(at / "metrics.jsonl") for at in (folder, tmp_path))
    assert [r["loss"] for r in whole] == [r["loss"] for r in cut]


@pytest.mark.parametrize("at", [5, 10, STEPS])
def test_an_evaluation_that_a_signal_left_out_is_made_when_the_run_continues(
    finished, tmp_path, at, caplog
):
    folder, whole, _ = finished

    def run(listener=lambda event: None):
        held = {"held": Arithmetic(3, seed=9, last=3)}
        return trainer(tmp_path, evals=held, eval_every=5, listener=listener).run()

    def stopping(event):
        if event.kind == "step" and event.step == at - 1:
            signal.raise_signal(signal.SIGTERM)

    def failing(event):
        if event.kind == "evaluated":
            raise Stop

    with pytest.raises(Interrupted, match=f"step {at}: stopped by SIGTERM"):
        run(stopping)
    with pytest.raises(Stop):
        run(failing)
    for _ in range(2):
        assert run().last["eval"] == whole.last["eval"]
    cut, uncut = (numbers(read_metrics(one / "metrics.jsonl")) for one in (tmp_path, folder))
    assert cut == uncut
    assert "damaged" not in caplog.text


def test_off_the_main_thread_a_run_works_too(tmp_path):
    results = []
    thread = threading.Thread(target=lambda: results.append(trainer(tmp_path, steps=3).run()))
    thread.start()
    thread.join(timeout=120)
    assert results[0].steps == 3


def test_lines_every_few_steps_and_the_last(finished, tmp_path):
    folder, _, _ = finished
    trainer(tmp_path, log_every=5).run()
    whole = {r["step"]: r["loss"] for r in read_metrics(folder / "metrics.jsonl")}
    assert [(r["step"], r["loss"]) for r in read_metrics(tmp_path / "metrics.jsonl")] == [
        (s, whole[s]) for s in (5, 10, 12)
    ]


def test_a_held_out_loader_serves_one_run_after_another(tmp_path):
    evals = {"held": Arithmetic(3, seed=9)}
    first, second = (trainer(tmp_path / name, evals=evals, steps=3).run() for name in "ab")
    assert first.last["eval"] == second.last["eval"]


def test_steps_default_to_the_length_of_the_loader(tmp_path):
    assert trainer(tmp_path, steps=None, train=Arithmetic(5)).run().steps == 5


def test_a_batch_without_targets_is_refused_and_not_saved(tmp_path):
    with pytest.raises(TrainError, match=r"step 8: every label of the batch is ignored \(-100\)"):
        trainer(tmp_path, train=Arithmetic(blank=8)).run()
    assert [r["step"] for r in read_metrics(tmp_path / "metrics.jsonl")] == list(range(1, 8))
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["4"]
    with pytest.raises(TrainError, match=r"step 1: every label of the batch .* or has weight 0"):
        trainer(tmp_path / "weights", train=Weightless()).run()


def test_a_loss_that_is_not_finite_names_its_step(tmp_path):
    with pytest.raises(
        TrainError, match=r"step 5: the loss is not finite.* Lower train\.optimizer\.learning_rate"
    ):
        trainer(tmp_path, train=Arithmetic(bad=5), on_nonfinite="stop").run()
    assert trainer(tmp_path, resume_changes=("train.on_nonfinite",)).run().resumed_from == 4


def test_lines_that_are_lost_before_a_resume_are_told(copied, caplog):
    path = copied / "metrics.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[2:]))
    trainer(copied, steps=14, resume_changes=("train.steps",)).run()
    assert "metrics.jsonl: damaged: up to step 12 it lacks lines" in caplog.text


def test_held_out_batches_without_targets_are_refused(tmp_path):
    with pytest.raises(TrainError, match=r"eval\.held: no label to predict in 1 batches"):
        trainer(tmp_path, steps=3, evals={"held": Arithmetic(1, blank=1)}).run()
    with pytest.raises(TrainError, match=r"eval\.held: no label with a weight above 0 to predict"):
        trainer(tmp_path / "weights", steps=3, evals={"held": Weightless(1)}).run()


def test_a_loader_that_ends_early_is_told(tmp_path):
    class Short(Arithmetic):
        def __iter__(self):
            yield self.batch(1)

    with pytest.raises(TrainError, match=r"step 2: the loader ended, 12 steps were asked for"):
        trainer(tmp_path, train=Short()).run()


def test_what_cannot_run_is_refused_before_anything_is_made(tmp_path):
    cases = [
        (
            {"steps": None},
            ConfigError,
            "train.steps: not given, and the loader never ends. Say how many steps to train.",
        ),
        (
            {"train": Arithmetic(5)},
            ConfigError,
            "train.steps: 12 steps, but the loader ends after 5 batches. Give at most 5, or a loader "
            "that never ends (data.load.num_epochs: null; without mix.max_epochs).",
        ),
        (
            {"evals": {"held": Arithmetic()}},
            ConfigError,
            "train.eval_batches: held-out loader 'held' never ends.",
        ),
        (
            {"train": Counted()},
            ConfigError,
            "loader Counted.state(): is not plain JSON: its key 0 would be read back as a text",
        ),
        (
            {"accumulate_steps": 3},
            PlacementError,
            "batch_size: 8 rows do not divide by the mesh (data 1, fsdp 1) times accumulate_",
        ),
        (
            {"resume_changes": ("train.step",)},
            ConfigError,
            "train.resume_changes: 'train.step' is nothing that a checkpoint",
        ),
        ({"model": ModelConfig()}, ConfigError, "vocab_size: not known"),
    ]
    for changes, kind, message in cases:
        with pytest.raises(kind) as error:
            trainer(tmp_path / "never", **changes)
        assert str(error.value).startswith(message)
    assert not (tmp_path / "never").exists()
    trainer(tmp_path / "never", evals={"held": Arithmetic()}, eval_batches=2)


@pytest.fixture
def copied(finished, tmp_path):
    shutil.copytree(finished[0], tmp_path / "run")
    return tmp_path / "run"


def test_a_checkpoint_of_another_run_is_refused_with_the_differences(copied):
    with pytest.raises(StateError) as error:
        trainer(
            copied, steps=14, optimizer=OptimizerConfig(learning_rate=0.01, warmup_steps=2)
        ).run()
    assert (
        "belongs to another run: train.optimizer.learning_rate: 0.01 here, 0.03 in the checkpoint; "
        in str(error.value)
    )
    assert "train.steps: 14 here, 12 in the checkpoint" in str(error.value)
    with pytest.raises(StateError, match=r"loader\.batch_size: 4 here, 8 in the checkpoint"):
        trainer(copied, train=Arithmetic(batch_size=4)).run()
    with pytest.raises(
        StateError, match=r"model\.\w+: .* here|model: .* here, None in the checkpoint"
    ):
        trainer(
            copied, model=ModelConfig(vocab_size=32, hidden_size=8, num_heads=1, num_kv_heads=1)
        ).run()


def test_options_of_evaluation_without_held_out_data_are_warned_of(tmp_path, caplog):
    trainer(tmp_path, eval_every=5)
    assert caplog.messages == [
        "train.eval_every: has no effect, because no data is held out (eval)"
    ]


def test_what_resume_changes_names_may_change(copied, caplog):
    with caplog.at_level(logging.WARNING, logger="easypipe"):
        result = trainer(copied, steps=14, resume_changes=("train.steps",)).run()
    assert (result.resumed_from, result.steps) == (12, 14)
    assert (
        "resumed at step 12 with changes: train.steps: 14 here, 12 in the checkpoint" in caplog.text
    )
    assert [r["step"] for r in read_metrics(copied / "metrics.jsonl")] == list(range(1, 15))


def test_every_key_path_that_a_refusal_names_may_be_listed(copied, caplog):
    groups = [{"match": "norm*", "weight_decay": 0.1}, {"match": "*", "learning_rate_scale": 0.5}]
    changed = {
        "optimizer": {"learning_rate": 0.01, "warmup_steps": 2, "groups": groups},
        "steps": 14,
    }
    with pytest.raises(StateError, match=r"list it in train\.resume_changes") as error:
        trainer(copied, **changed).run()
    named = re.findall(r"(train\.\S+): ", str(error.value))
    assert named == ["train.optimizer.learning_rate", "train.optimizer.groups", "train.steps"]
    assert trainer(copied, **changed, resume_changes=tuple(named)).run().resumed_from == 12
    groups = [groups[0], {"match": "*", "learning_rate_scale": 0.25}]
    changed |= {"optimizer": {"learning_rate": 0.01, "warmup_steps": 2, "groups": groups}}
    with pytest.raises(
        StateError,
        match=r"run: train\.optimizer\.groups\.1\.learning_rate_scale: 0\.25 here, 0\.5 in the "
        r"checkpoint\. Ch",
    ):
        trainer(copied, **changed).run()
    trainer(
        copied, **changed, resume_changes=("train.optimizer.groups.1.learning_rate_scale",)
    ).run()
    # keys that only the checkpoint has
    for schedule in ({"schedule": "polynomial", "power": 3.0}, {"schedule": "wsd"}, {}):
        changed |= {"optimizer": {"learning_rate": 0.01, "warmup_steps": 2} | schedule}
        changed["steps"] += 1
        with pytest.raises(StateError) as error:
            trainer(copied, **changed).run()
        [pasted] = re.findall(r"resume_changes=\[(\S+)\]", str(error.value))
        trainer(copied, **changed, resume_changes=tuple(pasted.split(","))).run()
    assert "train.optimizer.cooldown_shape" in pasted
    with pytest.raises(
        ConfigError,
        match=r"'train\.optimizer\.learning_rat' is nothing .*Did you mean "
        r"'train\.optimizer\.learning_rate'\?",
    ):
        trainer(copied, resume_changes=("train.optimizer.learning_rat",))


def test_lists_of_sections_are_compared_entry_by_entry():
    saved = {"datasets": [{"name": "a", "files": ["x"]}, {"name": "b"}], "shape": [1, 2]}
    assert differences(
        saved, {"datasets": [{"name": "a", "files": ["y"]}, {"name": "b"}], "shape": [1, 2]}
    ) == {"datasets.0.files": "['y'] here, ['x'] in the checkpoint"}
    assert differences(saved, {"datasets": [{"name": "a", "files": ["x"]}], "shape": [2, 1]}) == {
        "datasets": "1 of them here, 2 in the checkpoint",
        "shape": "[2, 1] here, [1, 2] in the checkpoint",
    }


def test_resume_false_refuses_a_folder_with_a_run(copied):
    with pytest.raises(
        ConfigError, match=r"train\.resume: .* holds a run at step 12, and resume is false"
    ):
        trainer(copied, resume=False).run()


def test_arrays_of_another_shape_are_listed(copied):
    class Wider(Tiny):
        def __init__(self, rngs):
            super().__init__(rngs)
            self.layers[0] = nnx.Linear(8, 8, rngs=rngs)

    with pytest.raises(
        StateError,
        match=r"holds other arrays: params/layers\.0\.bias: float32\[8\] here, float32\[16\] in "
        r"the checkpoint",
    ):
        trainer(copied, model=Wider).run()


@pytest.mark.parametrize("part", ["arrays", "run"])
def test_a_damaged_checkpoint_is_set_aside_with_a_warning(copied, finished, caplog, part):
    shutil.rmtree(copied / "checkpoints/12" / part)
    with caplog.at_level(logging.WARNING, logger="easypipe"):
        result = trainer(copied, evals={"held": Arithmetic(3, seed=9, last=3)}, eval_every=5).run()
    assert result.resumed_from == 8
    assert "checkpoints/12: cannot be read" in caplog.text
    assert "; moved to" in caplog.text
    assert "checkpoints-damaged/12, continuing from step 8" in caplog.text
    assert (copied / "checkpoints-damaged/12").is_dir()
    assert sorted(p.name for p in (copied / "checkpoints").iterdir()) == ["12", "8"]
    assert numbers(read_metrics(copied / "metrics.jsonl")) == numbers(
        read_metrics(finished[0] / "metrics.jsonl")
    )


def test_when_no_checkpoint_can_be_read_nothing_begins_anew(copied):
    for step in ("8", "12"):
        (copied / "checkpoints" / step / "run/data.json").write_text("{")
    before = (copied / "metrics.jsonl").read_bytes()
    with pytest.raises(StateError, match=r"checkpoints/12: cannot be read"):
        trainer(copied).run()
    assert (copied / "metrics.jsonl").read_bytes() == before
    assert sorted(p.name for p in (copied / "checkpoints").iterdir()) == ["12", "8"]


def test_keep_and_every_are_obeyed(tmp_path):
    trainer(tmp_path / "one", checkpoint=CheckpointConfig(every=3, keep=3)).run()
    assert sorted(int(p.name) for p in (tmp_path / "one/checkpoints").iterdir()) == [6, 9, 12]
    trainer(tmp_path / "two", checkpoint=CheckpointConfig(every=None)).run()
    assert [p.name for p in (tmp_path / "two/checkpoints").iterdir()] == ["12"]


def test_a_trained_module_can_be_trained_on(finished, tmp_path):
    _, result, _ = finished
    more = trainer(tmp_path, model=result.model, steps=3).run()
    assert more.first["loss"] < 1.1 * result.last["loss"]
    assert not result.model.table.embedding[...].is_deleted()


def test_batches_are_what_the_tests_say():
    batch = Arithmetic(2).batch(1)
    assert batch["labels"].shape == (ROWS, LENGTH)
    assert 0 < (batch["labels"] != -100).sum() < batch["segment_ids"].sum() < ROWS * LENGTH


def test_out_of_memory_says_what_is_held_and_what_to_change(tmp_path):
    class Huge(Tiny):
        def __init__(self, rngs):
            super().__init__(rngs)
            self.more = nnx.Param(jax.numpy.zeros((1 << 24, 1 << 20)))

    def hungry(module, batch):
        out = loss_sums(module, batch)
        large = jax.lax.broadcasted_iota(jax.numpy.float32, (1 << 30, 1 << 14), 0)
        sorted_ = jax.numpy.sort(jax.lax.stop_gradient(large * out.loss_sum), axis=0)
        return out._replace(loss_sum=out.loss_sum + 0 * sorted_[0, 0])

    heard = []
    message = (
        r"^step [12]: a device is out of memory.* holds parameters .*: "
        r"data\.load\.accumulation_steps: 2 "
    )
    for run in (
        trainer(tmp_path / "state", model=Huge),
        Trainer(Tiny, settings(tmp_path / "step"), Arithmetic(), loss=hungry, mesh=MESH),
    ):
        run.listener = heard.append
        with pytest.raises(TrainError, match=message) as error:
            run.run()
        assert heard[-1].kind == "exception"
        assert "TrainError: step " in heard[-1].record["error"]
    assert "optimizer" in str(error.value)
    assert isinstance(error.value.__cause__, jax.errors.JaxRuntimeError)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "RESOURCE_EXHAUSTED: while allocating 2500 bytes.",
            "memory (2.5 kB more were asked for):",
        ),
        (
            "INTERNAL: Out of memory trying to allocate 1.5GiB",
            "memory (1.5GiB more were asked for):",
        ),
        ("INTERNAL: CUDA error: out of memory", "is out of memory: it holds parameters"),
        ("INTERNAL: another error", None),
    ],
)
def test_out_of_memory_is_told_from_what_every_device_says(tmp_path, text, says):
    made = trainer(tmp_path)
    known = made.layout, made.optimizer, made.config, None, ROWS
    error = out_of_memory(jax.errors.JaxRuntimeError(text), 3, *known)
    assert error is None if says is None else says in str(error)
    assert out_of_memory(MemoryError(text), 3, *known) is None
