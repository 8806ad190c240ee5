"""Filling the token cache: ranges of rows are read, tokenized and committed by threads; the
manifest is written last.

Whatever was committed is used again: a range whose file did not change is not read, one whose text
did not change is not tokenized. A process that is killed leaves committed ranges behind, and the
next one goes on from there. Layout: cache/manifest.py.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import json
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Required, TypedDict, Unpack

import pyarrow as pa
from xxhash import xxh3_128_hexdigest

from easypipe.cache.blocks import TokenStamp, block_sums
from easypipe.cache.folder import STATS, CacheFolder, folder_of
from easypipe.cache.manifest import FORMAT, Manifest, TokenizerIdentity
from easypipe.cache.ranges import Range, Record, ranges_of, read_record, record_path, write_record
from easypipe.cache.reader import TokenCache
from easypipe.core import locks, storage
from easypipe.core.config import digest
from easypipe.core.errors import CacheError, ConfigError, MissingFileError, StorageError
from easypipe.core.protocols import (
    ProgressEvent,
    ProgressListener,
    Reject,
    ShardedSource,
    counted,
    silent,
)
from easypipe.sources.base import innermost
from easypipe.stages.tokenize.encoders import RowForm, TextForm
from easypipe.stages.tokenize.text_rows import raw_row
from easypipe.stages.tokenize.token_rows import Documents, documents_hash, sample_of
from easypipe.stages.tokenize.totals import OnError, Totals
from easypipe.transforms.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger("easypipe")

SAMPLE_ROWS = 256  # of the data, compared with the reference before the fast backend is used on it
SAMPLE_BYTES = 64 << 10
SYNCS = 3  # ranges that wait for the disk while others are worked on ...
UPLOADS = 8  # ... or are on their way to a bucket


class Options(TypedDict, total=False):
    """What `prepare` and its kin take beside source, tokenizer and progress. dataset and cache_dir
    are required.

    cache_dir: a folder of this machine, or a CacheFolder. form: what the rows are; None: text in
    the column `content_field`.
    on_error: at a bad row (null, empty, no string, refused by the source) stop, or leave it out and
    count it by reason, or write it to a
        file beside the manifest as well. max_bad_rows: stop at the first bad row after so many,
        counted in the order of the shards.
    ranges_of: `ranges.ranges_of`, or something that remembers what it gave.
    num_workers: ranges in work at a time, each held in memory; None takes one per core. batch_size:
    texts encoded at a time; 1,000.
    """

    dataset: Required[str]
    cache_dir: Required[Path | CacheFolder]
    content_field: str
    form: RowForm | None
    on_error: OnError
    max_bad_rows: int | None
    ranges_of: Callable[[ShardedSource, str], Sequence[Range]]
    num_workers: int | None
    batch_size: int


def prepare(
    source: ShardedSource,
    tokenizer: Tokenizer,
    *,
    progress: ProgressListener = silent,
    **options: Unpack[Options],
) -> TokenCache:
    """The token cache of a source: opened where it stands, finished where it was begun.

    Raises SourceError (missing column, bad row), BudgetError, TokenizerError, StorageError; each
    names file and row where one is to blame.
    """
    job = _Job.of(source, tokenizer, **options)
    opened = _open(job)
    if opened is not None:
        logger.info(
            "dataset %s: token cache %s is complete, nothing is tokenized", job.dataset, job.key
        )
        return opened
    with locks.preparing(job.folder.local, job.key, job.dataset) as waited:
        return (_open(job) if waited else None) or _fill(job, progress)


def prepare_part(
    source: ShardedSource,
    tokenizer: Tokenizer,
    *,
    part: Sequence[int],
    progress: ProgressListener = silent,
    **options: Unpack[Options],
) -> int:
    """Tokenizes and commits the ranges whose numbers `part` lists and writes no manifest: `prepare`
    finds them done, on any machine.

    Errors as `prepare`; bad rows are charged to the budget by `prepare`, in their order. Returns
    how many rows were gone through.
    """
    job = _Job.of(source, tokenizer, **options)
    mine = [job.ranges[number] for number in part]
    totals = Totals(job.dataset, job.form.label, job.on_error, None)
    rows = sum(piece.stop - piece.start for piece in mine)
    with locks.working(job.folder.local), contextlib.closing(_run(job, mine)) as records:
        for piece, record in zip(mine, records, strict=True):
            totals.add(piece, record)
            progress(
                ProgressEvent(
                    stage="tokenize", dataset=job.dataset, done=totals.rows, total=rows, unit="rows"
                )
            )
    return rows


def pending(
    source: ShardedSource, tokenizer: Tokenizer, **options: Unpack[Options]
) -> tuple[list[int], int]:
    """(numbers of the ranges that nobody has committed, how many ranges there are); none once the
    manifest stands. Reads no text.
    """
    job = _Job.of(source, tokenizer, **options)
    if storage.exists(job.manifest, job.folder.options):
        return [], len(job.ranges)
    return [number for number, piece in enumerate(job.ranges) if job.record(piece) is None], len(
        job.ranges
    )


def manifest_key(ranges: Sequence[Range], on_error: OnError, max_bad_rows: int | None) -> str:
    """What the manifest of a dataset is called."""
    return digest("manifest", FORMAT, [r.key for r in ranges], on_error, max_bad_rows)


def _fill(job: _Job, progress: ProgressListener) -> TokenCache:
    """Whatever is missing of the ranges, then the manifest."""
    source, tokenizer, dataset, form, ranges = (
        job.source,
        job.tokenizer,
        job.dataset,
        job.form,
        job.ranges,
    )
    storage.sweep(job.folder.local)
    started = time.perf_counter()
    totals = Totals(dataset, form.label, job.on_error, job.max_bad_rows)
    rows = sum(r.stop - r.start for r in ranges)
    with contextlib.closing(_run(job, ranges)) as records:
        for piece, record in zip(ranges, records, strict=True):
            totals.add(piece, record)
            done = totals.rows
            progress(
                ProgressEvent(
                    stage="tokenize",
                    dataset=dataset,
                    done=done,
                    total=rows,
                    unit="rows",
                    num_bytes=totals.text_bytes,
                )
            )
    totals.require_documents()
    quarantine, checksum = (
        _write_quarantine(job) if job.on_error == "quarantine" and totals.bad else ("", "")
    )
    seconds = time.perf_counter() - started
    manifest = Manifest(
        dataset=dataset,
        key=job.key,
        content_field=form.label,
        tokenizer=_identity(tokenizer),
        shard_names=tuple(shard.name for shard in source.shards),
        shard_rows=tuple(shard.num_rows or 0 for shard in source.shards),
        parts=tuple(totals.parts),
        counts=totals.counts(),
        fingerprint=digest(
            "tokens",
            tokenizer.fingerprint,
            [[p.shard, p.start, p.stop, p.content] for p in totals.parts],
        ),
        loss_mask=form.masked,
        pairs=form.pairs,
        quarantine=quarantine,
        quarantine_checksum=checksum,
        facts={
            "seconds": round(seconds, 3),
            "text_bytes": totals.text_bytes,
            # of all of it; where some was done before, or elsewhere, these seconds say nothing
            # about it
            **(
                {}
                if job.done["ranges_reused"]
                else {
                    "megabytes_per_second": round(totals.text_bytes / 1e6 / max(seconds, 1e-9), 1)
                }
            ),
            "encoder": ", ".join(sorted(totals.encoders)),
            **({"files_cut": cut} if (cut := getattr(innermost(source), "files_cut", 0)) else {}),
            **{
                name: job.done[name]
                for name in (
                    "ranges_reused",
                    "ranges_found_by_content",
                    "ranges_written",
                    "documents_encoded",
                )
            },
        },
    )
    manifest.counts.ledger(dataset, {}).check()
    job.folder.commit_manifest(manifest)
    return TokenCache(job.manifest, dataset=dataset, folder=job.folder)


def _cores() -> int:
    """Cores that this process may use; not every system tells which those are."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


@dataclass(frozen=True, kw_only=True)
class _Job:
    """What every worker needs to know. `done` counts under `lock`."""

    source: ShardedSource
    tokenizer: Tokenizer
    dataset: str
    form: RowForm
    folder: CacheFolder
    recipe: str
    ranges: Sequence[Range]
    on_error: OnError
    max_bad_rows: int | None
    batch_size: int
    workers: int
    at_work: threading.Semaphore
    done: Counter[str] = dataclasses.field(default_factory=Counter)
    lock: Any = dataclasses.field(default_factory=threading.Lock)
    proving: Any = dataclasses.field(default_factory=threading.Lock)
    stop: threading.Event = dataclasses.field(default_factory=threading.Event)

    @classmethod
    def of(cls, source: ShardedSource, tokenizer: Tokenizer, **options: Unpack[Options]) -> _Job:
        """Cuts the source into ranges. Raises ConfigError, SourceError; reads no text."""
        on_error, budget = options.get("on_error", "error"), options.get("max_bad_rows")
        if budget is not None and on_error == "error":
            raise ConfigError(
                at="max_bad_rows",
                problem="has no effect while on_error is 'error'",
                fix="Set on_error to 'skip'.",
            )
        form = options.get("form") or TextForm(options.get("content_field", "text"))
        form.require(source, options["dataset"])
        workers = options.get("num_workers") or _cores()
        folder = folder_of(options["cache_dir"])
        recipe = form.recipe(tokenizer, refuted=tokenizer.refuted(folder.local))
        return cls(
            source=source,
            tokenizer=tokenizer,
            dataset=options["dataset"],
            form=form,
            folder=folder,
            recipe=recipe,
            ranges=options.get("ranges_of", ranges_of)(source, recipe),
            on_error=on_error,
            max_bad_rows=budget,
            batch_size=options.get("batch_size", 1000),
            workers=workers,
            at_work=threading.Semaphore(workers),
        )

    @functools.cached_property
    def key(self) -> str:
        return manifest_key(self.ranges, self.on_error, self.max_bad_rows)

    @property
    def manifest(self) -> Path | str:
        return self.folder.manifest(self.key)

    def count(self, **amounts: int) -> None:
        with self.lock:
            self.done.update(amounts)

    def record_path(self, piece: Range) -> Path | str:
        return record_path(self.folder, self.recipe, piece.key)

    def record(self, piece: Range) -> Record | None:
        return read_record(self.record_path(piece), self.folder.options)


def _open(job: _Job) -> TokenCache | None:
    """None where the cache was never finished, or a file of it is gone or damaged: then it is made
    good.
    """
    try:
        cache = TokenCache(job.manifest, dataset=job.dataset, folder=job.folder)
        if job.folder.holds_quarantine(cache.manifest):
            return cache
        logger.warning(
            "dataset %s: %s is gone or damaged, and is written again", job.dataset, cache.quarantine
        )
        return None
    except MissingFileError:
        return None
    except (CacheError, StorageError) as error:
        logger.warning("dataset %s: the token cache is prepared again: %s", job.dataset, error)
        return None


def _run(job: _Job, ranges: Sequence[Range]) -> Generator[Record]:
    """Records in the order of `ranges`, whatever order they are finished in; a bounded number is
    under way.

    A few threads more than work at a time: committing is waiting for the disk or the store.
    """
    under_way: deque[Future[Record]] = collections.deque()
    waiting = iter(ranges)
    threads = job.workers + (UPLOADS if job.folder.remote else SYNCS)
    pool = ThreadPoolExecutor(
        max(1, min(threads, len(ranges))), thread_name_prefix="easypipe-tokenize"
    )
    try:
        for _ in ranges:
            while (
                len(under_way) < max(2 * job.workers, threads)
                and (following := next(waiting, None)) is not None
            ):
                under_way.append(pool.submit(_process, job, following))
            yield under_way.popleft().result()
    finally:
        job.stop.set()
        pool.shutdown(wait=True, cancel_futures=True)


def _process(job: _Job, piece: Range) -> Record:
    """Read, tokenize, commit one range, as far as it is not done. Runs on a worker thread."""
    name = job.source.shards[piece.shard].name
    try:
        record = _finished(job, piece)
        if record is not None:
            job.count(ranges_reused=1)
            return record
        if job.stop.is_set():
            raise CacheError(at=name, problem="tokenizing was stopped")
        record = _stored(job, piece, name)
        write_record(job.record_path(piece), record, job.folder.options)
        return record
    except Exception as error:
        error.add_note(
            f"while tokenizing dataset {job.dataset!r}, {name}, rows {piece.start}:{piece.stop}"
        )
        raise


def _finished(job: _Job, piece: Range) -> Record | None:
    """The record of a range that was committed, if its tokens are whole."""
    record = job.record(piece)
    if record is None or not record.file:
        return record
    return record if job.folder.holds(record.file, record.num_bytes, record.checksum) else None


def _prove(job: _Job, texts: pa.LargeStringArray) -> None:
    """The fast backend is used on this dataset only once it agreed with the reference on some of
    it.
    """
    with job.proving:
        if "proved" in job.done:
            return
        sample = sample_of(texts, SAMPLE_ROWS, SAMPLE_BYTES)
        backend = job.tokenizer.prove(sample, of=f"dataset {job.dataset}", memo=job.folder.local)
        logger.debug("dataset %s: tokenizing with %s: %s", job.dataset, job.tokenizer.name, backend)
        job.count(proved=1)


def _stored(job: _Job, piece: Range, name: str) -> Record:
    """The record of a range, with its token file in place: written now, or found under the name
    that its content gives it.
    """
    with job.at_work:
        texts = job.form.read(job.source, piece.shard, piece.start, piece.stop)
        text, text_bytes, rejects = texts.content_hash(), texts.num_bytes, list(texts.rejects)
        identity = digest("tokens", job.recipe, text)
        file = f"{identity[:2]}/{identity}.arrow"
        (stats, stamp), documents = _found(job.folder, file), None
        if stats is None:
            _prove(job, texts.texts)
            documents = job.form.encode(
                texts, job.tokenizer, batch_size=job.batch_size, at=name, audit_key=text
            )
            job.count(documents_encoded=len(texts.texts), ranges_written=1)
            stats = _stats(documents, str(job.tokenizer.backend.name))
        del texts  # they are larger than their tokens
    if documents is None:
        job.count(ranges_found_by_content=1)
    elif documents.batch.num_rows:
        stamp = job.folder.commit_tokens(file, documents.batch, stats)
    rejects = counted([*rejects, *(Reject(**reject) for reject in stats.pop("rejects"))])
    return Record(
        shard_name=name,
        start=piece.start,
        stop=piece.stop,
        text=text,
        text_bytes=text_bytes,
        file=file if stats["docs"] else "",
        num_bytes=stamp.num_bytes,
        checksum=stamp.checksum,
        blocks=stamp.blocks,
        rejects=rejects,
        **stats,
    )


def _stats(documents: Documents, encoder: str) -> dict[str, Any]:
    return {
        "docs": documents.batch.num_rows,
        "tokens": documents.tokens,
        "encoded": documents.encoded,
        "added": documents.added,
        "truncated": documents.truncated,
        "special": documents.special,
        "escaped": documents.escaped,
        "lost": documents.lost,
        "lengths": dict(documents.lengths),
        **({} if documents.trained is None else {"trained": documents.trained}),
        "content": documents.content,
        "encoder": encoder,
        "rejects": [dataclasses.asdict(reject) for reject in counted(documents.rejects)],
    }


def _found(folder: CacheFolder, file: str) -> tuple[dict[str, Any] | None, TokenStamp]:
    """What a token file says of itself, and its stamp; None where it is not there, or not whole."""
    nothing = None, TokenStamp(num_bytes=0, checksum="")
    try:
        data = folder.content(file)
        batch = pa.ipc.open_file(data).get_batch(0)
        stats = json.loads((batch.schema.metadata or {})[STATS])
    except FileNotFoundError:
        return nothing
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        logger.warning("%s: written again, it is damaged: %s", folder.tokens(file), error)
        return nothing
    if documents_hash(batch) != stats["content"]:
        logger.warning(
            "%s: written again, it is damaged: its tokens have another hash than was committed",
            folder.tokens(file),
        )
        return nothing
    return stats, TokenStamp(
        num_bytes=data.size, checksum=xxh3_128_hexdigest(data), blocks=block_sums(data)
    )


def _write_quarantine(job: _Job) -> tuple[str, str]:
    """The file and its checksum. One JSON object a line: file, row, reason, detail, raw. Benign
    rows are no bad rows.
    """
    name = f"{job.key}.quarantine.jsonl"
    with (
        storage.commit_file(job.folder.at("manifests", name), job.folder.options) as (
            temporary,
            stamp,
        ),
        open(temporary, "w", encoding="utf-8") as out,
    ):
        for piece in job.ranges:
            record = job.record(piece)
            assert record is not None, "every range was committed"
            for reject in record.rejects:
                if not reject.benign:
                    raw = raw_row(job.source, piece.shard, reject, job.form.columns[0])
                    row = {
                        "file": record.shard_name,
                        "row": reject.row,
                        "reason": reject.reason,
                        "detail": reject.detail,
                        "raw": raw,
                    }
                    out.write(json.dumps(row, ensure_ascii=False) + "\n")
    return name, stamp().checksum


def _identity(tokenizer: Tokenizer) -> TokenizerIdentity:
    return TokenizerIdentity(
        name=tokenizer.name,
        fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
