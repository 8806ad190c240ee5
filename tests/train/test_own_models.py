"""Modules of other makes in the same call: NNX modules that give logits, and Flax Linen through its
bridge.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from easypipe.core.errors import ConfigError
from easypipe.train.finished import load_trained
from easypipe.train.losses.loss import logits_loss_sums, loss_sums
from easypipe.train.model.decoder import Decoder, ModelConfig
from easypipe.train.parallel.mesh import make_mesh
from easypipe.train.trainer import Trainer
from token_support import small_tokenizer, small_tokenizer_folder
from train.runs import VOCAB, Arithmetic, settings

MESH = make_mesh(devices=jax.devices()[:1])


class Linen(nn.Module):
    """Logits of the next token from this one; packed rows need no more."""

    @nn.compact
    def __call__(self, input_ids: Any, segment_ids: Any = None) -> Any:
        return nn.Dense(VOCAB)(nn.gelu(nn.Dense(16)(nn.Embed(VOCAB, 8)(input_ids))))


class Plain(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.table, self.head = nnx.Embed(VOCAB, 8, rngs=rngs), nnx.Linear(8, VOCAB, rngs=rngs)

    def __call__(self, input_ids: Any) -> Any:
        return self.head(self.table(input_ids))


@pytest.mark.parametrize(
    "model", [Linen(), Plain, Plain(nnx.Rngs(0))], ids=["linen", "nnx function", "nnx module"]
)
def test_a_module_that_gives_logits_is_trained_and_resumed(model: Any, tmp_path: Path) -> None:
    def trainer(steps: int) -> Trainer:
        config = settings(
            tmp_path,
            steps=steps,
            resume_changes=("train.steps",),
            optimizer={"learning_rate": 0.03},
        )
        return Trainer(model, config, Arithmetic(), {"held": Arithmetic(1, seed=7)}, mesh=MESH)

    first = trainer(2).run()
    assert first.last["loss"] < first.first["loss"]
    again = trainer(3).run()
    assert again.resumed_from == 2
    assert again.last["loss"] < first.last["loss"]
    assert again.last["eval"]["held"]["loss"] > 0
    ids = jnp.arange(10).reshape(2, 5)
    assert again.model(ids).shape == (2, 5, VOCAB)
    opened = load_trained(tmp_path, base=model).model
    np.testing.assert_array_equal(opened(ids), again.model(ids))
    with pytest.raises(ConfigError, match="a module or a function from Python, which is not known"):
        load_trained(tmp_path)


class Dropping(nn.Module):
    """Drops half of what it knows; the switch is an attribute of the layer or an argument."""

    by_name: bool
    attribute: bool | None

    @nn.compact
    def __call__(self, input_ids: Any) -> Any:
        x = nn.Embed(VOCAB, 8, name="table")(input_ids)
        told: dict[str, Any] = {} if self.attribute is not None else {"deterministic": False}
        layer = nn.Dropout(0.5, deterministic=self.attribute)
        x = layer(inputs=x, **told) if self.by_name else layer(x, **told)
        return nn.Dense(VOCAB, name="head")(x)


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("attribute", [None, False])
def test_linen_drops_nothing_in_an_evaluation(
    tmp_path: Path, attribute: bool | None, by_name: bool
) -> None:
    model, held = Dropping(by_name, attribute), Arithmetic(1, seed=7)
    config = settings(tmp_path, steps=1, optimizer={"learning_rate": 0.03})
    result = Trainer(model, config, Arithmetic(), {"held": held}, mesh=MESH).run()
    arrays = jax.tree.leaves(nnx.state(result.model, nnx.Param))
    table, bias, kernel = (
        next(np.asarray(one, np.float64) for one in arrays if one.shape == shape)
        for shape in ((VOCAB, 8), (VOCAB,), (8, VOCAB))
    )
    batch = held.batch(1)
    logits = (table @ kernel + bias)[batch["input_ids"]]
    rows, slots = np.nonzero(batch["labels"] != -100)
    targets = logits[rows, slots, batch["labels"][rows, slots]]
    expected = (np.log(np.exp(logits).sum(-1))[rows, slots] - targets).mean()
    assert result.last["eval"]["held"]["loss"] == pytest.approx(expected, rel=1e-5)
    ids = batch["input_ids"]
    assert not np.array_equal(result.model(ids), result.model(ids)), "training drops"


class Attending(nn.Module):
    attention: nn.Module

    @nn.compact
    def __call__(self, input_ids: Any) -> Any:
        x = nn.Embed(VOCAB, 8)(input_ids)
        return nn.Dense(VOCAB)(self.attention(x, x, mask=nn.make_causal_mask(input_ids)))


def test_attention_of_linen_drops_nothing_in_an_evaluation(tmp_path: Path) -> None:
    losses, curves = {}, {}
    for rate in (0.0, 0.9):
        layer = nn.MultiHeadDotProductAttention(2, dropout_rate=rate, deterministic=False)
        still = settings(tmp_path / str(rate), steps=4, optimizer={"learning_rate": 1e-30})
        run = Trainer(Attending(layer), still, Arithmetic(), {"held": Arithmetic(1)}, mesh=MESH)
        result = run.run()
        losses[rate] = result.last["eval"]["held"]["loss"]
        curves[rate] = result.last["loss"]
    assert losses[0.9] == losses[0.0]
    assert curves[0.9] != curves[0.0], "training drops"


@pytest.mark.parametrize("options", [{}, {"z_loss": 0.1, "label_smoothing": 0.2}])
def test_the_loss_of_logits_is_the_fused_one(options: dict[str, float]) -> None:
    model = Decoder(
        ModelConfig(
            vocab_size=VOCAB,
            hidden_size=16,
            intermediate_size=24,
            num_layers=1,
            num_heads=2,
            num_kv_heads=1,
        ),
        nnx.Rngs(0),
    )
    batch = {name: jnp.asarray(array) for name, array in Arithmetic().batch(1).items()}
    with jax.default_matmul_precision("highest"):
        one, other = loss_sums(model, batch, **options), logits_loss_sums(model, batch, **options)  # type: ignore[arg-type]
    np.testing.assert_allclose(np.asarray(one[:3]), np.asarray(other[:3]), rtol=1e-5)
    wrong = batch | {"labels": batch["labels"].at[0, 0].set(VOCAB)}
    assert np.isnan(logits_loss_sums(model, wrong).loss_sum)


def test_what_cannot_have_an_effect_is_refused_and_what_is_not_isolated_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(
        ConfigError,
        match=r"train\.loss\.chunk_size: has no effect on a module without `hidden` and `lm_head`",
    ):
        Trainer(Plain, settings(tmp_path, loss={"chunk_size": 8}), Arithmetic(), mesh=MESH)
    with caplog.at_level(logging.WARNING, "easypipe"):
        Trainer(Linen(), settings(tmp_path), Arithmetic(), mesh=MESH)
        assert "segment_ids" not in caplog.text
        Trainer(Plain, settings(tmp_path), Arithmetic(), mesh=MESH)
    assert (
        "model: Plain takes no segment_ids: documents that are packed into one row see each other"
        in caplog.text
    )


@pytest.mark.parametrize(
    ("made", "gave"),
    [
        (lambda logits: {"logits": logits}, "dict"),
        (lambda logits: (logits, None), "tuple"),
        (lambda logits: logits[..., 0], r"shape \(8, 12\)"),
        (lambda logits: logits[:, 1:], r"shape \(8, 11, \d+\)"),
    ],
)
def test_a_module_that_gives_no_logits_is_told_so(made: Any, gave: str, tmp_path: Path) -> None:
    class Odd(Plain):
        def __call__(self, input_ids: Any) -> Any:
            return made(super().__call__(input_ids))

    message = rf"model Odd: gave {gave} for input_ids of shape \(8, 12\)\. Return logits alone"
    with pytest.raises(ConfigError, match=message):
        Trainer(Odd, settings(tmp_path, steps=3), Arithmetic(), mesh=MESH).run()


def test_fewer_logits_than_tokens_are_refused_before_a_step(tmp_path: Path) -> None:
    """They gave losses that are not numbers: ten steps were skipped before the run ended."""
    tokens, folder = small_tokenizer().vocab_size, str(small_tokenizer_folder())
    assert tokens > VOCAB
    message = (
        f"model Plain: gives {VOCAB} logits, and the tokenizer of the data has {tokens} tokens. "
        "Give at least one logit for each token."
    )
    config = settings(tmp_path, steps=3)
    with pytest.raises(ConfigError, match=message):
        Trainer(Plain, config, Arithmetic(), mesh=MESH, tokenizer=folder).run()
    gone = str(tmp_path / "gone.json")  # a cache trains without its tokenizer
    assert Trainer(Plain, config, Arithmetic(), mesh=MESH, tokenizer=gone).run().last
