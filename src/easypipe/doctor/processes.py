"""Checks with other processes: several make the rows of one; one is killed while it prepares."""
# pyright: strict

from __future__ import annotations

import dataclasses
import itertools
import logging
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import numpy as np

from easypipe.core import storage
from easypipe.core.schema import INPUT_IDS
from easypipe.core.values import Batch
from easypipe.doctor.check import Check, Failed, Skipped
from easypipe.doctor.data import BATCHES, Sample, compare
from easypipe.loader.loader import Loader

PROCESSES = 2
KILLED = 9  # the exit code of a process that dies by `die`
DEATH = 4  # the number of the file whose rename kills the process; with little data, a manifest
PATIENCE_S = 300.0  # how long the process may run before it is killed


def process_checks(sample: Sample) -> Sequence[Check]:
    return [
        Check("several processes", partial(several_processes, sample)),
        Check("a kill while preparing", partial(a_kill_while_preparing, sample)),
    ]


def several_processes(sample: Sample) -> str:
    """Checks that several processes, preparing at once, make the same rows as one process.

    They prepare into one folder; each makes the batches of its own rows.
    """
    rows = [
        row
        for _, batch in zip(sample.batches, _ungrouped(sample), strict=False)
        for row in _rows(batch)
    ]
    if any(size % PROCESSES for _, size in _ungrouped(sample).rows.step_sizes):
        raise Skipped(f"weights follow steps whose rows {PROCESSES} processes cannot share evenly")
    place = sample.elsewhere("together")
    with ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn")) as pool:
        shares = list(pool.map(share, itertools.repeat(place), range(PROCESSES)))
    for rank, batches in enumerate(shares):
        own = [row for batch in batches for row in _rows(batch)]
        for n, (expected, found) in enumerate(zip(rows[rank::PROCESSES], own, strict=False)):
            for name, values in expected.items():
                # rows that are not packed are as long as the longest of their batch
                slots = min(len(values), len(found[name]))
                if not np.array_equal(values[:slots], found[name][:slots]):
                    raise Failed(
                        f"row {n * PROCESSES + rank} has another {name} in process {rank} of "
                        f"{PROCESSES} than in one alone"
                    )
        if len(own) < len(rows) // PROCESSES:
            raise Failed(f"process {rank} of {PROCESSES} has {len(own)} rows of {len(rows)}")
    return f"{len(rows)} rows by {PROCESSES} processes, which prepared at the same time"


def a_kill_while_preparing(sample: Sample) -> str:
    """Checks that if a process dies while it writes the cache, the next one finishes it.

    No temporary files of the killed process may remain.
    """
    prepared, place = sample.pipeline, sample.elsewhere("killed")
    dying = multiprocessing.get_context("spawn").Process(target=die, args=(place,))
    dying.start()
    dying.join(PATIENCE_S)
    if dying.exitcode != KILLED:
        dying.kill()
        raise Skipped(f"the process to be killed ended by itself, with {dying.exitcode}")
    documents = compare(prepared, place.pipeline, "prepared after a kill")
    left = [path for path in place.folder.rglob("*") if path.name.startswith(storage.TEMPORARY)]
    if left:
        raise Failed(
            f"{left[0].relative_to(place.folder)}: left by a killed process, and not removed"
        )
    return f"killed, and prepared again: {documents}"


def share(sample: Sample, rank: int) -> list[Batch]:
    """Returns the batches of one of PROCESSES ranks; it runs in another process."""
    _say_nothing()
    whole = _ungrouped(sample)
    sizes = [(step, -(-size // PROCESSES)) for step, size in whole.config.batch_size_schedule]
    size = -(-whole.batch_size // PROCESSES)
    # if PROCESSES do not divide a batch, pack.shuffle_buffer_factor would give another block
    block = whole.state().config["shuffle_buffer_size"]
    own = dataclasses.replace(
        whole.config, batch_size=size, batch_size_schedule=sizes, shuffle_buffer_size=block
    )
    loader = whole.copy(own).of_rank(rank, PROCESSES)
    return [
        {name: np.asarray(values) for name, values in batch.items()}
        for batch in itertools.islice(loader, BATCHES)
    ]


def die(sample: Sample) -> None:
    """Ends its process while it prepares; it runs in another process."""
    steps = itertools.count(1)

    def kill(step: str, _: str) -> None:
        if step == "rename" and next(steps) == DEATH:
            os._exit(KILLED)

    _say_nothing()
    storage.set_fault_hook(kill)
    sample.pipeline.prepare()


def _ungrouped(sample: Sample) -> Loader:
    """Returns a loader whose order of rows does not depend on the size of batches."""
    return sample.loader(dataclasses.replace(sample.load, group_by_length=None))


def _say_nothing() -> None:
    """Silences warnings, which the doctor's own process has printed."""
    logging.getLogger("easypipe").setLevel(logging.ERROR)


def _rows(batch: Batch) -> list[dict[str, np.ndarray]]:
    """Returns the rows of a batch, micro-batch by micro-batch."""
    lead = np.ndim(batch[INPUT_IDS]) - 1
    flat = {name: np.asarray(values) for name, values in batch.items()}
    flat = {name: values.reshape(-1, *values.shape[lead:]) for name, values in flat.items()}
    return [
        {name: values[row] for name, values in flat.items()} for row in range(len(flat[INPUT_IDS]))
    ]
