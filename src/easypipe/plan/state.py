"""The few integers between two windows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from easypipe.core.errors import StateError

At = TypeVar("At")  # how far one dataset is drawn: see WindowState.drawn


@dataclass(frozen=True, kw_only=True)
class WindowState(Generic[At]):
    """All that a window depends on, besides datasets and spec: JSON of less than 3 KiB for 60
    datasets.

    index: of the window, counted from where planning began. epoch: of the mixture, 0 first.
    first_row: rows before the window. drawn: how far each dataset is drawn: its documents in this
    epoch, or in streaming where its stream stands in it (loader/streams/feed.py). deficits,
    active: of the mixture (`plan.mix`). The state behind the last window of a plan has epoch ==
    num_epochs.
    cut: under strategy "concat", (dataset, tokens) of the document that the window begins with,
    whose first `tokens` stand in rows before. A count of documents has it drawn, a place in a
    stream stands before it. None where a row ended with its document.
    """

    first_row: int
    epoch: int
    drawn: tuple[At, ...]
    deficits: tuple[int, ...]
    active: tuple[bool, ...]
    cut: tuple[int, int] | None = None
    index: int = 0

    def to_json(self) -> dict[str, Any]:
        return {
            "index": self.index,
            "epoch": self.epoch,
            "first_row": self.first_row,
            "drawn": list(self.drawn),
            "deficits": list(self.deficits),
            "active": "".join("01"[alive] for alive in self.active),
            **({} if self.cut is None else {"cut": list(self.cut)}),
        }

    @classmethod
    def from_json(cls, values: Any) -> WindowState[int]:
        """Raises StateError where `values` is not what `to_json` writes."""
        try:
            index, epoch, first_row = (int(values[key]) for key in ("index", "epoch", "first_row"))
            drawn, deficits = (tuple(int(n) for n in values[key]) for key in ("drawn", "deficits"))
            active = tuple({"0": False, "1": True}[alive] for alive in values["active"])
            cut = values.get("cut")
            cut = None if cut is None else (int(cut[0]), int(cut[1]))
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise StateError(
                at="window", problem=f"{values!r} is no state of a plan: {error!r}"
            ) from None
        return WindowState(
            index=index,
            epoch=epoch,
            first_row=first_row,
            drawn=drawn,
            deficits=deficits,
            active=active,
            cut=cut,
        )
