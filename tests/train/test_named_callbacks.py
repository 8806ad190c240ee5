"""Callbacks that a configuration names."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sqlite3
import struct
import sys
import time
from pathlib import Path

import jax
import pytest

from easypipe.core.config import apply_overrides, from_dict
from easypipe.core.errors import ConfigError
from easypipe.train.callbacks.config import BestConfig, CallbacksConfig
from easypipe.train.callbacks.named import (
    BestCheckpoints,
    EarlyStopping,
    EarlyStoppingConfig,
    Heartbeat,
    HeartbeatConfig,
    Known,
    ProfileConfig,
    ProfilerWindow,
    make_callbacks,
)
from easypipe.train.checkpoint.files import ended
from easypipe.train.config import CheckpointConfig, TrainingConfig
from easypipe.train.events import TrainEvent
from easypipe.train.metrics.log import read_metrics
from easypipe.train.parallel.mesh import make_mesh
from easypipe.train.record import read_kept, write_kept
from easypipe.train.trainer import Trainer
from train.runs import Arithmetic, Tiny, settings

MESH = make_mesh({"data": 1}, devices=jax.devices()[:1])


def trainer(folder, callbacks, *, listener=lambda event: None, **changes):
    values = from_dict(TrainingConfig, {"output_dir": str(folder), "callbacks": callbacks})
    config = settings(
        folder,
        callbacks=values.callbacks,
        **{"eval_every": 2, "checkpoint": CheckpointConfig(every=None)} | changes,
    )
    return Trainer(
        Tiny, config, Arithmetic(), {"held": Arithmetic(1, seed=7)}, listener=listener, mesh=MESH
    )


STOPPED = {"steps": 4, "checkpoint": CheckpointConfig(every=2)}


class Stop(Exception):
    pass


def stop_after(step):
    def listener(event):
        if event.kind == "checkpoint" and event.step == step:
            raise Stop

    return listener


def told(control, metric_values, steps=100, begin=1):
    return [
        TrainEvent(
            kind="step",
            step=step,
            steps=steps,
            record={"eval": {"held": {"loss": value}}},
            control=control,
        )
        for step, value in enumerate(metric_values, start=begin)
    ]


@pytest.mark.parametrize(
    ("options", "values", "stops_at"),
    [
        ({"patience": 2}, [3.0, 2.0, 2.0, 2.5], 4),
        ({"patience": 2}, [3.0, 2.0, 2.1, 1.9, 2.0, 1.8], None),
        ({"patience": 2, "min_delta": 0.2}, [3.0, 2.0, 2.1, 1.9, 2.0], 4),
        ({"patience": 1, "mode": "max"}, [1.0, 2.0, 1.5], 3),
        ({"patience": 3}, [1.0, 2.0, 2.0], None),
    ],
)
def test_early_stopping_follows_its_options_and_its_state(options, values, stops_at):
    from easypipe.train.events import Control

    config = EarlyStoppingConfig(metric="eval.held.loss", **options)
    control, stopper = Control(), EarlyStopping(config)
    stopped = None
    for event in told(control, values):
        again = EarlyStopping(config)  # as after a kill between any two values
        again.restore(json.loads(json.dumps(stopper.state())))
        stopper = again
        stopper.on_step(event)
        if control.reason is not None:
            stopped = event.step
            break
    assert stopped == stops_at
    if stopped is not None:  # gone on behind its end it has all of its patience
        control, again = Control(), EarlyStopping(config)
        again.restore(stopper.state())
        for event in told(control, [values[-1]] * config.patience, begin=stopped + 1):
            assert control.reason is None
            again.on_step(event)
        assert control.reason is not None


@pytest.mark.parametrize("names", [("a", "a.b"), ("a.b", "a")])
def test_of_loaders_whose_names_begin_alike_the_metric_names_one(tmp_path, names):
    made = from_dict(CallbacksConfig, {"best": {"metric": "eval.a.b.loss"}})
    evals = {name: Arithmetic(1, seed=len(name)) for name in names}
    run = settings(tmp_path, callbacks=made, eval_every=2, steps=4)
    last = Trainer(Tiny, run, Arithmetic(), evals, mesh=MESH).run().last
    assert read_kept(tmp_path / "best.json")[0]["eval.a.b.loss"] == last["eval"]["a.b"]["loss"]


def test_a_run_stops_early_and_says_why(tmp_path, caplog):
    early = {"metric": "eval.held.loss", "patience": 1, "min_delta": 5.0}
    result = trainer(tmp_path, {"early_stopping": early}).run()
    assert result.steps == 4
    assert "stopped at step 4 of 12: eval.held.loss is" in caplog.text
    assert ended(result.checkpoint)
    assert not ended(result.checkpoint.with_name("0"))
    # run once more it stays there, whatever made it end
    for again in ({"early_stopping": early}, {}):
        caplog.clear()
        assert trainer(tmp_path, again).run().steps == 4
        assert "the run ended at step 4 of 12: eval.held.loss is" in caplog.text
    # what it says to do
    on = trainer(tmp_path, {"early_stopping": early}, resume_changes=("ended",)).run()
    assert on.resumed_from == 4
    assert on.steps == 6, "one evaluation more, as the patience of a new run has it"
    assert trainer(tmp_path, {}, resume_changes=("ended",)).run().steps == 12
    assert not ended(result.checkpoint.with_name("12"))


def test_the_best_checkpoints_are_kept_and_listed(tmp_path):
    callbacks = {
        "best": {"metric": "eval.held.loss", "mode": "max", "keep": 2}
    }  # the first evaluations are the worst ones: never the newest
    how = {"checkpoint": CheckpointConfig(every=5, keep=1)}
    trainer(tmp_path / "whole", callbacks, **how).run()
    with pytest.raises(Stop):
        trainer(tmp_path / "cut", callbacks, listener=stop_after(10), **how).run()
    trainer(tmp_path / "cut", callbacks, **how).run()
    for name in ("whole", "cut"):
        seen = {
            r["step"]: r["eval"]["held"]["loss"]
            for r in read_metrics(tmp_path / name / "metrics.jsonl")
            if "eval" in r
        }
        best = sorted(seen, key=lambda step: -seen[step])[:2]
        listed = read_kept(tmp_path / name / "best.json")
        assert listed == [
            {"step": step, "eval.held.loss": seen[step], "checkpoint": f"checkpoints/{step}"}
            for step in best
        ]
        assert {int(path.name) for path in (tmp_path / name / "checkpoints").iterdir()} == {
            12,
            *best,
        }


def test_best_json_names_only_checkpoints_that_are_there_whole(tmp_path):
    folder, listed = tmp_path / "checkpoints", []

    def listener(event):
        if (tmp_path / "best.json").exists():
            names = [one["checkpoint"] for one in read_kept(tmp_path / "best.json")]
            whole = max(int(path.name) for path in folder.iterdir() if path.name.isdigit())
            assert all(int(name.rpartition("/")[2]) <= whole for name in names), (
                "none that is still being written"
            )
            listed.append(names)

    trainer(
        tmp_path,
        {"best": {"metric": "eval.held.loss"}},
        listener=listener,
        checkpoint=CheckpointConfig(every=None, keep=1),
    ).run()
    assert (
        [one["step"] for one in read_kept(tmp_path / "best.json")]
        == [int(path.name) for path in folder.iterdir()]
        == [12]
    )
    assert ["checkpoints/2"] in listed, "listed when it was whole, and not only at the end"
    assert [] not in listed, "the one before is listed until the next one is whole"


@pytest.mark.parametrize("write", [True, False])
def test_a_list_of_later_steps_goes_where_a_run_goes_back(tmp_path, write):
    write_kept(tmp_path / "best.json", [{"step": 9, "loss": 1.0, "checkpoint": "checkpoints/9"}])
    best = BestCheckpoints(BestConfig(metric="loss"), tmp_path, write=write)
    best.on_init(TrainEvent(kind="init", step=4, steps=12))
    assert (tmp_path / "best.json").exists() is not write, "one process of a run writes"


def test_a_resume_without_the_writers_cuts_their_files_too(tmp_path, caplog):
    """Steps 3 and 4 were of another timeline: their lines go, and so does their checkpoint's entry;
    what best.json still lists is kept while the run goes on. Another's file is left as it is.
    """
    lines = ("rollbacks.jsonl", "samples.jsonl")
    options = {"steps": 8, "checkpoint": CheckpointConfig(every=2, keep=1)}
    best = {"best": {"metric": "eval.held.loss", "mode": "max", "keep": 2}}
    with pytest.raises(Stop):
        trainer(tmp_path, best, listener=stop_after(4), **options).run()
    entries = [{"step": step, "checkpoint": f"checkpoints/{step}"} for step in (2, 4)]
    write_kept(tmp_path / "best.json", entries)
    shutil.rmtree(tmp_path / "checkpoints/4")
    for name in lines:
        (tmp_path / name).write_text("".join(f'{{"step": {step}}}\n' for step in (1, 2, 3, 4)))
    (tmp_path / "lm_eval.jsonl").write_text("no record\n")
    trainer(tmp_path, {}, **options).run()
    for name in lines:
        assert [one["step"] for one in read_metrics(tmp_path / name)] == [1, 2]
    assert "lm_eval.jsonl, line 1: not a metrics record" in caplog.text
    assert (tmp_path / "lm_eval.jsonl").read_text() == "no record\n"
    assert [one["step"] for one in read_kept(tmp_path / "best.json")] == [2]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["2", "8"]

    files = [*lines, "best.json", "metrics.jsonl"]
    before = [(tmp_path / name).read_bytes() for name in files]
    trainer(tmp_path, {}, **options).run()  # it is finished
    assert [(tmp_path / name).read_bytes() for name in files] == before
    shutil.rmtree(tmp_path / "checkpoints")  # begun again
    trainer(tmp_path, {}, **options).run()
    assert [(tmp_path / name).read_bytes() for name in lines] == [b"", b""]
    assert not (tmp_path / "best.json").exists()


def test_an_object_lets_go_of_what_was_best_before_a_resume(tmp_path):
    checkpoint = CheckpointConfig(every=2, keep=2)
    config = settings(tmp_path, steps=8, eval_every=2, checkpoint=checkpoint)
    evals = {"held": Arithmetic(1, seed=7)}
    best = BestCheckpoints(BestConfig(metric="eval.held.loss"), tmp_path)
    options = {"mesh": MESH, "callbacks": [best]}
    with pytest.raises(Stop):
        Trainer(Tiny, config, Arithmetic(), evals, listener=stop_after(4), **options).run()
    write_kept(tmp_path / "best.json", [{"step": 2, "checkpoint": "checkpoints/2"}])
    Trainer(Tiny, config, Arithmetic(), evals, **options).run()
    assert [one["step"] for one in read_kept(tmp_path / "best.json")] == [8]
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"6", "8"}


def test_the_lowest_is_best_by_default(tmp_path):
    lowest = trainer(tmp_path / "low", {"best": {"metric": "eval.held.ppl"}}).run()
    assert read_kept(tmp_path / "low/best.json")[0]["step"] == lowest.steps


def test_values_of_another_metric_are_not_compared(tmp_path, caplog):
    loss = {"metric": "eval.held.loss", "mode": "max"}
    trainer(tmp_path, {"best": loss, "early_stopping": loss | {"patience": 9}}, steps=4).run()
    share = {"metric": "eval.held.token_accuracy", "mode": "max"}
    options = {"measure": ("token_accuracy",), "resume_changes": ("train.steps",)}
    result = trainer(
        tmp_path, {"best": share, "early_stopping": share | {"patience": 1}}, steps=6, **options
    ).run()
    assert result.steps == 6
    assert [one["step"] for one in read_kept(tmp_path / "best.json")] == [6]
    for name in ("best", "early_stopping"):
        text = f"train.callbacks.{name}: values of eval.held.loss (max) in the checkpoint are not"
        assert text in caplog.text


def test_a_best_checkpoint_that_is_gone_is_told(tmp_path, caplog):
    callbacks = {"best": {"metric": "eval.held.loss", "mode": "max"}}
    trainer(tmp_path, callbacks, steps=4, checkpoint=CheckpointConfig(keep=1)).run()
    shutil.rmtree(tmp_path / "checkpoints/2")
    with caplog.at_level(logging.WARNING, logger="easypipe"):
        trainer(tmp_path, callbacks, steps=4).run()
    assert "the checkpoint of step 2, one of the best, is gone" in caplog.text


def test_heartbeats_are_renewed_and_say_how_it_ended(tmp_path):
    trainer(tmp_path, {"heartbeat": {"every_s": 0.0}}, steps=3).run()
    beat = json.loads((tmp_path / "heartbeat-0.json").read_text())
    assert (beat["step"], beat["steps"], beat["status"], beat["pid"]) == (
        3,
        3,
        "ended",
        os.getpid(),
    )
    seen = []

    def listener(event):
        if event.kind == "step":
            seen.append(json.loads((tmp_path / "two/heartbeat-0.json").read_text()))
            if event.step == 3:
                raise Stop

    with pytest.raises(Stop):
        trainer(tmp_path / "two", {"heartbeat": {"every_s": 0.0}}, listener=listener).run()
    assert {one["status"] for one in seen} == {"running"}
    assert seen[-1]["time"] > seen[0]["time"]
    assert json.loads((tmp_path / "two/heartbeat-0.json").read_text())["status"] == "failed"
    stopped = TrainEvent(
        kind="exception",
        step=4,
        steps=9,
        record={"error": "Interrupted: step 4: stopped by SIGTERM"},
    )
    Heartbeat(HeartbeatConfig(), tmp_path / "two")(stopped)
    assert json.loads((tmp_path / "two/heartbeat-0.json").read_text())["status"] == "stopped"


def test_heartbeats_come_no_more_often_than_every_s(tmp_path):
    now = [0.0]
    heart = Heartbeat(HeartbeatConfig(every_s=10.0), tmp_path, process=3, clock=lambda: now[0])
    for step, now[0] in enumerate([0.0, 4.0, 9.0, 11.0, 15.0], start=1):
        heart(TrainEvent(kind="dispatch", step=step, steps=9))
        assert json.loads((tmp_path / "heartbeat-3.json").read_text())["step"] == (
            1 if step < 4 else 4
        )


def test_a_profile_of_the_window_is_written(tmp_path):
    trainer(tmp_path, {"profile": {"start": 3, "steps": 2}}, steps=7).run()
    (trace,) = (tmp_path / "profile").rglob("*.xplane.pb")
    assert trace.stat().st_size > 1000
    with pytest.raises(
        ConfigError,
        match=r"train\.callbacks\.profile\.start: 13, but the run ends after 12 steps\. Give at "
        r"most 12\.",
    ):
        trainer(tmp_path / "never", {"profile": {"start": 13}})
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize("steps", [1, 3])
def test_the_window_is_as_long_as_it_is_told(tmp_path, monkeypatch, steps):
    seen = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: seen.append("start"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: seen.append("stop"))
    window = ProfilerWindow(ProfileConfig(start=4, steps=steps), tmp_path)
    for step in range(1, 12):
        window(TrainEvent(kind="dispatch", step=step, steps=12))
        seen.append(step)
    at = seen.index("start"), seen.index("stop")
    # one dispatch later, when the last of them has been read
    assert (seen[at[0] + 1], seen[at[1] + 1]) == (4, 4 + steps + 1)
    assert seen.count("start") == seen.count("stop") == 1


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """tag -> step -> value of the event files of a folder, read as TensorBoard does: what lies
    behind a later start is hidden.
    """
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    events = []
    for path in sorted(folder.glob("events.out.tfevents.*")):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            events.append(Event.FromString(data[at + 12 : at + 12 + length]))
            at += 16 + length
    found: dict[str, dict[int, float]] = {}
    for event in sorted(events, key=lambda event: event.wall_time):
        if event.session_log.status == SessionLog.START:
            for values in found.values():
                for step in [step for step in values if step >= event.step]:
                    del values[step]
        for value in event.summary.value:
            found.setdefault(value.tag, {})[event.step] = value.simple_value
    return found


def test_tensorboard_has_every_number_once(tmp_path):
    how = {"checkpoint": CheckpointConfig(every=4)}
    callbacks = {"tensorboard": {"folder": str(tmp_path / "board"), "flush_s": 1}}
    with pytest.raises(Stop):
        trainer(tmp_path / "run", callbacks, listener=stop_after(8), **how).run()
    trainer(tmp_path / "run", callbacks, **how).run()
    board, records = scalars(tmp_path / "board"), read_metrics(tmp_path / "run/metrics.jsonl")
    assert board["train/loss"] == {r["step"]: pytest.approx(r["loss"]) for r in records}
    assert board["eval/held/ppl"] == {
        r["step"]: pytest.approx(r["eval"]["held"]["ppl"]) for r in records if "eval" in r
    }
    trainer(tmp_path / "own", {"tensorboard": {}}, steps=3).run()
    assert len(scalars(tmp_path / "own/tensorboard")["train/grad_norm"]) == 3


def test_tensorboard_writes_what_it_has_after_flush_s(tmp_path):
    seen = {}

    def listener(event):
        if event.kind == "step" and event.step in (1, 3):
            time.sleep(1.2 if event.step == 1 else 0.2)
        if event.kind == "step" and event.step == 4:
            for name in ("1", "30"):
                if (tmp_path / name).exists():
                    seen[name] = len(scalars(tmp_path / name).get("train/loss", {}))

    for flush_s in (1, 30):
        callbacks = {"tensorboard": {"folder": str(tmp_path / str(flush_s)), "flush_s": flush_s}}
        trainer(tmp_path / "run", callbacks, listener=listener, steps=4, eval_every=None).run()
        shutil.rmtree(tmp_path / "run")
    assert seen["1"] > 0
    assert seen["30"] == 0


def test_wandb_offline_keeps_the_run_and_no_key(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    secret = "0123456789abcdef" * 2 + "deadbeef"
    monkeypatch.setenv("WANDB_API_KEY", secret)
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    seen = []

    def listener(event):
        if event.kind == "step" and event.step == 2:
            seen.append(
                (
                    wandb.run.project,
                    wandb.run.entity,
                    wandb.run.name,
                    wandb.run.offline,
                    dict(wandb.run.summary),
                )
            )

    options = {"project": "tests", "entity": "us", "name": "one", "mode": "offline"}
    trainer(tmp_path / "run", {"wandb": options}, steps=3, listener=listener).run()
    assert seen[0][:4] == ("tests", "us", "one", True)
    wandb.teardown()  # `finish` does not wait until its service has written the file
    (kept,) = (tmp_path / "run/wandb").glob("offline-run-*/*.wandb")
    written = kept.read_bytes()
    assert b"grad_norm" in written
    assert b"eval/held/loss" in written
    for path in (tmp_path / "run").rglob("*"):
        assert not path.is_file() or secret.encode() not in path.read_bytes(), path


def test_trackio_goes_on_in_its_run(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    trackio = pytest.importorskip("trackio", reason="the extra [trackio] is not installed")
    options = {"trackio": {"project": "tests", "name": "one"}}
    with pytest.raises(Stop):
        trainer(tmp_path / "run", options, **STOPPED, listener=stop_after(2)).run()
    trainer(tmp_path / "run", options, **STOPPED).run()
    [run] = trackio.Api().runs("tests")
    assert run.name == "one"
    with sqlite3.connect(tmp_path / "trackio/tests.db") as db:
        lines = dict(db.execute("SELECT step, metrics FROM metrics WHERE run_name = 'one'"))
    assert sorted(lines) == [1, 2, 3, 4]
    assert all(b"grad_norm" in line for line in lines.values())


def test_mlflow_goes_on_in_its_run(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="the extra [mlflow] is not installed")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    options = {"mlflow": {"experiment": "tests", "name": "one"}}
    with pytest.raises(Stop):
        trainer(tmp_path / "run", options, **STOPPED, listener=stop_after(2)).run()
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/run/mlflow.db")
    experiment = client.get_experiment_by_name("tests").experiment_id
    [run] = client.search_runs([experiment])
    assert run.info.status == "FAILED"
    options["mlflow"]["tracking_uri"] = f"sqlite:///{tmp_path}/run/mlflow.db"
    trainer(tmp_path / "run", options, **STOPPED).run()
    [run] = client.search_runs([experiment])
    assert (run.info.run_name, run.info.status) == ("one", "FINISHED")
    norms = client.get_metric_history(run.info.run_id, "grad_norm")
    assert {one.step for one in norms} == {1, 2, 3, 4}
    assert "eval/held/loss" in run.data.metrics
    assert list((tmp_path / "run/mlflow").rglob("config.json"))


def test_mlflow_takes_names_that_it_refuses(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="the extra [mlflow] is not installed")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    made = from_dict(CallbacksConfig, {"mlflow": {"experiment": "tests"}})
    run = settings(tmp_path, callbacks=made, steps=3)
    Trainer(Tiny, run, Arithmetic(), {"c++": Arithmetic(1)}, mesh=MESH).run()
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    [kept] = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
    assert "eval/c__/loss" in kept.data.metrics


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("tensorboard", "tensorboardX"),
        ("wandb", "wandb"),
        ("trackio", "trackio"),
        ("mlflow", "mlflow"),
    ],
)
def test_a_package_that_is_not_there_is_named(tmp_path, monkeypatch, name, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        ConfigError,
        match=rf"train\.callbacks\.{name}: needs the package {package}: .*easypipe\[{name}\]",
    ):
        trainer(tmp_path, {name: {}})


@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        (
            {"earlystopping": {}},
            "callbacks.earlystopping: unknown key (have: early_stopping, best, tensorboard, wandb, "
            "trackio, mlflow, profile, heartbeat, lm_eval, samples). ",
        ),
        ({"early_stopping": {}}, "callbacks.early_stopping.metric: required"),
        (
            {"early_stopping": {"metric": "loss", "patience": 0}},
            "callbacks.early_stopping.patience: 0 is too small",
        ),
        (
            {"early_stopping": {"metric": "loss", "min_delta": -1.0}},
            "callbacks.early_stopping.min_delta: -1.0 is not a number",
        ),
        (
            {"early_stopping": {"metric": "loss", "mode": "low"}},
            "callbacks.early_stopping.mode: 'low' is not an option (have: min, max)",
        ),
        ({"best": {"metric": "eval.held.loss", "keep": 0}}, "callbacks.best.keep: 0 is too small"),
        ({"tensorboard": {"flush_s": 0}}, "callbacks.tensorboard.flush_s: 0 is too small"),
        ({"profile": {"steps": 0}}, "callbacks.profile.steps: 0 is too small"),
        (
            {"heartbeat": {"every_s": -1.0}},
            "callbacks.heartbeat.every_s: -1.0 is not a number from 0 up",
        ),
        (
            {"wandb": {"mode": "disabled"}},
            "callbacks.wandb.mode: 'disabled' is not an option (have: online, offline)",
        ),
        (
            {"mlflow": {"tracking_uri": "https://me:secret@runs.example"}},
            "callbacks.mlflow.tracking_uri: holds a password",
        ),
    ],
)
def test_bad_values_are_refused(callbacks, message):
    with pytest.raises(ConfigError) as error:
        from_dict(TrainingConfig, {"output_dir": "out", "callbacks": callbacks})
    assert str(error.value).startswith(message)
    assert "secret" not in str(error.value)


def test_metrics_that_will_not_be_there_are_refused(tmp_path):
    for callbacks, message in (
        (
            {"early_stopping": {"metric": "eval.hold.loss"}},
            r"no metric named 'eval\.hold\.loss' .*Did you mean 'eval\.held\.loss'\?",
        ),
        (
            {"best": {"metric": "loss"}},
            r"train\.callbacks\.best\.metric: no held-out metric named 'loss' \(have: "
            r"eval\.held\.loss, ",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            trainer(tmp_path, callbacks)
    with pytest.raises(
        ConfigError,
        match=r"eval\.held\.loss is measured once, after the last step\. Set train\.eval_every\.",
    ):
        trainer(tmp_path, {"best": {"metric": "eval.held.loss"}}, eval_every=None)


def test_the_command_line_names_them_too():
    values = apply_overrides(
        {"output_dir": "out"},
        ["callbacks.heartbeat.every_s=5.0", "callbacks.early_stopping={metric: loss}"],
    )
    config = from_dict(TrainingConfig, values).callbacks
    assert config.heartbeat == HeartbeatConfig(every_s=5.0)
    assert config.early_stopping == EarlyStoppingConfig(metric="loss")
    assert config.best is None


def test_what_only_writes_is_made_in_the_first_process(tmp_path):
    config = from_dict(
        CallbacksConfig,
        {
            "early_stopping": {"metric": "loss"},
            "heartbeat": {},
            "profile": {"start": 1},
        },
    )
    known = Known(evals={}, eval_every=None, steps=10)
    made = make_callbacks(config, tmp_path, known, run_config={}, process=1)
    assert set(made) == {"early_stopping", "heartbeat"}
