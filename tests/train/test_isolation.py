"""Law 5 through the real model, with every backend of attention: no document of a row influences
another, and packing changes no loss.

The fused backends are interpreted.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from easypipe.core.schema import IGNORE
from easypipe.train.config import DistillConfig
from easypipe.train.losses.loss import loss_sums
from easypipe.train.model.decoder import Decoder, ModelConfig
from strategies import examples

VOCAB, LENGTH = 53, 24
# rows of padding keep one shape, so that one program serves every example of both laws
EMPTY = [[]] * 5
CONFIG = ModelConfig(
    vocab_size=VOCAB,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
)

lengths_of_a_row = st.lists(st.integers(1, 9), min_size=2, max_size=6).filter(
    lambda lengths: sum(lengths) <= LENGTH
)


every_backend = pytest.mark.parametrize("backend", ["xla", "splash", "triton"])


@functools.cache
def programs(backend):
    """Gradients with respect to the parameters and to the embedded input, one compiled program
    each.
    """
    graph, params = nnx.split(
        Decoder(dataclasses.replace(CONFIG, attention=backend), nnx.Rngs(3)), nnx.Param
    )
    loss = lambda params, data: loss_sums(nnx.merge(graph, params), data, chunk_size=10).loss_sum  # noqa: E731

    def hidden(params, data):
        return nnx.merge(graph, params).hidden(
            data["input_ids"], data["segment_ids"], data["position_ids"]
        )

    return params, jax.jit(jax.value_and_grad(loss)), jax.jit(hidden)


def documents(lengths, seed):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, length).astype(np.int32) for length in lengths]


def rows(groups, slots=LENGTH):
    """Each group of documents in a row of its own, as pack and collate lay them out."""
    data = {
        name: np.zeros((len(groups), slots), np.int32)
        for name in ("input_ids", "segment_ids", "position_ids")
    }
    data["labels"] = np.full((len(groups), slots), IGNORE, np.int32)
    for row, group in enumerate(groups):
        start = 0
        for number, document in enumerate(group, 1):
            cut = slice(start, start + len(document))
            data["input_ids"][row, cut], data["segment_ids"][row, cut] = document, number
            data["position_ids"][row, cut] = np.arange(len(document))
            data["labels"][row, start : start + len(document) - 1] = document[1:]
            start += len(document)
    return data


@every_backend
@examples(20)
@given(lengths=lengths_of_a_row, seed=st.integers(0, 99), choice=st.integers(0, 5))
def test_perturbing_one_segment_changes_no_other(backend, lengths, seed, choice):
    params, value_and_grad, hidden = programs(backend)
    victim = choice % len(lengths)
    before = documents(lengths, seed)
    after = list(before)
    after[victim] = (
        before[victim] + 1 + np.random.default_rng(seed).integers(0, VOCAB - 1, lengths[victim])
    ).astype(np.int32) % VOCAB
    first, second = rows([before, *EMPTY]), rows([after, *EMPTY])
    elsewhere = first["segment_ids"] != victim + 1
    np.testing.assert_array_equal(
        np.asarray(hidden(params, first))[elsewhere], np.asarray(hidden(params, second))[elsewhere]
    )
    assert not np.array_equal(
        np.asarray(hidden(params, first))[~elsewhere],
        np.asarray(hidden(params, second))[~elsewhere],
    )
    # The loss of the others, and what they give to the gradient of every parameter.
    (loss, grads), (other_loss, other_grads) = (
        value_and_grad(params, {**data, "labels": np.where(elsewhere, data["labels"], IGNORE)})
        for data in (first, second)
    )
    np.testing.assert_array_equal(loss, other_loss)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(other_grads), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6 * float(jnp.abs(a).max()))


@every_backend
@examples(10)
@given(lengths=lengths_of_a_row, seed=st.integers(0, 99))
def test_packed_loss_and_gradients_equal_unpacked(backend, lengths, seed):
    params, value_and_grad, _ = programs(backend)
    pieces = documents(lengths, seed)
    packed = rows([pieces, *EMPTY])
    unpacked = rows([[piece] for piece in pieces] + [[]] * (6 - len(pieces)))
    (loss, grads), (other_loss, other_grads) = (
        value_and_grad(params, packed),
        value_and_grad(params, unpacked),
    )
    np.testing.assert_allclose(loss, other_loss, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(other_grads), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * float(jnp.abs(a).max()))


def test_the_check_can_fail():
    """Without segment ids the same perturbation is seen: the law's test is not blind."""
    params, _, _ = programs("xla")
    graph, _ = nnx.split(Decoder(CONFIG, nnx.Rngs(3)), nnx.Param)
    model = nnx.merge(graph, params)
    data = rows([documents([5, 6], 0)])
    changed = data["input_ids"].copy()
    changed[0, 0] = (changed[0, 0] + 1) % VOCAB
    assert not np.array_equal(
        model.hidden(data["input_ids"])[0, 5:11], model.hidden(changed)[0, 5:11]
    )


def test_packed_distillation_equals_unpacked():
    """What draws a document to its teacher is the same in a row with others and in one of its own."""
    graph, params = nnx.split(Decoder(CONFIG, nnx.Rngs(3)), nnx.Param)
    texts = documents([7, 1, 9, 5], seed=4)
    rng = np.random.default_rng(4)
    said = [
        (rng.integers(0, VOCAB, (len(text), 2)), np.log(rng.dirichlet((1, 1, 1), len(text))[:, :2]))
        for text in texts
    ]

    def summed(groups):
        data, teachers = rows(groups), iter(said)
        data["teacher_ids"] = np.zeros((*data["labels"].shape, 2), np.int32)
        data["teacher_log_probs"] = np.zeros((*data["labels"].shape, 2), np.float32)
        for row, group in enumerate(groups):
            ends = np.cumsum([len(text) for text in group])
            for text, end in zip(group, ends, strict=True):
                cut = slice(end - len(text), end)
                ids, log_probs = next(teachers)
                data["teacher_ids"][row, cut], data["teacher_log_probs"][row, cut] = ids, log_probs

        def loss(params):
            model = nnx.merge(graph, params)
            out = loss_sums(model, data, chunk_size=10, distill=DistillConfig())
            return out.loss_sum, out.ratios["kl"]

        return jax.value_and_grad(loss, has_aux=True)(params)

    (one, kl), grads = summed([texts])
    (other, other_kl), other_grads = summed([[text] for text in texts])
    np.testing.assert_allclose(one, other, rtol=1e-5)
    np.testing.assert_allclose(kl, other_kl, rtol=1e-5)
    assert kl[1] == sum(len(text) - 1 for text in texts)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(other_grads), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * float(jnp.abs(a).max()))
