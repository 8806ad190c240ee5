"""Whatever a module lists in `__all__` is there, and the front door's list is what it opens."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from pathlib import Path

import pytest

import easypipe
from easypipe.core.lazy import homes

MODULES = [
    "easypipe",
    *(module.name for module in pkgutil.walk_packages(easypipe.__path__, "easypipe.")),
]


@pytest.mark.parametrize("name", MODULES)
def test_all_resolves(name: str) -> None:
    if name == "easypipe.interop.torch":
        pytest.importorskip("torch", reason="torch is not installed: pip install easypipe[torch]")
    module = importlib.import_module(name)
    exported = getattr(module, "__all__", [])
    assert len(exported) == len(set(exported)), f"{name}.__all__ repeats itself"
    missing = [item for item in exported if not hasattr(module, item)]
    assert not missing, f"{name}.__all__ names what is not there: {missing}"


def test_dir_lists_the_exports() -> None:
    assert set(easypipe.__all__) <= set(dir(easypipe))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Pipelin'"):
        _ = easypipe.Pipelin


@pytest.mark.parametrize("name", ["easypipe", "easypipe.kernels", "easypipe.train"])
def test_type_checkers_see_what_is_loaded_lazily(name: str) -> None:
    """The stub of a package whose names are loaded when first used exports each of them, and
    nothing else.
    """
    package = importlib.import_module(name)
    body = ast.parse(
        Path(str(package.__file__)).with_suffix(".pyi").read_text(encoding="utf-8")
    ).body
    seen = homes(str(package.__file__))
    assert {*seen} == {*package.__all__} - {"__version__"}
    [listed] = [
        node.value
        for node in body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    assert sorted(ast.literal_eval(listed)) == sorted(package.__all__), (
        f"__all__ of {name}/__init__.pyi"
    )
