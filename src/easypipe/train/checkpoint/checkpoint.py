"""The checkpoints of a run: copied, saved while steps run, verified, set aside, pruned by age.

Arrays, loader state and configuration of one step are committed together. Only this module uses
Orbax.

Law (commit or nothing): `latest()` is a checkpoint that was completely written and synced, whenever
the process that wrote it was killed or the machine lost power. Nothing is loaded except what was
written (files.py). Leftovers of a killed process are removed when the folder is opened.

Orbax writes and reads the arrays. Its Checkpointer could also name and keep checkpoints, by its
save-decision and preservation policies. But it renames a folder as soon as it is written, before
the checksums can be added, and its BestN keeps the later of two equals. Its policies would replace
only the three lines of `_finish` that say what is kept.
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
# The errors of Orbax and TensorStore if the file system refuses: NotImplementedError for a file
# that would have to be on another device.
_REFUSED = (OSError, ValueError, NotImplementedError)
_UNREADABLE = (*_REFUSED, KeyError)  # and for files that are missing or incomplete

Arrays = Mapping[str, jax.Array]


class DamagedCheckpoint(StateError):
    """The error of a checkpoint whose files were deleted, cut short or changed since the commit."""


def _is_told_once(record: logging.LogRecord) -> bool:
    """Returns False for the tracebacks of Orbax's threads, whose errors `wait` raises."""
    return "_SignalingThread.run() raised" not in str(record.msg)


class _Saving(NamedTuple):
    """A save in progress: its step, the future of its commit, the event of its copied arrays."""

    step: int
    committed: Future[None]
    copied: threading.Event


class Checkpoints(Closeable):
    """The checkpoints in `folder`; saves new ones and deletes old ones.

    Close it, or use it as a context manager.

    Args:
        folder: The folder of the checkpoints.
        keep: How many of the newest are kept, besides the protected ones. With None the folder is
            only read, and files that another process may be writing are left alone.

    Raises:
        ConfigError: The path of the folder is one that Orbax takes for a pattern.
        StorageError: The folder cannot hold checkpoints.

    Attributes:
        folder: The absolute path of the folder.
        protected: Steps that are kept whatever their age, by the name of what protects them.
    """

    def __init__(self, folder: Path, *, keep: int | None) -> None:
        self.folder = folder.absolute()  # Orbax refuses relative paths
        logging.getLogger("absl").addFilter(_is_told_once)  # which Orbax logs to
        self._several = jax.process_count() > 1
        registry = ocp.handlers.local_registry()
        registry.add(ocp.handlers.JsonHandler, checkpointable_name=RUN)
        self._context = ocp.Context()
        self._context.checkpointables.registry = registry
        # `load` has already reported arrays that are missing.
        self._context.pytree.loading.partial_load = True
        # Weights hardly shrink (7 %), and zstd took three times the processor time.
        self._context.array.saving.use_compression = False
        # With a thread of its own, closing would wait five minutes, when the process ends, for a
        # folder that cannot be created.
        self._context.async_options.create_directories_asynchronously = self._several
        self.protected: dict[str, set[int]] = {}
        self._keep, self._snapshots = keep, Snapshots()
        self._writer = Threads(1, thread_name_prefix="easypipe saves")
        self._saving: _Saving | None = None
        if keep is None:
            return
        files.check_path(self.folder, str(folder))
        with raising(
            StorageError, folder, "cannot hold checkpoints", "Give another train.output_dir."
        ):
            if jax.process_index() == 0:
                make_folder(self.folder)
                files.sweep(self.folder)
        self._agree(f"opened {self.folder}")

    def steps(self) -> list[int]:
        """Returns the steps that have a checkpoint, oldest first."""
        return files.committed(self.folder)

    def latest(self) -> int | None:
        return max(self.steps(), default=None)

    def save(self, step: int, arrays: Arrays, run: Json) -> None:
        """Starts to write a checkpoint, and returns. One save runs at a time.

        `copied` waits until the arrays may be donated. An error of this save is raised by `wait`.

        Args:
            step: The step of the checkpoint.
            arrays: The arrays by name.
            run: Plain JSON, saved with them.

        Raises:
            StorageError: The save before this one could not be written.
        """
        self.wait()
        keeping = frozenset[int]().union(*self.protected.values())
        parts: dict[str, PyTree] = {ARRAYS: dict(arrays), RUN: {"format": FORMAT, **run}}
        copied, committed = threading.Event(), Future[None]()
        if not self._several:
            committed = self._writer.submit(self._write, step, parts, keeping, copied)
        else:
            # Orbax agrees with the other processes by programs on the devices, which must run in
            # the same order relative to the steps.
            try:
                written = self._start(step, parts)
            except BaseException as error:  # noqa: BLE001  (raised by `wait`, as that of a save in the background is)
                committed.set_exception(error)
            else:
                committed = self._writer.submit(self._finish, step, written, keeping)
            copied.set()
        self._saving = _Saving(step, committed, copied)

    def expect(self, like: Mapping[str, PyTree]) -> None:
        """Announces the arrays, or abstract ones, that will be saved.

        Memory for a copy of them is then ready at the first save.
        """
        if not self._several:
            self._writer.submit(self._snapshots.expect, like)

    def copied(self) -> None:
        """Returns after the arrays that were given to `save` may be donated."""
        if self._saving is not None:
            self._saving.copied.wait()

    def _write(
        self,
        step: int,
        parts: dict[str, PyTree],
        keeping: frozenset[int],
        copied: threading.Event,
    ) -> None:
        """Writes and commits a checkpoint, in the background thread of a single process."""
        try:
            apart = self._snapshots.take(parts[ARRAYS])
            if apart is not None:
                parts[ARRAYS] = dict(apart)
                copied.set()
            written = self._start(step, parts)  # returns after the arrays are in host memory
            copied.set()
            self._finish(step, written, keeping)
        finally:
            copied.set()

    def _start(self, step: int, parts: dict[str, PyTree]) -> ocp.AsyncResponse[None]:
        """Starts to write the parts of a checkpoint with Orbax."""
        with ocp.Context(self._context):
            target = str(files.writing(self.folder, step))
            return ocp.save_checkpointables_async(target, parts, overwrite=True)

    def _finish(self, step: int, written: ocp.AsyncResponse[None], keeping: frozenset[int]) -> None:
        """Commits a checkpoint after Orbax has written it, and deletes old ones.

        Args:
            step: The step of the checkpoint.
            written: The response of Orbax.
            keeping: The steps that were protected when the save began.
        """
        written.result()
        if jax.process_index() == 0:
            files.commit(self.folder, step)
            steps = self.steps()
            kept = {*steps[-(self._keep or 1) :], *keeping}
            try:
                files.delete(self.folder, [old for old in steps if old not in kept])
            except OSError as error:  # the newest one is committed anyway
                log.warning("%s: an older checkpoint cannot be deleted: %s", self.folder, error)

    def run(self, step: int) -> JsonObject:
        """Returns the `run` that was given to `save`.

        Raises:
            DamagedCheckpoint: The checkpoint is damaged.
            StateError: The checkpoint has the format of another version.
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
        """Loads the arrays of `step`, sharded like `abstract`, whatever mesh they were saved on.

        Args:
            step: The step of the checkpoint.
            abstract: Shape, dtype and sharding of the arrays, by name.
            partial: Whether saved arrays that `abstract` does not name are ignored.

        Raises:
            DamagedCheckpoint: The checkpoint is damaged.
            StateError: The saved arrays differ from `abstract` in name, shape or dtype; lists the
                differences.
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
        """Returns shape and dtype of the arrays of `step`, by name.

        Raises:
            DamagedCheckpoint: The checkpoint is damaged.
        """
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
        """Moves a damaged checkpoint aside, so that no later one is deleted in its place.

        Returns:
            The folder to which it was moved.
        """
        target = self.folder.with_name(f"{self.folder.name}-damaged") / str(step)
        if jax.process_index() == 0:
            target.parent.mkdir(exist_ok=True)
            shutil.rmtree(target, ignore_errors=True)  # an older damaged one
            (self.folder / str(step)).rename(target)
        self._agree(f"set aside {step}")
        return target

    def wait(self, *, agree: bool = True) -> None:
        """Returns after the newest save is committed.

        Args:
            agree: Whether to wait, in a run of several processes, until all have committed theirs.

        Raises:
            StorageError: The save failed; raised once.
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
        """Returns after all writing has ended.

        Raises:
            StorageError: The newest save failed, and `wait` did not raise it.
        """
        self._writer.shutdown()
        self.wait(agree=False)  # the other processes may be gone

    def _agree(self, that: str) -> None:
        """Waits until the other processes of the run reach the same call."""
        if self._several:
            multihost_utils.sync_global_devices(f"easypipe {that}")

    def _read(self, step: int, part: str, abstract: PyTree) -> PyTree:
        """Reads one part of a checkpoint with Orbax.

        Raises:
            DamagedCheckpoint: Orbax cannot read it.
        """
        try:
            with ocp.Context(self._context):
                return ocp.load_checkpointables(self._at(step), {part: abstract})[part]
        except _UNREADABLE as error:
            raise self._damaged(step, _reason(error)) from error

    def _check(self, step: int, part: str) -> None:
        """Compares the files of a part with their checksums; processes share the files of arrays.

        Raises:
            DamagedCheckpoint: A file differs from what was committed.
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
        fix = "Move its folder away: the run continues from an earlier one, or starts again."
        earlier = [other for other in self.steps() if other < step]
        if self._keep is None and earlier:
            fix = f"Read the checkpoint before it: --step {earlier[-1]} (in Python step=)."
        return DamagedCheckpoint(at=self._at(step), problem=f"cannot be read: {reason}", fix=fix)


def _reason(error: BaseException) -> str:
    """Returns the first line of the root cause of an error.

    Orbax wraps it in long messages about its handlers.
    """
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"


logger = logging.getLogger("easypipe")


class Snapshots:
    """Copies of a state on the devices, from which a checkpoint is written while steps continue.

    On accelerators a copy is freed when it is dropped: their memory pools reuse it at once. On a
    CPU it is kept, and the next copy is written into it. Getting 1 GB of new memory from the system
    takes seconds; copying it takes 0.15 s.
    """

    def __init__(self) -> None:
        self._kept: Arrays | None = None
        self._room: bool | None = None

    def expect(self, like: Arrays | Mapping[str, jax.ShapeDtypeStruct]) -> None:
        """Allocates the memory for arrays like these, which may be abstract, on a CPU.

        It does nothing on other devices.
        """
        places = {name: leaf.sharding for name, leaf in like.items()}
        if _on_cpu(places):
            born = jax.jit(
                lambda: {name: jnp.zeros(leaf.shape, leaf.dtype) for name, leaf in like.items()},
                out_shardings=places,
            )
            self._kept = jax.block_until_ready(born())

    def take(self, arrays: Arrays) -> Arrays | None:
        """Returns copies of the arrays with the same shardings; None if there is no memory."""
        places = {name: array.sharding for name, array in arrays.items()}
        if self._room is None:  # queried once: later peaks include a copy
            devices = {one for place in places.values() for one in place.addressable_devices}
            stats = [device.memory_stats() or {} for device in devices]
            self._room = has_room(on_device(dict(arrays)), stats)
            if not self._room:
                logger.warning(
                    "no room on the devices for a second copy of the state: steps wait while a "
                    "checkpoint is copied from them"
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
    """Returns whether each device had `needed` bytes left at its peak.

    Args:
        needed: Bytes of a copy on one device.
        told: The memory_stats of the devices; one without statistics counts as having room.
    """
    known = [stats for stats in told if {"bytes_limit", "peak_bytes_in_use"} <= set(stats)]
    return all(needed <= stats["bytes_limit"] - stats["peak_bytes_in_use"] for stats in known)


def _copied(arrays: Arrays, into: Arrays | None = None) -> Arrays:
    """Copies the arrays; `into` is donated, so that the copies use its memory."""
    return jax.tree.map(jnp.copy, arrays)


def _kinds(arrays: Arrays) -> dict[str, Identity]:
    """Returns shape, dtype and sharding of each array, by name."""
    return {name: (leaf.shape, leaf.dtype, leaf.sharding) for name, leaf in arrays.items()}


def _on_cpu(places: Mapping[str, Sharding | None]) -> bool:
    devices = {one for place in places.values() if place for one in place.device_set}
    return all(device.platform == "cpu" for device in devices)
