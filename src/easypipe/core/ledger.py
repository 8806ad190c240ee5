# pyright: strict
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingTypeStubs=false
"""The ledger: an account of every row and token, which shows that none was lost.

An entry is one balance: on the left, what came `into` a step; on the right, where it went.
`Ledger.check()` raises an error if the sums differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from easypipe.core.errors import LedgerError
from easypipe.core.values import JsonObject


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One balance: `sum(into) == sum(out)`.

    Args:
        stage: The step that counted.
        dataset: The name of the dataset.
        unit: What is counted: rows, documents, tokens or slots.
        into: Counts by where they came from.
        out: Counts by outcome or reason.
    """

    stage: str
    dataset: str
    unit: str
    into: Mapping[str, int]
    out: Mapping[str, int]

    @property
    def leak(self) -> int:
        """How many units came in and did not go out; negative if too many went out."""
        return sum(self.into.values()) - sum(self.out.values())


@dataclass(kw_only=True)
class Ledger:
    """The balances of all steps, and other figures that were measured."""

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
        """Adds one balance, without counts of 0; the arguments are those of Entry."""
        self.entries.append(
            Entry(
                stage=stage,
                dataset=dataset,
                unit=unit,
                into=_without_zeros(into),
                out=_without_zeros(out),
            )
        )

    def extend(self, other: Ledger, under: str = "") -> None:
        """Adds the entries and facts of another ledger; its datasets are named below `under`."""

        def named(dataset: str) -> str:
            return dataset if dataset.startswith(under) else f"{under}.{dataset}"

        self.entries += [replace(one, dataset=named(one.dataset)) for one in other.entries]
        for key, value in other.facts.items():
            stage, dot, dataset = key.partition(".")
            self.facts[f"{stage}.{named(dataset)}" if dot else key] = value

    def find(self, stage: str, dataset: str, unit: str) -> Entry:
        """Returns the entry of a step.

        Raises:
            KeyError: There is none.
        """
        for entry in self.entries:
            if (entry.stage, entry.dataset, entry.unit) == (stage, dataset, unit):
                return entry
        raise KeyError((stage, dataset, unit))

    def check(self) -> None:
        """Checks that every entry balances.

        Raises:
            LedgerError: An entry does not; the error names the first.
        """
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
        """Yields (stage, dataset, unit, count that came in, where it went) for tables."""
        for entry in self.entries:
            went = ", ".join(f"{key} {value:,}" for key, value in entry.out.items())
            yield entry.stage, entry.dataset, entry.unit, sum(entry.into.values()), went

    def __str__(self) -> str:
        """Returns a line for each entry, in columns."""
        rows = [(*where, f"{total:,}", went) for *where, total, went in self.rows()]
        columns = zip(*rows, strict=True) if rows else [[""]] * 5
        a, b, c, d, _ = (max(map(len, column)) for column in columns)
        return "\n".join(
            f"{stage:{a}}  {dataset:{b}}  {unit:{c}}  {total:>{d}}  {went}"
            for stage, dataset, unit, total, went in rows
        )

    def to_json(self) -> JsonObject:
        """Returns entries and facts as a JSON object."""
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
    """Leaves out counts of 0; if all are 0, the first stays."""
    return {key: int(value) for key, value in counts.items() if value} or dict.fromkeys(
        list(counts)[:1], 0
    )
