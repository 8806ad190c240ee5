"""What left tokens out of a dataset when it was tokenized, and a max_length that left out none."""

from __future__ import annotations

from easypipe.cache.manifest import Counts
from easypipe.core.protocols import ShardedSource
from easypipe.stages.tokenize.documents import tokenized_of
from easypipe.transforms.chat.turns import CUT_BY
from easypipe.transforms.refused import TOO_LONG
from easypipe.transforms.tokenizer.config import length_limit

# counts of lengths that are of no tokens, or of whole documents
_NO_CUTS = ("pieces", "overlap", "drop", "error")


def cut_by(counts: Counts) -> str:
    """Returns what left out tokens, with its verb; of several, each may have left out some."""
    by = [name for name, count in counts.lengths.items() if count and name not in _NO_CUTS]
    if not by:
        return "max_length of the tokenizer cut off"
    said = {
        CUT_BY: "cuts of long conversations between turns, where pieces have no target,",
        "budgets": "length.budgets",
    }
    return f"{' or '.join(said.get(name, f'length.policy {name}') for name in by)} left out"


def length_beyond(source: ShardedSource, counts: Counts) -> int | None:
    """Returns the max_length of a dataset if none of its documents is longer; else None."""
    tokenized = tokenized_of(source)
    if tokenized is None or counts.truncated or TOO_LONG in counts.rejects:
        return None
    # documents longer than max_length, by what was done with them
    return None if counts.lengths else length_limit(tokenized.tokenizer.config)
