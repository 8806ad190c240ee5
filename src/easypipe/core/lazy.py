# pyright: strict
"""Packages whose names are loaded when first used: their stubs (`__init__.pyi`) list them, once."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any


def homes(package_file: str) -> dict[str, str]:
    """Exported name → the module that defines it, as the stub beside `package_file` imports it."""
    stub = ast.parse(Path(package_file).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom) and node.module]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def lazy_exports(
    package: str, package_file: str, *others: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a package: call it with `__name__` and `__file__`.

    others: names that the package defines itself.

    Importing such a package imports nothing else of easypipe but this module.
    """
    found = homes(package_file)

    def load(name: str) -> Any:
        if name not in found:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            return getattr(importlib.import_module(found[name]), name)
        except ModuleNotFoundError:
            from easypipe.core.errors import naming_extra

            with naming_extra():
                raise

    names = sorted([*found, *others])
    return load, lambda: names, names
