"""Programs compiled for TPUs that are not there, and what can be read in them.

libtpu compiles without hardware. `pip install jax[tpu]` brings the version that belongs to the jax line; the tests need it and say so.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

GENERATIONS = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}  # at least four devices each
BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


def tpu_mesh(generation: str, **axes: int) -> Mesh:
    """A mesh over the first devices of a small topology; skips where no libtpu can be loaded."""
    # Several test processes may load it at once, and none may look for a machine that owns a TPU.
    os.environ.update(ALLOW_MULTIPLE_LIBTPU_LOAD="1", TPU_SKIP_MDS_QUERY="1")
    try:
        topology = topologies.get_topology_desc(platform="tpu", topology_name=GENERATIONS[generation])
    except Exception as error:  # noqa: BLE001  (whatever keeps libtpu from loading)
        pytest.skip(f"no TPU compiler here (pip install 'jax[tpu]'): {error}")
    count = math.prod(axes.values())
    devices = np.array(topology.devices[:count]).reshape(tuple(axes.values()))
    return Mesh(devices, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def array(mesh: Mesh, shape: tuple[int, ...], dtype: Any, *spec: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jax.numpy.dtype(dtype), sharding=NamedSharding(mesh, PartitionSpec(*spec)))


class Program(NamedTuple):
    """A compiled program, per device."""

    text: str
    temp_bytes: int  # of HBM, beside arguments and results

    @property
    def largest_array_bytes(self) -> int:
        """Of any instruction, loops and fusions included."""
        return max(BYTES[dtype] * math.prod(shape) for dtype, shape in arrays(self.text))

    @property
    def kernels(self) -> set[str]:
        """Names of the Pallas kernels in it."""
        return set(re.findall(r"%(loss_[a-z_]+)[.\d]* = [^\n]*tpu_custom_call", self.text))

    @property
    def collectives(self) -> list[tuple[str, int]]:
        """(kind, bytes of its result) of every collective."""
        found = []
        for line in self.text.splitlines():
            match = re.search(rf" = (.*?) ({'|'.join(COLLECTIVES)})(-start)?\(", line)
            if match:
                sizes = [BYTES[dtype] * math.prod(shape) for dtype, shape in arrays(match[1])]
                found.append((match[2], max(sizes) if match[3] else sum(sizes)))
        return found


def compiled(function: Callable[..., Any], mesh: Mesh, *arguments: Any, **options: Any) -> Program:
    with jax.set_mesh(mesh):
        program = jax.jit(function, **options).lower(*arguments).compile()
    memory = program.memory_analysis()  # its temp_size_in_bytes counts VMEM too
    beside = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return Program(program.as_text(), memory.peak_memory_in_bytes - beside)


def arrays(text: str) -> list[tuple[str, tuple[int, ...]]]:
    return [
        (dtype, tuple(int(size) for size in sizes.split(",") if size))
        for dtype, sizes in re.findall(rf"\b({'|'.join(BYTES)})\[([\d,]*)\]", text)
    ]
