"""Whatever a module lists in `__all__` is there, and the front door's list is what it opens."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

import easypipe

MODULES = ["easypipe", *(module.name for module in pkgutil.walk_packages(easypipe.__path__, "easypipe."))]


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
