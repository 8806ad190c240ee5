"""Hypothesis strategies that several test files share: shards, lengths, weights, cuts."""

from __future__ import annotations

import os

import numpy as np
import pyarrow as pa
from hypothesis import settings
from hypothesis import strategies as st

# Text that has broken tokenizers and line readers before: line separators that are not newlines,
# combining marks, astral planes, controls.
HOSTILE = "\u2028\u2029\x85\x0b\x0c\x1c\u200d\ufe0f\u0301👩‍👩‍👧🏽Å😀𝔘ﷺ\ufeff\u202e０"


def examples(count: int) -> settings:
    """A decorator: half of so many examples, or as many times them as `nox -s laws` asks for."""
    return settings(
        max_examples=max(1, int(count * float(os.environ.get("EASYPIPE_EXAMPLES", 0.5))))
    )


def texts(*, min_size: int = 0) -> st.SearchStrategy[str]:
    """Any text without surrogates and NUL, often with hostile characters; with a min_size, none of
    white space alone.
    """
    plain = st.text(
        st.characters(exclude_categories=("Cs",), exclude_characters="\x00"),
        min_size=min_size,
        max_size=60,
    )
    either = st.one_of(plain, st.text(HOSTILE + "ab \n\t", min_size=min_size, max_size=40))
    return either.filter(str.strip) if min_size else either


def text_tables(
    *, min_rows: int = 0, max_rows: int = 60, min_size: int = 1
) -> st.SearchStrategy[pa.Table]:
    """Tables with a `text` and an integer `n` column."""
    rows = st.lists(texts(min_size=min_size), min_size=min_rows, max_size=max_rows)
    return rows.map(
        lambda r: pa.table(
            {"text": pa.array(r, pa.string()), "n": pa.array(range(len(r)), pa.int64())}
        )
    )


def shards(*, max_shards: int = 4) -> st.SearchStrategy[list[pa.Table]]:
    return st.lists(text_tables(max_rows=25), min_size=1, max_size=max_shards)


def row_cuts() -> st.SearchStrategy[list[int]]:
    """Places to cut, taken modulo the number of rows."""
    return st.lists(st.integers(0, 1 << 20), max_size=8)


def lengths(
    *, min_docs: int = 1, max_docs: int = 300, max_length: int = 700
) -> st.SearchStrategy[np.ndarray]:
    """Int32[n] document lengths, at least 1 each: uniform, mostly short with a few giants, or all
    alike.
    """
    some = st.integers(min_docs, max_docs)
    uniform = some.flatmap(lambda n: st.lists(st.integers(1, max_length), min_size=n, max_size=n))
    short = some.flatmap(
        lambda n: st.lists(
            st.one_of(st.integers(1, 8), st.just(max_length)), min_size=n, max_size=n
        )
    )
    alike = st.tuples(some, st.integers(1, max_length)).map(lambda t: [t[1]] * t[0])
    return st.one_of(uniform, short, alike).map(lambda values: np.asarray(values, dtype=np.int32))


def weights(
    *, max_datasets: int = 6, smallest: float = 1e-6
) -> st.SearchStrategy[dict[str, float]]:
    """Weights of datasets `d0`, `d1`, ..., as small as one in a million."""
    value = st.one_of(st.floats(smallest, 1.0), st.sampled_from([smallest, 1e-3, 0.5, 1.0]))
    return st.lists(value, min_size=1, max_size=max_datasets).map(
        lambda v: {f"d{i}": w for i, w in enumerate(v)}
    )


def seeds() -> st.SearchStrategy[int]:
    return st.integers(0, 2**31 - 1)
