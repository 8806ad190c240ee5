"""Topologies of devices that are not present, to compile for: `v5p:4x4x4`, `v6e:16x16`, `h200:8`.

TPUs need libtpu (`pip install 'jax[tpu]'`) and NVIDIA GPUs need jax's CUDA wheels; both compile
without hardware.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from easypipe.core.errors import ConfigError, require, require_known
from easypipe.train.metrics.devices import known_device


class Topology(NamedTuple):
    """Devices to compile for.

    Attributes:
        name: The name that was asked for.
        devices: jax devices that can be compiled for, and used for nothing else.
    """

    name: str
    devices: Sequence[object]


_EXAMPLES = {
    "v5e": "v5e:4x4",
    "v5p": "v5p:4x4x4",
    "v6e": "v6e:16x16",
    "tpu7x": "tpu7x:4x4x4",
    "h100": "h100:8",
    "h200": "h200:8",
}
_GPUS = {"h100": "NVIDIA H100", "h200": "NVIDIA H200"}

# What XLA needs to know about a GPU (its GpuTargetConfig), as an H200 reports it; an H100 differs
# in name and memory.
_TARGET = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {rate}
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: {memory}
  shared_memory_per_block_optin: 232448
  cuda_compute_capability {{ major: 9 }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
runtime_version {{ major: {cuda} minor: 0 patch: 0 }}
device_description_str: "{name}"
"""


def topology(name: str) -> Topology:
    """Returns the devices of a topology's name.

    It is `kind:AxB`, a TPU slice of AxB or AxBxC chips, or `gpu:N` and `gpu:HOSTSxN`.

    Raises:
        ConfigError: The kind or shape does not exist, or its compiler is not installed; the message
            lists the kinds, or says what to install.
    """
    kind, _, shape = name.strip().lower().partition(":")
    example = _EXAMPLES.get(kind, "")
    require_known(kind, _EXAMPLES, "topology", f"no kind of device named {kind!r}")
    require(
        re.fullmatch(r"[1-9]\d*(x[1-9]\d*){0,2}", shape) is not None,
        "topology",
        f"{name!r} is not a shape of whole numbers",
        f"Write it like {example!r}.",
    )
    sizes = [int(size) for size in shape.split("x")]
    make = _nvidia if kind in _GPUS else _tpu
    return Topology(name, make(name, kind, sizes))


def _tpu(name: str, kind: str, sizes: Sequence[int]) -> Sequence[object]:
    """Returns the devices of a TPU slice."""
    require(
        importlib.util.find_spec("libtpu") is not None,
        "topology",
        f"no compiler for {kind}: libtpu is not installed",
        "pip install 'jax[tpu]'",
    )
    example = _EXAMPLES[kind]
    expected = example.count("x", example.index(":")) + 1
    require(
        len(sizes) == expected,
        "topology",
        f"{name!r} has {len(sizes)} dimensions, and slices of {kind} have {expected}",
        f"Write it like {example!r}.",
    )
    # libtpu then does not look for a machine with a TPU, several processes may compile at once, and
    # its messages about missing TPUs are not shown.
    quiet = {
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_MIN_LOG_LEVEL": "3",
        "TPU_ACCELERATOR_TYPE": "v5p-8",
        "TPU_STDERR_LOG_LEVEL": "3",
    }
    fix = f"Chips come in hosts of 2x2; write a slice that exists, like {example!r}."
    asked = {"platform": "tpu", "topology_name": f"{kind}:{'x'.join(map(str, sizes))}"}
    return _devices(asked, quiet, f"libtpu does not support {name!r}", fix)


def _nvidia(name: str, kind: str, sizes: Sequence[int]) -> Sequence[object]:
    """Returns the devices of hosts with NVIDIA GPUs."""
    require(
        len(sizes) <= 2,
        "topology",
        f"{name!r} has {len(sizes)} dimensions",
        f"Write '{kind}:8', or '{kind}:4x8' for 4 hosts.",
    )
    hosts, each = (1, *sizes)[-2:]
    require(
        each <= 8,
        "topology",
        f"{name!r} puts {each} GPUs into a host, which has at most 8",
        f"Write '{kind}:{math.ceil(each / 8)}x8'.",
    )
    installed = {distribution.name for distribution in importlib.metadata.distributions()}
    cuda = next((version for version in (13, 12) if f"jax-cuda{version}-plugin" in installed), None)
    require(
        cuda is not None,
        "topology",
        f"no compiler for {kind}: jax's CUDA wheels are not installed",
        "pip install 'easypipe[cuda13]' (4.4 GB; needs no GPU).",
    )
    device = known_device(_GPUS[kind])
    assert device is not None
    rate, memory = int(device.memory_rate), int(device.memory)
    target = _TARGET.format(name=_GPUS[kind], memory=memory, rate=rate, cuda=cuda)
    asked = {"platform": "cuda", "topology_name": "", "target_config": target}
    # Otherwise the plugin refuses a machine without a driver.
    unasked = {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    problem = f"jax's CUDA compiler refuses {name!r}"
    return _devices(asked | {"topology": f"1x{hosts}x{each}"}, unasked, problem)


def _devices(
    asked: Mapping[str, str], variables: Mapping[str, str], problem: str, fix: str | None = None
) -> Sequence[object]:
    """Returns jax's devices for the options `asked`, with `variables` set in the environment.

    Raises:
        ConfigError: The compiler does not know the topology.
    """
    from jax.experimental import topologies

    for key, value in variables.items():
        os.environ.setdefault(key, value)
    try:
        return topologies.get_topology_desc(**asked).devices
    except RuntimeError as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(at="topology", problem=f"{problem}: {reason}", fix=fix) from error
