"""The state machine of an output folder: empty, under way, complete; and whose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from easypipe.core import storage
from easypipe.core.errors import CacheError, ConfigError
from easypipe.stages.saved import MANIFEST, SavedManifest, SavedShard, join, read_manifest

RUN = "_easypipe-run.json"
RECORDS = "_shards"


@dataclass(frozen=True, kw_only=True)
class Run:
    """One fingerprint's claim on a folder."""

    folder: str
    fingerprint: str
    manifest: SavedManifest | None  # of a complete run
    replaces: Sequence[str]  # shard files of an older run, removed after the commit
    claimed: bool

    @property
    def prefix(self) -> str:
        return prefix_of(self.fingerprint)

    def standing(self) -> tuple[SavedShard, ...] | None:
        """The shards of a complete run, None where it is not, or where a file of it is gone or of another size."""
        if self.manifest is None or not all(self._has_size(shard) for shard in self.manifest.shards):
            return None
        return self.manifest.shards

    def finished(self, names: Sequence[str]) -> dict[str, SavedShard]:
        """Those of `names` that stand as they were committed."""
        known = {shard.name: shard for shard in self.manifest.shards} if self.manifest is not None else {}
        found = {name: known.get(name) or self._recorded(name) for name in names}
        return {name: shard for name, shard in found.items() if shard is not None and self._stands(shard)}

    def record(self, shard: SavedShard) -> None:
        storage.commit_json(self._record_path(shard.name), asdict(shard))

    def commit(self, manifest: SavedManifest) -> None:
        """The manifest last; then what was only needed on the way, and what it replaces, goes."""
        storage.commit_json(join(self.folder, MANIFEST), manifest.to_json())
        self.tidy()

    def tidy(self) -> None:
        """Removes what a complete run does not need: what it replaced, its claim and its records. A killed process may have left them."""
        fs, root = storage.filesystem(self.folder)
        for name in [*self.replaces, RUN]:
            if fs.exists(join(root, name)):
                fs.rm_file(join(root, name))
        if fs.exists(join(root, RECORDS)):
            fs.rm(join(root, RECORDS), recursive=True)

    def claim(self) -> None:
        """Says whose the folder is, before the first shard is written."""
        if not self.claimed:
            storage.commit_json(join(self.folder, RUN), {"fingerprint": self.fingerprint, "replaces": list(self.replaces)})
        if not storage.is_remote(self.folder):
            storage.sweep(self.folder.removeprefix("file://"))

    def _recorded(self, name: str) -> SavedShard | None:
        path = self._record_path(name)
        return SavedShard(**storage.read_json(path)) if storage.exists(path) else None

    def _stands(self, shard: SavedShard) -> bool:
        path = join(self.folder, shard.name)
        if storage.is_remote(path) or not self._has_size(shard):
            return self._has_size(shard)
        return storage.checksum(path.removeprefix("file://")).checksum == shard.checksum

    def _has_size(self, shard: SavedShard) -> bool:
        path = join(self.folder, shard.name)
        if not storage.exists(path):
            return False
        fs, name = storage.filesystem(path)
        return int(fs.size(name) or 0) == shard.num_bytes

    def _record_path(self, name: str) -> str:
        return join(join(self.folder, RECORDS), f"{name}.json")


def prefix_of(fingerprint: str) -> str:
    return f"part-{fingerprint[:8]}-"


def open_run(folder: str, fingerprint: str, *, overwrite: bool) -> Run:
    """What `fingerprint` finds in the folder: nothing, its earlier claim, or its complete run. Changes nothing.

    Raises ConfigError where something else is there and `overwrite` is False. Files that no run wrote are never removed.
    """
    names = _names(folder)
    manifest, claim = _manifest(folder, names, overwrite), _claim(folder, names)
    if claim is not None and claim["fingerprint"] == fingerprint:
        own = manifest if manifest is not None and manifest.fingerprint == fingerprint else None
        return Run(folder=folder, fingerprint=fingerprint, manifest=own, replaces=claim["replaces"], claimed=True)
    if manifest is not None and manifest.fingerprint == fingerprint and claim is None:
        return Run(folder=folder, fingerprint=fingerprint, manifest=manifest, replaces=(), claimed=False)
    if names and not overwrite:
        raise _occupied(folder, names, manifest, claim)
    replaces = {shard.name for shard in manifest.shards} if manifest is not None else set()
    if claim is not None:
        replaces |= {name for name in names if name.startswith(prefix_of(claim["fingerprint"]))}
    replaces = sorted(name for name in replaces if not name.startswith(prefix_of(fingerprint)))
    return Run(folder=folder, fingerprint=fingerprint, manifest=None, replaces=replaces, claimed=False)


def _names(folder: str) -> list[str]:
    fs, root = storage.filesystem(folder)
    if not fs.exists(root):
        return []
    found = [str(path).rstrip("/").rpartition("/")[2] for path in fs.ls(root, detail=False)]
    return sorted(name for name in found if name and not name.startswith(storage.TEMPORARY))


def _manifest(folder: str, names: Sequence[str], overwrite: bool) -> SavedManifest | None:
    if MANIFEST not in names:
        return None
    try:
        return read_manifest(folder)
    except CacheError:
        if overwrite:
            return None  # what cannot be read is replaced, as asked
        raise


def _claim(folder: str, names: Sequence[str]) -> dict[str, Any] | None:
    return storage.read_json(join(folder, RUN)) if RUN in names else None


def _occupied(folder: str, names: Sequence[str], manifest: SavedManifest | None, claim: Mapping[str, Any] | None) -> ConfigError:
    if manifest is not None:
        what = f"holds another saved run: {manifest.num_rows:,} rows in {len(manifest.shards)} {manifest.format} shards"
    elif claim is not None:
        what = f"holds an unfinished run of something else (fingerprint {claim['fingerprint'][:8]})"
    else:
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        what = f"is not empty: {shown}"
    return ConfigError(at=f"save.output_dir={folder}", problem=what, fix="Choose another folder, or set overwrite=True to replace it.")
