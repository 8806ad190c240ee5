"""A cache of the reference model's log-probabilities of answers, looked up by the answers' tokens.

A micro-batches · B batch · S sequence · P known answers
"""
# ruff: noqa: F722  (shapes in annotations are jaxtyping's, not Python)

from __future__ import annotations

import io
import logging
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Bool, Float, UInt32

from easypipe.core.config import digest
from easypipe.core.protocols import BatchLoader
from easypipe.core.storage import commit_bytes, make_folder
from easypipe.core.values import Json
from easypipe.train.checks import KnowingState
from easypipe.train.losses.preference import COLUMNS, REFERENCE, Arrays, Reference, by_segment
from easypipe.train.model.lora import fingerprint
from easypipe.train.parallel.distributed import several
from easypipe.train.parallel.mesh import batch_shards, place_batch
from easypipe.train.state import ModelLayout, TrainState

logger = logging.getLogger("easypipe")

ALIKE = 4  # how many keys with the same first 32 bits are compared; further ones count as unknown
_SALTS = (0x9E3779B1, 0x7FEB352D)


class Passes(NamedTuple):
    """Loaders that read all data of a run once, and the folder for what is computed from it."""

    loaders: Callable[[], Sequence[BatchLoader]]
    folder: Path


class CachedReference(Reference):
    """A Reference that looks up the summed log-probabilities of known answers.

    The column has each sum at its answer's first token and 0 at the others, because losses take
    sums over answers. If a batch has an unknown answer, the model is evaluated on that batch.
    """

    def __init__(self, layout: ModelLayout) -> None:
        super().__init__(layout)
        everywhere = NamedSharding(layout.mesh, PartitionSpec())

        def ask(params: Arrays, rest: Arrays, batch: Arrays) -> tuple[Array, Array, Array]:
            sums = by_segment(self.live(params, rest, batch), batch["segment_ids"])
            own = jnp.take_along_axis(sums, batch["segment_ids"], axis=1)
            return *_keys(batch), own

        def one(params: Arrays, rest: Arrays, table: Arrays, batch: Arrays) -> Array:
            keys, first = _keys(batch)
            sums, known = _look_up(table, keys)
            return jax.lax.cond(
                (first & ~known).any(),
                lambda: self.live(params, rest, batch),
                lambda: jnp.where(first, sums, 0.0),
            )

        def run(params: Arrays, rest: Arrays, table: Arrays, batch: Arrays) -> Array:
            if batch["input_ids"].ndim == 2:
                return one(params, rest, table, batch)
            return jax.lax.map(lambda micro: one(params, rest, table, micro), batch)

        self._ask, self._look = jax.jit(ask, out_shardings=everywhere), jax.jit(run)
        self._table: Arrays = {}

    def fill(self, first: TrainState, passes: Passes, mesh: Mesh, shape: Json) -> None:
        """Computes the sums of all answers of the data, or reads those of an earlier run.

        The earlier run had the same data and the same model. Call it after `keep`.

        Args:
            first: The state before the first step.
            passes: The data.
            mesh: The mesh of the run.
            shape: What the model computes, besides its arrays. If it is None, that is not known,
                and nothing is cached on disk.
        """
        loaders = passes.loaders()
        states = [loader.state() for loader in loaders]
        data = [dict(state.components) for state in states if isinstance(state, KnowingState)]
        file = None
        if shape is not None and len(data) == len(loaders):
            key = digest(shape, fingerprint({**first.params, **first.rest}), data)
            file = passes.folder / f"{key}.npz"
        found = None if file is None else _read(file)
        # Hosts may have caches of their own, and all processes have to ask the model together.
        if several() and not multihost_utils.process_allgather(np.asarray(found is not None)).all():
            found = None
        if found is None:
            batches = (batch for loader in loaders for batch in _placed(loader, mesh))
            found = _table([jax.device_get(self._ask(*self.kept(first.rest, b))) for b in batches])
            logger.info("train.preference.reference: asked of %d answers", len(found["sums"]))
            if file is not None:
                kept = io.BytesIO()
                np.savez(kept, allow_pickle=False, **found)
                make_folder(file.parent)
                commit_bytes(file, kept.getvalue())
        everywhere = NamedSharding(mesh, PartitionSpec())
        self._table = {
            name: jax.make_array_from_callback(value.shape, everywhere, value.__getitem__)
            for name, value in found.items()
        }

    def added(self, rest: Arrays, batch: Arrays) -> dict[str, Array]:
        """Returns the batch with the column `reference_log_probs`."""
        params, rest, given = self.kept(rest, batch)
        return {**batch, REFERENCE: self._look(params, rest, self._table, given)}


def _placed(loader: BatchLoader, mesh: Mesh) -> Iterator[Arrays]:
    """Yields the batches of a loader on the mesh, padded to rows that the mesh divides."""
    shards = batch_shards(mesh)
    rows = -(-loader.batch_size // shards) * shards
    for batch in loader:
        yield place_batch({name: batch[name] for name in COLUMNS}, mesh, rows=rows)


def _keys(batch: Arrays) -> tuple[UInt32[Array, "B S 2"], Bool[Array, "B S"]]:
    """Returns a 64-bit key for every slot, and where answers begin.

    The key is a hash of all tokens and labels of the slot's answer.
    """
    segments, places = batch["segment_ids"], batch["position_ids"]
    bits = jnp.stack(
        [_mixed(salt, batch["input_ids"], batch["labels"], places) for salt in _SALTS], axis=-1
    )
    sums = by_segment(bits, segments)
    keys = jnp.take_along_axis(sums, segments[:, :, None], axis=1)
    return keys, (segments > 0) & (places == 0)


def _mixed(salt: int, *values: Array) -> UInt32[Array, "B S"]:
    """Hashes several numbers of each slot with the finalizer of MurmurHash3."""
    found = jnp.uint32(salt)
    for value in values:
        found = found ^ value.astype(jnp.uint32)
        found = (found ^ (found >> 16)) * jnp.uint32(0x85EBCA6B)
        found = (found ^ (found >> 13)) * jnp.uint32(0xC2B2AE35)
        found = found ^ (found >> 16)
    return found


def _look_up(table: Arrays, keys: Array) -> tuple[Float[Array, "B S"], Bool[Array, "B S"]]:
    """Returns the sum of every key, and whether the key is known."""
    known_keys, known_sums = table["keys"], table["sums"]
    begin = jnp.searchsorted(known_keys[:, 0], keys[..., 0])
    sums, known = jnp.zeros(begin.shape, jnp.float32), jnp.zeros(begin.shape, bool)
    for i in range(ALIKE):
        at = jnp.minimum(begin + i, len(known_sums) - 1)
        same = (known_keys[at] == keys).all(axis=-1)
        sums, known = jnp.where(same, known_sums[at], sums), known | same
    return sums, known


def _table(found: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> dict[str, np.ndarray]:
    """Returns a table of each answer's sum, ordered by the answer's key.

    It is made from the keys, answer starts and sums of batches.
    """
    keys, sums = (
        np.concatenate([one[part][one[1]] for one in found])  # of each answer's first slot
        for part in (0, 2)
    )
    keys, index = np.unique(keys, axis=0, return_index=True)
    return {"keys": keys, "sums": sums[index]}


def _read(file: Path) -> dict[str, np.ndarray] | None:
    """Returns the cached table; None if there is none or it is damaged."""
    try:
        with np.load(file, allow_pickle=False) as kept:
            return {"keys": kept["keys"], "sums": kept["sums"]}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        logger.warning("%s cannot be read (%s): the model is asked again", file, error)
        return None
