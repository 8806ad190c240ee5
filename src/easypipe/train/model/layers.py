"""What a decoder is made of: norms, projections, rotations, and the layer that joins them with
attention.

B batch · S sequence · D width · H query heads · K key and value heads · h head width
"""
# ruff: noqa: F722  (shapes in annotations are jaxtyping's, not Python)

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float, Int

from easypipe.train.model.attention import attend
from easypipe.train.model.config import ModelConfig, RopeScaling
from easypipe.train.parallel.axes import partitioned

Turns = tuple[Float[Array, "B S 1 h/2"], Float[Array, "B S 1 h/2"]]


class Layer(nnx.Module):
    """Attention and MLP, each added to the stream it reads. Arrays of options that are off do not
    exist.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        width, inner, head = config.hidden_size, config.intermediate_size, config.head_width
        make = functools.partial(linear, config, rngs=rngs)
        # 2 additions a layer: keeps the sum's size whatever the depth (GPT-2)
        residual = (2 * config.num_layers) ** -0.5
        self.config = config
        self.attention_norm, self.mlp_norm = norm(config, width, rngs), norm(config, width, rngs)
        self.query = make(width, config.num_heads * head, ("embed", "heads"), bias=config.qkv_bias)
        self.key = make(width, config.num_kv_heads * head, ("embed", "heads"), bias=config.qkv_bias)
        self.value = make(
            width, config.num_kv_heads * head, ("embed", "heads"), bias=config.qkv_bias
        )
        self.output = make(config.num_heads * head, width, ("heads", "embed"), scale=residual)
        self.gate = make(width, inner, ("embed", "mlp"))
        self.up = make(width, inner, ("embed", "mlp"))
        self.down = make(inner, width, ("mlp", "embed"), scale=residual)
        if config.qk_norm:
            self.query_norm, self.key_norm = norm(config, head, rngs), norm(config, head, rngs)
        if config.post_norms:
            self.attention_post_norm, self.mlp_post_norm = (
                norm(config, width, rngs),
                norm(config, width, rngs),
            )

    def __call__(
        self,
        x_BSD: Float[Array, "B S D"],
        segment_ids: Int[Array, "B S"],
        windowed: Bool[Array, ""] | bool,
        turns: Turns,
    ) -> Float[Array, "B S D"]:
        config, (batch, length, _) = self.config, x_BSD.shape
        normed_BSD = self.attention_norm(x_BSD)
        query_BSHh = self.query(normed_BSD).reshape(batch, length, config.num_heads, -1)
        key_BSKh = self.key(normed_BSD).reshape(batch, length, config.num_kv_heads, -1)
        value_BSKh = self.value(normed_BSD).reshape(batch, length, config.num_kv_heads, -1)
        if config.qk_norm:
            query_BSHh, key_BSKh = self.query_norm(query_BSHh), self.key_norm(key_BSKh)
        mixed_BSHh = attend(
            rotate(query_BSHh, turns),
            rotate(key_BSKh, turns),
            value_BSKh,
            segment_ids,
            window=config.sliding_window,
            windowed=windowed,
            scale=None if config.attention_width is None else config.attention_width**-0.5,
            soft_cap=config.attention_soft_cap,
            backend=config.attention,
        )
        added_BSD = self.output(mixed_BSHh.reshape(batch, length, -1))
        x_BSD = x_BSD + (self.attention_post_norm(added_BSD) if config.post_norms else added_BSD)
        normed_BSD = self.mlp_norm(x_BSD)
        activation = (
            nnx.silu
            if config.activation == "silu"
            else functools.partial(nnx.gelu, approximate=True)
        )
        added_BSD = self.down(activation(self.gate(normed_BSD)) * self.up(normed_BSD))
        return x_BSD + (self.mlp_post_norm(added_BSD) if config.post_norms else added_BSD)


def linear(
    config: ModelConfig,
    inputs: int,
    outputs: int,
    axes: tuple[str, str],
    rngs: nnx.Rngs,
    scale: float = 1.0,
    bias: bool = False,
) -> nnx.Linear:
    """A projection whose kernel, [inputs, outputs], has dimensions that mean `axes`; its first
    values have the size `scale`·inputs^-1/2.
    """
    init = nnx.initializers.variance_scaling(scale**2, "fan_in", "truncated_normal")
    return nnx.Linear(
        inputs,
        outputs,
        use_bias=bias,
        dtype=jnp.dtype(config.dtype),
        param_dtype=jnp.dtype(config.param_dtype),
        kernel_init=partitioned(init, *axes),
        bias_init=partitioned(nnx.initializers.zeros, axes[1]),
        rngs=rngs,
    )


def norm(config: ModelConfig, width: int, rngs: nnx.Rngs) -> nnx.RMSNorm | OnePlusNorm:
    """A norm over the last dimension, `width` long, with the scale that `config.norm_scale`
    names.
    """
    if config.norm_scale == "one_plus":
        return OnePlusNorm(config, width, rngs)
    return nnx.RMSNorm(
        width,
        epsilon=config.norm_epsilon,
        dtype=jnp.dtype(config.dtype),  # of the result; the mean of squares is taken in float32
        param_dtype=jnp.dtype(config.param_dtype),
        scale_init=partitioned(nnx.initializers.ones, None),
        rngs=rngs,
    )


class OnePlusNorm(nnx.Module):
    """`x / rms(x) · (1 + scale)`, all in float32, as Gemma has it: weight decay pulls it to 1 and
    not to 0.
    """

    def __init__(self, config: ModelConfig, width: int, rngs: nnx.Rngs) -> None:
        self.epsilon, self.dtype = config.norm_epsilon, jnp.dtype(config.dtype)
        self.scale = nnx.Param(
            partitioned(nnx.initializers.zeros, None)(
                rngs.params(), (width,), jnp.dtype(config.param_dtype)
            )
        )

    def __call__(self, x: Float[Array, "*n D"]) -> Float[Array, "*n D"]:
        wide = x.astype(jnp.float32)
        size = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.epsilon)
        return (wide * size * (1 + self.scale[...].astype(jnp.float32))).astype(self.dtype)


def rotation(
    position_ids: Array, head_width: int, theta: float, scaling: RopeScaling | None
) -> Turns:
    """Cosine and sine of the angle of every pair, Float32[B, S, 1, h/2] (Su et al., RoFormer,
    2021).
    """
    exponent = jnp.arange(0, head_width, 2, dtype=jnp.float32) / head_width
    angle = position_ids[:, :, None, None].astype(jnp.float32) * _slowed(theta**-exponent, scaling)
    return jnp.cos(angle), jnp.sin(angle)


def _slowed(frequency: Float[Array, " h/2"], scaling: RopeScaling | None) -> Float[Array, " h/2"]:
    """Radians a position, scaled. llama3: Llama 3.1's model code, `apply_scaling`."""
    if scaling is None:
        return frequency
    if scaling.kind == "linear":
        return frequency / scaling.factor
    # full circles within the rows of the first training
    turns = scaling.original_length * frequency / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = jnp.clip((turns - low) / (high - low), 0, 1)
    return frequency * (kept + (1 - kept) / scaling.factor)


def rotate(x_BSHh: Float[Array, "B S H h"], turns: Turns) -> Float[Array, "B S H h"]:
    """Pairs are (i, i + h/2), as in the published Llama weights; turned in float32."""
    cosine, sine = turns
    first, second = jnp.split(x_BSHh.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate(
        [first * cosine - second * sine, second * cosine + first * sine], axis=-1
    )
    return turned.astype(x_BSHh.dtype)
