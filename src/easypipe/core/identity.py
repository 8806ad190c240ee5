"""What tells apart callables and objects of the user's beside the version that their author gives
them: their name, and what they hold.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import PurePath
from types import BuiltinFunctionType, CodeType, MethodType
from typing import Any


def name_of(function: Any) -> str:
    if isinstance(function, functools.partial):
        return name_of(function.func)
    kind = function if hasattr(function, "__qualname__") else type(function)
    return f"{kind.__module__}:{kind.__qualname__}"


def held_by(function: Any, above: tuple[int, ...] = ()) -> Any:
    """What tells apart functions of one name: the code of lambdas and inner functions, and the
    values that partials, closures and objects hold; None where the name is enough. above: what
    holds this one, as a function may hold itself."""
    if id(function) in above:
        return "above"
    above = (*above, id(function))
    if isinstance(function, functools.partial):
        return [
            "partial",
            held_by(function.func, above),
            _value(function.args, above),
            _value(function.keywords, above),
        ]
    if isinstance(function, MethodType):
        return ["method", _value(function.__self__, above), held_by(function.__func__, above)]
    code = getattr(function, "__code__", None)
    if code is None:
        return (
            None
            if isinstance(function, BuiltinFunctionType | type)
            else ["object", _value(getattr(function, "__dict__", {}), above)]
        )
    # every script is called that
    if "<" not in function.__qualname__ and function.__module__ != "__main__":
        return None
    cells = [
        _value(cell.cell_contents, above) for cell in function.__closure__ or () if _is_filled(cell)
    ]
    return [
        "code",
        _code(code),
        cells,
        _value(function.__defaults__, above),
        _value(function.__kwdefaults__, above),
    ]


def _value(value: Any, above: tuple[int, ...]) -> Any:
    """Plain values as they are; of others only the type, as nothing else of them is the same in
    every process.
    """
    if value is None or isinstance(value, bool | int | float | str | bytes | PurePath):
        return [type(value).__name__, repr(value)]
    if id(value) in above:
        return "above"
    if callable(value):
        return [
            "function",
            name_of(value),
            None if isinstance(value, type) else held_by(value, above),
        ]
    above = (*above, id(value))
    if isinstance(value, Mapping):
        return [
            "mapping",
            [[_value(key, above), _value(item, above)] for key, item in value.items()],
        ]
    if isinstance(value, list | tuple):
        return ["list", [_value(item, above) for item in value]]
    if isinstance(value, set | frozenset):
        return ["set", sorted(str(_value(item, above)) for item in value)]
    return [f"{type(value).__module__}:{type(value).__qualname__}"]


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _code(code: CodeType) -> list[str]:
    consts = [
        part
        for const in code.co_consts
        for part in (_code(const) if isinstance(const, CodeType) else [repr(const)])
    ]
    return [code.co_code.hex(), *code.co_names, *consts]
