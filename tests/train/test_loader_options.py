"""What a loader can be told, as the Trainer sees it: micro-batches, batch sizes by step, and data
that changed.
"""

from __future__ import annotations

import re

import jax
import numpy as np
import pytest

from easypipe import DatasetConfig, PipelineConfig, RunConfig
from easypipe.core.config import apply_overrides, from_dict
from easypipe.core.errors import ConfigError, StateError
from easypipe.loader.config import LoadStageConfig
from easypipe.loader.loader import Loader
from easypipe.run import inputs_of
from easypipe.train.callbacks.named import BestCheckpoints, EarlyStopping
from easypipe.train.config import TrainingConfig
from easypipe.train.metrics.log import read_metrics
from easypipe.train.parallel.mesh import make_mesh
from easypipe.train.record import read_changes, read_kept, write_config, write_versions
from easypipe.train.trainer import Trainer
from loader_support import MemoryCache, plan_rows, some_docs
from pipelines import jsonl, tokenizer
from train.runs import Arithmetic, Tiny, numbers, settings

MESH = make_mesh({"data": 1}, devices=jax.devices()[:1])
CACHE = MemoryCache(some_docs([9] * 90, vocab_size=32), vocab_size=32)
OTHER = MemoryCache(some_docs([9] * 90, vocab_size=32, seed=4), vocab_size=32)


def loader(cache=CACHE, **load) -> Loader:
    load = {"batch_size": 4, "num_epochs": None, "mesh": MESH, **load}
    return Loader(
        plan_rows([cache], seq_length=12, num_epochs=load["num_epochs"]), LoadStageConfig(**load)
    )


def trainer(folder, train, evals=None, given=(), **changes) -> Trainer:
    config = settings(folder, **{"steps": 3, **changes})
    return Trainer(Tiny, config, train, evals, mesh=MESH, callbacks=given)


def curve(folder):
    return numbers(read_metrics(folder / "metrics.jsonl"))


def test_micro_batches_cut_by_the_loader_train_the_same_bit_for_bit(tmp_path):
    trainer(tmp_path / "trainer", loader(), accumulate_steps=2).run()
    trainer(tmp_path / "loader", loader(accumulation_steps=2), accumulate_steps=2).run()
    assert curve(tmp_path / "loader") == curve(tmp_path / "trainer")


@pytest.mark.parametrize("pieces", [1, 4])
def test_both_have_to_agree_on_how_many(tmp_path, pieces):
    message = (
        rf"train\.accumulate_steps: {pieces}, but the loader cuts its batches into 2 "
        r"micro-batches\. Use the same number"
    )
    with pytest.raises(ConfigError, match=message):
        trainer(tmp_path, loader(accumulation_steps=2), accumulate_steps=pieces)
    with pytest.raises(
        ConfigError, match=r"eval\.held\.load\.accumulation_steps: 1, but the loader cuts"
    ):
        trainer(tmp_path, loader(), {"held": loader(accumulation_steps=2, num_epochs=1)})


def test_batches_grow_with_the_step(tmp_path):
    # NumPy batches, which the Trainer places
    one = loader(batch_size_schedule=((2, 8),), accumulation_steps=2, mesh=None)
    trainer(tmp_path, one, steps=4, accumulate_steps=2).run()
    tokens = [record["num_tokens"] for record in curve(tmp_path)]
    real = [
        sum(
            int((b["segment_ids"] > 0).sum())
            for b in [loader(mesh=None, batch_size_schedule=((2, 8),)).batch(t)]
        )
        for t in range(4)
    ]
    assert tokens == real
    assert np.diff(tokens)[1] > 20


def test_a_refusal_names_every_key_that_differs_ready_to_paste_and_no_other(tmp_path):
    trainer(tmp_path, loader(), steps=3).run()
    # the last did not change
    for given in ((), ("train.steps",), ("loader.sources", "loader.tokenizer")):
        with pytest.raises(StateError) as error:
            trainer(tmp_path, loader(OTHER, batch_size=8), steps=5, resume_changes=given).run()
        pasted = re.findall(r"train\.resume_changes=(\[\S+\])\.$", str(error.value))
        assert pasted == [
            "[train.steps,loader.batch_size,loader.sources,loader.config,loader.plan]"
        ], str(error.value)
    assert "batch_size was 4, is 8" in str(error.value)
    changes = from_dict(
        TrainingConfig, apply_overrides({"output_dir": "x"}, [f"resume_changes={pasted[0]}"])
    ).resume_changes
    assert (
        trainer(tmp_path, loader(OTHER, batch_size=8), steps=5, resume_changes=changes)
        .run()
        .resumed_from
        == 3
    )


def test_the_state_of_another_kind_of_loader_is_refused(tmp_path):
    trainer(tmp_path, loader(), steps=3).run()
    with pytest.raises(StateError, match=r"Arithmetic: its states are a dict, .*Give the loader"):
        trainer(tmp_path, Arithmetic(batch_size=4), steps=3).run()


def test_changed_data_are_refused_unless_the_config_says_so(tmp_path):
    trainer(tmp_path, loader(), steps=3).run()
    with pytest.raises(
        StateError,
        match=r"3: belongs to a run on other data: sources and plan "
        r"changed.*train\.resume_changes=\[train",
    ):
        trainer(tmp_path, loader(OTHER), steps=5, resume_changes=("train.steps",)).run()
    one = loader(OTHER)
    trainer(
        tmp_path, one, steps=5, resume_changes=("train.steps", "loader.sources", "loader.plan")
    ).run()
    assert len(curve(tmp_path)) == 5
    assert one.state().changes[0]["batch"] == 3


@pytest.mark.parametrize("by_name", [True, False])
def test_values_of_changed_held_out_data_are_not_compared(tmp_path, caplog, by_name):
    """The lowest of old and the highest of new data would rank; data that comes or goes may."""

    def run(cache, steps, *names):
        metric = {"metric": "eval.held.loss"}
        named = {"best": {**metric, "keep": 9}, "early_stopping": {**metric, "patience": 9}}
        values = {"output_dir": str(tmp_path), "callbacks": named}
        callbacks = from_dict(TrainingConfig, values).callbacks
        options = {"resume_changes": ["train.steps"], "eval_every": 1}
        evals = {name: loader(cache, num_epochs=1) for name in ("held", *names)}
        given = ()
        if by_name:
            options["callbacks"] = callbacks
        else:
            best = BestCheckpoints(callbacks.best, tmp_path)
            given = (EarlyStopping(callbacks.early_stopping), best)
        one = trainer(tmp_path, loader(), evals, given, steps=steps, **options)
        one.run()
        early = next(each for each in one.callbacks if isinstance(each, EarlyStopping))
        return early.best

    def ranked():
        return sorted(one["step"] for one in read_kept(tmp_path / "best.json"))

    run(CACHE, 3)
    run(CACHE, 4, "more")  # one more is no change of the other
    assert ranked() == [1, 2, 3, 4]
    assert "eval.held" not in caplog.text
    run(OTHER, 4)  # it is finished: nothing more is compared
    assert ranked() == [1, 2, 3, 4]
    caplog.clear()
    best = run(OTHER, 6)
    assert ranked() == [5, 6]
    assert best == min(one["eval"]["held"]["loss"] for one in curve(tmp_path)[4:])
    assert "since the checkpoint: eval.held: another sources and plan" in caplog.text
    entry = read_changes(tmp_path)[-1]
    assert (entry["step"], entry["changed"]["eval.held"]) == (4, "another sources and plan")


def test_a_run_has_one_key_for_micro_batches(caplog):
    def run(load, **options):
        return RunConfig(
            data=PipelineConfig(datasets=[DatasetConfig(data_files="a.jsonl")], load=load),
            train=TrainingConfig(output_dir="runs", **options),
        )

    two = {"batch_size": 4, "accumulation_steps": 2}
    assert run(two).train.accumulate_steps == 2
    assert run(two, accumulate_steps=2).train.accumulate_steps == 2
    assert not caplog.records
    assert run({"batch_size": 4}, accumulate_steps=2).train.accumulate_steps == 2
    assert "another name of data.load.accumulation_steps" in caplog.text
    with pytest.raises(ConfigError, match=r"3, but data\.load\.accumulation_steps is 2"):
        run(two, accumulate_steps=3)


def test_a_trainer_takes_the_micro_batches_of_its_data(tmp_path, caplog):
    lines = [{"text": "abc " * 20}] * 40

    def made(pieces: int, **options) -> Trainer:
        data = {
            "datasets": [{"data_files": str(jsonl(tmp_path / "a.jsonl", lines))}],
            "default_tokenizer": tokenizer(),
            "cache_dir": str(tmp_path / "cache"),
            "seed": 1,
            "load": {"batch_size": 4, "accumulation_steps": pieces, "num_epochs": None},
        }
        options = {"output_dir": tmp_path / "run", "steps": 1, "mesh": MESH, **options}
        return Trainer(Tiny, data=data, seq_length=16, **options)

    both, alone = made(2, accumulate_steps=2), made(2)
    assert both.config == alone.config
    assert alone.config.accumulate_steps == alone.run_config["train"]["accumulate_steps"] == 2
    assert alone.in_micro_batches
    assert "another name" not in caplog.text
    assert made(1, accumulate_steps=2).config.accumulate_steps == 2
    assert "another name of data.load.accumulation_steps" in caplog.text
    with pytest.raises(ConfigError, match=r"3, but data\.load\.accumulation_steps is 2"):
        made(2, accumulate_steps=3)


def test_a_run_whose_data_has_no_seed_records_the_one_that_was_drawn(tmp_path):
    """So that it goes on with the same batches."""
    data = {
        "datasets": [{"data_files": str(jsonl(tmp_path / "a.jsonl", [{"text": "abc"}] * 40))}],
        "default_tokenizer": tokenizer(),
        "cache_dir": str(tmp_path / "cache"),
    }
    model = {"hidden_size": 16, "intermediate_size": 16, "num_layers": 1, "num_heads": 2}
    how = {"output_dir": str(tmp_path / "run"), "steps": 1}
    run = from_dict(RunConfig, {"data": data, "train": how, "model": model})
    made = inputs_of(run, mesh=MESH)
    assert run.data.seed is None
    assert made.run.data.seed == made.prepared.data.get_context().seed
    (tmp_path / "run").mkdir()
    write_versions(tmp_path / "run", 0)
    write_config(tmp_path / "run", made.run)
    assert inputs_of(run, mesh=MESH).run.data.seed == made.run.data.seed
