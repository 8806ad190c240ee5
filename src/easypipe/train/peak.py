"""Peak rates of devices, from their makers' data sheets: what model FLOPs utilisation is a share of."""

from __future__ import annotations

from typing import Any

# Dense bfloat16 FLOP/s of one jax device, by the beginning of its device_kind; the longest that fits counts.
_PEAKS = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,  # v5p
    "TPU v6 lite": 918e12,
    "TPU7x": 1153.5e12,  # a chip has two devices
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H200": 989e12,
    "NVIDIA GH200": 989e12,
    "NVIDIA B200": 2250e12,
}


def peak_flops(device: Any) -> float | None:
    """Dense bfloat16 FLOP/s of a jax device; None where this table does not know it, as for every CPU."""
    fitting = [kind for kind in _PEAKS if device.device_kind.startswith(kind)]
    return _PEAKS[max(fitting, key=len)] if fitting else None
