"""Checks of the loaders that a trainer is given: how many steps, micro-batches, passes, states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, runtime_checkable

from easypipe.core.errors import ConfigError, require
from easypipe.core.protocols import BatchLoader
from easypipe.core.values import Batch, Json, attribute_of
from easypipe.train.config import TrainingConfig

# The steps of a plan if the data decides the length of the run: the program contains the length of
# the schedule as a constant.
MANY_STEPS = 1_000_000


@runtime_checkable
class EpochStyle(Protocol):
    """A loader that has passes: each iteration after a finished one is the next pass.

    Its states know the pass, like those of EpochLoader.
    """

    def set_epoch(self, epoch: int) -> None: ...
    def loader(self, epoch: int) -> BatchLoader: ...


@runtime_checkable
class JsonState(Protocol):
    """A loader state that can be written as JSON text and read back."""

    def to_json(self) -> str: ...
    @classmethod
    def from_json(cls, text: str) -> Self: ...


@runtime_checkable
class KnowingState(Protocol):
    """A loader state that knows which data it belongs to: easypipe's own LoaderState."""

    row: int
    epoch: int
    components: Mapping[str, str]
    config: Json
    changes: tuple[Json, ...]

    def changed(self, components: Mapping[str, str], config: Json) -> tuple[list[str], str]: ...


@runtime_checkable
class Explaining(Protocol):
    """A loader that knows which documents are in a batch, like the Loader of a plan."""

    def explain(self, step: int) -> Any: ...


@runtime_checkable
class Sourced(Protocol):
    """A loader whose batches may name the dataset of each token, by `source_ids`.

    The ids are indices of `source_names`.
    """

    @property
    def source_names(self) -> Sequence[str]: ...


@runtime_checkable
class Closing(Protocol):
    """An iterator that holds resources and can be closed."""

    def close(self) -> None: ...


@dataclass
class Shapes:
    """A stand-in for a loader if only shapes are needed.

    Attributes:
        batch_size: Rows of a batch.
        accumulation_steps: Micro-batches into which the loader cuts a batch.
        batches: The number of batches; None if it is not known.
        source_names: The datasets of its tokens, as if they were measured separately.
    """

    batch_size: int
    accumulation_steps: int
    batches: int | None = None
    source_names: Sequence[str] = ("data",)

    def __len__(self) -> int:
        if self.batches is None:
            raise TypeError("the data is not looked at")
        return self.batches

    def __iter__(self) -> Iterator[Batch]:
        return iter(())

    def state(self) -> Json:
        return {}

    def restore(self, state: Json) -> None:
        del state


def check_loader(loader: BatchLoader, at: str) -> None:
    """Checks that an object is a BatchLoader. One without a length counts as endless.

    Raises:
        ConfigError: It lacks a name of the protocol.
    """
    # A loader may be of any class, so its names are checked.
    lacking = [
        name for name in ("batch_size", "__iter__", "state", "restore") if not hasattr(loader, name)
    ]
    require(
        not lacking,
        at,
        f"{type(loader).__name__} is not a loader: it has no {', '.join(lacking)}",
        "Give one that a Pipeline builds, or anything with easypipe.core.protocols.BatchLoader's "
        "names.",
    )


def sources_of(loader: BatchLoader, at: str) -> Sequence[str]:
    """Returns the names of the datasets that the batches of a loader tell apart.

    Raises:
        ConfigError: They do not distinguish datasets.
    """
    names = loader.source_names if isinstance(loader, Sourced) else ()
    require(
        names,
        "train.measure",
        f"sources, and batches of the loader {at!r} do not say which dataset a token is of",
        "Load with load.source_ids: true, or give data in place of a loader.",
    )
    return names


def num_batches(loader: BatchLoader) -> int | None:
    """Returns the number of batches of a whole loader; None if it never ends."""
    try:
        return len(loader)
    except TypeError:
        return None


def resolve_steps(config: TrainingConfig, train: BatchLoader) -> int:
    """Returns the number of steps of a run, from its options or its loader.

    Raises:
        ConfigError: The batch size or the number of passes differs between loader and config, the
            loader has fewer batches than steps, or neither says how long the run is.
    """
    require(
        config.batch_size in (None, train.batch_size),
        "train.batch_size",
        f"{config.batch_size}, but the loader's batches have {train.batch_size} rows",
        "Make the loader with this batch_size, or leave it out here.",
    )
    batches = num_batches(train)
    if config.epochs is not None:
        passes = getattr(
            getattr(train, "config", None), "num_epochs", 1
        )  # some loaders have passes
        how = "never ends" if batches is None or passes is None else f"ends after {passes}"
        if batches is not None and passes is not None:
            whole = isinstance(train, EpochStyle) and config.epochs % passes == 0
            if whole or config.epochs == passes:
                return batches * config.epochs // passes
        raise ConfigError(
            at="train.epochs",
            problem=f"{config.epochs}, but the loader {how}",
            fix=f"Make it with num_epochs={config.epochs}, or give steps here.",
        )
    require(
        config.steps is not None or batches is not None,
        "train.steps",
        "not given, and the loader never ends",
        "Say how many steps to train.",
    )
    endless = (
        "num_epochs: null"
        if isinstance(train, EpochStyle)
        else "data.load.num_epochs: null; without mix.max_epochs"
    )
    require(
        config.steps is None or batches is None or config.steps <= batches,
        "train.steps",
        f"{config.steps} steps, but the loader ends after {batches} batches",
        f"Give at most {batches}, or a loader that never ends ({endless}).",
    )
    steps = batches if config.steps is None else config.steps
    assert steps is not None
    return steps


def micro_batches(at: str, loader: BatchLoader, pieces: int) -> bool:
    """Returns whether the loader already yields micro-batches, [A, B/A, ...].

    Args:
        at: The key path of the option, for the error message.
        loader: The loader.
        pieces: The number of micro-batches of the run.

    Raises:
        ConfigError: The loader's A is neither 1 nor `pieces`.
    """
    # other BatchLoaders do not have this name
    cut = attribute_of(loader, "accumulation_steps") or 1
    if cut in (1, pieces):
        return cut > 1
    raise ConfigError(
        at=at,
        problem=f"{pieces}, but the loader cuts its batches into {cut} micro-batches",
        fix=f"Use the same number, {pieces} or {cut}, for both.",
    )
