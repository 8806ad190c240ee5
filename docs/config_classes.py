"""Griffe extension of the API reference: reads a config class as the dataclass that it becomes,
so that the tables of its keys have their types and defaults.
"""

from __future__ import annotations

import griffe


class ConfigClasses(griffe.Extension):
    """Takes `@config` for `@dataclass(kw_only=True)`, which griffe knows."""

    def on_class_instance(self, *, cls: griffe.Class, **_: object) -> None:
        for decorator in cls.decorators:
            value = decorator.value
            if isinstance(value, griffe.Expr) and value.canonical_path.endswith(".config"):
                decorator.value = griffe.ExprCall(
                    griffe.ExprName("dataclasses.dataclass"),
                    [griffe.ExprKeyword("kw_only", "True")],
                )
