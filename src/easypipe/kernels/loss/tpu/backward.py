"""The gradients on a TPU: every tile of logits is recomputed once, and both products are taken of
it at once.

A block of columns of the head stays in VMEM beside its gradient (float32) while the tokens stream
past. The gradient of the hidden states, which every block of columns adds to, has no place in VMEM
unless tokens are few; it lives in HBM and is read, added to and written by each block. Stored as
float32 it would be an array that nobody asked for, of twice the output's size. So a float32 is kept
in two
halves: the output's own bfloat16, rounded to nearest, and 16 bits beside it that say where within
the rounding the sum stands (`_split`, `_joined`).

Three schedules:
- *resident*: hidden states and their gradient stay in VMEM and the head streams past them, once.
  Grid (block of columns j, rows k).
- *streaming*: one call for each group of column blocks, one for each TensorCore; grid (core c, tile
  of tokens k, part w of the width). On
  two cores the tokens are passed in two halves, the second core always in the other half than the
  first: no core adds to what the other adds to. Between the halves the head's gradient of the
  group, [cores, ...] in float32, stands in HBM.
- *apart* (apart.py), where even those 16 bits of every hidden state are too many: each
  gradient has a pass of its own.

T tokens · D width · V vocabulary · R rows of a tile · C columns of a block
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from easypipe.kernels.loss.stats import Cotangents, Gradients, Inputs, Layout, varying_like
from easypipe.kernels.loss.tpu import apart as pallas_tpu_apart
from easypipe.kernels.loss.tpu.blocks import (
    LANES,
    SLACK,
    WIDTH_STEP,
    Blocks,
    backward_vmem,
    cdiv,
    sizes_of,
)
from easypipe.kernels.loss.tpu.forward import ROWS
from easypipe.kernels.loss.tpu.loops import in_steps, shape_like
from easypipe.kernels.loss.tpu.tiles import (
    At,
    Problem,
    Refs,
    add_to_head,
    head_block,
    of_hidden,
    scratch,
    tile_dz,
)


def gradients(
    inputs: Inputs,
    lse: Array,
    g: Cotangents,
    layout: Layout,
    soft_cap: float | None,
    grad_dtype: Any,
    blocks: Blocks,
    interpret: Any,
) -> Gradients:
    """`Kernel.gradients` of stats.py."""
    hidden, lm_head, bias, labels = inputs
    tokens, width = hidden.shape
    vocab = lm_head.shape[1 if layout == "dv" else 0]
    hidden_dtype, head_dtype = (grad_dtype or hidden.dtype), (grad_dtype or lm_head.dtype)
    vmem = backward_vmem(blocks, sizes_of(tokens, width, vocab, hidden.dtype, head_dtype)) + SLACK
    problem = Problem(
        tokens,
        width,
        vocab,
        layout,
        soft_cap,
        bias is not None,
        hidden_dtype == jnp.bfloat16,
        blocks,
        vmem,
    )
    # float32 holds ids below 2**24
    local = labels.astype(jnp.float32)
    nothing = jnp.zeros_like(lse)
    known_8T = jnp.stack([local, lse, *g, nothing, nothing, nothing]).astype(jnp.float32)
    bias_1V = None if bias is None else bias.astype(jnp.float32)[None, :]
    run = (
        _resident
        if blocks.resident
        else pallas_tpu_apart.gradients
        if blocks.own_tokens
        else _streaming
    )
    d_hidden, d_head, d_bias = run(
        hidden, lm_head, known_8T, bias_1V, problem, head_dtype, interpret
    )
    if bias is not None and d_bias is not None:
        d_bias = d_bias.sum(axis=(0, 1)).astype(grad_dtype or bias.dtype)
    return Gradients(d_hidden.astype(hidden_dtype), d_head, d_bias)


def _resident(hidden, lm_head, known_8T, bias_1V, problem: Problem, head_dtype, interpret):
    blocks = problem.blocks
    rows, columns = blocks.back_rows, blocks.back_columns
    padded = cdiv(problem.tokens, rows) * rows
    stays = pl.Buffered(1)
    whole = pl.BlockSpec((padded, problem.width), lambda j, k: (0, 0), pipeline_mode=stays)
    head_shape, head_index = head_block(problem, lambda j, k: j)
    state_dtype = jnp.bfloat16 if problem.split else jnp.float32
    in_specs = [
        whole,
        pl.BlockSpec(head_shape, head_index),
        pl.BlockSpec((ROWS, rows), lambda j, k: (0, k)),
    ]
    out_specs = [whole, pl.BlockSpec(head_shape, head_index)]
    out_shape = [
        shape_like(hidden.shape, state_dtype, hidden),
        shape_like(lm_head.shape, head_dtype, hidden),
    ]
    buffers = scratch(problem, head_shape, hidden.dtype)
    if problem.split:
        buffers.insert(0, pltpu.VMEM((padded, problem.width), jnp.int16))
    arguments = [hidden, lm_head, known_8T]
    if problem.has_bias:
        in_specs.append(pl.BlockSpec((1, columns), lambda j, k: (0, j)))
        out_specs.append(pl.BlockSpec((1, 1, columns), lambda j, k: (0, 0, j)))
        out_shape.append(shape_like((1, 1, problem.vocab), jnp.float32, hidden))
        arguments.append(bias_1V)

    def kernel(hidden_ref, head_ref, known_ref, *refs):
        bias_ref, *refs = refs if problem.has_bias else (None, *refs)
        d_hidden_ref, d_head_ref, *refs = refs
        d_bias_ref, *refs = refs if problem.has_bias else (None, *refs)
        low_ref, *refs = refs if problem.split else (None, *refs)
        sum_ref, *dz_refs = refs
        block, tile = pl.program_id(0), pl.program_id(1)
        window = pl.ds(pl.multiple_of(tile * rows, rows), rows)
        refs_ = Refs(
            hidden_ref.at[window], head_ref, known_ref, bias_ref, sum_ref, d_bias_ref, *dz_refs
        )
        state = _State(
            d_hidden_ref.at[window],
            low_ref.at[window] if low_ref is not None else None,
            lambda x: jnp.where(block == 0, 0.0, x),
        )
        first = tile == 0
        _tile(
            refs_,
            state,
            state,
            At(block, tile, 0, adds_nothing=first, bias_adds_nothing=first, begins=True),
            problem,
        )

        @pl.when(tile == pl.num_programs(1) - 1)
        def _finish():
            d_head_ref[...] = sum_ref[...].astype(d_head_ref.dtype)

    d_hidden, d_head, *d_bias = pl.pallas_call(
        kernel,
        out_shape=out_shape,
        grid=(cdiv(problem.vocab, columns), padded // rows),
        in_specs=in_specs,
        out_specs=out_specs,
        scratch_shapes=buffers,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=problem.vmem
        ),
        interpret=interpret,
        name="loss_gradients",
    )(*arguments)
    return d_hidden, d_head, d_bias[0] if d_bias else None


def _streaming(hidden, lm_head, known_8T, bias_1V, problem: Problem, head_dtype, interpret):
    blocks = problem.blocks
    groups = cdiv(cdiv(problem.vocab, blocks.back_columns), blocks.back_parts)
    head_shape, _ = head_block(problem, lambda j: j)
    tokens, width, vocab = problem.tokens, problem.width, problem.vocab
    # jax's interpreter returns aliased arrays that end within a block with the whole block: here
    # they are whole ones at once
    if interpret:
        tokens = cdiv(tokens, blocks.back_rows) * blocks.back_rows
        vocab = groups * blocks.back_parts * blocks.back_columns
    d_head_shape = (width, vocab) if problem.layout == "dv" else (vocab, width)
    carry = {
        "high": jnp.zeros((tokens, width), jnp.bfloat16 if problem.split else jnp.float32),
        "head": jax.lax.empty(d_head_shape, head_dtype),
    }
    if problem.split:
        carry["low"] = jnp.zeros((tokens, width), jnp.int16)
    if problem.has_bias:
        carry["bias"] = jnp.zeros((blocks.back_parts, 1, vocab), jnp.float32)
    if blocks.back_parts > 1:
        carry["between"] = jax.lax.empty((blocks.back_parts, *head_shape), jnp.float32)

    def group(index, carry):
        for turn in range(blocks.back_parts):
            carry = _streaming_turn(
                index, turn, hidden, lm_head, known_8T, bias_1V, carry, problem, interpret
            )
        return carry

    carry = {name: varying_like(array, hidden) for name, array in carry.items()}
    carry = jax.lax.fori_loop(0, groups, group, carry)
    d_hidden, d_head, d_bias = carry["high"], carry["head"], carry.get("bias")
    if interpret:
        d_hidden, d_head = (
            d_hidden[: problem.tokens],
            d_head[: lm_head.shape[0], : lm_head.shape[1]],
        )
        d_bias = None if d_bias is None else d_bias[:, :, : problem.vocab]
    return d_hidden, d_head, d_bias


def _streaming_turn(
    index,
    turn: int,
    hidden,
    lm_head,
    known_8T,
    bias_1V,
    carry: dict[str, Array],
    problem: Problem,
    interpret,
):
    """All tokens' share of one group of column blocks, or on two cores: half of it."""
    blocks = problem.blocks
    rows, columns, parts = blocks.back_rows, blocks.back_columns, blocks.back_parts
    tiles = cdiv(problem.tokens, rows) // parts
    share = blocks.back_width or problem.width

    def tile_of(core, k):
        return (core + turn) % parts * tiles + k

    stays = pl.Buffered(1)
    head_shape, head_index = head_block(problem, lambda c, k, w, group: group[0] * parts + c)
    tokens_spec = pl.BlockSpec((rows, problem.width), lambda c, k, w, group: (tile_of(c, k), 0))
    state_spec = pl.BlockSpec((rows, share), lambda c, k, w, group: (tile_of(c, k), w))
    head_spec = pl.BlockSpec(head_shape, head_index, pipeline_mode=stays)
    bias_spec = pl.BlockSpec((1, columns), lambda c, k, w, group: (0, group[0] * parts + c))
    aside = pl.BlockSpec(memory_space=pl.ANY)
    inputs = {"hidden": (hidden, tokens_spec), "lm_head": (lm_head, head_spec)}
    inputs["known"] = (
        known_8T,
        pl.BlockSpec((ROWS, rows), lambda c, k, w, group: (0, tile_of(c, k))),
    )
    if problem.has_bias:
        inputs["bias_row"] = bias_1V, bias_spec
    outputs = {"high": state_spec}
    if problem.split:
        outputs["low"] = state_spec
    if problem.has_bias:
        outputs["bias"] = pl.BlockSpec(
            (1, 1, columns), lambda c, k, w, group: (turn, 0, group[0] * parts + c)
        )
    begins, ends = turn == 0, turn == parts - 1
    if ends:
        outputs["head"] = head_spec
    if not (begins and ends):
        outputs["between"] = aside
    for name in outputs:
        inputs[name] = carry[name], state_spec if name in ("high", "low") else aside
    names_in, names_out = list(inputs), list(outputs)

    def kernel(group_ref, *refs):
        given = dict(zip(names_in, refs, strict=False))
        results = dict(zip(names_out, refs[len(names_in) :], strict=False))
        sum_ref, *dz_refs = refs[len(names_in) + len(names_out) :]
        core, k, w = (pl.program_id(i) for i in range(3))

        @pl.when((k == 0) & (w == 0))
        def _take():
            if not begins:
                pltpu.sync_copy(given["between"].at[core], sum_ref)

        refs_ = Refs(
            given["hidden"],
            given["lm_head"],
            given["known"],
            given.get("bias_row"),
            sum_ref,
            results.get("bias"),
            *dz_refs,
        )
        before = _State(given["high"], given.get("low"), lambda x: x)
        after = _State(results["high"], results.get("low"), lambda x: x)
        at = At(
            group_ref[0] * parts + core,
            tile_of(core, k),
            w * share if share < problem.width else 0,
            (k == 0) & begins,
            k == 0,
            w == 0,
        )
        _tile(refs_, before, after, at, problem)

        @pl.when((k == pl.num_programs(1) - 1) & (w == pl.num_programs(2) - 1))
        def _finish():
            if ends:
                results["head"][...] = sum_ref[...].astype(results["head"].dtype)
            else:
                pltpu.sync_copy(sum_ref, results["between"].at[core])

    call = pl.pallas_call(
        kernel,
        out_shape=[shape_like(carry[name].shape, carry[name].dtype, hidden) for name in names_out],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(parts, tiles, problem.width // share),
            in_specs=[spec for _, spec in inputs.values()],
            out_specs=list(outputs.values()),
            scratch_shapes=scratch(problem, head_shape, hidden.dtype),
        ),
        input_output_aliases={
            1 + names_in.index(name): place for place, name in enumerate(names_out)
        },
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=problem.vmem,
        ),
        interpret=interpret,
        name="loss_gradients",
    )
    results = call(jnp.full((1,), index, jnp.int32), *(array for array, _ in inputs.values()))
    return carry | dict(zip(names_out, results, strict=True))


class _State(NamedTuple):
    """The gradient of the hidden states of a tile, W of the width."""

    high: Any  # [R, W] float32, or bfloat16 where `low` is given
    low: Any  # [R, W] int16, or None
    begun: Any  # what a value read from it becomes: 0 where nothing was written before


def _tile(refs: Refs, before: _State, after: _State, at: At, problem: Problem) -> None:
    """Adds a tile's share to the three gradients."""
    if at.begins is True:
        tile_dz(refs, at, problem)
    else:
        pl.when(at.begins)(lambda: tile_dz(refs, at, problem))

    def add_products(part, _) -> None:
        first = at.first_width + part.start
        width = pl.ds(first if isinstance(first, int) else pl.multiple_of(first, LANES), part.size)
        add_to_head(refs, width, problem.layout)
        total_RS = before.begun(_joined(before, part)) + of_hidden(refs, width, problem.layout)
        if after.low is None:
            after.high[:, part] = total_RS
        else:
            after.high[:, part], after.low[:, part] = _split(total_RS)

    in_steps(before.high.shape[1], WIDTH_STEP, add_products, None)


def _split(x: Array) -> tuple[Array, Array]:
    """A float32 as its bfloat16, rounded to nearest, and the distance to it in units of float32
    (one unit is lost at an exact tie).
    """
    high = x.astype(jnp.bfloat16)
    distance = jax.lax.bitcast_convert_type(x, jnp.int32) - jax.lax.bitcast_convert_type(
        high.astype(jnp.float32), jnp.int32
    )
    return high, jnp.clip(distance, -(1 << 15), (1 << 15) - 1).astype(jnp.int16)


def _joined(state: _State, part) -> Array:
    if state.low is None:
        return state.high[:, part]
    bits = jax.lax.bitcast_convert_type(
        state.high[:, part].astype(jnp.float32), jnp.int32
    ) + state.low[:, part].astype(jnp.int32)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
