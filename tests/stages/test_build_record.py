"""What keeps a config from being written down as it is, and which values do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from easypipe import DatasetConfig
from easypipe.core.config import CODE_KEYS
from easypipe.stages.build_record import _reasons

CODE = sorted(CODE_KEYS)[0]


@pytest.mark.parametrize(
    ("value", "reasons"),
    [
        (None, []),
        (True, []),
        (7, []),
        (0.5, []),
        ("text", []),
        (Path("a"), []),
        ("https://host/a?version=7", []),
        ({"a": [1, {"b": ("c", None)}]}, []),
        (DatasetConfig(name="d", data_files="a.jsonl"), []),
        ({CODE: None}, []),
        ({CODE: "module:function"}, [f"{CODE} runs code"]),
        ({"a": {"b": [{CODE: "x"}]}}, [f"a.b[0].{CODE} runs code"]),
        ("https://me:pa55@host/a", [" is an address with credentials"]),
        ({"a": ["x", "s3://k:s@b/c"]}, ["a[1] is an address with credentials"]),
        ({"a": {"b": len}}, ["a.b is a builtin_function_or_method in memory"]),
        ({"a": [object(), 1, {2}]}, ["a[0] is a object in memory", "a[2] is a set in memory"]),
        (DatasetConfig(name="d", data_files="https://me:pa55@host/a.jsonl"), ["data_files is an address with credentials"]),
    ],
)  # fmt: skip
def test_what_plain_values_do_not_say(value: Any, reasons: list[str]) -> None:
    assert _reasons(value, "") == reasons
