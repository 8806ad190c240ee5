"""`easypipe.Trainer` takes what its engine takes; a loss of one's own gives a mean, means by name,
or sums.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import easypipe
from easypipe import Trainer
from easypipe.core.errors import ConfigError
from easypipe.core.schema import IGNORE
from easypipe.train import state as states
from easypipe.train.events import Callback
from easypipe.train.losses.loss import RECORDED, AsSums, LossOutput
from easypipe.train.metrics.log import read_metrics
from easypipe.train.parallel.mesh import make_mesh
from easypipe.train.step import _gradients, gradient_places
from pipelines import jsonl, texts, tokenizer
from train.runs import Arithmetic, Tiny, settings

MESH = make_mesh(devices=jax.devices()[:1])


def each(model: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    """The cross entropy of every label, and which count."""
    logits = model.hidden(batch["input_ids"]) @ model.lm_head()
    nll = -jnp.take_along_axis(
        jax.nn.log_softmax(logits), jnp.maximum(batch["labels"], 0)[..., None], -1
    )[..., 0]
    return nll, batch["labels"] != IGNORE


def sums(model: Any, batch: Any) -> LossOutput:
    nll, counted = each(model, batch)
    total = (nll * counted).sum()
    return LossOutput(
        total,
        counted.sum(),
        jax.lax.stop_gradient(total),
        {"sharp": ((nll < 2) & counted).sum().astype(jnp.float32)},
    )


def mean(model: Any, batch: Any) -> jax.Array:
    nll, counted = each(model, batch)
    return nll.mean(where=counted)  # 0 / 0 where nothing counts


def means(model: Any, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    nll, counted = each(model, batch)
    loss = (nll * counted).sum() / counted.sum()  # its gradient too is 0 / 0 there
    return loss, {"nll": loss, "sharp": (nll < 2).mean(where=counted)}


class Uneven(Arithmetic):
    """Batches whose micro-batches have unlike numbers of targets, one of them none."""

    def batch(self, t: int) -> dict[str, np.ndarray]:
        made = super().batch(t)
        made["labels"][1::4] = IGNORE
        made["labels"][2::4, 3:] = IGNORE
        return made


def train(loss: Any, folder: Path, accumulate: int = 1) -> list[dict[str, Any]]:
    config = settings(
        folder, steps=4, accumulate_steps=accumulate, optimizer={"learning_rate": 0.05}
    )
    Trainer(Tiny, config, Uneven(), {"held": Uneven(3, seed=5, last=3)}, loss=loss, mesh=MESH).run()
    return read_metrics(folder / "metrics.jsonl")


@pytest.fixture(scope="module")
def by_sums(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return train(sums, tmp_path_factory.mktemp("sums"))


@pytest.mark.parametrize("micro", [True, False])
def test_a_micro_batch_without_targets_adds_no_gradient(micro: bool) -> None:
    """Step by step: compilers fold the 0 / 0 of most losses away."""
    model, batch = Tiny(nnx.Rngs(0)), Arithmetic(blank=1).batch(1)
    with states.on(MESH), jax.disable_jit():
        layout = states.layout_of(model, MESH)
        gradients = _gradients(layout, AsSums(means), gradient_places(layout), micro=micro)
        found, _, _ = gradients(*layout.split(model), jax.tree.map(jnp.asarray, batch))
    assert {bool(jnp.isfinite(g).all()) for g in found.values()} == {micro}


@pytest.mark.parametrize(("loss", "accumulate"), [(means, 4), (mean, 1)])
def test_means_train_as_their_sums_do(
    by_sums: list[dict[str, Any]], loss: Any, accumulate: int, tmp_path: Path
) -> None:
    records = train(loss, tmp_path, accumulate)
    for wanted, got in zip(by_sums, records, strict=True):
        assert got["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
        assert got["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-4)
        assert got["num_targets"] == wanted["num_targets"]
        for key in ("nll", "ppl"):  # which only the loss can know
            assert got[key] == (pytest.approx(wanted[key], rel=1e-5) if loss is means else None)
        assert ("sharp" in got) == (loss is means)
        assert got.get("sharp", wanted["sharp"]) == pytest.approx(wanted["sharp"], abs=1e-5)
    assert by_sums[-1]["loss"] < by_sums[0]["loss"]
    seen, wanted = records[-1]["eval"]["held"], by_sums[-1]["eval"]["held"]
    told = (
        wanted
        if loss is means
        else {
            "loss": wanted["loss"],
            "nll": None,
            "ppl": None,
            "num_targets": wanted["num_targets"],
        }
    )
    assert seen == {
        key: value if value is None else pytest.approx(value, rel=1e-5)
        for key, value in told.items()
    }


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            lambda nll: nll,
            r"loss: gave float32 of shape \(8, 12\)\. A loss returns a scalar, the mean over the "
            r"batch's targets; \(scalar",
        ),
        (lambda nll: {"loss": nll.mean()}, r"loss: gave dict\. A loss returns"),
        (lambda nll: (nll > 1).any(), r"loss: gave bool of shape \(\)\. A loss returns"),
        (lambda nll: (nll > 1).sum(), r"loss: gave int32 of shape \(\)\. A loss returns"),
        (
            lambda nll: (nll.sum(), 1, 2),
            r"loss: gave tuple\. A loss returns .* or a LossOutput of sums",
        ),
        (
            lambda nll: (nll.mean(), {"each": nll.mean(0)}),
            r"loss, 'each': gave float32 of shape \(12,\)\. Give a scalar",
        ),
        (
            lambda nll: (nll.mean(), {"grad_norm": nll.mean()}),
            r"loss, 'grad_norm': is the name of a value that every record has .*Give it another name",
        ),
        (
            lambda nll: LossOutput(nll.sum(), jnp.int32(nll.size), nll.sum(), {"nll": nll.sum()}),
            r"loss, 'nll': is the name of a value that every record has",
        ),
        (
            lambda nll: LossOutput(
                nll.sum(), jnp.int32(9), nll.sum(), ratios={"step": (nll.sum(), nll.sum())}
            ),
            r"loss, 'step': is the name of a value that every record has",
        ),
    ],
)
def test_what_is_no_loss_is_refused(given: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        Trainer(
            Tiny,
            settings(tmp_path, steps=3),
            Arithmetic(),
            loss=lambda model, batch: given(each(model, batch)[0]),
            mesh=MESH,
        ).run()


def test_sequences_that_are_no_tokens_are_cut_into_micro_batches(tmp_path: Path) -> None:
    class Features(Arithmetic):
        def batch(self, t: int) -> dict[str, np.ndarray]:
            known = super().batch(t)
            return {"features": known["input_ids"][..., None] / 32, "labels": known["labels"]}

    class Tagger(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.out = nnx.Linear(2, 32, rngs=rngs)

    def loss(model: Any, batch: Any) -> jax.Array:
        own = batch["features"].astype(jnp.float32)
        of_row = jnp.broadcast_to(own.mean(1, keepdims=True), own.shape)
        logits = model.out(jnp.concatenate([own, of_row], -1))
        labels = jnp.maximum(batch["labels"], 0)[..., None]
        nll = -jnp.take_along_axis(jax.nn.log_softmax(logits), labels, -1)[..., 0]
        return nll.mean(where=batch["labels"] != IGNORE)

    losses = [
        Trainer(Tagger, config, Features(), loss=loss, mesh=MESH).run().last["loss"]
        for pieces in (1, 2)
        for config in (settings(tmp_path / f"{pieces}", steps=3, accumulate_steps=pieces),)
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_a_mean_over_what_nobody_has_counted_is_refused(tmp_path: Path) -> None:
    class Bare(Arithmetic):
        def batch(self, t: int) -> dict[str, np.ndarray]:
            return {"input_ids": super().batch(t)["input_ids"]}

    def loss(model: Any, batch: Any) -> jax.Array:
        return model.hidden(batch["input_ids"]).mean()

    with pytest.raises(
        ConfigError,
        match=r"loss: returned a mean, but the batch has no labels.*Give a LossOutput of sums, with num_targets",
    ):
        Trainer(Tiny, settings(tmp_path / "a", steps=3), Bare(), loss=loss, mesh=MESH).run()

    def counted(model: Any, batch: Any) -> LossOutput:
        return LossOutput(
            loss(model, batch) * batch["input_ids"].size,
            jnp.int32(batch["input_ids"].size),
            jnp.float32(0),
        )

    last = (
        Trainer(Tiny, settings(tmp_path / "b", steps=3), Bare(), loss=counted, mesh=MESH).run().last
    )
    assert math.isfinite(last["loss"])


def test_names_of_a_record_are_refused_of_a_loss(by_sums: list[dict[str, Any]]) -> None:
    assert by_sums[-1].keys() - {"nll", "sharp"} == RECORDED


@pytest.mark.parametrize("metric", ["sharp", "eval.held.sharp"])
def test_what_a_loss_tells_by_name_can_be_watched(metric: str, tmp_path: Path) -> None:
    def steps(mode: str, name: str = metric) -> Any:
        # a share never gains that much
        early = {"early_stopping": {"metric": name, "mode": mode, "patience": 1, "min_delta": 1.0}}
        config = settings(tmp_path / mode, steps=5, eval_every=1, callbacks=early)
        held = {"held": Uneven(3, seed=5, last=3)}
        Trainer(Tiny, config, Uneven(), held, loss=means, mesh=MESH).run()
        return [record["step"] for record in read_metrics(tmp_path / mode / "metrics.jsonl")]

    assert steps("max") == [1, 2]
    # known before anything runs
    with pytest.raises(ConfigError, match=r"no metric named 'eval\.hold\.sharp'"):
        steps("min", "eval.hold.sharp")


@pytest.mark.parametrize("callback", ["early_stopping", "best"])
@pytest.mark.parametrize(
    ("loss", "metric", "meant"),
    [
        (means, "eval.held.sharper", "eval.held.sharp"),
        (sums, "eval.held.fill", "eval.held.nll"),
        (mean, "eval.held.nll", "eval.held.loss"),  # which only the loss could know
        (means, "sharper", "sharp"),
        (sums, "tokens_per_second", None),  # another in each process
    ],
)
@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_metric_that_a_loss_does_not_tell_is_refused_before_the_first_step(
    callback: str, loss: Any, metric: str, meant: str | None, accumulate: int, tmp_path: Path
) -> None:
    class Dispatched(Callback):
        def on_dispatch(self, event: Any) -> None:
            raise AssertionError("a step was taken")

    config = settings(
        tmp_path,
        steps=5,
        eval_every=1,
        accumulate_steps=accumulate,
        callbacks={callback: {"metric": metric}},
    )
    held = {"held": Uneven(3, seed=5, last=3)}
    kind = "metric" if callback == "early_stopping" else "held-out metric"
    words = rf"train\.callbacks\.{callback}\.metric: no {kind} named '{metric}' \(have: "
    words += "loss, " if callback == "early_stopping" else r"eval\.held\.loss"
    if meant is not None and (callback == "early_stopping" or "eval" in meant):
        words += rf".*Did you mean '{meant}'"
    options = {"loss": loss, "mesh": MESH, "callbacks": [Dispatched()]}
    with pytest.raises(ConfigError, match=words):
        Trainer(Tiny, config, Uneven(), held, **options).run()


class Misspelt(Callback):
    def on_steps(self, event: Any) -> None: ...


class Unheard(Callback):
    def on_the_hour(self, event: Any) -> None: ...


class Heard(Callback):
    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_step(self, event: Any) -> None:
        self.steps.append(event.step)


def test_one_class_under_one_name() -> None:
    from easypipe.train import trainer

    assert trainer.Trainer is easypipe.Trainer is Trainer
    assert Trainer.__name__ == "Trainer"
    with pytest.raises(AttributeError, match="has no attribute 'Traner'"):
        _ = trainer.Traner


@pytest.mark.parametrize("by", ["loader", "data"])
def test_callbacks_mesh_loss_and_optimizer_from_python(by: str, tmp_path: Path) -> None:
    import optax

    heard = Heard()
    options: dict[str, Any] = {
        "steps": 2,
        "output_dir": str(tmp_path / "run"),
        "callbacks": [heard],
        "mesh": MESH,
        "loss": means,
        "optimizer": optax.sgd(0.1),
    }
    if by == "loader":
        trainer = Trainer(Tiny, train=Arithmetic(), **options)
    else:

        def model(rngs: nnx.Rngs) -> nnx.Module:
            made = Tiny(rngs)
            made.table = nnx.Embed(400, 8, rngs=rngs)
            return made

        rows = jsonl(tmp_path / "rows.jsonl", [{"text": text} for text in texts(40)])
        data = easypipe.DatasetConfig(data_files=str(rows), tokenizer=tokenizer())
        trainer = Trainer(
            model, data=data, seq_length=16, batch_size=4, progress=lambda event: None, **options
        )
    assert trainer.mesh is MESH
    assert trainer.callbacks == (heard,)
    last = trainer.run().last
    assert heard.steps == [1, 2]
    assert "sharp" in last
    assert "learning_rate" not in last  # an optimizer from Python tells none


def test_the_same_names_with_options(tmp_path: Path) -> None:
    given = {
        "mesh": "fsdp",
        "callbacks": {"heartbeat": {}},
        "loss": {"z_loss": 0.1},
        "optimizer": {"learning_rate": 0.1},
    }
    config = Trainer(Tiny, train=Arithmetic(), steps=1, output_dir=str(tmp_path), **given).config
    assert (config.loss.z_loss, config.optimizer.learning_rate) == (0.1, 0.1)
    assert config.mesh == "fsdp"
    assert config.callbacks.heartbeat is not None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"callbacks": [Heard]}, r"callbacks\[0\]: <class .*Heard'> is not a Callback"),
        (
            {"callbacks": ["early_stopping"]},
            r"callbacks\[0\]: 'early_stopping' is not a Callback.*are given as a mapping: \{best: \{\}\}",
        ),
        ({"callbacks": 3}, r"callbacks\[0\]: 3 is not a Callback"),
        (
            {"callbacks": [Unheard()]},
            r"on_the_hour is not called at any event.*Rename the method\.",
        ),
        (
            {"callbacks": [Misspelt()]},
            r"callbacks\[0\] Misspelt: on_steps is not called at any event.*Did you mean 'on_step'",
        ),
        (
            {"callbacks": {"early_stoping": {}}},
            r"callbacks\.early_stoping: unknown key.*Did you mean 'early_stopping'",
        ),
        ({"mesh": jax.make_mesh((1,), ("data",))}, r"mesh: has no axis fsdp"),
        ({"mesh": "fspd"}, r"mesh.*fspd"),
        ({"callback": []}, r"callback: no such option of Trainer.*Did you mean 'callbacks'"),
        (
            {"train": [{}]},
            r"^train: list is not a loader: it has no batch_size, state, restore\. Give",
        ),
        ({"evals": {"held": 3}}, r"^evals\.held: int is not a loader"),
        ({"loss": 3}, r"^loss: 3 cannot be called"),
    ],
)
def test_what_is_none_of_them_is_refused(
    given: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        Trainer(Tiny, steps=1, output_dir=str(tmp_path), **{"train": Arithmetic()} | given)
    # one alone will do
    assert Trainer(
        Tiny, train=Arithmetic(), steps=1, output_dir=str(tmp_path), callbacks=Heard()
    ).callbacks
