"""What a trainer is given, looked at before anything is made: models, loaders, lengths of runs, and
what a checkpoint is compared by.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from easypipe.core.errors import ConfigError, StateError, did_you_mean
from easypipe.core.protocols import BatchLoader
from easypipe.train.checkpoint.checkpoint import (
    Checkpoints,
    DamagedCheckpoint,
    differences,
    key_paths,
    listed,
)
from easypipe.train.config import TrainingConfig
from easypipe.train.events import Callback

LOADER_PARTS = ("sources", "tokenizer", "config", "plan")  # what a loader's state is compared by
ENDED = "ended"  # in resume_changes: a run that stopped for good goes on
# of TrainingConfig: what decides the numbers
MUST_MATCH = ("optimizer", "loss", "steps", "seed", "accumulate_steps")
# these too; compared only where there is one, so that it is told whether there was
IF_THERE = ("lora", "preference")
# for a run whose length its data decides: the length of the schedule is a constant of the program
MANY_STEPS = 1_000_000


def checked_callbacks(given: Any) -> tuple[Callback, ...]:
    """Raises ConfigError for what are no callbacks."""
    given = (given,) if isinstance(given, Callback) else given
    for i, one in enumerate(
        given if isinstance(given, Iterable) and not isinstance(given, str) else (given,)
    ):
        if not (callable(one) and hasattr(one, "state") and hasattr(one, "restore")) or isinstance(
            one, type
        ):
            fix = "Make an object of a class that extends easypipe.train.events.Callback; those with names stand in a mapping: {best: {}}."
            raise ConfigError(at=f"callbacks[{i}]", problem=f"{one!r} is no Callback", fix=fix)
    return tuple(given)


class Shapes:
    """Stands for a loader where only shapes are asked. batches: None where their number is not
    known.
    """

    def __init__(
        self, batch_size: int, accumulation_steps: int, batches: int | None = None
    ) -> None:
        self.batch_size, self.accumulation_steps, self._batches = (
            batch_size,
            accumulation_steps,
            batches,
        )

    def __len__(self) -> int:
        if self._batches is None:
            raise TypeError("the data is not looked at")
        return self._batches

    def __iter__(self) -> Any:
        return iter(())

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Any) -> None:
        del state


def has_passes(loader: Any) -> bool:
    """Whether every iteration behind a finished one is the next pass, which its states know
    (EpochLoader).
    """
    return hasattr(loader, "set_epoch") and hasattr(loader, "loader")


def resolve_steps(config: TrainingConfig, train: BatchLoader) -> int:
    """Raises ConfigError where the loader is not what the config says of it, or has fewer
    batches.
    """
    if config.batch_size is not None and config.batch_size != train.batch_size:
        problem = f"{config.batch_size}, but the loader's batches have {train.batch_size} rows"
        raise ConfigError(
            at="train.batch_size",
            problem=problem,
            fix="Make the loader with this batch_size, or leave it out here.",
        )
    try:
        batches = len(train)
    except TypeError:
        batches = None
    if config.epochs is not None:
        passes = getattr(getattr(train, "config", None), "num_epochs", 1)
        if batches is None or passes is None:
            problem = f"{config.epochs}, but the loader never ends"
            raise ConfigError(
                at="train.epochs",
                problem=problem,
                fix=f"Make it with num_epochs={config.epochs}, or give steps here.",
            )
        if config.epochs != passes and (config.epochs % passes or not has_passes(train)):
            problem = f"{config.epochs}, but the loader ends after {passes}"
            raise ConfigError(
                at="train.epochs",
                problem=problem,
                fix=f"Make it with num_epochs={config.epochs}, or give steps here.",
            )
        return batches * config.epochs // passes
    if config.steps is None:
        if batches is None:
            raise ConfigError(
                at="train.steps",
                problem="not given, and the loader never ends",
                fix="Say how many steps to train.",
            )
        return batches
    if batches is not None and config.steps > batches:
        raise ConfigError(
            at="train.steps",
            problem=f"{config.steps} steps, but the loader ends after {batches} batches",
            fix=f"Give at most {batches}, or set num_epochs: null in the loader.",
        )
    return config.steps


def micro_batches(at: str, loader: BatchLoader, pieces: int) -> bool:
    """Whether the loader yields [A, B/A, ...] already. Raises ConfigError where its A is not
    `pieces`.
    """
    cut = getattr(loader, "accumulation_steps", 1)
    if cut in (1, pieces):
        return cut > 1
    raise ConfigError(
        at=at,
        problem=f"{pieces}, but the loader cuts its batches into {cut} micro-batches",
        fix=f"Use the same number, {pieces} or {cut}, for both.",
    )


def saved_loader_state(loader: BatchLoader) -> Any:
    """JSON text where the state can write itself as such, else the state, which then is plain
    JSON.
    """
    state = loader.state()
    return {"text": state.to_json()} if hasattr(state, "to_json") else {"value": state}


def loader_state(loader: BatchLoader, saved: Mapping[str, Any]) -> Any:
    return type(loader.state()).from_json(saved["text"]) if "text" in saved else saved["value"]


def changed_data(saved: Mapping[str, Any], loader: Any) -> tuple[list[str], str]:
    """LOADER_PARTS of `loader` that are others than those of a saved state, and what changed in
    words.

    ([], "") also where there is no loader to ask, or none that knows: such a one refuses a foreign
    state itself.
    """
    if loader is None or "text" not in saved:
        return [], ""
    state: Any = loader_state(loader, saved)
    now: Any = (loader.loader(state.epoch) if has_passes(loader) else loader).state()
    return state.changed(now.components, now.config) if hasattr(now, "changed") else ([], "")


def is_under(path: str, key: str) -> bool:
    return path == key or path.startswith(f"{key}.")


def check_newest(
    folder: Path,
    config: TrainingConfig,
    identity: Mapping[str, Any],
    unknown: Sequence[str] = (),
    loader: Callable[[], BatchLoader | None] = lambda: None,
) -> None:
    """check_resume and check_same of the newest checkpoint in `folder`, where there is one.
    unknown: key paths that are not compared.

    loader: gives that of the run where no data has to be prepared for it; called only where
    something is refused anyway.
    """
    if not folder.is_dir():
        return
    with Checkpoints(folder, keep=None) as checkpoints:
        steps = checkpoints.steps()
        if not steps:
            return
        check_resume(folder, config, steps)
        try:
            saved = checkpoints.run(steps[-1])
        except DamagedCheckpoint:
            return  # a run goes back to an older one
    same = functools.partial(
        check_same, saved, identity, (*config.resume_changes, *unknown), folder / str(steps[-1])
    )
    try:
        same()
    except StateError:
        same(loader())
        raise


def check_resume(folder: Path, config: TrainingConfig, steps: Sequence[int]) -> None:
    """Raises ConfigError where `folder` has checkpoints, of `steps`, and the run must not go on
    from them.
    """
    if not config.resume:
        problem = f"{folder.parent} holds a run at step {steps[-1]}, and resume is false"
        raise ConfigError(
            at="train.resume",
            problem=problem,
            fix="Set resume: true, or give another train.output_dir.",
        )


def check_same(
    saved: Mapping[str, Any],
    identity: Mapping[str, Any],
    allowed: Sequence[str],
    at: Path,
    loader: BatchLoader | None = None,
    data: Mapping[str, Any] | None = None,
) -> dict[str, str]:
    """What differs from a checkpoint, all of it allowed: key path → what it was and is. saved: what
    the checkpoint was given as `run`.

    data: the config of the data, whose keys that differ are told where the data does. Raises
    StateError with all that is not allowed, and with what to write into resume_changes.
    """
    unlike, (parts, words) = (
        differences(saved["identity"], identity),
        changed_data(saved["loader"], loader),
    )
    others = {f"loader.{part}": words for part in parts}
    refused = [
        path for path in (*unlike, *others) if not any(is_under(path, key) for key in allowed)
    ]
    if not refused:
        return unlike | others
    problems = []
    if own := {path: unlike[path] for path in refused if path in unlike}:
        problems.append(f"belongs to another run: {listed(own)}")
    if any(path in others for path in refused):
        keys = (
            listed(differences(saved["config"].get("data", {}), data or {}, "data"))
            if data is not None
            else ""
        )
        which = "of its data" if own else "belongs to a run on other data:"
        problems.append(f"{which} {words}" + (f" ({keys})" if keys else ""))
    ended = [ENDED] if ENDED in allowed else []
    # as --set takes it, and YAML behind a colon
    fix = f"list it in train.resume_changes=[{','.join([*unlike, *others, *ended])}]"
    if others and not getattr(loader, "can_change", True):
        fix = "leave streaming out of new runs: a stream cannot be entered at another place"
    raise StateError(
        at=str(at),
        problem="; ".join(problems),
        fix=f"Change that back, give another train.output_dir, or {fix}.",
    )


def check_changes(changes: Sequence[str], identity: Mapping[str, Any]) -> None:
    """Raises ConfigError for a key path that no refusal of a checkpoint names."""
    parts = [
        ENDED,
        *identity,
        *(f"train.{key}" for key in (*MUST_MATCH, *IF_THERE)),
        *(f"loader.{part}" for part in LOADER_PARTS),
    ]
    known = {*parts, *key_paths(identity)}
    for key in changes:
        if key not in known:
            problem = f"{key!r} is nothing that a checkpoint is compared by"
            raise ConfigError(
                at="train.resume_changes",
                problem=problem,
                have=sorted(set(parts)),
                fix=did_you_mean(key, sorted(known)),
            )
