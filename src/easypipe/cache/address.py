"""Numba kernels that read mapped token files by address: lengths and EOS flags of documents.

A gather over thousands of files then needs no list of arrays. Callers own the memory: an address is
only valid while the object that it came from exists.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from easypipe.core.jit import jit, later
from easypipe.core.values import Bools, Int32, Int64, Integer, UInt64


def _pointer(kind: str) -> Any:
    """Returns a numba intrinsic that turns an address into a pointer to values of `kind`."""

    def make() -> Any:
        from numba import types
        from numba.extending import intrinsic

        @intrinsic
        def at(typing_context: Any, address: Any) -> Any:
            # numba's types have the names of NumPy's
            signature = types.CPointer(getattr(types, kind))(types.uint64)

            def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
                return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

            return signature, generate

        return at

    return later(make)


# `int64_at(address)[i]` inside a kernel; `address` is a uint64
int64_at = _pointer("int64")
uint8_at = _pointer("uint8")
uint16_at = _pointer("uint16")
uint32_at = _pointer("uint32")


class Buffers(NamedTuple):
    """The addresses of all parts in memory, for kernels; there are P parts.

    They are valid while the TokenCache that returned them exists.

    Attributes:
        first_doc: Int64[P+1], the documents before each part, and in all.
        ids_address: UInt64[P], the first token of the part, `id_bytes` bytes each (unsigned).
        offsets_address: UInt64[P], the int64 offsets of the documents in the part, one more than
            there are documents.
        mask_address: UInt64[P], the uint8 loss_mask, one per token; 0 if every token is a target.
        eos_address: UInt64[P], a uint8 per document (schema.HAS_EOS): 1 if packing adds no EOS
            after it.
        file_address: UInt64[P], the first byte of the part's file.
        checked_address: UInt64[P], flags of the blocks that were checked (cache/blocks.py); 0 if
            nothing has to be checked.
        id_bytes: The bytes of a token id.
    """

    first_doc: Int64
    ids_address: UInt64
    offsets_address: UInt64
    mask_address: UInt64
    eos_address: UInt64
    file_address: UInt64
    checked_address: UInt64
    id_bytes: int


@jit
def _part_of(doc: int, first_doc: Int64, part: Integer) -> Integer:
    """Returns the part that holds `doc`; tries `part` first, as neighbours are usually together."""
    if first_doc[part] <= doc < first_doc[part + 1]:
        return part
    return np.searchsorted(first_doc, doc, side="right") - 1


@jit
def list_lengths(docs: Int64, first_doc: Int64, offsets_address: UInt64, out: Int32) -> None:
    """Writes document lengths: out[i] = offsets[d + 1] - offsets[d] in the part of docs[i].

    Args:
        docs: Int64[n], numbers of documents.
        first_doc: As in Buffers.
        offsets_address: As in Buffers.
        out: Int[n], filled with the lengths.
    """
    part = 0
    for i in range(docs.size):
        doc = docs[i]
        part = _part_of(doc, first_doc, part)
        offsets = int64_at(offsets_address[part])
        local = doc - first_doc[part]
        out[i] = offsets[local + 1] - offsets[local]


@jit
def count_zeros(first_doc: Int64, bytes_address: UInt64) -> int:
    """Returns how many documents have a byte of 0.

    Args:
        first_doc: As in Buffers.
        bytes_address: UInt64[P], where each part has a byte per document.
    """
    zeros = 0
    for part in range(bytes_address.shape[0]):
        values = uint8_at(bytes_address[part])
        for local in range(first_doc[part + 1] - first_doc[part]):
            zeros += values[local] == 0
    return zeros


@jit
def byte_values(docs: Int64, first_doc: Int64, bytes_address: UInt64, out: Bools) -> None:
    """Writes whether the byte of each document is not 0: out[i] for docs[i].

    Args:
        docs: Int64[n], numbers of documents.
        first_doc: As in Buffers.
        bytes_address: UInt64[P], where each part has a byte per document.
        out: Bool[n], filled with the result.
    """
    part = 0
    for i in range(docs.size):
        doc = docs[i]
        part = _part_of(doc, first_doc, part)
        out[i] = uint8_at(bytes_address[part])[doc - first_doc[part]] != 0
