"""Every optimizer and every schedule of the configuration: that they descend, that their options do
something, that nothing of their state is on every device by accident."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
from typing import Any

import jax

if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import forked
from easypipe.core.errors import ConfigError, StateError
from easypipe.train import state as states
from easypipe.train.config import CheckpointConfig
from easypipe.train.metrics.log import read_metrics
from easypipe.train.model.classifier import Classifier
from easypipe.train.model.config import ClassifierConfig, LoraConfig
from easypipe.train.model.decoder import Decoder, ModelConfig
from easypipe.train.optim.config import DEFAULTS, OptimizerConfig, ParameterGroup
from easypipe.train.optim.optimizers import make_optimizer, make_schedule
from easypipe.train.parallel.mesh import make_mesh, partitioned
from easypipe.train.trainer import Trainer

if __name__ != "__main__":
    from train.runs import Arithmetic, Tiny, numbers, settings

STEPS = 60
QUARTERS = {  # mesh, and over which of its axes the optimizer's state is divided besides
    (("data", 4), ("sequence", 2)): ("data",),
    (("data", 2), ("sequence", 2), ("tensor", 2)): ("data",),
    (("fsdp", 2), ("sequence", 2), ("tensor", 2)): (),
}
RATES = {"prodigy": 1.0, "muon": 0.3, "lamb": 0.05}


def quadratic():
    """A loss whose curvature differs by direction: 0.5 |A^T (W - B)|^2 + |b - 1|^2."""
    random = np.random.default_rng(0)
    aim = jnp.asarray(random.normal(size=(6, 4)), jnp.float32)
    mix = jnp.asarray(
        np.diag([3.0, 2.0, 1.0, 0.7, 0.5, 0.3]) @ np.linalg.qr(random.normal(size=(6, 6)))[0],
        jnp.float32,
    )

    def loss(params):
        return 0.5 * jnp.sum((mix @ (params["w"] - aim)) ** 2) + jnp.sum(
            (params["bias"] - 1.0) ** 2
        )

    return loss, {"w": jnp.ones((6, 4), jnp.float32), "bias": jnp.zeros(4, jnp.float32)}


def descend(config: OptimizerConfig, steps: int = STEPS, hidden: bool = True):
    """Losses before and after, parameters, state, optimizer, and the parameters after every step."""
    loss, params = quadratic()
    optimizer = make_optimizer(
        config, steps, {"w": True, "bias": False}, {"w": hidden, "bias": False}
    )
    state = optimizer.init(params)

    def step(carry, _):
        params, state = carry
        updates, state = optimizer.update(jax.grad(loss)(params), state, params, obj_fn=loss)
        params = optax.apply_updates(params, updates)
        return (params, state), params

    (params, state), path = jax.jit(lambda carry: jax.lax.scan(step, carry, length=steps))(
        (params, state)
    )
    return (
        loss(quadratic()[1]),
        loss(optimizer.eval_params(state, params)),
        params,
        state,
        optimizer,
        path,
    )


@pytest.mark.parametrize("name", DEFAULTS)
def test_f25_every_optimizer_descends(name):
    config = OptimizerConfig(
        name=name, learning_rate=RATES.get(name, 0.1), weight_decay=0.0, clip_norm=None
    )
    before, after, *_ = descend(config)
    assert after < 0.2 * before


@pytest.mark.parametrize("name", DEFAULTS)
def test_every_option_of_an_optimizer_does_something_and_others_are_refused(name):
    given = {"learning_rate": RATES.get(name, 0.05), "clip_norm": None} | (
        {"gamma": 1.0} if name == "sophia" else {}
    )
    other = {
        "beta1": 0.5,
        "beta2": 0.7,
        "beta3": 0.6,
        "epsilon": 50.0,
        "weight_decay": 0.5,
        "momentum": 0.3,
        "newton_schulz_steps": 1,
        "decay_rate": 0.3,
        "gamma": 5.0,
        "alpha": 1.0,
        "update_interval": 3,
        "max_precondition_dim": 4,
    }
    base = descend(OptimizerConfig(name=name, **given), 5)[2]
    for option, value in other.items():
        if option in DEFAULTS[name]:
            # muon's betas and epsilon are those of the AdamW that its other parameters get
            key = "bias" if name == "muon" and option in ("beta1", "beta2", "epsilon") else "w"
            assert not np.array_equal(
                base[key], descend(OptimizerConfig(name=name, **given | {option: value}), 5)[2][key]
            ), option
        else:
            with pytest.raises(
                ConfigError,
                match=rf"^{option}: {name} has no {option}\. Remove it, or choose one of ",
            ):
                OptimizerConfig(name=name, **given | {option: value})


@pytest.mark.parametrize("name", DEFAULTS)
def test_decay_is_decoupled_on_matrices_alone_and_groups_train_otherwise(name):
    """With no gradient a matrix shrinks by the rate times the decay, a bias stays; a frozen group
    does not move at all.
    """
    rate, decay = 0.125, 0.25
    params = {
        "w": jnp.full((6, 4), 2.0),
        "frozen.w": jnp.full((6, 4), 2.0),
        "bias": jnp.full(4, 2.0),
    }
    kinds = {"w": True, "frozen.w": True, "bias": False}
    groups = (ParameterGroup(match="frozen.*", learning_rate_scale=0.0),)
    config = OptimizerConfig(
        name=name,
        learning_rate=rate,
        schedule="constant",
        weight_decay=decay,
        clip_norm=None,
        groups=groups,
    )

    def first_update(config: OptimizerConfig, gradient: float):
        optimizer = make_optimizer(config, 10, kinds)
        grads = jax.tree.map(lambda p: jnp.full(p.shape, gradient), params)
        return optimizer.update(
            grads,
            optimizer.init(params),
            params,
            obj_fn=lambda p: 0.0 * sum(jnp.sum(x) for x in p.values()),
        )[0]

    # without a gradient it has no rate; decay is of the rate that the step is taken with
    if name == "prodigy":
        with_decay, without = (
            first_update(dataclasses.replace(config, weight_decay=d), 1.0) for d in (decay, 0.0)
        )
        updates = jax.tree.map(jnp.subtract, with_decay, without)
        assert np.all(np.asarray(with_decay["frozen.w"]) == 0)
        expected = -rate * decay * 2.0 * 1e-6 * np.sqrt(1 - 0.999) / (1 - 0.9)
    else:
        updates = first_update(config, 0.0)
        # lamb's trust ratio makes any step as long as the parameter
        expected = -rate * 2.0 if name == "lamb" else -rate * decay * 2.0
    for still in ("bias", "frozen.w"):
        assert np.all(np.asarray(updates[still]) == 0)
    np.testing.assert_allclose(updates["w"], expected, rtol=1e-2 if name == "prodigy" else 1e-4)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("average", [None, 0.9])
@pytest.mark.parametrize("name", DEFAULTS)
def test_a_frozen_group_stays_bit_for_bit_trained_and_evaluated(name, average, dtype):
    groups = (ParameterGroup(match="frozen.*", learning_rate_scale=0.0),)
    average = None if name == "schedule_free" else average
    optimizer = make_optimizer(
        OptimizerConfig(name=name, groups=groups, ema_decay=average),
        20,
        {"w": True, "frozen.w": True, "frozen.bias": False},
    )
    random = np.random.default_rng(0)
    start = {"w": random.normal(size=(6, 4)), "frozen.w": random.normal(size=(6, 4))}
    start["frozen.bias"] = np.array([-0.0, 0.0, 1e-30, 1 / 3])
    start = {name: jnp.asarray(value, dtype) for name, value in start.items()}

    @jax.jit
    def step(params, state, grads):
        updates, state = optimizer.update(
            grads, state, params, obj_fn=lambda p: sum(jnp.sum(x**2) for x in p.values())
        )
        return optax.apply_updates(params, updates), state

    params, state = start, optimizer.init(start)
    for _ in range(20):
        grads = {
            name: jnp.asarray(random.normal(size=value.shape), dtype)
            for name, value in start.items()
        }
        params, state = step(params, state, grads)
    # a small step is less than half a place of bfloat16
    assert dtype == jnp.bfloat16 or not np.array_equal(params["w"], start["w"])
    evaluated = jax.jit(optimizer.eval_params)(state, params)
    for frozen in ("frozen.w", "frozen.bias"):
        for found in (params, evaluated):
            assert np.asarray(found[frozen]).tobytes() == np.asarray(start[frozen]).tobytes()


def test_schedule_free_is_refused_for_parameters_that_it_would_move_by_rounding(tmp_path):
    def made(param_dtype: Any, **options: Any) -> Trainer:
        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_layers": 1, "num_heads": 2}
        model = ModelConfig(vocab_size=32, param_dtype=param_dtype, dtype="bfloat16", **sizes)
        optimizer = OptimizerConfig(name="schedule_free")
        return Trainer(model, settings(tmp_path, optimizer=optimizer, **options), Arithmetic())

    message = (
        r"^train\.optimizer\.name: schedule_free needs parameters in float32, since it would move "
        r"others by their rounding at every step: embedding, head\.kernel, .*\. Set "
        r"model\.param_dtype: float32 \(model\.dtype may stay bfloat16\), or choose another "
        r"optimizer\.$"
    )
    with pytest.raises(ConfigError, match=message):
        made("bfloat16")
    made("float32")  # what it says to do
    # adapters beside them are in float32
    made("bfloat16", lora=LoraConfig(rank=2))


def test_a_group_decides_by_name_first_match_first():
    kinds = {"layers.query.kernel": True, "embedding": True, "norm.scale": False}
    groups = (
        ParameterGroup(match="layers.*", weight_decay=0.5),
        ParameterGroup(match="norm.*", weight_decay=0.25, learning_rate_scale=2.0),
    )
    config = OptimizerConfig(
        name="lion",
        learning_rate=0.1,
        schedule="constant",
        weight_decay=1.0,
        clip_norm=None,
        groups=groups,
    )
    optimizer = make_optimizer(config, 10, kinds)
    params = {name: jnp.ones(3) for name in kinds}
    updates, _ = optimizer.update(
        jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params
    )
    np.testing.assert_allclose(
        [float(updates[name][0]) for name in kinds], [-0.05, -0.1, -0.05], rtol=1e-6
    )
    for match, reason in (
        ("layer.*", "fits no parameter"),
        ("layers.query.*", "fits only parameters that an earlier group has"),
    ):
        with pytest.raises(ConfigError, match=reason) as error:
            make_optimizer(
                OptimizerConfig(
                    groups=(ParameterGroup(match="layers.*"), ParameterGroup(match=match))
                ),
                10,
                kinds,
            )
        assert error.value.at == "train.optimizer.groups[1].match"
    assert "layers.query.kernel" in str(error.value)


@pytest.mark.parametrize("name", ["adamw", "prodigy", "sophia"])
def test_ema_decay_evaluates_a_running_average_of_what_is_trained(name: str) -> None:
    options: Any = {"name": name, "learning_rate": 0.1, "schedule": "constant"}
    _, _, plain, *_, path = descend(OptimizerConfig(**options), steps=9)
    config = OptimizerConfig(ema_decay=0.4, **options)
    _, _, params, state, optimizer, _ = descend(config, steps=9)
    average = jax.tree.map(lambda start: np.asarray(start, np.float64), quadratic()[1])
    for steps in range(1, 10):
        kept = min(0.4, steps / (9 + steps))
        average = {
            k: kept * average[k] + (1 - kept) * np.asarray(path[k][steps - 1]) for k in average
        }
    assert optimizer.needs_objective == (name == "sophia")
    found = optimizer.eval_params(state, params)
    for k, want in average.items():
        np.testing.assert_array_equal(params[k], plain[k])
        np.testing.assert_allclose(found[k], want, rtol=1e-5)
    for wrong in ({"ema_decay": 1.0}, {"ema_decay": 0.9, "name": "schedule_free"}):
        with pytest.raises(ConfigError, match="ema_decay"):
            OptimizerConfig(**wrong)


def test_schedule_free_is_evaluated_at_its_average():
    config = OptimizerConfig(
        name="schedule_free", learning_rate=0.1, weight_decay=0.0, clip_norm=None
    )
    _, after, params, state, optimizer, _ = descend(config)
    loss, _ = quadratic()
    assert float(after) != float(loss(params))
    averages = optimizer.eval_params(state, params)
    expected = jax.tree.map(lambda y, z: (y - 0.1 * z) / 0.9, params, state[-1].z)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), averages, expected)
    with pytest.raises(
        ConfigError, match=r"schedule: schedule_free runs at a constant rate, not cosine"
    ):
        OptimizerConfig(name="schedule_free", schedule="cosine")


def test_soap_is_the_algorithm_of_the_paper():
    """Against a plain float64 loop over one matrix: rotate, Adam, rotate back; then averages, and
    one power step with QR.
    """
    b1, b2, eps, every = 0.9, 0.8, 1e-8, 2
    config = OptimizerConfig(
        name="soap",
        learning_rate=1.0,
        schedule="constant",
        beta1=b1,
        beta2=b2,
        update_interval=every,
    )
    config = dataclasses.replace(config, epsilon=eps, weight_decay=0.0, clip_norm=None)
    optimizer = make_optimizer(config, 10, {"w": True})
    random = np.random.default_rng(1)
    with jax.enable_x64(True):
        params = {"w": jnp.zeros((2, 4, 4), jnp.float64)}  # two stacked matrices
        state = optimizer.init(params)
        grads = random.normal(size=(6, 2, 4, 4))
        got = []
        for gradient in grads:
            updates, state = optimizer.update({"w": jnp.asarray(gradient)}, state, params)
            got.append(np.asarray(updates["w"]))
    for which in range(2):
        left, right, mean, square = (
            np.zeros((4, 4)),
            np.zeros((4, 4)),
            np.zeros((4, 4)),
            np.zeros((4, 4)),
        )
        q_left, q_right = np.eye(4), np.eye(4)
        for t, gradient in enumerate(grads[:, which]):
            if t == 0:
                expected = np.zeros((4, 4))
            else:
                turned = q_left.T @ gradient @ q_right
                mean, square = b1 * mean + (1 - b1) * gradient, b2 * square + (1 - b2) * turned**2
                scaled = (q_left.T @ (mean / (1 - b1**t)) @ q_right) / (
                    np.sqrt(square / (1 - b2**t)) + eps
                )
                expected = -(q_left @ scaled @ q_right.T)
            np.testing.assert_allclose(got[t][which], expected, rtol=1e-6, atol=1e-9)
            left, right = (
                b2 * left + (1 - b2) * gradient @ gradient.T,
                b2 * right + (1 - b2) * gradient.T @ gradient,
            )
            if t == 0:
                q_left, q_right = (
                    np.linalg.eigh(left)[1][:, ::-1],
                    np.linalg.eigh(right)[1][:, ::-1],
                )
            elif t % every == 0:
                order = np.argsort(-np.diag(q_left.T @ left @ q_left))
                q_left, square = np.linalg.qr(left @ q_left[:, order])[0], square[order]
                order = np.argsort(-np.diag(q_right.T @ right @ q_right))
                q_right, square = np.linalg.qr(right @ q_right[:, order])[0], square[:, order]


class Wide(nnx.Module):
    """An embedding, two stacked layers, a head: every kind of parameter a decoder has, large enough
    that Adafactor factors them.
    """

    def __init__(self, rngs: nnx.Rngs) -> None:
        normal = nnx.initializers.normal(0.1)
        key = rngs.params()
        self.table = nnx.Param(partitioned(normal, "vocab", "embed")(key, (256, 128), jnp.float32))
        self.layers = nnx.Param(
            partitioned(normal, "layers", "embed", "mlp")(key, (2, 128, 384), jnp.float32)
        )
        self.square = nnx.Param(partitioned(normal, "embed", "mlp")(key, (128, 128), jnp.float32))
        self.scale = nnx.Param(partitioned(nnx.initializers.ones, None)(key, (128,), jnp.float32))


def print_what_devices_hold() -> None:
    """Runs in a process with eight devices: {optimizer: [[where, ndim, size, size on a device],
    ...]} of real states, as JSON.
    """
    mesh = make_mesh({"fsdp": 2, "tensor": 4})
    held = {}
    with states.on(mesh):
        layout = states.layout_of(nnx.eval_shape(lambda: Wide(nnx.Rngs(0))), mesh)
        for name in DEFAULTS:
            optimizer = make_optimizer(OptimizerConfig(name=name), 10, layout.decays, layout.hidden)
            state = states.init_state(lambda: Wide(nnx.Rngs(0)), layout, optimizer)
            leaves = jax.tree_util.tree_flatten_with_path(state.optimizer)[0]
            held[name] = [
                (jax.tree_util.keystr(p), x.ndim, x.size, x.addressable_shards[0].data.size)
                for p, x in leaves
            ]
    for axes, spread in QUARTERS.items():
        mesh = make_mesh(dict(axes))
        with states.on(mesh):
            layout = states.layout_of(
                nnx.eval_shape(lambda: Wide(nnx.Rngs(0))), mesh, spread=spread
            )
            for name in DEFAULTS:
                optimizer = make_optimizer(
                    OptimizerConfig(name=name), 10, layout.decays, layout.hidden
                )
                leaves = jax.tree_util.tree_flatten_with_path(
                    states.abstract_state(layout, optimizer).optimizer
                )[0]
                on_device = [math.prod(x.sharding.shard_shape(x.shape)) for _, x in leaves]
                key = f"{name} {axes} {spread}"
                held[key] = [
                    (jax.tree_util.keystr(p), x.ndim, x.size, n)
                    for (p, x), n in zip(leaves, on_device, strict=True)
                ]
    print(json.dumps(held))


@pytest.fixture(scope="module")
def held() -> dict[str, list[list]]:
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = forked.run([sys.executable, __file__], env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", DEFAULTS)
def test_no_moment_is_on_every_device_by_accident(name, held):
    """On a mesh of 2 x 4, what a device holds of the optimizer is an eighth of it, plus what is
    small: counters, vectors, keys.
    """
    for where, ndim, size, on_device in held[name]:
        if ndim >= 2 and name not in ("soap", "adafactor"):
            assert on_device * 8 == size, where
        elif size > 200:  # a side of a matrix lies over that side's axis alone
            assert on_device < size, where
    total, on_device = (sum(leaf[i] for leaf in held[name]) for i in (2, 3))
    assert on_device <= {"soap": 0.4, "adafactor": 0.6}.get(name, 0.13) * total


@pytest.mark.parametrize("name", DEFAULTS)
@pytest.mark.parametrize(("axes", "spread"), QUARTERS.items())
def test_no_moment_is_whole_under_zero1_and_beside_a_sequence_axis(name, axes, spread, held):
    """A device holds a quarter of every moment, as the rest of the mesh shares rows: of ZeRO-1's
    four replicas each holds its part.
    """
    found = held[f"{name} {axes} {spread}"]
    for where, ndim, size, on_device in found:
        if ndim >= 2 and name not in ("soap", "adafactor"):
            assert on_device * 4 == size, where
        elif size > 200:
            assert on_device < size, where
    total, on_device = (sum(leaf[i] for leaf in found) for i in (2, 3))
    assert on_device <= {"soap": 0.6, "adafactor": 0.7}.get(name, 0.26) * total


@pytest.mark.parametrize("shape", [(4, 64), (64, 4), (16, 16), (3, 8, 32)], ids=str)
def test_a_step_of_muon_is_as_large_as_one_of_adamw_whatever_the_shape(shape):
    """0.2 for each number (Liu et al., 2025, section 2.2), up to the steps of Newton and Schulz."""
    how = {"learning_rate": 1.0, "schedule": "constant", "warmup_steps": 0, "weight_decay": 0.0}
    config = OptimizerConfig(name="muon", clip_norm=None, **how)
    muon = make_optimizer(config, 10, {"w": True})
    params = {"w": jnp.zeros(shape)}
    gradient = {"w": jax.random.normal(jax.random.key(0), shape)}
    step, _ = muon.update(gradient, muon.init(params), params)
    assert 0.15 < float(jnp.sqrt(jnp.square(step["w"]).mean())) < 0.25


def test_muon_leaves_embeddings_heads_and_vectors_to_adamw():
    mesh = make_mesh({"data": 1}, devices=jax.devices()[:1])
    with states.on(mesh):
        layout = states.layout_of(nnx.eval_shape(lambda: Tiny(nnx.Rngs(0))), mesh)
    assert [name for name, is_hidden in layout.hidden.items() if is_hidden] == [
        "layers.0.kernel",
        "layers.1.kernel",
    ]
    hidden, embedded = (
        descend(OptimizerConfig(name="muon", learning_rate=0.01), 1, hidden)[2]["w"]
        for hidden in (True, False)
    )
    adam = descend(OptimizerConfig(name="adamw", learning_rate=0.01), 1)[2]["w"]
    np.testing.assert_allclose(embedded, adam, rtol=1e-6)
    step = np.asarray(hidden) * (1 / (1 - 0.01 * 0.1)) - 1.0  # without the decay of w = 1
    singular = np.linalg.svd(step, compute_uv=False) / (0.01 * 0.2 * np.sqrt(6))
    assert np.all((singular > 0.5) & (singular < 1.3))  # what five Newton-Schulz steps make of them


@pytest.mark.parametrize("name", ["lamb", "adafactor", "muon", "soap"])
def test_each_of_the_stacked_layers_is_stepped_as_if_it_were_alone(name, tmp_path):
    """Layers that differ in size by 100 would show a norm over all of them."""
    config = OptimizerConfig(name=name, schedule="constant", clip_norm=None)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_layers": 3, "num_heads": 2}
    run = settings(tmp_path, steps=4, optimizer=config)
    trainer = Trainer(ModelConfig(vocab_size=32, **sizes), run, Arithmetic())
    layout, random = trainer.layout, np.random.default_rng(0)
    assert layout.stacked == {one for one in layout.params if one.startswith("layers.")}

    def drawn(*of_layers: float) -> dict[str, jax.Array]:
        return {
            one: jnp.asarray(random.normal(size=leaf.shape), jnp.float32)
            * (jnp.array(of_layers).reshape(3, *[1] * (leaf.ndim - 1)) if "layers." in one else 1)
            for one, leaf in layout.params.items()
        }

    def apart(values: Any) -> dict[str, Any]:
        return {
            f"{one}@{i}": value[i] if isinstance(value, jax.Array) and "layers." in one else value
            for one, value in values.items()
            for i in (range(3) if "layers." in one else (0,))
        }

    params = drawn(1.0, 10.0, 100.0)
    alone = make_optimizer(config, 4, apart(layout.decays), apart(layout.hidden))
    together, each = trainer.optimizer.init(params), alone.init(apart(params))
    for _ in range(3):
        grads = drawn(1.0, 1.0, 1.0)
        found, together = trainer.optimizer.update(grads, together, params)
        wanted, each = alone.update(apart(grads), each, apart(params))
        for one, update in apart(found).items():
            np.testing.assert_allclose(update, wanted[one], rtol=1e-3, atol=1e-6, err_msg=one)


class Unlabelled(nnx.Module):
    """A user's model without labels, whose heads only their names tell."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed, self.mix = nnx.Embed(8, 4, rngs=rngs), nnx.Linear(4, 4, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 4, rngs=rngs)
        self.head, self.value_head = nnx.Linear(4, 8, rngs=rngs), nnx.Linear(4, 2, rngs=rngs)
        self.output = nnx.Linear(4, 8, rngs=rngs)


def reward_model() -> Decoder:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_layers": 1, "num_heads": 2}
    made = Decoder(ModelConfig(vocab_size=8, **sizes), nnx.Rngs(0))
    made.add_score(0)
    return made


@pytest.mark.parametrize(
    ("build", "heads"),
    [
        (reward_model, {"embedding", "head.kernel", "score"}),
        (
            lambda: Classifier(ClassifierConfig(num_classes=3, image_shape=(4, 4, 1)), nnx.Rngs(0)),
            {"out.kernel"},
        ),
        (
            lambda: Unlabelled(nnx.Rngs(0)),
            {"embed.embedding", "head.kernel", "value_head.kernel", "output.kernel"},
        ),
    ],
    ids=["reward", "classifier", "unlabelled"],
)
def test_every_head_is_known_by_its_labels_or_its_name(build, heads):
    mesh = make_mesh({"data": 1}, devices=jax.devices()[:1])
    with states.on(mesh):
        layout = states.layout_of(nnx.eval_shape(build), mesh)
    matrices = {name for name, decays in layout.decays.items() if decays}
    assert {name for name in matrices if not layout.hidden[name]} == heads


def test_a_checkpoint_in_which_muon_took_a_head_is_refused_by_name(tmp_path, monkeypatch):
    def run(steps):
        config = settings(tmp_path, steps=steps, optimizer=OptimizerConfig(name="muon"))
        config = dataclasses.replace(config, resume_changes=("train.steps",))
        mesh = make_mesh({"data": 1}, devices=jax.devices()[:1])
        return Trainer(Tiny, config, Arithmetic(), mesh=mesh).run()

    with monkeypatch.context() as earlier:
        earlier.setattr(states, "_is_outer", lambda *_: False)
        run(1)
    with pytest.raises(StateError, match=r"holds other arrays: optimizer/.*/table\.embedding"):
        run(2)


@pytest.mark.parametrize("name", ["sophia", "schedule_free", "soap", "muon"])
def test_a_run_resumes_bit_for_bit_whatever_the_optimizer_keeps(name, tmp_path):
    """Sophia's curvature comes from the first micro-batch through the loss itself; schedule_free is
    evaluated at its average.
    """
    options = {
        "optimizer": OptimizerConfig(
            name=name, learning_rate=0.02, update_interval=2 if name in ("sophia", "soap") else None
        )
    }
    options |= {"accumulate_steps": 2, "eval_every": 4}

    def run(folder, steps):
        config = settings(folder, steps=8, checkpoint=CheckpointConfig(every=4), **options)

        def stop(event):
            if event.kind == "step" and event.step == steps:
                raise KeyboardInterrupt

        mesh = make_mesh({"data": 1}, devices=jax.devices()[:1])
        return Trainer(
            Tiny, config, Arithmetic(), {"held": Arithmetic(2, seed=7)}, listener=stop, mesh=mesh
        ).run()

    whole = run(tmp_path / "whole", None)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", 6)
    cut = run(tmp_path / "cut", None)
    assert cut.resumed_from == 4
    assert numbers(read_metrics(whole.metrics)) == numbers(read_metrics(cut.metrics))
    assert whole.last["loss"] < whole.first["loss"]


def test_any_optax_transformation_from_python(tmp_path):
    mesh = make_mesh({"data": 1}, devices=jax.devices()[:1])
    result = Trainer(
        Tiny,
        settings(tmp_path, optimizer=OptimizerConfig()),
        Arithmetic(),
        mesh=mesh,
        optimizer=optax.sgd(0.5),
    ).run()
    assert result.last["loss"] < result.first["loss"]
    assert "learning_rate" not in result.last
    with pytest.raises(
        ConfigError, match=r"^train\.optimizer: given, and so is an optimizer from Python"
    ):
        Trainer(Tiny, settings(tmp_path), Arithmetic(), mesh=mesh, optimizer=optax.sgd(0.5))


@pytest.mark.parametrize(
    ("options", "expected"),  # rates at steps 0, 3, 4, 12, 19 of 20, of the peak
    [
        ({"schedule": "constant"}, [0.2, 0.8, 1.0, 1.0, 1.0]),
        ({"schedule": "linear"}, [0.2, 0.8, 1.0, 0.55, 0.1 + 0.9 / 16]),
        ({"schedule": "polynomial", "final_fraction": 0.0}, [0.2, 0.8, 1.0, 0.25, 1 / 256]),
        (
            {"schedule": "polynomial", "final_fraction": 0.0, "power": 3.0},
            [0.2, 0.8, 1.0, 0.125, 1 / 4096],
        ),
        ({"schedule": "inverse_sqrt"}, [0.2, 0.8, 1.0, 3**-0.5, (4 / 19) ** 0.5]),
        ({"schedule": "wsd"}, [0.2, 0.8, 1.0, 1.0, 0.55]),
        (
            {"schedule": "wsd", "cooldown_steps": 10, "final_fraction": 0.0},
            [0.2, 0.8, 1.0, 0.8, 0.1],
        ),
        (
            {"schedule": "constant", "cooldown_steps": 10, "cooldown_shape": "sqrt"},
            [0.2, 0.8, 1.0, 1 - 0.9 * 0.2**0.5, 1 - 0.9 * 0.9**0.5],
        ),
        (
            {
                "schedule": "constant",
                "cooldown_steps": 10,
                "cooldown_shape": "cosine",
                "final_fraction": 0.0,
            },
            [0.2, 0.8, 1.0, (1 + np.cos(0.2 * np.pi)) / 2, (1 + np.cos(0.9 * np.pi)) / 2],
        ),
        (
            {"schedule": "inverse_sqrt", "cooldown_steps": 4, "final_fraction": 0.0},
            [0.2, 0.8, 1.0, 3**-0.5, 0.125],
        ),
        (
            {"schedule": "one_cycle", "final_fraction": 0.0},
            [
                0.04,
                0.04 + 0.96 * (1 - np.cos(0.75 * np.pi)) / 2,
                1.0,
                0.5,
                (1 + np.cos(15 / 16 * np.pi)) / 2,
            ],
        ),
    ],
)
def test_f25_schedules_have_their_formula(options, expected):
    schedule = make_schedule(OptimizerConfig(learning_rate=2.0, warmup_steps=4, **options), 20)
    np.testing.assert_allclose(
        [float(schedule(jnp.int32(k))) / 2.0 for k in (0, 3, 4, 12, 19)], expected, rtol=2e-5
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"schedule": "cosine", "cooldown_steps": 3},
            "cooldown_steps: cosine falls all along: it has no cool-down",
        ),
        (
            {"schedule": "constant", "cooldown_shape": "sqrt"},
            "cooldown_shape: there is no cool-down",
        ),
        (
            {"schedule": "constant", "final_fraction": 0.1},
            "final_fraction: the constant schedule does not have an end value",
        ),
        ({"schedule": "cosine", "power": 2.0}, "power: the cosine schedule has none"),
        (
            {"schedule": "one_cycle"},
            "warmup_steps: one_cycle rises over its warm-up, which is missing",
        ),
        (
            {"schedule": "wsd", "cooldown_steps": 0, "final_fraction": 0.5},
            "final_fraction: the wsd schedule does not have an end value",
        ),
        ({"schedule": "cosin"}, "schedule: 'cosin' is not an option"),
        (
            {"groups": ({"match": "a", "weight_decay": -1.0},)},
            r"groups\[0\].weight_decay: -1.0 is not a number from 0 up",
        ),
        ({"beta1": 1.0}, r"beta1: 1.0 is outside \[0, 1\)"),
        ({"learning_rate": float("nan")}, "learning_rate: nan is not a positive number"),
    ],
)
def test_what_has_no_effect_is_refused(options, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        OptimizerConfig(**options)


def test_warm_up_and_cool_down_leave_a_step_between_them():
    with pytest.raises(
        ConfigError,
        match=r"5 warm-up steps and 5 of cool-down do not end before the last of 10 steps\. Give "
        r"at most 4\.",
    ):
        make_schedule(OptimizerConfig(schedule="wsd", warmup_steps=5, cooldown_steps=5), 10)
    for steps, cooling in ((10, 50), (1, None)):  # and what the error says to give is taken
        with pytest.raises(ConfigError, match=rf"cooldown_steps: .*Give at most {steps - 1}\.$"):
            make_schedule(OptimizerConfig(schedule="wsd", cooldown_steps=cooling), steps)
        make_schedule(OptimizerConfig(schedule="wsd", cooldown_steps=steps - 1), steps)


@pytest.mark.parametrize("name", DEFAULTS)
def test_every_optimizer_sees_clipped_gradients(name: str) -> None:
    config = OptimizerConfig(name=name, learning_rate=0.1, clip_norm=1.0)  # type: ignore[arg-type]
    optimizer = make_optimizer(config, 10, {"w": True})
    draw = np.random.default_rng(0)
    large, small = (
        jnp.asarray(scale * draw.standard_normal((4, 4)), jnp.float32) for scale in (1e3, 1e-2)
    )
    extra = {"obj_fn": lambda params: (params["w"] ** 2).sum()} if optimizer.needs_objective else {}
    found = []
    for first in (large, large / jnp.linalg.norm(large)):
        params = {"w": jnp.full((4, 4), 0.5)}
        state = optimizer.init(params)
        for gradient in (first, small):
            updates, state = optimizer.update({"w": gradient}, state, params, **extra)
            params = optax.apply_updates(params, updates)
        found.append(np.asarray(updates["w"]))
    np.testing.assert_allclose(*found, rtol=1e-3, atol=1e-4 * np.abs(found[1]).max())


if __name__ == "__main__":
    print_what_devices_hold()
