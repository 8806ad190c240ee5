"""The ledger of a streaming loader, from the counters of what this process has read since its
iteration began.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from easypipe.core.ledger import Ledger
from easypipe.loader.streams.feed import Loaded
from easypipe.loader.streams.spec import StreamSpec
from easypipe.plan.plan_stats import COUNTERS, FIELDS

LOST = "without a token"  # characters of texts, beside what became of special strings
BY_KEY = ("rejects", "strings", "lengths", "shares", "shares_read", "shares_before", "shares_left")
LEFT_OUT = "left out, for want of a full batch"


@dataclass
class Books:
    """Counters of a stream, or of all streams of a process, by dataset number."""

    rows: Counter[int] = field(default_factory=Counter)
    docs: Counter[int] = field(default_factory=Counter)
    rejects: dict[int, Counter[str]] = field(default_factory=dict)
    # of the texts that were read: special strings, and LOST
    strings: dict[int, Counter[str]] = field(default_factory=dict)
    # documents over max_length by policy, and pieces of splitting
    lengths: dict[int, Counter[str]] = field(default_factory=dict)
    added: Counter[int] = field(default_factory=Counter)  # EOS
    # read, and not drawn before their epoch ended
    left: Counter[int] = field(default_factory=Counter)
    # read again, and placed before the state that was restored
    resumed: Counter[int] = field(default_factory=Counter)
    waiting: Counter[int] = field(default_factory=Counter)
    # Of the shares of every pass that was begun, by unit (Deal.share): all, what was read, what lay
    # before the state that was restored,
    # and what was not read when its epoch ended.
    shares: dict[int, Counter[str]] = field(default_factory=dict)
    shares_read: dict[int, Counter[str]] = field(default_factory=dict)
    shares_before: dict[int, Counter[str]] = field(default_factory=dict)
    shares_left: dict[int, Counter[str]] = field(default_factory=dict)
    table: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, COUNTERS), np.int64))
    packed_rows: int = 0
    # Of all streams of a process: rows in batches, in windows made anew but given before the state,
    # in no batch, and rows of padding.
    rows_given: int = 0
    rows_before: int = 0
    rows_left_out: int = 0
    padding_rows: int = 0

    @classmethod
    def total(cls, parts: Iterable[Books]) -> Books:
        """Of several streams together, as they stand now."""
        whole = cls()
        for part in parts:
            for name in ("rows", "docs", "added", "left", "resumed", "waiting"):
                getattr(whole, name).update(getattr(part, name))
            for name in BY_KEY:
                for i, counts in getattr(part, name).items():
                    getattr(whole, name).setdefault(i, Counter()).update(counts)
            if part.table.shape[0]:
                whole.table = (
                    whole.table + part.table if whole.table.shape[0] else part.table.copy()
                )
            whole.packed_rows += part.packed_rows
        return whole

    @property
    def all_dropped(self) -> int:
        """How many documents were drawn, where each of them was longer than a row and left out;
        else 0.
        """
        known = dict(zip(FIELDS, self.table.sum(axis=0).tolist(), strict=True))
        return known["draws"] if known["draws"] == known["docs_dropped"] else 0

    def begin_pass(self, dataset: int, share: Mapping[str, int], before: Mapping[str, int]) -> None:
        self.shares.setdefault(dataset, Counter()).update(share)
        self.shares_before.setdefault(dataset, Counter()).update(before)

    def end_epoch(self, dataset: int) -> None:
        """What was not read until now stays so."""
        self.shares_left[dataset] = self.unread(dataset)

    def unread(self, dataset: int) -> Counter[str]:
        """Of every unit in the shares of `dataset`, how many were not read."""
        left = Counter(self.shares.get(dataset, {}))
        for counts in (self.shares_read, self.shares_before):
            left.subtract(counts.get(dataset, {}))
        return left

    def chunk(self, dataset: int, loaded: Loaded, skipped: int, share: Mapping[str, int]) -> None:
        self.shares_read.setdefault(dataset, Counter()).update(share)
        self.resumed[dataset] += skipped
        self.rows[dataset] += loaded.rows
        self.docs[dataset] += loaded.num_docs
        self.rejects.setdefault(dataset, Counter()).update(loaded.rejects)
        self.strings.setdefault(dataset, Counter()).update(loaded.strings)
        self.lengths.setdefault(dataset, Counter()).update(loaded.lengths)


def ledger_of(books: Books, names: Sequence[str], spec: StreamSpec) -> Ledger:
    """What lies in files → read or not; rows → documents or rejected; documents → drawn, waiting or
    left at an epoch's end; tokens → placed, truncated or dropped; rows made → in batches, waiting
    or left out."""
    ledger = Ledger()
    for i, name in enumerate(names):
        rejects = books.rejects.get(i, Counter())
        known = (
            dict(zip(FIELDS, books.table[i].tolist(), strict=True))
            if books.table.shape[0]
            else dict.fromkeys(FIELDS, 0)
        )
        over = dict(sorted(books.lengths.get(i, Counter()).items()))
        read = {
            "read": books.rows[i],
            **({"pieces": over.pop("pieces")} if "pieces" in over else {}),
        }
        over.pop("overlap", None)  # tokens are counted when they are drawn
        for unit, left in sorted(books.unread(i).items()):
            known_left = books.shares_left.get(i, Counter())[unit]
            ledger.add(
                "files",
                name,
                unit,
                into={"of the passes begun": books.shares[i][unit]},
                out={
                    "read": books.shares_read.get(i, Counter())[unit],
                    "before the state": books.shares_before.get(i, Counter())[unit],
                    "unread when their epoch ended": known_left,
                    "unread so far": left - known_left,
                },
            )
        ledger.add(
            "stream",
            name,
            "rows",
            into=read,
            out={"documents": books.docs[i], **dict(sorted(rejects.items()))},
        )
        if over:
            ledger.add(
                "lengths", name, "documents", into={"over max_length": sum(over.values())}, out=over
            )
        strings = +books.strings.get(i, Counter())
        if lost := strings.pop(LOST, 0):
            ledger.add("stream", name, "lost characters", into={"in texts": lost}, out={LOST: lost})
        if strings:
            ledger.add(
                "stream",
                name,
                "special strings",
                into={"in texts": strings.total()},
                out=dict(sorted(strings.items())),
            )
        ledger.add(
            "mix",
            name,
            "documents",
            into={"read": books.docs[i]},
            out={
                "drawn": known["draws"],
                "waiting": books.waiting[i],
                "left at the end of an epoch": books.left[i],
                "before the state": books.resumed[i],
            },
        )
        stage = "mix" if spec.pack is None else "pack"
        ledger.add(
            stage,
            name,
            "documents",
            into={"drawn": known["draws"]},
            out={
                "placed": known["docs_placed"],
                "dropped": known["docs_dropped"],
                "empty": known["docs_empty"],
                "pending": known["docs_pending"],
            },
        )
        ledger.add(
            stage,
            name,
            "tokens",
            into={"drawn": known["tokens_drawn"] - books.added[i], "EOS": books.added[i]},
            out={
                "placed": known["tokens_placed"],
                "truncated": known["tokens_truncated"],
                "dropped": known["tokens_dropped"],
                "pending": known["tokens_pending"],
            },
        )
        placed, starts = known["tokens_placed"], known["segments"]
        ledger.add(
            "labels",
            name,
            "tokens",
            into={"placed": placed},
            out={"targets or masked": placed - starts, "segment starts": starts},
        )
    placed = int(books.table[:, FIELDS.index("tokens_placed")].sum()) if books.table.shape[0] else 0
    if spec.pack is not None:
        slots = books.packed_rows * spec.pack.seq_length
        ledger.add(
            "pack",
            "stream",
            "slots",
            into={"slots": slots},
            out={"tokens": placed, "padding": slots - placed},
        )
        ledger.facts["pack.stream.fill"] = placed / slots if slots else 1.0
    known_rows = {
        "in batches": books.rows_given,
        "before the state": books.rows_before,
        LEFT_OUT: books.rows_left_out,
    }
    out = {**known_rows, "waiting": books.packed_rows - sum(known_rows.values())}
    ledger.add("load", "stream", "rows", into={"made": books.packed_rows}, out=out)
    ledger.facts |= {"stream.rows": books.packed_rows, "stream.rows of padding": books.padding_rows}
    return ledger
