"""FORMATS: which reader opens a file, by extension or by `type=`; says why a file is not read."""

from __future__ import annotations

import os
from typing import Unpack

from easypipe.core.errors import ConfigError, SourceError, require, require_known
from easypipe.core.values import Arguments
from easypipe.sources.base import FileOptions, FileSource
from easypipe.sources.external.token_files import TokenFilesConfig, TokenShardedSource
from easypipe.sources.files import DataFiles, resolve
from easypipe.sources.formats.arrayrecord import ArrayRecordShardedSource
from easypipe.sources.formats.arrow import ArrowShardedSource
from easypipe.sources.formats.csv import CsvShardedSource
from easypipe.sources.formats.jsonlines import JsonShardedSource
from easypipe.sources.formats.mds import MdsShardedSource
from easypipe.sources.formats.parquet import ParquetShardedSource
from easypipe.sources.formats.txt import TextShardedSource, TextUnit
from easypipe.sources.formats.webdataset import WebDatasetShardedSource
from easypipe.sources.refs import ALL_EXTENSIONS, COMPRESSIONS, TOKEN_EXTENSIONS, format_of

# compressions and archives that are refused by name
UNREAD = (".xz", ".lzma", ".zip", ".tgz", ".7z", ".lz4", ".br", ".rar")

FORMATS: dict[str, type[FileSource]] = {
    "parquet": ParquetShardedSource,
    "arrow": ArrowShardedSource,
    "json": JsonShardedSource,
    "csv": CsvShardedSource,
    "txt": TextShardedSource,
    "tokens": TokenShardedSource,
    "arrayrecord": ArrayRecordShardedSource,
    "mds": MdsShardedSource,
    "webdataset": WebDatasetShardedSource,
}


def open_files(
    data_files: DataFiles,
    type: str | None = None,  # named as in DatasetConfig
    *,
    token_files: TokenFilesConfig | None = None,
    text_unit: TextUnit | None = None,
    **options: Unpack[FileOptions],
) -> FileSource:
    """Returns a source of files of one format.

    Args:
        data_files: Paths, globs, folders or URLs.
        type: The format, a key of FORMATS; None takes the format of the extensions.
        token_files: How documents are laid out in files of tokens.
        text_unit: What a row of text files is; None takes a line.
        options: Those of FileSource.

    Raises:
        MissingFileError: A file does not exist.
        SourceError: An extension is unknown, or the files have several formats.
        ConfigError: The type is unknown, or an option has no effect.
    """
    if type is not None:
        require_known(type, FORMATS, "type", f"{type!r} is not a file format")
    if type is None:
        by_format: dict[str | None, str] = {}
        named, data_files = data_files, resolve(data_files, options.get("storage_options"))
        for file in data_files:
            by_format.setdefault(format_of(file.path), file.path)
        if None in by_format:
            raise _unknown(by_format[None])
        if len(by_format) > 1:
            raise SourceError(
                at=str(named),
                problem="files of several formats: "
                + ", ".join(f"{path} ({kind})" for kind, path in by_format.items()),
                fix="Give one format by type= or by a glob, and the others as datasets of their "
                "own.",
            )
        type = str(next(iter(by_format)))
        if type == "mds":  # if a folder is named, its index says which shards must exist
            data_files = named
    more: Arguments = {}
    if type in TOKEN_EXTENSIONS:
        more["layout"] = token_files
    elif token_files is not None:
        raise ConfigError(
            at="token_files", problem=f"has no effect on {type} files", fix="Leave it out."
        )
    require_text_files(text_unit, type)
    if text_unit is not None:
        more["text_unit"] = text_unit
    return FORMATS[type](data_files, **options, **more)


def require_text_files(text_unit: TextUnit | None, kind: str) -> None:
    """Raises ConfigError if a unit of text is named for files of another format."""
    require(
        text_unit is None or kind == "txt",
        "text_unit",
        f"has no effect on {kind} files",
        "Leave it out: it is for text files.",
    )


def _unknown(path: str) -> SourceError:
    """Returns the error for a file whose extension is not that of a format, with what to do."""
    stem, ending = os.path.splitext(path)
    if ending.lower() in UNREAD:
        problem = f"{ending} files are not read"
        return SourceError(
            at=path,
            problem=problem,
            have=COMPRESSIONS,
            fix="Unpack it, or compress it as one of those.",
        )
    if ending.lower() == ".idx":
        return SourceError(
            at=path,
            problem="an index holds no tokens",
            fix=f"Name the file beside it: {os.path.basename(stem)}.bin.",
        )
    endings = [ending for endings in ALL_EXTENSIONS.values() for ending in endings]
    return SourceError(
        at=path,
        problem="its extension names no format",
        have=endings,
        fix="Give the format by type=.",
    )
