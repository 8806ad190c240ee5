"""The signatures of all public names: parameters, their kinds and defaults; the fields of configs;
the options of the commands.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import typing
from pathlib import Path
from typing import Any

import easypipe
from golden.cases import golden
from golden.digests import plain

MODULES = (
    "easypipe.train",
    "easypipe.kernels",
    "easypipe.interop.grain",
    "easypipe.interop.hub",
    "easypipe.interop.torch",
)


@golden()
def package(folder: Path) -> Any:
    return {
        name: _described(getattr(easypipe, name))
        for name in easypipe.__all__
        if name != "__version__"
    }


@golden()
def modules(folder: Path) -> Any:
    found = {}
    for name in MODULES:
        try:
            module = importlib.import_module(name)
        except ImportError as error:  # torch is an extra
            found[name] = f"needs {error.name}"
            continue
        found[name] = {
            one: _described(getattr(module, one)) for one in sorted(getattr(module, "__all__", ()))
        }
    found["easypipe.interop.torch"] = "needs torch"  # wherever it is installed, the same
    return found


@golden()
def commands(folder: Path) -> Any:
    """Every command with its arguments and options: their types, limits and defaults."""
    import typer.main

    from easypipe.cli.app import app

    def of(command: Any) -> Any:
        inner = getattr(command, "commands", None)
        if inner:
            return {name: of(one) for name, one in sorted(inner.items())}
        function = inspect.unwrap(command.callback)
        hints = typing.get_type_hints(function, include_extras=True)
        defaults = inspect.signature(function).parameters
        return {
            [*one.opts, *one.secondary_opts][0]: _option(hints[one.name], defaults[one.name])
            for one in sorted(command.params, key=lambda one: one.opts)
            if one.name in hints
        }

    return of(typer.main.get_command(app))


def _option(hint: Any, parameter: inspect.Parameter) -> str:
    """Type, limits and default of what a command takes."""
    kind, *more = typing.get_args(hint) if typing.get_origin(hint) is typing.Annotated else [hint]
    limits = ("min", "max", "clamp", "exists", "file_okay", "dir_okay", "case_sensitive")
    said = [f"{name}={getattr(one, name)}" for one in more for name in limits]
    usual = ("=None", "file_okay=True", "dir_okay=True", "exists=False", "clamp=False", "ive=True")
    default = parameter.default
    given = [] if default is inspect.Parameter.empty else [f"= {plain(default)}"]
    name = re.sub(r"pathlib\.|_local\.", "", inspect.formatannotation(kind))
    return " ".join([name, *(one for one in said if not one.endswith(usual)), *given])


def _described(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and isinstance(value, type):
        fields = {
            f.name: _default(f.default, f.default_factory)
            for f in dataclasses.fields(value)
            if f.init
        }
        return {"fields": fields, "methods": _methods(value)}
    if isinstance(value, type):
        return {"init": _signature(value.__init__), "methods": _methods(value)}
    if callable(value):
        return _signature(value)
    return plain(value)


def _default(default: Any, factory: Any) -> Any:
    if default is dataclasses.MISSING:
        return (
            "required"
            if factory is dataclasses.MISSING
            else f"{getattr(factory, '__name__', 'made')}()"
        )
    return plain(default)


def _methods(of: type) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in sorted(vars(of).items()):
        if name.startswith("_"):
            continue
        value = getattr(value, "__func__", value)
        if inspect.isfunction(value):
            found[name] = _signature(value)
        elif isinstance(value, property) or type(value).__name__ == "cached_property":
            found[name] = "property"
    return found


def _signature(function: Any) -> list[str] | str:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return "no signature"
    mark = {
        inspect.Parameter.VAR_POSITIONAL: "*",
        inspect.Parameter.VAR_KEYWORD: "**",
        inspect.Parameter.KEYWORD_ONLY: "*, ",
    }
    return [
        f"{mark.get(one.kind, '')}{one.name}"
        + ("" if one.default is inspect.Parameter.empty else f"={one.default!r}".split(" at 0x")[0])
        for one in parameters
        if one.name not in ("self", "cls")
    ]
