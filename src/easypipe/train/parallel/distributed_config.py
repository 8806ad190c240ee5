"""How the processes of a run find each other, as it is told. No jax here."""

from __future__ import annotations

from easypipe.core.config import config
from easypipe.core.errors import ConfigError


@config
class DistributedConfig:
    """The processes of a run on several hosts. All left out: JAX_COORDINATOR_ADDRESS,
    JAX_NUM_PROCESSES and JAX_PROCESS_ID are asked, then the scheduler (TPU pods, Slurm, Kubernetes,
    Open MPI); where none speaks of several processes there is one.
    """

    enabled: bool = True  # False: this process is alone, whatever the environment says
    coordinator_address: str | None = None  # "host:port" of process 0, as the others reach it
    num_processes: int | None = None
    process_id: int | None = None  # of this process, from 0; process 0 writes the files of the run
    timeout: int = 300  # seconds in which all have to come together
    # seconds after which a process that is silent counts as lost, and the others end
    heartbeat: int = 100

    def check(self) -> None:
        address = self.coordinator_address
        if address is not None and not address.rpartition(":")[2].isdecimal():
            raise ConfigError(
                at="coordinator_address",
                problem=f"{address!r} has no port",
                fix='Write it as "host:port".',
            )
        for name in ("num_processes", "timeout", "heartbeat"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(at=name, problem=f"{value} is too small", fix="Give at least 1.")
        if self.process_id is not None and not 0 <= self.process_id < (
            self.num_processes or self.process_id + 1
        ):
            last = f"to {self.num_processes - 1}" if self.num_processes else "up"
            raise ConfigError(
                at="process_id",
                problem=f"{self.process_id} is not from 0 {last}",
                fix="Number the processes from 0.",
            )
        given = [self.coordinator_address, self.num_processes, self.process_id]
        if not self.enabled and any(value is not None for value in given):
            raise ConfigError(
                at="enabled",
                problem="false, and the processes are described all the same",
                fix="Leave one of them out.",
            )
