"""Options of models (decoder, image classifier, adapters) and checks of widths, heads and windows.

This file imports no jax: a configuration is read and checked on machines that only prepare data.
"""

from __future__ import annotations

import math
from dataclasses import asdict, fields
from typing import Literal

from easypipe.core.config import ListOf, check_at_least, check_number, config, was_given
from easypipe.core.errors import ConfigError, require

AttentionBackend = Literal["xla", "splash", "triton"]
# Head widths: Triton's blocks are powers of two, and its products need at least 16.
TRITON_WIDTHS = (16, 32, 64, 128, 256)


# With larger sizes the compiler gives up without an error, or describing the layers takes hours.
_LARGEST = {"vocab_size": 1 << 31, "num_layers": 10_000}  # others: 2^20
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


@config
class RopeScaling:
    """Slower rotations for rows longer than a model was first trained on."""

    # `linear`: every pair of dimensions turns `factor` times slower; `llama3`: only those of long
    # wavelength
    kind: Literal["linear", "llama3"]
    factor: float  # how many times slower pairs turn
    # for llama3: pairs that turn fewer times than this within original_length are slowed by the
    # whole factor
    low_freq_factor: float = 1.0
    # for llama3: pairs that turn more often than this stay as they are; those in between are
    # interpolated
    high_freq_factor: float = 4.0
    original_length: int = 8192  # for llama3: the longest row in the original training

    def check(self) -> None:
        check_number(self, "8.0 is usual.", "factor", "low_freq_factor", "high_freq_factor")
        require(
            self.factor >= 1,
            "factor",
            f"{self.factor} is less than 1",
            "8.0 is usual; leave rope_scaling out for none.",
        )
        low, high = self.low_freq_factor, self.high_freq_factor
        above = _only_given(self, "high_freq_factor", "low_freq_factor")
        require(
            0 < low < high,
            "high_freq_factor" if above else "low_freq_factor",
            f"{high} is not above low_freq_factor {low}"
            if above
            else f"{low} is not between 0 and high_freq_factor {high}",
            "1.0 and 4.0 are usual.",
        )
        check_at_least(self, 1, "original_length")
        given, own = asdict(self), {one.name: one.default for one in fields(self)}
        for field in ("low_freq_factor", "high_freq_factor", "original_length"):
            require(
                self.kind != "linear" or given[field] == own[field],
                field,
                "has no effect with kind linear",
                "Leave it out, or choose kind llama3.",
            )


@config
class ModelConfig:
    """The shape of a decoder.

    The defaults have 4.7 M parameters with a vocabulary of 8,192; 2 cores train them in minutes.
    """

    # tokens of the vocabulary; None takes the tokenizer's number, which the run fills in
    vocab_size: int | None = None
    hidden_size: int = 192  # width of the residual stream
    intermediate_size: int = 512  # width inside the MLP of a layer
    num_layers: int = 4  # layers, each of attention and an MLP
    num_heads: int = 6  # heads of the queries
    # heads of keys and values. As many as num_heads make multi-head attention, 1 multi-query
    num_kv_heads: int = 2
    head_dim: int | None = None  # width of a head; None means hidden_size / num_heads
    # base of the rotary positions. With a larger one they turn slower, for longer rows
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-6  # added to the mean square before a norm divides by its root
    # the head is the transposed embedding table: fewer parameters, slower learning
    tie_embeddings: bool = False
    dtype: Literal["float32", "bfloat16"] = "float32"  # dtype of products and activations
    # dtype of the parameters that the optimizer updates
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    # what the backward pass computes again. `dots` is all but matrix products, `full` whole layers
    remat: Literal["none", "dots", "full"] = "none"
    # implementation of attention; None takes "splash" on TPU, "triton" on NVIDIA, "xla" elsewhere
    attention: AttentionBackend | None = None
    # compile one layer and run it num_layers times; False compiles each one, which is slower to
    # compile and faster on CPUs
    scan_layers: bool = True
    # scaling of the layers that use rope_theta; None does not scale
    rope_scaling: RopeScaling | None = None
    # base of the rotary positions in layers with a window; None takes rope_theta
    local_rope_theta: float | None = None
    # how many tokens a query sees, itself included; None lets it see all before it
    sliding_window: int | None = None
    # every n-th layer has no window; with None, all layers have one
    global_every: int | None = None
    qkv_bias: bool = False  # query, key and value projections add a bias
    qk_norm: bool = False  # heads of query and key are normalised before they are rotated
    # attention scores are divided by the root of this; None means head_dim
    attention_width: int | None = None
    attention_soft_cap: float | None = None  # with a cap c, attention scores become c·tanh(score/c)
    logit_soft_cap: float | None = None  # with a cap c, logits become c·tanh(logit/c)
    activation: Literal["silu", "gelu_tanh"] = "silu"  # activation of the MLP's gate
    # norms multiply by their scale w (`plain`) or by 1 + w (`one_plus`)
    norm_scale: Literal["plain", "one_plus"] = "plain"
    post_norms: bool = False  # normalise the outputs of attention and MLP before they are added
    scale_embeddings: bool = False  # embeddings are multiplied by the root of hidden_size

    def check(self) -> None:
        values = asdict(self)
        check_at_least(self, 1, *_SIZES)
        for field in _SIZES:
            most = _LARGEST.get(field, 1 << 20)
            require(
                (values[field] or 0) <= most,
                field,
                f"{values[field]} is too large",
                f"Give at most {most:,}.",
            )
        self._check_heads()
        usual = "10000.0 and 1e-6 are usual."
        check_number(self, usual, "rope_theta", "norm_epsilon", "local_rope_theta")
        check_number(self, "Leave it out for none.", "attention_soft_cap", "logit_soft_cap")
        require(
            self.attention != "triton" or self.head_width in TRITON_WIDTHS,
            "attention",
            f"'triton' supports heads of width {', '.join(map(str, TRITON_WIDTHS))}, and these "
            f"have {self.head_width}",
            "Leave it out, and the fastest that can run is taken.",
        )
        for field in ("global_every", "local_rope_theta"):
            require(
                values[field] is None or self.sliding_window is not None,
                field,
                "has no effect without sliding_window",
                "Leave it out, or set sliding_window.",
            )
        require(
            self.rope_scaling is None or self.local_rope_theta is None or not all(self.windowed),
            "rope_scaling",
            "has no effect: every layer has a window and local_rope_theta",
            "Leave rope_scaling or local_rope_theta out, or set global_every.",
        )

    def _check_heads(self) -> None:
        """Checks that the widths of hidden states, heads and key heads fit each other."""
        width, heads, groups = self.hidden_size, self.num_heads, self.num_kv_heads
        divisors = [n for n in range(1, heads + 1) if heads % n == 0]
        require(
            heads % groups == 0 or not _only_given(self, "num_heads", "num_kv_heads"),
            "num_heads",
            f"{heads} is not a multiple of num_kv_heads {groups}",
            f"Give a multiple, or set num_kv_heads to one of {', '.join(map(str, divisors))}.",
        )
        require(
            heads % groups == 0,
            "num_kv_heads",
            f"{groups} does not divide num_heads {heads}",
            f"Give one of these, or num_heads a multiple of {groups}.",
            divisors,
        )
        require(
            self.head_dim is not None or width % heads == 0,
            *(
                ("hidden_size", f"{width} is not a multiple of num_heads {heads}, the default")
                if _only_given(self, "hidden_size", "num_heads")
                else ("num_heads", f"{heads} does not divide hidden_size {width}")
            ),
            f"Set head_dim, or num_heads to a divisor of {width}.",
        )
        require(
            self.head_width % 2 == 0,
            *(
                ("head_dim", f"{self.head_width} is odd: rotary positions turn pairs")
                if self.head_dim is not None
                else (
                    "hidden_size" if _only_given(self, "hidden_size", "num_heads") else "num_heads",
                    f"hidden_size {width} over num_heads {heads} gives heads of {self.head_width}, "
                    "which is odd: rotary positions turn pairs",
                )
            ),
            "Give an even width.",
        )

    @property
    def head_width(self) -> int:
        return self.head_dim if self.head_dim is not None else self.hidden_size // self.num_heads

    @property
    def windowed(self) -> tuple[bool, ...]:
        """Whether each layer has the window."""
        every = self.global_every
        return tuple(
            self.sliding_window is not None and (every is None or (i + 1) % every != 0)
            for i in range(self.num_layers)
        )

    @property
    def vocabulary(self) -> int:
        """vocab_size, which must be known by now.

        Raises:
            ConfigError: It is not known.
        """
        if self.vocab_size is None:
            raise ConfigError(
                at="vocab_size",
                problem="not known",
                fix="Set it, or build the model through a run, which asks the tokenizer.",
            )
        return self.vocab_size


@config
class ClassifierConfig:
    """A small untrained network that classifies images.

    The defaults have 19,000 parameters for ten classes of grey images.

    Args:
        kind: "convnet": for each of hidden_sizes a 3 x 3 convolution with this many channels and a
            pooling that halves both sides, then the mean over the rest of the image; "mlp": all
            pixels through layers of these widths.
    """

    kind: Literal["convnet", "mlp"] = "convnet"
    hidden_sizes: ListOf[int] = (32, 64)  # channels of each convolution, or widths of the layers
    # None takes the number of classes in the data, which the run fills in
    num_classes: int | None = None
    # height, width and channels; None takes those of the data, which the run fills in
    image_shape: tuple[int, int, int] | None = None

    def check(self) -> None:
        sizes, convolves = self.hidden_sizes, self.kind == "convnet"
        for i, size in enumerate(sizes):
            require(size >= 1, f"hidden_sizes[{i}]", f"{size} is not a size", "Give at least 1.")
        require(
            not convolves or sizes,
            "hidden_sizes",
            "a convnet without convolutions",
            "Give at least one size.",
        )
        require(
            self.num_classes is None or self.num_classes >= 2,
            "num_classes",
            f"{self.num_classes} leaves nothing to tell apart",
            "Give at least 2.",
        )
        if self.image_shape is not None:
            require(
                min(self.image_shape) >= 1,
                "image_shape",
                f"{self.image_shape} is not (height, width, channels)",
                "Give sizes from 1.",
            )
            side = min(self.image_shape[:2])
            require(
                not convolves or side >= 1 << len(sizes),
                "hidden_sizes",
                f"{len(sizes)} halvings leave nothing of a side of {side} pixels",
                f"Give at most {side.bit_length() - 1} sizes, or larger images.",
            )


@config
class LoraConfig:
    """Low-rank adapters (Hu et al., 2021), which are trained while everything else is frozen.

    A projection W becomes W + scale·A·B. A is [inputs, rank], drawn uniformly from ±inputs^-1/2; B
    is [rank, outputs] and zero at first, so training begins at the model itself. Both are float32,
    whatever W is. Optimizer state and checkpoints hold no frozen parameters.
    """

    rank: int = 8  # columns of A and rows of B
    # the scale is alpha / rank, so the learning rate can stay when the rank changes
    alpha: float = 16.0
    # the scale is alpha / sqrt(rank) instead (Kalajdzievski, 2023), for ranks of 64 and more
    rank_stabilized: bool = False
    # projections, by name ("layers.query"), by its last part ("query") or by a pattern; "*" names
    # all
    targets: ListOf[str] = ("*",)

    def check(self) -> None:
        check_at_least(self, 1, "rank")
        check_number(self, "Twice the rank is usual.", "alpha")
        require(
            self.targets,
            "targets",
            "names nothing to train",
            'Give names of projections, or ["*"] for all.',
        )

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)


def _only_given(value: object, option: str, *others: str) -> bool:
    """Whether this option was given and none of `others`, so that it is the one to blame."""
    return was_given(value, option) and not any(was_given(value, other) for other in others)
