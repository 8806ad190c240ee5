"""Functions of the user's: where they are found, and what they are known by.

Code cannot be fingerprinted (what it calls may change without it), so a function is known by its
name and a version that its author gives it. One without a version has a fingerprint of this process
alone, and what it makes is not kept.
"""

from __future__ import annotations

import importlib
import logging
import secrets
import traceback
from collections.abc import Callable
from typing import Any

from easypipe.core.config import digest
from easypipe.core.errors import ConfigError, did_you_mean
from easypipe.core.identity import held_by, name_of

logger = logging.getLogger("easypipe")


class UserFunction:
    """A callable, or what `module:function` names. Raises ConfigError where that is not there,
    importing the module to see.

    version: a text or number; else the function's own attribute `version`; else there is none.
    """

    def __init__(
        self, function: Callable[[Any], Any] | str, version: str | int | None, *, of: str
    ) -> None:
        self._call = find_function(function, of) if isinstance(function, str) else function
        if not callable(self._call):
            raise ConfigError(
                at=of,
                problem=f"{function!r} is no function",
                fix='Give a function, or "module:function".',
            )
        self.name = function if isinstance(function, str) else name_of(function)
        version = version if version is not None else getattr(self._call, "version", None)
        self.cacheable = version is not None
        if version is not None:
            self.fingerprint = digest("function", self.name, str(version), held_by(self._call))
        else:
            self.fingerprint = digest("function of this process", self.name, secrets.token_hex(16))
            logger.warning(
                "%s: %s has no version, so nothing that it makes is kept in the token cache. Give it one (version=..., or an attribute "
                "`version` of the function), and another one whenever it changes.",
                of,
                self.name,
            )

    def __call__(self, value: Any) -> Any:
        return self._call(value)


def find_function(name: str, at: str) -> Callable[[Any], Any]:
    """The function that `module:function` names. Raises ConfigError saying which part of it is not
    there.
    """
    module_name, colon, path = name.partition(":")
    if not colon or not module_name or not path:
        raise ConfigError(
            at=at, problem=f"{name!r} names no function", fix='Write "module:function".'
        )
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError as error:
        fix = "Put its folder on PYTHONPATH, or install it."
        raise ConfigError(
            at=at, problem=f"{name!r}: {module_name!r} cannot be imported: {error}", fix=fix
        ) from error
    for part in path.split("."):
        if not hasattr(found, part):
            have = (
                [key for key in vars(found) if not key.startswith("_")]
                if hasattr(found, "__dict__")
                else []
            )
            raise ConfigError(
                at=at,
                problem=f"{name!r}: {module_name!r} has no {part!r}",
                have=have[:20],
                fix=did_you_mean(part, have),
            )
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(
            at=at,
            problem=f"{name!r} is {type(found).__name__}, not a function",
            fix="Name a function.",
        )
    return found


def why(name: str, error: BaseException) -> str:
    """What a function raised and where, in one line."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f", line {frames[-1].lineno} of {frames[-1].filename}" if len(frames) > 2 else ""
    return f"{name} raised {type(error).__name__}: {' '.join(str(error).split())}{where}"
