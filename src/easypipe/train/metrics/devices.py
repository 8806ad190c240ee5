"""The table of devices with their peak rates and memory; running out of memory, and what helps.

Model FLOPs utilisation is a share of these rates, and a plan calculates with them.

TPUs: cloud.google.com/tpu/docs, the page of each generation ("Key chip specifications"). A TPU7x
chip has two jax devices; the table has one of them. NVIDIA: the data sheets of A100 80GB SXM, H100
SXM and PCIe, H200 SXM, GH200 and B200. Rates are dense, which is half of those with sparsity, and
NVLink is in one direction, which is half of what is advertised.
"""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from easypipe.core.errors import TrainError
from easypipe.core.visible import bytes_text
from easypipe.train.config import TrainingConfig
from easypipe.train.model.config import ModelConfig
from easypipe.train.optim.optimizers import Optimizer
from easypipe.train.state import ModelLayout, abstract_state


class Device(NamedTuple):
    """A row of the device table.

    Attributes:
        flops: Dense bfloat16 FLOPs per second.
        memory: Bytes of HBM, as the device reports them.
        memory_rate: Bytes of HBM read or written per second.
        link_rate: Bytes per second that it can send to its neighbours (ICI, NVLink), over all of
            its links together.
    """

    flops: float
    memory: float
    memory_rate: float
    link_rate: float


_GIB = 2.0**30

# By prefix of jax's device_kind; the longest match counts.
_DEVICES = {
    "TPU v4": Device(275e12, 32 * _GIB, 1228e9, 300e9),
    **dict.fromkeys(("TPU v5 lite", "TPU v5e"), Device(197e12, 16 * _GIB, 819e9, 200e9)),
    "TPU v5": Device(459e12, 95 * _GIB, 2765e9, 600e9),  # v5p
    **dict.fromkeys(("TPU v6 lite", "TPU v6e"), Device(918e12, 32 * _GIB, 1640e9, 400e9)),
    "TPU7x": Device(1153.5e12, 96 * _GIB, 3690e9, 300e9),
    "NVIDIA A100": Device(312e12, 80e9, 2039e9, 300e9),
    "NVIDIA H100": Device(989e12, 81_559 * 2.0**20, 3350e9, 450e9),
    "NVIDIA H100 PCIe": Device(756e12, 80e9, 2000e9, 64e9),
    "NVIDIA H200": Device(989e12, 143_771 * 2.0**20, 4800e9, 450e9),
    "NVIDIA GH200": Device(989e12, 96e9, 4000e9, 450e9),
    "NVIDIA B200": Device(2250e12, 180e9, 8000e9, 900e9),
}


def known_device(kind: str) -> Device | None:
    """Returns the table's row for jax's `device_kind`; None if it has none, as for every CPU."""
    fitting = [known for known in _DEVICES if kind.startswith(known)]
    return _DEVICES[max(fitting, key=len)] if fitting else None


def peak_flops(device: Any) -> float | None:
    """Returns the dense bfloat16 FLOP/s of a jax device; None if the table does not have it."""
    known = known_device(device.device_kind)
    return None if known is None else known.flops


def out_of_memory(
    error: BaseException,
    step: int,
    layout: ModelLayout,
    optimizer: Optimizer,
    config: TrainingConfig,
    model: ModelConfig | None,
    batch_size: int,
) -> TrainError | None:
    """Returns the error to raise instead of `error` if a device ran out of memory, or None.

    Args:
        error: The error of the run.
        step: The newest step that was dispatched, or is being compiled.
        layout: The layout of the model.
        optimizer: The optimizer.
        config: The options of the run.
        model: The config of the model; None for a module that is not a Decoder.
        batch_size: Rows of a step.
    """
    text = str(error)
    if not (
        isinstance(error, jax.errors.JaxRuntimeError)
        and ("RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower())
    ):
        return None
    state, mesh = abstract_state(layout, optimizer), layout.mesh
    parts = {"parameters": state.params, "optimizer": state.optimizer, "other state": state.rest}
    held = ", ".join(
        f"{name} {bytes_text(on_device(tree))}"
        for name, tree in parts.items()
        if jax.tree.leaves(tree)
    )
    limit = (mesh.devices.flat[0].memory_stats() or {}).get("bytes_limit")
    wanted = re.search(r"allocat\w* (?:of )?(\d+) bytes|allocate ([\d.]+ ?\w?i?B)", text)
    asked = (
        ""
        if wanted is None
        else f" ({wanted[2] or bytes_text(int(wanted[1]))} more were asked for)"
    )
    changes = "; ".join(advice(model, config, mesh, batch_size))
    fix = (
        f"What helps, cheapest first: {changes}. `easypipe plan CONFIG --topology ...` "
        "shows the effect of a change."
    )
    return TrainError(
        at=f"step {max(1, step)}",
        problem=f"a device{'' if limit is None else f' of {bytes_text(limit)}'} is out of "
        f"memory{asked}: it holds {held}; "
        f"a step adds gradients, {bytes_text(on_device(state.params))} or more, and activations",
        fix=fix,
    )


def advice(
    model: ModelConfig | None,
    train: TrainingConfig,
    mesh: Mesh,
    batch_size: int,
    *,
    attention: str | None = None,
    much_state: bool = True,
) -> tuple[str, ...]:
    """Returns changes that help if a step does not fit, the cheapest first.

    Args:
        model: The config of the model; None for a module that is not a Decoder.
        train: The options of the run.
        mesh: The mesh.
        batch_size: Rows of a step.
        attention: The attention backend in use, if it is known.
        much_state: Whether a smaller state would help.
    """
    said = []
    rows = batch_size / (mesh.shape["data"] * mesh.shape["fsdp"]) / train.accumulate_steps
    if model is not None and model.remat == "none":
        said.append(
            "model.remat: \"dots\" (now 'none'): keeps the results of matrix products alone, and "
            "computes none of them again"
        )
    if model is not None and model.remat != "full":
        said.append(
            f'model.remat: "full" (now {model.remat!r}): activations of one layer in place of all; '
            "a third more products"
        )
    if attention == "xla":
        said.append(
            "an attention that does not keep scores (model.attention): this one keeps the score "
            "of every query and key"
        )
    if rows > 1:
        pieces = train.accumulate_steps
        said.append(
            f"data.load.accumulation_steps: {2 * pieces} (now {pieces}): {rows:g} rows are at once "
            "on a device"
        )
    if mesh.shape["data"] > 1:
        said.append(
            "train.mesh: fsdp in place of data: every replica along data holds all parameters and "
            "moments"
        )
    if much_state:
        said.append(
            "an optimizer with a smaller state (lion, adafactor), or more devices along fsdp or "
            "tensor"
        )
    said.append("a shorter data.pack.seq_length, or more devices along train.mesh.sequence")
    return tuple(said)


def on_device(tree: Any, itemsize: int | None = None) -> int:
    """Returns the bytes of arrays, or of abstract ones, on the device that holds most of them.

    Args:
        tree: The arrays.
        itemsize: Bytes of a number, instead of those of each dtype.
    """
    leaves = jax.tree.leaves(tree)
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * (itemsize or leaf.dtype.itemsize)
        for leaf in leaves
    )
