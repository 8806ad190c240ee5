"""Bytes and FLOPs of Pallas kernels, counted from their grids, BlockSpecs, index maps and bodies.

A block is moved where its index changes from one step of the grid to the next, once for each core.
What is copied by hand counts as often as it is done. (`cost_analysis` cannot be asked: Pallas
kernels declare their own costs.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr


class Cost(NamedTuple):
    bytes: int
    flops: int


def cost(function: Any, *arguments: Any) -> Cost:
    """Of all Pallas kernels in `function`; loops around them must have a known length. XLA's own
    fills of matrices are added.

    In a loop around them, the last round alone may be cut short by the end of an array. In a grid
    of three dimensions, what stands under a condition in the body and has a product in it is taken
    to run in the first step of the last dimension.
    """
    moved = flops = 0
    for call, times in _calls(jax.make_jaxpr(function)(*arguments).jaxpr, 1):
        if call.primitive.name == "pallas_call":
            moved += (times - 1) * _moved(call, 0) + _moved(call, times - 1)
            grid = call.params["grid_mapping"].grid
            always, first = _flops(call.params["jaxpr"])
            flops += times * math.prod(grid) * always + times * math.prod(grid[:2]) * first
        else:
            moved += times * sum(_size(out.aval) for out in call.outvars)
    return Cost(moved, flops)


def beyond(function: Any, *arguments: Any) -> list[str]:
    """The blocks of the kernels of `function` that begin outside of their array: the interpreter
    moves those into it, as a device does not.
    """
    wrong = []
    for call, _ in _calls(jax.make_jaxpr(function)(*arguments).jaxpr, 1):
        if call.primitive.name != "pallas_call":
            continue
        mapping = call.params["grid_mapping"]
        points = np.indices(mapping.grid).reshape(len(mapping.grid), -1).T
        scalars = [jnp.zeros(1, jnp.int32)] * mapping.num_index_operands
        for number, block in enumerate(mapping.block_mappings):
            starts = _starts(block, points, scalars)
            whole = np.array(block.array_aval.shape)
            if ((starts < 0) | (starts >= np.maximum(whole, 1))).any():
                wrong.append(f"{call.params['name']}, block {number}")
    return wrong


def _calls(jaxpr: Any, times: int) -> Iterator[tuple[Any, int]]:
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call" or (
            equation.primitive.name == "broadcast_in_dim" and equation.outvars[0].aval.ndim > 1
        ):
            yield equation, times
            continue
        length = equation.params.get("length", 1) if equation.primitive.name == "scan" else 1
        assert equation.primitive.name != "while", "a loop of unknown length"
        for inner in _inner(equation):
            yield from _calls(inner, times * length)


def _inner(equation: Any) -> Iterator[Any]:
    for value in equation.params.values():
        for one in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(one, ClosedJaxpr):
                yield one.jaxpr
            elif hasattr(one, "eqns"):
                yield one


def _moved(call: Any, group: int) -> int:
    mapping = call.params["grid_mapping"]
    # [steps, dimensions of the grid], in order
    points = np.indices(mapping.grid).reshape(len(mapping.grid), -1).T
    semantics = call.params["compiler_params"].dimension_semantics
    cores = mapping.grid[0] if str(semantics[0]).endswith("parallel") else 1
    scalars = [jnp.full(1, group, jnp.int32)] * mapping.num_index_operands
    total = 0
    for block in mapping.block_mappings:
        shape = [getattr(size, "block_size", size) for size in block.block_shape]
        whole = block.array_aval.shape
        if block.index_map_jaxpr.jaxpr.outvars and str(
            getattr(block.transformed_block_aval, "memory_space", "")
        ) in ("any", "hbm"):
            continue  # copied by hand, where at all
        starts = _starts(block, points, scalars)
        changes = np.any(starts[1:] != starts[:-1], axis=1)
        first_of_core = (
            points[1:, 0] != points[:-1, 0] if cores > 1 else np.zeros(len(points) - 1, bool)
        )
        fetched = np.concatenate([[True], changes | first_of_core])
        sizes = np.minimum(np.array(shape), np.array(whole) - starts[fetched])
        total += int(np.prod(sizes, axis=1).sum()) * block.array_aval.dtype.itemsize
    return total + cores * _copied(call.params["jaxpr"])


def _starts(block: Any, points: np.ndarray, scalars: list[Any]) -> np.ndarray:
    """Where the block of each point of the grid begins: [points, dimensions of the array]."""
    find = jax.vmap(lambda *at: jnp.stack(block.compute_start_indices_interpret(at, *scalars)))
    return np.asarray(find(*jnp.asarray(points.T))).reshape(len(points), -1)


def _copied(jaxpr: Any) -> int:
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dma_start":
            buffers = [var.aval for var in equation.invars if getattr(var.aval, "ndim", 0) == 2]
            total += min(_size(aval) for aval in buffers)
        total += sum(_copied(inner) for inner in _inner(equation))
    return total


def _flops(jaxpr: Any) -> tuple[int, int]:
    """(in every step of the grid, in those that meet a condition)."""
    always = first = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (over, _), _ = equation.params["dimension_numbers"]
            always += (
                2
                * math.prod(equation.outvars[0].aval.shape)
                * math.prod(equation.invars[0].aval.shape[axis] for axis in over)
            )
            continue
        length = equation.params.get("length", 1) if equation.primitive.name == "scan" else 1
        inner = [sum(_flops(one)) for one in _inner(equation)]
        if equation.primitive.name == "cond":
            first += max(inner, default=0)
        else:
            assert not any(_flops(one)[1] for one in _inner(equation)), "a condition in a loop"
            always += length * sum(inner)
    return always, first


def _size(aval: Any) -> int:
    return math.prod(aval.shape) * aval.dtype.itemsize
