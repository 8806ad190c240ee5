"""StreamSpec: what, besides its data, decides a streaming loader's rows, such as window sizes."""

from __future__ import annotations

from dataclasses import dataclass

from easypipe.core.config import digest, to_dict
from easypipe.core.values import JsonObject
from easypipe.plan.pack import PackSpec
from easypipe.plan.spec import LATER_CHOICES, PlanSpec, ends_choice

STREAM_VERSION = 2  # raise it with every change that moves a document to a different row

# If shuffle_buffer_size is not set, a window of a stream ends after WINDOW_DOCS documents, or after
# WINDOW_TOKENS tokens (or those of WINDOW_ROWS rows, if that is more).
WINDOW_DOCS = 4096
WINDOW_TOKENS = 1 << 20
WINDOW_ROWS = 128


def window_tokens(pack: PackSpec | None) -> int:
    return max(WINDOW_TOKENS, WINDOW_ROWS * (0 if pack is None else pack.seq_length))


@dataclass(frozen=True, kw_only=True)
class StreamSpec:
    """The choices that, with the datasets, decide the content of every row.

    Args:
        plan: The plan of each stream: the batches of its schedule are the stream's rows of each
            batch, and max_epochs counts the stream's passes. Its windows end by `window_tokens` if
            their size was not chosen.
        num_streams: The number of canonical streams; each has `batch_size // num_streams` rows of
            every batch.
        shuffle: Whether the ranges of each pass are permuted.
        shuffle_window: Whether the documents within a window are permuted.
        eos: The id that ends documents, or one for each dataset if they differ; None adds none.
        joined: Whether rows of pack strategy "concat" are one segment each, across the ends of
            documents.
        train_continued: As for loader.rows.PlannedRows.
    """

    plan: PlanSpec
    num_streams: int
    shuffle: bool = True
    shuffle_window: bool = True
    eos: int | tuple[int, ...] | None = None
    joined: bool = False
    train_continued: bool = False

    @property
    def last_epoch(self) -> int | None:
        """The number of epochs of the mixture in the whole run; None if it never ends."""
        return self.plan.last_epoch([1] * len(self.plan.weights))

    def choices(self) -> JsonObject:
        """Returns the choices that decide the rows, as JSON.

        It leaves out num_epochs: more epochs only add rows at the end.
        """
        choices = {**to_dict(self), **to_dict(self.plan)}
        if self.plan.window_tokens is not None:
            choices |= {"window_docs": None, "window_tokens": None}
        for key in ("plan", "order", "num_epochs"):
            del choices[key]
        # streams without the later choices keep the fingerprints that they had before these existed
        defaults = LATER_CHOICES | {"joined": False, "train_continued": False}
        kept = {k: v for k, v in choices.items() if k not in defaults or v != defaults[k]}
        return kept | ends_choice(self.plan)

    def fingerprint(self) -> str:
        return digest("streams", STREAM_VERSION, self.choices())
