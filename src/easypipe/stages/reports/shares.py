"""What a run draws from each dataset by step; notes on shares that are far from the weights.

A stage is the steps between two points of a weight schedule; without a schedule it is the whole
run.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from easypipe.core.protocols import ShardedSource
from easypipe.core.values import Int32, Int64
from easypipe.loader.steps import Steps
from easypipe.plan.window import Window, token_sizes
from easypipe.plan.windows import Plan
from easypipe.stages.mix.mixture import Mixture, planned_of

MARKS = 100  # the largest number of intervals of a run
# a weight of documents and its share of tokens are both reported if they differ by a larger factor
FACTOR = 1.5
# a stage's share that differs more from the requested one is reported if documents are long
FAR = 0.05
LONG = 0.05  # documents are long if the mean one has a larger fraction of a stage's tokens
_LENGTHS = 1 << 20  # lengths that are read at a time


@dataclass(frozen=True, kw_only=True)
class StepShares:
    """What the steps after the previous interval, up to `step`, hold of each dataset.

    Attributes:
        step: The last step of the interval.
        requested: The share by the weights.
        realised: The actual share: of the documents that begin in these rows if weights are shares
            of documents ("rows"), else of the tokens.
        tokens: How many of its tokens are in these rows, whatever the unit of the weights.
    """

    step: int
    requested: dict[str, float]
    realised: dict[str, float]
    tokens: dict[str, int]


def shares_by_step(
    plan: Plan, mixture: Mixture, counted: Steps, steps: int
) -> tuple[StepShares, ...]:
    """Returns the shares of the steps from `counted.begin` to `steps`, in at most MARKS intervals.

    The intervals have about the same number of steps.
    """
    first, row = counted.begin
    marks = sorted(
        {first + round((steps - first) * (i + 1) / MARKS) for i in range(MARKS)} - {first}
    )
    found = []
    for step in marks:
        stop = counted.start(step)
        if plan.ends:
            stop = min(stop, plan.num_rows or 0)
        tokens, documents = _counts(plan, row, stop)
        parts = tokens if mixture.spec.unit == "tokens" else documents
        total = max(1, int(parts.sum()))
        realised = {
            name: int(part) / total for name, part in zip(mixture.parts, parts, strict=True)
        }
        placed = dict(zip(mixture.parts, tokens.tolist(), strict=True))
        found.append(
            StepShares(
                step=step,
                requested=asked_between(mixture, row, stop),
                realised=realised,
                tokens=placed,
            )
        )
        row = stop
    return tuple(found)


def _counts(plan: Plan, start: int, stop: int) -> tuple[Int64, Int64]:
    """Returns (tokens of each dataset in rows `start` to `stop`, documents that begin there).

    Both are Int64[datasets].
    """
    tokens, documents = np.zeros((2, len(plan.datasets)), dtype=np.int64)
    while start < stop:
        window = plan.window_at(start)
        end = min(stop, window.after.first_row)
        first, last = (
            int(window.layout.first_piece[row - window.first_row]) for row in (start, end)
        )
        draw, begin, length = window.layout.table[2:5, first:last]
        tokens += _by_dataset(window, draw, length, tokens.size).astype(np.int64)
        documents += _by_dataset(window, draw, begin == 0, tokens.size).astype(np.int64)
        start = end
    return tokens, documents


def documents_drawn(plan: Plan, rows: int) -> NDArray[np.float64]:
    """Returns Float64[datasets]: how many documents of each dataset the first `rows` rows hold.

    All documents of earlier windows are counted, and those of the last window that are in these
    rows. A window draws its documents before it packs them, so a run that ends inside a window does
    not see all of them. A document that is cut counts with the part that is seen.
    """
    counts = np.zeros(len(plan.datasets))
    if not rows:
        return counts
    last = plan.window_at(rows - 1)
    whole = rows if last.after.first_row == rows else last.first_row
    counts += [part.draws for part in plan.stats(whole).datasets.values()]
    if whole < rows:
        _, _, draw, start, length = last.layout.table[
            :, : int(last.layout.first_piece[rows - whole])
        ]
        # at least 1, because an empty document is also a document
        kept = token_sizes(last.length, plan.spec.pack)[draw]
        parts = np.where(last.length[draw] == 0, start == 0, length / kept)
        if last.state.cut is not None:  # the window before has drawn the document
            parts = np.where(draw == 0, 0.0, parts)
        counts += _by_dataset(last, draw, parts, counts.size)
    return counts


def _by_dataset(
    window: Window[int], draw: Int32, weigh: NDArray[np.int32 | np.bool_ | np.float64], size: int
) -> NDArray[np.float64]:
    """Returns the sum of `weigh` over pieces, for each dataset."""
    return np.bincount(window.dataset[draw], weights=weigh, minlength=size).astype(np.float64)


def asked_between(mixture: Mixture, start: int, stop: int) -> dict[str, float]:
    """Returns the mean requested share over rows `start` to `stop`.

    It is computed from the means up to `start` and up to `stop`.
    """
    if stop <= start:
        return mixture.requested(stop)
    before, after = mixture.requested(start) if start else {}, mixture.requested(stop)
    return {
        name: max(0.0, share * stop - before.get(name, 0.0) * start) / (stop - start)
        for name, share in after.items()
    }


def unlike_weights(mixture: Mixture, plan: Plan, asked: Mapping[str, float]) -> str | None:
    """Returns a note if shares of tokens differ from weights of documents by more than FACTOR.

    The shares are the expected ones by mean lengths, which a short run may not show. It returns
    None if they are close.
    """
    if (
        len(mixture.parts) == 1
        or mixture.spec.unit == "tokens"
        or mixture.spec.stop == "all_exhausted"
    ):
        return None
    weighed = {
        name: share * mean
        for (name, share), mean in zip(asked.items(), _mean_tokens(plan), strict=True)
    }
    total = sum(weighed.values()) or 1.0
    apart = [
        f"{name} has {tokens / total:.2%} of the tokens for a weight of {asked[name]:.2%}"
        for name, tokens in weighed.items()
        if asked[name] > 0 and not 1 / FACTOR <= tokens / total / asked[name] <= FACTOR
    ]
    if not apart:
        return None
    more = f", and {len(apart) - 8} more" if len(apart) > 8 else ""
    why = "the weights are shares of the documents (mix.unit: rows), whose lengths differ"
    return (
        f"{'; '.join(apart[:8])}{more}: {why}. Set mix.unit: tokens to make them shares of the "
        "tokens"
    )


def warning_of_weights(source: ShardedSource) -> str | None:
    """Returns the note of `unlike_weights` for a prepared mixture, packed or not; else None."""
    planned = planned_of(source)
    if planned is None or len(planned.mixture.parts) == 1:
        return None
    mixture, schedule = planned.mixture, planned.mixture.spec.schedule
    if schedule is not None and not schedule.batch_sizes:
        return None
    plan = planned.plan()
    for each in mixture.spec.all_weights:
        asked = {name: weight / sum(each) for name, weight in zip(mixture.parts, each, strict=True)}
        if (said := unlike_weights(mixture, plan, asked)) is not None:
            return said
    return None


def far_from_asked(mixture: Mixture, plan: Plan, counted: Steps, steps: int) -> list[str]:
    """Returns a note for each stage with shares that are far off because documents are long."""
    if len(mixture.parts) == 1 or mixture.spec.stop == "all_exhausted":
        return []
    first, found, means = counted.begin, [], _mean_tokens(plan)
    points = (
        () if mixture.spec.schedule is None else [step for step, _ in mixture.spec.schedule.points]
    )
    edges = [first.batch, *(step for step in points if first.batch < step < steps), steps]
    rows = [
        counted.start(step) if plan.num_rows is None else min(plan.num_rows, counted.start(step))
        for step in edges
    ]
    seen = [_seen(mixture, plan, row) for row in rows]
    for (begin, stop), (start, end), (before, after) in zip(
        *map(itertools.pairwise, (edges, rows, seen)), strict=True
    ):
        tokens, parts = after[0] - before[0], after[1] - before[1]
        placed, total = int(tokens.sum()), parts.sum()
        if not total:
            continue
        asked = asked_between(mixture, start, end)
        apart = [
            abs(part / total - asked[name]) for name, part in zip(mixture.parts, parts, strict=True)
        ]
        long = [
            i for i, mean in enumerate(means) if mean > LONG * placed and list(asked.values())[i]
        ]
        if not long or max(apart) <= FAR:
            continue
        i = int(np.argmax(apart))
        name, longest = list(mixture.parts)[i], max(long, key=lambda i: means[i])
        unit = "tokens" if mixture.spec.unit == "tokens" else "documents"
        set_unit = "" if mixture.spec.unit == "tokens" else "Set mix.unit: tokens. "
        found.append(
            f"steps {begin + 1:,} to {stop:,}: {name} has {parts[i] / total:.2%} of the {unit} "
            f"where {asked[name]:.2%} is asked for: "
            f"documents of {list(mixture.parts)[longest]} (mean {means[longest]:,.0f} tokens) are "
            f"long against these {placed:,} tokens. "
            f"{set_unit}Cut them (tokenize.max_length, pack.oversize: truncate), or give more steps"
        )
    return found


def late_stages(plan: Plan, counted: Steps, steps: int) -> list[str]:
    """Returns a note for each point of a weight schedule that takes effect at a later step.

    Windows of packed documents end only near the step at which weights change.
    """
    found, schedule = list[str](), plan.spec.schedule
    if schedule is None:
        return found
    for step, _ in schedule.points:
        if counted.begin.batch < step < steps:
            row = counted.start(step)
            window = plan.window_at(row)
            begins = row if window.first_row == row else window.after.first_row
            late = schedule.step_of(begins) - schedule.step_of(row)
            if late:
                found.append(
                    f"the weights of step {step:,} hold from step {step + late:,} on, "
                    "where the window of documents before them ends"
                )
    return found


def _seen(mixture: Mixture, plan: Plan, row: int) -> tuple[Int64, NDArray[np.int64 | np.float64]]:
    """Returns (tokens of each dataset in the first `row` rows, their count in the weights' unit).

    The unit is tokens or documents.
    """
    drawn = documents_drawn(plan, row)
    tokens = np.array(
        [part.tokens_placed for part in plan.stats(row).datasets.values()], dtype=np.int64
    )
    return tokens, tokens if mixture.spec.unit == "tokens" else drawn


def _mean_tokens(plan: Plan) -> Sequence[float]:
    """Returns for each dataset the mean number of a document's tokens that are placed in a row."""
    pack = plan.spec.pack
    if pack is None or pack.oversize in ("split", "error"):
        return [dataset.total_tokens / max(1, dataset.num_docs) for dataset in plan.datasets]
    found = []
    for dataset in plan.datasets:
        cuts = [
            np.arange(a, min(a + _LENGTHS, dataset.num_docs))
            for a in range(0, dataset.num_docs, _LENGTHS)
        ]
        found.append(
            sum(int(token_sizes(dataset.lengths(docs), pack).sum()) for docs in cuts)
            / max(1, dataset.num_docs)
        )
    return found
