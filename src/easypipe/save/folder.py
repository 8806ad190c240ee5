"""The state machine of an output folder: empty, under way, complete; and whose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from easypipe.core import storage
from easypipe.core.checked import checked_json, commit_checked, recall_checked
from easypipe.core.errors import CacheError, ConfigError
from easypipe.save.saved import MANIFEST, SavedManifest, SavedShard, join, read_manifest

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
    takes_over: bool = False  # somebody's claim stands there, and is to be replaced
    # the rows of its shards, where an earlier process planned them
    edges: tuple[int, ...] | None = None
    storage_options: dict[str, Any] | None = field(default=None, repr=False)

    @property
    def prefix(self) -> str:
        return prefix_of(self.fingerprint)

    def standing(self) -> tuple[SavedShard, ...] | None:
        """The shards of a complete run, None where it is not, or where a file of it is gone or of
        another size.
        """
        if self.manifest is None or not all(
            self._has_size(shard) for shard in self.manifest.shards
        ):
            return None
        return self.manifest.shards

    def finished(self, names: Sequence[str]) -> dict[str, SavedShard]:
        """Those of `names` that stand as they were committed."""
        known = (
            {shard.name: shard for shard in self.manifest.shards}
            if self.manifest is not None
            else {}
        )
        found = {name: known.get(name) or self._recorded(name) for name in names}
        return {
            name: shard
            for name, shard in found.items()
            if shard is not None and self._stands(shard)
        }

    def record(self, shard: SavedShard) -> None:
        commit_checked(self._record_path(shard.name), asdict(shard), self.storage_options)

    def commit(self, manifest: SavedManifest) -> None:
        """The manifest last; then what was only needed on the way, and what it replaces, goes.

        Raises ConfigError where another run has taken the folder meanwhile: its shards would go,
        and this manifest name what is gone.
        """
        if storage.is_remote(self.folder):
            found = open_run(
                self.folder, self.fingerprint, overwrite=False, storage_options=self.storage_options
            )
            if not found.claimed and found.manifest is None:
                raise ConfigError(
                    at=f"save.output_dir={self.folder}",
                    problem="was emptied while rows were written there",
                    fix="Save again, alone.",
                )
        commit_checked(join(self.folder, MANIFEST), manifest.to_json(), self.storage_options)
        self.tidy()

    def tidy(self) -> None:
        """Removes what a complete run does not need: what it replaced, its claim and its records. A
        killed process may have left them.
        """
        there = storage.names_in(self.folder, self.storage_options)
        for name in [*self.replaces, RUN, RECORDS]:
            if name in there:
                storage.remove(join(self.folder, name), self.storage_options)

    def claim(self, edges: Sequence[int]) -> None:
        """Says whose the folder is and which rows its shards hold, before the first one is written.
        The first to say so has it: raises ConfigError where another run was quicker.

        The edges are kept because sizes on disk are measured: the next process may have another
        version of the codec.
        """
        if not self.claimed or self.edges is None:
            claim = {
                "fingerprint": self.fingerprint,
                "replaces": list(self.replaces),
                "edges": [int(edge) for edge in edges],
            }
            path, data = join(self.folder, RUN), checked_json(claim)
            # a local folder is locked
            if self.claimed or self.takes_over or not storage.is_remote(self.folder):
                storage.commit_bytes(path, data, self.storage_options)
            elif not storage.create_bytes(path, data, self.storage_options):
                raise ConfigError(
                    at=f"save.output_dir={self.folder}",
                    problem="another run began to write there at the same time",
                    fix="Choose another folder, or save again when it has ended.",
                )
        if not storage.is_remote(self.folder):
            storage.sweep(self.folder.removeprefix("file://"))

    def _recorded(self, name: str) -> SavedShard | None:
        return recall_checked(
            self._record_path(name),
            lambda record: SavedShard(**record),
            what="the record of a saved shard",
            storage_options=self.storage_options,
            older=[entry.name for entry in fields(SavedShard)],
        )

    def _stands(self, shard: SavedShard) -> bool:
        path = join(self.folder, shard.name)
        if storage.is_remote(path) or not self._has_size(shard):
            return self._has_size(shard)
        return storage.checksum(path.removeprefix("file://")).checksum == shard.checksum

    def _has_size(self, shard: SavedShard) -> bool:
        return (
            storage.size_of(join(self.folder, shard.name), self.storage_options) == shard.num_bytes
        )

    def _record_path(self, name: str) -> str:
        return join(join(self.folder, RECORDS), f"{name}.json")


def prefix_of(fingerprint: str) -> str:
    return f"part-{fingerprint[:8]}-"


def open_run(
    folder: str,
    fingerprint: str,
    *,
    overwrite: bool,
    before: str | None = None,
    storage_options: dict[str, Any] | None = None,
) -> Run:
    """What `fingerprint` finds in the folder: nothing, its earlier claim, or its complete run.
    Changes nothing.

    before: what easypipe 0.1 called the same config, so that a refusal can say why its folder is
    not taken for this run. Raises ConfigError where something else is there and `overwrite` is
    False. Files that no run wrote are never removed.
    """
    names = storage.names_in(folder, storage_options)
    manifest, claim = (
        _manifest(folder, names, overwrite, storage_options),
        _claim(folder, names, fingerprint, storage_options),
    )
    if claim is not None and claim["fingerprint"] == fingerprint:
        own = manifest if manifest is not None and manifest.fingerprint == fingerprint else None
        edges = claim["edges"]
        return Run(
            folder=folder,
            fingerprint=fingerprint,
            manifest=own,
            replaces=claim["replaces"],
            claimed=True,
            edges=None if edges is None else tuple(edges),
            storage_options=storage_options,
        )
    if manifest is not None and manifest.fingerprint == fingerprint and claim is None:
        return Run(
            folder=folder,
            fingerprint=fingerprint,
            manifest=manifest,
            replaces=(),
            claimed=False,
            edges=manifest.edges,
            storage_options=storage_options,
        )
    if names and not overwrite:
        raise _occupied(folder, names, manifest, claim, before)
    replaces = {shard.name for shard in manifest.shards} if manifest is not None else set()
    if claim is not None:
        replaces |= {name for name in names if name.startswith(prefix_of(claim["fingerprint"]))}
    replaces = sorted(name for name in replaces if not name.startswith(prefix_of(fingerprint)))
    return Run(
        folder=folder,
        fingerprint=fingerprint,
        manifest=None,
        replaces=replaces,
        claimed=False,
        takes_over=claim is not None,
        storage_options=storage_options,
    )


def _manifest(
    folder: str, names: Sequence[str], overwrite: bool, storage_options: dict[str, Any] | None
) -> SavedManifest | None:
    if MANIFEST not in names:
        return None
    try:
        return read_manifest(folder, storage_options)
    except CacheError:
        if overwrite:
            return None  # what cannot be read is replaced, as asked
        raise


def _claim(
    folder: str, names: Sequence[str], fingerprint: str, storage_options: dict[str, Any] | None
) -> dict[str, Any] | None:
    """Whose folder it is, None where nobody says so. Where the claim is damaged, the names of its
    shards tell.
    """
    if RUN not in names:
        return None
    found = recall_checked(
        join(folder, RUN),
        lambda claim: {
            "fingerprint": claim["fingerprint"],
            "replaces": claim["replaces"],
            "edges": claim.get("edges"),
        },
        what="the claim of a saved run",
        storage_options=storage_options,
        older=("fingerprint", "replaces", "edges"),
    )
    if found is not None:
        return found
    own = set(names) <= {RUN, RECORDS} or any(
        name.startswith(prefix_of(fingerprint)) for name in names
    )
    return {"fingerprint": fingerprint if own else "unknown", "replaces": [], "edges": None}


def _occupied(
    folder: str,
    names: Sequence[str],
    manifest: SavedManifest | None,
    claim: Mapping[str, Any] | None,
    before: str | None,
) -> ConfigError:
    if manifest is not None and manifest.fingerprint == before:
        what = "holds the same rows in shards of another size: max_shard_size counted bytes before compression when they were written"
    elif manifest is not None:
        what = f"holds another saved run: {manifest.num_rows:,} rows in {len(manifest.shards)} {manifest.format} shards"
    elif claim is not None:
        what = f"holds an unfinished run of something else (fingerprint {claim['fingerprint'][:8]})"
    else:
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        what = f"is not empty: {shown}"
    return ConfigError(
        at=f"save.output_dir={folder}",
        problem=what,
        fix="Choose another folder, or set overwrite=True to replace it.",
    )
