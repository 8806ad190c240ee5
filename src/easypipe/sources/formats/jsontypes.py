"""Column types of JSON rows: one schema for a whole file, from a scan of its keys and values.

Null gives way to any type. Numbers are int64, or float64 if one of them is not an integer. A column
of several kinds has the type of lists or objects if these came first. Otherwise it has that of
strings if there are any, or that of the kind that came first. Rows of another kind are bad rows. If
no type holds all numbers of a column exactly, or the contents of its lists or objects have no
common type, more than MAX_INNER keys or more than MAX_LEVELS levels, the column is kept as JSON.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.json as pj

from easypipe.core.errors import SchemaError
from easypipe.core.jit import jit
from easypipe.core.schema import changes_json, holds, is_json, schema_of_text, schema_text
from easypipe.core.values import Int32, Int64, JsonObject, UInt8, UInt64
from easypipe.sources.formats.scanners import (
    BLANK,
    GOOD,
    ODD,
    skip_nested,
    skip_space,
    skip_string,
)
from easypipe.sources.schemas import JSON, TypeConflict, merge_types, plain_type

# Kernels that scan bytes for the top-level keys of JSON objects, and the kinds of their values.


# ruff: noqa: SIM110 - kernels spell out what numba compiles best


# kinds of JSON values, as bits
NULL, BOOL, INT, FLOAT, STRING, OBJECT, ARRAY = 1, 2, 4, 8, 16, 32, 64
WIDE = 128  # beside INT or FLOAT: an integer that float64, or that int64, does not hold
NESTED = OBJECT | ARRAY

MAX_KEYS = 4096
KEY_BYTES = 1 << 20
TABLE = 4 * MAX_KEYS
# Of the objects in one column, each key at each place counted once. An Arrow type gives every row
# a cell for every key, so rows with keys of their own would take their square in memory.
MAX_INNER = 512
MAX_LEVELS = 60  # of lists and objects in a column; Arrow IPC writes up to 63
INNER_TABLE = 128 * 2 * MAX_INNER  # of all columns of a file together half as many keys

_QUOTE = 34
_LARGE = re.compile(rb"[\[,:\s]-?(\d{20}|9[2-9]\d{17})")  # integers that int64 may not hold


class Keys(NamedTuple):
    """The top-level keys of objects, and the kinds of their values, filled by observe_keys.

    Keys are numbered in order of first appearance.

    Attributes:
        counts: Int64[3]: keys, bytes of `text`, whether keys were left out for lack of room.
        table: A hash table of key numbers; -1 is free.
        spans: Key k is text[spans[k] : spans[k + 1]].
        text: The raw bytes of keys, as between their quotes.
        kinds: For each key, all kinds of values seen.
        first: For each key, the first kind seen that is not NULL.
    """

    counts: Int64
    table: Int32
    spans: Int32
    text: UInt8
    kinds: UInt8
    first: UInt8


def new_keys() -> Keys:
    """Returns Keys without any key."""
    return Keys(
        np.zeros(3, np.int64),
        np.full(TABLE, -1, np.int32),
        np.zeros(MAX_KEYS + 1, np.int32),
        np.zeros(KEY_BYTES, np.uint8),
        np.zeros(MAX_KEYS, np.uint8),
        np.zeros(MAX_KEYS, np.uint8),
    )


class Inner(NamedTuple):
    """The keys inside the objects of columns, counted by gather_members.

    Attributes:
        counts: Int32[MAX_KEYS], how many keys each column has; above MAX_INNER it is kept as JSON.
        left: UInt8[MAX_KEYS], 1 for columns that are left out, whatever they hold.
        table: A hash set of hashes of keys and of the places of their objects; 0 is free.
        size: Int64[1], how many hashes are in `table`.
        bases: UInt64[MAX_LEVELS + 1], the places of the open brackets.
        places: The same of the values in them.
    """

    counts: Int32
    left: UInt8
    table: UInt64
    size: Int64
    bases: UInt64
    places: UInt64


def new_inner() -> Inner:
    """Returns an Inner without any key."""
    return Inner(
        np.zeros(MAX_KEYS, np.int32),
        np.zeros(MAX_KEYS, np.uint8),
        np.zeros(INNER_TABLE, np.uint64),
        np.zeros(1, np.int64),
        np.zeros(MAX_LEVELS + 1, np.uint64),
        np.zeros(MAX_LEVELS + 1, np.uint64),
    )


@jit
def observe_keys(data: UInt8, starts: Int64, ends: Int64, flags: UInt8, keys: Keys) -> None:
    """Adds the top-level keys of GOOD records and their values to Keys, and flags all records.

    Keys beyond MAX_KEYS set counts[2] and are not recorded.
    """
    words = data[: len(data) // 8 * 8].view(np.uint64)
    line_keys = np.empty(MAX_KEYS, np.int32)
    line_kinds = np.empty(MAX_KEYS, np.uint8)
    for r in range(len(starts)):
        i, end = starts[r], ends[r]
        i = skip_space(data, i, end)
        if i == end:
            flags[r] = BLANK
            continue
        flags[r] = ODD
        if data[i] != 123:
            continue
        i += 1
        here, expect, ok, guess = 0, False, False, 0
        while True:
            i = skip_space(data, i, end)
            if i >= end or data[i] != _QUOTE:
                ok = i < end and data[i] == 125 and not expect
                break
            key = i + 1
            i = skip_string(data, words, key, end)
            if i < 0:
                break
            key_end = i - 1
            i = skip_space(data, i, end)
            if i >= end or data[i] != 58:  # :
                break
            kind, i = _value(data, words, skip_space(data, i + 1, end), end)
            if i < 0:
                break
            slot = _slot(data, key, key_end, guess, keys)
            guess = slot + 1
            if slot >= 0 and here < MAX_KEYS:
                line_keys[here] = slot
                line_kinds[here] = kind
                here += 1
            i = skip_space(data, i, end)
            if i < end and data[i] == 44:
                i += 1
                expect = True
            else:
                ok = i < end and data[i] == 125
                break
        if ok and skip_space(data, i + 1, end) == end:
            flags[r] = GOOD
            for k in range(here):
                keys.kinds[line_keys[k]] |= line_kinds[k]
                if keys.first[line_keys[k]] <= NULL:
                    keys.first[line_keys[k]] = line_kinds[k]


@jit
def gather_members(
    data: UInt8,
    starts: Int64,
    ends: Int64,
    flags: UInt8,
    keys: Keys,
    inner: Inner,
    out: UInt8,
) -> int:
    """Copies the members of GOOD records to `out`, an object a line, and counts the keys in them.

    Args:
        data: The bytes of the file.
        starts: Where the records begin.
        ends: Where they end.
        flags: Those that observe_keys set.
        keys: The Keys that it filled.
        inner: Counts by column, which grow. Members of a column that has too many are left out.
        out: UInt8 with room for the records and their line breaks.

    Returns:
        How many bytes were written.
    """
    words = data[: len(data) // 8 * 8].view(np.uint64)
    at = 0
    for r in range(len(starts)):
        if flags[r] != GOOD:
            continue
        end, guess, opened = ends[r], 0, at
        i = skip_space(data, skip_space(data, starts[r], end) + 1, end)
        out[at] = 123
        at += 1
        while data[i] == _QUOTE:
            begin = i
            i = skip_string(data, words, begin + 1, end)
            slot = _slot(data, begin + 1, i - 1, guess, keys)
            guess = slot + 1
            value = skip_space(data, skip_space(data, i, end) + 1, end)
            kind, i = _value(data, words, value, end)
            if slot >= 0 and kind & NESTED:
                _count_inner(data, words, value, i, slot, inner)
            if slot >= 0 and not inner.left[slot] and inner.counts[slot] <= MAX_INNER:
                if at > opened + 1:
                    out[at] = 44
                    at += 1
                for k in range(begin, i):
                    out[at] = 32 if data[k] == 10 or data[k] == 13 else data[k]
                    at += 1
            i = skip_space(data, i, end)
            if data[i] == 44:
                i = skip_space(data, i + 1, end)
        out[at] = 125
        out[at + 1] = 10
        at += 2
    return at


@jit
def _count_inner(data: UInt8, words: UInt64, i: int, end: int, slot: int, inner: Inner) -> None:
    """Adds the keys of the objects in the value `data[i:end]` to those of its column.

    All items of a list have one place. A value of too many levels counts as too many keys.
    """
    depth, bases, places = 0, inner.bases, inner.places
    places[0] = np.uint64(slot + 1) * np.uint64(0x9E3779B97F4A7C15)
    while i < end and inner.counts[slot] <= MAX_INNER:
        c = data[i]
        if c == _QUOTE:
            key = i + 1
            i = skip_string(data, words, key, end)
            behind = skip_space(data, i, end)
            if behind < end and data[behind] == 58:  # :
                places[depth] = _added(data, key, i - 1, bases[depth], slot, inner)
                i = behind + 1
            continue
        if c == 123 or c == 91:
            depth += 1
            if depth > MAX_LEVELS:
                inner.counts[slot] = MAX_INNER + 1
                break
            bases[depth] = places[depth] = places[depth - 1]
        elif c == 125 or c == 93:
            depth -= 1
        i += 1


@jit
def _added(
    data: UInt8, key: int, key_end: int, base: np.uint64, slot: int, inner: Inner
) -> np.uint64:
    """Returns the hash of a key in the object at `base`, after adding it if it is new."""
    mixed = (base ^ np.uint64(255)) * np.uint64(1099511628211)
    for i in range(key, key_end):
        mixed = (mixed ^ np.uint64(data[i])) * np.uint64(1099511628211)
    mixed |= np.uint64(1)  # 0 is free
    place = np.int64(mixed >> np.uint64(32)) % INNER_TABLE
    while inner.table[place]:
        if inner.table[place] == mixed:
            return mixed
        place = (place + 1) % INNER_TABLE
    if inner.size[0] >= INNER_TABLE // 2:
        inner.counts[slot] = MAX_INNER + 1
        return mixed
    inner.table[place] = mixed
    inner.size[0] += 1
    inner.counts[slot] += 1
    return mixed


@jit
def _value(data: UInt8, words: UInt64, i: int, end: int) -> tuple[int, int]:
    """Returns the kind of the value at `i`, and where it ends; -1 if it is not a value."""
    if i >= end:
        return 0, -1
    c = data[i]
    if c == _QUOTE:
        return STRING, skip_string(data, words, i + 1, end)
    if c == 123 or c == 91:
        return OBJECT if c == 123 else ARRAY, skip_nested(data, words, i, end)
    return _scalar(data, i, end)


@jit
def _scalar(data: UInt8, i: int, end: int) -> tuple[int, int]:
    """Returns the kind of a literal or number, and where it ends; -1 if it is neither."""
    c = data[i]
    most = np.uint64(9223372036854775807)
    if c == 116 or c == 102 or c == 110:  # t f n
        kind = NULL if c == 110 else BOOL
        while i < end and 97 <= data[i] <= 122:
            i += 1
        return kind, i
    if c == 45:
        i += 1
        most += np.uint64(1)
    digits, value = 0, np.uint64(0)
    while i < end and 48 <= data[i] <= 57:
        if digits < 19:
            value = value * np.uint64(10) + np.uint64(data[i] - 48)
        digits += 1
        i += 1
    if digits == 0:
        return 0, -1
    kind = INT
    if digits > 19 or value > most:
        kind = FLOAT | WIDE
    elif value > np.uint64(1 << 53) and np.uint64(np.float64(value)) != value:
        kind = INT | WIDE
    if i < end and (data[i] == 46 or data[i] == 101 or data[i] == 69):  # . e E
        kind = FLOAT
        while i < end and (
            48 <= data[i] <= 57
            or data[i] == 46
            or data[i] == 101
            or data[i] == 69
            or data[i] == 43
            or data[i] == 45
        ):
            i += 1
    return kind, i


@jit
def _slot(data: UInt8, key: int, key_end: int, guess: int, keys: Keys) -> int:
    """Returns the number of a key, in order of first appearance; -1 if the table is full.

    Lines mostly repeat their keys, so `guess` is tried first.

    Args:
        data: The bytes of the file.
        key: Where the key begins, after its quote.
        key_end: Where it ends.
        guess: The number that it probably has.
        keys: The Keys, to which a new key is added.
    """
    counts, table, spans, text = keys.counts, keys.table, keys.spans, keys.text
    length = key_end - key
    if guess < counts[0] and _same(data, key, length, guess, spans, text):
        return guess
    mixed = np.uint64(1469598103934665603)  # FNV-1a, 64 bits
    for i in range(key, key_end):
        mixed = (mixed ^ np.uint64(data[i])) * np.uint64(1099511628211)
    place = np.int64(mixed >> np.uint64(32)) % TABLE
    while table[place] >= 0:
        if _same(data, key, length, table[place], spans, text):
            return table[place]
        place = (place + 1) % TABLE
    slot = counts[0]
    if slot >= MAX_KEYS or counts[1] + length > KEY_BYTES:
        counts[2] = 1
        return -1
    for i in range(length):
        text[counts[1] + i] = data[key + i]
    counts[0] += 1
    counts[1] += length
    spans[slot + 1] = counts[1]
    table[place] = slot
    return slot


@jit
def _same(data: UInt8, key: int, length: int, slot: int, spans: Int32, text: UInt8) -> bool:
    begin = spans[slot]
    if spans[slot + 1] - begin != length:
        return False
    for i in range(length):
        if text[begin + i] != data[key + i]:
            return False
    return True


class Observer:
    """Collects column types from records that are shown in order.

    Args:
        path: The file, for errors.
        columns: The columns whose contents matter; None means all.
    """

    def __init__(self, path: str, columns: tuple[str, ...] | None) -> None:
        self._path = path
        self._columns = columns
        self._keys, self._inner = new_keys(), new_inner()
        # added first, so that they are found even if a file has more keys than the table holds
        if columns is not None:
            for name in columns:
                row = json.dumps({name: None}, ensure_ascii=False).encode()
                self._observe(
                    np.frombuffer(row, np.uint8), np.zeros(1, np.int64), np.array([len(row)])
                )
            self._keys.kinds[:] = 0
        self._nested: dict[str, pa.DataType] = {}

    def __call__(self, data: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> None:
        """Adds the types of some records: record i is `data[starts[i]:ends[i]]`."""
        flags = self._observe(data, starts, ends)
        if not (self._keys.kinds[: self._keys.counts[0]] & NESTED).any():
            return
        names, wide = self._names(), self._inner.counts > MAX_INNER
        known = {names[slot] for slot in np.flatnonzero(wide).tolist()}
        nested = [name for name, every, _ in self._columns_seen() if every & NESTED]
        wanted = [
            name
            for name in nested
            if name not in known and (self._columns is None or name in self._columns)
        ]
        if not wanted:
            return
        many = len(names) > MAX_INNER  # the other columns are as many cells
        self._inner.left[: len(names)] = [many and name not in wanted for name in names]
        out = np.empty(int((ends - starts).sum()) + len(starts), np.uint8)
        size = gather_members(data, starts, ends, flags, self._keys, self._inner, out)
        found = nested_types(out[:size].tobytes(), wanted)
        for slot in np.flatnonzero(self._inner.counts > MAX_INNER).tolist():
            if names[slot] in wanted:
                found[str(names[slot])] = JSON
        for name, kind in found.items():
            if not pa.types.is_nested(kind) and not is_json(kind):
                continue  # here the column holds another kind than elsewhere in the file
            before = self._nested.get(name)
            self._nested[name] = kind if before is None else merge_json(before, kind)

    def facts(self) -> JsonObject:
        """Returns the types that were found, as JSON.

        Raises:
            SchemaError: There are more columns than the table holds, and all are to be read.
        """
        if self._keys.counts[2] and self._columns is None:
            raise SchemaError(
                at=self._path,
                problem=f"its rows have more than {MAX_KEYS} different keys",
                fix="Name those to read with columns=[...] of a source in Python; a config without "
                "format_callback reads only those that its options name.",
            )
        nested = pa.schema(list(self._nested.items()))
        return {
            "columns": self._columns_seen(),
            "nested": schema_text(nested),
        }

    def _observe(self, data: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        data = data.view()
        data.flags.writeable = False
        flags = np.empty(len(starts), np.uint8)
        observe_keys(data, starts, ends, flags, self._keys)
        return flags

    def _columns_seen(self) -> list[tuple[str, int, int]]:
        """Returns (name, all kinds, first kind) of every column.

        Keys that differ only in their escapes are one column.
        """
        found: dict[str, tuple[int, int]] = {}
        for slot, name in enumerate(self._names()):
            every, first = int(self._keys.kinds[slot]), int(self._keys.first[slot])
            if name is None or not every:
                continue
            before = found.get(name, (0, 0))
            found[name] = (before[0] | every, before[1] if before[1] > NULL else first)
        return [(name, every, first) for name, (every, first) in found.items()]

    def _names(self) -> list[str | None]:
        """Returns the column of every key; None for a key that is not text.

        It has bad escapes or bytes that are not UTF-8: reading rejects the rows that hold it.
        """
        names: list[str | None] = []
        keys = self._keys
        for slot in range(int(keys.counts[0])):
            raw = keys.text[keys.spans[slot] : keys.spans[slot + 1]].tobytes()
            try:
                name = json.loads(b'"' + raw + b'"')
                name.encode()
                names.append(name)
            except ValueError:
                names.append(None)
        return names


def schema_of(facts: JsonObject, exact: Sequence[str] = (), *, known: bool = True) -> pa.Schema:
    """Returns the schema that an Observer's facts describe.

    Args:
        facts: What `Observer.facts` returned.
        exact: Columns whose objects and mixed numbers are kept as JSON, also in lists: an Arrow
            type has one order of keys and one type of number for all rows, and no nulls of single
            rows.
        known: Whether the facts cover all rows. If not, all lists of `exact` columns are JSON,
            because later rows may have others in them.
    """
    nested = schema_of_text(facts["nested"])
    fields = []
    for name, every, first in facts["columns"]:
        if every & STRING and not first & NESTED:
            kind = pa.large_string()
        elif first & (INT | FLOAT):
            mixed = every & FLOAT and (every & WIDE or (name in exact and every & INT))
            kind = JSON if mixed else pa.float64() if every & FLOAT else pa.int64()
        elif first & NESTED:
            kind = nested.field(name).type if name in nested.names else pa.null()
            if name in exact and (not known or changes_json(kind)):
                kind = JSON
        else:
            kind = pa.bool_() if first == BOOL else pa.null()
        fields.append(pa.field(name, kind))
    return pa.schema(fields)


def nested_types(lines: bytes, names: list[str]) -> dict[str, pa.DataType]:
    """Returns the types of these columns in JSON lines; lines that do not parse are passed over."""
    try:
        options = pj.ReadOptions(use_threads=False, block_size=len(lines) + 64)
        table = pj.read_json(pa.BufferReader(lines), read_options=options)
        columns = table.schema.names
        found = {name: table.schema.field(name).type for name in names if name in columns}
        plain = {name: _without_times(kind) for name, kind in found.items()}
    except (pa.ArrowInvalid, UnicodeDecodeError):  # the latter: a key is not UTF-8
        return _slow_types(lines, names)
    # pyarrow makes a float64 of an integer that int64 does not hold
    if any(holds(kind, pa.types.is_floating) for kind in found.values()) and _LARGE.search(lines):
        return _slow_types(lines, names)
    return plain


def _slow_types(lines: bytes, names: list[str]) -> dict[str, pa.DataType]:
    """Finds the types row by row, for a block in which types clash or a line is broken."""
    found: dict[str, pa.DataType] = {}
    for row in _objects(io.BytesIO(lines)):
        for name in names:
            if isinstance(row.get(name), dict | list):
                try:
                    kind = _type_of(row[name])
                except TypeConflict:
                    kind = JSON
                except UnicodeEncodeError:  # a key is half of a surrogate pair: a bad row
                    continue
                found[name] = merge_json(found[name], kind) if name in found else kind
    return found


def _objects(lines: Iterable[bytes]) -> Iterator[JsonObject]:
    """Yields the objects of JSON lines, without lines that do not parse (reading rejects them)."""
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(row := json.loads(line), dict):
                yield row


def merge_json(first: pa.DataType, second: pa.DataType) -> pa.DataType:
    """Returns the type of a nested column of both; JSON if no type holds both inside.

    Lists and objects in the same place inside it are such a conflict, too. But if the column itself
    has both, the kind that came first stays, and rows of the other kind are bad rows.
    """
    t = pa.types
    if is_json(first) or is_json(second):
        return JSON
    if t.is_nested(first) and t.is_nested(second) and t.is_struct(first) != t.is_struct(second):
        return first
    try:
        return merge_types(first, second)
    except TypeConflict:
        return JSON


def _without_times(kind: pa.DataType) -> pa.DataType:
    """Returns a plain type with text instead of times.

    The JSON reader parses strings that look like times as times, so the type would depend on the
    rows in the block.
    """
    t = pa.types
    times = lambda one: t.is_timestamp(one) or t.is_time(one) or t.is_date(one)  # noqa: E731
    return plain_type(kind, lambda one: pa.large_string() if times(one) else one)


def _type_of(value: Any) -> pa.DataType:
    """Returns the Arrow type of a JSON value.

    Raises:
        TypeConflict: Types inside are mixed, or int64 does not hold an integer.
    """
    if value is None:
        return pa.null()
    if isinstance(value, bool):
        return pa.bool_()
    if isinstance(value, int):
        if not -(1 << 63) <= value < 1 << 63:
            raise TypeConflict(f"{value} and int64")
        return pa.int64()
    if isinstance(value, float):
        return pa.float64()
    if isinstance(value, str):
        return pa.large_string()
    if isinstance(value, dict):
        return pa.struct([(key, _type_of(item)) for key, item in value.items()])
    return pa.large_list(_merged(_type_of(item) for item in value))


def _merged(kinds: Iterable[pa.DataType]) -> pa.DataType:
    """Returns the common type; raises TypeConflict if there is none."""
    result = pa.null()
    for kind in kinds:
        result = merge_types(result, kind)
    return result
