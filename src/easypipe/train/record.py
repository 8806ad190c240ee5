"""What a run leaves in its folder beside checkpoints and metrics: how it was configured, on what it ran, which data it read.

No jax at import time: `easypipe explain` and `easypipe report` read these files anywhere.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from easypipe.core import storage
from easypipe.core.config import allowing_code, load_yaml, to_dict
from easypipe.core.errors import StateError

RECORD = "run.yaml"  # in train.output_dir: the configuration as it was resolved, which `easypipe train` takes back
LEDGER = "ledger.json"  # where every row and token of the data went
PLAN = "plan.json"  # what the run drew of each dataset, against what its weights ask for
VERSIONS = "versions.json"  # of everything that has a say in the numbers; an entry for each process that began with other ones
CHANGES = "changes.json"  # what was allowed to differ when the run went on, an entry for each step where it did
FINGERPRINTS = "fingerprints.json"  # digests of the data of training and of each evaluation

_PACKAGES = (
    "easypipe", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "pyarrow", "tokenizers", "gigatoken",
)  # fmt: skip


def write_config(folder: Path, resolved: Any) -> None:
    """run.yaml, of a RunConfig."""
    text = yaml.safe_dump(to_dict(resolved), sort_keys=False, allow_unicode=True)
    storage.commit_bytes(folder / RECORD, text.encode())


def write_versions(folder: Path, step: int) -> dict[str, Any]:
    """Adds what runs here to versions.json, unless it is what ran before; `step` is where the run went on. Returns the entry."""
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
    known: list[dict[str, Any]] = storage.read_json(path) if path.exists() else []
    if not known or {key: value for key, value in known[-1].items() if key != "from_step"} != here:
        storage.commit_json(path, [*known, {"from_step": step, **here}])
    return here


def write_fingerprints(folder: Path, train: Any, evals: Mapping[str, Any]) -> None:
    """fingerprints.json, of loaders whose state tells what data they read; of others it has null."""
    storage.commit_json(
        folder / FINGERPRINTS, {"train": fingerprint(train), "eval": {name: fingerprint(loader) for name, loader in evals.items()}}
    )


def write_changes(folder: Path, step: int, change: Mapping[str, Any] | None, of_data: Sequence[Mapping[str, Any]] = ()) -> None:
    """Brings changes.json up to a run that goes on at `step`.

    change: what `step` begins with, where something was allowed to differ: "row", "changed" (key path
    → what it was and is), "before" ("config" and "components" of the run up to there). of_data: all
    changes that the loader's state tells of, for those that were made before there was this file.
    What stands there of `step` and later steps goes: the run went back to before it.
    """
    path = folder / CHANGES
    known = read_changes(folder)
    kept = [one for one in known if one["step"] < step]
    kept += [] if change is None else [{"step": step, **change}]
    told = {one["step"] for one in kept}
    for one in of_data:
        if one["batch"] not in told:
            parts = {f"loader.{key}": "another" for key in one if key not in ("batch", "row")}
            kept.append({"step": one["batch"], "row": one["row"], "changed": parts, "before": None})
    if kept != known:
        storage.commit_json(path, sorted(kept, key=lambda one: one["step"]))


def read_changes(folder: Path) -> list[dict[str, Any]]:
    """The entries of changes.json, by step; [] where nothing was ever changed. Raises StateError where it is no such file."""
    path = folder / CHANGES
    known = read_optional(path) or []
    if not isinstance(known, list) or not all(
        isinstance(one, dict) and {"step", "row", "changed", "before"} <= one.keys() for one in known
    ):
        raise StateError(at=str(path), problem="is not what a run writes there", fix="Move it away: changes of the run are not known then.")
    return known


def fingerprint(loader: Any) -> dict[str, str] | None:
    """A digest each of sources, tokenizer, config and plan; None where the loader does not know."""
    components = getattr(loader.state(), "components", None)
    return None if components is None else dict(components)


def recorded_seed(output_dir: str | Path) -> int | None:
    """The data seed of the run in `output_dir`, None where there is no run yet. Raises StateError where its record has none."""
    record = Path(output_dir).expanduser() / RECORD
    if not record.exists():
        return None
    with allowing_code():  # it may name functions; reading them runs none
        saved = load_yaml(record)
    try:
        return int(saved["data"]["seed"])
    except (KeyError, TypeError, ValueError) as error:
        raise StateError(at=str(record), problem=f"records no seed: {error!r}", fix="Set data.seed.") from error


def read_optional(path: Path) -> Any:
    """The JSON of a file of the run, None where there is no such file. Raises StateError where it is none."""
    if not path.exists():
        return None
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise StateError(at=str(path), problem=f"is no JSON: {error}", fix="Move it away.") from error


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
