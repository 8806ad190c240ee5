"""What a trainer asks of loaders: how many steps they make, micro-batches, passes, states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, runtime_checkable

from easypipe.core.errors import ConfigError, require
from easypipe.core.protocols import BatchLoader
from easypipe.core.values import Batch, Json, attribute_of
from easypipe.train.config import TrainingConfig

# for a run whose length its data decides: the length of the schedule is a constant of the program
MANY_STEPS = 1_000_000


@runtime_checkable
class EpochStyle(Protocol):
    """A loader of which every iteration behind a finished one is the next pass, which its states
    know (EpochLoader).
    """

    def set_epoch(self, epoch: int) -> None: ...
    def loader(self, epoch: int) -> BatchLoader: ...


@runtime_checkable
class JsonState(Protocol):
    """A loader's state that writes itself as text."""

    def to_json(self) -> str: ...
    @classmethod
    def from_json(cls, text: str) -> Self: ...


@runtime_checkable
class KnowingState(Protocol):
    """A loader's state that knows which data it belongs to: easypipe's own LoaderState."""

    row: int
    epoch: int
    components: Mapping[str, str]
    config: Json
    changes: tuple[Json, ...]

    def changed(self, components: Mapping[str, str], config: Json) -> tuple[list[str], str]: ...


@runtime_checkable
class Explaining(Protocol):
    """A loader that knows which documents stand in a batch, as the Loader of a plan does."""

    def explain(self, step: int) -> Any: ...


@runtime_checkable
class Sourced(Protocol):
    """A loader whose batches may say which dataset a token is of: `source_ids` numbers these."""

    @property
    def source_names(self) -> Sequence[str]: ...


@runtime_checkable
class Closing(Protocol):
    """An iterator that holds something open."""

    def close(self) -> None: ...


@dataclass
class Shapes:
    """Stands for a loader where only shapes are asked.

    Attributes:
        batch_size: Rows of a batch.
        accumulation_steps: Micro-batches into which the loader cuts a batch.
        batches: How many; None where that is not known.
        source_names: The datasets of its tokens, as if they were told apart.
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
    """Raises ConfigError for what is no BatchLoader; one without a length never ends."""
    # a loader may be of any class
    lacking = [
        name for name in ("batch_size", "__iter__", "state", "restore") if not hasattr(loader, name)
    ]
    require(
        not lacking,
        at,
        f"{type(loader).__name__} is no loader: it has no {', '.join(lacking)}",
        "Give one that a Pipeline builds, or anything with easypipe.core.protocols.BatchLoader's "
        "names.",
    )


def sources_of(loader: BatchLoader, at: str) -> Sequence[str]:
    """The datasets that the batches of a loader tell apart. Raises ConfigError where they do
    not.
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
    """Batches from the start to the end of a loader; None where it never ends."""
    try:
        return len(loader)
    except TypeError:
        return None


def resolve_steps(config: TrainingConfig, train: BatchLoader) -> int:
    """Raises ConfigError where the loader is not what the config says of it, or has fewer
    batches.
    """
    require(
        config.batch_size in (None, train.batch_size),
        "train.batch_size",
        f"{config.batch_size}, but the loader's batches have {train.batch_size} rows",
        "Make the loader with this batch_size, or leave it out here.",
    )
    batches = num_batches(train)
    if config.epochs is not None:
        passes = getattr(getattr(train, "config", None), "num_epochs", 1)  # of loaders with passes
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
    require(
        config.steps is None or batches is None or config.steps <= batches,
        "train.steps",
        f"{config.steps} steps, but the loader ends after {batches} batches",
        f"Give at most {batches}, or set num_epochs: null in the loader.",
    )
    steps = batches if config.steps is None else config.steps
    assert steps is not None
    return steps


def micro_batches(at: str, loader: BatchLoader, pieces: int) -> bool:
    """Whether the loader yields [A, B/A, ...] already.

    Raises ConfigError where its A is not `pieces`.
    """
    cut = attribute_of(loader, "accumulation_steps") or 1  # of any other BatchLoader
    if cut in (1, pieces):
        return cut > 1
    raise ConfigError(
        at=at,
        problem=f"{pieces}, but the loader cuts its batches into {cut} micro-batches",
        fix=f"Use the same number, {pieces} or {cut}, for both.",
    )
