"""Lists of token ids, one after the other, with what is trained of them: cut, framed and replaced
all at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.unsignedinteger]
Mask = NDArray[np.uint8]  # 1 is a target


class Tokens(NamedTuple):
    """n documents: `ids[offsets[i] : offsets[i + 1]]`, offsets Int64[n+1] from 0.

    mask UInt8[total]; None: every token is a target.
    """

    offsets: NDArray[np.int64]
    ids: Ids
    mask: Mask | None = None

    @property
    def sizes(self) -> NDArray[np.int64]:
        return np.diff(self.offsets)

    def shortened(self, cut: NDArray[np.int64]) -> Tokens:
        """Without the last `cut` (Int64[n]) tokens of each."""
        if not cut.any():
            return self
        # +1 where a cut begins, -1 where the next document does
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
        front: NDArray[np.bool_],
        behind: NDArray[np.bool_],
        trained: NDArray[np.bool_] | None = None,
    ) -> Tokens:
        """With `prefix` in front of those where `front` (Bool[n]) is set, `suffix` behind those of
        `behind`. trained Bool[n]: whether the suffix is a target, where there is a mask."""
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
        """With other tokens and masks for some documents, by number."""
        if not others:
            return self
        sizes = self.sizes
        ids: list[Ids] = []
        masks: list[Mask] = []
        at = 0
        for i, (new, flags) in sorted(others.items()):  # few
            sizes[i], here = len(new), int(self.offsets[i])
            ids += [self.ids[at:here], np.asarray(new, self.ids.dtype)]
            if self.mask is not None and flags is not None:
                masks += [self.mask[at:here], flags]
            at = int(self.offsets[i + 1])
        mask = None if self.mask is None else np.concatenate([*masks, self.mask[at:]])
        return Tokens(offsets_of(sizes), np.concatenate([*ids, self.ids[at:]]), mask)


def offsets_of(sizes: NDArray[np.int64] | Sequence[int]) -> NDArray[np.int64]:
    """Int64[n+1] of lists with these sizes."""
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
