"""Lists a cache folder's datasets and clears them, with old leftovers that nothing needs.

in use    an open reader holds the lock of its manifest (core/locks.py); such a dataset is never
          removed
leftovers records, tokens and plans that no manifest names: from preparations that did not finish,
          or from files that changed since

Locks do not reach from machine to machine. So in a bucket it is unknown who reads (in_use is
False), and leftovers younger than YOUNG_S stay: they may belong to a preparation that is running.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from easypipe.cache.folder import CONFIGS, CacheFolder, folder_of
from easypipe.cache.manifest import Manifest, read_manifest
from easypipe.cache.ranges import read_record
from easypipe.core import locks, storage
from easypipe.core.errors import CacheError, EasypipeError, few, require, require_known
from easypipe.core.threads import each
from easypipe.core.tree import Found, files_below

YOUNG_S = 86_400.0
REQUESTS = 16  # requests to a store at a time
QUARANTINE = ".quarantine.jsonl"
# Each cache has one of these folders. Other folders may have a configs/ or plans/ of their own,
# whose files would be removed.
_OF_CACHES = {"manifests", "ranges", "indexes", locks.FOLDER}


@dataclass(frozen=True, kw_only=True)
class CachedDataset:
    """One prepared dataset of a cache folder.

    Args:
        path: Its manifest; a URL in a bucket.
        dataset: Its name, "?" if the manifest cannot be read.
        rows: The rows that were read.
        documents: The documents that were kept.
        tokens: Their tokens.
        num_bytes: The bytes of its token files, which other datasets may share.
        tokenizer: The name of its tokenizer.
        age_s: Seconds since it was prepared.
        in_use: Whether an open reader of this machine uses it.
        manifest: None if it cannot be read.
    """

    path: Path | str
    dataset: str = "?"
    rows: int = 0
    documents: int = 0
    tokens: int = 0
    num_bytes: int = 0
    tokenizer: str = "?"
    age_s: float
    in_use: bool
    manifest: Manifest | None

    @property
    def key(self) -> str:
        """The name of the manifest without its extension."""
        return str(self.path).rpartition("/")[2].removesuffix(".json")


@dataclass(frozen=True, kw_only=True)
class CacheListing:
    """The content of a cache folder.

    Args:
        path: The folder.
        datasets: Its datasets.
        num_bytes: The bytes of the whole folder.
        leftover_bytes: The bytes of files that no manifest names.
    """

    path: Path | str
    datasets: tuple[CachedDataset, ...]
    num_bytes: int
    leftover_bytes: int


@dataclass(frozen=True, kw_only=True)
class Cleared:
    """The result of `clear_cache`: what it removed, or would remove.

    Args:
        removed: Names of the datasets that were removed.
        kept: Names of the chosen datasets that an open reader uses.
        files: How many files were removed.
        num_bytes: Their bytes.
    """

    removed: tuple[str, ...]
    kept: tuple[str, ...]
    files: int
    num_bytes: int


def list_cache(cache_dir: Path | CacheFolder) -> CacheListing:
    """Returns the content of the cache folder; an empty listing if there is no folder."""
    folder = folder_of(cache_dir)
    files = files_below(folder.at(), folder.options)
    datasets = _datasets(folder, files)
    leftover = _unnamed(folder, files, datasets)
    return CacheListing(
        path=folder.at(),
        datasets=datasets,
        num_bytes=_bytes(files, files),
        leftover_bytes=_bytes(files, leftover),
    )


def clear_cache(
    cache_dir: Path | CacheFolder,
    *,
    older_than_days: float | None = None,
    datasets: Sequence[str] | None = None,
    dry_run: bool = False,
) -> Cleared:
    """Removes datasets from a cache folder, and what no remaining dataset needs.

    If neither age nor name limits the choice, leftovers, plans and indexes are removed too. Files
    that a reader of this machine has open stay.

    Args:
        cache_dir: The folder.
        older_than_days: Removes only datasets that were prepared at least this many days ago; None:
            any age.
        datasets: Removes only datasets of these names; None: any name.
        dry_run: Removes nothing, and returns what would be removed.

    Raises:
        ConfigError: A dataset of that name does not exist, the age is negative, or the folder has
            content and is no cache.
        CacheError: A process of this machine is preparing in the folder.
    """
    folder = folder_of(cache_dir)
    require(
        older_than_days is None or older_than_days >= 0,
        "--older-than",
        f"{older_than_days} days are not an age",
        "Give 0 or more.",
    )
    if _is_empty(folder):
        return Cleared(removed=(), kept=(), files=0, num_bytes=0)
    with _alone(folder):
        files = files_below(folder.at(), folder.options)
        known = _datasets(folder, files)
        for name in datasets or ():
            have = sorted({one.dataset for one in known})
            require_known(name, have, "--dataset", f"no dataset {name!r} in {folder.at()}")
        least = None if older_than_days is None else older_than_days * 86_400
        chosen = [
            one
            for one in known
            if (least is None or one.age_s >= least)
            and (datasets is None or one.dataset in datasets)
        ]
        with contextlib.ExitStack() as held:
            going = [one for one in chosen if _hold(folder, one.key, held)]
            staying = [one for one in known if one not in going]
            everything = older_than_days is None and datasets is None
            names = _going(folder, files, going, staying, everything=everything)
            if not dry_run:
                _remove(folder, names, [one.key for one in going])
    kept = tuple(one.dataset for one in chosen if one not in going)
    return Cleared(
        removed=tuple(one.dataset for one in going),
        kept=kept,
        files=len(names),
        num_bytes=_bytes(files, names),
    )


def _is_empty(folder: CacheFolder) -> bool:
    """Returns whether a folder has no content.

    Raises:
        ConfigError: It has content and is no cache.
    """
    there = storage.names_in(folder.at(), folder.options)
    require(
        not there or _OF_CACHES & {*there},
        "--cache-dir",
        f"{folder.at()} is no token cache: it holds {', '.join(few(there))}",
        "Give the folder that data was prepared in.",
    )
    return not there


def _alone(folder: CacheFolder) -> contextlib.AbstractContextManager[Any]:
    """Keeps processes of this machine from preparing in the folder; in a bucket it can do nothing.

    Raises:
        CacheError: A process already prepares there.
    """
    if folder.remote:
        return contextlib.nullcontext()
    held = locks.try_hold(locks.work_lock(folder.local), exclusive=True)
    if held is None:
        raise CacheError(
            at=str(folder.local),
            problem="a process prepares data in it right now",
            fix="Clear it when that has ended.",
        )
    return held


def _hold(folder: CacheFolder, key: str, held: contextlib.ExitStack) -> bool:
    """Returns whether no process reads `key`; then readers are kept away until `held` ends.

    Args:
        folder: The cache folder.
        key: The key of the manifest.
        held: Takes the lock, if it was free.
    """
    if folder.remote:
        return True
    mine = locks.try_hold(locks.reader_lock(folder.local, key), exclusive=True)
    if mine is not None:
        held.enter_context(mine)
    return mine is not None


def _remove(folder: CacheFolder, names: Sequence[str], keys: Sequence[str]) -> None:
    """Removes files, manifests first, so that no manifest names a file that is gone."""
    first = [name for name in names if name.startswith("manifests/")]
    for some in (first, [name for name in names if name not in set(first)]):
        _each(
            folder, lambda name: storage.remove(folder.at(*name.split("/")), folder.options), some
        )
    if not folder.remote:
        for key in keys:
            locks.remove(locks.reader_lock(folder.local, key))
            locks.remove(locks.writer_lock(folder.local, key))
        _remove_empty_folders(folder.local)


def _datasets(folder: CacheFolder, files: Mapping[str, Found]) -> tuple[CachedDataset, ...]:
    names = _named(files, "manifests/", ".json")
    return tuple(_each(folder, lambda name: _describe(folder, name, files[name]), names))


def _describe(folder: CacheFolder, name: str, found: Found) -> CachedDataset:
    """Describes the dataset of a manifest."""
    path, age = folder.at(*name.split("/")), max(0.0, time.time() - found.modified)
    key = name.rpartition("/")[2].removesuffix(".json")
    unread = CachedDataset(path=path, age_s=age, in_use=_in_use(folder, key), manifest=None)
    try:
        m = read_manifest(path, folder.options)
    except EasypipeError:
        return unread
    return dataclasses.replace(
        unread,
        dataset=m.dataset,
        rows=m.counts.rows,
        documents=m.counts.docs,
        tokens=m.counts.tokens,
        num_bytes=sum({part.file: part.num_bytes for part in m.parts}.values()),
        tokenizer=m.tokenizer.name,
        manifest=m,
    )


def _in_use(folder: CacheFolder, key: str) -> bool:
    lock = locks.reader_lock(folder.local, key)
    if folder.remote or not lock.exists():
        return False
    held = locks.try_hold(lock, exclusive=True)
    if held is not None:
        held.close()
    return held is None


def _going(
    folder: CacheFolder,
    files: Mapping[str, Found],
    going: Sequence[CachedDataset],
    staying: Sequence[CachedDataset],
    *,
    everything: bool,
) -> list[str]:
    """Returns the files to remove, manifests first.

    Args:
        folder: The cache folder.
        files: All files below it.
        going: The datasets to remove.
        staying: The datasets that stay.
        everything: Whether leftovers, plans and indexes go too.
    """
    tokens = _token_files(going) - _token_files(staying)
    # an unreadable manifest may name any file, so no file is certainly a leftover
    if any(one.manifest is None for one in staying):
        everything = False
    named = [f"manifests/{one.key}{end}" for one in going for end in (".json", QUARANTINE)] + [
        f"{CONFIGS}/{one.key}.json" for one in going
    ]
    if everything:
        rest = [
            name
            for name in _unnamed(folder, files, staying)
            if not _young(folder, files[name]) or name.removeprefix("tokens/") in tokens
        ]
        if not staying:
            rest += [
                name for name in files if name.startswith(("plans/", "indexes/", f"{CONFIGS}/"))
            ]
    else:
        rest = [f"tokens/{file}" for file in sorted(tokens)]
    if tokens:
        rest += [name for name, file in _records(folder, files) if file in tokens]
    return list(dict.fromkeys(name for name in (*named, *rest) if name in files))


def _young(folder: CacheFolder, found: Found) -> bool:
    """Returns whether a file may belong to a preparation that is running on another machine."""
    return folder.remote and time.time() - found.modified < YOUNG_S


def _unnamed(
    folder: CacheFolder, files: Mapping[str, Found], datasets: Sequence[CachedDataset]
) -> list[str]:
    """Returns the leftovers: token files that no manifest names, and what belongs to them."""
    needed, keys = _token_files(datasets), {one.key for one in datasets}
    found = [
        name
        for name, file in _records(folder, files)
        if (file not in needed if file else not datasets)
    ]
    tokens = _named(files, "tokens/", ".arrow")
    found += [name for name in tokens if name.removeprefix("tokens/") not in needed]
    for name in files:
        top, _, rest = name.partition("/")
        if top == "manifests" and rest.endswith(QUARANTINE):
            found += [name] if rest.removesuffix(QUARANTINE) not in keys else []
    return found


def _records(folder: CacheFolder, files: Mapping[str, Found]) -> list[tuple[str, str | None]]:
    """Returns (name of the record, token file) of every range.

    The token file is "" if the range has no documents, None if the record cannot be read.
    """
    names = _named(files, "ranges/", ".json")
    records = _each(
        folder,
        lambda name: read_record(folder.at(*name.split("/")), storage_options=folder.options),
        names,
    )
    return [
        (name, None if record is None else record.part.file)
        for name, record in zip(names, records, strict=True)
    ]


def _each(folder: CacheFolder, work: Any, names: Sequence[str]) -> list[Any]:
    """Returns `work(name)` for every name; several run at a time if each is a request."""
    return each(work, names, REQUESTS, "admin") if folder.remote else [*map(work, names)]


def _token_files(datasets: Sequence[CachedDataset]) -> set[str]:
    return {
        part.file
        for one in datasets
        if one.manifest is not None
        for part in one.manifest.parts
        if part.file
    }


def _named(files: Mapping[str, Found], top: str, ending: str) -> list[str]:
    """Returns the files below `top` with this extension, without temporary files."""
    return [
        name
        for name in files
        if name.startswith(top)
        and name.endswith(ending)
        and not name.rpartition("/")[2].startswith(storage.TEMPORARY)
    ]


def _bytes(files: Mapping[str, Found], names: Collection[str]) -> int:
    return sum(files[name].num_bytes for name in names)


def _remove_empty_folders(cache_dir: Path) -> None:
    for folder in sorted((path for path in cache_dir.rglob("*") if path.is_dir()), reverse=True):
        empty = folder.name != locks.FOLDER and not any(folder.iterdir())
        if empty and not folder.is_symlink():
            folder.rmdir()
