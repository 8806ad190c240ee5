"""Files that carry a checksum of themselves: what was written comes back, and whatever else stands
there is damage.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from easypipe.core.checked import (
    KEY,
    checked_json,
    commit_checked,
    parse_checked,
    read_checked,
    recall_checked,
    remember_checked,
)
from easypipe.core.errors import DamagedFileError, MissingFileError

VALUE = {"states": [{"epoch": 3, "checksum": "0" * 32}], "plan": 'a"b\n', KEY[:4]: None}
SHAPES = [
    b"",
    b"{",
    b"[1]",
    b"null",
    b'"x"',
    b"3",
    b"\xff\xfe",
    b"{}",
    json.dumps({**VALUE, KEY: "0" * 32}).encode(),
]

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.dictionaries(st.text().filter(lambda key: key != KEY), json_values, max_size=4), st.data()
)
def test_what_was_written_comes_back_and_no_changed_byte_does(
    value: dict[str, Any], data: st.DataObject
) -> None:
    written = checked_json(value)
    assert parse_checked(written, "a.json") == value
    at, bit = data.draw(st.integers(0, len(written) - 1)), data.draw(st.integers(0, 7))
    changed = written[:at] + bytes([written[at] ^ 1 << bit]) + written[at + 1 :]
    for older in (None, value.keys()):
        with pytest.raises(DamagedFileError, match=r"^a\.json: damaged: "):
            parse_checked(changed, "a.json", older=older)
    with pytest.raises(DamagedFileError):
        parse_checked(written[:at], "a.json", older=value.keys())


@pytest.mark.parametrize("shape", SHAPES)
def test_damage_of_any_shape(
    tmp_path: Path, shape: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(shape)
    with pytest.raises(DamagedFileError, match=r"damaged: .*Delete the file and run again"):
        read_checked(path)
    with caplog.at_level(logging.WARNING, "easypipe"):
        assert recall_checked(path, dict, what="the plan") is None
    assert f"the plan {path} is rebuilt: damaged: it" in caplog.text
    commit_checked(path, VALUE)
    assert recall_checked(path, lambda found: found["states"], what="the plan") == VALUE["states"]


def test_missing_foreign_and_older(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "a.json"
    assert recall_checked(path, dict, what="the plan") is None
    with pytest.raises(MissingFileError):
        read_checked(path)
    assert not caplog.records
    path.write_text(json.dumps(VALUE))
    assert read_checked(path, older=VALUE) == VALUE
    commit_checked(path, {})
    assert recall_checked(path, lambda found: found["states"], what="the plan") is None
    assert "does not hold what this version of easypipe writes: KeyError('states')" in caplog.text


def test_one_that_stands_under_the_name_of_another_is_made_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two indexes, plans or records of ranges that were swapped are whole, each by itself."""
    remember_checked(tmp_path / "a.json", VALUE)
    assert recall_checked(tmp_path / "a.json", dict, what="the plan") == VALUE
    (tmp_path / "a.json").rename(tmp_path / "b.json")
    assert recall_checked(tmp_path / "b.json", dict, what="the plan") is None
    assert "b.json is rebuilt: damaged: it was written as a.json" in caplog.text
    commit_checked(tmp_path / "c.json", VALUE)  # as earlier versions wrote them
    (tmp_path / "c.json").rename(tmp_path / "d.json")
    assert recall_checked(tmp_path / "d.json", dict, what="the plan") == VALUE
