"""Answers that are judged each for itself: formulas, answers under other prompts, whole runs."""

from __future__ import annotations

import json
import math
import shutil
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pytest
import yaml
from pyarrow.csv import write_csv

from easypipe import Pipeline, RunConfig
from easypipe.cli import main
from easypipe.core.config import from_dict, to_dict
from easypipe.core.errors import ConfigError, EasypipeError
from easypipe.run import train
from easypipe.train.checkpoint.checkpoint import Checkpoints
from easypipe.train.config import PreferenceConfig
from easypipe.train.losses import unpaired
from easypipe.train.losses.loss import RECORDED
from easypipe.train.losses.unpaired import answer_losses, answers_elsewhere
from easypipe.train.metrics.log import read_metrics
from token_support import small_tokenizer_folder
from train.runs import numbers
from train.test_processes import finish, launched


@pytest.mark.parametrize("loss", ["kto", "apo_zero_unpaired"])
def test_what_an_answer_costs_is_trls_formula_in_float64(loss: Any) -> None:
    draw = np.random.default_rng(1)
    ratios, desirable, kl = draw.normal(size=40) * 9, draw.random(40) < 0.5, 0.7 * (loss == "kto")
    config = PreferenceConfig(loss=loss, beta=0.3, desirable_weight=1.5, undesirable_weight=0.5)

    def sigmoid(x: float) -> float:
        return 1 / (1 + math.exp(-x))

    wanted = [
        1.5 * (1 - sigmoid(0.3 * (r - kl))) if good else 0.5 * (1 - sigmoid(0.3 * (kl - r)))
        for r, good in zip(ratios.tolist(), desirable.tolist(), strict=True)
    ]
    with jax.enable_x64(True):
        found = answer_losses(jnp.asarray(ratios), jnp.asarray(desirable), jnp.asarray(kl), config)
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-12)


def packed(samples: list[tuple[list[int], list[int]]], slots: int) -> dict[str, np.ndarray]:
    """A row of prompts with their answers; the last token of an answer is not a target where it is
    0.
    """
    row = {name: np.zeros(slots, np.int32) for name in ("input_ids", "segment_ids", "position_ids")}
    row["labels"] = np.full(slots, -100, np.int32)
    at = 0
    for number, (prompt, answer) in enumerate(samples, start=1):
        ids = prompt + answer
        here = slice(at, at + len(ids))
        row["input_ids"][here], row["segment_ids"][here] = ids, number
        row["position_ids"][here] = np.arange(len(ids))
        for slot in range(len(prompt), len(ids)):
            row["labels"][at + slot - 1] = ids[slot] or -100
        at += len(ids)
    return row


def test_answers_stand_under_the_next_prompt_of_their_row() -> None:
    draw = np.random.default_rng(7)
    for slots in (48, 64):
        rows, wanted = [], []
        for count in (5, 2, 1, 3):
            samples = [
                (draw.integers(1, 99, draw.integers(1, 6)).tolist(),
                 [*draw.integers(1, 99, draw.integers(1, 5)).tolist(), *[0] * draw.integers(0, 2)])
                for _ in range(count)
            ]  # fmt: skip
            rows.append(packed(samples, slots))
            turned = [(p, samples[(i + 1) % count][1]) for i, (p, _) in enumerate(samples)]
            wanted.append(packed(turned, slots))
        wanted[2]["labels"][:] = -100  # an answer alone has no other prompt
        batch = {name: jnp.asarray(np.stack([row[name] for row in rows])) for name in rows[0]}
        for wide in (False, True):
            # jax warns of the first scatter of int64 into int32, and will refuse it
            with jax.enable_x64(wide), warnings.catch_warnings(action="error"):
                found = jax.jit(answers_elsewhere)(batch)
            for name in rows[0]:
                np.testing.assert_array_equal(found[name], np.stack([row[name] for row in wanted]))


def test_the_mean_of_answers_elsewhere_is_no_part_of_the_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ratios(model: Any, batch: Any, reference: str) -> Any:
        here = model["here" if reference == unpaired.REFERENCE else "elsewhere"]
        return jnp.full((1, 2), here), jnp.ones((1, 2), jnp.bool_)

    monkeypatch.setattr(unpaired, "_ratios", ratios)
    names = ("input_ids", "labels", "segment_ids", "position_ids")
    batch = dict(zip(names, jnp.array([[[1, 2]], [[1, 2]], [[1, 2]], [[0, 0]]]), strict=True))
    batch[unpaired.DESIRABLE.name] = jnp.array([[1, 0]])
    loss = unpaired.unpaired_loss(PreferenceConfig(loss="kto", desirable_weight=2.0))
    model: Any = {"here": jnp.float32(0.3), "elsewhere": jnp.float32(0.7)}
    assert float(loss(model, batch).ratios["kl"][0]) == pytest.approx(2 * 0.7)
    found: Any = jax.grad(lambda model: loss(model, batch).loss_sum)(model)
    assert float(found["here"]) < 0
    assert float(found["elsewhere"]) == 0


def config(folder: Path, preference: Any, **dataset: Any) -> RunConfig:
    rows = [
        {"prompt": f"{n} + {n} = ", "completion": str(2 * n) if n % 3 else "no idea", "label": n % 3 > 0, "number": n}
        for n in range(60)
    ]  # fmt: skip
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    fields = {"prompt_field": "prompt", "completion_field": "completion", "desirable_field": "label"}  # fmt: skip
    own = {"data_files": str(folder / "rows.jsonl"), **(fields | dataset)}
    data = {
        "datasets": [{name: value for name, value in own.items() if value is not None}],
        "default_tokenizer": str(small_tokenizer_folder()),
        "cache_dir": str(folder / "cache"),
        "pack": {"seq_length": 64, "strategy": "first_fit", "oversize": "drop"},
        "load": {"batch_size": 4, "accumulation_steps": 2, "num_epochs": 20},
        "seed": 1,
    }
    sizes = dict.fromkeys(("hidden_size", "intermediate_size"), 16)
    model = {**sizes, "num_layers": 1, "num_heads": 1, "num_kv_heads": 1}
    training = {"output_dir": str(folder / "run"), "steps": 12, "optimizer": {"learning_rate": 0.02}}  # fmt: skip
    training |= {"preference": preference} if preference else {}
    return from_dict(RunConfig, {"data": data, "model": model, "train": training})


def test_adapters_learn_it_and_two_processes_have_the_curve_of_one(tmp_path: Path) -> None:
    """By command, with KTO: the adapters alone are kept, and the run goes on."""
    changes = {"lora": {"rank": 4, "targets": ["*"]}, "mesh": {"data": 2, "tensor": 2}}
    changes |= {"checkpoint": {"every": 4}, "optimizer": {"learning_rate": 0.1}}
    made = to_dict(config(tmp_path, {"loss": "kto"}))
    made["model"] |= {"num_heads": 2, "num_kv_heads": 2}
    assert main(["prepare", _written(tmp_path, "data", made, {})]) == 0
    for name, count in (("one", 1), ("two", 2)):
        file = _written(tmp_path, name, made, changes)
        finish(launched(count, ["-m", "easypipe", "train", file, "--samples", "0"]))
    one, two = (_numbers(tmp_path / name) for name in ("one", "two"))
    for a, b in zip(one, two, strict=True):
        assert a == pytest.approx(b, rel=1e-4, abs=1e-5)
    assert one[0]["loss"] == pytest.approx(0.5)
    assert one[-1]["loss"] < 0.48
    assert one[-1]["reward_desirable"] > one[-1]["reward_undesirable"]
    assert any(line["kl"] > 0 for line in one)
    # what stopped goes on, with the same reference, which is the model without its adapters
    shutil.rmtree(tmp_path / "two" / "checkpoints" / "12")
    finish(launched(1, ["-m", "easypipe", "train", str(tmp_path / "two.yaml"), "--samples", "0"]))
    again = _numbers(tmp_path / "two")
    for a, b in zip(again, one, strict=True):
        assert a == pytest.approx(b, rel=1e-4, abs=1e-5)
    kept = {name.rpartition(".")[2] for name in _kept(tmp_path / "two")}
    assert kept == {"lora_a", "lora_b"}


def _numbers(run: Path) -> list[dict[str, Any]]:
    """The numbers of each step; a loss of answers has no perplexity."""
    lines = numbers(read_metrics(run / "metrics.jsonl"))
    assert {line.pop("ppl") for line in lines} == {None}
    return lines


def _written(folder: Path, name: str, made: Any, changes: Any) -> str:
    """The file of a run."""
    own = {**made["train"], **changes, "output_dir": str(folder / name)}
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump({**made, "train": own}))
    return str(file)


def _kept(run: Path) -> list[str]:
    """Names of the parameters of the last checkpoint."""
    with Checkpoints(run / "checkpoints", keep=None) as checkpoints:
        found = checkpoints.describe(12)
    return [name for name in found if name.startswith("params/")]


@pytest.mark.parametrize(
    "preference",
    [{"loss": "kto"}, {"loss": "apo_zero_unpaired", "reference": "cached"}],
    ids=["kto", "apo"],
)
def test_desirable_answers_become_likelier_than_the_others(
    tmp_path: Path, preference: dict[str, str]
) -> None:
    train(config(tmp_path, preference))
    first, *_, last = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert first["loss"] == pytest.approx(0.5)
    assert first["reward_desirable"] == pytest.approx(0, abs=1e-5)
    assert last["loss"] < 0.45
    assert last["reward_desirable"] > 0 > last["reward_undesirable"]
    assert last.keys() - RECORDED - {"nll"} == {*PreferenceConfig(**preference).tells}


@pytest.mark.parametrize(
    ("preference", "dataset", "words"),
    [
        ({}, {"desirable_field": None}, "kto needs answers .*hold no verdicts.*desirable_field"),
        (None, {}, r"data: holds answers with verdicts, and without train\.preference"),
        ({"loss": "sigmoid"}, {}, "the rows hold no pairs of answers"),
        ({"reference": "cached"}, {}, r"preference\.reference: cached, and kto compares"),
        ({"loss": "ipo", "desirable_weight": 2}, {}, "has no effect on the loss ipo"),
        ({"desirable_weight": -1.0}, {}, "-1.0 is not a number from 0 up"),
        ({}, {"rejected_field": "label2"}, "desirable_column: judges one answer"),
        ({}, {"desirable_field": "prompt"}, "is the prompt_field too"),
        ({}, {"desirable_field": "number"}, "row 0, column .number.: [0-9] is not a verdict"),
    ],
)
def test_what_does_not_go_together_is_refused(
    tmp_path: Path, preference: Any, dataset: Any, words: str
) -> None:
    given = preference if preference is None else {"loss": "kto"} | preference
    with pytest.raises(EasypipeError, match=words):
        train(config(tmp_path, given, **dataset))


def test_weights_of_tokens_are_refused_as_preferences_do_not_use_them(tmp_path: Path) -> None:
    row = {"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "loss_weights": [1.0, 0.5, 0.5]}
    (tmp_path / "weighed.jsonl").write_text(json.dumps(row | {"desirable": [1, 1, 1]}) + "\n")
    values = to_dict(config(tmp_path, {"loss": "kto"}))
    values["data"]["datasets"] = [
        {
            "data_files": str(tmp_path / "weighed.jsonl"),
            "aligned_columns": ["loss_weights", "desirable"],
        }
    ]
    with pytest.raises(ConfigError, match="'loss_weights', which has no effect on preferences"):
        train(from_dict(RunConfig, values))


def test_verdicts_may_be_texts_as_in_csv(tmp_path: Path) -> None:
    config(tmp_path, {"loss": "kto"})
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    texts = [{**row, "label": ["false", "True", "TRUE"][row["number"] % 3]} for row in rows]
    write_csv(pa.Table.from_pylist(texts), tmp_path / "rows.csv")
    found = []
    for name in ("rows.jsonl", "rows.csv"):
        run = config(tmp_path, {"loss": "kto"}, data_files=str(tmp_path / name))
        found.append(Pipeline(run.data).source().tokenize().pack().load().build())
    for one, other in zip(*found, strict=True):
        for name, values in one.items():
            np.testing.assert_array_equal(values, other[name], name)


def test_answers_that_are_judged_stay_whole(tmp_path: Path) -> None:
    values = to_dict(config(tmp_path, {"loss": "kto"}))
    values["data"]["pack"]["oversize"] = "split"
    with pytest.raises(
        ConfigError, match=r"pack\.oversize: 'split' would cut answers with verdicts"
    ):
        train(from_dict(RunConfig, values))


def test_a_reward_model_is_told_by_what_it_scores_and_writes_no_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": f"{n} is", "chosen": f"{n} yes", "rejected": "no"} for n in range(40)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = to_dict(config(tmp_path, {"loss": "reward"}))
    [dataset] = made["data"]["datasets"]
    fields = {"prompt_field": "prompt", "completion_field": "chosen", "rejected_field": "rejected"}
    dataset |= {"data_files": str(tmp_path / "p.jsonl"), "desirable_field": None, **fields}
    made["eval"] = {"held": {"from": "data", "fraction": 0.3}}
    file = _written(tmp_path, "run", made, {"steps": 2})
    assert main(["train", file]) == 0
    told = capsys.readouterr().out
    assert "held out held: loss" in told
    assert "reward accuracy" in told
    assert "»" not in told
