"""The files of a checkpoint: checksums, commit, checks when read, and sweeping of leftovers.

A checkpoint is the folder `<step>`. It is written as `<step>.tmp` (by Orbax as
`<step>.tmp.orbax-checkpoint-tmp` first); `commit` renames it after all of it is on the disk. A
checkpoint that is deleted loses its name before it loses its files. So any folder with a number as
its name is complete, whenever the process was killed or the machine lost power.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from easypipe.core import storage
from easypipe.core.checked import commit_checked, read_checked, shaped
from easypipe.core.errors import EasypipeError, StorageError, require
from easypipe.core.threads import each
from easypipe.core.values import JsonObject

CHECKPOINTS = "checkpoints"  # the folder of checkpoints in a run's output_dir
CHECKSUMS = "checksums.json"  # {"files": {path in the checkpoint: [bytes, XXH3-128 in hex]}}
ARRAYS, RUN = "arrays", "run"  # the two parts of a checkpoint, each a folder in it
_RECORD = "data.json"  # the file in which Orbax writes RUN
_WRITING, _REPLACED, _GOING = ".tmp", ".replaced", ".deleting"
# Suffixes of what a killed process left.
_LOST = frozenset((_WRITING, _REPLACED, _GOING, ".orbax-checkpoint-tmp"))
# Orbax first writes arrays for each process, then merges them: without the second nothing is found.
_OF_PROCESS, _MERGED = f"{ARRAYS}/ocdbt.process_", f"{ARRAYS}/manifest.ocdbt"
_AT_ONCE = 4  # files that are read in parallel


def committed(folder: Path) -> list[int]:
    """Returns the steps that have a checkpoint in `folder`, oldest first."""
    return (
        sorted(
            int(path.name) for path in folder.iterdir() if path.name.isdecimal() and path.is_dir()
        )
        if folder.is_dir()
        else []
    )


def ended(checkpoint: Path) -> bool:
    """Returns whether `checkpoint` exists and is the end of a run that a callback ended for good.

    Raises:
        StorageError: The record of the run in it cannot be read.
    """
    return bool(_saved(checkpoint).get("ended"))


def evaluated(checkpoint: Path) -> bool:
    """Returns whether no evaluation is left to make of `checkpoint`.

    Raises:
        StorageError: The record of the run in it cannot be read.
    """
    return _saved(checkpoint).get("unevaluated") is None


def _saved(checkpoint: Path) -> JsonObject:
    """Returns the record of the run in `checkpoint`; {} if there is none."""
    record = checkpoint / RUN / _RECORD
    saved = storage.read_json(record) if record.exists() else None
    return cast("JsonObject", saved) if isinstance(saved, dict) else {}


def check_path(folder: Path, at: str) -> None:
    """Checks that Orbax can write to a folder: it takes its absolute path for a glob pattern.

    With `[1]` in it checkpoints were written that nothing can read; with `*` or `?` arrays of other
    folders would be merged; a backslash is a slash there.

    Raises:
        ConfigError: It cannot.
    """
    path = folder.absolute().as_posix()
    found = [character for character in "*?[\\" if character in path]
    require(
        not found,
        at,
        f"{path} has {' and '.join(found)} in its path, where Orbax cannot write checkpoints",
        "Give another folder, or a link to it whose path has no * ? [ or backslash.",
    )


def writing(folder: Path, step: int) -> Path:
    """Returns the folder in which a checkpoint is written, before `commit` renames it."""
    return folder / f"{step}{_WRITING}"


def commit(folder: Path, step: int) -> None:
    """Makes `writing(folder, step)` the checkpoint of `step`; replaces an existing one.

    Raises:
        StorageError: Its arrays were written, but not merged.
    """
    made, target = writing(folder, step), folder / str(step)
    files = sorted(path for path in made.rglob("*") if path.is_file())
    names = [file.relative_to(made).as_posix() for file in files]
    for file, problem in _unmerged(names).items():
        raise StorageError(at=str(made / file), problem=problem, fix="Give another folder.")
    commit_checked(made / CHECKSUMS, {"files": dict(zip(names, _stamps(files), strict=True))})
    replaced = folder / f"{step}{_REPLACED}"
    if target.exists():
        os.rename(target, replaced)
    storage.commit_folder(made, target)
    shutil.rmtree(replaced, ignore_errors=True)


def delete(folder: Path, steps: Iterable[int]) -> None:
    for step in steps:
        going = folder / f"{step}{_GOING}"
        os.rename(folder / str(step), going)
        shutil.rmtree(going)


def checkpoints_below(path: Path) -> list[Path]:
    """Returns the checkpoints that `path` is or holds, oldest first.

    `path` is a checkpoint, a folder of them, or the output_dir of a run.
    """
    if path.name.isdecimal() and any((path / name).exists() for name in (CHECKSUMS, ARRAYS, RUN)):
        return [path]
    folder = path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path
    return [found for step in committed(folder) for found in checkpoints_below(folder / str(step))]


def sweep(folder: Path) -> None:
    """Removes what killed processes left in `folder`. No other process may be writing there."""
    for path in folder.iterdir():
        step, dot, _ = path.name.partition(".")
        if not dot or not step.isdecimal() or path.suffix not in _LOST:
            continue
        if path.suffix == _REPLACED and not (folder / step).exists():
            os.rename(path, folder / step)  # its replacement was not committed
        else:
            shutil.rmtree(path)


@dataclass(frozen=True, kw_only=True)
class Checked:
    """The result of `check`.

    Attributes:
        problems: The problem of each file that has one.
        files: The number of files that were read.
        num_bytes: The number of bytes that were read.
        sealed: Whether there were checksums to compare with.
    """

    problems: dict[str, str]
    files: int = 0
    num_bytes: int = 0
    sealed: bool = True


@dataclass(frozen=True)
class _Sums:
    """The contents of CHECKSUMS: bytes and checksum of each file."""

    files: dict[str, tuple[int, str]]


def check(checkpoint: Path, part: str = "", *, share: tuple[int, int] = (0, 1)) -> Checked:
    """Compares the files of a checkpoint, or of a `part` of it, with their checksums.

    Earlier versions wrote no checksums, so their checkpoints cannot be checked (`sealed` is False).

    Args:
        checkpoint: The folder of a checkpoint.
        part: ARRAYS or RUN, with the files next to these folders; "": everything.
        share: (i, n): only every n-th file, from the i-th; the n shares together are all files.
    """
    if not os.path.lexists(checkpoint / CHECKSUMS):
        return Checked(
            problems={
                name: "missing" for name in (ARRAYS, RUN) if not (checkpoint / name).is_dir()
            },
            sealed=False,
        )
    try:
        expected = shaped(_Sums, read_checked(checkpoint / CHECKSUMS)).files
    except EasypipeError as error:
        return Checked(problems={CHECKSUMS: error.problem})
    except ValueError as error:
        return Checked(problems={CHECKSUMS: f"damaged: {error}"})
    if outside := [name for name in expected if not storage.is_inside(name)]:
        return Checked(problems={CHECKSUMS: f"{outside[0]!r} is not a file of this checkpoint"})
    of_part = (
        name for name in expected if not part or name.partition("/")[0] == part or "/" not in name
    )
    names = sorted(of_part)[share[0] :: share[1]]
    problems = {name: "missing" for name in names if not (checkpoint / name).is_file()}
    there = [name for name in names if name not in problems]
    if part != RUN:
        problems |= _unmerged(expected)
    found = dict(zip(there, _stamps(checkpoint / name for name in there), strict=True))
    for name, stamp in found.items():
        if stamp != list(expected[name]):
            same = stamp[0] == expected[name][0]
            problems[name] = (
                "its bytes are not the bytes that were written"
                if same
                else f"{stamp[0]} bytes, {expected[name][0]} were written"
            )
    return Checked(
        problems=problems,
        files=len(there),
        num_bytes=sum(int(stamp[0]) for stamp in found.values()),
    )


def _stamps(files: Iterable[Path]) -> list[list[int | str]]:
    """Returns [bytes, checksum] of each file."""
    stamps = each(storage.checksum, [*files], _AT_ONCE, "checksums")
    return [[stamp.num_bytes, stamp.checksum] for stamp in stamps]


def _unmerged(names: Collection[str]) -> dict[str, str]:
    """Returns the problem of the files of a checkpoint whose arrays no reader would find."""
    merged = _MERGED in names or not any(name.startswith(_OF_PROCESS) for name in names)
    return {} if merged else {_MERGED: "was not written, so that its arrays cannot be read"}
