"""Run by test_placement.py as one of several processes of jax.distributed: `one_process.py PORT PROCESSES ID`.

Prints, for every layout: what lies where of each batch (rows and slots → digest per column), the rows that were read, the state.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys

import jax
import numpy as np

from loader_support import MemoryCache, plan_rows, some_docs

port, count, index = map(int, sys.argv[1:])
if count > 1:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", count, index)

from easypipe.loader.loader import Loader, LoadStageConfig  # noqa: E402
from easypipe.loader.rows import PlannedRows  # noqa: E402

assert jax.process_count() == count
assert jax.device_count() == 4

LAYOUTS = {
    "data": ({"data": 4}, None),
    "data x tensor": ({"data": 4, "tensor": 1}, None),
    "slots": ({"seq": 4}, [None, "seq"]),
    "all": ({"tensor": -1}, None),
}
cache = MemoryCache(some_docs([30] * 100))
report: dict[str, dict] = {"batches": {}, "rows": {}, "state": {}, "resumed": {}}
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
            rows, slots = (range(*part.indices(size)) for part, size in zip(shard.index, values.shape, strict=True))
            for r, row in zip(rows, np.asarray(shard.data), strict=True):
                parts[f"{name}[{r}, {slots.start}:{slots.stop}]"] = hashlib.sha256(row.tobytes()).hexdigest()[:16]
    return parts


for name, (mesh, spec) in LAYOUTS.items():

    def make(mesh=mesh, spec=spec) -> Loader:
        config = LoadStageConfig(
            batch_size=8, mesh=mesh, partition_spec=spec, drop_last=False, shuffle_buffer_size=10, prefetch_workers=index + 1
        )
        return Loader(plan_rows([cache]), config)

    read.clear()
    loader = make()
    batches = iter(loader)
    seen = [digests(batch) for batch in itertools.islice(batches, 3)]
    report["state"][name] = state = loader.state().to_json()
    seen += [digests(batch) for batch in batches]
    report["batches"][name] = seen
    report["rows"][name] = sorted(read)
    resumed = make()
    resumed.restore(state)
    report["resumed"][name] = [digests(batch) for batch in resumed] == seen[3:]
print(json.dumps(report))
