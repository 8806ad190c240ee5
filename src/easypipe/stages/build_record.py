"""The build record: what a cache or saved folder was made by, kept so that it can be made again.

configs/<name>.json   name: the key of a manifest of that cache, or the fingerprint of a saved
folder {"config": a PipelineConfig without its stages, "stages": [[name, config], ...] behind
source(), "folder": that relative paths start from,
 "unknown": why it cannot be made again from this file alone, "" where it can}

It is a convenience beside the data and no part of it: equal rows make equal folders, whoever made
them from whatever files. Credentials are left out, and so is whatever runs code.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from easypipe.cache.folder import CONFIGS, CacheFolder
from easypipe.core import storage
from easypipe.core.checked import recall_checked, remember_checked
from easypipe.core.config import CODE_KEYS, fields_of, to_dict
from easypipe.core.errors import ConfigError, EasypipeError, StorageError
from easypipe.core.protocols import BaseStage, PipelineContext
from easypipe.core.remote import public_url
from easypipe.core.values import Json, JsonObject
from easypipe.save import saved
from easypipe.save.folder import prefix_of
from easypipe.stages.config import settings_of

KEYS = ("config", "stages", "folder", "unknown")
STAGES = ("tokenize", "mix", "pack", "save")

log = logging.getLogger("easypipe")


def remember(
    name: str,
    stages: Sequence[BaseStage],
    context: PipelineContext,
    folder: CacheFolder | None = None,
    dataset: str | None = None,
) -> None:
    """Keeps it, where the folder can be written to.

    Args:
        name: Of the file, see above.
        stages: Behind source().
        context: Of the pipeline.
        folder: None takes the pipeline's.
        dataset: The only one that `name` was made of; None: all are needed.
    """
    own: CacheFolder = CacheFolder(context.cache_dir) if context.cache is None else context.cache
    here = own if folder is None else folder
    path = _path(here, name)
    try:
        if not _read(here, name).get("unknown", "?"):
            return
        if isinstance(path, Path) and path.parent.is_dir():
            storage.sweep(path.parent)  # a killed process may have left half of one
        remember_checked(path, _described(stages, context, dataset), here.options)
    except StorageError as error:
        log.info("`easypipe verify --repair` will have to be given the config: %s", error)


def recall(name: str, folder: CacheFolder) -> Json:
    """What `remember` kept. Raises ConfigError where there is nothing, or where it is not enough,
    saying what to give.
    """
    fix = "Give the config that made it: easypipe verify PATH CONFIG.YAML --repair."
    kept = _read(folder, name)
    if not kept:
        problem = "is not there, so nobody knows what made this"
        fix = f"Set EASYPIPE_CACHE to the cache folder that it was made with. Or: {fix}"
        raise ConfigError(at=str(_path(folder, name)), problem=problem, fix=fix)
    if kept["unknown"]:
        raise ConfigError(at=str(_path(folder, name)), problem=kept["unknown"], fix=fix)
    if not Path(kept["folder"]).is_dir():
        problem = f"was made in {kept['folder']}, which is gone"
        raise ConfigError(at=str(_path(folder, name)), problem=problem, fix=fix)
    return kept


def recall_saved(path: str, folder: CacheFolder) -> Json:
    """`recall` for a saved folder; where its manifest cannot be read, the names of its shards
    tell.
    """
    try:
        fingerprint = saved.read_manifest(path).fingerprint
    except EasypipeError:  # that is what is broken
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
    try:
        kept = recall_checked(
            _path(folder, name),
            dict,
            what="the config of a cache",
            storage_options=folder.options,
            older=KEYS,
        )
    except StorageError:  # it is written again when the data is made again
        return {}
    return kept if kept is not None and set(KEYS) <= kept.keys() else {}


def _described(
    stages: Sequence[BaseStage], context: PipelineContext, dataset: str | None
) -> JsonObject:
    # by which tokenize() cuts conversations
    without = {name: None for name in (*STAGES, "load") if name != "pack"}
    config = settings_of(context)
    own = [one for one in config.datasets if one.name == dataset] or config.datasets
    config = dataclasses.replace(config, **without, datasets=own, executor="local")
    reasons = [
        f"its chain has a stage of Python, {stage.name!r}"
        for stage in stages
        if stage.name not in STAGES
    ]
    reasons += [
        f"datasets[{i}].data_files are rows in memory"
        for i, dataset in enumerate(config.datasets)
        if dataset.in_memory
    ]
    reasons = reasons or [
        reason
        for value in (config, *(stage.config for stage in stages))
        for reason in _reasons(value, "")
    ]
    return {
        "config": None if reasons else to_dict(config),
        "stages": [] if reasons else [[stage.name, to_dict(stage.config)] for stage in stages],
        "folder": os.getcwd(),
        "unknown": "; ".join(reasons),
    }


def _reasons(value: Any, at: str) -> list[str]:
    """Why plain values do not say it all."""
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
