"""The states of an output folder: its run, what else it holds, records of finished files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace

from easypipe.core import storage
from easypipe.core.checked import (
    checked_json,
    commit_checked,
    recall_checked,
    remember_checked,
)
from easypipe.core.errors import CacheError, ConfigError, require
from easypipe.core.remote import StorageOptions
from easypipe.core.visible import first_of
from easypipe.save.saved import MANIFEST, SavedManifest, SavedShard, join, read_manifest

RUN = "_easypipe-run.json"
RECORDS = "_shards"


@dataclass(frozen=True, kw_only=True)
class Claim:
    """The file that says which run a folder belongs to while the run is in progress.

    Attributes:
        fingerprint: The fingerprint of the run.
        replaces: Shard files of an older run, removed after the commit.
        edges: The rows at which its shards begin and end. They are stored because they depend on
            measured sizes, and the next process may have another version of the codec.
    """

    fingerprint: str
    replaces: Sequence[str] = ()
    edges: Sequence[int] | None = None


@dataclass(frozen=True, kw_only=True)
class Run:
    """One fingerprint in a folder.

    Attributes:
        folder: The folder.
        fingerprint: The fingerprint of the rows and how they are saved.
        storage_options: As in SaveStageConfig.
        manifest: The manifest, if its run is complete.
        replaces: As in `Claim`.
        claimed: Whether its own claim is in the folder.
        takes_over: Whether another run's claim is in the folder and will be replaced.
        edges: The rows of its shards, if an earlier process planned them.
    """

    folder: str
    fingerprint: str
    storage_options: StorageOptions = field(default=None, repr=False)
    manifest: SavedManifest | None = None
    replaces: Sequence[str] = ()
    claimed: bool = False
    takes_over: bool = False
    edges: Sequence[int] | None = None

    @property
    def prefix(self) -> str:
        """The beginning of its shards' names."""
        return prefix_of(self.fingerprint)

    def standing(self) -> tuple[SavedShard, ...] | None:
        """Returns the shards of a complete run.

        It is None if the run is not complete, or a file is missing or has a different size.
        """
        if self.manifest is None or not all(map(self._has_size, self.manifest.shards)):
            return None
        return self.manifest.shards

    def finished(self, names: Sequence[str]) -> dict[str, SavedShard]:
        """Returns those of `names` that are in the folder, unchanged since their commit."""
        shards = () if self.manifest is None else self.manifest.shards
        known = {shard.name: shard for shard in shards}
        found = [known.get(name) or self._recorded(name) for name in names]
        return {shard.name: shard for shard in found if shard is not None and self._stands(shard)}

    def record(self, shard: SavedShard) -> None:
        """Records a shard that was committed."""
        remember_checked(self._record_path(shard.name), asdict(shard), self.storage_options)

    def commit(self, manifest: SavedManifest) -> None:
        """Commits the manifest, then removes temporary records and what is replaced.

        Raises:
            ConfigError: Another run has claimed the folder in the meantime. It would remove this
                run's shards, and the manifest would name missing files.
        """
        if storage.is_remote(self.folder):
            found = open_run(
                self.folder, self.fingerprint, overwrite=False, storage_options=self.storage_options
            )
            require(
                found.claimed or found.manifest is not None,
                f"save.output_dir={self.folder}",
                "was emptied while rows were written there",
                "Save again, while no other process writes there.",
            )
        commit_checked(join(self.folder, MANIFEST), manifest.to_json(), self.storage_options)
        self.tidy()

    def tidy(self) -> None:
        """Removes what a complete run does not need: what it replaced, its claim and its records.

        A killed process may have left them.
        """
        there = storage.names_in(self.folder, self.storage_options)
        for name in [*self.replaces, RUN, RECORDS]:
            if name in there:
                storage.remove(join(self.folder, name), self.storage_options)

    def claim(self, edges: Sequence[int]) -> None:
        """Claims the folder before the first shard is written, with the rows that its shards hold.

        Raises:
            ConfigError: Another run was faster; the first claim is valid.
        """
        remote = storage.is_remote(self.folder)  # a local folder is locked
        if not self.claimed or self.edges is None:
            claim = Claim(fingerprint=self.fingerprint, replaces=self.replaces, edges=edges)
            path, data = join(self.folder, RUN), checked_json(asdict(claim))
            if self.claimed or self.takes_over or not remote:
                storage.commit_bytes(path, data, self.storage_options)
            elif not storage.create_bytes(path, data, self.storage_options):
                raise ConfigError(
                    at=f"save.output_dir={self.folder}",
                    problem="another run began to write there at the same time",
                    fix="Choose another folder, or save again when it has ended.",
                )
        if not remote:
            storage.sweep(self.folder.removeprefix("file://"))

    def _recorded(self, name: str) -> SavedShard | None:
        """Returns the record of a shard that was committed earlier, if there is one."""
        return recall_checked(
            self._record_path(name),
            lambda record: SavedShard(**record),
            what="the record of a saved shard",
            storage_options=self.storage_options,
            older=[entry.name for entry in fields(SavedShard)],
        )

    def _stands(self, shard: SavedShard) -> bool:
        """Returns whether a shard has its size, and, if it is local, its checksum."""
        path = join(self.folder, shard.name)
        return self._has_size(shard) and (
            storage.is_remote(path)
            or storage.checksum(path.removeprefix("file://")).checksum == shard.checksum
        )

    def _has_size(self, shard: SavedShard) -> bool:
        size = storage.size_of(join(self.folder, shard.name), self.storage_options)
        return size == shard.num_bytes

    def _record_path(self, name: str) -> str:
        return join(self.folder, f"{RECORDS}/{name}.json")


def prefix_of(fingerprint: str) -> str:
    """Returns the beginning of the names of a run's shards."""
    return f"part-{fingerprint[:8]}-"


def _held(
    names: Sequence[str], manifest: SavedManifest | None, claim: Claim | None, before: str | None
) -> str:
    """Returns, in words, what a folder holds that is not this run."""
    if manifest is not None and manifest.fingerprint == before:
        return (
            "holds the same rows in shards of another size: max_shard_size counted bytes before "
            "compression when they were written"
        )
    if manifest is not None:
        return (
            f"holds another saved run: {manifest.num_rows:,} rows in {len(manifest.shards)} "
            f"{manifest.format} shards"
        )
    if claim is not None:
        return f"holds an unfinished run of something else (fingerprint {claim.fingerprint[:8]})"
    return f"is not empty: {first_of(names, 5)}"


def open_run(
    folder: str,
    fingerprint: str,
    *,
    overwrite: bool,
    before: str | None = None,
    storage_options: StorageOptions = None,
) -> Run:
    """Finds out what a folder holds for `fingerprint`: nothing, its claim, or its complete run.

    It changes nothing. Files that were not written by a run are never removed.

    Args:
        fingerprint: The fingerprint of the run.
        overwrite: Whether another run may be replaced.
        before: The fingerprint of the same config in easypipe 0.1, so that an error can say why
            its folder is not used for this run.

    Raises:
        ConfigError: The folder holds something else and `overwrite` is False.
    """
    names = storage.names_in(folder, storage_options)
    run = Run(folder=folder, fingerprint=fingerprint, storage_options=storage_options)
    manifest = None
    if MANIFEST in names:
        try:
            manifest = read_manifest(folder, storage_options)
        except CacheError:
            if not overwrite:  # overwrite also replaces what cannot be read
                raise
    own = manifest if manifest is not None and manifest.fingerprint == fingerprint else None
    claim = _claim(run, names)
    if claim is not None and claim.fingerprint == fingerprint:
        return replace(run, manifest=own, claimed=True, replaces=claim.replaces, edges=claim.edges)
    if own is not None and claim is None:
        return replace(run, manifest=own, edges=own.edges)
    if names and not overwrite:
        raise ConfigError(
            at=f"save.output_dir={folder}",
            problem=_held(names, manifest, claim, before),
            fix="Choose another folder, or set overwrite=True to replace it.",
        )
    old = set() if manifest is None else {shard.name for shard in manifest.shards}
    if claim is not None:
        old |= {name for name in names if name.startswith(prefix_of(claim.fingerprint))}
    old = sorted(name for name in old if not name.startswith(run.prefix))
    return replace(run, replaces=old, takes_over=claim is not None)


def _claim(run: Run, names: Sequence[str]) -> Claim | None:
    """Returns the claim of the folder, or None.

    If the claim is damaged, the names of the shards identify the run.
    """
    if RUN not in names:
        return None
    found = recall_checked(
        join(run.folder, RUN),
        lambda claim: Claim(**claim),
        what="the claim of a saved run",
        storage_options=run.storage_options,
        older=[entry.name for entry in fields(Claim)],
    )
    own = set(names) <= {RUN, RECORDS} or any(name.startswith(run.prefix) for name in names)
    return found or Claim(fingerprint=run.fingerprint if own else "unknown")
