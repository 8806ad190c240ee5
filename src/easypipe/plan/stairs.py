"""Windows under a schedule: which shares one has, and how many documents, so that it ends about
where the shares change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction

from easypipe.plan.deficit import weights_of
from easypipe.plan.schedule import normalized
from easypipe.plan.spec import PlanDataset, PlanSpec
from easypipe.plan.state import WindowState

_UNIT = 1 << 32
_TRIES = 6


def shares_at(spec: PlanSpec, row: int) -> tuple[Fraction, ...]:
    """The shares of a window that begins at `row`."""
    return (
        normalized(spec.weights)
        if spec.schedule is None
        else spec.schedule.shares(spec.schedule.step_of(row))
    )


def draw_shares(
    datasets: Sequence[PlanDataset],
    spec: PlanSpec,
    shares: Sequence[Fraction],
    active: Sequence[bool],
) -> tuple[Fraction, ...]:
    """The part of the draws that each dataset will have: its share, divided by its mean length
    where shares are of tokens.

    Where all have left (only the rest of a document is to come, under strategy "stream") all have
    the same.
    """
    weights = weights_of(shares, active, _UNIT) if any(active) else (0,) * len(datasets)
    if spec.unit == "tokens":
        weights = tuple(
            w * max(1, d.num_docs) * _UNIT // max(1, d.total_tokens)
            for w, d in zip(weights, datasets, strict=True)
        )
    return normalized(weights) if any(weights) else normalized([1] * len(weights))


def window_draws(
    datasets: Sequence[PlanDataset], spec: PlanSpec, state: WindowState, shares: Sequence[Fraction]
) -> int:
    """Documents of the window behind `state`, which has `shares`: under a schedule those before
    these change, as the mean lengths tell.
    """
    rows = rows_left(spec, state.first_row)
    if rows is None:
        return spec.window_docs
    if spec.pack is None:
        return min(spec.window_docs, rows)
    parts = draw_shares(datasets, spec, shares, state.active)
    longest = spec.pack.seq_length * _UNIT if spec.pack.oversize == "truncate" else 1 << 62
    # of a mean document, in 2^-32 tokens
    lengths = [min(longest, d.total_tokens * _UNIT // max(1, d.num_docs)) for d in datasets]
    mean = max(1, sum(int(part * length) for part, length in zip(parts, lengths, strict=True)))
    return max(1, min(spec.window_docs, rows * spec.pack.seq_length * _UNIT // mean))


def rows_left(spec: PlanSpec, row: int) -> int | None:
    """Rows until the shares change next; None where they do not."""
    return None if spec.schedule is None else spec.schedule.rows_left(row)


def fit(guess: int, most: int, rows: int, rows_of: Callable[[int], int]) -> int:
    """How many documents to draw, at most `most`, so that they fill up to `rows` rows and not more;
    the last number that was tried or less.

    rows_of: rows that so many documents fill, known only once they are packed. A number is good if
    no row is missing (one in 256, of many), or after six tries; one that fits is always found,
    unless the first document alone fills more rows.
    """
    fits, over, tries = 0, most + 1, 0
    while over - fits > 1 and (tries < _TRIES or not fits):
        guess = min(max(guess, fits + 1), over - 1)
        filled = rows_of(guess)
        tries += 1
        if filled > rows:
            over = guess
        else:
            fits = guess
            if rows - filled <= rows >> 8:
                break
        guess = guess * rows // max(1, filled) if tries < _TRIES else guess // 2
    return fits or 1
