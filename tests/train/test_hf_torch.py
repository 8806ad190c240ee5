"""Against torch itself, every logit of 512 tokens, both ways. Torch is no part of the test extra: `nox -s parity`."""

from __future__ import annotations

import importlib.util

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from easypipe.train import load_pretrained, save_pretrained
from easypipe.train.model import Decoder, ModelConfig
from train.hf_support import CONFIGS, tensors, token_ids, torch_logits, write_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed: nox -s parity"),
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed: nox -s parity"),
]


@pytest.mark.parametrize("family", CONFIGS)
def test_logits_equal_torch_before_and_after_saving(family, tmp_path):
    config, ids = CONFIGS[family], token_ids(seed=1)
    model = load_pretrained(write_model(tmp_path / "in", config, tensors(config, seed=1), files=2))
    logits = np.asarray(nnx.jit(Decoder.__call__)(model, jnp.asarray(ids)))
    want = torch_logits(tmp_path / "in", ids)
    difference = np.abs(logits - want).max()
    print(f"{family}: largest difference of {logits.size} logits up to {np.abs(want).max():.1f}: {difference:.1e}")
    assert difference < 1e-4
    saved = save_pretrained(model, tmp_path / "out", max_shard_bytes=20_000)
    np.testing.assert_array_equal(torch_logits(saved, ids), want)


def test_torch_opens_a_model_that_was_made_here(tmp_path):
    model = Decoder(ModelConfig(vocab_size=64, hidden_size=24, intermediate_size=40, num_layers=2, head_dim=8), nnx.Rngs(0))
    ids = token_ids(seed=2)
    want = torch_logits(save_pretrained(model, tmp_path / "out"), ids)
    assert np.abs(np.asarray(nnx.jit(Decoder.__call__)(model, jnp.asarray(ids))) - want).max() < 1e-4
