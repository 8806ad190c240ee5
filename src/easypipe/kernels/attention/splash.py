"""Flash attention over packed rows on TPUs, by jax's splash attention kernels; their block sizes.

They are jax.experimental.pallas.ops.tpu.splash_attention. Blocks hidden by the causal mask or the
window are never read. Segments within the other blocks are masked: they differ from row to row, and
the kernel's list of blocks does not.

B batch · Q query slots of this device · S slots of the row · H query heads · K key and value heads
· h head width
"""
# ruff: noqa: F722  (shapes in annotations are jaxtyping's, not Python)

from __future__ import annotations

from typing import cast

import jax
from jax import Array
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Float, Int

# Slots of a block: the largest that divides the queries of a device. A block of 512 x 512 scores is
# 1 MiB of the 16 in VMEM.
BLOCKS = (512, 256, 128)


def make_kernel(
    heads: int,
    slots: int,
    shards: int,
    window: int | None,
    soft_cap: float | None,
    *,
    interpret: bool,
) -> splash.SplashAttentionKernel:
    """Returns the kernel for rows of `slots` whose queries are sharded over `shards` devices.

    Each device has `heads` query heads. The kernel is a pytree of block lists, which belong to the
    trace in which this is called.
    """
    size = next(size for size in BLOCKS if slots // shards % size == 0)
    square = (slots, slots)
    mask: masks.Mask = (
        masks.CausalMask(square) if window is None else masks.LocalMask(square, (window - 1, 0), 0)
    )
    return splash.make_splash_mha(
        masks.MultiHeadMask([mask] * heads),
        block_sizes=splash.BlockSizes(**dict.fromkeys(_SIZES, size)),
        attn_logits_soft_cap=soft_cap,
        head_shards=1,
        q_seq_shards=shards,
        residual_checkpoint_name="attention",
        interpret=interpret,
    )


_SIZES = (
    "block_q",
    "block_kv",
    "block_kv_compute",
    "block_q_dkv",
    "block_kv_dkv",
    "block_kv_dkv_compute",
    "block_q_dq",
    "block_kv_dq",
)


def kernel_specs(
    kernel: splash.SplashAttentionKernel, sequence: str | None
) -> splash.SplashAttentionKernel:
    """Returns the specs of the kernel's block lists: over the devices that share the queries."""
    if sequence is None:
        return jax.tree.map(lambda _: P(), kernel)
    mesh = jax.sharding.get_abstract_mesh()
    return kernel.manual_sharding_spec(NamedSharding(mesh, P(None, sequence)))


def attention(
    query_BQHh: Float[Array, "B Q H h"],
    key_BSKh: Float[Array, "B S K h"],
    value_BSKh: Float[Array, "B S K h"],
    query_segments: Int[Array, "B Q"],
    key_segments: Int[Array, "B S"],
    kernel: splash.SplashAttentionKernel,
    *,
    scale: float,
) -> Float[Array, "B Q H h"]:
    """Returns softmax attention within segments, in the dtype of the query, summed in float32.

    Q and S are multiples of 128.
    """
    # The kernel scales nothing; the product is rounded once to the dtype.
    query, key, value = (
        array.swapaxes(1, 2)
        for array in ((query_BQHh * scale).astype(query_BQHh.dtype), key_BSKh, value_BSKh)
    )
    segments = splash.SegmentIds(query_segments, key_segments)
    # The kernel can also return its sums; here they are not asked for.
    mixed = cast("Array", jax.vmap(kernel)(query, key, value, segments))
    return mixed.swapaxes(1, 2).astype(query_BQHh.dtype)
