"""FewShot: solved examples before every row, the same for all or drawn for each from a file."""

from __future__ import annotations

import codecs
import io
import json
from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from easypipe.core.config import digest
from easypipe.core.errors import ConfigError, MissingFileError, SourceError, require
from easypipe.core.random import fold, permute
from easypipe.core.storage import read_bytes
from easypipe.transforms.chat.sandbox import Json, Row
from easypipe.transforms.prompt.config import FewShotConfig
from easypipe.transforms.refused import Refused

MOST_BYTES = 256 << 20
# key of the second row of a pair: the first row, for which the examples of both are drawn
PREFERRED = "easypipe preferred"


class FewShot:
    """The examples of rows. Thread-safe."""

    def __init__(
        self,
        config: FewShotConfig,
        columns: Sequence[str],
        plain: Callable[[Row], Row],
        write: Callable[[Sequence[Row]], Sequence[Json | Refused]],
        fix: str,
    ) -> None:
        """Reads and writes the examples.

        Args:
            columns: The columns that every example must have.
            plain: Returns a row in the form in which rows are compared.
            write: Returns examples in the form in which they are put before rows.
            fix: The advice if an example is refused.

        Raises:
            ConfigError: An example is not a sample or lacks columns, or there are too few.
            SourceError: The file holds something other than rows.
        """
        self.separator, self._count, self._seed = config.separator, config.count, config.seed
        pool: Sequence[Row] = config.examples
        if config.data_files is not None:
            pool = _read(str(config.data_files), tuple(columns))
            assert config.count is not None
            require(
                len(pool) > config.count,
                "few_shot.count",
                f"{config.data_files} has {len(pool)} rows, and {config.count} are "
                "drawn that are not the row at hand",
                f"Give at most {len(pool) - 1}." if len(pool) > 1 else "Name a file of more rows.",
            )
        for i, example in enumerate(pool):
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
        pool = [plain(example) for example in pool]
        self._keys = [digest(example) for example in pool]
        # everything that decides which examples a row gets, except the row
        self.identity = [digest(self._keys), config.count, config.seed, config.separator]
        self._examples = write(pool)
        for i, one in enumerate(self._examples):
            if isinstance(one, Refused):
                problem = f"{one.reason}: {one.detail}"
                raise ConfigError(at=f"few_shot, example {i}", problem=problem, fix=fix)

    def of(self, row: Row) -> list[Json]:
        """Returns the examples of a row as they were written, in their order.

        A drawn example never equals this row. Both rows of a pair have the same examples.
        """
        if self._count is None:
            return list(self._examples)
        own = digest(self._plain(row.get(PREFERRED, row)))
        found: list[int] = []
        size = len(self._keys)
        for at in range(0, size, 64):  # the first few are enough, unless many rows are alike
            some, key = np.arange(at, min(size, at + 64)), fold(self._seed, "few_shot", own)
            found += [i for i in permute(some, size, key).tolist() if self._keys[i] != own]
            if len(found) >= self._count:
                break
        return [self._examples[i] for i in found[: self._count]]


def _read(path: str, columns: tuple[str, ...]) -> list[Row]:
    """Returns the rows of a file of examples, with only these columns."""
    at = "few_shot.data_files"
    try:
        data = read_bytes(path).removeprefix(codecs.BOM_UTF8)
    except MissingFileError:
        raise ConfigError(
            at=at,
            problem=f"there is no file {path}",
            fix="Name a file of rows: .jsonl, .json or .parquet.",
        ) from None
    require(
        len(data) <= MOST_BYTES,
        at,
        f"{path} has {len(data)} bytes, more than {MOST_BYTES} to draw from",
        "Name a smaller file.",
    )
    try:
        if data[:4] == b"PAR1":
            rows = pq.read_table(io.BytesIO(data)).to_pylist()
        elif data.lstrip()[:1] == b"[":
            rows = json.loads(data)
        else:
            rows = [json.loads(line) for line in data.splitlines() if line.strip()]
    except (ValueError, RecursionError, pa.ArrowException) as error:
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
