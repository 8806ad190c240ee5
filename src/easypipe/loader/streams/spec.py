"""What decides the rows of a streaming loader, beside its data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from easypipe.core.config import digest, to_dict
from easypipe.plan import mix
from easypipe.plan.mix_schedule import Schedule
from easypipe.plan.pack import PackSpec
from easypipe.plan.spec import Unit, stages_choice

STREAM_VERSION = 2  # raise it with every change that moves a document to another row

WINDOW_DOCS = 4096  # of a stream, where shuffle_buffer_size says nothing else: so many, ...
# ... or so many tokens, or WINDOW_ROWS rows' worth where that is more, whichever comes first
WINDOW_TOKENS = 1 << 20
WINDOW_ROWS = 128


@dataclass(frozen=True, kw_only=True)
class StreamSpec:
    """The choices that, with the datasets, decide what stands in every row. weights, stop,
    num_epochs, pack, schedule, unit, block: as in plan.spec.PlanSpec, but the schedule's batches
    are a stream's rows of them. max_epochs: most passes of each stream over each dataset.

    num_streams: canonical streams; each gives `batch_size // num_streams` rows of every batch.
    shuffle: ranges per pass, and documents within a window. window_docs: of a window; None takes
    WINDOW_DOCS, or fewer long ones. eos: id that ends documents, or one for each dataset where they
    differ; None adds none.
    joined: rows of pack strategy "stream" are one segment each, over the ends of documents.
    train_continued: as of loader.rows.PlannedRows.
    """

    seed: int
    num_streams: int
    weights: tuple[int, ...]
    stop: mix.Stop
    num_epochs: int | None = 1
    shuffle: bool = True
    shuffle_window: bool = True
    window_docs: int | None = None
    pack: PackSpec | None = None
    eos: int | tuple[int, ...] | None = None
    schedule: Schedule | None = None
    unit: Unit = "rows"
    block: int | None = None
    max_epochs: tuple[int | None, ...] | None = None
    joined: bool = False
    train_continued: bool = False

    @property
    def mix_stop(self) -> mix.Stop:
        """For a single dataset all are the same."""
        return "all_exhausted" if len(self.weights) == 1 else self.stop

    @property
    def endless_parts(self) -> bool:
        """Whether each dataset begins anew on its own, so that the mixture has no epochs."""
        return self.stop == "restart" and len(self.weights) > 1

    @property
    def caps(self) -> tuple[int | None, ...]:
        return (None,) * len(self.weights) if self.max_epochs is None else self.max_epochs

    @property
    def last_epoch(self) -> int | None:
        """Epochs of the mixture in the whole run; None where it never ends."""
        ends = None if None in self.caps else max(cap for cap in self.caps if cap is not None)
        if self.endless_parts:
            return None if ends is None else 1
        return (
            ends
            if self.num_epochs is None
            else self.num_epochs
            if ends is None
            else min(ends, self.num_epochs)
        )

    @property
    def window_tokens(self) -> int:
        return max(
            WINDOW_TOKENS, WINDOW_ROWS * (self.pack.seq_length if self.pack is not None else 0)
        )

    def choices(self) -> dict[str, Any]:
        """What decides the rows. Not num_epochs: more epochs only add rows behind the last."""
        choices = {key: value for key, value in to_dict(self).items() if key != "num_epochs"}
        defaults = {
            "schedule": None,
            "unit": "rows",
            "block": None,
            "max_epochs": None,
            "joined": False,
            "train_continued": False,
        }
        for key, default in defaults.items():
            if choices[key] == default:
                # streams without them keep the fingerprints that they had before these choices
                # existed
                del choices[key]
        return choices | stages_choice(self.schedule, self.pack)

    def fingerprint(self) -> str:
        return digest("streams", STREAM_VERSION, self.choices())
