"""Measures how full the rows of each packing strategy are and how fast it is, compared with
Grain's FirstFitPackIterDataset.

easypipe's time holds everything after the token cache: the plan over lengths, the gather of the
tokens from the mapped cache, and the four columns input_ids, labels, segment_ids, position_ids as
NumPy batches.

slots/s per core: all of it on one thread, without prefetching, in CPU time of that thread; for
documents of lognormal length, and for those of the shared chat data (their texts over and over) in
rows of 8,192. tokens/s against Grain: on the clock, each with its own threads. Grain packs `inputs`
and `targets` (labels shifted beforehand, untimed) from documents that lie in memory; it is timed
with its default read threads, and with none, which is faster here, on a part of them.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from _common import (
    SHARED,
    Report,
    alternate,
    arguments,
    cut_documents,
    documents,
    one_parquet,
    packed_loader,
    table,
    tokenizer_folder,
)

STRATEGIES = ("first_fit", "pool", "greedy", "concat")
BATCH = 64
CORE_BATCH = 8
GRAIN_BINS = 64


def run_ours(
    file: Path, tokenizer: Path, seq_length: int, strategy: str, seen: dict[str, float]
) -> float:
    tokens = slots = 0
    for batch in packed_loader(
        file, tokenizer, seq_length, strategy=strategy, batch_size=BATCH, drop_last=False
    ):
        tokens += int(np.count_nonzero(batch["segment_ids"]))
        slots += batch["segment_ids"].size
    seen[strategy] = tokens / slots
    return float(tokens)


def on_one_core(
    file: Path, tokenizer: Path, seq_length: int, rounds: int
) -> dict[str, tuple[float, float]]:
    """(fill, slots per second of CPU time) of each strategy: one pass over all documents, from the
    plan on.
    """
    fill: dict[str, float] = {}
    rates: dict[str, list[float]] = {strategy: [] for strategy in STRATEGIES}
    # the first compiles, and scans nothing that later ones are spared
    for turn in range(rounds + 1):
        for strategy in STRATEGIES:
            loader = packed_loader(
                file,
                tokenizer,
                seq_length,
                strategy=strategy,
                batch_size=CORE_BATCH,
                prefetch_enabled=False,
            )
            plan = loader.rows.plan
            # without the checkpoints that opening the loader has left
            fresh = type(plan)(plan.datasets, plan.spec)
            loader.rows.plan = fresh
            gc.collect()
            slots, start = 0, time.thread_time()
            for batch in loader:
                slots += batch["input_ids"].size
            if turn:
                rates[strategy].append(slots / (time.thread_time() - start))
            fill[strategy] = fresh.stats().fill
    return {
        strategy: (fill[strategy], statistics.median(rates[strategy])) for strategy in STRATEGIES
    }


def chat_texts(count: int) -> list[str]:
    """The conversations of the shared chat data, a document each, over and over. Empty where the
    data is not there.
    """
    found = []
    for path in sorted((SHARED / "chat").glob("*.json*")):
        text = path.read_text(encoding="utf-8")
        rows = (
            json.loads(text)
            if path.suffix == ".json"
            else [json.loads(line) for line in text.splitlines()]
        )
        for row in rows:
            parts = (
                [message.get("content") or "" for message in row["messages"]]
                if "messages" in row
                else [str(v) for v in row.values()]
            )
            found.append("\n".join(parts))
    return list(itertools.islice(itertools.cycle(found), count)) if found else []


def grain_documents(path: Path, texts: list[str], seq_length: int) -> list[dict[str, np.ndarray]]:
    from tokenizers import Tokenizer

    found = []
    for encoding in Tokenizer.from_file(str(path / "tokenizer.json")).encode_batch_fast(texts):
        ids = np.array(encoding.ids[:seq_length], np.int32)
        found.append({"inputs": ids, "targets": np.append(ids[1:], np.int32(-100))})
    return found


def run_grain(
    docs: list[dict[str, np.ndarray]], seq_length: int, threads: int | None, seen: dict[str, float]
) -> float:
    import grain

    rows = grain.MapDataset.source(docs).shuffle(seed=1)
    stream = (
        rows.to_iter_dataset()
        if threads is None
        else rows.to_iter_dataset(grain.ReadOptions(num_threads=threads))
    )
    packed = grain.experimental.FirstFitPackIterDataset(
        stream,
        length_struct={"inputs": seq_length, "targets": seq_length},
        num_packing_bins=GRAIN_BINS,
    )
    tokens = slots = 0
    for row in packed:
        tokens += int(np.count_nonzero(row["inputs_segment_ids"]))
        slots += seq_length
    seen["grain"] = tokens / slots
    return float(tokens)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--documents", type=int, default=70_000)
    parser.add_argument(
        "--peer-documents",
        type=int,
        default=8_000,
        help="how many of them Grain packs: rates are compared",
    )
    parser.add_argument(
        "--median-chars",
        type=int,
        default=850,
        help="sets the median length; about 400 tokens of the default text",
    )
    parser.add_argument("--seq-length", type=int, default=2048)
    options = parser.parse_args()
    texts = documents(options.text)
    report = Report("packing", "tokens/s")
    fill: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["EASYPIPE_CACHE"] = folder
        tokenizer = tokenizer_folder(Path(folder), texts)
        docs = cut_documents(texts, options.documents, options.median_chars, sigma=1.0)
        file = one_parquet(Path(folder), docs)
        profiles = {
            f"median {options.median_chars} characters, rows of {options.seq_length}": (
                file,
                options.seq_length,
            )
        }
        chat = chat_texts(options.documents)
        if chat:
            (Path(folder) / "chat").mkdir()
            profiles["chat data, rows of 8192"] = (one_parquet(Path(folder) / "chat", chat), 8192)
        core = {
            name: on_one_core(made, tokenizer, length, options.rounds)
            for name, (made, length) in profiles.items()
        }
        theirs = grain_documents(tokenizer, docs[: options.peer_documents], options.seq_length)
        contenders = {
            f"easypipe {strategy}": lambda strategy=strategy: run_ours(
                file, tokenizer, options.seq_length, strategy, fill
            )
            for strategy in STRATEGIES
        }
        contenders["grain FirstFit"] = lambda: run_grain(theirs, options.seq_length, None, fill)
        contenders["grain FirstFit, no read threads"] = lambda: run_grain(
            theirs, options.seq_length, 0, fill
        )
        alternate(report, contenders, options.rounds)
        report.facts["median tokens"] = int(np.median([len(doc["inputs"]) for doc in theirs]))
    report.facts["fill of grain FirstFit"] = round(fill["grain"], 5)
    lines = [
        (name, strategy, f"{full:.3%}", f"{rate / 1e6:,.0f} M")
        for name, found in core.items()
        for strategy, (full, rate) in found.items()
    ]
    table(("documents", "strategy", "fill", "slots/s per core"), lines)
    report.facts["one core"] = {
        name: {s: [round(full, 5), round(rate)] for s, (full, rate) in found.items()}
        for name, found in core.items()
    }
    first = next(iter(core.values()))
    report.target(
        "million slots a second per core, to plan rows and gather four columns",
        first["first_fit"][1] / 1e6,
        at_least=300,
    )
    report.target(
        "times the speed of grain FirstFit",
        report.ratio("easypipe first_fit", "grain FirstFit"),
        at_least=80,
    )
    report.target(
        "times the speed of grain without read threads",
        report.ratio("easypipe first_fit", "grain FirstFit, no read threads"),
        at_least=1,
    )
    report.target("fill of first_fit", first["first_fit"][0], at_least=0.999)
    report.target("fill of pool", first["pool"][0], at_least=0.99)
    report.finish(options.out)


if __name__ == "__main__":
    main()
