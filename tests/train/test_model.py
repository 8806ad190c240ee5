"""The decoder against a NumPy decoder written from the formulas, and every option's effect."""

from __future__ import annotations

import dataclasses
import math
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import forked
from easypipe.core.config import from_dict
from easypipe.core.errors import ConfigError
from easypipe.train.losses.loss import loss_sums
from easypipe.train.model.decoder import Decoder, ModelConfig, param_count, positions

TINY = ModelConfig(
    vocab_size=61,
    hidden_size=24,
    intermediate_size=40,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
)


def tiny(**changes) -> Decoder:
    return Decoder(dataclasses.replace(TINY, **changes), nnx.Rngs(0))


def batch(rows=2, length=12, seed=0):
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, TINY.vocab_size, (rows, length)).astype(np.int32)
    segments = np.array([[1] * 5 + [2] * 4 + [3] + [0] * 2] * rows, np.int32)
    labels = np.where(
        (segments == np.roll(segments, -1, 1)) & (segments > 0), np.roll(ids, -1, 1), -100
    ).astype(np.int32)
    return {
        "input_ids": ids,
        "segment_ids": segments,
        "position_ids": np.asarray(positions(jnp.asarray(segments))),
        "labels": labels,
    }


def gradients(model, data, **options):
    graph, params = nnx.split(model, nnx.Param)

    def loss(params):
        out = loss_sums(nnx.merge(graph, params), data, **options)
        return out.loss_sum, out

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(params)


def numpy_logits(model: Decoder, ids, segments, places):
    """One row at a time, one head at a time, in float64."""
    config = model.config
    weights = jax.tree.map(
        lambda leaf: np.asarray(leaf, np.float64), nnx.to_pure_dict(nnx.state(model, nnx.Param))
    )
    head = config.head_width

    def norm(x, scale):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_epsilon) * scale

    def turn(x, place):
        pairs = np.arange(head // 2)
        z = (x[:, : head // 2] + 1j * x[:, head // 2 :]) * np.exp(
            1j * place[:, None] * config.rope_theta ** (-2 * pairs / head)
        )
        return np.concatenate([z.real, z.imag], axis=1)

    rows = []
    for tokens, segment, place in zip(ids, segments, places, strict=True):
        x = weights["embedding"][tokens]
        may_see = (segment[:, None] == segment[None, :]) & np.tri(len(tokens), dtype=bool)
        for layer in range(config.num_layers):
            w = jax.tree.map(lambda leaf, layer=layer: leaf[layer], weights["layers"])
            y = norm(x, w["attention_norm"]["scale"])
            query, key, value = (y @ w[name]["kernel"] for name in ("query", "key", "value"))
            heads = []
            for h in range(config.num_heads):
                k = h // (config.num_heads // config.num_kv_heads)
                cut, kv_cut = slice(h * head, (h + 1) * head), slice(k * head, (k + 1) * head)
                scores = (
                    turn(query[:, cut], place) @ turn(key[:, kv_cut], place).T / math.sqrt(head)
                )
                p = np.exp(np.where(may_see, scores, -np.inf))
                heads.append(p / p.sum(-1, keepdims=True) @ value[:, kv_cut])
            x = x + np.concatenate(heads, axis=1) @ w["output"]["kernel"]
            y = norm(x, w["mlp_norm"]["scale"])
            gate = y @ w["gate"]["kernel"]
            x = x + (gate / (1 + np.exp(-gate)) * (y @ w["up"]["kernel"])) @ w["down"]["kernel"]
        head_matrix = weights["embedding"].T if config.tie_embeddings else weights["head"]["kernel"]
        rows.append(norm(x, weights["norm"]["scale"]) @ head_matrix)
    return np.stack(rows)


@pytest.mark.parametrize(
    "changes",
    [{}, {"tie_embeddings": True}, {"num_kv_heads": 6}, {"num_kv_heads": 1, "rope_theta": 100.0}],
)
def test_logits_equal_numpy(changes):
    model, data = tiny(**changes), batch()
    logits = nnx.jit(Decoder.__call__)(
        model, data["input_ids"], data["segment_ids"], data["position_ids"]
    )
    want = numpy_logits(model, data["input_ids"], data["segment_ids"], data["position_ids"])
    np.testing.assert_allclose(logits, want, rtol=1e-4, atol=1e-5)


def test_positions_restart_with_each_segment_and_default_to_the_whole_row():
    segments = jnp.array([[1, 1, 1, 2, 2, 0, 0], [1, 2, 3, 3, 3, 3, 0]])
    np.testing.assert_array_equal(
        positions(segments), [[0, 1, 2, 0, 1, 0, 1], [0, 0, 0, 1, 2, 3, 0]]
    )
    model, ids = tiny(), batch()["input_ids"]
    np.testing.assert_array_equal(
        model(ids), model(ids, jnp.ones_like(ids), jnp.arange(12)[None] + jnp.zeros_like(ids))
    )


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"implementation": "reference"},
        {"implementation": "chunked", "chunk_size": 7},
        {"rule": "strict"},
    ],
)
def test_loss_sums_are_those_of_the_logits(options, tied):
    model, data = tiny(tie_embeddings=tied), batch()
    out = loss_sums(model, data, **options)
    log_p = jax.nn.log_softmax(model(data["input_ids"], data["segment_ids"], data["position_ids"]))
    kept = data["labels"] >= 0
    want = -np.take_along_axis(np.asarray(log_p), np.where(kept, data["labels"], 0)[..., None], -1)[
        ..., 0
    ][kept].sum()
    np.testing.assert_allclose(out.loss_sum, want, rtol=1e-5)
    assert int(out.num_targets) == kept.sum()
    assert tied or abs(float(out.loss_sum) / kept.sum() - math.log(TINY.vocab_size)) < 0.2, (
        "an untrained model guesses evenly"
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"scan_layers": False},
        {"remat": "dots"},
        {"remat": "full"},
        {"scan_layers": False, "remat": "full"},
    ],
)
def test_scan_and_remat_change_the_program_and_not_the_result(changes):
    data = batch()
    (loss, _), grads = gradients(tiny(), data)
    (other_loss, _), other_grads = gradients(tiny(**changes), data)
    np.testing.assert_allclose(loss, other_loss, rtol=1e-6)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(other_grads), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def compiled(data, **changes):
    graph, params = nnx.split(tiny(**changes), nnx.Param)
    return (
        jax.jit(jax.grad(lambda p: loss_sums(nnx.merge(graph, p), data).loss_sum))
        .lower(params)
        .compile()
    )


def test_remat_keeps_less_and_unrolling_leaves_no_loop():
    data = {name: np.tile(array, (16, 1)) for name, array in batch().items()}
    programs = {remat: compiled(data, remat=remat) for remat in ("none", "dots", "full")}
    memory = {
        remat: program.memory_analysis().temp_size_in_bytes for remat, program in programs.items()
    }
    assert memory["full"] < memory["dots"] < memory["none"], memory
    assert compiled(data, scan_layers=False).as_text().count("while(") < programs[
        "none"
    ].as_text().count("while(")


def test_dtypes():
    model, data = tiny(dtype="bfloat16"), batch()
    assert nnx.eval_shape(lambda: model.hidden(data["input_ids"])).dtype == jnp.bfloat16
    assert nnx.eval_shape(lambda: model(data["input_ids"])).dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))} == {
        jnp.dtype("float32")
    }
    (loss, _), grads = gradients(model, data)
    assert {loss.dtype, *(leaf.dtype for leaf in jax.tree.leaves(grads))} == {jnp.dtype("float32")}
    np.testing.assert_allclose(loss, gradients(tiny(), data)[0][0], rtol=0.01)
    half = tiny(dtype="bfloat16", param_dtype="bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(half, nnx.Param))} == {
        jnp.dtype("bfloat16")
    }


def test_parameters():
    assert (
        param_count(tiny()) - param_count(tiny(tie_embeddings=True))
        == TINY.vocab_size * TINY.hidden_size
    )
    default = nnx.eval_shape(lambda: Decoder(ModelConfig(vocab_size=8192), nnx.Rngs(0)))
    assert 4.5e6 < param_count(default) < 5e6
    layers = nnx.state(tiny(), nnx.Param)["layers"]
    kernels = np.asarray(layers["gate"]["kernel"].get_value())
    assert kernels.shape == (3, 24, 40)
    assert not np.array_equal(kernels[0], kernels[1]), "each layer draws its own weights"
    np.testing.assert_array_equal(
        kernels, np.asarray(nnx.state(tiny(), nnx.Param)["layers"]["gate"]["kernel"].get_value())
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_kv_heads": 4}, r"num_kv_heads: 4 does not divide num_heads 6 \(have: 1, 2, 3, 6\)"),
        (
            {"head_dim": None, "hidden_size": 25},
            "hidden_size: 25 is not a multiple of num_heads 6, the default. Set head_dim",
        ),
        ({"head_dim": 7}, "head_dim: 7 is odd"),
        ({"num_layers": 0}, "num_layers: 0 is too small. Give at least 1"),
        ({"norm_epsilon": 0.0}, "norm_epsilon: 0.0 is not a positive number"),
        ({"dtype": "bfloat"}, "dtype: 'bfloat' is not an option .* Did you mean 'bfloat16'"),
        ({"hiden_size": 3}, "hiden_size: unknown key .* Did you mean 'hidden_size'"),
    ],
)
def test_bad_configs_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        from_dict(ModelConfig, {**dataclasses.asdict(TINY), **change})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"num_heads": 5, "hidden_size": 40},
            "num_heads: 5 is not a multiple of num_kv_heads 2. Give a multiple, or set num_kv_heads "
            "to one of 1, 5.",
        ),
        (
            {"num_heads": 5, "num_kv_heads": 2},
            "num_kv_heads: 2 does not divide num_heads 5 (have: 1, 5). Give one of these, or "
            "num_heads a multiple of 2.",
        ),
        ({"num_kv_heads": 4}, "num_kv_heads: 4 does not divide num_heads 6"),
        (
            {"hidden_size": 100},
            "hidden_size: 100 is not a multiple of num_heads 6, the default. Set head_dim",
        ),
        ({"num_heads": 10}, "num_heads: 10 does not divide hidden_size 192. Set head_dim"),
        ({"hidden_size": 198}, "hidden_size: hidden_size 198 over num_heads 6 gives heads of 33"),
        ({"num_heads": 64}, "num_heads: hidden_size 192 over num_heads 64 gives heads of 3, which"),
        (
            {"rope_scaling": {"kind": "llama3", "factor": 8.0, "high_freq_factor": 0.5}},
            "rope_scaling.high_freq_factor: 0.5 is not above low_freq_factor 1.0",
        ),
        (
            {"rope_scaling": {"kind": "llama3", "factor": 8.0, "low_freq_factor": 5.0}},
            "rope_scaling.low_freq_factor: 5.0 is not between 0 and high_freq_factor 4.0",
        ),
    ],
)
def test_of_two_options_that_do_not_fit_the_one_that_was_given_is_named(given, message):
    with pytest.raises(ConfigError) as error:
        from_dict(ModelConfig, given)
    assert str(error.value).startswith(message)


def test_an_unknown_vocabulary_is_refused_where_it_is_needed():
    with pytest.raises(ConfigError, match=r"vocab_size: not known\. Set it"):
        tiny(vocab_size=None)


MESH_PROGRAM = """
import dataclasses, jax, numpy as np
jax.config.update("jax_num_cpu_devices", 8)
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P
from easypipe.core.errors import ConfigError
from easypipe.train.model.generate import generate
from easypipe.train.losses.loss import loss_sums
from easypipe.train.parallel.mesh import make_mesh
from easypipe.train.model.decoder import Decoder, ModelConfig

config = ModelConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2, tie_embeddings=TIED)
rng = np.random.default_rng(0)
ids = rng.integers(0, 64, (8, 16)).astype(np.int32)
labels = np.where(rng.random((8, 16)) < 0.2, -100, np.roll(ids, -1, 1)).astype(np.int32)
data = {"input_ids": ids, "labels": labels, "segment_ids": np.repeat([[1, 2]], 8, 0).repeat(8, 1).astype(np.int32)}

def run(batch):
    graph, params = nnx.split(jax.jit(lambda: Decoder(config, nnx.Rngs(0)))())
    f = jax.jit(jax.value_and_grad(lambda p, b: loss_sums(nnx.merge(graph, p), b, z_loss=1e-3, chunk_size=16).loss_sum))
    return params, f(params, batch), generate(nnx.merge(graph, params), [[1, 2, 3]], max_new_tokens=4, temperature=0)

as_numpy = lambda tree: [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
params, (loss, grads), text = jax.tree.map(np.asarray, run(data))
for shape in [(2, 2, 2), (1, 2, 4)]:
    mesh = make_mesh(dict(zip(("data", "fsdp", "tensor"), shape, strict=True)))
    with jax.set_mesh(mesh):
        p, (l, g), t = run(jax.device_put(data, NamedSharding(mesh, P(("data", "fsdp")))))
    specs = {jax.tree_util.keystr(path): leaf.sharding.spec for path, leaf in jax.tree_util.tree_flatten_with_path(p)[0]}
    if shape == (2, 2, 2):
        assert specs["['embedding'].value"] == P("tensor", "fsdp"), specs
        assert specs["['layers']['gate']['kernel'].value"] == P(None, "fsdp", "tensor"), specs
        assert specs["['layers']['down']['kernel'].value"] == P(None, "tensor", "fsdp"), specs
        share = p["layers"]["gate"]["kernel"].get_value().addressable_shards[0].data.size * 4
        assert share == p["layers"]["gate"]["kernel"].get_value().size, "a device holds its share only"
    assert all(abs(a - b).max() < 1e-6 for a, b in zip(as_numpy(p), as_numpy(params))), "the same on every mesh, up to rounding"
    assert abs(float(l) / float(loss) - 1) < 1e-5
    ratios = [float(np.vdot(a, b) / np.vdot(b, b)) for a, b in zip(as_numpy(g), as_numpy(grads))]
    assert max(abs(ratio - 1) for ratio in ratios) < 1e-4, (shape, ratios)
    assert jax.tree.leaves(t) == [int(token) for token in jax.tree.leaves(text)]
    with jax.set_mesh(mesh):
        if shape[2] == 4:
            try:
                Decoder(dataclasses.replace(config, vocab_size=66), nnx.Rngs(0))
            except ConfigError as error:
                want = "model.vocab_size: 66 does not divide over the 4 devices of mesh axis 'tensor'. "
                assert str(error) == want + "Give axis 'tensor' one of [1, 2], or change vocab_size.", error
            else:
                raise AssertionError("an uneven vocabulary was accepted")
print("all equal")
"""


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_born_sharded_and_equal_on_every_mesh(tied):
    """In a process of its own: a process fixes its number of devices when jax starts."""
    program = MESH_PROGRAM.replace("TIED", str(tied))
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = forked.run([sys.executable, "-c", program], env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "all equal" in done.stdout
    assert "rematerialization" not in done.stderr, "the partitioner gave up on a layout"
