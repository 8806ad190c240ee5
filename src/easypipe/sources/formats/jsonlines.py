"""JSON files, plain or compressed, one object a line or one array; why a record is not a row.

Elements of an array are found by a scanner, and parsed as lines are, with spaces instead of line
breaks inside them. pyarrow parses a range at once. If it refuses a block, the block is halved until
the bad lines are alone, and these are reported. Whether a row is good depends on that row alone,
never on its neighbours.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.json as pj

from easypipe.core.protocols import Reject, by_row, left_out
from easypipe.core.schema import is_json, is_list, offsets_of
from easypipe.core.text import not_utf8
from easypipe.core.values import Record
from easypipe.sources.base import Rows
from easypipe.sources.formats.jsontypes import Observer, schema_of
from easypipe.sources.formats.records import BOM, Layout, Records, RecordSource, read_head
from easypipe.sources.formats.scanners import (
    BLANK,
    GOOD,
    flag_objects,
    gather,
    split_elements,
    split_lines,
)
from easypipe.sources.refs import FileRef
from easypipe.sources.schemas import json_array, json_text, text_array

FEW = 64  # a refused block of at most this many lines is checked line by line
KIND_NAMES = {
    bool: "true or false",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "an array",
    dict: "an object",
}


class JsonShardedSource(RecordSource):
    """The rows of JSON lines files and of files that are one JSON array.

    Options are those of FileSource. The schema is inferred over whole files (jsontypes.py). A key
    that a row does not have is null. Reasons of rejects: blank_line (benign), unparsable,
    not_an_object, not_a_string, wrong_type, invalid_utf8.
    """

    kind = "json"

    _exact: Sequence[str] = ()  # the columns of Source.exactly

    def _lay_out(self, file: FileRef) -> Layout:
        """Distinguishes lines from one array by the first character that is not white space."""
        head = read_head(file, 1 << 16, self._plain)
        start = len(BOM) if head.startswith(BOM) else 0
        text = head[start:]
        opening = len(text) - len(text.lstrip(b" \t\r\n"))
        is_array = text[opening : opening + 1] == b"["
        name = "jsonarray" if is_array else "jsonlines"
        return Layout(
            key=[name, self.columns, "exact integers"],
            split=split_elements if is_array else split_lines,
            start=start + opening if is_array else start,
            schema=partial(schema_of, exact=self._exact),
            parse=partial(parse, lines_already=not is_array),
            observer=partial(Observer, file.path, self.columns),
            lead=int(is_array),
            closes=is_array,
            lines=not is_array,
            trims=True,
        )

    def exactly(self, columns: Sequence[str]) -> JsonShardedSource:
        clone = self.reopened()
        clone._exact = columns
        return clone


def parse(piece: Records, fields: pa.Schema, *, lines_already: bool) -> Rows:
    """Returns the rows of some records, and the rejects among them.

    Args:
        piece: The records.
        fields: The columns to return.
        lines_already: Whether only line breaks are between the records.
    """
    count = len(piece.starts)
    flags = np.empty(count, np.uint8)
    all_good = flag_objects(piece.data, piece.starts, piece.ends, flags) == count
    good = np.flatnonzero(flags == GOOD)
    if all_good and lines_already:
        text, borders = piece.data, np.append(piece.starts, piece.ends[-1])
    else:
        text = np.empty(int((piece.ends - piece.starts).sum()) + count, np.uint8)
        gather(piece.data, piece.starts, piece.ends, flags, text)
        borders = offsets_of((piece.ends - piece.starts + 1)[good])
    typed = pa.schema([field for field in fields if not is_json(field.type)])
    lines = _Lines(memoryview(text.data), borders, _parse_schema(typed))
    table, bad = lines.parse(len(good))
    if len(typed) < len(fields):
        table, bad = _with_json(table, bad, [piece.record(int(i)) for i in good], fields)
    rejects = [
        _judge(piece.record(int(good[i])), fields, piece.row + int(good[i]), error)
        for i, error in bad
    ]
    rejects += left_out(np.flatnonzero(flags == BLANK) + piece.row, "blank_line", "a blank line")
    wrong = np.flatnonzero((flags != GOOD) & (flags != BLANK)).tolist()
    rejects += [_judge(piece.record(i), fields, piece.row + i, None) for i in wrong]
    kept = np.delete(good, [i for i, _ in bad]) if bad else good
    return Rows(table, kept.astype(np.int64) + piece.row, by_row(rejects))


parse_lines = partial(parse, lines_already=True)


def _with_json(
    table: pa.Table, bad: list[tuple[int, str]], lines: list[bytes], fields: pa.Schema
) -> tuple[pa.Table, list[tuple[int, str]]]:
    """Returns the good rows with the columns that are JSON, and (line, why) of bad ones.

    In such a column a row has its own keys in their order, and its own nulls.

    Args:
        table: The rows that pyarrow parsed, with the other columns.
        bad: (line, why) of the lines that pyarrow refused.
        lines: All lines.
        fields: The columns to return.
    """
    names = [field.name for field in fields if is_json(field.type)]
    why, typed = dict(bad), len(names) < len(fields)
    texts: list[list[str | None]] = [[] for _ in names]
    kept: list[int] = []  # rows of `table`
    at = -1
    # row by row: these columns are objects of any shape, which no Arrow kernel can extract
    for i, line in enumerate(lines):
        if i in why:
            continue
        at += 1
        try:
            row = json.loads(line.decode())  # bytes may hold halves of surrogate pairs
            found = [None if row.get(name) is None else json_text(row[name]) for name in names]
        # AttributeError: the line is not an object
        except (ValueError, RecursionError, AttributeError) as error:
            why[i] = str(error)
            continue
        kept.append(at)
        for column, text in zip(texts, found, strict=True):
            column.append(text)
    if typed and len(kept) < table.num_rows:
        table = table.take(pa.array(kept, pa.int64()))
    arrays = {name: json_array(column) for name, column in zip(names, texts, strict=True)}
    columns = [
        arrays[field.name] if field.name in arrays else table.column(field.name) for field in fields
    ]
    return pa.table(columns, names=fields.names), sorted(why.items())


@dataclass(frozen=True)
class _Lines:
    """JSON lines back to back: line i is text[borders[i]:borders[i + 1]]."""

    text: memoryview
    borders: np.ndarray
    schema: pa.Schema

    def parse(self, count: int) -> tuple[pa.Table, list[tuple[int, str]]]:
        """Returns the rows of the lines that can be parsed, and (line, why) of the other lines."""
        tables: list[pa.Table] = []
        odd = [] if not any(map(pa.types.is_nested, self.schema.types)) else self._odd_keys()
        bad = [(i, "a key is not UTF-8") for i in odd]
        pending = _between(odd, 0, count)
        while pending:
            a, b = pending.pop()
            if a == b:
                continue
            result = self._block(a, b)
            if isinstance(result, pa.Table):
                tables.append(result)
            elif b - a == 1:
                bad.append((a, result))
            elif b - a <= FEW and (wrong := [i for i in range(a, b) if self._is_wrong(i)]):
                bad += [(i, result) for i in wrong]  # faster than halving down to each
                pending += _between(wrong, a, b)
            else:
                middle = (a + b) // 2
                pending += [(middle, b), (a, middle)]  # the first half is looked at first
        return pa.concat_tables(tables) if tables else self.schema.empty_table(), bad

    def _odd_keys(self) -> list[int]:
        """Returns the lines with keys that are not UTF-8 in these columns; pyarrow drops them."""
        found = []
        for line in sorted(not_utf8(text_array(self.borders, self.text))):
            with contextlib.suppress(ValueError, RecursionError, AttributeError):  # as in _is_wrong
                text = bytes(self.text[int(self.borders[line]) : int(self.borders[line + 1])])
                row = json.loads(text.decode(errors="surrogateescape"))
                if any(_has_odd_key(row.get(name)) for name in self.schema.names):
                    found.append(line)
        return found

    def _is_wrong(self, line: int) -> bool:
        """Returns whether a value has another kind than its column, which pyarrow refuses."""
        try:
            row = json.loads(
                bytes(self.text[int(self.borders[line]) : int(self.borders[line + 1])])
            )
            return misfit(row, self.schema) is not None
        except (ValueError, RecursionError, AttributeError):
            return False  # pyarrow reports such lines

    def _block(self, a: int, b: int) -> pa.Table | str:
        """Returns the table of lines `a` to `b`, or why pyarrow refuses them."""
        text = self.text[int(self.borders[a]) : int(self.borders[b])]
        read = pj.ReadOptions(use_threads=False, block_size=len(text) + 64)
        options = pj.ParseOptions(
            explicit_schema=self.schema,
            unexpected_field_behavior="ignore",
            newlines_in_values=False,
        )
        try:
            table = pj.read_json(
                pa.BufferReader(pa.py_buffer(text)), read_options=read, parse_options=options
            )
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            return str(error)
        return table if table.num_rows == b - a else f"{table.num_rows} rows instead of {b - a}"


def _between(lines: list[int], first: int, last: int) -> list[tuple[int, int]]:
    """Returns the ranges between these lines, the last of them first."""
    edges = [first, *(edge for i in lines for edge in (i, i + 1)), last]
    return list(zip(edges[::2], edges[1::2], strict=True))[::-1]


def _has_odd_key(value: object) -> bool:
    """Returns whether a key inside a value has bytes that "surrogateescape" stands for."""
    if isinstance(value, dict):
        odd = any("\udc80" <= c <= "\udcff" for key in value for c in key)
        return odd or any(map(_has_odd_key, value.values()))
    return isinstance(value, list) and any(map(_has_odd_key, value))


def _judge(record: bytes, fields: pa.Schema, row: int, error: str | None) -> Reject:
    """Returns the reject that says in plain words why one record is not a row.

    Args:
        record: The bytes of the record.
        fields: The columns that it should have.
        row: Its number.
        error: What pyarrow said about it; None if it was not asked.
    """

    def reject(reason: str, detail: str) -> Reject:
        # a file may have millions of rows with the same fault
        return Reject(row=row, reason=reason, detail=sys.intern(detail))

    try:
        value = json.loads(record.decode())  # given bytes, it would accept other encodings too
    except UnicodeDecodeError as problem:
        return reject("invalid_utf8", f"not UTF-8 at byte {problem.start} of the line")
    except json.JSONDecodeError as problem:
        hint = (
            "; if this file is one object over many lines, write one object a line"
            if record.strip() in (b"{", b"}")
            else ""
        )
        said = problem.msg.removesuffix(" at").removesuffix(" starting")
        return reject("unparsable", f"not JSON: {said} at character {problem.colno}{hint}")
    except ValueError as problem:  # int() refuses thousands of digits
        return reject("unparsable", f"a number too long: {problem}")
    except RecursionError:
        return reject("unparsable", "nested too deeply")
    if not isinstance(value, dict):
        return reject(
            "not_an_object", f"expected an object, found {KIND_NAMES.get(type(value), 'null')}"
        )
    if field := misfit(value, fields):
        wanted, found = _kind_name(field.type), KIND_NAMES[type(value[field.name])]
        reason = "not_a_string" if wanted == "a string" else "wrong_type"
        wanted += " as in other rows" if reason == "not_a_string" else ""
        return reject(reason, f"column {field.name!r}: expected {wanted}, found {found}")
    if error is None:
        return reject("unparsable", "nested too deeply")
    return reject("unparsable", f"not a row: {re.sub(r' in row [0-9]+$', '', error)}")


def misfit(row: Record, fields: pa.Schema) -> pa.Field | None:
    """Returns the first column whose value has another outer kind than its type, or None.

    pyarrow checks what is inside lists and objects.
    """
    for field in fields:
        value = row.get(field.name)
        if value is None or is_json(field.type):
            continue
        if KIND_NAMES[type(value)] != _kind_name(field.type):
            return field
    return None


def _kind_name(kind: pa.DataType) -> str:
    t = pa.types
    if t.is_boolean(kind):
        return KIND_NAMES[bool]
    if t.is_integer(kind) or t.is_floating(kind):
        return KIND_NAMES[int]
    if t.is_struct(kind):
        return KIND_NAMES[dict]
    if is_list(kind):
        return KIND_NAMES[list]
    return "null" if t.is_null(kind) else KIND_NAMES[str]


def _parse_schema(fields: pa.Schema) -> pa.Schema:
    """Returns the types that pyarrow's JSON reader is asked to return.

    It does not know large_list, and returns invalid arrays for lists of nulls (pyarrow 26).
    """

    def small(kind: pa.DataType) -> pa.DataType:
        if pa.types.is_large_list(kind):
            return pa.list_(
                pa.bool_() if pa.types.is_null(kind.value_type) else small(kind.value_type)
            )
        if pa.types.is_struct(kind):
            return pa.struct([(field.name, small(field.type)) for field in kind.fields])
        return kind

    return pa.schema([(field.name, small(field.type)) for field in fields])
