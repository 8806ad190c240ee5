"""Users' functions and objects: finds `module:function`, fingerprints, warns if one has no version.

Code cannot be fingerprinted, because what it calls may change. A function is therefore identified
by its name, the values that it holds, and a version that its author gives it. The fingerprint of a
function without a version is valid only in this process, and tokens made by it are not kept.
"""

from __future__ import annotations

import functools
import importlib
import logging
import secrets
import traceback
from collections.abc import Callable, Mapping
from pathlib import PurePath
from types import BuiltinFunctionType, CodeType, MethodType
from typing import Any, NoReturn

from easypipe.core.config import digest
from easypipe.core.errors import (
    ConfigError,
    EasypipeError,
    SourceError,
    did_you_mean,
    raising,
    require,
)
from easypipe.core.values import attribute_of

logger = logging.getLogger("easypipe")


def dotted_name(function: object, otherwise: str) -> str:
    """Returns module and name of a user's function, with `otherwise` for one that has no name."""
    name = attribute_of(function, "__qualname__") or otherwise
    return f"{attribute_of(function, '__module__') or ''}.{name}"


def warn_unversioned(of: str, name: str) -> None:
    """Warns that tokens made by a user's object are not kept, because it has no version.

    Args:
        of: The option that it is given as.
        name: Its name.
    """
    logger.warning(
        "%s: %s has no version, so its results are not kept in the token cache. Give it one "
        "(version=..., or its attribute `version`), and change it whenever the function changes.",
        of,
        name,
    )


class UserFunction:
    """A user's callable with a name and a fingerprint.

    Args:
        function: A callable, or the text `module:function`, whose module is imported.
        version: A text or number; None takes the function's own attribute `version`, if it has one.
        of: The option that it is given as, for messages.

    Raises:
        ConfigError: It cannot be found, or is not a function.
    """

    def __init__(
        self, function: Callable[[Any], Any] | str, version: str | int | None, *, of: str
    ) -> None:
        self._call = find_function(function, of) if isinstance(function, str) else function
        if not callable(self._call):
            raise ConfigError(
                at=of,
                problem=f"{function!r} is not a function",
                fix='Give a function, or "module:function".',
            )
        self.name = function if isinstance(function, str) else name_of(function)
        version = version if version is not None else attribute_of(self._call, "version")
        self.cacheable = version is not None
        if version is not None:
            self.fingerprint = digest("function", self.name, str(version), held_by(self._call))
        else:
            self.fingerprint = digest("function of this process", self.name, secrets.token_hex(16))
            warn_unversioned(of, self.name)

    def __call__(self, value: Any) -> Any:
        return self._call(value)


def find_function(name: str, at: str) -> Callable[[Any], Any]:
    """Returns the function that `module:function` names.

    Raises:
        ConfigError: It cannot be found; the error says which part of the name does not exist.
    """
    module_name, colon, path = name.partition(":")
    require(
        colon and module_name and path,
        at,
        f"{name!r} names no function",
        'Write "module:function".',
    )
    with raising(
        ConfigError,
        at,
        f"{name!r}: {module_name!r} cannot be imported",
        "Put its folder on PYTHONPATH, or install it.",
        ImportError,
    ):
        found: Any = importlib.import_module(module_name)
    for part in path.split("."):
        # the name comes from a config and may have several parts: `module:Class.method`
        if not hasattr(found, part):
            have = [key for key in dir(found) if not key.startswith("_")]
            raise ConfigError(
                at=at,
                problem=f"{name!r}: {module_name!r} has no {part!r}",
                have=have[:20],
                fix=did_you_mean(part, have),
            )
        found = getattr(found, part)
    require(
        callable(found),
        at,
        f"{name!r} is {type(found).__name__}, not a function",
        "Name a function.",
    )
    return found


def why(name: str, error: BaseException) -> str:
    """Returns what a function raised and where, in one line."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f", line {frames[-1].lineno} of {frames[-1].filename}" if len(frames) > 2 else ""
    return f"{name} raised {type(error).__name__}: {' '.join(str(error).split())}{where}"


def raise_named(source: str, error: Exception, at: str) -> NoReturn:
    """Raises SourceError from what a user's source raised at a place.

    Errors of easypipe and MemoryError are raised unchanged, with a note.
    """
    if isinstance(error, EasypipeError | MemoryError):
        error.add_note(f"while reading {at}")
        raise error
    fix = "Leave the row out in the source: whatever on_error says, reading ends here."
    raise SourceError(at=at, problem=why(source, error), fix=fix) from error


def name_of(function: Any) -> str:
    """Returns `module:name` of a function, or of the class of a callable object."""
    if isinstance(function, functools.partial):
        return name_of(function.func)
    # a callable object is known by its class's name
    kind = function if hasattr(function, "__qualname__") else type(function)
    return f"{kind.__module__}:{kind.__qualname__}"


def held_by(function: Any, above: tuple[int, ...] = ()) -> Any:
    """Returns what distinguishes functions of the same name; None if the name is enough.

    It is the code of lambdas and inner functions, and the values that partials, closures and
    objects hold.

    Args:
        function: Any callable.
        above: The ids of the objects that hold this one, because a function may hold itself.
    """
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
    code = attribute_of(function, "__code__")
    if code is None:
        return (
            None
            if isinstance(function, BuiltinFunctionType | type)
            else ["object", _value(attribute_of(function, "__dict__") or {}, above)]
        )
    # the module of every script is called __main__, so its name is not enough
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
    """Returns plain values unchanged, and only the type of others.

    Nothing else about other values is the same in every process.
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
