"""What decides the rows of a transform is in its fingerprint: every option of every transform of
the house is tried, and what lies below a transform too.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from chat_support import MARKED, WORDS, chat_tokenizer
from easypipe.compat.small_transformer import EncodeTexts
from easypipe.core.protocols import SourceInfo, info_of
from easypipe.sources.external.memory import InMemoryShardedSource
from easypipe.transforms.columns import columns, conversation, functions, hold_out
from easypipe.transforms.columns.base import ColumnTransform, TransformedSource
from easypipe.transforms.columns.columns import (
    ClassNames,
    Combine,
    Drop,
    Extract,
    FilterNonEmpty,
    Rename,
    Select,
)
from easypipe.transforms.columns.conversation import Chat
from easypipe.transforms.columns.functions import Expand, Filter, Map
from easypipe.transforms.columns.hold_out import HoldOut, HoldOutConfig
from easypipe.transforms.prompt import fill_in_the_middle
from easypipe.transforms.prompt.fill_in_the_middle import FillInTheMiddle
from easypipe.transforms.tokenizer.bpe import train_bpe

FIRST, SECOND = ["<a>", "<b>", "<c>"], ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"]


def shout(row: dict[str, Any]) -> dict[str, Any]:
    return {"x": row["text"].upper()}


def other(row: dict[str, Any]) -> dict[str, Any]:
    return {"x": row["text"]}


def many(row: dict[str, Any]) -> list[dict[str, Any]]:
    return [row]


def more(row: dict[str, Any]) -> list[dict[str, Any]]:
    return [row]


@dataclass
class Words:
    """A tokenizer of somebody else's."""

    version: str = "1"
    eos_token_id: int = 1
    pad_token_id: int = 0
    vocab_size: int = 9
    lower: bool = False

    def encode(self, text: str) -> list[int]:
        return [len(word) for word in text.split()]


class Others(Words):
    pass


@pytest.fixture(scope="module")
def fim(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("fim") / "tokenizer"
    train_bpe([word + "\n" for word in WORDS] * 20, 400, [*FIRST, *SECOND], folder)
    return str(folder)


HELD = HoldOutConfig(fraction=0.3)
# how it is made, from what, and what is changed of that: an option and its value
Base = tuple[Callable[..., ColumnTransform], dict[str, Any], list[tuple[str, Any]]]
BASES: list[Base] = [
    (Rename, {"names": {"a": "b"}}, [("names", {"a": "c"}), ("names", {"b": "a"})]),
    (Select, {"names": ["a"]}, [("names", ["b"]), ("names", ["a", "b"]), ("names", ["b", "a"])]),
    (Drop, {"names": ["a"]}, [("names", ["b"]), ("names", ["a", "b"])]),
    (ClassNames, {"names": ["a"]}, [("names", ["b"]), ("names", ["b", "a"])]),
    (FilterNonEmpty, {"names": ["a"]}, [("names", ["b"]), ("names", ["a", "b"])]),
    (Extract, {"paths": {"a": "b.0"}}, [("paths", {"a": "b.1"}), ("paths", {"c": "b.0"})]),
    (
        Combine,
        {"into": "a", "template": "{b}"},
        [("into", "c"), ("template", "{b} "), ("null_as", "")],
    ),
    (Filter, {"test": pc.field("a") > 1}, [("test", pc.field("a") > 2)]),
    (Filter, {"test": shout, "version": "1"}, [("test", other), ("version", "2")]),
    (
        Map,
        {"function": shout, "version": "1"},
        [
            ("function", other),
            ("version", "2"),
            ("batched", True),
            ("columns", {"x": "int64"}),
            ("columns", {"x": "int32"}),
            ("columns", {"y": "int32"}),
        ],
    ),
    (Expand, {"by": "a", "most": 2}, [("by", "b"), ("most", 3)]),
    (
        Expand,
        {"by": many, "most": 2, "version": "1"},
        [("by", more), ("most", 3), ("version", "2"), ("columns", {"x": "bool"})],
    ),
    (
        Chat,
        {"tokenizer": chat_tokenizer()},
        [
            ("messages", "talk"),
            ("tools", "tools"),
            ("into", "said"),
            ("chat_template", MARKED),
            ("template_date", "2026-01-31"),
            ("tokenizer", None),
        ],
    ),
    (
        FillInTheMiddle,
        {"tokenizer": None},
        [
            ("rate", 0.1),
            ("spm_rate", 0.1),
            ("seed", 1),
            ("column", "code"),
            ("tokens", FIRST),
            ("tokens", [FIRST[0], *SECOND[1:]]),
            ("tokens", [SECOND[0], FIRST[1], SECOND[2]]),
            ("tokens", [*SECOND[:2], FIRST[2]]),
        ],
    ),
    (
        HoldOut,
        {
            "options": HELD,
            "names": ["a"],
            "schema": pa.schema({"a": pa.string(), "b": pa.string()}),
        },
        [("names", ["a", "b"]), ("schema", pa.schema({"a": pa.json_()}))]
        + [
            ("options", dataclasses.replace(HELD, **{name: value}))
            for name, value in {"fraction": 0.4, "seed": 1, "held": True}.items()
        ],
    ),
    (
        EncodeTexts,
        {"tokenizer": Words(), "column": "text"},
        [("column", "body"), ("tokenizer", Others())]
        + [
            ("tokenizer", Words(**{name: value}))
            for name, value in {"version": "2", "eos_token_id": 2, "pad_token_id": 3}.items()
        ]
        + [("tokenizer", Words(lower=True))],
    ),
]
ELSEWHERE = {
    ("FillInTheMiddle", "tokenizer"): "decides by its tokens",
}


def made(make: Callable[..., ColumnTransform], options: dict[str, Any], fim: str) -> str:
    if options.get("tokenizer", "") is None:
        options = options | {"tokenizer": fim}
        if make is Chat:
            options["chat_template"] = MARKED.replace("assistant", "bot")
    if make in (Select, Drop, FilterNonEmpty):
        return make(*options["names"]).fingerprint
    return make(**options).fingerprint


def test_every_option_is_in_the_fingerprint_of_a_transform(fim: str) -> None:
    known: dict[str, Any] = {}
    for make, base, changes in BASES:
        for changed in [{}, *({option: value} for option, value in changes)]:
            found = made(make, base | changed, fim)
            assert found == made(make, base | changed, fim)
            assert found not in known, (make, changed, known[found])
            known[found] = make, changed


@pytest.mark.parametrize(
    "other", [Words(version="2"), Words(eos_token_id=2), Words(pad_token_id=3), Others()], ids=repr
)
def test_tokens_of_own_tokenizers_tell_whose_they_are(other: Words) -> None:
    """Which decides whether they may be mixed."""
    own, same, unlike = (
        EncodeTexts(one, "text").tokens.tokenizer_fingerprint for one in (Words(), Words(), other)
    )
    assert own == same != unlike


def test_every_option_of_every_transform_is_tried() -> None:
    modules = (columns, conversation, functions, hold_out, fill_in_the_middle)
    house = {
        kind
        for module in modules
        for kind in vars(module).values()
        if inspect.isclass(kind) and issubclass(kind, ColumnTransform)
    } - {ColumnTransform}
    assert house <= {make for make, *_ in BASES}
    for make, _, changes in BASES:
        options = {*inspect.signature(make).parameters}
        tried = {option for one, _, more in BASES if one is make for option, _ in more}
        assert options - tried <= {option for kind, option in ELSEWHERE if kind == make.__name__}
        assert changes


def test_fields_of_a_hold_out_are_tried() -> None:
    tried = [options for _, options in BASES[-2][2] if isinstance(options, HoldOutConfig)]
    for field in dataclasses.fields(HoldOutConfig):
        assert any(getattr(one, field.name) != getattr(HELD, field.name) for one in tried)


def test_the_order_of_steps_is_in_the_fingerprint_and_that_of_dropped_names_is_not() -> None:
    one, two = Rename({"a": "b"}), Select("b")
    assert (one >> two).fingerprint != (two >> one).fingerprint
    assert Drop("a", "b").fingerprint == Drop("b", "a").fingerprint


class Unkept(InMemoryShardedSource):
    """Rows that no cache may keep."""

    @property
    def info(self) -> SourceInfo:
        return dataclasses.replace(super().info, cacheable=False)


def test_a_source_is_known_by_its_transform_its_columns_and_what_lies_below() -> None:
    rows = {"text": ["x"], "a": ["y"], "b": ["z"]}

    def source(version: str = "1", **more: list[str]) -> TransformedSource:
        # reads all columns, whichever are asked for
        transform = Map(shout, columns={"x": "string"}, version=version)
        return TransformedSource(InMemoryShardedSource(rows | more), transform)

    plain = source()
    several = [plain, source("2"), source(a=["w"])]
    several += [plain.select(columns) for columns in (["a"], ["b"], ["a", "b"], ["b", "a"])]
    for known in ([one.fingerprint for one in several], [one.shard_identity(0) for one in several]):
        assert len(set(known)) == len(known)
    assert info_of(plain).cacheable
    assert not info_of(TransformedSource(Unkept(rows), Rename({"a": "c"}))).cacheable
    unversioned = Map(lambda row: row)
    assert not info_of(TransformedSource(InMemoryShardedSource(rows), unversioned)).cacheable
