from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from easypipe.train.model.decoder import Decoder, ModelConfig, param_count, positions
from easypipe.train.model.flops import (
    flops_from_sums,
    flops_per_step,
    matmul_params,
    palm_flops_per_step,
    segment_sums,
    windows,
)
from strategies import examples

CONFIG = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
)


def test_matmul_params_are_all_but_norms_and_lookup():
    norms = (2 * CONFIG.num_layers + 1) * CONFIG.hidden_size
    tied = dataclasses.replace(CONFIG, tie_embeddings=True)  # its table counts once, as the head
    assert matmul_params(tied) == param_count(Decoder(tied, nnx.Rngs(0))) - norms
    assert matmul_params(CONFIG) == matmul_params(tied)


def test_exact_count_follows_the_products_one_by_one():
    lengths = [5, 9, 1]
    # query and output, key and value, MLP
    per_token = 2 * 32 * (4 * 16) * 2 + 2 * 32 * (2 * 16) * 2 + 3 * 2 * 32 * 48
    head = 2 * 32 * 64
    forward = sum(n * (3 * per_token + head) for n in lengths)
    forward += sum(
        3 * 4 * (2 * n * n * 16 * 2) // 2 for n in lengths
    )  # scores and mixing of each head, half of them behind the causal mask
    assert flops_per_step(CONFIG, lengths) == 3 * forward


def test_packing_costs_less_than_the_palm_convention_says_and_a_full_row_half_its_attention():
    assert (
        flops_per_step(CONFIG, [32, 32])
        < flops_per_step(CONFIG, [64])
        < palm_flops_per_step(CONFIG, 64, 64)
    )
    attention = 12 * 3 * 4 * 16 * 64 * 64
    assert palm_flops_per_step(CONFIG, 64, 64) == 6 * matmul_params(CONFIG) * 64 + attention
    assert flops_per_step(CONFIG, [64]) == 6 * matmul_params(CONFIG) * 64 + attention // 2


def test_sums_on_device_equal_the_lengths():
    segments = jnp.array([[1, 1, 1, 2, 2, 0], [1, 2, 2, 2, 2, 3]])
    tokens, squares = segment_sums(segments, positions(segments))
    lengths = [3, 2, 1, 4, 1]
    assert (int(tokens), float(squares)) == (sum(lengths), sum(n * n for n in lengths))
    np.testing.assert_allclose(
        flops_from_sums(CONFIG, float(tokens), float(squares)),
        flops_per_step(CONFIG, lengths),
        rtol=1e-12,
    )


@examples(25)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=5),
    window=st.integers(1, 20),
    every=st.sampled_from([None, 1, 2, 3]),
)
def test_a_window_bounds_what_a_token_is_counted_for(lengths, window, every):
    """Token by token: twice what it sees within the window, less the half of itself on the
    diagonal.
    """
    windowed = dataclasses.replace(CONFIG, sliding_window=window, global_every=every)
    attended = sum(
        min(2 * place + 1, 2 * (wide or 99))
        for wide in windows(windowed)
        for n in lengths
        for place in range(n)
    )
    assert (
        flops_per_step(windowed, lengths)
        == 6 * matmul_params(CONFIG) * sum(lengths) + 6 * 4 * 16 * attended
    )
    segments = np.zeros((1, 60), np.int32)
    segments[0, : sum(lengths)] = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    tokens, seen = segment_sums(
        jnp.asarray(segments), positions(jnp.asarray(segments)), windows(windowed)
    )
    np.testing.assert_allclose(
        flops_from_sums(windowed, float(tokens), float(seen)),
        flops_per_step(windowed, lengths),
        rtol=1e-6,
    )


def test_windows_in_the_palm_convention():
    windowed = dataclasses.replace(CONFIG, sliding_window=4, global_every=3)
    assert windows(windowed) == [4, 4, None]
    assert palm_flops_per_step(windowed, 10, 10) == 10 * (
        6 * matmul_params(CONFIG) + 12 * 4 * 16 * (4 + 4 + 10)
    )
    wide = dataclasses.replace(CONFIG, sliding_window=100)
    assert flops_per_step(wide, [3, 7]) == flops_per_step(CONFIG, [3, 7])
