"""How soon the first batch comes of a token cache of 10 GB, in process and with imports warm.

The cache is synthetic and sparse: a manifest over some 2,400 token files of 4 MB, as 20 GB of text
make, whose tokens are holes on disk (zeros when they are read) and whose lengths, offsets and row
numbers are there. Timed from Pipeline to the first batch of packed rows, for

first open   nobody has planned these rows before
later        the plan's checkpoints lie beside the cache
a tenth      first open of a cache of a tenth of the size: what does not grow with the
             data is what the two have in common
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from _common import Report, arguments
from easypipe import (
    BaseStage,
    DatasetConfig,
    LoadStageConfig,
    PackStageConfig,
    Pipeline,
    PipelineConfig,
)
from easypipe.cache.blocks import block_sums
from easypipe.cache.folder import CacheFolder
from easypipe.cache.manifest import Counts, Manifest, Part, TokenizerIdentity, fingerprint_of
from easypipe.cache.reader import TokenCache, cache_schema
from easypipe.core.protocols import ShardedDataSource

VOCAB, EOS = 50_257, 50_256
PART_BYTES = 4 << 20
BLOCK = 4096


def sparse_cache(folder: Path, num_bytes: int) -> Path:
    """Writes the cache, and returns its manifest."""
    rng = np.random.Generator(np.random.PCG64(0))
    lengths = np.maximum(1, rng.lognormal(np.log(400), 1.0, 4000)).astype(np.int64)
    lengths = lengths[: int(np.searchsorted(np.cumsum(lengths), PART_BYTES // 2))]
    docs, tokens = len(lengths), int(lengths.sum())
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]))
    batch = pa.RecordBatch.from_arrays(
        [
            pa.LargeListArray.from_arrays(offsets, pa.array(np.zeros(tokens, np.uint16))),
            pa.array(np.zeros(docs, np.uint8)),
            pa.array(np.arange(docs, dtype=np.int64)),
        ],
        schema=cache_schema(VOCAB),
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    buffer = sink.getvalue()
    data, blocks = np.frombuffer(buffer, np.uint8), block_sums(buffer)
    used = np.array([data[at : at + BLOCK].any() for at in range(0, data.size, BLOCK)])
    edges = np.flatnonzero(np.diff(used, prepend=False, append=False)) * BLOCK
    runs = [(int(a), data[a:b].tobytes()) for a, b in edges.reshape(-1, 2)]
    parts = []
    for number in range(-(-num_bytes // data.size)):
        name = f"{number % 256:02x}/{number:08x}.arrow"
        path = folder / "tokens" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as file:
            for at, run in runs:
                file.seek(at)
                file.write(run)
            file.truncate(data.size)
        parts.append(
            Part(
                shard=0,
                start=number * docs,
                stop=(number + 1) * docs,
                docs=docs,
                tokens=tokens,
                file=name,
                num_bytes=data.size,
                blocks=blocks,
            )
        )
    rows = len(parts) * docs
    tokenizer = TokenizerIdentity(
        name="none", fingerprint="none", vocab_size=VOCAB, eos_token_id=EOS
    )
    manifest = Manifest(
        dataset="text",
        key="sparse",
        content_field="text",
        tokenizer=tokenizer,
        shard_names=("text",),
        shard_rows=(rows,),
        parts=tuple(parts),
        counts=Counts(
            rows=rows, docs=rows, encoded=len(parts) * tokens, tokens=len(parts) * tokens
        ),
        fingerprint=fingerprint_of(tokenizer, parts),
    )
    CacheFolder(folder).commit_manifest(manifest)
    return folder / "manifests" / "sparse.json"


class Cached(ShardedDataSource):
    """Documents of a token cache that stands; opened where the pipeline first needs it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.schema, self.shards, self.fingerprint = cache_schema(VOCAB), (), "sparse"

    def materialize(self) -> TokenCache:
        return TokenCache(self._path)

    def read(self, shard: int, start: int, stop: int) -> pa.RecordBatch:
        return self.materialize().read(shard, start, stop)


class OpenCache(BaseStage):
    name = "open"

    def process(self, data: dict[str, Any], context: Any) -> dict[str, Any]:
        return {"text": Cached(context.config.cache_dir / "manifests" / "sparse.json")}


def first_batch(folder: Path, seq_length: int, batch_size: int) -> float:
    config = PipelineConfig(
        datasets=[
            DatasetConfig(
                name="text",
                data_files=[{"text": "stands in for the files that the cache was made of"}],
            )
        ],
        seed=1,
        cache_dir=folder,
        pack=PackStageConfig(seq_length=seq_length, strategy="first_fit", eos_token_id=EOS),
        load=LoadStageConfig(batch_size=batch_size),
    )
    start = time.perf_counter()
    loader = Pipeline(config).source().add_stage(OpenCache()).pack().load().build()
    batches = iter(loader)
    batch = next(batches)
    elapsed = time.perf_counter() - start
    assert batch["input_ids"].shape == (batch_size, seq_length)
    batches.close()
    return elapsed


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--gigabytes", type=float, default=10.0)
    parser.add_argument("--seq-length", type=int, default=2048)
    parser.add_argument("--batch-size", type=int, default=8)
    options = parser.parse_args()
    report = Report("first_batch", "s")
    with tempfile.TemporaryDirectory() as scratch:
        whole, tenth = Path(scratch) / "whole", Path(scratch) / "tenth"
        for folder, size in ((whole, options.gigabytes), (tenth, options.gigabytes / 10)):
            cache = TokenCache(sparse_cache(folder, int(size * 1e9)))
            report.facts[f"{folder.name}: token files, documents, tokens"] = [
                len(cache.manifest.parts),
                cache.num_docs,
                cache.total_tokens,
            ]
            del cache
        cases = {
            "first open": (whole, True),
            "later": (whole, False),
            "first open of a tenth": (tenth, True),
        }
        for turn in range(-1, options.rounds):
            for name, (folder, fresh) in cases.items():
                if fresh:
                    shutil.rmtree(folder / "plans", ignore_errors=True)
                elapsed = first_batch(folder, options.seq_length, options.batch_size)
                if turn >= 0:
                    report.seconds.setdefault(name, []).append(elapsed)
    report.target(
        "first batch, first open, seconds",
        statistics.median(report.seconds["first open"]),
        below=0.3,
    )
    report.target(
        "first batch, later, seconds", statistics.median(report.seconds["later"]), below=0.3
    )
    report.finish(options.out)


if __name__ == "__main__":
    main()
