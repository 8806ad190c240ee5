# pyright: strict
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingTypeStubs=false
"""Exceptions with place, cause, choices and fix; the names in a folder, and similar names.

EasypipeError
├── ConfigError        (ValueError)
├── StageOrderError    (RuntimeError)
├── SourceError        (ValueError)
│   ├── MissingFileError (FileNotFoundError)
│   └── SchemaError    (SourceError)
├── TokenizerError     (ValueError)
├── BudgetError        (SourceError)
├── PlanError          (ValueError)
├── CacheError         (ValueError)
├── StorageError       (OSError)
│   └── DamagedFileError (StorageError)
├── StateError         (ValueError)
├── LedgerError        (RuntimeError)
├── PlacementError     (ValueError)
├── StallError         (TimeoutError)
├── MissingExtraError  (ImportError)
└── TrainError         (RuntimeError)
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import os
from collections.abc import Collection, Generator, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from easypipe.core.visible import visible

E = TypeVar("E", bound="EasypipeError")


class EasypipeError(Exception):
    """The base of all errors; its text is `at: problem (have: a, b). fix`.

    Attributes:
        at: Where it happened: a key path, a file with its row, a URL.
        problem: What is wrong.
        have: The values that would have been accepted, if there are few.
        fix: What to do about it.
        exit_code: The exit code of the command line: 2 for something that the user must correct, 1
            for a failure.
        in_all: Whether all processes of a run raise it, after the same step.
    """

    exit_code = 2
    in_all = False

    def __init__(
        self, *, at: str, problem: str, have: Iterable[object] | None = None, fix: str | None = None
    ) -> None:
        self.at = at
        self.problem = problem
        self.have = None if have is None else [str(item) for item in have]
        self.fix = fix
        super().__init__(at, problem)

    def __reduce__(self) -> tuple[object, ...]:  # errors cross processes with their notes
        parts = {"at": self.at, "problem": self.problem, "have": self.have, "fix": self.fix}
        # notes and traces are in __dict__, which the constructor does not take
        return functools.partial(type(self), **parts), (), self.__dict__

    def __str__(self) -> str:
        at, text = _shortened(self.at), _shortened(self.problem)
        text = f"{at}: {text}" if at else text
        if self.have is not None:
            text += f" (have: {_shortened(', '.join(self.have)) or 'none'})"
        return visible(f"{text.removesuffix('.')}. {self.fix}" if self.fix else text, keep="\n\t")


def _shortened(text: str, most: int = 4000) -> str:
    """Returns a part of a message, cut to `most` characters: a hostile name may have millions."""
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"


class ConfigError(EasypipeError, ValueError):
    """A wrong configuration value; `at` is its key path."""

    def under(self, parent: str) -> ConfigError:
        """Returns the same error with `parent` in front of its key path."""
        joint = "" if not self.at or self.at.startswith("[") else "."
        return moved(self, f"{parent}{joint}{self.at}")


def moved(error: E, at: str) -> E:
    """Returns the same error with another `at`."""
    return type(error)(at=at, problem=error.problem, have=error.have, fix=error.fix)


def require(
    holds: object,
    at: str,
    problem: str,
    fix: str | None = None,
    have: Iterable[object] | None = None,
) -> None:
    """Checks that a condition holds.

    Args:
        holds: The condition; any true value passes.
        at: As in EasypipeError.
        problem: As in EasypipeError.
        fix: As in EasypipeError.
        have: As in EasypipeError.

    Raises:
        ConfigError: The condition does not hold.
    """
    if not holds:
        raise ConfigError(at=at, problem=problem, have=have, fix=fix)


@contextlib.contextmanager
def raising(
    kind: type[EasypipeError],
    at: str | Path,
    problem: str,
    fix: str | None = None,
    on: type[Exception] | tuple[type[Exception], ...] = OSError,
) -> Generator[None]:
    """Raises an error of easypipe in place of one of the types `on`.

    Args:
        kind: The class of the error to raise.
        at: As in EasypipeError.
        problem: What failed; the text of the original error is appended.
        fix: As in EasypipeError; if access was denied, the fix is to check permissions.
        on: The types of errors to replace.
    """
    try:
        yield
    except on as error:
        if isinstance(error, PermissionError) and "permissions" not in str(fix):
            fix = "Check the path and permissions."
        raise kind(at=str(at), problem=f"{problem}: {error}", fix=fix) from error


class MissingExtraError(EasypipeError, ImportError):
    """A missing package that an extra of easypipe installs; `at` is the package."""


TRAIN_EXTRA = ("jax", "jaxlib", "flax", "optax", "orbax", "jaxtyping", "matplotlib")


@contextlib.contextmanager
def naming_extra() -> Generator[None]:
    """Raises MissingExtraError if a package of the extra `[train]` is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in TRAIN_EXTRA:
            raise
        raise MissingExtraError(
            at=package,
            problem="is not installed; training and placing batches on devices need it, preparing "
            "data does not",
            fix="Install it with: pip install 'easypipe[train]'",
        ) from error


class StageOrderError(EasypipeError, RuntimeError):
    """Stages of a pipeline that were called in an impossible order."""


class SourceError(EasypipeError, ValueError):
    """A file or a row that cannot be read; `at` names both."""


class MissingFileError(SourceError, FileNotFoundError):
    """A path or glob that matches no file."""

    __str__ = EasypipeError.__str__  # OSError's own would print the argument tuple


class SchemaError(SourceError):
    """Columns that do not exist, or that cannot be read together."""


class BudgetError(SourceError):
    """More bad rows than the dataset's budget allows."""


class TokenizerError(EasypipeError, ValueError):
    """A tokenizer that does not load, or does not encode as it should."""


class PlanError(EasypipeError, ValueError):
    """An order, mixture or packing that cannot be planned."""


class CacheError(EasypipeError, ValueError):
    """A token cache or saved folder that is damaged, too new or not easypipe's."""


class StorageError(EasypipeError, OSError):
    """Bytes that could not be read or committed."""

    __str__ = EasypipeError.__str__


class DamagedFileError(StorageError):
    """A file of easypipe whose bytes have changed since they were written."""


class StateError(EasypipeError, ValueError):
    """A saved state that does not belong to this pipeline."""


class LedgerError(EasypipeError, RuntimeError):
    """Rows or tokens that are not accounted for."""

    exit_code = 1


class PlacementError(EasypipeError, ValueError):
    """A batch that does not fit its mesh."""


class StallError(EasypipeError, TimeoutError):
    """A stage that did not deliver before its deadline."""

    exit_code = 1
    __str__ = EasypipeError.__str__


class TrainError(EasypipeError, RuntimeError):
    """A reason why the trainer cannot continue."""


def place(
    file: str, *, row: int | None = None, line: int | None = None, column: str | None = None
) -> str:
    """Returns a place such as `file, row 3, column 'text'`.

    Rows count from 0, as in `read(a, b)`; lines count from 1, as in an editor.
    """
    parts = [file]
    if row is not None:
        parts.append(f"row {row}")
    if line is not None:
        parts.append(f"line {line}")
    if column is not None:
        parts.append(f"column {column!r}")
    return ", ".join(parts)


def did_you_mean(name: str, known: Iterable[str]) -> str | None:
    """Returns `Did you mean 'code'?`, or None if no known name is similar.

    Names that differ in a letter or two come first. Then come names that have all words of `name`
    (`chat_template`), or only words of it; those with the same last word are preferred. Then come
    names with `name` as their initials (`lr`), then names with a similar spelling.
    """

    def nearness(other: str) -> tuple[bool, bool, bool, float]:
        words, others = name.lower().split("_"), other.lower().split("_")
        within = set(words) <= set(others) or set(others) <= set(words)
        initials = len(others) > 1 and words == ["".join(word[:1] for word in others)]
        alike = difflib.SequenceMatcher(None, name, other).ratio()
        return (
            alike > 0.9,
            within or initials,
            within and words[-1] == others[-1],
            alike,
        )

    best = max(((nearness(other), other) for other in known), default=None)
    if best is None or not (best[0][1] or best[0][3] >= 0.6):
        return None
    return f"Did you mean {best[1]!r}?"


def nearest_folder(path: str) -> str:
    """Returns the nearest existing folder at or above an absolute path."""
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    return path


def names_in(folder: str) -> list[str]:
    """Returns the names in a folder, without hidden ones, sorted; [] if it cannot be read."""
    with contextlib.suppress(OSError):
        return sorted(name for name in os.listdir(folder) if not name.startswith("."))
    return []


def near_path(path: str | Path) -> tuple[list[str], str | None]:
    """Finds what may have been meant by a path that does not exist.

    Returns:
        (a few names in the deepest folder of the path that exists, `Did you mean ...?` for the name
        that is missing there, or None).
    """
    whole = os.path.abspath(os.path.expanduser(path))
    folder = nearest_folder(os.path.dirname(whole))
    missing = os.path.relpath(whole, folder).partition(os.sep)[0]
    names = names_in(folder)
    # comparing all names of a very large folder would take minutes
    return few(names), None if missing in names else did_you_mean(missing, names[:2000])


def few(names: Sequence[str], most: int = 8) -> list[str]:
    """Returns the first names for a message, followed by "..." if there are more."""
    return [*names[:most], *(["..."] if len(names) > most else [])]


def require_known(
    name: str,
    have: Collection[str],
    at: str,
    problem: str,
    fix: str | None = None,
    kind: type[EasypipeError] = ConfigError,
) -> None:
    """Checks that `name` is one of `have`.

    Args:
        name: The name to check.
        have: The names that are known.
        at: As in EasypipeError.
        problem: As in EasypipeError.
        fix: What to do if no known name is similar.
        kind: The class of the error.

    Raises:
        EasypipeError: The name is unknown; an error of class `kind` with a similar name, else
            `fix`.
    """
    if name not in have:
        raise kind(at=at, problem=problem, have=have, fix=did_you_mean(str(name), have) or fix)


def require_option(value: str, options: Iterable[str], at: str) -> None:
    """Raises ConfigError if a value is not one of `options`."""
    require_known(value, tuple(options), at, f"{value!r} is not an option")


def require_columns(names: Iterable[str], have: Sequence[str], at: str) -> None:
    """Raises SourceError for the first name that is not one of the columns `have`."""
    for name in names:
        require_known(name, have, at, f"no column {name!r}", kind=SourceError)


def require_rows(start: int, stop: int, num_rows: int | None, at: str) -> None:
    """Raises SourceError for a range outside a shard of `num_rows` rows (None: any number)."""
    if not 0 <= start <= stop or (num_rows is not None and stop > num_rows):
        raise SourceError(
            at=at,
            problem=f"rows {start}:{stop} were asked for",
            fix=f"It has rows 0:{num_rows}.",
        )
