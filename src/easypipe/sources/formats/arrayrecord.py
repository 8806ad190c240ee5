"""ArrayRecord files: records by number, as UTF-8 text or as documents of tokens.

It needs the package `array-record` (extra `arrayrecord`), which reads only local files.
"""

from __future__ import annotations

import importlib
import threading
from typing import Any, Unpack

import numpy as np
import pyarrow as pa

from easypipe.core.config import digest, fields_of
from easypipe.core.errors import SourceError, place, raising
from easypipe.core.schema import INPUT_IDS, offsets_of
from easypipe.sources.base import FileOptions, FileSource, Rows, Survey
from easypipe.sources.external.token_files import TokenFilesConfig, token_lists
from easypipe.sources.files import DataFiles, open_local
from easypipe.sources.refs import FileRef
from easypipe.sources.schemas import text_array

TEXT = "text"
CUT_BYTES = 1 << 20


class ArrayRecordShardedSource(FileSource):
    """The records of ArrayRecord files, in the column `text` or `input_ids`.

    A record of text that is not UTF-8 is a reject (invalid_utf8). Other options are those of
    FileSource.

    Args:
        layout: The dtype of the tokens of each record; None: records are text.
    """

    kind = "arrayrecord"

    def __init__(
        self,
        data_files: DataFiles,
        *,
        layout: TokenFilesConfig | None = None,
        **options: Unpack[FileOptions],
    ) -> None:
        super().__init__(data_files, **options)
        self._layout, self._reading = layout, threading.Lock()
        self._readers: dict[str, tuple[threading.Lock, Any]] = {}

    def _survey(self, file: FileRef) -> Survey:
        given = {} if self._layout is None else fields_of(self._layout)
        for name in ("separator_id", "document_tokens"):
            if given.get(name) is not None:
                raise file.error(
                    f"{name} has no effect: every record is a document", f"Leave {name} out."
                )
        if self._layout is not None and self._layout.dtype is None:
            raise file.error(
                "records of tokens do not say their dtype",
                "Give it by token_files, or leave that out.",
            )
        _, reader = self._reader(file)
        rows = reader.num_records()
        step = max(1, rows * CUT_BYTES // max(1, file.num_bytes))
        kind = (
            pa.large_string()
            if self._layout is None
            else pa.large_list(pa.from_numpy_dtype(np.dtype(str(self._layout.dtype))))
        )
        name = TEXT if self._layout is None else INPUT_IDS
        return Survey(
            num_rows=rows,
            total_rows=rows,
            cuts=tuple(range(0, rows, step)) or (0,),
            schema=pa.schema([pa.field(name, kind)]),
        )

    def _rows(
        self, file: FileRef, survey: Survey, fields: pa.Schema, start: int, stop: int
    ) -> Rows:
        lock, reader = self._reader(file)
        with lock, open_local(file):  # the file must still be the one that was opened
            try:
                found: list[bytes] = reader.read(start, stop)
            except (RuntimeError, IndexError, ValueError) as error:
                at = place(file.path, row=start)
                raise SourceError(
                    at=at,
                    problem=f"damaged ArrayRecord data: {error}",
                    fix="Copy or write the file again.",
                ) from error
        offsets = offsets_of([len(record) for record in found])
        data = b"".join(found)
        if self._layout is None:
            return Rows(pa.table({TEXT: text_array(offsets, data)}))
        dtype = np.dtype(str(self._layout.dtype)).newbyteorder("<")
        odd = np.flatnonzero(np.diff(offsets) % dtype.itemsize)
        if odd.size:
            size = len(found[int(odd[0])])
            at = place(file.path, row=start + int(odd[0]))
            raise SourceError(
                at=at,
                problem=f"{size} bytes are not a whole number of {dtype} tokens",
                fix="Check dtype.",
            )
        return Rows(token_lists(np.frombuffer(data, dtype), offsets // dtype.itemsize))

    def raw(self, shard: int, row: int) -> str | None:
        lock, reader = self._reader(self.files[shard])
        with lock:
            return reader.read(row, row + 1)[0].decode("utf-8", "replace")

    def _reader(self, file: FileRef) -> tuple[threading.Lock, Any]:
        """Returns the lock and the reader of a file; a file is opened once."""
        with self._reading:
            if file.path not in self._readers:
                self._readers[file.path] = (threading.Lock(), _open(file))
            return self._readers[file.path]

    def _options(self) -> list[Any]:
        return [*super()._options(), None if self._layout is None else digest(self._layout)]


def _open(file: FileRef) -> Any:
    """Returns the reader of a local file; raises SourceError if it cannot be read."""
    if file.remote:
        raise file.error("ArrayRecord files are read locally only", "Copy them to this machine.")
    fix = "pip install 'easypipe[arrayrecord]'."
    with raising(SourceError, file.path, "cannot be read", fix, ImportError):
        array_record_module: Any = importlib.import_module(
            "array_record.python.array_record_module"
        )
    with open_local(file):
        reader = array_record_module.ArrayRecordReader(file.here.path)
    if reader.ok():
        return reader
    why = ""
    try:
        reader.close()  # this call raises the error with the cause
    except RuntimeError as error:
        why = f": {error}"
    raise file.error(
        f"not an ArrayRecord file, or truncated{why}", "Check its type, or copy it again."
    )
