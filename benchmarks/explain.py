"""How soon `Loader.explain` names the documents of batch 1,000,000: the first time, when the plan
is scanned up to there, and ever after.

The data is real text, packed, and read without end. `later` is the median over steps far apart, in
a loader that has come so far once; `next process` starts with the checkpoints that the first one
kept. Every answer is compared with the batch that a loader makes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

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

BATCH, SEQ_LENGTH, FAR = 8, 2048, 1_000_000
STEPS = (FAR, 999_001, 500_000, 123_456, 17, 750_001, 250_000)


def timed(loader: object, step: int) -> float:
    start = time.perf_counter()
    loader.explain(step)
    return time.perf_counter() - start


def check(loader: object, step: int) -> None:
    made = loader.batch(step)
    for row in loader.explain(step).rows:
        for segment in row.segments:
            assert np.array_equal(
                made["input_ids"][row.row, segment.slot_start : segment.slot_stop], segment.ids
            )


def next_process(file: Path, tokenizer: Path) -> float:
    code = (
        f"import sys, time; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from pathlib import Path\n"
        "from explain import BATCH, FAR, SEQ_LENGTH, packed_loader, timed\n"
        f"loader = packed_loader(Path({str(file)!r}), Path({str(tokenizer)!r}), SEQ_LENGTH, "
        "batch_size=BATCH, num_epochs=None)\n"
        "loader.explain(3)\n"
        "print(timed(loader, FAR))\n"
    )
    return float(
        subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, text=True
        ).stdout
    )


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument(
        "--documents",
        type=int,
        default=50_000,
        help="about 1,800 characters each; the fewer, the more epochs pass",
    )
    options = parser.parse_args()
    report = Report("explain", "s")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["EASYPIPE_CACHE"] = str(Path(folder) / "cache")
        texts = documents(options.text)
        tokenizer = tokenizer_folder(Path(folder), texts)
        file = one_parquet(Path(folder), cut_documents(texts, options.documents, 1300))
        loader = packed_loader(file, tokenizer, SEQ_LENGTH, batch_size=BATCH, num_epochs=None)
        loader.explain(3)
        report.seconds["first look"] = [timed(loader, FAR)]
        for _ in range(options.rounds):
            report.seconds.setdefault("later", []).extend(timed(loader, step) for step in STEPS)
        for step in STEPS:
            check(loader, step)
        report.seconds["next process"] = [
            next_process(file, tokenizer) for _ in range(options.rounds)
        ]
    report.target("later, the slowest of all, in s", max(report.seconds["later"]), below=0.5)
    report.target(
        "next process, the slowest of all, in s", max(report.seconds["next process"]), below=0.5
    )
    report.finish(options.out)


if __name__ == "__main__":
    main()
