"""The common parts of the TPU kernels: calls by name, loops of the device, a tile of logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, TypeVar, cast

import jax
import jax.numpy as jnp
from jax import Array, Ref
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from easypipe.kernels.loss.stats import Layout, soft_capped

Interpret = bool | pltpu.InterpretParams  # True or parameters of the interpreter, without a TPU
Refs = dict[str, Ref]
Carry = TypeVar("Carry")
ROWS = 8  # rows of float32 that a TPU stores together
LOWEST = -1e30  # a masked logit: finite, so that no difference of two of them is NaN


def named_call(
    kernel: Callable[[Refs, Refs, Refs], None],
    name: str,
    *,
    grid: tuple[int, ...],
    inputs: Mapping[str, tuple[Array, pl.BlockSpec]],
    outputs: Mapping[str, tuple[jax.ShapeDtypeStruct, pl.BlockSpec]],
    scratch: Mapping[str, pl.MemoryRef],
    cores: bool,
    vmem: int,
    interpret: Interpret,
    index: Array | None = None,
) -> dict[str, Array]:
    """Calls pallas_call of `kernel(inputs, outputs, scratch)`, which finds its references by name.

    An output with the name of an input takes its place.

    Args:
        cores: The first dimension of the grid is spread over the cores.
        vmem: The bytes of VMEM that the kernel may take.
        index: A number that index maps and kernel (as "index") also receive.
    """
    num_index = index is not None

    def by_name(*refs: Ref) -> None:
        rest = iter(refs)
        names = (["index"] * num_index + [*inputs], outputs, scratch)
        kernel(*({key: next(rest) for key in part} for part in names))

    order = list(inputs)
    semantics: list[Literal["parallel", "arbitrary"]] = ["arbitrary"] * len(grid)
    semantics[0] = "parallel" if cores else "arbitrary"
    results = pl.pallas_call(
        by_name,
        out_shape=[shape for shape, _ in outputs.values()],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=int(num_index),
            grid=grid,
            in_specs=[spec for _, spec in inputs.values()],
            out_specs=[spec for _, spec in outputs.values()],
            scratch_shapes=list(scratch.values()),  # pyright: ignore[reportArgumentType]  (of VMEM)
        ),
        input_output_aliases={
            num_index + order.index(key): place
            for place, key in enumerate(outputs)
            if key in inputs
        },
        compiler_params=pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=vmem),
        interpret=interpret,
        name=name,
    )(*([] if index is None else [index]), *(array for array, _ in inputs.values()))
    return dict(zip(outputs, results, strict=True))


def some(start: Array | int, size: int) -> pl.Slice:
    return cast("pl.Slice", pl.ds(start, size))  # pl.ds gives a slice without a size alone


def in_steps(size: int, step: int, do: Callable[[pl.Slice, Carry], Carry], carry: Carry) -> Carry:
    """Computes `carry = do(pl.ds(start, step), carry)` for all of `size`, in a loop on the device.

    Unrolled, the loop takes minutes to compile.
    """
    whole, rest = divmod(size, step)
    if whole > 1:
        carry = jax.lax.fori_loop(
            0, whole, lambda i, carry: do(some(pl.multiple_of(i * step, step), step), carry), carry
        )
    elif whole:
        carry = do(some(0, step), carry)
    return do(some(whole * step, rest), carry) if rest else carry


def logits(
    hidden_RD: Array, head: Array, bias_1C: Array | None, layout: Layout, soft_cap: float | None
) -> Array:
    """Returns z of a tile, float32."""
    x_RC = product(hidden_RD, head, 1, layout.index("d"))
    return soft_capped(x_RC if bias_1C is None else x_RC + bias_1C, soft_cap)


def product(a: Array, b: Array, over_a: int, over_b: int) -> Array:
    """Contracts dimension `over_a` of `a` with `over_b` of `b`, into float32.

    Products of float32 are exact, not passes in bfloat16.
    """
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    return jax.lax.dot_general(
        a,
        b,
        (((over_a,), (over_b,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def shape_like(shape: tuple[int, ...], dtype: DTypeLike, array: Array) -> jax.ShapeDtypeStruct:
    """Returns the shape of a result that varies over the same mesh axes as `array`.

    This matters inside a shard_map that checks them.
    """
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(array).manual_axis_type)


def head_block(
    layout: Layout, width: int, columns: int, column_block: Callable[..., Array]
) -> tuple[tuple[int, int], Callable[..., tuple[Array | int, Array | int]]]:
    """Returns (shape, index map) of a block of columns of the head."""
    if layout == "dv":
        return (width, columns), lambda *at: (0, column_block(*at))
    return (columns, width), lambda *at: (column_block(*at), 0)
