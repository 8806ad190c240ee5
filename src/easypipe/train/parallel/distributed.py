"""The processes of a run: how they join, share a seed, fail together, and agree on a maximum."""

from __future__ import annotations

import atexit
import functools
import importlib.util
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import NoReturn

import jax
import numpy as np
from jax._src import distributed as jax_distributed  # jax exposes its key-value store nowhere else
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from easypipe.core.config import from_dict, to_dict
from easypipe.core.errors import ConfigError, EasypipeError, StallError, require
from easypipe.core.random import draw_seed
from easypipe.core.values import Arguments, Json
from easypipe.train.parallel.config import DistributedConfig

logger = logging.getLogger("easypipe")

VARIABLES = {
    "coordinator_address": "JAX_COORDINATOR_ADDRESS",
    "num_processes": "JAX_NUM_PROCESSES",
    "process_id": "JAX_PROCESS_ID",
}
"""Field of DistributedConfig → the environment variable that is used if the field is not set."""
GRACE = 2.0
"""Seconds between hearing that another process has failed and exiting; meanwhile a process reports
its own error.
"""
_FAILED = "easypipe/failed"


def initialize(config: DistributedConfig | None = None) -> bool:
    """Joins this process to the others of its run; returns True if there are others.

    Call it before anything asks JAX for a device. Values missing in config and VARIABLES come from
    the scheduler: Slurm, Open MPI, Kubernetes (indexed Jobs and JobSets), TPU pods. If none of them
    names other processes, nothing is done. A second call does nothing.

    Raises:
        ConfigError: The description of the processes is incomplete or invalid.
        StallError: The others do not connect within config.timeout seconds.
    """
    config = DistributedConfig() if config is None else config
    if jax.distributed.is_initialized():
        return _together()
    if not config.enabled:
        return False
    described = _described(config, os.environ)
    missing = [field for field in VARIABLES if field not in described]
    scheduler = _scheduler(os.environ) if missing else None
    if not described and scheduler is None:
        return False
    require(
        scheduler is not None or not missing,
        f"train.distributed.{''.join(missing[:1])}",
        f"not given, though {', '.join(described)} is",
        f"Set it, or {', '.join(VARIABLES[field] for field in missing)}; or nothing, where a "
        "scheduler can be asked.",
    )
    # JAX's handler of SIGTERM would receive the signal before there is a loop that saves, and leave
    # the process running.
    jax.config.update("jax_enable_preemption_service", False)
    # These affect only CPUs, where concurrent programs mix up their messages.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    try:
        joined = _join(config, described, ask_scheduler=bool(missing))
    except (RuntimeError, ValueError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        fix = "See that the address is free, and is one of process 0's host."
        if "must be called before" in reason:
            reason = "JAX has made devices already"
            fix = "Call easypipe.train.initialize() first thing in the program."
        elif missing:
            fix = f"Set {', '.join(VARIABLES.values())}."
        problem = f"cannot be joined to other processes: {reason}"
        raise ConfigError(at="train.distributed", problem=problem, fix=fix) from error
    if not joined:
        who = "process {process_id} of {num_processes}" if not missing else "this process"
        where = described.get("coordinator_address", f"the address that {scheduler} gives")
        raise StallError(
            at="train.distributed",
            problem=f"{who.format(**described)} could not connect to the other processes within "
            f"{config.timeout} s at {where}",
            fix="See that all of them run, reach that address, and have ids of their own; or raise "
            "train.distributed.timeout.",
        )
    here, count = jax.process_index(), jax.process_count()
    local, devices = jax.local_device_count(), jax.device_count()
    logger.info("process %d of %d, %d of %d devices", here, count, local, devices)
    return _together()


def leave(code: int, error: BaseException) -> None:
    """Ends this process, which has failed, and the others of its run, with the exit code `code`.

    Otherwise the others would wait for this process in their next step, and it would wait for them
    at its end. It does nothing if the run has no other process, or if all processes have met this
    error together.
    """
    if not several() or (isinstance(error, EasypipeError) and error.in_all):
        return
    client = jax_distributed.global_state.client
    assert client is not None  # several() is true
    failed = f"{code} {jax.process_index()} {error or type(error).__name__}"
    with suppress(jax.errors.JaxRuntimeError):  # another failed earlier, or the store is gone
        client.key_value_set(_FAILED, failed)
    if jax.process_index() == 0:  # it holds the store from which the others learn
        time.sleep(2 * GRACE + 1)
    _end(code)


def _together() -> bool:
    """Returns several(); if so, an uncaught error from here on ends all processes."""
    if several():
        _listen()
    return several()


@functools.cache  # once in a process
def _listen() -> None:
    """Installs the hook of uncaught errors, and starts to watch for failures elsewhere."""
    told = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        told(kind, error, trace)
        leave(error.exit_code if isinstance(error, EasypipeError) else 1, error)

    sys.excepthook = hook
    over = threading.Event()
    listening = threading.Thread(target=_hear, args=(over,), name="easypipe hears of failures")
    listening.daemon = True

    def stop() -> None:  # before jax shuts down, which the thread calls
        over.set()
        listening.join()

    listening.start()
    atexit.register(stop)


def _hear(over: threading.Event) -> None:
    """Checks every second whether another process has failed; then logs that, and ends this one."""
    client = jax_distributed.global_state.client
    assert client is not None
    while not over.wait(1):
        with suppress(jax.errors.JaxRuntimeError):  # no process has failed
            code, process, why = client.key_value_try_get(_FAILED).split(" ", 2)
            if int(process) == jax.process_index():
                return
            time.sleep(GRACE)
            logger.error("process %s has failed: %s\nThis one ends too.", process, why)
            _end(int(code))


def _end(code: int) -> NoReturn:
    """Exits at once: a usual exit of jax would wait for the other processes."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def several() -> bool:
    """Returns whether the run has more processes than this one.

    It does not ask JAX for a device if `initialize` was not called.
    """
    return jax.distributed.is_initialized() and jax.process_count() > 1


def is_first() -> bool:
    """Returns whether this process speaks for the run: it is the first one, or the only one."""
    return not several() or jax.process_index() == 0


def shared_seed() -> int | None:
    """Draws a seed that is the same in every process; returns None in a run of one process.

    Every process must call it at the same place.
    """
    if not several():
        return None
    return int(multihost_utils.broadcast_one_to_all(np.int32(draw_seed())))


def of_every_process(values: Json) -> list[Json]:
    """Returns the plain JSON that each process passed, in order.

    Every process must call it at the same place.
    """
    if not several():
        return [values]
    own = json.dumps(values).encode()
    sizes = multihost_utils.process_allgather(np.int32(len(own)))
    padded = np.frombuffer(own.ljust(int(sizes.max())), np.uint8)
    gathered = np.asarray(multihost_utils.process_allgather(padded))
    return [json.loads(text.tobytes()) for text in gathered.reshape(jax.process_count(), -1)]


class Largest:
    """A maximum over processes, without waiting.

    A call `largest(number)` returns the largest number that any process passed in the call before
    this one, and 0 in the first call. Every process must make the same calls, at the same places of
    the same program. Numbers are int32, at least 0.
    """

    def __init__(self) -> None:
        # One number per device and not per process: on CPU, programs over all devices run in turn,
        # but smaller ones run concurrently, and then gloo takes the numbers of one for those of the
        # other.
        self._mesh = Mesh(np.array(jax.devices()), ("device",))
        self._spread, self._before = NamedSharding(self._mesh, PartitionSpec("device")), None
        self._reduce = jax.jit(
            lambda numbers: numbers.max(), out_shardings=NamedSharding(self._mesh, PartitionSpec())
        )

    def __call__(self, number: int) -> int:
        numbers = jax.make_array_from_callback(
            (self._mesh.size,), self._spread, lambda index: np.array([number], np.int32)
        )
        with jax.set_mesh(self._mesh):  # the run's mesh has other axes
            before, self._before = self._before, self._reduce(numbers)
        return 0 if before is None else int(before.addressable_data(0))


def _described(config: DistributedConfig, variables: Mapping[str, str]) -> dict[str, str | int]:
    """Returns the values from config and environment, by the names of `jax.distributed.initialize`.

    Raises:
        ConfigError: A variable is not a number, or a value is out of range.
    """
    given = to_dict(config)
    described: dict[str, str | int] = {}
    for field, variable in VARIABLES.items():
        value = given[field]
        if value is None and variable in variables:
            value = variables[variable]
            if field != "coordinator_address":
                require(
                    value.isdecimal(),
                    variable,
                    f"{value!r} is not a number",
                    "Give a whole number from 0.",
                )
                value = int(value)
        if value is not None:
            described[field] = value
    from_dict(DistributedConfig, described, at="train.distributed")  # checks the values
    return described


def _scheduler(variables: Mapping[str, str]) -> str | None:
    """Returns the name of the scheduler that started several processes; None if none did.

    Raises:
        ConfigError: jax lacks the package to ask it.
    """
    if int(variables.get("SLURM_NTASKS", "1")) > 1 and {
        "SLURM_PROCID",
        "SLURM_STEP_NODELIST",
    } <= set(variables):
        return "Slurm"
    if int(variables.get("OMPI_COMM_WORLD_SIZE", "1")) > 1:
        return "Open MPI"
    from jax._src import clusters  # the only place where jax recognizes a TPU pod

    if any(
        cluster.is_env_present() for cluster in (clusters.GkeTpuCluster, clusters.GceTpuCluster)
    ):
        return "the TPU pod"
    if "KUBERNETES_SERVICE_HOST" in variables and "JOB_COMPLETION_INDEX" in variables:
        require(
            importlib.util.find_spec("kubernetes") is not None,
            "train.distributed",
            "an indexed Kubernetes job, which jax cannot query without the package kubernetes",
            f"Install jax[k8s], or set {', '.join(VARIABLES.values())} in the manifest; "
            "docs/multihost.md has one.",
        )
        return "Kubernetes"
    return None


def _join(
    config: DistributedConfig, described: Mapping[str, str | int], *, ask_scheduler: bool
) -> bool:
    """Joins the other processes; returns False if config.timeout passed.

    The call waits in a thread, because jax's own deadline aborts the process without a message.
    """
    raised: list[Exception] = []
    options: Arguments = dict(described)
    options["cluster_detection_method"] = None if ask_scheduler else "deactivate"
    options["heartbeat_timeout_seconds"] = config.heartbeat
    # By then this process has reported the problem and exited.
    options["initialization_timeout"] = config.timeout + 60

    def join() -> None:
        try:
            jax.distributed.initialize(**options)
        except Exception as error:  # noqa: BLE001  (crosses to the thread that waits)
            raised.append(error)

    joining = threading.Thread(target=join, name="easypipe joins its processes", daemon=True)
    joining.start()
    joining.join(config.timeout)
    if raised:
        raise raised[0]
    return not joining.is_alive()
