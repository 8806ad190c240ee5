"""CheckpointManager, for users' own training loops: saves without pickle, and keeps the best."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util
from jaxtyping import PyTree

from easypipe.core.closing import Closeable
from easypipe.core.errors import ConfigError, MissingFileError, StateError, require
from easypipe.core.protocols import BatchLoader
from easypipe.core.values import Json, JsonObject, JsonValue, attribute_of
from easypipe.train.checkpoint.checkpoint import Checkpoints
from easypipe.train.checkpoint.resume import loader_state, plain_json, saved_loader_state
from easypipe.train.state import flatten, unflatten


class CheckpointManager(Closeable):
    """Saves and loads the checkpoints of a user's own training loop.

    `path = manager.save(model=model, optimizer=optimizer, epoch=5, metrics={"val_loss": 0.38},
    loader=loader)`; `manager.load(path)`.

    Checkpoints are folders in `checkpoint_dir`, numbered in the order of saving. A process that is
    killed leaves the last complete one. Close the manager, or use it as a context manager.

    Args:
        checkpoint_dir: The folder of the checkpoints.
        keep: How many of the newest are kept; None: all.
        best_metric: A name in `metrics`; the best checkpoints by it are kept in addition.
        best_mode: Whether the smallest or the largest value is the best.
        keep_best: How many of the best are kept.

    Raises:
        ConfigError: Options are out of range or have no effect, or the path of the folder has a
            character that Orbax takes for a pattern.
        StorageError: The folder cannot hold checkpoints.
    """

    def __init__(
        self,
        checkpoint_dir: str | Path,
        *,
        keep: int | None = None,
        best_metric: str | None = None,
        best_mode: Literal["min", "max"] = "min",
        keep_best: int = 1,
    ) -> None:
        for name, value in (("keep", keep), ("keep_best", keep_best)):
            require(value is None or value >= 1, name, f"{value} is too few", "Give at least 1.")
        require(
            best_mode in ("min", "max"),
            "best_mode",
            f"{best_mode!r} is not an option",
            have=("min", "max"),
        )
        require(
            best_metric is not None or (best_mode, keep_best) == ("min", 1),
            "best_metric",
            "not given, and without it best_mode and keep_best have no effect",
            "Name one.",
        )
        self._checkpoints = Checkpoints(
            Path(os.path.expanduser(checkpoint_dir)), keep=keep or sys.maxsize
        )
        self._metric, self._keep_best = best_metric, keep_best
        self._sign = 1 if best_mode == "min" else -1
        self._seen: dict[int, float] = {}
        for step in self._checkpoints.steps() if best_metric is not None else ():
            value = self._run(step)["metrics"].get(best_metric)
            if value is not None:
                self._seen[step] = value

    def save(
        self,
        *,
        model: PyTree,
        optimizer: PyTree = None,
        scheduler: Any = None,
        epoch: int | None = None,
        metrics: Json | None = None,
        custom_state: Json | None = None,
        loader: BatchLoader | None = None,
    ) -> Path:
        """Writes a checkpoint, and returns its folder after it is complete.

        Args:
            model: An nnx.Module, or any tree of arrays.
            optimizer: An nnx.Optimizer, or any tree of arrays, such as an optax state.
            scheduler: An object with `state_dict()`, or plain JSON; a schedule function has no
                state.
            epoch: The number of the epoch.
            metrics: Numbers by name.
            custom_state: Plain JSON.
            loader: Anything with `state()`. After `load(loader=...)` has restored it, it yields the
                batch that would have come next.

        Raises:
            ConfigError: Something cannot be written without pickle; the message says where it is.
            StorageError: The checkpoint cannot be written.
        """
        arrays = _named("model", model) | _named("optimizer", optimizer)
        require(arrays, "model", "has no arrays", "Give the model, or a tree of its arrays.")
        kinds = {name: jax.random.key_impl(leaf) for name, leaf in arrays.items() if _is_key(leaf)}
        arrays |= {name: jax.random.key_data(arrays[name]) for name in kinds}
        run: JsonObject = {
            "epoch": plain_json("epoch", epoch),
            "metrics": {
                name: _number(f"metrics.{name}", value) for name, value in (metrics or {}).items()
            },
            "custom_state": plain_json("custom_state", dict(custom_state or {})),
            "scheduler": plain_json("scheduler", _scheduler_state(scheduler)),
            "loader": None if loader is None else saved_loader_state(loader),
            "keys": {name: str(kind) for name, kind in kinds.items()},
        }
        step = (self._checkpoints.latest() or 0) + 1
        if self._metric is not None:
            require(
                self._metric in run["metrics"],
                "metrics",
                f"without {self._metric!r}, which decides which is the best",
                have=run["metrics"],
            )
            self._seen[step] = run["metrics"][self._metric]
            self._checkpoints.protected["best"] = set(self._ranked()[: self._keep_best])
        try:
            self._checkpoints.save(step, arrays, run)
            self._checkpoints.wait()
        except BaseException:
            self._seen.pop(step, None)  # it is not there
            raise
        return self._path(step)

    def load(
        self,
        path: str | Path | None = None,
        *,
        model: PyTree = None,
        optimizer: PyTree = None,
        scheduler: Any = None,
        loader: BatchLoader | None = None,
    ) -> JsonObject:
        """Returns the arguments of `save`, by name.

        The names are model, optimizer, scheduler, epoch, metrics, custom_state and loader; `loader`
        is its saved state. A part that is not given here is returned as nested dicts of arrays.

        Args:
            path: The path that `save` returned; None: the newest checkpoint.
            model: The model that the arrays are put into. An nnx.Module is changed in place; for
                another tree, one of the same structure is returned. The arrays get the shardings of
                the given ones.
            optimizer: The same for the optimizer.
            scheduler: An object whose `load_state_dict` is called.
            loader: A loader; it is restored to continue after the last batch that was taken.

        Raises:
            MissingFileError: The checkpoint does not exist.
            ConfigError: The path is in another folder, or a loader or scheduler is given and none
                was saved.
            StateError: The checkpoint is damaged, or arrays differ in name, shape or dtype.
        """
        step = self._step(path)
        run, given = self._run(step), {"model": model, "optimizer": optimizer}
        first = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        wanted = {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=first)
            for name, leaf in self._checkpoints.describe(step).items()
            if given[name.partition("/")[0]] is None
        }
        for part, tree in given.items():
            for name, leaf in _named(part, tree).items():
                data = jax.random.key_data(leaf) if _is_key(leaf) else leaf
                wanted[name] = jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=data.sharding)
        arrays = dict(self._checkpoints.load(step, wanted)) if wanted else {}
        for name, kind in run["keys"].items():
            arrays[name] = jax.random.wrap_key_data(arrays[name], impl=kind)
        found = {part: _put(part, tree, arrays) for part, tree in given.items()}
        stateful = attribute_of(scheduler, "load_state_dict")  # like PyTorch's schedulers
        for name, wanted in (("scheduler", stateful), ("loader", loader)):
            require(
                wanted is None or run[name] is not None,
                name,
                f"{self._path(step)} was saved without one",
                f"Save it: save(..., {name}={name}).",
            )
        if stateful:
            scheduler.load_state_dict(run["scheduler"])
        if loader is not None:
            loader.restore(loader_state(loader, run["loader"]))
        others = ("scheduler", "epoch", "metrics", "custom_state", "loader")
        return found | {name: run[name] for name in others}

    def latest(self) -> Path | None:
        """Returns the newest checkpoint; None if there is none."""
        step = self._checkpoints.latest()
        return None if step is None else self._path(step)

    def best(self) -> Path | None:
        """Returns the checkpoint with the best `best_metric`; None if there is none.

        Of equal ones, it is the earlier.

        Raises:
            ConfigError: No best_metric was named.
        """
        require(
            self._metric is not None,
            "best_metric",
            "not given, so the best checkpoint is unknown",
            "CheckpointManager(best_metric=...).",
        )
        ranked = self._ranked()
        return self._path(ranked[0]) if ranked else None

    def all(self) -> list[Path]:
        """Returns every checkpoint, oldest first."""
        return [self._path(step) for step in self._checkpoints.steps()]

    def close(self) -> None:
        self._checkpoints.close()

    def _run(self, step: int) -> JsonObject:
        """Returns the metadata of a checkpoint.

        Raises:
            StateError: It is a checkpoint of a Trainer's run.
        """
        run = self._checkpoints.run(step)
        if "custom_state" not in run:
            fix = (
                "Read it with easypipe.train.finished.load_trained, or give another checkpoint_dir."
            )
            raise StateError(
                at=str(self._path(step)), problem="is a checkpoint of a Trainer's run", fix=fix
            )
        return run

    def _ranked(self) -> list[int]:
        """Returns the steps that have the best metric, the best first."""
        return sorted(self._seen, key=lambda step: (self._sign * self._seen[step], step))

    def _path(self, step: int) -> Path:
        return self._checkpoints.folder / str(step)

    def _step(self, path: str | Path | None) -> int:
        """Returns the step of a checkpoint's path; None means the newest.

        Raises:
            MissingFileError: The checkpoint does not exist.
            ConfigError: The path is in another folder.
        """
        steps = self._checkpoints.steps()
        if path is None:
            if not steps:
                raise MissingFileError(
                    at=str(self._checkpoints.folder),
                    problem="holds no checkpoint yet",
                    fix="Save one first.",
                )
            return steps[-1]
        given = Path(os.path.expanduser(path)).absolute()
        require(
            given.parent == self._checkpoints.folder,
            str(path),
            f"is not a checkpoint of {self._checkpoints.folder}",
            f"CheckpointManager({str(given.parent)!r}).load(...).",
        )
        if not given.name.isdecimal() or int(given.name) not in steps:
            raise MissingFileError(
                at=str(path),
                problem=f"no such checkpoint (have: {', '.join(map(str, steps)) or 'none'})",
            )
        return int(given.name)


def _named(part: str, given: PyTree) -> dict[str, jax.Array]:
    """Returns name → array for the leaves of a model or an optimizer.

    Raises:
        ConfigError: A leaf is neither an array nor a number.
    """
    arrays, pure = {}, _pure(given)
    named = flatten(pure)
    require(
        len(named) == len(jax.tree.leaves(pure)),
        part,
        "two leaves have the same path, since a key contains a slash",
        "Rename the key, or save nested dicts.",
    )
    for path, leaf in named.items():
        name = f"{part}/{path}"
        require(
            isinstance(leaf, bool | int | float | jax.Array | np.ndarray | np.generic),
            name.replace("/", "."),
            f"{type(leaf).__name__} is neither an array nor a number",
            "Put it into custom_state, or leave it out.",
        )
        array = leaf if isinstance(leaf, jax.Array) else _array(name.replace("/", "."), leaf)
        require(
            array.size,
            name.replace("/", "."),
            f"is an empty array, {array.dtype} of shape {array.shape}, which cannot be saved",
            "Leave it out.",
        )
        arrays[name] = array
    return arrays


def _array(at: str, leaf: PyTree) -> jax.Array:
    """Returns a number or NumPy array as JAX holds it.

    Raises:
        ConfigError: It does not hold numbers, or integers that JAX would change.
    """
    given = np.asarray(leaf)
    numbers = given.dtype == bool or jnp.issubdtype(given.dtype, np.number)
    require(numbers, at, f"{given.dtype} is not a dtype of numbers", "Put it into custom_state.")
    dtype = jax.dtypes.canonicalize_dtype(given.dtype)
    array = jnp.asarray(given.astype(dtype))
    require(
        given.dtype.kind not in "iu" or np.array_equal(given, array),
        at,
        f"has numbers that {dtype} cannot hold",
        "Put them into custom_state, or set jax_enable_x64.",
    )
    return array


def _pure(given: PyTree) -> PyTree:
    return nnx.to_pure_dict(nnx.state(given)) if isinstance(given, nnx.Pytree) else given


def _is_key(leaf: jax.Array) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _put(part: str, given: PyTree, arrays: Mapping[str, jax.Array]) -> PyTree:
    """Puts the arrays of a part into `given`, which may be a module.

    Returns nested dicts of arrays if nothing was given, and None if there are no arrays.
    """
    if given is None:
        return traverse_util.unflatten_dict(dict(arrays), sep="/").get(part)
    own = {name.removeprefix(f"{part}/"): array for name, array in arrays.items()}
    tree = unflatten(own, _pure(given))
    if not isinstance(given, nnx.Pytree):
        return tree
    state = nnx.state(given)
    nnx.replace_by_pure_dict(state, tree)
    nnx.update(given, state)
    return given


def _number(at: str, value: Any) -> float:
    """Returns a metric as a finite float.

    Raises:
        ConfigError: It is not a finite number.
    """
    try:
        number = float(value)
    except (TypeError, ValueError):
        problem = f"{value!r} is not a number"
        raise ConfigError(at=at, problem=problem, fix="Put it into custom_state.") from None
    require(math.isfinite(number), at, f"{number} cannot be compared", "Leave it out.")
    return number


def _scheduler_state(scheduler: Any) -> JsonValue:
    if attribute_of(scheduler, "state_dict"):  # like PyTorch's schedulers
        return scheduler.state_dict()
    return None if callable(scheduler) else scheduler
