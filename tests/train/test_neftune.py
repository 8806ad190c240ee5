"""Noise on embeddings: its size, that it is of training alone, and that a run goes on with it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from easypipe import ModelConfig, Trainer
from easypipe.core.errors import ConfigError, StateError
from easypipe.train.config import CheckpointConfig, OptimizerConfig, TrainingConfig
from easypipe.train.losses.loss import loss_sums
from easypipe.train.metrics.log import read_metrics
from easypipe.train.model.config import ClassifierConfig
from easypipe.train.model.noise import noise_columns, noise_of
from easypipe.train.plan.aot import plan_step
from easypipe.train.plan.topology import Topology
from train.runs import VOCAB, Arithmetic, Tiny, numbers, settings

MODEL = ModelConfig(
    vocab_size=VOCAB, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=1, num_kv_heads=1
)
ALPHA, WIDTH = 5.0, 512


def test_noise_is_even_within_alpha_by_the_root_of_tokens_times_width() -> None:
    """Of each document its own length, in a packed row too; nothing on padding."""
    lengths = ((40, 3, 17), (1, 60, 0), (64, 0, 0))
    segments = np.array([np.repeat([1, 2, 3, 0], [*row, 64 - sum(row)]) for row in lengths])
    batch = {"input_ids": jnp.zeros((3, 64), jnp.int32), "segment_ids": jnp.asarray(segments)}
    noise = noise_of({**batch, **noise_columns(ALPHA, 3)(7, batch)})
    assert noise is not None
    given = jnp.ones((3, 64, WIDTH))
    found = np.asarray(noise.added(given) - given, np.float64)
    assert not found[segments == 0].any()
    for row, sizes in enumerate(lengths):
        for number, size in enumerate(sizes, start=1):
            own = found[row][segments[row] == number]
            if own.size:
                bound = ALPHA / math.sqrt(size * WIDTH)
                assert 0.95 * bound < np.abs(own).max() <= bound * (1 + 1e-5)
                assert own.std() == pytest.approx(bound / math.sqrt(3), rel=0.1)
                assert abs(own.mean()) < 0.15 * bound


def test_noise_follows_from_seed_step_and_row() -> None:
    whole = {"input_ids": jnp.zeros((6, 8), jnp.int32)}
    make = noise_columns(ALPHA, 3)
    seeds = np.asarray(make(2, whole)["noise_seeds"])
    assert len(set(seeds.tolist())) == 6
    assert (seeds == np.asarray(make(2, whole)["noise_seeds"])).all()
    for other in (make(3, whole), noise_columns(ALPHA, 4)(2, whole)):
        assert not np.isin(other["noise_seeds"], seeds).any()
    cut = make(2, {"input_ids": jnp.zeros((3, 2, 8), jnp.int32)})
    assert np.asarray(cut["noise_seeds"]).tolist() == [seeds[a::3].tolist() for a in range(3)]


def run(folder: Path, loader: Any = None, **changes: Any) -> list[dict[str, Any]]:
    values: dict[str, Any] = {"steps": 6, "eval_every": 3, "neftune_alpha": ALPHA}
    config = settings(folder, **(values | changes))
    Trainer(
        MODEL, config, Arithmetic() if loader is None else loader, {"held": Arithmetic(2, seed=7)}
    ).run()
    return numbers(read_metrics(folder / "metrics.jsonl"))


def test_evaluations_have_none(tmp_path: Path) -> None:
    still: Any = {"optimizer": OptimizerConfig(learning_rate=1e-12, weight_decay=0.0)}
    noisy = run(tmp_path / "noisy", **still)
    plain = run(tmp_path / "plain", neftune_alpha=None, **still)
    assert all(a["loss"] != b["loss"] for a, b in zip(noisy, plain, strict=True))
    for a, b in zip(noisy[2::3], plain[2::3], strict=True):
        assert a["eval"]["held"]["loss"] == pytest.approx(b["eval"]["held"]["loss"], rel=1e-6)


class Stopped(Exception):
    pass


def test_a_run_that_goes_on_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", checkpoint=CheckpointConfig(every=2))

    class Killed(Arithmetic):
        def batch(self, t: int) -> dict[str, np.ndarray]:
            if t == 5:
                raise Stopped
            return super().batch(t)

    cut: Any = {"checkpoint": CheckpointConfig(every=2)}
    with pytest.raises(Stopped):
        run(tmp_path / "cut", Killed(), **cut)
    with pytest.raises(StateError, match="neftune_alpha"):
        run(tmp_path / "cut", neftune_alpha=1.0, **cut)
    with pytest.raises(StateError, match="neftune_alpha"):
        run(tmp_path / "cut", neftune_alpha=None, **cut)
    assert run(tmp_path / "cut", **cut) == whole


def test_micro_batches_have_the_noise_of_the_whole(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole")
    cut = run(tmp_path / "cut", accumulate_steps=4)
    for a, b in zip(whole, cut, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-3)


def test_a_plan_counts_it() -> None:
    here = Topology("here", jax.devices()[:1])
    config = TrainingConfig(steps=5)
    noisy = TrainingConfig(steps=5, neftune_alpha=ALPHA)
    plain, more = (
        plan_step(MODEL, one, here, batch_size=4, seq_length=16) for one in (config, noisy)
    )
    assert more.memory.batch == plain.memory.batch + 4 * 4 + 4 * 16 * 4


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda at: Trainer(Tiny, settings(at, neftune_alpha=5.0), Arithmetic()), "Tiny"),
        (
            lambda at: Trainer(
                MODEL, settings(at, neftune_alpha=5.0), Arithmetic(), loss=loss_sums
            ),
            "loss from Python",
        ),
        (
            lambda at: Trainer(
                ClassifierConfig(num_classes=2, image_shape=(8, 8, 1)),
                settings(at, neftune_alpha=5.0),
                Arithmetic(),
            ),
            "Classifier",
        ),
        (lambda at: settings(at, neftune_alpha=0.0), "not a positive number"),
        (lambda at: settings(at, neftune_alpha=float("nan")), "not a positive number"),
    ],
    ids=["module", "loss", "classes", "zero", "nan"],
)
def test_where_it_cannot_act_it_is_refused(make: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        make(tmp_path)
