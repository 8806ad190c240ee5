# pyright: strict
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingTypeStubs=false
"""Strict configs: frozen dataclasses from dicts, YAML, `--set`; which of them may name functions.

    @config
    class PackStageConfig:
        seq_length: int
        strategy: Literal["greedy", "pool", "first_fit"] = "greedy"

        def check(self) -> None:                     # optional: rules beyond types
            problem = f"must be at least 1, got {self.seq_length}"
            require(self.seq_length >= 1, "seq_length", problem, "Give at least 1.")

Unknown keys and wrong types raise ConfigError with the whole key path: `datasets[1].seq_lenght:
unknown key. Did you mean 'seq_length'?`
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import hashlib
import json
import math
import os
import re
import types
import typing
import weakref
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, dataclass_transform

import pydantic
import yaml
from pydantic.dataclasses import dataclass as pydantic_dataclass

from easypipe.core.errors import ConfigError, did_you_mean, place, require
from easypipe.core.foreign_names import VALUES, ours
from easypipe.core.safe_yaml import DEEPEST, read_yaml, wrong_yaml
from easypipe.core.trust import require_trusted_storage
from easypipe.core.values import Arguments, JsonObject, Settings

T = TypeVar("T")

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    ListOf = Sequence  # what may be given: a list or a tuple
else:

    class ListOf:
        """The type of an option that is a list: `datasets: ListOf[DatasetConfig]`.

        Lists and tuples are accepted; the config holds a tuple.
        """

        def __class_getitem__(cls, item: Any) -> Any:
            return tuple[item, ...]


# for the id of each existing config, the names of the options that it was made with
_made_with: dict[int, frozenset[str]] = {}
CODE_KEYS = ("format_callback",)  # keys whose values name functions that are called
_code_allowed = contextvars.ContextVar("easypipe_code_allowed", default=False)

_PATH_OF_URL = re.compile(r"[a-z][a-z\d+.-]+:/(?!/)")

_RULES = pydantic.ConfigDict(strict=True, arbitrary_types_allowed=True, extra="forbid")


@dataclass_transform(kw_only_default=True, frozen_default=True)
def config(cls: type[T]) -> type[T]:
    """Class decorator: a frozen keyword-only dataclass whose constructor validates every value.

    A class may have a static method `written_out`, which replaces shorthand values with what they
    mean, and a method `check`, which raises ConfigError for what types cannot express.
    """
    made: Any = pydantic_dataclass(cls, frozen=True, kw_only=True, config=_RULES)  # pyright: ignore[reportCallIssue, reportArgumentType]
    validate = made.__init__

    @functools.wraps(validate)
    def __init__(self: Any, *args: Any, **values: Any) -> None:
        if args:
            raise ConfigError(
                at=cls.__name__, problem="takes keyword arguments only", have=_field_names(made)
            )
        hints, given = _hints(made), values
        values = declared(cls, "written_out", dict)(_unaliased(made, values))
        for key in values:
            if key not in hints:
                raise ConfigError(
                    at=key, problem="unknown key", have=_field_names(made), fix=meant(made, key)
                )
        values = {key: _structure(value, hints[key], key) for key, value in values.items()}
        try:
            validate(self, **values)
        except pydantic.ValidationError as error:
            raise _readable(error, made) from None
        # stored outside the object, so that its only attributes are its options
        _made_with[id(self)] = frozenset({*given, *values})
        weakref.finalize(self, _made_with.pop, id(self), None).atexit = False
        check = declared(made, "check", None)
        if check is not None:
            check(self)
        for key, value in values.items():
            if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
                raise ConfigError(
                    at=key, problem=f"{value} does not fit 64 bits", fix="Give a smaller number."
                )
            if Path in typing.get_args(hints[key]) and value is not None:
                require(
                    _names_a_place(str(value)),
                    key,
                    f"{str(value)!a} names no file or folder",
                    "Give a path, or leave it out.",
                )
                require(
                    not (isinstance(value, Path) and _PATH_OF_URL.match(str(value))),
                    key,
                    f"{str(value)!a} was a URL, in which pathlib.Path turns // into /",
                    "Give it as a str.",
                )

    made.__init__ = __init__
    made.__easypipe_config__ = True
    return made


def _names_a_place(path: str) -> bool:
    """Returns whether a path can name a file here; a `~` in it must be an existing home folder."""
    return path != "" and "\0" not in path and not os.path.expanduser(path).startswith("~")


def fields_of(value: Any, *, secret: bool = True) -> Arguments:
    """Returns the options of a config, or the fields of any other dataclass, by name.

    Args:
        value: A config or a dataclass.
        secret: Whether to include fields marked `metadata={'secret': True}`.
    """
    # not dataclasses.asdict, which converts nested dataclasses too
    return {name: getattr(value, name) for name in _names_of(type(value), secret)}


@functools.cache
def _names_of(cls: type[DataclassInstance], secret: bool) -> tuple[str, ...]:
    fields = (f for f in dataclasses.fields(cls) if secret or not f.metadata.get("secret"))
    return tuple(f.name for f in fields)


def declared(cls: Any, name: str, default: T) -> T:
    """Returns what a class of configs declares about itself: ALIASES, ELSEWHERE, written_out."""
    # a class that declares nothing has no such attribute
    return getattr(cls, name, default)


def check_at_least(owner: object, least: int, *names: str) -> None:
    """Raises ConfigError if one of the named options of a config is below `least`; None passes."""
    options = fields_of(owner)
    for name in names:
        value = options[name]
        require(
            value is None or value >= least,
            name,
            f"{value} is too small",
            f"Give at least {least}.",
        )


def check_number(owner: object, fix: str | None, *names: str, zero: bool = False) -> None:
    """Checks that options are finite and above 0; None passes.

    Args:
        owner: A config.
        fix: What to do about it, for the error.
        names: The options to check.
        zero: Whether 0 also passes.

    Raises:
        ConfigError: An option is not finite or not above 0.
    """
    kind = "number from 0 up" if zero else "positive number"
    for name in names:
        value = fields_of(owner)[name]
        fits = value is None or (math.isfinite(value) and (value > 0 or (zero and value == 0)))
        require(fits, name, f"{value} is not a {kind}", fix)


def was_given(value: Any, option: str) -> bool:
    """Returns whether a config was made with this option, even if with its default value.

    `dataclasses.replace` passes all options: in a config made by it, an option with its default
    value counts as not given.
    """
    [field] = [f for f in dataclasses.fields(value) if f.name == option]
    # a copy is not recorded, and counts as made with all options
    made_with = _made_with.get(id(value), frozenset(f.name for f in dataclasses.fields(value)))
    return option in made_with and (
        len(made_with) < len(dataclasses.fields(value)) or fields_of(value)[option] != field.default
    )


def with_aliases(before: T, changes: Settings) -> T:
    """Does `dataclasses.replace(before, **changes)`; an alias changes the option it names."""
    cls: Any = type(before)
    values = fields_of(before) | dict(changes)
    for alias, (head, _, rest) in _aliases(cls).items():
        if alias in changes and head not in changes:
            values[head] = (
                dataclasses.replace(values[head], **{rest: None}) if rest else changes[alias]
            )
    return cls(**values)


def _aliases(cls: Any) -> dict[str, tuple[str, str, str]]:
    """Returns (option, ".", option within it) by alias; without a path the last two are ""."""
    return {alias: path.partition(".") for alias, path in declared(cls, "ALIASES", {}).items()}


def _unaliased(cls: Any, values: Settings) -> Arguments:
    """Returns values by the names of their fields, with aliases replaced.

    A class may declare `ALIASES: ClassVar[Mapping[str, str]]`, which maps aliases to the paths of
    options.

    Raises:
        ConfigError: An option is given under both names, with different values.
    """
    made = dict(values)
    for alias, (head, _, rest) in _aliases(cls).items():
        value, there = made.pop(alias, None), made.get(head)
        if value is None:
            continue
        if not rest:
            found, made[head] = there, value
        elif there is None or isinstance(there, Mapping):
            found = None if there is None else there.get(rest)
            made[head] = {**(there or {}), rest: value}
        else:
            found, made[head] = (
                fields_of(there).get(rest),
                dataclasses.replace(there, **{rest: value}),
            )
        if found is not None and found != value:
            path = f"{head}.{rest}" if rest else head
            raise ConfigError(
                at=alias,
                problem=f"{value!r}, but {path} is {found!r}: they are one option",
                fix="Give one of them.",
            )
    return made


def is_config(cls: object) -> bool:
    return isinstance(cls, type) and declared(cls, "__easypipe_config__", False)


def meant(cls: Any, key: str) -> str | None:
    """Returns what to write instead of an unknown key of a config class; None if nothing is near.

    A class may declare `ELSEWHERE: ClassVar[Mapping[str, str]]`: for keys that people look for
    here, a sentence that says where the option is.
    """
    if told := declared(cls, "ELSEWHERE", {}).get(key):
        return told
    if (told := ours(key)) is not None:
        return told
    within = [
        f"{name}.{key}"
        for name, hint in _hints(cls).items()
        if any(key in _field_names(part) for part in _configs_of(hint))
    ]
    return (
        f"Did you mean {' or '.join(map(repr, within))}?"
        if within
        else did_you_mean(key, _field_names(cls))
    )


def from_dict(cls: type[T], values: Any, at: str = "") -> T:
    """Returns `cls(**values)`; `at` is put in front of the key path of any error.

    Raises:
        ConfigError: `values` are not a mapping, or not valid options.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(at=at or cls.__name__, problem=f"expected a mapping, got {values!r}")
    try:
        return cls(**{str(key): value for key, value in values.items()})
    except ConfigError as error:
        raise (error.under(at) if at else error) from None


def to_dict(value: Any) -> Any:
    """Returns plain dicts, lists and scalars that `from_dict` and YAML accept.

    Fields marked `metadata={'secret': True}` are left out.
    """
    if value is None or isinstance(value, (bool, int, float, str)):  # most values, told first
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: to_dict(option) for name, option in fields_of(value, secret=False).items()}
    if isinstance(value, Mapping):
        return {str(key): to_dict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_dict(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, types.FunctionType | types.BuiltinFunctionType | type):
        return f"{value.__module__}:{value.__qualname__}"
    return repr(value)


def digest(*parts: Any) -> str:
    """Returns 32 hex digits of SHA-256 over canonical JSON, which are the same on every machine."""
    text = json.dumps(
        [to_dict(part) for part in parts],
        sort_keys=True,
        separators=(",", ":"),
        ensure_ascii=True,
        allow_nan=False,
    )
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def load_yaml(path: str | Path) -> JsonObject:
    """Returns the mapping in a YAML file, read safely (core/safe_yaml.py).

    Raises:
        ConfigError: The file cannot be read or is not valid YAML, or it names code or an untrusted
            server.
    """
    path = Path(path)
    try:
        if not path.is_file():
            inside = path / "run.yaml"  # a run's folder
            raise ConfigError(
                at=str(path),
                problem="this is a folder" if path.is_dir() else "no such file",
                fix=f"Give the path of {'its run.yaml' if inside.is_file() else 'a YAML file'}.",
            )
        text = path.read_bytes().decode()
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            at=place(str(path), line=line),
            problem=f"not UTF-8 at byte {error.start}",
            fix="Save the file as UTF-8.",
        ) from None
    except OSError as error:
        raise ConfigError(
            at=str(path), problem=f"cannot be read: {error.strerror}", fix="Check the path."
        ) from None
    return parse_yaml(text, at=str(path))


def parse_yaml(text: str, at: str) -> JsonObject:
    """Returns the mapping in a YAML text; `at` is its name in errors.

    Raises:
        ConfigError: As in `load_yaml`.
    """
    try:
        values = read_yaml(text)
    except yaml.YAMLError as error:
        line, why = wrong_yaml(error, text)
        raise ConfigError(
            at=place(at, line=line), problem=f"not valid YAML: {why}", fix="Correct that line."
        ) from None
    require(
        isinstance(values, dict),
        at,
        f"expected a mapping at the top, got {type(values).__name__}",
        "Write one option a line, as key: value.",
    )
    require_harmless(values, "")
    return values


@contextlib.contextmanager
def allowing_code() -> Generator[None]:
    """Lets YAML name functions to call within the block; configs made in Python always may."""
    token = _code_allowed.set(True)
    try:
        yield
    finally:
        _code_allowed.reset(token)


def require_harmless(values: Any, at: str) -> None:
    """Checks that plain values that came as text are harmless: reading a config must not run code.

    Args:
        values: Plain values.
        at: Their key path.

    Raises:
        ConfigError: They name a function to call or an untrusted server, or a text holds half a
            surrogate pair, which cannot be in the name of a file or column.
    """
    if isinstance(values, dict):
        for key, value in values.items():
            here = f"{at}.{key}".lstrip(".")
            require_harmless(key, at)
            if key == "storage_options" and isinstance(value, dict):
                require_trusted_storage(value, here)
            if key in CODE_KEYS and value is not None and not _code_allowed.get():
                fix = (
                    "If you trust this file, pass --allow-code; in Python: `with "
                    "easypipe.core.config.allowing_code():`."
                )
                raise ConfigError(at=here, problem=f"runs code, {value!r}", fix=fix)
            require_harmless(value, here)
    elif isinstance(values, list):
        for i, value in enumerate(values):
            require_harmless(value, f"{at}[{i}]")
    elif isinstance(values, str):
        whole = not any("\ud800" <= letter <= "\udfff" for letter in values)
        require(whole, at, f"{values!a} is not valid Unicode", "Write it again.")


def apply_overrides(values: JsonObject, overrides: Sequence[str]) -> JsonObject:
    """Returns a copy of `values` with each `key.path=value` set.

    Args:
        values: The options.
        overrides: Texts; items of lists are named by number, as in `datasets.0` or, as in errors,
            `datasets[0]`; values are read as YAML.

    Raises:
        ConfigError: A path or a value cannot be understood.
    """
    result = json.loads(json.dumps(values, default=str))
    for override in overrides:
        try:  # if the locale is ASCII, the bytes of other letters are single surrogates
            override = override.encode("utf-8", "surrogateescape").decode()
        except UnicodeError:
            problem = f"{override!a} is not valid UTF-8"
            raise ConfigError(at="--set", problem=problem, fix="Write it in UTF-8.") from None
        path, equals, text = override.partition("=")
        path = re.sub(r"\[([0-9]+)\]", r".\1", path)
        require(
            equals and all(path.split(".")) and path.count(".") < DEEPEST,
            override[:200],
            "not of the form key.path=value",
            "Write --set train.steps=100.",
        )
        try:
            value = read_yaml(text)
        except yaml.YAMLError as error:
            _, why = wrong_yaml(error, text)
            problem = f"{text!a} is not a YAML value: {why}"
            raise ConfigError(at=path, problem=problem, fix="Quote it: 'key=\"text\"'.") from None
        node: Any = result
        keys = path.split(".")
        for depth, key in enumerate(keys):
            last = depth == len(keys) - 1
            here = ".".join(keys[: depth + 1])
            if isinstance(node, list):
                require(
                    key.isdecimal() and int(key) < len(node),
                    here,
                    f"no item {key!r}",
                    have=range(len(node)),
                )
                index: Any = int(key)
            elif isinstance(node, dict):
                index = key
            else:
                raise ConfigError(
                    at=here, problem=f"{node!r} has no keys", fix="Set the key before the dot."
                )
            if last:
                node[index] = value
            else:
                if isinstance(node, dict) and node.get(index) is None:
                    node[index] = {}
                node = node[index]
    require_harmless(result, "")
    return result


def _field_names(cls: Any) -> list[str]:
    return [f.name for f in dataclasses.fields(cls)]


@functools.cache
def _hints(cls: Any) -> Arguments:
    hints = typing.get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls)}


def _configs_of(hint: Any) -> list[Any]:
    """Returns the config classes that a field of this type may hold."""
    return [
        kind for kind in (typing.get_args(hint) if _is_union(hint) else [hint]) if is_config(kind)
    ]


def _structure(value: Any, hint: Any, at: str) -> Any:
    """Turns mappings into nested configs, and lists into tuples, if the type requires them.

    Everything else is left to validation.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if _is_union(hint):
        if value is None and type(None) in arguments:
            return None
        if isinstance(value, Mapping) and (configs := _configs_of(hint)):
            return from_dict(_meant(configs, value), value, at)
        for argument in arguments:
            if typing.get_origin(argument) in (tuple, dict) and isinstance(
                value, list | tuple | Mapping
            ):
                value = _structure(value, argument, at)
        return value
    if is_config(hint):
        return from_dict(hint, value, at) if isinstance(value, Mapping) else value
    if origin is tuple and isinstance(value, list | tuple):
        items = arguments[:1] * len(value) if arguments[1:] == (...,) else arguments
        require(len(items) == len(value), at, f"expected {len(items)} items, got {len(value)}")
        return tuple(
            _structure(item, h, f"{at}[{i}]")
            for i, (item, h) in enumerate(zip(value, items, strict=True))
        )
    if origin is dict and isinstance(value, Mapping):
        return {key: _structure(item, arguments[1], f"{at}.{key}") for key, item in value.items()}
    return value


def _meant(configs: list[Any], values: Mapping[Any, Any]) -> Any:
    """Chooses the config class that a mapping is meant for.

    It is the first class with required options that are all given, else the first class without
    required options.
    """
    named = [cls for cls in configs if _required(cls) and _required(cls) <= values.keys()]
    return (named or [cls for cls in configs if not _required(cls)] or configs)[0]


def _readable(error: pydantic.ValidationError, cls: Any) -> ConfigError:
    """Returns the first complaint of pydantic as a ConfigError.

    pydantic lists every branch of a union; the complaints about one field share its name.
    """
    complaints = error.errors()
    same_field = [c for c in complaints if c["loc"][:1] == complaints[0]["loc"][:1]]
    # the branch that matched the most of the value is the one that was meant
    first = max(same_field, key=lambda c: len(c["loc"]))
    if len(first["loc"]) > 2:
        same_field = [first]
    loc = list(first["loc"])
    branches = [a for a in typing.get_args(_hints(cls).get(str(loc[0]))) if a is not type(None)]
    if len(loc) > 1 and len(branches) > 1 and _is_union(_hints(cls)[str(loc[0])]):
        del loc[1]  # the name of the union's branch, which is not part of the key path
    at = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).lstrip(".")
    if first["type"] == "missing":
        return ConfigError(at=at, problem="required, but not given", fix=f"Set {at!r}.")
    wanted = _wanted(same_field)
    value = first["input"]
    if any(f.metadata.get("secret") and f.name == str(loc[0]) for f in dataclasses.fields(cls)):
        return ConfigError(at=at, problem=f"{wanted}, got a value of another type")
    if first["type"] == "literal_error" and len(same_field) == 1:
        options = re.findall(r"'([^']*)'", str((first.get("ctx") or {}).get("expected", "")))
        theirs = value if isinstance(value, str) else ""
        fix = did_you_mean(VALUES.get(theirs, theirs), options) if theirs else None
        return ConfigError(at=at, problem=f"{value!r} is not an option", have=options, fix=fix)
    shown = repr(value) if len(repr(value)) <= 80 else repr(value)[:77] + "..."
    section, fix = _spelled(value, _hints(cls).get(str(loc[0]))) if len(loc) == 1 else (None, None)
    options = None if section is None else _field_names(section)
    if value is None and fix is None:
        fix = "Give one, or leave it out."
    return ConfigError(
        at=at, problem=f"{wanted}, got {shown} ({type(value).__name__})", have=options, fix=fix
    )


_WANTED = {
    "bool_type": "true or false",
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "a text",
    "tuple_type": "a list",
    "dict_type": "a mapping",
}


def _wanted(complaints: Sequence[Any]) -> str:
    """Returns what pydantic expected, in the words of YAML."""

    def one(complaint: Any) -> str:
        instance = re.fullmatch(
            r"Input should be (?:a dictionary or )?an instance of (\w+)", complaint["msg"]
        )
        if instance is not None:
            return "a path" if instance[1] == "Path" else "a mapping of options"
        return _WANTED.get(complaint["type"], "")

    said = list(dict.fromkeys(map(one, complaints)))
    return (
        f"wants {' or '.join(said)}"
        if all(said)
        else " or ".join(dict.fromkeys(c["msg"][:1].lower() + c["msg"][1:] for c in complaints))
    )


def _spelled(value: Any, hint: Any) -> tuple[Any, str | None]:
    """Returns the config class that belongs in the place of `value`, and how to write it.

    Each is None if there is none.
    """
    branches = typing.get_args(hint) if _is_union(hint) else (hint,)
    section = next(iter(_configs_of(hint)), None)
    none = type(None) in branches
    if isinstance(value, str) and value.lower() == "none" and none:
        return None, "Write null for none."
    if section is not None:
        needed = _required(section)
        given = f"Give at least {', '.join(sorted(needed))}" if needed else "{} takes all defaults"
        return section, f"{given}; null leaves it out." if none else f"{given}."
    if isinstance(value, float) and value.is_integer() and int in branches:
        return None, f"Write {int(value)}."
    if isinstance(value, str) and any(typing.get_origin(branch) is tuple for branch in branches):
        return None, f"Write [{value}]."
    return None, None


def _required(cls: Any) -> set[str]:
    """Returns the names of the options without a default."""
    nothing = dataclasses.MISSING
    return {
        f.name
        for f in dataclasses.fields(cls)
        if f.default is nothing and f.default_factory is nothing
    }


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)
