"""A decoder in the manner of Llama, in Flax NNX: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

B batch · S sequence · D width · H query heads · K key and value heads · h head width · F inner width of the MLP · V vocabulary
"""
# ruff: noqa: F722  (shapes in annotations are jaxtyping's, not Python)

from __future__ import annotations

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float, Int

from easypipe.core.config import config
from easypipe.core.errors import ConfigError
from easypipe.kernels.stats import Layout
from easypipe.train.axes import BATCH_AXES, constrain, on_mesh, partitioned


@config
class ModelConfig:
    """The shape of a decoder. The defaults have 4.7 M parameters with a vocabulary of 8,192: what 2 cores train in minutes."""

    vocab_size: int | None = None  # None: the tokenizer's, filled in by the run
    hidden_size: int = 192
    intermediate_size: int = 512
    num_layers: int = 4
    num_heads: int = 6
    num_kv_heads: int = 2  # as many as num_heads: multi-head; 1: multi-query
    head_dim: int | None = None  # None: hidden_size / num_heads
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-6
    tie_embeddings: bool = False  # True: the head is the embedding table, transposed; fewer parameters, slower learning
    dtype: Literal["float32", "bfloat16"] = "float32"  # of products and activations
    param_dtype: Literal["float32", "bfloat16"] = "float32"  # of the parameters the optimizer updates
    remat: Literal["none", "dots", "full"] = "none"  # recompute in the backward pass: nothing, all but matrix products, whole layers
    scan_layers: bool = True  # one compiled layer run num_layers times; False compiles each: slower to compile, faster on CPU

    def check(self) -> None:
        for field in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ConfigError(at=field, problem=f"{value} is not a size", fix="Give at least 1.")
        if self.num_heads % self.num_kv_heads:
            fitting = [n for n in range(1, self.num_heads + 1) if self.num_heads % n == 0]
            raise ConfigError(at="num_kv_heads", problem=f"{self.num_kv_heads} does not divide num_heads {self.num_heads}", have=fitting)
        if self.head_dim is None and self.hidden_size % self.num_heads:
            fix = f"Set head_dim, or num_heads to a divisor of {self.hidden_size}."
            raise ConfigError(at="num_heads", problem=f"{self.num_heads} does not divide hidden_size {self.hidden_size}", fix=fix)
        if self.head_width % 2:
            raise ConfigError(at="head_dim", problem=f"{self.head_width} is odd: rotary positions turn pairs", fix="Give an even width.")
        for field in ("rope_theta", "norm_epsilon"):
            if getattr(self, field) <= 0:
                raise ConfigError(at=field, problem=f"{getattr(self, field)} is not positive", fix="10000.0 and 1e-6 are usual.")

    @property
    def head_width(self) -> int:
        return self.head_dim if self.head_dim is not None else self.hidden_size // self.num_heads

    @property
    def vocabulary(self) -> int:
        """vocab_size, once it is known."""
        if self.vocab_size is None:
            raise ConfigError(
                at="vocab_size", problem="not known", fix="Set it, or build the model through a run, which asks the tokenizer."
            )
        return self.vocab_size


class Decoder(nnx.Module):
    """Token ids in, logits (or the hidden states before the head) out.

    Build inside `jax.jit` under `jax.set_mesh(mesh)`, and every parameter is born on its devices. Raises ConfigError where a dimension
    does not divide over its mesh axis.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        check_mesh(config)
        self.config = config
        width, vocab, param_dtype = config.hidden_size, config.vocabulary, jnp.dtype(config.param_dtype)
        # Tokens must weigh as much in the residual stream as what the layers add to it (unit size), or early training is slow: a table
        # of 0.02 reached 4.98 where 1/sqrt(D) reached 4.28, and 1 (untied) 3.89. A table that is also the head cannot be larger than
        # 1/sqrt(D): its own token would win every logit.
        table_init = partitioned(nnx.initializers.normal(width**-0.5 if config.tie_embeddings else 1.0), "vocab", "embed")
        self.embedding = nnx.Param(table_init(rngs.params(), (vocab, width), param_dtype))
        make_layers = nnx.vmap(functools.partial(_Layer, config), in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"})
        self.layers = make_layers(rngs.split(config.num_layers))
        self.norm = _norm(config, rngs)
        if not config.tie_embeddings:
            self.head = _linear(config, width, vocab, ("embed", "vocab"), rngs, scale=0.25)  # first logits small, first loss near log(V)

    def __call__(
        self, input_ids: Int[Array, "B S"], segment_ids: Int[Array, "B S"] | None = None, position_ids: Int[Array, "B S"] | None = None
    ) -> Float[Array, "B S V"]:
        """Float32 logits of every slot. They are large: training goes through train/loss.py, which never holds them."""
        hidden_BSD = self.hidden(input_ids, segment_ids, position_ids)
        return jnp.einsum(f"bsd,{self.lm_head_layout}->bsv", hidden_BSD, self.lm_head(), preferred_element_type=jnp.float32)

    def hidden(
        self, input_ids: Int[Array, "B S"], segment_ids: Int[Array, "B S"] | None = None, position_ids: Int[Array, "B S"] | None = None
    ) -> Float[Array, "B S D"]:
        """States before the head, in `config.dtype`, normalised.

        segment_ids: slots of one row see each other only within a segment; 0 is padding; None: each row is one segment.
        position_ids: place of the token in its segment, for the rotation; None: counted from segment_ids.
        """
        if segment_ids is None:
            segment_ids = jnp.ones_like(input_ids)
        if position_ids is None:
            position_ids = positions(segment_ids)
        # A table sharded over its vocabulary is gathered over `fsdp` first; without this the partitioner replicates it whole.
        table_VD = constrain(self.embedding[...].astype(self.config.dtype), "tensor", None)
        x_BSD = constrain(jnp.take(table_VD, input_ids, axis=0), BATCH_AXES, None, None)
        mask_BSS = segment_mask(segment_ids)
        rotation = _rotation(position_ids, self.config)

        def layer(x_BSD: Array, one: _Layer) -> tuple[Array, None]:
            return constrain(one(x_BSD, mask_BSS, rotation), BATCH_AXES, None, None), None

        if self.config.remat == "full":
            layer = jax.checkpoint(layer)
        elif self.config.remat == "dots":
            layer = jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
        x_BSD, _ = jax.lax.scan(layer, x_BSD, self.layers, unroll=1 if self.config.scan_layers else self.config.num_layers)
        return self.norm(x_BSD)

    def lm_head(self) -> Float[Array, "D V"] | Float[Array, "V D"]:
        """The matrix that turns hidden states into logits, in `config.dtype`; which way round, `lm_head_layout` says."""
        matrix = self.embedding[...] if self.config.tie_embeddings else self.head.kernel[...]
        return matrix.astype(self.config.dtype)

    @property
    def lm_head_layout(self) -> Layout:
        """A table that is also the head stays as it lies: turned round, it would be copied."""
        return "vd" if self.config.tie_embeddings else "dv"


def check_mesh(config: ModelConfig) -> None:
    """Raises ConfigError where a sharded dimension of the parameters does not divide over its axis of the mesh in `jax.set_mesh`."""
    if not on_mesh():
        return
    shape = jax.sharding.get_abstract_mesh().shape
    sizes = {
        "hidden_size": (config.hidden_size, "fsdp"),
        "intermediate_size": (config.intermediate_size, "tensor"),
        "num_heads": (config.num_heads * config.head_width, "tensor"),
        "num_kv_heads": (config.num_kv_heads * config.head_width, "tensor"),
        "vocab_size": (config.vocabulary, "tensor"),
    }
    for field, (size, axis) in sizes.items():
        if size % shape[axis]:
            detail = f" times head width {config.head_width}" if field in ("num_heads", "num_kv_heads") else ""
            problem = f"{getattr(config, field)}{detail} does not divide over the {shape[axis]} devices of mesh axis {axis!r}"
            fitting = [n for n in range(1, shape[axis]) if size % n == 0]
            raise ConfigError(at=field, problem=problem, fix=f"Give axis {axis!r} one of {fitting}, or change {field}.")


def positions(segment_ids: Int[Array, "B S"]) -> Int[Array, "B S"]:
    """Place of every slot within its run of equal segment ids, from 0."""
    index_BS = jnp.broadcast_to(jnp.arange(segment_ids.shape[1], dtype=jnp.int32), segment_ids.shape)
    starts_BS = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return index_BS - jax.lax.cummax(jnp.where(starts_BS, index_BS, 0), axis=1)


def segment_mask(segment_ids: Int[Array, "B S"]) -> Bool[Array, "B S S"]:
    """True where query slot s may see key slot t: same segment, t not after s. Padding sees padding, so that no row of it is empty."""
    causal_SS = jnp.tril(jnp.ones((segment_ids.shape[1],) * 2, dtype=bool))
    return (segment_ids[:, :, None] == segment_ids[:, None, :]) & causal_SS


def param_count(model: nnx.Module) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))


class _Layer(nnx.Module):
    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        width, inner, head = config.hidden_size, config.intermediate_size, config.head_width
        linear = functools.partial(_linear, config, rngs=rngs)
        residual = (2 * config.num_layers) ** -0.5  # 2 additions a layer: keeps the sum's size whatever the depth (GPT-2)
        self.config = config
        self.attention_norm, self.mlp_norm = _norm(config, rngs), _norm(config, rngs)
        self.query = linear(width, config.num_heads * head, ("embed", "heads"))
        self.key = linear(width, config.num_kv_heads * head, ("embed", "heads"))
        self.value = linear(width, config.num_kv_heads * head, ("embed", "heads"))
        self.output = linear(config.num_heads * head, width, ("heads", "embed"), scale=residual)
        self.gate = linear(width, inner, ("embed", "mlp"))
        self.up = linear(width, inner, ("embed", "mlp"))
        self.down = linear(inner, width, ("mlp", "embed"), scale=residual)

    def __call__(self, x_BSD: Array, mask_BSS: Array, rotation: tuple[Array, Array]) -> Array:
        batch, length, _ = x_BSD.shape
        normed_BSD = self.attention_norm(x_BSD)
        query_BSHh = _rotate(self.query(normed_BSD).reshape(batch, length, self.config.num_heads, -1), rotation)
        key_BSKh = _rotate(self.key(normed_BSD).reshape(batch, length, self.config.num_kv_heads, -1), rotation)
        value_BSKh = self.value(normed_BSD).reshape(batch, length, self.config.num_kv_heads, -1)
        mixed_BSHh = jax.nn.dot_product_attention(query_BSHh, key_BSKh, value_BSKh, mask=mask_BSS[:, None])
        x_BSD = x_BSD + self.output(mixed_BSHh.reshape(batch, length, -1))
        normed_BSD = self.mlp_norm(x_BSD)
        return x_BSD + self.down(nnx.silu(self.gate(normed_BSD)) * self.up(normed_BSD))


def _linear(config: ModelConfig, inputs: int, outputs: int, axes: tuple[str, str], rngs: nnx.Rngs, scale: float = 1.0) -> nnx.Linear:
    init: Any = nnx.initializers.variance_scaling(scale**2, "fan_in", "truncated_normal")
    return nnx.Linear(
        inputs,
        outputs,
        use_bias=False,
        dtype=jnp.dtype(config.dtype),
        param_dtype=jnp.dtype(config.param_dtype),
        kernel_init=partitioned(init, *axes),
        rngs=rngs,
    )


def _norm(config: ModelConfig, rngs: nnx.Rngs) -> nnx.RMSNorm:
    return nnx.RMSNorm(
        config.hidden_size,
        epsilon=config.norm_epsilon,
        dtype=jnp.dtype(config.dtype),  # of the result; the mean of squares is taken in float32
        param_dtype=jnp.dtype(config.param_dtype),
        scale_init=partitioned(nnx.initializers.ones, None),
        rngs=rngs,
    )


def _rotation(position_ids: Array, config: ModelConfig) -> tuple[Array, Array]:
    """Cosine and sine of the angle of every pair, Float32[B, S, 1, h/2] (Su et al., RoFormer, 2021)."""
    exponent = jnp.arange(0, config.head_width, 2, dtype=jnp.float32) / config.head_width
    angle = position_ids[:, :, None, None].astype(jnp.float32) * config.rope_theta**-exponent
    return jnp.cos(angle), jnp.sin(angle)


def _rotate(x_BSHh: Array, rotation: tuple[Array, Array]) -> Array:
    """Pairs are (i, i + h/2), as in the published Llama weights; turned in float32."""
    cosine, sine = rotation
    first, second = jnp.split(x_BSHh.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
    return turned.astype(x_BSHh.dtype)
