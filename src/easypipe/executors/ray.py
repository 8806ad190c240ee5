"""Preparing on a Ray cluster: tasks, retried on failure, tokenize ranges into a shared folder.

The cluster is the one that Ray is connected to, that RAY_ADDRESS names or that runs on this
machine; otherwise one is started here and stopped after preparing.

A task is some ranges of one dataset. It commits the same bytes that this machine would have
committed. This process then finishes the token cache from the workers' records, so its bytes do not
depend on who made it. A task whose worker dies is retried, and reuses what was committed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, Protocol

from easypipe.core.errors import CacheError, ConfigError, raising, require
from easypipe.core.protocols import ProgressEvent, ProgressListener, silent

log = logging.getLogger("easypipe")

# the most: the overhead of a task is only some milliseconds, so larger ones would gain nothing
RANGES_PER_TASK = 64
# the least, if there are enough ranges, so that all workers end at about the same time
TASKS_PER_CPU = 8
RETRIES = 3  # for a task whose worker or machine died; an error in the data is raised at once


class Preparable(Protocol):
    """A token cache that is filled in parts (cache/writer.py)."""

    def missing(self) -> tuple[list[int], int]: ...
    def fill_part(self, numbers: Sequence[int]) -> int: ...


@dataclasses.dataclass(frozen=True)
class _Task:
    """Ranges of one dataset, by their numbers, that one worker tokenizes."""

    dataset: str
    part: tuple[int, ...]


def prepare_on_ray(
    sources: Mapping[str, Preparable],
    rebuild: Callable[[], Mapping[str, Preparable]],
    *,
    cpus_per_task: int = 1,
    progress: ProgressListener = silent,
) -> None:
    """Commits every pending range by tasks on Ray; `rebuild` makes the same sources in a worker.

    Raises:
        ConfigError: Ray is missing, or the workers wrote into a different folder than this machine
            sees.
        CacheError: The workers of a task died repeatedly.
    """
    waiting = {name: source.missing() for name, source in sources.items()}
    if not any(numbers for numbers, _ in waiting.values()):
        return
    ray = _import_ray()
    with _cluster(ray):
        _warn_if_none_is_large_enough(ray, cpus_per_task)
        cpus = max(1, int(ray.cluster_resources().get("CPU", 1)) // cpus_per_task)
        work = ray.remote(_work).options(
            num_cpus=cpus_per_task, max_retries=RETRIES, retry_exceptions=False
        )
        run, shared = uuid.uuid4().hex, ray.put(rebuild)
        done = {name: total - len(numbers) for name, (numbers, total) in waiting.items()}
        running: dict[Any, _Task] = {}
        following = itertools.chain.from_iterable(
            _cut(name, numbers, cpus) for name, (numbers, _) in waiting.items()
        )
        try:
            while True:
                while len(running) < 4 * cpus + 4 and (task := next(following, None)) is not None:
                    running[work.remote(run, shared, task.dataset, task.part)] = task
                if not running:
                    break
                [ready], _ = ray.wait(list(running), num_returns=1)
                task = running.pop(ready)
                _result(ray, ready, task)
                done[task.dataset] += len(task.part)
                event = ProgressEvent(
                    stage="tokenize",
                    dataset=task.dataset,
                    done=done[task.dataset],
                    total=waiting[task.dataset][1],
                    unit="ranges",
                )
                progress(event)
        finally:
            for left in running:
                ray.cancel(left, force=False)
    for name, source in sources.items():
        missing, total = source.missing()
        require(
            not missing,
            "cache_dir",
            f"Ray's workers are done, and {len(missing)} of {total} ranges of dataset "
            f"{name!r} are not in this folder",
            "Set cache_dir to a folder that all machines of the cluster share.",
        )


def _work(
    run: str, rebuild: Callable[[], Mapping[str, Preparable]], dataset: str, part: tuple[int, ...]
) -> int:
    """Fills a part in a Ray worker, which keeps the sources for its next task of the same run."""
    global _kept
    if _kept is None or _kept[0] != run:
        _kept = (run, rebuild())
    return _kept[1][dataset].fill_part(part)


_kept: tuple[str, Mapping[str, Preparable]] | None = None


def _result(ray: Any, ready: Any, task: _Task) -> int:
    """Returns how many rows a finished task processed, or raises its error."""
    try:
        return ray.get(ready)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None  # as it was raised there, with its notes
    except (
        ray.exceptions.WorkerCrashedError,
        ray.exceptions.NodeDiedError,
        ray.exceptions.OutOfMemoryError,
    ) as error:
        raise CacheError(
            at=f"dataset {task.dataset!r}, ranges {task.part[0]} to {task.part[-1]}",
            problem=f"Ray's worker died {RETRIES + 1} times: {type(error).__name__}",
            fix="Look for memory errors in the workers' logs; then run again, finished ranges are "
            "kept.",
        ) from error


def _cut(dataset: str, numbers: Sequence[int], cpus: int) -> Iterator[_Task]:
    """Cuts the pending ranges of a dataset into tasks."""
    size = max(1, min(RANGES_PER_TASK, len(numbers) // (TASKS_PER_CPU * cpus)))
    for start in range(0, len(numbers), size):
        yield _Task(dataset, tuple(numbers[start : start + size]))


def _warn_if_none_is_large_enough(ray: Any, cpus: int) -> None:
    """Warns if tasks wait for a machine with more CPUs, which an autoscaler may add."""
    nodes = (node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"])
    if (largest := int(max(nodes, default=0))) < cpus:
        log.warning(
            "ray: a task takes tokenize.num_workers=%d CPUs, and no machine of the cluster has "
            "more than %d: nothing is tokenized until one joins that has",
            cpus,
            largest,
        )


def _import_ray() -> Any:
    fix = "python -m pip install 'easypipe[ray]'"
    with raising(ConfigError, "executor", "'ray' needs the package ray", fix, ImportError):
        import ray
    return ray


@contextlib.contextmanager
def _cluster(ray: Any) -> Generator[None, None, None]:
    """Connects to a Ray cluster, and afterwards keeps a connection that already existed."""
    if ray.is_initialized():
        yield
        return
    ray.init(log_to_driver=False, logging_level="warning")
    try:
        yield
    finally:
        ray.shutdown()
