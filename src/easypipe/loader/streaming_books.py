"""The ledger of a streaming loader, from the counters of what this process has read since its iteration began."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from easypipe.core.ledger import Ledger
from easypipe.loader.streaming_window import Books, StreamSpec
from easypipe.plan.tally import FIELDS


def ledger_of(books: Books, names: Sequence[str], spec: StreamSpec) -> Ledger:
    """rows → documents or rejected; documents → drawn, waiting or left at an epoch's end; tokens → placed, truncated or dropped."""
    ledger = Ledger()
    for i, name in enumerate(names):
        rejects = books.rejects.get(i, Counter())
        known = dict(zip(FIELDS, books.table[i].tolist(), strict=True)) if books.table.shape[0] else dict.fromkeys(FIELDS, 0)
        ledger.add("stream", name, "rows", into={"read": books.rows[i]}, out={"documents": books.docs[i], **dict(sorted(rejects.items()))})
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
        ledger.add("labels", name, "tokens", into={"placed": placed}, out={"targets or masked": placed - starts, "segment starts": starts})
    placed = int(books.table[:, FIELDS.index("tokens_placed")].sum()) if books.table.shape[0] else 0
    if spec.pack is not None:
        slots = books.packed_rows * spec.pack.seq_length
        ledger.add("pack", "stream", "slots", into={"slots": slots}, out={"tokens": placed, "padding": slots - placed})
        ledger.facts["pack.stream.fill"] = placed / slots if slots else 1.0
    ledger.facts |= {"stream.rows": books.packed_rows, "stream.rows of padding": books.padding_rows}
    return ledger
