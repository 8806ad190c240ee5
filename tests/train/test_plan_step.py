"""A step compiled for devices that are not here: what is told of it, and what is refused."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import jax
import pytest
from typer.testing import CliRunner

from aot import tpu_mesh
from easypipe import run as runs
from easypipe import train_bpe
from easypipe.cli.app import app
from easypipe.core.config import from_dict
from easypipe.core.errors import ConfigError, PlacementError
from easypipe.run import RunConfig
from easypipe.train.config import TrainingConfig
from easypipe.train.metrics.devices import known_device
from easypipe.train.model.config import ClassifierConfig
from easypipe.train.model.decoder import ModelConfig
from easypipe.train.model.flops import flops_per_step, palm_flops_per_step
from easypipe.train.plan.aot import plan_step, roofline
from easypipe.train.plan.hlo import read
from easypipe.train.plan.topology import Topology, topology
from pipelines import texts

SHAPE = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_layers": 3,
    "num_heads": 2,
    "num_kv_heads": 2,
}
MODEL = ModelConfig(**SHAPE, dtype="bfloat16", remat="full")
CONFIG = f"""
data: {{datasets: [{{data_files: nowhere.jsonl}}], seed: 1, pack: {{seq_length: 512}}, load: {{batch_size: 8}}}}
model: {json.dumps({**SHAPE, "dtype": "bfloat16", "remat": "full"})}
train: {{output_dir: out, mesh: {{data: 2, fsdp: 2}}}}
"""


@pytest.fixture(scope="module")
def tpu():
    tpu_mesh("v5e", data=1)  # skips where no TPU compiler is


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("plan") / "run.yaml"
    path.write_text(CONFIG)
    return path


@pytest.fixture(scope="module")
def plan(tpu, config):
    return runs.plan_on(RunConfig.load(config), "v5e:2x2")


def test_memory_is_told_by_part(plan):
    memory, parameters = plan.memory, plan.parameters
    assert parameters == 2 * 512 * 256 + 3 * (4 * 256 * 256 + 3 * 256 * 512 + 2 * 256) + 256
    # in two parts; norms are whole on every device
    assert abs(memory.parameters - 4 * parameters / 2) < 4 * 4096
    assert abs(memory.optimizer - 2 * memory.parameters) < 1024  # two moments each, and counters
    assert memory.batch == 4 * 4 * 512 * 8 // 4  # four columns of int32 over four devices
    parts = (
        memory.parameters,
        memory.optimizer,
        memory.other_state,
        memory.batch,
        memory.temporaries,
        memory.program,
    )
    assert sum(parts) == memory.peak
    assert memory.temporaries > memory.gradients // 2
    assert memory.available == 16 << 30
    assert memory.fits
    assert plan.advice == ()


def test_only_judged_answers_have_a_column_of_verdicts() -> None:
    here = Topology("here", jax.devices()[:1])
    pairs, judged = (
        plan_step(
            ModelConfig(**SHAPE),
            from_dict(TrainingConfig, {"preference": {"loss": loss}}),
            here,
            batch_size=2,
            seq_length=32,
        ).memory.batch
        for loss in ("sigmoid", "kto")
    )
    assert pairs == 4 * 4 * 2 * 32  # four columns of int32
    assert judged == 5 * 4 * 2 * 32


def test_the_copy_of_a_reference_model_is_counted() -> None:
    here = Topology("here", jax.devices()[:1])
    with_copy, without = (
        plan_step(
            ModelConfig(**SHAPE),
            from_dict(TrainingConfig, {"preference": {"reference": reference}}),
            here,
            batch_size=2,
            seq_length=32,
        ).memory
        for reference in ("initial", "none")
    )
    assert with_copy.other_state == without.other_state + with_copy.parameters
    assert with_copy.peak == without.peak + with_copy.parameters


def test_the_vocabulary_is_that_of_the_tokenizer_that_the_data_gets(tmp_path: Path) -> None:
    own, other = (
        train_bpe(texts(60), size, ["<|endoftext|>"], tmp_path / str(size)) for size in (280, 290)
    )
    shape = {name: size for name, size in SHAPE.items() if name != "vocab_size"}
    seen = []
    for dataset, stage, default in ((own, other, other), (None, own, other), (None, None, own)):
        data = {
            "datasets": [{"data_files": "nowhere.jsonl", "tokenizer": dataset and str(own)}],
            "tokenize": {"default_tokenizer": stage and str(stage)},
            "default_tokenizer": str(default),
            "pack": {"seq_length": 32},
            "load": {"batch_size": 1},
        }
        run = from_dict(RunConfig, {"data": data, "model": shape, "train": {"output_dir": "out"}})
        plan = runs.plan_on(run, Topology("here", jax.devices()[:1]))
        seen.append(plan.parameters)
    assert len(set(seen)) == 1


def test_collectives_are_counted_as_often_as_loops_turn(plan):
    assert plan.unknown_loops == 0
    layers = [one for one in plan.collectives if one.times % MODEL.num_layers == 0]
    assert {"all-gather", "all-reduce"} <= {one.kind for one in layers}
    assert {one.devices for one in plan.collectives} <= {2, 4}
    gathered = sum(
        one.times * one.size
        for one in plan.collectives
        if one.kind in ("all-gather", "all-reduce") and one.devices == 2
    )
    # each layer's weights in bfloat16, forward and again
    assert gathered > 3 * 2 * (4 * 256 * 256 + 3 * 256 * 512) * 2


def test_flops_are_ours_and_the_roofline_is_arithmetic(plan):
    line, device = plan.roofline, known_device(plan.device)
    assert line.flops == flops_per_step(MODEL, [512] * 8)
    assert line.palm_flops == palm_flops_per_step(MODEL, 8 * 512, 512)
    # remat: full computes the layers once more, and not the head
    assert line.flops < line.executed_flops < 4 / 3 * line.flops
    assert line.compute_s == line.executed_flops / (4 * device.flops)
    assert line.link_s == sum(one.sent for one in plan.collectives) / device.link_rate
    assert line.best_s == max(line.compute_s, line.memory_s, line.link_s) < line.worst_s
    assert line.mfu_at_best == pytest.approx(line.flops / line.best_s / (4 * device.flops))


@pytest.mark.parametrize(("remat", "passes"), [("none", 2), ("dots", 2), ("full", 3)])
def test_the_traffic_with_memory_is_counted(remat, passes):
    mesh, device = {"data": 2, "fsdp": 4, "tensor": 2}, known_device("TPU v5 lite")
    config = ModelConfig(**SHAPE, dtype="bfloat16", remat=remat)
    line = roofline(config, device, mesh, (16, 512, 2), "splash", held=1000, sent=0.0)
    products = 3 * 256 * (4 * 256 + 3 * 512) + 256 * 512
    weights = passes * 2 * products // 2 * 2  # in both micro-batches, bfloat16, half on a device
    inputs = 2 * passes * 3 * 16 * 512 // 8 * 256 * 2  # of three layers, over data and fsdp
    gradients = 2 * 4 * products // 8  # float32, over fsdp and tensor
    traffic = 2 * 1000 + gradients + weights + inputs
    assert line.memory_s == pytest.approx(traffic / device.memory_rate)


@pytest.mark.parametrize(("attention", "hidden"), [("splash", 0), ("xla", 1)])
def test_what_a_step_executes_beside_its_flops_is_counted(attention, hidden):
    """XLA's attention also computes the pairs that the causal mask hides, as many as it keeps."""
    device, slots = known_device("TPU v5 lite"), 16 * 512
    mesh = {"data": 1, "fsdp": 1, "tensor": 1}
    layers = 3 * 256 * (4 * 256 + 3 * 512)  # a product each way for each of these numbers
    flops = flops_per_step(ModelConfig(**SHAPE), [512] * 16)
    scores = flops - 6 * (layers + 256 * 512) * slots
    mixing = scores * (1 + hidden) / 3  # of a forward pass
    again = {"none": 0, "dots": mixing * hidden, "full": 2 * layers * slots + mixing}
    for remat, more in again.items():
        config = ModelConfig(**SHAPE, remat=remat)
        line = roofline(config, device, mesh, (16, 512, 1), attention, held=0, sent=0.0)
        assert line.flops == flops
        assert line.executed_flops == pytest.approx(flops + scores * hidden + more)


def test_the_command_prints_it_with_what_is_not_known(plan, config, monkeypatch, tmp_path):
    monkeypatch.setattr(runs, "plan_on", lambda run, topology: plan)  # compiled above
    page = ["--topology", "v5e:2x2", "--no-prepare", "--html", str(tmp_path / "plan.html")]
    assert CliRunner().invoke(app, ["plan", str(config), *page]).exit_code == 0
    written = (tmp_path / "plan.html").read_text()
    assert re.search(r"not known: .*nowhere\.jsonl", written)
    assert "attention splash" in written
    shown = CliRunner().invoke(app, ["plan", str(config), "--topology", "v5e:2x2", "--no-prepare"])
    assert shown.exit_code == 0, shown.output
    for text in (
        "4 devices (TPU v5 lite), mesh data 2, fsdp 2",
        "attention splash",
        "it fits",
        "roofline",
        "not known:",
        "Check the path",
    ):
        assert text in shown.output
    told = CliRunner().invoke(
        app, ["plan", str(config), "--topology", "v5e:2x2", "--no-prepare", "--json"]
    )
    found = json.loads(told.stdout)
    assert found["data"] is None
    assert "nowhere.jsonl" in found["data_missing"]
    assert found["step"]["memory"]["fits"] is True
    assert found["step"]["collectives"][0]["sent"] == plan.collectives[0].sent


def test_what_does_not_fit_says_what_to_change(tpu):
    model = ModelConfig(
        vocab_size=1 << 17,
        hidden_size=8192,
        head_dim=64,
        intermediate_size=128,
        num_layers=1,
        num_heads=2,
        num_kv_heads=2,
    )
    plan = plan_step(
        model,
        TrainingConfig(output_dir="out", mesh={"data": 4}),
        "v5e:2x2",
        batch_size=8,
        seq_length=128,
    )
    assert plan.memory.peak > plan.memory.available
    assert plan.memory.fits is False
    assert "IT DOES NOT FIT" in str(plan)
    assert any("fsdp in place of data" in one for one in plan.advice)
    assert any("remat" in one for one in plan.advice)
    assert any("data.load.accumulation_steps: 2 (now 1)" in one for one in plan.advice)
    assert all(f"  - {one}\n" in f"{plan}\n" for one in plan.advice)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (
            "v5q:2x2",
            r"topology: no kind of device named 'v5q' \(have: v5e, v5p, .*Did you mean 'v5",
        ),
        ("v5p", r"'v5p' is not a shape of whole numbers.*like 'v5p:4x4x4'"),
        ("v5p:4x4", r"'v5p:4x4' has 2 dimensions, and slices of v5p have 3"),
        ("v5p:3x3x3", r"libtpu does not support 'v5p:3x3x3'"),
        ("h200:16", r"puts 16 GPUs into a host.*'h200:2x8'"),
        ("h200:2x2x2", r"has 3 dimensions"),
    ],
)
def test_a_topology_that_is_none_is_refused_with_what_there_is(tpu, name, told):
    with pytest.raises(ConfigError, match=told):
        topology(name)


def test_a_mesh_that_the_torus_cannot_carry_is_refused(tpu):
    train = TrainingConfig(output_dir="out", mesh={"data": 2, "fsdp": 32})
    with pytest.raises(ConfigError, match=r"train\.mesh: .* cannot be laid over v5p:4x4x4"):
        plan_step(MODEL, train, "v5p:4x4x4", batch_size=64, seq_length=512)


def test_rows_that_the_mesh_cannot_divide_are_refused(tpu):
    train = TrainingConfig(output_dir="out", mesh={"sequence": 4})
    with pytest.raises(
        PlacementError,
        match=r"seq_length: rows of 30 slots do not divide over mesh axis 'sequence' of 4\. Choose "
        r"a seq_length",
    ):
        plan_step(MODEL, train, "v5e:2x2", batch_size=4, seq_length=30)


@pytest.mark.parametrize(
    ("model", "sizes", "told"),
    [
        (MODEL, (0, 32), "batch_size: 0 is too small. Give at least 1"),
        (MODEL, (2, 0), "seq_length: 0 is too small"),
        (ClassifierConfig(num_classes=2, image_shape=(8, 8, 1)), (2, 32), "model: is a classifier"),
    ],
)
def test_a_step_that_cannot_be_planned_is_refused(model, sizes, told):
    here = Topology("here", jax.devices()[:1])
    with pytest.raises(ConfigError, match=told):
        plan_step(model, TrainingConfig(), here, batch_size=sizes[0], seq_length=sizes[1])


def test_a_run_whose_rows_have_no_length_is_refused(config):
    run = RunConfig.load(config, ["data.pack=null"])
    with pytest.raises(
        ConfigError,
        match=r"data\.pack: neither it nor data\.tokenize\.max_length says how long rows are",
    ):
        runs.plan_on(run, "v5e:2x2")


def test_groups_and_loops_are_read_as_xla_writes_them():
    """Three spellings of groups; a loop within a loop; a kernel whose text has lines that begin
    with a brace; a loop of unknown length.
    """
    text = """
%inner (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %k = f32[8]{0} custom-call(%x), backend_config={"kernel":"
}}"}
  %ar = ((f32[8]{0}), f32[8]{0}) all-reduce-start(%x), replica_groups={{0,1},{2,3}}, to_apply=%add
}
%until (p: (s32[], f32[8])) -> pred[] {
  %n = s32[]{:T(128)} constant(5)
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}
%outer (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %w = (s32[], f32[8]) while(%t), condition=%until, body=%inner
  %ag = ((f32[1]{0}, f32[1]{0}), (f32[4]{0}, /*index=1*/f32[4]{0})) all-gather-start(%x), replica_groups=[1,4]<=[4], dimensions={0}
}
%open (p: (s32[], f32[8])) -> pred[] {
  ROOT %ne = pred[] compare(%i, %j), direction=NE
}
%once (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %cp = f32[8]{0} collective-permute(%x), source_target_pairs={{0,1},{1,0}}
}
ENTRY %main (a: f32[8]) -> f32[8] {
  %w1 = (s32[], f32[8]) while(%t), condition=%open, body=%outer, backend_config={"known_trip_count":{"n":"3"}}
  %w2 = (s32[], f32[8]) while(%t), condition=%open, body=%once
  %rs = f32[2]{0} reduce-scatter(%x), replica_groups=mesh['a'=2,'b'=2] {'a','b'}, to_apply=%add
}
"""
    found = read(text, 4)
    assert found.unknown_loops == 1
    seen = {one.kind: (one.times, one.devices, one.size, one.sent) for one in found.collectives}
    assert seen == {
        "all-reduce": (15, 2, 32, 15 * 32.0),
        "all-gather": (3, 4, 32, 3 * 24.0),
        "collective-permute": (1, 2, 32, 32.0),
        "reduce-scatter": (1, 4, 8, 24.0),
    }


def test_a_reduce_scatter_is_counted_as_one_however_the_compiler_writes_it():
    """Gradients bf16[1024,256] of two layers, summed over 8 devices that keep 128 rows each: 7/8 of
    512 KiB leave a device, twice.
    """
    tpu = """
%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}
%all-reduce-scatter.7 (input: bf16[1024,256]) -> bf16[128,256] {
  %input = bf16[1024,256]{1,0:T(8,128)(2,1)} parameter(0)
  %all-reduce.3 = bf16[1024,256]{1,0:T(8,128)(2,1)} all-reduce(%input), replica_groups=[1,8]<=[8], to_apply=%add
  %index = s32[] multiply(%id, %rows)
  ROOT %slice = bf16[128,256]{1,0:T(8,128)(2,1)} dynamic-slice(%all-reduce.3, %index, %zero), dynamic_slice_sizes={128,256}
}
%body (p: (s32[], bf16[1024,256])) -> (s32[], bf16[1024,256]) {
  %fusion = bf16[128,256]{1,0:T(8,128)(2,1)} fusion(%g), kind=kCustom, calls=%all-reduce-scatter.7
}
ENTRY %main (a: bf16[1024,256]) -> f32[] {
  %w = (s32[], bf16[1024,256]) while(%t), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"2"}}
  %norm = f32[] all-reduce(%x), replica_groups=[1,8]<=[8], to_apply=%add
}
"""
    gpu = """
%body (p: (s32[], bf16[1024,256])) -> (s32[], bf16[1024,256]) {
  %start = ((bf16[1024,256]{1,0}), bf16[128,256]{1,0}) reduce-scatter-start(%g), replica_groups=[1,8]<=[8], dimensions={0}, to_apply=%add
  %done = bf16[128,256]{1,0} reduce-scatter-done(%start)
}
ENTRY %main (a: bf16[1024,256]) -> f32[] {
  %w = (s32[], bf16[1024,256]) while(%t), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"2"}}
  %norm = f32[] all-reduce(%x), replica_groups=[1,8]<=[8], to_apply=%add
}
"""
    for program in (tpu, gpu):
        seen = {
            one.kind: (one.shape, one.size, one.devices, one.times, one.sent)
            for one in read(program, 8).collectives
        }
        assert seen == {
            "reduce-scatter": ("bf16[128,256]", 128 * 256 * 2, 8, 2, 2 * 7 / 8 * 1024 * 256 * 2),
            "all-reduce": ("f32[]", 4, 8, 1, 2 * 7 / 8 * 4),
        }


def test_an_all_reduce_that_another_fusion_slices_is_sent_whole() -> None:
    """As in the step of configs/llama_8b_v5p.yaml on v5p:4x4x4, where XLA notes the algorithm of an
    all-reduce for the first, and that of a scatter for fusions called all-reduce-scatter alone.
    """
    program = """
%slice.1 (whole: f32[1024,256], at: s32[]) -> f32[128,256] {
  %whole = f32[1024,256]{1,0} parameter(0)
  ROOT %kept = f32[128,256]{1,0} dynamic-slice(%whole, %at, %zero), dynamic_slice_sizes={128,256}
}
ENTRY %main (a: f32[1024,256]) -> f32[128,256] {
  %all-reduce.76 = f32[1024,256]{1,0} all-reduce(%a), replica_groups=[1,8]<=[8], to_apply=%add
  ROOT %fusion = f32[128,256]{1,0} fusion(%all-reduce.76, %id), kind=kLoop, calls=%slice.1
}
"""
    (one,) = read(program, 8).collectives
    assert (one.kind, one.sent) == ("all-reduce", 2 * 7 / 8 * 1024 * 256 * 4)


@pytest.mark.skipif(
    os.environ.get("EASYPIPE_AOT") != "all", reason="a minute of a core (nox -s aot_tpu)"
)
def test_an_8b_model_is_planned_for_64_chips_in_minutes(tpu):
    run = RunConfig.load(Path(__file__).parents[2] / "configs" / "llama_8b_v5p.yaml")
    started = time.process_time()
    plan = runs.plan_on(run, "v5p:4x4x4")
    assert time.process_time() - started < 300
    assert plan.parameters == 8_030_261_248  # as the card of Llama 3 8B has it
    assert plan.memory.fits
    assert 10 << 30 < plan.memory.peak < 95 << 30
