# pyright: strict
"""Type names for values whose types others decide: JSON, records, batches, settings, arguments.

Such values may hold anything, and the name says what they are. Code that reads one checks it first.
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
Record = dict[str, Any]  # what a file holds: values of Python by column
Row = Mapping[str, Any]  # the same, only read
Batch = dict[str, Any]  # arrays by column: of NumPy, of JAX once placed, or of a user's collator
Columns = Mapping[str, Any]  # such a batch, only read
Settings = Mapping[str, Any]  # options by name, as YAML gives them
Arguments = dict[str, Any]  # keyword arguments, collected before a call
Identity = Sequence[Any]  # what decides a result, part by part, for a digest
Int64 = NDArray[np.int64]
Int32 = NDArray[np.int32]
UInt64 = NDArray[np.uint64]
UInt8 = NDArray[np.uint8]
Bools = NDArray[np.bool_]
Integers = NDArray[np.integer]  # of any width
Array = NDArray[Any]  # of whatever dtype a file or a user has
DType = np.dtype[np.generic]

# Objects of users and other libraries: what they can do is checked where they come in.
Dataset = Any  # rows by number, or to iterate over: lists, those of `datasets`, of torch, of users
Item = Any  # one row of a Dataset
Collate = Callable[..., Any]  # a list of rows to a batch; with `keys` too where it draws


def attribute_of(thing: object, *names: str) -> Any:
    """Returns the first of these attributes that a foreign object has; None if it has none.

    Objects of users and of other libraries are asked by name here alone, as their types are
    unknown.
    """
    found = (getattr(thing, name, None) for name in names)
    return next((value for value in found if value is not None), None)
