"""The table of block sizes, its command, and what they change."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from easypipe.cli.app import run
from easypipe.core.errors import ConfigError
from easypipe.kernels import choice, pallas_tpu, tune, tuning
from easypipe.kernels.api import fused_linear_cross_entropy
from easypipe.kernels.pallas_tpu_blocks import (
    DEVICES,
    LANES,
    RESERVED,
    V5P,
    V7X,
    Blocks,
    as_blocks,
    backward_vmem,
    block_candidates,
    cdiv,
    device_of,
    even_split,
    forward_vmem,
    plan_blocks,
    sizes_of,
)
from easypipe.kernels.stats import Inputs
from easypipe.kernels.tuning import Entry, blocks_for, bucket, extend_table, package_table, read_table

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
        return blocks_for(device, implementation, tokens, width, vocab, dtype, default=lambda: {"chunk_tokens": 512})["chunk_tokens"]

    assert [found(tokens) for tokens in (32, 33, 64, 65)] == [512, 8, 8, 512]
    assert found(64, width=17) == found(64, vocab=64) == found(64, dtype="bfloat16") == found(64, device="TPU v5") == 512
    assert found(64, implementation="pallas_tpu") == 512


def test_a_table_is_extended_not_replaced(user_table):
    other = Entry(device="gpu", implementation="x", tokens=1, width=1, vocab=1, dtype="float32", blocks={"n": 1}, source="model")
    extend_table(user_table, [CHUNK])
    assert extend_table(user_table, [other]) == [CHUNK, other]
    newer = Entry(**{**CHUNK.__dict__, "blocks": {"chunk_tokens": 16}})
    extend_table(user_table, [newer])
    assert read_table(user_table) == [newer, other]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no JSON"),
        ("{}", "is no list of entries"),
        ('[{"device": "cpu"}]', "entry 0: .*missing"),
        (json.dumps([CHUNK.__dict__, {**CHUNK.__dict__, "tokens": 63}]), "entry 1: tokens, width and vocab must be powers of two"),
        (json.dumps([{**CHUNK.__dict__, "source": "guessed"}]), "entry 0: source is 'guessed'"),
        (json.dumps([{**CHUNK.__dict__, "blocks": {"chunk_tokens": -1}}]), "entry 0: blocks are no sizes"),
        (json.dumps([{**CHUNK.__dict__, "colour": 1}]), "entry 0: .*colour"),
    ],
)
def test_what_is_no_table_is_refused(user_table, text, message):
    user_table.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        blocks_for("cpu", "chunked", 64, 16, 100, "float32", default=dict)
    assert str(user_table) in str(caught.value)


def test_the_package_table_fits_its_devices():
    for entry in package_table():
        assert entry.source in ("measured", "model")
        assert (entry.ms is not None) == (entry.source == "measured")
        if entry.implementation == "pallas_tpu":
            blocks, sizes = as_blocks(entry.blocks), sizes_of(entry.tokens, entry.width, entry.vocab, entry.dtype)
            assert entry.device in DEVICES
            assert forward_vmem(blocks, sizes) <= device_of(entry.device).vmem - RESERVED
            assert backward_vmem(blocks, sizes) <= device_of(entry.device).vmem - RESERVED


def test_other_names_of_blocks_are_refused():
    with pytest.raises(ConfigError, match="have rows"):
        as_blocks({"rows": 1})


@pytest.mark.parametrize("vocab", [256, 257, 32_000, 32_768, 50_257, 128_256, 151_936, 152_064, 201_088, 248_320, 262_144])
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


def test_candidates_all_fit_and_begin_with_the_plan():
    sizes = sizes_of(8192, 2048, 32_768, "bfloat16")
    for device in set(DEVICES.values()):
        found = block_candidates(device, sizes)
        assert found[0] == plan_blocks(device, sizes)
        assert len(found) > 3
        assert all(max(forward_vmem(one, sizes), backward_vmem(one, sizes)) <= device.vmem - RESERVED for one in found)


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
                source="model",
            )
        ],
    )
    program = jax.make_jaxpr(lambda: pallas_tpu.stats(Inputs(hidden, head, None, jnp.zeros(300, jnp.int32)), layout="dv", soft_cap=None))()
    assert "grid=(1, 3, 4, 1)" in str(program)
    user_table.unlink()
    program = jax.make_jaxpr(lambda: pallas_tpu.stats(Inputs(hidden, head, None, jnp.zeros(300, jnp.int32)), layout="dv", soft_cap=None))()
    assert "grid=(1, 3, 4, 1)" not in str(program)


@pytest.mark.parametrize("rule", ["strict", "fast"])
def test_rows_of_the_table_reach_the_row_kernels(user_table, rule):
    blocks = {"row_columns": 64, "row_warps": 4}
    shape: Any = {"tokens": 512, "width": 128, "vocab": 512, "dtype": "float32"}
    hidden, head, labels = jnp.zeros((300, 128), jnp.float32), jnp.zeros((128, 504), jnp.float32), jnp.zeros(300, jnp.int32)

    def num_warps() -> set[str]:
        loss = functools.partial(fused_linear_cross_entropy, layout="dv", implementation="pallas_gpu", rule=rule)
        return set(re.findall(r"num_warps=(\d+)", str(jax.make_jaxpr(jax.grad(loss))(hidden, head, labels))))

    assert num_warps() == {"32"}
    extend_table(user_table, [Entry(device="cpu", implementation="pallas_gpu", **shape, blocks=blocks, source="model")])
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


def test_tune_writes_where_it_is_told(tmp_path, user_table):
    path = tmp_path / "other.json"
    assert run(["kernels", "tune", "--tokens", "8", "--width", "8", "--vocab", "50", "--repeats", "1", "--table", str(path)]) == 0
    assert len(read_table(path)) == 1
    assert not user_table.exists()


def test_tune_says_what_does_not_run(monkeypatch):
    def broken(*_):
        raise ValueError("too large\nfor this")

    monkeypatch.setattr(tune, "_step", broken)
    trials = []
    with pytest.raises(ConfigError, match="chunked runs with no blocks at all: too large"):
        tune.tune(8, 8, 8, "float32", on_trial=trials.append)
    assert [trial.ms for trial in trials] == [None]
    assert trials[0].failure == "too large"


@pytest.mark.parametrize(
    ("at", "arguments"), [("tokens", (0, 8, 8, "float32")), ("vocab", (8, 8, 0, "float32")), ("dtype", (8, 8, 8, "float16"))]
)
def test_tune_refuses(at, arguments):
    with pytest.raises(ConfigError, match=at):
        tune.tune(*arguments)
