"""Sources of users' own: whatever opens shards by name, and functions that give rows."""

from __future__ import annotations

import gc
import itertools
import logging
import re
import sqlite3
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from easypipe import (
    BaseStage,
    DatasetConfig,
    LoadStageConfig,
    Pipeline,
    PipelineConfig,
    Shard,
    ShardedDataSource,
    block_mixture_interleave,
)
from easypipe.core.errors import ConfigError, SourceError, StageOrderError
from easypipe.core.protocols import scan
from easypipe.core.schema import ROW_NUMBER
from easypipe.sources.external import own
from easypipe.sources.external.objects import open_object
from easypipe.sources.external.own import BLOCK_ROWS
from easypipe.transforms.columns.functions import Expand
from laws import assert_conserved, assert_exact_resume, assert_same_batches, assert_stateless_reads
from pipelines import config, texts, tokenizer

ROWS = 2 * BLOCK_ROWS + 88


class Mine(ShardedDataSource):
    """Document 002's shape: rows of each shard from its start, nothing else."""

    shard_names = ("a", "b", "empty")
    opened: ClassVar[list[tuple[str, int]]] = []  # (shard, thread that took its first row)

    def __init__(self, rows: int = ROWS, version: str | None = "1") -> None:
        self.rows = rows
        if version is not None:
            self.version = version

    def open_shard(self, shard_name: str) -> Iterator[dict[str, Any]]:
        self.opened.append((shard_name, threading.get_ident()))
        for i, text in enumerate(texts({"a": self.rows, "b": 7, "empty": 0}[shard_name])):
            yield {"text": text, "n": i}


class Table(ShardedDataSource):
    """A table of SQLite, whose connections belong to the thread that opened them."""

    version = 3

    def __init__(self, path: Path, *, seeks: bool = True) -> None:
        self.path = str(path)
        self.shards = [Shard(name="notes", num_rows=300 if seeks else None)]
        if not path.exists():
            with closing(sqlite3.connect(path)) as db, db:
                db.execute("CREATE TABLE notes (id INTEGER PRIMARY KEY, body TEXT)")
                db.executemany(
                    "INSERT INTO notes (body) VALUES (?)", [(text,) for text in texts(300)]
                )

    def open_shard_at_row(self, shard_name: str, row: int) -> Iterator[dict[str, Any]]:
        with closing(sqlite3.connect(self.path)) as db:
            for (body,) in db.execute(
                f"SELECT body FROM {shard_name} ORDER BY id LIMIT -1 OFFSET ?", [row]
            ):
                yield {"text": body}


class Forward(Table):
    def open_shard(self, shard_name: str) -> Iterator[dict[str, Any]]:
        return Table.open_shard_at_row(self, shard_name, 0)

    open_shard_at_row = ShardedDataSource.open_shard_at_row


class Again:
    """Rows that can be iterated over again, without a length. Calling it does something else."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return Mine().open_shard("a")

    def __call__(self) -> None: ...


def rows() -> Iterator[dict[str, Any]]:
    yield from Mine().open_shard("a")


def sources(folder: Path) -> dict[str, Any]:
    """One of every kind."""
    kinds = {
        "mine": Mine(),
        "table": Table(folder / "t.db"),
        "uncounted": Table(folder / "t.db", seeks=False),
    }
    return kinds | {
        "forward": Forward(folder / "t.db", seeks=False),
        "function": rows,
        "again": Again(),
    }


KINDS = ["mine", "table", "uncounted", "forward", "function", "again"]


@pytest.mark.parametrize("kind", KINDS)
def test_stateless_reads(kind: str, tmp_path: Path) -> None:
    """Law 3, by cuts that Hypothesis chooses, each on a source that has read nothing yet."""

    @given(st.lists(st.integers(0, 2 * ROWS), max_size=5))
    @settings(max_examples=5)
    def law(cuts: list[int]) -> None:
        assert_stateless_reads(open_object(sources(tmp_path)[kind], name="d", version="1"), cuts)

    law()


def test_rows_are_asked_for_once_and_on_one_thread(tmp_path: Path) -> None:
    Mine.opened.clear()
    source: Any = open_object(Mine(), name="d", folder=tmp_path / "indexes")
    assert source.schema == pa.schema([("text", pa.large_string()), ("n", pa.int64())])
    assert [(shard.name, shard.num_rows) for shard in source.shards] == [
        ("a", ROWS),
        ("b", 7),
        ("empty", 0),
    ]
    narrow = source.select(["n"])
    assert narrow.read(0, 500, 503).to_pydict() == {"n": [500, 501, 502]}
    assert_stateless_reads(source)
    # once for the columns, once for the rows
    assert [name for name, _ in Mine.opened] == ["a", "a", "b", "empty"]
    assert len({thread for _, thread in Mine.opened}) == 1
    Mine.opened.clear()
    known = open_object(Mine(), name="d", folder=tmp_path / "indexes")
    assert (known.schema, known.shards, known.fingerprint) == (
        source.schema,
        source.shards,
        source.fingerprint,
    )
    assert Mine.opened == []  # what is known of a version is kept
    [kept] = (tmp_path / "indexes").iterdir()
    kept.write_text(kept.read_text().replace(f"{ROWS},", f"{ROWS - 1},"))
    # damage is found, and counted again
    assert open_object(Mine(), name="d", folder=tmp_path / "indexes").shards == source.shards


def batches(tmp_path: Path, data: Any, **options: Any) -> list[Any]:
    """What a run over a dataset alone yields."""
    pipeline = Pipeline(
        config(
            tmp_path,
            datasets=[DatasetConfig(name="d", data_files=data, **options)],
            pack={"seq_length": 64},
        )
    )
    return list(pipeline.source().tokenize().pack().load({"batch_size": 8}).build())


def test_batches_are_those_of_the_same_rows_in_memory(tmp_path: Path) -> None:
    want = batches(tmp_path, list(rows()))
    for data, options in ((rows, {"version": "1"}), (Again(), {"version": 2}), (rows, {})):
        assert assert_same_batches(want, batches(tmp_path, data, **options)) > 10
    everything = [
        {"text": row["text"]} for name in Mine.shard_names for row in Mine().open_shard(name)
    ]
    want = batches(tmp_path, everything)
    assert_same_batches(want, batches(tmp_path, Mine()))
    given_to_source = Pipeline(config(tmp_path, datasets=[], pack={"seq_length": 64})).source(
        {"d": Mine()}
    )
    assert_same_batches(want, given_to_source.tokenize().pack().load({"batch_size": 8}).build())
    want = batches(tmp_path, [{"text": text} for text in texts(300)])
    for kind in ("table", "uncounted", "forward"):
        assert_same_batches(want, batches(tmp_path, sources(tmp_path)[kind]))


def test_a_warm_start_asks_for_no_row(tmp_path: Path) -> None:
    first = batches(tmp_path, Mine())
    Mine.opened.clear()
    assert_same_batches(first, batches(tmp_path, Mine()))
    assert Mine.opened == []
    batches(tmp_path, Mine(version="2"))
    assert [name for name, _ in Mine.opened] == ["a", "a", "b", "empty"]
    Mine.opened.clear()
    batches(tmp_path, Mine(rows=9))  # the same version, and other rows by what it holds
    assert Mine.opened


def test_without_a_version_nothing_is_kept_and_a_warning_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        batches(tmp_path, Mine(version=None))
    [said] = [text for text in caplog.messages if "version" in text]
    assert re.match(
        "dataset d: [a-z._]*test_own:Mine has no version, so its rows are read again in every "
        "process",
        said,
    )
    assert not (tmp_path / "cache" / "tokens").exists()
    caplog.clear()
    batches(tmp_path, Mine(version=None), version="1")
    assert "version" not in caplog.text
    assert (tmp_path / "cache" / "tokens").exists()


def test_version_says_whose_rows_what_gives_them_by_number_has() -> None:
    class Rows:
        def __init__(self) -> None:
            self.read = 0

        def __len__(self) -> int:
            return 3000

        def __getitem__(self, i: int) -> dict[str, Any]:
            self.read += 1
            return {"text": str(i)}

    a, b = Rows(), Rows()
    assert (
        open_object(a, version="1").fingerprint
        == open_object(b, version="1").fingerprint
        != open_object(b, version="2").fingerprint
    )
    assert a.read == b.read == 0
    assert open_object(a).fingerprint == open_object(b).fingerprint  # by content
    assert a.read == b.read >= 3000


def test_num_rows_asks_for_no_row_behind_them(tmp_path: Path) -> None:
    def endless() -> Iterator[dict[str, Any]]:
        for i in itertools.count():
            assert i < 1024, "asked for more than the columns take"
            yield {"text": f"row {i}"}

    source = (
        Pipeline(
            config(tmp_path, datasets=[DatasetConfig(name="d", data_files=endless, num_rows=300)])
        )
        .source()
        .get_data()["d"]
    )
    assert_stateless_reads(source)
    assert source.shards[0].num_rows == 300
    two: Any = open_object(Mine(), name="d", num_rows=ROWS + 3)
    assert [shard.num_rows for shard in two.shards] == [ROWS, 3]


def test_only_rows_that_are_counted_to_their_end_are_said_to_have_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def rows() -> Iterator[dict[str, Any]]:
        return ({"text": f"row {i}"} for i in range(2 * ROWS))

    monkeypatch.setattr(own, "MANY_ROWS", ROWS + 1)
    some: Any = open_object(rows, name="d", version="1", num_rows=2 * ROWS - 1)
    assert some.shards[0].num_rows == 2 * ROWS - 1
    streamed: Any = open_object(rows, name="d", version="1", counted=False)
    assert streamed.read(0, ROWS, 2 * ROWS).num_rows == ROWS
    assert not caplog.records
    every: Any = open_object(rows, name="d", version="1")
    assert every.shards[0].num_rows == 2 * ROWS
    assert [record.getMessage() for record in caplog.records] == [
        "d: 768 rows and no end; if it has none, set num_rows, or streaming=True"
    ]


@pytest.mark.parametrize("kind", ["mine", "forward", "function"])
def test_streaming_reads_forward_and_resumes(kind: str, tmp_path: Path) -> None:
    def make() -> Any:
        datasets = [DatasetConfig(name="d", data_files=sources(tmp_path)[kind], version="1")]
        made = Pipeline(
            config(
                tmp_path, datasets=datasets, streaming=True, num_streams=2, pack={"seq_length": 64}
            )
        )
        return made.source().tokenize().pack().load({"batch_size": 4}).build()

    loader = make()
    assert list(loader)
    assert_conserved(loader.ledger())
    assert_exact_resume(make, 12, stops=[0, 1, 5, 11])


def test_streaming_reads_what_never_ends(tmp_path: Path) -> None:
    def endless() -> Iterator[dict[str, Any]]:
        return ({"text": f"row {i}"} for i in itertools.count())

    datasets = [DatasetConfig(name="d", data_files=endless, version="1")]
    loader = (
        Pipeline(config(tmp_path, datasets=datasets, streaming=True))
        .source()
        .tokenize()
        .pack({"seq_length": 64})
    )
    assert (
        len(
            list(
                itertools.islice(
                    loader.load({"batch_size": 4, "shuffle_buffer_size": 64}).build(), 3
                )
            )
        )
        == 3
    )


class Bring(BaseStage):
    @property
    def name(self) -> str:
        return "bring"

    def process(self, data: dict[str, Any], context: Any) -> dict[str, Any]:
        return {**data, "d": Mine()}


def test_a_stage_that_brings_its_sources_may_come_first(tmp_path: Path) -> None:
    pipeline = Pipeline(config(tmp_path, datasets=[], pack={"seq_length": 64})).add_stage(Bring())
    want = batches(tmp_path, Mine())
    report = pipeline.copy().tokenize().save({"output_dir": tmp_path / "saved"}).build()
    assert sum(folder.num_rows for folder in report.folders) == ROWS + 7
    assert_same_batches(want, pipeline.tokenize().pack().load({"batch_size": 8}).build())
    both = Pipeline(config(tmp_path)).add_stage(Bring()).source()
    assert list(both.get_data()) == ["d", "code", "docs"]
    mixed = (
        both.tokenize()
        .mix({"stop_strategy": "first_exhausted"})
        .pack({"seq_length": 64})
        .load({"batch_size": 4})
        .build()
    )
    assert len(list(mixed)) > 3


def test_warnings_name_a_source_that_a_stage_brings(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Unversioned(Bring):
        def process(self, data: dict[str, Any], context: Any) -> dict[str, Any]:
            return {"brought": Mine(version=None)}

    Pipeline(config(tmp_path, datasets=[])).add_stage(Unversioned()).tokenize().get_data()
    assert caplog.messages
    assert all(line.startswith("dataset brought: ") for line in caplog.messages)


def test_stages_before_any_source_still_raise(tmp_path: Path) -> None:
    class Look(Bring):
        def process(self, data: dict[str, Any], context: Any) -> dict[str, Any]:
            return data

    class Wrong(Bring):
        def process(self, data: dict[str, Any], context: Any) -> dict[str, Any]:
            return {"x": 5}

    empty = Pipeline(config(tmp_path, datasets=[]))
    for stage in ("tokenize", "mix", "pack", "save", "load", "build"):
        with pytest.raises(StageOrderError, match=r"Call source\(\) before other pipeline stages"):
            getattr(empty.copy(), stage)()
    with pytest.raises(
        StageOrderError,
        match=r"stage 'bring' is the first, but returns no source. Call source\(\) before it",
    ):
        empty.copy().add_stage(Look())
    with pytest.raises(ConfigError, match=r"stage 'bring' gave 5 for 'x'. Return \{name: source\}"):
        empty.copy().add_stage(Wrong())
    with pytest.raises(ConfigError, match="datasets: there is none"):
        empty.copy().source()
    with pytest.raises(
        ConfigError, match=r"datasets\[2\].name: 'code' names an earlier dataset too"
    ):
        Pipeline(config(tmp_path)).source({"code": rows})


def test_own_sources_are_interleaved_and_discovered(tmp_path: Path) -> None:
    from easypipe import discover

    both = block_mixture_interleave(
        {"a": open_object(rows, name="a"), "b": open_object(Again(), name="b")},
        stop_strategy="first_exhausted",
    )
    assert both.read(0, 0, 4).column("n").to_pylist() == [0, 0, 1, 1]
    assert discover(Mine(), cache_dir=tmp_path).propose().config.content_field == "text"


def fails() -> Iterator[dict[str, Any]]:
    yield {"text": "x"}
    raise OSError("the line is down")


class Listed(ShardedDataSource):
    shard_names: ClassVar = {"one": None}.keys()  # any collection with an order

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def open_shard(self, shard_name: str) -> Iterator[Any]:
        yield from self.rows


class ListedAtRow(Listed):
    def open_shard_at_row(self, shard_name: str, row: int) -> Iterator[Any]:
        yield from self.rows[row:]


class ByNumber:
    """Rows by number, as torch's datasets have them."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> Any:
        return self.rows[number]


class Nameless:
    def open_shard(self, name: str) -> Iterator[dict[str, Any]]:
        raise AssertionError(name)


class Unordered(Nameless):
    shard_names: ClassVar = {"a", "b"}


class Misnamed:
    def shards(self) -> list[str]:
        return ["a"]

    def open_shard(self, name: str) -> Iterator[dict[str, Any]]:
        raise AssertionError(name)


class Rowless(ShardedDataSource):
    shard_names: ClassVar = ["a"]

    def open_shard(self, shard_name: str) -> Any:
        """Forgot to yield."""


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            rows(),
            "data_files: a generator can be read only once, .* Give the function that makes it, "
            "without calling it",
        ),
        (Mine, r"<class .*Mine'> is neither a path nor rows. .* of this class: Mine\(\.\.\.\)"),
        (
            ShardedDataSource(),
            r"data_files: ShardedDataSource has neither open_shard\(name\) nor read",
        ),
        (
            Nameless(),
            "data_files: shard_names of Nameless are None. Give a list of different names",
        ),
        (Unordered(), r"data_files: shard_names of Unordered are {'.', '.'}. Give a list of diff"),
        (
            Misnamed(),
            r"data_files: shards of Misnamed are \['a'\]. Give a list of Shard\(name=..., num_rows=",
        ),
        (
            Rowless(),
            "shard 'a': open_shard of Rowless gave NoneType, which has no rows. Yield",
        ),
        (lambda: iter(()), "d: has no row from which columns can be determined"),
        (
            lambda: iter([{"a": 1}, {"a": 2, "b": 1}, {"a": "x"}, {"a": 1.5}]),
            "d, row 2, column 'a': is not of type double: .*. Give .*, or set on_error to 'skip'",
        ),
        (
            ByNumber([{"a": []}, {"a": {"b": 1}}]),
            "d, row 1, column 'a': is not of type large_list",
        ),
        (
            Listed([{"a": "x"}] * 7 + [{"a": "a\ud800"}]),
            r"d, shard 'one', row 7, column 'a': is not Unicode text: '\\ud800' is half of a "
            r"surrogate pair. Replace it, as text.encode\('utf-8', 'replace'\).decode\(\) does, or "
            "set on_error to 'skip'",
        ),
        (
            lambda: iter([5]),
            "d, row 0: expected a dict with names of columns, got int. Map .*, or set on_error",
        ),
        (
            lambda: iter([{"a": 1}] * 1100 + [{"b": 1}]),
            "d, row 1100: column 'b' is not in the first 1024 rows",
        ),
        (
            lambda: iter([{"a": 1}] * 1100 + [{"a": "x"}]),
            "d, row 1100, column 'a': is not of type int64",
        ),
    ],
)
def test_what_is_refused(data: Any, message: str, tmp_path: Path) -> None:
    def run() -> None:
        source = (
            Pipeline(config(tmp_path, datasets=[DatasetConfig(name="d", data_files=data)]))
            .source()
            .get_data()["d"]
        )
        source.read(0, 0, source.shards[0].num_rows or 0)

    with pytest.raises((ConfigError, SourceError), match=message):
        run()


class FailsWhole(ShardedDataSource):
    schema, fingerprint = pa.schema([("text", pa.large_string())]), "fails"
    shards = (Shard(name="one", num_rows=2),)

    def read(self, shard: int, start: int, stop: int) -> pa.RecordBatch:
        raise OSError("the line is down")


class FailsAtOpening(Rowless):
    def open_shard(self, shard_name: str) -> Any:
        raise OSError("the line is down")


class FailsByNumber:
    def __len__(self) -> int:
        return 2

    def __getitem__(self, number: int) -> dict[str, Any]:
        return list(fails())[number]


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize(
    ("data", "at"),
    [
        (fails, "d, row 1"),
        (FailsAtOpening(), "d, shard 'a', row 0"),
        (FailsByNumber(), "d, row 0"),
        (FailsWhole(), "one, rows 0:2"),
    ],
    ids=["function", "opening", "by_number", "whole"],
)
def test_what_the_rows_raise_names_the_place_and_is_no_end(data: Any, at: str, skip: bool) -> None:
    source: Any = open_object(data, name="d", skip=skip)
    kind = "fails" if data is fails else type(data).__name__
    for _ in range(2):
        with pytest.raises(SourceError) as caught:
            scan(source, 0, 0, source.shards[0].num_rows)
        assert re.fullmatch(
            f"{at}: [a-z._]*test_own:{kind} raised OSError: the line is down.*. Leave the row out in the "
            "source: whatever on_error says, reading ends here.",
            str(caught.value),
        )
        assert isinstance(caught.value.__cause__, OSError)


def test_errors_of_easypipe_within_a_source_keep_their_words() -> None:
    def rows() -> Iterator[dict[str, Any]]:
        yield from open_object(FailsByNumber(), name="inner").open_shard("inner")

    with pytest.raises(SourceError, match=r"^inner, row 0: ") as caught:
        _ = open_object(rows, name="d").schema
    assert caught.value.__notes__ == ["while reading d, row 0"]


def test_what_gave_all_of_its_rows_is_let_go() -> None:
    class Given(Iterator[dict[str, Any]]):
        def __init__(self) -> None:
            self.numbers = iter(range(3))

        def __next__(self) -> dict[str, Any]:
            return {"n": next(self.numbers)}

    made: list[weakref.ref[Given]] = []

    def given() -> Given:
        one = Given()
        made.append(weakref.ref(one))
        return one

    source = open_object(given, name="d", version="1")
    assert source.read(0, 0, 3).column("n").to_pylist() == [0, 1, 2]
    gc.collect()
    assert {one() for one in made} == {None}


def test_rows_that_are_fewer_than_were_counted(tmp_path: Path) -> None:
    Table(tmp_path / "t.db")
    with closing(sqlite3.connect(tmp_path / "t.db")) as db, db:
        db.execute("DELETE FROM notes WHERE id > 290")
    source = open_object(Table(tmp_path / "t.db"), name="d")
    with pytest.raises(
        SourceError,
        match=r"d, shard 'notes': ended after 290 rows, fewer than its num_rows, which is 300. Correct",
    ):
        source.read(0, 280, 300)


class Says(ShardedDataSource):
    """A source that says that it has `says` rows, and has `has`."""

    def __init__(self, says: int | None, has: int) -> None:
        self.shards = [Shard(name="a", num_rows=says), Shard(name="b", num_rows=5)]
        self.has = {"a": has, "b": 5}
        self.version = "1"

    def open_shard(self, shard_name: str) -> Iterator[dict[str, Any]]:
        return ({"text": f"row {i}"} for i in range(self.has[shard_name]))


class SaysAtRow(Says):
    def open_shard_at_row(self, shard_name: str, row: int) -> Iterator[dict[str, Any]]:
        return itertools.islice(self.open_shard(shard_name), row, None)


class SaysOfRanges(Says):
    schema, fingerprint = pa.schema([("text", pa.large_string())]), "ranges"

    def read(self, shard: int, start: int, stop: int) -> pa.RecordBatch:
        rows = list(Says.open_shard(self, "ab"[shard]))
        return pa.RecordBatch.from_pylist(rows[start:stop], schema=self.schema)

    open_shard = ShardedDataSource.open_shard


MISCOUNTED = (
    "d, shard 'a': {} its num_rows, which is {}. Correct num_rows in [a-z._]*test_own:Says.*None"
)


@pytest.mark.parametrize("how", ["cached", "streaming", "read", "open_shard"])
@pytest.mark.parametrize(
    ("says", "has", "num_rows", "message"),
    [
        (300, 300, None, None),
        (None, 300, None, None),
        (0, 300, None, None),  # counted
        (290, 300, None, MISCOUNTED.format("has more rows than", 290)),
        (256, 257, None, MISCOUNTED.format("has more rows than", 256)),
        (310, 300, None, MISCOUNTED.format("ended after 300 rows, fewer than", 310)),
        (290, 300, 293, MISCOUNTED.format("has more rows than", 290)),
        (290, 300, 290, None),  # no row behind the last one may be asked for
        (290, 300, 100, None),
    ],
)
@pytest.mark.parametrize("make", [Says, SaysAtRow])
def test_no_row_is_lost_where_a_source_miscounts_them(
    make: type[Says],
    says: int | None,
    has: int,
    num_rows: int | None,
    message: str | None,
    how: str,
    tmp_path: Path,
) -> None:
    def read() -> int:
        if how in ("cached", "streaming"):
            dataset = DatasetConfig(
                name="d", data_files=make(says, has), num_rows=num_rows, tokenizer=tokenizer()
            )
            streaming = how == "streaming"
            made = Pipeline(
                PipelineConfig(datasets=[dataset], seed=1, cache_dir=tmp_path, streaming=streaming)
            )
            return sum(
                len(batch["input_ids"])
                for batch in made.source().tokenize().load({"batch_size": 1}).build()
            )
        source: Any = open_object(make(says, has), name="d", num_rows=num_rows)
        if how == "open_shard":
            return sum(1 for one in source.shards for _ in source.open_shard(one.name))
        return sum(
            source.read(shard, start, min(start + 50, one.num_rows)).num_rows
            for shard, one in enumerate(source.shards)
            for start in range(0, one.num_rows, 50)
        )

    if message is None:
        assert read() == (has + 5 if num_rows is None else num_rows)
        return
    with pytest.raises(SourceError, match=message):
        read()


def test_a_source_may_refuse_the_row_behind_its_last_one() -> None:
    class Refuses(Says):
        def open_shard_at_row(self, shard_name: str, row: int) -> Iterator[dict[str, Any]]:
            rows = list(self.open_shard(shard_name))
            return (rows[i] for i in itertools.count(row))

    source = open_object(Refuses(300, 300), name="d")
    assert source.read(0, 290, 300).num_rows == 10
    with pytest.raises(SourceError, match=r"d, shard 'a', row 300: .* raised IndexError"):
        open_object(Refuses(310, 300), name="d").read(0, 290, 310)


def test_a_range_of_a_whole_source_has_all_its_rows(tmp_path: Path) -> None:
    """There `num_rows` is where a shard ends: no row behind it is asked for."""
    for says, total in ((300, 305), (290, 295)):
        source: Any = open_object(SaysOfRanges(says, 300), name="d")
        assert sum(1 for one in source.shards for _ in source.open_shard(one.name)) == total
    for streaming in (False, True):
        dataset = DatasetConfig(name="d", data_files=SaysOfRanges(310, 300), tokenizer=tokenizer())
        made = Pipeline(
            PipelineConfig(datasets=[dataset], seed=1, cache_dir=tmp_path, streaming=streaming)
        )
        with pytest.raises(
            SourceError,
            match=r"a, rows 0:310: [a-z._]*test_own:SaysOfRanges returned 300 rows, and the shard has 310 by "
            r"its num_rows. Correct num_rows, or return",
        ):
            list(made.source().tokenize().load({"batch_size": 1}).build())
    with pytest.raises(SourceError, match="a, rows 0:310: "):
        list(open_object(SaysOfRanges(310, 300), name="d").open_shard("a"))


def test_version_has_no_effect_on_what_is_known_by_its_content() -> None:
    for data in ("a.jsonl", [{"text": "x"}]):
        with pytest.raises(
            ConfigError,
            match="version: has no effect: files, and rows in memory, are known by their content",
        ):
            DatasetConfig(data_files=data, version="1")
    with pytest.raises(
        ConfigError, match="version: has no effect: OwnSource has a fingerprint of its own"
    ):
        open_object(open_object(rows), version="1")


@pytest.mark.parametrize("at", [0, 300, 1300], ids=["first", "early", "later"])
@pytest.mark.parametrize("bad", [{"text": 5}, 7, {"text": "x", "other": 1}], ids=str)
@pytest.mark.parametrize("make", [Listed, ListedAtRow, ByNumber])
def test_a_bad_row_under_skip_is_left_out_and_counted(
    make: type[Any], bad: Any, at: int, tmp_path: Path
) -> None:
    good = [{"text": text} for text in texts(1400)]
    rows = [*good[:at], bad, *good[at:]]
    fits = bad == {"text": "x", "other": 1} and at < 1024  # then it is a column
    source = open_object(make(rows), name="d", version="1", skip=True)
    parts = [scan(source, 0, start, min(start + 300, 1401)) for start in range(0, 1401, 300)]
    read = [row for part in parts for row in part.batch.to_pylist()]
    assert [row["text"] for row in read] == [row["text"] for row in (rows if fits else good)]
    assert [row[ROW_NUMBER] for row in read] == [n for n in range(1401) if fits or n != at]
    rejects = [(one.row, one.reason) for part in parts for one in part.rejects]
    assert rejects == ([] if fits else [(at, "wrong_type")])
    if bad == {"text": 5}:
        assert [one.detail[:15] for part in parts for one in part.rejects] == ["column 'text': "]
    assert_stateless_reads(source, [at, at + 1, 17])
    strict: Any = open_object(make([*good[:at], 7, *good[at:]]), name="d", version="1")
    with pytest.raises(SourceError, match=rf"row {at}: expected a dict"):
        strict.read(0, 0, strict.shards[0].num_rows)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    "given", [Listed, list, lambda rows: {"text": [row["text"] for row in rows]}]
)
def test_a_bad_row_of_python_stands_in_the_ledger(
    given: Callable[[list[Any]], Any],
    streaming: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    rows: list[Any] = [{"text": text} for text in texts(30)]
    dataset = DatasetConfig(
        name="d", data_files=given([*rows, {"text": 5}]), tokenizer=tokenizer(), on_error="skip"
    )
    chain = Pipeline(
        PipelineConfig(datasets=[dataset], seed=1, cache_dir=tmp_path, streaming=streaming)
    )
    loader = chain.source().tokenize().load(LoadStageConfig(batch_size=5)).build()
    assert len(list(loader)) == 6
    ledger = loader.ledger() if streaming else chain.ledger()
    assert {"wrong_type": 1}.items() <= ledger.entries[int(streaming)].out.items()
    [told] = [line for line in caplog.messages if "on_error" in line]
    assert re.match(
        r"dataset d: on_error is 'skip': bad rows are left out and counted; the first that was read "
        r"is (d|one), row 30: wrong_type: column 'text': is not of type"
        if streaming
        else r"dataset d: on_error is 'skip': 1 of 31 rows left out \(wrong_type 1\)",
        told,
    )


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("make", [Listed, ListedAtRow, ByNumber, list])
def test_a_column_that_is_not_read_spoils_no_row(
    make: Callable[[list[Any]], Any], streaming: bool, tmp_path: Path
) -> None:
    good = [{"text": text, "n": 1, "o": {"a": 1}} for text in texts(1100)]
    others: list[Any] = [{"n": "x"}, {"n": object()}, {"new": 1}, {"o": {"b": 1}}, {"n": "\ud800"}]
    rows = [*good[:7], {**good[0], "n": "y"}, *good[7:], *({**good[0], **one} for one in others)]
    dataset = DatasetConfig(name="d", data_files=make(rows), tokenizer=tokenizer(), version=None)
    made = Pipeline(
        PipelineConfig(datasets=[dataset], seed=1, cache_dir=tmp_path, streaming=streaming)
    ).source()
    if make is not list:  # whose columns follow from all rows
        source = made.copy().get_data()["d"]
        with pytest.raises(
            SourceError, match=r"row 7, column 'n': is not of type int64: .*on_error"
        ):
            source.read(0, 0, 1000)
        with pytest.raises(SourceError, match=r"row 1103: column 'new' is not in the first 1024"):
            source.read(0, 1103, 1104)
    loader = made.tokenize().load({"batch_size": 2}).build()
    assert sum(len(batch["input_ids"]) for batch in loader) == 1106


def test_rows_that_become_several_are_all_streamed(tmp_path: Path) -> None:
    """Where a shard ends is known of the rows below, which have other numbers."""

    def rows() -> Iterator[dict[str, Any]]:
        return ({"text": f"row {i}"} for i in range(3000))

    datasets = [DatasetConfig(name="d", data_files=rows, version="1")]
    twice = Expand(lambda row: [row, {"text": f"{row['text']} again"}], most=2, version="1")
    made = Pipeline(config(tmp_path, datasets=datasets, streaming=True, num_streams=1))
    loader = made.source().transform(twice).tokenize().load({"batch_size": 8}).build()
    assert sum(len(batch["input_ids"]) for batch in loader) == 6000


@pytest.mark.parametrize(
    ("early", "late", "what"),
    [
        (1, 1.5, "1.5"),
        ([1, 2], [1, 2.25], "2.25"),
        ({"n": [1]}, {"n": [0.5]}, "0.5"),
        ([1], np.array([1.5]), "1.5"),
    ],
)
def test_a_fraction_behind_integers_is_not_cut(early: Any, late: Any, what: str) -> None:
    """Arrow makes 1 of 1.5 without a word."""

    def rows() -> Iterator[dict[str, Any]]:
        yield from ({"text": "a", "n": early} for _ in range(1024))
        yield {"text": "b", "n": late}

    source = open_object(rows, name="d", version="1")
    with pytest.raises(SourceError, match=rf"row 1024, column 'n': .*{what} is not an integer"):
        source.read(0, 1000, 1025)

    def whole() -> Iterator[dict[str, Any]]:
        yield from ({"text": "a", "n": 1} for _ in range(1024))
        yield {"text": "b", "n": 2.0}

    assert open_object(whole, name="d", version="1").read(0, 1024, 1025)["n"].to_pylist() == [2]


def test_a_file_under_a_name_is_no_column(tmp_path: Path) -> None:
    """As `datasets` has them: {"train": "rows.jsonl"}."""
    datasets = [DatasetConfig(name="d", data_files={"train": "rows.jsonl"})]
    with pytest.raises(
        SourceError, match=r"column 'train': 'rows.jsonl' is not a list.*data_files: "
    ):
        Pipeline(config(tmp_path, datasets=datasets)).source().get_data()["d"].read(0, 0, 1)
