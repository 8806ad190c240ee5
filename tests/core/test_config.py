from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest

from easypipe import PipelineConfig
from easypipe.core.config import (
    apply_overrides,
    check_at_least,
    config,
    digest,
    from_dict,
    load_yaml,
    parse_yaml,
    to_dict,
    was_given,
    with_aliases,
)
from easypipe.core.errors import ConfigError


@config
class Inner:
    seq_length: int
    strategy: Literal["greedy", "pool"] = "greedy"

    def check(self) -> None:
        if self.seq_length < 1:
            raise ConfigError(
                at="seq_length",
                problem=f"{self.seq_length} is not a row length",
                fix="Give at least 1.",
            )


@config
class Section:
    steps: int | None = None


@config
class Aliased:
    ALIASES: ClassVar[Mapping[str, str]] = {"epochs": "passes", "length": "section.steps"}
    passes: int | None = 1
    section: Section | None = None
    epochs: int | None = None
    length: int | None = None

    def check(self) -> None:
        check_at_least(self, 1, "passes")


@config
class Outer:
    inner: Inner
    many: tuple[Inner, ...] = ()
    weights: dict[str, float] | None = None
    named: dict[str, Inner] | None = None
    either: Inner | str | None = None
    files: str | tuple[str, ...] = ""
    anything: Any = None
    section: Section | None = None
    flag: bool = False
    token: str | None = dataclasses.field(default=None, metadata={"secret": True})


GOOD: dict[str, Any] = {"inner": {"seq_length": 8}}

REFUSED = [
    (
        {"inner": {"seq_lenght": 8}},
        "inner.seq_lenght: unknown key (have: seq_length, strategy). Did you mean 'seq_length'?",
    ),
    (
        {**GOOD, "seq_length": 8},
        "seq_length: unknown key (have: KEYS). Did you mean 'inner.seq_length' or "
        "'either.seq_length'?",
    ),
    ({"inner": {"seq_length": "8"}}, "inner.seq_length: wants a whole number, got '8' (str)"),
    ({"inner": {"seq_length": True}}, "inner.seq_length: wants a whole number, got True (bool)"),
    ({"inner": {"seq_length": 0}}, "inner.seq_length: 0 is not a row length. Give at least 1."),
    (
        {**GOOD, "many": [GOOD["inner"], {"seq_length": 0}]},
        "many[1].seq_length: 0 is not a row length. Give at least 1.",
    ),
    (
        {**GOOD, "named": {"a": {"seq_length": 0}}},
        "named.a.seq_length: 0 is not a row length. Give at least 1.",
    ),
    (
        {**GOOD, "many": [{"seq_length": 1, "strategy": "gredy"}]},
        "many[0].strategy: 'gredy' is not an option (have: greedy, pool). Did you mean 'greedy'?",
    ),
    ({**GOOD, "weights": [1]}, "weights: wants a mapping, got [1] (list)"),
    ({**GOOD, "weights": {"code": "much"}}, "weights.code: wants a number, got 'much' (str)"),
    (
        {**GOOD, "either": {"seq_length": 0}},
        "either.seq_length: 0 is not a row length. Give at least 1.",
    ),
    (
        {**GOOD, "either": 3},
        "either: wants a mapping of options or a text, got 3 (int) (have: seq_length, strategy). "
        "Give at least seq_length; null leaves it out.",
    ),
    (
        {**GOOD, "inner": True},
        "inner: wants a mapping of options, got True (bool) (have: seq_length, strategy). Give at "
        "least seq_length.",
    ),
    (
        {**GOOD, "section": True},
        "section: wants a mapping of options, got True (bool) (have: steps). {} takes all "
        "defaults; null leaves it out.",
    ),
    (
        {**GOOD, "section": {"steps": 1e3}},
        "section.steps: wants a whole number, got 1000.0 (float). Write 1000.",
    ),
    (
        {**GOOD, "section": {"steps": 1.5}},
        "section.steps: wants a whole number, got 1.5 (float)",
    ),
    (
        {**GOOD, "section": {"steps": "None"}},
        "section.steps: wants a whole number, got 'None' (str). Write null for none.",
    ),
    ({**GOOD, "flag": "maybe"}, "flag: wants true or false, got 'maybe' (str)"),
    ({**GOOD, "many": "a"}, "many: wants a list, got 'a' (str). Write [a]."),
    (
        {**GOOD, "many": None},
        "many: wants a list, got None (NoneType). Give one, or leave it out.",
    ),
    ({**GOOD, "files": ["a", 3]}, "files[1]: wants a text, got 3 (int)"),
    ({}, "inner: required, but not given. Set 'inner'."),
]


@pytest.mark.parametrize(
    ("values", "message"), REFUSED, ids=lambda v: v if isinstance(v, str) else ""
)
def test_refusals_name_the_key_path_and_the_fix(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        from_dict(Outer, values)
    message = message.replace(
        "KEYS", "inner, many, weights, named, either, files, anything, section, flag, token"
    )
    assert str(refusal.value) == message
    with pytest.raises(ConfigError) as refusal:
        from_dict(Outer, values, at="data")
    assert str(refusal.value) == "data." + message


@pytest.mark.parametrize("key", ["cache_dir", "save.output_dir", "datasets.0.cache_path"])
def test_a_path_that_was_a_url_names_no_local_folder(key: str) -> None:
    *above, name = key.split(".")
    values: dict[str, Any] = {"datasets": [{"data_files": "x"}], "save": {}}
    into = functools.reduce(lambda at, key: at[int(key) if key.isdigit() else key], above, values)
    into[name] = Path("s3://bucket/folder")
    told = rf"{name}: 's3:/bucket/folder' was a URL, in which pathlib.Path .* Give it as a str\."
    with pytest.raises(ConfigError, match=told):
        from_dict(PipelineConfig, values)
    for fine in ("s3://bucket/folder", Path("folder"), Path("/a:/b"), Path("C:/b")):
        into[name] = fine
        from_dict(PipelineConfig, values)


def test_the_suggested_spelling_works() -> None:
    assert from_dict(Outer, {"inner": {"seq_length": 8}}).inner.seq_length == 8


def test_frozen_and_replaceable() -> None:
    outer = Outer(inner=Inner(seq_length=2), files=["a", "b"])  # pyright: ignore[reportArgumentType]
    assert outer.files == ("a", "b")
    with pytest.raises(dataclasses.FrozenInstanceError):
        outer.files = "c"  # type: ignore[misc]
    assert dataclasses.replace(outer, files="c").files == "c"
    with pytest.raises(ConfigError, match="keyword arguments only"):
        Inner(3)  # type: ignore[misc]


def test_round_trip_leaves_secrets_out() -> None:
    outer = Outer(inner=Inner(seq_length=2), weights={"a": 1}, token="hf_secret")
    plain = to_dict(outer)
    assert "token" not in plain
    assert "hf_secret" not in str(plain)
    assert from_dict(Outer, plain) == dataclasses.replace(outer, token=None)


def test_digest_depends_on_values_only() -> None:
    assert digest(Outer(inner=Inner(seq_length=2))) == digest(
        Outer(inner=Inner(seq_length=2, strategy="greedy"))
    )
    assert digest(Outer(inner=Inner(seq_length=2))) != digest(Outer(inner=Inner(seq_length=3)))
    assert digest(1) != digest("1")
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    assert digest("a", "b") != digest("ab")


def test_an_alias_is_the_option_that_it_stands_for() -> None:
    made = Aliased(epochs=3, length=8)
    assert (made.passes, made.section, made.epochs) == (3, Section(steps=8), None)
    assert with_aliases(made, {"epochs": 5}).passes == 5
    assert with_aliases(made, {"length": 9}).section == Section(steps=9)
    assert with_aliases(made, {"passes": 6}).section == Section(steps=8)
    assert with_aliases(made, {"epochs": 4, "passes": 4}).passes == 4
    for change in ({"epochs": 4, "passes": 5}, {"length": 4, "section": Section(steps=5)}):
        with pytest.raises(ConfigError, match="they are one option"):
            with_aliases(made, change)
        with pytest.raises(ConfigError, match="they are one option"):
            Aliased(**change)  # pyright: ignore[reportArgumentType]


def test_the_least_value_is_enough() -> None:
    assert Aliased(passes=1).passes == 1
    assert Aliased(passes=None).passes is None
    with pytest.raises(ConfigError, match=r"passes: 0 is too small. Give at least 1."):
        Aliased(passes=0)
    largest = (1 << 63) - 1
    assert Aliased(passes=largest).passes == largest
    with pytest.raises(ConfigError, match=f"passes: {largest + 1} does not fit 64 bits"):
        Aliased(passes=largest + 1)


def test_an_option_was_given_if_only_with_its_default() -> None:
    given = Aliased(passes=1)
    assert was_given(given, "passes")
    assert not was_given(given, "section")
    # a copy is made with every option: there a default is one that nobody wrote
    copy = dataclasses.replace(given, section=Section(steps=1))
    assert not was_given(copy, "passes")
    assert was_given(copy, "section")


def test_yaml_numbers_and_duplicates(tmp_path: Any) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("lr: 1e-4\nname: 1e\nn: 3\n")
    assert load_yaml(path) == {"lr": 1e-4, "name": "1e", "n": 3}
    with pytest.raises(ConfigError, match="key 'a' appears twice"):
        parse_yaml("a: 1\na: 2\n", at="x.yaml")
    assert parse_yaml("a: &a {b: 1, c: 2}\nd: {<<: *a, c: 3}\n", at="x.yaml")["d"] == {
        "b": 1,
        "c": 3,
    }
    with pytest.raises(ConfigError, match="not valid YAML"):
        parse_yaml("a: !!python/object/apply:os.system [ls]\n", at="x.yaml")
    with pytest.raises(ConfigError, match="no such file"):
        load_yaml(tmp_path / "absent.yaml")
    path.write_bytes(b"lr: \xff")
    with pytest.raises(ConfigError, match=r"not UTF-8 at byte 4\. Save the file as UTF-8"):
        load_yaml(path)


def test_which_texts_of_yaml_are_numbers() -> None:
    """Those of YAML 1.2's core schema, `_` between digits and `0b`; not sixties nor octals of 1.1."""
    numbers = {
        **{"0": 0, "-7": -7, "+12": 12, "1_000": 1000, "0b101": 5, "0x1F": 31, "1e-4": 1e-4},
        **{"1E3": 1e3, "2.5e+3": 2.5e3, "1.": 1.0, "-1.5": -1.5, ".5": 0.5, "+.5e2": 50.0},
        **dict.fromkeys((".inf", ".Inf", "+.INF"), math.inf),
        "-.inf": -math.inf,
    }
    for text, number in numbers.items():
        [found] = parse_yaml(f"a: {text}\n", at="x.yaml").values()
        assert (found, type(found)) == (number, type(number)), text
    for text in (".nan", ".NaN", ".NAN"):
        assert math.isnan(parse_yaml(f"a: {text}\n", at="x.yaml")["a"])
    for text in ("1:30", "010", "1e", "0x", "1.5.2", ".", "1e5x", "e5"):
        assert parse_yaml(f"a: {text}\n", at="x.yaml")["a"] == text


def test_overrides() -> None:
    values = {"data": {"datasets": [{"name": "a"}]}, "train": None}
    changed = apply_overrides(
        values, ["train.optimizer.learning_rate=1e-4", "data.datasets.0.name=b", "data.flag=true"]
    )
    assert changed == {
        "data": {"datasets": [{"name": "b"}], "flag": True},
        "train": {"optimizer": {"learning_rate": 1e-4}},
    }
    assert values["train"] is None
    with pytest.raises(ConfigError, match=r"data\.datasets\.1: no item '1' \(have: 0\)"):
        apply_overrides(values, ["data.datasets.1.name=b"])
    as_in_errors = apply_overrides(values, ["data.datasets[0].name=b"])
    assert as_in_errors == apply_overrides(values, ["data.datasets.0.name=b"])
    with pytest.raises(ConfigError, match="not of the form"):
        apply_overrides(values, ["data"])
