"""Preferences: the loss is the published formula, packed or not, and training on pairs separates the answers."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from easypipe.core.errors import ConfigError
from easypipe.core.schema import IGNORE, INPUT_IDS, LABELS, POSITION_IDS, SEGMENT_IDS
from easypipe.train.model import Decoder, ModelConfig
from easypipe.train.preference import REFERENCE, WithReference, num_columns, preference_loss, segment_log_probs

SLOTS, VOCAB = 16, 40
CONFIG = ModelConfig(vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_layers=1, num_heads=2, num_kv_heads=2)


@functools.cache
def model(seed: int = 0) -> Decoder:
    return Decoder(CONFIG, nnx.Rngs(seed))


def batch() -> dict[str, np.ndarray]:
    """Two rows: two pairs and padding; one pair."""
    rng = np.random.Generator(np.random.PCG64(0))
    lengths = [[3, 4, 2, 5], [6, 7]]
    out = {name: np.full((2, SLOTS), IGNORE if name == LABELS else 0, np.int32) for name in (INPUT_IDS, LABELS, SEGMENT_IDS, POSITION_IDS)}
    for row, segments in enumerate(lengths):
        at = 0
        for number, length in enumerate(segments, 1):
            here = slice(at, at + length)
            ids = rng.integers(2, VOCAB, length)
            out[INPUT_IDS][row, here], out[SEGMENT_IDS][row, here], out[POSITION_IDS][row, here] = ids, number, np.arange(length)
            out[LABELS][row, at + 1 : at + length - 1] = ids[2:]  # the first token is a prompt's
            if length == 2:
                out[LABELS][row, at] = ids[1]
            at += length
    return out


def by_hand(of: Decoder) -> list[tuple[float, float]]:
    """(log p of the chosen answer, of the rejected one) of the three pairs, each answer alone in a row."""
    given, found = batch(), []
    for row in range(2):
        for segment in range(1, int(given[SEGMENT_IDS][row].max()) + 1):
            slots = given[SEGMENT_IDS][row] == segment
            logits = of(jnp.asarray(given[INPUT_IDS][row : row + 1, slots]))[0]
            labels = given[LABELS][row, slots]
            logs = np.asarray(jax.nn.log_softmax(logits))
            found.append(sum(float(logs[t, label]) for t, label in enumerate(labels) if label >= 0))
    return list(zip(found[::2], found[1::2], strict=True))


def test_answers_packed_are_as_likely_as_alone():
    log_probs, counts = segment_log_probs(model(), {name: jnp.asarray(column) for name, column in batch().items()})
    assert log_probs.shape == (2, num_columns(SLOTS)) == counts.shape
    found = [*np.asarray(log_probs)[0, 1:5], *np.asarray(log_probs)[1, 1:3]]
    np.testing.assert_allclose(found, np.ravel(by_hand(model())), rtol=1e-5)
    assert counts.sum() == (batch()[LABELS] >= 0).sum()


@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
def test_the_loss_is_the_formula(label_smoothing):
    beta, given = 0.3, {name: jnp.asarray(column) for name, column in batch().items()}
    given[REFERENCE] = segment_log_probs(model(1), given)[0]
    out = preference_loss(beta=beta, label_smoothing=label_smoothing)(model(), given)
    wanted = 0.0
    for (chosen, rejected), (chosen_0, rejected_0) in zip(by_hand(model()), by_hand(model(1)), strict=True):
        margin = beta * ((chosen - chosen_0) - (rejected - rejected_0))
        wanted += -(1 - label_smoothing) * np.log(1 / (1 + np.exp(-margin))) - label_smoothing * np.log(1 / (1 + np.exp(margin)))
    np.testing.assert_allclose(out.loss_sum, wanted, rtol=1e-5)
    assert out.num_targets == 3
    same = preference_loss(beta=beta)(model(1), given)
    np.testing.assert_allclose(same.loss_sum / 3, np.log(2), rtol=1e-6)  # the reference itself tells no pair apart


class Once:
    """A loader of one batch."""

    batch_size = 2

    def __init__(self, *, cut: bool = False):
        self.accumulation_steps = 2 if cut else 1

    def __iter__(self):
        yield {name: column.reshape(2, 1, SLOTS) if self.accumulation_steps > 1 else column for name, column in batch().items()}

    def __len__(self) -> int:
        return 1

    def state(self) -> int:
        return 7


def test_batches_carry_what_the_reference_gives():
    whole, cut = (next(iter(WithReference(Once(cut=c), model(1)))) for c in (False, True))
    expected = segment_log_probs(model(1), {name: jnp.asarray(column) for name, column in batch().items()})[0]
    np.testing.assert_allclose(whole[REFERENCE], expected, rtol=1e-6)
    np.testing.assert_allclose(cut[REFERENCE].reshape(2, -1), expected, rtol=1e-6)
    assert WithReference(Once(), model(1)).state() == 7
    assert len(WithReference(Once(), model(1))) == 1


@pytest.mark.parametrize(("options", "key"), [({"beta": 0.0}, "beta"), ({"label_smoothing": 0.5}, "label_smoothing")])
def test_what_makes_no_sense_is_refused(options, key):
    with pytest.raises(ConfigError, match=key):
        preference_loss(**options)
