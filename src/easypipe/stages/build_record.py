"""The build record: the config and stages that made a cache or saved folder, for `verify --repair`.

The file is configs/<name>.json; the name is the key of a manifest of that cache, or the fingerprint
of a saved folder. It holds:

    config: A PipelineConfig without its stages.
    stages: [[name, config], ...], the stages after source().
    folder: The folder from which relative paths start.
    unknown: Why this file is not enough to make the data again; "" if it is.

The record is not a part of the data: equal rows make equal folders, whatever files they came from.
It leaves out credentials, and everything that runs code.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from easypipe.cache.folder import CONFIGS, CacheFolder
from easypipe.core import storage
from easypipe.core.checked import recall_checked, remember_checked
from easypipe.core.config import CODE_KEYS, fields_of, to_dict
from easypipe.core.errors import ConfigError, EasypipeError, StorageError, require
from easypipe.core.protocols import BaseStage, PipelineContext
from easypipe.core.remote import public_url
from easypipe.core.values import Json, JsonObject
from easypipe.save import saved
from easypipe.save.folder import prefix_of
from easypipe.stages.config import settings_of
from easypipe.stages.source.config import DatasetConfig

KEYS = ("config", "stages", "folder", "unknown")
STAGES = ("tokenize", "mix", "pack", "save")

log = logging.getLogger("easypipe")


@dataclasses.dataclass(frozen=True)
class Chain:
    """A chain of stages, which writes the build records of its datasets.

    What is common to all records is computed once.

    Attributes:
        stages: The stages after source().
        context: The context of the pipeline.
    """

    stages: Sequence[BaseStage]
    context: PipelineContext

    def remember(
        self, name: str, folder: CacheFolder | None = None, dataset: DatasetConfig | None = None
    ) -> None:
        """Writes the build record, unless the folder is read-only or has a sufficient one.

        Args:
            name: The name of the file; see the top of this module.
            folder: The folder to write into; None takes the pipeline's.
            dataset: The only dataset that `name` was made from; None: all are needed.
        """
        kept: CacheFolder | None = self.context.cache
        own = CacheFolder(self.context.cache_dir) if kept is None else kept
        here = own if folder is None else folder
        try:
            if _read(here, name).get("unknown", "?"):
                remember_checked(_path(here, name), self._described(dataset), here.options)
        except StorageError as error:
            log.info("`easypipe verify --repair` will have to be given the config: %s", error)

    def _described(self, dataset: DatasetConfig | None) -> JsonObject:
        """Returns the build record of one dataset, or of all."""
        config, stages, reasons = self._shared
        own = settings_of(self.context).datasets if dataset is None else (dataset,)
        reasons = reasons or [
            f"datasets[{i}].data_files are rows in memory"
            for i, one in enumerate(own)
            if one.in_memory
        ]
        reasons = reasons or _reasons({"datasets": own}, "")
        return {
            "config": None if reasons else {**config, "datasets": to_dict(own)},
            "stages": stages,
            "folder": os.getcwd(),
            "unknown": "; ".join(reasons),
        }

    @functools.cached_property
    def _shared(self) -> tuple[JsonObject, list[Any], list[str]]:
        """Returns (the config without its datasets, the stages, why these are not enough)."""
        # `pack` stays in the config, because tokenize() uses it to cut conversations
        without = {name: None for name in (*STAGES, "load") if name != "pack"}
        config = fields_of(settings_of(self.context), secret=False)
        config |= {**without, "datasets": None, "executor": "local"}
        reasons = [
            f"its chain has a stage of Python, {stage.name!r}"
            for stage in self.stages
            if stage.name not in STAGES
        ]
        reasons = reasons or [
            reason
            for value in (config, *(stage.config for stage in self.stages))
            for reason in _reasons(value, "")
        ]
        stages = [] if reasons else [[one.name, to_dict(one.config)] for one in self.stages]
        return to_dict(config), stages, reasons


def recall(name: str, folder: CacheFolder) -> Json:
    """Reads the build record that `Chain.remember` wrote.

    Raises:
        ConfigError: There is no record, or it is not enough to make the data again; the message
            says what to give.
    """
    fix = "Give the config that made it: easypipe verify PATH CONFIG.YAML --repair."
    kept = _read(folder, name)
    if not kept:
        problem = "is not there, so what made this is unknown"
        fix = f"Set EASYPIPE_CACHE to the cache folder that it was made with. Or: {fix}"
        raise ConfigError(at=str(_path(folder, name)), problem=problem, fix=fix)
    require(not kept["unknown"], str(_path(folder, name)), kept["unknown"], fix)
    require(
        Path(kept["folder"]).is_dir(),
        str(_path(folder, name)),
        f"was made in {kept['folder']}, which is gone",
        fix,
    )
    return kept


def recall_saved(path: str, folder: CacheFolder) -> Json:
    """Reads the build record of a saved folder.

    If the folder's manifest cannot be read, the names of its shards identify the record.
    """
    try:
        fingerprint = saved.read_manifest(path).fingerprint
    except EasypipeError:  # the manifest is broken
        known = [
            name.removesuffix(".json")
            for name in storage.names_in(folder.at(CONFIGS), folder.options)
        ]
        shards = storage.names_in(path)
        fits = [
            name for name in known if any(shard.startswith(prefix_of(name)) for shard in shards)
        ]
        fingerprint = fits[0] if len(fits) == 1 else "unknown"
    return recall(fingerprint, folder)


def _path(folder: CacheFolder, name: str) -> Path | str:
    return folder.at(CONFIGS, f"{name}.json")


def _read(folder: CacheFolder, name: str) -> Json:
    """Returns a build record; {} if there is none or it cannot be read."""
    try:
        kept = recall_checked(
            _path(folder, name),
            dict,
            what="the config of a cache",
            storage_options=folder.options,
            older=KEYS,
        )
    except StorageError:  # the record is written again when the data is made again
        return {}
    return kept if kept is not None and set(KEYS) <= kept.keys() else {}


def _reasons(value: Any, at: str) -> list[str]:
    """Returns why plain values cannot express everything in `value`."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = fields_of(value, secret=False)
    if isinstance(value, Mapping):
        code = [
            f"{at}{key} runs code" for key in value if key in CODE_KEYS and value[key] is not None
        ]
        return code or [
            reason for key, one in value.items() for reason in _reasons(one, f"{at}{key}.")
        ]
    if isinstance(value, list | tuple):
        return [
            reason
            for i, one in enumerate(value)
            for reason in _reasons(one, f"{at.rstrip('.')}[{i}].")
        ]
    if isinstance(value, str) and public_url(value) != value:
        return [f"{at.rstrip('.')} is an address with credentials"]
    plain = value is None or isinstance(value, bool | int | float | str | Path)
    return [] if plain else [f"{at.rstrip('.')} is a {type(value).__name__} in memory"]
