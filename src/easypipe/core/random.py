# pyright: strict
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingTypeStubs=false
"""Randomness as arithmetic: seeds folded by name, and permutations that are computed one index at a time.

Nothing here depends on jax.random or NumPy's Generator, whose streams may change between versions.
"""

from __future__ import annotations

import hashlib
import secrets

import numpy as np
from numpy.typing import NDArray

MAX_ROWS = 1 << 48
ROUNDS = 8

_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)  # finalizer constants of SplitMix64 (Steele, Lea, Flood: OOPSLA 2014)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def fold(seed: int, *names: str | int) -> int:
    """A 64-bit seed for `names` below `seed`. Sibling names never disturb each other.

    BLAKE2b over the seed and length-prefixed names: `fold(1, "ab", "c")` and `fold(1, "a", "bc")` differ, as do 1 and "1".
    """
    hasher = hashlib.blake2b(digest_size=8)
    for part in (seed, *names):
        data = (b"i%d" % part) if isinstance(part, int) else b"s" + part.encode()
        hasher.update(len(data).to_bytes(8, "little") + data)
    return int.from_bytes(hasher.digest(), "little")


def draw_seed() -> int:
    """A fresh seed for a run that was given none; the caller prints and records it."""
    return secrets.randbits(31)


def mix64(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of SplitMix64: a bijection of 64-bit words that scatters every bit."""
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    return values ^ (values >> np.uint64(31))


def half_bits(size: int) -> int:
    """Bits of one Feistel half: the network permutes 2^(2·half) ≥ size words, at most four times too many."""
    return max(1, ((size - 1).bit_length() + 1) // 2)


def round_keys(key: int) -> NDArray[np.uint64]:
    """UInt64[ROUNDS] from one 64-bit key."""
    return np.array([fold(key, "round", i) for i in range(ROUNDS)], dtype=np.uint64)


def permute(indices: NDArray[np.int64], size: int, key: int) -> NDArray[np.int64]:
    """Where each of `indices` (Int64[n], below `size`) goes under the permutation of `range(size)` that `key` names.

    A balanced Feistel network over 2^(2·half) words, walked along its cycle until it lands below `size`
    (Black, Rogaway: Ciphers with Arbitrary Finite Domains, CT-RSA 2002). Raises ValueError where size is 0 or above 2^48.
    """
    if not 0 < size <= MAX_ROWS:
        raise ValueError(f"cannot permute {size} rows: between 1 and 2^48 are possible")
    indices = np.asarray(indices, dtype=np.int64)
    if indices.size and (indices.min() < 0 or indices.max() >= size):
        raise ValueError(f"indices must lie in [0, {size})")
    half = np.uint64(half_bits(size))
    keys = round_keys(key)
    result = _feistel(indices.astype(np.uint64), half, keys)
    outside = np.flatnonzero(result >= np.uint64(size))
    while outside.size:
        walked = _feistel(result[outside], half, keys)
        result[outside] = walked
        outside = outside[walked >= np.uint64(size)]
    return result.astype(np.int64)


def _feistel(words: NDArray[np.uint64], half: np.uint64, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = words >> half, words & mask
    for key in keys:
        left, right = right, left ^ (mix64(right + key) & mask)
    return (left << half) | right
