"""Measures the time to the first batch, and the time from restoring a loader at batch 100,000 to
its next batch. The state is at most 4 KiB of JSON.

The state is taken by a loader that really got there. Each timed restore has a new loader, and ends
with the next batch, which is compared with the batch that the uninterrupted run gave. Grain's
packing iterator is restored beside it, from a place that it reaches in seconds.
"""

from __future__ import annotations

import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from _common import (
    Report,
    arguments,
    cut_documents,
    documents,
    one_parquet,
    packed_loader,
    tokenizer_folder,
)

BATCH = 8


def first_batch_of_a_process(tokenizer: Path, seq_length: int, file: Path) -> float:
    """Wall seconds from starting Python to the first batch, over a warm token cache."""
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from pathlib import Path\n"
        "from _common import packed_loader\n"
        f"next(iter(packed_loader(Path({str(file)!r}), Path({str(tokenizer)!r}), {seq_length}, "
        f"batch_size={BATCH})))\n"
    )
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def grain_restore(
    texts: list[str], tokenizer: Path, seq_length: int, at: int, rounds: int
) -> list[float]:
    import grain
    from tokenizers import Tokenizer

    reference = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    docs = [
        {"inputs": np.array(e.ids[:seq_length], np.int32)}
        for e in reference.encode_batch_fast(texts[:4000])
    ]

    def make() -> Any:
        stream = (
            grain.MapDataset.source(docs)
            .shuffle(seed=1)
            .repeat()
            .to_iter_dataset(grain.ReadOptions(num_threads=0))
        )
        packed = grain.experimental.FirstFitPackIterDataset(
            stream, length_struct={"inputs": seq_length}, num_packing_bins=64
        )
        return iter(packed.batch(BATCH))

    iterator = make()
    for _ in range(at):
        next(iterator)
    state = iterator.get_state()
    wanted = next(iterator)
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        again = make()
        again.set_state(state)
        batch = next(again)
        seconds.append(time.perf_counter() - start)
        if not np.array_equal(batch["inputs"], wanted["inputs"]):
            raise SystemExit("grain's restored iterator gave another batch")
    return seconds


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--at", type=int, default=100_000, help="the batch to restore at")
    parser.add_argument(
        "--peer-at", type=int, default=1000, help="the batch to restore Grain's packing iterator at"
    )
    parser.add_argument("--documents", type=int, default=20_000)
    parser.add_argument("--seq-length", type=int, default=512)
    options = parser.parse_args()
    texts = documents(options.text)
    report = Report("resume", "s")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["EASYPIPE_CACHE"] = folder
        tokenizer = tokenizer_folder(Path(folder), texts)
        docs = cut_documents(texts, options.documents, 1050)
        file = one_parquet(Path(folder), docs)

        def loader() -> Any:
            return packed_loader(
                file, tokenizer, options.seq_length, batch_size=BATCH, num_epochs=None
            )

        seconds = report.seconds
        for turn in range(-1, options.rounds):
            start = time.perf_counter()
            batches = iter(loader())
            next(batches)
            if turn >= 0:
                seconds.setdefault("first batch, warm cache", []).append(
                    time.perf_counter() - start
                )
            batches.close()

        running = loader()
        batches = iter(running)
        start = time.perf_counter()
        for _ in itertools.islice(batches, options.at):
            pass
        report.facts["batches/s on the way"] = round(options.at / (time.perf_counter() - start))
        state = running.state()
        text = state.to_json()
        wanted = next(batches)
        batches.close()
        del running

        for turn in range(-1, options.rounds):
            opening = time.perf_counter()
            fresh = loader()
            start = time.perf_counter()
            fresh.restore(type(state).from_json(text))
            batches = iter(fresh)
            batch = next(batches)
            over = time.perf_counter()
            batches.close()
            if turn >= 0:
                seconds.setdefault(f"restore at batch {options.at:,} to the next batch", []).append(
                    over - start
                )
                seconds.setdefault("the same with building the pipeline", []).append(over - opening)
            for column, values in wanted.items():
                if not np.array_equal(values, batch[column]):
                    raise SystemExit(
                        f"batch {options.at}, column {column}: the restored loader gave another "
                        "batch"
                    )

        for turn in range(-1, min(3, options.rounds)):
            elapsed = first_batch_of_a_process(tokenizer, options.seq_length, file)
            if turn >= 0:
                seconds.setdefault("first batch of a fresh process, imports included", []).append(
                    elapsed
                )
        seconds[f"grain FirstFit: restore at batch {options.peer_at:,}"] = grain_restore(
            docs, tokenizer, options.seq_length, options.peer_at, options.rounds
        )
    report.facts["state, bytes"] = len(text.encode())
    report.target(
        "restore, seconds",
        statistics.median(seconds[f"restore at batch {options.at:,} to the next batch"]),
        below=0.2,
    )
    report.target("state, bytes", len(text.encode()), below=4097)
    report.finish(options.out)


if __name__ == "__main__":
    main()
