"""Writes one dataset into one folder with threads, the manifest last; SavedFolder is the result."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from easypipe.core import locks, storage
from easypipe.core.config import digest
from easypipe.core.ledger import Ledger
from easypipe.core.protocols import (
    ProgressEvent,
    ProgressListener,
    ShardedSource,
    TokenInfo,
    Turns,
)
from easypipe.core.schema import schema_text
from easypipe.core.threads import Threads
from easypipe.save.card import write_card
from easypipe.save.config import CODECS, SaveStageConfig, codec_of, max_bytes_of
from easypipe.save.folder import Run, open_run
from easypipe.save.saved import (
    FORMAT_VERSION,
    SavedManifest,
    SavedShard,
    count_tokens,
    join,
)
from easypipe.save.shard_writer import open_writer
from easypipe.save.sizes import batches, count_rows, default_shard_bytes, plan_shards

log = logging.getLogger("easypipe")

TOLERANCE = 1.1  # of max_shard_size; a shard above it is named in a warning


@dataclass(frozen=True, kw_only=True)
class SavedFolder:
    """One output folder after saving.

    Attributes:
        dataset: The name of the dataset.
        path: The folder.
        manifest: Its manifest.
        num_read: The number of rows of the source.
        resumed_shards: The number of shards that were already finished.
        up_to_date: Whether all were already finished, so that nothing was written.
        seconds: How long it took.
        decided_by: The option that decided the number of shards: `num_shards`, `max_shard_size` or
            `default`; None if an earlier run planned them.
    """

    dataset: str
    path: str
    manifest: SavedManifest = field(repr=False)
    num_read: int
    resumed_shards: int
    up_to_date: bool
    seconds: float
    decided_by: str | None

    @property
    def format(self) -> str:
        return self.manifest.format

    @property
    def num_shards(self) -> int:
        return len(self.manifest.shards)

    @property
    def num_rows(self) -> int:
        return self.manifest.num_rows

    @property
    def num_tokens(self) -> int:
        return self.manifest.num_tokens

    @property
    def num_bytes(self) -> int:
        return self.manifest.num_bytes

    def enter(self, ledger: Ledger) -> None:
        """Adds the balance of what was read and written, and its time and size, to the ledger."""
        ledger.add(
            "save",
            self.dataset,
            "rows",
            into={"read": self.num_read},
            out={"saved": self.num_rows, **self.manifest.rejected},
        )
        ledger.facts |= {
            f"save.{self.dataset}.seconds": round(self.seconds, 3),
            f"save.{self.dataset}.bytes": self.num_bytes,
        }


@dataclass(frozen=True, kw_only=True)
class Target:
    """One dataset, the folder that it is saved to, and how."""

    dataset: str
    source: ShardedSource
    folder: str
    config: SaveStageConfig


class Rows(NamedTuple):
    """What is written of a dataset.

    Attributes:
        source: The rows.
        fingerprint: Their identity.
        tokens: What is known of their tokenizer.
        turns: How their conversations are rendered.
        ledger: Returns the ledger up to these rows; it is called when they are written.
        aligned: Columns with values for every token.
    """

    source: ShardedSource
    fingerprint: str
    tokens: TokenInfo | None
    turns: Turns | None
    ledger: Callable[[], Ledger]
    aligned: tuple[str, ...] = ()


def write_folder(target: Target, rows: Rows, progress: ProgressListener) -> SavedFolder:
    """Writes the rows of one dataset.

    Raises:
        ConfigError: The folder holds something else.
        StorageError: Writing fails.
    """
    with contextlib.ExitStack() as stack:
        if not storage.is_remote(target.folder):  # remote folders have no locks: see Run.claim
            folder = Path(os.path.expanduser(target.folder.removeprefix("file://")))
            stack.enter_context(locks.saving(folder))
        return _write_folder(target, rows, progress)


def _write_folder(target: Target, rows: Rows, progress: ProgressListener) -> SavedFolder:
    began, config, source = time.perf_counter(), target.config, rows.source
    identity, before = _identities(config, rows)
    run = open_run(
        target.folder,
        identity,
        overwrite=config.overwrite,
        before=before,
        storage_options=config.storage_options,
    )
    shards, resumed, decided_by = run.standing(), 0, None
    up_to_date = shards is not None
    if shards is None:
        edges = run.edges
        if edges is None:
            planned, decided_by = plan_shards(
                source,
                config.format,
                codec_of(config),
                num_shards=config.num_shards,
                max_bytes=max_bytes_of(config),
            )
            edges = tuple(planned.tolist())
        run.claim(edges)
        shards, resumed = _Writing(target, source, run, edges, progress).run_all()
        _check_sizes(target, shards)
    else:
        run.tidy()
    folder = SavedFolder(
        dataset=target.dataset,
        path=target.folder,
        manifest=SavedManifest(
            fingerprint=identity,
            format=config.format,
            compression=codec_of(config),
            schema=source.schema,
            tokens=rows.tokens,
            turns=rows.turns,
            aligned=rows.aligned,
            shards=shards,
            ledger={},
        ),
        num_read=count_rows(source.shards),
        resumed_shards=resumed,
        up_to_date=up_to_date,
        seconds=time.perf_counter() - began,
        decided_by=decided_by,
    )
    progress(_progress(target.dataset, folder.num_read, folder.num_read))
    ledger = rows.ledger()
    folder.enter(ledger)
    ledger.check()
    # Seconds are left out, so that the same rows make the same folder.
    balance = {"entries": ledger.to_json()["entries"]}
    manifest = dataclasses.replace(folder.manifest, ledger=balance)
    # written before the manifest, which is the commit
    write_card(target.folder, manifest, config.storage_options)
    if not up_to_date:
        run.commit(manifest)
    return dataclasses.replace(folder, manifest=manifest)


def _identities(config: SaveStageConfig, rows: Rows) -> tuple[str, str | None]:
    """Returns (the fingerprint of this run, its fingerprint by easypipe 0.1 or None).

    The `max_shard_size` of easypipe 0.1 counted bytes before compression.
    """
    schema = schema_text(rows.source.schema)
    what = ("saved", FORMAT_VERSION, rows.fingerprint, schema, config.format, codec_of(config))
    limit = max_bytes_of(config)
    if limit is not None:
        before = digest(*what, config.num_shards, limit)
        return digest(*what, config.num_shards, {"on disk": limit}), before
    default = default_shard_bytes(rows.source.shards) if config.num_shards is None else None
    return digest(*what, config.num_shards, default), None


def _check_sizes(target: Target, shards: Sequence[SavedShard]) -> None:
    """Warns if samples misjudged the data; a row above the limit cannot be cut."""
    limit = max_bytes_of(target.config) or float("inf")
    above = [
        shard for shard in shards if shard.num_rows > 1 and shard.num_bytes > TOLERANCE * limit
    ]
    if above:
        largest = max(above, key=lambda shard: shard.num_bytes)
        log.warning(
            "dataset %s: %d of %d shards are more than a tenth above max_shard_size=%d, the "
            "largest is %s with %d bytes; its rows compress "
            "worse than the sampled ones",
            target.dataset, len(above), len(shards), limit, largest.name, largest.num_bytes,
        )  # fmt: skip


class _Writing:
    """The shards of one folder, written several at a time; each is committed when finished."""

    def __init__(
        self,
        target: Target,
        source: ShardedSource,
        run: Run,
        edges: Sequence[int],
        progress: ProgressListener,
    ) -> None:
        self.target, self.source, self.run, self.progress = target, source, run, progress
        config, count = target.config, len(edges) - 1
        extension = CODECS[config.format][codec_of(config)]
        self.rows = {
            f"{run.prefix}{i:05d}-of-{count:05d}{extension}": (edges[i], edges[i + 1])
            for i in range(count)
        }
        self.cores = min(os.cpu_count() or 1, 8)
        # This many threads encode rows; others wait for the disk or the store.
        self.at_work = threading.Semaphore(self.cores)
        self.stop, self.lock = threading.Event(), threading.Lock()
        self.done = self.num_bytes = 0

    def run_all(self) -> tuple[tuple[SavedShard, ...], int]:
        """Returns every shard in order, and how many of them were already finished."""
        shards = self.run.finished(list(self.rows))
        resumed = len(shards)
        missing = [name for name in self.rows if name not in shards]
        self.done = sum(shard.num_read for shard in shards.values())
        pool = Threads(self.cores + 2, thread_name_prefix="easypipe-save")
        try:
            shards |= zip(missing, pool.map(self._write, missing), strict=True)
        # Also on Ctrl-C: the writers stop at their next batch, and what is committed is kept.
        except BaseException:
            self.stop.set()
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
        return tuple(shards[name] for name in self.rows), resumed

    def _write(self, name: str) -> SavedShard:
        start, stop = self.rows[name]
        try:
            return self._write_shard(name, start, stop)
        except Exception as error:
            error.add_note(
                f"while saving dataset {self.target.dataset!r}, shard {name}, rows {start}:{stop}"
            )
            raise

    def _write_shard(self, name: str, start: int, stop: int) -> SavedShard:
        """Writes and commits one shard, and records it."""
        rows, tokens, rejected = 0, 0, Counter[str]()
        config, path = self.target.config, join(self.target.folder, name)
        with (
            storage.commit_file(path, config.storage_options) as (temporary, stamp),
            self.at_work,
            open_writer(temporary, config.format, codec_of(config), self.source.schema) as write,
        ):
            for batch, rejects in batches(self.source, start, stop):
                if self.stop.is_set():
                    raise _StoppedError
                write(batch)
                rows += batch.num_rows
                tokens += count_tokens(batch)
                for reject in rejects:
                    rejected[reject.reason] += reject.count
                self._report(batch.num_rows + sum(each.count for each in rejects), batch.nbytes)
        saved = SavedShard(
            name=name,
            num_rows=rows,
            num_tokens=tokens,
            num_bytes=stamp().num_bytes,
            checksum=stamp().checksum,
            rejected=dict(rejected),
        )
        self.run.record(saved)
        return saved

    def _report(self, rows: int, num_bytes: int) -> None:
        with self.lock:
            self.done, self.num_bytes = self.done + rows, self.num_bytes + num_bytes
            total = count_rows(self.source.shards)
            self.progress(_progress(self.target.dataset, self.done, total, self.num_bytes))


class _StoppedError(Exception):
    """Raised in writers when another shard failed first; no caller sees it."""


def _progress(dataset: str, done: int, total: int, num_bytes: int = 0) -> ProgressEvent:
    return ProgressEvent(
        stage="save", dataset=dataset, done=done, total=total, unit="rows", num_bytes=num_bytes
    )
