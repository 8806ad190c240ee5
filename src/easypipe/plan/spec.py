"""What a plan is made of: the datasets, seen as lengths, and the choices."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from easypipe.core.config import digest, to_dict
from easypipe.core.errors import PlanError
from easypipe.plan.mix import MAX_DATASETS, MAX_DRAWS, MAX_WEIGHT_SUM, Stop
from easypipe.plan.order import OrderSpec
from easypipe.plan.pack import PackSpec
from easypipe.plan.schedule import Schedule

PLAN_VERSION = 1  # raise it with every change that moves a document to another row

WINDOW_TOKENS = 16 << 20
WINDOW_ROWS = 4096
MAX_WINDOW_DOCS = 65_536

LONGEST_WORD = 40  # characters of JSON

Unit = Literal["rows", "tokens"]
UNITS: tuple[Unit, ...] = ("rows", "tokens")

STOPS: tuple[Stop, ...] = ("restart", "first_exhausted", "all_exhausted")


@dataclass(frozen=True)
class PlanDataset:
    """A dataset as a plan sees it.

    num_docs: documents. total_tokens: the sum of all lengths. fingerprint: of the tokens. lengths:
    Int64[n] document numbers → Int32[n] tokens each, an EOS that will be appended already counted;
    called from several threads.
    """

    name: str
    num_docs: int
    total_tokens: int
    fingerprint: str
    lengths: Callable[[NDArray[np.int64]], NDArray[np.int32]]


@dataclass(frozen=True, kw_only=True)
class PlanSpec:
    """The choices that, with the datasets, decide which documents stand in every row.

    weights: positive integers, one per dataset (`mix.integer_weights`). stop: when a mixture ends;
    "restart" never does, so it wants num_epochs None; for a single dataset all three are the same
    and an epoch is one pass. num_epochs: how often a mixture that ends is drawn, with new
    permutations each time; None goes on forever. pack: None gives every document a row of its own.
    window_docs: documents planned and packed together.

    schedule: weights by training step in place of `weights`, which then only sizes windows. unit:
    what a share is a share of; "tokens" are those that get a place in a row. block: under a
    schedule, documents in a block that shares are rounded to. max_epochs: most passes over each
    dataset in the whole run, None for no limit; a dataset that has made them is out of the mixture.
    """

    seed: int
    weights: tuple[int, ...]
    stop: Stop
    window_docs: int
    num_epochs: int | None = 1
    order: OrderSpec = field(default_factory=OrderSpec)
    pack: PackSpec | None = None
    schedule: Schedule | None = None
    unit: Unit = "rows"
    block: int | None = None
    max_epochs: tuple[int | None, ...] | None = None

    def __post_init__(self) -> None:
        if self.stop not in STOPS:
            raise PlanError(at="stop", problem=f"no strategy {self.stop!r}", have=STOPS)
        if not self.weights or any(
            type(weight) is not int or weight < 1 for weight in self.weights
        ):
            problem = f"{self.weights!r} are not positive integers"
            raise PlanError(at="weights", problem=problem, fix="Make them with integer_weights.")
        if sum(self.weights) > MAX_WEIGHT_SUM or len(self.weights) > MAX_DATASETS:
            problem = f"{len(self.weights)} weights with a sum of {sum(self.weights)}"
            fix = f"At most {MAX_DATASETS} datasets and a sum of 2^40 can be mixed; make the weights with integer_weights."
            raise PlanError(at="weights", problem=problem, fix=fix)
        if not 1 <= self.window_docs <= MAX_DRAWS:
            problem = f"{self.window_docs} documents make no window"
            raise PlanError(at="window_docs", problem=problem, fix=f"Give 1 to {MAX_DRAWS}.")
        if self.num_epochs is not None and self.num_epochs < 1:
            problem = f"{self.num_epochs} epochs hold no rows"
            raise PlanError(
                at="num_epochs",
                problem=problem,
                fix="Give at least 1, or None for data without end.",
            )
        if self.unit not in UNITS:
            raise PlanError(at="unit", problem=f"no unit {self.unit!r}", have=UNITS)
        if self.schedule is not None and {
            len(weights) for weights in self.schedule.all_weights
        } != {len(self.weights)}:
            raise PlanError(
                at="schedule",
                problem=f"its points do not have weights for {len(self.weights)} datasets",
            )
        if self.block is not None and (
            self.schedule is None or self.unit == "tokens" or not 1 <= self.block <= 1 << 40
        ):
            raise PlanError(
                at="block",
                problem=f"{self.block}",
                fix="Give 1 to 2^40, with a schedule of weights by rows.",
            )
        if self.max_epochs is not None and len(self.max_epochs) != len(self.weights):
            raise PlanError(
                at="max_epochs",
                problem=f"{len(self.max_epochs)} numbers for {len(self.weights)} datasets",
            )
        if self.max_epochs is not None and any(
            cap is not None and cap < 1 for cap in self.max_epochs
        ):
            raise PlanError(
                at="max_epochs",
                problem=f"{self.max_epochs} holds fewer than one pass",
                fix="Give at least 1.",
            )
        if self.stop == "restart" and len(self.weights) > 1 and self.num_epochs is not None:
            fix = "Set num_epochs to None, or stop to 'first_exhausted' or 'all_exhausted'."
            raise PlanError(
                at="num_epochs",
                problem=f"a mixture that restarts has no end to reach {self.num_epochs} times",
                fix=fix,
            )

    @property
    def has_epochs(self) -> bool:
        """Whether the draws come in epochs; else each dataset restarts on its own."""
        return self.stop != "restart" or len(self.weights) == 1

    @property
    def caps(self) -> tuple[int | None, ...]:
        """Most passes over each dataset; None for no limit."""
        return (None,) * len(self.weights) if self.max_epochs is None else self.max_epochs

    def last_epoch(self, num_docs: Sequence[int]) -> int | None:
        """Epochs of the whole run, which caps may end early; None where it never ends."""
        passes = [cap for cap, count in zip(self.caps, num_docs, strict=True) if count]
        ends = (
            max((cap for cap in passes if cap is not None), default=0)
            if None not in passes
            else None
        )
        if not self.has_epochs:
            return None if ends is None else 1
        return (
            ends
            if self.num_epochs is None
            else self.num_epochs
            if ends is None
            else min(ends, self.num_epochs)
        )


def window_docs(
    datasets: Sequence[PlanDataset], weights: Sequence[int], seq_length: int | None = None
) -> int:
    """Documents of a window, from integers only: 16 Mi tokens' worth, 4,096 rows' worth where that
    is more, at most 65,536.

    Enough that the one row a window leaves part empty does not matter, few enough that planning a
    window takes milliseconds.
    """
    tokens = max(WINDOW_TOKENS, WINDOW_ROWS * (seq_length or 0))
    # The mean length of a draw is sum(w · tokens / docs) / sum(w); in integers of 2^-32 tokens, so
    # that machines agree.
    mean = sum(
        w * ((d.total_tokens << 32) // max(1, d.num_docs))
        for w, d in zip(weights, datasets, strict=True)
    ) // sum(weights)
    return max(1, min(MAX_WINDOW_DOCS, -(-(tokens << 32) // max(1, mean))))


def check(datasets: Sequence[PlanDataset], spec: PlanSpec) -> None:
    """Raises PlanError where datasets and spec do not make a plan."""
    names = [dataset.name for dataset in datasets]
    if len(names) != len(spec.weights):
        raise PlanError(
            at="weights",
            problem=f"{len(spec.weights)} weights for {len(names)} datasets",
            have=names,
        )
    if len(set(names)) != len(names):
        raise PlanError(
            at="datasets",
            problem="two datasets have one name",
            have=names,
            fix="Names fold the seed: rename one.",
        )
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
    """Hex digest of everything that decides what stands in a row. Not num_epochs: more epochs only
    add rows behind the last.
    """
    return digest(
        "plan",
        PLAN_VERSION,
        choices(spec),
        [[d.name, d.num_docs, d.total_tokens, d.fingerprint] for d in datasets],
    )


def choices(spec: PlanSpec) -> dict[str, Any]:
    """What of `spec` the fingerprint covers."""
    found: dict[str, Any] = {
        key: value for key, value in to_dict(spec).items() if key != "num_epochs"
    }
    for key, default in {
        "schedule": None,
        "unit": "rows",
        "block": None,
        "max_epochs": None,
    }.items():
        if found[key] == default:
            # plans without them keep the fingerprints that they had before these choices existed
            del found[key]
    if spec.pack is not None and spec.pack.strategy != "pool":
        del found["pack"]["num_packers"]
    return found


def in_words(choices: Mapping[str, Any], prefix: str = "plan.") -> dict[str, Any]:
    """`choices`, one key each, for messages about what changed: what is long by the beginning of
    its digest.

    Not window_docs, which follows from the data and the others.
    """
    found: dict[str, Any] = {}
    for key, value in choices.items():
        if isinstance(value, Mapping) and key != "schedule":
            found |= in_words(value, f"{prefix}{key}.")
        elif value is not None and key != "window_docs":
            found[prefix + key] = (
                value if len(json.dumps(value)) <= LONGEST_WORD else digest(value)[:8]
            )
    return found
