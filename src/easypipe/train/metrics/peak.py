"""The table of devices: FLOP/s, memory and link rates of TPU and GPU generations, by data sheet.

Model FLOPs utilisation is a share of these, and a plan reckons with them.

TPUs: cloud.google.com/tpu/docs, the page of each generation ("Key chip specifications"). A TPU7x
chip has two jax devices; the table has one. NVIDIA: the data sheets of A100 80GB SXM, H100 SXM and
PCIe, H200 SXM, GH200 and B200; dense rates, which are half of those with sparsity, and NVLink in
one direction, which is half of what is advertised.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Device(NamedTuple):
    """flops: dense bfloat16 a second. memory: bytes of HBM, as the device tells them. memory_rate:
    bytes of it a second. link_rate: bytes a second that it can send to its neighbours (ICI,
    NVLink), over all of its links together.
    """

    flops: float
    memory: float
    memory_rate: float
    link_rate: float


_GIB = 2.0**30

# By the beginning of jax's device_kind; the longest that fits counts.
_DEVICES = {
    "TPU v4": Device(275e12, 32 * _GIB, 1228e9, 300e9),
    "TPU v5 lite": Device(197e12, 16 * _GIB, 819e9, 200e9),  # v5e
    "TPU v5": Device(459e12, 95 * _GIB, 2765e9, 600e9),  # v5p
    "TPU v6 lite": Device(918e12, 32 * _GIB, 1640e9, 400e9),  # v6e
    "TPU7x": Device(1153.5e12, 96 * _GIB, 3690e9, 300e9),
    "NVIDIA A100": Device(312e12, 80e9, 2039e9, 300e9),
    "NVIDIA H100": Device(989e12, 81_559 * 2.0**20, 3350e9, 450e9),
    "NVIDIA H100 PCIe": Device(756e12, 80e9, 2000e9, 64e9),
    "NVIDIA H200": Device(989e12, 143_771 * 2.0**20, 4800e9, 450e9),
    "NVIDIA GH200": Device(989e12, 96e9, 4000e9, 450e9),
    "NVIDIA B200": Device(2250e12, 180e9, 8000e9, 900e9),
}


def known_device(kind: str) -> Device | None:
    """The row of the table for jax's `device_kind`; None where it has none, as for every CPU."""
    fitting = [known for known in _DEVICES if kind.startswith(known)]
    return _DEVICES[max(fitting, key=len)] if fitting else None


def peak_flops(device: Any) -> float | None:
    """Dense bfloat16 FLOP/s of a jax device; None where the table does not know it."""
    known = known_device(device.device_kind)
    return None if known is None else known.flops
