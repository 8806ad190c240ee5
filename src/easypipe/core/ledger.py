# pyright: strict
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingTypeStubs=false
"""Conservation: every row and token that came in went somewhere, and the books say where.

An entry is one balance: what came `into` a step on the left, where it went on the right;
`Ledger.check()` raises where the sums differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from easypipe.core.errors import LedgerError
from easypipe.core.values import JsonObject


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One balance: `sum(into) == sum(out)`. `unit` is rows, documents, tokens or slots; keys of
    `out` are outcomes or reasons.
    """

    stage: str
    dataset: str
    unit: str
    into: Mapping[str, int]
    out: Mapping[str, int]

    @property
    def leak(self) -> int:
        return sum(self.into.values()) - sum(self.out.values())


@dataclass(kw_only=True)
class Ledger:
    entries: list[Entry] = field(default_factory=list)
    # seconds, bytes, fill: measured, not balanced
    facts: JsonObject = field(default_factory=dict)

    def add(
        self,
        stage: str,
        dataset: str,
        unit: str,
        *,
        into: Mapping[str, int],
        out: Mapping[str, int],
    ) -> None:
        self.entries.append(
            Entry(
                stage=stage,
                dataset=dataset,
                unit=unit,
                into=_without_zeros(into),
                out=_without_zeros(out),
            )
        )

    def extend(self, other: Ledger) -> None:
        self.entries += other.entries
        self.facts |= other.facts

    def find(self, stage: str, dataset: str, unit: str) -> Entry:
        for entry in self.entries:
            if (entry.stage, entry.dataset, entry.unit) == (stage, dataset, unit):
                return entry
        raise KeyError((stage, dataset, unit))

    def check(self) -> None:
        """Raises LedgerError naming the first balance that does not close."""
        for entry in self.entries:
            if entry.leak:
                raise LedgerError(
                    at=f"{entry.stage}.{entry.dataset}",
                    problem=f"{abs(entry.leak)} {entry.unit} "
                    f"{'lost' if entry.leak > 0 else 'too many'}: "
                    f"in {dict(entry.into)}, out {dict(entry.out)}",
                    fix="This is a bug in easypipe, please report it with this line.",
                )

    def rows(self) -> Iterator[tuple[str, str, str, int, str]]:
        """(stage, dataset, unit, in, where it went) for tables."""
        for entry in self.entries:
            went = ", ".join(f"{key} {value:,}" for key, value in entry.out.items())
            yield entry.stage, entry.dataset, entry.unit, sum(entry.into.values()), went

    def to_json(self) -> JsonObject:
        entries = [
            {
                "stage": e.stage,
                "dataset": e.dataset,
                "unit": e.unit,
                "in": dict(e.into),
                "out": dict(e.out),
            }
            for e in self.entries
        ]
        return {"entries": entries, "facts": self.facts}


def _without_zeros(counts: Mapping[str, int]) -> dict[str, int]:
    return {key: int(value) for key, value in counts.items() if value} or dict.fromkeys(
        list(counts)[:1], 0
    )
