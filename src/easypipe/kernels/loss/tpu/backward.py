"""The gradients on a TPU, with recomputed tiles of logits: resident, streaming or apart.

A block of columns of the head stays in VMEM with its gradient (float32) while the tokens stream
past. Every block of columns adds to the gradient of the hidden states, which does not fit VMEM
unless there are few tokens. So it is in HBM, and is read, added to and written by each block. As
float32 it would be another array, of twice the output's size. So a float32 is kept in two halves:
the output's own bfloat16, rounded to nearest, and 16 more bits for the position of the sum within
the rounding (`_split`, `_joined`).

Three schedules:
- *resident*: hidden states and their gradient stay in VMEM and the head streams past them, once.
  Grid (block of columns j, rows k).
- *streaming*: one call for each group of column blocks, one for each TensorCore; grid (core c, tile
  of tokens k, part w of the width). On two cores the tokens are passed in two halves, and the cores
  are always in different halves: they never add to the same sums. Between the halves the head's
  gradient of the group, [cores, ...] in float32, is in HBM.
- *apart*, if even those 16 bits of every hidden state are too many: a pass for each gradient.
  Whatever the order of the tiles, one pass over them has half-finished float32 sums of the smaller
  of the two gradients in HBM: 2·D bytes for each token (or column) in addition to the bfloat16 of
  the result. So the logits are computed once more, 8·T·D·V FLOPs instead of 6, and every sum is
  finished in VMEM. The first pass is like *resident*, but without the hidden states' gradient and
  with a tile of hidden states at a time. In the second, a block of tokens stays with its gradient
  while the head streams past. Grid (block i, columns j, rows k of it). On two TensorCores each
  takes a part of the blocks that stay.

T tokens · D width · V vocabulary · B tokens that stay · R rows of a tile · C columns of a block
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import Array, Ref
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from easypipe.kernels.loss.stats import (
    Cotangents,
    Gradients,
    Inputs,
    Layout,
    soft_cap_slope,
    varying_like,
    vocab_size,
)
from easypipe.kernels.loss.tpu.blocks import (
    COLUMN_STEP,
    LANES,
    SLACK,
    WIDTH_STEP,
    Blocks,
    backward_vmem,
    cdiv,
    sizes_of,
)
from easypipe.kernels.loss.tpu.common import (
    ROWS,
    Interpret,
    Refs,
    head_block,
    in_steps,
    logits,
    named_call,
    product,
    shape_like,
    some,
)


class _Given(NamedTuple):
    hidden: Array
    lm_head: Array
    known: Array  # float32[8, T]: the labels, lse and cotangents of the tokens
    bias: Array | None  # float32[1, V]


def gradients(
    inputs: Inputs,
    lse: Array,
    g: Cotangents,
    layout: Layout,
    soft_cap: float | None,
    grad_dtype: DTypeLike | None,
    blocks: Blocks,
    interpret: Interpret,
) -> Gradients:
    """Returns Kernel.gradients of stats.py."""
    hidden, lm_head, bias, labels = inputs
    (tokens, width), vocab = hidden.shape, vocab_size(lm_head, layout)
    hidden_dtype, head_dtype = (grad_dtype or hidden.dtype), (grad_dtype or lm_head.dtype)
    sizes = sizes_of(tokens, width, vocab, hidden.dtype, head_dtype)
    problem = Problem(
        tokens=tokens,
        width=width,
        vocab=vocab,
        layout=layout,
        soft_cap=soft_cap,
        has_bias=bias is not None,
        split=hidden_dtype == jnp.bfloat16,
        blocks=blocks,
        dtype=hidden.dtype,
        head_dtype=jnp.dtype(head_dtype),
        vmem=backward_vmem(blocks, sizes) + SLACK,
        interpret=interpret,
    )
    # float32 holds ids below 2**24
    local = labels.astype(jnp.float32)
    nothing = jnp.zeros_like(lse)
    known_8T = jnp.stack([local, lse, *g, nothing, nothing, nothing]).astype(jnp.float32)
    bias_1V = None if bias is None else bias.astype(jnp.float32)[None, :]
    given = _Given(hidden, lm_head, known_8T, bias_1V)
    if blocks.resident:
        found = _over_head(given, problem)
    elif blocks.own_tokens:
        found = _over_head(given, problem) | {"hidden": _over_tokens(given, problem)}
    else:
        found = _streaming(given, problem)
    d_bias = None
    if bias is not None:
        d_bias = found["bias"].sum(axis=(0, 1)).astype(grad_dtype or bias.dtype)
    return Gradients(found["hidden"].astype(hidden_dtype), found["head"], d_bias)


def _over_head(given: _Given, problem: Problem) -> dict[str, Array]:
    """Returns the gradients of head and bias; also of the hidden states, if all are resident."""
    blocks, hidden = problem.blocks, given.hidden
    rows, columns = blocks.back_rows, blocks.back_columns
    padded, stays = cdiv(problem.tokens, rows) * rows, pl.Buffered(1)
    head_shape, head_index = head_block(problem.layout, problem.width, columns, lambda j, k: j)
    mode = None if blocks.resident else stays
    head_spec = pl.BlockSpec(head_shape, head_index, pipeline_mode=mode)
    whole = pl.BlockSpec((padded, problem.width), lambda j, k: (0, 0), pipeline_mode=stays)
    tile = pl.BlockSpec((rows, problem.width), lambda j, k: (k, 0))
    inputs = {
        "tokens": (hidden, whole if blocks.resident else tile),
        "lm_head": (given.lm_head, head_spec),
        "known": (given.known, pl.BlockSpec((ROWS, rows), lambda j, k: (0, k))),
    }
    outputs, buffers = {}, {}
    if blocks.resident:
        outputs["hidden"] = shape_like(hidden.shape, problem.state_dtype, hidden), whole
        if problem.split:
            buffers["low"] = pltpu.VMEM((padded, problem.width), jnp.int16)
    outputs["head"] = shape_like(given.lm_head.shape, problem.head_dtype, hidden), head_spec
    if given.bias is not None:
        inputs["bias_row"] = given.bias, pl.BlockSpec((1, columns), lambda j, k: (0, j))
        outputs["bias"] = (
            shape_like((1, 1, problem.vocab), jnp.float32, hidden),
            pl.BlockSpec((1, 1, columns), lambda j, k: (0, 0, j)),
        )

    def kernel(given: Refs, results: Refs, buffers: Refs) -> None:
        block, tile = pl.program_id(0), pl.program_id(1)
        hidden_ref, state = given["tokens"], None
        if blocks.resident:
            window = pl.ds(pl.multiple_of(tile * rows, rows), rows)
            hidden_ref = hidden_ref.at[window]
            state = _State(
                results["hidden"].at[window],
                buffers["low"].at[window] if problem.split else None,
                lambda x: jnp.where(block == 0, 0.0, x),
            )
        refs = _tile_refs(hidden_ref, given, results, buffers)
        at = At(block, tile, adds_nothing=tile == 0, bias_adds_nothing=tile == 0)
        _add_tile(refs, state, state, at, problem)

        @pl.when(tile == pl.num_programs(1) - 1)
        def _finish():
            results["head"][...] = buffers["sum"][...].astype(problem.head_dtype)

    return named_call(
        kernel,
        "loss_gradients" if blocks.resident else "loss_gradients_of_head",
        grid=(cdiv(problem.vocab, columns), padded // rows),
        inputs=inputs,
        outputs=outputs,
        scratch=buffers | scratch(problem, head_shape),
        cores=not blocks.resident,
        vmem=problem.vmem,
        interpret=problem.interpret,
    )


def _over_tokens(given: _Given, problem: Problem) -> Array:
    """Returns only the gradient of the hidden states."""
    hidden, blocks = given.hidden, problem.blocks
    rows, columns, stay = blocks.back_rows, blocks.own_columns, blocks.own_tokens
    problem = problem._replace(blocks=blocks._replace(back_columns=columns))
    head_spec = pl.BlockSpec(*head_block(problem.layout, problem.width, columns, lambda i, j, k: j))
    tokens_spec = pl.BlockSpec(
        (stay, problem.width), lambda i, j, k: (i, 0), pipeline_mode=pl.Buffered(1)
    )
    inputs = {
        "tokens": (hidden, tokens_spec),
        "lm_head": (given.lm_head, head_spec),
        "known": (given.known, pl.BlockSpec((ROWS, stay), lambda i, j, k: (0, i))),
    }
    if given.bias is not None:
        inputs["bias_row"] = given.bias, pl.BlockSpec((1, columns), lambda i, j, k: (0, j))

    def kernel(given: Refs, results: Refs, buffers: Refs) -> None:
        block, column_block, k = (pl.program_id(axis) for axis in range(3))
        window, sum_ref = pl.ds(pl.multiple_of(k * rows, rows), rows), buffers["total"]
        known = given | {"known": given["known"].at[:, window]}
        refs = _tile_refs(given["tokens"].at[window], known, {}, buffers)
        tile_dz(refs, At(column_block, block * (stay // rows) + k), problem)

        def add(part: pl.Slice, _: None) -> None:
            before = jnp.where(column_block == 0, 0.0, sum_ref[window, part])
            sum_ref[window, part] = before + of_hidden(refs, part, problem.layout)

        in_steps(problem.width, WIDTH_STEP, add, None)

        @pl.when(column_block == pl.num_programs(1) - 1)
        def _finish():
            d_hidden_ref = results["hidden"]
            d_hidden_ref[window, :] = sum_ref[window, :].astype(d_hidden_ref.dtype)

    return named_call(
        kernel,
        "loss_gradients_of_hidden",
        grid=(cdiv(problem.tokens, stay), cdiv(problem.vocab, columns), stay // rows),
        inputs=inputs,
        outputs={"hidden": (shape_like(hidden.shape, problem.state_dtype, hidden), tokens_spec)},
        scratch={
            "total": pltpu.VMEM((stay, problem.width), jnp.float32),
            "dz": pltpu.VMEM((rows, columns), problem.dtype),
        },
        cores=True,
        vmem=problem.vmem,
        interpret=problem.interpret,
    )["hidden"]


def _streaming(given: _Given, problem: Problem) -> dict[str, Array]:
    """Returns all gradients by the schedule *streaming*, one group of column blocks at a time."""
    hidden, blocks = given.hidden, problem.blocks
    groups = cdiv(cdiv(problem.vocab, blocks.back_columns), blocks.back_parts)
    tokens, width, vocab = problem.tokens, problem.width, problem.vocab
    # jax's interpreter returns aliased arrays that end within a block with the whole block, so here
    # they consist of whole blocks.
    if problem.interpret:
        tokens = cdiv(tokens, blocks.back_rows) * blocks.back_rows
        vocab = groups * blocks.back_parts * blocks.back_columns
    whole_head = (width, vocab) if problem.layout == "dv" else (vocab, width)
    carry = {
        "hidden": jnp.zeros((tokens, width), problem.state_dtype),
        "head": jax.lax.empty(whole_head, problem.head_dtype),
    }
    if problem.split:
        carry["low"] = jnp.zeros((tokens, width), jnp.int16)
    if problem.has_bias:
        carry["bias"] = jnp.zeros((blocks.back_parts, 1, vocab), jnp.float32)
    if blocks.back_parts > 1:
        shape, _ = head_block(problem.layout, width, blocks.back_columns, lambda j: j)
        carry["between"] = jax.lax.empty((blocks.back_parts, *shape), jnp.float32)

    def group(index: Array, carry: dict[str, Array]) -> dict[str, Array]:
        for turn in range(blocks.back_parts):
            carry = carry | _streaming_turn(index, turn, given, carry, problem)
        return carry

    carry = {name: varying_like(array, hidden) for name, array in carry.items()}
    carry = jax.lax.fori_loop(0, groups, group, carry)
    if problem.interpret:
        rows, columns = given.lm_head.shape
        carry["hidden"] = carry["hidden"][: problem.tokens]
        carry["head"] = carry["head"][:rows, :columns]
        if problem.has_bias:
            carry["bias"] = carry["bias"][:, :, : problem.vocab]
    return carry


def _streaming_turn(
    index: Array, turn: int, arrays: _Given, carry: dict[str, Array], problem: Problem
) -> dict[str, Array]:
    """Adds all tokens' share of one group of column blocks, or on two cores half of it."""
    blocks = problem.blocks
    rows, columns, parts = blocks.back_rows, blocks.back_columns, blocks.back_parts
    tiles = cdiv(problem.tokens, rows) // parts
    share = blocks.back_width or problem.width
    begins, ends = turn == 0, turn == parts - 1

    def tile_of(core: Array, k: Array) -> Array:
        return (core + turn) % parts * tiles + k

    head_shape, head_index = head_block(
        problem.layout, problem.width, columns, lambda c, k, w, group: group[0] * parts + c
    )
    state_spec = pl.BlockSpec((rows, share), lambda c, k, w, group: (tile_of(c, k), w))
    head_spec = pl.BlockSpec(head_shape, head_index, pipeline_mode=pl.Buffered(1))
    aside = pl.BlockSpec(memory_space=pl.ANY)
    inputs = {
        "tokens": (
            arrays.hidden,
            pl.BlockSpec((rows, problem.width), lambda c, k, w, group: (tile_of(c, k), 0)),
        ),
        "lm_head": (arrays.lm_head, head_spec),
        "known": (
            arrays.known,
            pl.BlockSpec((ROWS, rows), lambda c, k, w, group: (0, tile_of(c, k))),
        ),
    }
    if arrays.bias is not None:
        inputs["bias_row"] = (
            arrays.bias,
            pl.BlockSpec((1, columns), lambda c, k, w, group: (0, group[0] * parts + c)),
        )
    specs = {"hidden": state_spec}
    if problem.split:
        specs["low"] = state_spec
    if problem.has_bias:
        specs["bias"] = pl.BlockSpec(
            (1, 1, columns), lambda c, k, w, group: (turn, 0, group[0] * parts + c)
        )
    if ends:
        specs["head"] = head_spec
    if not (begins and ends):
        specs["between"] = aside
    for name in specs:
        inputs[name] = carry[name], state_spec if name in ("hidden", "low") else aside

    def kernel(given: Refs, results: Refs, buffers: Refs) -> None:
        core, k, w = (pl.program_id(i) for i in range(3))

        @pl.when((k == 0) & (w == 0))
        def _take():
            if not begins:
                pltpu.sync_copy(given["between"].at[core], buffers["sum"])

        refs = _tile_refs(given["tokens"], given, results, buffers)
        before, after = (
            _State(refs["hidden"], refs.get("low"), lambda x: x) for refs in (given, results)
        )
        at = At(
            given["index"][0] * parts + core,
            tile_of(core, k),
            w * share if share < problem.width else 0,
            (k == 0) & begins,
            k == 0,
            w == 0,
        )
        _add_tile(refs, before, after, at, problem)

        @pl.when((k == pl.num_programs(1) - 1) & (w == pl.num_programs(2) - 1))
        def _finish():
            if ends:
                results["head"][...] = buffers["sum"][...].astype(problem.head_dtype)
            else:
                pltpu.sync_copy(buffers["sum"], results["between"].at[core])

    return named_call(
        kernel,
        "loss_gradients",
        grid=(parts, tiles, problem.width // share),
        inputs=inputs,
        outputs={
            name: (shape_like(carry[name].shape, carry[name].dtype, arrays.hidden), spec)
            for name, spec in specs.items()
        },
        scratch=scratch(problem, head_shape),
        cores=True,
        vmem=problem.vmem,
        interpret=problem.interpret,
        index=jnp.full((1,), index, jnp.int32),
    )


def _tile_refs(hidden: Ref, given: Refs, results: Refs, buffers: Refs) -> Tile:
    return Tile(
        hidden,
        given["lm_head"],
        given["known"],
        given.get("bias_row"),
        buffers.get("sum"),
        results.get("bias"),
        buffers["dz"],
        buffers.get("dz_turned"),
    )


class _State(NamedTuple):
    """The gradient of the hidden states of a tile, W of the width.

    Attributes:
        high: [R, W] float32, or bfloat16 if `low` is given.
        low: [R, W] int16, or None.
        begun: Maps a value that was read to the value that counts: 0 if nothing was written before.
    """

    high: Ref
    low: Ref | None
    begun: Callable[[Array], Array]


def _add_tile(
    refs: Tile, before: _State | None, after: _State | None, at: At, problem: Problem
) -> None:
    """Adds a tile's share to the gradients of head and bias.

    It also adds to that of the hidden states, if `before` holds it.
    """
    if at.begins is True:
        tile_dz(refs, at, problem)
    else:
        pl.when(at.begins)(lambda: tile_dz(refs, at, problem))

    def add_products(part: pl.Slice, _: None) -> None:
        first = at.first_width + part.start
        at_lanes = first if isinstance(first, int) else pl.multiple_of(first, LANES)
        width = some(at_lanes, cast("int", part.size))
        add_to_head(refs, width)
        if before is None or after is None:
            return
        total_RS = before.begun(_joined(before, part)) + of_hidden(refs, width, problem.layout)
        if after.low is None:
            after.high[:, part] = total_RS
        else:
            after.high[:, part], after.low[:, part] = _split(total_RS)

    in_steps(
        problem.width if before is None else before.high.shape[1], WIDTH_STEP, add_products, None
    )


def _split(x: Array) -> tuple[Array, Array]:
    """Returns a float32 as its bfloat16, rounded to nearest, and the distance to it.

    The distance is in units of float32 (one unit is lost in an exact tie).
    """
    high = x.astype(jnp.bfloat16)
    distance = jax.lax.bitcast_convert_type(x, jnp.int32) - jax.lax.bitcast_convert_type(
        high.astype(jnp.float32), jnp.int32
    )
    return high, jnp.clip(distance, -(1 << 15), (1 << 15) - 1).astype(jnp.int16)


def _joined(state: _State, part: pl.Slice) -> Array:
    if state.low is None:
        return state.high[:, part]
    bits = jax.lax.bitcast_convert_type(
        state.high[:, part].astype(jnp.float32), jnp.int32
    ) + state.low[:, part].astype(jnp.int32)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


class Problem(NamedTuple):
    """The constants that the kernel is compiled for."""

    tokens: int
    width: int
    vocab: int
    layout: Layout
    soft_cap: float | None
    has_bias: bool
    split: bool  # the gradient of hidden is two halves of a float32; otherwise it is float32
    blocks: Blocks
    dtype: jnp.dtype  # the dtype of the products
    head_dtype: jnp.dtype  # the dtype of the head's gradient
    vmem: int  # bytes
    interpret: Interpret

    @property
    def state_dtype(self) -> DTypeLike:
        return jnp.bfloat16 if self.split else jnp.float32


class Tile(NamedTuple):
    """The references of a tile."""

    hidden: Ref  # [R, D]
    head: Ref  # [D, C] or [C, D]
    known: Ref  # [8, R] float32
    bias: Ref | None  # [1, C]
    d_head: Ref | None  # float32 like head
    d_bias: Ref | None  # [1, 1, C] float32
    dz: Ref  # [R, C] in the dtype of the products
    dz_turned: Ref | None = None  # [C, R], for the layout "vd"


class At(NamedTuple):
    """The place of a step in the problem."""

    column_block: Array
    tile: Array
    first_width: Array | int = 0  # where the part of the width in the state begins
    adds_nothing: Array | bool = False  # to the head's gradient: nothing is in it yet
    bias_adds_nothing: Array | bool = False
    begins: Array | bool = True  # the tile: later steps do the rest of its width


def scratch(problem: Problem, head_shape: tuple[int, int]) -> dict[str, pl.MemoryRef]:
    rows, columns = problem.blocks.back_rows, problem.blocks.back_columns
    found: dict[str, pl.MemoryRef] = {
        "sum": pltpu.VMEM(head_shape, jnp.float32),
        "dz": pltpu.VMEM((rows, columns), problem.dtype),
    }
    if problem.layout == "vd":
        found["dz_turned"] = pltpu.VMEM((columns, rows), problem.dtype)
    return found


def tile_dz(refs: Tile, at: At, problem: Problem) -> None:
    """Computes the tile's logits and their gradient, which goes to refs.dz."""
    rows, columns = problem.blocks.back_rows, problem.blocks.back_columns

    if (d_head := refs.d_head) is not None:

        @pl.when(at.adds_nothing)
        def _start():
            d_head[...] = jnp.zeros(d_head.shape, d_head.dtype)

    # Memory beyond the arrays was never loaded and may be NaN, which would spread through a
    # product: it is set to 0.
    if problem.tokens % rows:

        @pl.when(at.tile == problem.tokens // rows)
        def _rows_beyond():
            row = jax.lax.broadcasted_iota(jnp.int32, refs.hidden.shape, 0)
            refs.hidden[...] = jnp.where(row < problem.tokens % rows, refs.hidden[...], 0)

    if problem.vocab % columns:

        @pl.when(at.column_block == problem.vocab // columns)
        def _columns_beyond():
            column = jax.lax.broadcasted_iota(jnp.int32, refs.head.shape, problem.layout.index("v"))
            refs.head[...] = jnp.where(column < problem.vocab % columns, refs.head[...], 0)

    known_R8 = refs.known[...].T
    label_R1, lse_R1, g_lse_R1, g_target_R1, g_sum_R1 = (known_R8[:, i : i + 1] for i in range(5))

    def logits_to_dz(part: pl.Slice, _: None) -> None:
        head = refs.head[:, part] if problem.layout == "dv" else refs.head[part, :]
        bias_1S = None if refs.bias is None else refs.bias[:, part]
        z_RS = logits(refs.hidden[...], head, bias_1S, problem.layout, problem.soft_cap)
        first = at.column_block * columns + part.start
        column_RS = first + jax.lax.broadcasted_iota(jnp.int32, z_RS.shape, 1)
        hit_RS = column_RS == label_R1.astype(jnp.int32)
        dx_RS = jnp.exp(z_RS - lse_R1) * g_lse_R1 + g_sum_R1 + jnp.where(hit_RS, g_target_R1, 0.0)
        dx_RS = dx_RS * soft_cap_slope(z_RS, problem.soft_cap)
        inside = column_RS < problem.vocab if problem.vocab % columns else None
        if problem.tokens % rows:
            row_RS = at.tile * rows + jax.lax.broadcasted_iota(jnp.int32, z_RS.shape, 0)
            inside = (
                row_RS < problem.tokens if inside is None else inside & (row_RS < problem.tokens)
            )
        if inside is not None:
            dx_RS = jnp.where(inside, dx_RS, 0.0)
        if refs.d_bias is not None:
            sum_1S = jnp.where(at.bias_adds_nothing, 0.0, refs.d_bias[0, :, part])
            refs.d_bias[0, :, part] = sum_1S + dx_RS.sum(axis=0, keepdims=True)
        refs.dz[:, part] = dx_RS.astype(refs.dz.dtype)
        if refs.dz_turned is not None:
            refs.dz_turned[part, :] = dx_RS.T.astype(refs.dz.dtype)

    in_steps(columns, COLUMN_STEP, logits_to_dz, None)


def add_to_head(refs: Tile, width: pl.Slice) -> None:
    """Adds the tile's share in `width` to the head's gradient."""
    assert refs.d_head is not None
    if refs.dz_turned is None:  # layout "dv"
        refs.d_head[width, :] += product(refs.hidden[:, width], refs.dz[...], 0, 0)
    else:
        refs.d_head[:, width] += product(refs.dz_turned[...], refs.hidden[:, width], 1, 0)


def of_hidden(refs: Tile, width: pl.Slice, layout: Layout) -> Array:
    """Returns the tile's share in `width` of the hidden states' gradient, float32."""
    return (
        product(refs.dz[...], refs.head[width, :], 1, 1)
        if layout == "dv"
        else product(refs.dz[...], refs.head[:, width], 1, 0)
    )
