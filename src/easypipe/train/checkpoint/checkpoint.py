"""Checkpoints of a run: arrays, loader state and configuration of one step, committed together. The
only module that knows Orbax.

Law (commit or nothing): `latest()` is a checkpoint that was written whole and synced, whenever the
process that wrote it was killed or the machine lost power; and nothing is loaded but what was
written (checkpoint_files.py). What a killed process left behind is removed when the folder is
opened.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from orbax.checkpoint import v1 as ocp

from easypipe.core.errors import StateError, StorageError
from easypipe.train.checkpoint import files
from easypipe.train.checkpoint.files import ARRAYS, RUN
from easypipe.train.checkpoint.snapshot import Snapshots

FORMAT = 1
# what Orbax and TensorStore raise for files that are not there or not whole
_UNREADABLE = (OSError, ValueError, KeyError)


class DamagedCheckpoint(StateError):
    """A checkpoint whose files are not what was committed: deleted, cut short or changed by
    something else.
    """


class Checkpoints:
    """The checkpoints in `folder`, of which the newest `keep` are kept, and the `protected`. Close
    it, or use it as a context manager.

    keep: None only reads, and leaves what another process may be writing alone.
    """

    def __init__(self, folder: Path, *, keep: int | None) -> None:
        self.folder = folder.absolute()  # Orbax refuses relative paths
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
        self._context.async_options.create_directories_asynchronously = jax.process_count() > 1
        self.protected: dict[str, set[int]] = {}  # who -> steps that are kept whatever their age
        self._keep = keep
        self._snapshots, self._writer = (
            Snapshots(),
            ThreadPoolExecutor(1, thread_name_prefix="easypipe saves"),
        )
        # step, when it is committed, whether its arrays are copied
        self._saving: tuple[int, Future[None], threading.Event] | None = None
        try:
            if keep is not None and jax.process_index() == 0:
                self.folder.mkdir(parents=True, exist_ok=True)
                files.sweep(self.folder)
        except OSError as error:
            raise StorageError(
                at=str(folder), problem=f"cannot hold checkpoints: {error}"
            ) from error
        if keep is not None and jax.process_count() > 1:
            multihost_utils.sync_global_devices(f"easypipe opened {self.folder}")

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, oldest first."""
        return files.committed(self.folder)

    def latest(self) -> int | None:
        steps = self.steps()
        return steps[-1] if steps else None

    def save(self, step: int, arrays: Mapping[str, jax.Array], run: Mapping[str, Any]) -> None:
        """Starts writing, and returns: `copied` tells when the arrays may be donated. One save runs
        at a time.

        run: plain JSON. Raises StorageError where the save before this one could not be written; of
        this one `wait` raises it.
        """
        self._committed()
        keeping = frozenset[int]().union(*self.protected.values())
        parts, copied = {RUN: {"format": FORMAT, **run}}, threading.Event()
        if jax.process_count() > 1:
            # Orbax agrees with the other processes by programs on the devices, which stand in one
            # order with those of the steps.
            try:
                written = self._start(step, arrays, parts)
            except BaseException as error:  # noqa: BLE001  (raised by `wait`, as that of a save in the background is)
                writing: Future[None] = Future()
                writing.set_exception(error)
            else:
                writing = self._writer.submit(self._finish, step, written, keeping)
            copied.set()
        else:
            writing = self._writer.submit(self._write, step, arrays, parts, keeping, copied)
        self._saving = step, writing, copied

    def expect(self, like: Mapping[str, Any]) -> None:
        """Says what arrays, or abstract ones, will be saved, so that what a save needs is at hand
        when it comes.
        """
        if jax.process_count() == 1:
            self._writer.submit(self._snapshots.expect, like)

    def copied(self) -> None:
        """Returns once the arrays that were given to `save` may be donated."""
        if self._saving is not None:
            self._saving[2].wait()

    def _write(
        self,
        step: int,
        arrays: Mapping[str, jax.Array],
        parts: dict[str, Any],
        keeping: frozenset[int],
        copied: threading.Event,
    ) -> None:
        try:
            apart = self._snapshots.take(arrays)
            if apart is not None:
                arrays = apart
                copied.set()
            written = self._start(step, arrays, parts)  # returns once they are in the host's memory
            copied.set()
            self._finish(step, written, keeping)
        finally:
            copied.set()

    def _start(self, step: int, arrays: Mapping[str, jax.Array], parts: dict[str, Any]) -> Any:
        with ocp.Context(self._context):
            return ocp.save_checkpointables_async(
                str(files.writing(self.folder, step)),
                {ARRAYS: dict(arrays), **parts},
                overwrite=True,
            )

    def _finish(self, step: int, written: Any, keeping: frozenset[int]) -> None:
        """Commits what Orbax has written when `written` has its result, and takes away what is no
        longer kept.

        keeping: what was protected when the save began.
        """
        written.result()
        if jax.process_index() == 0:
            files.commit(self.folder, step)
            newest = self.steps()[-(self._keep or 1) :]
            files.delete(
                self.folder,
                [old for old in self.steps() if old not in newest and old not in keeping],
            )

    def run(self, step: int) -> dict[str, Any]:
        """What `save` was given as `run`. Raises DamagedCheckpoint, and StateError for a checkpoint
        of another version.
        """
        self._check(step, RUN)
        saved: Any = self._read(step, RUN, None)
        if not isinstance(saved, dict) or saved.get("format") != FORMAT:
            found = saved.get("format") if isinstance(saved, dict) else None
            raise StateError(
                at=self._at(step),
                problem=f"checkpoint format {found}, this version reads {FORMAT}",
                fix="Give another output_dir.",
            )
        return saved

    def load(
        self, step: int, abstract: Mapping[str, jax.ShapeDtypeStruct], *, partial: bool = False
    ) -> dict[str, jax.Array]:
        """The arrays of `step`, each laid out as `abstract` says, on whatever mesh they were saved.

        partial: saved arrays that `abstract` does not name are left where they are.

        Raises DamagedCheckpoint, and StateError listing how the saved arrays differ from `abstract`
        in name, shape and dtype.
        """
        saved = {
            name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in self.describe(step).items()
        }
        if partial:
            saved = {name: text for name, text in saved.items() if name in abstract}
        unlike = differences(
            saved, {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in abstract.items()}
        )
        if unlike:
            raise StateError(
                at=self._at(step),
                problem=f"holds other arrays: {listed(unlike)}",
                fix="Give another output_dir.",
            )
        return self._read(step, ARRAYS, dict(abstract))

    def describe(self, step: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape and dtype of the arrays of `step`. Raises DamagedCheckpoint."""
        self._check(step, ARRAYS)
        try:
            with ocp.Context(self._context):
                metadata: Any = ocp.checkpointables_metadata(self._at(step)).metadata
        except _UNREADABLE as error:
            raise self._damaged(step, _reason(error)) from error
        described = metadata.get(ARRAYS)
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
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices(f"easypipe set aside {step}")
        return target

    def wait(self) -> None:
        """Returns once the newest save is committed. Raises StorageError where it failed."""
        self._committed()

    def close(self) -> None:
        """Returns once nothing is being written. Raises StorageError where the newest save failed,
        if `wait` did not.
        """
        self._writer.shutdown()
        self._committed(agree=False)  # the other processes may be gone

    def _committed(self, *, agree: bool = True) -> None:
        """Raises what went wrong in the newest save, once. agree: where there are several
        processes, all of them know then.
        """
        if self._saving is None:
            return
        (step, writing, _), self._saving = self._saving, None
        try:
            writing.result()
        except (OSError, ValueError) as error:
            problem = f"cannot be written: {error}"
            raise StorageError(
                at=self._at(step), problem=problem, fix="Check space and permissions."
            ) from error
        finally:
            if agree and jax.process_count() > 1:
                multihost_utils.sync_global_devices(f"easypipe saved {step}")

    def _read(self, step: int, part: str, abstract: Any) -> Any:
        try:
            with ocp.Context(self._context):
                return ocp.load_checkpointables(self._at(step), {part: abstract})[part]
        except _UNREADABLE as error:
            raise self._damaged(step, _reason(error)) from error

    def _check(self, step: int, part: str) -> None:
        """Raises DamagedCheckpoint where files of a part are not as they were committed. Arrays are
        shared out among the processes.
        """
        several = part == ARRAYS and jax.process_count() > 1
        share = (jax.process_index(), jax.process_count()) if several else (0, 1)
        problems = files.check(self.folder / str(step), part, share=share).problems
        damaged = bool(problems)
        if several:
            damaged = bool(multihost_utils.process_allgather(np.asarray(damaged)).any())
        if damaged:
            told = [f"{name}: {what}" for name, what in problems.items()] or [
                "another process found it damaged"
            ]
            raise self._damaged(step, "; ".join(told[:4]))

    def _at(self, step: int) -> str:
        return str(self.folder / str(step))

    def _damaged(self, step: int, reason: str) -> DamagedCheckpoint:
        return DamagedCheckpoint(at=self._at(step), problem=f"cannot be read: {reason}")


def _reason(error: BaseException) -> str:
    """The first line of what began it; Orbax wraps that in pages about its handlers."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"


def differences(
    saved: Any, here: Any, at: str = "", words: str = "{here} here, {saved} in the checkpoint"
) -> dict[str, str]:
    """key path → `64 here, 128 in the checkpoint` (`words`), for every value of two nested mappings
    that is not the same.

    Of lists of mappings (datasets, groups) each entry is compared: `datasets.1.name`, as `--set`
    has it.
    """
    if isinstance(saved, Mapping) and isinstance(here, Mapping):
        found: dict[str, str] = {}
        for key in [*here, *(key for key in saved if key not in here)]:
            path = f"{at}.{key}" if at else str(key)
            found |= differences(saved.get(key, _ABSENT), here.get(key, _ABSENT), path, words)
        return found
    if _are_sections(saved) and _are_sections(here):
        found = (
            {}
            if len(saved) == len(here)
            else {at: words.format(here=f"{len(here)} of them", saved=len(saved))}
        )
        for i, (one, other) in enumerate(zip(saved, here, strict=False)):
            found |= differences(one, other, f"{at}.{i}", words)
        return found
    return {} if saved == here else {at: words.format(here=_shown(here), saved=_shown(saved))}


def key_paths(values: Any, at: str = "") -> Iterator[str]:
    """Every path that `differences` may have found in `values`, sections before what they hold."""
    if isinstance(values, Mapping) or _are_sections(values):
        for key, value in values.items() if isinstance(values, Mapping) else enumerate(values):
            path = f"{at}.{key}" if at else str(key)
            yield path
            yield from key_paths(value, path)


def listed(unlike: Mapping[str, str], most: int = 8) -> str:
    """What `differences` found, in one line."""
    lines = [f"{path}: {difference}" for path, difference in unlike.items()]
    return "; ".join(lines[:most]) + (
        f"; and {len(lines) - most} more" if len(lines) > most else ""
    )


def _are_sections(value: Any) -> bool:
    return (
        isinstance(value, list) and bool(value) and all(isinstance(one, Mapping) for one in value)
    )


def _shown(value: Any) -> str:
    return "nothing" if value is _ABSENT else str(value)


_ABSENT = object()
