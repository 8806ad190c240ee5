"""PlanSpec and PlanDataset, the input of a plan, also in words: window sizes, fingerprint."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from easypipe.core.checked import whole
from easypipe.core.config import digest, to_dict
from easypipe.core.errors import PlanError, StateError
from easypipe.core.values import Int32, Int64, Json, JsonObject
from easypipe.plan.mix import MAX_DATASETS, MAX_WEIGHT_SUM, Stop
from easypipe.plan.mix_schedule import Schedule, normalized
from easypipe.plan.order import OrderConfig
from easypipe.plan.pack import PackSpec

PLAN_VERSION = 1  # raise it with every change that moves a document to another row

WINDOW_TOKENS = 16 << 20
WINDOW_ROWS = 4096
MAX_WINDOW_DOCS = 65_536
LEAST_ROWS = 64  # of windows that end with a pass

LONGEST_WORD = 40  # characters of JSON

Unit = Literal["rows", "tokens"]
UNITS: tuple[Unit, ...] = ("rows", "tokens")

STOPS: tuple[Stop, ...] = ("restart", "first_exhausted", "all_exhausted")


@dataclass(frozen=True)
class PlanDataset:
    """A dataset as plans use it: a count of documents and their lengths.

    Args:
        name: The name of the dataset; it seeds the dataset's order.
        num_docs: The number of documents.
        total_tokens: The sum of all lengths.
        fingerprint: The fingerprint of the dataset's tokens.
        lengths: Maps document numbers, Int64[n], to their tokens, Int32[n]. An EOS that will be
            appended is counted already. Several threads call it.
    """

    name: str
    num_docs: int
    total_tokens: int
    fingerprint: str
    lengths: Callable[[Int64], Int32]


class Stage(NamedTuple):
    """The shares by which a window is drawn, and how long they hold.

    Attributes:
        shares: The shares of the datasets. None means that the weights count documents and never
            change.
        rows: The rows until the shares change next; None if they do not.
        most: The most rows that the window may have then.
    """

    shares: tuple[Fraction, ...] | None
    rows: int | None = None
    most: int = 0


@dataclass(frozen=True, kw_only=True)
class PlanSpec:
    """The choices that, with the datasets, decide which documents are in every row.

    A mixture that is not planned yet leaves window_docs, window_tokens, pack and num_epochs to the
    code that plans it.

    Args:
        weights: Positive integers, one per dataset (`mix.integer_weights`).
        stop: When a mixture ends. "restart" never ends, and therefore needs num_epochs None. For a
            single dataset all three are the same and an epoch is one pass.
        window_docs: The documents that are planned and packed together.
        window_tokens: A window has fewer documents if fewer hold this many tokens; None sets no
            such limit.
        num_epochs: How often a mixture that ends is drawn, with new permutations each time; None
            repeats it forever.
        pack: How documents are packed; with None every document has a row of its own.
        schedule: Weights by training step in place of `weights`, which then only size windows.
        unit: The unit of shares; "tokens" are those that get a place in a row.
        block: Under a schedule, the number of documents in the block to which shares are rounded.
        max_epochs: The most passes over each dataset in the whole run, None for no limit. After
            these a dataset leaves the mixture.
    """

    seed: int
    weights: tuple[int, ...]
    stop: Stop
    window_docs: int = MAX_WINDOW_DOCS
    window_tokens: int | None = None
    num_epochs: int | None = 1
    order: OrderConfig = field(default_factory=OrderConfig)
    pack: PackSpec | None = None
    schedule: Schedule | None = None
    unit: Unit = "rows"
    block: int | None = None
    max_epochs: tuple[int | None, ...] | None = None

    def __post_init__(self) -> None:
        """Asserts what the configs have already checked, with messages for users."""
        count, schedule = len(self.weights), self.schedule
        assert self.stop in STOPS, f"no strategy {self.stop!r}"
        assert self.unit in UNITS, f"no unit {self.unit!r}"
        assert 0 < count <= MAX_DATASETS, f"{count} datasets"
        assert min(self.weights) > 0, "make weights with integer_weights"
        assert sum(self.weights) <= MAX_WEIGHT_SUM, "make weights with integer_weights"
        assert self.window_docs > 0, f"{self.window_docs} documents make no window"
        assert self.num_epochs is None or self.num_epochs > 0, "no epoch"
        assert self.num_epochs is None or self.has_epochs, "a mixture that restarts has no epochs"
        assert schedule is None or len(schedule.all_weights[0]) == count, "points of others"
        assert self.block is None or (schedule is not None and self.unit == "rows"), "no block"
        assert len(self.caps) == count, "max_epochs of other datasets"
        assert min(cap or 1 for cap in self.caps) > 0, "fewer than one pass"

    @property
    def has_epochs(self) -> bool:
        """Whether the draws come in epochs; if not, each dataset restarts on its own."""
        return self.stop != "restart" or len(self.weights) == 1

    @property
    def caps(self) -> tuple[int | None, ...]:
        """The most passes over each dataset; None for no limit."""
        return (None,) * len(self.weights) if self.max_epochs is None else self.max_epochs

    @property
    def all_weights(self) -> Sequence[tuple[int, ...]]:
        """Every set of weights by which documents are drawn."""
        return [self.weights] if self.schedule is None else self.schedule.all_weights

    def stage(self, row: int) -> Stage:
        """Returns the stage of a window that begins at `row`."""
        if self.schedule is None:
            return Stage(normalized(self.weights) if self.unit == "tokens" else None)
        shares = self.schedule.shares(self.schedule.step_of(row))
        return Stage(shares, *(self.schedule.stage_end(row) or ()))

    def last_epoch(self, num_docs: Sequence[int]) -> int | None:
        """Returns the epochs of the whole run, which `caps` may end early; None: no end."""
        passes = [cap for cap, count in zip(self.caps, num_docs, strict=True) if count]
        ends = None if None in passes else max((cap for cap in passes if cap), default=0)
        if not self.has_epochs:
            return None if ends is None else 1
        return min((n for n in (ends, self.num_epochs) if n is not None), default=None)


def window_docs(
    datasets: Sequence[PlanDataset], weights: Sequence[int], seq_length: int | None = None
) -> int:
    """Returns the number of documents of a window, computed from integers only.

    They are 16 Mi tokens' worth, or 4,096 rows' worth if that is more, and at most 65,536. This is
    enough to make the one partly empty row of a window negligible, and few enough that planning a
    window takes milliseconds.
    """
    tokens = max(WINDOW_TOKENS, WINDOW_ROWS * (seq_length or 0))
    # The mean length of a draw is sum(w · tokens / docs) / sum(w); in integers of 2^-32 tokens, so
    # that all machines agree.
    mean = sum(
        w * ((d.total_tokens << 32) // max(1, d.num_docs))
        for w, d in zip(weights, datasets, strict=True)
    ) // sum(weights)
    return max(1, min(MAX_WINDOW_DOCS, -(-(tokens << 32) // max(1, mean))))


def pass_docs(
    datasets: Sequence[PlanDataset], weights: Sequence[int], seq_length: int, unit: Unit
) -> int:
    """Returns about how many documents a mixture draws in a pass over the dataset that ends first.

    They are those of as many passes as fill LEAST_ROWS rows. A dataset that restarts within a
    window repeats documents there, before rows that were permuted have shown the others.
    """
    draws = [  # how often each dataset is drawn, in parts of their sum
        w if unit == "rows" else w * (d.num_docs << 32) // max(1, d.total_tokens)
        for w, d in zip(weights, datasets, strict=True)
    ]
    one = min(
        max(1, d.num_docs * sum(draws) // part)
        for part, d in zip(draws, datasets, strict=True)
        if part
    )
    tokens = sum(
        part * d.total_tokens // max(1, d.num_docs) for part, d in zip(draws, datasets, strict=True)
    )
    mean = max(1, min(seq_length, tokens // sum(draws)))  # that of a draw
    return one * -(-LEAST_ROWS * seq_length // (mean * one))


def check(datasets: Sequence[PlanDataset], spec: PlanSpec) -> None:
    """Checks that every dataset has the documents that the plan needs.

    Raises:
        PlanError: A dataset that the mixture needs, or every dataset, has no documents.
    """
    names = [dataset.name for dataset in datasets]
    assert len(names) == len({*names}) == len(spec.weights), f"{names} for {spec.weights}"
    for dataset in datasets:
        if dataset.num_docs < 1 and (spec.stop != "all_exhausted" or len(names) == 1):
            fix = "Leave it out, or give it data." if len(names) > 1 else "Give it data."
            raise PlanError(at=f"dataset {dataset.name!r}", problem="has no documents", fix=fix)
    if not any(dataset.num_docs for dataset in datasets):
        raise PlanError(
            at="datasets",
            problem="none has any documents",
            have=names,
            fix="Give at least one of them data.",
        )


def fingerprint(datasets: Sequence[PlanDataset], spec: PlanSpec) -> str:
    """Returns the hex digest of everything that decides the content of a row.

    It leaves out num_epochs: more epochs only add rows after the last.
    """
    return digest(
        "plan",
        PLAN_VERSION,
        choices(spec),
        [[d.name, d.num_docs, d.total_tokens, d.fingerprint] for d in datasets],
    )


def choices(spec: PlanSpec) -> JsonObject:
    """Returns the part of `spec` that the fingerprint covers, as JSON."""
    found: JsonObject = {
        key: value
        for key, value in to_dict(spec).items()
        # plans without the later choices keep the fingerprints that they had before these choices
        if key != "num_epochs" and (key, value) not in LATER_CHOICES.items()
    }
    if spec.pack is not None and spec.pack.strategy != "pool":
        del found["pack"]["num_packers"]
    return found | ends_choice(spec)


LATER_CHOICES = {
    "window_tokens": None,
    "schedule": None,
    "unit": "rows",
    "block": None,
    "max_epochs": None,
}


def ends_choice(spec: PlanSpec) -> dict[str, str]:
    """Returns fingerprint entries of plans whose windows end elsewhere than in earlier versions.

    These are packed plans with changing weights: their windows end at an estimate of the row, which
    earlier versions searched for. They are also plans in which a dataset leaves for good: their
    windows once included what the other datasets yielded later.
    """
    found, pack = dict[str, str](), spec.pack
    if spec.schedule is not None and pack is not None and not pack.concat:
        found["stages_end"] = "estimated"
    if not spec.has_epochs and any(spec.caps):
        found["windows_end"] = "where one leaves"
    return found


def in_words(choices: Json, prefix: str = "plan.") -> JsonObject:
    """Returns `choices` with one key each, for messages about what changed.

    A long value is replaced by the beginning of its digest. window_docs is left out, because it
    follows from the data and the other choices.
    """
    found: JsonObject = {}
    for key, value in choices.items():
        if isinstance(value, Mapping) and key != "schedule":
            found |= in_words(value, f"{prefix}{key}.")
        elif value is not None and key != "window_docs":
            found[prefix + key] = (
                value if len(json.dumps(value)) <= LONGEST_WORD else digest(value)[:8]
            )
    return found


At = TypeVar("At")  # how far one dataset is drawn: see WindowState.drawn


@dataclass(frozen=True, kw_only=True)
class WindowState(Generic[At]):
    """What a window depends on besides datasets and spec: JSON of less than 3 KiB for 60
    datasets.

    The state after the last window of a plan has epoch == num_epochs.

    Args:
        first_row: The number of rows before the window.
        epoch: The epoch of the mixture, from 0.
        drawn: How far each dataset is drawn: its documents in this epoch, or, in streaming, the
            position of its stream (loader/streams/feed.py).
        deficits: The deficits of the mixture (`plan.mix`).
        active: Which datasets are still in the mixture.
        cut: Under strategy "concat", (dataset, tokens) of the document that the window begins with;
            its first `tokens` tokens are in earlier rows. A count of documents includes it as
            drawn; a position in a stream is before it. None if a row ended with its document.
        index: The number of the window, counted from where planning began.
    """

    first_row: int
    epoch: int
    drawn: tuple[At, ...]
    deficits: tuple[int, ...]
    active: tuple[bool, ...]
    cut: tuple[int, int] | None = None
    index: int = 0

    def to_json(self) -> JsonObject:
        return {
            "index": self.index,
            "epoch": self.epoch,
            "first_row": self.first_row,
            "drawn": list(self.drawn),
            "deficits": list(self.deficits),
            "active": "".join("01"[alive] for alive in self.active),
            **({} if self.cut is None else {"cut": list(self.cut)}),
        }

    @classmethod
    def from_json(cls, values: Any) -> WindowState[int]:
        """Reads a state that `to_json` wrote.

        Raises:
            StateError: `to_json` cannot have written `values`.
        """
        try:
            index, epoch, first_row = (
                whole(values[key]) for key in ("index", "epoch", "first_row")
            )
            drawn, deficits = (tuple(map(whole, values[key])) for key in ("drawn", "deficits"))
            active = tuple({"0": False, "1": True}[alive] for alive in values["active"])
            cut = values.get("cut")
            cut = None if cut is None else (whole(cut[0]), whole(cut[1]))
            if max(map(abs, (index, epoch, first_row, *drawn, *deficits, *(cut or ())))) >> 62:
                raise ValueError("a number that does not fit")
        # a state from a file may be of any shape
        except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
            raise StateError(
                at="window", problem=f"{values!r} is not a state of a plan: {error!r}"
            ) from None
        return WindowState(
            index=index,
            epoch=epoch,
            first_row=first_row,
            drawn=drawn,
            deficits=deficits,
            active=active,
            cut=cut,
        )
