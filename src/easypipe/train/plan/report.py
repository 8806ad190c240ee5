"""A StepPlan as text."""

from __future__ import annotations

from easypipe.train.plan.aot import StepPlan, unknowns

_SHOWN = 8  # collectives; the rest in one line


def text(plan: StepPlan) -> str:
    """The report that `easypipe plan --topology` prints."""
    return "\n\n".join(
        part
        for part in (_what(plan), _memory(plan), _collectives(plan), _speed(plan), _not_known(plan))
        if part
    )


def _what(plan: StepPlan) -> str:
    mesh = (
        ", ".join(f"{axis} {size}" for axis, size in plan.mesh.items() if size > 1) or "one device"
    )
    cut = f" in {plan.accumulate_steps} micro-batches" if plan.accumulate_steps > 1 else ""
    lines = [
        f"{plan.topology}: {_of(plan.devices, 'device')} ({plan.device}), mesh {mesh}",
        f"  step: {plan.batch_size:,} rows of {plan.seq_length:,} slots{cut} = {plan.batch_size * plan.seq_length:,} slots",
        f"  model: {plan.parameters:,} parameters"
        + (f", attention {plan.attention}" if plan.attention else ""),
        f"  compiled here in {plan.compile_seconds:.0f} s; nothing ran",
    ]
    return "\n".join(lines)


def _memory(plan: StepPlan) -> str:
    memory = plan.memory
    rows = [
        ("parameters", memory.parameters, ""),
        ("optimizer state", memory.optimizer, ""),
        ("other state", memory.other_state, ""),
        ("batch", memory.batch, ""),
        (
            "temporaries",
            memory.temporaries,
            f"  gradients ({_gib(memory.gradients)} in float32), activations, gathered parameters, buffers",
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
    if not plan.collectives:
        return "" if plan.memory.fits is False else "collectives: none"
    total = sum(one.sent for one in plan.collectives)
    lines = [
        f"collectives of a step: a device sends {_size(total)}",
        f"  {'kind':<20}{'times':>7}{'among':>7}{'each':>10}{'sent':>10}  of",
    ]
    lines += [
        f"  {one.kind:<20}{one.times:>7}{one.devices:>7}{_size(one.size):>10}{_size(one.sent):>10}  {one.shape}"
        for one in plan.collectives[:_SHOWN]
    ]
    rest = plan.collectives[_SHOWN:]
    if rest:
        sent = _size(sum(one.sent for one in rest))
        lines.append(f"  {'others':<20}{sum(one.times for one in rest):>7}{'':>17}{sent:>10}")
    return "\n".join(lines)


def _speed(plan: StepPlan) -> str:
    line = plan.roofline
    if line is None:
        return ""
    lines = [
        f"FLOPs of a step: {line.flops:.4g} (6·N a token, and causal attention within rows of one document)",
        f"  {line.palm_flops:.4g} by the PaLM convention; {line.executed_flops:.4g} with what is computed again",
    ]
    if plan.xla_flops:
        lines.append(
            f"  XLA counts {plan.xla_flops:.4g} on each device, a loop's body once, and in kernels what they declare"
        )
    lines += [
        "roofline, at the data sheet's rates",
        f"  products {_seconds(line.compute_s)}, memory {_seconds(line.memory_s)}, links {_seconds(line.link_s)}",
        f"  a step takes {_seconds(line.best_s)} at best (all at once), {_seconds(line.worst_s)} one after the other",
        f"  at best {line.slots_per_s_at_best:,.0f} slots/s; MFU {line.mfu_at_worst:.1%} to {line.mfu_at_best:.1%},"
        f" by the PaLM convention up to {line.palm_mfu_at_best:.1%}",
    ]
    return "\n".join(lines)


def _not_known(plan: StepPlan) -> str:
    return "\n".join(["not known:", *(f"  - {one}" for one in unknowns(plan))])


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f}"


def _size(size: float) -> str:
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _of(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"
