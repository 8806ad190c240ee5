"""A second copy of the state on the devices, so that steps go on while the first is written."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from easypipe.train.metrics.memory import on_device

logger = logging.getLogger("easypipe")

Arrays = Mapping[str, jax.Array]


class Snapshots:
    """`take(arrays)`: the same arrays in memory of their own, laid out alike; None where the
    devices have no room for them.

    On accelerators a copy is given back when it is dropped: their pools hand it out again in no
    time. On a CPU it is kept, and the next one is written into it: to get 1 GB of new memory from
    the system takes seconds, to copy as much 0.15.
    """

    def __init__(self) -> None:
        self._kept: Arrays | None = None
        self._room: bool | None = None

    def expect(self, like: Arrays | Mapping[str, jax.ShapeDtypeStruct]) -> None:
        """On a CPU, gets the memory for arrays like these, which may be abstract. Elsewhere
        nothing.
        """
        places = {name: leaf.sharding for name, leaf in like.items()}
        if _on_cpu(places):
            born = jax.jit(
                lambda: {name: jnp.zeros(leaf.shape, leaf.dtype) for name, leaf in like.items()},
                out_shardings=places,
            )
            self._kept = jax.block_until_ready(born())

    def take(self, arrays: Arrays) -> Arrays | None:
        places = {name: array.sharding for name, array in arrays.items()}
        if self._room is None:  # asked once: from here on the peak has such a copy in it
            devices = {one for place in places.values() for one in place.addressable_devices}
            stats = [device.memory_stats() or {} for device in devices]
            self._room = has_room(on_device(dict(arrays)), stats)
            if not self._room:
                logger.warning(
                    "no room on the devices for a second copy of the state: steps wait while a "
                    "checkpoint is carried off them"
                )
        if not self._room:
            return None
        kept, self._kept = self._kept, None
        if kept is None or _kinds(kept) != _kinds(arrays):
            taken = jax.jit(_copied, out_shardings=places)(arrays)
        else:
            into = jax.jit(_copied, out_shardings=places, donate_argnums=1, keep_unused=True)
            taken = into(arrays, kept)
        if _on_cpu(places):
            self._kept = jax.block_until_ready(taken)
        return taken


def has_room(needed: int, told: Iterable[Mapping[str, int]]) -> bool:
    """Whether each device had `needed` bytes left when it held most. told: their memory_stats; one
    that does not tell has room.
    """
    known = [stats for stats in told if {"bytes_limit", "peak_bytes_in_use"} <= set(stats)]
    return all(needed <= stats["bytes_limit"] - stats["peak_bytes_in_use"] for stats in known)


def _copied(arrays: Arrays, into: Arrays | None = None) -> Arrays:
    """into: donated, so that the copies lie where it lay."""
    return jax.tree.map(jnp.copy, arrays)


def _kinds(arrays: Arrays) -> dict[str, object]:
    return {name: (leaf.shape, leaf.dtype, leaf.sharding) for name, leaf in arrays.items()}


def _on_cpu(places: Mapping[str, Sharding | None]) -> bool:
    devices = {one for place in places.values() if place for one in place.device_set}
    return all(device.platform == "cpu" for device in devices)
