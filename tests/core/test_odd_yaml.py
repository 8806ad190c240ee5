"""YAML files that are odd, damaged or hostile: an error with file and line, at once."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from easypipe import LoadStageConfig, TokenizerConfig
from easypipe.cli import main
from easypipe.core import safe_yaml
from easypipe.core.config import apply_overrides, load_yaml
from easypipe.core.errors import ConfigError
from easypipe.core.safe_yaml import MOST_REPEATED

BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{c}: &{c} [{','.join([f'*{chr(ord(c) - 1)}'] * 9)}]\n" for c in "bcdefghij"
)
ODD = {
    "bomb": (BOMB, "its aliases repeat more than 100,000 values", 5),
    "latin": ("a: 1\nb: é".encode("latin-1"), "not UTF-8 at byte 8", 2),
    "utf16": ("a: 1".encode("utf-16"), "not UTF-8 at byte 0", 1),
    "brackets": ("a:\n " + "[" * 900, "nested more than 100 deep", 2),
    "mappings": ("\n".join(" " * i + "a:" for i in range(300)), "nested more than 100 deep", 100),
    "list key": ("a: 1\n? [a, b]\n: 1\n", "a key is not text", 2),
    "mapping key": ("? {a: b}\n: 1\n", "a key is not text", 1),
    "date key": ("2024-01-01: 1\n", "a key is not text", 1),
    "no month": ("a: 1\nb: 2024-13-45\n", "not a valid timestamp: month must be in 1..12", 2),
    "no hour": ("a: 2024-02-28T25:61:00\n", "not a valid timestamp: hour must be in 0..23", 1),
    "digits": ("a: " + "9" * 5000, "not a valid int: Exceeds the limit", 1),
    "hex": ("a: 0x" + "f" * 50000, "not a valid int: it has more than 128 bits", 1),
    "minutes": (
        "a: !!int " + ":".join(["59"] * 5000),
        "not a valid int: it has more than 128 bits",
        1,
    ),
    "no bool": ("a: !!bool maybe", "not a valid bool: 'maybe'", 1),
    "no date": ("a: !!timestamp x", "not a valid timestamp", 1),
    "nul": ("a: 1\nb: \0", "unacceptable character #x0000", 2),
    "itself": ("a: &a [*a]\n", "found unconstructable recursive node", 1),
}


@pytest.mark.parametrize("name", ODD)
def test_the_error_names_file_and_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content, problem, line = ODD[name]
    path = tmp_path / "odd.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    began = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        load_yaml(path)
    assert time.monotonic() - began < 20
    text = str(caught.value)
    assert problem in text
    assert text.startswith(f"{path}, line {line}: ")
    assert main(["plan", str(path)]) == 2
    assert problem in capsys.readouterr().err


def test_a_file_of_many_values_or_letters_is_refused_before_it_is_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "large.yaml"
    monkeypatch.setattr(safe_yaml, "MOST_VALUES", 1000)
    path.write_text("a:\n" + " - 1\n" * 997)
    assert len(load_yaml(path)["a"]) == 997
    path.write_text("a:\n" + " - 1\n" * 2000)
    with pytest.raises(
        ConfigError, match=r"large\.yaml, line 1001: .*it has more than 1,000 values"
    ):
        load_yaml(path)
    path.write_text("a: " + "x" * safe_yaml.LONGEST)
    with pytest.raises(ConfigError, match=r"large\.yaml: .*more than 10,000,000 characters"):
        load_yaml(path)


def test_aliases_are_of_use(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("a: &a {x: [1, 2]}\nb: {<<: *a, y: 3}\nc: [*a, *a]\n")
    a = {"x": [1, 2]}
    assert load_yaml(path) == {"a": a, "b": {**a, "y": 3}, "c": [a, a]}
    path.write_text(f"a: [{', '.join(['1'] * (MOST_REPEATED + 1))}]")  # long, but written out
    assert len(load_yaml(path)["a"]) == MOST_REPEATED + 1


def test_overrides_are_read_by_the_same_rules() -> None:
    for text, problem in (("2024-13-45", "month must be"), ("[" * 200, "nested more than")):
        with pytest.raises(ConfigError, match=rf"^a: .*{problem}"):
            apply_overrides({}, [f"a={text}"])


def test_a_path_that_no_file_can_have(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "x" * 6000]) == 2
    assert "cannot be read: File name too long. Check the path." in capsys.readouterr().err


def test_numbers_beyond_64_bits_and_passes_beyond_counting_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^max_length: 10+ does not fit 64 bits"):
        TokenizerConfig(name_or_path="x", max_length=10**20)
    with pytest.raises(ConfigError, match=r"^num_epochs: 10+ passes are too many .* null"):
        LoadStageConfig(batch_size=1, num_epochs=10**15)
    assert LoadStageConfig(batch_size=1, num_epochs=100_000).num_epochs == 100_000
