"""On eight fake devices and in real processes: both need their own interpreter, because JAX counts
its devices once.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from easypipe.core.errors import PlacementError
from easypipe.loader.config import LoadStageConfig
from easypipe.loader.loader import Loader
from easypipe.loader.placement import Placement, make_mesh
from loader_processes import finish, python
from loader_support import MemoryCache, plan_rows, some_docs

HERE = Path(__file__).parent


def test_meshes_of_eight_devices():
    assert finish(python("eight_devices.py", devices=8)).split()[-1] == "done"


CACHE = MemoryCache(some_docs([30] * 200))


def loader(**load) -> Loader:
    return Loader(plan_rows([CACHE]), LoadStageConfig(batch_size=8, **load))


def test_ten_batches_held_on_a_cpu_device_do_not_change():
    """JAX uses aligned host memory as it stands, so a buffer that is used again would show through
    in a batch that is still held.
    """
    for collated in ({"mesh": {"data": 1}}, {"prefetch_to_device": True}):
        wanted = [{name: values.copy() for name, values in batch.items()} for batch in loader()]
        held = list(loader(**collated, prefetch_workers=3, prefetch_buffer_size=6))
        assert len(held) >= 10
        for batch, expected in zip(held, wanted, strict=True):
            for name, values in expected.items():
                np.testing.assert_array_equal(np.asarray(batch[name]), values)


def test_ten_batches_put_on_a_device_by_hand_do_not_change():
    import jax

    wanted = [{name: values.copy() for name, values in batch.items()} for batch in loader()]
    held = [
        jax.device_put(batch, jax.devices()[0])
        for batch in loader(prefetch_workers=3, prefetch_buffer_size=6)
    ]
    for batch, expected in zip(held, wanted, strict=True):
        for name, values in expected.items():
            np.testing.assert_array_equal(np.asarray(batch[name]), values)


def test_without_a_mesh_batches_are_numpy_and_with_one_they_are_jax():
    import jax

    assert type(next(iter(loader()))) is dict
    assert all(type(values) is np.ndarray for values in next(iter(loader())).values())
    for on_device in (
        next(iter(loader(prefetch_to_device=True))),
        next(iter(loader(mesh={"data": -1}))),
    ):
        assert all(isinstance(values, jax.Array) for values in on_device.values())
        assert {values.sharding.mesh.axis_names for values in on_device.values()} == {("data",)}


def test_numpy_loading_does_not_import_jax():
    code = (
        "import sys; from loader_support import *; from easypipe.loader.loader import *\n"
        "next(iter(Loader(plan_rows([MemoryCache(some_docs([9] * 90))]), LoadStageConfig())))\n"
        "assert 'jax' not in sys.modules"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), *sys.path])}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=120)


@pytest.mark.parametrize(
    ("mesh", "spec", "message"),
    [
        ({"data": 3}, None, r"mesh: data=3 is 3 devices, there are 1\. Set one axis to -1"),
        (
            {"data": 2, "tensor": -1},
            None,
            r"mesh: data=2 x tensor=-1: the fixed axes take 2 devices, which does not divide the 1",
        ),
        ({}, None, r"mesh: no axes\. Write \{'data': -1\}"),
        ({"data": "all"}, None, r"mesh\.data: 'all' is not an axis size"),
        ("data", None, r"mesh: expected a jax Mesh or \{axis: size\}, got 'data'"),
        (
            {"data": 1},
            ["dat"],
            r"partition_spec: the mesh has no axis 'dat' \(have: data\)\. Did you mean 'data'\?",
        ),
        ({"data": 1}, ["data", "data"], r"partition_spec: axis 'data' appears twice"),
        ({"data": 1}, ["data", None, None], r"has 3 entries, batches have 2 dimensions"),
        ({"data": 1}, 5, r"partition_spec: expected a PartitionSpec or a list, got 5"),
    ],
)
def test_bad_placements(mesh, spec, message):
    with pytest.raises(PlacementError, match=message):
        Placement(mesh, spec, 8)


@pytest.mark.parametrize(
    ("mesh", "sizes"),
    [
        ({"data": -1}, (8,)),
        ({"data": 8}, (8,)),
        ({"data": 2, "tensor": -1}, (2, 4)),
        ({"data": -1, "tensor": 4}, (2, 4)),
        ({"data": 2, "fsdp": -1, "tensor": 2}, (2, 2, 2)),
        ({"data": -1, "fsdp": 8}, (1, 8)),
        ({"data": -1, "fsdp": 1}, (8, 1)),
    ],
)
def test_one_axis_takes_what_the_others_leave(mesh, sizes, monkeypatch):
    import jax

    asked = []
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    monkeypatch.setattr(jax, "make_mesh", lambda *given, **options: asked.append(given))
    make_mesh(mesh)
    assert asked == [(sizes, tuple(mesh))]
