"""Document 004's TrainingConfig: its four keys take effect where they belong, and conflicts are
refused.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from easypipe import (
    ClassifyConfig,
    ModelConfig,
    OptimizerConfig,
    PipelineConfig,
    RunConfig,
    TaskSpec,
    Trainer,
    TrainingConfig,
    UniversalDataModule,
    load_tokenizer,
)
from easypipe.compat.trainer import _pipeline
from easypipe.core.config import from_dict, to_dict
from easypipe.core.errors import ConfigError
from easypipe.train.events import Callback, TrainEvent
from easypipe.train.metrics.log import read_metrics
from pipelines import texts, tokenizer
from train.runs import Tiny

WIKI = [{"text": text} for text in texts(50)]


def test_the_documents_training_config_as_printed() -> None:
    # Define training config
    training_config = TrainingConfig(batch_size=32, epochs=10, learning_rate=5e-5, random_seed=42)

    # Create data module with config parameters
    data_module = UniversalDataModule(
        train_data=WIKI,
        task_spec=TaskSpec.lm_tiny(),
        tokenizer=load_tokenizer(tokenizer()),
        batch_size=training_config.batch_size,
        seed=training_config.random_seed,
        num_workers=2,
    )
    assert next(iter(data_module.train_dataloader()))["input_ids"].shape[0] == 32
    assert (training_config.epochs, training_config.learning_rate) == (10, 5e-5)
    assert (training_config.seed, training_config.optimizer.learning_rate) == (42, 5e-5)
    assert TrainingConfig(seed=3, optimizer={"name": "lion"}).random_seed == 3
    assert TrainingConfig(optimizer={"name": "lion"}).learning_rate == 1e-4  # that optimizer's own
    both = TrainingConfig(learning_rate=1e-2, optimizer={"name": "lion", "learning_rate": 1e-2})
    assert both.optimizer.name == "lion"
    assert from_dict(TrainingConfig, to_dict(training_config)) == training_config


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"learning_rate": 1e-3, "optimizer": {"learning_rate": 1e-2}},
            r"learning_rate: 0.001, but optimizer.learning_rate is 0.01: they",
        ),
        (
            {"learning_rate": 1e-3, "optimizer": OptimizerConfig(learning_rate=1e-2)},
            r"0.001, but optimizer.learning_rate is",
        ),
        (
            {"random_seed": 1, "seed": 0},
            r"random_seed: 1, but seed is 0: they are one option. Give one of them",
        ),
        ({"epochs": 2, "steps": 5}, r"epochs: 2, and steps say how long the run is too"),
        ({"epochs": 0}, r"epochs: 0 is too small"),
        ({"batch_size": 0}, r"batch_size: 0 is too small"),
        ({"learning_rate": -1.0}, r"optimizer.learning_rate: -1.0 is not a positive number"),
        ({"random_seed": "x"}, r"seed: wants a whole number"),
        ({"num_train_epochs": 3}, r"'num_train_epochs' is data\.load\.num_epochs here"),
    ],
)
def test_conflicting_values_of_a_training_config_are_refused(
    given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainingConfig(**given)


def test_batches_and_passes_of_a_training_config_are_told_to_the_data() -> None:
    train = {"batch_size": 4, "epochs": 3, "output_dir": "run"}
    data = {"datasets": [{"data_files": "a.parquet"}], "default_tokenizer": "t"}
    run = from_dict(RunConfig, {"data": data, "train": train})
    assert run.data.load is not None
    assert (run.data.load.batch_size, run.data.load.num_epochs) == (4, 3)
    assert from_dict(RunConfig, to_dict(run)) == run
    assert dataclasses.replace(run, model=ModelConfig()).data == run.data
    for load, message in (
        # which is its default, but was written
        ({"batch_size": 8}, "train.batch_size: 4, but data.load.batch_size is 8"),
        ({"num_epochs": None}, "train.epochs: 3, but data.load.num_epochs is None"),
    ):
        with pytest.raises(ConfigError, match=message):
            from_dict(RunConfig, {"data": data | {"load": load}, "train": train})
    images = {"data_files": [{"image": np.zeros((2, 2)), "label": 0}]}
    task = {"name": "digits", "modality": "vision", "task_type": "classification"}
    classify = from_dict(ClassifyConfig, {"task": task, "data": images, "train": train})
    assert (classify.data.batch_size, classify.data.num_epochs) == (4, 3)
    with pytest.raises(ConfigError, match=r"train.batch_size: 4, but data.batch_size is 2"):
        from_dict(
            ClassifyConfig, {"task": task, "data": images | {"batch_size": 2}, "train": train}
        )


def test_a_run_makes_the_passes_that_its_config_says(tmp_path: Path) -> None:
    rows = [np.arange(i, i + 9) % 32 for i in range(16)]

    def run(name: str, stop: int | None = None, passes: int = 1, **options: Any) -> list[Any]:
        config = TrainingConfig(
            output_dir=tmp_path / name,
            batch_size=4,
            epochs=3,
            learning_rate=0.05,
            random_seed=2,
            **options,
        )
        module = UniversalDataModule(
            rows, batch_size=4, seed=config.random_seed, num_epochs=passes, num_workers=0
        )

        class Ending(Callback):
            def on_step(self, event: TrainEvent) -> None:
                if event.step == stop:
                    event.control.stop("enough")

        Trainer(Tiny, config, module.train_dataloader(), callbacks=[Ending()]).run()
        return [
            (record["step"], record["loss"])
            for record in read_metrics(tmp_path / name / "metrics.jsonl")
        ]

    whole = run("three passes at once", passes=3)
    assert len(whole) == 12
    assert run("one pass after the other") == whole
    run("in two parts", stop=6)
    assert run("in two parts") == whole
    loader = UniversalDataModule(rows, batch_size=8, seed=1, num_epochs=None).train_dataloader()
    for config, message in (
        (
            {"batch_size": 4, "steps": 2},
            "train.batch_size: 4, but the loader's batches have 8 rows. Make the loader with this "
            "batch_size",
        ),
        (
            {"epochs": 3},
            "train.epochs: 3, but the loader never ends. Make it with num_epochs=3, or give steps "
            "here",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            Trainer(Tiny, TrainingConfig(output_dir=tmp_path / "no", **config), loader)
    # begins at its first batch every time
    plain = UniversalDataModule(rows, batch_size=8, seed=1).train_dataloader().loader(0)
    with pytest.raises(
        ConfigError,
        match=r"train.epochs: 3, but the loader ends after 1. Make it with num_epochs=3",
    ):
        Trainer(Tiny, TrainingConfig(output_dir=tmp_path / "no", epochs=3), plain)
    named = Trainer(
        Tiny,
        TrainingConfig(output_dir=tmp_path / "no", learning_rate=0.1),
        plain,
        learning_rate=0.2,
        random_seed=7,
    ).config
    assert (named.optimizer.learning_rate, named.seed) == (0.2, 7)


@pytest.mark.parametrize("option", ["seq_length", "batch_size", "progress"])
def test_options_of_data_beside_a_loader_are_refused(option: str) -> None:
    with pytest.raises(ConfigError, match=f"^{option}: has no effect on a loader that is given"):
        Trainer(None, TrainingConfig(), [], **{option: 4})


def test_held_out_data_has_a_name() -> None:
    with pytest.raises(ConfigError, match=r"^evals: list does not name what is held out"):
        Trainer(None, TrainingConfig(), [], [[]])  # pyright: ignore[reportArgumentType]


def test_data_is_read_from_a_file_of_it_or_of_a_whole_run(tmp_path: Path) -> None:
    data = {"datasets": [{"name": "a", "data_files": "a.jsonl"}], "seed": 3}
    for values in (data, {"data": data, "train": {"steps": 5}}):
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(values))
        made = _pipeline("data", path, 64, 8)
        assert made.pack is not None
        assert made.load is not None
        assert (made.seed, made.pack.seq_length, made.load.batch_size) == (3, 64, 8)
        assert _pipeline("data", path, None, None) == from_dict(PipelineConfig, data)
