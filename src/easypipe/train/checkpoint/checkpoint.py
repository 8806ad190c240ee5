"""Checkpoints of a run: saved beside the steps, committed, checked when read, old ones deleted.

Arrays, loader state and configuration of one step are committed together. The only module that
knows Orbax.

Law (commit or nothing): `latest()` is a checkpoint that was written whole and synced, whenever the
process that wrote it was killed or the machine lost power; and nothing is loaded but what was
written (files.py). What a killed process left behind is removed when the folder is opened.

Orbax writes and reads the arrays. Its Checkpointer would also name and keep checkpoints, by its
save-decision and preservation policies, but renames a folder as soon as it is written, with no
place for the checksums that must be in it before; and its BestN keeps the later of two equals. What
its policies would replace here are the three lines of `_finish` that say what is kept.
"""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Sharding
from jaxtyping import PyTree
from orbax.checkpoint import v1 as ocp

from easypipe.core.closing import Closeable
from easypipe.core.errors import StateError, StorageError, raising
from easypipe.core.storage import make_folder
from easypipe.core.threads import Threads
from easypipe.core.values import Identity, Json, JsonObject
from easypipe.train.checkpoint import files
from easypipe.train.checkpoint.differences import differences, listed
from easypipe.train.checkpoint.files import ARRAYS, RUN
from easypipe.train.metrics.devices import on_device

log = logging.getLogger("easypipe")

FORMAT = 1
# What Orbax and TensorStore raise where the file system refuses: NotImplementedError for a file
# that would have to be on another device.
_REFUSED = (OSError, ValueError, NotImplementedError)
_UNREADABLE = (*_REFUSED, KeyError)  # and for files that are not there or not whole

Arrays = Mapping[str, jax.Array]


class DamagedCheckpoint(StateError):
    """A checkpoint whose files are not what was committed: deleted, cut short or changed by
    something else.
    """


class _Saving(NamedTuple):
    """A save under way: of which step, when it is committed, whether its arrays are copied."""

    step: int
    committed: Future[None]
    copied: threading.Event


class Checkpoints(Closeable):
    """The checkpoints in `folder`, of which the newest `keep` are kept, and the `protected`.

    Close it, or use it as a context manager.

    keep: None only reads, and leaves what another process may be writing alone.
    """

    def __init__(self, folder: Path, *, keep: int | None) -> None:
        self.folder = folder.absolute()  # Orbax refuses relative paths
        self._several = jax.process_count() > 1
        registry = ocp.handlers.local_registry()
        registry.add(ocp.handlers.JsonHandler, checkpointable_name=RUN)
        self._context = ocp.Context()
        self._context.checkpointables.registry = registry
        # of arrays that are there: `load` has said what is not
        self._context.pytree.loading.partial_load = True
        # weights hardly shrink (7 %), and zstd took three times the processor time
        self._context.array.saving.use_compression = False
        # Made by a thread of its own, a folder that cannot be made is waited for, five minutes,
        # when the process ends.
        self._context.async_options.create_directories_asynchronously = self._several
        self.protected: dict[str, set[int]] = {}  # who -> steps that are kept whatever their age
        self._keep, self._snapshots = keep, Snapshots()
        self._writer = Threads(1, thread_name_prefix="easypipe saves")
        self._saving: _Saving | None = None
        if keep is None:
            return
        with raising(StorageError, folder, "cannot hold checkpoints"):
            if jax.process_index() == 0:
                make_folder(self.folder)
                files.sweep(self.folder)
        self._agree(f"opened {self.folder}")

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, oldest first."""
        return files.committed(self.folder)

    def latest(self) -> int | None:
        return max(self.steps(), default=None)

    def save(self, step: int, arrays: Arrays, run: Json) -> None:
        """Starts writing, and returns: `copied` tells when the arrays may be donated.

        One save runs at a time.

        run: plain JSON. Raises StorageError where the save before this one could not be written; of
        this one `wait` raises it.
        """
        self.wait()
        keeping = frozenset[int]().union(*self.protected.values())
        parts: dict[str, PyTree] = {ARRAYS: dict(arrays), RUN: {"format": FORMAT, **run}}
        copied, committed = threading.Event(), Future[None]()
        if not self._several:
            committed = self._writer.submit(self._write, step, parts, keeping, copied)
        else:
            # Orbax agrees with the other processes by programs on the devices, which stand in one
            # order with those of the steps.
            try:
                written = self._start(step, parts)
            except BaseException as error:  # noqa: BLE001  (raised by `wait`, as that of a save in the background is)
                committed.set_exception(error)
            else:
                committed = self._writer.submit(self._finish, step, written, keeping)
            copied.set()
        self._saving = _Saving(step, committed, copied)

    def expect(self, like: Mapping[str, PyTree]) -> None:
        """Says what arrays, or abstract ones, will be saved, so that what a save needs is at hand
        when it comes.
        """
        if not self._several:
            self._writer.submit(self._snapshots.expect, like)

    def copied(self) -> None:
        """Returns once the arrays that were given to `save` may be donated."""
        if self._saving is not None:
            self._saving.copied.wait()

    def _write(
        self,
        step: int,
        parts: dict[str, PyTree],
        keeping: frozenset[int],
        copied: threading.Event,
    ) -> None:
        try:
            apart = self._snapshots.take(parts[ARRAYS])
            if apart is not None:
                parts[ARRAYS] = dict(apart)
                copied.set()
            written = self._start(step, parts)  # returns once they are in the host's memory
            copied.set()
            self._finish(step, written, keeping)
        finally:
            copied.set()

    def _start(self, step: int, parts: dict[str, PyTree]) -> ocp.AsyncResponse[None]:
        with ocp.Context(self._context):
            target = str(files.writing(self.folder, step))
            return ocp.save_checkpointables_async(target, parts, overwrite=True)

    def _finish(self, step: int, written: ocp.AsyncResponse[None], keeping: frozenset[int]) -> None:
        """Commits what Orbax has written when `written` has its result, and takes away what is no
        longer kept.

        keeping: what was protected when the save began.
        """
        written.result()
        if jax.process_index() == 0:
            files.commit(self.folder, step)
            steps = self.steps()
            kept = {*steps[-(self._keep or 1) :], *keeping}
            try:
                files.delete(self.folder, [old for old in steps if old not in kept])
            except OSError as error:  # the newest is committed, whatever becomes of older ones
                log.warning("%s: an older checkpoint cannot be deleted: %s", self.folder, error)

    def run(self, step: int) -> JsonObject:
        """What `save` was given as `run`.

        Raises DamagedCheckpoint, and StateError for a checkpoint of another version.
        """
        self._check(step, RUN)
        saved = self._read(step, RUN, None)
        if not isinstance(saved, dict) or saved.get("format") != FORMAT:
            found = saved.get("format") if isinstance(saved, dict) else None
            problem = f"checkpoint format {found}, this version reads {FORMAT}"
            raise StateError(at=self._at(step), problem=problem, fix="Give another output_dir.")
        return saved

    def load(
        self, step: int, abstract: Mapping[str, jax.ShapeDtypeStruct], *, partial: bool = False
    ) -> dict[str, jax.Array]:
        """The arrays of `step`, each laid out as `abstract` says, on whatever mesh they were saved.

        partial: saved arrays that `abstract` does not name are left where they are.

        Raises DamagedCheckpoint, and StateError listing how the saved arrays differ from `abstract`
        in name, shape and dtype.
        """
        described = self.describe(step)
        saved, asked = (
            {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in arrays.items()}
            for arrays in (described, abstract)
        )
        if partial:
            saved = {name: text for name, text in saved.items() if name in asked}
        if unlike := differences(saved, asked):
            problem = f"holds other arrays: {listed(unlike)}"
            raise StateError(at=self._at(step), problem=problem, fix="Give another output_dir.")
        return self._read(step, ARRAYS, dict(abstract))

    def describe(self, step: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape and dtype of the arrays of `step`. Raises DamagedCheckpoint."""
        self._check(step, ARRAYS)
        try:
            with ocp.Context(self._context):
                described = ocp.checkpointables_metadata(self._at(step)).metadata.get(ARRAYS)
        except _UNREADABLE as error:
            raise self._damaged(step, _reason(error)) from error
        if described is None:
            raise self._damaged(step, "the description of its arrays is missing or cut short")
        return {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in described.items()
        }

    def set_aside(self, step: int) -> Path:
        """Moves a damaged checkpoint out of the way, so that no later one is deleted in its place.

        Returns where to.
        """
        target = self.folder.with_name(f"{self.folder.name}-damaged") / str(step)
        if jax.process_index() == 0:
            target.parent.mkdir(exist_ok=True)
            shutil.rmtree(target, ignore_errors=True)  # an older one that was as damaged
            (self.folder / str(step)).rename(target)
        self._agree(f"set aside {step}")
        return target

    def wait(self, *, agree: bool = True) -> None:
        """Returns once the newest save is committed. Raises StorageError where it failed, once.

        agree: where there are several processes, all of them have theirs committed.
        """
        if self._saving is None:
            return
        (step, committed, _), self._saving = self._saving, None
        fix, at = "Check space and permissions.", self._at(step)
        with raising(StorageError, at, "cannot be written", fix, _REFUSED):
            committed.result()
        if agree:
            self._agree(f"saved {step}")

    def close(self) -> None:
        """Returns once nothing is being written.

        Raises StorageError where the newest save failed, if `wait` did not.
        """
        self._writer.shutdown()
        self.wait(agree=False)  # the other processes may be gone

    def _agree(self, that: str) -> None:
        """Waits for the other processes of the run to come here too."""
        if self._several:
            multihost_utils.sync_global_devices(f"easypipe {that}")

    def _read(self, step: int, part: str, abstract: PyTree) -> PyTree:
        try:
            with ocp.Context(self._context):
                return ocp.load_checkpointables(self._at(step), {part: abstract})[part]
        except _UNREADABLE as error:
            raise self._damaged(step, _reason(error)) from error

    def _check(self, step: int, part: str) -> None:
        """Raises DamagedCheckpoint where files of a part are not as they were committed.

        Arrays are shared out among the processes.
        """
        several = part == ARRAYS and self._several
        share = (jax.process_index(), jax.process_count()) if several else (0, 1)
        problems = files.check(self.folder / str(step), part, share=share).problems
        damaged = bool(problems)
        if several:
            damaged = bool(multihost_utils.process_allgather(np.asarray(damaged)).any())
        if damaged:
            found = [f"{name}: {what}" for name, what in problems.items()]
            raise self._damaged(step, "; ".join(found[:4]) or "another process found it damaged")

    def _at(self, step: int) -> str:
        return str(self.folder / str(step))

    def _damaged(self, step: int, reason: str) -> DamagedCheckpoint:
        return DamagedCheckpoint(at=self._at(step), problem=f"cannot be read: {reason}")


def _reason(error: BaseException) -> str:
    """The first line of what began it; Orbax wraps that in pages about its handlers."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"


logger = logging.getLogger("easypipe")


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
        """On a CPU, gets the memory for arrays like these, which may be abstract.

        Elsewhere nothing.
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
    """Whether each device had `needed` bytes left when it held most.

    told: their memory_stats; one that does not tell has room.
    """
    known = [stats for stats in told if {"bytes_limit", "peak_bytes_in_use"} <= set(stats)]
    return all(needed <= stats["bytes_limit"] - stats["peak_bytes_in_use"] for stats in known)


def _copied(arrays: Arrays, into: Arrays | None = None) -> Arrays:
    """into: donated, so that the copies lie where it lay."""
    return jax.tree.map(jnp.copy, arrays)


def _kinds(arrays: Arrays) -> dict[str, Identity]:
    return {name: (leaf.shape, leaf.dtype, leaf.sharding) for name, leaf in arrays.items()}


def _on_cpu(places: Mapping[str, Sharding | None]) -> bool:
    devices = {one for place in places.values() if place for one in place.device_set}
    return all(device.platform == "cpu" for device in devices)
