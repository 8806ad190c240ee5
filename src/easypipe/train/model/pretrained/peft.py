"""Saves adapters as a folder that PEFT opens (adapter_config.json, safetensors), and loads them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import load_file, save_file

from easypipe.core.errors import MissingFileError, StateError, raising, require
from easypipe.core.storage import json_bytes
from easypipe.core.values import JsonValue
from easypipe.core.visible import first_of
from easypipe.train.model.config import LoraConfig
from easypipe.train.model.decoder import Decoder
from easypipe.train.model.lora import adapters, add_lora
from easypipe.train.model.pretrained.families import PROJECTIONS
from easypipe.train.model.pretrained.files import (
    Shape,
    in_words,
    read_json,
    reading,
    unlike,
)
from easypipe.train.model.pretrained.save import new_folder

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_NAME = "base_model.model.model.layers.{layer}.{module}.lora_{ab}.weight"
_PARSED = re.compile(r"base_model\.model\.model\.layers\.(\d+)\.([a-z_.]+)\.lora_([AB])\.weight")
# Keys of adapter_config.json -> values that ask for nothing but what is done here.
_NEUTRAL: dict[str, tuple[JsonValue, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layer_replication": (None,),
    "trainable_token_indices": (None,),
    "lora_bias": (False, None),
    "use_qalora": (False, None),
    "use_bdlora": (False, None),
    # Other values begin with another base, such as PiSSA's, or with one that is quantized.
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
    "alora_invocation_tokens": (None,),
    "target_parameters": (None, []),
}


def save_adapters(module: Decoder, path: str | Path, *, base: str | Path | None = None) -> Path:
    """Writes the adapters of `module` to the new folder `path`, and returns the folder.

    `peft.PeftModel.from_pretrained` opens it. The folder appears complete or not at all.

    Args:
        module: The model with adapters.
        path: The folder to create.
        base: The folder or Hub name of the model to which they belong; PEFT looks it up.

    Raises:
        ConfigError: The module has no adapters that PEFT can open, or the folder is not empty.
        StorageError: The folder cannot be written.
    """
    found = adapters(module)
    require(
        isinstance(module, Decoder) and found,
        "module",
        "has no adapters that PEFT knows",
        "Train with train.lora, or use save_pretrained.",
    )
    require(
        module.added is None,
        "module",
        "has new tokens, for which the model that PEFT would open has no rows",
        "Leave --adapters out: save_pretrained merges adapters and rows.",
    )
    require(
        module.score is None,
        "module",
        "is a reward model, whose score is trained beside its adapters",
        "Leave --adapters out: save_pretrained merges them and writes the score.",
    )
    config = next(iter(found.values())).lora
    names = {name: PROJECTIONS[name.removeprefix("layers.")] for name in found}
    written = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None if base is None else str(base),
        "r": config.rank,
        "lora_alpha": config.alpha,
        "use_rslora": config.rank_stabilized,
        "target_modules": sorted(their.rpartition(".")[2] for their in names.values()),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    tensors = {}
    for name, linear in found.items():
        for ab, stacked in (("A", linear.lora_a), ("B", linear.lora_b)):
            for layer, matrix in enumerate(np.asarray(stacked[...])):
                tensors[_NAME.format(layer=layer, module=names[name], ab=ab)] = (
                    np.ascontiguousarray(matrix.T)
                )
    with new_folder(path) as folder:
        save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        (folder / ADAPTER_CONFIG).write_bytes(json_bytes(written))
    return Path(os.path.expanduser(path)).absolute()


def load_adapters(module: Decoder, path: str | Path) -> Decoder:
    """Returns a Decoder like `module`, whose arrays it shares, with the adapters of a folder.

    The folder was written by PEFT or by `save_adapters`.

    Raises:
        MissingFileError: The folder has no adapters as safetensors.
        ConfigError: The adapters are of another kind; the message names the key of
            adapter_config.json.
        StateError: Tensors are missing, unexpected or of the wrong shape, or a file is damaged.
    """
    folder = Path(os.path.expanduser(path))
    values, file = read_json(folder / ADAPTER_CONFIG), folder / ADAPTER_WEIGHTS
    for key, neutral in _NEUTRAL.items():
        value, at = values.get(key, neutral[0]), f"{folder / ADAPTER_CONFIG}: {key}"
        require(value in neutral, at, f"{value!r} is not supported", have=neutral)
    if not file.is_file():
        fix = "Save the adapters as safetensors; pickles are not read."
        raise MissingFileError(at=str(file), problem="no such file", fix=fix)
    with reading(file):
        tensors = load_file(file)
    does_not_fit = (KeyError, TypeError, ValueError)
    targets = _targets(tensors, file)
    with raising(StateError, folder / ADAPTER_CONFIG, "does not fit this decoder", on=does_not_fit):
        config = LoraConfig(
            rank=values["r"],
            alpha=float(values["lora_alpha"]),
            rank_stabilized=bool(values.get("use_rslora")),
            targets=targets,
        )
        adapted = add_lora(nnx.clone(module, variables=False), config, seed=0)
    wanted: dict[str, Shape] = {}
    for name, linear in adapters(adapted).items():
        for ab, variable in (("A", linear.lora_a), ("B", linear.lora_b)):
            layers, *shape = variable.shape
            module_name = PROJECTIONS[name.removeprefix("layers.")]
            named = [_NAME.format(layer=i, module=module_name, ab=ab) for i in range(layers)]
            found = [tensors[one].T for one in named if one in tensors]
            wanted |= dict.fromkeys(named, tuple(shape[::-1]))
            if [matrix.shape for matrix in found] == [tuple(shape)] * layers:
                variable[...] = jnp.stack([jnp.asarray(one, jnp.float32) for one in found])
    others = in_words(unlike(wanted, {name: tensor.shape for name, tensor in tensors.items()}))
    if others:
        problem, fix = (
            f"not the adapters of this decoder; {others}",
            "Compare with its config.json.",
        )
        raise StateError(at=str(file), problem=problem, fix=fix)
    return adapted


def _targets(tensors: Iterable[str], file: Path) -> tuple[str, ...]:
    """Returns the projections of the decoder to which the adapters belong.

    Raises:
        StateError: A tensor does not belong to any, or there is no tensor.
    """
    ours = {their: name for name, their in PROJECTIONS.items()}
    parsed = {name: _PARSED.fullmatch(name) for name in tensors}
    places = {
        name: f"layers.{ours[match[2]]}"
        for name, match in parsed.items()
        if match is not None and match[2] in ours
    }
    unexpected = sorted(parsed.keys() - places.keys())
    if unexpected or not parsed:
        problem = "adapters that this decoder has no place for: "
        raise StateError(at=str(file), problem=problem + (first_of(unexpected) or "none"))
    return tuple(sorted(set(places.values())))
