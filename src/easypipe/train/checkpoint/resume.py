"""Compares a run with its checkpoint on resume: what must match, and how changes are allowed."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from easypipe.core.config import to_dict
from easypipe.core.errors import StateError, did_you_mean, require
from easypipe.core.protocols import BatchLoader
from easypipe.core.values import Json
from easypipe.train.checkpoint.checkpoint import Checkpoints, DamagedCheckpoint
from easypipe.train.checkpoint.differences import differences, key_paths, listed
from easypipe.train.checks import EpochStyle, JsonState, KnowingState
from easypipe.train.config import PreferenceConfig, TrainingConfig
from easypipe.train.model.config import ClassifierConfig, ModelConfig
from easypipe.train.optim.config import OptimizerConfig
from easypipe.train.parallel.distributed import of_every_process

logger = logging.getLogger("easypipe")

LOADER_PARTS = (
    "sources",
    "tokenizer",
    "config",
    "plan",
)  # the parts in which loader states are compared
ENDED = "ended"  # in resume_changes: continue a run that had ended
# Keys of TrainingConfig that decide the numbers.
MUST_MATCH = ("optimizer", "loss", "steps", "seed", "accumulate_steps", "on_nonfinite")
# These decide them too, but are compared only if they are set, so that the message says whether one
# was set.
IF_THERE = ("lora", "preference", "distill", "neftune_alpha", "class_weights", "spikes")
# Options of preferences that older checkpoints lack: they are compared only if they have other
# values.
LATER = {"loss": "sigmoid", "margin": None, "desirable_weight": 1.0, "undesirable_weight": 1.0}

# Options of which earlier versions kept no copy in the identity: checkpoints have them in "train".
COMPARED_LATER = ("on_nonfinite", "spikes")

OWN = ("output_dir", "distributed")  # options that each process may have for itself


def identity_of(
    config: TrainingConfig,
    model: ModelConfig | ClassifierConfig | None,
    steps: int,
    batch_size: int,
    *,
    own_optimizer: bool,
) -> Json:
    """Returns everything that must not change between a run and its resumption.

    Args:
        config: The options of the run.
        model: The config of the model; None for a module from Python.
        steps: The number of steps of the run.
        batch_size: Rows of a step.
        own_optimizer: Whether the optimizer comes from Python.
    """
    values = to_dict(config)
    train = {name: values[name] for name in MUST_MATCH}
    train |= {name: values[name] for name in IF_THERE if values[name] is not None}
    if config.spikes is not None:
        train["checkpoint"] = _goes_back_to(values)
    given = train.get("preference", {})
    for name, value in LATER.items():
        if name in given and given[name] == value:
            del given[name]
    train["optimizer"] = config.optimizer.resolved()
    if own_optimizer:
        train["optimizer"] = {"name": "given from Python"}
    train["steps"] = steps
    return {"model": to_dict(model), "train": train, "loader": {"batch_size": batch_size}}


def _goes_back_to(train: Json) -> Json:
    """Returns the options of checkpoints that decide to which step a spike takes the run back."""
    return {"every": train["checkpoint"]["every"]}


def run_differences(saved: Json, identity: Json, **words: str) -> dict[str, str]:
    """Returns the `differences` of a run from its checkpoint, its data apart.

    Args:
        saved: The `run` that was given to the checkpoint.
        identity: The result of `identity_of`.
        words: Those of `differences`.
    """
    was, values = saved["identity"], saved["train"]
    later = {name: values[name] for name in COMPARED_LATER if values[name] is not None}
    if "spikes" in later:
        later["checkpoint"] = _goes_back_to(values)
    found = differences({**was, "train": later | was["train"]}, identity, **words)
    found.pop("train.checkpoint", None)  # it comes and goes with spikes, which are told
    return found


def held_out_differences(saved: Json, held_out: Json, config: Json) -> dict[str, dict[str, str]]:
    """Compares held-out data with that of the checkpoint, and warns of what changed.

    Args:
        saved: The `run` that was given to the checkpoint.
        held_out: `Engine.held_out`, by the names of loaders.
        config: The config of the run.

    Returns:
        For each loader that both have and whose numbers are of other data, the differences, key
        path → old and new value.
    """
    found, before = {}, saved.get("held_out", {})  # older checkpoints lack it
    evals = [one.get("eval", {}) for one in (saved["config"], config)]
    for name, now in held_out.items():
        was = before.get(name, now)
        if parts := [part for part in now if was.get(part) != now[part]]:
            at = f"eval.{name}"
            old, new = (one.get(name, {}) for one in evals)
            own = differences(old, new, at, words="was {saved}, is {here}")
            found[name] = {at: f"another {' and '.join(parts)}"} | own
            logger.warning("changed since the checkpoint: %s", listed(found[name]))
    return found


def check_processes(
    config: TrainingConfig, identity: Json, loaders: Mapping[str, BatchLoader]
) -> None:
    """Checks that every process trains the same run on the same data.

    Every process must call it at the same place.

    Args:
        config: The options of the run.
        identity: The result of `identity_of`.
        loaders: The loaders, by the key paths in errors.

    Raises:
        ConfigError: They do not. It is raised in every process.
    """
    options = {key: value for key, value in to_dict(config).items() if key not in OWN}
    own = {**identity, "train": options}
    for name, loader in loaders.items():
        state = loader.state()
        parts = {**state.components, **state.config} if isinstance(state, KnowingState) else {}
        if not getattr(loader, "can_change", True):  # see check_same
            parts.pop("sources", None)  # a stream knows files by paths and times, as on each host
        own[name] = own.get(name, {}) | parts
    first, *others = of_every_process(own)
    for number, other in enumerate(others, start=1):
        words = f"{{here}} in process {number}, {{saved}} in process 0"
        unlike = differences(first, other, words=words)
        require(
            not unlike,
            "train",
            f"the processes train different runs: {listed(unlike)}",
            "Give every process the same config and the same data.",
        )


def saved_loader_state(loader: BatchLoader) -> Json:
    """Returns the loader's state for a checkpoint: as text if it has `to_json`, or unchanged.

    Raises:
        ConfigError: It is neither.
    """
    state = loader.state()
    if isinstance(state, JsonState):
        return {"text": state.to_json()}
    at = f"loader {type(loader).__name__}.state()"
    return {"value": plain_json(at, state, finite=False)}


def plain_json(at: str, value: object, *, finite: bool = True) -> Any:
    """Returns `value` as it is read back from JSON.

    Args:
        at: The place of the value, for the error message.
        value: The value.
        finite: Whether every number must be finite.

    Raises:
        ConfigError: A part of it is not plain JSON; the message says where it is.
    """
    if isinstance(value, list | tuple):
        return [plain_json(f"{at}[{i}]", one, finite=finite) for i, one in enumerate(value)]
    if isinstance(value, Mapping):
        for key in value:
            _plain(isinstance(key, str), at, f"its key {key!r} would be read back as a text")
        return {key: plain_json(f"{at}.{key}", one, finite=finite) for key, one in value.items()}
    known = value is None or isinstance(value, str | int | float)
    _plain(known, at, f"{type(value).__name__} cannot be written")
    _plain(not finite or not isinstance(value, float) or math.isfinite(value), at, str(value))
    return value


def _plain(holds: bool, at: str, problem: str) -> None:
    fix = "Give numbers, texts, lists and dicts with texts as keys; of an array, x.tolist()."
    require(holds, at, f"is not plain JSON: {problem}", fix)


def loader_state(loader: BatchLoader, saved: Json) -> Any:
    """Returns the saved state in the form that the loader's `restore` takes.

    Raises:
        StateError: It is that of another kind of loader.
    """
    if "text" not in saved:
        return saved["value"]
    own = loader.state()
    if not isinstance(own, JsonState):
        raise StateError(
            at=f"loader {type(loader).__name__}",
            problem=f"its states are a {type(own).__name__}, and the checkpoint has the text of "
            "another kind of loader",
            fix="Give the loader with which it was saved.",
        )
    return own.from_json(saved["text"])


def changed_data(saved: Json, loader: BatchLoader | None) -> tuple[list[str], str]:
    """Compares the data of `loader` with that of a saved loader state.

    Returns:
        The LOADER_PARTS that differ, and what changed in words. ([], "") also if there is no loader
        to ask, or if its state does not know its data: such a loader itself refuses a foreign
        state.
    """
    if loader is None or "text" not in saved:
        return [], ""
    state = loader_state(loader, saved)
    now = (loader.loader(state.epoch) if isinstance(loader, EpochStyle) else loader).state()
    return state.changed(now.components, now.config) if isinstance(now, KnowingState) else ([], "")


def check_newest(
    folder: Path,
    config: TrainingConfig,
    identity: Json,
    unknown: Sequence[str],
    loader: Callable[[], BatchLoader | None],
) -> None:
    """Applies check_resume and check_same to the newest checkpoint in `folder`, if there is one.

    Args:
        folder: The folder of checkpoints.
        config: The options of the run.
        identity: The result of `identity_of`.
        unknown: Key paths that are not compared.
        loader: Returns the loader of the run if no data has to be prepared for it; called only if
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
            return  # the run will use an older checkpoint
    at, allowed = folder / str(steps[-1]), (*config.resume_changes, *unknown)
    try:
        check_same(saved, identity, allowed, at)
    except StateError:
        check_same(saved, identity, allowed, at, loader())
        raise


def check_resume(folder: Path, config: TrainingConfig, steps: Sequence[int]) -> None:
    """Checks that the run may continue from the checkpoints of `steps` in `folder`.

    Raises:
        ConfigError: train.resume is false.
    """
    require(
        config.resume,
        "train.resume",
        f"{folder.parent} holds a run at step {steps[-1]}, and resume is false",
        "Set resume: true, or give another train.output_dir.",
    )


def check_same(
    saved: Json,
    identity: Json,
    allowed: Sequence[str],
    at: Path,
    loader: BatchLoader | None = None,
    data: Json | None = None,
) -> tuple[dict[str, str], dict[str, str]]:
    """Compares a run with the checkpoint that it resumes from.

    Args:
        saved: The `run` that was given to the checkpoint.
        identity: The result of `identity_of`.
        allowed: Key paths that may differ.
        at: The folder of the checkpoint.
        loader: The loader of the run.
        data: The config of the data; its differing keys are named if the data differs.

    Returns:
        Two mappings of allowed differences, key path → old and new value: those of the run, and
        those of its loader's parts.

    Raises:
        StateError: Something differs that is not allowed; the message lists every difference, and
            what to write into resume_changes.
    """
    own = run_differences(saved, identity)
    parts, words = changed_data(saved["loader"], loader)
    of_data = {f"loader.{part}": words for part in parts}
    refused = {
        path
        for path in own | of_data
        if not any(path == key or path.startswith(f"{key}.") for key in allowed)
    }
    if not refused:
        return own, of_data
    problems = []
    if unlike := {path: text for path, text in own.items() if path in refused}:
        problems.append(f"belongs to another run: {listed(unlike)}")
    if not refused.isdisjoint(of_data):
        which = "of its data" if unlike else "belongs to a run on other data:"
        keys = "" if data is None else listed(data_differences(saved, data))
        problems.append(f"{which} {words}" + (f" ({keys})" if keys else ""))
    ended = [ENDED] if ENDED in allowed else []
    # In the syntax of --set, which YAML takes after a colon.
    fix = f"list it in train.resume_changes=[{','.join([*own, *of_data, *ended])}]"
    # Loaders of other libraries do not have this attribute.
    if of_data and not getattr(loader, "can_change", True):
        fix = "leave streaming out of new runs: a stream cannot start at another place"
    raise StateError(
        at=str(at),
        problem="; ".join(problems),
        fix=f"Change that back, give another train.output_dir, or {fix}.",
    )


def data_differences(saved: Json, data: Json, **words: str) -> dict[str, str]:
    """Returns the keys of the data config that differ from those of a checkpoint."""
    return differences(saved["config"].get("data", {}), data, "data", **words)


def check_changes(changes: Sequence[str], identity: Json) -> None:
    """Checks that resuming compares every key path of resume_changes with the checkpoint.

    Raises:
        ConfigError: It does not compare one of them.
    """
    of_train = (f"train.{key}" for key in (*MUST_MATCH, *IF_THERE))
    parts = {ENDED, *identity, *of_train, *(f"loader.{part}" for part in LOADER_PARTS)}
    # Of these sections a checkpoint may have keys that this run does not.
    sections = ("optimizer", OptimizerConfig), ("preference", PreferenceConfig)
    options = {f"train.{name}.{one.name}" for name, cls in sections for one in fields(cls)}
    known = sorted(parts | options | {*key_paths(identity)})
    for key in changes:
        require(
            key in known,
            "train.resume_changes",
            f"{key!r} is nothing that a checkpoint is compared by",
            did_you_mean(key, known),
            have=sorted(parts),
        )
