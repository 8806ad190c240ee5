"""Short, obvious and slow: what the kernels of this package are checked against."""

from __future__ import annotations

from collections.abc import Sequence


def assign(weights: Sequence[int], num_draws: int) -> list[int]:
    """The first draws of a mixture, straight from Tijdeman's rule (The chairman assignment problem, Discrete Mathematics 32, 1980).

    Among the datasets that are owed at least 1/(2k - 2) of a draw, the one whose debt would first exceed 1 - 1/(2k - 2); of equals,
    the first.
    """
    if len(weights) == 1:
        return [0] * num_draws
    total, slack = sum(weights), 2 * len(weights) - 2
    counts, drawn = [0] * len(weights), []
    for n in range(1, num_draws + 1):
        deadlines = {}
        for i, weight in enumerate(weights):
            owed = n * weight - counts[i] * total  # in units of 1 / total
            if slack * owed >= total:
                # the smallest m with slack * (m * weight - counts[i] * total) > (slack - 1) * total
                deadlines[i] = ((slack - 1 + slack * counts[i]) * total) // (slack * weight) + 1
        chosen = min(deadlines, key=lambda i: (deadlines[i], i))
        counts[chosen] += 1
        drawn.append(chosen)
    return drawn
