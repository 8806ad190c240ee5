"""Options of the device mesh (axes, presets, rules) and of the processes of a run.

This file imports no jax: a configuration is read and checked on machines that only prepare data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import field
from typing import Literal, get_args

from easypipe.core.config import check_at_least, config, from_dict
from easypipe.core.errors import ConfigError, did_you_mean, require, require_known
from easypipe.core.values import Settings

Axes = str | tuple[str, ...] | None
Preset = Literal["dp", "fsdp", "zero1", "tp", "hybrid"]

MESH_AXES = ("data", "fsdp", "sequence", "tensor")
BATCH_AXES = ("data", "fsdp")
RULES: Mapping[str, Axes] = {
    "embed": "fsdp",
    "heads": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
    "layers": None,
}
"""Meaning of a parameter's dimension → the mesh axes over which it is divided."""

PRESETS: tuple[Preset, ...] = get_args(Preset)
# The axis that gets the remaining devices, by preset.
_OPEN = {"dp": "data", "fsdp": "fsdp", "zero1": "data", "tp": "tensor", "hybrid": "fsdp"}
_TOGETHER = (
    ("embed", "heads"),
    ("embed", "mlp"),
    ("embed", "vocab"),
    *(("layers", name) for name in ("embed", "heads", "mlp", "vocab")),
)


@config
class MeshConfig:
    """Devices along each axis of the mesh; -1 takes the remaining ones.

    An axis that is not given has one device, or the preset's number.

    Presets: dp, all devices along data; fsdp, along fsdp; tp, along tensor; zero1 is dp with the
    optimizer's state divided over data; hybrid has data across slow links (between slices of TPUs,
    else hosts) and fsdp within.

    Args:
        data: Replicas of the model, each with rows of its own.
        fsdp: Replicas that share one copy of the parameters.
        sequence: Devices that share the slots of a row.
        tensor: Devices that share every layer.
    """

    # one of the presets above (dp, fsdp, tp, zero1, hybrid); axes that are given too override it
    preset: Preset | None = None
    data: int | None = None
    fsdp: int | None = None
    sequence: int | None = None
    tensor: int | None = None
    # the mesh axes over which a named dimension of the parameters is divided; with null, it is not
    # divided
    axis_rules: dict[str, str | tuple[str, ...] | None] = field(default_factory=dict)

    def check(self) -> None:
        for name, size in self.given.items():
            require(
                size == -1 or size >= 1,
                name,
                f"{size} is not a number of devices",
                "Give at least 1, or -1 for those that remain.",
            )
        open_axes = [name for name, size in self.given.items() if size == -1]
        require(
            len(open_axes) <= 1,
            "",
            "-1 (the devices that remain) appears more than once",
            "Leave it on one axis.",
            have=open_axes,
        )
        self._check_rules()

    @property
    def given(self) -> dict[str, int]:
        """The number of devices of each axis that is given."""
        sizes = zip(MESH_AXES, (self.data, self.fsdp, self.sequence, self.tensor), strict=True)
        return {name: size for name, size in sizes if size is not None}

    def sizes(self, slow: int = 1) -> dict[str, int]:
        """Returns the number of devices, or -1, of every axis.

        Args:
            slow: The number of groups of devices that are joined by slow links.
        """
        sizes = dict.fromkeys(MESH_AXES, 1) | self.given
        if self.preset is not None and -1 not in sizes.values():
            free = (
                "data" if self.preset == "hybrid" and self.fsdp is not None else _OPEN[self.preset]
            )
            if free not in self.given:
                sizes[free] = -1
        if self.preset == "hybrid" and self.data is None and sizes["data"] != -1:
            sizes["data"] = slow
        return sizes

    @property
    def rules(self) -> dict[str, Axes]:
        """RULES, overridden by axis_rules."""
        return {**RULES, **self.axis_rules}

    def _check_rules(self) -> None:
        """Checks that axis_rules name known dimensions and axes, and use no axis twice in one
        array.
        """
        for name, axes in self.axis_rules.items():
            at = f"axis_rules.{name}"
            require_known(name, RULES, at, f"no dimension of a parameter means {name!r}")
            for axis in axes_of(axes):
                require_known(axis, MESH_AXES, at, f"no mesh axis named {axis!r}")
            twice = len(set(axes_of(axes))) < len(axes_of(axes))
            require(not twice, at, f"{axes} names an axis twice", "Name each axis once.")
        for one, other in _TOGETHER:
            shared = set(axes_of(self.rules[one])) & set(axes_of(self.rules[other]))
            require(
                not shared,
                "axis_rules",
                f"{one} and {other} are dimensions of one array, and both lie over "
                f"{', '.join(sorted(shared))}",
                "Give them different axes, or null for whole.",
            )


@config
class DistributedConfig:
    """The processes of a run on several hosts.

    Without these options, JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID decide,
    then the scheduler (TPU pods, Slurm, Kubernetes, Open MPI); if none of them names several
    processes, there is one.
    """

    enabled: bool = True  # with False this process is alone, whatever the environment says
    coordinator_address: str | None = None  # "host:port" of process 0, as the others reach it
    num_processes: int | None = None  # how many processes the run has, on all hosts
    # number of this process, from 0; process 0 writes the files of the run
    process_id: int | None = None
    timeout: int = 300  # seconds within which all processes must have connected
    # a process that is silent for this many seconds counts as lost, and the others end
    heartbeat: int = 100

    def check(self) -> None:
        address = self.coordinator_address
        host, _, port = (address or "").rpartition(":")
        require(
            address is None or (host and port.isdecimal() and 0 < int(port) < 1 << 16),
            "coordinator_address",
            f"{address!r} has no {'host' if port.isdecimal() and not host else 'port'}",
            'Write it as "host:port".',
        )
        check_at_least(self, 1, "num_processes", "timeout", "heartbeat")
        last = f"to {self.num_processes - 1}" if self.num_processes else "up"
        require(
            self.process_id is None or 0 <= self.process_id < (self.num_processes or math.inf),
            "process_id",
            f"{self.process_id} is not from 0 {last}",
            "Number the processes from 0.",
        )
        given = [self.coordinator_address, self.num_processes, self.process_id]
        require(
            self.enabled or not any(value is not None for value in given),
            "enabled",
            "false, but the processes are described",
            "Leave one of them out.",
        )


def mesh_config(mesh: MeshConfig | Settings | str | None, at: str = "mesh") -> MeshConfig:
    """Returns a MeshConfig from a preset's name, from sizes by axis, or from None, which means dp.

    Raises:
        ConfigError: No preset or axis has that name, or a size is out of range.
    """
    if isinstance(mesh, MeshConfig):
        return mesh
    if isinstance(mesh, Mapping):
        return from_dict(MeshConfig, mesh, at)
    name = "dp" if mesh is None else mesh
    if name not in PRESETS:
        raise ConfigError(
            at=at,
            problem=f"no preset named {name!r}",
            have=PRESETS,
            fix=did_you_mean(str(name), PRESETS),
        )
    return MeshConfig(preset=name)


def axes_of(axes: Axes) -> tuple[str, ...]:
    """Returns one axis, several or none as a tuple."""
    return (axes,) if isinstance(axes, str) else tuple(axes or ())
