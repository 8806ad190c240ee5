"""Verifies saved folders and their packed rows; passes caches and checkpoints to their verifiers.

It changes nothing; stages/prepare.py repairs what is found.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from easypipe.cache.config import CacheConfig
from easypipe.cache.folder import CacheFolder
from easypipe.cache.location import cache_folder
from easypipe.cache.repair import place_of
from easypipe.cache.verify import (
    Problem,
    Verification,
    check_tokenizer,
    verify_manifest,
    verify_records,
    wrong_bytes,
)
from easypipe.core import storage
from easypipe.core.errors import EasypipeError, MissingFileError, require
from easypipe.core.protocols import TokenInfo
from easypipe.core.remote import StorageOptions
from easypipe.core.schema import INPUT_IDS, SEGMENT_IDS
from easypipe.save import saved
from easypipe.save.folder import RUN
from easypipe.train.checkpoint import files as checkpoint_files

BATCH_ROWS = 4096
CHECKPOINT = "checkpoint"


def verify(path: str | Path, storage_options: StorageOptions = None) -> tuple[Verification, ...]:
    """Verifies everything in `path`, reading every byte.

    Args:
        path: A token cache (its folder, or one manifest in it); a saved folder, or a folder of
            saved folders; or the output_dir of a run, its folder of checkpoints, or one of them.
        storage_options: Passed to fsspec, for a remote path.

    Raises:
        ConfigError: There is nothing to verify.
    """
    text = str(path)
    place = cache_folder_of(path, storage_options)
    if place is not None:
        folder, key = place
        if key is not None:
            return (verify_manifest(folder, key),)
        names = storage.names_in(folder.at("manifests"), storage_options)
        keys = [name.removesuffix(".json") for name in names if name.endswith(".json")]
        return (*(verify_manifest(folder, key) for key in keys), *verify_records(folder))
    local = None if storage.is_remote(text) else Path(place_of(path))
    if local and (checkpoints := checkpoint_files.checkpoints_below(local)):
        return tuple(map(_checkpoint, checkpoints))
    folders = _saved_folders(text, storage_options)
    require(
        folders,
        text or "''",
        "is neither a token cache, nor a folder that save() wrote, nor the output_dir of "
        "a run with checkpoints",
        "Give one of those.",
    )
    return tuple(_saved(folder, storage_options) for folder in folders)


def cache_folder_of(
    path: str | Path, storage_options: StorageOptions = None
) -> tuple[CacheFolder, str | None] | None:
    """Returns (the token cache at `path`, the key of the manifest if `path` is one).

    It is None if `path` is not a token cache.
    """
    text = place_of(path)
    root, _, name = text.rpartition("/manifests/")
    key = (
        name.removesuffix(".json")
        if root and name.endswith(".json") and storage.exists(text, storage_options)
        else None
    )
    if key is None and "manifests" not in storage.names_in(text, storage_options):
        return None
    return cache_folder(
        text if key is None else root, CacheConfig(storage_options=storage_options)
    ), key


def _checkpoint(folder: Path) -> Verification:
    """Verifies a checkpoint."""
    found = checkpoint_files.check(folder)
    problems = [
        Problem(at=str(folder / name), what=what, file=str(folder / name))
        for name, what in found.problems.items()
    ]
    old = "no checksums: an earlier version saved it, so only the presence of its parts was checked"
    return Verification(
        path=str(folder),
        kind=CHECKPOINT,
        dataset="",
        files=found.files,
        num_bytes=found.num_bytes,
        problems=tuple(problems),
        notes=() if found.sealed else (old,),
    )


def _saved_folders(path: str, storage_options: StorageOptions) -> list[str]:
    """Returns the saved folders at or in `path`."""
    below = storage.names_in(path, storage_options)
    if saved.MANIFEST in below or RUN in below:
        return [path]
    folders = [saved.join(path, name) for name in below]
    return [
        folder
        for folder in folders
        if storage.exists(saved.join(folder, saved.MANIFEST), storage_options)
    ]


def _saved(folder: str, storage_options: StorageOptions) -> Verification:
    """Verifies a saved folder: its manifest, its shards' bytes and rows, and its tokenizer."""
    path = saved.join(folder, saved.MANIFEST)
    dataset = folder.rstrip("/").rpartition("/")[2]
    try:
        manifest = saved.read_manifest(folder, storage_options)
    except EasypipeError as error:
        at, what = path, f"the manifest is {error.problem}"
        if isinstance(error, MissingFileError):
            at, what = (
                folder,
                "unfinished: it has no manifest yet; run the job that writes it again",
            )
        problem = Problem(at=at, what=what, file=path)
        return Verification(path=folder, kind="saved rows", dataset=dataset, problems=(problem,))
    problems: list[Problem] = []
    rows, tokens = manifest.num_rows, manifest.num_tokens
    leaks = [
        entry
        for entry in manifest.ledger.get("entries", ())
        if sum(entry["in"].values()) != sum(entry["out"].values())
    ]
    if leaks:
        what = f"the manifest is damaged: its ledger does not add up: {leaks[0]}"
        problems.append(Problem(at=path, what=what, file=path))
    for shard in manifest.shards:
        at = saved.join(folder, shard.name)
        wrong = wrong_bytes(at, shard.num_bytes, shard.checksum, storage_options)
        if wrong is not None:
            problems.append(Problem(at=at, what=wrong, file=at))
    if not problems:  # a folder with problems cannot be opened
        problems += _saved_rows(folder, manifest, storage_options)
    notes: tuple[str, ...] = ()
    if manifest.tokens is not None:
        more, notes = check_tokenizer(manifest.tokens, path)
        problems += more
    return Verification(
        path=folder,
        kind="saved rows",
        dataset=dataset,
        files=len(manifest.shards),
        num_bytes=manifest.num_bytes,
        rows=rows,
        tokens=tokens,
        problems=tuple(problems),
        notes=notes,
    )


def _saved_rows(
    folder: str, manifest: saved.SavedManifest, storage_options: StorageOptions
) -> Iterator[Problem]:
    """Yields problems with counts and columns of shards whose bytes are right."""
    path = saved.join(folder, saved.MANIFEST)
    try:
        source = saved.SavedSource(folder, storage_options)
        for i, (shard, info) in enumerate(zip(source.saved, source.shards, strict=True)):
            rows = tokens = 0
            for start in range(0, info.num_rows or 0, BATCH_ROWS):
                batch = source.read(i, start, min(start + BATCH_ROWS, info.num_rows or 0))
                rows += batch.num_rows
                tokens += saved.count_tokens(batch)
                if source.packed and manifest.tokens is not None:
                    yield from _wrong_slots(batch, manifest.tokens, path)
            if (rows, tokens) != (shard.num_rows, shard.num_tokens):
                what = (
                    f"holds {rows} rows of {tokens} tokens, the manifest says {shard.num_rows} "
                    f"of {shard.num_tokens}"
                )
                yield Problem(
                    at=saved.join(folder, shard.name),
                    what=f"{what}, though its checksum is right",
                    file=path,
                )
    except (EasypipeError, pa.ArrowException, KeyError) as error:
        yield Problem(
            at=folder,
            what=f"its rows are not in the columns that the manifest names: {error}",
            file=path,
        )


def _wrong_slots(batch: pa.RecordBatch, told: TokenInfo, path: str) -> Iterator[Problem]:
    """Yields problems if packed rows differ from the manifest in slots or padding."""
    ids = batch.column(INPUT_IDS)
    sizes = ids.value_lengths().unique().to_pylist()
    if told.seq_length is not None and sizes != [told.seq_length]:
        what = f"its rows have {sizes} slots, the manifest says {told.seq_length}"
        yield Problem(at=path, what=what, file=path)
    unused = batch.column(SEGMENT_IDS).flatten().to_numpy() == 0
    padding = np.unique(ids.flatten().to_numpy()[unused]).tolist()
    if padding not in ([], [told.pad_token_id or 0]):
        what = f"its rows are padded with {padding}, the manifest says {told.pad_token_id}"
        yield Problem(at=path, what=what, file=path)
