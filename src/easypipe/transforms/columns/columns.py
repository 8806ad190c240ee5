# pyright: reportAttributeAccessIssue=false
# (pyarrow creates the functions of its compute module at import)
"""Transforms that run in Arrow: Rename, Select, Drop, Extract, Combine, ClassNames, FilterNonEmpty.

No row becomes a Python object. Every `narrow` leaves out what the wanted columns do not need. So
`Rename(...) >> Combine(...)` before tokenizing reads two of a file's fifty columns.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from easypipe.core.class_names import classes_of, named
from easypipe.core.config import digest
from easypipe.core.errors import (
    ConfigError,
    SourceError,
    require,
    require_columns,
    require_known,
)
from easypipe.core.schema import ROW_NUMBER, is_json, is_list, list_sizes
from easypipe.core.text import has_text
from easypipe.core.values import JsonValue
from easypipe.transforms.chat.columns import decoded_of
from easypipe.transforms.columns.base import ColumnTransform, Narrowed, Rows, overlaid

_TEXT = pa.large_string()


class Rename(ColumnTransform):
    """A transform that gives columns new names: `Rename({"old": "new"})`.

    The other columns stay, and so does the order.

    Raises:
        ConfigError: The names are not two different strings.
        SourceError: A column does not exist, or a name is taken.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        _require_names(names, "Rename", 'Write Rename({"old": "new"}).')
        require(
            len(set(names.values())) == len(names),
            "Rename",
            f"two columns cannot have one name: {dict(names)}",
            "Give each its own.",
        )
        self.names = dict(names)

    @property
    def fingerprint(self) -> str:
        return digest("rename", sorted(self.names.items()))

    def columns(self, before: pa.Schema) -> pa.Schema:
        require_columns(list(self.names), before.names, str(self))
        for old, new in self.names.items():
            if new in before.names and new not in self.names:
                fix = f"Drop {new!r} first, or choose another name for {old!r}."
                raise self.error(f"there is a column {new!r} already", fix, have=before.names)
        return pa.schema(
            [field.with_name(self.names.get(field.name, field.name)) for field in before]
        )

    def rows(self, rows: Rows) -> Rows:
        names = [self.names.get(name, name) for name in rows.batch.schema.names]
        return Rows(rows.batch.rename_columns(names), rows.numbers)

    def narrow(self, columns: Sequence[str], before: pa.Schema) -> Narrowed:
        old = {new: old for old, new in self.names.items()}
        kept = {old[name]: name for name in columns if name in old}
        needs = [old.get(name, name) for name in columns]
        return (Rename(kept) if kept else Select(needs)), needs

    def __repr__(self) -> str:
        return f"Rename({self.names})"


class Select(ColumnTransform):
    """A transform that keeps only these columns, in this order: `Select("text", "id")`."""

    def __init__(self, *names: str | Sequence[str]) -> None:
        self.names = column_names(names, "Select")

    @property
    def fingerprint(self) -> str:
        return digest("select", self.names)

    def columns(self, before: pa.Schema) -> pa.Schema:
        require_columns(self.names, before.names, str(self))
        return pa.schema([before.field(name) for name in self.names])

    def rows(self, rows: Rows) -> Rows:
        return Rows(rows.batch.select(list(self.names)), rows.numbers)

    def narrow(self, columns: Sequence[str], before: pa.Schema) -> Narrowed:
        return Select(columns), columns

    def __repr__(self) -> str:
        return f"Select({_shown(self.names)})"


class Drop(ColumnTransform):
    """A transform that removes columns: `Drop("metadata")`.

    Raises:
        SourceError: No column would be left.
    """

    def __init__(self, *names: str | Sequence[str]) -> None:
        self.names = column_names(names, "Drop")

    @property
    def fingerprint(self) -> str:
        return digest("drop", sorted(self.names))

    def columns(self, before: pa.Schema) -> pa.Schema:
        require_columns(self.names, before.names, str(self))
        if len(self.names) == len(before):
            raise self.error("no column would be left", "Keep at least one.", have=before.names)
        return pa.schema([field for field in before if field.name not in self.names])

    def rows(self, rows: Rows) -> Rows:
        return Rows(rows.batch.drop_columns(list(self.names)), rows.numbers)

    def narrow(self, columns: Sequence[str], before: pa.Schema) -> Narrowed:
        return Select(columns), columns

    def __repr__(self) -> str:
        return f"Drop({_shown(self.names)})"


class Extract(ColumnTransform):
    """A transform that takes columns out of nested ones.

    `Extract({"answer": "choices.0.message.content", "last": "turns.-1"})`

    A path goes through keys of structs and positions in lists, counted from the end if they are
    negative. The result for a list that is too short is null, as is anything inside a null. A new
    column replaces one of the same name.

    Raises:
        SourceError: A key does not exist.
    """

    def __init__(self, paths: Mapping[str, str]) -> None:
        _require_names(paths, "Extract", 'Write Extract({"text": "a.b.0"}).')
        self.paths = dict(paths)

    @property
    def fingerprint(self) -> str:
        return digest("extract", list(self.paths.items()))

    def columns(self, before: pa.Schema) -> pa.Schema:
        made = self._extracted(pa.RecordBatch.from_pylist([], schema=before))
        return overlaid(before, {name: array.type for name, array in made.items()})

    def rows(self, rows: Rows) -> Rows:
        return self.overlaid(rows, self._extracted(rows.batch))

    def narrow(self, columns: Sequence[str], before: pa.Schema) -> Narrowed:
        kept = {name: path for name, path in self.paths.items() if name in columns}
        needs = [name for name in columns if name not in kept]
        needs += [_split(path, before, str(self))[0] for path in kept.values()]
        needs = list(dict.fromkeys(needs))
        return (Extract(kept) if kept else Select(needs)), needs

    def _extracted(self, batch: pa.RecordBatch) -> dict[str, pa.Array]:
        return {name: self._values(path, batch) for name, path in self.paths.items()}

    def _values(self, path: str, batch: pa.RecordBatch) -> pa.Array:
        """Follows a path into a batch."""
        name, steps = _split(path, batch.schema, str(self))
        array = batch.column(name)
        for step in steps:
            kind = array.type
            if is_list(kind):
                position = _position(step)
                if position is None:
                    fix = f"Give a position, as in {path.replace(step, '0', 1)!r}."
                    raise self.error(f"{path!r}: {step!r} is not a position in a list", fix)
                array = _item(array, position)
            elif pa.types.is_struct(kind):
                keys = [field.name for field in kind.fields]
                problem = f"{path!r}: no key {step!r}"
                require_known(step, keys, str(self), problem, kind=SourceError)
                array = pc.struct_field(array, step)
            else:
                raise self.error(
                    f"{path!r}: {kind} has nothing inside", f"End the path before {step!r}."
                )
        return array

    def __repr__(self) -> str:
        return f"Extract({self.paths})"


class Combine(ColumnTransform):
    r"""A transform that writes several columns into one of text.

    `Combine("text", "{question}\n{answer}")`

    The format knows only `{column}`, and `{{` for a brace: it has no attributes, positions or
    conversions, and nothing in it can run. Columns are text, numbers or booleans. The other columns
    stay; a column called `into` is replaced.

    Args:
        into: The column of text.
        template: The format.
        null_as: The text for a null; None makes the whole row null.
    """

    def __init__(self, into: str, template: str, *, null_as: str | None = None) -> None:
        require(
            _is_name(into),
            "Combine",
            f"{into!r} cannot name a column",
            'Write Combine("text", "{a} {b}").',
        )
        self.into = self.makes = into
        self.template, self.null_as = template, null_as
        self._pieces = _parse_template(template)
        self.reads = [name for name, is_field in self._pieces if is_field]

    @property
    def fingerprint(self) -> str:
        return digest("combine", self.into, self.template, self.null_as)

    def columns(self, before: pa.Schema) -> pa.Schema:
        require_columns(self.reads or (), before.names, str(self))
        t = pa.types
        for name in self.reads or ():
            kind = before.field(name).type
            if not (
                t.is_large_string(kind)
                or t.is_string(kind)
                or t.is_integer(kind)
                or t.is_floating(kind)
                or t.is_boolean(kind)
            ):
                fix = "Take what you need of it first: Extract({...})."
                raise self.error(f"column {name!r} holds {kind}, not text or a number", fix)
        return overlaid(before, {self.into: pa.large_string()})

    def rows(self, rows: Rows) -> Rows:
        parts: list[pa.Array | pa.Scalar] = []
        for text, is_field in self._pieces:
            part = _text(rows.batch, text) if is_field else pa.scalar(text, _TEXT)
            if is_field and self.null_as is not None:
                part = pc.fill_null(part, pa.scalar(self.null_as, _TEXT))
            parts.append(part)
        separator = pa.scalar("", _TEXT)
        joined = pc.binary_join_element_wise(*parts, separator)
        return self.overlaid(rows, {self.into: joined})

    def narrow(self, columns: Sequence[str], before: pa.Schema) -> Narrowed:
        if self.into not in columns:
            return Select(columns), columns
        return super().narrow(columns, before)

    def __repr__(self) -> str:
        return f"Combine({self.into!r}, {self.template!r})"


class ClassNames(ColumnTransform):
    """A transform that replaces class numbers by the names that `datasets` gives them.

    Args:
        names: The columns that have such names.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)

    @property
    def fingerprint(self) -> str:
        return digest("class names", self.names)

    def columns(self, before: pa.Schema) -> pa.Schema:
        nothing = self._named(pa.RecordBatch.from_pylist([], schema=before))
        return overlaid(before, {name: array.type for name, array in nothing.items()})

    def rows(self, rows: Rows) -> Rows:
        return self.overlaid(rows, self._named(rows.batch))

    def narrow(self, columns: Sequence[str], before: pa.Schema) -> Narrowed:
        kept = [name for name in self.names if name in columns]
        return (ClassNames(kept) if kept else Select(columns)), columns

    def _named(self, batch: pa.RecordBatch) -> dict[str, pa.Array]:
        return {
            name: named(batch.column(name), classes_of(batch.schema.field(name)))
            for name in self.names
        }

    def __repr__(self) -> str:
        return f"ClassNames({_shown(self.names)})"


class FilterNonEmpty(ColumnTransform):
    """A transform that keeps rows in which every one of these columns holds something.

    `FilterNonEmpty("prompt", "answer")`

    Null, blank text and an empty list hold nothing; a number always holds something.
    """

    drops = True

    def __init__(self, *names: str | Sequence[str]) -> None:
        self.names = self.reads = column_names(names, "FilterNonEmpty")

    @property
    def fingerprint(self) -> str:
        return digest("filter non-empty", sorted(self.names))

    def columns(self, before: pa.Schema) -> pa.Schema:
        require_columns(self.names, before.names, str(self))
        return before

    def rows(self, rows: Rows) -> Rows:
        keep = np.ones(rows.batch.num_rows, np.bool_)
        for name in self.names:
            column = rows.batch.column(name)
            full = column.is_valid()
            if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
                full = pa.array(has_text(column))
            elif is_list(column.type):
                full = pa.array(list_sizes(column) > 0)
            elif is_json(column.type):
                full = pa.array(
                    [value not in (None, [], "") for value in decoded_of(column)], pa.bool_()
                )
            keep &= full.to_numpy(zero_copy_only=False)
        return rows.kept(keep)

    narrow = ColumnTransform.narrow  # it uses `reads`; named here for readers of this class

    def __repr__(self) -> str:
        return f"FilterNonEmpty({_shown(self.names)})"


def column_names(names: tuple[str | Sequence[str], ...], of: str) -> tuple[str, ...]:
    """Returns the names given as `("a", "b")` or as `(["a", "b"],)`.

    Raises:
        ConfigError: There is no name, or one is given twice.
    """
    flat = tuple(names[0]) if len(names) == 1 and not isinstance(names[0], str) else names
    require(
        flat
        and all(isinstance(name, str) and name for name in flat)
        and len(set(flat)) == len(flat),
        of,
        f"expected different column names, got {names!r}",
        f'Write {of}("text").',
    )
    return flat  # type: ignore[return-value]


def _require_names(names: Mapping[str, str], of: str, fix: str) -> None:
    """Raises ConfigError if `names` does not map names of columns to names."""
    if not isinstance(names, Mapping) or not names:
        expected = "old and new names" if of == "Rename" else "names and paths"
        raise ConfigError(at=of, problem=f"expected {expected}, got {names!r}", fix=fix)
    for one, other in names.items():
        if not _is_name(one) or not _is_name(other):
            said = f"{one!r} cannot become" if of == "Rename" else f"{one!r} has no path in"
            raise ConfigError(at=of, problem=f"{said} {other!r}", fix=fix)


def _text(batch: pa.RecordBatch, column: str) -> pa.Array:
    """Returns a column as text, with the names of classes for their numbers."""
    array, classes = batch.column(column), classes_of(batch.schema.field(column))
    return (array if classes is None else named(array, classes)).cast(_TEXT)


def _is_name(name: JsonValue) -> bool:
    return isinstance(name, str) and name not in ("", ROW_NUMBER)


def _parse_template(template: str) -> tuple[tuple[str, bool], ...]:
    """Returns (text, whether it is the name of a column) for the parts of a format, in order.

    Raises:
        ConfigError: It holds anything but `{column}`, `{{` and `}}`.
    """
    fix = 'Write only columns in braces, as in "{question} {answer}", and {{ for a brace.'
    require(
        isinstance(template, str),
        "Combine",
        f"{template!r} is not a format",
        fix,
    )
    pieces: list[tuple[str, bool]] = []
    try:
        for text, name, spec, conversion in string.Formatter().parse(template):
            if text:
                pieces.append((text, False))
            if name is None:
                continue
            if not name or spec or conversion or any(c in name for c in ".[]{}!") or name.isdigit():
                raise ValueError(f"{{{name}}} is more than the name of a column")
            pieces.append((name, True))
    except ValueError as error:
        raise ConfigError(at="Combine", problem=f"{template!r}: {error}", fix=fix) from None
    require(
        any(is_field for _, is_field in pieces),
        "Combine",
        f"{template!r} names no column",
        fix,
    )
    return tuple(pieces)


def _split(path: str, schema: pa.Schema, at: str) -> tuple[str, list[str]]:
    """Returns the column that a path begins with, and the steps into it.

    Names may have dots, so the longest name that is a column is taken.
    """
    steps = path.split(".")
    for n in range(len(steps), 1, -1):
        name = ".".join(steps[:n])
        if name in schema.names:
            return name, steps[n:]
    require_columns(steps[:1], schema.names, at)
    return steps[0], steps[1:]


def _position(step: str) -> int | None:
    return int(step) if step.removeprefix("-").isdigit() and step.isascii() else None


def _item(array: pa.Array, position: int) -> pa.Array:
    """Returns item `position` of every list; null if the list is too short."""
    if pa.types.is_fixed_size_list(array.type):
        array = array.cast(pa.large_list(array.type.value_type))
    lengths = list_sizes(array)
    offsets = array.offsets.to_numpy().astype(np.int64)
    there = lengths > position if position >= 0 else lengths >= -position
    at = (offsets[:-1] if position >= 0 else offsets[1:]) + position
    return array.values.take(pa.array(at, pa.int64(), mask=~there))


def _shown(names: Sequence[str]) -> str:
    return ", ".join(repr(name) for name in names)
