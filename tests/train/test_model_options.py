"""What each option of the published families does to a decoder; their formulas are held to torch in
test_hf.py.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from easypipe.core.config import from_dict
from easypipe.core.errors import ConfigError
from easypipe.train.model.decoder import Decoder, ModelConfig
from easypipe.train.model.generate import generate

TINY = ModelConfig(
    vocab_size=61,
    hidden_size=24,
    intermediate_size=40,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
)
IDS = np.random.default_rng(0).integers(0, 61, (1, 24)).astype(np.int32)
LINEAR = {"kind": "linear", "factor": 4.0}
LLAMA3 = {"kind": "llama3", "factor": 4.0, "original_length": 16}


def built(**changes) -> Decoder:
    return Decoder(from_dict(ModelConfig, {**dataclasses.asdict(TINY), **changes}), nnx.Rngs(0))


def logits(**changes) -> np.ndarray:
    return np.asarray(nnx.jit(Decoder.__call__)(built(**changes), IDS))


@pytest.mark.parametrize(
    ("base", "change"),
    [
        ({}, {"sliding_window": 5}),
        ({"sliding_window": 5}, {"global_every": 2}),
        ({"sliding_window": 5}, {"local_rope_theta": 100.0}),
        ({}, {"rope_scaling": LINEAR}),
        ({}, {"rope_scaling": LLAMA3}),
        ({"rope_scaling": LLAMA3}, {"rope_scaling": LLAMA3 | {"low_freq_factor": 0.5}}),
        ({"rope_scaling": LLAMA3}, {"rope_scaling": LLAMA3 | {"high_freq_factor": 2.0}}),
        ({"rope_scaling": LLAMA3}, {"rope_scaling": LLAMA3 | {"original_length": 32}}),
        ({}, {"qk_norm": True}),
        ({}, {"attention_width": 2}),
        ({}, {"attention_soft_cap": 0.5}),
        ({}, {"logit_soft_cap": 0.5}),
        ({}, {"activation": "gelu_tanh"}),
        ({}, {"post_norms": True}),
        ({}, {"scale_embeddings": True}),
    ],
)
def test_an_option_changes_the_logits(base, change):
    assert np.abs(logits(**base) - logits(**{**base, **change})).max() > 1e-4


@pytest.mark.parametrize("scan_layers", [True, False])
def test_a_window_hides_what_is_far_and_every_nth_layer_sees_it(scan_layers):
    other = IDS.copy()
    other[0, 0] += 1
    call = nnx.jit(Decoder.__call__)

    def reached(**changes):
        model = built(scan_layers=scan_layers, **changes)
        return np.flatnonzero(np.abs(call(model, IDS) - call(model, other)).max(-1)[0] > 0).max()

    assert reached(sliding_window=4) == 3 * 3, "three layers, each three tokens back"
    assert reached(sliding_window=4, global_every=3) == 23
    assert reached() == 23


def test_a_window_as_long_as_the_row_and_a_local_theta_of_the_same_size_change_nothing():
    np.testing.assert_array_equal(
        logits(sliding_window=24, local_rope_theta=TINY.rope_theta), logits()
    )


def test_caps_bound_and_bias_and_scales_are_parameters():
    assert np.abs(logits(logit_soft_cap=0.125)).max() <= 0.125
    plain, biased = nnx.state(built()), nnx.state(built(qkv_bias=True))
    more = {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(biased)}
    more -= {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(plain)}
    assert len(more) == 3
    assert all("bias" in name for name in more)
    model = built(norm_scale="one_plus")
    assert not model.norm.scale.get_value().any(), "1 + w begins at 1, as w does"
    np.testing.assert_allclose(
        np.asarray(nnx.jit(Decoder.__call__)(model, IDS)), logits(), rtol=1e-4, atol=1e-5
    )
    moved = built(qkv_bias=True)
    moved.layers.value.bias.set_value(jnp.ones_like(moved.layers.value.bias.get_value()))
    assert np.abs(np.asarray(nnx.jit(Decoder.__call__)(moved, IDS)) - logits()).max() > 1e-3


def test_sampling_draws_from_capped_logits():
    """A cap near zero makes all tokens equally likely, however sure the model is."""
    prompts, options = [[1, 2, 3]] * 8, {"max_new_tokens": 8, "temperature": 0.01}
    sure = {tuple(row) for row in generate(built(), prompts, **options)}
    even = {tuple(row) for row in generate(built(logit_soft_cap=1e-6), prompts, **options)}
    assert len(sure) < len(even) == 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sliding_window": 0}, "sliding_window: 0 is too small"),
        ({"global_every": 2}, "global_every: has no effect without sliding_window"),
        ({"local_rope_theta": 100.0}, "local_rope_theta: has no effect without sliding_window"),
        ({"attention_width": 0}, "attention_width: 0 is too small"),
        (
            {"attention_soft_cap": 0.0},
            "attention_soft_cap: 0.0 is not a positive number. Leave it out for none",
        ),
        ({"logit_soft_cap": -1.0}, "logit_soft_cap: -1.0 is not a positive number"),
        ({"activation": "gelu"}, "activation: 'gelu' is not an option"),
        ({"norm_scale": "one"}, "norm_scale: 'one' is not an option"),
        (
            {"rope_scaling": {"kind": "yarn", "factor": 2.0}},
            "rope_scaling.kind: 'yarn' is not an option",
        ),
        (
            {"rope_scaling": {"kind": "linear", "factor": 0.5}},
            "rope_scaling.factor: 0.5 is less than 1",
        ),
        (
            {"rope_scaling": LINEAR | {"factor": math.inf}},
            "rope_scaling.factor: inf is not a positive number",
        ),
        (
            {"rope_scaling": LLAMA3 | {"high_freq_factor": math.inf}},
            "rope_scaling.high_freq_factor: inf is not a positive number",
        ),
        (
            {"rope_scaling": LINEAR | {"original_length": 32}},
            "rope_scaling.original_length: has no effect with kind linear",
        ),
        (
            {"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}},
            "rope_scaling.low_freq_factor: 4.0 is not between",
        ),
        (
            {"rope_scaling": LLAMA3 | {"original_length": 0}},
            "rope_scaling.original_length: 0 is too small",
        ),
        (
            {"rope_scaling": LINEAR, "sliding_window": 4, "local_rope_theta": 10.0},
            "rope_scaling: has no effect: every layer has a window",
        ),
    ],
)
def test_bad_options_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        from_dict(ModelConfig, {**dataclasses.asdict(TINY), **change})
