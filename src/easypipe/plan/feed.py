"""Feed, the protocol of the datasets that windows draw from, and CachedFeed over token caches."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple, Protocol

import numpy as np

from easypipe.core.errors import PlanError
from easypipe.core.random import child, fold
from easypipe.core.values import Int32, Int64
from easypipe.plan import mix
from easypipe.plan.mix import weights_of
from easypipe.plan.mix_schedule import normalized
from easypipe.plan.order import documents
from easypipe.plan.pack import PackSpec, placed_tokens
from easypipe.plan.spec import At, PlanDataset, PlanSpec, Stage, WindowState

_LOOK = 1 << 16  # how many lengths are looked up at a time
_UNIT = 1 << 32  # tokens and shares are counted in parts of this size


class WindowRule(NamedTuple):
    """How a window is made: it has `docs` documents, or fewer that hold `tokens` tokens.

    Attributes:
        docs: The documents of the window.
        tokens: The number of tokens that ends it earlier; None for no such limit.
        stage: The shares by which it is drawn.
        parts: Roughly which part of its draws each dataset will have. It changes speed, never a
            draw.
        row_key: The key that permutes its rows.
        document_keys: The keys that permute its documents, one for each dataset; none if they are
            permuted already.
    """

    stage: Stage
    docs: int
    tokens: int | None
    parts: Sequence[Fraction]
    row_key: int
    document_keys: Sequence[int] = ()


class Feed(Protocol[At]):
    """The datasets of a mixture, each in the order in which its documents are drawn.

    Law: which documents come after a state follows from the state alone, whatever was looked up
    before. Documents are counted from the state on, for each dataset: a document that the state
    cuts is number 0. Arrays are Int64[k] for k datasets unless stated otherwise.

    Attributes:
        num_docs: The documents of a pass; 1 for a dataset whose documents are not counted.
        counted: Whether `remaining` is known without looking documents up.
        block: The number of draws that are made at a time; a window that ends by its tokens ends
            between two blocks.
        draws_next: Whether a window under "concat" also takes the document after its last token,
            although it holds no token of it.
    """

    num_docs: Int64
    counted: bool
    block: int
    draws_next: bool

    def rule(self, state: WindowState[At]) -> WindowRule:
        """Returns how the window after `state` is made."""
        ...

    def remaining(self, state: WindowState[At], enough: Int64) -> Int64:
        """Returns the documents that each dataset still has in this epoch, after a cut one.

        If they are not counted, it returns at most `enough`, and counts the cut document too.
        """
        ...

    def look(
        self, state: WindowState[At], start: Int64, counts: Int64
    ) -> tuple[Int64, Int32, Int64]:
        """Looks up the `counts` documents from `start` on, one dataset after the other.

        Returns:
            Their numbers; their lengths, Int32, including an added EOS; and how many there are of
            each dataset.
        """
        ...

    def tokens(self, start: Int64, stop: Int64) -> int:
        """Returns the tokens of the looked-up documents `start` to `stop`, without added EOS."""
        ...

    def advance(
        self, state: WindowState[At], draws: mix.Draws, cut: tuple[int, int] | None
    ) -> tuple[At, ...]:
        """Returns the datasets' positions after these draws; `cut` is that of the state there."""
        ...

    def begin(self, epoch: int) -> tuple[At, ...]:
        """Returns the datasets' positions when an epoch begins."""
        ...

    def name(self, dataset: int, doc: int) -> str:
        """Names a document, for messages."""
        ...


class CachedFeed:
    """The documents of token caches, which are counted. Implements Feed.

    It is pure arithmetic, on any thread.
    """

    counted, draws_next = True, False
    block = mix.MAX_DRAWS

    def __init__(self, datasets: Sequence[PlanDataset], spec: PlanSpec) -> None:
        self.datasets, self.spec = tuple(datasets), spec
        self.num_docs = np.array([dataset.num_docs for dataset in datasets], dtype=np.int64)
        self._order_keys = np.array(
            [fold(spec.seed, "order", dataset.name) for dataset in datasets], dtype=np.uint64
        )
        self._row_key = fold(spec.seed, "rows")

    def rule(self, state: WindowState[int]) -> WindowRule:
        """Returns the rule; by mean lengths, a window ends before its shares change."""
        spec, stage = self.spec, self.spec.stage(state.first_row)
        docs, parts = spec.window_docs, self._parts(state, stage)
        if stage.rows is not None and spec.pack is None:
            docs = min(docs, stage.rows)
        elif stage.rows is not None and spec.pack is not None:
            longest = spec.pack.seq_length * _UNIT if spec.pack.oversize == "truncate" else 1 << 62
            mean = sum(  # the mean length of a drawn document, in 2^-32 tokens
                int(part * min(longest, d.total_tokens * _UNIT // max(1, d.num_docs)))
                for part, d in zip(parts, self.datasets, strict=True)
            )
            full = stage.rows * spec.pack.seq_length * _UNIT // max(1, mean)
            docs = max(1, min(docs, full))
        return WindowRule(stage, docs, None, parts, child(self._row_key, state.index))

    def _parts(self, state: WindowState[int], stage: Stage) -> Sequence[Fraction]:
        """Returns each dataset's expected part of the draws; () if weights count documents.

        It is the dataset's share, divided by its mean length if shares are of tokens. If all
        datasets have left, all have the same part. Then, under strategy "concat", only the rest of
        a document is to come.
        """
        if stage.shares is None:
            return ()
        if not any(state.active):
            return normalized([1] * len(self.datasets))
        weights = weights_of(stage.shares, state.active, _UNIT)
        if self.spec.unit == "tokens":
            weights = [
                w * max(1, d.num_docs) * _UNIT // max(1, d.total_tokens)
                for w, d in zip(weights, self.datasets, strict=True)
            ]
        return normalized(weights if any(weights) else [1] * len(weights))

    def remaining(self, state: WindowState[int], enough: Int64 | None = None) -> Int64:
        stop: mix.Stop = "all_exhausted" if len(self.datasets) == 1 else self.spec.stop
        drawn = np.array(state.drawn, dtype=np.int64)
        return mix.remaining(self.num_docs, drawn, stop, self.spec.caps)

    def look(
        self, state: WindowState[int], start: Int64, counts: Int64
    ) -> tuple[Int64, Int32, Int64]:
        place = np.array(state.drawn, dtype=np.int64) + start
        if state.cut is not None:
            place[state.cut[0]] -= 1  # that document is drawn
        docs = documents(
            self.spec.order, self.num_docs, self._order_keys, state.epoch, place, counts
        )
        lengths, at = np.empty(docs.shape[0], dtype=np.int32), 0
        for dataset, count in zip(self.datasets, counts.tolist(), strict=True):
            if count:
                lengths[at : at + count] = _lengths(dataset, docs[at : at + count])
                at += count
        return docs, lengths, counts

    def tokens(self, start: Int64, stop: Int64) -> int:
        raise AssertionError("windows of counted documents end by their number")

    def advance(
        self, state: WindowState[int], draws: mix.Draws, cut: tuple[int, int] | None
    ) -> tuple[int, ...]:
        return tuple(a + b for a, b in zip(state.drawn, draws.counts.tolist(), strict=True))

    def begin(self, epoch: int) -> tuple[int, ...]:
        return (0,) * len(self.datasets)

    def name(self, dataset: int, doc: int) -> str:
        return f"dataset {self.datasets[dataset].name!r}, document {doc}"

    def some_document_fits(self, pack: PackSpec) -> bool:
        """Returns whether any document gets a piece; looks at lengths until one does."""
        return any(
            placed_tokens(_lengths(dataset, docs), pack).any()
            for dataset in self.datasets
            for start in range(0, dataset.num_docs, _LOOK)
            for docs in [np.arange(start, min(start + _LOOK, dataset.num_docs), dtype=np.int64)]
        )


def _lengths(dataset: PlanDataset, docs: Int64) -> Int32:
    """Returns the lengths of documents of a dataset.

    Raises:
        PlanError: They are not Int32[n], or below 0.
    """
    lengths = dataset.lengths(docs)
    if lengths.dtype != np.int32 or lengths.shape != docs.shape:
        raise PlanError(
            at=f"dataset {dataset.name!r}",
            problem=f"lengths of {docs.shape[0]} documents came as "
            f"{lengths.dtype}{list(lengths.shape)}",
            fix="PlanDataset.lengths must return Int32[n].",
        )
    if (lengths < 0).any():
        n = int(np.argmax(lengths < 0))
        raise PlanError(
            at=f"dataset {dataset.name!r}, document {docs[n]}",
            problem=f"a length of {lengths[n]} tokens",
            fix="The token cache is damaged: prepare it again.",
        )
    return lengths
