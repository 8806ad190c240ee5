"""Attention over packed rows: the one function through which every layer mixes tokens.

B batch · S sequence · H query heads · K key and value heads · G query heads of a key head · h head width
"""
# ruff: noqa: F722  (shapes in annotations are jaxtyping's, not Python)

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int


def attend(
    query_BSHh: Float[Array, "B S H h"],
    key_BSKh: Float[Array, "B S K h"],
    value_BSKh: Float[Array, "B S K h"],
    segment_ids: Int[Array, "B S"],
    *,
    window: int | None = None,
    windowed: Bool[Array, ""] | bool = True,
    scale: float | None = None,
    soft_cap: float | None = None,
) -> Float[Array, "B S H h"]:
    """Every query's mean of the values it may see, weighted by softmax(cap(query·key·scale)); scores are float32.

    A slot sees the slots of its own segment that are not after it, itself included. Segments are contiguous; padding (id 0) sees padding.
    window: slots it sees at most, the nearest; None: all. windowed: whether this layer has that window; may be traced, so that one
    compiled layer serves both kinds. scale: None for h^-1/2. soft_cap: c, scores become c·tanh(score/c).
    """
    mask_BSS = segment_mask(segment_ids)
    if window is not None:
        length = segment_ids.shape[1]
        mask_BSS &= _near(length, jnp.where(windowed, window, length))
    return _xla(query_BSHh, key_BSKh, value_BSKh, mask_BSS, scale, soft_cap)


def segment_mask(segment_ids: Int[Array, "B S"]) -> Bool[Array, "B S S"]:
    """True where query slot s may see key slot t: same segment, t not after s. Padding sees padding, so that no row of it is empty."""
    causal_SS = jnp.tril(jnp.ones((segment_ids.shape[1],) * 2, dtype=bool))
    return (segment_ids[:, :, None] == segment_ids[:, None, :]) & causal_SS


def _near(length: int, window: Int[Array, ""]) -> Bool[Array, "S S"]:
    """True where key slot t is less than `window` before query slot s. Segments are contiguous, so slots count as positions do."""
    index_S = jnp.arange(length)
    return index_S[:, None] - index_S[None, :] < window


def _xla(query_BSHh: Array, key_BSKh: Array, value_BSKh: Array, mask_BSS: Array, scale: float | None, soft_cap: float | None) -> Array:
    if soft_cap is None:
        return jax.nn.dot_product_attention(query_BSHh, key_BSKh, value_BSKh, mask=mask_BSS[:, None], scale=scale)
    batch, length, heads, head = query_BSHh.shape
    grouped_BSKGh = query_BSHh.reshape(batch, length, key_BSKh.shape[2], -1, head)
    scores_BKGST = jnp.einsum("bskgh,btkh->bkgst", grouped_BSKGh, key_BSKh, preferred_element_type=jnp.float32)
    scores_BKGST = soft_cap * jnp.tanh(scores_BKGST * ((head**-0.5 if scale is None else scale) / soft_cap))
    shares_BKGST = jax.nn.softmax(jnp.where(mask_BSS[:, None, None], scores_BKGST, -jnp.inf), axis=-1)
    mixed_BSKGh = jnp.einsum("bkgst,btkh->bskgh", shares_BKGST.astype(value_BSKh.dtype), value_BSKh)
    return mixed_BSKGh.reshape(batch, length, heads, head)
