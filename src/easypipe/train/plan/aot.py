"""A training step compiled for devices that are not there: what it holds, what it sends, how fast
it can be at best.

It is the Trainer's own step, lowered for abstract arrays that lie where the run's arrays would lie.
"""

from __future__ import annotations

import dataclasses
import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from easypipe.core.errors import ConfigError
from easypipe.core.schema import INPUT_IDS, LABELS, POSITION_IDS, SEGMENT_IDS
from easypipe.train import state as states
from easypipe.train.callbacks.config import CallbacksConfig
from easypipe.train.checks import MANY_STEPS, Shapes
from easypipe.train.config import TrainingConfig
from easypipe.train.metrics.memory import advice, on_device
from easypipe.train.metrics.peak import Device, known_device
from easypipe.train.model.attention import choose
from easypipe.train.parallel.axes import TOKEN_AXES
from easypipe.train.parallel.mesh import check_row_length, make_mesh
from easypipe.train.plan.hlo import Collective, read
from easypipe.train.plan.roofline import Roofline, roofline
from easypipe.train.plan.topology import topology
from easypipe.train.trainer import Engine

PACKED = (INPUT_IDS, LABELS, SEGMENT_IDS, POSITION_IDS)


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on each device. Where XLA refused the program, `temporaries` and `peak` are what it
    said it wanted, if it did.
    """

    parameters: int
    optimizer: int
    other_state: int  # dropout keys and the like
    batch: int
    gradients: int  # in float32, if all were held at once; part of `temporaries`
    # gradients, activations, gathered parameters, buffers, and what the layout of the others pads
    temporaries: int
    program: int
    peak: int  # all of it, at the worst moment
    available: int | None  # None where the table of devices does not know
    refused: bool  # XLA would not compile it: it does not fit

    @property
    def fits(self) -> bool | None:
        if self.refused:
            return False
        return None if self.available is None else self.peak <= self.available


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """What `plan_step` found. `str()` is a report, `to_json()` the same as plain data; nothing is
    known of the data's documents.
    """

    topology: str
    device: str  # jax's device_kind
    mesh: dict[str, int]
    batch_size: int
    seq_length: int
    accumulate_steps: int
    attention: str | None  # the backend; None for a module that is no Decoder
    parameters: int
    memory: Memory
    collectives: tuple[Collective, ...]  # of one step, those of most bytes first
    unknown_loops: int
    xla_flops: float | None  # of one device, as XLA counts
    # None where the model's FLOPs or the device's rates are not known, or it was not compiled
    roofline: Roofline | None
    compile_seconds: float
    advice: tuple[str, ...]  # what to change where it does not fit

    @property
    def devices(self) -> int:
        return math.prod(self.mesh.values())

    def to_json(self) -> dict[str, Any]:
        """Plain data: sizes in bytes on each device, times in seconds."""
        found = dataclasses.asdict(self)
        found["collectives"] = [one._asdict() | {"sent": one.sent} for one in self.collectives]
        found["memory"]["fits"] = self.memory.fits
        return found | {"devices": self.devices, "not_known": list(unknowns(self))}

    def __str__(self) -> str:
        from easypipe.train.plan.report import text

        return text(self)


def plan_step(
    model: Any,
    train: TrainingConfig,
    on: str,
    *,
    batch_size: int,
    seq_length: int,
    columns: Sequence[str] = PACKED,
    accumulation_steps: int = 1,
) -> StepPlan:
    """Compiles the step of `Trainer(model, train, ...)` for the topology `on` (see `topology`) and
    reads what came out.

    batch_size, seq_length: rows of a step, over all devices, and slots of a row. columns: of the
    batches, all Int32. accumulation_steps: micro-batches into which the loader cuts; 1 where the
    step does. Raises ConfigError for a topology that is none or whose compiler is not installed,
    and what Trainer raises for a config that cannot be.
    """
    there = topology(on)
    started = time.perf_counter()
    mesh = _mesh(train, there.name, there.devices)
    told = dataclasses.replace(
        train,
        steps=train.steps or MANY_STEPS,
        epochs=None,
        batch_size=None,
        callbacks=CallbacksConfig(),
    )
    trainer = Engine(model, told, Shapes(batch_size, accumulation_steps), mesh=mesh)
    check_row_length(seq_length, mesh)
    state = states.abstract_state(trainer.layout, trainer.optimizer)
    batch = _abstract_batch(mesh, columns, batch_size, seq_length, accumulation_steps)
    config, step = trainer.origin.config, trainer.train_step
    backend, refusal, program = None, "", None
    with states.on(mesh, trainer.rules):
        if config is not None:
            backend = choose(config.attention, config.head_width, jnp.dtype(config.dtype))
        lowered = step.lower(state, batch)  # pyright: ignore[reportFunctionMemberAccess]  (a jitted function)
        try:
            program = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            refusal = str(error)
            # a kernel's own memory may be short too
            if "RESOURCE_EXHAUSTED" not in refusal or "hbm" not in refusal.lower():
                raise
    kind = mesh.devices.flat[0].device_kind
    device = known_device(kind)
    memory = _memory(state, batch, program, refusal, device)
    found = read(program.as_text(), mesh.size) if program is not None else None
    collectives = tuple(found.collectives) if found else ()
    much_state = memory.parameters + memory.optimizer > 0.5 * (memory.available or 0)
    plan = StepPlan(
        topology=there.name,
        device=kind,
        mesh=dict(mesh.shape),
        batch_size=batch_size,
        seq_length=seq_length,
        accumulate_steps=train.accumulate_steps,
        attention=backend,
        parameters=sum(leaf.size for leaf in state.params.values()),
        memory=memory,
        collectives=collectives,
        unknown_loops=found.unknown_loops if found else 0,
        xla_flops=(program.cost_analysis() or {}).get("flops") if program is not None else None,
        roofline=None,
        compile_seconds=time.perf_counter() - started,
        advice=()
        if memory.fits is not False
        else advice(config, train, mesh, batch_size, attention=backend, much_state=much_state),
    )
    if config is None or device is None or found is None:
        return plan
    held, sent = memory.parameters + memory.optimizer, sum(one.sent for one in collectives)
    slots = batch_size, seq_length, train.accumulate_steps
    return dataclasses.replace(
        plan, roofline=roofline(config, device, dict(mesh.shape), slots, str(backend), held, sent)
    )


def unknowns(plan: StepPlan) -> tuple[str, ...]:
    """What the numbers of a plan do not say."""
    said = [
        "how near the kernels come to the device's peak rates, and how much of what is sent hides behind products: nothing ran",
        "how long documents are: rows count as full, of one document each; shorter ones cost less attention",
        "what reading data, saving and evaluating take; the evaluation step's memory",
    ]
    if plan.device.startswith("NVIDIA"):
        said.append(
            "what XLA chooses once it can time products on the GPU; jax takes 75 % of a GPU's memory unless told otherwise"
        )
        said.append("links between hosts: all are taken for NVLink")
    else:
        said.append(
            "links between slices; which neighbours on the torus exchange what: a device's links are taken together"
        )
    if plan.unknown_loops:
        said.append(f"how often {plan.unknown_loops} loops turn: what is in them is counted once")
    return tuple(said)


def _mesh(train: TrainingConfig, name: str, devices: Sequence[Any]) -> Mesh:
    try:
        return make_mesh(train.mesh, devices=devices, at="train.mesh")
    except NotImplementedError as error:  # jax lays each axis over whole dimensions of a torus
        problem = f"{train.mesh} cannot be laid over {name}: {str(error).splitlines()[0]}"
        raise ConfigError(
            at="train.mesh",
            problem=problem,
            fix="Let each axis be a product of dimensions of the topology.",
        ) from error


def _abstract_batch(
    mesh: Mesh, columns: Sequence[str], batch_size: int, seq_length: int, pieces: int
) -> dict[str, jax.ShapeDtypeStruct]:
    lead = (pieces, batch_size // pieces) if pieces > 1 else (batch_size,)
    where = NamedSharding(mesh, PartitionSpec(*(None,) * (len(lead) - 1), *TOKEN_AXES))
    return {
        name: jax.ShapeDtypeStruct((*lead, seq_length), jnp.int32, sharding=where)
        for name in columns
    }


def _memory(
    state: states.TrainState, batch: Any, program: Any, refusal: str, device: Device | None
) -> Memory:
    parts = {
        "parameters": state.params,
        "optimizer": state.optimizer,
        "other_state": (state.rest, state.step),
        "batch": batch,
    }
    sizes = {name: on_device(tree) for name, tree in parts.items()}
    held, code = sum(sizes.values()), 0
    if program is None:
        peak = _wanted(refusal, held)
    else:
        seen = program.memory_analysis()
        code = seen.generated_code_size_in_bytes
        beside = seen.argument_size_in_bytes + seen.output_size_in_bytes - seen.alias_size_in_bytes
        # Of a TPU's temporaries, XLA counts those in VMEM too; its peak is of HBM alone. For GPUs
        # it may give no peak.
        peak = (seen.peak_memory_in_bytes or beside + seen.temp_size_in_bytes) + code
    return Memory(
        **sizes,
        gradients=on_device(state.params, 4),
        temporaries=max(0, peak - code - held),
        program=code,
        peak=peak,
        available=None if device is None else int(device.memory),
        refused=program is None,
    )


def _wanted(refusal: str, held: int) -> int:
    """Bytes of HBM that XLA says a program wanted, in one of its two sentences; else those that are
    held, which it wanted at least.
    """
    for sentence, beside in (
        (r"Used ([\d.]+)([KMGT]) of", 0),
        (r"temporaries \(([\d.]+)([KMGT])\)", held),
    ):
        found = re.search(sentence, refusal)
        if found:
            return beside + int(float(found[1]) * 1024 ** ("KMGT".index(found[2]) + 1))
    return held
