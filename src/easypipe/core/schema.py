"""Names and dtypes of columns, their Arrow types, exact casts, JSON; OutputSchema and TaskSpec.

A stored row (token cache, saved rows) has `input_ids`, `loss_mask`, `segment_ids`, `position_ids`;
only batches have `labels`.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from easypipe.core.config import config
from easypipe.core.errors import SourceError, require
from easypipe.core.values import Arguments, Batch, Columns, DType, Int64

# pyright: strict
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingTypeStubs=false


INPUT_IDS = "input_ids"
LOSS_MASK = "loss_mask"  # 1: the token is a target; without the column every token is
# in the loss_mask of a token cache: the first token of a pair's second answer; it is not a target
SEGMENT_BREAK = 2
SEGMENT_IDS = "segment_ids"  # 0 is padding; segments of a row are numbered from 1
POSITION_IDS = "position_ids"  # they restart at 0 in each segment
# only in rows of strategy "concat", one number per row: the label of the last slot, which is in
# another row
LOOK_AHEAD = "look_ahead"
LABELS = "labels"  # batches only: the next token of the same segment, or IGNORE
ATTENTION_MASK = "attention_mask"
# TRL's names for such masks in tokenized data; 1 is a target
COMPLETION_MASK, ASSISTANT_MASKS = "completion_mask", "assistant_masks"
# the columns that say which tokens are targets: a token must be a target in all given columns
TARGET_COLUMNS = (LOSS_MASK, LABELS, COMPLETION_MASK, ASSISTANT_MASKS)
# sequence-to-sequence batches: the decoder's input; its next tokens are `labels`
DECODER_INPUT_IDS = "decoder_input_ids"
DECODER_ATTENTION_MASK = "decoder_attention_mask"
PIXEL_VALUES = "pixel_values"
# only in the token cache; 1: packing adds no EOS to the document, because it ends with one, its
# text continues in the next document, or it is a pair
HAS_EOS = "has_eos"

SOURCE = "__source__"  # which dataset a row came from
ORIGIN = pa.field(SOURCE, pa.dictionary(pa.int32(), pa.string()), nullable=False)
ROW_NUMBER = "__row_number__"  # physical record number within its shard

IGNORE = -100  # the label of a slot that is not a target


def token_dtype(vocab_size: int) -> np.dtype:
    """Returns the smallest of uint16 and uint32 that holds every id below `vocab_size`."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def token_list(vocab_size: int) -> pa.DataType:
    """Returns the Arrow type of a document's tokens.

    The lists have int64 offsets, so that a shard can have more than 2^31 tokens.
    """
    return pa.large_list(pa.from_numpy_dtype(token_dtype(vocab_size)))


def offsets_of(sizes: NDArray[np.integer[Any]] | Sequence[int]) -> Int64:
    """Returns where lists of these sizes begin, and where the last of them ends: Int64[n + 1]."""
    offsets = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(np.asarray(sizes, np.int64), out=offsets[1:])
    return offsets


def schema_text(schema: pa.Schema) -> str:
    """Returns a schema as text that JSON can hold; `schema_of_text` reads it."""
    return base64.b64encode(schema.serialize().to_pybytes()).decode()


def schema_of_text(text: str) -> pa.Schema:
    """Returns the schema that `schema_text` wrote."""
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text)))


def data_columns(schema: pa.Schema) -> list[str]:
    """Returns the names of all columns except ROW_NUMBER."""
    return [name for name in schema.names if name != ROW_NUMBER]


def with_row_numbers(schema: pa.Schema) -> pa.Schema:
    return schema.append(pa.field(ROW_NUMBER, pa.int64()))


def without_row_numbers(schema: pa.Schema) -> pa.Schema:
    return pa.schema([field for field in schema if field.name != ROW_NUMBER])


def row_numbers(batch: pa.RecordBatch, start: int) -> Int64:
    """Returns the row numbers Int64[rows] of a batch that was read from row `start` on."""
    if ROW_NUMBER in batch.schema.names:
        return batch.column(ROW_NUMBER).to_numpy()
    return np.arange(start, start + batch.num_rows)


def fields_text(schema: pa.Schema) -> str:
    """Returns columns and their types as text for messages."""
    return ", ".join(f"{field.name}: {field.type}" for field in schema)


def is_list(kind: pa.DataType) -> bool:
    """Returns whether a column holds lists, including large and fixed-size lists."""
    t = pa.types
    return t.is_list(kind) or t.is_large_list(kind) or t.is_fixed_size_list(kind)


def list_sizes(lists: pa.Array) -> Int64:
    """Returns how many items each list has: Int64[n]; 0 for null."""
    sizes = pc.fill_null(pc.call_function("list_value_length", [lists]), 0)
    return sizes.to_numpy(zero_copy_only=False).astype(np.int64, copy=False)


def typed_array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Returns Python values as an array of `kind`; raises an error if Arrow would change a value.

    Arrow drops the fraction of a number that should be an integer, and makes a number that is too
    large infinite.

    Raises:
        ArrowInvalid: Values do not fit the type, or would be changed. Other Arrow errors are
            possible.
    """
    made = pa.array(values, kind)
    whole = holds(kind, pa.types.is_integer) and _may_hold_fractions(values, kind)
    if whole or _holds_infinity(made):
        for value in values:
            why = _changed(value, kind)
            if why is not None:
                raise pa.ArrowInvalid(why)
    return made


def cast_array(values: pa.Array, kind: pa.DataType) -> pa.Array:
    """Casts an array to `kind`; raises what `typed_array` raises."""
    made = values.cast(kind)
    return typed_array(values.to_pylist(), kind) if _holds_infinity(made) else made


def _may_hold_fractions(values: Sequence[Any], kind: pa.DataType) -> bool:
    """Returns whether values for a type with integers may hold fractions."""
    if holds(kind, pa.types.is_map):  # Arrow infers text for the pairs of a map
        return True
    try:
        return holds(pa.infer_type(values), pa.types.is_floating)
    except (pa.ArrowInvalid, pa.ArrowTypeError):  # keys beyond those of `kind` may mix types
        return True


def _holds_infinity(made: pa.Array) -> bool:
    """Returns whether a number of less than 64 bits is infinite."""
    kind = made.type
    if pa.types.is_float32(kind) or pa.types.is_float16(kind):
        return bool(np.isinf(made.to_numpy(zero_copy_only=False)).any())
    if is_list(kind):
        return _holds_infinity(made.flatten())
    if pa.types.is_map(kind):
        return _holds_infinity(made.items)
    return pa.types.is_struct(kind) and any(map(_holds_infinity, made.flatten()))


def _changed(value: Any, kind: pa.DataType) -> str | None:
    """Returns why a number within `value` would be changed by the type `kind`; None if none would.

    A number is changed if it has a fraction and should be an integer, or if it is too large.
    """
    found: Iterable[str | None] = ()
    if value is None:
        return None
    if pa.types.is_integer(kind):
        cut = isinstance(value, float | np.floating) and value % 1
        return f"{float(value)!r} is not an integer" if cut else None
    if pa.types.is_float32(kind) or pa.types.is_float16(kind):
        most = float(np.finfo(kind.to_pandas_dtype()).max)
        beyond = most < abs(float(value)) < math.inf
        return f"{float(value)!r} is beyond the largest {kind}" if beyond else None
    if is_list(kind):
        found = (_changed(item, kind.field(0).type) for item in value)
    elif pa.types.is_struct(kind) and isinstance(value, Mapping):
        found = (_changed(value.get(field.name), field.type) for field in kind)
    elif pa.types.is_map(kind):
        items = value.items() if isinstance(value, Mapping) else value
        found = (_changed(item, kind.item_type) for _, item in items)
    return next((one for one in found if one is not None), None)


JSON = pa.json_(pa.large_string())


def is_json(kind: pa.DataType) -> bool:
    """Returns whether values are JSON text, used for lists or objects without a common type."""
    return isinstance(kind, pa.JsonType)


def holds(kind: pa.DataType, test: Callable[[pa.DataType], bool]) -> bool:
    """Returns whether `test` is true of a type or of one anywhere within it."""
    return test(kind) or any(holds(kind.field(i).type, test) for i in range(kind.num_fields))


def changes_json(kind: pa.DataType) -> bool:
    """Returns whether lists and objects of JSON may change in a column of this type.

    Objects get the keys of all rows, in one order, and integers beside fractions become fractions.
    """

    def changes(one: pa.DataType) -> bool:
        return pa.types.is_struct(one) or pa.types.is_floating(one)

    return pa.types.is_nested(kind) and holds(kind, changes)


def plain_type(
    kind: pa.DataType, leaf: Callable[[pa.DataType], pa.DataType] | None = None
) -> pa.DataType:
    """Returns the type that a column has in this package; applying it again changes nothing.

    Args:
        kind: Any Arrow type.
        leaf: The conversion of types that contain no others; None keeps them.
    """
    if holds(kind, is_json):
        return JSON
    if isinstance(kind, pa.BaseExtensionType):
        return plain_type(kind.storage_type, leaf)
    t, inside = pa.types, partial(plain_type, leaf=leaf)
    if t.is_dictionary(kind) or t.is_run_end_encoded(kind):
        return inside(kind.value_type)
    if t.is_string(kind) or t.is_large_string(kind) or t.is_string_view(kind):
        return pa.large_string()
    if t.is_binary(kind) or t.is_large_binary(kind) or t.is_binary_view(kind):
        return pa.large_binary()
    if (
        t.is_list(kind)
        or t.is_large_list(kind)
        or t.is_list_view(kind)
        or t.is_large_list_view(kind)
    ):
        return pa.large_list(inside(kind.value_type))
    if t.is_fixed_size_list(kind):
        return pa.list_(inside(kind.value_type), kind.list_size)
    if t.is_struct(kind):
        return pa.struct([pa.field(field.name, inside(field.type)) for field in kind.fields])
    return kind if leaf is None else leaf(kind)


_TOKEN_COLUMNS = (
    INPUT_IDS,
    LABELS,
    ATTENTION_MASK,
    SEGMENT_IDS,
    POSITION_IDS,
    DECODER_INPUT_IDS,
    DECODER_ATTENTION_MASK,
)


@config
class OutputSchema:
    """The dtypes of the columns of a batch, as NumPy names; other columns keep their own.

    Args:
        dtypes: {column: dtype}, which replace the defaults: int32 for tokens, labels and masks,
            float32 for pixel_values.
    """

    dtypes: dict[str, str] = field(default_factory=dict)

    def check(self) -> None:
        """Raises ConfigError for a dtype that does not hold numbers."""
        for name, kind in self.dtypes.items():
            try:
                numeric = np.dtype(kind).kind in "iufb"
            except TypeError:
                numeric = False
            require(
                numeric,
                f"dtypes.{name}",
                f"{kind!r} is not a dtype of numbers",
                "Write 'int32', 'float32', ...",
            )

    def cast(self, batch: Columns) -> Batch:
        """Returns the batch in these dtypes.

        Raises:
            SourceError: An integer does not fit.
        """
        wanted = dict.fromkeys(_TOKEN_COLUMNS, "int32") | {PIXEL_VALUES: "float32"} | self.dtypes
        return {
            name: _cast(name, np.asarray(values), np.dtype(wanted[name]))
            if name in wanted
            else values
            for name, values in batch.items()
        }


def _cast(name: str, values: np.ndarray[Any, Any], kind: DType) -> np.ndarray[Any, Any]:
    """Casts numbers to a dtype; raises SourceError for an integer that does not fit."""
    if values.dtype == kind:
        return values
    with np.errstate(over="ignore", invalid="ignore"):
        cast = values.astype(kind)
        whole = kind.kind == "f" and values.dtype.kind in "iu"
        changed = (cast.astype(values.dtype) if whole else cast) != values
    if (whole or kind.kind in "iu") and changed.any():
        first = tuple(np.argwhere(changed)[0].tolist())
        rows = f"row {first[0]} of the batch, " if first else ""
        raise SourceError(
            at=f"{rows}column {name!r}",
            problem=f"{values[first]} does not fit {kind}",
            fix="Name a wider dtype in OutputSchema(dtypes=...).",
        )
    return cast


@config
class TaskSpec:
    """A task: it chooses a collator and its options.

    See `CollatorRegistry.get_collator(task_spec=...)`.

    Args:
        name: The name of the task, for messages.
        modality: The modality of the rows: "text", "vision", "multimodal" or one for which a
            collator was registered.
        task_type: What is predicted: "causal_lm", "masked_lm", "seq2seq", "classification" or any
            other word; it chooses among the collators of one modality.
        options: Options of the collator, if the caller gives none.
    """

    name: str
    modality: str
    task_type: str
    options: Arguments = field(default_factory=dict)

    def check(self) -> None:
        words = {"name": self.name, "modality": self.modality, "task_type": self.task_type}
        for key, word in words.items():
            require(word, key, "is empty", "Give a word.")

    @classmethod
    def lm_tiny(cls) -> TaskSpec:
        """Returns the task that predicts the next token of texts."""
        return cls(name="lm_tiny", modality="text", task_type="causal_lm")

    @classmethod
    def vision_tiny(cls) -> TaskSpec:
        """Returns the task that predicts the class of images of one size."""
        return cls(name="vision_tiny", modality="vision", task_type="classification")
