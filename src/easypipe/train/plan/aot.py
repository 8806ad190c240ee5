"""Compiles a training step for absent devices; reports memory, messages, bounds of its time.

It is the Trainer's own step, lowered for abstract arrays with the shardings of the run's arrays.
The best speed follows from its computation, memory traffic and messages, by the rates of the
device's data sheet (Williams, Waterman & Patterson, Roofline, 2009).
"""

from __future__ import annotations

import dataclasses
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Compiled, Lowered

from easypipe.core.aligned import DESIRABLE
from easypipe.core.errors import ConfigError, require
from easypipe.core.schema import INPUT_IDS, LABELS, POSITION_IDS, SEGMENT_IDS
from easypipe.core.values import JsonObject
from easypipe.core.visible import bytes_text
from easypipe.train import state as states
from easypipe.train.callbacks.config import CallbacksConfig
from easypipe.train.checks import MANY_STEPS, Shapes
from easypipe.train.config import UNPAIRED, TrainingConfig
from easypipe.train.engine import Engine
from easypipe.train.metrics.devices import Device, advice, known_device, on_device
from easypipe.train.model.attention import choose
from easypipe.train.model.config import ModelConfig
from easypipe.train.model.flops import flops_per_step, matmul_params, palm_flops_per_step
from easypipe.train.model.noise import abstract_columns
from easypipe.train.model.pretrained.origin import Model
from easypipe.train.parallel.mesh import TOKEN_AXES, check_row_length, make_mesh
from easypipe.train.plan.hlo import Collective, Read, read
from easypipe.train.plan.topology import Topology, topology


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """Bounds of the time of a step, in seconds on every device, and its FLOPs over all devices.

    Attributes:
        flops: The exact FLOPs for rows full of one document each; see flops_per_step.
        palm_flops: See palm_flops_per_step.
        executed_flops: The FLOPs including recomputation (remat), and what attention computes and
            then masks.
        compute_s: The time of executed_flops at the devices' peak.
        memory_s: The time of the least traffic with HBM.
        link_s: The time of the messages, over all links of a device together.
        best_s: The time if all three overlap.
        worst_s: The time if they run in turn.
        mfu_at_best: flops / (best_s x peak).
        mfu_at_worst: flops / (worst_s x peak).
        palm_mfu_at_best: The same with palm_flops; above 1 if attention skips what this convention
            counts.
        slots_per_s_at_best: Slots per second at best_s.
    """

    flops: int
    palm_flops: int
    executed_flops: float
    compute_s: float
    memory_s: float
    link_s: float
    best_s: float
    worst_s: float
    mfu_at_best: float
    mfu_at_worst: float
    palm_mfu_at_best: float
    slots_per_s_at_best: float


def roofline(
    config: ModelConfig,
    device: Device,
    mesh: Mapping[str, int],
    shape: tuple[int, int, int],
    attention: str,
    held: int,
    sent: float,
) -> Roofline:
    """Returns the bounds of a step.

    Args:
        config: The options of the model.
        device: The row of the device table.
        mesh: The sizes of the mesh axes.
        shape: Rows of a step over all devices, slots of a row, micro-batches.
        attention: The attention backend.
        held: Bytes of parameters and moments on a device.
        sent: Bytes that a device sends in a step.
    """
    batch_size, seq_length, accumulate_steps = shape
    devices, slots = math.prod(mesh.values()), batch_size * seq_length
    flops = flops_per_step(config, [seq_length] * batch_size)
    products = 6 * matmul_params(config) * slots
    scores = flops - products
    # "xla" computes the products of all pairs, and a causal mask hides half of them.
    hidden = scores if attention == "xla" else 0
    # The FLOPs of the layers' products in a forward pass.
    forward = 2 * (matmul_params(config) - config.hidden_size * config.vocabulary) * slots
    mixing = (scores + hidden) / 3
    again = {"none": 0.0, "dots": mixing if attention == "xla" else 0.0, "full": forward + mixing}[
        config.remat
    ]
    executed = flops + hidden + again
    compute_s = executed / (devices * device.flops)
    memory_s = _least_traffic(config, mesh, slots, accumulate_steps, held) / device.memory_rate
    link_s = sent / device.link_rate
    best, worst, peak = (
        max(compute_s, memory_s, link_s),
        compute_s + memory_s + link_s,
        devices * device.flops,
    )
    palm = palm_flops_per_step(config, slots, seq_length)
    return Roofline(
        flops=flops,
        palm_flops=palm,
        executed_flops=executed,
        compute_s=compute_s,
        memory_s=memory_s,
        link_s=link_s,
        best_s=best,
        worst_s=worst,
        mfu_at_best=flops / (best * peak),
        mfu_at_worst=flops / (worst * peak),
        palm_mfu_at_best=palm / (best * peak),
        slots_per_s_at_best=slots / best,
    )


def _least_traffic(
    config: ModelConfig, mesh: Mapping[str, int], slots: int, accumulate_steps: int, held: int
) -> float:
    """Returns the least traffic of a device with HBM, in bytes.

    The state and float32 gradients are written and read once; in every pass, the weights are read,
    and each layer's input is written once and read once.
    """
    itemsize = 2 if config.dtype == "bfloat16" else 4
    passes = 3 if config.remat == "full" else 2
    weights = passes * accumulate_steps * matmul_params(config) / mesh["tensor"] * itemsize
    streams = (
        2
        * passes
        * config.num_layers
        * slots
        / (math.prod(mesh.values()) / mesh["tensor"])
        * config.hidden_size
        * itemsize
    )
    gradients = 2 * 4 * matmul_params(config) / (mesh["fsdp"] * mesh["tensor"])
    return 2 * held + gradients + weights + streams


PACKED = (INPUT_IDS, LABELS, SEGMENT_IDS, POSITION_IDS)


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The memory of a step, in bytes on each device.

    If XLA refused the program, `temporaries` and `peak` are the sizes in its message, if it has
    any.

    Attributes:
        parameters: The parameters.
        optimizer: The state of the optimizer.
        other_state: Dropout keys and the like; a reference model's copy of the parameters.
        batch: The batch.
        gradients: Float32 gradients, if all were held at once; a part of `temporaries`.
        temporaries: Gradients, activations, gathered parameters, buffers, and padding of the
            others.
        program: The code.
        peak: All of it, at the worst moment.
        available: The memory of a device; None if the table of devices does not have it.
        refused: Whether XLA would not compile it, because it does not fit.
    """

    parameters: int
    optimizer: int
    other_state: int
    batch: int
    gradients: int
    temporaries: int
    program: int
    peak: int
    available: int | None
    refused: bool

    @property
    def fits(self) -> bool | None:
        if self.refused:
            return False
        return None if self.available is None else self.peak <= self.available


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """The result of `plan_step`.

    `str()` is a report, `to_json()` the same as plain data. The documents of the data are not known
    to it.

    Attributes:
        topology: The name of the topology.
        device: jax's device_kind.
        mesh: The sizes of the mesh axes.
        batch_size: Rows of a step.
        seq_length: Slots of a row.
        accumulate_steps: The number of micro-batches.
        attention: The attention backend; None for a module that is not a Decoder.
        parameters: The number of parameters.
        memory: The memory of a device.
        collectives: The messages of a step, those with most bytes first.
        unknown_loops: The number of loops whose trip count is not known.
        xla_flops: The FLOPs of one device, as XLA counts them.
        roofline: Bounds of the time; None if the model's FLOPs or the device's rates are not known,
            or it was not compiled.
        compile_seconds: The time of the compilation.
        advice: What to change if it does not fit.
    """

    topology: str
    device: str
    mesh: dict[str, int]
    batch_size: int
    seq_length: int
    accumulate_steps: int
    attention: str | None
    parameters: int
    memory: Memory
    collectives: tuple[Collective, ...]
    unknown_loops: int
    xla_flops: float | None
    roofline: Roofline | None
    compile_seconds: float
    advice: tuple[str, ...]

    @property
    def devices(self) -> int:
        return math.prod(self.mesh.values())

    def to_json(self) -> JsonObject:
        """Returns plain data: sizes in bytes on each device, times in seconds."""
        found = dataclasses.asdict(self)
        found["collectives"] = [one._asdict() | {"sent": one.sent} for one in self.collectives]
        found["memory"]["fits"] = self.memory.fits
        return found | {"devices": self.devices, "not_known": list(unknowns(self))}

    def __str__(self) -> str:
        return _report(self)


def plan_step(
    model: Model,
    train: TrainingConfig,
    on: str | Topology,
    *,
    batch_size: int,
    seq_length: int,
    columns: Sequence[str] = PACKED,
    accumulation_steps: int = 1,
) -> StepPlan:
    """Compiles the step of `Trainer(model, train, ...)` for a topology, and reads the result.

    Raises ConfigError for a topology that does not exist or whose compiler is not installed, and
    the errors of Trainer.

    Args:
        on: The name of a topology, see `topology`; or a Topology of present devices.
        batch_size: Rows of a step, over all devices.
        seq_length: Slots of a row.
        columns: The columns of the batches, all Int32.
        accumulation_steps: Micro-batches into which the loader cuts a batch; 1 if the step cuts it.
    """
    require(
        train.distill is None,
        "train.distill",
        "the step is compiled without data, so the columns of the teacher are not known",
        "Leave it out: --set train.distill=null.",
    )
    for name, value in (("batch_size", batch_size), ("seq_length", seq_length)):
        require(value >= 1, name, f"{value} is too small", "Give at least 1.")
    there, started = topology(on) if isinstance(on, str) else on, time.perf_counter()
    mesh = _mesh(train, there.name, there.devices)
    of_data = {"epochs": None, "batch_size": None, "callbacks": CallbacksConfig(), "measure": ()}
    of_data |= {"eval_every": None, "eval_batches": None}
    alone = dataclasses.replace(train, steps=train.steps or MANY_STEPS, **of_data)
    trainer = Engine(model, alone, Shapes(batch_size, accumulation_steps), mesh=mesh)
    require(
        trainer.origin.classifier is None,
        "model",
        "is a classifier, and only steps on tokens can be planned",
        "Train it for a few steps: the records tell memory and speed.",
    )
    check_row_length(seq_length, mesh)
    state = states.abstract_state(trainer.layout, trainer.optimizer)
    columns = _columns(train, columns)
    batch = _abstract_batch(mesh, columns, batch_size, seq_length, accumulation_steps)
    if trainer.noise is not None:
        batch |= abstract_columns(batch["input_ids"])
    copy = {} if trainer.reference is None else state.params
    config, backend = trainer.origin.config, None
    with states.on(mesh, trainer.rules):
        if config is not None:
            backend = choose(config.attention, config.head_width, jnp.dtype(config.dtype))
        program = _compiled(trainer.train_step.lower(state, batch))  # pyright: ignore[reportFunctionMemberAccess]  (a jitted function)
    kind = mesh.devices.flat[0].device_kind
    memory = _memory(state, batch, copy, program, device := known_device(kind))
    compiled = None if isinstance(program, str) else program
    found = Read([], 0) if compiled is None else read(compiled.as_text() or "", mesh.size)
    held, line = memory.parameters + memory.optimizer, None
    if compiled is not None and config is not None and device is not None:
        sent = sum(one.sent for one in found.collectives)
        slots = batch_size, seq_length, train.accumulate_steps
        line = roofline(config, device, mesh.shape, slots, str(backend), held, sent)
    much_state = held > 0.5 * (memory.available or 0)
    changes = advice(config, train, mesh, batch_size, attention=backend, much_state=much_state)
    return StepPlan(
        topology=there.name,
        device=kind,
        mesh=dict(mesh.shape),
        batch_size=batch_size,
        seq_length=seq_length,
        accumulate_steps=train.accumulate_steps,
        attention=backend,
        parameters=sum(leaf.size for leaf in state.params.values()),
        memory=memory,
        collectives=tuple(found.collectives),
        unknown_loops=found.unknown_loops,
        xla_flops=None if compiled is None else (compiled.cost_analysis() or {}).get("flops"),
        roofline=line,
        compile_seconds=time.perf_counter() - started,
        advice=changes if memory.fits is False else (),
    )


def _compiled(lowered: Lowered) -> Compiled | str:
    """Compiles a program; returns XLA's message if it does not fit the device's memory."""
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        refusal = str(error)
        # A kernel's own memory may be too small as well.
        if "RESOURCE_EXHAUSTED" not in refusal or "hbm" not in refusal.lower():
            raise
        return refusal


def unknowns(plan: StepPlan) -> tuple[str, ...]:
    """Returns what the numbers of a plan do not include."""
    said = [
        "how near the kernels come to the device's peak rates, and how much of what is sent hides "
        "behind products: nothing ran",
        "how long documents are: rows count as full, of one document each; shorter ones cost less "
        "attention",
        "what reading data, saving, evaluating and asking a reference model take; the evaluation "
        "step's memory",
    ]
    if plan.device.startswith("NVIDIA"):
        said.append(
            "what XLA chooses once it can time products on the GPU; jax takes 75 % of a GPU's "
            "memory unless told otherwise"
        )
        said.append("links between hosts: all are taken for NVLink")
    else:
        said.append(
            "links between slices; which neighbours on the torus exchange what: a device's links "
            "are taken together"
        )
    if plan.unknown_loops:
        said.append(f"how often {plan.unknown_loops} loops turn: what is in them is counted once")
    return tuple(said)


def _mesh(train: TrainingConfig, name: str, devices: Sequence[object]) -> Mesh:
    """Returns the mesh of the run on these devices.

    Raises:
        ConfigError: The axes do not fit the topology.
    """
    try:
        return make_mesh(train.mesh, devices=devices, at="train.mesh")
    except NotImplementedError as error:  # jax needs whole torus dimensions
        problem = f"{train.mesh} cannot be laid over {name}: {str(error).splitlines()[0]}"
        raise ConfigError(
            at="train.mesh",
            problem=problem,
            fix="Let each axis be a product of dimensions of the topology.",
        ) from error


def _columns(train: TrainingConfig, columns: Sequence[str]) -> Sequence[str]:
    """Returns the columns, with those that the loss also needs."""
    unpaired = train.preference is not None and train.preference.loss in UNPAIRED
    return (*columns, DESIRABLE.name) if unpaired else columns


def _abstract_batch(
    mesh: Mesh, columns: Sequence[str], batch_size: int, seq_length: int, pieces: int
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the abstract columns of a batch."""
    lead = (pieces, batch_size // pieces) if pieces > 1 else (batch_size,)
    where = NamedSharding(mesh, PartitionSpec(*(None,) * (len(lead) - 1), *TOKEN_AXES))
    return {
        name: jax.ShapeDtypeStruct((*lead, seq_length), jnp.int32, sharding=where)
        for name in columns
    }


def _memory(
    state: states.TrainState,
    batch: Mapping[str, jax.ShapeDtypeStruct],
    copy: states.Arrays,
    program: Compiled | str,
    device: Device | None,
) -> Memory:
    """Returns the memory of a step, from its arrays and the compiled program or XLA's refusal.

    `copy` are arrays of a reference model, which lie beside those of the program.
    """
    parts = {
        "parameters": state.params,
        "optimizer": state.optimizer,
        "other_state": (state.rest, state.step, copy),
        "batch": batch,
    }
    sizes = {name: on_device(tree) for name, tree in parts.items()}
    held, code, aside = sum(sizes.values()), 0, on_device(copy)
    if isinstance(program, str):
        peak = _wanted(program, held - aside) + aside
    else:
        seen = program.memory_analysis()
        assert seen is not None
        code = seen.generated_code_size_in_bytes
        beside = seen.argument_size_in_bytes + seen.output_size_in_bytes - seen.alias_size_in_bytes
        # XLA counts a TPU's temporaries in VMEM too; its peak is of HBM alone. For GPUs it may
        # report no peak.
        peak = (seen.peak_memory_in_bytes or beside + seen.temp_size_in_bytes) + code + aside
    return Memory(
        **sizes,
        gradients=on_device(state.params, 4),
        temporaries=max(0, peak - code - held),
        program=code,
        peak=peak,
        available=None if device is None else int(device.memory),
        refused=isinstance(program, str),
    )


def _wanted(refusal: str, held: int) -> int:
    """Returns the bytes of HBM that a program wanted, by XLA's refusal.

    The refusal has one of two sentences.

    Without such a sentence it returns `held`, the least that the program can have wanted.
    """
    for sentence, beside in (
        (r"Used ([\d.]+)([KMGT]) of", 0),
        (r"temporaries \(([\d.]+)([KMGT])\)", held),
    ):
        found = re.search(sentence, refusal)
        if found:
            return beside + int(float(found[1]) * 1024 ** ("KMGT".index(found[2]) + 1))
    return held


_SHOWN = 8  # collectives in a report; the rest are one line


def _report(plan: StepPlan) -> str:
    not_known = "\n".join(["not known:", *(f"  - {one}" for one in unknowns(plan))])
    parts = _what(plan), _memory_lines(plan), _collectives(plan), _speed(plan), not_known
    return "\n\n".join(part for part in parts if part)


def _what(plan: StepPlan) -> str:
    """Describes the devices, the step and the model, for the report."""
    mesh = (
        ", ".join(f"{axis} {size}" for axis, size in plan.mesh.items() if size > 1) or "one device"
    )
    cut = f" in {plan.accumulate_steps} micro-batches" if plan.accumulate_steps > 1 else ""
    lines = [
        f"{plan.topology}: {plan.devices:,} device{'s' * (plan.devices != 1)} ({plan.device}), "
        f"mesh {mesh}",
        f"  step: {plan.batch_size:,} rows of {plan.seq_length:,} slots{cut} = "
        f"{plan.batch_size * plan.seq_length:,} slots",
        f"  model: {plan.parameters:,} parameters"
        + (f", attention {plan.attention}" if plan.attention else ""),
        f"  compiled here in {plan.compile_seconds:.0f} s; nothing ran",
    ]
    return "\n".join(lines)


def _memory_lines(plan: StepPlan) -> str:
    """Describes the memory of a device, and advice if it is short, for the report."""
    memory = plan.memory
    rows = [
        ("parameters", memory.parameters, ""),
        ("optimizer state", memory.optimizer, ""),
        ("other state", memory.other_state, ""),
        ("batch", memory.batch, ""),
        (
            "temporaries",
            memory.temporaries,
            f"  gradients ({_gib(memory.gradients)} in float32), activations, gathered parameters, "
            "buffers",
        ),
        ("program", memory.program, ""),
    ]
    lines = ["memory of a device, GiB"]
    lines += [f"  {name:<18}{_gib(size):>8}{note}" for name, size, note in rows if size >= 1 << 20]
    verdict = {
        True: "it fits",
        False: "IT DOES NOT FIT",
        None: "what this device has is not known",
    }[memory.fits]
    of = "" if memory.available is None else f" of {_gib(memory.available)}"
    least = "at least" if memory.refused else "at the peak"
    lines.append(f"  {least:<18}{_gib(memory.peak):>8}{of}: {verdict}")
    if plan.advice:
        lines += ["what to change:", *(f"  - {one}" for one in plan.advice)]
    return "\n".join(lines)


def _collectives(plan: StepPlan) -> str:
    """Describes the messages of a step, for the report."""
    if not plan.collectives:
        return "" if plan.memory.fits is False else "collectives: none"
    total = sum(one.sent for one in plan.collectives)
    lines = [
        f"collectives of a step: a device sends {bytes_text(total)}",
        f"  {'kind':<20}{'times':>7}{'among':>7}{'each':>10}{'sent':>10}  of",
    ]
    lines += [
        f"  {one.kind:<20}{one.times:>7}{one.devices:>7}{bytes_text(one.size):>10}"
        f"{bytes_text(one.sent):>10}  {one.shape}"
        for one in plan.collectives[:_SHOWN]
    ]
    rest = plan.collectives[_SHOWN:]
    if rest:
        sent = bytes_text(sum(one.sent for one in rest))
        lines.append(f"  {'others':<20}{sum(one.times for one in rest):>7}{'':>17}{sent:>10}")
    return "\n".join(lines)


def _speed(plan: StepPlan) -> str:
    """Describes the FLOPs and the bounds of the time, for the report."""
    line = plan.roofline
    if line is None:
        return ""
    lines = [
        f"FLOPs of a step: {line.flops:.4g} (6·N a token, and causal attention within rows of one "
        "document)",
        f"  {line.palm_flops:.4g} by the PaLM convention; {line.executed_flops:.4g} with what is "
        "computed again",
    ]
    if plan.xla_flops:
        lines.append(
            f"  XLA counts {plan.xla_flops:.4g} on each device, a loop's body once, and in kernels "
            "what they declare"
        )
    lines += [
        "roofline, at the data sheet's rates",
        f"  products {_seconds(line.compute_s)}, memory {_seconds(line.memory_s)}, links "
        f"{_seconds(line.link_s)}",
        f"  a step takes {_seconds(line.best_s)} at best (all at once), {_seconds(line.worst_s)} "
        "one after the other",
        f"  at best {line.slots_per_s_at_best:,.0f} slots/s; MFU {line.mfu_at_worst:.1%} to "
        f"{line.mfu_at_best:.1%},"
        f" by the PaLM convention up to {line.palm_mfu_at_best:.1%}",
    ]
    return "\n".join(lines)


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f}"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
