"""The table of block sizes, its command, and what they change."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import time
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from easypipe.cli.app import run
from easypipe.core.errors import ConfigError
from easypipe.kernels.loss import choice
from easypipe.kernels.loss.api import fused_linear_cross_entropy
from easypipe.kernels.loss.stats import Inputs
from easypipe.kernels.loss.tpu import kernel as pallas_tpu
from easypipe.kernels.loss.tpu.blocks import (
    DEVICES,
    LANES,
    RESERVED,
    V5E,
    V5P,
    V7X,
    Blocks,
    as_blocks,
    backward_vmem,
    block_candidates,
    cdiv,
    device_of,
    even_split,
    fitted,
    forward_vmem,
    plan_blocks,
    sizes_of,
)
from easypipe.kernels.tuning import measure as tune
from easypipe.kernels.tuning import table as tuning
from easypipe.kernels.tuning.table import (
    Entry,
    blocks_for,
    bucket,
    extend_table,
    read_table,
)

CHUNK = Entry(
    device="cpu",
    implementation="chunked",
    tokens=64,
    width=16,
    vocab=128,
    dtype="float32",
    blocks={"chunk_tokens": 8},
    source="measured",
    ms=1.5,
)


@pytest.fixture
def user_table(tmp_path, monkeypatch):
    path = tmp_path / "kernels.json"
    monkeypatch.setattr(tuning, "user_table", lambda: path)
    return path


def test_an_entry_serves_its_bucket(user_table):
    assert [bucket(size) for size in (1, 2, 3, 4, 5, 128_256)] == [1, 2, 4, 4, 8, 131_072]
    extend_table(user_table, [CHUNK])

    def found(tokens, width=16, vocab=100, dtype="float32", device="cpu", implementation="chunked"):
        return blocks_for(
            device,
            implementation,
            tokens,
            width,
            vocab,
            dtype,
            default=lambda: {"chunk_tokens": 512},
        )["chunk_tokens"]

    assert [found(tokens) for tokens in (32, 33, 64, 65)] == [512, 8, 8, 512]
    assert (
        found(64, width=17)
        == found(64, vocab=64)
        == found(64, dtype="bfloat16")
        == found(64, device="TPU v5")
        == 512
    )
    assert found(64, implementation="pallas_tpu") == 512
    # written again meanwhile, by this process or another
    extend_table(user_table, [dataclasses.replace(CHUNK, blocks={"chunk_tokens": 16})])
    os.utime(user_table, ns=(0, 1))
    assert found(64) == 16
    user_table.unlink()
    assert found(64) == 512


def test_a_table_is_extended_not_replaced(user_table):
    shape: Any = {"tokens": 1, "width": 1, "vocab": 1, "dtype": "float32"}
    other = Entry(
        device="gpu", implementation="x", **shape, blocks={"n": 1}, source="measured", ms=2.5
    )
    extend_table(user_table, [CHUNK])
    assert extend_table(user_table, [other]) == [CHUNK, other]
    newer = Entry(**{**CHUNK.__dict__, "blocks": {"chunk_tokens": 16}})
    extend_table(user_table, [newer])
    assert read_table(user_table) == [newer, other]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("{}", "is not a list of entries"),
        ('[{"device": "cpu"}]', "entry 0: .*missing"),
        (
            json.dumps([CHUNK.__dict__, {**CHUNK.__dict__, "tokens": 63}]),
            "entry 1: tokens, width and vocab must be powers of two",
        ),
        (json.dumps([{**CHUNK.__dict__, "source": "guessed"}]), "entry 0: source is 'guessed'"),
        (
            json.dumps([{**CHUNK.__dict__, "source": "model"}]),
            "entry 0: .*a table holds what was measured",
        ),
        (
            json.dumps([{**CHUNK.__dict__, "ms": None}]),
            "entry 0: .*ms None: a table holds what was measured",
        ),
        (
            json.dumps([{**CHUNK.__dict__, "blocks": {"chunk_tokens": -1}}]),
            "entry 0: blocks are not sizes",
        ),
        (json.dumps([{**CHUNK.__dict__, "colour": 1}]), "entry 0: .*colour"),
    ],
)
def test_what_is_no_table_is_refused(user_table, text, message):
    user_table.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        blocks_for("cpu", "chunked", 64, 16, 100, "float32", default=dict)
    assert str(user_table) in str(caught.value)


SHAPES = [(8192, 2048, 8192), (8192, 2048, 32_768), (32_768, 4096, 32_768), (32_768, 4096, 131_072)]
SMALL_V5P, LARGE_V5P = (
    (2, 8192, 512, 512, 2, 256, 2816, 1024, 0),
    (2, 6656, 512, 256, 2, 256, 1408, 1024, 0),
)
SMALL_V5E, LARGE_V5E = (
    (1, 8192, 512, 512, 1, 512, 512, 2048, 1),
    (1, 11_264, 512, 512, 1, 256, 3328, 1024, 0),
)
SMALL_V7X, LARGE_V7X = (
    (1, 8192, 512, 512, 1, 256, 2816, 1024, 0),
    (1, 6656, 512, 256, 1, 256, 1408, 1024, 0),
)
PLANNED = {
    "TPU v5": [(2, 8192, 512, 512, 2, 256, 2048, 1024, 0), SMALL_V5P, LARGE_V5P, LARGE_V5P],
    "TPU v5 lite": [SMALL_V5E, SMALL_V5E, LARGE_V5E, LARGE_V5E],
    "TPU v6 lite": [SMALL_V5E, SMALL_V5E, LARGE_V5E, LARGE_V5E],
    "TPU7x": [SMALL_V7X, SMALL_V7X, LARGE_V7X, LARGE_V7X],
}


@pytest.mark.parametrize("device", PLANNED)
def test_the_accounting_plans_blocks_that_fit(device):
    """These sizes stood in a table once, untimed; the accounting must go on choosing
    them until a device says better.
    """
    for shape, planned in zip(SHAPES, PLANNED[device], strict=True):
        sizes = sizes_of(*shape, "bfloat16")
        blocks = plan_blocks(device_of(device), sizes)
        assert blocks[:9] == planned
        assert (
            max(forward_vmem(blocks, sizes), backward_vmem(blocks, sizes))
            <= device_of(device).vmem - RESERVED
        )


@pytest.mark.parametrize(
    ("ways", "dtype", "expected"),
    [
        ({"resident": 1}, "bfloat16", 25_509_888),
        ({"resident": 1}, "float32", 37_306_368),
        ({"back_width": 1024}, "bfloat16", 15_024_128),
        ({"back_width": 1024}, "float32", 22_626_304),
        ({"own_tokens": 4096, "own_columns": 256}, "bfloat16", 47_349_760),
        ({"own_tokens": 4096, "own_columns": 256}, "float32", 61_898_752),
    ],
)
def test_the_accounting_counts_as_it_did(ways, dtype, expected):
    """Blocks were tried on it: a term that changes has a reason, and these numbers follow."""
    blocks = Blocks(1, 1024, 256, 512, 1, 256, 512, 0, 0)._replace(**ways)
    sizes = sizes_of(2048, 1000, 4096, dtype, "float32")
    assert backward_vmem(blocks, sizes) == expected
    assert forward_vmem(blocks, sizes) == {"bfloat16": 7_471_104, "float32": 17_170_432}[dtype]


def test_a_size_that_an_implementation_does_not_know_is_refused_by_name(user_table):
    """Tables of an earlier easypipe may name the spans of a forward kernel that is gone."""
    entry = Entry(
        **{
            **CHUNK.__dict__,
            "implementation": "pallas_gpu",
            "blocks": {"slab_mib": 128, "fused_splits": 33},
        }
    )
    extend_table(user_table, [entry])
    hidden, head, labels = jnp.zeros((64, 16)), jnp.zeros((16, 128)), jnp.zeros(64, jnp.int32)
    loss = functools.partial(fused_linear_cross_entropy, implementation="pallas_gpu", rule="strict")
    with pytest.raises(
        ConfigError,
        match=r"no block size is named 'fused_splits' \(have: slab_mib, .*Take it out of the entry",
    ) as caught:
        jax.eval_shape(loss, hidden, head, labels)
    assert str(user_table) in str(caught.value)
    extend_table(user_table, [Entry(**{**entry.__dict__, "blocks": {"slab_mib": 128}})])
    jax.eval_shape(loss, hidden, head, labels)


def test_other_names_of_blocks_are_refused():
    with pytest.raises(ConfigError, match="have rows"):
        as_blocks({"rows": 1})


@pytest.mark.parametrize(
    "vocab",
    [256, 257, 32_000, 32_768, 50_257, 128_256, 151_936, 152_064, 201_088, 248_320, 262_144],
)
@pytest.mark.parametrize("width", [576, 2048, 4096, 8192])
def test_both_cores_of_v5p_have_an_even_share_of_any_vocabulary(width, vocab):
    for tokens in (256, 1000, 8192, 32_768):
        blocks = plan_blocks(V5P, sizes_of(tokens, width, vocab, "bfloat16"))
        columns = cdiv(vocab, blocks.columns)
        assert blocks.parts == blocks.back_parts == 2
        assert columns >= 2  # so no core's share is empty, and they differ by less than one block
        assert cdiv(vocab, blocks.back_columns) % 2 == 0
        assert cdiv(tokens, blocks.back_rows) % 2 == 0


def test_even_split():
    for size in range(1, 3000, 37):
        for most in (128, 640, 1024):
            for parts in (1, 2):
                block = even_split(size, most, parts)
                if block is None:
                    assert parts == 2
                else:
                    assert block % LANES == 0
                    assert block <= max(most, LANES)
                    assert cdiv(size, block) % parts == 0


def test_unknown_devices_get_the_smallest_memory():
    assert device_of("TPU v99") == V7X
    sizes = sizes_of(4096, 4096, 128_256, "bfloat16")
    assert forward_vmem(plan_blocks(device_of("TPU v99"), sizes), sizes) <= V7X.vmem


@pytest.mark.parametrize(
    "sizes",
    [sizes_of(8192, 2048, 32_768, "bfloat16"), sizes_of(1024, 8192, 32_768, "float32")],
)
def test_candidates_all_fit_and_begin_with_the_plan(sizes):
    for device in set(DEVICES.values()):
        found = block_candidates(device, sizes)
        assert found[0] == plan_blocks(device, sizes)
        assert len(found) > 3
        assert all(
            max(forward_vmem(one, sizes), backward_vmem(one, sizes)) <= device.vmem - RESERVED
            for one in found
        )


def test_blocks_of_one_backward_pass_give_way_where_the_plan_has_two():
    few, many = (sizes_of(tokens, 3072, 32_768, "bfloat16") for tokens in (34_000, 50_000))
    plans = {sizes: plan_blocks(V5E, sizes) for sizes in (few, many)}
    assert not plans[few].own_tokens
    assert plans[many].own_tokens
    assert bucket(few.tokens) == bucket(many.tokens)
    for one, other in ((few, many), (many, few)):
        assert fitted(plans[one], V5E, other)[4:] == plans[other][4:]


def test_blocks_of_the_table_reach_the_kernel(user_table, monkeypatch):
    hidden, head = jnp.zeros((300, 128), jnp.float32), jnp.zeros((128, 500), jnp.float32)
    blocks = Blocks(1, 128, 128, 128, 1, 128, 128, 128, 0)
    extend_table(
        user_table,
        [
            Entry(
                device="cpu",
                implementation="pallas_tpu",
                tokens=512,
                width=128,
                vocab=512,
                dtype="float32",
                blocks=blocks._asdict(),
                source="measured",
                ms=1.0,
            )
        ],
    )
    program = jax.make_jaxpr(
        lambda: pallas_tpu.stats(
            Inputs(hidden, head, None, jnp.zeros(300, jnp.int32)), layout="dv", soft_cap=None
        )
    )()
    assert "grid=(1, 3, 4, 1)" in str(program)
    user_table.unlink()
    program = jax.make_jaxpr(
        lambda: pallas_tpu.stats(
            Inputs(hidden, head, None, jnp.zeros(300, jnp.int32)), layout="dv", soft_cap=None
        )
    )()
    assert "grid=(1, 3, 4, 1)" not in str(program)


@pytest.mark.parametrize("rule", ["strict", "fast"])
def test_rows_of_the_table_reach_the_row_kernels(user_table, rule):
    blocks = {"row_columns": 64, "row_warps": 4}
    shape: Any = {"tokens": 512, "width": 128, "vocab": 512, "dtype": "float32"}
    hidden, head, labels = (
        jnp.zeros((300, 128), jnp.float32),
        jnp.zeros((128, 504), jnp.float32),
        jnp.zeros(300, jnp.int32),
    )

    def num_warps() -> set[str]:
        loss = functools.partial(
            fused_linear_cross_entropy, layout="dv", implementation="pallas_gpu", rule=rule
        )
        return set(
            re.findall(
                r"num_warps=(\d+)", str(jax.make_jaxpr(jax.grad(loss))(hidden, head, labels))
            )
        )

    assert num_warps() == {"8"}
    extend_table(
        user_table,
        [
            Entry(
                device="cpu",
                implementation="pallas_gpu",
                **shape,
                blocks=blocks,
                source="measured",
                ms=1.0,
            )
        ],
    )
    assert num_warps() == {"4"}


def test_tune_measures_and_its_result_is_used(user_table, capsys):
    sizes = ["--tokens", "200", "--width", "8", "--vocab", "50", "--repeats", "1"]
    assert run(["kernels", "tune", *sizes]) == 0
    told = capsys.readouterr().out
    for chunk in (128, 256):
        assert f"chunk_tokens {chunk}: " in told
    (entry,) = read_table(user_table)
    assert (entry.device, entry.implementation, entry.source) == ("cpu", "chunked", "measured")
    assert (entry.tokens, entry.width, entry.vocab) == (256, 8, 64)
    assert entry.ms > 0
    assert f"chunk_tokens {entry.blocks['chunk_tokens']} ({entry.ms:,.2f} ms)" in told
    plan = choice.Plan((("cpu", "chunked"),), "dv", None)
    hidden, head = jnp.zeros((200, 8)), jnp.zeros((8, 50))
    assert choice.chunk_tokens(plan, choice.ANYWHERE, hidden, head) == entry.blocks["chunk_tokens"]
    extend_table(user_table, [Entry(**{**entry.__dict__, "blocks": {"chunk_tokens": 24}})])
    assert choice.chunk_tokens(plan, choice.ANYWHERE, hidden, head) == 24
    assert choice.chunk_tokens(plan, "tpu", hidden, head) == choice.CHUNK_TOKENS["tpu"]
    assert run(["kernels", "table"]) == 0
    assert "chunk_tokens=24" in capsys.readouterr().out


def test_tune_tries_the_kernels_of_the_device(monkeypatch):
    """jax calls a CUDA device "gpu"."""
    tried = set()

    def one(name, blocks, *_):
        tried.add((name, *sorted(blocks)))
        return tune.Trial(blocks, 1.0)

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(tune, "_tried", one)
    entry = tune.tune(4096, 1024, 32_768, "bfloat16")
    assert entry.implementation == "pallas_gpu"
    assert {name for name, *_ in tried} == {"pallas_gpu"}
    assert "slab_mib" in entry.blocks


def test_tune_times_nothing_that_is_wrong(monkeypatch):
    """A block that is left out, or read twice, must not win by it."""
    right = tune._step

    def step(name, blocks):
        run = right(name, blocks)
        if blocks["chunk_tokens"] == 128:
            return run

        def half(hidden, lm_head, labels):
            loss, d_hidden, d_head = run(hidden, lm_head, labels)
            return loss, d_hidden, d_head.at[:, : d_head.shape[1] // 8].set(0)

        return jax.jit(half)

    trials = []
    monkeypatch.setattr(tune, "_step", step)
    for dtype in ("float32", "bfloat16"):
        assert tune.tune(300, 32, 200, dtype, repeats=1, on_trial=trials.append).blocks == {
            "chunk_tokens": 128
        }
    assert [trial.ms is None for trial in trials] == [False, True, True] * 2
    assert trials[1].failure.startswith("wrong values: d_lm_head differs from the reference by ")


def test_the_least_of_the_times_counts():
    pauses = iter([0.0, 0.05, 0.0, 0.05])  # the first call compiles
    assert tune._milliseconds(lambda: time.sleep(next(pauses)), (), 3) < 25


def test_what_is_no_number_is_wrong():
    wanted = (jnp.ones(()), jnp.ones((2, 2)), jnp.ones((2, 2)))
    found = (*wanted[:2], wanted[2].at[0, 0].set(jnp.nan))
    assert str(tune._problem(found, wanted, "float32")).startswith("wrong values: d_lm_head")
    assert tune._problem(wanted, wanted, "float32") is None


def test_the_kernels_pass_the_check_that_tune_makes(monkeypatch):
    """Interpreted: their values are within what counts as rounding."""
    interpreted = (
        functools.partial(pallas_tpu.stats, interpret=True),
        functools.partial(pallas_tpu.gradients, interpret=True),
    )
    monkeypatch.setattr(pallas_tpu, "stats", interpreted[0])
    monkeypatch.setattr(pallas_tpu, "gradients", interpreted[1])
    arguments = tune._arguments(200, 128, 300, "bfloat16")
    blocks = plan_blocks(V5P, sizes_of(200, 128, 300, "bfloat16"))._asdict()
    found = tune._step("pallas_tpu", blocks)(*arguments)
    assert tune._problem(found, tune._wanted(*arguments), "bfloat16") is None


def test_tune_writes_where_it_is_told(tmp_path, user_table):
    path = tmp_path / "other.json"
    assert (
        run(
            [
                "kernels",
                "tune",
                "--tokens",
                "8",
                "--width",
                "8",
                "--vocab",
                "50",
                "--repeats",
                "1",
                "--table",
                str(path),
            ]
        )
        == 0
    )
    assert len(read_table(path)) == 1
    assert not user_table.exists()


def test_tune_says_what_does_not_run(monkeypatch):
    def broken(*_):
        raise ValueError("too large\nfor this")

    monkeypatch.setattr(tune, "_step", broken)
    trials = []
    with pytest.raises(ConfigError, match="chunked does not run with any blocks: too large"):
        tune.tune(8, 8, 8, "float32", on_trial=trials.append)
    assert [trial.ms for trial in trials] == [None]
    assert trials[0].failure == "too large"


@pytest.mark.parametrize(
    ("at", "arguments"),
    [
        ("tokens", (0, 8, 8, "float32")),
        ("vocab", (8, 8, 0, "float32")),
        ("dtype", (8, 8, 8, "float16")),
    ],
)
def test_tune_refuses(at, arguments):
    with pytest.raises(ConfigError, match=at):
        tune.tune(*arguments)
