"""CheckpointManager, for training loops of one's own: model, optimizer, loader, without pickle."""

from __future__ import annotations

import json
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
from easypipe.train.checkpoint.resume import loader_state, saved_loader_state
from easypipe.train.state import flatten, unflatten


class CheckpointManager(Closeable):
    """Saves and loads checkpoints of a training loop of one's own.

    `path = manager.save(model=model, optimizer=optimizer, epoch=5, metrics={"val_loss": 0.38},
    loader=loader)`; `manager.load(path)`.

    Checkpoints are folders in `checkpoint_dir`, numbered as they were saved; a process that is
    killed leaves the last whole one.
    keep: how many of the newest stay; None: all. best_metric: a name in `metrics`; those with the
    best `keep_best` of it stay besides.
    best_mode: whether a small one is best, or a large one. Close it, or use it as a context
    manager.
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
        """Raises ConfigError for options that cannot be, StorageError for a folder that cannot hold
        checkpoints.
        """
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
        """Writes a checkpoint, and returns its folder once it is whole.

        model, optimizer: an nnx.Module (nnx.Optimizer is one), or any tree of arrays, as optax
        states are. scheduler: an object with `state_dict()`, or plain JSON; a schedule function has
        no state. metrics: numbers by name. custom_state: plain JSON.
        loader: whatever has `state()`; resumed by `load(loader=...)`, it yields the batch that
        would have come next. Raises ConfigError for what cannot be written without pickle, with its
        place; StorageError.
        """
        arrays = _named("model", model) | _named("optimizer", optimizer)
        kinds = {name: jax.random.key_impl(leaf) for name, leaf in arrays.items() if _is_key(leaf)}
        arrays |= {name: jax.random.key_data(arrays[name]) for name in kinds}
        run = {
            "epoch": epoch,
            "metrics": {
                name: _number(f"metrics.{name}", value) for name, value in (metrics or {}).items()
            },
            "custom_state": _json("custom_state", dict(custom_state or {})),
            "scheduler": _json("scheduler", _scheduler_state(scheduler)),
            "loader": None if loader is None else saved_loader_state(loader),
            "keys": {name: str(kind) for name, kind in kinds.items()},
        }
        step = (self._checkpoints.latest() or 0) + 1
        if self._metric is not None:
            require(
                self._metric in run["metrics"],
                "metrics",
                f"without {self._metric!r}, by which the best is told",
                have=run["metrics"],
            )
            self._seen[step] = run["metrics"][self._metric]
            self._checkpoints.protected["best"] = set(self._ranked()[: self._keep_best])
        self._checkpoints.save(step, arrays, run)
        self._checkpoints.wait()
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
        """Gives back what `save` was given.

        That is model, optimizer, scheduler, epoch, metrics, custom_state and loader (its state).

        path: what `save` returned; None: the newest. A model or an optimizer that is given here is
        what the arrays are put into: an nnx.Module is changed in place, of other trees one of the
        same structure is returned; the arrays lie as those of what is given do. One that is not
        given comes back as nested dicts of arrays. A loader that is given goes on behind the last
        batch that was taken; a scheduler gets `load_state_dict`. Raises MissingFileError where
        there is none, ConfigError for another folder's, StateError for damage and for arrays that
        differ in name, shape or dtype.
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
        if attribute_of(scheduler, "load_state_dict"):  # as PyTorch's have
            scheduler.load_state_dict(run["scheduler"])
        if loader is not None:
            require(
                run["loader"] is not None,
                "loader",
                f"{self._path(step)} was saved without one",
                "Save it: save(..., loader=loader).",
            )
            loader.restore(loader_state(loader, run["loader"]))
        others = ("scheduler", "epoch", "metrics", "custom_state", "loader")
        return found | {name: run[name] for name in others}

    def latest(self) -> Path | None:
        """The newest checkpoint."""
        step = self._checkpoints.latest()
        return None if step is None else self._path(step)

    def best(self) -> Path | None:
        """The checkpoint with the best `best_metric`, the earlier one of two alike.

        Raises ConfigError where none was named.
        """
        require(
            self._metric is not None,
            "best_metric",
            "not given: nobody knows which is best",
            "CheckpointManager(best_metric=...).",
        )
        ranked = self._ranked()
        return self._path(ranked[0]) if ranked else None

    def all(self) -> list[Path]:
        """Every checkpoint that is there, oldest first."""
        return [self._path(step) for step in self._checkpoints.steps()]

    def close(self) -> None:
        self._checkpoints.close()

    def _run(self, step: int) -> JsonObject:
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
        return sorted(self._seen, key=lambda step: (self._sign * self._seen[step], step))

    def _path(self, step: int) -> Path:
        return self._checkpoints.folder / str(step)

    def _step(self, path: str | Path | None) -> int:
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
            f"is no checkpoint of {self._checkpoints.folder}",
            f"CheckpointManager({str(given.parent)!r}).load(...).",
        )
        if not given.name.isdigit() or int(given.name) not in steps:
            raise MissingFileError(
                at=str(path),
                problem=f"no such checkpoint (have: {', '.join(map(str, steps)) or 'none'})",
            )
        return int(given.name)


def _named(part: str, given: PyTree) -> dict[str, jax.Array]:
    """name → array, of a model or an optimizer. Raises ConfigError for other leaves."""
    arrays = {}
    for path, leaf in flatten(_pure(given)).items():
        name = f"{part}/{path}"
        require(
            isinstance(leaf, bool | int | float | jax.Array | np.ndarray | np.generic),
            name.replace("/", "."),
            f"{type(leaf).__name__} is neither an array nor a number",
            "Put it into custom_state, or leave it out.",
        )
        arrays[name] = leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)
    return arrays


def _pure(given: PyTree) -> PyTree:
    return nnx.to_pure_dict(nnx.state(given)) if isinstance(given, nnx.Pytree) else given


def _is_key(leaf: jax.Array) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _put(part: str, given: PyTree, arrays: Mapping[str, jax.Array]) -> PyTree:
    """`given` with its arrays; where nothing was given, nested dicts of them, and None where there
    are none.
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
    try:
        number = float(value)
    except (TypeError, ValueError):
        problem = f"{value!r} is no number"
        raise ConfigError(at=at, problem=problem, fix="Put it into custom_state.") from None
    require(math.isfinite(number), at, f"{number} cannot be compared", "Leave it out.")
    return number


def _json(at: str, value: JsonValue) -> Any:
    """`value`, if it is plain JSON. Raises ConfigError with the place of what is not."""
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        if isinstance(value, Mapping):
            for key, item in value.items():
                _json(f"{at}.{key}", item)
        problem = f"is not plain JSON: {error}"
        fix = "Give numbers, texts, lists and dicts."
        raise ConfigError(at=at, problem=problem, fix=fix) from None


def _scheduler_state(scheduler: Any) -> JsonValue:
    if attribute_of(scheduler, "state_dict"):  # as PyTorch's have
        return scheduler.state_dict()
    return None if callable(scheduler) else scheduler
