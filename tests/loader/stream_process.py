"""Run by test_streaming.py as one of several processes of jax.distributed: `stream_process.py PORT
PROCESSES ID FOLDER RESUME`.

Writes, of an endless mixture and of a finite one: what lies in every row of each batch, the streams
that were read, and the states. With RESUME (a number of processes that ran before) it also goes on
from each of their states.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
from pathlib import Path

import jax
import numpy as np

port, count, index, folder, before = (
    int(sys.argv[1]),
    int(sys.argv[2]),
    int(sys.argv[3]),
    Path(sys.argv[4]),
    int(sys.argv[5]),
)
if count > 1:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", count, index)

from easypipe import LoadStageConfig, MixStageConfig, PackStageConfig, Pipeline  # noqa: E402
from easypipe.loader.loader import Loader  # noqa: E402
from easypipe.loader.rows.rows import Share  # noqa: E402
from pipelines import config, two_datasets  # noqa: E402

assert jax.process_count() == count
assert jax.device_count() == 4
BATCHES = 12


def make(kind: str) -> Loader:
    stop, epochs = ("restart", None) if kind == "endless" else ("all_exhausted", 1)
    values = config(
        folder,
        datasets=two_datasets(folder / "data"),
        default_tokenizer=str(folder / "tokenizer"),
        streaming=True,
        mix=MixStageConfig(weights={"code": 0.7, "docs": 0.3}, stop_strategy=stop),
        pack=PackStageConfig(seq_length=64),
        load=LoadStageConfig(
            batch_size=8,
            mesh={"data": 4},
            num_epochs=epochs,
            drop_last=False,
            shuffle_buffer_size=12,
        ),
        num_streams=4,
    )
    return Pipeline(values).source().tokenize().mix().pack().load().build()


def rows_of(batch: dict[str, jax.Array]) -> dict[str, str]:
    found = {}
    for name, values in batch.items():
        for shard in values.addressable_shards:
            for r, row in zip(
                range(*shard.index[0].indices(8)), np.asarray(shard.data), strict=True
            ):
                found[f"{name}[{r}]"] = hashlib.sha256(row.tobytes()).hexdigest()[:16]
    return found


report: dict[str, dict] = {"batches": {}, "states": {}, "streams": {}}
for kind in ("endless", "finite"):
    loader = make(kind)
    report["streams"][kind] = loader.rows.own(
        Share({} if loader._local[8] is None else {8: loader._local[8]})
    )
    seen, states = [], [loader.state().to_json()]
    for batch in itertools.islice(iter(loader), BATCHES):
        seen.append(rows_of(batch))
        states.append(loader.state().to_json())
    report["batches"][kind], report["states"][kind] = seen, states
    if before:
        saved = json.loads((folder / f"streams-{before}-0.json").read_text())["states"][kind]
        for step in range(0, len(saved) - 2, 3):
            first = make(kind)  # saved by another number of processes, and resumed on this
            first.restore(saved[step])
            for further in range(2):  # save → resume → save → resume
                batches = iter(first)
                assert rows_of(next(batches)) == seen[step + further], (
                    f"{kind}, resumed behind batch {step}"
                )
                again = first.state().to_json()
                assert again == saved[step + further + 1], (
                    f"{kind}: another state behind batch {step + further + 1}"
                )
                batches.close()  # type: ignore[attr-defined]
                first = make(kind)
                first.restore(again)
(folder / f"streams-{count}-{index}.json").write_text(json.dumps(report))
