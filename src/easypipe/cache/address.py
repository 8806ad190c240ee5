"""Numba kernels that read mapped token files by address: lengths and EOS flags of documents.

A gather over thousands of files then needs no list of arrays. Callers own the memory: an address is
only valid while the object that it came from exists.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from easypipe.core.jit import jit, later


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


@jit
def _part_of(doc, first_doc, part):  # type: ignore[no-untyped-def]
    """Returns the part that holds `doc`; tries `part` first, as neighbours are usually together."""
    if first_doc[part] <= doc < first_doc[part + 1]:
        return part
    return np.searchsorted(first_doc, doc, side="right") - 1


@jit
def list_lengths(docs, first_doc, offsets_address, out):  # type: ignore[no-untyped-def]
    """Writes document lengths: out[i] = offsets[d + 1] - offsets[d] in the part of docs[i].

    Args:
        docs: Int64[n], numbers of documents.
        first_doc: As in reader.Buffers.
        offsets_address: As in reader.Buffers.
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
def count_zeros(first_doc, bytes_address):  # type: ignore[no-untyped-def]
    """Returns how many documents have a byte of 0.

    Args:
        first_doc: As in reader.Buffers.
        bytes_address: UInt64[P], where each part has a byte per document.
    """
    zeros = 0
    for part in range(bytes_address.shape[0]):
        values = uint8_at(bytes_address[part])
        for local in range(first_doc[part + 1] - first_doc[part]):
            zeros += values[local] == 0
    return zeros


@jit
def byte_values(docs, first_doc, bytes_address, out):  # type: ignore[no-untyped-def]
    """Writes whether the byte of each document is not 0: out[i] for docs[i].

    Args:
        docs: Int64[n], numbers of documents.
        first_doc: As in reader.Buffers.
        bytes_address: UInt64[P], where each part has a byte per document.
        out: Bool[n], filled with the result.
    """
    part = 0
    for i in range(docs.size):
        doc = docs[i]
        part = _part_of(doc, first_doc, part)
        out[i] = uint8_at(bytes_address[part])[doc - first_doc[part]] != 0
