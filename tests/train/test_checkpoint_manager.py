"""`CheckpointManager` of the fourth document, with Flax and Optax in the place of torch."""

from __future__ import annotations

import resource
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from easypipe import CheckpointManager, ConfigError, MissingFileError, StateError
from easypipe.core.errors import StorageError
from train.runs import Arithmetic


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, width: int = 3) -> None:
        self.first, self.dropout = nnx.Linear(2, width, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.dropout(self.first(x)).sum()


def trained(seed: int, steps: int) -> tuple[Model, nnx.Optimizer]:
    model = Model(nnx.Rngs(seed))
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    for _ in range(steps):
        take(model, optimizer)
    return model, optimizer


def take(model: Model, optimizer: nnx.Optimizer) -> None:
    optimizer.update(model, nnx.grad(lambda module: module(jnp.ones((4, 2))))(model))


def leaves(*modules: Any) -> list[Any]:
    return [np.asarray(jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)
            for module in modules for leaf in jax.tree.leaves(nnx.state(module))]  # fmt: skip


def test_f35_the_example_of_the_document(tmp_path: Path) -> None:
    """Model, optimizer, loader and seed come back as they were, and training goes on bit for
    bit.
    """
    model, optimizer = trained(0, 2)
    loader, schedule = Arithmetic(8), optax.cosine_decay_schedule(0.1, 100)
    batches = iter(loader)
    next(batches), next(batches)
    epoch, step, seed = 5, 2, 42
    manager = CheckpointManager(checkpoint_dir=tmp_path / "checkpoints")
    path = manager.save(
        model=model,
        optimizer=optimizer,
        scheduler=schedule,
        epoch=epoch,
        metrics={"val_loss": jnp.float32(0.5)},
        custom_state={"data_module_seed": seed, "epoch_step": epoch * len(loader) + step},
        loader=loader,
    )
    take(model, optimizer)
    expected = next(batches)
    manager.close()

    with CheckpointManager(checkpoint_dir=tmp_path / "checkpoints") as manager:
        again, again_optimizer = trained(7, 0)
        fresh = Arithmetic(8)
        state = manager.load(path, model=again, optimizer=again_optimizer, loader=fresh)
        assert state["custom_state"] == {"data_module_seed": 42, "epoch_step": 42}
        assert (state["epoch"], state["metrics"], state["scheduler"]) == (
            5,
            {"val_loss": 0.5},
            None,
        )
        assert state["model"] is again
        take(again, again_optimizer)
        for one, other in zip(
            leaves(again, again_optimizer), leaves(model, optimizer), strict=True
        ):
            np.testing.assert_array_equal(one, other)
        np.testing.assert_array_equal(next(iter(fresh))["input_ids"], expected["input_ids"])
        plain = manager.load()
        assert plain["model"]["first"]["kernel"].shape == (2, 3)
        assert plain["loader"] == state["loader"]


def test_trees_of_arrays_keep_their_structure(tmp_path: Path) -> None:
    params = {"w": jnp.arange(4.0), "deep": [jnp.ones(2, jnp.bfloat16), 3]}
    tx = optax.adamw(0.1)
    with CheckpointManager(tmp_path) as manager:
        path = manager.save(model=params, optimizer=tx.init(params["w"]), scheduler={"last": 3})
        empty = jax.tree.map(jnp.zeros_like, params)
        state = manager.load(path, model=empty, optimizer=tx.init(jnp.zeros(4)))
    assert jax.tree.structure(state["model"]) == jax.tree.structure(params)
    assert state["model"]["deep"][0].dtype == jnp.bfloat16
    assert int(state["model"]["deep"][1]) == 3
    assert isinstance(state["optimizer"][0], optax.ScaleByAdamState)
    assert state["scheduler"] == {"last": 3}


@pytest.mark.parametrize(("mode", "kept", "best"), [("min", [2, 5, 6], 2), ("max", [1, 5, 6], 1)])
def test_the_newest_and_the_best_stay(
    tmp_path: Path, mode: Any, kept: list[int], best: int
) -> None:
    options: Any = {"keep": 2, "best_metric": "loss", "best_mode": mode}
    with CheckpointManager(tmp_path, **options) as manager:
        assert manager.latest() is None
        assert manager.best() is None
        for loss in (0.9, 0.1, 0.5, 0.4, 0.3):
            manager.save(model={"w": jnp.float32(loss)}, metrics={"loss": loss})
    # what was best before it was opened stays too
    with CheckpointManager(tmp_path, **options) as manager:
        last = manager.save(model={"w": jnp.float32(0.6)}, metrics={"loss": 0.6})
        assert [path.name for path in manager.all()] == [str(step) for step in kept]
        assert manager.latest() == last
        assert manager.best() == tmp_path / str(best)
        manager.save(model={"w": jnp.float32(0)}, metrics={"loss": 0.1 if mode == "min" else 0.9})
        assert manager.best() == tmp_path / str(best), "the earlier one of two alike"


def test_what_could_not_be_saved_is_not_the_best(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, best_metric="loss") as manager:
        first = manager.save(model={"w": jnp.ones(1)}, metrics={"loss": 2.0})
        (tmp_path / "2").write_text("in the way")
        (tmp_path / "2.replaced").mkdir()
        with pytest.raises(StorageError, match="cannot be written"):
            manager.save(model={"w": jnp.ones(1)}, metrics={"loss": 1.0})
        assert manager.best() == first


def test_a_file_that_cannot_grow_is_told_once(tmp_path: Path, caplog: Any) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    weights = jnp.asarray(np.random.default_rng(0).normal(size=100_000))
    with CheckpointManager(tmp_path) as manager:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        try:
            with pytest.raises(StorageError, match=r"cannot be written: .*File too large"):
                manager.save(model={"w": weights})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not [one for one in caplog.records if one.levelname == "ERROR"]


class Numbered(Arithmetic):
    def state(self):
        return {"t": np.int64(self.t)}


def test_bad_input_is_named(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path / "a", best_metric="loss")
    model, optimizer = trained(0, 1)
    with pytest.raises(MissingFileError, match="holds no checkpoint yet"):
        manager.load()
    for values, message in (
        (
            {"metrics": {"acc": 1}},
            r"metrics: without 'loss', which decides which is the best \(have: acc\)",
        ),
        ({"metrics": {"loss": "low"}}, r"metrics\.loss: 'low' is not a number"),
        ({"metrics": {"loss": float("nan")}}, r"metrics\.loss: nan cannot be compared"),
        ({"custom_state": {"a": {"b": object()}}}, r"custom_state\.a\.b: is not plain JSON"),
        ({"custom_state": {"a": [{1: 2}]}}, r"custom_state\.a\[0\]: .* key 1 would be read back"),
        ({"custom_state": {"a": float("inf")}}, r"custom_state\.a: is not plain JSON: inf"),
        ({"epoch": np.int64(3)}, r"epoch: is not plain JSON: int64"),
        ({"loader": Numbered()}, r"loader Numbered\.state\(\)\.t: is not plain JSON: int64"),
        (
            {"model": {"a/b": jnp.ones(1), "a": {"b": jnp.ones(2)}}},
            "model: two leaves have the same path, since a key contains a slash",
        ),
        ({"model": {"name": "gpt"}}, r"model\.name: str is neither an array nor a number"),
        ({"model": {"at": [2**40]}}, r"model\.at\.0: has numbers that int32 cannot hold"),
        ({"model": {"at": np.array([2**40])}}, r"model\.at: has numbers that int32 cannot hold"),
        ({"model": {"at": np.array(["a"])}}, r"model\.at: <U1 is not a dtype of numbers"),
        ({"optimizer": {"at": jnp.ones((0, 3))}}, r"optimizer\.at: is an empty array, float32"),
        ({"model": {}}, "model: has no arrays"),
    ):
        with pytest.raises(ConfigError, match=message):
            manager.save(**{"model": model, "metrics": {"loss": 1.0}, **values})  # type: ignore[arg-type]
    path = manager.save(model=model, metrics={"loss": 1.0})
    with pytest.raises(
        StateError,
        match=r"holds other arrays: model/first/bias: float32\[5\] here, float32\[3\] in the "
        r"checkpoint",
    ):
        manager.load(path, model=Model(nnx.Rngs(0), width=5))
    with pytest.raises(StateError, match=r"optimizer/.* here, nothing in the checkpoint"):
        manager.load(path, optimizer=optimizer)
    with pytest.raises(ConfigError, match=r"loader: .* was saved without one"):
        manager.load(path, loader=Arithmetic())
    with pytest.raises(ConfigError, match=r"scheduler: .* was saved without one"):
        manager.load(path, scheduler=types.SimpleNamespace(load_state_dict=vars))
    with pytest.raises(ConfigError, match="is not a checkpoint of"):
        manager.load(tmp_path / "b" / "1")
    with pytest.raises(MissingFileError, match=r"no such checkpoint \(have: 1\)"):
        manager.load(tmp_path / "a" / "2")
    manager.close()
    for options, message in (
        ({"keep": 0}, "keep: 0 is too few"),
        ({"keep_best": 2}, "without it best_mode and keep_best have no effect"),
    ):
        with pytest.raises(ConfigError, match=message):
            CheckpointManager(tmp_path / "c", **options)
    with pytest.raises(ConfigError, match="so the best checkpoint is unknown"):
        CheckpointManager(tmp_path / "c").best()
