"""Bytes and FLOPs of the TPU kernels at the shapes of the issue: what is counted is what is stated,
and near the least.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import kernel_costs
from easypipe.kernels.loss.stats import Cotangents, Inputs, Objective
from easypipe.kernels.loss.tpu import backward as pallas_tpu_backward
from easypipe.kernels.loss.tpu import blocks as tpu_blocks
from easypipe.kernels.loss.tpu import rows as pallas_tpu_rows
from easypipe.kernels.loss.tpu.blocks import (
    LANES,
    ROW_SIZES,
    V5E,
    V5P,
    V6E,
    V7X,
    Device,
    Sizes,
    _backward_choices,
    _forward_choices,
    backward_bytes,
    forward_bytes,
    needs_own_pass,
    plan_blocks,
    sizes_of,
)
from easypipe.kernels.loss.tpu.kernel import forward_stats
from easypipe.kernels.tuning import table as tuning

DEVICES = {"v5e": V5E, "v5p": V5P, "v6e": V6E, "tpu7x": V7X}
# the last: a quarter of a vocabulary
SHAPES = [(8192, 2048, 32_768), (32_768, 4096, 128_256), (32_768, 4096, 32_064)]
# beyond what one backward pass may hold: each gradient has its own
SHAPES += [(131_072, 4096, 128_256), (65_536, 8192, 128_256)]


def least_bytes(device: Device, sizes: Sizes) -> tuple[int, int]:
    """(forward, backward): what these schedules would move at least, if what streams took no more
    of VMEM than one tile of 128.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in ("ROW_SIZES", "FORWARD_COLUMNS"):
            patch.setattr(tpu_blocks, name, (LANES,))
        forward = min(forward_bytes(one, sizes) for one in _forward_choices(device, sizes))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tpu_blocks, "WIDTH_SHARES", (LANES,))
        patch.setattr(tpu_blocks, "RESIDENT_COLUMNS", (1024, 512, 256, LANES))
        backward = list(_backward_choices(device, sizes, ROW_SIZES))
    return forward, min(backward_bytes(one, sizes) for one in backward)


def shape(sizes: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype))


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
@pytest.mark.parametrize(("tokens", "width", "vocab"), SHAPES)
def test_bytes_near_the_least_and_no_flops_too_many(device, tokens, width, vocab):
    sizes = sizes_of(tokens, width, vocab, "bfloat16")
    blocks, (least_forward, least_backward) = plan_blocks(device, sizes), least_bytes(device, sizes)
    assert forward_bytes(blocks, sizes) <= 1.3 * least_forward
    assert backward_bytes(blocks, sizes) <= 1.3 * least_backward
    hidden, head, labels = (
        shape((tokens, width), "bfloat16"),
        shape((width, vocab), "bfloat16"),
        shape((tokens,), "int32"),
    )
    scalars = shape((tokens,), "float32")
    counted = kernel_costs.cost(
        lambda h, w, t: forward_stats(Inputs(h, w, None, t), "dv", None, blocks, False),
        hidden,
        head,
        labels,
    )
    assert counted.bytes == pytest.approx(forward_bytes(blocks, sizes), rel=0.01)
    assert counted.flops <= 1.05 * 2 * tokens * width * vocab
    counted = kernel_costs.cost(
        lambda h, w, t, s: pallas_tpu_backward.gradients(
            Inputs(h, w, None, t), s, Cotangents(s, s, s), "dv", None, None, blocks, False
        ),
        *(hidden, head, labels, scalars),
    )
    assert counted.bytes == pytest.approx(backward_bytes(blocks, sizes), rel=0.01)
    products = 8 if needs_own_pass(sizes) else 6
    assert counted.flops <= 1.05 * products * tokens * width * vocab


@pytest.mark.parametrize("device", ["TPU v5e", "TPU v5p"])
def test_rows_are_read_once_and_written_once(device, monkeypatch):
    monkeypatch.setattr(tuning, "device_kind", lambda: device)
    logits, labels, weights = (
        shape((4096, 32_768), "bfloat16"),
        shape((4096,), "int32"),
        shape((4096,), "float32"),
    )
    objective = Objective(1e-4, 0.1, 32_768)
    counted = kernel_costs.cost(
        lambda x, t, w: pallas_tpu_rows.row_step(x, t, w, objective=objective, soft_cap=None),
        logits,
        labels,
        weights,
    )
    assert counted.flops == 0
    assert counted.bytes == pytest.approx(2 * 4096 * 32_768 * 2, rel=0.01)


def test_no_block_begins_outside_of_its_array(monkeypatch):
    tokens, width, vocab = 2048, 1024, 5000
    sizes = sizes_of(tokens, width, vocab, "bfloat16")
    hidden, head = shape((tokens, width), "bfloat16"), shape((width, vocab), "bfloat16")
    labels, scalars = shape((tokens,), "int32"), shape((tokens,), "float32")
    planned = plan_blocks(V5E, sizes)
    own = planned._replace(resident=0, back_width=0, own_tokens=512, own_columns=256)
    streams = planned._replace(resident=0, back_width=512, own_tokens=0, own_columns=0)
    for blocks in (planned, own, streams):
        assert not kernel_costs.beyond(
            lambda h, w, t, blocks=blocks: forward_stats(
                Inputs(h, w, None, t), "dv", None, blocks, False
            ),
            *(hidden, head, labels),
        )
        assert not kernel_costs.beyond(
            lambda h, w, t, s, blocks=blocks: pallas_tpu_backward.gradients(
                Inputs(h, w, None, t), s, Cotangents(s, s, s), "dv", None, None, blocks, False
            ),
            *(hidden, head, labels, scalars),
        )
    monkeypatch.setattr(tuning, "device_kind", lambda: "TPU v5e")
    assert not kernel_costs.beyond(
        lambda x, t, w: pallas_tpu_rows.row_step(
            x, t, w, objective=Objective(1e-4, 0.1, 4992), soft_cap=None
        ),
        *(shape((tokens, 4992), "bfloat16"), labels, scalars),
    )


def test_the_count_sees_what_is_moved_again():
    """A head that is read for every tile of tokens, instead of once for all that stay."""
    sizes = sizes_of(8192, 2048, 32_768, "bfloat16")
    small = plan_blocks(V5E, sizes)._replace(tokens=1024)
    arguments = (
        shape((8192, 2048), "bfloat16"),
        shape((2048, 32_768), "bfloat16"),
        shape((8192,), "int32"),
    )
    counted = kernel_costs.cost(
        lambda h, w, t: forward_stats(Inputs(h, w, None, t), "dv", None, small, False),
        *arguments,
    )
    assert counted.bytes > 8 * 2048 * 32_768 * 2
    assert counted.bytes == pytest.approx(forward_bytes(small, sizes), rel=0.01)
