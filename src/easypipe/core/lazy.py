# pyright: strict
"""Packages whose names are imported on first use; their stubs (`__init__.pyi`) list the names."""

from __future__ import annotations

import importlib
from _ast import ImportFrom, Module, PyCF_ONLY_AST

# `import easypipe` waits for what this module imports; ast, pathlib and typing would be three
# quarters of that time.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def homes(package_file: str) -> dict[str, str]:
    """Returns the module of each exported name, read from the stub next to `package_file`."""
    path = package_file.rpartition(".")[0] + ".pyi"
    with open(path, encoding="utf-8") as file:
        stub = compile(file.read(), path, "exec", PyCF_ONLY_AST)
    assert isinstance(stub, Module)
    imports = [node for node in stub.body if isinstance(node, ImportFrom) and node.module]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def lazy_exports(
    package: str, package_file: str, *others: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Returns `__getattr__`, `__dir__` and `__all__` of a package.

    Importing such a package imports only this module of easypipe.

    Args:
        package: The package's `__name__`.
        package_file: The package's `__file__`.
        *others: Names that the package defines itself.
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
