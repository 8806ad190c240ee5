from __future__ import annotations

import pytest

from easypipe.core.errors import LedgerError
from easypipe.core.ledger import Ledger


def test_a_closed_balance_passes_and_a_leak_raises() -> None:
    ledger = Ledger()
    ledger.add(
        "tokenize", "code", "rows", into={"read": 10}, out={"written": 9, "null": 1, "empty": 0}
    )
    ledger.check()
    assert ledger.find("tokenize", "code", "rows").out == {"written": 9, "null": 1}
    assert list(ledger.rows()) == [("tokenize", "code", "rows", 10, "written 9, null 1")]
    ledger.add("pack", "code", "tokens", into={"drawn": 100, "eos": 9}, out={"placed": 108})
    assert str(ledger).splitlines() == [
        "tokenize  code  rows     10  written 9, null 1",
        "pack      code  tokens  109  placed 108",
    ]
    with pytest.raises(LedgerError, match=r"pack\.code: 1 tokens lost"):
        ledger.check()


def test_too_much_is_as_wrong_and_joined_ledgers_keep_everything() -> None:
    ledger, other = Ledger(facts={"a": 1}), Ledger(facts={"b": 2})
    assert str(ledger) == ""
    other.add("pack", "code", "tokens", into={"drawn": 5}, out={"placed": 7})
    ledger.extend(other)
    assert ledger.facts == {"a": 1, "b": 2}
    with pytest.raises(LedgerError, match=r"pack\.code: 2 tokens too many"):
        ledger.check()


def test_json() -> None:
    ledger = Ledger(facts={"seconds": 1.5})
    ledger.add("tokenize", "a", "rows", into={"read": 0}, out={"written": 0})
    assert ledger.to_json() == {
        "entries": [
            {
                "stage": "tokenize",
                "dataset": "a",
                "unit": "rows",
                "in": {"read": 0},
                "out": {"written": 0},
            }
        ],
        "facts": {"seconds": 1.5},
    }
