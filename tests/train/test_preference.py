"""Preferences: the loss is the published formula, packed or not, and training on pairs separates
the answers.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from chat_support import chat_tokenizer
from easypipe import (
    DatasetConfig,
    LoadStageConfig,
    PackStageConfig,
    PipelineConfig,
    PromptConfig,
    RunConfig,
)
from easypipe.core.errors import ConfigError, StateError
from easypipe.core.schema import IGNORE, INPUT_IDS, LABELS, POSITION_IDS, SEGMENT_IDS
from easypipe.run import train
from easypipe.train import save_pretrained
from easypipe.train.callbacks.config import BestConfig, CallbacksConfig
from easypipe.train.config import (
    WITHOUT_REFERENCE,
    CheckpointConfig,
    LossConfig,
    OptimizerConfig,
    PreferenceConfig,
    PreferenceLoss,
    SpikeConfig,
    TrainingConfig,
)
from easypipe.train.engine import Engine
from easypipe.train.events import TrainEvent
from easypipe.train.finished import load_trained
from easypipe.train.losses import preference as preferences
from easypipe.train.losses.cached_reference import CachedReference, Passes
from easypipe.train.losses.loss import RECORDED
from easypipe.train.losses.preference import (
    LOSSES,
    REFERENCE,
    Pairs,
    Reference,
    by_segment,
    preference_loss,
)
from easypipe.train.model.config import LoraConfig
from easypipe.train.model.decoder import Decoder, ModelConfig
from easypipe.train.model.lora import add_lora
from easypipe.train.model.pretrained.peft import save_adapters
from easypipe.train.parallel.mesh import make_mesh
from easypipe.train.state import TrainState, layout_of
from easypipe.train.trainer import Trainer
from train.runs import Tiny

SLOTS, VOCAB = 16, 40
PAIRS: Any = {"format_type": "prompt_completion", "input_columns": ("prompt",)}
CONFIG = ModelConfig(
    vocab_size=VOCAB,
    hidden_size=16,
    intermediate_size=24,
    num_layers=1,
    num_heads=2,
    num_kv_heads=2,
)


@functools.cache
def model(seed: int = 0) -> Decoder:
    return Decoder(CONFIG, nnx.Rngs(seed))


def batch() -> dict[str, np.ndarray]:
    """Two rows: two pairs and padding; one pair."""
    rng = np.random.Generator(np.random.PCG64(0))
    lengths = [[3, 4, 2, 5], [6, 7]]
    out = {
        name: np.full((2, SLOTS), IGNORE if name == LABELS else 0, np.int32)
        for name in (INPUT_IDS, LABELS, SEGMENT_IDS, POSITION_IDS)
    }
    for row, segments in enumerate(lengths):
        at = 0
        for number, length in enumerate(segments, 1):
            here = slice(at, at + length)
            ids = rng.integers(2, VOCAB, length)
            out[INPUT_IDS][row, here], out[SEGMENT_IDS][row, here], out[POSITION_IDS][row, here] = (
                ids,
                number,
                np.arange(length),
            )
            out[LABELS][row, at + 1 : at + length - 1] = ids[2:]  # the first token is a prompt's
            if length == 2:
                out[LABELS][row, at] = ids[1]
            at += length
    return out


@functools.cache
def program() -> Any:
    """log softmax of the logits of one row of SLOTS."""
    graph, _ = nnx.split(model())
    return jax.jit(lambda state, ids: jax.nn.log_softmax(nnx.merge(graph, state)(ids)))


def by_hand(of: Decoder) -> list[tuple[float, float]]:
    """(log p of the chosen answer, of the rejected one) of the three pairs, each answer alone in a
    row.
    """
    given, found = batch(), []
    for row in range(2):
        for segment in range(1, int(given[SEGMENT_IDS][row].max()) + 1):
            slots = np.flatnonzero(given[SEGMENT_IDS][row] == segment)
            ids = np.zeros((1, SLOTS), np.int32)
            ids[0, : len(slots)] = given[INPUT_IDS][row, slots]
            logs = np.asarray(program()(nnx.split(of)[1], ids))[0]
            found.append(
                sum(
                    float(logs[t, label])
                    for t, label in enumerate(given[LABELS][row, slots])
                    if label >= 0
                )
            )
    return list(zip(found[::2], found[1::2], strict=True))


def on_device() -> dict[str, jax.Array]:
    return {name: jnp.asarray(column) for name, column in batch().items()}


@functools.cache
def reference() -> tuple[Reference, Any]:
    layout = layout_of(model(), make_mesh(devices=jax.devices()[:1]))
    return Reference(layout), layout


def reference_of(module: Decoder, given: dict[str, jax.Array]) -> jax.Array:
    kept, layout = reference()
    params, rest = layout.split(module)
    kept.keep(params)
    return kept.added(rest, given)[REFERENCE]


def test_a_reference_has_no_dropout():
    found = []
    for dropout in (0.0, 0.5):
        with_dropout = Tiny(nnx.Rngs(3), dropout)
        layout = layout_of(with_dropout, make_mesh(devices=jax.devices()[:1]))
        asked = Reference(layout)
        params, rest = layout.split(with_dropout)
        asked.keep(params)
        given = {
            name: column % 8 if name == INPUT_IDS else column
            for name, column in on_device().items()
        }
        given[LABELS] = jnp.where(given[LABELS] >= 0, given[LABELS] % 8, IGNORE)
        found.append(asked.added(rest, given)[REFERENCE])
    np.testing.assert_array_equal(*found)


def test_answers_packed_are_as_likely_as_alone():
    found = reference_of(model(), on_device())
    assert found.shape == (2, SLOTS)
    for row, segments in ((0, (1, 2, 3, 4)), (1, (1, 2))):
        wanted = np.ravel(by_hand(model()))[4 * row :][: len(segments)]
        sums = [
            float(found[row][batch()[SEGMENT_IDS][row] == segment].sum()) for segment in segments
        ]
        np.testing.assert_allclose(sums, wanted, rtol=1e-5)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
def test_the_loss_is_the_formula(label_smoothing):
    beta, given = 0.3, on_device()
    given[REFERENCE] = reference_of(model(1), given)
    _, layout = reference()
    loss = preference_loss(PreferenceConfig(beta=beta, label_smoothing=label_smoothing))
    run = jax.jit(lambda params, rest, given: loss(layout.merge(params, rest), given))
    out = run(*layout.split(model()), given)
    wanted, margins = 0.0, []
    for (chosen, rejected), (chosen_0, rejected_0) in zip(
        by_hand(model()), by_hand(model(1)), strict=True
    ):
        margin = beta * ((chosen - chosen_0) - (rejected - rejected_0))
        wanted += -(1 - label_smoothing) * np.log(
            1 / (1 + np.exp(-margin))
        ) - label_smoothing * np.log(1 / (1 + np.exp(margin)))
        margins.append(margin)
    np.testing.assert_allclose(out.loss_sum, wanted, rtol=1e-5)
    np.testing.assert_allclose(out.more["reward_margin"], sum(margins), rtol=1e-4)
    assert out.more["reward_accuracy"] == sum(margin > 0 for margin in margins)
    assert out.num_targets == 3
    same = run(*layout.split(model(1)), given)
    # the reference itself tells no pair apart
    np.testing.assert_allclose(same.loss_sum / 3, np.log(2), rtol=1e-6)


Formula = Callable[[Any, Any, Any, Any, float, float], Any]


def _ln_sigmoid(x: Any) -> Any:
    return -np.logaddexp(0, -x)


def _sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def _odds(c: Any, r: Any) -> Any:
    return (c - r) - (np.log1p(-np.exp(c)) - np.log1p(-np.exp(r)))


# As trl 1.16 writes them (trainer/dpo_trainer.py, experimental/{orpo,cpo}): of c and r, the
# log-ratios of the answers, and their means over tokens, C and R; b is beta, e label_smoothing.
TRL: dict[str, Formula] = {
    "sigmoid": lambda c, r, C, R, b, e: (
        -_ln_sigmoid(b * (c - r)) * (1 - e) - _ln_sigmoid(-b * (c - r)) * e
    ),
    "hinge": lambda c, r, C, R, b, e: np.maximum(1 - b * (c - r), 0),
    "ipo": lambda c, r, C, R, b, e: ((C - R) - 1 / (2 * b)) ** 2,
    "exo_pair": lambda c, r, C, R, b, e: (
        _sigmoid(b * (c - r)) * (_ln_sigmoid(b * (c - r)) - np.log1p(-e))
        + _sigmoid(-b * (c - r)) * (_ln_sigmoid(-b * (c - r)) - np.log(e))
    ),
    "nca_pair": lambda c, r, C, R, b, e: (
        -_ln_sigmoid(b * c) - 0.5 * _ln_sigmoid(-b * c) - 0.5 * _ln_sigmoid(-b * r)
    ),
    "robust": lambda c, r, C, R, b, e: (
        (-(1 - e) * _ln_sigmoid(b * (c - r)) - -e * _ln_sigmoid(-b * (c - r))) / (1 - 2 * e)
    ),
    "bco_pair": lambda c, r, C, R, b, e: -_ln_sigmoid(b * c) - _ln_sigmoid(-b * r),
    "sppo_hard": lambda c, r, C, R, b, e: (c - 0.5 / b) ** 2 + (r + 0.5 / b) ** 2,
    "apo_zero": lambda c, r, C, R, b, e: 1 - _sigmoid(b * c) + _sigmoid(b * r),
    "apo_down": lambda c, r, C, R, b, e: _sigmoid(b * c) + 1 - _sigmoid(b * (c - r)),
    "sigmoid_norm": lambda c, r, C, R, b, e: -_ln_sigmoid(b * (C - R)),
    "orpo": lambda c, r, C, R, b, e: -C - b * _ln_sigmoid(_odds(C, R)),
    # trainer/reward_trainer.py: of scores
    "reward": lambda c, r, C, R, b, e: -_ln_sigmoid(c - r),
    "simpo": lambda c, r, C, R, b, e: (
        -_ln_sigmoid(b * (C - R - 0.7 / b)) * (1 - e) - _ln_sigmoid(-b * (C - R - 0.7 / b)) * e
    ),
}
SMOOTHED = ("sigmoid", "robust", "exo_pair", "simpo")


@pytest.mark.parametrize("loss", LOSSES)
def test_each_loss_has_the_formula_of_trl_in_float64(loss: PreferenceLoss) -> None:
    beta, smoothing = 0.3, 0.1 if loss in SMOOTHED else 0.0
    margin = 0.7 if loss == "simpo" else None
    held = {} if loss == "reward" else {"beta": beta}
    config = PreferenceConfig(loss=loss, label_smoothing=smoothing, margin=margin, **held)
    draw = np.random.default_rng(0)
    tokens = draw.integers(1, 30, (2, 40)).astype(np.float64)
    sums = (
        -draw.random((2, 40)) * 3 * tokens
        if loss in WITHOUT_REFERENCE
        else draw.normal(size=(2, 40)) * 9
    )
    want = TRL[loss](*sums, *(sums / tokens), beta, smoothing)
    with jax.enable_x64(True):
        found = LOSSES[loss](Pairs(*map(jnp.asarray, (*sums, *tokens))), config)
        assert found.dtype == jnp.float64
    np.testing.assert_allclose(found, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("loss", sorted(WITHOUT_REFERENCE))
def test_a_certain_answer_has_a_gradient(loss: PreferenceLoss) -> None:
    config = PreferenceConfig(loss=loss)
    of = lambda c, r: LOSSES[loss](Pairs(c, r, jnp.float32(2), jnp.float32(3)), config)  # noqa: E731
    for sums in ((0.0, -3.0), (-3.0, 0.0), (0.0, 0.0)):
        assert np.isfinite(jax.grad(of, (0, 1))(*map(jnp.float32, sums))).all()


@pytest.mark.parametrize("loss", ["ipo", "orpo", "simpo"])
def test_losses_of_means_are_those_of_the_pairs_of_a_batch(loss: PreferenceLoss) -> None:
    """Rows have padding, whose gradient is none."""
    given, layout = on_device(), reference()[1]
    if loss not in WITHOUT_REFERENCE:
        given[REFERENCE] = reference_of(model(1), given)
    total = preference_loss(PreferenceConfig(loss=loss))
    params, rest = layout.split(model())
    grads, out = jax.jit(
        jax.grad(
            lambda p: (lambda o: (o.loss_sum, o))(total(layout.merge(p, rest), given)), has_aux=True
        )
    )(params)
    assert all(np.isfinite(one).all() for one in jax.tree.leaves(grads))
    counts = [
        (given[LABELS][row][given[SEGMENT_IDS][row] == segment] >= 0).sum()
        for row, segments in ((0, 4), (1, 2))
        for segment in range(1, segments + 1)
    ]
    ratios = np.ravel(by_hand(model()))
    if loss not in WITHOUT_REFERENCE:
        ratios = ratios - np.ravel(by_hand(model(1)))
    means = ratios / np.array(counts)
    beta = PreferenceConfig().beta
    formula = (
        TRL[loss] if loss != "simpo" else lambda c, r, C, R, b, e: -_ln_sigmoid(b * (C - R) - 0.5)
    )
    want = formula(ratios[::2], ratios[1::2], means[::2], means[1::2], beta, 0.0).sum()
    np.testing.assert_allclose(out.loss_sum, want, rtol=1e-4)


@pytest.mark.parametrize("loss", LOSSES)
def test_half_a_pair_is_no_pair(loss: PreferenceLoss, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an answer has nothing to train (it was cut, or masked), the other one counts as little:
    neither in the loss and what it tells, nor in a gradient.
    """
    likely = np.random.default_rng(0).normal(-2, 1, (2, SLOTS)).astype(np.float32)
    for of in ("log_probs", "scores"):
        monkeypatch.setattr(
            preferences, of, lambda w, given: jnp.where(given[LABELS] != IGNORE, w * likely, 0.0)
        )
    smoothing = 0.1 if loss in SMOOTHED else 0.0
    total = preference_loss(PreferenceConfig(loss=loss, label_smoothing=smoothing))

    def run(*without: int) -> Any:
        given = on_device()
        gone = jnp.isin(given[SEGMENT_IDS][0], jnp.array(without))
        given[LABELS] = given[LABELS].at[0].set(jnp.where(gone, IGNORE, given[LABELS][0]))
        out = total(1.0, given)  # type: ignore[arg-type]
        return [*out[:2], *out.more.values(), jax.grad(lambda w: total(w, given).loss_sum)(1.0)]

    wanted = run(3, 4)
    assert int(wanted[1]) == 2
    for half in (3, 4):
        np.testing.assert_allclose(run(half), wanted, rtol=1e-6)


def test_micro_batches_have_the_reference_of_the_whole():
    given = on_device()
    cut = reference_of(
        model(1), {name: column.reshape(2, 1, SLOTS) for name, column in given.items()}
    )
    np.testing.assert_allclose(cut.reshape(2, SLOTS), reference_of(model(1), given), rtol=1e-6)


class SamePairs:
    """A loader that yields the one batch for ever."""

    batch_size, accumulation_steps = 2, 1

    def __init__(self) -> None:
        self._done = 0

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        while True:
            self._done += 1
            yield batch()

    def __len__(self) -> int:
        raise TypeError

    def state(self) -> int:
        return self._done

    def restore(self, state: int) -> None:
        self._done = state


def losses(folder: Path, **changes: Any) -> list[dict[str, Any]]:
    options: Any = {
        "steps": 6,
        "optimizer": OptimizerConfig(learning_rate=0.02, warmup_steps=0),
        "eval_every": 3,
    } | changes
    config = TrainingConfig(output_dir=folder, mesh={"data": 1}, **options)
    mesh = make_mesh(config.mesh, devices=jax.devices()[:1])
    Trainer(
        CONFIG,
        config,
        SamePairs(),
        {"same": SamePairs()} if config.eval_batches else None,
        mesh=mesh,
    ).run()
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_training_tells_the_answers_apart_and_goes_on_from_its_reference(tmp_path):
    preference = PreferenceConfig(beta=0.5)
    whole = losses(tmp_path / "whole", preference=preference, eval_batches=1)
    assert whole[0]["loss"] == pytest.approx(np.log(2), abs=1e-5)
    assert whole[0]["reward_accuracy"] == 0.0
    assert whole[-1]["loss"] < 0.5 < whole[-1]["reward_accuracy"]
    assert whole[-1]["eval"]["same"]["reward_margin"] > 0
    assert whole[-1].keys() - RECORDED - {"nll"} == {*preference.tells}
    # a loss of pairs has no perplexity
    assert {line["ppl"] for line in [*whole, whole[-1]["eval"]["same"]]} == {None}
    assert all(line["nll"] == line["loss"] for line in whole)
    best = CallbacksConfig(best=BestConfig(metric="eval.same.ppl"))
    with pytest.raises(ConfigError, match=r"no held-out metric named 'eval\.same\.ppl'"):
        losses(tmp_path / "best", preference=preference, eval_batches=1, callbacks=best)
    # Killed after step 3 and run again: the reference is the model before step 1, not the one that
    # it goes on with.
    checkpoint = {
        "checkpoint": CheckpointConfig(every=3),
        "preference": preference,
        "eval_batches": 1,
    }
    stopping = losses_until(tmp_path / "parts", 3, **checkpoint)
    assert stopping == 3
    parts = losses(tmp_path / "parts", **checkpoint)
    assert [line["loss"] for line in parts] == [line["loss"] for line in whole]


OTHER_WEIGHTS = (
    r"checkpoints: belongs to a run that began with other weights, to which its reference or a "
    r"roll-back returns: embedding, .* differ\. Train the model that it began with, or give another "
    r"train\.output_dir\.$"
)


@pytest.mark.parametrize("reference", ["initial", "cached"])
def test_a_run_goes_on_from_its_own_reference_or_not_at_all(tmp_path, reference, monkeypatch):
    """The folder of the published model is replaced while the run is stopped."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_layers": 1, "num_heads": 2}
    for seed in (0, 1):
        model = Decoder(ModelConfig(vocab_size=512, **sizes), nnx.Rngs(seed))
        save_pretrained(model, tmp_path / f"model{seed}")
    run = told_run(tmp_path, "run", reference=reference)
    constant = dataclasses.replace(run.train.optimizer, schedule="constant")

    def trained(seed: int, steps: int, **options: Any) -> list[float]:
        shutil.rmtree(tmp_path / "base", ignore_errors=True)
        shutil.copytree(tmp_path / f"model{seed}", tmp_path / "base")
        config = dataclasses.replace(run.train, steps=steps, resume_changes=("train.steps",))
        config = dataclasses.replace(config, optimizer=constant, **options)
        result = Trainer(str(tmp_path / "base"), config, data=run.data).run()
        return [line["loss"] for line in map(json.loads, result.metrics.open())]

    whole = trained(0, 3, output_dir=tmp_path / "whole")
    trained(0, 1)
    with pytest.raises(StateError, match=OTHER_WEIGHTS):
        trained(1, 2)
    trained(0, 2)
    with pytest.raises(StateError, match=OTHER_WEIGHTS):  # as the resumed run recorded it too
        trained(1, 3)
    assert trained(0, 3) == whole
    # a checkpoint of an earlier version has no such record
    older = tmp_path / "older"
    with monkeypatch.context() as earlier:
        earlier.setattr(Engine, "weights", lambda *_, **__: {"frozen": {}, "initial": {}})
        trained(0, 1, output_dir=older)
    assert trained(0, 3, output_dir=older) == whole


def told_run(
    tmp_path: Path, name: str, tokenizer: str | None = None, **preference: Any
) -> RunConfig:
    """A run of pairs made of text."""
    rows = [
        {"prompt": f"{n} + {n} = ", "chosen": f"{2 * n}", "rejected": f"{n}, I think"}
        for n in range(8)
    ]
    data = PipelineConfig(
        datasets=[
            DatasetConfig(
                data_files=rows,
                prompt=PromptConfig(label_column="chosen", rejected_column="rejected", **PAIRS),
            )
        ],
        default_tokenizer=tokenizer or chat_tokenizer(),
        seed=1,
        cache_dir=tmp_path,
        pack=PackStageConfig(seq_length=64, strategy="first_fit", oversize="drop"),
        load=LoadStageConfig(batch_size=2, num_epochs=None),
    )
    settings = TrainingConfig(
        output_dir=tmp_path / name,
        steps=4,
        preference=PreferenceConfig(beta=0.5, **preference),
        optimizer=OptimizerConfig(learning_rate=0.02, warmup_steps=0),
    )
    size = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_layers": 1,
        "num_heads": 2,
        "num_kv_heads": 2,
    }
    return RunConfig(data=data, train=settings, model=ModelConfig(**size))


def test_a_run_is_told_by_its_configuration(tmp_path):
    """From rows to the loss: the whole chain that `easypipe train configs/dpo.yaml` runs. A cached
    reference is asked once of all data, and gives the same losses.
    """
    result = train(told_run(tmp_path, "run"))
    assert result.first["loss"] == pytest.approx(np.log(2), abs=1e-5)
    assert result.last["loss"] < result.first["loss"]
    assert result.first["num_targets"] == 2 * 2  # two rows, two pairs in each
    live = [line["loss"] for line in lines_of(tmp_path / "run")]
    train(told_run(tmp_path, "cached", reference="cached"))
    np.testing.assert_allclose(
        [line["loss"] for line in lines_of(tmp_path / "cached")], live, rtol=2e-5
    )
    (kept,) = (tmp_path / "reference").iterdir()
    with np.load(kept) as table:
        assert table["keys"].shape == (16, 2)  # of eight pairs


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_answers_that_were_asked_before_are_looked_up(tmp_path):
    """Whatever stands beside them in a row; of a batch with another one the model is asked."""
    layout, given = reference()[1], on_device()
    cached = CachedReference(layout)
    params, rest = layout.split(model(1))
    cached.keep(params)
    live = by_segment(reference_of(model(1), given), given[SEGMENT_IDS])

    def sums(given: dict[str, jax.Array]) -> jax.Array:
        found = cached.added(rest, given)[REFERENCE]
        return by_segment(found.reshape(-1, SLOTS), given[SEGMENT_IDS].reshape(-1, SLOTS))

    class Once(SamePairs):
        def __init__(self, rows: int) -> None:
            super().__init__()
            self.rows = rows

        def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
            yield {name: column[: self.rows] for name, column in batch().items()}

        def state(self) -> Any:  # of data that is known
            names = {
                "row": 0,
                "epoch": 0,
                "config": {},
                "changes": (),
                "changed": lambda *_: ([], ""),
            }
            return SimpleNamespace(components={"sources": str(self.rows)}, **names)

    first: Any = TrainState(params, rest, None, None)
    for rows in (1, 2):  # one row alone: the answers of the other are not known
        passes = Passes(lambda rows=rows: [Once(rows)], tmp_path)
        cached.fill(first, passes, layout.mesh, None)
        np.testing.assert_allclose(sums(given), live, rtol=1e-5, atol=1e-5)
    swapped = jnp.arange(SLOTS).at[jnp.array([2, 3])].set(jnp.array([3, 2]))
    others = [  # answers of which one token, one target or the order is another
        {INPUT_IDS: given[INPUT_IDS].at[1, 2].add(-1)},
        {LABELS: given[LABELS].at[1, 2].set(IGNORE)},
        {name: given[name][:, swapped] for name in (INPUT_IDS, LABELS)},
    ]
    for other in (given | changes for changes in others):
        wanted = by_segment(reference_of(model(1), other), given[SEGMENT_IDS])
        assert np.abs(wanted - live).max() > 1e-3
        np.testing.assert_allclose(sums(other), wanted, rtol=1e-5, atol=1e-5)
    assert not list(tmp_path.iterdir())
    alone = {name: column[:1] for name, column in given.items()}
    np.testing.assert_allclose(sums(alone), live[:1], rtol=1e-5, atol=1e-5)
    cut = {name: column.reshape(2, 1, SLOTS) for name, column in given.items()}
    np.testing.assert_allclose(sums(cut), live, rtol=1e-5, atol=1e-5)
    found = cached.added(rest, given)[REFERENCE]
    is_first = (given[POSITION_IDS] == 0) & (given[SEGMENT_IDS] > 0)
    assert not np.asarray(found)[~np.asarray(is_first)].any()  # looked up, not asked
    cached.fill(first, Passes(lambda: [Once(2)], tmp_path), layout.mesh, {"hidden_size": 16})
    (kept,) = tmp_path.iterdir()
    with np.load(kept) as table:
        np.savez(kept, keys=table["keys"], sums=table["sums"] + 1)
    again = CachedReference(layout)  # of another run: takes what is kept
    again.keep(params)
    again.fill(first, Passes(lambda: [Once(2)], tmp_path), layout.mesh, {"hidden_size": 16})
    told = again.added(rest, given)[REFERENCE]
    np.testing.assert_allclose(told[is_first], found[is_first] + 1, rtol=1e-6)
    kept.write_bytes(b"damaged")
    again.fill(first, Passes(lambda: [Once(2)], tmp_path), layout.mesh, {"hidden_size": 16})
    np.testing.assert_array_equal(again.added(rest, given)[REFERENCE], found)


def test_a_reward_model_scores_the_last_token_of_each_answer() -> None:
    scored, given = Decoder(CONFIG, nnx.Rngs(0)), batch()
    scored.add_score(0)
    hidden = nnx.jit(Decoder.hidden)
    alone = []
    for row, segments in ((0, 4), (1, 2)):
        for segment in range(1, segments + 1):
            ids = given[INPUT_IDS][row][given[SEGMENT_IDS][row] == segment]
            padded = np.zeros((1, SLOTS), np.int32)
            padded[0, : len(ids)] = ids
            own = np.asarray(hidden(scored, padded))[0, len(ids) - 1].astype(np.float64)
            alone.append(own @ np.asarray(scored.score, np.float64)[:, 0])
    chosen, rejected = np.array(alone[::2]), np.array(alone[1::2])
    out = preference_loss(PreferenceConfig(loss="reward"))(scored, on_device())
    np.testing.assert_allclose(out.loss_sum, -_ln_sigmoid(chosen - rejected).sum(), rtol=1e-5)
    np.testing.assert_allclose(out.more["reward_margin"], (chosen - rejected).sum(), rtol=1e-3)
    assert out.more["reward_accuracy"] == (chosen > rejected).sum()
    assert out.num_targets == 3


def test_a_reward_model_is_trained_opened_again_and_saved(tmp_path: Path) -> None:
    lines = losses(tmp_path / "run", preference=PreferenceConfig(loss="reward"))
    assert lines[0]["loss"] == pytest.approx(np.log(2), abs=0.05)
    assert lines[-1]["loss"] < 0.3 < lines[-1]["reward_margin"]
    assert lines[-1]["reward_accuracy"] == 1.0
    model = load_trained(tmp_path / "run").model
    out = save_pretrained(model, tmp_path / "out")
    named = load_file(out / "model.safetensors")
    assert "lm_head.weight" not in named
    np.testing.assert_array_equal(named["score.weight"], np.asarray(model.score[...]).T)
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    assert list(config["id2label"]) == ["0"]  # which is how transformers counts labels
    kept = json.loads(json.dumps(config)) | {"architectures": None}  # some files name none
    model.hf_config = json.dumps(kept)
    other = save_pretrained(model, tmp_path / "other")
    assert json.loads((other / "config.json").read_text()) == config


def test_what_a_reward_model_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="beta: has no effect on the loss reward"):
        PreferenceConfig(loss="reward", beta=0.2)
    adapted = Decoder(CONFIG, nnx.Rngs(0))
    adapted.add_score(0)
    with pytest.raises(ConfigError, match="is a reward model, whose score is trained beside"):
        save_adapters(add_lora(adapted, LoraConfig(rank=2), 0), tmp_path / "out")


def test_a_cached_reference_needs_data(tmp_path):
    with pytest.raises(ConfigError, match="a loader does not tell how all data is read once"):
        losses(tmp_path, preference=PreferenceConfig(reference="cached"))


def test_pairs_are_trained_as_pairs_and_nothing_else_is(tmp_path):
    def run(columns: dict[str, Any], preference: PreferenceConfig | None) -> RunConfig:
        data = PipelineConfig(
            datasets=[
                DatasetConfig(
                    data_files=[{"prompt": "a ", "chosen": "b", "rejected": "c"}],
                    prompt=PromptConfig(**PAIRS, **columns),
                )
            ],
            default_tokenizer=chat_tokenizer(),
            seed=1,
            cache_dir=tmp_path,
            pack=PackStageConfig(seq_length=64, oversize="drop"),
            load=LoadStageConfig(batch_size=1),
        )
        size = {
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_layers": 1,
            "num_heads": 2,
            "num_kv_heads": 2,
        }
        settings = TrainingConfig(output_dir=tmp_path / "run", steps=1, preference=preference)
        return RunConfig(data=data, train=settings, model=ModelConfig(**size))

    with pytest.raises(
        ConfigError, match=r"data: holds pairs of answers, and without train.preference"
    ):
        train(run({"label_column": "chosen", "rejected_column": "rejected"}, None))
    with pytest.raises(
        ConfigError,
        match=r"train.preference: is given, but the rows hold no pairs of answers \(data\)",
    ):
        train(run({"label_column": "chosen"}, PreferenceConfig()))
    pairs = {"label_column": "chosen", "rejected_column": "rejected"}
    plain, paired = run({"label_column": "chosen"}, None), run(pairs, PreferenceConfig())
    with pytest.raises(ConfigError, match=r"^eval\.held: holds pairs of answers, and without"):
        train(dataclasses.replace(plain, eval={"held": paired.data}))
    with pytest.raises(ConfigError, match=r"but the rows hold no pairs of answers \(eval\.held\)"):
        train(dataclasses.replace(paired, eval={"held": plain.data}))


def test_a_run_with_adapters_keeps_only_them_twice(tmp_path):
    lines = losses(tmp_path, preference=PreferenceConfig(beta=0.5), lora=LoraConfig(rank=2))
    assert lines[0]["loss"] == pytest.approx(np.log(2), abs=1e-5)
    assert lines[-1]["loss"] < lines[0]["loss"]


def test_without_a_reference_the_first_loss_tells_pairs_apart(tmp_path):
    lines = losses(tmp_path, steps=1, preference=PreferenceConfig(beta=0.5, reference="none"))
    assert abs(lines[0]["loss"] - np.log(2)) > 1e-3


def losses_until(folder: Path, step: int, **changes: Any) -> int:
    """Stops after `step`, as a signal would."""
    options: Any = {
        "steps": 6,
        "optimizer": OptimizerConfig(learning_rate=0.02, warmup_steps=0),
        "eval_every": 3,
    } | changes
    config = TrainingConfig(output_dir=folder, mesh={"data": 1}, **options)
    mesh = make_mesh(config.mesh, devices=jax.devices()[:1])

    def listener(event: TrainEvent) -> None:
        if event.kind == "checkpoint" and event.step == step:
            raise KeyboardInterrupt

    trainer = Trainer(
        CONFIG, config, SamePairs(), {"same": SamePairs()}, mesh=mesh, listener=listener
    )
    with pytest.raises(KeyboardInterrupt):
        trainer.run()
    return step


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PreferenceConfig(beta=0.0), "beta"),
        (lambda: PreferenceConfig(label_smoothing=0.5), "label_smoothing"),
        (lambda: PreferenceConfig(loss="hinge", label_smoothing=0.1), "label_smoothing: has no ef"),
        (lambda: PreferenceConfig(loss="exo_pair"), "label_smoothing: 0.0, but exo_pair takes"),
        (lambda: PreferenceConfig(margin=0.3), "margin: has no effect on the loss sigmoid"),
        (lambda: PreferenceConfig(loss="simpo", margin=-1.0), "margin: -1.0 is not"),
        (lambda: PreferenceConfig(loss="orpo", reference="cached"), "reference: has no effect"),
        (
            lambda: TrainingConfig(
                output_dir="x", preference=PreferenceConfig(), loss=LossConfig(z_loss=0.1)
            ),
            "loss: has no effect on pref",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


class Swapped(SamePairs):
    """Batches 7 and 8 say the contrary: their answers have changed places."""

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        for given in super().__iter__():
            if self._done in (7, 8):
                given[SEGMENT_IDS] = np.array([0, 2, 1, 4, 3], np.int32)[given[SEGMENT_IDS]]
            yield given


def test_preferences_that_turn_round_are_rolled_back_with_the_same_reference(tmp_path):
    spikes = SpikeConfig(window=4, threshold=6.0, patience=2)
    options: Any = {
        "steps": 12,
        "spikes": spikes,
        "lora": LoraConfig(rank=2),
        "preference": PreferenceConfig(beta=0.5),
    }
    options |= {
        "optimizer": OptimizerConfig(learning_rate=0.05, warmup_steps=0),
        "checkpoint": CheckpointConfig(every=3),
    }
    mesh = make_mesh({"data": 1}, devices=jax.devices()[:1])

    def run(name: str, stop: int | None = None) -> list[tuple[int, float]]:
        def listener(event: TrainEvent) -> None:
            if event.kind == "step" and event.step == stop:
                raise KeyboardInterrupt

        config = TrainingConfig(output_dir=tmp_path / name, mesh={"data": 1}, **options)
        Trainer(CONFIG, config, Swapped(), mesh=mesh, listener=listener).run()
        lines = [
            json.loads(line)
            for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        ]
        return [(line["step"], line["loss"]) for line in lines]

    whole = run("whole")
    went = [
        json.loads(line)
        for line in (tmp_path / "whole" / "rollbacks.jsonl").read_text().splitlines()
    ]
    assert [(line["step"], line["to"], line["batch_of_step"]) for line in went] == [
        (8, 6, 7),
        (8, 6, 8),
    ]
    assert [step for step, _ in whole] == list(range(1, 13))
    assert whole[-1][1] < whole[5][1] < whole[6][1]
    with pytest.raises(KeyboardInterrupt):
        run("cut", stop=10)
    assert run("cut") == whole
