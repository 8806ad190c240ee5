"""Saves a decoder as a folder for `transformers`: weights, config, tokenizer, longest row seen."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import shutil
import stat
from collections.abc import Generator, Mapping, Sequence
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
from easypipe.train.model.pretrained.families import (
    FAMILIES,
    Weight,
    from_hf,
    shape_of,
    to_hf,
    weights,
)
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
    """The facts about a model's training data that generation needs.

    A checkpoint records it.

    Attributes:
        chat_template: The chat template of its conversations.
        stop_token_ids: The tokens that end a turn of the assistant.
        max_length: The number of tokens of the longest row.
    """

    chat_template: str | None = None
    stop_token_ids: tuple[int, ...] = ()
    max_length: int | None = None

    @classmethod
    def of(cls, turns: Turns | None) -> Seen:
        """Returns the facts that follow from how conversations are written."""
        return (
            cls()
            if turns is None
            else cls(chat_template=turns.template, stop_token_ids=turns.stop_token_ids)
        )

    @classmethod
    def recorded(cls, saved: JsonObject) -> Seen:
        """Returns the facts that a checkpoint records; earlier versions recorded nothing."""
        values: JsonObject = saved.get("seen") or {"stop_token_ids": ()}
        given: JsonObject = {**values, "stop_token_ids": tuple(values["stop_token_ids"])}
        return cls(**given)

    def record(self) -> JsonObject:
        """Returns it as plain JSON, for a checkpoint."""
        return {**dataclasses.asdict(self), "stop_token_ids": list(self.stop_token_ids)}

    def longer(self, length: int | None) -> Seen:
        """Returns this after a row of this many tokens."""
        known = self.max_length or 0
        return (
            self
            if length is None or length <= known
            else dataclasses.replace(self, max_length=length)
        )

    def options(self) -> JsonObject:
        """Returns the options of save_pretrained that follow from it."""
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
    """Writes `module` to the new folder `path`, complete or not at all, and returns the folder.

    `transformers.AutoModelForCausalLM.from_pretrained` opens it: config.json,
    generation_config.json, model.safetensors. Tensors have the dtype of the parameters; adapters
    are merged into them. A module of `load_pretrained` keeps all other keys of its config.json.

    Args:
        tokenizer: A tokenizer.json, a folder with one, or a Hub name, whose files are copied; or an
            object with `save_pretrained`, as in `transformers`.
        chat_template: The chat template of the training; None: the tokenizer's own.
        eos_token_id: The tokens that end a text, instead of the tokenizer's EOS token; they are
            also written to generation_config.json.
        max_length: The longest row that the model saw; max_position_embeddings is at least this.
        max_shard_bytes: The most bytes of a file (unless one tensor is larger) and of weights on
            the host at a time; larger models get several files and an index.

    Raises:
        ConfigError: No family of `transformers` fits the module, or the folder is not empty.
        MissingFileError: The tokenizer does not exist.
        TrainError: Other processes hold parts of arrays.
        StorageError: The folder cannot be written.
    """
    require(
        isinstance(module, Decoder),
        "module",
        f"{type(module).__name__} is not a Decoder, and others have no class in transformers",
        "easypipe.CheckpointManager saves and loads them.",
    )
    fix = "5_000_000_000 is usual."
    require(max_shard_bytes >= 1, "max_shard_bytes", f"{max_shard_bytes} is not a size", fix)
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
            for name, file in copied.items():
                shutil.copyfile(file, folder / name)
            if not copied:
                tokenizer.save_pretrained(str(folder))
            if chat_template is not None:
                _write_template(folder, chat_template)
    return Path(os.path.expanduser(path)).absolute()


@contextlib.contextmanager
def new_folder(path: str | Path) -> Generator[Path, None, None]:
    """Yields a folder to write into, which becomes `path` if no error is raised.

    Raises:
        ConfigError: `path` exists and is not an empty folder.
        StorageError: It cannot be written.
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
    """Sets the modes of files by the umask.

    safetensors makes its files readable only by the owner.
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
    """Returns the contents of config.json and of generation_config.json.

    Args:
        module: The model.
        special: The bos_token_id, eos_token_id and pad_token_id of the tokenizer, if they exist.
        eos_token_id: See save_pretrained.
        max_length: See save_pretrained.
    """
    config = json.loads(module.hf_config) if module.hf_config else None
    if config is None or from_hf(config) != shape_of(module.config):
        config = to_hf(module.config)
    config.pop("dtype", None)
    if module.score is not None:
        (own,) = config.get("architectures") or [FAMILIES[config["model_type"]].architecture]
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
    # With a factor, the length is part of the scaling of positions.
    if max_length is not None and "factor" not in rope:
        config["max_position_embeddings"] = max(
            max_length, config.get("max_position_embeddings") or 0
        )
    return config | {"torch_dtype": module.config.param_dtype}, generation


def special_tokens(tokenizer: Any, files: Mapping[str, Path]) -> JsonObject:
    """Returns those of bos_token_id, eos_token_id and pad_token_id that a tokenizer has."""
    if files:
        try:
            tokenizer = load_tokenizer(files[_DEFINITION])
        except TokenizerError as error:
            logger.warning("%s; config.json and generation_config.json name no tokens of it", error)
    names = "bos_token_id", "eos_token_id", "pad_token_id"
    found = {name: attribute_of(tokenizer, name) for name in names}
    return {name: number for name, number in found.items() if isinstance(number, int)}


def _write_template(folder: Path, template: str) -> None:
    """Writes `template` to the places where `transformers` looks for it.

    That is a file of its own, and the place of older versions if the tokenizer uses it.
    """
    path = folder / TOKENIZER_CONFIG
    values = read_json(path) if path.is_file() else {}
    own = values.get("chat_template")
    named = own if isinstance(own, list) else []
    if any(isinstance(one, dict) and one.get("template") == template for one in named):
        return  # it is one of the tokenizer's own
    (folder / CHAT_TEMPLATE).write_text(template, encoding="utf-8")
    if own is not None:
        path.write_bytes(json_bytes({**values, "chat_template": template}))


_DEFINITION = "tokenizer.json"


def _tokenizer_files(tokenizer: Any) -> dict[str, Path]:
    """Returns the files of a tokenizer to copy, by new name; {} for an object that saves itself.

    Raises:
        ConfigError: It is not a tokenizer that can be saved.
        MissingFileError: There is no tokenizer.json.
    """
    if tokenizer is None or attribute_of(tokenizer, "save_pretrained"):
        return {}
    require(
        isinstance(tokenizer, str | Path),
        "tokenizer",
        f"{type(tokenizer).__name__} cannot be saved",
        "Give a tokenizer.json, its folder, or an object with save_pretrained.",
    )
    path = Path(os.path.expanduser(tokenizer))
    path = path if path.exists() else model_folder(tokenizer, None, weights=False)
    if path.is_file() and path.suffix == ".json":
        return {_DEFINITION: path}
    found = {name: path / name for name in TOKENIZER_FILES if (path / name).is_file()}
    if _DEFINITION not in found:
        raise MissingFileError(
            at=str(path),
            problem="holds no tokenizer.json",
            fix="Give a tokenizer.json, or the folder of one.",
        )
    return found


class WrittenTensor(NamedTuple):
    """A tensor to be written; it is copied from its device when it is fetched.

    Attributes:
        name: The name in the file.
        array: The array that holds it.
        layer: Its layer in the array, if that holds several.
        transposed: Whether it is transposed in the file.
    """

    name: str
    array: jax.Array
    layer: int | None
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
    """Returns every tensor to be written, layer by layer; nothing is copied yet.

    A reward model has a score instead of the head.

    Raises:
        TrainError: Other processes hold parts of an array.
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
    """Writes the tensors to one file, or to several with an index."""
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
