"""Families of published decoders: config.json to ModelConfig and back, names of weights, refusals.

A new family is a row of FAMILIES.

Sources: the configuration classes and modelling code of `transformers` 5, whose defaults apply to
keys that a config.json leaves out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from easypipe.core.config import fields_of
from easypipe.core.errors import ConfigError, did_you_mean, require
from easypipe.core.values import JsonObject, JsonValue
from easypipe.train.model.config import ModelConfig, RopeScaling


@dataclass(frozen=True, kw_only=True)
class Family:
    """An architecture of `transformers`: everything that distinguishes it from the others.

    Attributes:
        model_type: The model_type of its config.json.
        architecture: The class of `transformers`.
        defaults: Defaults of its config.json that differ from _DEFAULTS.
        options: The options of ModelConfig that all models of the family share.
        activation_key: The key of the activation.
        windows: Which layers have a window: none; all; "upper" or "pattern". The last two mean the
            layers in layer_types if it is given. Otherwise "upper" means the upper layers (if
            use_sliding_window is set), and "pattern" all but every n-th (sliding_window_pattern).
        caps: Options of ModelConfig that None switches off -> their keys.
        scalar_key: The key of attention_width.
        local_theta_key: The key of local_rope_theta.
    """

    model_type: str
    architecture: str
    defaults: JsonObject
    options: JsonObject = field(default_factory=dict)
    activation_key: str = "hidden_act"
    windows: Literal["none", "all", "upper", "pattern"] = "none"
    caps: Mapping[str, str] = field(default_factory=dict)
    scalar_key: str | None = None
    local_theta_key: str | None = None


# Options of ModelConfig -> their keys, for all families.
_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "norm_epsilon": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
    "rope_theta": "rope_theta",
}
_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "sliding_window", "sliding_window_pattern",
)  # fmt: skip
_NUMBERS = (
    "rms_norm_eps", "rope_theta", "rope_local_base_freq", "query_pre_attn_scalar",
    "max_window_layers", "attn_logit_softcapping", "final_logit_softcapping", "factor",
    "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
)  # fmt: skip
_DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
}
_QWEN = {
    "intermediate_size": 22016,
    "vocab_size": 151936,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
}
_GEMMA = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_GEMMA_OPTIONS = {
    "activation": "gelu_tanh",
    "norm_scale": "one_plus",
    "post_norms": True,
    "scale_embeddings": True,
}
_GEMMA_KEYS: JsonObject = {
    "activation_key": "hidden_activation",
    "windows": "pattern",
    "caps": {
        "attention_soft_cap": "attn_logit_softcapping",
        "logit_soft_cap": "final_logit_softcapping",
    },
    "scalar_key": "query_pre_attn_scalar",
}

FAMILIES = {
    family.model_type: family
    for family in (
        Family(model_type="llama", architecture="LlamaForCausalLM", defaults={}),
        Family(
            model_type="mistral",
            architecture="MistralForCausalLM",
            defaults={"intermediate_size": 14336, "num_key_value_heads": 8, "sliding_window": 4096},
            windows="all",
        ),
        Family(
            model_type="qwen2",
            architecture="Qwen2ForCausalLM",
            defaults=_QWEN,
            options={"qkv_bias": True},
            windows="upper",
        ),
        Family(
            model_type="qwen3",
            architecture="Qwen3ForCausalLM",
            defaults=_QWEN | {"head_dim": 128},
            options={"qk_norm": True},
            windows="upper",
        ),
        Family(
            model_type="gemma2",
            architecture="Gemma2ForCausalLM",
            defaults=_GEMMA
            | {
                "vocab_size": 256_000,
                "final_logit_softcapping": 30.0,
                "attn_logit_softcapping": 50.0,
                "sliding_window_pattern": 2,
            },
            options=_GEMMA_OPTIONS,
            **_GEMMA_KEYS,
        ),
        Family(
            model_type="gemma3_text",
            architecture="Gemma3ForCausalLM",
            defaults=_GEMMA
            | {
                "vocab_size": 262_208,
                "rope_theta": 1e6,
                "rope_local_base_freq": 10_000.0,
                "sliding_window_pattern": 6,
            },
            options=_GEMMA_OPTIONS | {"qk_norm": True},
            local_theta_key="rope_local_base_freq",
            **_GEMMA_KEYS,
        ),
    )
}
SUPPORTED = tuple(f"{family.model_type} ({family.architecture})" for family in FAMILIES.values())

_ACTIVATIONS = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}
_SLIDING, _FULL = "sliding_attention", "full_attention"
_OBJECTS = ("rope_scaling", "rope_parameters", _FULL, _SLIDING)
# Keys of config.json -> values that ask for nothing but what this decoder does.
_NEUTRAL: dict[str, tuple[JsonValue, ...]] = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "attention_dropout": (0, None),
    "partial_rotary_factor": (1, None),
    "use_bidirectional_attention": (False, None),
    "quantization_config": (None,),
    "hidden_activation_sparsity": (None,),
    "num_experts": (0, None),
    "num_local_experts": (0, None),
}


def family_of(hf: JsonObject, at: str) -> Family:
    """Returns the family of a config.json.

    Raises:
        ConfigError: The architecture is not one of SUPPORTED.
    """
    name = hf.get("model_type")
    family = FAMILIES.get(str(name))
    if family is None:
        named = (
            f"model_type {name!r}"
            if name is not None
            else f"architectures {hf.get('architectures')!r} without model_type"
        )
        problem = f"{named} is not a model that this decoder can be"
        fix = did_you_mean(str(name), FAMILIES)
        raise ConfigError(at=at, problem=problem, have=SUPPORTED, fix=fix)
    architectures = hf.get("architectures") or [family.architecture]
    require(
        architectures == [family.architecture],
        f"{at}: architectures",
        f"{architectures!r} is not a language model of {name}",
        have=[family.architecture],
    )
    return family


def _supported(
    value: JsonValue, have: Sequence[JsonValue], at: str, fix: str | None = None
) -> None:
    """Checks that a value is one of those that are supported."""
    require(value in have, at, f"{value!r} is not supported", fix, have)


def _require_kind(key: str, value: JsonValue, at: str) -> None:
    """Checks that the value of a key of config.json has its type, or is null if that is allowed."""
    if value is None:
        return
    fix = "Download the folder again."
    if key in _SIZES:
        whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        require(whole, at, f"{value!r:.80} is not a whole number from 1", fix)
    elif key in _NUMBERS:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        require(number, at, f"{value!r:.80} is not a number", fix)
    elif key == "layer_types":
        require(isinstance(value, list), at, f"{value!r:.80} is not a list", fix)
    elif key in _OBJECTS:
        if not isinstance(value, Mapping):
            raise ConfigError(at=at, problem=f"{value!r:.80} is not an object", fix=fix)
        for inner, one in value.items():
            _require_kind(inner, one, f"{at}.{inner}")


def from_hf(hf: JsonObject, at: str = "config.json") -> ModelConfig:
    """Returns the ModelConfig of a config.json, of transformers 4 or 5.

    Raises:
        ConfigError: This decoder does not support the value of a key; the message names the key.
    """
    family = family_of(hf, at)
    for key, neutral in _NEUTRAL.items():
        _supported(hf.get(key), neutral, f"{at}: {key}", "Convert the model, or choose another.")
    known = {
        **_DEFAULTS,
        **family.defaults,
        **{key: value for key, value in hf.items() if value is not None or key in _OPTIONAL},
    }
    for key, value in known.items():
        _require_kind(key, value, f"{at}: {key}")
    activation = _ACTIVATIONS[family.options.get("activation", "silu")]
    # The first files of Gemma have the key of other families.
    given = hf.get(family.activation_key) or hf.get("hidden_act") or activation
    _supported(given, [activation], f"{at}: {family.activation_key}")
    values: JsonObject = {option: known[key] for option, key in _KEYS.items()}
    heads = values["num_heads"]
    head_dim = values["head_dim"] or values["hidden_size"] // heads
    window, every = _windows(family, known, at)
    values |= {
        "num_kv_heads": values["num_kv_heads"] or heads,
        "head_dim": head_dim,
        "norm_epsilon": float(values["norm_epsilon"]),
        "sliding_window": window,
        "global_every": every,
        **_rope(family, known, window, every, at),
        **family.options,
    }
    if family.scalar_key is not None:
        scalar = known[family.scalar_key]
        values["attention_width"] = None if scalar == head_dim else scalar
    for option, key in family.caps.items():
        cap = known.get(key)
        values[option] = None if cap is None else float(cap)
    try:
        return ModelConfig(**values)
    except ConfigError as error:
        raise error.under(at) from None


# Keys for which null differs from a missing key.
_OPTIONAL = ("sliding_window", "final_logit_softcapping", "attn_logit_softcapping")


def to_hf(config: ModelConfig) -> JsonObject:
    """Returns a config.json for `transformers`, of the first family that exactly fits this model.

    Raises:
        ConfigError: No family fits.
    """
    for family in FAMILIES.values():
        hf = _written(family, config)
        if from_hf(hf) == shape_of(config):
            return hf
    names = [one.name for one in dataclasses.fields(ModelConfig)]
    # All families have the options before rope_scaling.
    own, plain = (
        {name: fields_of(one)[name] for name in names[names.index("rope_scaling") :]}
        for one in (config, ModelConfig())
    )
    unusual = ", ".join(f"{name}: {own[name]}" for name in own if own[name] != plain[name])
    problem = f"no family that transformers knows has {unusual or 'these options'}"
    raise ConfigError(
        at="model",
        problem=problem,
        have=SUPPORTED,
        fix="Save checkpoints only, or choose the options of one family.",
    )


def shape_of(config: ModelConfig) -> ModelConfig:
    """Returns `config` without what config.json cannot hold.

    That is the dtypes and how the model is compiled.
    """
    same: JsonObject = {
        one.name: one.default
        for one in dataclasses.fields(ModelConfig)
        if one.name in ("dtype", "param_dtype", "remat", "scan_layers")
    }
    if not any(config.windowed):
        same |= {"sliding_window": None, "global_every": None, "local_rope_theta": None}
    elif all(config.windowed):
        same["global_every"] = None
    if config.local_rope_theta == config.rope_theta and config.rope_scaling is None:
        same["local_rope_theta"] = None
    if config.attention_width == config.head_width:
        same["attention_width"] = None
    return dataclasses.replace(config, head_dim=config.head_width, **same)


def _written(family: Family, config: ModelConfig) -> JsonObject:
    """Returns the config.json of a model if it were of this family."""
    values = dataclasses.asdict(config)
    hf: JsonObject = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **{key: values[option] for option, key in _KEYS.items()},
        "vocab_size": config.vocabulary,
        "head_dim": config.head_width,
        family.activation_key: _ACTIVATIONS[family.options.get("activation", "silu")],
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    }
    if config.rope_scaling is not None:
        scaling = config.rope_scaling
        hf["rope_scaling"] = {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling.kind == "llama3":
            hf["rope_scaling"] |= {
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_length,
            }
            hf["max_position_embeddings"] = int(scaling.original_length * scaling.factor)
    if family.windows != "none":
        hf["sliding_window"] = config.sliding_window
    if family.windows in ("upper", "pattern"):
        hf["layer_types"] = [_SLIDING if windowed else _FULL for windowed in config.windowed]
    if family.windows == "upper":
        hf["use_sliding_window"] = config.sliding_window is not None
    if family.scalar_key is not None:
        hf[family.scalar_key] = config.attention_width or config.head_width
    hf |= {key: values[option] for option, key in family.caps.items()}
    if family.local_theta_key is not None:
        hf[family.local_theta_key] = config.local_rope_theta or config.rope_theta
    return hf


def _windows(family: Family, known: JsonObject, at: str) -> tuple[int | None, int | None]:
    """Returns (sliding_window, global_every).

    Raises:
        ConfigError: The layers without a window are not every n-th layer.
    """
    window, layers = known.get("sliding_window"), known["num_hidden_layers"]
    if window is None or family.windows == "none":
        return None, None
    if family.windows == "all":
        return window, None
    types = known.get("layer_types")
    if types is None and family.windows == "pattern":
        every = known["sliding_window_pattern"]
        types = [_SLIDING if (i + 1) % every else _FULL for i in range(layers)]
    elif types is None:  # Qwen: the upper layers, if switched on
        first = known.get("max_window_layers", 28) if known.get("use_sliding_window") else layers
        types = [_SLIDING if i >= first else _FULL for i in range(layers)]
    full = [i for i, kind in enumerate(types) if kind == _FULL]
    if len(full) == layers:
        return None, None
    every = full[0] + 1 if full else None
    expected = [_SLIDING if every is None or (i + 1) % every else _FULL for i in range(layers)]
    require(
        list(types) == expected,
        f"{at}: layer_types",
        f"{types} does not repeat: every n-th layer may see the whole row, the others "
        "have the window",
        "Choose a model whose layers alternate evenly.",
    )
    return window, every


def _rope(
    family: Family, known: JsonObject, window: int | None, every: int | None, at: str
) -> JsonObject:
    """Returns rope_theta, rope_scaling and local_rope_theta.

    They come from `rope_parameters` (transformers 5), or from `rope_scaling` and `rope_theta` (4).
    """
    parameters = known.get("rope_parameters") or {}
    nested = {kind: parameters[kind] or {} for kind in (_FULL, _SLIDING) if kind in parameters}
    main = {
        **(known.get("rope_scaling") or {}),
        **(nested.get(_FULL, {}) if nested else parameters),
    }
    theta = float(main.get("rope_theta") or known["rope_theta"])
    local = nested.get(_SLIDING, {})
    kind = local.get("rope_type", "default")
    _supported(kind, ["default"], f"{at}: rope_parameters.{_SLIDING}")
    found: JsonObject = {"rope_theta": theta, "rope_scaling": _scaling(main, known, at)}
    if family.local_theta_key is not None and window is not None:
        near = float(local.get("rope_theta") or known[family.local_theta_key])
        if every is None:  # no layer uses the other
            return {"rope_theta": near}
        if near != theta or found["rope_scaling"] is not None:
            found["local_rope_theta"] = near
    return found


def _scaling(rope: JsonObject, known: JsonObject, at: str) -> RopeScaling | None:
    """Returns the RopeScaling of a config.json, or None."""
    kind = rope.get("rope_type") or rope.get("type") or "default"
    _supported(rope.get("partial_rotary_factor", 1.0), [1.0], f"{at}: partial_rotary_factor")
    _supported(kind, ["default", "linear", "llama3"], f"{at}: rope_type")
    if kind == "default":
        return None
    needed = ("factor", "low_freq_factor", "high_freq_factor")[: 3 if kind == "llama3" else 1]
    for key in needed:
        require(rope.get(key) is not None, at, f"rope_scaling has no {key}", "Download it again.")
    values: JsonObject = {"kind": kind, "factor": float(rope["factor"])}
    if kind == "llama3":
        values |= {key: float(rope[key]) for key in ("low_freq_factor", "high_freq_factor")}
        values["original_length"] = rope.get("original_max_position_embeddings") or known.get(
            "max_position_embeddings", 8192
        )
    try:
        return RopeScaling(**values)
    except ConfigError as error:
        raise error.under(f"{at}: rope_scaling") from None


@dataclass(frozen=True)
class Weight:
    """Where the values of an array of the decoder are in the files.

    Attributes:
        name: The name of the tensor, with `{i}` for the number of the layer.
        transposed: Whether the tensor is a matrix that is transposed there.
        stacked: Whether there is one tensor for each layer.
    """

    name: str
    transposed: bool = False
    stacked: bool = True


def weights(config: ModelConfig) -> dict[str, Weight]:
    """Returns the tensor of each parameter of Decoder(config), by the parameter's dotted name."""
    found = {
        "embedding": Weight("model.embed_tokens.weight", stacked=False),
        "norm.scale": Weight("model.norm.weight", stacked=False),
    }
    if not config.tie_embeddings:
        found["head.kernel"] = Weight("lm_head.weight", transposed=True, stacked=False)
    layer = "model.layers.{i}."
    for ours, theirs in PROJECTIONS.items():
        found[f"layers.{ours}.kernel"] = Weight(f"{layer}{theirs}.weight", transposed=True)
        if config.qkv_bias and ours in ("query", "key", "value"):
            found[f"layers.{ours}.bias"] = Weight(f"{layer}{theirs}.bias")
    norms = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    if config.post_norms:
        norms |= {
            "attention_post_norm": "post_attention_layernorm",
            "mlp_norm": "pre_feedforward_layernorm",
            "mlp_post_norm": "post_feedforward_layernorm",
        }
    if config.qk_norm:
        norms |= {"query_norm": "self_attn.q_norm", "key_norm": "self_attn.k_norm"}
    return found | {
        f"layers.{ours}.scale": Weight(f"{layer}{theirs}.weight") for ours, theirs in norms.items()
    }


PROJECTIONS = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "output": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
