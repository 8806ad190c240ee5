"""The saved state of a stream between two windows: at most 48 characters for each dataset.

Integers are written as LEB128 (7 bits per byte; the highest bit says that more follow), deficits
after zigzag encoding, and the whole as base64 without padding. The order is: first_row, epoch; for
every dataset deficit, active, and its place (epoch, entry, chunk, taken); the bad rows of every
dataset, if there are any or a document is cut; and the document that is cut, if there is one.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator

from easypipe.core.errors import StateError
from easypipe.loader.streams.feed import Place
from easypipe.plan.spec import WindowState

StreamState = WindowState[Place]


def to_text(state: StreamState) -> str:
    numbers = [state.first_row, state.epoch]
    for deficit, active, place in zip(state.deficits, state.active, state.drawn, strict=True):
        zigzag = 2 * deficit if deficit >= 0 else -2 * deficit - 1
        numbers += [zigzag, int(active), *place[:4]]
    bad = [place.bad for place in state.drawn]
    if state.cut is not None or any(bad):
        numbers += [*bad, *(state.cut or ())]
    return base64.b64encode(b"".join(map(_leb128, numbers))).decode().rstrip("=")


def from_text(text: str, num_datasets: int) -> StreamState:
    """Reads a state that `to_text` wrote for `num_datasets` datasets.

    Raises:
        StateError: `text` is not such a state.
    """
    try:
        numbers = list(_numbers(base64.b64decode(text + "=" * (-len(text) % 4), validate=True)))
        first_row, epoch, *rest = numbers
        if len(rest) not in (6 * num_datasets, 7 * num_datasets, 7 * num_datasets + 2):
            raise ValueError(f"{len(rest)} numbers for {num_datasets} datasets")
        bad = rest[6 * num_datasets : 7 * num_datasets] or [0] * num_datasets
        cut = rest[7 * num_datasets :]
        if cut and cut[0] >= num_datasets:
            raise ValueError(f"a document of dataset {cut[0]} of {num_datasets}")
    except (binascii.Error, TypeError, ValueError) as error:
        raise StateError(
            at="loader state", problem=f"{text!r} is not a state of a stream: {error}"
        ) from None
    parts = [rest[i : i + 6] for i in range(0, 6 * num_datasets, 6)]
    return WindowState(
        first_row=first_row,
        epoch=epoch,
        deficits=tuple(-(part[0] + 1 >> 1) if part[0] & 1 else part[0] >> 1 for part in parts),
        active=tuple(bool(part[1]) for part in parts),
        drawn=tuple(Place(*part[2:6], bad=of) for part, of in zip(parts, bad, strict=True)),
        cut=(cut[0], cut[1]) if cut else None,
    )


def _leb128(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)


def _numbers(data: bytes) -> Iterator[int]:
    number = shift = 0
    for byte in data:
        number |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            yield number
            number = shift = 0
    if shift:
        raise ValueError("cut short")
