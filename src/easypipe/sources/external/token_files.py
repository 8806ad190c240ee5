"""Tokens in files of others (.npy, raw .bin, Megatron's): their dtype, and where documents end.

Every document is a row of `input_ids`.

two-dimensional .npy      a row of the array is a document
one-dimensional .npy, raw .bin   documents end with `separator_id`, or all have `document_tokens`
tokens .bin next to an .idx      the index says where documents are (sources/external/megatron.py)
"""

from __future__ import annotations

import contextlib
import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Unpack

import numpy as np
import pyarrow as pa

from easypipe.core.config import check_at_least, config, digest, fields_of
from easypipe.core.errors import MissingFileError, require
from easypipe.core.schema import INPUT_IDS
from easypipe.core.values import DType, Int64
from easypipe.sources.base import FileOptions, FileSource, Rows, Survey
from easypipe.sources.external.megatron import MegatronIndex, open_index
from easypipe.sources.files import DataFiles, read_range, resolve
from easypipe.sources.formats.members import npy_header
from easypipe.sources.formats.records import Found, Layout, Records, RecordSource
from easypipe.sources.formats.scanners import split_tokens
from easypipe.sources.refs import FileRef, plain_name

NPY_MAGIC = b"\x93NUMPY"
HEADER_BYTES = 1 << 16
CUT_BYTES = 1 << 20


@config
class TokenFilesConfig:
    """How documents are stored in files of tokens.

    Arrays of two dimensions, and Megatron's files with an index, need none of these options.

    Args:
        dtype: The integer type of raw `.bin` files, little-endian; `.npy` and `.idx` files record
            their own.
        separator_id: The token that ends every document, usually EOS; it stays the document's last
            token.
        document_tokens: Every document has this many tokens (the last of a file may have fewer),
            instead of a separator.
    """

    dtype: Literal["uint8", "uint16", "uint32", "int32", "int64"] | None = None
    separator_id: int | None = None
    document_tokens: int | None = None

    def check(self) -> None:
        require(
            self.separator_id is None or self.document_tokens is None,
            "document_tokens",
            "has no effect together with separator_id",
            "Leave one of them out.",
        )
        check_at_least(self, 0, "separator_id")
        check_at_least(self, 1, "document_tokens")


@dataclass(frozen=True)
class _Found:
    """How documents are laid out in one file.

    Attributes:
        dtype: The dtype of the tokens.
        start: The byte at which the first one begins.
        width: The tokens of every document, unless there is an index.
        megatron: The index that says where documents are; None if there is none.
    """

    dtype: DType
    start: int
    width: int = 0
    megatron: MegatronIndex | None = None


class TokenShardedSource(RecordSource):
    """The documents of token files, in the one column `input_ids`.

    Other options are those of FileSource.

    Args:
        layout: How documents are laid out in the files.

    Raises:
        SourceError: A file has no layout, is of another format, is truncated, or its size differs
            from what its header says.
    """

    kind = "tokens"
    numbered, raw = False, FileSource.raw

    def __init__(
        self,
        data_files: DataFiles,
        *,
        layout: TokenFilesConfig | None = None,
        **options: Unpack[FileOptions],
    ) -> None:
        super().__init__(data_files, **options)
        self._layout = layout or TokenFilesConfig()
        found = {file.path: _index_beside(file) for file in self.files}
        self._indexes = {path: index for path, index in found.items() if index is not None}

    def _survey(self, file: FileRef) -> Survey:
        """Finds out where the documents of a file are: by its index, its shape, or the layout."""
        if file.path in self._indexes:
            self._refuse(file, "the .idx file beside it says where documents are")
            index = open_index(self._indexes[file.path], file)
            return _survey(file, _Found(index.dtype, 0, megatron=index), index.num_docs)
        head = read_range(file, 0, min(HEADER_BYTES, file.num_bytes))
        if head.startswith(NPY_MAGIC) or file.path.lower().endswith(".npy"):
            dtype, shape, start = _npy_header(file, head)
            if self._layout.dtype is not None:
                raise file.error(
                    f"says itself that it holds {dtype}",
                    "Leave dtype out: it is for raw .bin files.",
                )
        else:
            if self._layout.dtype is None:
                raise file.error(
                    "raw tokens do not say their dtype",
                    "Give token_files=TokenFilesConfig(dtype='uint16', ...).",
                )
            dtype, start = np.dtype(self._layout.dtype).newbyteorder("<"), 0
            if file.num_bytes % dtype.itemsize:
                problem = f"{file.num_bytes} bytes are not a whole number of {dtype} tokens"
                raise file.error(
                    problem, "Check dtype, or copy the file again: it may be truncated."
                )
            shape = (file.num_bytes // dtype.itemsize,)
        if len(shape) == 2:
            self._refuse(file, "its array has two dimensions: every row is a document")
            return _survey(file, _Found(dtype, start, width=shape[1]), shape[0])
        if self._layout.document_tokens is not None:
            width = self._layout.document_tokens
            return _survey(file, _Found(dtype, start, width=width), -(-shape[0] // width))
        if self._layout.separator_id is None:
            raise file.error(
                "one long row of tokens does not say where documents end",
                "Give token_files=TokenFilesConfig(separator_id=...), the EOS token, or "
                "document_tokens.",
            )
        separator = self._layout.separator_id
        if separator > np.iinfo(dtype.str).max:
            raise file.error(f"no token of {dtype} is {separator}", "Check dtype and separator_id.")
        layout = Layout(
            key=["tokens", dtype.str, separator, start],
            split=partial(split_tokens, dtype.itemsize, separator),
            start=start,
            schema=lambda facts: _schema(dtype),
            parse=partial(_separated, dtype),
        )
        return self._indexed(file, layout)

    def _rows(
        self, file: FileRef, survey: Survey, fields: pa.Schema, start: int, stop: int
    ) -> Rows:
        if isinstance(survey.detail, Found):
            return super()._rows(file, survey, fields, start, stop)
        found: _Found = survey.detail
        if found.megatron is not None:
            values, offsets = found.megatron.read(file, start, stop)
        else:
            width = found.width
            size, total = (
                found.dtype.itemsize,
                (file.num_bytes - found.start) // found.dtype.itemsize,
            )
            last = min(stop * width, total)
            data = read_range(file, found.start + start * width * size, found.start + last * size)
            values = np.frombuffer(data, found.dtype)
            offsets = np.minimum(np.arange(stop - start + 1, dtype=np.int64) * width, len(values))
        return Rows(token_lists(values, offsets))

    def fetched(self, shard: int, start: int, stop: int) -> AbstractContextManager[None]:
        """Fetches documents that a separator ends; the other kinds fetch for themselves."""
        if isinstance(self._open().surveys[shard].detail, Found):
            return super().fetched(shard, start, stop)
        return nullcontext()

    def _refuse(self, file: FileRef, why: str) -> None:
        """Raises SourceError if an option of the layout is given: it would have no effect."""
        for name, value in fields_of(self._layout).items():
            if value is not None:
                raise file.error(f"{name} has no effect: {why}", f"Leave {name} out.")

    def _options(self) -> list[Any]:
        return [
            *super()._options(),
            digest(self._layout),
            sorted(index.digest for index in self._indexes.values()),
        ]

    def shard_identity(self, shard: int) -> str:
        index = self._indexes.get(self.files[shard].path)
        own = [*super()._options(), digest(self._layout), None if index is None else index.digest]
        return digest(
            "tokens", own, self.files[shard].digest, str(self.schema.field(INPUT_IDS).type)
        )


def _separated(dtype: DType, piece: Records, fields: pa.Schema) -> Rows:
    text = piece.data[piece.starts[0] : piece.ends[-1]].tobytes()
    offsets = (np.append(piece.starts[:1], piece.ends) - piece.starts[0]) // dtype.itemsize
    numbers = np.arange(piece.row, piece.row + len(piece.starts), dtype=np.int64)
    return Rows(token_lists(np.frombuffer(text, dtype), offsets), numbers)


def token_lists(values: np.ndarray, offsets: Int64) -> pa.Table:
    native = values.astype(values.dtype.newbyteorder("="), copy=False)
    lists = pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(native))
    return pa.table({INPUT_IDS: lists})


def _schema(dtype: DType) -> pa.Schema:
    return pa.schema(
        [pa.field(INPUT_IDS, pa.large_list(pa.from_numpy_dtype(dtype.newbyteorder("="))))]
    )


def _survey(file: FileRef, found: _Found, rows: int) -> Survey:
    step = max(1, rows * CUT_BYTES // max(1, file.num_bytes))
    return Survey(
        num_rows=rows,
        total_rows=rows,
        cuts=tuple(range(0, rows, step)) or (0,),
        schema=_schema(found.dtype),
        detail=found,
    )


def _npy_header(file: FileRef, head: bytes) -> tuple[DType, tuple[int, ...], int]:
    """Returns dtype, shape, and the byte at which the data begins."""
    if not head.startswith(NPY_MAGIC):
        raise file.error(f"not an .npy file: it begins with {head[:6]!r}", "Check its type.")
    try:
        dtype, shape, fortran, start = npy_header(head)
    except ValueError as error:
        raise file.error(f"damaged .npy header: {error}", "Write the array again.") from None
    if dtype.kind not in "ui" or dtype.itemsize > 8 or (dtype.itemsize > 1 and dtype.str[0] == ">"):
        raise file.error(
            f"an array of {dtype.str} is not an array of tokens", "Write little-endian integers."
        )
    if len(shape) not in (1, 2) or (len(shape) == 2 and (fortran or not shape[1])):
        problem = f"an array of shape {shape}{', in Fortran order' if fortran else ''}"
        raise file.error(problem, "Write it with one or two dimensions, in C order.")
    expected = start + math.prod(shape) * dtype.itemsize
    if file.num_bytes != expected:
        problem = f"{file.num_bytes} bytes, its header says {expected}" + (
            ": truncated" if file.num_bytes < expected else ""
        )
        raise file.error(problem, "Copy or write the file again.")
    return dtype, shape, start


def _index_beside(file: FileRef) -> FileRef | None:
    stem, dot, last = plain_name(file.path).rpartition("/")[2].rpartition(".")
    index = file.beside(f"{stem}.idx") if dot and last.lower() == "bin" else None
    with contextlib.suppress(MissingFileError):
        return resolve(index, file.storage_options)[0] if index is not None else None
    return None
