"""Checks of the loss's arguments, and of a requested implementation, in one error.

A request that passes becomes the arrays that the kernels take, and the plan.
"""

from __future__ import annotations

import functools
import logging
import math
import operator
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from easypipe.core.errors import did_you_mean, require
from easypipe.kernels.loss import choice
from easypipe.kernels.loss.choice import (
    FAVOURITES,
    MODULES,
    Implementation,
    LossSharding,
    Plan,
    Rule,
)
from easypipe.kernels.loss.stats import (
    Inputs,
    Layout,
    Objective,
    accumulator_dtype,
    varying_axes,
    varying_like,
)

logger = logging.getLogger("easypipe")
DTYPES = ("bfloat16", "float32", "float64")
REDUCTIONS = ("mean", "sum", "none")


@dataclass(frozen=True)
class Request:
    """The arguments of a call of the api; `lm_head` is None if `hidden` are the logits."""

    at: str
    hidden: Array
    lm_head: Array | None
    labels: Array
    bias: Array | None = None
    weights: Array | None = None
    ignore_index: int = -100
    z_loss: float = 0.0
    label_smoothing: float = 0.0
    soft_cap: float | None = None
    reduction: str = "none"
    layout: Layout | None = None
    sharding: LossSharding | None = None
    implementation: Implementation | None = None
    rule: Rule | None = None
    chunk_size: int | None = None
    float32_logits: bool = False
    temperature: float = 1.0
    entropy: bool = False  # whether the entropy is asked for, which only XLA computes

    @functools.cached_property
    def arrays(self) -> dict[str, Array]:
        """The arrays that are given, by name."""
        found = {
            "hidden": self.hidden,
            "lm_head": self.lm_head,
            "labels": self.labels,
            "bias": self.bias,
            "weights": self.weights,
        }
        return {name: array for name, array in found.items() if array is not None}

    def with_layout(self) -> Request:
        """Returns the same request, of arrays, with the layout that the head's shape shows.

        The layout is None if the shape does not show it, or if there is no head.
        """
        arrays = {name: jnp.asarray(array) for name, array in self.arrays.items()}
        hidden, lm_head, layout = arrays["hidden"], arrays.get("lm_head"), self.layout
        if layout is None and lm_head is not None and lm_head.ndim == 2 and hidden.ndim:
            (rows, columns), width = lm_head.shape, hidden.shape[-1]
            if rows != columns:
                layout = "dv" if rows == width else "vd" if columns == width else None
        return replace(self, **arrays, layout=layout)

    @property
    def vocab(self) -> int:
        """The columns of the vocabulary over all devices."""
        if self.lm_head is None:
            return self.hidden.shape[-1]
        return self.lm_head.shape[(self.layout or "dv").index("v")]

    @property
    def vocab_shards(self) -> int:
        mesh = jax.sharding.get_abstract_mesh()
        return math.prod(mesh.shape[axis] for axis in self.sharding.vocab) if self.sharding else 1

    @property
    def chosen_rule(self) -> Rule:
        if self.lm_head is None or self.reduction == "none" or self.implementation == "reference":
            return "strict"
        if self.rule is not None:
            return self.rule
        columns, itemsize = self.vocab // self.vocab_shards, self.lm_head.dtype.itemsize
        fits = choice.fast_fits(columns, itemsize) and not self.float32_logits
        return "fast" if fits else "strict"


@dataclass(frozen=True)
class Call:
    """A request that passed the checks, in the form for the kernels."""

    inputs: Inputs  # lm_head is None if hidden are the logits
    weights: Array  # accumulator dtype, 0 if a token does not count
    counted: Array
    plan: Plan
    rule: Rule
    objective: Objective
    reduction: str


def checked(request: Request) -> Call:
    """Checks a request and returns the call.

    Raises:
        ConfigError: The request cannot run; the message gives every reason.
    """
    request = request.with_layout()
    problems = [*_shapes(request), *_numbers(request), *_names(request), *_mesh(request)]
    if not problems:  # the next checks need valid shapes and names
        problems = [*_labels(request), *_runs(request)]
    require(not problems, request.at, "; ".join(problems))
    return _call(request)


def _call(request: Request) -> Call:
    """Returns the call of a request that passed the checks."""
    given, vocab = request.arrays, request.vocab
    hidden, lm_head, labels = request.hidden, request.lm_head, _as_int32(request.labels)
    if lm_head is not None:
        wider = jnp.result_type(hidden, lm_head)
        hidden, lm_head = hidden.astype(wider), lm_head.astype(wider)
    bias, soft_cap = request.bias, None if request.soft_cap is None else float(request.soft_cap)
    # Python's float: a NumPy scalar would make bfloat16 arrays float32
    if (warmth := float(request.temperature)) != 1:
        # cap(x) / t is the cap soft_cap / t of x / t: so the logits stay untouched
        hidden, bias = hidden / warmth, None if bias is None else bias / warmth
        soft_cap = None if soft_cap is None else soft_cap / warmth
    dtype = accumulator_dtype(hidden)
    counted = (labels != request.ignore_index) & (labels >= 0) & (labels < vocab)
    weights = given["weights"].astype(dtype) if "weights" in given else jnp.ones((), dtype)
    weights = jnp.where(counted, weights, 0)
    # Inside the user's shard_map, jax sums the cotangents of arrays that all devices share, so the
    # arrays have to be marked as varying before our rules begin.
    inputs = Inputs(hidden, lm_head, bias, jnp.where(counted, labels, -1))  # pyright: ignore[reportArgumentType]  (see Call)
    shared = jax.tree.leaves((inputs, weights, counted))
    inputs, weights, counted = jax.tree.map(
        lambda array: varying_like(array, *shared), (inputs, weights, counted)
    )
    implementation, refusals = request.implementation, {}
    if implementation is None and request.entropy:
        implementation = "chunked"
    if implementation is None:
        refusals = {name: list(_refusals(request, name)) for name in FAVOURITES.values()}
        unused = FAVOURITES.get(choice.platform_at_hand())
        if unused and refusals[unused]:
            why = "; ".join(refusals[unused])
            message = "%s: %s cannot run, so XLA's own operations do: %s"
            logger.warning(message, request.at, unused, why)
    if labels.size == 0 and implementation != "reference":
        implementation = "chunked"
    plan = Plan(
        choice.candidates(refusals, implementation),
        request.layout or "dv",
        soft_cap,
        request.sharding,
        request.chunk_size,
        request.float32_logits,
    )
    objective = Objective(float(request.z_loss), float(request.label_smoothing), vocab)
    return Call(inputs, weights, counted, plan, request.chosen_rule, objective, request.reduction)


def _as_int32(labels: Array) -> Array:
    """Returns labels as int32; a label that does not fit int32 stays outside the vocabulary.

    Otherwise it would wrap around into the vocabulary.
    """
    ours, theirs = jnp.iinfo(jnp.int32), jnp.iinfo(labels.dtype)
    if theirs.max > ours.max:
        labels = jnp.clip(labels, max(ours.min, theirs.min), ours.max)
    return labels.astype(jnp.int32)


def _shapes(request: Request) -> Iterator[str]:
    """Yields what is wrong with shapes and dtypes."""
    hidden, lm_head = request.hidden, request.lm_head
    labels, layout = request.labels, request.layout
    what = "hidden" if lm_head is not None else "logits"
    if hidden.ndim < 2 or hidden.shape[:-1] != labels.shape or 0 in hidden.shape[-1:]:
        yield (
            f"labels {labels.shape} do not fit {what} {hidden.shape}: give {what} [T, n] and "
            "labels [T], or both with batch dimensions"
        )
    if lm_head is not None:
        if lm_head.ndim != 2 or 0 in lm_head.shape:
            yield f"lm_head {lm_head.shape} is not a matrix: give [D, V] or [V, D]"
        elif hidden.ndim and hidden.shape[-1] not in lm_head.shape:
            yield (
                f"lm_head {lm_head.shape} has no dimension of the width {hidden.shape[-1]} of "
                "hidden"
            )
        elif layout is None:
            yield (
                f"layout: lm_head {lm_head.shape} is square, so it fits both ways: say 'dv' for "
                "[D, V] or 'vd' for [V, D]"
            )
        elif layout not in get_args(Layout):
            yield _option("layout", layout, get_args(Layout))
        elif hidden.ndim and lm_head.shape[layout.index("d")] != hidden.shape[-1]:
            yield (
                f"layout: lm_head {lm_head.shape} read as {layout!r} does not fit the width "
                f"{hidden.shape[-1]} of hidden"
            )
        elif request.bias is not None and request.bias.shape != (request.vocab,):
            yield f"bias {request.bias.shape} does not fit a vocabulary of {request.vocab}"
    if request.weights is not None and request.weights.shape != labels.shape:
        yield f"weights {request.weights.shape} do not fit labels {labels.shape}"
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        yield f"labels: dtype {labels.dtype} is not an integer: give token ids as int32"
    for name, array in ((what, hidden), ("lm_head", lm_head), ("bias", request.bias)):
        if array is not None and array.dtype.name not in DTYPES:
            yield f"{name}: dtype {array.dtype} is not one of {', '.join(DTYPES)}"
    if request.weights is not None and jnp.issubdtype(request.weights.dtype, jnp.complexfloating):
        yield f"weights: dtype {request.weights.dtype} is not real: give float32"


def _numbers(request: Request) -> Iterator[str]:
    """Yields what is wrong with the numbers, all of which are static under jit."""
    if not 0 <= _number(request.z_loss) < math.inf:
        yield f"z_loss: {request.z_loss} is not a number from 0 up (1e-4 is usual)"
    if not 0 <= _number(request.label_smoothing) < 1:
        yield f"label_smoothing: {request.label_smoothing} is outside [0, 1) (0.1 is usual)"
    if not 0 < _number(request.temperature) < math.inf:
        yield f"temperature: {request.temperature} is not a positive number (1.0 is none)"
    if request.soft_cap is not None and not 0 < _number(request.soft_cap) < math.inf:
        yield (
            f"logit_soft_cap: {request.soft_cap} is not a positive number (30.0 is usual; None "
            "for none)"
        )
    if request.chunk_size is not None and not (
        _is_whole(request.chunk_size) and request.chunk_size >= 1
    ):
        yield f"chunk_size: {request.chunk_size} tokens are not a chunk: give an integer above 0"
    label = request.ignore_index
    if not (_is_whole(label) and -(2**31) <= operator.index(label) < 2**31):
        yield (f"ignore_index: {label} is not a label: give an int of 32 bits (-100 is usual)")


def _number(value: float) -> float:
    """Returns nan for a value that is not a number, or that jit traces."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def _is_whole(value: int) -> bool:
    try:
        return operator.index(value) == value
    except TypeError:  # a value that jit traces comes here, too
        return False


def _names(request: Request) -> Iterator[str]:
    """Yields what is wrong with options that take a name, and with their combinations."""
    implementations = get_args(Implementation)
    if request.lm_head is None:
        implementations = ("reference", "chunked", "pallas_gpu")
    if request.entropy:
        implementations = ("reference", "chunked")
    for name, value, options in (
        ("implementation", request.implementation, (None, *implementations)),
        ("rule", request.rule, (None, *get_args(Rule))),
        ("reduction", request.reduction, REDUCTIONS),
    ):
        if value not in options:
            yield _option(name, value, options)
    if request.rule == "fast" and request.reduction == "none":
        yield (
            "rule: 'fast' needs a scalar loss, and reduction is 'none': choose 'strict', or reduce"
        )
    if request.rule == "fast" and request.float32_logits:
        yield (
            "rule: 'fast' rounds the logits to the dtype of the inputs, and float32_logits is "
            "set: choose 'strict', or leave it out"
        )
    if request.implementation == "reference":
        unknown = {
            "rule": request.rule,
            "chunk_size": request.chunk_size,
            "sharding": request.sharding,
        }
        for name, value in unknown.items():
            if value is not None:
                yield (
                    f"{name}: the reference implementation does not use it: leave it None, or "
                    "choose implementation 'chunked'"
                )


def _mesh(request: Request) -> Iterator[str]:
    """Yields what is wrong with `sharding`."""
    sharding, layout = request.sharding, request.layout
    if sharding is None:
        return
    mesh = jax.sharding.get_abstract_mesh()
    missing = False
    axes_of = asdict(sharding)
    for field, axes in axes_of.items():
        for axis in axes:
            if axis not in mesh.axis_names:
                missing = True
                have = ", ".join(map(str, mesh.axis_names)) or "none"
                yield (
                    f"sharding.{field}: no mesh axis named {axis!r} (have: {have}): call under "
                    "jax.set_mesh(mesh), with axes of that mesh"
                )
            elif axis in mesh.manual_axes:
                missing = True
                yield (
                    f"sharding.{field}: shard_map has split axis {axis!r} already: call without "
                    "sharding, or outside of it"
                )
    pairs = [("tokens", "vocab"), ("tokens", "sequence"), ("embed", "vocab")]
    for one, other in pairs if request.lm_head is not None else pairs[:2]:
        both = set(axes_of[one]) & set(axes_of[other])
        if both:
            yield f"sharding: {one} and {other} both lie over {', '.join(sorted(both))}"
    if request.labels.ndim > 2:
        yield (
            f"sharding: labels {request.labels.shape} have more than batch and sequence: "
            "reshape "
            "them to [B, S]"
        )
    if sharding.sequence and request.labels.ndim != 2:
        yield (
            f"sharding.sequence: labels {request.labels.shape} have no sequence: give hidden "
            "[B, "
            "S, D] and labels [B, S]"
        )
    if missing or (request.lm_head is not None and (layout is None or request.lm_head.ndim != 2)):
        return
    vocab, parts = request.vocab, request.vocab_shards
    if vocab % parts:
        more = vocab + -vocab % parts
        yield (
            f"sharding.vocab: a vocabulary of {vocab} does not divide over {parts} devices: "
            "make "
            f"it {more}, or shard it over fewer"
        )


def _labels(request: Request) -> Iterator[str]:
    """Yields what is wrong with the labels, but only if their values are known."""
    labels, vocab = request.labels, request.vocab
    if isinstance(labels, Tracer) or not labels.is_fully_addressable:
        return
    values = np.asarray(labels)
    wrong = (values != request.ignore_index) & ((values < 0) | (values >= vocab))
    if wrong.any():
        where = tuple(int(index) for index in np.argwhere(wrong)[0])
        yield (
            f"labels: {int(wrong.sum())} outside the vocabulary of {vocab}, the first "
            f"{int(values[where])} at {list(where)} "
            f"(ignore_index is {request.ignore_index})"
        )


def _runs(request: Request) -> Iterator[str]:
    name = request.implementation
    if name is None or name not in FAVOURITES.values():
        return
    for reason in [*_refusals(request, name), *_elsewhere(request, name)]:
        yield f"implementation: {name!r} cannot run: {reason}"
    if request.chunk_size is not None and request.chosen_rule == "strict":
        yield f"chunk_size: {name!r} has none under the rule 'strict': leave it None"


def _refusals(request: Request, name: Implementation) -> Iterator[str]:
    """Yields why an implementation cannot run these arguments on any device of its platform."""
    if (reason := choice.missing(MODULES[name])) is not None:
        yield reason
        return
    arrays = [array for key, array in request.arrays.items() if key != "weights"]
    if request.sharding is None and (devices := choice.devices_without_sharding(*arrays)) > 1:
        yield (
            f"the compiler cannot split it over {devices} devices: say by `sharding` how the "
            "arguments lie"
        )
    if any(varying_axes(array) for array in arrays):
        yield (
            "a shard_map around it checks how results vary, which kernels do not say: give that "
            "shard_map check_vma=False"
        )
    if request.lm_head is None:
        if jnp.dtype(request.hidden.dtype) == jnp.float64:
            yield "float64 runs in XLA only"
        return
    layout, width = request.layout or "dv", request.hidden.shape[-1]
    sizes = {"d": width, "v": request.vocab // request.vocab_shards}
    wider = jnp.result_type(request.hidden, request.lm_head)
    hidden = jax.ShapeDtypeStruct((math.prod(request.labels.shape), width), wider)
    lm_head = jax.ShapeDtypeStruct(tuple(sizes[axis] for axis in layout), wider)
    yield from choice.kernel(name).refusals(hidden, lm_head, layout=layout)


def _elsewhere(request: Request, name: str) -> Iterator[str]:
    """Yields why the implementation cannot run on the devices here, but only outside of a trace.

    Under jit the program may be lowered for a platform that is not present.
    """
    arrays = list(request.arrays.values())
    if any(isinstance(array, Tracer) for array in arrays):
        return
    devices = {device for array in arrays for device in array.devices()}
    here = {choice.platform_name(device.platform) for device in devices}
    if (reason := choice.misplaced(name, here | {choice.platform_at_hand()})) is not None:
        yield f"{reason}: leave it None, or lower the call for such a device under jax.jit"


def _option(name: str, value: str | None, options: tuple[str | None, ...]) -> str:
    known = [option for option in options if option is not None]
    near = did_you_mean(str(value), known)
    return (
        f"{name}: {value!r} is not an option (have: "
        f"{', '.join(known)}){'. ' + near if near else ''}"
    )
