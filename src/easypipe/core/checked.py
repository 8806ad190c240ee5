# pyright: strict
"""Writes and reads easypipe's own JSON files, which contain a checksum of themselves.

`commit_checked` writes one and `read_checked` reads it; `remember_checked` and `recall_checked` are
for files that can be made again. No other code should parse JSON that easypipe wrote for itself:
after damage to a digit it is still valid JSON, and would be believed.

The file is plain JSON. Its first key, on a separate line, is `xxh3_128`: the XXH3-128, in hex, of
the file's bytes with zeros in place of those 32 digits. Earlier versions wrote a line for each
value.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TypeVar, cast

import pydantic
from xxhash import xxh3_128_hexdigest

from easypipe.core import storage
from easypipe.core.errors import DamagedFileError, MissingFileError
from easypipe.core.remote import StorageOptions
from easypipe.core.values import Json, JsonObject

T = TypeVar("T")
KEY = "xxh3_128"
NAME = "written_as"  # the key of the file's own name, for files whose name identifies the content

_BLANK = b"0" * 32
# The rest is one line. Earlier versions indented it, with the keys of nested objects further in.
_MARK = f'\n "{KEY}": "'.encode()

log = logging.getLogger("easypipe")
# paths that a warning named: a file may be read often before it is made again
_told: set[str] = set()


def checked_json(value: Json) -> bytes:
    """Returns the bytes of such a file."""
    text = json.dumps({**value}, sort_keys=True)  # indenting takes ten times as long
    rest = b'",\n ' + text[1:].encode() if value else b'"}'
    data = bytearray(b"".join((b"{", _MARK, _BLANK, rest, b"\n")))
    start = 1 + len(_MARK)  # filled in place, as the record of a bad file may be large
    data[start : start + len(_BLANK)] = xxh3_128_hexdigest(data).encode()
    return bytes(data)


def commit_checked(
    path: str | Path, value: Json, storage_options: StorageOptions = None
) -> storage.Stamp:
    """Commits `value`, whose keys are strings, for `read_checked`.

    Raises:
        StorageError: It cannot be written.
    """
    return storage.commit_bytes(path, checked_json(value), storage_options)


def remember_checked(
    path: str | Path, value: Json, storage_options: StorageOptions = None, *, synced: bool = True
) -> storage.Stamp:
    """Commits `value` for `recall_checked`, which rejects it under a file name other than `path`'s.

    Args:
        path: The file.
        value: A JSON object.
        storage_options: Passed to fsspec.
        synced: As in `storage.commit_file`.

    Raises:
        StorageError: It cannot be written.
    """
    data = checked_json({**value, NAME: _name(path)})
    return storage.commit_bytes(path, data, storage_options, synced=synced)


def read_checked(
    path: str | Path,
    storage_options: StorageOptions = None,
    *,
    older: Collection[str] | None = None,
) -> JsonObject:
    """Returns what `commit_checked` wrote.

    Args:
        path: The file.
        storage_options: Passed to fsspec.
        older: If given, a JSON object without a checksum, as earlier versions wrote it, is also
            accepted if it has no other keys than these.

    Raises:
        MissingFileError: There is no file.
        DamagedFileError: Its bytes have changed since they were written.
        StorageError: It cannot be read.
    """
    return parse_checked(storage.read_bytes(path, storage_options), path, older=older)


def parse_checked(
    data: bytes, path: str | Path, *, older: Collection[str] | None = None
) -> JsonObject:
    """Does what `read_checked` does, with the bytes `data` of the file at `path`."""
    before, mark, after = data.partition(_MARK)
    blanked = b"".join((before, mark, _BLANK, after[len(_BLANK) :]))
    if mark and after[: len(_BLANK)] != xxh3_128_hexdigest(blanked).encode():
        raise _damaged(path, "its checksum does not match its content")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"it is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise _damaged(path, "it is not a JSON object")
    found = cast("JsonObject", value)
    if not mark and (older is None or not found.keys() <= set(older)):
        raise _damaged(
            path,
            f"it has no checksum under {KEY!r}, or was written by an earlier version of easypipe",
        )
    found.pop(KEY, None)
    return found


def recall_checked(
    path: str | Path,
    parse: Callable[[JsonObject], T],
    *,
    what: str,
    storage_options: StorageOptions = None,
    older: Collection[str] | None = None,
) -> T | None:
    """Returns `parse` of what `remember_checked` wrote; if that is None, the caller makes it again.

    Args:
        path: The file.
        parse: Makes the result from the JSON object; it may raise LookupError, OverflowError,
            TypeError, ValueError or AttributeError.
        what: A description of the file for the warning, such as "the plan".
        storage_options: Passed to fsspec.
        older: As in `read_checked`.

    Returns:
        The result of `parse`; None if the file does not exist or, with a warning, if it is damaged.

    Raises:
        StorageError: The file cannot be read, which says nothing about its content.
    """
    try:
        value = parse_checked(storage.read_bytes(path, storage_options), path, older=older)
        if (name := value.pop(NAME, _name(path))) != _name(path):  # earlier versions wrote none
            raise _damaged(path, f"it was written as {name}")
        return parse(value)
    except MissingFileError:
        return None
    except DamagedFileError as error:
        why = error.problem
    # a record may be of any shape
    except (LookupError, OverflowError, TypeError, ValueError, AttributeError) as error:
        why = f"damaged: it does not hold what this version of easypipe writes: {error!r}"
    if str(path) not in _told:
        _told.add(str(path))
        log.warning("%s %s is rebuilt: %s", what, path, why)
    return None


def whole(value: object) -> int:
    """Returns an integer value of a file unchanged.

    Raises:
        TypeError: The value is not an integer; int() would convert it.
    """
    if type(value) is not int:
        raise TypeError(f"{value!r} is not a whole number")
    return value


def shaped(cls: type[T], values: Json) -> T:
    """Returns `values` as a dataclass `cls`, checked against the types of its fields.

    Even an intact file may have been written by another program.

    Raises:
        ValueError: The type of a value is not that of its field; the error names the first.
    """
    try:
        return _shape(cls).validate_python(values)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"{where}: {first['msg']}") from None


@functools.cache
def _shape(cls: type[T]) -> pydantic.TypeAdapter[T]:
    return pydantic.TypeAdapter(cls)


def _name(path: str | Path) -> str:
    return str(path).rpartition("/")[2]


def _damaged(path: str | Path, why: str) -> DamagedFileError:
    return DamagedFileError(
        at=str(path), problem=f"damaged: {why}", fix="Delete the file and run again."
    )
