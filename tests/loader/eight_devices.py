"""Run by test_placement.py with eight CPU devices."""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from easypipe.core.errors import PlacementError
from easypipe.loader.collate import CollateConfig
from easypipe.loader.config import LoadStageConfig
from easypipe.loader.loader import Loader
from easypipe.loader.placement import Placement, make_mesh
from laws import assert_same_batches
from loader_support import MemoryCache, plan_rows, some_docs

assert jax.device_count() == 8
cache = MemoryCache(some_docs([30] * 300))


def loader(batch_size: int = 16, rows=None, collate=None, **load) -> Loader:
    return Loader(
        rows or plan_rows([cache]), LoadStageConfig(batch_size=batch_size, **load), collate=collate
    )


wanted = list(loader())
ragged = plan_rows([MemoryCache(some_docs(range(1, 200)))], seq_length=None)
ragged_wanted = list(loader(rows=ragged))

# mesh, partition spec, the shape of a device's part of [16, 64]
LAYOUTS = [
    ({"data": -1}, None, (2, 64)),
    ({"data": 2, "fsdp": 4}, None, (2, 64)),
    ({"data": 2, "tensor": -1}, None, (8, 64)),
    ({"tensor": 8}, None, (16, 64)),
    ({"data": 2, "seq": 4}, ["data", "seq"], (8, 16)),
    ({"data": 4, "sequence": 2}, None, (4, 32)),
    ({"data": 2, "fsdp": 2, "tensor": 2}, [["fsdp", "data"], None], (4, 64)),
    ({"data": 8}, PartitionSpec(None, "data"), (16, 8)),
    ({"data": 8}, "data", (2, 64)),
    (
        jax.make_mesh(
            (2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4]
        ),
        None,
        (8, 64),
    ),
    (jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2), None, (4, 64)),
]
for mesh, spec, part in LAYOUTS:
    batches = list(loader(mesh=mesh, partition_spec=spec))
    assert_same_batches(wanted, batches, what=str(mesh))
    sharding = Placement(mesh, spec, 16).sharding
    for values in batches[0].values():
        assert values.sharding.is_equivalent_to(sharding, 2), (mesh, values.sharding)
        assert {shard.data.shape for shard in values.addressable_shards} == {part}
    if part[1] == 64 and (spec is None or spec == "data"):
        assert_same_batches(
            ragged_wanted,
            loader(rows=ragged, mesh=mesh, partition_spec=spec),
            what=f"ragged on {mesh}",
        )

held = list(itertools.islice(iter(loader(mesh={"data": -1}, prefetch_workers=3)), 10))
assert_same_batches(wanted[: len(held)], held, what="ten held batches")
device_batch = next(iter(loader(prefetch_to_device=True)))
assert device_batch["labels"].sharding.mesh.shape == {"data": 8}
masked = CollateConfig(attention_mask=True)
assert_same_batches(loader(collate=masked), loader(collate=masked, mesh={"data": 8}))
total = plan_rows([cache]).num_rows
last = list(loader(drop_last=False, mesh={"data": 8}))[-1]
assert total % 16, "choose documents so that the last batch is short"
assert not np.asarray(last["segment_ids"])[total % 16 :].any()
assert (np.asarray(last["labels"])[total % 16 :] == -100).all()


plain = list(loader(batch_size_schedule=((2, 32),)))
spread = {"mesh": {"data": 2, "seq": 4}, "partition_spec": ["data", "seq"]}
for batch, whole in zip(
    loader(batch_size_schedule=((2, 32),), accumulation_steps=4, **spread), plain, strict=True
):
    for name, values in batch.items():
        size = len(whole[name])
        assert values.sharding.spec == PartitionSpec(None, "data", "seq")
        assert {shard.data.shape for shard in values.addressable_shards} == {(4, size // 8, 16)}
        np.testing.assert_array_equal(
            np.asarray(values).swapaxes(0, 1).reshape(size, 64), whole[name]
        )


def refused(message: str, **load) -> None:
    with pytest.raises(PlacementError, match=message):
        loader(**load)


# The message names batch, axis sizes and what would fit, and what it recommends runs.
refused(
    r"batch_size: 12 rows do not divide over data=8 = 8 ways\. Set batch_size to 8 or 16, or "
    r"change the mesh",
    batch_size=12,
    mesh={"data": 8},
)
refused(
    r"batch_size: 3 rows do not divide over data=2 x fsdp=4 = 8 ways\. Set batch_size to 8, or",
    batch_size=3,
    mesh={"data": 2, "fsdp": 4},
)
assert next(iter(loader(batch_size=8, mesh={"data": 2, "fsdp": 4})))["labels"].shape == (8, 64)
refused(
    r"batch_size: 16 rows in 4 micro-batches do not divide over data=8 = 8 ways\. Set batch_size "
    r"to 32, or change the mesh",
    accumulation_steps=4,
    mesh={"data": 8},
)
refused(
    r"batch_size: 40 rows in 4 micro-batches do not divide .* Set batch_size to 32 or 64, or",
    batch_size=40,
    accumulation_steps=4,
    mesh={"data": 8},
)
refused(
    r"batch_size: 20 rows do not divide over data=8",
    batch_size_schedule=((9, 20),),
    mesh={"data": 8},
)
refused(
    r"mesh: data=3 x fsdp=-1: the fixed axes take 3 devices, which does not divide the 8",
    mesh={"data": 3, "fsdp": -1},
)
refused(r"mesh: data=4 is 4 devices, there are 8\. Set one axis to -1", mesh={"data": 4})
assert make_mesh({"data": 4, "fsdp": -1}).shape == {"data": 4, "fsdp": 2}

odd = plan_rows([cache], seq_length=30)
with pytest.raises(
    PlacementError,
    match=r"rows of 30 slots do not divide over seq=4 = 4 ways\. Choose a row length that 4 "
    r"divides",
) as caught:
    next(iter(loader(rows=odd, mesh={"data": 2, "seq": 4}, partition_spec=["data", "seq"])))
assert caught.value.__notes__ == ["loader: batch 0, rows 0:16, stage 'place'"]
print("done")
