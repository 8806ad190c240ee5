"""Devices that are not there, to compile for: `v5p:4x4x4`, `v6e:16x16`, `h200:8`.

TPUs by libtpu (`pip install 'jax[tpu]'`), which compiles without hardware; NVIDIA by jax's CUDA
wheels, which do too.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import os
import re
from collections.abc import Sequence
from typing import NamedTuple

from easypipe.core.errors import ConfigError, did_you_mean


class Topology(NamedTuple):
    """name: as it was asked for. devices: jax devices that can be compiled for, and nothing
    else.
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
_GPUS = {
    "h100": ("NVIDIA H100", 80 << 30, 3_350_000_000_000),
    "h200": ("NVIDIA H200", 150_754_820_096, 4_800_000_000_000),
}

# What XLA wants to know of a GPU (its GpuTargetConfig), as an H200 tells it; an H100 differs in
# name and memory.
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
    """The devices of `kind:AxB`: a TPU slice of AxB or AxBxC chips, or `gpu:N` and `gpu:HOSTSxN`.

    Raises ConfigError, at `topology`, for a kind or a shape that does not exist, with the list of
    kinds; and where its compiler is not installed, with what to install.
    """
    kind, _, shape = name.strip().lower().partition(":")
    if kind not in _EXAMPLES:
        known = list(_EXAMPLES)
        raise ConfigError(
            at="topology",
            problem=f"no kind of device named {kind!r}",
            have=known,
            fix=did_you_mean(kind, known),
        )
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){0,2}", shape):
        problem = f"{name!r} names no shape of whole numbers"
        raise ConfigError(at="topology", problem=problem, fix=f"Write it like {_EXAMPLES[kind]!r}.")
    sizes = tuple(int(size) for size in shape.split("x"))
    return Topology(name, _nvidia(name, kind, sizes) if kind in _GPUS else _tpu(name, kind, sizes))


def _tpu(name: str, kind: str, sizes: tuple[int, ...]) -> Sequence[object]:
    from jax.experimental import topologies

    if importlib.util.find_spec("libtpu") is None:
        raise ConfigError(
            at="topology",
            problem=f"no compiler for {kind}: libtpu is not installed",
            fix="pip install 'jax[tpu]'",
        )
    expected = _EXAMPLES[kind].partition(":")[2].count("x") + 1
    if len(sizes) != expected:
        problem = f"{name!r} has {len(sizes)} dimensions, and slices of {kind} have {expected}"
        raise ConfigError(at="topology", problem=problem, fix=f"Write it like {_EXAMPLES[kind]!r}.")
    # No machine that owns a TPU is looked for, and several processes may compile at once. What
    # libtpu says while it finds none is no news.
    quiet = {
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_MIN_LOG_LEVEL": "3",
        "TPU_ACCELERATOR_TYPE": "v5p-8",
        "TPU_STDERR_LOG_LEVEL": "3",
    }
    for key, value in quiet.items():
        os.environ.setdefault(key, value)
    try:
        return topologies.get_topology_desc(
            platform="tpu", topology_name=f"{kind}:{'x'.join(map(str, sizes))}"
        ).devices
    except RuntimeError as error:
        fix = f"Chips come in hosts of 2x2; write a slice that exists, like {_EXAMPLES[kind]!r}."
        raise ConfigError(
            at="topology", problem=f"libtpu knows no {name!r}: {_first_line(error)}", fix=fix
        ) from error


def _nvidia(name: str, kind: str, sizes: tuple[int, ...]) -> Sequence[object]:
    from jax.experimental import topologies

    if len(sizes) > 2:
        raise ConfigError(
            at="topology",
            problem=f"{name!r} has {len(sizes)} dimensions",
            fix=f"Write '{kind}:8', or '{kind}:4x8' for 4 hosts.",
        )
    hosts, each = (1, *sizes)[-2:]
    if each > 8:
        fix = f"Write '{kind}:{math.ceil(each / 8)}x8'."
        raise ConfigError(
            at="topology",
            problem=f"{name!r} puts {each} GPUs into a host, which has at most 8",
            fix=fix,
        )
    installed = {distribution.name for distribution in importlib.metadata.distributions()}
    cuda = next((version for version in (13, 12) if f"jax-cuda{version}-plugin" in installed), None)
    if cuda is None:
        problem = f"no compiler for {kind}: jax's CUDA wheels are not installed"
        raise ConfigError(
            at="topology",
            problem=problem,
            fix="pip install 'easypipe[cuda13]' (4.4 GB; needs no GPU).",
        )
    # else the plugin refuses a machine without a driver
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    description, memory, rate = _GPUS[kind]
    target = _TARGET.format(name=description, memory=memory, rate=rate, cuda=cuda)
    try:
        return topologies.get_topology_desc(
            platform="cuda", topology_name="", target_config=target, topology=f"1x{hosts}x{each}"
        ).devices
    except RuntimeError as error:
        raise ConfigError(
            at="topology", problem=f"jax's CUDA compiler refuses {name!r}: {_first_line(error)}"
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
