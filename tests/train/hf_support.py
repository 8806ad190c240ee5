"""Tiny models of every family: their config.json, and weights that any machine draws anew from the
names of the tensors.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

GOLDENS = Path(__file__).parent / "goldens" / "hf_logits.npz"
LENGTH = 512  # shorter rows do not show wrong rotations
# positions whose logits are kept
SHOWN = np.unique(np.concatenate([np.arange(0, LENGTH, 73), [LENGTH - 2, LENGTH - 1]]))
VOCAB = 64

_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama3": {
        **_SHAPE,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "rope_theta": 500000.0,
        "rope_scaling": _LLAMA3,
        "rms_norm_eps": 1e-5,
    },
    "smollm2": {
        **_SHAPE,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "rope_theta": 100000.0,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "rope_interleaved": False,
    },
    "mistral": {
        **_SHAPE,
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 100,
        "rope_theta": 10000.0,
        "head_dim": 16,
    },
    "qwen2.5": {
        **_SHAPE,
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "rope_theta": 1000000.0,
        "use_sliding_window": False,
        "sliding_window": 100,
        "max_window_layers": 1,
        "tie_word_embeddings": True,
    },
    "qwen3": {
        **_SHAPE,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "head_dim": 16,
        "attention_bias": False,
    },
    "gemma2": {
        **_SHAPE,
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "sliding_window": 100,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 8.0,
        "hidden_activation": "gelu_pytorch_tanh",
        "num_hidden_layers": 3,
    },
    "gemma3": {
        **_SHAPE,
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 100,
        "sliding_window_pattern": 2,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "hidden_activation": "gelu_pytorch_tanh",
        "num_hidden_layers": 3,
    },
}

# with windows that another key switches on, and slower rotations of another kind
NINE = CONFIGS | {
    "qwen2.5 with windows": CONFIGS["qwen2.5"]
    | {"use_sliding_window": True, "max_window_layers": 0},
    "llama2, linear": CONFIGS["smollm2"]
    | {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "tie_word_embeddings": False},
}


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Tensor name -> shape, as `transformers` names them; written down here and not taken from the
    code under test.
    """
    kind, width, inner = config["model_type"], config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim", width // config["num_attention_heads"])
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], width),
        "model.norm.weight": (width,),
    }
    if not config.get("tie_word_embeddings", kind.startswith("gemma")):
        found["lm_head.weight"] = (config["vocab_size"], width)
    norms = ["input_layernorm", "post_attention_layernorm"]
    norms += (
        ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        if kind.startswith("gemma")
        else []
    )
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        found |= {f"{layer}.{name}.weight": (width,) for name in norms}
        for name, size in (("q", queries), ("k", keys), ("v", keys)):
            found[f"{layer}.self_attn.{name}_proj.weight"] = (size, width)
            if kind == "qwen2":
                found[f"{layer}.self_attn.{name}_proj.bias"] = (size,)
        found[f"{layer}.self_attn.o_proj.weight"] = (width, queries)
        found |= {f"{layer}.mlp.{name}_proj.weight": (inner, width) for name in ("gate", "up")}
        found[f"{layer}.mlp.down_proj.weight"] = (width, inner)
        if kind in ("qwen3", "gemma3_text"):
            found |= {f"{layer}.self_attn.{name}_norm.weight": (head,) for name in ("q", "k")}
    return found


def tensors(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Weights large enough that attention is uneven, caps bend and norms differ from one."""
    one_plus = config["model_type"].startswith("gemma")
    made = {}
    for name, shape in shapes(config).items():
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        values = np.random.default_rng(int.from_bytes(digest[:8], "little")).standard_normal(shape)
        if name.endswith("norm.weight"):
            values = 0.3 * values + (0.0 if one_plus else 1.0)
        else:
            values *= 0.3
        made[name] = values.astype(np.float32)
    return made


def token_ids(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, (1, LENGTH)).astype(np.int32)


def write_model(
    folder: Path, config: dict[str, Any], weights: dict[str, np.ndarray], files: int = 1
) -> Path:
    """A folder as `transformers` saves it, in one file or several."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if files == 1:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names = sorted(weights)
    where = {
        name: f"model-{i % files + 1:05d}-of-{files:05d}.safetensors"
        for i, name in enumerate(names)
    }
    for file in set(where.values()):
        save_file(
            {name: weights[name] for name in names if where[name] == file},
            folder / file,
            metadata={"format": "pt"},
        )
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": where})
    )
    return folder


def torch_logits(folder: Path, ids: np.ndarray) -> np.ndarray:
    """What `transformers` computes, with the attention that knows caps and windows; float32."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        str(folder), attn_implementation="eager", dtype=torch.float32
    )
    with torch.no_grad():
        return model(torch.from_numpy(ids.astype(np.int64))).logits.numpy()


if __name__ == "__main__":  # python tests/train/hf_support.py: needs torch, writes the goldens
    import tempfile

    with tempfile.TemporaryDirectory() as temporary:
        logits = {}
        for family, one in CONFIGS.items():
            logits[family] = torch_logits(
                write_model(Path(temporary) / family, one, tensors(one)), token_ids()
            )[0, SHOWN]
        GOLDENS.parent.mkdir(exist_ok=True)
        np.savez_compressed(GOLDENS, **logits)
        print(
            {family: float(abs(values).max()) for family, values in logits.items()},
            GOLDENS.stat().st_size,
            "bytes",
        )
