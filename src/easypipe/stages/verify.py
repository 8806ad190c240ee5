"""Whether what stands on disk is what was committed: token caches, saved folders and checkpoints,
byte by byte, and what their manifests say of them.

Nothing is changed here; stages/repair.py makes good what is found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from easypipe.cache.config import CacheConfig
from easypipe.cache.folder import CacheFolder
from easypipe.cache.location import cache_folder
from easypipe.cache.manifest import Manifest, Part, read_manifest
from easypipe.cache.ranges import Record, read_record
from easypipe.cache.reader import cache_schema
from easypipe.core import storage
from easypipe.core.config import digest
from easypipe.core.errors import ConfigError, EasypipeError, MissingFileError, TokenizerError
from easypipe.core.schema import INPUT_IDS, ROW_NUMBER, SEGMENT_IDS
from easypipe.save import saved
from easypipe.save.folder import RUN
from easypipe.stages.decoding import same_tokenizer_again
from easypipe.train.checkpoint import files as checkpoint_files

BATCH_ROWS = 4096
CHECKPOINT = "checkpoint"


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is wrong, and where. file: the file to make again, None where none is to blame."""

    at: str
    what: str
    file: str | None = None

    def __str__(self) -> str:
        return f"{self.at}: {self.what}"


@dataclass(frozen=True, kw_only=True)
class Verification:
    """One dataset of a token cache, one saved folder or one checkpoint. rows, tokens: as the
    manifest has them, 0 of a checkpoint; files, num_bytes: that were read.

    notes: what could not be checked, and why.
    """

    path: str
    kind: str  # "token cache", "saved rows", "records", "checkpoint"
    dataset: str
    files: int
    num_bytes: int
    rows: int
    tokens: int
    problems: tuple[Problem, ...]
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.problems


def verify(
    path: str | Path, storage_options: dict[str, Any] | None = None
) -> tuple[Verification, ...]:
    """Everything below `path`: a token cache (its folder, or one manifest in it), a saved folder,
    or a folder of saved folders; the output_dir of a run, its folder of checkpoints, or one of
    these.

    Reads every byte. Raises ConfigError where there is nothing that can be verified.
    """
    text = str(path)
    place = cache_folder_of(path, storage_options)
    if place is not None:
        folder, key = place
        if key is not None:
            return (_cache(folder, key),)
        names = storage.names_in(folder.at("manifests"), storage_options)
        keys = [name.removesuffix(".json") for name in names if name.endswith(".json")]
        return (*(_cache(folder, key) for key in keys), *_records(folder))
    if (
        checkpoints := []
        if storage.is_remote(text)
        else checkpoint_files.checkpoints_below(Path(place_of(path)))
    ):
        return tuple(map(_checkpoint, checkpoints))
    folders = _saved_folders(text, storage_options)
    if not folders:
        problem = "is neither a token cache, nor a folder that save() wrote, nor the output_dir of a run with checkpoints"
        raise ConfigError(at=text, problem=problem, fix="Give one of those.")
    return tuple(_saved(folder, storage_options) for folder in folders)


def cache_folder_of(
    path: str | Path, storage_options: dict[str, Any] | None = None
) -> tuple[CacheFolder, str | None] | None:
    """(the token cache that `path` is or is a manifest of, the key of that manifest)."""
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


def place_of(path: str | Path) -> str:
    """A path or URL in the one spelling under which places are compared."""
    if storage.is_remote(path):
        return str(path).rstrip("/")
    return str(Path(str(path).removeprefix("file://")).expanduser().absolute())


# Token caches


def _cache(folder: CacheFolder, key: str) -> Verification:
    path = folder.manifest(key)
    try:
        manifest = read_manifest(path, folder.options)
    except EasypipeError as error:
        problem = Problem(at=str(path), what=f"the manifest: {error.problem}", file=str(path))
        return Verification(
            path=str(path), kind="token cache", dataset="?", files=0, num_bytes=0, rows=0, tokens=0, problems=(problem,)
        )  # fmt: skip
    parts = [part for part in manifest.parts if part.file]
    problems = [*_books(str(path), key, manifest)]
    for part in parts:
        problems += _part(manifest, part, folder)
    quarantine = folder.at("manifests", manifest.quarantine)
    if manifest.quarantine and not folder.holds_quarantine(manifest):
        problems.append(
            Problem(
                at=str(quarantine), what="the quarantine file is missing or damaged", file=str(path)
            )
        )
    more, notes = _probe(manifest.tokenizer.name, manifest.tokenizer.fingerprint)
    return Verification(
        path=str(path),
        kind="token cache",
        dataset=manifest.dataset,
        files=len(parts),
        num_bytes=sum(part.num_bytes for part in parts),
        rows=manifest.counts.rows,
        tokens=manifest.counts.tokens,
        problems=(*problems, *more),
        notes=notes,
    )


def _books(path: str, key: str, m: Manifest) -> Iterator[Problem]:
    """What a manifest says against itself."""
    wrong: list[str] = []
    docs, tokens = sum(part.docs for part in m.parts), sum(part.tokens for part in m.parts)
    if (docs, tokens) != (m.counts.docs, m.counts.tokens):
        wrong.append(
            f"its parts hold {docs} documents of {tokens} tokens, its counts say {m.counts.docs} of {m.counts.tokens}"
        )
    wrong += [
        f"{entry.unit} do not add up: in {dict(entry.into)}, out {dict(entry.out)}"
        for entry in m.counts.ledger(m.dataset, {}).entries
        if entry.leak
    ]
    at: Counter[int] = Counter()
    for part in m.parts:
        if not 0 <= part.shard < len(m.shard_names) or part.start != at[part.shard]:
            wrong.append(
                f"rows {part.start}:{part.stop} of shard {part.shard} do not follow row {at[part.shard]}"
            )
            break
        at[part.shard] = part.stop
    else:
        wrong += [
            f"{at[i]} of {rows} rows of {name} are told of"
            for i, (name, rows) in enumerate(zip(m.shard_names, m.shard_rows, strict=False))
            if at[i] != rows
        ]
    content = [[part.shard, part.start, part.stop, part.content] for part in m.parts]
    if digest("tokens", m.tokenizer.fingerprint, content) != m.fingerprint:
        wrong.append("its fingerprint is not that of its parts")
    if key != m.key:
        wrong.append(f"it is the manifest {m.key}")
    for what in wrong:
        yield Problem(at=path, what=f"the manifest is damaged: {what}", file=path)


def _part(m: Manifest, part: Part, folder: CacheFolder) -> Iterator[Problem]:
    file = folder.tokens(part.file)
    at = f"{file} (rows {part.start}:{part.stop} of {m.shard_names[part.shard] if 0 <= part.shard < len(m.shard_names) else '?'})"
    found = _bytes(str(file), part.num_bytes, part.checksum, folder.options)
    if found is not None:
        yield Problem(at=at, what=found, file=str(file))
        return
    try:
        wrong = _contents(m, part, pa.ipc.open_file(folder.content(part.file)).get_batch(0))
    except (pa.ArrowException, OSError, ValueError) as error:
        wrong = f"cannot be read: {error}"
    if wrong:  # its bytes are those that were committed, so the manifest is what changed
        yield Problem(
            at=at, what=f"{wrong}, though its checksum is right", file=str(folder.manifest(m.key))
        )


def _contents(m: Manifest, part: Part, batch: pa.RecordBatch) -> str | None:
    expected = cache_schema(m.tokenizer.vocab_size, loss_mask=m.loss_mask)
    if not batch.schema.remove_metadata().equals(expected):
        return f"columns {_columns(batch.schema)}, expected {_columns(expected)}"
    ids, rows = batch.column(INPUT_IDS).flatten(), batch.column(ROW_NUMBER).to_numpy()
    if (batch.num_rows, len(ids)) != (part.docs, part.tokens):
        return f"holds {batch.num_rows} documents of {len(ids)} tokens, the manifest says {part.docs} of {part.tokens}"
    largest = int(ids.to_numpy().max()) if len(ids) else 0
    if largest >= m.tokenizer.vocab_size:
        return f"token {largest} is outside the vocabulary of {m.tokenizer.vocab_size}"
    if rows.size and not (
        part.start <= rows[0] and rows[-1] < part.stop and (np.diff(rows) >= 0).all()
    ):
        return f"row numbers {rows[0]} to {rows[-1]} do not ascend within {part.start}:{part.stop}"
    return None


def _records(folder: CacheFolder) -> Iterator[Verification]:
    """Records of ranges: what a later preparation would take over."""
    recipes = storage.names_in(folder.at("ranges"), folder.options)
    paths = [
        folder.at("ranges", recipe, name)
        for recipe in recipes
        for name in storage.names_in(folder.at("ranges", recipe), folder.options)
    ]
    known: dict[str, tuple[str, tuple[int, int]] | None] = {}
    problems: list[Problem] = []
    for path in paths:
        record = read_record(path, storage_options=folder.options)
        if record is None:
            problems.append(
                Problem(at=str(path), what="the record of a range cannot be read", file=str(path))
            )
        elif record.part.file and (what := _record(record, folder, known)):
            problems.append(Problem(at=str(path), what=what, file=str(path)))
    if problems:
        yield Verification(
            path=str(folder.at("ranges")), kind="records", dataset="", files=len(paths), num_bytes=0, rows=0, tokens=0,
            problems=tuple(problems),
        )  # fmt: skip


def _record(
    record: Record, folder: CacheFolder, known: dict[str, tuple[str, tuple[int, int]] | None]
) -> str | None:
    """None also where the tokens themselves are gone or damaged: that is told of their manifest,
    and a preparation notices.
    """
    if record.part.file not in known:
        try:
            data = folder.content(record.part.file)
            batch = pa.ipc.open_file(data).get_batch(0)
            known[record.part.file] = (
                xxhash.xxh3_128(data).hexdigest(),
                (batch.num_rows, len(batch.column(INPUT_IDS).flatten())),
            )
        except (pa.ArrowException, OSError, ValueError):
            known[record.part.file] = None
    there = known[record.part.file]
    if (
        there is None
        or there[0] != record.part.checksum
        or there[1] == (record.part.docs, record.part.tokens)
    ):
        return None
    return f"says {record.part.docs} documents of {record.part.tokens} tokens, its file holds {there[1][0]} of {there[1][1]}"


def _probe(name: str, fingerprint: str) -> tuple[list[Problem], tuple[str, ...]]:
    """The golden probe: what the tokenizer of that name makes of a fixed text, and of its files, is
    part of the fingerprint.
    """
    try:
        same_tokenizer_again(name, fingerprint)
    except TokenizerError as error:
        if "is not the tokenizer" in error.problem:
            return [Problem(at=f"tokenizer {name}", what=error.problem)], ()
        return [], (
            f"the tokenizer is not here, so its encoding was not compared: {error.at}: {error.problem}",
        )
    return [], ()


# Checkpoints


def _checkpoint(folder: Path) -> Verification:
    found = checkpoint_files.check(folder)
    problems = [
        Problem(at=str(folder / name), what=what, file=str(folder / name))
        for name, what in found.problems.items()
    ]
    notes = (
        ()
        if found.sealed
        else (
            "no checksums: an earlier version saved it, so only that its parts are there was looked at",
        )
    )
    return Verification(
        path=str(folder),
        kind=CHECKPOINT,
        dataset="",
        files=found.files,
        num_bytes=found.num_bytes,
        rows=0,
        tokens=0,
        problems=tuple(problems),
        notes=notes,
    )


# Saved folders


def _saved_folders(path: str, storage_options: dict[str, Any] | None) -> list[str]:
    below = storage.names_in(path, storage_options)
    if saved.MANIFEST in below or RUN in below:
        return [path]
    folders = [saved.join(path, name) for name in below]
    return [
        folder
        for folder in folders
        if storage.exists(saved.join(folder, saved.MANIFEST), storage_options)
    ]


def _saved(folder: str, storage_options: dict[str, Any] | None) -> Verification:
    manifest_path = saved.join(folder, saved.MANIFEST)

    def made(
        problems: list[Problem], m: saved.SavedManifest | None = None, notes: tuple[str, ...] = ()
    ) -> Verification:
        shards = () if m is None else m.shards
        return Verification(
            path=folder,
            kind="saved rows",
            dataset=folder.rstrip("/").rpartition("/")[2],
            files=len(shards),
            num_bytes=sum(shard.num_bytes for shard in shards),
            rows=sum(shard.num_rows for shard in shards),
            tokens=sum(shard.num_tokens for shard in shards),
            problems=tuple(problems),
            notes=notes,
        )

    try:
        manifest = saved.read_manifest(folder, storage_options)
    except MissingFileError:
        return made(
            [
                Problem(
                    at=folder,
                    what="unfinished: it has no manifest yet; run what writes it again",
                    file=manifest_path,
                )
            ]
        )
    except EasypipeError as error:
        return made(
            [Problem(at=manifest_path, what=f"the manifest is {error.problem}", file=manifest_path)]
        )
    problems: list[Problem] = []
    text = storage.read_json(manifest_path, storage_options)
    told, summed = (
        (text.get("num_rows"), text.get("num_tokens")),
        (manifest.num_rows, sum(shard.num_tokens for shard in manifest.shards)),
    )
    if told != summed:
        what = f"the manifest is damaged: {told[0]} rows of {told[1]} tokens, its shards have {summed[0]} of {summed[1]}"
        problems.append(Problem(at=manifest_path, what=what, file=manifest_path))
    for shard in manifest.shards:
        path = saved.join(folder, shard.name)
        found = _bytes(path, shard.num_bytes, shard.checksum, storage_options)
        if found is not None:
            problems.append(Problem(at=path, what=found, file=path))
    if not problems:  # else it cannot be opened
        problems += _saved_rows(folder, manifest, storage_options)
    more, notes = (
        ([], ())
        if manifest.tokens is None
        else _probe(manifest.tokens.tokenizer, manifest.tokens.tokenizer_fingerprint)
    )
    return made([*problems, *more], manifest, notes)


def _saved_rows(
    folder: str, manifest: saved.SavedManifest, storage_options: dict[str, Any] | None
) -> Iterator[Problem]:
    """Counts and columns of every shard, whose bytes are known to be right."""
    path = saved.join(folder, saved.MANIFEST)
    try:
        source = saved.SavedSource(folder, storage_options)
        for i, (shard, info) in enumerate(zip(manifest.shards, source.shards, strict=True)):
            rows = tokens = 0
            for start in range(0, info.num_rows or 0, BATCH_ROWS):
                batch = source.read(i, start, min(start + BATCH_ROWS, info.num_rows or 0))
                rows += batch.num_rows
                tokens += _count_tokens(batch)
            if (rows, tokens) != (shard.num_rows, shard.num_tokens):
                what = f"holds {rows} rows of {tokens} tokens, the manifest says {shard.num_rows} of {shard.num_tokens}"
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


def _count_tokens(batch: pa.RecordBatch) -> int:
    """Without padding, as saving counts them."""
    if SEGMENT_IDS in batch.schema.names:
        return int(
            np.count_nonzero(batch.column(SEGMENT_IDS).flatten().to_numpy(zero_copy_only=False))
        )
    return len(batch.column(INPUT_IDS).flatten()) if INPUT_IDS in batch.schema.names else 0


# Both


def _bytes(
    path: str, num_bytes: int, checksum: str, storage_options: dict[str, Any] | None
) -> str | None:
    """What is wrong with the bytes of a file, if anything."""
    hasher, size = xxhash.xxh3_128(), 0
    try:
        for chunk in storage.chunks(path, storage_options):
            hasher.update(chunk)
            size += len(chunk)
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        return f"cannot be read: {error}"
    if size != num_bytes:
        return f"{size} bytes, committed with {num_bytes}"
    if hasher.hexdigest() != checksum:
        return f"damaged: checksum {hasher.hexdigest()}, committed as {checksum}"
    return None


def _columns(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in schema)
