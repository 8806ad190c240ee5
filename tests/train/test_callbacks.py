from __future__ import annotations

import jax
import numpy as np
import pytest

from easypipe.core.errors import ConfigError, TrainError
from easypipe.train.events import Callback
from easypipe.train.metrics.log import read_metrics
from easypipe.train.parallel.mesh import make_mesh
from easypipe.train.trainer import Trainer
from train.runs import Arithmetic, Tiny, numbers, settings

MESH = make_mesh({"data": 1}, devices=jax.devices()[:1])


class Patient(Callback):
    """Remembers what it heard, and stops the run with its `most`-th evaluation."""

    def __init__(self, most=None, fail=None):
        self.most, self.fail, self.heard, self.seen, self.begun_with = most, fail, [], 0, None

    def on_init(self, event):
        self.heard.append(("init", event.step))
        self.begun_with = self.seen

    def on_dispatch(self, event):
        self.heard.append(("dispatch", event.step))

    def on_step(self, event):
        self.heard.append(("step", event.step))
        assert all(isinstance(value, int | float | dict | None) for value in event.record.values())
        if event.step == self.fail:
            raise RuntimeError("enough")

    def on_eval(self, event):
        self.heard.append(("eval", event.step))
        assert event.record["held"]["loss"] > 0
        self.seen += 1
        if self.seen == self.most:
            event.control.stop("seen enough")

    def on_save(self, event):
        self.heard.append(("save", event.step))

    def on_end(self, event):
        self.heard.append(("end", event.step))

    def on_exception(self, event):
        self.heard.append(("exception", event.step, event.record["error"]))

    def state(self):
        return {"seen": self.seen}

    def restore(self, state):
        self.seen = state["seen"]


def run(folder, callback, **changes):
    held = {"held": Arithmetic(1, seed=7)}
    return Trainer(
        Tiny,
        settings(folder, steps=6, eval_every=2, **changes),
        Arithmetic(),
        held,
        callbacks=[callback],
        mesh=MESH,
    ).run()


def test_callbacks_hear_numbers_in_order_and_a_step_is_dispatched_before_the_last_one_is_read(
    tmp_path,
):
    heard = Patient()
    run(tmp_path, heard)
    assert heard.heard[:9] == [
        ("init", 0),
        ("dispatch", 1),
        ("dispatch", 2),
        ("step", 1),
        ("eval", 2),
        ("step", 2),
        ("dispatch", 3),
        ("dispatch", 4),
        ("step", 3),
    ]
    assert [one for one in heard.heard if one[0] in ("save", "end")] == [
        ("save", 4),
        ("save", 6),
        ("end", 6),
    ]


def test_a_callback_may_end_the_run_and_its_state_is_in_the_checkpoint(tmp_path, caplog):
    run(tmp_path / "whole", Patient())
    early = run(tmp_path / "early", Patient(most=1))
    assert (early.steps, early.checkpoint.name, early.last["step"]) == (2, "2", 2)
    assert "stopped at step 2 of 6: seen enough" in caplog.text
    more = Patient()
    assert run(tmp_path / "early", more).resumed_from == 2
    assert more.begun_with == 1
    whole, cut = (
        numbers(read_metrics(tmp_path / name / "metrics.jsonl")) for name in ("whole", "early")
    )
    assert whole == cut


def test_a_callback_that_fails_at_the_end_hides_no_error(tmp_path):
    class Worse(Patient):
        def on_exception(self, event):
            raise OSError("no space")

    with pytest.raises(RuntimeError, match="enough") as error:
        run(tmp_path, Worse(fail=3))
    assert error.value.__notes__ == [
        "a callback failed when it was told of this: OSError: no space"
    ]


def test_callbacks_hear_of_the_error_that_ends_a_run(tmp_path):
    failing = Patient(fail=3)
    with pytest.raises(RuntimeError, match="enough"):
        run(tmp_path, failing)
    assert failing.heard[-1] == ("exception", 3, "RuntimeError: enough")


def test_a_stop_before_the_first_step_is_told_so(tmp_path):
    class Early(Callback):
        def on_init(self, event):
            event.control.stop("not today")

    message = r"callbacks: one stopped the run before its first step: not today\. Stop in on_step"
    with pytest.raises(TrainError, match=message):
        run(tmp_path, Early())


def test_a_state_goes_back_to_a_callback_of_its_class(tmp_path, caplog):
    class Other(Patient):
        def restore(self, state):
            raise AssertionError("it has none")

    def run(callbacks, steps):
        how = settings(tmp_path, steps=steps, resume_changes=["train.steps"])
        evals = {"held": Arithmetic(1, seed=7)}
        Trainer(Tiny, how, Arithmetic(), evals, callbacks=callbacks, mesh=MESH).run()
        return [one.begun_with for one in callbacks]

    run([Patient(), Patient()], 3)
    assert run([Other(), Patient(), Patient(), Patient()], 4) == [0, 1, 1, 0]
    assert "callbacks that this run lacks" not in caplog.text
    assert run([Patient()], 5) == [2]
    assert "holds states of callbacks that this run lacks: test_a_state" in caplog.text


@pytest.mark.parametrize("state", [{"a": np.ones(2)}, {"a": object()}, {("a", "b"): 1}, {1: 2}])
def test_a_state_that_is_no_json_names_its_callback(state, tmp_path):
    class Odd(Callback):
        def state(self):
            return state

    with pytest.raises(ConfigError, match=r"callback Odd\.state\(\).*: is not plain JSON"):
        Trainer(Tiny, settings(tmp_path, steps=3), Arithmetic(), callbacks=[Odd()]).run()
