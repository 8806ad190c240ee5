"""Documents as concatenated token ids with a loss mask: cut, framed, replaced, joined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from easypipe.core.schema import offsets_of
from easypipe.core.values import Bools, Int64, UInt8

Ids = NDArray[np.unsignedinteger]
Mask = UInt8  # 1 marks a target


class Tokens(NamedTuple):
    """n documents; document i is `ids[offsets[i] : offsets[i + 1]]`.

    Attributes:
        offsets: Int64[n+1] from 0.
        ids: The tokens of all documents.
        mask: UInt8[total]; None: every token is a target.
    """

    offsets: Int64
    ids: Ids
    mask: Mask | None = None

    @property
    def sizes(self) -> Int64:
        """Int64[n]: the number of tokens of each document."""
        return np.diff(self.offsets)

    def shortened(self, cut: Int64) -> Tokens:
        """Returns the documents without the last `cut` (Int64[n]) tokens of each."""
        if not cut.any():
            return self
        # +1 where a cut begins, -1 where the next document begins
        step = np.zeros(len(self.ids) + 1, np.int8)
        step[(self.offsets[1:] - cut)[cut > 0]] += 1
        step[self.offsets[1:][cut > 0]] -= 1
        keep = np.cumsum(step[:-1], dtype=np.int8) == 0
        mask = None if self.mask is None else self.mask[keep]
        return Tokens(offsets_of(self.sizes - cut), self.ids[keep], mask)

    def framed(
        self,
        prefix: Sequence[int],
        suffix: Sequence[int],
        front: Bools,
        behind: Bools,
        trained: Bools | None = None,
    ) -> Tokens:
        """Returns the documents with `prefix` before some of them and `suffix` after some.

        Args:
            prefix: Token ids.
            suffix: Token ids.
            front: Bool[n], which documents get the prefix.
            behind: Bool[n], which documents get the suffix.
            trained: Bool[n], whether the suffix is a target, if there is a mask.
        """
        added = front * len(prefix) + behind * len(suffix)
        if not added.any():
            return self
        offsets = offsets_of(self.sizes + added)
        ids = np.empty(int(offsets[-1]), self.ids.dtype)
        mask = None if self.mask is None else np.zeros(len(ids), np.uint8)
        content = np.ones(len(ids), np.bool_)
        ends = offsets[1:][behind] - len(suffix)
        for starts, tokens in ((offsets[:-1][front], prefix), (ends, suffix)):
            for i, token in enumerate(tokens):
                ids[starts + i] = token
                content[starts + i] = False
                if mask is not None and trained is not None and starts is ends:
                    mask[starts + i] = trained[behind]
        ids[content] = self.ids
        if mask is not None and self.mask is not None:
            mask[content] = self.mask
        return Tokens(offsets, ids, mask)

    def replaced(self, others: Mapping[int, tuple[Sequence[int], Mask | None]]) -> Tokens:
        """Returns the documents with other tokens and masks for some, given by their numbers."""
        if not others:
            return self
        sizes = self.sizes
        ids: list[Ids] = []
        masks: list[Mask] = []
        at = 0
        for i, (new, flags) in sorted(others.items()):  # few documents
            sizes[i], here = len(new), int(self.offsets[i])
            ids += [self.ids[at:here], np.asarray(new, self.ids.dtype)]
            if self.mask is not None and flags is not None:
                masks += [self.mask[at:here], flags]
            at = int(self.offsets[i + 1])
        mask = None if self.mask is None else np.concatenate([*masks, self.mask[at:]])
        return Tokens(offsets_of(sizes), np.concatenate([*ids, self.ids[at:]]), mask)


class EncodedTexts(NamedTuple):
    """n documents with their special tokens; document i is `ids[offsets[i] : offsets[i + 1]]`.

    Attributes:
        offsets: Int64[n+1] from 0.
        ids: unsigned[total].
        mask: UInt8[total], 1 for a target; None: every token is a target.
        before: Int64[n], how many special tokens were put before each document.
        added: Int64[n], how many special tokens were added to each document in all.
        truncated: Int64[n], how many content tokens were cut off each document.
        special: Int64[n], how many special strings are in each text, if they were looked for.
    """

    offsets: Int64
    ids: Ids
    mask: Mask | None
    before: Int64
    added: Int64
    truncated: Int64
    special: Int64

    @classmethod
    def empty(cls, *, masked: bool) -> Self:
        """Returns one document without tokens, with an empty mask if it is `masked`."""
        none, mask = np.zeros(1, np.int64), np.zeros(0, np.uint8) if masked else None
        return cls(np.zeros(2, np.int64), np.zeros(0, np.uint8), mask, none, none, none, none)

    @classmethod
    def joined(cls, parts: Sequence[EncodedTexts], dtype: np.dtype[np.unsignedinteger]) -> Self:
        """Concatenates the documents of all parts; there must be at least one part."""
        offsets, ids, masks, *others = zip(*parts, strict=True)
        known = [mask for mask in masks if mask is not None]
        return cls(
            offsets_of(np.concatenate([np.diff(one) for one in offsets])),
            np.concatenate(ids).astype(dtype, copy=False),
            np.concatenate(known) if known else None,
            *(np.concatenate(one) for one in others),
        )

    def where(self, kept: Bools) -> EncodedTexts:
        """Returns the documents for which `kept` (Bool[n]) is set."""
        if kept.all():
            return self
        sizes = np.diff(self.offsets)
        tokens = np.repeat(kept, sizes)
        return EncodedTexts(
            offsets_of(sizes[kept]),
            self.ids[tokens],
            None if self.mask is None else self.mask[tokens],
            *(one[kept] for one in self[3:]),
        )
