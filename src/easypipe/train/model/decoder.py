"""The decoder (Llama, Qwen, Mistral or Gemma) in Flax NNX: layers, norms, rotation, added tokens.

RMSNorm, rotary positions, grouped-query attention, a gated MLP.

B batch · S sequence · D width · H query heads · K key and value heads · h head width · F inner
width of the MLP · V vocabulary
"""
# ruff: noqa: F722  (shapes in annotations are jaxtyping's, not Python)

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float, Int

from easypipe.core.errors import require
from easypipe.core.random import fold
from easypipe.kernels.loss.stats import Layout
from easypipe.train.model.attention import KVCache, Scores, attend, attend_cached, head_axes, runs
from easypipe.train.model.config import ModelConfig, RopeScaling
from easypipe.train.model.noise import Noise
from easypipe.train.parallel.config import axes_of
from easypipe.train.parallel.mesh import (
    BATCH_AXES,
    TOKEN_AXES,
    constrain,
    on_mesh,
    partitioned,
    rules,
    vocab_axes,
)

Turns = tuple[Float[Array, "B S 1 h/2"], Float[Array, "B S 1 h/2"]]
# (query, key, value, scores) -> the attention output of each head
Mix = Callable[[Array, Array, Array, Scores], Array]


class Layer(nnx.Module):
    """A layer: attention and MLP, each added to the residual stream that it reads.

    Parameters of options that are off do not exist.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        width, inner, head = config.hidden_size, config.intermediate_size, config.head_width
        make = functools.partial(linear, config, rngs=rngs)
        # Each layer adds twice: this factor keeps the size of the sum constant for any depth
        # (GPT-2).
        residual = (2 * config.num_layers) ** -0.5
        self.config = config
        self.attention_norm, self.mlp_norm = norm(config, width, rngs), norm(config, width, rngs)
        project = functools.partial(make, width, axes=("embed", "heads"), bias=config.qkv_bias)
        self.query = project(config.num_heads * head)
        self.key = project(config.num_kv_heads * head)
        self.value = project(config.num_kv_heads * head)
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
        self, x_BSD: Float[Array, "B S D"], windowed: Bool[Array, ""] | bool, turns: Turns, mix: Mix
    ) -> Float[Array, "B S D"]:
        """Returns the stream after the layer.

        Args:
            x_BSD: The residual stream.
            windowed: Whether this layer has the window.
            turns: The rotation of queries and keys.
            mix: The attention.
        """
        config, (batch, length, _) = self.config, x_BSD.shape
        normed_BSD = self.attention_norm(x_BSD)
        query_BSHh = self.query(normed_BSD).reshape(batch, length, config.num_heads, -1)
        key_BSKh = self.key(normed_BSD).reshape(batch, length, config.num_kv_heads, -1)
        value_BSKh = self.value(normed_BSD).reshape(batch, length, config.num_kv_heads, -1)
        if config.qk_norm:
            query_BSHh, key_BSKh = self.query_norm(query_BSHh), self.key_norm(key_BSKh)
        mixed_BSHh = mix(
            rotate(query_BSHh, turns),
            rotate(key_BSKh, turns),
            value_BSKh,
            Scores(
                window=config.sliding_window,
                windowed=windowed,
                scale=None if config.attention_width is None else config.attention_width**-0.5,
                soft_cap=config.attention_soft_cap,
            ),
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
    """Returns a projection; `axes` are the meanings of the dimensions of its kernel.

    Args:
        config: The options of the model, for its dtypes.
        inputs: The number of inputs.
        outputs: The number of outputs.
        axes: The meanings of the dimensions of the kernel, [inputs, outputs], for its sharding.
        rngs: The source of random keys.
        scale: The initial values have a standard deviation of `scale`·inputs^-1/2.
        bias: Whether the projection adds a bias.
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
    """Returns a norm over the last dimension, with the scale of `config.norm_scale`."""
    if config.norm_scale == "one_plus":
        return OnePlusNorm(config, width, rngs)
    return nnx.RMSNorm(
        width,
        epsilon=config.norm_epsilon,
        dtype=jnp.dtype(config.dtype),  # dtype of the result; the mean of squares is float32
        param_dtype=jnp.dtype(config.param_dtype),
        scale_init=partitioned(nnx.initializers.ones, None),
        rngs=rngs,
    )


class OnePlusNorm(nnx.Module):
    """The norm `x / rms(x) · (1 + scale)`, all in float32, as in Gemma.

    Weight decay pulls its factor to 1, not to 0.
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
    """Returns cosine and sine of the angle of every pair, each Float32[B, S, 1, h/2].

    (Su et al., RoFormer, 2021.)

    Args:
        position_ids: Int[B, S], the position of each token.
        head_width: The width of a head.
        theta: The base of the angles.
        scaling: The scaling of the angles, if any.
    """
    exponent = jnp.arange(0, head_width, 2, dtype=jnp.float32) / head_width
    angle = position_ids[:, :, None, None].astype(jnp.float32) * slowed(theta**-exponent, scaling)
    return jnp.cos(angle), jnp.sin(angle)


def slowed(frequency: Float[Array, " h/2"], scaling: RopeScaling | None) -> Float[Array, " h/2"]:
    """Returns the scaled frequencies, in radians per position.

    llama3 is `apply_scaling` of Llama 3.1's model code.
    """
    if scaling is None:
        return frequency
    if scaling.kind == "linear":
        return frequency / scaling.factor
    # Full circles within the rows of the original training.
    turns = scaling.original_length * frequency / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = jnp.clip((turns - low) / (high - low), 0, 1)
    return frequency * (kept + (1 - kept) / scaling.factor)


def rotate(x_BSHh: Float[Array, "B S H h"], turns: Turns) -> Float[Array, "B S H h"]:
    """Rotates the pairs (i, i + h/2) of each head, in float32, as in Llama's weights."""
    cosine, sine = turns
    first, second = jnp.split(x_BSHh.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate(
        [first * cosine - second * sine, second * cosine + first * sine], axis=-1
    )
    return turned.astype(x_BSHh.dtype)


class AddedTokens(nnx.Module):
    """The trained rows of new tokens, which replace those in a frozen embedding table and head.

    They are float32 and replicated on every device.

    Args:
        config: The options of the model.
        ids: The ids of the new tokens.
    """

    def __init__(self, config: ModelConfig, ids: range) -> None:
        self.start, self.count = ids.start, len(ids)
        width = config.hidden_size
        self.embedding = nnx.LoRAParam(jnp.zeros((self.count, width), jnp.float32))
        self.lm_head = (
            None
            if config.tie_embeddings
            else nnx.LoRAParam(jnp.zeros((width, self.count), jnp.float32))
        )

    def embedded(self, input_ids: Int[Array, "B S"], x: Float[Array, "B S D"]) -> Array:
        """Returns the embeddings `x` with those of new tokens replaced."""
        rows = self.embedding[...].astype(x.dtype)
        places = input_ids - self.start
        new = (places >= 0) & (places < self.count)
        return jnp.where(new[..., None], jnp.take(rows, places, axis=0, mode="clip"), x)

    def in_table(self, table: Float[Array, "V D"]) -> Float[Array, "V D"]:
        """Returns the embedding table with the rows of new tokens replaced."""
        rows = self.embedding[...].astype(table.dtype)
        return jax.lax.dynamic_update_slice(table, rows, (self.start, 0))

    def in_head(self, head: Array) -> Array:
        """Returns the head, [D, V], or the table if that is the head, with new tokens."""
        if self.lm_head is None:
            return self.in_table(head)
        columns = self.lm_head[...].astype(head.dtype)
        return jax.lax.dynamic_update_slice(head, columns, (0, self.start))


class Decoder(nnx.Module):
    """The decoder: token ids in, logits (or the hidden states before the head) out.

    If it is built inside `jax.jit` under `jax.set_mesh(mesh)`, every parameter is created on its
    devices.

    Attributes:
        config: The options of the model.
        hf_config: The config.json of the published weights, from which save_pretrained starts.
        added: The rows of new tokens, if the model was given any for adapters.
        score: [D, 1], the head of a reward model.

    Raises:
        ConfigError: A dimension does not divide over its mesh axis.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        check_mesh(config)
        self.config = config
        self.hf_config: str | None = None
        width, vocab, param_dtype = (
            config.hidden_size,
            config.vocabulary,
            jnp.dtype(config.param_dtype),
        )
        # Embeddings must be as large in the residual stream as what the layers add to it (unit
        # size), or early training is slow: a table of 0.02 reached a loss of 4.98, where 1/sqrt(D)
        # reached 4.28, and 1 (untied) 3.89. A table that is also the head cannot be larger than
        # 1/sqrt(D): its own token would win every logit.
        table_init = partitioned(
            nnx.initializers.normal(width**-0.5 if config.tie_embeddings else 1.0), "vocab", "embed"
        )
        self.embedding = nnx.Param(table_init(rngs.params(), (vocab, width), param_dtype))
        make_layers = nnx.vmap(
            functools.partial(Layer, config),
            in_axes=0,
            out_axes=0,
            transform_metadata={nnx.PARTITION_NAME: "layers"},
        )
        self.layers = make_layers(rngs.split(config.num_layers))
        self.norm = norm(config, config.hidden_size, rngs)
        if not config.tie_embeddings:
            # The initial logits are small, so that the first loss is near log(V).
            self.head = linear(config, width, vocab, ("embed", "vocab"), rngs, scale=0.25)
        self.added: AddedTokens | None = nnx.data(None)
        self.score: nnx.LoRAParam[Array] | None = nnx.data(None)

    def __call__(
        self,
        input_ids: Int[Array, "B S"],
        segment_ids: Int[Array, "B S"] | None = None,
        position_ids: Int[Array, "B S"] | None = None,
    ) -> Float[Array, "B S V"]:
        """Returns the float32 logits of every slot.

        They are large: training uses train/losses/loss.py, which never holds them.
        """
        return self.logits(self.hidden(input_ids, segment_ids, position_ids))

    def logits(self, hidden: Float[Array, "*tokens D"]) -> Float[Array, "*tokens V"]:
        """Returns the float32 logits of hidden states, capped if the model caps them."""
        logits = jnp.einsum(
            f"...d,{self.lm_head_layout}->...v",
            hidden,
            self.lm_head(),
            preferred_element_type=jnp.float32,
        )
        cap = self.logit_soft_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def add_score(self, seed: int) -> None:
        """Makes the decoder a reward model.

        It adds a head of one number, which is trained even if only adapters are.
        """
        key = jax.random.key(fold(seed, "score") % 2**32)
        first = 0.02 * jax.random.normal(key, (self.config.hidden_size, 1), jnp.float32)
        self.score = nnx.LoRAParam(first)

    def scores(self, hidden: Float[Array, "*tokens D"]) -> Float[Array, "*tokens"]:
        """Returns a reward model's score of the text up to each token; float32."""
        assert self.score is not None
        return (hidden.astype(jnp.float32) @ self.score[...])[..., 0]

    def hidden(
        self,
        input_ids: Int[Array, "B S"],
        segment_ids: Int[Array, "B S"] | None = None,
        position_ids: Int[Array, "B S"] | None = None,
        *,
        noise: Noise | None = None,
    ) -> Float[Array, "B S D"]:
        """Returns the normalised states before the head, in `config.dtype`.

        Args:
            input_ids: The tokens.
            segment_ids: The segment of each slot; slots of a row see each other only within a
                segment; 0 is padding; None: each row is one segment.
            position_ids: The position of the token in its segment, for the rotation; None: counted
                from segment_ids.
            noise: Noise on the embeddings, in training.
        """
        if segment_ids is None:
            segment_ids = jnp.ones_like(input_ids)
        if position_ids is None:
            position_ids = positions(segment_ids)
        config = self.config

        def mix(query: Array, key: Array, value: Array, scores: Scores) -> Array:
            return attend(query, key, value, segment_ids, scores, config.attention)

        windowed, of = self._kinds(position_ids)

        def layer(x_BSD: Array, one: tuple[Layer, Array | None]) -> tuple[Array, None]:
            block, windowed = one
            x_BSD = block(x_BSD, *of(windowed), mix)
            return constrain(x_BSD, *TOKEN_AXES, None), None

        if config.remat == "full":
            layer = jax.checkpoint(layer)
        elif config.remat == "dots":
            layer = jax.checkpoint(layer, policy=_PRODUCTS)
        x_BSD = self._embedded(input_ids, noise)
        x_BSD, _ = jax.lax.scan(layer, x_BSD, (self.layers, windowed), unroll=self._unroll)
        return self.norm(x_BSD)

    def extend(
        self, input_ids: Int[Array, "B T"], position_ids: Int[Array, "B T"], cache: KVCache
    ) -> tuple[Float[Array, "B T D"], KVCache]:
        """Returns `hidden` of tokens that follow those in `cache`, and the extended cache.

        Args:
            input_ids: The tokens.
            position_ids: The position of each token in its row, below the number of slots of
                `cache`.
            cache: The cache.
        """
        windowed, of = self._kinds(position_ids)

        def layer(
            carry: tuple[Array, KVCache], one: tuple[Layer, Array, Array | None]
        ) -> tuple[tuple[Array, KVCache], None]:
            (x_BTD, cache), (block, number, windowed) = carry, one

            def mix(query: Array, key: Array, value: Array, scores: Scores) -> Array:
                nonlocal cache
                cache = cache.written(number, position_ids, key, value)
                keys, values = cache.keys[number], cache.values[number]
                return attend_cached(query, keys, values, position_ids, scores)

            x_BTD = block(x_BTD, *of(windowed), mix)
            return (constrain(x_BTD, BATCH_AXES, None, None), cache), None

        layers = (self.layers, jnp.arange(self.config.num_layers), windowed)
        begin = (self._embedded(input_ids), cache)
        (x_BTD, cache), _ = jax.lax.scan(layer, begin, layers, unroll=self._unroll)
        return self.norm(x_BTD), cache

    def _embedded(
        self, input_ids: Int[Array, "B S"], noise: Noise | None = None
    ) -> Float[Array, "B S D"]:
        """Returns the embeddings of tokens, with noise and scaling."""
        # A table sharded over its vocabulary is gathered over `fsdp` first; otherwise the
        # partitioner replicates all of it.
        table_VD = constrain(self.embedding[...].astype(self.config.dtype), vocab_axes(), None)
        x_BSD = constrain(jnp.take(table_VD, input_ids, axis=0), *TOKEN_AXES, None)
        if self.added is not None:
            x_BSD = self.added.embedded(input_ids, x_BSD)
        if noise is not None:
            x_BSD = noise.added(x_BSD)
        if self.config.scale_embeddings:
            # The factor is rounded to the dtype first, because Gemma was trained in this way.
            x_BSD = x_BSD * jnp.asarray(self.config.hidden_size**0.5, x_BSD.dtype)
        return x_BSD

    @property
    def _unroll(self) -> int:
        return 1 if self.config.scan_layers else self.config.num_layers

    def _kinds(
        self, position_ids: Int[Array, "B S"]
    ) -> tuple[Bool[Array, " L"] | None, Callable[[Array | None], tuple[Array | bool, Turns]]]:
        """Returns which layers have the window, and a function of the arguments of a layer.

        The first is None if all layers are alike. The function takes one entry of it, and returns
        whether the layer has the window, and its rotation.
        """
        # True for layers with the window, False for those without; one kind or both.
        kinds = sorted(set(self.config.windowed), reverse=True)
        turned = [self._turns(position_ids, windowed=kind) for kind in kinds]

        def of(windowed: Array | None) -> tuple[Array | bool, Turns]:
            if windowed is None:
                return kinds[0], turned[0]
            return windowed, jax.tree.map(functools.partial(jnp.where, windowed), *turned)

        return jnp.array(self.config.windowed) if len(kinds) > 1 else None, of

    def _turns(self, position_ids: Array, *, windowed: bool) -> Turns:
        """Returns the rotation of layers with the window, or of those without."""
        config = self.config
        if windowed and config.local_rope_theta is not None:
            return rotation(position_ids, config.head_width, config.local_rope_theta, None)
        return rotation(position_ids, config.head_width, config.rope_theta, config.rope_scaling)

    def lm_head(self) -> Float[Array, "D V"] | Float[Array, "V D"]:
        """Returns the matrix that turns hidden states into logits, in `config.dtype`.

        `lm_head_layout` is the order of its dimensions.
        """
        matrix = self.embedding[...] if self.config.tie_embeddings else self.head.kernel[...]
        matrix = matrix.astype(self.config.dtype)
        return matrix if self.added is None else self.added.in_head(matrix)

    @property
    def logit_soft_cap(self) -> float | None:
        return self.config.logit_soft_cap

    @property
    def lm_head_layout(self) -> Layout:
        """The order of the dimensions of `lm_head`.

        A table that is also the head is not transposed, which would copy it.
        """
        return "vd" if self.config.tie_embeddings else "dv"


_PRODUCTS = jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    # The outputs of the fused attention kernels.
    jax.checkpoint_policies.save_only_these_names("attention"),
)


def check_mesh(config: ModelConfig) -> None:
    """Checks that sharded dimensions of the parameters divide over their mesh axes.

    Raises:
        ConfigError: A dimension does not.
    """
    if not on_mesh():
        return
    shape, heads, width = (
        jax.sharding.get_abstract_mesh().shape,
        axes_of(rules()["heads"]),
        config.head_width,
    )
    # field of the config, its value, its factor, the mesh axes over which the product is divided
    sizes = (
        ("hidden_size", config.hidden_size, 1, axes_of(rules()["embed"])),
        ("intermediate_size", config.intermediate_size, 1, axes_of(rules()["mlp"])),
        # Attention has whole heads on a device; if there are fewer key heads than devices, they are
        # copied.
        ("num_heads", config.num_heads, 1, head_axes()),
        ("num_heads", config.num_heads, width, heads),
        ("num_kv_heads", config.num_kv_heads, width, heads),
        ("vocab_size", config.vocabulary, 1, axes_of(rules()["vocab"])),
    )
    for field, value, times, axes in sizes:
        ways, axis = math.prod(shape[axis] for axis in axes), " x ".join(map(repr, axes))
        size, detail = value * times, f" times head width {width}" if times > 1 else ""
        fitting = [n for n in range(1, ways) if size % n == 0 == ways % n]
        require(
            size % ways == 0,
            f"model.{field}",
            f"{value}{detail} does not divide over the {ways} devices of mesh axis {axis}",
            f"Give axis {axis} one of {fitting}, or change {field}.",
        )


def positions(segment_ids: Int[Array, "B S"]) -> Int[Array, "B S"]:
    """Returns the position of every slot in its run of equal segment ids, from 0."""
    return jnp.arange(segment_ids.shape[1], dtype=jnp.int32) - runs(segment_ids)[0]


def param_count(model: nnx.Module) -> int:
    """Returns the number of parameters of a module."""
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
