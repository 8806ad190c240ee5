"""Weights of classes: torch's CrossEntropyLoss(weight=..., label_smoothing=...), in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compat.test_classify import config
from easypipe import ModelConfig, Trainer
from easypipe.compat.classify import train
from easypipe.core.errors import ConfigError, StateError
from easypipe.train.losses.loss import classification_sums
from easypipe.train.metrics.log import read_metrics
from train.runs import Arithmetic, settings

WEIGHTS = (0.25, 0.0, 3.0, 1.0)


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("z_loss", [0.0, 0.1])
def test_the_loss_is_the_weighted_mean_of_torch(smoothing: float, z_loss: float) -> None:
    """The formula of torch's documentation, row by row; and its gradient."""
    draw = np.random.default_rng(1)
    logits, labels = draw.normal(size=(40, 4)) * 3, draw.integers(0, 4, 40)
    labels[::7] = -100

    def textbook(logits: Any) -> Any:
        log_p = jax.nn.log_softmax(logits)
        total = weight = 0.0
        for n, label in enumerate(labels.tolist()):
            if label == -100:
                continue
            spread = sum(-w * log_p[n, c] for c, w in enumerate(WEIGHTS)) / 4
            total += (1 - smoothing) * -WEIGHTS[label] * log_p[n, label] + smoothing * spread
            total += z_loss * WEIGHTS[label] * jax.nn.logsumexp(logits[n]) ** 2
            weight += WEIGHTS[label]
        return total / weight

    batch = {"pixel_values": jnp.asarray(logits, jnp.float32), "labels": jnp.asarray(labels)}

    def ours(logits: Any) -> tuple[Any, Any]:
        batch["pixel_values"] = logits
        out = classification_sums(
            lambda given: given,
            batch,
            label_smoothing=smoothing,
            z_loss=z_loss,
            class_weights=WEIGHTS,
        )
        return out.loss_sum / out.divisor, out

    (found, out), slope = jax.value_and_grad(ours, has_aux=True)(jnp.asarray(logits, jnp.float32))
    with jax.enable_x64(True):
        wanted, exact = jax.value_and_grad(textbook)(jnp.asarray(logits))
        np.testing.assert_allclose(found, wanted, rtol=1e-5)
        np.testing.assert_allclose(slope, exact, rtol=1e-4, atol=1e-6)
    top, below = out.ratios["accuracy"]
    counted = labels != -100
    assert float(top / below) == pytest.approx((logits.argmax(-1) == labels)[counted].mean())
    assert out.num_targets == counted.sum()


def test_a_run_takes_them_and_goes_on_with_the_same(tmp_path: Path) -> None:
    def given(**more: Any) -> Any:
        own = {"output_dir": str(tmp_path / "run"), "steps": 4, "checkpoint": {"every": 2}}
        return config(tmp_path, train=own | more)

    train(given(output_dir=str(tmp_path / "plain")))
    train(given(output_dir=str(tmp_path / "even"), class_weights=[2.0] * 3))
    train(given(class_weights=[0.1, 5.0, 1.0]))
    plain, even, own = (
        [line["loss"] for line in read_metrics(tmp_path / name / "metrics.jsonl")]
        for name in ("plain", "even", "run")
    )
    assert even == pytest.approx(plain, rel=1e-5)
    assert own != pytest.approx(plain, rel=1e-3)
    with pytest.raises(StateError, match="class_weights"):
        train(given(class_weights=[0.1, 5.0, 2.0]))
    with pytest.raises(ConfigError, match=r"train.class_weights: 2 weights, and there are 3 class"):
        train(given(output_dir=str(tmp_path / "other"), class_weights=[1.0, 2.0]))


def test_what_has_no_classes_refuses_them(tmp_path: Path) -> None:
    model = ModelConfig(
        vocab_size=32, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=1, num_kv_heads=1
    )
    with pytest.raises(ConfigError, match="this model predicts tokens"):
        Trainer(model, settings(tmp_path, class_weights=[1.0] * 32), Arithmetic())
    given = settings(tmp_path, class_weights=[1.0] * 32)
    with pytest.raises(ConfigError, match="no effect on a loss from Python"):
        Trainer(model, given, Arithmetic(), loss=lambda module, batch: jnp.zeros(()))
    for wrong in ([-1.0, 1.0], [0.0, 0.0], [float("nan"), 1.0], []):
        with pytest.raises(
            ConfigError, match=r"class_weights: .* are not weights: each must be at least 0"
        ):
            settings(tmp_path, class_weights=wrong)
    with pytest.raises(ConfigError, match="no effect on preferences"):
        settings(tmp_path, class_weights=[1.0, 2.0], preference={"beta": 0.1})
