"""Documents as token ids are cut, framed, replaced, joined and chosen as plain lists would be."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from easypipe.core.schema import offsets_of
from easypipe.transforms.tokenizer.ragged import EncodedTexts, Tokens
from strategies import examples

PREFIX, SUFFIX = [100, 101], [200, 201, 202]


class Document(NamedTuple):
    """ids with their targets, and what is done to them."""

    ids: list[tuple[int, int]]  # id, and whether it is a target
    cut: int
    front: bool
    behind: bool
    trained: bool
    other: list[tuple[int, int]] | None


ids = st.lists(st.tuples(st.integers(0, 99), st.integers(0, 1)), max_size=4)
documents = st.lists(
    st.builds(
        Document,
        ids,
        st.integers(0, 4),
        st.booleans(),
        st.booleans(),
        st.booleans(),
        st.none() | ids,
    ),
    min_size=1,
    max_size=5,
).map(lambda all_: [one._replace(cut=min(one.cut, len(one.ids))) for one in all_])


def tokens_of(parts: list[list[tuple[int, int]]], *, masked: bool) -> Tokens:
    flat = [pair for part in parts for pair in part]
    return Tokens(
        offsets_of(np.array([len(part) for part in parts])),
        np.array([i for i, _ in flat], np.uint16),
        np.array([flag for _, flag in flat], np.uint8) if masked else None,
    )


def lists_of(
    offsets: np.ndarray, ids: np.ndarray, mask: np.ndarray | None
) -> list[list[tuple[int, int]]]:
    assert offsets[0] == 0
    assert offsets[-1] == len(ids) == len(ids if mask is None else mask)
    flags = np.ones(len(ids), int) if mask is None else mask
    both = list(zip(ids.tolist(), flags.tolist(), strict=True))
    return [both[a:b] for a, b in itertools.pairwise(offsets)]


def expected(parts: list[list[tuple[int, int]]], *, masked: bool) -> list[list[tuple[int, int]]]:
    return [[(i, flag if masked else 1) for i, flag in part] for part in parts]


def flags_of(documents: list[Document], name: str) -> np.ndarray:
    return np.array([getattr(one, name) for one in documents])


@examples(60)
@given(documents, st.booleans())
def test_tokens_are_what_lists_are(documents: list[Document], masked: bool) -> None:
    tokens = tokens_of([one.ids for one in documents], masked=masked)

    shortened = tokens.shortened(flags_of(documents, "cut"))
    left = [one.ids[: len(one.ids) - one.cut] for one in documents]
    assert lists_of(*shortened) == expected(left, masked=masked)

    framed = tokens.framed(
        PREFIX, SUFFIX, *(flags_of(documents, name) for name in ("front", "behind", "trained"))
    )
    around = [
        [(i, 0) for i in PREFIX if one.front]
        + one.ids
        + [(i, int(one.trained)) for i in SUFFIX if one.behind]
        for one in documents
    ]
    assert lists_of(*framed) == expected(around, masked=masked)

    others = {i: one.other for i, one in enumerate(documents) if one.other is not None}
    replaced = tokens.replaced(
        {
            i: ([token for token, _ in other], np.array([flag for _, flag in other], np.uint8))
            for i, other in others.items()
        }
    )
    exchanged = [others.get(i, one.ids) for i, one in enumerate(documents)]
    assert lists_of(*replaced) == expected(exchanged, masked=masked)


@examples(40)
@given(st.lists(documents, min_size=1, max_size=3), st.booleans())
def test_texts_are_joined_and_chosen_with_all_that_is_counted(
    parts: list[list[Document]], masked: bool
) -> None:
    def encoded(part: list[Document], first: int) -> EncodedTexts:
        counts = [np.arange(first, first + len(part)) * 10 + k for k in range(4)]
        return EncodedTexts(*tokens_of([one.ids for one in part], masked=masked), *counts)

    starts = np.cumsum([0, *map(len, parts)])
    joined = EncodedTexts.joined(
        [encoded(part, int(first)) for part, first in zip(parts, starts, strict=False)],
        np.dtype(np.uint32),
    )
    every = [one for part in parts for one in part]
    chosen = joined.where(flags_of(every, "front"))
    assert joined.ids.dtype == np.uint32
    for found, numbers in (
        (joined, range(len(every))),
        (chosen, [i for i, one in enumerate(every) if one.front]),
    ):
        assert lists_of(*found[:3]) == expected([every[i].ids for i in numbers], masked=masked)
        assert [one.tolist() for one in found[3:]] == [
            [i * 10 + k for i in numbers] for k in range(4)
        ]
