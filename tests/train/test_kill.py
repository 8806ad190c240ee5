"""The trainer's law with real processes and real signals."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import forked
from easypipe.train.metrics.log import read_metrics
from train.runs import numbers

PROGRAM = Path(__file__).with_name("runs.py")


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("compiled")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }


def train(environment, folder, *options):
    return forked.run([sys.executable, PROGRAM, folder, *map(str, options)], env=environment)


def curve(folder):
    return numbers(read_metrics(folder / "metrics.jsonl"))


@pytest.fixture(scope="module")
def whole(environment, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    subprocess.run([sys.executable, PROGRAM, folder], env=environment, check=True)
    assert [record["step"] for record in curve(folder)] == list(range(1, 31))
    return curve(folder)


def test_killed_at_a_random_step_the_curve_is_the_same_bit_for_bit(environment, whole, tmp_path):
    uncached = {key: value for key, value in environment.items() if not key.startswith("JAX_COMP")}
    step = random.SystemRandom().randrange(1, 30)
    assert train(uncached, tmp_path, step).returncode == -signal.SIGKILL
    assert read_metrics(tmp_path / "metrics.jsonl")[-1]["step"] == step
    again = train(uncached, tmp_path)
    assert again.returncode == 0, again.stderr
    assert curve(tmp_path) == whole, f"killed after step {step}"


def test_killed_while_saving_the_last_good_checkpoint_stands(environment, whole, tmp_path):
    for save, files in ((5, 0), (10, 7)):
        assert train(environment, tmp_path, 0, save, files).returncode == -signal.SIGKILL
        committed = sorted(
            int(p.name) for p in (tmp_path / "checkpoints").iterdir() if p.name.isdigit()
        )
        assert committed == list(range(5, save, 5)), "the save that was cut off does not count"
        resumed = train(environment, tmp_path, save + 1)  # dies after the save that failed before
        assert resumed.returncode == -signal.SIGKILL
        assert int(resumed.stdout.split()[0]) == save - 4
    again = train(environment, tmp_path)
    assert again.returncode == 0, again.stderr
    assert curve(tmp_path) == whole
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["25", "30"]


def test_sigterm_saves_the_step_and_exits_with_143(environment, whole, tmp_path):
    process = forked.Popen(
        [sys.executable, PROGRAM, tmp_path],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while int(process.stdout.readline()) < 7:
        pass
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 143
    assert "stopped by SIGTERM, saved in" in said
    saved = max(int(p.name) for p in (tmp_path / "checkpoints").iterdir())
    again = train(environment, tmp_path)
    assert int(again.stdout.split()[0]) == saved + 1
    assert curve(tmp_path) == whole
