"""Users' functions and objects: finds `module:function`, fingerprints, warns if one has no version.

Code cannot be fingerprinted, because what it calls may change. A function is therefore identified
by its name, the values that it holds, and a version that its author gives it. The fingerprint of a
function without a version, or with a value whose content cannot be read, is valid only in this
process, and tokens made by it are not kept.
"""

from __future__ import annotations

import array
import functools
import importlib
import logging
import operator
import re
import secrets
import struct
import threading
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from datetime import date, time, timedelta, tzinfo
from decimal import Decimal
from pathlib import PurePath
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    EllipsisType,
    MemberDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
)
from typing import Any, NoReturn

import numpy as np

from easypipe.core.config import digest
from easypipe.core.errors import (
    ConfigError,
    EasypipeError,
    SourceError,
    did_you_mean,
    raising,
    require,
)
from easypipe.core.values import Held, attribute_of

logger = logging.getLogger("easypipe")

POINTER_BYTES = struct.calcsize("P")


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


def warn_not_comparable(of: str, name: str, kind: str) -> None:
    """Warns that a function's results are not kept, because of a value of type `kind` in it."""
    logger.warning(
        "%s: %s holds a value of type %s, which cannot be compared with that of another process, "
        "so its results are not kept in the token cache, whatever its version. Hold plain values, "
        "arrays or dataclasses, or give that value an attribute `version`.",
        of,
        name,
        kind,
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
        held: Held = secrets.token_hex(16)
        self.cacheable = version is not None
        self.unversioned: tuple[str, ...] = ()  # why it is not cacheable
        if version is None:
            self.unversioned = (f"{self.name} has no version",)
            warn_unversioned(of, self.name)
        else:
            try:
                held = held_by(self._call, strict=True)
            except NotComparableError as error:
                self.cacheable = False
                self.unversioned = (f"{self.name} holds a value of type {error}",)
                warn_not_comparable(of, self.name, str(error))
        self.fingerprint = (
            digest("function", self.name, str(version), held)
            if self.cacheable
            else digest("function of this process", self.name, held)
        )

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


def name_of(function: Held) -> str:
    """Returns `module:name` of a function, or of the class of a callable object."""
    if isinstance(function, functools.partial):
        return name_of(function.func)
    # a callable object is known by its class's name
    kind = function if attribute_of(function, "__qualname__") else type(function)
    # a method of C code has no module
    return f"{attribute_of(kind, '__module__')}:{kind.__qualname__}"


def held_by(function: Held, *, strict: bool = False) -> Held:
    """Returns what distinguishes functions of the same name; None if the name is enough.

    It is the code of lambdas and inner functions, and the values that partials, closures and
    objects hold.

    Args:
        function: Any callable.
        strict: Whether a value that is not comparable is an error. Otherwise such a value counts
            by the name of its type, because the version of the object tells what is in it.

    Raises:
        NotComparableError: There is such a value, and `strict` is True.
    """
    return _Held(strict, {}).by(function, ())


class NotComparableError(Exception):
    """A value is held whose content is not the same in every process, or not readable."""


class _Held:
    """Reads what functions and objects hold.

    Args:
        strict: As in `held_by`.
        done: What objects hold that were read already, by id: many may hold one object.
    """

    def __init__(self, strict: bool, done: dict[int, list[Held]]) -> None:
        self._strict, self._done = strict, done

    def by(self, function: Held, above: tuple[int, ...]) -> Held:
        """Returns what `held_by` does.

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
                self.by(function.func, above),
                self.value(function.args, above),
                self.value(function.keywords, above),
            ]
        if isinstance(function, MethodType):
            method = self.by(function.__func__, above)
            return ["method", self.value(function.__self__, above), method]
        if isinstance(function, BuiltinFunctionType | MethodWrapperType):
            owner = function.__self__
            alone = owner is None or isinstance(owner, ModuleType | type)
            return None if alone else ["method", self.value(owner, above), None]
        code = attribute_of(function, "__code__")
        if code is None:
            return None if isinstance(function, type) else self._callable(function, above)
        # the module of every script is called __main__, so its name is not enough
        if "<" not in function.__qualname__ and function.__module__ != "__main__":
            return None
        cells = [
            self.value(cell.cell_contents, above)
            for cell in function.__closure__ or ()
            if _is_filled(cell)
        ]
        return [
            "code",
            _code(code),
            cells,
            self.value(function.__defaults__, above),
            self.value(function.__kwdefaults__, above),
        ]

    def _callable(self, function: Held, above: tuple[int, ...]) -> list[Held]:
        """Returns what a callable object holds."""
        held = self.value(attribute_of(function, "__dict__") or {}, above)
        slots = members_of(function)
        # a function of C code has a name of its own, and what it wraps is in its __dict__
        whole = not slots and (vars_alone(function) or attribute_of(function, "__qualname__"))
        return ["object", held, *([] if whole else self._content(function, above))]

    def value(self, value: Held, above: tuple[int, ...]) -> Held:
        """Returns plain values unchanged, and the type and the content of others."""
        if value is None or isinstance(value, bool | int | float | str | bytes | PurePath):
            return [type(value).__name__, repr(value)]
        if id(value) in above:
            return "above"
        if callable(value):
            known = isinstance(value, type)
            held = None if known else self._or_named(value, lambda: self.by(value, above))
            return ["function", name_of(value), held]
        above = (*above, id(value))
        if isinstance(value, Mapping):
            pairs = [[self.value(key, above), self.value(one, above)] for key, one in value.items()]
            return ["mapping", pairs]
        if isinstance(value, list | tuple):
            return ["list", [self.value(item, above) for item in value]]
        if isinstance(value, set | frozenset):
            return ["set", sorted(str(self.value(item, above)) for item in value)]
        return [_kind(value), *self._content(value, above)]

    def _content(self, value: Held, above: tuple[int, ...]) -> list[Held]:
        """Returns what distinguishes objects of one type; [] if they are all alike."""
        if id(value) not in self._done:
            whole = _Held(True, self._done)
            parts = self._or_named(value, lambda: whole._parts(value, above))
            self._done[id(value)] = [digest(parts)] if parts else []
        return self._done[id(value)]

    def _or_named(self, value: Held, read: Callable[[], Held]) -> Held:
        """Returns what `read` does; for what is not comparable, its `fingerprint` or `version`."""
        try:
            return read()
        except (NotComparableError, RecursionError) as error:
            named = attribute_of(value, "fingerprint", "version")
            if isinstance(named, str | int):
                return [str(named)]
            if not self._strict:
                return []
            if isinstance(error, NotComparableError):
                raise
            raise NotComparableError(_kind(value)) from error

    def _parts(self, value: Held, above: tuple[int, ...]) -> list[Held]:
        if isinstance(value, TOLD_BY_REPR) or type(value).__module__ == operator.__name__:
            return [repr(value)]
        if isinstance(value, ModuleType | logging.Logger):
            return [value.__name__ if isinstance(value, ModuleType) else value.name]
        if isinstance(value, re.Pattern):
            return [self.value(value.pattern, above), value.flags]
        if isinstance(value, deque):
            return [self.value(list(value), above), value.maxlen]
        if type(value) is np.ndarray or isinstance(value, np.generic):
            array = np.asarray(value)
            data = array.tolist() if array.dtype.hasobject else digest(array.tobytes().hex())
            return [str(array.dtype), list(array.shape), self.value(data, above)]
        slots = members_of(value)
        if not vars_alone(value, len(slots)) and not isinstance(value, WITHOUT_CONTENT):
            raise NotComparableError(_kind(value))
        filled = {name: member.__get__(value) for name, member in slots if hasattr(value, name)}
        held = (attribute_of(value, "__dict__") or {}) | filled
        return [self.value(held, above)] if held else []


# repr() of these is their content, and the same in every process, as that of operator's getters
TOLD_BY_REPR = (
    array.array,
    bytearray,
    complex,
    date,
    Decimal,
    EllipsisType,
    range,
    slice,
    time,
    timedelta,
    tzinfo,
    np.dtype,
)
WITHOUT_CONTENT = (type(threading.Lock()), type(threading.RLock()))


def members_of(value: object) -> list[tuple[str, MemberDescriptorType]]:
    """Returns the `__slots__` of an object's classes."""
    every = (vars(kind) for kind in type(value).__mro__)
    return [
        (name, member)
        for members in every
        if "__slots__" in members
        for name, member in members.items()
        if isinstance(member, MemberDescriptorType)
    ]


def vars_alone(value: object, slots: int = 0) -> bool:
    """Returns whether an object holds its `__dict__` and `slots` values, and nothing else.

    A type of C code holds more: its objects are larger.
    """
    kind: Any = type(value)
    pointers = slots + (kind.__dictoffset__ > 0) + (kind.__weakrefoffset__ > 0)
    size = object.__basicsize__ + pointers * POINTER_BYTES
    return kind.__basicsize__ <= size and not kind.__itemsize__


def _kind(value: object) -> str:
    return f"{type(value).__module__}:{type(value).__qualname__}"


def _is_filled(cell: CellType) -> bool:
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
