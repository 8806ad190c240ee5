# pyright: strict
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingTypeStubs=false
"""Computed randomness: seeds derived by name, and permutations computed index by index.

Nothing here depends on jax.random or NumPy's Generator, whose streams may change between versions.
"""

from __future__ import annotations

import hashlib
import secrets
from typing import TypeVar

import numpy as np

from easypipe.core.values import Int64, UInt64

MAX_ROWS = 1 << 48
ROUNDS = 8

# finalizer constants of SplitMix64 (Steele, Lea, Flood: OOPSLA 2014)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_STEP = 0x9E3779B97F4A7C15  # its increment, an odd number near 2^64 divided by the golden ratio
_WORD = (1 << 64) - 1

Words = TypeVar("Words", UInt64, np.uint64)  # or one word, in a kernel


def fold(seed: int, *names: str | int) -> int:
    """Returns a 64-bit seed for `names` under `seed`; different names have independent seeds.

    It is BLAKE2b over the seed and length-prefixed names: `fold(1, "ab", "c")` and `fold(1, "a",
    "bc")` differ, as do 1 and "1".
    """
    hasher = hashlib.blake2b(digest_size=8)
    for part in (seed, *names):
        data = (b"i%d" % part) if isinstance(part, int) else b"s" + part.encode()
        hasher.update(len(data).to_bytes(8, "little") + data)
    return int.from_bytes(hasher.digest(), "little")


def draw_seed() -> int:
    """Returns a new seed for a run without one; the caller prints and records it."""
    return secrets.randbits(31)


def mix64(values: Words) -> Words:
    """Applies the finalizer of SplitMix64: a bijection of 64-bit words that scatters every bit."""
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    return values ^ (values >> np.uint64(31))


def word_bits(size: int) -> tuple[int, int]:
    """Returns the bits (left, right) of the two halves of a Feistel word.

    Together they are the fewest that can number `size` words, and at least one each.
    """
    bits = max(2, (size - 1).bit_length())
    return bits - bits // 2, bits // 2


def child(key: int, index: int) -> int:
    """Returns the 64-bit key number `index` (at least 0) under `key`.

    It is output `index` of a SplitMix64 generator that starts at `key`. It is only arithmetic, so
    compiled code can make a key for every epoch; for names use `fold`.
    """
    word = np.array([(key + (index + 1) * _STEP) & _WORD], dtype=np.uint64)
    return int(mix64(word)[0])


def round_keys(key: int) -> UInt64:
    """Returns the keys of the Feistel rounds, UInt64[ROUNDS]: the first children of `key`."""
    return np.array([child(key, i) for i in range(ROUNDS)], dtype=np.uint64)


def permute(indices: Int64, size: int, key: int) -> Int64:
    """Returns where each index goes under the permutation of `range(size)` given by `key`.

    It is a Feistel network over the words of `word_bits(size)`, repeated until the result is below
    `size` (cycle walking; Black, Rogaway: Ciphers with Arbitrary Finite Domains, CT-RSA 2002).

    Args:
        indices: Int64[n], each below `size`.
        size: From 1 to 2^48.
        key: A 64-bit key.

    Raises:
        ValueError: `size` is 0 or above 2^48, or an index is out of range.
    """
    if not 0 < size <= MAX_ROWS:
        raise ValueError(f"cannot permute {size} rows: between 1 and 2^48 are possible")
    indices = np.asarray(indices, dtype=np.int64)
    if indices.size and (indices.min() < 0 or indices.max() >= size):
        raise ValueError(f"indices must lie in [0, {size})")
    bits = word_bits(size)
    keys = round_keys(key)
    result = _feistel(indices.astype(np.uint64), bits, keys)
    outside = np.flatnonzero(result >= np.uint64(size))
    while outside.size:
        walked = _feistel(result[outside], bits, keys)
        result[outside] = walked
        outside = outside[walked >= np.uint64(size)]
    return result.astype(np.int64)


def _feistel(words: UInt64, bits: tuple[int, int], keys: UInt64) -> UInt64:
    shift, left_mask, right_mask = (
        np.uint64(bits[1]),
        np.uint64((1 << bits[0]) - 1),
        np.uint64((1 << bits[1]) - 1),
    )
    left, right = words >> shift, words & right_mask
    for even, odd in zip(keys[::2], keys[1::2], strict=True):
        left = left ^ (mix64(right + even) & left_mask)
        right = right ^ (mix64(left + odd) & right_mask)
    return (left << shift) | right
