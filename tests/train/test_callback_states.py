"""A run that was killed and goes on does what one that was not does: of every callback, killed behind
every step.
"""

from __future__ import annotations

import ast
import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import pytest

import easypipe.train
from easypipe.core.config import from_dict
from easypipe.train.callbacks import trackers
from easypipe.train.callbacks.config import CallbacksConfig
from easypipe.train.callbacks.named import Known, make_callbacks
from easypipe.train.events import Callback, Control, TrainEvent
from easypipe.train.record import BEST, read_kept

LOSSES = [3.0, 2.5, 2.7, 2.4, None, 2.6, 2.4, 2.3, 2.9, 2.35, 2.8, 2.9]  # None: not evaluated
STEPS = len(LOSSES)
METRIC = {"metric": "eval.held.loss"}
KNOWN = Known(evals={"held": ()}, eval_every=1, steps=STEPS, tokenizer="some")
# name -> its options, one mapping a trial
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "early_stopping": [
        METRIC | {"patience": 3},
        METRIC | {"patience": 5, "mode": "max"},
        METRIC | {"patience": 3, "min_delta": 0.15},
    ],
    "best": [METRIC | {"keep": 1}, METRIC | {"keep": 3}, METRIC | {"keep": 2, "mode": "max"}],
    "heartbeat": [{"every_s": 0.0}],
    "tensorboard": [{}],
    "wandb": [{"mode": "offline"}],
    "trackio": [{"project": "tests"}],
    "mlflow": [{"experiment": "tests"}],
    "profile": [{"start": 3, "steps": 4}],
}
# Their models run in tests of their own; they keep nothing but files, whose lines are cut by step.
STATELESS = {"lm_eval": "LmEval", "samples": "Samples"}
PACKAGES = {name: name for name in ("wandb", "trackio", "mlflow")} | {"tensorboard": "tensorboardX"}


def callback(folder: Path, name: str, options: dict[str, Any]) -> Any:
    config = from_dict(CallbacksConfig, {name: options})
    return make_callbacks(config, folder, KNOWN, run_config={}, process=0)[name]


class Run:
    """Tells a callback of its steps, and does what it asks for, as a Trainer does."""

    def __init__(self, folder: Path, name: str, options: dict[str, Any]) -> None:
        self.folder, self.name, self.options = folder, name, options
        self.asked: list[Any] = []  # behind each step
        self.ids: set[str | None] = set()  # of runs in a service

    def begin(self, step: int) -> None:
        self.control = Control()
        self.callback = callback(self.folder, self.name, self.options)
        if step:
            self.callback.restore(json.loads(json.dumps(self.state)))
        self.say("start", step)
        self.ids.add(getattr(self.callback, "id", None))

    def say(self, kind: Any, step: int, record: Any = None) -> None:
        self.callback(
            TrainEvent(kind=kind, step=step, steps=STEPS, record=record or {}, control=self.control)
        )

    def step(self, step: int) -> None:
        loss = LOSSES[step - 1]
        measured = {} if loss is None else {"eval": {"held": {"loss": loss}}}
        self.say("dispatch", step)
        self.say("step", step, {"step": step, "loss": 1.0} | measured)
        control = self.control
        self.asked.append((control.reason, control.ended, control.saving, sorted(control.kept)))
        self.state = self.callback.state()
        (self.folder / "checkpoints" / str(step)).mkdir(parents=True)
        self.say("checkpoint", step)
        control.saving = False

    def through(self, broken_behind: int | None = None) -> Run:
        self.begin(0)
        for step in range(1, STEPS + 1):
            self.step(step)
            if self.control.reason is not None:
                break
            if step == broken_behind:
                if self.name not in ("early_stopping", "best"):  # which may be killed
                    self.say("exception", step, {"error": "Interrupted: by a test"})
                self.begin(step)
        self.say("end", len(self.asked))
        return self


def told(folder: Path, name: str) -> Any:
    """What the files say at the end, of no matter which process."""
    if name == "best":
        return read_kept(folder / BEST)
    if name == "heartbeat":
        beat = json.loads((folder / "heartbeat-0.json").read_text())
        return {key: beat[key] for key in ("step", "steps", "status")}
    return None


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    seen: list[str] = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: seen.append("start"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: seen.append("stop"))
    return seen


@pytest.mark.parametrize("name", [*OPTIONS])
def test_a_run_that_goes_on_asks_for_what_an_unbroken_one_does(
    tmp_path: Path, traced: list[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    if name in PACKAGES:
        pytest.importorskip(PACKAGES[name])
    for variable in ("TRACKIO_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(variable, str(tmp_path / variable))
    monkeypatch.setenv("WANDB_MODE", "offline")
    services = name in ("wandb", "trackio", "mlflow")  # a process of each: slow
    for number, options in enumerate(OPTIONS[name]):
        whole = Run(tmp_path / f"{number}-whole", name, options).through()
        for cut in range(1, len(whole.asked)) if not services else (5,):
            run = Run(tmp_path / f"{number}-{cut}", name, options).through(cut)
            assert run.asked == whole.asked, (options, cut)
            assert told(run.folder, name) == told(whole.folder, name)
            assert services == ({None} != run.ids)
            assert len(run.ids) == 1, "it went on in another run"
            if not services:
                assert run.state == whole.state
        if name in ("early_stopping", "best"):
            assert len({str(asked) for asked in whole.asked}) > 1, "it never asked for anything"
    assert traced.count("start") == traced.count("stop")
    assert (name == "profile") == bool(traced)


def test_every_callback_is_tried() -> None:
    """Those that a config names, and every class of the package that keeps a state."""
    names = {field.name for field in dataclasses.fields(CallbacksConfig)}
    assert names == {*OPTIONS, *STATELESS}
    found = {}
    for path in sorted(Path(easypipe.train.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                methods = {one.name for one in node.body if isinstance(one, ast.FunctionDef)}
                if {"state", "restore"} <= methods:
                    found[node.name] = path.stem
    assert set(found) == {
        "EarlyStopping",
        "BestCheckpoints",
        "Tracker",  # wandb, trackio, mlflow
        "SpikeGuard",  # test_watch.py, killed at every step too
        "Callback",
        "StatefulListener",
        "Shapes",  # in place of a loader
    }
    kept = {one.__name__: one for one in Callback.__subclasses__()}
    assert all(kept[name].state is Callback.state for name in STATELESS.values())


@pytest.mark.parametrize(("kind", "failed"), [("end", False), ("exception", True)])
def test_a_service_is_told_how_a_run_ended_once(
    kind: Any, failed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[bool] = []

    class Service(trackers.Tracker[Any]):
        name = "service"

        def on_init(self, event: TrainEvent) -> None:
            self._run = self

        def finish(self, *, failed: bool) -> None:
            told.append(failed)

    monkeypatch.setattr(trackers, "installed", lambda name, package: None)
    service = Service(None, Path(), {})
    service(TrainEvent(kind=kind, step=0, steps=9))  # before it has begun
    for each in ("start", kind, kind):
        service(TrainEvent(kind=each, step=1, steps=9))
    assert told == [failed]
