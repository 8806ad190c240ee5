"""What lies in a cache folder, and removing it: by manifest, with whatever no other manifest needs.

in use    an open reader holds the lock of its manifest (core/locks.py); such a dataset is never removed
leftovers records, tokens and plans that no manifest names: of preparations that did not finish, or of files that changed since
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from easypipe.core import locks, storage
from easypipe.core.errors import CacheError, ConfigError, EasypipeError, did_you_mean
from easypipe.sources.manifest import Manifest, read_manifest
from easypipe.stages.ranges import read_record
from easypipe.stages.verify import manifests


@dataclass(frozen=True, kw_only=True)
class CachedDataset:
    """One manifest; None where it cannot be read. num_bytes: of its token files, which others may share. age_s: since it was prepared."""

    path: Path
    dataset: str
    rows: int
    documents: int
    tokens: int
    num_bytes: int
    tokenizer: str
    age_s: float
    in_use: bool
    manifest: Manifest | None


@dataclass(frozen=True, kw_only=True)
class CacheListing:
    """num_bytes: of the whole folder. leftover_bytes: of what no manifest names."""

    path: Path
    datasets: tuple[CachedDataset, ...]
    num_bytes: int
    leftover_bytes: int


@dataclass(frozen=True, kw_only=True)
class Cleared:
    """removed, kept: names of datasets; kept are those that an open reader uses. num_bytes, files: that were removed, or would be."""

    removed: tuple[str, ...]
    kept: tuple[str, ...]
    files: int
    num_bytes: int


def list_cache(cache_dir: Path) -> CacheListing:
    """What the cache folder holds; an empty listing where there is no folder. Changes nothing."""
    datasets = tuple(_describe(path) for path in manifests(cache_dir))
    files = [path for path in cache_dir.rglob("*") if path.is_file()] if cache_dir.is_dir() else []
    leftover = _unnamed(cache_dir, datasets)
    return CacheListing(path=cache_dir, datasets=datasets, num_bytes=_bytes(files), leftover_bytes=_bytes(leftover))


def clear_cache(
    cache_dir: Path, *, older_than_days: float | None = None, datasets: Sequence[str] | None = None, dry_run: bool = False
) -> Cleared:
    """Removes the datasets that were prepared more than `older_than_days` ago and are called one of `datasets`; None asks for all.

    With them goes what no remaining dataset needs; where nothing limits the choice, leftovers, plans and indexes go too. What a reader has
    open stays. Raises ConfigError for a name that is not there, CacheError where somebody prepares in this folder.
    """
    if older_than_days is not None and older_than_days < 0:
        raise ConfigError(at="--older-than", problem=f"{older_than_days} days are no age", fix="Give 0 or more.")
    if not cache_dir.is_dir():
        return Cleared(removed=(), kept=(), files=0, num_bytes=0)
    with _alone(cache_dir):
        known = [_describe(path) for path in manifests(cache_dir)]
        for name in datasets or ():
            if name not in {one.dataset for one in known}:
                names = sorted({one.dataset for one in known})
                raise ConfigError(at="--dataset", problem=f"no dataset {name!r} in {cache_dir}", have=names, fix=did_you_mean(name, names))
        least = None if older_than_days is None else older_than_days * 86_400
        chosen = [one for one in known if (least is None or one.age_s >= least) and (datasets is None or one.dataset in datasets)]
        held = {one.path: locks.try_hold(locks.reader_lock(cache_dir, one.path.stem), exclusive=True) for one in chosen}
        try:
            going = [one for one in chosen if held[one.path] is not None]
            staying = [one for one in known if one not in going]
            everything = older_than_days is None and datasets is None
            files = _going(cache_dir, going, staying, everything=everything)
            size = _bytes(files)
            if not dry_run:
                for file in files:  # manifests first: what they name is then no longer promised
                    file.unlink(missing_ok=True)
                for one in going:
                    locks.remove(locks.reader_lock(cache_dir, one.path.stem))
                    locks.remove(locks.writer_lock(cache_dir, one.path.stem))
                _remove_empty_folders(cache_dir)
        finally:
            for hold in held.values():
                if hold is not None:
                    hold.release()
    kept = tuple(one.dataset for one in chosen if one not in going)
    return Cleared(removed=tuple(one.dataset for one in going), kept=kept, files=len(files), num_bytes=size)


def _alone(cache_dir: Path) -> locks.Hold:
    work = locks.work_lock(cache_dir)
    held = locks.try_hold(work, exclusive=True)
    if held is None:
        raise CacheError(at=str(cache_dir), problem="a process prepares data in it right now", fix="Clear it when that has ended.")
    return held


def _describe(path: Path) -> CachedDataset:
    cache_dir, age = path.parent.parent, max(0.0, time.time() - path.stat().st_mtime)
    lock = locks.reader_lock(cache_dir, path.stem)
    held = locks.try_hold(lock, exclusive=True) if lock.exists() else None
    in_use = lock.exists() and held is None
    if held is not None:
        held.release()
    try:
        m = read_manifest(path)
    except EasypipeError:
        return CachedDataset(
            path=path, dataset="?", rows=0, documents=0, tokens=0, num_bytes=0, tokenizer="?", age_s=age, in_use=in_use, manifest=None
        )
    return CachedDataset(
        path=path,
        dataset=m.dataset,
        rows=m.counts.rows,
        documents=m.counts.docs,
        tokens=m.counts.tokens,
        num_bytes=sum({part.file: part.num_bytes for part in m.parts}.values()),
        tokenizer=m.tokenizer.name,
        age_s=age,
        in_use=in_use,
        manifest=m,
    )


def _going(cache_dir: Path, going: Sequence[CachedDataset], staying: Sequence[CachedDataset], *, everything: bool) -> list[Path]:
    """Files to remove, manifests first."""
    needed = _token_files(staying)
    tokens = _token_files(going) - needed
    if any(one.manifest is None for one in staying):  # nobody knows what it names, so no leftover is surely one
        everything = False
    named = [one.path for one in going] + [one.path.with_suffix(".quarantine.jsonl") for one in going]
    if everything:
        rest = _unnamed(cache_dir, staying)
        if not staying:
            rest += [path for folder in ("plans", "indexes") for path in (cache_dir / folder).rglob("*") if path.is_file()]
        rest = [path for path in rest if path not in named]
    else:
        rest = [cache_dir / "tokens" / file for file in sorted(tokens)]
        records = _records(cache_dir) if tokens else ()
        rest += [path for path, file in records if file in tokens]
    return [path for path in (*named, *rest) if path.exists()]


def _unnamed(cache_dir: Path, datasets: Sequence[CachedDataset]) -> list[Path]:
    """Token files that no manifest names and the records of such, quarantine files without a manifest, and plans of nobody."""
    needed = _token_files(datasets)
    found = [path for path, file in _records(cache_dir) if (file not in needed if file else not datasets)]
    root = cache_dir / "tokens"
    found += [path for path in root.rglob("*.arrow") if not _temporary(path) and path.relative_to(root).as_posix() not in needed]
    stems = {one.path.stem for one in datasets}
    suffix = ".quarantine.jsonl"
    found += [path for path in (cache_dir / "manifests").glob(f"*{suffix}") if path.name.removesuffix(suffix) not in stems]
    return found


def _records(cache_dir: Path) -> Iterable[tuple[Path, str | None]]:
    """(path, token file) of every range; "" where the range has no documents, None where the record cannot be read."""
    for path in sorted((cache_dir / "ranges").glob("*/*.json")):
        if not _temporary(path):
            record = read_record(path)
            yield path, None if record is None else record.file


def _token_files(datasets: Sequence[CachedDataset]) -> set[str]:
    return {part.file for one in datasets if one.manifest is not None for part in one.manifest.parts if part.file}


def _temporary(path: Path) -> bool:
    return path.name.startswith(storage.TEMPORARY)


def _bytes(files: Iterable[Path]) -> int:
    return sum(file.stat().st_size for file in files)


def _remove_empty_folders(cache_dir: Path) -> None:
    for folder in sorted((path for path in cache_dir.rglob("*") if path.is_dir()), reverse=True):
        if folder.name != locks.FOLDER and not any(folder.iterdir()):
            folder.rmdir()
