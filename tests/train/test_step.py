from __future__ import annotations

import dataclasses
import functools
import re
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from easypipe.core.errors import ConfigError, PlacementError, TrainError
from easypipe.train import state as states
from easypipe.train.config import OptimizerConfig
from easypipe.train.losses.loss import logits_loss_sums, loss_sums
from easypipe.train.model.decoder import Decoder, ModelConfig
from easypipe.train.optim.optimizers import Optimizer, make_optimizer, make_schedule
from easypipe.train.parallel.mesh import check_batch_size, make_mesh, place_batch
from easypipe.train.step import make_eval_step, make_train_step
from train.runs import VOCAB, Arithmetic, Tiny

MESH = make_mesh({"data": 1}, devices=jax.devices()[:1])
CONFIG = OptimizerConfig(learning_rate=0.05, weight_decay=0.2, clip_norm=0.5)


@functools.cache
def compiled(accumulate_steps: int = 1, dropout: float = 0.0):
    def build():
        return Tiny(nnx.Rngs(3), dropout)

    with states.on(MESH):
        layout = states.layout_of(nnx.eval_shape(build), MESH)
        optimizer = make_optimizer(CONFIG, 50, layout.decays)
        step = make_train_step(
            layout,
            optimizer,
            make_schedule(CONFIG, 50),
            loss_sums,
            accumulate_steps=accumulate_steps,
        )
    return layout, optimizer, step, lambda: states.init_state(build, layout, optimizer)


def run(steps, **how):
    layout, _, step, fresh = compiled(**how)
    metrics = []
    with states.on(MESH):
        state = fresh()
        for t in range(1, steps + 1):
            state, measured = step(state, place_batch(Arithmetic().batch(t), MESH))
            metrics.append(jax.device_get(measured))
    return layout, state, metrics


def test_a_step_is_the_plain_mean_over_targets():
    _, optimizer, _, fresh = compiled()
    layout, after, (metrics,) = run(1)
    batch = {name: jnp.asarray(value) for name, value in Arithmetic().batch(1).items()}

    def mean_loss(params):
        model = layout.merge(params, {})
        logits = model.hidden(batch["input_ids"]) @ model.lm_head()
        nll = -jnp.take_along_axis(
            jax.nn.log_softmax(logits), jnp.maximum(batch["labels"], 0)[..., None], -1
        )[..., 0]
        keep = batch["labels"] != -100
        return (nll * keep).sum() / keep.sum()

    with states.on(MESH):
        params = fresh().params
        loss, grads = jax.jit(jax.value_and_grad(mean_loss))(params)
        updates, _ = jax.jit(optimizer.update)(grads, jax.jit(optimizer.init)(params), params)
    assert metrics["loss"] == pytest.approx(float(loss), rel=1e-5)
    assert metrics["nll"] == metrics["loss"]
    assert metrics["grad_norm"] == pytest.approx(
        np.sqrt(sum(float((np.asarray(g) ** 2).sum()) for g in grads.values())), rel=1e-4
    )
    assert metrics["learning_rate"] == np.float32(0.05)
    for name, value in params.items():
        np.testing.assert_allclose(
            after.params[name], np.asarray(value) + np.asarray(updates[name]), rtol=1e-4, atol=1e-5
        )


def test_metrics_count_targets_and_real_tokens():
    _, _, (metrics,) = run(1)
    batch = Arithmetic().batch(1)
    lengths = batch["segment_ids"].sum(axis=1)
    assert metrics["num_targets"] == (batch["labels"] != -100).sum()
    assert metrics["num_tokens"] == lengths.sum()
    assert metrics["num_slots"] == batch["input_ids"].size
    assert metrics["attended"] == (lengths**2).sum()


def test_micro_batches_of_uneven_targets_give_the_same_update():
    _, whole, one = run(6)
    _, cut, many = run(6, accumulate_steps=4)
    for a, b in zip(one, many, strict=True):
        assert (a["num_targets"], a["num_tokens"], a["attended"]) == (
            b["num_targets"],
            b["num_tokens"],
            b["attended"],
        )
        np.testing.assert_allclose(
            [a["loss"], a["grad_norm"]], [b["loss"], b["grad_norm"]], rtol=1e-4
        )
    for name, value in whole.params.items():
        np.testing.assert_allclose(cut.params[name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("accumulate_steps", [1, 4])
def test_fractional_weights_make_the_weighted_mean(accumulate_steps):
    """Against the definition in float64: sum of w * nll over sum of w, over the targets."""
    layout, _, step, fresh = compiled(accumulate_steps=accumulate_steps)
    batch = Arithmetic().batch(1)
    weights = np.random.default_rng(2).choice([0, 0.25, 0.5, 1, 3], batch["labels"].shape)
    batch["loss_weights"] = weights.astype(np.float32)
    with states.on(MESH):
        state = fresh()
        model = layout.merge(state.params, {})
        hidden, head = model.hidden(jnp.asarray(batch["input_ids"])), model.lm_head()
        hidden, head = (np.asarray(array, np.float64) for array in (hidden, head))
        evaluated = make_eval_step(layout, loss_sums)(state.params, {}, place_batch(batch, MESH))
        by_logits = logits_loss_sums(lambda ids: model.hidden(ids) @ model.lm_head(), batch)
        _, metrics = step(state, place_batch(batch, MESH))
    logits, counted = hidden @ head, batch["labels"] != -100
    lse = np.log(np.exp(logits).sum(-1))
    labels = np.maximum(batch["labels"], 0)[..., None]
    nll = lse - np.take_along_axis(logits, labels, -1)[..., 0]
    expected = (weights * nll)[counted].sum() / weights[counted].sum()
    assert float(metrics["loss"]) == pytest.approx(expected, rel=1e-5)
    assert float(metrics["nll"]) == pytest.approx(expected, rel=1e-5)
    assert metrics["num_targets"] == counted.sum()
    for out in (evaluated, by_logits):
        assert float(out.loss_sum / out.divisor) == pytest.approx(expected, rel=1e-5)


def test_weights_of_one_change_nothing():
    _, plain, (one,) = run(1)
    _, _, step, fresh = compiled()
    batch = Arithmetic().batch(1)
    batch["loss_weights"] = np.ones(batch["labels"].shape, np.float32)
    with states.on(MESH):
        state, two = step(fresh(), place_batch(batch, MESH))
    np.testing.assert_allclose(float(two["loss"]), one["loss"], rtol=1e-6)
    for name, value in plain.params.items():
        np.testing.assert_allclose(state.params[name], value, rtol=1e-4, atol=1e-5)


def test_weights_that_are_not_finite_are_a_step_to_skip_and_no_batch_without_targets():
    _, _, step, fresh = compiled()
    batch = Arithmetic().batch(1)
    batch["loss_weights"] = np.full(batch["labels"].shape, np.nan, np.float32)
    with states.on(MESH):
        state, measured = step(fresh(), place_batch(batch, MESH))
    assert int(measured["num_targets"]) == (batch["labels"] != -100).sum()
    assert np.isnan(measured["loss"])
    assert int(state.step) == 0


@pytest.mark.parametrize("option", ["z_loss", "label_smoothing"])
def test_what_is_added_to_the_loss_is_not_in_nll(option):
    layout, _, _, fresh = compiled()
    with states.on(MESH):
        state, batch = fresh(), place_batch(Arithmetic().batch(1), MESH)
        plain, more = (
            make_eval_step(layout, functools.partial(loss_sums, **{option: size}))(
                state.params, {}, batch
            )
            for size in (0.0, 0.1)
        )
    assert (
        float(plain.loss_sum)
        == float(plain.nll_sum)
        == pytest.approx(float(more.nll_sum), rel=1e-6)
    )
    assert abs(float(more.loss_sum) - float(plain.loss_sum)) > 0.01


def test_a_gradient_that_is_not_finite_moves_nothing_though_the_loss_is():
    class Origin(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.zeros(2))

    with states.on(MESH):
        layout = states.layout_of(nnx.eval_shape(Origin), MESH)
        optimizer = make_optimizer(OptimizerConfig(clip_norm=None), 50, layout.decays)
        # its slope is 0 / 0
        step = make_train_step(
            layout, optimizer, None, lambda model, batch: jnp.sqrt((model.w[...] ** 2).sum())
        )
        state, measured = step(
            states.init_state(Origin, layout, optimizer), place_batch(Arithmetic().batch(1), MESH)
        )
    assert (float(measured["loss"]), int(measured["updates"])) == (0.0, 0)
    assert np.isnan(measured["grad_norm"])
    assert np.asarray(state.params["w"]).tolist() == [0.0, 0.0]


def test_dropout_draws_anew_each_step_and_not_in_evaluation():
    layout, _, _, fresh = compiled(dropout=0.5)
    assert {name for name in layout.rest if name.endswith("count")}
    evaluate = make_eval_step(layout, loss_sums)
    with states.on(MESH):
        batch = place_batch(Arithmetic().batch(1), MESH)
        state = fresh()
        before = jax.device_get(state.rest)
        first, again = (
            evaluate(state.params, state.rest, batch),
            evaluate(state.params, state.rest, batch),
        )
    _, state, _ = run(2, dropout=0.5)
    assert float(first.loss_sum) == float(again.loss_sum)
    count = next(name for name in layout.rest if name.endswith("count"))
    assert int(state.rest[count]) == int(before[count]) + 2
    _, state, _ = run(1, dropout=0.5, accumulate_steps=4)  # each micro-batch draws its own
    assert int(state.rest[count]) == int(before[count]) + 4


def test_the_given_state_is_consumed():
    _, _, step, fresh = compiled()
    with states.on(MESH):
        state = fresh()
        step(state, place_batch(Arithmetic().batch(1), MESH))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))


def test_a_module_is_copied_and_not_consumed():
    model = Tiny(nnx.Rngs(3))
    layout, optimizer, step, _ = compiled()
    with states.on(MESH):
        state = states.state_from(model, states.layout_of(model, MESH), optimizer)
        np.testing.assert_array_equal(state.params["table.embedding"], model.table.embedding[...])
        step(state, place_batch(Arithmetic().batch(1), MESH))
    assert not model.table.embedding[...].is_deleted()
    assert layout.merge(*layout.split(model)).hidden(jnp.zeros((1, 2), jnp.int32)).shape == (
        1,
        2,
        8,
    )


def test_only_matrices_decay():
    class Stacked(nnx.Module):
        def __init__(self, rngs):
            make = nnx.vmap(
                Tiny, in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"}
            )
            self.stack = make(rngs.split(2))

    decays = states.layout_of(nnx.eval_shape(lambda: Stacked(nnx.Rngs(0))), MESH).decays
    assert decays == {
        "stack.layers.0.bias": False,
        "stack.layers.0.kernel": True,
        "stack.layers.1.bias": False,
        "stack.layers.1.kernel": True,
        "stack.norm.scale": False,
        "stack.table.embedding": True,
    }


def test_labels_that_no_rule_knows_are_refused():
    class Odd(nnx.Module):
        def __init__(self, rngs):
            self.weight = nnx.Param(
                jnp.zeros((4, 4)), out_sharding=("embd", None), eager_sharding=False
            )

    with pytest.raises(
        ConfigError, match=r"model\.weight: dimension 0 is labelled 'embd' .*Did you mean 'embed'\?"
    ):
        states.layout_of(Odd(nnx.Rngs(0)), MESH)


def test_flattened_states_come_back():
    _, state, _ = run(1)
    named = states.flatten(state)
    assert {"step", "params/table.embedding", "params/layers.0.kernel"} <= set(named)
    assert sum("mu" in name.split("/") for name in named) == len(state.params)
    back = states.unflatten(named, state)
    assert jax.tree.structure(back) == jax.tree.structure(state)
    assert all(a is b for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(state), strict=True))


def test_bfloat16_multiplies_and_float32_is_updated():
    """Every product of the forward pass takes bfloat16; an update far below its resolution (2^-8)
    is kept by the float32 parameters.
    """
    shape = ModelConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=16,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        dtype="bfloat16",
    )
    with states.on(MESH):
        layout = states.layout_of(nnx.eval_shape(lambda: Decoder(shape, nnx.Rngs(0))), MESH)
        optimizer = Optimizer(optax.sgd(1e-4))
        step = make_train_step(layout, optimizer, None, loss_sums)
        state = states.init_state(lambda: Decoder(shape, nnx.Rngs(0)), layout, optimizer)
        batch = place_batch(Arithmetic().batch(1), MESH)
        program = make_eval_step(layout, loss_sums).lower(state.params, state.rest, batch).as_text()
        before = jax.device_get(state.params)
        after = before
        for _ in range(3):
            state, _ = step(state, batch)
            moved = jax.device_get(state.params)
            assert all((moved[name] != after[name]).any() for name in moved)
            after = moved
    products = re.findall(r"dot_general.*: \(tensor<.*x(\w+)>, tensor<.*x(\w+)>\) ->", program)
    assert len(products) >= 8
    assert set(products) == {("bf16", "bf16")}
    rounded = [
        jnp.array_equal(before[name].astype(jnp.bfloat16), after[name].astype(jnp.bfloat16))
        for name in before
        if "kernel" not in name
    ]
    assert any(rounded), "in bfloat16 nothing would have moved"


def test_hybrid_wants_hosts_alike_and_data_across_them():
    def hosts(*sizes):
        return [
            SimpleNamespace(platform="cpu", process_index=host)
            for host, size in enumerate(sizes)
            for _ in range(size)
        ]

    with pytest.raises(
        ConfigError,
        match=r"mesh\.preset: hybrid needs hosts of one size, but these have 2, 4 devices",
    ):
        make_mesh("hybrid", devices=hosts(4, 2))
    with pytest.raises(
        ConfigError,
        match=r"mesh\.data: hybrid puts data across 2 hosts .*Let fsdp x sequence x tensor divide "
        r"the 4 devices of",
    ):
        make_mesh({"preset": "hybrid", "fsdp": 8}, devices=hosts(4, 4))


@dataclasses.dataclass(frozen=True)
class Chip:
    process_index: int
    id: int
    platform: str = "cpu"
    device_kind: str = "cpu"
    client: Any = None
    slice_index: int = 0


def test_hybrid_keeps_parameters_within_a_slice_of_several_processes():
    chips = [Chip(number // 2, number, slice_index=number % 2) for number in range(8)]
    mesh = make_mesh("hybrid", devices=chips)
    assert dict(mesh.shape) == {"data": 2, "fsdp": 4, "sequence": 1, "tensor": 1}
    slices = np.vectorize(lambda chip: chip.slice_index)(mesh.devices).reshape(2, 4)
    assert sorted(slices[:, 0]) == [0, 1]
    assert (slices == slices[:, :1]).all()


def test_hybrid_parts_hosts_along_data_alone():
    chips = [Chip(process_index=number % 2, id=number) for number in range(8)]
    mesh = make_mesh({"preset": "hybrid", "fsdp": 2, "tensor": 2}, devices=chips)
    assert dict(mesh.shape) == {"data": 2, "fsdp": 2, "sequence": 1, "tensor": 2}
    hosts = np.vectorize(lambda chip: chip.process_index)(mesh.devices).reshape(2, 4)
    assert sorted(hosts[:, 0]) == [0, 1]
    assert (hosts == hosts[:, :1]).all()


def test_meshes_and_batches_that_do_not_fit_say_what_would():
    with pytest.raises(
        ConfigError,
        match=r"mesh: \{data: 3, fsdp: 1, sequence: 1, tensor: 1\} does not fit 1 cpu device\. Let "
        r"the sizes multiply to 1",
    ):
        make_mesh({"data": 3}, devices=jax.devices()[:1])
    with pytest.raises(ConfigError, match=r"mesh\.tensr: unknown key .*Did you mean 'tensor'\?"):
        make_mesh({"tensr": 1})
    with pytest.raises(
        PlacementError,
        match=r"10 rows do not divide by the mesh \(data 1, fsdp 1\) times accumulate_steps 4\. "
        r"Use 8 or 12 rows",
    ):
        check_batch_size(10, MESH, 4)
    with pytest.raises(PlacementError, match=r"3 rows do not .*\. Use 4 rows\."):
        check_batch_size(3, MESH, 4)
    for rows in (8, 12):
        check_batch_size(rows, MESH, 4)


def test_values_of_rows_are_placed_beside_their_tokens():
    batch = {"weight": np.arange(4.0), "input_ids": np.zeros((4, 8), np.int32)}
    placed = place_batch(batch, make_mesh({"data": 1}, devices=jax.devices()[:1]))
    for name, value in batch.items():
        np.testing.assert_array_equal(placed[name], value)
        assert len(placed[name].sharding.spec) == value.ndim


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([[1, 2]], "batch.mine: list, not an array of numbers in rows"),
        (3, "batch.mine: int, not an array of numbers in rows"),
        (np.zeros(()), r"batch.mine: float64 of shape \(\), not an array of numbers in rows"),
        (np.array(["a"]), r"batch.mine: <U1 of shape \(1,\), not an array of numbers in rows"),
    ],
)
def test_a_column_that_cannot_be_placed_is_named(value, message):
    with pytest.raises(TrainError, match=message):
        place_batch(
            {"input_ids": np.zeros((1, 8), np.int32), "mine": value},
            make_mesh({"data": 1}, devices=jax.devices()[:1]),
        )


def test_short_batches_are_filled_with_what_trains_nothing():
    batch = Arithmetic(1, last=3).batch(1)
    placed = place_batch(batch, MESH, rows=8)
    assert {name: value.shape for name, value in placed.items()} == dict.fromkeys(batch, (8, 12))
    assert (np.asarray(placed["labels"])[3:] == -100).all()
    assert (np.asarray(placed["segment_ids"])[3:] == 0).all()
    layout, _, _, fresh = compiled()
    evaluate = make_eval_step(layout, loss_sums)
    with states.on(MESH):
        state = fresh()
        short, filled = (
            evaluate(state.params, state.rest, b) for b in (place_batch(batch, MESH), placed)
        )
    assert int(short.num_targets) == int(filled.num_targets)
    assert float(short.loss_sum) == pytest.approx(float(filled.loss_sum), rel=1e-6)
    assert place_batch(placed, MESH)["labels"] is placed["labels"]
    assert int(np.asarray(placed["input_ids"]).max()) < VOCAB


def test_evaluation_is_that_of_the_model_without_dropout():
    plain, _, _, _ = compiled()
    layout, _, _, fresh = compiled(dropout=0.5)
    with states.on(MESH):
        state, batch = fresh(), place_batch(Arithmetic().batch(1), MESH)
        dropped = make_eval_step(layout, loss_sums)(state.params, state.rest, batch)
        whole = make_eval_step(plain, loss_sums)(
            {name: state.params[name] for name in plain.params}, {}, batch
        )
    assert float(dropped.loss_sum) == float(whole.loss_sum)
