# pyright: strict
"""Type names for values of types that others decide: JSON, records, batches, settings, arguments.

Such values may hold anything; the name says what they are. Code that reads one checks it first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Json = Mapping[str, Any]  # a JSON object that is read
# any value of JSON
JsonValue: TypeAlias = "bool | float | str | Sequence[JsonValue] | Mapping[str, JsonValue] | None"
JsonObject = dict[str, Any]  # a JSON object that is made, or that its reader may change
Record = dict[str, Any]  # a record of a file: Python values by column
Row = Mapping[str, Any]  # the same, read-only
Batch = dict[str, Any]  # arrays by column: of NumPy, of JAX once placed, or of a user's collator
Columns = Mapping[str, Any]  # such a batch, read-only
Settings = Mapping[str, Any]  # options by name, as read from YAML
Arguments = dict[str, Any]  # keyword arguments, collected before a call
Identity = Sequence[Any]  # the parts that decide a result, for a digest
Int64 = NDArray[np.int64]
Int32 = NDArray[np.int32]
UInt64 = NDArray[np.uint64]
UInt8 = NDArray[np.uint8]
Bools = NDArray[np.bool_]
Integers = NDArray[np.integer]  # of any width
Integer = int | np.integer  # a number in a kernel: counted there, or read from an array
Array = NDArray[Any]  # of any dtype that a file or a user has
DType = np.dtype[np.generic]

# Objects of users and other libraries: their capabilities are checked when they are passed in.
Dataset = Any  # rows by index or by iteration: a list, or one of `datasets`, torch or a user
Item = Any  # one row of a Dataset
Held = Any  # a user's function or object, a value that one holds, and what tells it apart
Collate = Callable[..., Any]  # makes a batch of a list of rows; it gets `keys` if it is random


def attribute_of(thing: object, *names: str) -> Any:
    """Returns the first of these attributes that a foreign object has; None if it has none.

    Only this function reads attributes of users' and other libraries' objects by name, because
    their types are unknown.
    """
    found = (getattr(thing, name, None) for name in names)
    return next((value for value in found if value is not None), None)
