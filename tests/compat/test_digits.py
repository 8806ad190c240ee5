"""Vision from a TaskSpec: scikit-learn's digits, a small convolutional network, our Trainer."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from easypipe import TaskSpec, Trainer, TrainingConfig, UniversalDataModule
from easypipe.train.losses.loss import classification_sums


class Digits(nnx.Module):
    """[B, 8, 8, 1] to logits of ten classes."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv = nnx.Conv(1, 16, (3, 3), rngs=rngs)
        self.out = nnx.Linear(16 * 16, 10, rngs=rngs)

    def __call__(self, pixels: jax.Array) -> jax.Array:
        x = nnx.max_pool(nnx.relu(self.conv(pixels)), (2, 2), (2, 2))
        return self.out(x.reshape(x.shape[0], -1))


def module() -> UniversalDataModule:
    datasets = pytest.importorskip("sklearn.datasets")
    images, labels = datasets.load_digits(return_X_y=True)
    rows = [
        {"image": image.reshape(8, 8).astype(np.float32) / 16, "label": int(label)}
        for image, label in zip(images, labels, strict=True)
    ]
    task = TaskSpec(
        name="digits",
        modality="vision",
        task_type="classification",
        options={"channels": 1, "mean": [0.3], "std": [0.35]},
    )
    return UniversalDataModule(
        rows, task_spec=task, batch_size=64, val_split=0.2, seed=7, num_workers=1, num_epochs=None
    )


def train(folder: Path, steps: int, accumulate_steps: int = 1) -> Any:
    data = module()
    config = TrainingConfig(
        output_dir=folder,
        steps=steps,
        seed=1,
        accumulate_steps=accumulate_steps,
        optimizer={"learning_rate": 0.01, "warmup_steps": 1},
        checkpoint={"every": 20},
    )
    return Trainer(
        Digits,
        config,
        data.train_dataloader(),
        {"val": data.val_dataloader()},
        loss=classification_sums,
    ).run()


def test_digits_are_learned_and_a_run_goes_on_where_it_stood(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", 60)
    assert whole.first["num_tokens"] == 64  # rows without tokens count as one each
    assert whole.last["eval"]["val"]["loss"] < 0.4 < whole.first["loss"]
    assert whole.last["eval"]["val"]["num_targets"] == 359
    val = module().val_dataloader()
    assert val is not None
    seen = [
        (jnp.argmax(whole.model(batch["pixel_values"]), -1) == batch["labels"]) for batch in val
    ]
    assert np.concatenate(seen).mean() > 0.9
    assert whole.last["eval"]["val"]["accuracy"] == pytest.approx(np.concatenate(seen).mean())

    # Killed behind step 40 and run again: the same losses, bit for bit.
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "checkpoints" / "60")
    again = train(tmp_path / "again", 60)
    assert again.resumed_from == 40
    assert again.last["loss"] == whole.last["loss"]


def test_micro_batches_of_images(tmp_path: Path) -> None:
    one, two = (train(tmp_path / str(pieces), 3, pieces) for pieces in (1, 2))
    assert one.last["loss"] == pytest.approx(two.last["loss"], rel=1e-5)
