"""What a run holds on a device, and what is said when that is too much."""

from __future__ import annotations

import math
import re
from typing import Any

import jax

from easypipe.core.errors import TrainError
from easypipe.train.config import TrainConfig
from easypipe.train.optim import Optimizer
from easypipe.train.state import ModelLayout, abstract_state


def out_of_memory(error: BaseException, step: int, layout: ModelLayout, optimizer: Optimizer, config: TrainConfig) -> TrainError | None:
    """The error to raise in place of `error` where a device ran out of memory; None for any other error.

    step: the newest that was handed out, or is compiled.
    """
    text = str(error)
    if not (isinstance(error, jax.errors.JaxRuntimeError) and ("RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower())):
        return None
    state, mesh = abstract_state(layout, optimizer), layout.mesh
    parts = {"parameters": state.params, "optimizer": state.optimizer, "other state": state.rest}
    held = ", ".join(f"{name} {_size(on_device(tree))}" for name, tree in parts.items() if jax.tree.leaves(tree))
    limit = (mesh.devices.flat[0].memory_stats() or {}).get("bytes_limit")
    wanted = re.search(r"allocat\w* (?:of )?(\d+) bytes|allocate ([\d.]+ ?\w?i?B)", text)
    asked = "" if wanted is None else f" ({wanted[2] or _size(int(wanted[1]))} more were asked for)"
    fix = (
        f"For fewer activations: model.remat: full, a larger train.accumulate_steps (now {config.accumulate_steps}), a smaller batch_size; "
        f"for less state: more devices along fsdp in train.mesh (now {mesh.shape.get('fsdp', 1)}), or an optimizer like lion or adafactor. "
        "`easypipe plan CONFIG --topology ...` tells what a change comes to."
    )
    return TrainError(
        at=f"step {max(1, step)}",
        problem=f"a device{'' if limit is None else f' of {_size(limit)}'} is out of memory{asked}: it holds {held}; "
        f"a step adds gradients, {_size(on_device(state.params))} or more, and activations",
        fix=fix,
    )


def on_device(tree: Any) -> int:
    """Bytes of arrays, or of abstract ones, on the one device that holds most of them."""
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _size(size: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.4g} TB"
