"""The record of a run in its folder: the configuration as it was resolved. No jax here: `easypipe explain` reads it anywhere."""

from __future__ import annotations

from pathlib import Path

from easypipe.core import storage
from easypipe.core.errors import StateError

RECORD = "run.json"  # in train.output_dir
LEDGER = "ledger.json"  # beside it: where every row and token of the data went


def recorded_seed(output_dir: str | Path) -> int | None:
    """The data seed of the run in `output_dir`, None where there is no run yet. Raises StateError where its record has none."""
    record = Path(output_dir).expanduser() / RECORD
    if not record.exists():
        return None
    saved = storage.read_json(record)
    try:
        return int(saved["data"]["seed"])
    except (KeyError, TypeError, ValueError) as error:
        raise StateError(at=str(record), problem=f"records no seed: {error!r}", fix="Set data.seed.") from error
