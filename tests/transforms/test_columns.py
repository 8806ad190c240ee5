"""Every transform goes through the laws: row by row, known schemas, honest fingerprints; and what
each one does and refuses.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

import laws
from easypipe.core.errors import ConfigError, SourceError
from easypipe.core.protocols import Shard, Source, Transform, bad_of, scan
from easypipe.core.schema import ROW_NUMBER, with_row_numbers
from easypipe.sources.external.memory import InMemoryShardedSource
from easypipe.transforms.columns.base import Chain, TransformedSource
from easypipe.transforms.columns.columns import (
    Combine,
    Drop,
    Extract,
    FilterNonEmpty,
    Rename,
    Select,
)
from easypipe.transforms.columns.functions import Expand, Filter, Map
from easypipe.transforms.columns.types import parse_type
from strategies import examples, row_cuts, texts


def shout(row: dict[str, Any]) -> dict[str, Any]:
    """Fails on the number 13, and gives a text where a number belongs on 7."""
    if row["n"] == 13:
        raise ValueError("thirteen")
    return {"text": (row["text"] or "").upper(), "size": "seven" if row["n"] == 7 else row["n"]}


def sized(batch: pa.RecordBatch) -> dict[str, Any]:
    return {"size": pc.binary_length(batch.column("text"))}


def is_even(row: dict[str, Any]) -> bool:
    return {13: None}.get(row["n"], row["n"] % 2 == 0)  # type: ignore[return-value]


def repeat(row: dict[str, Any]) -> list[dict[str, Any]]:
    if row["n"] == 13:
        raise KeyError("thirteen")
    return [
        {"text": f"{i} {row['text']}", "size": "seven" if row["n"] == 7 and i == 1 else i}
        for i in range(row["n"] % 5)
    ]


EVERY: list[Callable[[], Transform]] = [
    lambda: Rename({"text": "body", "n": "text"}),
    lambda: Select("text", "n"),
    lambda: Drop("tags"),
    lambda: Extract({"first": "tags.0", "last": "tags.-1", "role": "who.role", "text": "text"}),
    lambda: Combine("text", "{n}: {{{text}}} {flag}", null_as="?"),
    lambda: Combine("both", "{text}{text}"),
    lambda: FilterNonEmpty("text", "tags"),
    lambda: Filter(pc.field("n") > 3),
    lambda: Filter(is_even, version="1"),
    lambda: Map(shout, columns={"size": "int64"}, version="1"),
    lambda: Map(sized, columns={"size": "int64"}, batched=True, version="1"),
    lambda: Expand("tags", most=3),
    lambda: Expand(repeat, most=3, columns={"size": "int32"}, version="1"),
    lambda: FilterNonEmpty("tags") >> Expand("tags", most=4) >> Filter(pc.field("n") != 2),
    lambda: (
        Expand("tags", most=2)
        >> Expand(repeat, most=3, columns={"size": "int64"}, version="1")
        >> Select("tags", "size")
    ),
    lambda: (
        Filter(is_even, version="1")
        >> Map(shout, columns={"size": "int64"}, version="1")
        >> Rename({"size": "s"})
        >> Combine("all", "{s} {text}")
    ),
]

rows = st.fixed_dictionaries(
    {
        "text": st.one_of(st.none(), texts()),
        "n": st.integers(0, 14),
        "tags": st.one_of(
            st.none(), st.lists(st.one_of(st.none(), st.text("ab", max_size=3)), max_size=4)
        ),
        "who": st.one_of(
            st.none(),
            st.fixed_dictionaries(
                {"role": st.one_of(st.none(), st.just("user")), "age": st.just(1)}
            ),
        ),
        "flag": st.one_of(st.none(), st.booleans()),
    }
)
SCHEMA = pa.schema(
    [
        ("text", pa.large_string()),
        ("n", pa.int64()),
        ("tags", pa.large_list(pa.large_string())),
        ("who", pa.struct([("role", pa.large_string()), ("age", pa.int64())])),
        ("flag", pa.bool_()),
    ]
)


def table_of(values: list[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(values, schema=SCHEMA)


class Shards(Source):
    """Tables as shards of one source; fails nowhere."""

    def __init__(self, tables: list[pa.Table]) -> None:
        self._parts = [
            InMemoryShardedSource(table, name=f"part {i}") for i, table in enumerate(tables)
        ]
        self.schema = self._parts[0].schema
        self.shards = [part.shards[0] for part in self._parts]
        self.fingerprint = "-".join(part.fingerprint for part in self._parts)

    def shard_identity(self, shard: int) -> str:
        return self._parts[shard].fingerprint

    def read(self, shard: int, start: int, stop: int) -> pa.RecordBatch:
        return self._parts[shard].read(0, start, stop)


@pytest.mark.parametrize("make", EVERY, ids=lambda make: repr(make()))
@examples(25)
@given(
    tables=st.lists(st.lists(rows, max_size=25).map(table_of), min_size=1, max_size=2),
    cuts=row_cuts(),
    pick=st.integers(0, 99),
)
def test_laws(
    make: Callable[[], Transform], tables: list[pa.Table], cuts: list[int], pick: int
) -> None:
    transform, source = make(), Shards(tables)
    whole = TransformedSource(source, transform, on_error="skip")
    assert isinstance(whole, Source)
    laws.assert_stateless_reads(whole, cuts)
    column = [name for name in whole.schema.names if name != ROW_NUMBER][
        pick % (len(whole.schema) - 1)
    ]
    narrow = whole.select([column])
    laws.assert_stateless_reads(narrow, cuts)
    for shard, info in enumerate(whole.shards):  # leaving out other columns changes no row
        assert narrow.read(shard, 0, info.num_rows or 0).equals(
            whole.read(shard, 0, info.num_rows or 0).select([column, ROW_NUMBER])
        )
    good = [
        row
        for row in tables[0].to_pylist()
        if row["n"] not in (7, 13) and row["n"] % 5 < 4 and len(row["tags"] or ()) < 3
    ]
    batch = (
        table_of(good).to_batches()[0] if good else pa.RecordBatch.from_pylist([], schema=SCHEMA)
    )
    if transform.fan_out == 1:  # type: ignore[attr-defined]
        laws.assert_row_wise(transform, batch, cuts)
    assert transform.schema(batch.schema).equals(transform(batch).schema)
    assert make().fingerprint == transform.fingerprint


@examples(30)
@given(
    values=st.lists(rows, max_size=12).map(table_of),
    picks=st.lists(st.sampled_from(range(4)), min_size=3, max_size=5),
)
def test_composition_is_associative(values: pa.Table, picks: list[int]) -> None:
    some = [
        Filter(pc.field("n") > 2),
        FilterNonEmpty("text"),
        Combine("text", "{text}{n}"),
        Rename({"text": "text"}),
    ]
    steps = [some[i] for i in picks]
    left = steps[0]
    for step in steps[1:]:
        left = left >> step
    right = steps[-1]
    for step in reversed(steps[:-1]):
        right = step >> right
    assert left.fingerprint == right.fingerprint == Chain(steps).fingerprint
    source = InMemoryShardedSource(values)
    total = source.shards[0].num_rows
    one, other = TransformedSource(source, left), TransformedSource(source, steps)
    step_by_step: Any = source
    for step in steps:
        step_by_step = step(step_by_step)
    whole = one.read(0, 0, total)
    assert whole.equals(other.read(0, 0, total))
    assert whole.to_pylist() == step_by_step.read(0, 0, total).to_pylist()


class Doubled:
    """A user's own transform, which itself has no `>>`."""

    fingerprint = "doubled"

    def schema(self, before: pa.Schema) -> pa.Schema:
        return before

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch.set_column(0, batch.schema.field(0), pc.multiply(batch.column(0), 2))


def test_an_own_transform_is_either_side_of_a_chain() -> None:
    assert one(Doubled() >> Rename({"n": "m"}), n=[1, 2]) == {"m": [2, 4]}
    assert one(Rename({"n": "m"}) >> Doubled(), n=[1, 2]) == {"m": [2, 4]}
    for left, right in ((5, Rename({"n": "m"})), (Rename({"n": "m"}), 5)):
        with pytest.raises(TypeError, match="unsupported operand"):
            left >> right  # type: ignore[operator]


def test_a_filter_is_known_by_all_of_its_values() -> None:
    long = list(range(1000))
    other = [*range(500), 7777, *range(501, 1000)]  # printed alike: Arrow shows the ends of a list
    assert (
        Filter(pc.field("n").isin(long)).fingerprint == Filter(pc.field("n").isin(long)).fingerprint
    )
    assert (
        Filter(pc.field("n").isin(long)).fingerprint
        != Filter(pc.field("n").isin(other)).fingerprint
    )


# what each one does


def one(transform: Any, **values: Any) -> dict[str, list[Any]]:
    source = InMemoryShardedSource(values)
    return transform(source.read(0, 0, source.shards[0].num_rows)).to_pydict()


def test_rename_select_drop() -> None:
    assert one(Rename({"a": "b", "b": "a"}), a=[1], b=[2], c=[3]) == {"b": [1], "a": [2], "c": [3]}
    assert list(one(Select("c", "a"), a=[1], b=[2], c=[3])) == ["c", "a"]
    assert list(one(Drop("a"), a=[1], b=[2], c=[3])) == ["b", "c"]


def test_extract_goes_through_structs_and_lists() -> None:
    rows = [
        {"a": {"b": [{"c": "x"}, {"c": "y"}]}},
        {"a": {"b": []}},
        {"a": None},
        {"a": {"b": [{"c": None}]}},
    ]
    source = InMemoryShardedSource(rows)
    made = Extract(
        {"first": "a.b.0.c", "last": "a.b.-1.c", "before": "a.b.-2.c", "third": "a.b.2"}
    )(source.read(0, 0, 4))
    assert made.select(["first", "last", "before", "third"]).to_pydict() == {
        "first": ["x", None, None, None],
        "last": ["y", None, None, None],
        "before": ["x", None, None, None],
        "third": [None] * 4,
    }
    assert one(Extract({"x": "a.b"}), **{"a.b": ["a name with a dot"]})["x"] == [
        "a name with a dot"
    ]


def test_combine_knows_columns_and_braces_only() -> None:
    made = one(
        Combine("text", "{{{q}}} is {n}, {f}, {b}"),
        q=["x", None],
        n=[1, 2],
        f=[1.5, 0.0],
        b=[True, False],
    )
    assert made["text"] == ["{x} is 1, 1.5, true", None]
    assert one(Combine("q", "<{q}>", null_as=""), q=["x", None])["q"] == ["<x>", "<>"]
    for template in (
        "{q.__class__}",
        "{q[0]}",
        "{0}",
        "{}",
        "{q!r}",
        "{q:>9}",
        "{q",
        "no column",
        "{q:{n}}",
    ):
        with pytest.raises(ConfigError):
            Combine("text", template)


def test_filter_non_empty() -> None:
    texts = ["x", "", "  \n\t\u2003", None, "y"]
    assert one(FilterNonEmpty("text"), text=texts, n=[0, 1, 2, 3, None])["text"] == ["x", "y"]
    assert one(FilterNonEmpty("n"), text=texts, n=[0, 1, 2, 3, None])["n"] == [0, 1, 2, 3]
    assert one(FilterNonEmpty("tags"), tags=[["a"], [], None])["tags"] == [["a"]]
    mixed = [[{"a": 1}], [], None, [{"a": "x"}]]  # kept as JSON
    assert one(FilterNonEmpty("m"), m=mixed, n=[0, 1, 2, 3])["n"] == [0, 3]
    kept = InMemoryShardedSource({"m": mixed}).read(0, 0, 0)
    assert FilterNonEmpty("m")(kept).num_rows == 0


def test_map_is_laid_over_the_row() -> None:
    made = one(
        Map(
            lambda row: {"a": row["a"] + 1, "b": [str(row["a"])]},
            columns={"b": "list<string>"},
            version="1",
        ),
        a=[1, 2],
        c=["x", "y"],
    )
    assert made == {"a": [2, 3], "c": ["x", "y"], "b": [["1"], ["2"]]}
    assert one(Map(lambda row: {"a": 0} if row["a"] == 1 else {}, version="1"), a=[1, 2])["a"] == [
        0,
        2,
    ]
    assert one(Map(lambda row: {"a": str(row["a"])}, columns={"a": "string"}, version="1"), a=[1])[
        "a"
    ] == ["1"]
    batched = Map(lambda batch: {"a": pc.add(batch.column("a"), 1)}, batched=True, version="1")
    assert one(batched, a=[1, 2], c=["x", "y"]) == {"a": [2, 3], "c": ["x", "y"]}


def test_expand_numbers_the_rows_of_a_row() -> None:
    source = TransformedSource(
        InMemoryShardedSource({"t": [["a", "b"], [], None, ["c"]], "n": [1, 2, 3, 4]}),
        Expand("t", most=3),
    )
    assert source.shards[0].num_rows == 12
    batch, rejects = source.scan(0, 0, 12)
    assert batch.to_pydict() == {"t": ["a", "b", "c"], "n": [1, 1, 4], ROW_NUMBER: [0, 1, 9]}
    assert [(r.row, r.reason, r.benign, r.count) for r in rejects] == [(2, "unfilled", True, 9)]
    with pytest.raises(
        SourceError,
        match=re.escape("memory, row 0: too_many_rows: row 0 becomes 2 rows or more, and most=1"),
    ):
        TransformedSource(InMemoryShardedSource({"t": [["a", "b"]]}), Expand("t", most=1)).read(
            0, 0, 1
        )
    lists = InMemoryShardedSource({"t": [["a"], ["b"], ["c", "d", "e"]]})
    with pytest.raises(SourceError, match="memory, row 2: too_many_rows"):
        TransformedSource(lists, Expand("t", most=2)).read(0, 0, 6)


@pytest.mark.parametrize("make", EVERY)
def test_a_row_is_refused_in_its_own_place_for_what_it_is_refused_for_alone(
    make: Callable[[], Transform],
) -> None:
    rows = [
        {"text": f"t{n}", "n": n, "tags": ["a"] * size, "who": None, "flag": None}
        for n, size in ((1, 1), (13, 2), (7, 3), (2, 5), (13, 1))
    ]

    def bad(rows: list[dict[str, Any]], first: int) -> list[tuple[int, str]]:
        source = TransformedSource(InMemoryShardedSource(table_of(rows)), make(), on_error="skip")
        most = source.transform.fan_out
        rejects = source.scan(0, 0, len(rows) * most).rejects
        return [(r.row + first * most, r.reason) for r in rejects if not r.benign]

    assert bad(rows, 0) == [one for i, row in enumerate(rows) for one in bad([row], i)]


def test_what_gives_several_rows_says_so_of_every_shard() -> None:
    class Files(Source):
        fingerprint = "files"
        schema = pa.schema([pa.field("tags", pa.list_(pa.string()))])
        shards = (
            Shard(name="a", num_rows=7, cuts=(0, 3), num_bytes=50),
            Shard(name="b", num_rows=None, num_bytes=9),
        )

    assert TransformedSource(Files(), Expand("tags", most=3)).shards == (
        Shard(name="a", num_rows=21, cuts=(0, 9), num_bytes=50),
        Shard(name="b", num_rows=None, num_bytes=9),
    )


def test_what_a_function_does_wrong_is_that_row_s() -> None:
    below = InMemoryShardedSource({"text": ["a", "b", "c"], "n": [1, 13, 7]})
    source = TransformedSource(
        below, Map(shout, columns={"size": "int64"}, version="1"), on_error="skip"
    )
    batch, rejects = source.scan(0, 0, 3)
    assert batch.column("text").to_pylist() == ["A"]
    assert [(r.row, r.reason, r.benign) for r in rejects] == [
        (1, "map_failed", False),
        (2, "wrong_type", False),
    ]
    assert re.search(
        r"test_columns:shout raised ValueError: thirteen, line \d+ of .*test_columns.py",
        rejects[0].detail,
    )
    assert "in column 'size': 'seven' cannot be int64" in rejects[1].detail
    strict = TransformedSource(below, Map(shout, columns={"size": "int64"}, version="1"))
    assert strict.read(0, 0, 1).num_rows == 1
    with pytest.raises(
        SourceError,
        match=r"^memory, row 1: map_failed: .*shout raised ValueError: thirteen.*set on_error to "
        r"'skip'",
    ):
        strict.read(0, 0, 3)
    with pytest.raises(
        SourceError,
        match=r"Filter\(.*is_even\), row 1: filter_failed: .*returned None, not True or False",
    ):
        Filter(is_even, version="1")(below.read(0, 0, 3))
    batched = Map(
        lambda b: {"n": [100 // (n - 13) for n in b.column("n").to_pylist()]},
        batched=True,
        version="1",
    )
    found = TransformedSource(below, batched, on_error="skip").scan(0, 0, 3)
    assert [(r.row, r.reason, r.benign) for r in found.rejects] == [(1, "map_failed", False)]


@pytest.mark.parametrize(
    ("step", "row"),
    [
        (Map(dict, version="1"), 1),
        (Filter(lambda row: True, version="1"), 1),
        (Expand(lambda row: [row], most=3, version="1"), 3),
    ],
    ids=["map", "filter", "expand"],
)
def test_a_text_that_is_not_utf8_is_that_row_s_fault(step: Any, row: int) -> None:
    """Files are checked where they are read; tables in memory and sources of one's own are not."""
    texts = pa.array([b"a", b"\xff", b"c"], pa.binary()).view(pa.string())
    source = TransformedSource(
        InMemoryShardedSource(pa.table({"text": texts})), step, on_error="skip"
    )
    batch, rejects = source.scan(0, 0, source.shards[0].num_rows)
    assert batch.num_rows == 2
    assert ("invalid_utf8", row) in [(reject.reason, reject.row) for reject in rejects]


def test_a_batch_function_that_looks_at_its_neighbours_is_refused() -> None:
    sums = Map(lambda batch: {"n": pc.cumulative_sum(batch.column("n"))}, batched=True, version="1")
    with pytest.raises(
        SourceError,
        match=r"returns other values for a row if the batch has other rows. Make each row depend on "
        r"itself alone",
    ):
        one(sums, n=[1, 2, 3])
    with pytest.raises(
        SourceError, match=r"returned 1 rows of 'n' for 3. Return a value for each row"
    ):
        one(Map(lambda batch: {"n": [1]}, batched=True, version="1"), n=[1, 2, 3])


def test_a_column_that_is_left_out_is_no_null() -> None:
    def some(row: dict[str, Any]) -> dict[str, Any]:
        return {} if row["n"] == 2 else {"size": None, "text": "b"}

    rows = {"text": ["a", "a"], "n": [1, 2]}
    made = Map(some, columns={"size": "int64"}, version="1")
    source = InMemoryShardedSource(rows)
    found = scan(TransformedSource(source, made, on_error="skip"), 0, 0, 2)
    assert found.batch.select(["text", "n", "size"]).to_pylist() == [
        {"text": "b", "n": 1, "size": None}
    ]
    [reject] = found.rejects
    assert (reject.row, reject.reason) == (1, "map_failed")
    assert reject.detail.endswith("some returned no column 'size'; None makes a null")
    # the old value stays where it leaves out a column that is there
    assert one(Map(lambda row: {}, version="1"), **rows)["text"] == ["a", "a"]
    several = Expand(lambda row: [some(row)], most=2, columns={"size": "int64"}, version="1")
    [reject] = bad_of(scan(TransformedSource(source, several, on_error="skip"), 0, 0, 4).rejects)
    assert (reject.row, reject.reason) == (2, "expand_failed")
    batched = Map(lambda batch: {}, columns={"size": "int64"}, batched=True, version="1")
    with pytest.raises(
        SourceError,
        match=r"returned no column 'size'. Return it, with None for nulls alone, or leave it out of "
        r"columns",
    ):
        one(batched, **rows)
    nulls = Map(lambda batch: {"size": None}, columns={"size": "int64"}, batched=True, version="1")
    assert one(nulls, **rows)["size"] == [None, None]


def test_without_a_version_nothing_is_known_in_the_next_process(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert Map(shout).fingerprint != Map(shout).fingerprint
    assert "shout has no version, so its results are not kept in the token cache" in caplog.text
    unsure = Rename({"a": "b"}) >> Map(shout)
    assert (unsure.cacheable, Map(shout, version="1").cacheable, Rename({"a": "b"}).cacheable) == (
        False,
        True,
        True,
    )
    source = TransformedSource(InMemoryShardedSource({"a": ["x"], "n": [1]}), unsure)
    assert not source.info.cacheable

    def known(row: dict[str, Any]) -> dict[str, Any]:
        return row

    known.version = 3  # type: ignore[attr-defined]
    assert Map(known).cacheable
    assert Map(known).fingerprint == Map(known, version="3").fingerprint


class Repeater:
    def __init__(self, times: int) -> None:
        self.times = times

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        return {"text": row["text"] * self.times}

    again = __call__


def repeated(row: dict[str, Any], times: int) -> dict[str, Any]:
    return {"text": row["text"] * times}


def repeater(times: int, words: object = None) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda row: {"text": row["text"] * times} if words is None else {}


@pytest.mark.parametrize(
    "make",
    [
        lambda times: partial(repeated, times=times),
        lambda times: partial({2: repeated, 3: repeater}[times], times=1),
        lambda times: repeater(2, partial({2: repeated, 3: repeater}[times])),
        lambda times: repeater(times),
        lambda times: Repeater(times),
        lambda times: Repeater(times).again,
        lambda times: partial(repeater(times)),
        lambda times: repeater(2, {"a": [times, {times}]}),
        lambda times: lambda row, n=times: {"text": row["text"] * n},
    ],
)
def test_one_name_and_version_with_other_values_is_another_function(
    make: Callable[[int], Any],
) -> None:
    assert Map(make(2), version="1").fingerprint == Map(make(2), version="1").fingerprint
    assert Map(make(2), version="1").fingerprint != Map(make(3), version="1").fingerprint


def test_functions_of_two_scripts_are_two() -> None:
    def made(code: str) -> str:
        namespace: dict[str, Any] = {"__name__": "__main__"}
        exec(f"def to_text(row): return {code}", namespace)
        return Map(namespace["to_text"], version="1").fingerprint

    assert made("{'text': row['a']}") == made("{'text': row['a']}")
    assert made("{'text': row['a']}") != made("{'text': row['b']}")


def test_a_function_may_hold_itself() -> None:
    def inner(row: dict[str, Any]) -> dict[str, Any]:
        return {} if row else inner(row)

    held: list[Any] = []
    held.append(held)
    assert Map(inner, version="1").fingerprint == Map(inner, version="1").fingerprint
    assert (
        Map(repeater(1, held), version="1").fingerprint
        != Map(repeater(1, []), version="1").fingerprint
    )


def test_functions_by_name() -> None:
    assert one(
        Map("transforms.test_columns:shout", columns={"size": "int64"}, version="1"),
        text=["a"],
        n=[1],
    )["text"] == ["A"]
    for name, message in {
        "transforms.test_columns:shoot": r"has no 'shoot' .*Did you mean 'shout'\?",
        "no_such_module:f": "'no_such_module' cannot be imported",
        "shout": 'names no function. Write "module:function"',
        "transforms.test_columns:EVERY": "is list, not a function",
    }.items():
        with pytest.raises(ConfigError, match=message):
            Map(name)
    twice = Expand("transforms.test_columns:repeat", most=4, columns={"size": "int64"}, version="1")
    assert one(twice, text=["a"], n=[2])["text"] == ["0 a", "1 a"]


def test_a_source_is_read_as_narrowly_as_can_be() -> None:
    class Watched(InMemoryShardedSource):
        def select(self, columns: list[str]) -> InMemoryShardedSource:
            asked.append(list(columns))
            return InMemoryShardedSource(table, columns=columns)

    asked: list[list[str]] = []
    table = pa.table({name: [name] for name in "abcdef"})
    chain = Rename({"a": "x"}) >> Combine("text", "{x} {b}") >> FilterNonEmpty("c") >> Drop("d")
    made = TransformedSource(Watched(table), chain).select(["text"])
    assert made.read(0, 0, 1).to_pydict() == {"text": ["a b"], ROW_NUMBER: [0]}
    assert [sorted(columns) for columns in asked] == [["a", "b", "c"]]


def test_sources_compose_with_a_call() -> None:
    source = (Rename({"a": "b"}) >> Filter(pc.field("b") > 1))(InMemoryShardedSource({"a": [1, 2]}))
    assert isinstance(source, TransformedSource)
    assert source.read(0, 0, 2).to_pydict() == {"b": [2], ROW_NUMBER: [1]}
    assert TransformedSource(
        InMemoryShardedSource({"a": [1]}), Rename({"a": "b"})
    ).schema.names == ["b"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Rename({"txt": "b"}),
            "no column 'txt' (have: text, n, tags, who, flag). Did you mean 'text'?",
        ),
        (lambda: Rename({"text": "n"}), "there is a column 'n' already"),
        (lambda: Select("nn"), "Select('nn'): no column 'nn'"),
        (lambda: Drop("text", "n", "tags", "who", "flag"), "no column would be left"),
        (
            lambda: Extract({"x": "who.rule"}),
            "'who.rule': no key 'rule' (have: role, age). Did you mean 'role'?",
        ),
        (
            lambda: Extract({"x": "tags.first"}),
            "'first' is not a position in a list. Give a position, as in 'tags.0'.",
        ),
        (lambda: Extract({"x": "n.a"}), "int64 has nothing inside"),
        (lambda: Extract({"x": "m"}), "no column 'm'"),
        (
            lambda: Combine("x", "{tags}"),
            "column 'tags' holds large_list<item: large_string>, not text or a number",
        ),
        (lambda: Combine("x", "{m}"), "no column 'm'"),
        (lambda: FilterNonEmpty("m"), "no column 'm'"),
        (lambda: Filter(pc.field("m") > 1), "No match for FieldRef.Name(m)"),
        (lambda: Filter(pc.field("n")), "Filter expression must evaluate to bool"),
        (
            lambda: Filter(pc.field("n") > "x"),
            "Function 'greater' has no kernel matching input types",
        ),
        (
            lambda: Expand("n", most=2),
            "column 'n' holds int64, not lists; columns of lists (have: tags)",
        ),
        (
            lambda: Rename({"text": "a"}) >> Select("text"),
            "Select('text'): no column 'text' (have: a, n",
        ),
    ],
)
def test_columns_that_do_not_fit(make: Callable[[], Transform], message: str) -> None:
    """Said before a row is read."""
    with pytest.raises(SourceError, match=re.escape(message)):
        TransformedSource(Shards([table_of([])]), make())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Rename({}), 'expected old and new names, got {}. Write Rename({"old": "new"}).'),
        (lambda: Rename({"a": "c", "b": "c"}), "two columns cannot have one name"),
        (lambda: Rename({"a": "__row_number__"}), "'a' cannot become '__row_number__'"),
        (lambda: Select(), "expected different column names"),
        (lambda: Drop("a", "a"), "expected different column names"),
        (lambda: Extract({}), "expected names and paths"),
        (lambda: Combine("", "{a}"), "'' cannot name a column"),
        (lambda: Combine(ROW_NUMBER, "{a}"), "'__row_number__' cannot name a column"),
        (lambda: Filter(pc.field("a") > 1, version="1"), "an expression says itself what it does"),
        (lambda: Expand("a", most=0), "0 rows are too few"),
        (lambda: Expand("a", most=1, version="2"), "a column of lists has a type and no version"),
        (lambda: Map(shout, columns={"x": "strin"}), "Map.columns.x: 'strin' is not a type"),
        (lambda: Drop("a")([1]), "list is neither a RecordBatch nor a source with a schema"),  # type: ignore[arg-type]
        (lambda: Map(5), "5 is not a function"),  # type: ignore[arg-type]
        (lambda: Chain([]), "an empty list"),
        (
            lambda: TransformedSource(Shards([table_of([])]), Drop("n"), on_error="skp"),
            "on_error: 'skp' is not an option (have: error, skip, quarantine). Did you mean 'skip'?",
        ),
        (lambda: Chain([len]), "is not a transform. Wrap a function: Map(function)."),  # type: ignore[list-item]
    ],
)
def test_options_that_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        make()


def test_an_unannounced_column_is_refused() -> None:
    with pytest.raises(
        SourceError,
        match=re.escape(
            "returned a column 'x' whose type is unknown (have: n). Name it with its type: "
            "columns={'x'"
        ),
    ):
        one(Map(lambda row: {"x": 1}, version="1"), n=[1])


def test_types_as_text() -> None:
    chat = "list<struct<role: string, content: string>>"
    assert parse_type(chat) == pa.large_list(
        pa.struct([("role", pa.large_string()), ("content", pa.large_string())])
    )
    pair = pa.struct([("b", pa.large_string()), ("c", pa.int64())])
    assert parse_type("struct<a: struct<b: string, c: int64>, d: int32>") == pa.struct(
        [("a", pair), ("d", pa.int32())]
    )
    assert parse_type(" list< list<int32> > ") == pa.large_list(pa.large_list(pa.int32()))
    assert parse_type(pa.list_(pa.string())) == pa.large_list(pa.large_string())
    names = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
    for name in (*names, "float32", "float64", "double", "bool"):
        assert parse_type(name) == pa.type_for_alias(name)
    assert (parse_type("string"), parse_type("binary")) == (pa.large_string(), pa.large_binary())
    for wrong in (
        "",
        "list",
        "list<>",
        "list<int64",
        "struct<a>",
        "int64>",
        "struct<a: int64,>",
        "text",
        "list<int64> x",
        "int-64",
    ):
        with pytest.raises(ConfigError):
            parse_type(wrong)


def test_rows_are_numbered_beyond_32_bits() -> None:
    numbers = [1 << 40, (1 << 40) + 1]
    batch = pa.RecordBatch.from_arrays(
        [pa.array(["a", "b"]), pa.array(numbers)],
        schema=with_row_numbers(pa.schema([("text", pa.string())])),
    )
    upper = Map(lambda row: {"text": row["text"].upper()}, version="1")
    found = (upper >> Rename({"text": "t"}))(batch)
    assert found.column("t").to_pylist() == ["A", "B"]
    assert found.column(ROW_NUMBER).to_pylist() == numbers


def test_a_function_that_gives_a_fraction_for_an_integer_is_refused() -> None:
    halves = Map(lambda row: {"n": row["n"] / 2}, columns={"n": "int64"}, version="1")
    assert one(halves, n=[2, 4])["n"] == [1, 2]
    with pytest.raises(
        SourceError, match=r"row 1: wrong_type: .*1.5 cannot be int64: 1.5 is not an int"
    ):
        one(halves, n=[2, 3])


@pytest.mark.parametrize("made", [{"n": 1}, "rows", b"rows", 5, None])
def test_expand_says_what_a_function_gave_in_place_of_rows(made: Any) -> None:
    with pytest.raises(
        SourceError, match=r"row 0: expand_failed: .*it returned .*not a list of rows"
    ):
        one(Expand(lambda row: made, most=2, version="1"), n=[2, 3])


def test_expand_names_the_row_that_is_no_mapping() -> None:
    with pytest.raises(SourceError, match=r"returned 5, not a mapping"):
        one(Expand(lambda row: [{"n": 1}, 5], most=2, version="1"), n=[2, 3])


def test_what_is_wrong_with_a_format_is_said_once() -> None:
    with pytest.raises(ConfigError) as caught:
        Combine("text", "{q.x}")
    assert str(caught.value).count("Write only columns in braces") == 1
