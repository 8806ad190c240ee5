"""Training loops written by hand: the same model, batch and update as the quickstart's, with jax
and optax and nothing around.

B batch · S sequence · D width · H query heads · K key heads · h head width · V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax


def make_step(config: Any, transformation: optax.GradientTransformation) -> Callable[..., Any]:
    """`(params, moments, batch) -> (params, moments, loss)`, compiled; what is given is
    consumed.
    """
    heads, kv_heads, width = config.num_heads, config.num_kv_heads, config.head_width

    def norm(x: Any, scale: Any) -> Any:
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + config.norm_epsilon) * scale

    def rotate(x: Any, angle: Any) -> Any:
        a, b = jnp.split(x, 2, -1)
        return jnp.concatenate(
            [a * jnp.cos(angle) - b * jnp.sin(angle), b * jnp.cos(angle) + a * jnp.sin(angle)], -1
        )

    def mean_loss(params: Any, batch: Any) -> Any:
        ids, segments, labels = batch["input_ids"], batch["segment_ids"], batch["labels"]
        size = ids.shape
        turns = config.rope_theta ** (-jnp.arange(width // 2) / (width // 2))
        angle = (batch["position_ids"][..., None] * turns)[:, :, None, :]
        seen = (segments[:, :, None] == segments[:, None, :]) & jnp.tri(size[1], dtype=bool)
        x = params["embedding"][ids]
        for number in range(config.num_layers):
            at = {
                name: value[number] for name, value in params.items() if name.startswith("layers.")
            }
            y = norm(x, at["layers.attention_norm.scale"])
            query = rotate((y @ at["layers.query.kernel"]).reshape(*size, heads, width), angle)
            key = rotate((y @ at["layers.key.kernel"]).reshape(*size, kv_heads, width), angle)
            value = (y @ at["layers.value.kernel"]).reshape(*size, kv_heads, width)
            mixed = jax.nn.dot_product_attention(query, key, value, mask=seen[:, None])
            x = x + mixed.reshape(*size, heads * width) @ at["layers.output.kernel"]
            y = norm(x, at["layers.mlp_norm.scale"])
            x = (
                x
                + (jax.nn.silu(y @ at["layers.gate.kernel"]) * (y @ at["layers.up.kernel"]))
                @ at["layers.down.kernel"]
            )
        logits = norm(x, params["norm.scale"]) @ params["head.kernel"]
        log_p = jax.nn.log_softmax(logits)
        picked = jnp.take_along_axis(log_p, jnp.maximum(labels, 0)[..., None], -1)[..., 0]
        return -jnp.sum(jnp.where(labels >= 0, picked, 0)) / jnp.sum(labels >= 0)

    return descend(mean_loss, transformation)


def descend(
    mean_loss: Callable[[Any, Any], Any], transformation: optax.GradientTransformation
) -> Callable[..., Any]:
    """The compiled step of any `(params, batch) -> loss`."""

    def step(params: Any, moments: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(mean_loss)(params, batch)
        updates, moments = transformation.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments, loss

    return jax.jit(step, donate_argnums=(0, 1))
