"""A decoder as a folder that `transformers` opens."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from easypipe.core.errors import ConfigError, MissingFileError, StorageError, TrainError
from easypipe.core.storage import commit_folder, json_bytes
from easypipe.train.lora import merge_lora
from easypipe.train.model import Decoder
from easypipe.train.models.families import from_hf, shape_of, to_hf, weights
from easypipe.train.models.files import CONFIG, INDEX, TOKENIZER_FILES, WEIGHTS, model_folder


def save_pretrained(module: Decoder, path: str | Path, *, tokenizer: Any = None, max_shard_bytes: int = 5_000_000_000) -> Path:
    """Writes `module` to the new folder `path`, for `transformers.AutoModelForCausalLM.from_pretrained`, and returns the folder.

    config.json, and model.safetensors, or several files with model.safetensors.index.json where the tensors take more than
    `max_shard_bytes` (bytes; no file is larger, unless by one tensor; so much of the weights is on the host at a time). Tensors have the
    dtype of the parameters; adapters are merged into them. A module of `load_pretrained` keeps all other keys of the config.json that it
    came with. tokenizer: a tokenizer.json, a folder with one or a Hub name, whose files are copied; or an object with `save_pretrained`, as
    `transformers` has.

    The folder appears whole or not at all. Raises ConfigError for a module that no family of `transformers` can hold and for a folder
    that is not empty; MissingFileError for a tokenizer that is not there; TrainError for arrays of which other processes hold parts;
    StorageError for what cannot be written.
    """
    if not isinstance(module, Decoder):
        raise ConfigError(at="module", problem=f"{type(module).__name__} is not a Decoder", fix="Other modules have no transformers class.")
    if max_shard_bytes < 1:
        raise ConfigError(at="max_shard_bytes", problem=f"{max_shard_bytes} is no size", fix="5_000_000_000 is usual.")
    module = merge_lora(module)
    config = _config_json(module)
    copied = _tokenizer_files(tokenizer)
    tensors = _tensors(module)
    with new_folder(path) as folder:
        _write_shards(folder, tensors, max_shard_bytes)
        (folder / CONFIG).write_bytes(json_bytes(config))
        for file in copied:
            shutil.copyfile(file, folder / file.name)
        if tokenizer is not None and not copied:
            tokenizer.save_pretrained(str(folder))
    return Path(path).expanduser().absolute()


@contextlib.contextmanager
def new_folder(path: str | Path) -> Iterator[Path]:
    """A folder to write into, which becomes `path` when all is written. Raises ConfigError where `path` is there; StorageError."""
    target = Path(path).expanduser().absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(at=str(target), problem="is there already", fix="Give a new folder, or remove this one.")
    temporary = target.parent / f".{target.name}.writing-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        temporary.mkdir(parents=True)
        yield temporary
        commit_folder(temporary, target)
    except OSError as error:
        raise StorageError(at=str(target), problem=f"cannot be written: {error}", fix="Check space and permissions.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _config_json(module: Decoder) -> dict[str, Any]:
    given = json.loads(module.hf_config) if module.hf_config else None
    kept = given is not None and from_hf(given) == shape_of(module.config)
    config = given if kept and given is not None else to_hf(module.config)
    config.pop("dtype", None)
    return config | {"torch_dtype": module.config.param_dtype}


def _tokenizer_files(tokenizer: Any) -> list[Path]:
    if tokenizer is None or hasattr(tokenizer, "save_pretrained"):
        return []
    if not isinstance(tokenizer, str | Path):
        problem = f"{type(tokenizer).__name__} cannot be saved"
        raise ConfigError(at="tokenizer", problem=problem, fix="Give a tokenizer.json, its folder, or an object with save_pretrained.")
    path = Path(tokenizer).expanduser()
    path = path if path.exists() else model_folder(tokenizer, None, weights=False)
    found = [path] if path.is_file() else [path / name for name in TOKENIZER_FILES if (path / name).is_file()]
    if not any(file.name == "tokenizer.json" for file in found):
        raise MissingFileError(at=str(path), problem="holds no tokenizer.json", fix="Give a tokenizer.json, or the folder of one.")
    return found


class _Tensor(NamedTuple):
    name: str  # in the file
    array: jax.Array
    layer: int | None  # of the array, where it has one
    transposed: bool

    @property
    def num_bytes(self) -> int:
        return self.array.nbytes // (1 if self.layer is None else self.array.shape[0])

    def fetch(self) -> np.ndarray:
        found = np.asarray(self.array if self.layer is None else self.array[self.layer])
        return np.ascontiguousarray(found.T if self.transposed else found)


def _tensors(module: Decoder) -> list[_Tensor]:
    """Every tensor of the files, layer by layer; nothing is copied yet."""
    named, found = weights(module.config), []
    for path, variable in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        ours, array = ".".join(str(key) for key in path), variable.get_value()
        if not array.is_fully_addressable:
            problem = "other processes hold parts of it"
            raise TrainError(at=f"module.{ours}", problem=problem, fix="Load the checkpoint in a single process, and save from there.")
        weight = named[ours]
        layers = range(module.config.num_layers) if weight.stacked else [None]
        found += [_Tensor(weight.name.format(i=layer), array, layer, weight.transposed) for layer in layers]
    return sorted(found, key=lambda tensor: (-1 if tensor.layer is None else tensor.layer, tensor.name))


def _write_shards(folder: Path, tensors: list[_Tensor], max_shard_bytes: int) -> None:
    shards: list[list[_Tensor]] = [[]]
    for tensor in tensors:
        if shards[-1] and sum(one.num_bytes for one in shards[-1]) + tensor.num_bytes > max_shard_bytes:
            shards.append([])
        shards[-1].append(tensor)
    where = {}
    for number, shard in enumerate(shards, 1):
        file = WEIGHTS if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file({one.name: one.fetch() for one in shard}, folder / file, metadata={"format": "pt"})
        where |= {one.name: file for one in shard}
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(tensor.num_bytes for tensor in tensors)}, "weight_map": where}
        (folder / INDEX).write_bytes(json_bytes(index))
