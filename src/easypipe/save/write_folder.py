"""One dataset into one folder: planned, written by several threads, each shard committed as it
ends, the manifest last.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from easypipe.core import locks, storage
from easypipe.core.config import digest
from easypipe.core.ledger import Ledger
from easypipe.core.protocols import PipelineContext, ProgressEvent, ShardedSource
from easypipe.core.schema import INPUT_IDS, SEGMENT_IDS
from easypipe.save.card import write_card
from easypipe.save.folder import Run, open_run
from easypipe.save.layout import batches, count_rows, default_shard_bytes
from easypipe.save.saved import FORMAT_VERSION, SavedManifest, SavedShard, join, schema_to_text
from easypipe.save.shard_writer import CODECS, check_json, open_writer
from easypipe.save.sizes import plan_shards
from easypipe.stages.reports.ledger import ledger_of, rows_of
from easypipe.stages.tokenize.tokens import token_info

log = logging.getLogger("easypipe")

TOLERANCE = 1.1  # of max_shard_size; a shard above it is named in a warning


@dataclass(frozen=True, kw_only=True)
class SavedFolder:
    """What stands in one output folder. `resumed_shards` were found finished; `up_to_date`: all of
    them were, nothing was written.

    decided_by: the option that made the shards as many as they are: `num_shards`, `max_shard_size`
    or `default`; None where an earlier run
        planned them.
    """

    dataset: str
    path: str
    fingerprint: str
    format: str
    num_shards: int
    num_read: int
    num_rows: int
    num_tokens: int
    num_bytes: int
    rejected: Mapping[str, int]  # rows that the source refused while they were written, by reason
    resumed_shards: int
    up_to_date: bool
    seconds: float
    decided_by: str | None = None

    def enter(self, ledger: Ledger) -> None:
        """The balance of what was read and what was written, and what it took."""
        ledger.add(
            "save",
            self.dataset,
            "rows",
            into={"read": self.num_read},
            out={"saved": self.num_rows, **self.rejected},
        )
        ledger.facts |= {
            f"save.{self.dataset}.seconds": round(self.seconds, 3),
            f"save.{self.dataset}.bytes": self.num_bytes,
        }


@dataclass(frozen=True, kw_only=True)
class Target:
    """One dataset, the folder that it goes to, and how. max_bytes: of a shard on disk."""

    dataset: str
    source: ShardedSource
    folder: str
    format: str
    compression: str
    num_shards: int | None = None
    max_bytes: int | None = None
    overwrite: bool = False
    storage_options: dict[str, Any] | None = field(default=None, repr=False)


def write_folder(target: Target, context: PipelineContext) -> SavedFolder:
    """Raises ConfigError where the folder holds something else, StorageError where writing
    fails.
    """
    if storage.is_remote(target.folder):  # no lock reaches there: see Run.claim and Run.commit
        return _write_folder(target, context)
    with locks.saving(Path(target.folder.removeprefix("file://")).expanduser()):
        return _write_folder(target, context)


def _write_folder(target: Target, context: PipelineContext) -> SavedFolder:
    began = time.perf_counter()
    source = rows_of(target.source)
    if target.format == "jsonl":
        check_json(source.schema)
    identity, before = _identities(target, source)
    run = open_run(
        target.folder,
        identity,
        overwrite=target.overwrite,
        before=before,
        storage_options=target.storage_options,
    )
    shards, resumed, decided_by = run.standing(), 0, None
    up_to_date = shards is not None
    if up_to_date:
        run.tidy()
    if shards is None:
        edges = None if run.edges is None else np.array(run.edges, np.int64)
        if edges is None:
            edges, decided_by = plan_shards(
                source,
                target.format,
                target.compression,
                num_shards=target.num_shards,
                max_bytes=target.max_bytes,
            )
        names = [
            f"{run.prefix}{i:05d}-of-{len(edges) - 1:05d}{CODECS[target.format][target.compression]}"
            for i in range(len(edges) - 1)
        ]
        run.claim(edges.tolist())
        finished = run.finished(names)
        resumed = len(finished)
        done = finished | _write_missing(source, target, run, names, edges, finished, context)
        shards = tuple(done[name] for name in names)
        _check_sizes(target, shards)
    rows = sum(shard.num_rows for shard in shards)
    read = count_rows(source.shards)
    context.progress(_progress(target.dataset, read, read))
    rejected: Counter[str] = Counter()
    for shard in shards:
        rejected.update(shard.rejected)
    folder = SavedFolder(
        dataset=target.dataset,
        path=target.folder,
        fingerprint=identity,
        format=target.format,
        num_shards=len(shards),
        num_read=read,
        num_rows=rows,
        num_tokens=sum(shard.num_tokens for shard in shards),
        num_bytes=sum(shard.num_bytes for shard in shards),
        rejected=dict(rejected),
        resumed_shards=resumed,
        up_to_date=up_to_date,
        seconds=time.perf_counter() - began,
        decided_by=decided_by,
    )
    ledger = ledger_of(target.dataset, target.source)
    folder.enter(ledger)
    ledger.check()
    manifest = SavedManifest(
        fingerprint=identity,
        format=target.format,
        compression=target.compression,
        schema=source.schema,
        tokens=token_info(target.source),
        shards=shards,
        # seconds are left out: the same rows make the same folder
        ledger={"entries": ledger.to_json()["entries"]},
    )
    # before the manifest, which is the commit
    write_card(target.folder, manifest, target.storage_options)
    if not folder.up_to_date:
        run.commit(manifest)
    return folder


def _identities(target: Target, source: ShardedSource) -> tuple[str, str | None]:
    """What this run is called, and what easypipe 0.1 called it, whose `max_shard_size` counted
    bytes before compression.
    """
    what = (
        "saved",
        FORMAT_VERSION,
        source.fingerprint,
        schema_to_text(source.schema),
        target.format,
        target.compression,
    )
    if target.max_bytes is not None:
        before = digest(*what, target.num_shards, target.max_bytes)
        return digest(*what, target.num_shards, {"on disk": target.max_bytes}), before
    return digest(
        *what,
        target.num_shards,
        default_shard_bytes(source.shards) if target.num_shards is None else None,
    ), None


def _check_sizes(target: Target, shards: Sequence[SavedShard]) -> None:
    """Says so where samples misjudged the data. A row that is larger than the limit cannot be
    cut.
    """
    if target.max_bytes is None:
        return
    above = [
        shard
        for shard in shards
        if shard.num_rows > 1 and shard.num_bytes > TOLERANCE * target.max_bytes
    ]
    if above:
        largest = max(above, key=lambda shard: shard.num_bytes)
        log.warning(
            "dataset %s: %d of %d shards are more than a tenth above max_shard_size=%d, the largest is %s with %d bytes; its rows compress "
            "worse than the sampled ones",
            target.dataset, len(above), len(shards), target.max_bytes, largest.name, largest.num_bytes,
        )  # fmt: skip


def _write_missing(
    source: ShardedSource,
    target: Target,
    run: Run,
    names: list[str],
    edges: NDArray[np.int64],
    finished: Mapping[str, SavedShard],
    context: PipelineContext,
) -> dict[str, SavedShard]:
    """Writes the shards that are not `finished`, some at a time; each is committed as it ends."""
    missing = [i for i, name in enumerate(names) if name not in finished]
    written: dict[str, SavedShard] = {}
    if not missing:
        return written
    stop, lock, num_bytes = threading.Event(), threading.Lock(), 0
    done = sum(shard.num_rows + sum(shard.rejected.values()) for shard in finished.values())

    def count(rows: int, of_bytes: int) -> None:
        nonlocal done, num_bytes
        with lock:
            done, num_bytes = done + rows, num_bytes + of_bytes
            context.progress(_progress(target.dataset, done, int(edges[-1]), num_bytes))

    def work(i: int) -> SavedShard:
        try:
            return _write_shard(
                source,
                target,
                run,
                names[i],
                int(edges[i]),
                int(edges[i + 1]),
                at_work,
                stop,
                count,
            )
        except Exception as error:
            error.add_note(
                f"while saving dataset {target.dataset!r}, shard {names[i]}, rows {edges[i]}:{edges[i + 1]}"
            )
            raise

    cores = min(os.cpu_count() or 1, 8)
    # rows are encoded by as many threads; others wait for the disk or the store meanwhile
    at_work = threading.Semaphore(cores)
    pool = ThreadPoolExecutor(min(len(missing), cores + 2), thread_name_prefix="easypipe-save")
    try:
        for i, shard in zip(missing, pool.map(work, missing), strict=True):
            written[names[i]] = shard
    # Ctrl-C too: the writers stop at their next batch, what is committed stays
    except BaseException:
        stop.set()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return written


class _StoppedError(Exception):
    """Another shard failed first; nobody sees this one."""


def _write_shard(
    source: ShardedSource,
    target: Target,
    run: Run,
    name: str,
    start: int,
    stop_row: int,
    at_work: threading.Semaphore,
    stop: threading.Event,
    count: Callable[[int, int], None],
) -> SavedShard:
    rows, tokens, rejected = 0, 0, Counter()
    with (
        storage.commit_file(join(target.folder, name), target.storage_options) as (
            temporary,
            stamp,
        ),
        at_work,
        open_writer(temporary, target.format, target.compression, source.schema) as write,
    ):
        for batch, rejects in batches(source, start, stop_row):
            if stop.is_set():
                raise _StoppedError
            write(batch)
            rows += batch.num_rows
            tokens += _count_tokens(batch)
            for reject in rejects:
                rejected[reject.reason] += reject.count
            count(batch.num_rows + sum(reject.count for reject in rejects), batch.nbytes)
    done = stamp()
    saved = SavedShard(
        name=name,
        num_rows=rows,
        num_tokens=tokens,
        num_bytes=done.num_bytes,
        checksum=done.checksum,
        rejected=dict(rejected),
    )
    run.record(saved)
    return saved


def _count_tokens(batch: pa.RecordBatch) -> int:
    """Tokens without padding."""
    if SEGMENT_IDS in batch.schema.names:
        return int(
            np.count_nonzero(batch.column(SEGMENT_IDS).flatten().to_numpy(zero_copy_only=False))
        )
    return len(batch.column(INPUT_IDS).flatten()) if INPUT_IDS in batch.schema.names else 0


def _progress(dataset: str, done: int, total: int, num_bytes: int = 0) -> ProgressEvent:
    return ProgressEvent(
        stage="save", dataset=dataset, done=done, total=total, unit="rows", num_bytes=num_bytes
    )
