"""Reads a compiled program's text (XLA's HLO): messages between devices, their bytes, loops."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

BYTES = {
    "pred": 1,
    "s8": 1,
    "u8": 1,
    "s16": 2,
    "u16": 2,
    "bf16": 2,
    "f16": 2,
    "s32": 4,
    "u32": 4,
    "f32": 4,
    "s64": 8,
    "u64": 8,
    "f64": 8,
}
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
FUSED_SCATTER = "all-reduce-scatter"
"""XLA's name of a fusion for TPUs with an all-reduce of which only a slice is kept: it sends what a
reduce-scatter sends. Programs for GPUs have a reduce-scatter instead. An all-reduce that a later
fusion slices is sent whole: XLA records the algorithm of an all-reduce next to it."""

_ARRAY = re.compile(rf"\b({'|'.join(BYTES)})\[([\d,]*)\]")
_COLLECTIVE = re.compile(rf" = (.*?) ({'|'.join(COLLECTIVES)})(-start)?\(")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")  # the head of a computation
_ROOT = re.compile(r"^\s*ROOT %?[\w.\-]+ = (.*?) [a-z][\w\-]*\(")
_CALLS = re.compile(r"(?:body|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"(?:branch_computations|called_computations)=\{([^}]*)\}")
_WHILE = re.compile(r" while\(.*condition=%?([\w.\-]+), body=%?([\w.\-]+)")
_TRIPS = re.compile(r'known_trip_count\\?":\{\\?"n\\?":\\?"(\d+)')
_BOUND = re.compile(r"%?([\w.\-]+) = s32\[\]\S* constant\((\d+)\)")


class Collective(NamedTuple):
    """One kind of message of a step, on each device.

    Attributes:
        kind: XLA's name of the operation.
        shape: The type of the largest array of its result, as XLA writes it.
        size: Bytes of the result.
        devices: The number of devices that exchange with each other.
        times: How often a step does it.
    """

    kind: str
    shape: str
    size: int
    devices: int
    times: int

    @property
    def sent(self) -> float:
        """Bytes that a device sends in a step, by ring algorithms (Patarasuk & Yuan, 2009)."""
        others = self.devices - 1
        share = {
            "all-reduce": 2 * others / self.devices,
            "reduce-scatter": others,
            "collective-permute": 1.0,
        }
        return self.times * self.size * share.get(self.kind, others / self.devices)


class Read(NamedTuple):
    """What `read` found in a program.

    Attributes:
        collectives: The messages.
        unknown_loops: The number of loops whose trip count is not in the text; their messages are
            counted once.
    """

    collectives: list[Collective]
    unknown_loops: int


def arrays(text: str) -> list[tuple[str, tuple[int, ...]]]:
    """Returns (dtype, shape) of every array named in `text`."""
    return [
        (dtype, tuple(int(size) for size in sizes.split(",") if size))
        for dtype, sizes in _ARRAY.findall(text)
    ]


def result(line: str) -> tuple[str, int, str] | None:
    """Returns (kind, bytes of the result, its type) of a collective in a line of HLO, or None."""
    match = _COLLECTIVE.search(line)
    if not match:
        return None
    of = match[1]
    # The start of a message has a tuple of input, output and more; that of a sum on TPUs has only
    # the output.
    if match[3]:
        parts = _elements(of)
        of = (
            parts[1]
            if len(parts) > 1 and (match[2] != "all-reduce" or parts[0].startswith("("))
            else of
        )
    return match[2], sum(BYTES[dtype] * math.prod(shape) for dtype, shape in arrays(of)), of


def _kept(kind: str, size: int, of: str, lines: list[str]) -> tuple[str, int, str]:
    """Returns `result` for an all-reduce in a fused reduce-scatter.

    Its `lines` end in the slice that is kept.
    """
    root = next((match[1] for line in lines if (match := _ROOT.match(line))), None)
    if kind != "all-reduce" or root is None:
        return kind, size, of
    return (
        "reduce-scatter",
        sum(BYTES[dtype] * math.prod(shape) for dtype, shape in arrays(root)),
        root,
    )


def _elements(of: str) -> list[str]:
    """Returns the elements of a tuple's type."""
    depth, found = 0, [""]
    for letter in of[1:-1]:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            found.append("")
        else:
            found[-1] += letter
    return found


def read(text: str, devices: int) -> Read:
    """Returns the collectives of a program for `devices` devices, those with most bytes first.

    Each counts as often as its loops run.
    """
    computations, entry = _computations(text)
    times, unknown = _times(computations, entry)
    found: dict[tuple[str, str, int, int], int] = {}
    for name, lines in computations.items():
        for line in lines:
            one = result(line)
            if one is not None and times.get(name):
                kind, size, of = _kept(*one, lines) if name.startswith(FUSED_SCATTER) else one
                group = _group(line, devices)
                key = kind, _largest(of), size, group
                found[key] = found.get(key, 0) + times[name]
    listed = [Collective(*key, turns) for key, turns in found.items() if key[3] > 1]
    return Read(sorted(listed, key=lambda one: -one.sent), unknown)


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """Returns the lines of every computation, by name, and the name of the entry computation."""
    named: dict[str, list[str]] = {}
    entry, current = "", None
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header:
            current = named.setdefault(header[2], [])
            entry = header[2] if header[1] else entry
        elif line.rstrip() == "}":  # lines of kernels may begin with one
            current = None
        elif current is not None:
            current.append(line)
    return named, entry


def _times(computations: dict[str, list[str]], entry: str) -> tuple[dict[str, int], int]:
    """Returns how often a step runs each computation, and the number of unknown loops.

    Only one of several branches runs, but each is counted as if it did.
    """
    times: dict[str, int] = {}
    unknown = 0

    def visit(name: str, turns: int) -> None:
        nonlocal unknown
        if name not in computations:
            return
        times[name] = times.get(name, 0) + turns
        for line in computations[name]:
            loop = _WHILE.search(line)
            if loop:
                inside = _turns(line, computations.get(loop[1], []))
                unknown += inside is None
                visit(loop[2], turns * (1 if inside is None else inside))
                continue
            called = _CALLS.findall(line)
            for branches in _BRANCHES.findall(line):
                called += [branch.strip().lstrip("%") for branch in branches.split(",")]
            for one in called:
                visit(one, turns)

    visit(entry, 1)
    return times, unknown


def _turns(line: str, condition: list[str]) -> int | None:
    """Returns the trip count of a loop; None if it is not known.

    XLA records it, or the loop's condition compares a counter from 0 with it, as in jax's scans and
    fori_loops.
    """
    noted = _TRIPS.search(line)
    if noted:
        return int(noted[1])
    text = "\n".join(condition)
    bounds = _BOUND.findall(text)
    return int(bounds[0][1]) if len(bounds) == 1 and "direction=LT" in text else None


def _group(line: str, devices: int) -> int:
    """Returns how many devices exchange with each other, by any of XLA's three notations."""
    # mesh['a'=4,'b'=2] {'a'}
    named = re.search(r"replica_groups=\w+\[([^\]]*)\][^{]*\{([^}]*)\}", line)
    if named and "=" in named[1]:
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
        return math.prod(int(sizes.get(axis, 1)) for axis in re.findall(r"'(\w+)'", named[2]))
    counted = re.search(r"replica_groups=\[(\d+),(\d+)\]", line)
    if counted:
        return int(counted[2])
    written = re.search(r"replica_groups=\{\{([\d,]*)\}", line)
    if written:
        return len(written[1].split(","))
    pairs = re.search(r"source_target_pairs=\{\{", line)
    return 2 if pairs else devices


def _largest(of: str) -> str:
    """Returns the type of the largest array in the type of a result."""
    found = arrays(of)
    if not found:
        return of
    dtype, shape = max(found, key=lambda one: BYTES[one[0]] * math.prod(one[1]))
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return f"{dtype}[{','.join(map(str, shape))}]{more}"
