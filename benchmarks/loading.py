"""Packed rows onto one CPU device, in batches of 8 rows of 2,048 slots, four int32 columns, each
batch ready before the next is asked for.

easypipe plans and gathers from its mapped token cache. The peers read rows that were packed for
them beforehand and lie in memory: Grain's iterator, a torch DataLoader (0 and 2 workers), and the
bare floor of the machine: np.take of shuffled rows + jax.device_put. Every contender is started
once and then runs on from round to round, so that no start counts.
"""

from __future__ import annotations

import functools
import itertools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from _common import (
    Report,
    alternate,
    arguments,
    cut_documents,
    documents,
    one_parquet,
    packed_loader,
    tokenizer_folder,
)

BATCH = 8
COLUMNS = ("input_ids", "labels", "segment_ids", "position_ids")


def drain(batches: Iterator[dict[str, Any]], count: int) -> float:
    slots = 0
    for batch in itertools.islice(batches, count):
        jax.block_until_ready([batch[column] for column in COLUMNS])
        slots += batch["input_ids"].size
    return float(slots)


def bare(rows: dict[str, np.ndarray], device: Any) -> Iterator[dict[str, Any]]:
    for epoch in itertools.count():
        order = np.random.Generator(np.random.PCG64(epoch)).permutation(len(rows["input_ids"]))
        for start in range(0, len(order) - BATCH + 1, BATCH):
            picked = order[start : start + BATCH]
            yield jax.device_put(
                {column: np.take(values, picked, axis=0) for column, values in rows.items()}, device
            )


def grain_batches(rows: dict[str, np.ndarray], device: Any) -> Iterator[dict[str, Any]]:
    import grain

    class Rows:
        def __len__(self) -> int:
            return len(rows["input_ids"])

        def __getitem__(self, index: int) -> dict[str, np.ndarray]:
            return {column: values[index] for column, values in rows.items()}

    stream = grain.MapDataset.source(Rows()).shuffle(seed=1).repeat().batch(BATCH).to_iter_dataset()
    for batch in stream:
        yield jax.device_put(batch, device)


def torch_batches(
    rows: dict[str, np.ndarray], device: Any, workers: int
) -> Iterator[dict[str, Any]]:
    import torch

    class Rows(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return len(rows["input_ids"])

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {column: torch.from_numpy(values[index]) for column, values in rows.items()}

    made = torch.utils.data.DataLoader(
        Rows(),
        batch_size=BATCH,
        shuffle=True,
        num_workers=workers,
        drop_last=True,
        persistent_workers=workers > 0,
    )
    for batch in itertools.chain.from_iterable(itertools.repeat(made)):
        yield jax.device_put({column: values.numpy() for column, values in batch.items()}, device)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--rows", type=int, default=4096, help="packed rows to choose from")
    parser.add_argument("--batches", type=int, default=1024, help="per round")
    parser.add_argument(
        "--peer-batches",
        type=int,
        default=256,
        help="per round of the slower peers; rates are compared",
    )
    parser.add_argument("--seq-length", type=int, default=2048)
    options = parser.parse_args()
    texts = documents(options.text)
    report = Report("loading", "slots/s")
    device = jax.devices("cpu")[0]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["EASYPIPE_CACHE"] = folder
        tokenizer = tokenizer_folder(Path(folder), texts)
        docs = cut_documents(texts, options.rows * options.seq_length // 550 + 64, 1050)
        file = one_parquet(Path(folder), docs)

        def ours(mesh: dict[str, int] | None) -> Any:
            return iter(
                packed_loader(
                    file,
                    tokenizer,
                    options.seq_length,
                    batch_size=BATCH,
                    mesh=mesh,
                    num_epochs=None,
                )
            )

        host = ours(None)
        packed = list(itertools.islice(host, options.rows // BATCH))
        rows = {column: np.concatenate([batch[column] for batch in packed]) for column in COLUMNS}
        del packed
        started = {
            "easypipe": ours({"data": 1}),
            "easypipe, NumPy batches": host,
            "bare take + device_put": bare(rows, device),
            "grain": grain_batches(rows, device),
            "torch DataLoader, 0 workers": torch_batches(rows, device, 0),
            "torch DataLoader, 2 workers": torch_batches(rows, device, 2),
        }
        slower = {"grain", "torch DataLoader, 2 workers"}
        contenders = {
            name: functools.partial(
                drain, batches, options.peer_batches if name in slower else options.batches
            )
            for name, batches in started.items()
        }
        alternate(report, contenders, options.rounds)
        report.facts["rows at rest"] = len(rows["input_ids"])
    report.target("times grain's iterator", report.ratio("easypipe", "grain"), at_least=10)
    report.target(
        "times torch DataLoader, 0 workers",
        report.ratio("easypipe", "torch DataLoader, 0 workers"),
        at_least=1.0,
    )
    report.target(
        "of bare take + device_put",
        report.ratio("easypipe", "bare take + device_put"),
        at_least=0.8,
    )
    report.finish(options.out)


if __name__ == "__main__":
    main()
