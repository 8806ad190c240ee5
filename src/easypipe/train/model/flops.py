"""Counts the FLOPs of a training step from the model and the data, exactly or as PaLM does.

(XLA's own count is wrong under a scan.)

A product of an m x k and a k x n matrix counts 2·m·k·n; the backward pass counts twice the forward
pass; recomputation (remat) is not counted, nor are norms, activations and softmax: this is the
numerator of model FLOPs utilisation, not of hardware utilisation.

In a layer with a sliding window of W, the token at place p of its segment attends to min(p + 1, W)
tokens. The diagonal counts half a token too much, which is left out for all layers alike. So a
token counts p + 1/2, or W if that is less.
"""
# ruff: noqa: F722  (shapes in annotations are jaxtyping's, not Python)

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from easypipe.train.model.decoder import ModelConfig


def matmul_params(config: ModelConfig) -> int:
    """Returns the number of parameters in matrix products: those of layers and head.

    Norms and the embedding lookup have none.
    """
    heads = 2 * config.num_heads * config.head_width + 2 * config.num_kv_heads * config.head_width
    layer = config.hidden_size * (heads + 3 * config.intermediate_size)
    return config.num_layers * layer + config.hidden_size * config.vocabulary


def flops_per_step(config: ModelConfig, segment_lengths: Iterable[int]) -> int:
    """Returns the forward and backward FLOPs over packed segments, exact as an integer.

    They are `6·N·tokens + 6·H·h·Σ_layers Σ attended`, attended being `length²` of a segment, or `W²
    + 2·W·(length - W)` in a layer with a window W that is shorter. A token sees half its segment on
    average; padding and other segments are not counted.

    Args:
        config: The options of the model.
        segment_lengths: The lengths of the segments in tokens, without padding.
    """
    lengths = [int(length) for length in segment_lengths]
    attended = sum(_attended(length, window) for window in windows(config) for length in lengths)
    return (
        6 * matmul_params(config) * sum(lengths)
        + _attention(config) // config.num_layers * attended
    )


def flops_from_sums(config: ModelConfig, num_tokens: float, attended: float) -> float:
    """Returns `flops_per_step` from the two numbers of `segment_sums`, which add up over steps."""
    return 6.0 * matmul_params(config) * num_tokens + float(_attention(config)) * attended


def adapter_flops(config: ModelConfig, adapter_params: int) -> int:
    """Returns the FLOPs that adapters add for a token, usually a negative number.

    It is `6·adapter_params - 2·N`: a frozen matrix passes a gradient through but has none of its
    own, which takes 4 FLOPs per parameter and token instead of 6.
    """
    return 6 * adapter_params - 2 * matmul_params(config)


def windows(config: ModelConfig) -> list[int | None]:
    """Returns the sliding window of each layer, or None for a layer without one."""
    return [config.sliding_window if windowed else None for windowed in config.windowed]


def palm_flops_per_step(config: ModelConfig, num_slots: int, seq_length: int) -> int:
    """Returns the FLOPs of a step in the PaLM convention, `(6·N + 12·L·H·h·S)` per slot.

    Padding counts, but segments and the causal mask do not. A layer with a window W has min(S, W)
    instead of S; PaLM had no windows. Chowdhery et al., PaLM, 2022, appendix B. N is
    `matmul_params`. Most papers print this number, which is higher than `flops_per_step`.
    """
    seen = sum(
        seq_length if window is None else min(seq_length, window) for window in windows(config)
    )
    return num_slots * (
        6 * matmul_params(config) + 2 * (_attention(config) // config.num_layers) * seen
    )


def segment_sums(
    segment_ids: Int[Array, "B S"],
    position_ids: Int[Array, "B S"],
    windows: Sequence[int | None] = (None,),
) -> tuple[Int[Array, ""], Float[Array, ""]]:
    """Returns `(tokens, attended)` of the segments of a batch, on device.

    tokens is int32. attended is float32 (rounded to 1e-7 of itself above 2^24): Σ length², the mean
    over layers, limited by their `windows`. The odd numbers 1, 3, ... 2n-1 sum to n², so it follows
    from positions, which restart at 0 in each segment.
    """
    is_token, seen = segment_ids > 0, 2.0 * position_ids + 1.0
    attended = jnp.zeros((), jnp.float32)
    for window, layers in Counter(windows).items():
        within = seen if window is None else jnp.minimum(seen, 2.0 * window)
        attended += layers / len(windows) * jnp.where(is_token, within, 0.0).sum(dtype=jnp.float32)
    return is_token.sum(dtype=jnp.int32), attended


def _attended(length: int, window: int | None) -> int:
    """Returns the `attended` of one segment in one layer."""
    return (
        length * length
        if window is None or length <= window
        else window * window + 2 * window * (length - window)
    )


def _attention(config: ModelConfig) -> int:
    """Returns 6·L·H·h, the factor of the mean `attended`."""
    return 6 * config.num_layers * config.num_heads * config.head_width
