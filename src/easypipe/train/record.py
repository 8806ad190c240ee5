"""The record files of a run folder (run.yaml, versions, changes, restarts ...), and reading them.

JSON files contain a checksum: `write_kept` writes such a file and `read_kept` reads it.

No jax at import time: `easypipe explain` and `easypipe report` read these files anywhere.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import logging
import os
import platform
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NotRequired

import pydantic
import yaml
from typing_extensions import TypedDict  # pydantic does not accept another one before Python 3.12

from easypipe.core import storage
from easypipe.core.checked import commit_checked, parse_checked
from easypipe.core.config import allowing_code, load_yaml, to_dict
from easypipe.core.errors import (
    DamagedFileError,
    MissingFileError,
    StateError,
    StorageError,
    require,
)
from easypipe.core.protocols import BatchLoader
from easypipe.core.values import Json, JsonObject, Settings
from easypipe.train.checkpoint.files import CHECKPOINTS, check_path
from easypipe.train.checks import KnowingState
from easypipe.train.metrics.log import LM_EVAL, METRICS, ROLLBACKS, SAMPLES, MetricsFile

# In train.output_dir: the resolved configuration, which `easypipe train` accepts again.
RECORD = "run.yaml"
LEDGER = "ledger.json"  # the ledger: the fate of every row and token of the data
PLAN = "plan.json"  # the tokens of each dataset, drawn and asked for
# Versions of everything that affects the numbers; a new entry for each process that ran with other
# versions.
VERSIONS = "versions.json"
# What was allowed to differ when the run was resumed, one entry for each step at which it differed.
CHANGES = "changes.json"
RESTARTS = "restarts.json"  # when and at which step the run was resumed
# digests of the data of training and of each evaluation, and how many steps the run has
FINGERPRINTS = "fingerprints.json"
BEST = "best.json"  # the checkpoints that did best on held-out data, the best first

# Keys of objects that earlier versions wrote without a checksum. What they wrote as a list is now
# under the name of the file.
_OLDER: Mapping[str, Sequence[str]] = {
    LEDGER: ("entries", "facts"),
    FINGERPRINTS: ("train", "eval"),
    PLAN: (
        "name", "unit", "datasets", "steps", "steps_available", "batch_size", "rows",
        "rows_left_over", "seq_length", "slots", "padding", "fill", "cache_bytes", "saved_bytes",
        "prepared", "notes", "seconds", "by_step",
    ),
}  # fmt: skip
_LISTS = (VERSIONS, CHANGES, RESTARTS, BEST)
# The options whose writers append to a MetricsFile.
_LINES = {ROLLBACKS: "spikes", SAMPLES: "samples", LM_EVAL: "lm_eval"}

_PACKAGES = (
    "easypipe", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "pyarrow",
    "tokenizers", "gigatoken",
)  # fmt: skip

logger = logging.getLogger("easypipe")


def write_config(folder: Path, resolved: object) -> None:
    """Writes run.yaml from the resolved RunConfig."""
    text = yaml.safe_dump(to_dict(resolved), sort_keys=False, allow_unicode=True)
    storage.commit_bytes(folder / RECORD, text.encode())


def check_record(folder: str | Path) -> None:
    """Checks that a run can have this folder, and that a run.yaml in it is the record of a run.

    Raises:
        ConfigError: It is a file, or lies in one, or no checkpoints can be written there.
        StateError: The run.yaml may be the user's own config, which the record would replace.
    """
    folder = Path(os.path.expanduser(folder))
    there = next((one for one in (folder, *folder.absolute().parents) if one.exists()), folder)
    is_file = there.is_file()
    require(not is_file, "train.output_dir", f"{there} is a file", "Give a folder.")
    check_path(folder, "train.output_dir")
    of_run = (VERSIONS, METRICS, CHECKPOINTS)
    if (folder / RECORD).exists() and not any((folder / name).exists() for name in of_run):
        raise StateError(
            at=str(folder / RECORD),
            problem="is not the record of a run, and training would replace it",
            fix="Give another train.output_dir, or rename the file.",
        )


def write_versions(folder: Path, step: int) -> Json:
    """Adds the versions of this process to versions.json, unless they are those of the last entry.

    Entries of that and later steps are dropped, because the run went back to before them.

    Args:
        folder: The run's folder.
        step: The step from which this process continues.

    Returns:
        The entry, without its step.
    """
    import jax

    device = jax.devices()[0]
    here = {
        "python": platform.python_version(),
        **{name: _version(name) for name in _PACKAGES},
        "platform": platform.platform(),
        "device_kind": device.device_kind,
        "devices": jax.device_count(),
        "processes": jax.process_count(),
    }
    path = folder / VERSIONS
    known = _known(path)
    kept = [one for one in known if one["from_step"] < step]
    if not kept or kept[-1] | {"from_step": 0} != here | {"from_step": 0}:
        kept.append({"from_step": step, **here})
    if kept != known:
        write_kept(path, kept)
    return here


def write_restart(folder: Path, step: int) -> None:
    """Adds an entry to restarts.json: the run continues from `step` here and now.

    Entries of that and later steps are dropped, because the run went back to before them.
    """
    kept = [one for one in _known(folder / RESTARTS) if one["step"] < step]
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S")
    write_kept(folder / RESTARTS, [*kept, {"step": step, "time": now}])


def _known(path: Path) -> list[JsonObject]:
    """Returns the entries of a list file; a damaged file is moved aside and counts as empty."""
    try:
        return read_kept(path) or []
    except StateError as error:
        aside = path.with_name(f"{path.stem}-damaged.json")
        path.replace(aside)
        logger.warning("%s: %s; moved to %s, and started again", path, error.problem, aside.name)
        return []


def write_fingerprints(
    folder: Path, train: BatchLoader, evals: Mapping[str, BatchLoader], steps: int | None
) -> None:
    """Writes fingerprints.json: digests of each loader's data, null if its state has none."""
    of_evals = {name: fingerprint(loader) for name, loader in evals.items()}
    kept = {"train": fingerprint(train), "eval": of_evals, "steps": steps}
    write_kept(folder / FINGERPRINTS, kept)


def write_changes(
    folder: Path,
    step: int,
    change: Json | None,
    of_data: Sequence[Json] = (),
) -> None:
    """Updates changes.json for a run that continues at `step`.

    Entries of that and later steps are dropped, because the run went back to before them.

    Args:
        folder: The run's folder.
        step: The step from which the run continues.
        change: What changed at `step`, or None: "row", "changed" (key path → what it was and is)
            and "before" ("config" and "components" of the run up to there).
        of_data: All changes that the loader's state records, which include those that were made
            before this file existed.
    """
    known = read_changes(folder)
    kept = [one for one in known if one["step"] < step]
    kept += [] if change is None else [{"step": step, **change}]
    told = {one["step"] for one in kept}
    for one in of_data:
        if one["batch"] not in told:
            parts = {f"loader.{key}": "another" for key in one if key not in ("batch", "row")}
            kept.append({"step": one["batch"], "row": one["row"], "changed": parts, "before": None})
    if kept != known:
        write_kept(folder / CHANGES, sorted(kept, key=lambda one: one["step"]))


def drop_later(
    folder: Path, step: int, saved: Collection[int], writers: Collection[str]
) -> set[int]:
    """Drops what the run wrote after `step` to files that no writer of this process cuts itself.

    Args:
        folder: The run's folder.
        step: The step from which the run continues.
        saved: The steps that have a checkpoint.
        writers: The options that are set: "spikes", and names of callbacks.

    Returns:
        The steps that best.json still lists; empty if the callback `best` writes it.
    """
    if not (folder / METRICS).exists():  # no run wrote here: such files are the user's
        return set()
    for name, writer in _LINES.items():
        if writer not in writers and (path := folder / name).exists():
            try:
                MetricsFile(path, after_step=step).close()
            except StorageError as error:
                logger.warning("%s; it is left as it is", error)
    if "best" in writers:
        return set()
    known = _known(folder / BEST)
    kept = [one for one in known if one.get("step") in saved]
    if kept and kept != known:
        write_kept(folder / BEST, kept)
    elif not kept:
        (folder / BEST).unlink(missing_ok=True)
    return {one["step"] for one in kept}


def read_changes(folder: Path) -> list[Json]:
    """Returns the entries of changes.json, by step; [] if nothing was ever changed.

    Raises:
        StateError: The file is damaged.
    """
    return read_kept(folder / CHANGES) or []


def fingerprint(loader: BatchLoader) -> dict[str, str] | None:
    """Returns digests of sources, tokenizer, config and plan; None if a loader has none."""
    state = loader.state()
    return dict(state.components) if isinstance(state, KnowingState) else None


def from_anywhere(name: str) -> str:
    """Returns a tokenizer or model name as a run records it.

    An existing path is made absolute.
    """
    path = Path(os.path.expanduser(name))
    return str(path.absolute()) if path.exists() else name


def found_beside(name: str, run: Path) -> str:
    """Finds a tokenizer or model that a run recorded.

    A relative path, as recorded by older runs, that does not exist from here is searched for in the
    run's folder and the folders above it, the nearest first.
    """
    path = Path(os.path.expanduser(name))
    folder = Path(os.path.expanduser(run)).absolute()
    beside = [] if path.exists() else [above / path for above in (folder, *folder.parents)]
    return next((str(one) for one in beside if one.exists()), name)


def recorded_seed(output_dir: str | Path) -> int | None:
    """Returns the data seed of the run in `output_dir`; None if there is no run yet.

    Raises:
        StateError: Its record has no seed.
    """
    saved = _recorded(output_dir)
    if saved is None:
        return None
    try:
        return int(saved["data"]["seed"])
    except (KeyError, TypeError, ValueError) as error:
        record = Path(os.path.expanduser(output_dir)) / RECORD
        raise StateError(
            at=str(record), problem=f"records no seed: {error!r}", fix="Set data.seed."
        ) from error


def recorded_datasets(output_dir: str | Path) -> list[str]:
    """Returns the names of the datasets of the run in `output_dir`; [] if none are recorded."""
    data = (_recorded(output_dir) or {}).get("data")
    datasets = data.get("datasets") if isinstance(data, dict) else None
    given = [one.get("name") for one in datasets or () if isinstance(one, dict)]
    return [name or f"dataset{i}" for i, name in enumerate(given, start=1)]


def recorded_steps(output_dir: str | Path) -> int | None:
    """Returns how many steps the run in `output_dir` has, from its config or its data.

    It is None without a run, or if the data decides and was not counted.

    Raises:
        StateError: A file of the run is damaged.
    """
    folder = Path(os.path.expanduser(output_dir))
    train = (_recorded(folder) or {}).get("train")
    steps = train.get("steps") if isinstance(train, dict) else None
    if isinstance(steps, int):
        return steps
    return (read_kept(folder / FINGERPRINTS) or {}).get("steps")


def _recorded(output_dir: str | Path) -> Settings | None:
    """Returns the recorded config of the run in `output_dir`; None if there is no run yet."""
    record = Path(os.path.expanduser(output_dir)) / RECORD
    if not record.exists():
        return None
    with allowing_code():  # it may name functions, which are only read here
        return load_yaml(record)


def write_kept(path: Path, value: Json | Sequence[Json]) -> None:
    """Writes one of the JSON files named above, with a checksum, for `read_kept`."""
    commit_checked(path, value if isinstance(value, Mapping) else {path.stem: list(value)})


def read_kept(path: Path) -> Any:
    """Reads a file that `write_kept` or an earlier version wrote; None if there is no such file.

    Raises:
        StateError: The file is damaged.
    """
    try:
        data = storage.read_bytes(path)
    except MissingFileError:
        return None
    try:
        found = _older_list(data) if path.name in _LISTS else None
        if found is None:
            found = parse_checked(data, path, older=_OLDER.get(path.name))
            found = found.get(path.stem) if path.name in _LISTS else found
        shape = pydantic.TypeAdapter(_SHAPES.get(path.name, _NOT_EMPTY))
        shape.validate_python(found, strict=True)
    except (DamagedFileError, pydantic.ValidationError) as error:
        unlike = "damaged: it does not hold what a run writes there"
        raise StateError(
            at=str(path),
            problem=error.problem if isinstance(error, DamagedFileError) else unlike,
            fix="Move it away: what it says about the run is then unknown.",
        ) from error
    return found


def _older_list(data: bytes) -> list[Any] | None:
    """Returns the list that an earlier version wrote; None if the data is something else."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, list) else None


class _Change(TypedDict):
    """An entry of changes.json."""

    step: int
    row: int | None
    changed: Json
    before: Mapping[str, Json | None] | None


class _Fingerprints(TypedDict):
    """The contents of fingerprints.json."""

    train: Json | None
    eval: Mapping[str, Json | None]
    steps: NotRequired[int | None]  # earlier versions wrote none


class _Restart(TypedDict):
    """An entry of restarts.json."""

    step: int
    time: str


class _Version(TypedDict):
    """An entry of versions.json."""

    from_step: int


class _Drawn(TypedDict):
    name: str


class _Plan(TypedDict):
    """Keys of plan.json by which pictures and pages are ordered."""

    datasets: list[_Drawn]


_NOT_EMPTY = Annotated[Json, pydantic.Field(min_length=1)]
_SHAPES: Json = {
    PLAN: _Plan,
    CHANGES: list[_Change],
    FINGERPRINTS: _Fingerprints,
    VERSIONS: list[_Version],
    RESTARTS: list[_Restart],
    BEST: list[Json],
}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
