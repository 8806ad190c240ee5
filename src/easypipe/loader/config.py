"""LoadStageConfig: the options of a loader, their checks, and how many streams a batch allows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from easypipe.core.config import ListOf, config, fields_of
from easypipe.core.errors import ConfigError, PlacementError, require

MOST_STREAMS = 8  # the most streams of a batch if num_streams is not set
MOST_EPOCHS = 100_000  # this many epochs of a few documents each are planned in a minute


@config
class LoadStageConfig:
    """How rows become batches, and where the batches go.

    Args:
        batch_size: Rows of a training step, over all processes and micro-batches.
        batch_size_schedule: `[[step, rows], ...]`, steps ascending and above 0: the batch size from
            each training step on; until the first of them, batches have `batch_size` rows. Compiled
            programs have a separate shape for each size.
        accumulation_steps: Micro-batches of a training step. With a number A above 1, every column
            is [A, rows / A, slots], for a program that adds up the gradients; micro-batch a holds
            the rows r of the batch with r % A == a.
        prefetch_enabled: Make batches ahead, in threads. False makes each batch on request, without
            a check for stalls.
        prefetch_workers: Threads that make batches ahead. One thread fills some hundred million
            slots per second; more help with slow reads.
        prefetch_buffer_size: The most batches that are ready ahead of their use.
        shuffle_buffer_size: Permute rows within consecutive blocks of this many, keyed by the seed;
            None keeps the order of the plan. Blocks are counted over the whole run, so one may hold
            the end of an epoch and the start of the next. With streaming, it is the number of
            documents in a window, which are permuted and packed together; None takes 4,096, or
            fewer if they are long.
        group_by_length: Put rows of similar length into one batch, for less padding. In every
            window of this many batches (such as 64), after the permutation of
            `shuffle_buffer_size`, rows are sorted by the slots they need, and the resulting batches
            are permuted. Only for rows that are not packed.
        drop_last: Leave out a last batch that is not full. False yields it. Without a mesh it is
            smaller; on a mesh, and with micro-batches, it is filled with rows of padding (segment
            0, labels -100), which do not change the shape or count in the loss.
            `Loader.rows_of(step)` returns the real rows.
        prefetch_to_device: Without a mesh, put batches on a one-axis mesh of this process's
            devices; with a mesh they are always put on it.
        num_epochs: Passes over the data, up to 100,000; None never ends.
        source_ids: Add the column source_ids: the number of the dataset that each token comes from,
            in the order of `Loader.source_names`.
        mesh: `{axis: size}`, one size may be -1, or a jax Mesh.
        partition_spec: How batches are divided over the mesh; None divides rows over its axes
            `data` and `fsdp`.
        stall_timeout_s: Seconds that one batch may take before StallError names the stage it is in.
    """

    batch_size: int = 8
    batch_size_schedule: ListOf[tuple[int, int]] = ()
    accumulation_steps: int = 1
    prefetch_enabled: bool = True
    prefetch_workers: int = 1
    prefetch_buffer_size: int = 8
    shuffle_buffer_size: int | None = None
    group_by_length: int | None = None
    drop_last: bool = True
    prefetch_to_device: bool = False
    num_epochs: int | None = 1
    source_ids: bool = False
    mesh: Any = None
    partition_spec: Any = None
    stall_timeout_s: float = 300.0

    def check(self) -> None:
        counts = (
            "batch_size",
            "accumulation_steps",
            "prefetch_workers",
            "prefetch_buffer_size",
            "shuffle_buffer_size",
        )
        options = fields_of(self)
        for name in (*counts, "group_by_length", "num_epochs"):
            value = options[name]
            require(value is None or value >= 1, name, f"{value} is too few", "Give at least 1.")
        require(
            self.num_epochs is None or self.num_epochs <= MOST_EPOCHS,
            "num_epochs",
            f"{self.num_epochs} passes are too many to plan and count",
            "Give null, which goes on forever, and end the run by its steps.",
        )
        self._check_schedule()
        require(
            self.stall_timeout_s > 0,
            "stall_timeout_s",
            f"{self.stall_timeout_s} is not a time to wait",
            "Give seconds above 0.",
        )
        if isinstance(self.mesh, Mapping):
            check_axes(self.mesh)
        require(
            self.partition_spec is None or self.mesh is not None or self.prefetch_to_device,
            "partition_spec",
            "has no effect without a mesh",
            "Set mesh, for example {'data': -1}.",
        )

    def _check_schedule(self) -> None:
        require(
            self.group_by_length is None or not self.batch_size_schedule,
            "group_by_length",
            "groups are batches of one size, and batch_size_schedule changes it",
            "Leave one of them out.",
        )
        before = 0
        for i, (step, _) in enumerate(self.batch_size_schedule):
            require(
                step > before,
                f"batch_size_schedule[{i}]",
                f"step {step} does not come after step {before}",
                "Name steps in ascending order; until the first of them, batches have "
                "batch_size rows.",
            )
            before = step
        sizes = [("batch_size", self.batch_size)]
        sizes += [
            (f"batch_size_schedule[{i}]", size)
            for i, (_, size) in enumerate(self.batch_size_schedule)
        ]
        for at, size in sizes:
            require(size >= 1, at, f"{size} rows are too few", "Give at least 1.")
            if size % self.accumulation_steps:
                below = size // self.accumulation_steps * self.accumulation_steps
                above = below + self.accumulation_steps
                raise ConfigError(
                    at=at,
                    problem=f"{size} rows do not divide into accumulation_steps "
                    f"{self.accumulation_steps}",
                    fix=f"Give {f'{below} or {above}' if below else above} rows.",
                )


def default_streams(*batch_sizes: int) -> int:
    """Returns the largest number of streams, up to MOST_STREAMS, that divides all batch sizes."""
    whole = math.gcd(*batch_sizes)
    return next(count for count in range(min(MOST_STREAMS, whole), 0, -1) if whole % count == 0)


def check_streams(num_streams: int, config: LoadStageConfig) -> None:
    """Checks that a batch of every step divides into the streams.

    Raises:
        ConfigError: `num_streams` does not divide every batch size.
    """
    sizes = {config.batch_size, *(size for _, size in config.batch_size_schedule)}
    for size in sorted(sizes):
        require(
            num_streams >= 1 and size % num_streams == 0,
            "num_streams",
            f"{num_streams} streams do not divide a batch of {size} rows",
            f"Give a divisor of {' and '.join(map(str, sorted(sizes)))}, or leave it out "
            f"for {default_streams(*sizes)}.",
        )


def check_axes(mesh: Mapping[Any, Any]) -> dict[str, int]:
    """Checks the axes of a mesh as far as that is possible without devices.

    Returns:
        `{axis: size}`.

    Raises:
        PlacementError: There is no axis, an axis has no name or no size, or several sizes are -1.
    """
    sizes: dict[str, int] = {}
    for axis, size in mesh.items():
        if (
            not isinstance(axis, str)
            or isinstance(size, bool)
            or not isinstance(size, int)
            or (size < 1 and size != -1)
        ):
            raise PlacementError(
                at=f"mesh.{axis}",
                problem=f"{size!r} is not an axis size",
                fix="Give a count of devices, or -1 for what is left.",
            )
        sizes[axis] = size
    if not sizes:
        raise PlacementError(at="mesh", problem="no axes", fix="Write {'data': -1}.")
    if list(sizes.values()).count(-1) > 1:
        raise PlacementError(
            at="mesh",
            problem=f"{axes_in_words(sizes)}: more than one axis is -1",
            fix="Give all but one a size.",
        )
    return sizes


def axes_in_words(sizes: Mapping[str, int]) -> str:
    return " x ".join(f"{axis}={size}" for axis, size in sizes.items())
