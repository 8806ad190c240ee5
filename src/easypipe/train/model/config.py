"""The shape of a decoder. No jax here: a configuration is read and checked on machines that only
prepare data.
"""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Literal

from easypipe.core.config import config
from easypipe.core.errors import ConfigError

AttentionBackend = Literal["xla", "splash", "triton"]
# of a head: Triton's blocks are powers of two, and its products no smaller than 16
TRITON_WIDTHS = (16, 32, 64, 128, 256)


_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "sliding_window",
    "global_every",
    "attention_width",
)
_POSITIVE = (
    "rope_theta",
    "norm_epsilon",
    "local_rope_theta",
    "attention_soft_cap",
    "logit_soft_cap",
)


@config
class RopeScaling:
    """Slower rotations for rows longer than a model was first trained on."""

    # linear: every pair turns `factor` times slower; llama3: those of long wavelength only
    kind: Literal["linear", "llama3"]
    factor: float
    # llama3: pairs that turn fewer times than this within original_length are slowed by all of
    # factor
    low_freq_factor: float = 1.0
    # llama3: pairs that turn more often stay as they are; between the two it is interpolated
    high_freq_factor: float = 4.0
    original_length: int = 8192  # llama3: tokens a row had in the first training

    def check(self) -> None:
        if self.factor < 1:
            raise ConfigError(
                at="factor",
                problem=f"{self.factor} is less than 1",
                fix="8.0 is usual; leave rope_scaling out for none.",
            )
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            problem = (
                f"{self.low_freq_factor} is not between 0 and high_freq_factor "
                f"{self.high_freq_factor}"
            )
            raise ConfigError(at="low_freq_factor", problem=problem, fix="1.0 and 4.0 are usual.")
        if self.original_length < 1:
            raise ConfigError(
                at="original_length",
                problem=f"{self.original_length} is no length",
                fix="8192 is usual.",
            )
        if self.kind == "linear":
            given, own = asdict(self), {one.name: one.default for one in fields(self)}
            for field in ("low_freq_factor", "high_freq_factor", "original_length"):
                if given[field] != own[field]:
                    raise ConfigError(
                        at=field,
                        problem="has no effect with kind linear",
                        fix="Leave it out, or choose kind llama3.",
                    )


@config
class ModelConfig:
    """The shape of a decoder. The defaults have 4.7 M parameters with a vocabulary of 8,192: what 2
    cores train in minutes.
    """

    vocab_size: int | None = None  # None: the tokenizer's, filled in by the run
    hidden_size: int = 192
    intermediate_size: int = 512
    num_layers: int = 4
    num_heads: int = 6
    num_kv_heads: int = 2  # as many as num_heads: multi-head; 1: multi-query
    head_dim: int | None = None  # None: hidden_size / num_heads
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-6
    # True: the head is the embedding table, transposed; fewer parameters, slower learning
    tie_embeddings: bool = False
    dtype: Literal["float32", "bfloat16"] = "float32"  # of products and activations
    # of the parameters the optimizer updates
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    # recompute in the backward pass: nothing, all but matrix products, whole layers
    remat: Literal["none", "dots", "full"] = "none"
    # what computes attention; None: "splash" on TPU, "triton" on NVIDIA, "xla" elsewhere
    attention: AttentionBackend | None = None
    # one compiled layer run num_layers times; False compiles each: slower to compile, faster on CPU
    scan_layers: bool = True
    rope_scaling: RopeScaling | None = None  # of layers that turn by rope_theta; None: none
    # of layers with a window, in place of rope_theta; None: rope_theta
    local_rope_theta: float | None = None
    # tokens that a query sees, itself included; None: all before it
    sliding_window: int | None = None
    global_every: int | None = None  # every n-th layer has no window; None: all have it
    qkv_bias: bool = False  # query, key and value projections add a bias
    qk_norm: bool = False  # heads of query and key are normalised before they are rotated
    attention_width: int | None = None  # attention scores are divided by its root; None: head_dim
    attention_soft_cap: float | None = None  # c: attention scores become c·tanh(score/c)
    logit_soft_cap: float | None = None  # c: logits become c·tanh(logit/c)
    activation: Literal["silu", "gelu_tanh"] = "silu"  # of the gate of the MLP
    # norms multiply by their scale w, or by 1 + w
    norm_scale: Literal["plain", "one_plus"] = "plain"
    post_norms: bool = False  # what attention and MLP give is normalised before it is added
    scale_embeddings: bool = False  # embeddings are multiplied by the root of hidden_size

    def check(self) -> None:
        values = asdict(self)
        for field in _SIZES:
            if values[field] is not None and values[field] < 1:
                raise ConfigError(
                    at=field, problem=f"{values[field]} is not a size", fix="Give at least 1."
                )
        self._check_heads()
        for field in _POSITIVE:
            if values[field] is not None and values[field] <= 0:
                usual = "10000.0 and 1e-6 are usual."
                fix = "Leave it out for none." if field.endswith("cap") else usual
                raise ConfigError(at=field, problem=f"{values[field]} is not positive", fix=fix)
        if self.attention == "triton" and self.head_width not in TRITON_WIDTHS:
            problem = (
                f"'triton' knows heads of width {', '.join(map(str, TRITON_WIDTHS))}, and "
                f"these have {self.head_width}"
            )
            fix = "Leave it out, and the fastest that can run is taken."
            raise ConfigError(at="attention", problem=problem, fix=fix)
        for field in ("global_every", "local_rope_theta"):
            if values[field] is not None and self.sliding_window is None:
                raise ConfigError(
                    at=field,
                    problem="has no effect without sliding_window",
                    fix="Leave it out, or set sliding_window.",
                )
        scales = self.rope_scaling is not None
        if scales and all(self.windowed) and self.local_rope_theta is not None:
            raise ConfigError(
                at="rope_scaling",
                problem="has no effect: every layer has a window and local_rope_theta",
                fix="Leave rope_scaling or local_rope_theta out, or set global_every.",
            )

    def _check_heads(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                at="num_kv_heads",
                problem=f"{self.num_kv_heads} does not divide num_heads {self.num_heads}",
                have=[n for n in range(1, self.num_heads + 1) if self.num_heads % n == 0],
            )
        if self.head_dim is None and self.hidden_size % self.num_heads:
            raise ConfigError(
                at="num_heads",
                problem=f"{self.num_heads} does not divide hidden_size {self.hidden_size}",
                fix=f"Set head_dim, or num_heads to a divisor of {self.hidden_size}.",
            )
        if self.head_width % 2:
            raise ConfigError(
                at="head_dim",
                problem=f"{self.head_width} is odd: rotary positions turn pairs",
                fix="Give an even width.",
            )

    @property
    def head_width(self) -> int:
        return self.head_dim if self.head_dim is not None else self.hidden_size // self.num_heads

    @property
    def windowed(self) -> tuple[bool, ...]:
        """Of each layer, whether it has the window."""
        every = self.global_every
        return tuple(
            self.sliding_window is not None and (every is None or (i + 1) % every != 0)
            for i in range(self.num_layers)
        )

    @property
    def vocabulary(self) -> int:
        """vocab_size, once it is known."""
        if self.vocab_size is None:
            raise ConfigError(
                at="vocab_size",
                problem="not known",
                fix="Set it, or build the model through a run, which asks the tokenizer.",
            )
        return self.vocab_size
