"""What a run holds on a device, and what is said when that is too much."""

from __future__ import annotations

import math
import re
from typing import Any

import jax
from jax.sharding import Mesh

from easypipe.core.errors import TrainError
from easypipe.train.config import TrainingConfig
from easypipe.train.model.config import ModelConfig
from easypipe.train.optim.optimizers import Optimizer
from easypipe.train.state import ModelLayout, abstract_state


def out_of_memory(
    error: BaseException,
    step: int,
    layout: ModelLayout,
    optimizer: Optimizer,
    config: TrainingConfig,
    model: ModelConfig | None,
    batch_size: int,
) -> TrainError | None:
    """The error to raise in place of `error` where a device ran out of memory; None for any other
    error.

    step: the newest that was handed out, or is compiled. model: None for a module that is no
    Decoder.
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
        f"{name} {_size(on_device(tree))}" for name, tree in parts.items() if jax.tree.leaves(tree)
    )
    limit = (mesh.devices.flat[0].memory_stats() or {}).get("bytes_limit")
    wanted = re.search(r"allocat\w* (?:of )?(\d+) bytes|allocate ([\d.]+ ?\w?i?B)", text)
    asked = "" if wanted is None else f" ({wanted[2] or _size(int(wanted[1]))} more were asked for)"
    changes = "; ".join(advice(model, config, mesh, batch_size))
    fix = (
        f"What helps, what costs least first: {changes}. `easypipe plan CONFIG --topology ...` "
        "tells what a change comes to."
    )
    return TrainError(
        at=f"step {max(1, step)}",
        problem=f"a device{'' if limit is None else f' of {_size(limit)}'} is out of "
        f"memory{asked}: it holds {held}; "
        f"a step adds gradients, {_size(on_device(state.params))} or more, and activations",
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
    """What helps where a step does not fit, what costs least first.

    batch_size: rows of a step. attention: the backend that runs, where it is known. much_state:
    whether a smaller state would help.
    """
    said = []
    rows = batch_size / (mesh.shape["data"] * mesh.shape["fsdp"]) / train.accumulate_steps
    if model is not None and model.remat != "full":
        said.append(
            f'model.remat: "full" (now {model.remat!r}): activations of one layer in place of all; '
            "a third more products"
        )
    if attention == "xla":
        said.append(
            "an attention that holds no scores (model.attention): this one holds those of every "
            "query and key"
        )
    if rows > 1:
        twice = (
            f"train.accumulate_steps: {2 * train.accumulate_steps} (now {train.accumulate_steps})"
        )
        said.append(f"{twice}: {rows:g} rows are at once on a device")
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
    """Bytes of arrays, or of abstract ones, on the one device that holds most of them; itemsize: of
    a number, in place of each dtype's.
    """
    leaves = jax.tree.leaves(tree)
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * (itemsize or leaf.dtype.itemsize)
        for leaf in leaves
    )


def _size(size: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.4g} TB"
