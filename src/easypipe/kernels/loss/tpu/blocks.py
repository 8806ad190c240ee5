"""Plans the block sizes of the TPU kernels, by a table of devices: VMEM, cores, bytes moved.

FLOPs are 2·T·D·V forward and 6·T·D·V backward for any blocks, except for *apart* below.

Forward. B tokens stay in VMEM while the head streams past. The head is read ceil(T / B) times, the
hidden states once for each TensorCore.

Backward, resident. Hidden states and their gradient stay in VMEM; the head and its gradient pass
once. Nothing is moved twice.

Backward, streaming. C columns of the head and their gradient stay while the tokens stream past.
Hidden states are read, and their gradient is read and written. That is 10·T·D bytes (in bfloat16)
for each of ceil(V / C) blocks.

Backward, apart. Two passes, and 8·T·D·V FLOPs: C columns stay while hidden states are read ceil(V /
C) times; then B tokens stay while the head is read ceil(T / B) times. It is chosen if the sums of
*streaming* would take more than SUM_BYTES of HBM.

In both passes, the fewest bytes are moved when as much as fits stays in VMEM; the stream needs
space too, enough to keep the matrix unit busy.

T tokens · D width · V vocabulary
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike

from easypipe.core.errors import ConfigError, require

MIB = 1 << 20
LANES = 128  # the last dimension of a block is a multiple of this, or the whole array's
ROW_SIZES = (512, 256, 128)  # tokens of a tile, as available
FORWARD_COLUMNS = (512, 256, 128)
RESIDENT_COLUMNS = (1024, 512, 256)
# The share of the width in one streaming step: the first that divides it, otherwise all of it.
WIDTH_SHARES = (1024, 896, 1280, 768, 640, 512)
COLUMN_STEP = 256  # columns whose logits are in float32 at once in the backward pass
WIDTH_STEP = 256  # numbers of the width at once in its two products
# With this many columns, a streaming backward pass is bound by the matrix unit on every generation.
FEWEST_COLUMNS = 640
RESERVED = 2 * MIB  # VMEM that is left to the compiler
SLACK = MIB  # VMEM that a kernel may take beyond its accounting
# The most HBM for the gradient of the hidden states while it is summed, in addition to the result.
SUM_BYTES = 256 * MIB
STATE = 4  # bytes of a gradient that is being summed: float32, whole or in two halves
PER_TOKEN = 8 * 4  # bytes of the numbers that are passed in or returned for a token


class Device(NamedTuple):
    vmem: int  # bytes of one TensorCore
    # the TensorCores that one device (as jax counts devices) has, and one kernel is spread over
    cores: int


V5E, V5P, V6E, V7X = (
    Device(128 * MIB, 1),
    Device(64 * MIB, 2),
    Device(128 * MIB, 1),
    Device(64 * MIB, 1),
)
DEVICES = {  # by jax's device_kind
    "TPU v5 lite": V5E,
    "TPU v5e": V5E,
    "TPU v5": V5P,
    "TPU v5p": V5P,
    "TPU v6 lite": V6E,
    "TPU v6e": V6E,
    "TPU7x": V7X,
}
# The least of the generations above; it is also used if a program is lowered without naming its
# device.
UNKNOWN = Device(64 * MIB, 1)
TOO_SMALL = ("TPU v2", "TPU v3", "TPU v4")  # 16 MiB of VMEM


class Blocks(NamedTuple):
    """Sizes of tiles, in tokens, numbers of the width, and columns of the vocabulary.

    Attributes:
        parts: Shares of the vocabulary in the forward pass, one for each core.
        tokens: Tokens that stay in VMEM in the forward pass.
        rows: Tokens of these in one tile.
        columns: Columns of a tile in the forward pass.
        back_parts: Cores that the backward pass is spread over.
        back_rows: Tokens of a tile in the backward pass.
        back_columns: Columns that stay in the backward pass.
        back_width: Numbers of the width, of the gradient of the hidden states, in one streaming
            step.
        resident: 1 if hidden states and their gradient stay in VMEM in the backward pass.
        own_tokens: Tokens that stay in a pass for only the gradient of the hidden states; 0 if
            there is no such pass (then back_width is not 0).
        own_columns: Columns that stream in that pass.
    """

    parts: int
    tokens: int
    rows: int
    columns: int
    back_parts: int
    back_rows: int
    back_columns: int
    back_width: int
    resident: int
    own_tokens: int = 0
    own_columns: int = 0


class Sizes(NamedTuple):
    """The sizes of one problem.

    `item` and `out` are the bytes of a number of the inputs and of the gradients.
    """

    tokens: int
    width: int
    vocab: int
    item: int
    out: int


def device_of(kind: str) -> Device:
    return DEVICES.get(kind, UNKNOWN)


def sizes_of(
    tokens: int, width: int, vocab: int, dtype: DTypeLike, grad_dtype: DTypeLike | None = None
) -> Sizes:
    return Sizes(
        tokens, width, vocab, jnp.dtype(dtype).itemsize, jnp.dtype(grad_dtype or dtype).itemsize
    )


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def rounded(size: int, multiple: int = LANES) -> int:
    return cdiv(size, multiple) * multiple


@functools.lru_cache(maxsize=256)
def plan_blocks(device: Device, sizes: Sizes) -> Blocks:
    """Returns the sizes that move the fewest bytes among those that fit.

    Their tiles fill the matrix unit.

    Raises:
        ConfigError: Not even the smallest blocks fit.
    """
    forward = min(
        _forward_choices(device, sizes),
        key=lambda blocks: forward_bytes(blocks, sizes),
        default=None,
    )
    backward = _plan_backward(device, sizes)
    if forward is None or backward is None:
        raise ConfigError(
            at="pallas_tpu",
            problem=f"no tile of width {sizes.width} fits {device.vmem // MIB} MiB of VMEM",
            fix="Choose implementation 'chunked'.",
        )
    return Blocks(*forward[:4], *backward[4:])


def needs_own_pass(sizes: Sizes) -> bool:
    """Returns whether the low halves of the hidden states' gradient take more than SUM_BYTES.

    A float32 gradient does not have low halves.
    """
    return sizes.out < STATE and sizes.tokens * sizes.width * (STATE - sizes.out) > SUM_BYTES


def forward_vmem(blocks: Blocks, sizes: Sizes) -> int:
    """Returns the bytes of VMEM of the forward kernel."""
    width = rounded(sizes.width)
    stays = blocks.tokens * width * sizes.item
    streams = 2 * width * blocks.columns * sizes.item
    per_token = 2 * 2 * PER_TOKEN * blocks.tokens
    # logits, and columns of one number per token
    tile = 2 * blocks.rows * blocks.columns * 4 + 16 * blocks.rows * LANES * 4
    # float32 products split their operands
    exact = 7 * (blocks.rows + blocks.columns) * width if sizes.item == 4 else 0
    return stays + streams + per_token + tile + exact


def backward_vmem(blocks: Blocks, sizes: Sizes) -> int:
    """Returns the bytes of VMEM of the backward kernel, for the layout that needs more."""
    rows, columns, width = blocks.back_rows, blocks.back_columns, rounded(sizes.width)
    if blocks.resident:
        head = (2 * sizes.item + 4 + 2 * sizes.out) * columns * width
        hidden = (sizes.item + STATE) * sizes.tokens * width
    else:
        head = (sizes.item + 4 + sizes.out) * columns * width
        hidden = 2 * sizes.item * rows * width + 4 * STATE * rows * rounded(blocks.back_width)
    dz = 2 * sizes.item * rows * columns
    per_token = 2 * PER_TOKEN * rows + 4 * PER_TOKEN * columns
    logits = 6 * rows * COLUMN_STEP * 4
    products = 2 * max(rows, columns) * WIDTH_STEP * 4 + 4 * rows * WIDTH_STEP * 4
    exact = 3 * (rows + columns) * WIDTH_STEP * 4 + rows * width * 10 if sizes.item == 4 else 0
    operand = rows * width  # a copy of hidden states, while the logits' product runs
    if not blocks.own_tokens:
        return head + hidden + dz + per_token + logits + products + exact + operand
    stays = (
        sizes.item + 4 + sizes.out
    ) * blocks.own_tokens * width + 2 * PER_TOKEN * blocks.own_tokens
    streams = (2 * sizes.item * width + sizes.item * rows + 4 * PER_TOKEN) * blocks.own_columns
    return (
        max(head + hidden + dz + per_token, stays + streams) + logits + products + exact + operand
    )


def forward_bytes(blocks: Blocks, sizes: Sizes) -> int:
    """Returns the bytes that the forward kernel moves between HBM and VMEM."""
    passes = (
        cdiv(sizes.tokens, blocks.tokens)
        if cdiv(cdiv(sizes.vocab, blocks.columns), blocks.parts) > 1
        else 1
    )
    hidden = blocks.parts * sizes.tokens * sizes.width * sizes.item
    return (
        hidden
        + passes * sizes.width * sizes.vocab * sizes.item
        + blocks.parts * sizes.tokens * (4 + PER_TOKEN)
    )


def backward_bytes(blocks: Blocks, sizes: Sizes) -> int:
    """Returns the bytes that the backward kernels move between HBM and VMEM.

    They include the state's first zeros.
    """
    hidden, head = sizes.tokens * sizes.width, sizes.vocab * sizes.width
    turns = cdiv(sizes.vocab, blocks.back_columns)
    known = turns * sizes.tokens * PER_TOKEN
    if blocks.resident:
        return hidden * (sizes.item + sizes.out) + head * (sizes.item + sizes.out) + known
    if blocks.own_tokens:
        own = (
            hidden * (sizes.item + sizes.out)
            + cdiv(sizes.tokens, blocks.own_tokens) * head * sizes.item
            + sizes.tokens * PER_TOKEN
        )
        return own + turns * hidden * sizes.item + head * (sizes.item + sizes.out) + known
    between = 2 * 4 * turns * blocks.back_columns * sizes.width if blocks.back_parts > 1 else 0
    tokens = hidden * STATE + turns * hidden * (sizes.item + 2 * STATE)
    return tokens + head * (blocks.back_parts * sizes.item + sizes.out) + between + known


def block_candidates(device: Device, sizes: Sizes) -> list[Blocks]:
    """Returns the blocks worth measuring: the plan, and each half of it in other tiles that fit."""
    plan = plan_blocks(device, sizes)
    forward = [Blocks(*blocks[:4], *plan[4:]) for blocks in _forward_choices(device, sizes)]
    halves = _backward_choices(device, sizes, ROW_SIZES)
    backward = [Blocks(*plan[:4], *blocks[4:]) for blocks in halves]
    return list(dict.fromkeys([plan, *forward, *backward]))


def row_block(device: Device, vocab: int, dtype: DTypeLike) -> int:
    """Returns how many rows of logits with their whole vocabulary stay in VMEM.

    They are read and written while their neighbours are processed.

    Raises:
        ConfigError: Not even the least number of rows fits.
    """
    size = jnp.dtype(dtype).itemsize
    least = 32 // size
    rows = (device.vmem // 2) // (4 * size * rounded(vocab)) // least * least
    require(
        rows,
        "pallas_tpu",
        f"{least} rows of a vocabulary of {vocab} do not fit {device.vmem // MIB} MiB of VMEM",
        "Shard the vocabulary, or choose the rule 'strict'.",
    )
    return min(rows, 8 * least)


def even_split(size: int, most: int, parts: int) -> int | None:
    """Returns the largest block that cuts `size` into a multiple of `parts` blocks, or None.

    It is a multiple of 128 and at most `most`.
    """
    units = cdiv(size, LANES)
    for block in range(min(most // LANES, units), 0, -1):
        count = cdiv(units, block)
        if count % parts == 0:
            even = cdiv(units, count)
            return even * LANES if cdiv(units, even) == count else block * LANES
    return None


def fitted(blocks: Blocks, device: Device, sizes: Sizes) -> Blocks:
    """Returns the blocks of another shape in the same bucket, cut down to this one.

    A half that cannot be cut down is planned again.
    """
    plan = plan_blocks(device, sizes)
    forward = blocks if blocks.parts == plan.parts else plan
    rows, columns = blocks.back_rows, blocks.back_columns
    if bool(blocks.own_tokens) != bool(plan.own_tokens):
        return Blocks(*forward[:4], *plan[4:])
    if not (blocks.resident or blocks.own_tokens):
        rows, columns = (
            even_split(*one, blocks.back_parts)
            for one in ((sizes.tokens, rows), (sizes.vocab, columns))
        )
    backward = blocks._replace(back_rows=rows, back_columns=columns) if rows and columns else plan
    if blocks.resident:
        backward = backward._replace(back_width=sizes.width)
    mixed = Blocks(*forward[:4], *backward[4:])
    return (
        mixed if not any(refused_blocks(mixed, device, sizes)) else Blocks(*forward[:4], *plan[4:])
    )


def refused_blocks(blocks: Blocks, device: Device, sizes: Sizes) -> Iterator[str]:
    """Yields every reason why a problem of these sizes cannot run in these blocks."""
    parts = blocks.back_parts
    if blocks.tokens % blocks.rows:
        yield f"tokens {blocks.tokens} is not a multiple of rows {blocks.rows}"
    if any(
        size % LANES
        for size in (blocks.rows, blocks.columns, blocks.back_rows, blocks.back_columns)
    ):
        yield f"rows and columns must be multiples of {LANES}"
    if blocks.resident:
        if sizes.tokens % blocks.back_rows or parts > 1 or blocks.back_width != sizes.width:
            yield (
                f"resident needs back_parts 1, back_width {sizes.width} and back_rows that divide "
                f"{sizes.tokens} tokens"
            )
    elif blocks.own_tokens:
        if (
            blocks.back_width
            or blocks.own_tokens % blocks.back_rows
            or not blocks.own_columns
            or blocks.own_columns % LANES
        ):
            yield (
                f"own_tokens needs back_width 0, a multiple of back_rows {blocks.back_rows}, and "
                f"own_columns of {LANES}"
            )
    else:
        if sizes.width % blocks.back_width:
            yield f"back_width {blocks.back_width} does not divide a width of {sizes.width}"
        for what, size, block in (
            ("tokens", sizes.tokens, blocks.back_rows),
            ("columns", sizes.vocab, blocks.back_columns),
        ):
            if cdiv(size, block) % parts:
                yield (
                    f"{cdiv(size, block)} tiles of {block} {what} are not equal shares for {parts} "
                    "cores"
                )
    for name, need in (
        ("forward", forward_vmem(blocks, sizes)),
        ("backward", backward_vmem(blocks, sizes)),
    ):
        if need > device.vmem - RESERVED:
            yield (
                f"{name} needs {need / MIB:.1f} MiB of VMEM; there are {device.vmem // MIB}, and "
                f"the compiler takes {RESERVED // MIB}"
            )


def as_blocks(values: Mapping[str, int]) -> Blocks:
    """Returns the values as Blocks.

    Raises:
        ConfigError: The names are not those of Blocks.
    """
    require(
        set(Blocks._fields) - set(Blocks._field_defaults) <= set(values) <= set(Blocks._fields),
        "pallas_tpu.blocks",
        f"have {', '.join(values)}",
        f"Give each of {', '.join(Blocks._fields)}, and no other "
        f"({' and '.join(Blocks._field_defaults)} may be left out).",
    )
    return Blocks(**values)


def _forward_choices(device: Device, sizes: Sizes) -> Iterator[Blocks]:
    """Yields the largest tiles first, each with as many tokens as fit."""
    parts = device.cores if sizes.vocab > LANES else 1
    for rows in ROW_SIZES:
        if rows > LANES and rows // 2 >= sizes.tokens:
            continue
        for columns in FORWARD_COLUMNS:
            if columns > LANES and parts * columns > sizes.vocab:
                continue
            per_token = forward_vmem(Blocks(parts, 1, 0, 0, 0, 0, 0, 0, 0), sizes)
            room = (
                device.vmem
                - RESERVED
                - forward_vmem(Blocks(parts, 0, rows, columns, 0, 0, 0, 0, 0), sizes)
            )
            most = min(room // per_token // rows * rows, rounded(sizes.tokens, rows))
            if most > 0:
                even = cdiv(sizes.tokens, cdiv(sizes.tokens, most))
                yield Blocks(parts, rounded(even, rows), rows, columns, 0, 0, 0, 0, 0)


def _plan_backward(device: Device, sizes: Sizes) -> Blocks | None:
    """Returns the best blocks of the backward pass, or None if none fit."""
    for blocks in _resident_choices(device, sizes):
        return blocks
    found = list(_backward_choices(device, sizes, ROW_SIZES[1:]))
    if needs_own_pass(sizes):
        found = [blocks for blocks in found if blocks.own_columns >= COLUMN_STEP] or found
        return max(
            found,
            key=lambda blocks: (blocks.back_rows, -backward_bytes(blocks, sizes)),
            default=None,
        )
    # 256 rows suit the matrix unit best, unless 128 leave space for more columns when these are too
    # few
    for blocks in found:
        if blocks.back_columns >= min(FEWEST_COLUMNS, sizes.vocab):
            return blocks
    return max(found, key=lambda blocks: (blocks.back_parts, blocks.back_columns), default=None)


def _backward_choices(device: Device, sizes: Sizes, row_sizes: tuple[int, ...]) -> Iterator[Blocks]:
    yield from _resident_choices(device, sizes)
    choices = _apart_choices if needs_own_pass(sizes) else _streaming_choices
    yield from choices(device, sizes, row_sizes)


def _resident_choices(device: Device, sizes: Sizes) -> Iterator[Blocks]:
    if device.cores > 1:  # each core would need a whole gradient of the hidden states of its own
        return
    for rows, columns in itertools.product(ROW_SIZES, RESIDENT_COLUMNS):
        blocks = Blocks(0, 0, 0, 0, 1, rows, columns, sizes.width, 1)
        if sizes.tokens % rows == 0 and backward_vmem(blocks, sizes) <= device.vmem - RESERVED:
            yield blocks


def _streaming_choices(
    device: Device, sizes: Sizes, row_sizes: tuple[int, ...]
) -> Iterator[Blocks]:
    """Yields blocks for *streaming*, on every core if the tiles can be divided evenly."""
    share = next((part for part in WIDTH_SHARES if sizes.width % part == 0), sizes.width)
    for parts in sorted({device.cores, 1}, reverse=True):
        dealt = False
        for most_rows in row_sizes:
            rows = even_split(sizes.tokens, most_rows, parts)
            if rows is None:
                continue
            columns = _most_columns(device, sizes, rows, share)
            columns = even_split(sizes.vocab, columns, parts) if columns else None
            if columns is not None:
                dealt = True
                yield Blocks(0, 0, 0, 0, parts, rows, columns, share, 0)
        if dealt:
            return


def _apart_choices(device: Device, sizes: Sizes, row_sizes: tuple[int, ...]) -> Iterator[Blocks]:
    """Yields blocks for *apart*, in which as much as fits stays in VMEM.

    They use every core if the columns can be divided evenly.
    """
    for parts in sorted({device.cores, 1}, reverse=True):
        dealt = False
        for rows, own_columns in itertools.product(row_sizes, FORWARD_COLUMNS):
            most = _most_columns(device, sizes, rows, 0)
            columns = even_split(sizes.vocab, most, parts) if most else None
            if columns is None:
                continue
            head = Blocks(0, 0, 0, 0, parts, rows, columns, 0, 0, 1, own_columns)
            own_tokens = (
                min(device.vmem // (sizes.item * rounded(sizes.width)), rounded(sizes.tokens, rows))
                // rows
                * rows
            )
            while (
                own_tokens
                and backward_vmem(head._replace(own_tokens=own_tokens), sizes)
                > device.vmem - RESERVED
            ):
                own_tokens -= rows
            if own_tokens:
                dealt = True
                even = cdiv(sizes.tokens, cdiv(sizes.tokens, own_tokens))
                yield head._replace(own_tokens=rounded(even, rows))
        if dealt:
            return


def _most_columns(device: Device, sizes: Sizes, rows: int, share: int) -> int:
    """Returns how many columns of the head fit in VMEM together with their gradient.

    Tiles of `rows` tokens stream past them. 0 means less than one tile.
    """
    per_column = backward_vmem(Blocks(0, 0, 0, 0, 1, rows, 1 << 20, share, 0), sizes) >> 20
    columns = rounded(min(sizes.vocab, device.vmem // per_column))
    while (
        columns
        and backward_vmem(Blocks(0, 0, 0, 0, 1, rows, columns, share, 0), sizes)
        > device.vmem - RESERVED
    ):
        columns -= LANES
    return columns
