"""CacheWriter fills a token cache with threads: it tokenizes or reuses ranges, commits a manifest.

Everything that was committed is reused: a range whose file did not change is not read, and a range
whose text did not change is not tokenized. A killed process leaves committed ranges, and the next
one continues from there. The layout of the folder is in cache/manifest.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import pyarrow as pa
from xxhash import xxh3_128_hexdigest

from easypipe.cache.bad_rows import ErrorBudget, OnError, write_quarantine
from easypipe.cache.blocks import TokenStamp, block_sums
from easypipe.cache.encoder import RowEncoder, RowsRead
from easypipe.cache.folder import STATS, CacheFolder
from easypipe.cache.manifest import FORMAT, Counts, Manifest, Part, fingerprint_of, total
from easypipe.cache.ranges import (
    Range,
    Record,
    counts_json,
    kept_rejects,
    ranges_of,
    read_record,
    record_of,
    record_path,
    write_record,
)
from easypipe.cache.reader import TokenCache
from easypipe.core import locks, storage
from easypipe.core.config import digest, fields_of, to_dict
from easypipe.core.errors import CacheError, MissingFileError, StorageError, require
from easypipe.core.protocols import (
    ProgressEvent,
    ProgressListener,
    Reject,
    ShardedSource,
    Source,
    fetched,
    innermost,
    silent,
)
from easypipe.core.threads import Threads
from easypipe.core.values import JsonObject

log = logging.getLogger("easypipe")
R = TypeVar("R", bound=RowsRead)

# how many ranges may wait for the disk, or for a bucket, while others are tokenized
SYNCS = 3
UPLOADS = 8
# how many later ranges may be finished while one waits for its server; their records are held
AHEAD = 256
_telling = threading.RLock()  # several datasets may be prepared at once, and report to one listener


@dataclass(kw_only=True, eq=False)
class CacheWriter(Generic[R]):
    """Fills the token cache of one dataset.

    It is thread-safe, and reads no rows until a method needs them.

    Args:
        source: The rows.
        encoder: Turns rows into documents.
        dataset: The name of the dataset.
        folder: The cache folder.
        on_error: What happens at a bad row (null, empty, not a string, rejected by the source):
            "error" stops, "skip" leaves it out and counts it by reason, "quarantine" also writes it
            to a file next to the manifest.
        max_bad_rows: Stops at the first bad row after this many, counted in the order of the
            shards.
        num_workers: How many ranges are processed at a time, each held in memory; None: one per
            core.
        progress: Called after every range.
        stage: The stage that its progress events name.
        when_made: Called with the key of the manifest when `fill` has made or found it.

    Raises:
        ConfigError: max_bad_rows has no effect.
    """

    source: ShardedSource
    encoder: RowEncoder[R]
    dataset: str
    folder: CacheFolder
    on_error: OnError = "error"
    max_bad_rows: int | None = None
    num_workers: int | None = None
    progress: ProgressListener = silent
    stage: str = "tokenize"
    when_made: Callable[[str], None] = lambda key: None

    def __post_init__(self) -> None:
        require(
            self.max_bad_rows is None or self.on_error != "error",
            "max_bad_rows",
            "has no effect while on_error is 'error'",
            "Set on_error to 'skip'.",
        )
        self._lock = threading.Lock()
        self._cache: TokenCache | None = None
        self._ranges: tuple[str, Sequence[Range]] = "", ()

    def ranges(self) -> Sequence[Range]:
        """Returns all rows of the source cut into ranges; reads no text.

        The result is kept: thousands of shards are cut once in a process, and not again for every
        part of them.

        Raises:
            SourceError: The rows of a shard cannot be counted.
        """
        key = self.encoder.key()
        if self._ranges[0] != key:
            self._ranges = key, ranges_of(self.source, key)
        return self._ranges[1]

    def key(self) -> str:
        """Returns the key of the manifest, which is its name."""
        return self._key(self.ranges())

    def _key(self, ranges: Sequence[Range]) -> str:
        keys = [piece.key for piece in ranges]
        return digest("manifest", FORMAT, keys, self.on_error, self.max_bad_rows)

    def path(self) -> Path | str:
        """Returns the path or URL of the manifest, which need not exist yet."""
        return self.folder.manifest(self.key())

    def missing(self) -> tuple[list[int], int]:
        """Returns which ranges are not committed yet; reads no text.

        Returns:
            (numbers of those ranges, how many ranges there are); none are missing once the manifest
            exists.
        """
        ranges = self.ranges()
        if storage.exists(self.path(), self.folder.options):
            return [], len(ranges)
        return [i for i, one in enumerate(ranges) if self.record(one) is None], len(ranges)

    def is_filled(self) -> bool:
        """Returns whether the token cache can be opened without further work."""
        try:
            TokenCache(self.path(), folder=self.folder)
        except (CacheError, FileNotFoundError):
            return False
        return True

    def fill(self, *, again: bool = False) -> TokenCache:
        """Returns the token cache: opened if it is complete, finished if it was begun.

        Args:
            again: Whether to examine its files again; otherwise every later call returns the same
                object.

        Raises:
            SourceError: A column is missing, or a row is bad.
            BudgetError: There are more bad rows than allowed.
            TokenizerError: The tokenizer does not encode as it should.
            StorageError: A file cannot be read or committed.
        """
        with self._lock:
            if self._cache is None or again:
                ranges = self.ranges()
                key = self._key(ranges)
                self._cache = self._opened(key) or self._filled(key, ranges)
                if not self.folder.temporary:
                    self.when_made(self._cache.manifest.key)
            return self._cache

    def fill_part(self, numbers: Sequence[int]) -> int:
        """Tokenizes and commits some ranges without writing the manifest.

        `fill` then finds them done, on any machine. It also charges their bad rows to the budget,
        in order. The errors are those of `fill`.

        Args:
            numbers: The numbers of the ranges.

        Returns:
            How many rows the ranges have.
        """
        require(
            not self.folder.temporary,
            f"datasets.{self.dataset}.cache_enabled",
            "its tokens are not kept, so no other process could take up this part",
            "Set cache_enabled and tokenize.cache_tokenized, and give its functions a version.",
        )
        ranges = self.ranges()
        work = _Work(self, [ranges[number] for number in numbers])
        budget = ErrorBudget(self.dataset, self.encoder.label, self.on_error, None)
        with locks.working(self.folder.local), contextlib.closing(work.records()) as records:
            for record in records:
                budget.charge(record)
        return work.num_rows

    def _opened(self, key: str) -> TokenCache | None:
        """Returns the cache; None if it was never finished, or if a file is gone or damaged.

        The caller then makes the missing files.
        """
        try:
            cache = TokenCache(self.folder.manifest(key), dataset=self.dataset, folder=self.folder)
            if self.folder.holds_quarantine(cache.manifest):
                log.info(
                    "dataset %s: token cache %s is complete, nothing is tokenized",
                    self.dataset,
                    key,
                )
                return cache
            why = f"{cache.quarantine} is gone or damaged, and is written again"
        except MissingFileError:
            return None
        except (CacheError, StorageError) as error:
            why = str(error)
        log.warning("dataset %s: the token cache is prepared again: %s", self.dataset, why)
        return None

    def _filled(self, key: str, ranges: Sequence[Range]) -> TokenCache:
        """Makes the ranges that are missing, then the manifest."""
        source = self.source
        with locks.preparing(self.folder.local, key, self.dataset) as waited:
            if waited and (opened := self._opened(key)):
                return opened
            storage.sweep(self.folder.local)
            work, started = _Work(self, ranges), time.perf_counter()
            budget = ErrorBudget(self.dataset, self.encoder.label, self.on_error, self.max_bad_rows)
            parts: list[Part] = []
            every: list[Counts] = []
            with contextlib.closing(work.records()) as records:
                for record in records:
                    budget.charge(record)
                    parts.append(record.part)
                    every.append(record.counts)
            counts = total(every)
            budget.require_documents(counts)
            quarantine, checksum = self._left_out(key, ranges, budget, counts.rows)
            identity = self.encoder.tokenizer_identity
            manifest = Manifest(
                dataset=self.dataset,
                key=key,
                content_field=self.encoder.label,
                tokenizer=identity,
                shard_names=tuple(shard.name for shard in source.shards),
                shard_rows=tuple(shard.num_rows or 0 for shard in source.shards),
                parts=tuple(parts),
                counts=counts,
                fingerprint=fingerprint_of(identity, parts),
                loss_mask=self.encoder.masked,
                pairs=self.encoder.pairs,
                aligned=self.encoder.aligned,
                quarantine=quarantine,
                quarantine_checksum=checksum,
                facts=work.facts(time.perf_counter() - started),
            )
            manifest.counts.ledger(self.dataset, {}).check()
            self.folder.commit_manifest(manifest)
            return TokenCache(self.folder.manifest(key), dataset=self.dataset, folder=self.folder)

    def _left_out(
        self, key: str, ranges: Sequence[Range], budget: ErrorBudget, num_rows: int
    ) -> tuple[str, str]:
        """Logs what was left out; returns the name and the checksum of its file, "" if none."""
        if not budget.bad:
            return "", ""
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in budget.reasons.items())
        log.warning(
            "dataset %s: on_error is %r: %d of %d rows left out (%s)",
            self.dataset,
            self.on_error,
            budget.bad,
            num_rows,
            reasons,
        )
        if self.on_error != "quarantine":
            return "", ""
        column = self.encoder.columns[0]
        quarantine, checksum = write_quarantine(
            self.folder, key, self.dataset, self._records(ranges), self.source, column
        )
        says = "its bad rows are in %s"
        if self.folder.temporary:
            says = (
                "its tokens are not kept, and neither are its bad rows: %s is removed when "
                "this process ends"
            )
        log.warning(f"dataset %s: {says}", self.dataset, self.folder.at("manifests", quarantine))
        return quarantine, checksum

    def record(self, piece: Range) -> Record | None:
        """Returns the committed record of a range; None if there is none."""
        record = read_record(record_path(self.folder, piece), piece.shard, self.folder.options)
        if record is None or (record.part.start, record.part.stop) != (piece.start, piece.stop):
            return None
        return record

    def _records(self, ranges: Sequence[Range]) -> Iterator[Record]:
        for piece in ranges:
            record = self.record(piece)
            assert record is not None, "every range was committed"
            yield record


class _Work(Generic[R]):
    """Threads that process ranges, and their counts."""

    def __init__(self, writer: CacheWriter[R], ranges: Sequence[Range]) -> None:
        self._writer, self._ranges = writer, ranges
        self._folder, self._encoder = writer.folder, writer.encoder
        self._workers = writer.num_workers or cores()
        self._at_work = threading.Semaphore(self._workers)
        self._waits = isinstance(writer.source, Source) and writer.source.waits
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._done = Counter[str]()
        self._encoders: set[str] = set()
        self._text_bytes = 0
        self.num_rows = sum(piece.stop - piece.start for piece in ranges)

    def records(self) -> Generator[Record]:
        """Yields the record of each range in order, no matter in which order they are finished."""
        rows = 0
        # a single range needs no thread
        made = self._by_threads() if len(self._ranges) > 1 else map(self._process, self._ranges)
        for record in made:
            yield record
            rows += record.counts.rows
            self._text_bytes += record.text_bytes
            self._encoders.add(record.encoder)
            event = ProgressEvent(
                stage=self._writer.stage,
                dataset=self._writer.dataset,
                done=rows,
                total=self.num_rows,
                unit="rows",
                num_bytes=self._text_bytes,
            )
            with _telling:
                self._writer.progress(event)

    def _by_threads(self) -> Generator[Record]:
        """Does what `records` does, with a bounded number of ranges in progress.

        There are more threads than processing needs, because committing waits for the disk or the
        store, and reading may wait too.
        """
        under_way: deque[Future[Record]] = deque()
        waiting = iter(self._ranges)
        threads = self._workers + (UPLOADS if self._folder.remote else SYNCS)
        threads += self._workers if self._waits else 0
        most = threads + AHEAD
        pool = Threads(min(threads, len(self._ranges)), thread_name_prefix="easypipe-tokenize")
        try:
            for _ in self._ranges:
                while len(under_way) < most and (piece := next(waiting, None)) is not None:
                    under_way.append(pool.submit(self._process, piece))
                yield under_way.popleft().result()
        finally:
            self._stop.set()
            pool.shutdown(wait=True, cancel_futures=True)

    def facts(self, seconds: float) -> JsonObject:
        """Returns measured facts, for people."""
        facts: JsonObject = {"seconds": round(seconds, 3), "text_bytes": self._text_bytes}
        # if some ranges were done before, or elsewhere, the seconds do not cover all of them
        if not self._done["ranges_reused"]:
            speed = self._text_bytes / 1e6 / max(seconds, 1e-9)
            facts["megabytes_per_second"] = round(speed, 1)
        facts["encoder"] = ", ".join(sorted(self._encoders))
        source = innermost(self._writer.source)
        if isinstance(source, Source) and (cut := source.files_cut):
            facts["files_cut"] = cut
        names = ("ranges_reused", "ranges_found_by_content", "ranges_written", "documents_encoded")
        return facts | {name: self._done[name] for name in names}

    def _process(self, piece: Range) -> Record:
        """Reads, tokenizes and commits one range, except for steps that are done already.

        It runs on a worker thread.
        """
        name, dataset = self._writer.source.shards[piece.shard].name, self._writer.dataset
        try:
            record = self._writer.record(piece)
            if record is not None and self._is_whole(record.part):
                self._count(ranges_reused=1)
                return record
            if self._stop.is_set():
                raise CacheError(at=name, problem="tokenizing was stopped")
            record = self._store(piece, name)
            write_record(record_path(self._folder, piece), record, self._folder.options)
            return record
        except Exception as error:
            # Arrow says this if the memory limit leaves no space for a thread's stack
            no_thread = isinstance(error, pa.ArrowException) and "worker thread" in str(error)
            if no_thread or isinstance(error, MemoryError):
                raise CacheError(
                    at=f"{name}, rows {piece.start} to {piece.stop}",
                    problem="no thread can be started" if no_thread else "memory ran out",
                    fix="Give the process more memory, or set a smaller tokenize.num_workers.",
                ) from error
            if self._encoder.backend:
                at = f"{name}, rows {piece.start}:{piece.stop}"
                error.add_note(f"while tokenizing dataset {dataset!r}, {at}")
            raise

    def _is_whole(self, part: Part) -> bool:
        return not part.file or self._folder.holds(part.file, part.num_bytes, part.checksum)

    def _store(self, piece: Range, name: str) -> Record:
        """Returns the record of a range whose token file is in place.

        The file is written now, or found under the name that follows from its content.
        """
        source, encoder = self._writer.source, self._encoder
        span = piece.shard, piece.start, piece.stop
        with fetched(source, *span) if self._waits else contextlib.nullcontext(), self._at_work:
            rows = encoder.read(source, *span)
            text, text_bytes, rejects = rows.content_hash(), rows.num_bytes, rows.rejects
            identity = digest("tokens", piece.recipe, text)
            file = f"{identity[:2]}/{identity}.arrow"
            found, batch = self._found(file, piece, rejects), None
            if found is None:
                documents = encoder.encode(rows, at=name, audit_key=text)
                batch = documents.batch
                said = {
                    "file": file,
                    **counts_json(documents.counts),
                    "content": encoder.content(batch),
                    "encoder": encoder.backend,
                    "rejects": to_dict(kept_rejects(documents.rejects)),
                }
                found = said, TokenStamp(num_bytes=0, checksum="")
                self._count(documents_encoded=rows.num_texts, ranges_written=1)
            del rows  # freed before the commit, because rows are larger than their tokens
        said, stamp = found
        if batch is None:
            self._count(ranges_found_by_content=1)
        elif batch.num_rows:
            stamp = self._folder.commit_tokens(file, batch, said)
        where = {"shard": piece.shard, "start": piece.start, "stop": piece.stop}
        record = record_of(
            {
                **said,
                **where,
                **fields_of(stamp),
                "file": file if said["docs"] else "",
                "shard_name": name,
                "text": text,
                "text_bytes": text_bytes,
            },
            rejects,
        )
        return dataclasses.replace(record, rejects=kept_rejects(record.rejects))

    def _found(
        self, file: str, piece: Range, rejects: Sequence[Reject]
    ) -> tuple[JsonObject, TokenStamp] | None:
        """Returns the metadata and the stamp of a token file that is already there.

        Args:
            file: The name of the file, which follows from its content.
            piece: The range whose documents it should hold.
            rejects: The rows of the range that were not passed on.

        Returns:
            None if it is missing or damaged, or if its documents and `rejects` are not all rows of
            `piece`.
        """
        data = pa.py_buffer(b"")
        try:
            data = self._folder.content(file)
            batch = pa.ipc.open_file(data).get_batch(0)
            said = json.loads((batch.schema.metadata or {})[STATS])
            whole = self._encoder.content(batch) == said["content"]
            why = "its tokens have another hash than was committed"
            if (name := said.get("file", file)) != file:  # earlier versions left it out
                whole, why = False, f"it was written as {name}"
            elif whole and _leaks(said, piece, rejects):
                whole, why = False, "it holds the documents of other rows"
        except FileNotFoundError:
            return None
        except (pa.ArrowException, OSError, KeyError, ValueError) as error:
            said, whole, why = {}, False, str(error)
        if not whole:
            path = self._folder.tokens(file)
            log.warning("%s: written again, it is damaged: %s", path, why)
            return None
        checksum = xxh3_128_hexdigest(data)
        return said, TokenStamp(num_bytes=data.size, checksum=checksum, blocks=block_sums(data))

    def _count(self, **amounts: int) -> None:
        with self._lock:
            self._done.update(amounts)


def _leaks(said: JsonObject, piece: Range, rejects: Sequence[Reject]) -> bool:
    """Returns whether a token file's own counts do not account for every row of a range."""
    nothing = {"shard": 0, "num_bytes": 0, "checksum": "", "shard_name": "", "file": ""}
    where = {"start": piece.start, "stop": piece.stop, "text": "", "text_bytes": 0}
    counts = record_of({**said, **nothing, **where}, rejects).counts
    return any(entry.leak for entry in counts.ledger("", {}).entries)


def cores() -> int:
    """Returns the number of cores that this process may use; only Linux reports which they are."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
