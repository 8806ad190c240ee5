"""The strict forward pass in one Hopper kernel (Pallas through Mosaic GPU): the logits stay in registers, in float32.

A block of three warpgroups takes TOKENS rows of hidden and one of `splits` spans of the vocabulary. One warpgroup feeds tiles of hidden and
head through shared memory (TMA, STAGES deep); two multiply (wgmma), half of the rows each, and fold every finished tile of logits into four
running numbers per row (online log-sum-exp: Milakov & Gimelshein, 2018). Blocks of the same rows run side by side, so these rows are read
from the level-2 cache; the spans are merged afterwards. It writes 16 bytes per token and span.

It compiles for sm_90a and agrees with the reference under the interpreter, which looks for races. It has not been timed: no table turns it
on yet. Beside the slabs of pallas_gpu.py it saves the writing and reading of the logits, and does not round them.

T tokens · D width · V vocabulary · S spans of the vocabulary
"""
# ruff: noqa: F722  (shapes in annotations are jaxtyping's, not Python)

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Float, Int

from easypipe.kernels.pallas_gpu_rows import LOWEST, capped
from easypipe.kernels.stats import Layout, LogitStats, vocab_size

ROWS, COLUMNS, DEPTH, STAGES = 128, 128, 64, 4  # the tile of one warpgroup, a step of its products, and how many steps are under way
TOKENS = 2 * ROWS


def refusals(hidden: Any, lm_head: Any, bias: Any, *, layout: Layout) -> list[str]:
    """Every reason why these arguments cannot run here; the slabs of pallas_gpu.py take them."""
    sizes = {"tokens": (hidden.shape[0], TOKENS), "width": (hidden.shape[1], DEPTH), "vocabulary": (vocab_size(lm_head, layout), COLUMNS)}
    reasons = [f"{name} {size} is no multiple of {tile}" for name, (size, tile) in sizes.items() if size % tile]
    if jnp.dtype(hidden.dtype).name not in ("bfloat16", "float16"):
        reasons.append(f"wgmma multiplies bfloat16 and float16, not {jnp.dtype(hidden.dtype).name}")
    if jax.__version_info__ < (0, 11):
        reasons.append(f"jax {jax.__version__} is older than 0.11, with which it was compiled")
    if bias is not None:
        reasons.append("a bias is not added here")
    return reasons


def stats(
    hidden: Float[Array, "T D"],
    lm_head: Array,
    labels: Int[Array, " T"],
    *,
    layout: Layout,
    soft_cap: float | None,
    splits: int,
    interpret: Any = None,
) -> LogitStats:
    """The four sums (see stats.Kernel), for what `refusals` lets pass. interpret: a `plgpu.InterpretGPUParams` (jax 0.11.2 and newer)."""
    num_tokens, tiles = hidden.shape[0], vocab_size(lm_head, layout) // COLUMNS
    splits = min(splits, tiles)
    run = plgpu.kernel(
        functools.partial(_kernel, tiles=tiles, splits=splits, layout=layout, soft_cap=soft_cap),
        out_type=jax.ShapeDtypeStruct((splits, 4, num_tokens), jnp.float32),
        grid=(num_tokens // TOKENS, splits),  # the last one runs fastest
        grid_names=("rows", "span"),
        num_threads=3,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        kernel_name="easypipe_fused_stats",
        **({} if interpret is None else {"interpret": interpret}),
    )
    best_ST, terms_ST, target_ST, sum_ST = jnp.moveaxis(run(hidden, lm_head, labels.astype(jnp.int32)), 1, 0)
    lse_T = jax.nn.logsumexp(best_ST, axis=0, b=terms_ST)
    return LogitStats(lse_T, target_ST.sum(axis=0), sum_ST.sum(axis=0), best_ST.max(axis=0))


def _kernel(hidden_ref, head_ref, labels_ref, sums_ref, *, tiles: int, splits: int, layout: Layout, soft_cap: float | None) -> None:
    first_row, span = jax.lax.axis_index("rows") * TOKENS, jax.lax.axis_index("span")
    per_span = pl.cdiv(tiles, splits)
    first_tile = span * per_span
    span_tiles = jnp.clip(tiles - first_tile, 0, per_span)
    swizzle = plgpu.find_swizzle(DEPTH * 16)
    transforms = (plgpu.TilingTransform((8, swizzle // 2)), plgpu.SwizzleTransform(swizzle))
    across, wide = ((COLUMNS, DEPTH), lambda k: (0, k)) if layout == "vd" else ((DEPTH, COLUMNS), lambda k: (k, 0))
    across_transforms = transforms
    if layout == "dv":
        swizzle = plgpu.find_swizzle(COLUMNS * 16)
        across_transforms = (plgpu.TilingTransform((8, swizzle // 2)), plgpu.SwizzleTransform(swizzle))

    def products(body, around):
        return plgpu.emit_pipeline_warp_specialized(
            body,
            grid=(hidden_ref.shape[1] // DEPTH,),
            memory_registers=40,
            in_specs=[
                plgpu.BlockSpec((TOKENS, DEPTH), lambda k: (0, k), transforms=transforms, delay_release=1),
                plgpu.BlockSpec(across, wide, transforms=across_transforms, delay_release=1),
            ],
            wg_axis="warpgroup",
            num_compute_wgs=2,
            max_concurrent_steps=STAGES,
            compute_context=around,
        )

    def nothing(*_) -> None:  # what a pipeline computes does not change the buffers it needs
        return None

    @functools.partial(
        pl.run_scoped,
        buffers=products(nothing, nothing).get_allocations(hidden_ref, head_ref),
        running_ref=plgpu.SMEM((2, 4, ROWS), jnp.float32),
        label_ref=plgpu.SMEM((2, ROWS), jnp.int32),
        arrived=plgpu.Barrier(num_barriers=2),
        collective_axes="warpgroup",
    )
    def _(buffers, running_ref, label_ref, arrived) -> None:
        group = jax.lax.axis_index("warpgroup")
        rows = pl.ds(first_row + group * ROWS, ROWS)
        per_row = plgpu.Layout.WGMMA.reduce(1)

        @pl.when(group < 2)
        def _():
            plgpu.copy_gmem_to_smem(labels_ref.at[rows], label_ref.at[group], arrived.at[group])
            plgpu.barrier_wait(arrived.at[group])
            for number, start in enumerate((LOWEST, 0.0, 0.0, 0.0)):
                running_ref[group, number] = plgpu.layout_cast(jnp.full((ROWS,), start, jnp.float32), per_row)

        def tile(done, _):
            first_column = (first_tile + done) * COLUMNS

            def around(multiply):
                @functools.partial(pl.run_scoped, total_ref=plgpu.WGMMAAccumulatorRef((ROWS, COLUMNS), jnp.float32))
                def _(total_ref):
                    multiply(total_ref)
                    _fold(total_ref[...], first_column, running_ref, label_ref, group, per_row, soft_cap)

            def multiply(_, hidden_block, head_block, total_ref):
                columns = head_block.transpose((1, 0)) if layout == "vd" else head_block
                plgpu.wgmma(total_ref, hidden_block.at[pl.ds(group * ROWS, ROWS)], columns)
                plgpu.wgmma_wait(1)
                return total_ref

            span_of_head = pl.ds(first_column, COLUMNS)
            head = head_ref.at[span_of_head] if layout == "vd" else head_ref.at[:, span_of_head]
            products(multiply, around)(hidden_ref.at[pl.ds(first_row, TOKENS)], head, allocations=buffers)
            return _

        jax.lax.fori_loop(0, span_tiles, tile, 0)

        @pl.when(group < 2)
        def _():
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(running_ref.at[group], sums_ref.at[span, :, rows])
            plgpu.wait_smem_to_gmem(0)


def _fold(x, first_column, running_ref, label_ref, group, per_row, soft_cap: float | None) -> None:
    """A tile of logits into the running maximum, sum of exp, target and sum of its rows."""

    def across(values):
        return jax.lax.broadcast_in_dim(values, (ROWS, COLUMNS), [0])

    z = capped(x, soft_cap)
    best, terms, target, total = (plgpu.load(running_ref.at[group, number], layout=per_row) for number in range(4))  # pyright: ignore[reportCallIssue]
    label = plgpu.load(label_ref.at[group], layout=per_row)  # pyright: ignore[reportCallIssue]
    higher = jnp.maximum(best, jnp.max(z, axis=1))
    ids = plgpu.broadcasted_iota(jnp.int32, (ROWS, COLUMNS), 1, layout=plgpu.Layout.WGMMA) + first_column
    running_ref[group, 0] = higher
    running_ref[group, 1] = terms * jnp.exp(best - higher) + jnp.sum(jnp.exp(z - across(higher)), axis=1)
    running_ref[group, 2] = target + jnp.sum(jnp.where(ids == across(label), z, 0.0), axis=1)
    running_ref[group, 3] = total + jnp.sum(z, axis=1)
