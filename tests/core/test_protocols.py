"""Shards by name, on every source of the house."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest

import easypipe
from easypipe.core import protocols
from easypipe.core.errors import SourceError
from easypipe.core.protocols import Shard, ShardedDataSource, ShardedSource
from easypipe.core.values import attribute_of
from easypipe.sources.external.memory import InMemoryShardedSource
from easypipe.sources.open import open_files
from easypipe.sources.splits import limited


def test_an_attribute_of_somebody_elses_may_be_nothing() -> None:
    """A tokenizer's pad token is often number 0."""
    one = SimpleNamespace(pad_token_id=0, unknown=None, name="")
    assert attribute_of(one, "unknown", "pad_token_id", "name") == 0
    assert attribute_of(one, "missing", "name") == ""
    assert attribute_of(one, "missing", "unknown") is None


def test_shards_by_name(tmp_path: Path) -> None:
    for name, rows in (("a", 3000), ("b", 3)):
        (tmp_path / f"{name}.txt").write_text(
            "".join(f"{name}{i}\n" + ("\n" if i == 1 else "") for i in range(rows))
        )
    source = open_files(tmp_path)
    names = source.shard_names
    assert names == (str(tmp_path / "a.txt"), str(tmp_path / "b.txt"))
    assert list(source.open_shard(names[1])) == [{"text": "b0"}, {"text": "b1"}, {"text": "b2"}]
    assert [row["text"] for row in source.open_shard(names[0])] == [f"a{i}" for i in range(3000)]
    # a blank line is a physical row
    assert [row["text"] for row in source.open_shard_at_row(names[0], 2999)] == ["a2998", "a2999"]
    assert list(source.open_shard_at_row(names[1], 4)) == []
    with pytest.raises(SourceError, match=r"no shard has this name .*Did you mean"):
        source.open_shard(str(tmp_path / "c.txt"))
    with pytest.raises(
        SourceError, match=re.escape("b.txt: row 5 was asked for. It has rows 0:4.")
    ):
        source.open_shard_at_row(names[1], 5)
    assert [
        row["n"] for row in limited(InMemoryShardedSource({"n": range(10)}), 3).open_shard("memory")
    ] == [0, 1, 2]


def test_a_source_of_ones_own() -> None:
    class Mine(ShardedDataSource):
        def __init__(self) -> None:
            self.table = InMemoryShardedSource({"n": [1, 2, 3]})
            self.schema, self.fingerprint = self.table.schema, "mine"
            self.shards = [Shard(name="one", num_rows=3)]

        def read(self, shard: int, start: int, stop: int):
            return self.table.read(shard, start, stop)

    assert isinstance(Mine(), ShardedSource)
    assert list(Mine().open_shard_at_row("one", 1)) == [{"n": 2}, {"n": 3}]


def test_every_source_has_them() -> None:
    """Whatever in the house has `read(shard, start, stop)`, `shards` and a fingerprint is a
    ShardedDataSource.
    """
    house = Path(easypipe.__file__).parent
    bases: dict[str, set[str]] = {}
    like_sources: dict[str, str] = {}
    for path in house.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = {ast.unparse(base) for base in node.bases}
                names = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
                names |= {  # and what its constructor sets
                    one.attr
                    for one in ast.walk(node)
                    if isinstance(one, ast.Attribute) and ast.unparse(one.value) == "self"
                }
                public = not node.name.startswith("_")
                if public and {"read", "fingerprint", "shards"} <= names:
                    like_sources[node.name] = path.name

    def is_one(name: str) -> bool:
        return name in {"ShardedDataSource", "Source", "Protocol"} or any(
            is_one(base) for base in bases.get(name, ())
        )

    assert len(like_sources) > 5
    assert not {name: file for name, file in like_sources.items() if not is_one(name)}


def test_a_source_that_declares_nothing_is_asked_like_one_of_the_house() -> None:
    """What the protocol asks for is enough, whatever else of a source is looked for."""

    class Least:
        schema = pa.schema([pa.field("n", pa.int64())])
        shards = (Shard(name="one", num_rows=3),)
        fingerprint = "least"

        def read(self, shard: int, start: int, stop: int) -> pa.RecordBatch:
            return pa.RecordBatch.from_pydict({"n": list(range(start, stop))})

    class OfTheHouse(Least, protocols.Source):
        pass

    least, house = Least(), OfTheHouse()
    for ask in (
        protocols.info_of,
        protocols.unit_of,
        lambda one: protocols.identity_of(one, 0),
        lambda one: protocols.place_of(one, 0, 2),
        lambda one: protocols.raw_of(one, 0, 2),
        lambda one: protocols.scan(one, 0, 1, 3),
        lambda one: protocols.select(one, ["n"]) is one,
        lambda one: protocols.innermost(one) is one,
    ):
        assert ask(least) == ask(house)
