"""What a trainer is given, looked at before anything is made: models, loaders, lengths of runs, and what a checkpoint is compared by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from easypipe.core.errors import ConfigError, StateError, did_you_mean
from easypipe.core.protocols import BatchLoader
from easypipe.train.checkpoint import differences
from easypipe.train.config import TrainConfig

LOADER_PARTS = ("sources", "tokenizer", "config", "plan")  # what a loader's state is compared by
ENDED = "ended"  # in resume_changes: a run that stopped for good goes on
MUST_MATCH = ("optimizer", "loss", "steps", "seed", "accumulate_steps")  # of TrainConfig: what decides the numbers


def resolve_steps(config: TrainConfig, train: BatchLoader) -> int:
    try:
        batches = len(train)
    except TypeError:
        batches = None
    if config.steps is None:
        if batches is None:
            raise ConfigError(at="train.steps", problem="not given, and the loader never ends", fix="Say how many steps to train.")
        return batches
    if batches is not None and config.steps > batches:
        raise ConfigError(
            at="train.steps",
            problem=f"{config.steps} steps, but the loader ends after {batches} batches",
            fix=f"Give at most {batches}, or set num_epochs: null in the loader.",
        )
    return config.steps


def micro_batches(at: str, loader: BatchLoader, pieces: int) -> bool:
    """Whether the loader yields [A, B/A, ...] already. Raises ConfigError where its A is not `pieces`."""
    cut = getattr(loader, "accumulation_steps", 1)
    if cut in (1, pieces):
        return cut > 1
    raise ConfigError(
        at=at,
        problem=f"{pieces}, but the loader cuts its batches into {cut} micro-batches",
        fix=f"Use the same number, {pieces} or {cut}, for both.",
    )


def saved_loader_state(loader: BatchLoader) -> Any:
    """JSON text where the state can write itself as such, else the state, which then is plain JSON."""
    state = loader.state()
    return {"text": state.to_json()} if hasattr(state, "to_json") else {"value": state}


def loader_state(loader: BatchLoader, saved: Mapping[str, Any]) -> Any:
    return type(loader.state()).from_json(saved["text"]) if "text" in saved else saved["value"]


def other_data(error: StateError, at: str, unlike: str) -> StateError:
    """What a loader says to a state that is not its own, in words of a run. at: the checkpoint. unlike: keys of the config that differ."""
    problem = f"belongs to a run on other data: {error.problem}" + (f" ({unlike})" if unlike else "")
    ways = "list what may be another in train.resume_changes (loader.sources, loader.tokenizer, loader.config, loader.plan)"
    return StateError(at=at, problem=problem, fix=f"Change that back, give another train.output_dir, or {ways}.")


def is_under(path: str, key: str) -> bool:
    return path == key or path.startswith(f"{key}.")


def check_changes(changes: tuple[str, ...], identity: Mapping[str, Any]) -> None:
    known = [
        ENDED,
        *identity,
        *differences({}, identity),
        *(f"train.{key}" for key in MUST_MATCH),
        *(f"loader.{part}" for part in LOADER_PARTS),
    ]
    for key in changes:
        if key not in known:
            problem = f"{key!r} is nothing that a checkpoint is compared by"
            raise ConfigError(at="train.resume_changes", problem=problem, have=sorted(set(known)), fix=did_you_mean(key, known))
