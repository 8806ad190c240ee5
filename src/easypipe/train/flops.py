"""Floating-point operations of a training step, counted from the model and the data (XLA's own count is wrong under a scan).

A product of an m x k and a k x n matrix counts 2·m·k·n; the backward pass counts twice the forward pass; recomputation (remat) is not
counted, nor are norms, activations and softmax: this is the numerator of model FLOPs utilisation, not of hardware utilisation.
"""
# ruff: noqa: F722  (shapes in annotations are jaxtyping's, not Python)

from __future__ import annotations

from collections.abc import Iterable

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from easypipe.train.model import ModelConfig


def matmul_params(config: ModelConfig) -> int:
    """Parameters that take part in a matrix product: layers and head, without norms and without the embedding lookup."""
    heads = 2 * config.num_heads * config.head_width + 2 * config.num_kv_heads * config.head_width
    layer = config.hidden_size * (heads + 3 * config.intermediate_size)
    return config.num_layers * layer + config.hidden_size * config.vocabulary


def flops_per_step(config: ModelConfig, segment_lengths: Iterable[int]) -> int:
    """Forward and backward FLOPs over packed segments of these lengths (tokens; padding left out), exact as an integer.

    `6·N·tokens + 6·L·H·h·Σ length²`: a token sees half its segment on average, padding and other segments cost nothing that counts.
    """
    lengths = [int(length) for length in segment_lengths]
    return 6 * matmul_params(config) * sum(lengths) + _attention(config) * sum(length * length for length in lengths)


def flops_from_sums(config: ModelConfig, num_tokens: float, squared_lengths: float) -> float:
    """`flops_per_step` from the two numbers that `segment_sums` gives, which add up over micro-batches and steps."""
    return 6.0 * matmul_params(config) * num_tokens + float(_attention(config)) * squared_lengths


def palm_flops_per_step(config: ModelConfig, num_slots: int, seq_length: int) -> int:
    """The PaLM convention, `(6·N + 12·L·H·h·S)` a slot: padding counts, segments and the causal mask do not.

    Chowdhery et al., PaLM, 2022, appendix B. N is `matmul_params`. It is what most papers print, and higher than `flops_per_step`.
    """
    return num_slots * (6 * matmul_params(config) + 2 * _attention(config) * seq_length)


def segment_sums(segment_ids: Int[Array, "B S"], position_ids: Int[Array, "B S"]) -> tuple[Int[Array, ""], Float[Array, ""]]:
    """`(tokens, Σ length²)` of the segments of a batch, on device: int32 and float32 (rounded to 1e-7 of itself above 2^24).

    The odd numbers 1, 3, ... 2n-1 sum to n², so positions, which restart at 0 in each segment, are all it takes.
    """
    is_token = segment_ids > 0
    return is_token.sum(dtype=jnp.int32), jnp.where(is_token, 2.0 * position_ids + 1.0, 0.0).sum(dtype=jnp.float32)


def _attention(config: ModelConfig) -> int:
    return 6 * config.num_layers * config.num_heads * config.head_width
