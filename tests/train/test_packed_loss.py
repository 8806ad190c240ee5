"""Law 5 from end to end: what a plan packs gives the real model the loss and the gradients of the
same documents in rows of their own.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from easypipe.core.schema import IGNORE, INPUT_IDS, LABELS, POSITION_IDS, SEGMENT_IDS
from easypipe.plan.pack import STRATEGIES
from easypipe.train.model.decoder import Decoder, ModelConfig
from loader_support import MemoryCache, plan_rows, some_docs

SLOTS, VOCAB, ROWS = 24, 60, 48

CONFIG = ModelConfig(
    vocab_size=VOCAB,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
)
COLUMNS = (INPUT_IDS, LABELS, SEGMENT_IDS, POSITION_IDS)


@functools.cache
def program():
    """Parameters, and (sum of the losses of all labels, its gradients) of ROWS rows as one compiled
    program.
    """
    graph, params = nnx.split(Decoder(CONFIG, nnx.Rngs(3)), nnx.Param)

    def loss(params, data):
        logits = nnx.merge(graph, params)(data[INPUT_IDS], data[SEGMENT_IDS], data[POSITION_IDS])
        labels = data[LABELS]
        picked = jnp.take_along_axis(
            jax.nn.log_softmax(logits), jnp.maximum(labels, 0)[..., None], axis=-1
        )[..., 0]
        return -jnp.sum(jnp.where(labels == IGNORE, 0.0, picked))

    return params, jax.jit(jax.value_and_grad(loss))


def padded(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """ROWS rows of SLOTS slots, whatever the batch has, so that one program serves all."""
    out = {
        name: np.full((ROWS, SLOTS), IGNORE if name == LABELS else 0, np.int32) for name in COLUMNS
    }
    for name, column in out.items():
        column[: batch[name].shape[0], : batch[name].shape[1]] = batch[name]
    return out


def alone(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Every segment of a batch in a row of its own, with the labels it has."""
    rows, numbers = np.nonzero(
        np.diff(batch[SEGMENT_IDS], axis=1, prepend=0) * (batch[SEGMENT_IDS] > 0)
    )
    out = {
        name: np.full((len(rows), SLOTS), IGNORE if name == LABELS else 0, np.int32)
        for name in batch
    }
    for n, (row, start) in enumerate(zip(rows, numbers, strict=True)):
        here = np.flatnonzero(batch[SEGMENT_IDS][row] == batch[SEGMENT_IDS][row, start])
        for name, column in out.items():
            column[n, : len(here)] = 1 if name == SEGMENT_IDS else batch[name][row, here]
    return out


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_packed_loss_and_gradients_equal_unpacked(strategy: str) -> None:
    params, loss = program()
    lengths = np.random.Generator(np.random.PCG64(1)).integers(1, 20, 30)
    masks = [np.arange(n) % 3 > 0 for n in lengths]
    caches = [
        MemoryCache(some_docs(lengths.tolist(), vocab_size=VOCAB), vocab_size=VOCAB, masks=masks)
    ]
    rows = plan_rows(caches, seq_length=SLOTS, strategy=strategy)
    packed = rows.batch(np.arange(rows.num_rows), SLOTS)
    documents = plan_rows(caches, seq_length=None)
    unpacked = documents.batch(np.arange(documents.num_rows), SLOTS)
    # cuts documents: what stands before the cut is not seen, but every token is the same target
    if strategy == "stream":
        assert sorted(packed[LABELS][packed[LABELS] != IGNORE]) == sorted(
            unpacked[LABELS][unpacked[LABELS] != IGNORE]
        )
        assert (packed[LABELS][:, -1] != IGNORE).any()
        unpacked = alone(packed)
    (one, grads), (other, other_grads) = (loss(params, padded(data)) for data in (packed, unpacked))
    np.testing.assert_allclose(one, other, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(other_grads), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * float(jnp.abs(a).max()))
