"""Writes a decoder as one GGUF file for llama.cpp: its header's keys, dtypes and tensors.

Source of keys, names and layouts: llama.cpp, `conversion/*.py` and `src/models/*.cpp`.
"""

from __future__ import annotations

import importlib
import logging
import math
import os
from pathlib import Path
from types import ModuleType
from typing import Literal

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from easypipe.core.errors import MissingExtraError, TokenizerError, raising, require
from easypipe.core.storage import commit_file
from easypipe.core.values import JsonObject
from easypipe.train.model.config import ModelConfig
from easypipe.train.model.decoder import Decoder, slowed
from easypipe.train.model.lora import merge_lora
from easypipe.train.model.pretrained.files import as_tokens
from easypipe.train.model.pretrained.gguf_tokens import Vocabulary, vocabulary_of
from easypipe.train.model.pretrained.save import (
    WrittenTensor,
    config_json,
    special_tokens,
    tensors_of,
)
from easypipe.transforms.tokenizer.files import find_chat_template
from easypipe.transforms.tokenizer.tokenizer import load_tokenizer

logger = logging.getLogger("easypipe")

Dtype = Literal["float32", "float16", "bfloat16"]
# model_type of config.json -> llama.cpp's name of the architecture that computes the same; `nox -s
# gguf` compares each of them.
ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
}
_WINDOWED = ("gemma2", "gemma3")  # architectures that have windows
# With this number of layers llama.cpp treats a model as one of 27 billion parameters, and divides
# attention scores by the root of the width over the heads.
_OF_27B = {"gemma2": 46, "gemma3": 62}
_ENDS = "eos_token_id", "eot_token_id", "eom_token_id"  # keys of tokens that end a text
_KINDS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_FILE_TYPES = {"float32": 0, "float16": 1, "bfloat16": 32}
_FIX = "Export without --gguf, for transformers."


def needed_gguf() -> ModuleType:
    """Returns the package that writes the file.

    Raises:
        MissingExtraError: The package is not installed.
    """
    fix = "Install it with: pip install 'easypipe[gguf]'"
    with raising(MissingExtraError, "gguf", "writing GGUF files needs it", fix, ImportError):
        return importlib.import_module("gguf")


def save_gguf(
    module: Decoder,
    path: str | Path,
    *,
    tokenizer: str | Path | None,
    chat_template: str | None = None,
    eos_token_id: int | list[int] | tuple[int, ...] | None = None,
    max_length: int | None = None,
    dtype: Dtype | None = None,
) -> Path:
    """Writes `module` to the new file `path` for llama.cpp, and returns the file.

    It holds the weights, the tokenizer, the chat template and the tokens that end a text. Adapters
    are merged. The file appears complete or not at all.

    Args:
        module: The model.
        path: The file to create.
        tokenizer: As for save_pretrained, but required.
        chat_template: As for save_pretrained.
        eos_token_id: As for save_pretrained.
        max_length: As for save_pretrained.
        dtype: The dtype of matrices; None: that of the parameters. Vectors are float32.

    Raises:
        MissingExtraError: The package gguf is not installed.
        ConfigError: The path exists, or llama.cpp would compute the model differently.
        TokenizerError: llama.cpp does not support the tokenizer's rules.
        StorageError: The file cannot be written.
    """
    gguf = needed_gguf()
    target = Path(os.path.expanduser(path)).absolute()
    require(not target.exists(), str(target), "is there already", "Give a new file's name.")
    require(
        tokenizer is not None,
        "tokenizer",
        "a GGUF file needs one, and the run names none",
        _FIX,
    )
    loaded = load_tokenizer(str(tokenizer))
    module = merge_lora(module)
    shape = module.config
    hf, generation = config_json(module, special_tokens(loaded, {}), eos_token_id, max_length)
    hf["max_position_embeddings"] = hf.get("max_position_embeddings") or max_length
    arch = _architecture(hf, shape, module.score is not None)
    matrices: Dtype = shape.param_dtype if dtype is None else dtype
    tables = _tables(vocabulary_of(loaded, shape.vocabulary), hf, generation, loaded.name)
    header: JsonObject = {
        "general.name": target.stem,
        "general.file_type": _FILE_TYPES[matrices],
        **{f"{arch}.{key}": value for key, value in _described(shape, arch, hf).items()},
        **{f"tokenizer.ggml.{key}": value for key, value in tables.items()},
    }
    template = _own_template(loaded.name) if chat_template is None else chat_template
    if template is not None:
        header["tokenizer.chat_template"] = template
    _write(gguf, target, header, module, arch, matrices)
    return target


def _write(
    gguf: ModuleType, path: Path, header: JsonObject, module: Decoder, arch: str, matrices: Dtype
) -> None:
    """Writes the file, one tensor at a time."""
    writer, shape = gguf.GGUFWriter(None, arch), module.config
    adding = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    adding |= {str: writer.add_string, list: writer.add_array}
    for key, value in header.items():
        adding[type(value)](key, value)
    factors, tensors = _rope_factors(shape), tensors_of(module)
    if factors is not None:
        writer.add_tensor_info("rope_freqs.weight", factors.shape, factors.dtype, factors.nbytes)
    (number,) = (number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(number, shape.num_layers)
    for tensor in tensors:
        dtype = matrices if len(tensor.shape) > 1 else "float32"
        kept = np.dtype(np.float32 if dtype == "float32" else np.uint16)
        writer.add_tensor_info(
            names.get_name(tensor.name, (".weight", ".bias")),
            tensor.shape,
            kept,
            math.prod(tensor.shape) * kept.itemsize,
            gguf.GGMLQuantizationType[_KINDS[dtype]],
        )
    with commit_file(path) as (temporary, _):
        writer.write_header_to_file(temporary)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        if factors is not None:
            writer.write_tensor_data(factors)
        for tensor in tensors:
            found = _laid_out(tensor, shape, arch)
            writer.write_tensor_data(_narrowed(found, matrices, tensor.name))
        writer.close()


def _architecture(hf: JsonObject, shape: ModelConfig, scores: bool) -> str:
    """Returns llama.cpp's name of the architecture of this model.

    Raises:
        ConfigError: No architecture computes the same.
    """
    family = hf["model_type"]
    require(
        family in ARCHITECTURES,
        "model",
        f"{family} was not compared with llama.cpp",
        _FIX,
        ARCHITECTURES,
    )
    arch = ARCHITECTURES[family]
    square = shape.num_heads * shape.head_width == shape.hidden_size
    caps = shape.attention_soft_cap and shape.logit_soft_cap
    scaling = shape.rope_scaling
    wrong = {
        "a reward model": scores,
        "no max_position_embeddings": hf["max_position_embeddings"] is None,
        "heads that do not fill hidden_size": arch == "qwen2" and not square,
        "no soft caps": arch == "gemma2" and not caps,
        "a soft cap of attention": arch == "gemma3" and shape.attention_soft_cap,
        "a head beside the embeddings": arch == "gemma2" and not shape.tie_embeddings,
        "rope_scaling of kind llama3": arch != "llama" and scaling and scaling.kind == "llama3",
    }
    reasons = [reason for reason, holds in wrong.items() if holds]
    problem = f"llama.cpp's {arch} does not support {family} with {', '.join(reasons)}"
    require(not reasons, "model", problem, _FIX)
    return arch


def _described(shape: ModelConfig, arch: str, hf: JsonObject) -> JsonObject:
    """Returns the keys of the model's shape."""
    length = hf["max_position_embeddings"]
    found: JsonObject = {}
    if arch in _WINDOWED:
        found = {
            "attention.sliding_window": shape.sliding_window or length,
            "attention.sliding_window_pattern": list(shape.windowed),
            "rope.freq_base_swa": shape.local_rope_theta or shape.rope_theta,
        }
    elif shape.sliding_window is not None and shape.sliding_window < length:
        length = shape.sliding_window
        logger.warning(
            "llama.cpp does not support the sliding window of %s: it computes the same up to %d "
            "tokens, which the file names as the longest row",
            hf["model_type"],
            length,
        )
    if shape.rope_scaling is not None and shape.rope_scaling.kind == "linear":
        found |= {"rope.scaling.type": "linear", "rope.scaling.factor": shape.rope_scaling.factor}
    caps = {
        "attn_logit_softcapping": shape.attention_soft_cap,
        "final_logit_softcapping": shape.logit_soft_cap,
    }
    return found | {
        "vocab_size": shape.vocabulary,
        "context_length": length,
        "embedding_length": shape.hidden_size,
        "feed_forward_length": shape.intermediate_size,
        "block_count": shape.num_layers,
        "attention.head_count": shape.num_heads,
        "attention.head_count_kv": shape.num_kv_heads,
        "attention.key_length": shape.head_width,
        "attention.value_length": shape.head_width,
        "attention.layer_norm_rms_epsilon": float(shape.norm_epsilon),
        "rope.dimension_count": shape.head_width,
        "rope.freq_base": float(shape.rope_theta),
        **{key: float(cap) for key, cap in caps.items() if cap is not None},
    }


def _tables(
    vocabulary: Vocabulary, hf: JsonObject, generation: JsonObject, name: str
) -> JsonObject:
    """Returns the keys of the tokens, and of those that begin and end a text.

    Raises:
        TokenizerError: A GGUF file cannot name the tokens that end a text.
    """
    ends = as_tokens(generation.get("eos_token_id"))
    if not 1 <= len(ends) <= len(_ENDS):
        raise TokenizerError(
            at=name,
            problem=f"{len(ends)} tokens end a text, and a GGUF file names 1 to {len(_ENDS)}",
            fix=_FIX if ends else "Name its eos_token in tokenizer_config.json.",
        )
    if vocabulary.ends not in (None, ends[0]):
        raise TokenizerError(
            at=name,
            problem=f"puts token {vocabulary.ends} behind every text, and llama.cpp could only put "
            f"{ends[0]} there, which ends a turn",
            fix=_FIX,
        )
    begins = hf.get("bos_token_id") if vocabulary.begins is None else vocabulary.begins
    named = {"bos_token_id": begins, "padding_token_id": hf.get("pad_token_id")}
    return {
        "model": vocabulary.kind,
        "pre": vocabulary.cut,
        "tokens": vocabulary.tokens,
        "token_type": vocabulary.types,
        **({"merges": vocabulary.merges} if vocabulary.merges else {}),
        **({"scores": vocabulary.scores} if vocabulary.scores else {}),
        "add_space_prefix": vocabulary.space_prefix,
        "add_bos_token": vocabulary.begins is not None,
        "add_eos_token": vocabulary.ends is not None,
        **{key: token for key, token in named.items() if token is not None},
        **dict(zip(_ENDS, ends, strict=False)),
    }


def _own_template(name: str) -> str | None:
    """Returns the chat template of a tokenizer; None if it has none."""
    try:
        return find_chat_template(name)[0]
    except TokenizerError:  # the tokenizer has none
        return None


def _laid_out(tensor: WrittenTensor, shape: ModelConfig, arch: str) -> NDArray[np.float32]:
    """Returns the values of a tensor in the layout of llama.cpp."""
    found = tensor.fetch().astype(np.float32)
    if tensor.name.endswith("norm.weight") and shape.norm_scale == "one_plus":
        found += 1
    kind = tensor.name.removesuffix(".weight").rpartition(".")[2]
    if arch == "llama" and kind in ("q_proj", "k_proj"):  # it rotates neighbours, not halves
        heads = shape.num_heads if kind == "q_proj" else shape.num_kv_heads
        halves = found.reshape(heads, 2, -1, found.shape[-1]).swapaxes(1, 2)
        found = halves.reshape(found.shape)
    if arch in _WINDOWED and kind == ("q_norm" if shape.qk_norm else "q_proj"):
        # llama.cpp divides scores by another root: the queries are scaled by the quotient of both.
        of_27b = shape.num_layers == _OF_27B[arch]
        theirs = shape.hidden_size // shape.num_heads if of_27b else shape.head_width
        found *= math.sqrt(theirs / (shape.attention_width or shape.head_width))
    return np.ascontiguousarray(found)


def _narrowed(
    found: NDArray[np.float32], dtype: Dtype, name: str
) -> NDArray[np.float32] | NDArray[np.uint16]:
    """Returns a matrix in its dtype, and a vector unchanged.

    Raises:
        ConfigError: The dtype cannot hold the values.
    """
    if dtype == "float32" or found.ndim == 1:
        return found
    with np.errstate(over="ignore"):
        narrow = found.astype(jnp.dtype(dtype))
    require(
        np.isfinite(narrow).all() or not np.isfinite(found).all(),
        "--dtype",
        f"{name} has values that {dtype} cannot hold",
        "Choose bfloat16 or float32.",
    )
    return narrow.view(np.uint16)


def _rope_factors(shape: ModelConfig) -> NDArray[np.float32] | None:
    """Returns how many times slower each pair rotates, [h/2]; None if llama3 scaling is off."""
    if shape.rope_scaling is None or shape.rope_scaling.kind != "llama3":
        return None
    width = shape.head_width
    plain = shape.rope_theta ** -(jnp.arange(0, width, 2, dtype=jnp.float32) / width)
    return np.asarray(plain / slowed(plain, shape.rope_scaling))
