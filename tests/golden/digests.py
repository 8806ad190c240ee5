"""What a golden case keeps: short digests of decoded content, never of file bytes, versions, times
or paths.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa


def digest(*parts: Any) -> str:
    """16 hex digits of arrays, Arrow tables, bytes, and what JSON can hold."""
    h = hashlib.sha256()
    for part in parts:
        for piece in _pieces(part):
            h.update(len(piece).to_bytes(8, "little") + piece)
    return h.hexdigest()[:16]


def _pieces(part: Any) -> Iterable[bytes]:
    if isinstance(part, pa.RecordBatch | pa.Table):
        yield json.dumps(part.to_pydict(), sort_keys=True, default=str, ensure_ascii=False).encode()
    elif isinstance(part, Mapping) and any(hasattr(value, "dtype") for value in part.values()):
        for name in sorted(part):
            array = np.ascontiguousarray(np.asarray(part[name]))
            yield f"{name} {array.dtype.str} {array.shape}".encode()
            yield array.tobytes()
    elif hasattr(part, "dtype"):
        yield from _pieces({"": part})
    elif isinstance(part, bytes):
        yield part
    else:
        yield json.dumps(part, sort_keys=True, ensure_ascii=False).encode()


def batches(
    loader: Iterable[Mapping[str, Any]], first: int = 3, most: int = 10_000
) -> dict[str, Any]:
    """Digests of the first batches, one of all of them in order, and how many there are."""
    heads: list[str] = []
    rolling, count = "", 0
    for batch in loader:
        one = digest(batch)
        heads += [one] if count < first else []
        rolling, count = digest(rolling, one), count + 1
        if count == most:
            break
    return {"first": heads, "all": rolling, "count": count}


def ledger(of: Any) -> dict[str, Any]:
    """The balances of a Ledger, dataset by dataset; no zeros, no measured facts."""
    return {
        f"{entry.stage} {entry.dataset} {entry.unit}": {
            "into": dict(sorted(entry.into.items())),
            "out": dict(sorted(entry.out.items())),
        }
        for entry in of.entries
    }


def message(error: BaseException, *folders: Path) -> str:
    """An error's type and text with its notes; folders stand as <0>, <1>, ..., and version numbers
    of libraries as they are matched.
    """
    text = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
    return without(text, *folders)


def without(text: str, *folders: Path) -> str:
    for number, folder in enumerate(folders):
        text = text.replace(str(folder), f"<{number}>")
    return re.sub(r"127\.0\.0\.1:\d+", "<host>", text)


def plain(value: Any) -> Any:
    """Dataclasses, paths and functions as JSON holds them."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if callable(value):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, list | tuple | range | set | frozenset):
        return [plain(one) for one in value]
    return (
        value.item()
        if isinstance(value, np.generic)
        else value
        if isinstance(value, str | int | float | bool | None)
        else str(value)
    )
