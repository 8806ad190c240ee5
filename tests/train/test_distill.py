"""Distillation: the divergence from a teacher's likeliest tokens in float64, its gradient, a run."""

from __future__ import annotations

import dataclasses
import math
import os
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import forked
from easypipe import ModelConfig, Pipeline, Trainer
from easypipe.core.config import from_dict
from easypipe.core.errors import ConfigError, StateError
from easypipe.jobs import chain
from easypipe.run import RunConfig, prepare, train
from easypipe.train.config import DistillConfig, OptimizerConfig, PreferenceConfig, TrainingConfig
from easypipe.train.losses import distill
from easypipe.train.losses.loss import loss_sums
from easypipe.train.metrics.log import read_metrics
from easypipe.train.parallel.mesh import make_mesh
from easypipe.train.plan.aot import plan_step
from token_support import small_tokenizer_folder
from train.runs import VOCAB, Arithmetic, Tiny, settings

TOP = 4


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def teacher(ids: np.ndarray, top: int = TOP, seed: int = 0) -> dict[str, np.ndarray]:
    """The likeliest tokens in the place of every one, by a table of what follows what."""
    table = np.random.default_rng(seed).normal(size=(VOCAB, VOCAB)) * 2
    before = np.concatenate([np.zeros_like(ids[:, :1]), ids[:, :-1]], axis=1)
    log_p = log_softmax(table)[before]
    best = np.argsort(-log_p, axis=-1)[..., :top]
    found = np.take_along_axis(log_p, best, -1).astype(np.float32)
    return {"teacher_ids": best.astype(np.int32), "teacher_log_probs": found}


def batch(top: int = TOP) -> dict[str, np.ndarray]:
    """With tokens of which the teacher says nothing, and tokens of which it says less."""
    made = Arithmetic().batch(1)
    made |= teacher(made["input_ids"], top)
    made["teacher_log_probs"][:, 2::5] = 0
    if top > 1:
        made["teacher_log_probs"][:, 3::5, -1] = -np.inf
    return made


class Taught(Arithmetic):
    """Batches with what a teacher says of them."""

    def batch(self, t: int) -> dict[str, Any]:
        made = super().batch(t)
        return made | teacher(made["input_ids"])


class Capped(Tiny):
    logit_soft_cap = 0.5


def by_hand(
    logits: np.ndarray, given: dict[str, np.ndarray], weight: float, weights: np.ndarray
) -> tuple[float, float]:
    """(loss, kl) in float64, token by token."""
    log_q, loss, kl, known = log_softmax(logits.astype(np.float64)), 0.0, 0.0, 0.0
    for row, slot in zip(*np.nonzero(given["labels"] != -100), strict=True):
        counts, nll = weights[row, slot], -log_q[row, slot, given["labels"][row, slot]]
        drawn = False
        if slot + 1 < logits.shape[1]:
            ids = given["teacher_ids"][row, slot + 1]
            log_p = given["teacher_log_probs"][row, slot + 1].astype(np.float64)
            drawn = bool(log_p.any())
        if not drawn:
            loss += counts * nll
            continue
        ids, log_p = ids[log_p > -np.inf], log_p[log_p > -np.inf]
        own = log_q[row, slot, ids]
        divergence = (np.exp(log_p) * (log_p - own)).sum()
        if (left := 1 - np.exp(log_p).sum()) > 1e-6:
            divergence += left * math.log(left / (1 - np.exp(own).sum()))
        loss += counts * ((1 - weight) * nll + weight * divergence)
        kl, known = kl + counts * divergence, known + counts
    return loss / weights[given["labels"] != -100].sum(), kl / known


@pytest.mark.parametrize("model", [Tiny, Capped])
@pytest.mark.parametrize(("weight", "top"), [(0.3, TOP), (1.0, 1), (0.7, VOCAB)])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_loss_is_the_divergence_by_hand(
    model: type[Tiny], weight: float, top: int, weighted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distill, "GATHERED", 500)  # several pieces
    module, given = model(nnx.Rngs(0)), batch(top)
    if top > 1:  # the teacher is sure of one token
        given["teacher_log_probs"][:, 4::5] = [0.0, *[-np.inf] * (top - 1)]
    weights = np.random.default_rng(2).choice([0.25, 1, 3], given["labels"].shape)
    given |= {"loss_weights": weights.astype(np.float32)} if weighted else {}
    weights = weights if weighted else np.ones_like(weights)
    logits = np.asarray(module.hidden(jnp.asarray(given["input_ids"])) @ module.lm_head())
    if model is Capped:
        logits = 0.5 * np.tanh(logits / 0.5)
    out = loss_sums(module, given, distill=DistillConfig(weight=weight))
    loss, kl = by_hand(logits, given, weight, weights)
    np.testing.assert_allclose(out.loss_sum / out.divisor, loss, rtol=2e-5)
    np.testing.assert_allclose(out.ratios["kl"][0] / out.ratios["kl"][1], kl, rtol=2e-5)
    plain = loss_sums(module, given)
    np.testing.assert_allclose(out.nll_sum, plain.nll_sum, rtol=1e-6)


def test_gradients_are_those_of_the_divergence_written_out() -> None:
    given, module = batch(), Tiny(nnx.Rngs(0))
    graph, params = nnx.split(module)
    shifted = {
        name: jnp.pad(given[name][:, 1:], ((0, 0), (0, 1), (0, 0)))
        for name in ("teacher_ids", "teacher_log_probs")
    }

    def textbook(params: Any) -> jax.Array:
        one = nnx.merge(graph, params)
        log_q = jax.nn.log_softmax(one.hidden(jnp.asarray(given["input_ids"])) @ one.lm_head())
        labels = jnp.maximum(given["labels"], 0)[..., None]
        nll = -jnp.take_along_axis(log_q, labels, -1)[..., 0]
        own = jnp.take_along_axis(log_q, shifted["teacher_ids"], -1)
        log_p = shifted["teacher_log_probs"]
        there = log_p > -jnp.inf
        p, q = jnp.where(there, jnp.exp(log_p), 0), jnp.where(there, jnp.exp(own), 0)
        kl = jnp.where(there, p * (jnp.where(there, log_p, 0) - own), 0).sum(-1)
        left = 1 - p.sum(-1)
        kl += jnp.where(left > 0, left * jnp.log(left / (1 - q.sum(-1))), 0)
        known, counted = (log_p != 0).any(-1), given["labels"] != -100
        each = jnp.where(known, 0.5 * nll + 0.5 * kl, nll)
        return jnp.where(counted, each, 0).sum()

    def ours(params: Any) -> jax.Array:
        return loss_sums(nnx.merge(graph, params), given, distill=DistillConfig()).loss_sum

    wanted, found = jax.grad(textbook)(params), jax.grad(ours)(params)
    for exact, one in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(one, exact, rtol=1e-3, atol=1e-4)


def test_what_no_teacher_says_makes_the_loss_no_number() -> None:
    """Ids outside the vocabulary, and logits in place of log-probs."""
    module = Tiny(nnx.Rngs(0))
    for column, value in (("teacher_ids", VOCAB), ("teacher_ids", -1), ("teacher_log_probs", 1.5)):
        given = batch()
        given[column][:, 1] = value
        assert math.isnan(loss_sums(module, given, distill=DistillConfig()).loss_sum), column


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"teacher_ids": None}, "no column 'teacher_ids'"),
        ({"teacher_log_probs": None}, "no column 'teacher_log_probs'"),
        ({"teacher_ids": np.zeros((8, 12, TOP), np.float32)}, "float32 of shape"),
        ({"teacher_log_probs": np.zeros((8, 12), np.float32)}, "of shape"),
        (
            {"teacher_log_probs": np.zeros((8, 12, 2), np.float32)},
            f"{TOP} ids of the teacher for a token, and 2 log-probs",
        ),
    ],
)
def test_batches_without_a_teacher_are_refused(change: dict[str, Any], problem: str) -> None:
    given = {name: one for name, one in (batch() | change).items() if one is not None}
    with pytest.raises(ConfigError, match=problem):
        loss_sums(Tiny(nnx.Rngs(0)), given, distill=DistillConfig())


# in a process of eight devices, by name
WAYS: dict[str, dict[str, Any]] = {
    "whole": {"mesh": {"data": 1}},
    "micro": {"mesh": {"data": 1}, "accumulate_steps": 4},
    "fsdp": {"mesh": "fsdp"},
    "tensor": {"mesh": {"data": 2, "tensor": 4}},
    "sequence": {"mesh": {"data": 2, "sequence": 2, "tensor": 2}},
}


def runs(folder: Path) -> None:
    for name, changes in WAYS.items():
        given = {"steps": 30, "distill": DistillConfig(weight=1.0)} | changes
        rate = {"learning_rate": 0.03, "schedule": "constant"}
        made = settings(folder / name, optimizer=OptimizerConfig(**rate), **given)
        mesh = make_mesh(made.mesh, devices=jax.devices()[: 1 if name in ("whole", "micro") else 8])
        Trainer(Tiny, made, Taught(), {"held": Taught(2, seed=3)}, mesh=mesh).run()


def test_the_model_comes_near_its_teacher(tmp_path: Path) -> None:
    """With micro-batches and over eight devices too: the same kl, which falls."""
    command = [sys.executable, __file__, str(tmp_path)]
    done = forked.run(command, env={**os.environ, "PYTHONPATH": ":".join(sys.path)})
    assert done.returncode == 0, done.stderr[-3000:]
    whole, *others = (read_metrics(tmp_path / name / "metrics.jsonl") for name in WAYS)
    assert whole[-1]["kl"] < 0.7 * whole[0]["kl"]
    assert 0 < whole[-1]["eval"]["held"]["kl"] < whole[0]["kl"]
    for other in others:
        for a, b in zip(whole, other, strict=True):
            assert a["kl"] == pytest.approx(b["kl"], rel=1e-3)
            assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-2)


MODEL = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_layers": 1,
    "num_heads": 1,
    "num_kv_heads": 1,
}


def of_rows(folder: Path, **changes: Any) -> RunConfig:
    ids = np.random.default_rng(0).integers(3, VOCAB, (40, 10))
    beside = teacher(ids)
    rows = [
        {"input_ids": ids[i].tolist()} | {name: beside[name][i].tolist() for name in beside}
        for i in range(len(ids))
    ]
    dataset = {
        "data_files": rows,
        "tokenizer": str(small_tokenizer_folder()),
        "aligned_columns": {"teacher_ids": TOP, "teacher_log_probs": TOP},
    }
    data = {
        "datasets": [dataset | changes.pop("dataset", {})],
        "cache_dir": str(folder / "cache"),
        "pack": {"seq_length": 32, "strategy": "first_fit"},
        "load": {"batch_size": 4},
        "seed": 1,
    }
    training = {"output_dir": str(folder / "run"), "steps": 3, "distill": {}} | changes
    made = {"data": data, "model": MODEL, "train": training}
    return from_dict(RunConfig, made | {"eval": {"held": {"from": "data", "fraction": 0.2}}})


def test_a_run_trains_by_the_columns_of_its_data_and_goes_on_with_the_same(tmp_path: Path) -> None:
    train(of_rows(tmp_path))
    assert read_metrics(tmp_path / "run" / "metrics.jsonl")[0]["kl"] > 0
    with pytest.raises(StateError, match=r"distill"):
        train(of_rows(tmp_path, distill={"weight": 0.9}))


@pytest.mark.parametrize("streaming", [False, True])
def test_one_dataset_of_tokens_trains_without_packing(tmp_path: Path, streaming: bool) -> None:
    """Its tokenizer and its columns are known, and it is prepared; its batches stay as they are."""
    made = of_rows(tmp_path)
    data = dataclasses.replace(made.data, pack=None, streaming=streaming)
    made = dataclasses.replace(made, data=data, eval={})
    if not streaming:
        [entry, *_] = prepare(made).report.ledger.entries
        assert (entry.stage, entry.unit, entry.into) == ("tokenize", "rows", {"read": 40})
    train(made)
    assert read_metrics(tmp_path / "run" / "metrics.jsonl")[0]["kl"] > 0
    unnamed = dataclasses.replace(data.datasets[0], aligned_columns=())
    other = dataclasses.replace(made, data=dataclasses.replace(data, datasets=(unnamed,)))
    with pytest.raises(ConfigError, match=r"no column 'teacher_ids'"):
        train(other)
    ours = chain(data).load().loader()
    theirs = Pipeline.from_config(data).source().tokenize().load().loader()
    for here, there in zip(ours, theirs, strict=True):
        jax.tree.map(np.testing.assert_array_equal, dict(here), dict(there))


def test_where_it_has_no_effect_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.*no column 'teacher_log_probs'"):
        train(of_rows(tmp_path, dataset={"aligned_columns": {"teacher_ids": TOP}}))
    with pytest.raises(ConfigError, match=r"distill.*has no effect on preferences"):
        TrainingConfig(output_dir="x", distill=DistillConfig(), preference=PreferenceConfig())
    with pytest.raises(ConfigError, match=r"weight.*is outside \(0, 1\]"):
        DistillConfig(weight=0.0)
    with pytest.raises(ConfigError, match=r"log_probs.*column of the ids"):
        DistillConfig(log_probs="teacher_ids")
    asked = settings(tmp_path / "own", distill=DistillConfig())
    with pytest.raises(ConfigError, match=r"train\.distill.*loss from Python"):
        Trainer(Tiny(nnx.Rngs(0)), asked, Taught(), loss=lambda model, batch: 0.0)
    with pytest.raises(ConfigError, match=r"train\.distill.*without `hidden`"):
        Trainer(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), asked, Taught())
    small = ModelConfig(vocab_size=VOCAB, **MODEL)
    with pytest.raises(ConfigError, match=r"train\.distill.*without data"):
        plan_step(small, asked, "v5e:2x2", batch_size=8, seq_length=16)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    runs(Path(sys.argv[1]))
