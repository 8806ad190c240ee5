"""Models of the Hugging Face Hub: logits as torch computed them once, folders that come back bit
for bit, and refusals by name.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import forked
from easypipe.core.errors import ConfigError, MissingFileError, SourceError, StateError
from easypipe.train import load_pretrained, save_pretrained
from easypipe.train.losses.loss import loss_sums
from easypipe.train.model.decoder import Decoder, ModelConfig, RopeScaling, param_count
from easypipe.train.model.pretrained.families import from_hf, to_hf
from easypipe.train.parallel.mesh import make_mesh
from easypipe.train.trainer import Trainer
from train.hf_support import CONFIGS, GOLDENS, SHOWN, VOCAB, shapes, tensors, token_ids, write_model
from train.runs import Arithmetic, settings

call = nnx.jit(Decoder.__call__)


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        family: write_model(root / family, config, tensors(config))
        for family, config in CONFIGS.items()
    }


@pytest.mark.parametrize("family", CONFIGS)
def test_logits_are_those_of_torch(folders, family):
    with np.load(GOLDENS) as golden:
        want = golden[family]
    logits = np.asarray(call(load_pretrained(folders[family]), jnp.asarray(token_ids())))
    assert logits.shape == (1, 512, VOCAB)
    assert np.abs(logits[0, SHOWN] - want).max() < 1e-4


def test_no_file_is_larger_than_it_may_be_and_none_is_smaller_than_it_has_to(folders, tmp_path):
    """Tensors are put into files in their order; one that fills a file to the last byte fits."""
    model = load_pretrained(folders[next(iter(CONFIGS))])

    def sizes(limit):  # bytes of the tensors of each file
        saved = save_pretrained(model, tmp_path / str(limit), max_shard_bytes=limit)
        files = sorted(saved.glob("*.safetensors"))
        return [sum(tensor.nbytes for tensor in load_file(file).values()) for file in files]

    each = sizes(1)
    for exact in (2, 5, len(each) - 1):
        limit, wanted = sum(each[:exact]), []
        for size in each:
            if not wanted or wanted[-1] + size > limit:
                wanted.append(0)
            wanted[-1] += size
        assert wanted[0] == limit
        assert sizes(limit) == wanted


@pytest.mark.parametrize("family", CONFIGS)
def test_load_save_load_is_bit_equal(folders, family, tmp_path):
    model = load_pretrained(folders[family])
    saved = save_pretrained(model, tmp_path / "out", max_shard_bytes=20_000)
    index = json.loads((saved / "model.safetensors.index.json").read_text())["weight_map"]
    written = {
        name: array
        for file in set(index.values())
        for name, array in load_file(saved / file).items()
    }
    given = tensors(CONFIGS[family])
    assert written.keys() == given.keys() == index.keys()
    assert all(np.array_equal(written[name], given[name]) for name in given)
    assert json.loads((saved / "config.json").read_text()) == CONFIGS[family] | {
        "torch_dtype": "float32"
    }
    again = load_pretrained(saved)
    assert again.config == model.config
    for a, b in zip(
        jax.tree.leaves(nnx.state(model)), jax.tree.leaves(nnx.state(again)), strict=True
    ):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("family", CONFIGS)
def test_configs_map_both_ways(family):
    config = from_hf(CONFIGS[family])
    written = to_hf(config)
    assert from_hf(written) == config
    assert written["architectures"] == CONFIGS[family]["architectures"]


@pytest.mark.parametrize("family", CONFIGS)
def test_transformers_reads_the_same_config(folders, family, tmp_path):
    """Version 5 renames keys and leaves defaults out; what it saves maps to the same model, and
    what is written here it can read.
    """
    transformers = pytest.importorskip("transformers", reason="the compare extra is not installed")
    theirs = transformers.AutoConfig.from_pretrained(folders[family])
    theirs.save_pretrained(tmp_path / "theirs")
    config = from_hf(CONFIGS[family])
    assert from_hf(json.loads((tmp_path / "theirs" / "config.json").read_text())) == config
    assert from_hf(theirs.to_dict()) == config
    (tmp_path / "config.json").write_text(json.dumps(to_hf(config)))
    assert from_hf(transformers.AutoConfig.from_pretrained(tmp_path).to_dict()) == config


def test_defaults_of_a_family_stand_for_what_config_json_leaves_out():
    """The text part of gemma-3-4b as it is published says no more than this."""
    config = from_hf(
        {
            "model_type": "gemma3_text",
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        }
    )
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (
        8,
        4,
        256,
        262_208,
    )
    assert (config.rope_theta, config.local_rope_theta, config.global_every) == (1e6, 1e4, 6)
    assert config.rope_scaling == RopeScaling(kind="linear", factor=8.0)
    assert config.tie_embeddings
    assert config.logit_soft_cap is None
    assert from_hf({"model_type": "gemma2"}).logit_soft_cap == 30.0
    assert from_hf({"model_type": "mistral", "sliding_window": None}).sliding_window is None
    assert from_hf({"model_type": "qwen2"}).qkv_bias


def shape(model_type, width, inner, layers, heads, kv_heads, vocab, **more):
    sizes = {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "vocab_size": vocab,
    }
    return (
        sizes
        | {"model_type": model_type, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
        | more
    )


LLAMA3_SCALING = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (
            shape(
                "llama",
                2048,
                8192,
                16,
                32,
                8,
                128256,
                head_dim=64,
                tie_word_embeddings=True,
                rope_scaling=LLAMA3_SCALING,
            ),
            1_235_814_400,
        ),
        (
            shape(
                "llama",
                576,
                1536,
                30,
                9,
                3,
                49152,
                tie_word_embeddings=True,
                pretraining_tp=1,
                is_llama_config=True,
            ),
            134_515_008,
        ),
        (shape("mistral", 4096, 14336, 32, 32, 8, 32000, sliding_window=4096), 7_241_732_096),
        (
            shape(
                "qwen2",
                896,
                4864,
                24,
                14,
                2,
                151936,
                tie_word_embeddings=True,
                max_window_layers=21,
                use_mrope=False,
            ),
            494_032_768,
        ),
        (
            shape(
                "qwen3",
                1024,
                3072,
                28,
                16,
                8,
                151936,
                head_dim=128,
                tie_word_embeddings=True,
                attention_bias=False,
            ),
            596_049_920,
        ),
        (
            shape(
                "gemma2", 2304, 9216, 26, 8, 4, 256000, head_dim=256, hidden_act="gelu_pytorch_tanh"
            ),
            2_614_341_888,
        ),
        (
            shape(
                "gemma3_text",
                1152,
                6912,
                26,
                4,
                1,
                262144,
                head_dim=256,
                sliding_window=512,
                sliding_window_pattern=6,
            ),
            999_885_952,
        ),
    ],
    ids=[
        "Llama-3.2-1B",
        "SmolLM2-135M",
        "Mistral-7B",
        "Qwen2.5-0.5B",
        "Qwen3-0.6B",
        "Gemma-2-2B",
        "Gemma-3-1B",
    ],
)
def test_published_models_have_as_many_parameters_as_their_cards_say(config, parameters):
    model = nnx.eval_shape(lambda: Decoder(from_hf(config), nnx.Rngs(0)))
    assert param_count(model) == parameters


def test_a_model_trained_here_is_saved_as_llama(tmp_path, caplog):
    config = ModelConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
    )
    model = Decoder(config, nnx.Rngs(0))
    (tmp_path / "tok").mkdir()
    (tmp_path / "tok" / "tokenizer.json").write_text("{}")
    saved = save_pretrained(model, tmp_path / "out", tokenizer=tmp_path / "tok")
    names = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]
    assert sorted(file.name for file in saved.iterdir()) == names
    assert "config.json and generation_config.json name no tokens of it" in caplog.text
    assert json.loads((saved / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    ids = jnp.asarray(token_ids()[:, :32])
    np.testing.assert_array_equal(call(load_pretrained(saved), ids), call(model, ids))


def test_dtypes_of_files_and_parameters(folders, tmp_path):
    half = load_pretrained(folders["qwen3"], dtype="bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(half))} == {jnp.dtype("bfloat16")}
    saved = save_pretrained(half, tmp_path / "half")
    assert json.loads((saved / "config.json").read_text())["torch_dtype"] == "bfloat16"
    wide = load_pretrained(
        saved, dtype="bfloat16", param_dtype="float32", remat="full", scan_layers=False
    )
    assert (
        wide.config.dtype,
        wide.config.param_dtype,
        wide.config.remat,
        wide.config.scan_layers,
    ) == (
        "bfloat16",
        "float32",
        "full",
        False,
    )
    for a, b in zip(
        jax.tree.leaves(nnx.state(half)), jax.tree.leaves(nnx.state(wide)), strict=True
    ):
        assert b.dtype == jnp.float32
        np.testing.assert_array_equal(np.asarray(a, np.float32), b)


def test_the_loss_caps_logits_as_the_model_does(folders):
    model, ids = load_pretrained(folders["gemma2"]), token_ids()
    labels = np.roll(ids, -1, 1)
    out = loss_sums(model, {"input_ids": ids, "labels": labels})
    log_p = jax.nn.log_softmax(call(model, jnp.asarray(ids)))
    np.testing.assert_allclose(
        out.loss_sum, -np.take_along_axis(np.asarray(log_p), labels[..., None], -1).sum(), rtol=1e-5
    )


def test_saving_is_whole_or_not_at_all(folders, tmp_path):
    model = load_pretrained(folders["mistral"])

    class Broken:
        def save_pretrained(self, folder):
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        save_pretrained(model, tmp_path / "out", tokenizer=Broken())
    assert list(tmp_path.iterdir()) == []
    save_pretrained(model, tmp_path / "out")
    with pytest.raises(ConfigError, match="out: is there already"):
        save_pretrained(model, tmp_path / "out")
    with pytest.raises(MissingFileError, match=r"holds no tokenizer\.json"):
        save_pretrained(model, tmp_path / "other", tokenizer=tmp_path)
    with pytest.raises(ConfigError, match="max_shard_bytes: 0 is not a size"):
        save_pretrained(model, tmp_path / "other", max_shard_bytes=0)
    with pytest.raises(ConfigError, match=r"Linear is not a Decoder, .*CheckpointManager saves"):
        save_pretrained(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), tmp_path / "other")


def test_a_model_of_no_family_is_not_saved(tmp_path):
    config = ModelConfig(
        vocab_size=8,
        hidden_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        qkv_bias=True,
        post_norms=True,
    )
    with pytest.raises(
        ConfigError,
        match=r"no family that transformers knows has qkv_bias: True, post_norms: True \(have: "
        r"llama",
    ):
        save_pretrained(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0))), tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model_type": "mixtral"},
            r"config.json: model_type 'mixtral' is not a model .*\(have: llama "
            r"\(LlamaForCausalLM\), mistral",
        ),
        ({"model_type": "qwen"}, "Did you mean 'qwen3'|Did you mean 'qwen2'"),
        (
            {"architectures": ["LlamaForSequenceClassification"]},
            "architectures: .* is not a language model of llama",
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            r"rope_type: 'yarn' is not supported \(have: default, linear, llama3\)",
        ),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 4.0}},
            "rope_type: 'dynamic' is not supported",
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 0.5}},
            r"config\.json: rope_scaling\.factor: 0\.5 is less than 1",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5 is not supported"),
        ({"attention_bias": True}, "attention_bias: True is not supported"),
        ({"mlp_bias": True}, "mlp_bias: True is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: .* is not supported"),
        ({"hidden_act": "relu"}, r"hidden_act: 'relu' is not supported \(have: silu\)"),
        ({"num_key_value_heads": 3}, "config.json.num_kv_heads: 3 does not divide"),
        (
            {
                "model_type": "qwen2",
                "architectures": ["Qwen2ForCausalLM"],
                "use_sliding_window": True,
                "max_window_layers": 1,
            },
            "layer_types: .* does not repeat",
        ),
    ],
)
def test_what_the_decoder_cannot_be_is_refused_by_name(change, message, tmp_path):
    config = {**CONFIGS["llama3"], "sliding_window": 64} | change
    folder = write_model(tmp_path, config, {})
    with pytest.raises(ConfigError, match=message):
        load_pretrained(folder)


def test_missing_unexpected_and_misshapen_weights_are_named(tmp_path):
    config = CONFIGS["qwen3"]
    weights = tensors(config)
    weights["model.layers.7.extra.weight"] = weights.pop("model.layers.1.self_attn.q_norm.weight")
    with pytest.raises(
        StateError,
        match=r"missing: model\.layers\.1\.self_attn\.q_norm\.weight; unexpected: "
        r"model\.layers\.7\.extra\.weight",
    ):
        load_pretrained(write_model(tmp_path / "names", config, weights))
    weights = tensors(config) | {"lm_head.weight": np.zeros((VOCAB + 1, 32), np.float32)}
    with pytest.raises(StateError, match=r"lm_head\.weight is \[65, 32\], not \[64, 32\]"):
        load_pretrained(write_model(tmp_path / "shapes", config, weights))


def test_a_tied_model_may_repeat_its_head_and_old_buffers(folders, tmp_path):
    config = CONFIGS["smollm2"]
    weights = tensors(config)
    more = {
        "lm_head.weight": weights["model.embed_tokens.weight"],
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32),
    }
    ids = jnp.asarray(token_ids()[:, :16])
    model = load_pretrained(write_model(tmp_path, config, weights | more))
    np.testing.assert_array_equal(call(model, ids), call(load_pretrained(folders["smollm2"]), ids))


def test_bad_folders(tmp_path):
    with pytest.raises(MissingFileError, match="no such folder"):
        load_pretrained(tmp_path / "none")
    with pytest.raises(MissingFileError, match=r"config\.json: no such file"):
        load_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(StateError, match=r"config\.json: cannot be read as JSON"):
        load_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama3"]))
    with pytest.raises(MissingFileError, match=r"model\.safetensors: no such file\. Download"):
        load_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(
        MissingFileError, match=r"Convert its \.bin files to safetensors: they are pickles"
    ):
        load_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(StateError, match="is not a whole safetensors file"):
        load_pretrained(tmp_path)
    for weight_map, message in (
        ({"a": "../../etc/model.safetensors"}, "is not a file of this folder"),
        ({"a": "model-1.safetensors"}, r"model-1\.safetensors: no such file"),
        (None, "has no weight_map"),
    ):
        (tmp_path / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": weight_map})
        )
        with pytest.raises((StateError, MissingFileError), match=message):
            load_pretrained(tmp_path)
    save_file({"b": np.zeros(2)}, tmp_path / "model-1.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model-1.safetensors"}})
    )
    with pytest.raises(StateError, match="names tensors that its files do not hold: a"):
        load_pretrained(tmp_path)
    with pytest.raises(SourceError, match="has no revision 'main'"):
        load_pretrained(tmp_path, revision="main")
    with pytest.raises(ConfigError, match=r"load_pretrained\.dtype: 'float16' is not an option"):
        load_pretrained(tmp_path, dtype="float16")  # pyright: ignore[reportArgumentType]


def test_a_hub_name_is_read_from_the_cache_of_the_hub_client(folders, tmp_path):
    """In a process of its own: the client reads its environment once. Nothing is asked of a
    network.
    """
    snapshot = tmp_path / "hub" / "models--tiny--qwen3" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    for file in folders["qwen3"].iterdir():
        (snapshot / file.name).write_bytes(file.read_bytes())
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("a" * 40)
    program = (
        "from easypipe.train import load_pretrained\n"
        "assert load_pretrained('tiny/qwen3').config.qk_norm\n"
        "try: load_pretrained('tiny/none')\n"
        "except FileNotFoundError as error: print(error)\n"
    )
    env = {
        **os.environ,
        "HF_HUB_CACHE": str(tmp_path / "hub"),
        "HF_HUB_OFFLINE": "1",
        "JAX_PLATFORMS": "cpu",
    }
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "tiny/none: no such folder, and the Hugging Face Hub cannot be reached" in done.stdout


SHARDED = """
import sys, resource
import jax
jax.config.update("jax_num_cpu_devices", 8)
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P
from easypipe.train import load_pretrained, save_pretrained
from easypipe.train.model.generate import generate
from easypipe.train.parallel.mesh import make_mesh
from easypipe.train.model.pretrained.files import WeightFiles

read = {}
plain = WeightFiles.read
def counted(self, name, part):
    found = plain(self, name, part)
    read[name] = read.get(name, 0) + found.size
    counted.largest = max(counted.largest, found.size)
    return found
counted.largest = 0
WeightFiles.read = counted
folder, out = sys.argv[1:]
whole = load_pretrained(folder)
sizes, read_whole = dict(read), counted.largest
read.clear(); counted.largest = 0
model = load_pretrained(folder, mesh=make_mesh({"data": 2, "fsdp": 2, "tensor": 2}))
assert read == sizes, "every value is read once, though two replicas take it"
assert counted.largest * 4 == read_whole, (counted.largest, read_whole)
gate = model.layers.gate.kernel.get_value()
assert gate.sharding.spec == P(None, "fsdp", "tensor"), gate.sharding
assert gate.addressable_shards[0].data.size * 4 == gate.size
for a, b in zip(jax.tree.leaves(nnx.state(model)), jax.tree.leaves(nnx.state(whole)), strict=True):
    np.testing.assert_array_equal(a, b)
ids = np.arange(64, dtype=np.int32)[None] % 60
call = nnx.jit(lambda model, ids: model(ids))
np.testing.assert_allclose(call(model, ids), call(whole, ids), atol=1e-4)
prompts = [[5, 6, 7], [9], [3, 1, 4, 1, 5, 9, 2, 6]]
texts = [generate(one, prompts, max_new_tokens=6, temperature=0) for one in (model, whole)]
assert texts[0] == texts[1], texts
save_pretrained(model, out)
again = load_pretrained(out)
for a, b in zip(jax.tree.leaves(nnx.state(again)), jax.tree.leaves(nnx.state(whole)), strict=True):
    np.testing.assert_array_equal(a, b)
print("all equal")
"""


@pytest.mark.slow
def test_each_device_gets_its_part_and_the_files_are_read_slice_by_slice(tmp_path):
    """On eight devices, in a process of its own: a process fixes its number of devices when jax
    starts.
    """
    config = {
        key: value for key, value in CONFIGS["qwen2.5"].items() if key != "tie_word_embeddings"
    }
    folder = write_model(tmp_path / "in", config, tensors(config), files=3)
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    arguments = [sys.executable, "-c", SHARDED, str(folder), str(tmp_path / "out")]
    done = forked.run(arguments, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "all equal" in done.stdout


def test_the_shapes_here_are_those_of_the_decoder():
    for config in CONFIGS.values():
        model = nnx.eval_shape(lambda config=config: Decoder(from_hf(config), nnx.Rngs(0)))
        assert sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model))) == sum(
            np.prod(shape) for shape in shapes(config).values()
        )


def test_parameters_of_a_loaded_model_train(folders):
    model = load_pretrained(folders["gemma3"])
    graph, params = nnx.split(model, nnx.Param)
    ids = token_ids()[:, :64]
    batch = {"input_ids": ids, "labels": np.roll(ids, -1, 1)}
    grads = jax.jit(jax.grad(lambda p: loss_sums(nnx.merge(graph, p), batch).loss_sum))(params)
    assert all(bool(jnp.any(leaf != 0)) for leaf in jax.tree.leaves(grads)), (
        "every weight takes part"
    )


def test_a_loaded_model_is_trained_and_saved_again(folders, tmp_path):
    mesh = make_mesh(devices=jax.devices()[:1])
    model = load_pretrained(folders["smollm2"], mesh=mesh)
    result = Trainer(model, settings(tmp_path / "run", steps=3), Arithmetic(3), mesh=mesh).run()
    saved = save_pretrained(result.model, tmp_path / "out")
    assert json.loads((saved / "config.json").read_text()) == CONFIGS["smollm2"] | {
        "torch_dtype": "float32"
    }
    before, after = (
        load_file(folders["smollm2"] / "model.safetensors"),
        load_file(saved / "model.safetensors"),
    )
    assert before.keys() == after.keys()
    assert not any(np.array_equal(before[name], after[name]) for name in before), (
        "every weight has moved"
    )
