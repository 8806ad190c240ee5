"""Arrays in memory as rows that a loader reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import ArrayLike

from easypipe.core.errors import ConfigError
from easypipe.core.protocols import Shard, Source
from easypipe.core.schema import (
    ATTENTION_MASK,
    INPUT_IDS,
    LABELS,
    LOOK_AHEAD,
    LOSS_MASK,
    POSITION_IDS,
    SEGMENT_IDS,
)

READ_COLUMNS = (INPUT_IDS, LOSS_MASK, SEGMENT_IDS, POSITION_IDS, ATTENTION_MASK, LABELS, LOOK_AHEAD)


class Arrays(Source):
    """Arrays in memory as a source of one shard."""

    def __init__(self, columns: Mapping[str, ArrayLike | Sequence[ArrayLike]]) -> None:
        arrays: dict[str, pa.Array] = {}
        for name, values in columns.items():
            if name == LOOK_AHEAD:
                arrays[name] = pa.array(np.asarray(values, np.int32))
            elif name in READ_COLUMNS:
                arrays[name] = _as_lists(name, values)
        if not arrays:
            raise ConfigError(at="rows", problem=f"no column {INPUT_IDS!r}", have=columns)
        if len({len(array) for array in arrays.values()}) > 1:
            counts = ", ".join(f"{name} {len(array)}" for name, array in arrays.items())
            raise ConfigError(at="rows", problem=f"columns of different numbers of rows: {counts}")
        self._batch = pa.RecordBatch.from_arrays(list(arrays.values()), names=list(arrays))

    @property
    def schema(self) -> pa.Schema:
        return self._batch.schema

    @property
    def shards(self) -> Sequence[Shard]:
        return (Shard(name="memory", num_rows=self._batch.num_rows),)

    @property
    def fingerprint(self) -> str:
        hasher = xxhash.xxh3_128()
        for name, column in zip(self.schema.names, self._batch.columns, strict=True):
            hasher.update(f"{name} {column.type} {len(column)}".encode())
            for buffer in column.buffers():
                if buffer is not None:
                    hasher.update(memoryview(buffer))
        return hasher.hexdigest()

    def read(self, shard: int, start: int, stop: int) -> pa.RecordBatch:
        return self._batch.slice(start, stop - start)


def _as_lists(name: str, values: ArrayLike | Sequence[ArrayLike]) -> pa.Array:
    if isinstance(values, np.ndarray) and values.ndim == 2:
        if values.dtype.kind not in "iub":
            raise ConfigError(at=f"rows.{name}", problem=f"expected integers, got {values.dtype}")
        flat = pa.array(np.ascontiguousarray(values).reshape(-1))
        return pa.FixedSizeListArray.from_arrays(flat, values.shape[1])
    rows = [np.asarray(row) for row in values]  # pyright: ignore[reportGeneralTypeIssues, reportArgumentType]
    for i, row in enumerate(rows):
        if row.ndim != 1 or (row.size and row.dtype.kind not in "iub"):
            raise ConfigError(
                at=f"rows.{name}[{i}]",
                problem=f"expected a row of integers, got {row.dtype} of shape {row.shape}",
            )
    offsets = np.concatenate([[0], np.cumsum([row.size for row in rows])]).astype(np.int64)
    flat = np.concatenate([row.astype(np.int64) for row in rows]) if rows else np.empty(0, np.int64)
    return pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(flat))
