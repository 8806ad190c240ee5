"""Programs compiled for TPUs that are not there, and what can be read in them.

libtpu compiles without hardware. `pip install jax[tpu]` brings the version that belongs to the jax
line; the tests need it and say so.
"""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from easypipe.core.errors import ConfigError
from easypipe.train.plan.hlo import BYTES, arrays, result
from easypipe.train.plan.topology import topology

# at least four devices each
GENERATIONS = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}


def tpu_mesh(generation: str, **axes: int) -> Mesh:
    """A mesh over the first devices of a small topology; skips where no libtpu can be loaded."""
    try:
        there = topology(GENERATIONS[generation])
    except ConfigError as error:
        pytest.skip(str(error))
    count = math.prod(axes.values())
    devices = np.array(there.devices[:count]).reshape(tuple(axes.values()))
    return Mesh(devices, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def array(mesh: Mesh, shape: tuple[int, ...], dtype: Any, *spec: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(
        shape, jax.numpy.dtype(dtype), sharding=NamedSharding(mesh, PartitionSpec(*spec))
    )


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
        return set(re.findall(r"%\w*?(loss_[a-z_]+?)_*[.\d]* = [^\n]*tpu_custom_call", self.text))

    @property
    def collectives(self) -> list[tuple[str, int]]:
        """(kind, bytes of its result) of every collective."""
        found = filter(None, map(result, self.text.splitlines()))
        return [(kind, size) for kind, size, _ in found]


def compiled(function: Callable[..., Any], mesh: Mesh, *arguments: Any, **options: Any) -> Program:
    """For TPUs. `memory_analysis().temp_size_in_bytes` counts VMEM as well (251 MiB too many on a
    v5e), so the compiler's own assignment of buffers is read: its temporaries without a colour lie
    in HBM; VMEM is colour 1, SMEM and semaphores are others."""
    with jax.set_mesh(mesh):
        lowered = jax.jit(function, **options).lower(*arguments)
    with tempfile.TemporaryDirectory() as folder:
        program = lowered.compile(
            compiler_options={"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        )
        (assignment,) = Path(folder).glob("*after_optimizations-buffer-assignment.txt")
        temporaries = re.findall(
            r"^allocation \d+: size (\d+), (?:page \d+, )?preallocated-temp",
            assignment.read_text(),
            re.MULTILINE,
        )
    return Program(program.as_text(), sum(map(int, temporaries)))


def check_collectives(program: Program, shape: tuple[int, int, int], shards: int) -> None:
    """What the shards of the vocabulary send each other: 16 bytes per token and shard, and the
    hidden states' gradient, to be summed.

    shape: (tokens, width, vocabulary). A loop of them stands once in the text.
    """
    tokens, width, _ = shape
    if shards == 1:
        assert program.collectives == []
        return
    assert sorted(kind for kind, _ in program.collectives) == ["all-gather", "all-reduce"]
    gathered, summed = (
        dict(program.collectives)["all-gather"],
        dict(program.collectives)["all-reduce"],
    )
    assert tokens * 16 * shards % gathered == 0
    assert tokens * width * 2 % summed == 0
