"""Adapters as a folder that PEFT opens (adapter_config.json, safetensors), and back."""

from __future__ import annotations

import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from easypipe.core.errors import ConfigError, MissingFileError, StateError, require
from easypipe.core.storage import json_bytes
from easypipe.train.model.config import LoraConfig
from easypipe.train.model.decoder import Decoder
from easypipe.train.model.lora import adapters, add_lora
from easypipe.train.model.pretrained.families import PROJECTIONS
from easypipe.train.model.pretrained.files import read_json, short
from easypipe.train.model.pretrained.save import new_folder

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_NAME = "base_model.model.model.layers.{layer}.{module}.lora_{ab}.weight"
_PARSED = re.compile(r"base_model\.model\.model\.layers\.(\d+)\.([a-z_.]+)\.lora_([AB])\.weight")
# keys of adapter_config.json -> values under which they change nothing that is done here
_NEUTRAL: dict[str, tuple[object, ...]] = {
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
    "target_parameters": (None, []),
}


def save_adapters(module: Decoder, path: str | Path, *, base: str | Path | None = None) -> Path:
    """Writes the adapters of `module` to the new folder `path`, for
    `peft.PeftModel.from_pretrained`, and returns the folder.

    base: folder or Hub name of the model that they belong to, which PEFT looks up. The folder
    appears whole or not at all. Raises ConfigError for a module without adapters and for a folder
    that is not empty; StorageError for what cannot be written.
    """
    found = adapters(module)
    require(
        isinstance(module, Decoder) and found,
        "module",
        "has no adapters that PEFT knows",
        "Train with train.lora, or use save_pretrained.",
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
    return Path(path).expanduser().absolute()


def load_adapters(module: Decoder, path: str | Path) -> Decoder:
    """A Decoder like `module`, whose arrays it shares, with the adapters of a folder that PEFT or
    `save_adapters` wrote.

    Raises MissingFileError; ConfigError for adapters of another kind, with the key of
    adapter_config.json; StateError for tensors that are missing, unexpected or of the wrong shape,
    with their names, and for damaged files.
    """
    folder = Path(path).expanduser()
    values = read_json(folder / ADAPTER_CONFIG)
    for key, neutral in _NEUTRAL.items():
        if key in values and values[key] not in neutral:
            raise ConfigError(
                at=f"{folder / ADAPTER_CONFIG}: {key}",
                problem=f"{values[key]!r} is not supported",
                have=neutral,
            )
    file = folder / ADAPTER_WEIGHTS
    if not file.is_file():
        raise MissingFileError(
            at=str(file),
            problem="no such file",
            fix="Save the adapters as safetensors; pickles are not read.",
        )
    try:
        tensors = load_file(file)
    except (SafetensorError, OSError) as error:
        raise StateError(
            at=str(file),
            problem=f"is not a whole safetensors file: {error}",
            fix="Download it again.",
        ) from error
    ours = {their: name for name, their in PROJECTIONS.items()}
    parsed = {name: _PARSED.fullmatch(name) for name in tensors}
    unexpected = sorted(
        name for name, match in parsed.items() if match is None or match[2] not in ours
    )
    if unexpected or not parsed:
        raise StateError(
            at=str(file),
            problem="adapters that this decoder has no place for: "
            f"{short(unexpected) or 'none at all'}",
        )
    targets = tuple(
        sorted({f"layers.{ours[match[2]]}" for match in parsed.values() if match is not None})
    )
    try:
        config = LoraConfig(
            rank=values["r"],
            alpha=float(values["lora_alpha"]),
            rank_stabilized=bool(values.get("use_rslora")),
            targets=targets,
        )
        adapted = add_lora(nnx.clone(module, variables=False), config, seed=0)
    except (KeyError, TypeError, ConfigError) as error:
        raise StateError(
            at=str(folder / ADAPTER_CONFIG), problem=f"does not fit this decoder: {error!s}"
        ) from error
    wanted = {}
    for name, linear in adapters(adapted).items():
        for ab, variable in (("A", linear.lora_a), ("B", linear.lora_b)):
            layers, rows, columns = variable.shape
            named = [
                _NAME.format(layer=i, module=PROJECTIONS[name.removeprefix("layers.")], ab=ab)
                for i in range(layers)
            ]
            wanted |= dict.fromkeys(named, (columns, rows))
            if all(one in tensors and tensors[one].shape == (columns, rows) for one in named):
                variable[...] = jnp.stack(
                    [jnp.asarray(tensors[one], jnp.float32).T for one in named]
                )
    missing = sorted(wanted.keys() - tensors.keys())
    further = sorted(tensors.keys() - wanted.keys())
    wrong = [f"{name} is {list(tensors[name].shape)}, not {list(shape)}" for name, shape in wanted.items() if name in tensors
             and tensors[name].shape != shape]  # fmt: skip
    if missing or further or wrong:
        kinds = (("missing", missing), ("unexpected", further), ("wrong", wrong))
        problem = "; ".join(f"{kind}: {short(names)}" for kind, names in kinds if names)
        raise StateError(
            at=str(file),
            problem=f"not the adapters of this decoder; {problem}",
            fix="Compare with its config.json.",
        )
    return adapted
