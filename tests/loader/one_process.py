"""Run by test_elastic.py as one of several processes of jax.distributed: `one_process.py PORT
PROCESSES ID FOLDER BEFORE`.

FOLDER: what all share: datasets, caches, and the states that a run of BEFORE processes saved (this
count: the ones that it saves itself). Writes there, for every layout: what lies where of each batch
(rows and slots → digest per column), the rows that were read, the states.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import jax
import numpy as np
import pyarrow.compute as pc

from loader_support import MemoryCache, plan_rows, some_docs

port, count, index = map(int, sys.argv[1:4])
folder, before = Path(sys.argv[4]), int(sys.argv[5])
if count > 1:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", count, index)

from easypipe import MixStageConfig, PackStageConfig, Pipeline, PipelineConfig  # noqa: E402
from easypipe.loader.collate import CollateConfig  # noqa: E402
from easypipe.loader.config import LoadStageConfig  # noqa: E402
from easypipe.loader.loader import Loader  # noqa: E402
from easypipe.loader.rows.planned import PlannedRows  # noqa: E402
from easypipe.loader.state import LoaderState  # noqa: E402
from easypipe.transforms.columns.functions import Filter  # noqa: E402
from pipelines import two_datasets  # noqa: E402

assert jax.process_count() == count
assert jax.device_count() == 12

LAYOUTS = {
    "data": ({"data": 12}, None),
    "two devices a row": ({"data": 6, "tensor": 2}, None),
    "slots": ({"seq": 12}, [None, "seq"]),
    "both": ({"data": 3, "seq": 4}, ["data", "seq"]),
    "all": ({"tensor": -1}, None),
    "data, micro-batches": ({"data": 12}, None),
    "data, documents grouped by length": ({"data": 12}, None),
    "data, the whole chain": ({"data": -1}, None),
}
cache = MemoryCache(some_docs([30] * 100))
ragged = MemoryCache(some_docs([1 + i * 37 % 89 for i in range(100)]))
report: dict[str, dict] = {"batches": {}, "rows": {}, "states": {}}
read: set[int] = set()
whole = PlannedRows.batch


def watched(self: PlannedRows, rows: np.ndarray, width: int):
    read.update(int(row) for row in rows if row >= 0)
    return whole(self, rows, width)


PlannedRows.batch = watched  # type: ignore[method-assign]


def digests(batch: dict[str, jax.Array]) -> dict[str, str]:
    parts = {}
    for name, values in batch.items():
        for shard in values.addressable_shards:
            *front, rows, slots = (
                range(*part.indices(size))
                for part, size in zip(shard.index, values.shape, strict=True)
            )
            data = np.asarray(shard.data)
            for a in front[0] if front else [0]:
                for i, r in enumerate(rows):
                    part = data[a, i] if front else data[i]
                    parts[f"{name}[{a}, {r}, {slots.start}:{slots.stop}]"] = hashlib.sha256(
                        part.tobytes()
                    ).hexdigest()[:16]
    return parts


def chain(load: LoadStageConfig) -> Loader:
    """Two datasets of text, the shortest rows filtered; mixed; documents too long for a row left
    out; packed; epochs in another order.
    """
    config = PipelineConfig(
        datasets=two_datasets(folder / "data"),
        default_tokenizer=str(folder / "tokenizer"),
        seed=7,
        cache_dir=folder / "cache",
        mix=MixStageConfig(weights={"code": 0.7, "docs": 0.3}, stop_strategy="all_exhausted"),
        pack=PackStageConfig(seq_length=96, strategy="first_fit", oversize="drop"),
        load=load,
    )
    return (
        Pipeline.from_config(config)
        .source()
        .transform(Filter(pc.utf8_length(pc.field("text")) > 12))
        .tokenize()
        .mix()
        .pack()
        .load()
        .build()
    )


def make(name: str) -> Loader:
    mesh, spec = LAYOUTS[name]
    options = {
        "mesh": mesh,
        "partition_spec": spec,
        "drop_last": False,
        "shuffle_buffer_size": 10,
        "prefetch_workers": index + 1,
    }
    if name == "data, the whole chain":
        return chain(
            LoadStageConfig(batch_size=12, num_epochs=2, batch_size_schedule=((2, 24),), **options)
        )
    if "grouped" in name:
        rule = CollateConfig(length_buckets=(24, 48, 96), padding_side="left")
        return Loader(
            plan_rows([ragged], seq_length=None),
            LoadStageConfig(batch_size=12, group_by_length=3, **options),
            collate=rule,
        )
    pieces = 2 if "micro" in name else 1
    return Loader(
        plan_rows([cache], seq_length=96),
        LoadStageConfig(batch_size=12 * pieces, accumulation_steps=pieces, **options),
    )


for name in LAYOUTS:
    read.clear()
    loader = make(name)
    seen, states = [], [loader.state().to_json()]
    for batch in loader:
        seen.append(digests(batch))
        states.append(loader.state().to_json())
    report["batches"][name], report["states"][name], report["rows"][name] = (
        seen,
        states,
        sorted(read),
    )

saved = (
    report["states"]
    if before == count
    else json.loads((folder / f"states-{before}.json").read_text())
)
for name in LAYOUTS:
    for step, text in enumerate(saved[name]):
        first = make(name)  # saved by another number of processes, and resumed on this
        first.restore(LoaderState.from_json(text))
        batches = iter(first)
        for further in range(2):  # save → resume → save → resume
            batch = next(batches, None)
            if batch is None:
                assert step + further == len(saved[name]) - 1, f"{name}: ended behind step {step}"
                break
            assert digests(batch) == report["batches"][name][step + further], (
                f"{name}, resumed behind step {step}"
            )
            again = first.state().to_json()
            assert again == saved[name][step + further + 1], (
                f"{name}: another state at step {step + further + 1}"
            )
            batches.close()
            first = make(name)
            first.restore(LoaderState.from_json(again))
            batches = iter(first)
        batches.close()
if index == 0:
    (folder / f"states-{count}.json").write_text(json.dumps(report["states"]))
# a pipe holds less than that
(folder / f"report-{count}-{index}.json").write_text(json.dumps(report))
