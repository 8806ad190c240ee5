"""The save stage: rows of any source into a folder of shards that reads back as what was saved."""

from __future__ import annotations

import os
import re
import threading
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from easypipe.core import storage
from easypipe.core.config import config, digest
from easypipe.core.errors import ConfigError
from easypipe.core.ledger import Ledger
from easypipe.core.protocols import BaseStage, PipelineContext, ProgressEvent, ShardedSource, scan
from easypipe.core.schema import INPUT_IDS, SEGMENT_IDS
from easypipe.stages.books import is_endless, ledger_of, rows_of
from easypipe.stages.folder import Run, open_run
from easypipe.stages.layout import count_rows, default_shard_bytes, locate, shard_edges
from easypipe.stages.saved import FORMAT_VERSION, SavedManifest, SavedShard, join, schema_to_text
from easypipe.stages.shard_writer import CODECS, Format, check_codec, check_json, open_writer
from easypipe.stages.tokens import token_info

BATCH_BYTES = 16 << 20  # of one row group or record batch, before compression

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


@config
class SaveStageConfig:
    """Where and how rows are written.

    enabled: False skips the stage.
    output_dir: folder or URL. Several datasets go to a folder each below it; a dataset's own `save_path` goes before it.
    compression: None takes the format's own default: zstd for parquet, none for arrow (so that it can be memory-mapped) and jsonl.
    num_shards: exactly so many files; None makes as many as `max_shard_size` asks for.
    max_shard_size: bytes of a shard's rows before compression, as a number or as "500MB". None, where num_shards is None too: an eighth of
        the data, but at least 16 MiB and at most 500 MiB, so that several cores can write.
    overwrite: replace what another run left in the folder. The old shards stay readable until the new ones are complete.
    """

    enabled: bool = True
    output_dir: str | Path | None = None
    format: Format = "parquet"
    compression: Literal["none", "gzip", "lz4", "zstd"] | None = None
    num_shards: int | None = None
    max_shard_size: int | str | None = None
    overwrite: bool = False

    def check(self) -> None:
        check_codec(self.format, self.compression)
        if self.num_shards is not None and self.num_shards < 1:
            raise ConfigError(at="num_shards", problem=f"{self.num_shards} shards hold nothing", fix="Give at least 1.")
        if self.max_shard_size is not None:
            parse_bytes(self.max_shard_size)


def parse_bytes(size: int | str) -> int:
    """Bytes of `500`, `"500MB"` (10^6) or `"500MiB"` (2^20). Raises ConfigError at `max_shard_size`."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(size))
    if found is None or found[2].upper() not in _UNITS or float(found[1]) * _UNITS[found[2].upper()] < 1:
        raise ConfigError(at="max_shard_size", problem=f"{size!r} is no size", fix='Write bytes as a number, or like "500MB" or "2GiB".')
    return int(float(found[1]) * _UNITS[found[2].upper()])


@dataclass(frozen=True, kw_only=True)
class SavedFolder:
    """What stands in one output folder. `resumed_shards` were found finished; `up_to_date`: all of them were, nothing was written."""

    dataset: str
    path: str
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

    def enter(self, ledger: Ledger) -> None:
        """The balance of what was read and what was written, and what it took."""
        ledger.add("save", self.dataset, "rows", into={"read": self.num_read}, out={"saved": self.num_rows, **self.rejected})
        ledger.facts |= {f"save.{self.dataset}.seconds": round(self.seconds, 3), f"save.{self.dataset}.bytes": self.num_bytes}


@dataclass(frozen=True, kw_only=True)
class SaveReport:
    folders: tuple[SavedFolder, ...]
    ledger: Ledger = field(repr=False)

    @property
    def num_rows(self) -> int:
        return sum(folder.num_rows for folder in self.folders)


@dataclass(frozen=True, kw_only=True)
class _Target:
    dataset: str
    source: ShardedSource
    folder: str
    format: str
    compression: str


class SaveStage(BaseStage):
    """Passes its data on unchanged; `write` is what `Pipeline.build()` calls."""

    config: SaveStageConfig

    @property
    def name(self) -> str:
        return "save"

    def process(self, data: dict[str, ShardedSource], context: PipelineContext) -> dict[str, ShardedSource]:
        for target in self._targets(data, context):
            if is_endless(target.source):
                raise ConfigError(
                    at="save",
                    problem=f"{target.dataset!r} never ends: its stop_strategy is 'restart'",
                    fix="Set mix.stop_strategy to 'first_exhausted' or 'all_exhausted'.",
                )
            if target.format == "jsonl":
                check_json(target.source.schema)
        return data

    def write(self, data: dict[str, ShardedSource], context: PipelineContext) -> list[SavedFolder]:
        """Writes every dataset of `data`. Raises ConfigError where a folder holds something else, StorageError where writing fails."""
        return [_write(target, self.config, context) for target in self._targets(data, context)]

    def _targets(self, data: Mapping[str, ShardedSource], context: PipelineContext) -> list[_Target]:
        if not self.config.enabled:
            return []
        datasets = {dataset.name: dataset for dataset in context.config.datasets}
        for name, dataset in datasets.items():
            if dataset.save_path is not None and name not in data:
                raise ConfigError(
                    at=f"datasets.{name}.save_path",
                    problem="has no effect after mix(), where the datasets are one",
                    fix="Save before mix(), or drop it and set save.output_dir.",
                )
        targets = []
        for name, source in data.items():
            own = datasets.get(name)
            chosen: Format = (own.save_format if own is not None else None) or self.config.format
            if own is not None and own.save_path is not None:
                folder = str(own.save_path)
            elif self.config.output_dir is not None:
                folder = str(self.config.output_dir) if len(data) == 1 else join(self.config.output_dir, name)
            else:
                raise ConfigError(
                    at="save.output_dir", problem=f"no folder for dataset {name!r}", fix="Set it, or the dataset's save_path."
                )
            try:
                codec = check_codec(chosen, self.config.compression)
            except ConfigError as error:
                raise error.under("save") from None
            targets.append(_Target(dataset=name, source=source, folder=folder, format=chosen, compression=codec))
        return targets


def _write(target: _Target, options: SaveStageConfig, context: PipelineContext) -> SavedFolder:
    began = time.perf_counter()
    source = rows_of(target.source)
    if target.format == "jsonl":
        check_json(source.schema)
    limit = None if options.max_shard_size is None else parse_bytes(options.max_shard_size)
    if limit is None and options.num_shards is None:
        limit = default_shard_bytes(source.shards)
    identity = digest(
        "saved", FORMAT_VERSION, source.fingerprint, schema_to_text(source.schema), target.format, target.compression,
        options.num_shards, limit,
    )  # fmt: skip
    run = open_run(target.folder, identity, overwrite=options.overwrite)
    shards, resumed = run.standing(), 0
    up_to_date = shards is not None
    if up_to_date:
        run.tidy()
    if shards is None:
        edges = shard_edges(source, num_shards=options.num_shards, max_bytes=limit)
        names = [f"{run.prefix}{i:05d}-of-{len(edges) - 1:05d}{CODECS[target.format][target.compression]}" for i in range(len(edges) - 1)]
        run.claim()
        finished = run.finished(names)
        resumed = len(finished)
        done = finished | _write_missing(source, target, run, names, edges, finished, context)
        shards = tuple(done[name] for name in names)
    rows = sum(shard.num_rows for shard in shards)
    context.progress(_progress(target.dataset, rows, rows))
    rejected: Counter[str] = Counter()
    for shard in shards:
        rejected.update(shard.rejected)
    folder = SavedFolder(
        dataset=target.dataset,
        path=target.folder,
        format=target.format,
        num_shards=len(shards),
        num_read=count_rows(source.shards),
        num_rows=rows,
        num_tokens=sum(shard.num_tokens for shard in shards),
        num_bytes=sum(shard.num_bytes for shard in shards),
        rejected=dict(rejected),
        resumed_shards=resumed,
        up_to_date=up_to_date,
        seconds=time.perf_counter() - began,
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
        ledger={"entries": ledger.to_json()["entries"]},  # seconds are left out: the same rows make the same folder
    )
    if not folder.up_to_date:
        run.commit(manifest)
    return folder


def _write_missing(
    source: ShardedSource,
    target: _Target,
    run: Run,
    names: list[str],
    edges: np.ndarray,
    finished: Mapping[str, SavedShard],
    context: PipelineContext,
) -> dict[str, SavedShard]:
    """Writes the shards that are not `finished`, some at a time; each is committed as it ends."""
    missing = [i for i, name in enumerate(names) if name not in finished]
    written: dict[str, SavedShard] = {}
    if not missing:
        return written
    stop, lock, done = threading.Event(), threading.Lock(), sum(s.num_rows for s in finished.values())

    def count(rows: int) -> None:
        nonlocal done
        with lock:
            done += rows
            context.progress(_progress(target.dataset, done, int(edges[-1])))

    def work(i: int) -> SavedShard:
        try:
            return _write_shard(source, target, run, names[i], int(edges[i]), int(edges[i + 1]), stop, count)
        except Exception as error:
            error.add_note(f"while saving dataset {target.dataset!r}, shard {names[i]}, rows {edges[i]}:{edges[i + 1]}")
            raise

    pool = ThreadPoolExecutor(max(1, min(len(missing), os.cpu_count() or 1, 8)), thread_name_prefix="easypipe-save")
    try:
        for i, shard in zip(missing, pool.map(work, missing), strict=True):
            written[names[i]] = shard
    except BaseException:  # Ctrl-C too: the writers stop at their next batch, what is committed stays
        stop.set()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return written


class _StoppedError(Exception):
    """Another shard failed first; nobody sees this one."""


def _write_shard(
    source: ShardedSource, target: _Target, run: Run, name: str, start: int, stop_row: int, stop: threading.Event, count: Any
) -> SavedShard:
    rows, tokens, rejected = 0, 0, Counter()
    step = _batch_rows(source, start, stop_row)
    with (
        storage.commit_file(join(target.folder, name)) as (temporary, stamp),
        open_writer(temporary, target.format, target.compression, source.schema) as write,
    ):
        for shard, a, b in locate(source.shards, start, stop_row):
            for at in range(a, b, step):
                if stop.is_set():
                    raise _StoppedError
                batch, rejects = scan(source, shard, at, min(at + step, b))
                write(batch)
                rows += batch.num_rows
                tokens += _count_tokens(batch)
                rejected.update(reject.reason for reject in rejects)
                count(batch.num_rows)
    done = stamp()
    saved = SavedShard(
        name=name, num_rows=rows, num_tokens=tokens, num_bytes=done.num_bytes, checksum=done.checksum, rejected=dict(rejected)
    )
    run.record(saved)
    return saved


def _batch_rows(source: ShardedSource, start: int, stop: int) -> int:
    """Rows that make about BATCH_BYTES, judged by the first ones."""
    for shard, a, b in locate(source.shards, start, stop):
        probe = source.read(shard, a, min(b, a + 64))
        if probe.num_rows:
            return max(1, BATCH_BYTES // max(1, probe.nbytes // probe.num_rows))
    return 1024


def _count_tokens(batch: pa.RecordBatch) -> int:
    """Tokens without padding."""
    if SEGMENT_IDS in batch.schema.names:
        return int(np.count_nonzero(batch.column(SEGMENT_IDS).flatten().to_numpy(zero_copy_only=False)))
    return len(batch.column(INPUT_IDS).flatten()) if INPUT_IDS in batch.schema.names else 0


def _progress(dataset: str, done: int, total: int) -> ProgressEvent:
    return ProgressEvent(stage="save", dataset=dataset, done=done, total=total, unit="rows")
