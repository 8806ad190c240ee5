"""Files of a run folder beside its checkpoints: config, versions, fingerprints, changes.

Files of JSON carry a checksum of themselves: `write_kept` writes one and `read_kept` reads it.

No jax at import time: `easypipe explain` and `easypipe report` read these files anywhere.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import logging
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import pydantic
import yaml
from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from easypipe.core import storage
from easypipe.core.checked import commit_checked, parse_checked
from easypipe.core.config import allowing_code, load_yaml, to_dict
from easypipe.core.errors import DamagedFileError, MissingFileError, StateError
from easypipe.core.protocols import BatchLoader
from easypipe.core.values import Json, JsonObject, Settings
from easypipe.train.checks import KnowingState

# in train.output_dir: the configuration as it was resolved, which `easypipe train` takes back
RECORD = "run.yaml"
LEDGER = "ledger.json"  # where every row and token of the data went
PLAN = "plan.json"  # what the run drew of each dataset, against what its weights ask for
# of everything that has a say in the numbers; an entry for each process that began with other ones
VERSIONS = "versions.json"
# what was allowed to differ when the run went on, an entry for each step where it did
CHANGES = "changes.json"
RESTARTS = "restarts.json"  # where a process took up the run again, and when
FINGERPRINTS = "fingerprints.json"  # digests of the data of training and of each evaluation
BEST = "best.json"  # the checkpoints that did best on held-out data, the best first

# Keys of objects that earlier versions wrote without a checksum. What they wrote as a list stands
# under the name of the file now.
_OLDER: Mapping[str, Sequence[str]] = {
    LEDGER: ("entries", "facts"),
    FINGERPRINTS: ("train", "eval"),
    PLAN: (
        "name", "unit", "datasets", "steps", "steps_available", "batch_size", "rows", "rows_left_over", "seq_length", "slots", "padding",
        "fill", "cache_bytes", "saved_bytes", "prepared", "notes", "seconds", "by_step",
    ),
}  # fmt: skip
_LISTS = (VERSIONS, CHANGES, RESTARTS, BEST)

_PACKAGES = (
    "easypipe", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "pyarrow", "tokenizers", "gigatoken",
)  # fmt: skip

logger = logging.getLogger("easypipe")


def write_config(folder: Path, resolved: object) -> None:
    """run.yaml, of a RunConfig."""
    text = yaml.safe_dump(to_dict(resolved), sort_keys=False, allow_unicode=True)
    storage.commit_bytes(folder / RECORD, text.encode())


def write_versions(folder: Path, step: int) -> Json:
    """Adds what runs here to versions.json, unless it is what ran before; `step` is where the run
    went on. Returns the entry.
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
    if not known or known[-1] | {"from_step": 0} != here | {"from_step": 0}:
        write_kept(path, [*known, {"from_step": step, **here}])
    return here


def write_restart(folder: Path, step: int) -> None:
    """Adds to restarts.json that the run goes on from `step` here and now. What stands there of
    later steps goes: the run went back to before them.
    """
    kept = [one for one in _known(folder / RESTARTS) if one["step"] < step]
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S")
    write_kept(folder / RESTARTS, [*kept, {"step": step, "time": now}])


def _known(path: Path) -> list[JsonObject]:
    """The entries of a list that goes on; of a damaged one none: it is moved aside."""
    try:
        return read_kept(path) or []
    except StateError as error:
        aside = path.with_name(f"{path.stem}-damaged.json")
        path.replace(aside)
        logger.warning("%s: %s; moved to %s, and begun anew", path, error.problem, aside.name)
        return []


def write_fingerprints(folder: Path, train: BatchLoader, evals: Mapping[str, BatchLoader]) -> None:
    """fingerprints.json, of loaders whose state tells what data they read; of others it has
    null.
    """
    of_evals = {name: fingerprint(loader) for name, loader in evals.items()}
    write_kept(folder / FINGERPRINTS, {"train": fingerprint(train), "eval": of_evals})


def write_changes(
    folder: Path,
    step: int,
    change: Json | None,
    of_data: Sequence[Json] = (),
) -> None:
    """Brings changes.json up to a run that goes on at `step`.

    change: what `step` begins with, where something was allowed to differ: "row", "changed" (key
    path → what it was and is), "before" ("config" and "components" of the run up to there).
    of_data: all changes that the loader's state tells of, for those that were made before there was
    this file. What stands there of `step` and later steps goes: the run went back to before it.
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


def read_changes(folder: Path) -> list[Json]:
    """The entries of changes.json, by step; [] where nothing was ever changed.

    Raises StateError where it is no such file.
    """
    return read_kept(folder / CHANGES) or []


def fingerprint(loader: BatchLoader) -> dict[str, str] | None:
    """A digest each of sources, tokenizer, config and plan; None where the loader does not know."""
    state = loader.state()
    return dict(state.components) if isinstance(state, KnowingState) else None


def from_anywhere(name: str) -> str:
    """A tokenizer or model as a run records it: a path that is there from any folder, a Hub name as
    it is.
    """
    path = Path(os.path.expanduser(name))
    return str(path.absolute()) if path.exists() else name


def found_beside(name: str, run: Path) -> str:
    """A tokenizer or model as it is found from here: a relative path that an older run recorded is
    looked for in the run's folder and those above it, the nearest first, where it is not here.
    """
    path = Path(os.path.expanduser(name))
    folder = Path(os.path.expanduser(run)).absolute()
    beside = [] if path.exists() else [above / path for above in (folder, *folder.parents)]
    return next((str(one) for one in beside if one.exists()), name)


def recorded_seed(output_dir: str | Path) -> int | None:
    """The data seed of the run in `output_dir`, None where there is no run yet.

    Raises StateError where its record has none.
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


def recorded_steps(output_dir: str | Path) -> int | None:
    """The train.steps of the run in `output_dir`; None where there is no run, or its data decides
    them.
    """
    train = (_recorded(output_dir) or {}).get("train")
    steps = train.get("steps") if isinstance(train, dict) else None
    return steps if isinstance(steps, int) else None


def _recorded(output_dir: str | Path) -> Settings | None:
    """The config of the run in `output_dir`, None where there is no run yet."""
    record = Path(os.path.expanduser(output_dir)) / RECORD
    if not record.exists():
        return None
    with allowing_code():  # it may name functions; reading them runs none
        return load_yaml(record)


def write_kept(path: Path, value: Json | Sequence[Json]) -> None:
    """Commits one of the files named above for `read_kept`."""
    commit_checked(path, value if isinstance(value, Mapping) else {path.stem: list(value)})


def read_kept(path: Path) -> Any:
    """What `write_kept` wrote, or an earlier version; None where there is no such file.

    Raises StateError where it is damaged.
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
            fix="Move it away: what it told of the run is not known then.",
        ) from error
    return found


def _older_list(data: bytes) -> list[Any] | None:
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
    train: Json | None
    eval: Mapping[str, Json | None]


class _Restart(TypedDict):
    step: int
    time: str


class _Version(TypedDict):
    from_step: object


_NOT_EMPTY = Annotated[Json, pydantic.Field(min_length=1)]
_SHAPES: Json = {
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
