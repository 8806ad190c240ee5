"""A decoder as a folder that `transformers` opens."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from safetensors import SafetensorError
from safetensors.numpy import save_file

from easypipe.core.errors import (
    MissingFileError,
    StorageError,
    TokenizerError,
    TrainError,
    raising,
    require,
)
from easypipe.core.protocols import Turns
from easypipe.core.storage import commit_folder, json_bytes, temporary_of
from easypipe.core.values import attribute_of
from easypipe.train.model.decoder import Decoder
from easypipe.train.model.lora import merge_lora
from easypipe.train.model.pretrained.families import Weight, from_hf, shape_of, to_hf, weights
from easypipe.train.model.pretrained.files import (
    CHAT_TEMPLATE,
    CONFIG,
    GENERATION,
    INDEX,
    TOKENIZER_CONFIG,
    TOKENIZER_FILES,
    WEIGHTS,
    JsonObject,
    Shape,
    as_tokens,
    model_folder,
    read_json,
)
from easypipe.transforms.tokenizer.tokenizer import load_tokenizer

logger = logging.getLogger("easypipe")


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What a model has seen in training, as far as whoever writes with it must know.

    A checkpoint records it.
    """

    chat_template: str | None = None
    stop_token_ids: tuple[int, ...] = ()  # what ends a turn of the assistant
    max_length: int | None = None  # tokens of the longest row

    @classmethod
    def of(cls, turns: Turns | None) -> Seen:
        return (
            cls()
            if turns is None
            else cls(chat_template=turns.template, stop_token_ids=turns.stop_token_ids)
        )

    @classmethod
    def recorded(cls, saved: JsonObject) -> Seen:
        """What stands in a checkpoint; earlier versions wrote none."""
        values: JsonObject = saved.get("seen") or {"stop_token_ids": ()}
        return cls(**{**values, "stop_token_ids": tuple(values["stop_token_ids"])})

    def record(self) -> JsonObject:
        return {**dataclasses.asdict(self), "stop_token_ids": list(self.stop_token_ids)}

    def longer(self, length: int | None) -> Seen:
        """This, after a row of so many tokens."""
        known = self.max_length or 0
        return (
            self
            if length is None or length <= known
            else dataclasses.replace(self, max_length=length)
        )

    def options(self) -> JsonObject:
        """What save_pretrained takes."""
        return {
            "chat_template": self.chat_template,
            "eos_token_id": self.stop_token_ids or None,
            "max_length": self.max_length,
        }


def save_pretrained(
    module: Decoder,
    path: str | Path,
    *,
    tokenizer: Any = None,
    chat_template: str | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    max_length: int | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> Path:
    """Writes `module` to the new folder `path` for `transformers`, and returns the folder.

    `transformers.AutoModelForCausalLM.from_pretrained` opens it.

    config.json, generation_config.json, and model.safetensors, or several files with
    model.safetensors.index.json where the tensors take more than `max_shard_bytes` (bytes; no file
    is larger, unless by one tensor; so much of the weights is on the host at a time). Tensors have
    the dtype of the parameters; adapters are merged into them. A module of `load_pretrained` keeps
    all other keys of the config.json that it came with. tokenizer: a tokenizer.json, a folder with
    one or a Hub name, whose files are copied; or an object with `save_pretrained`, as
    `transformers` has.

    chat_template: the text of the one that the model was trained with; None: the tokenizer's own.
    eos_token_id: what ends what it writes, in place of the tokenizer's EOS token, which
    generation_config.json names besides. max_length: tokens of the longest row that it has seen,
    which is its max_position_embeddings, unless its config.json came with more.

    The folder appears whole or not at all. Raises ConfigError for a module that no family of
    `transformers` can hold and for a folder that is not empty; MissingFileError for a tokenizer
    that is not there; TrainError for arrays of which other processes hold parts; StorageError for
    what cannot be written.
    """
    kind = f"{type(module).__name__} is not a Decoder"
    require(
        isinstance(module, Decoder), "module", kind, "Other modules have no transformers class."
    )
    require(
        max_shard_bytes >= 1,
        "max_shard_bytes",
        f"{max_shard_bytes} is no size",
        "5_000_000_000 is usual.",
    )
    module = merge_lora(module)
    copied = _tokenizer_files(tokenizer)
    config, generation = config_json(
        module, special_tokens(tokenizer, copied), eos_token_id, max_length
    )
    tensors = tensors_of(module)
    with new_folder(path) as folder:
        _write_shards(folder, tensors, max_shard_bytes)
        (folder / CONFIG).write_bytes(json_bytes(config))
        (folder / GENERATION).write_bytes(json_bytes(generation))
        if tokenizer is not None:
            for file in copied:
                shutil.copyfile(file, folder / file.name)
            if not copied:
                tokenizer.save_pretrained(str(folder))
            if chat_template is not None:
                _write_template(folder, chat_template)
    return Path(os.path.expanduser(path)).absolute()


@contextlib.contextmanager
def new_folder(path: str | Path) -> Iterator[Path]:
    """A folder to write into, which becomes `path` when all is written.

    Raises ConfigError where `path` is there; StorageError.
    """
    target = Path(os.path.expanduser(path)).absolute()
    require(
        not target.exists() or (target.is_dir() and not any(target.iterdir())),
        str(target),
        "is there already",
        "Give a new folder, or remove this one.",
    )
    failures = (OSError, SafetensorError)
    with raising(
        StorageError, target, "cannot be written", "Check space and permissions.", failures
    ):
        temporary = temporary_of(target)
        try:
            temporary.mkdir()
            yield temporary
            _usual_modes(temporary)
            commit_folder(temporary, target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _usual_modes(folder: Path) -> None:
    """Gives files the mode that the umask gives new ones: safetensors leaves its own to the owner
    alone.
    """
    probe = folder / ".mode"
    probe.touch()
    mode = stat.S_IMODE(probe.stat().st_mode)
    probe.unlink()
    for file in folder.iterdir():
        file.chmod(mode)


def config_json(
    module: Decoder,
    special: JsonObject,
    eos_token_id: int | Sequence[int] | None,
    max_length: int | None,
) -> tuple[JsonObject, JsonObject]:
    """config.json and generation_config.json.

    special: the tokenizer's bos_token_id, eos_token_id and pad_token_id, where there are.
    """
    config = json.loads(module.hf_config) if module.hf_config else None
    if config is None or from_hf(config) != shape_of(module.config):
        config = to_hf(module.config)
    config.pop("dtype", None)
    if module.score is not None:
        (own,) = config["architectures"]
        kind = own.replace("ForCausalLM", "ForSequenceClassification")
        config |= {"architectures": [kind], "id2label": {"0": "reward"}, "label2id": {"reward": 0}}
    given = {key: value for key, value in config.items() if value is not None or key not in special}
    config = {**special, **given}
    ends = as_tokens(config.get("eos_token_id"))
    if given_ends := as_tokens(eos_token_id):
        config["eos_token_id"] = given_ends[0]
        own = as_tokens(special.get("eos_token_id"))
        ends = list(dict.fromkeys([*given_ends, *ends, *own]))
    others = "bos_token_id", "pad_token_id"
    generation = {name: config[name] for name in others if config.get(name) is not None}
    if ends:
        generation["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    # else the length is part of how positions are scaled
    if max_length is not None and "factor" not in rope:
        config["max_position_embeddings"] = max(
            max_length, config.get("max_position_embeddings") or 0
        )
    return config | {"torch_dtype": module.config.param_dtype}, generation


def special_tokens(tokenizer: Any, files: list[Path]) -> JsonObject:
    """bos_token_id, eos_token_id and pad_token_id of a tokenizer, those that it has."""
    if files:
        try:
            [tokenizer] = (load_tokenizer(file) for file in files if file.name == "tokenizer.json")
        except TokenizerError as error:
            logger.warning("%s; config.json and generation_config.json name no tokens of it", error)
    names = "bos_token_id", "eos_token_id", "pad_token_id"
    found = {name: attribute_of(tokenizer, name) for name in names}
    return {name: number for name, number in found.items() if isinstance(number, int)}


def _write_template(folder: Path, template: str) -> None:
    """Puts `template` where `transformers` looks: its own file, and where older versions do, if
    there is one already.
    """
    path = folder / TOKENIZER_CONFIG
    values = read_json(path) if path.is_file() else {}
    own = values.get("chat_template")
    named = own if isinstance(own, list) else []
    if any(isinstance(one, dict) and one.get("template") == template for one in named):
        return  # the tokenizer's, with others beside it
    (folder / CHAT_TEMPLATE).write_text(template, encoding="utf-8")
    if own is not None:
        path.write_bytes(json_bytes({**values, "chat_template": template}))


def _tokenizer_files(tokenizer: Any) -> list[Path]:
    if tokenizer is None or attribute_of(tokenizer, "save_pretrained"):
        return []
    require(
        isinstance(tokenizer, str | Path),
        "tokenizer",
        f"{type(tokenizer).__name__} cannot be saved",
        "Give a tokenizer.json, its folder, or an object with save_pretrained.",
    )
    path = Path(os.path.expanduser(tokenizer))
    path = path if path.exists() else model_folder(tokenizer, None, weights=False)
    names = [path] if path.is_file() else [path / name for name in TOKENIZER_FILES]
    found = [name for name in names if name.is_file()]
    if not any(file.name == "tokenizer.json" for file in found):
        raise MissingFileError(
            at=str(path),
            problem="holds no tokenizer.json",
            fix="Give a tokenizer.json, or the folder of one.",
        )
    return found


class WrittenTensor(NamedTuple):
    """A tensor of the files, which is copied from its device when it is fetched."""

    name: str  # in the file
    array: jax.Array
    layer: int | None  # of the array, where it has one
    transposed: bool

    @property
    def shape(self) -> Shape:
        whole = self.array.shape if self.layer is None else self.array.shape[1:]
        return whole[::-1] if self.transposed else whole

    @property
    def num_bytes(self) -> int:
        return self.array.nbytes // (1 if self.layer is None else self.array.shape[0])

    def fetch(self) -> np.ndarray:
        found = np.asarray(self.array if self.layer is None else self.array[self.layer])
        return np.ascontiguousarray(found.T if self.transposed else found)


def tensors_of(module: Decoder) -> list[WrittenTensor]:
    """Every tensor of the files, layer by layer; nothing is copied yet. A reward model has a score
    in place of the head.
    """
    named, found = weights(module.config), []
    if module.score is not None:
        named["score"] = Weight("score.weight", transposed=True, stacked=False)
    for path, variable in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        ours, array = ".".join(str(key) for key in path), variable.get_value()
        if ours == "head.kernel" and module.score is not None:
            continue
        if not array.is_fully_addressable:
            problem = "other processes hold parts of it"
            raise TrainError(
                at=f"module.{ours}",
                problem=problem,
                fix="Load the checkpoint in a single process, and save from there.",
            )
        weight = named[ours]
        layers = range(module.config.num_layers) if weight.stacked else [None]
        found += [
            WrittenTensor(weight.name.format(i=layer), array, layer, weight.transposed)
            for layer in layers
        ]
    return sorted(
        found, key=lambda tensor: (-1 if tensor.layer is None else tensor.layer, tensor.name)
    )


def _write_shards(folder: Path, tensors: list[WrittenTensor], max_shard_bytes: int) -> None:
    shards: list[list[WrittenTensor]] = [[]]
    for tensor in tensors:
        if (
            shards[-1]
            and sum(one.num_bytes for one in shards[-1]) + tensor.num_bytes > max_shard_bytes
        ):
            shards.append([])
        shards[-1].append(tensor)
    where = {}
    for number, shard in enumerate(shards, 1):
        file = (
            WEIGHTS if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        )
        save_file(
            {one.name: one.fetch() for one in shard}, folder / file, metadata={"format": "pt"}
        )
        where |= {one.name: file for one in shard}
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(tensor.num_bytes for tensor in tensors)},
            "weight_map": where,
        }
        (folder / INDEX).write_bytes(json_bytes(index))
