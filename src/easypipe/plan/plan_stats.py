"""The statistics of a plan: what became of every drawn document and token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np

from easypipe.core.jit import jit
from easypipe.core.ledger import Ledger
from easypipe.core.values import Int32, Int64
from easypipe.plan.pack import Layout, PackSpec


@dataclass(frozen=True, kw_only=True)
class DrawStats:
    """What became of the documents that were drawn from one dataset.

    These balances hold:

    draws = docs_placed + docs_pending + docs_dropped + docs_empty
    tokens_drawn = tokens_placed + tokens_pending + tokens_truncated + tokens_dropped

    Args:
        docs_pending: Drawn in the window of the last row, but (partly) in a row after it.
        docs_dropped: Longer than a row.
        docs_empty: Without tokens, so without a place in a packed row.
        docs_truncated: Those of docs_placed that lost tokens_truncated.
        segments: The pieces with tokens; each starts with a token that is not a target. Under
            strategy "concat" a piece that continues a document of the row before does not count:
            its first token is a target there.
    """

    draws: int
    docs_placed: int
    docs_pending: int
    docs_dropped: int
    docs_empty: int
    docs_truncated: int
    tokens_drawn: int
    tokens_placed: int
    tokens_pending: int
    tokens_truncated: int
    tokens_dropped: int
    segments: int

    def enter(self, ledger: Ledger, stage: str, name: str, added: int | None) -> None:
        """Adds both balances to the ledger.

        Args:
            ledger: The ledger to add to.
            stage: The stage of the ledger's entries.
            name: The name of the dataset.
            added: The EOS tokens among those that were drawn; None if they are not known.
        """
        documents = {
            "placed": self.docs_placed,
            "pending": self.docs_pending,
            "dropped": self.docs_dropped,
            "empty": self.docs_empty,
        }
        ledger.add(stage, name, "documents", into={"drawn": self.draws}, out=documents)
        into = {"drawn, with EOS": self.tokens_drawn}
        if added is not None:
            into = {"drawn": self.tokens_drawn - added, "EOS": added}
        tokens = {
            "placed": self.tokens_placed,
            "pending": self.tokens_pending,
            "truncated": self.tokens_truncated,
            "dropped": self.tokens_dropped,
        }
        ledger.add(stage, name, "tokens", into=into, out=tokens)


@dataclass(frozen=True, kw_only=True)
class DatasetStats(DrawStats):
    """One dataset's part of a plan: passes · num_docs = draws + unreached.

    The passes are those that were begun.
    """

    num_docs: int
    passes: int
    unreached: int

    @property
    def epochs(self) -> float:
        """The passes over the dataset that were drawn; the last one may be partial."""
        return self.draws / self.num_docs if self.num_docs else 0.0


@dataclass(frozen=True, kw_only=True)
class PlanStats:
    """The statistics of `rows` rows: slots = tokens placed + padding.

    Without packing a row has as many slots as tokens; the batch pads it.
    """

    rows: int
    slots: int
    padding: int
    datasets: Mapping[str, DatasetStats]

    @property
    def fill(self) -> float:
        """The tokens per slot, 1.0 if there are no slots."""
        return 1 - self.padding / self.slots if self.slots else 1.0


# The counters that windows add up for a dataset, in the order of columns of Int64[k, COUNTERS].
FIELDS = tuple(field.name for field in fields(DrawStats))
COUNTERS = len(FIELDS)
SEGMENTS = FIELDS.index("segments")

# What happens to documents over the row length; with WHOLE, rows have no length.
SPLIT, TRUNCATE, DROP, WHOLE = 0, 1, 2, 3
_RULES = {"split": SPLIT, "truncate": TRUNCATE, "drop": DROP, "error": SPLIT}


def count(
    draws: tuple[Int32, Int32],
    layout: Layout,
    num_rows: int,
    pack: PackSpec | None,
    into: Int64,
    cut: int = 0,
) -> None:
    """Adds the draws of a window to `into`; only the first `num_rows` of its rows are reached.

    Args:
        draws: The dataset and the length of each draw, Int32[n].
        layout: The layout of the window.
        num_rows: The rows that are reached.
        pack: How documents are packed; None for no packing.
        into: Int64[k, COUNTERS].
        cut: Under strategy "concat", the tokens of the first document that are in rows of windows
            that were counted before, with the document itself.
    """
    pieces = int(layout.first_piece[num_rows])
    streams = pack is not None and pack.concat
    rule = (WHOLE, 0) if pack is None else (_RULES[pack.oversize], pack.seq_length)
    _count(*draws, layout.table, (num_rows, pieces, streams, cut), rule, into)


@jit
def _count(
    dataset: Int32,
    lengths: Int32,
    table: Int32,
    reached: tuple[int, int, bool, int],
    rule: tuple[int, int],
    into: Int64,
) -> None:
    """Adds the counters of a window to `into` (Int64[k, COUNTERS], columns as in FIELDS)."""
    num_rows, num_pieces, streams, cut = reached
    how, seq_length = rule
    placed = np.zeros(lengths.shape[0], np.int64)
    if cut > 0:  # it was counted as drawn and as pending, and is counted again below
        of, length = dataset[0], np.int64(lengths[0])
        placed[0] = cut
        into[of, 0] -= 1
        into[of, 2] -= 1
        into[of, 6] -= length
        into[of, 8] -= length - cut
    for piece in range(num_pieces):
        draw, length = table[2, piece], np.int64(table[4, piece])
        placed[draw] += length
        into[dataset[draw], 7] += length
        into[dataset[draw], 11] += length > 0 and not (streams and table[3, piece] > 0)
    for draw in range(lengths.shape[0]):
        of, length = dataset[draw], np.int64(lengths[draw])
        keep = min(length, seq_length) if how == TRUNCATE else length
        into[of, 0] += 1
        into[of, 6] += length
        if length == 0 and how != WHOLE:
            into[of, 4] += 1
        elif length > seq_length and how == DROP:
            into[of, 3] += 1
            into[of, 10] += length
        elif placed[draw] == keep and (length > 0 or draw < num_rows):
            into[of, 1] += 1
            into[of, 5] += length > keep
            into[of, 9] += length - keep
        else:
            into[of, 2] += 1
            into[of, 8] += length - placed[draw]
