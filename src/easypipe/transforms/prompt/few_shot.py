"""Solved examples in front of rows: the same for all, or some drawn for each from a file."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from easypipe.core.config import digest
from easypipe.core.errors import ConfigError, MissingFileError, SourceError
from easypipe.core.random import fold, permute
from easypipe.core.storage import read_bytes
from easypipe.transforms.chat.sandbox import Row
from easypipe.transforms.prompt.config import FewShotConfig

MOST_BYTES = 256 << 20


class FewShot:
    """Examples of rows. columns: of which every example has all. plain: a row as it is compared.
    Thread safe.

    Raises ConfigError where an example has not all columns, or there are too few; SourceError for a
    file of other things than rows.
    """

    def __init__(
        self,
        config: FewShotConfig,
        columns: Sequence[str],
        plain: Callable[[Row], Row],
    ) -> None:
        self._config = config
        self.pool: Sequence[Row] = config.examples
        if config.data_files is not None:
            self.pool = _read(str(config.data_files), tuple(columns))
            assert config.count is not None
            if len(self.pool) <= config.count:
                problem = (
                    f"{config.data_files} has {len(self.pool)} rows, and {config.count} are "
                    "drawn that are not the row at hand"
                )
                raise ConfigError(
                    at="few_shot.count",
                    problem=problem,
                    fix=f"Give at most {max(1, len(self.pool) - 1)}.",
                )
        for i, example in enumerate(self.pool):
            missing = [name for name in columns if name not in example]
            if missing:
                at = (
                    f"few_shot.examples[{i}]"
                    if config.data_files is None
                    else f"few_shot.data_files, row {i}"
                )
                raise ConfigError(
                    at=at,
                    problem=f"no column {missing[0]!r}",
                    have=list(example),
                    fix="Give every column of the format.",
                )
        self._plain = plain
        self.pool = [plain(example) for example in self.pool]
        self._keys = [digest(example) for example in self.pool]
        self._pool_digest = digest(self._keys)

    @property
    def identity(self) -> list[object]:
        """What decides which examples a row has, but the row."""
        return [self._pool_digest, self._config.count, self._config.seed, self._config.separator]

    @property
    def separator(self) -> str:
        return self._config.separator

    def of(self, row: Row) -> list[int]:
        """Numbers of the examples in the pool, in their order; of drawn ones never that of a row
        that equals this one.
        """
        if self._config.count is None:
            return list(range(len(self.pool)))
        own = digest(self._plain(row))
        found: list[int] = []
        size = len(self.pool)
        for at in range(0, size, 64):  # the first few are enough, unless many rows are alike
            numbers = permute(
                np.arange(at, min(size, at + 64)), size, fold(self._config.seed, "few_shot", own)
            )
            found += [i for i in numbers.tolist() if self._keys[i] != own]
            if len(found) >= self._config.count:
                break
        return found[: self._config.count]


def _read(path: str, columns: tuple[str, ...]) -> list[Row]:
    at = "few_shot.data_files"
    try:
        data = read_bytes(str(Path(path).expanduser()) if "://" not in path else path)
    except MissingFileError:
        raise ConfigError(
            at=at,
            problem=f"there is no file {path}",
            fix="Name a file of rows: .jsonl, .json or .parquet.",
        ) from None
    if len(data) > MOST_BYTES:
        raise ConfigError(
            at=at,
            problem=f"{path} has {len(data)} bytes, more than {MOST_BYTES} to draw from",
            fix="Name a smaller file.",
        )
    try:
        if data[:4] == b"PAR1":
            rows = pq.read_table(io.BytesIO(data)).to_pylist()
        elif data.lstrip()[:1] == b"[":
            rows = json.loads(data)
        else:
            rows = [json.loads(line) for line in data.splitlines() if line.strip()]
    except (ValueError, pa.ArrowInvalid) as error:
        raise SourceError(
            at=path,
            problem=f"neither JSON nor parquet: {error}",
            fix="Name a file of rows: .jsonl, .json, .parquet.",
        ) from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise SourceError(
            at=path,
            problem="holds other things than rows",
            fix="Give a list of objects, or lines of them.",
        )
    return [{name: row[name] for name in row if name in columns} for row in rows]
