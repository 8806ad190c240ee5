"""Packing documents into rows: easypipe's plan and gather against Grain's FirstFitPackIterDataset, on the same documents.

easypipe's time holds everything after the token cache: the plan over lengths, the gather of the tokens from the mapped cache, and the
four columns input_ids, labels, segment_ids, position_ids as NumPy batches. Grain packs `inputs` and `targets` (labels shifted
beforehand, untimed) from documents that lie in memory; it is timed with its default read threads, and with none, which is faster here,
on a part of the documents.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np

from _common import Report, alternate, arguments, cut_documents, documents, one_parquet, packed_loader, tokenizer_folder

BATCH = 64
GRAIN_BINS = 64


def run_ours(file: Path, tokenizer: Path, seq_length: int, strategy: str, seen: dict[str, float]) -> float:
    tokens = slots = 0
    for batch in packed_loader(file, tokenizer, seq_length, strategy=strategy, batch_size=BATCH, drop_last=False):
        tokens += int(np.count_nonzero(batch["segment_ids"]))
        slots += batch["segment_ids"].size
    seen[strategy] = tokens / slots
    return float(tokens)


def grain_documents(path: Path, texts: list[str], seq_length: int) -> list[dict[str, np.ndarray]]:
    from tokenizers import Tokenizer

    found = []
    for encoding in Tokenizer.from_file(str(path / "tokenizer.json")).encode_batch_fast(texts):
        ids = np.array(encoding.ids[:seq_length], np.int32)
        found.append({"inputs": ids, "targets": np.append(ids[1:], np.int32(-100))})
    return found


def run_grain(docs: list[dict[str, np.ndarray]], seq_length: int, threads: int | None, seen: dict[str, float]) -> float:
    import grain

    rows = grain.MapDataset.source(docs).shuffle(seed=1)
    stream = rows.to_iter_dataset() if threads is None else rows.to_iter_dataset(grain.ReadOptions(num_threads=threads))
    packed = grain.experimental.FirstFitPackIterDataset(
        stream, length_struct={"inputs": seq_length, "targets": seq_length}, num_packing_bins=GRAIN_BINS
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
    parser.add_argument("--peer-documents", type=int, default=8_000, help="how many of them Grain packs: rates are compared")
    parser.add_argument("--median-chars", type=int, default=850, help="sets the median length; about 400 tokens of the default text")
    parser.add_argument("--seq-length", type=int, default=2048)
    options = parser.parse_args()
    texts = documents(options.text)
    report = Report("packing", "tokens/s")
    fill: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["EASYPIPE_CACHE"] = folder
        tokenizer = tokenizer_folder(Path(folder), texts)
        docs = cut_documents(texts, options.documents, options.median_chars)
        file = one_parquet(Path(folder), docs)
        theirs = grain_documents(tokenizer, docs[: options.peer_documents], options.seq_length)
        contenders = {
            f"easypipe {strategy}": lambda strategy=strategy: run_ours(file, tokenizer, options.seq_length, strategy, fill)
            for strategy in ("first_fit", "pool", "greedy")
        }
        contenders["grain FirstFit"] = lambda: run_grain(theirs, options.seq_length, None, fill)
        contenders["grain FirstFit, no read threads"] = lambda: run_grain(theirs, options.seq_length, 0, fill)
        alternate(report, contenders, options.rounds)
        report.facts["median tokens"] = int(np.median([len(doc["inputs"]) for doc in theirs]))
    report.facts |= {f"fill {name}": round(value, 5) for name, value in fill.items()}
    report.target("times grain FirstFit", report.ratio("easypipe first_fit", "grain FirstFit"), at_least=80)
    report.target("times grain without read threads", report.ratio("easypipe first_fit", "grain FirstFit, no read threads"), at_least=1)
    report.target("fill of first_fit", fill["first_fit"], at_least=0.999)
    report.finish(options.out)


if __name__ == "__main__":
    main()
