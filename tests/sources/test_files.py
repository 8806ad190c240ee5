"""Which files a source reads, locally and through fsspec."""

from __future__ import annotations

import glob
import gzip
import itertools
import os
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import feather

from easypipe.core.errors import ConfigError, MissingFileError, SourceError
from easypipe.core.schema import ROW_NUMBER
from easypipe.sources.files import _identity, read_range, resolve
from easypipe.sources.open import open_files
from easypipe.sources.refs import format_of, natural
from laws import assert_stateless_reads


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in [
        "part-10.jsonl",
        "part-2.jsonl",
        "deep/part-1.jsonl",
        "_SUCCESS.jsonl",
        ".hidden.jsonl",
        ".cache/other.jsonl",
        "notes.md",
        "x[1].txt",
    ]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"text": "x"}\n')
    return tmp_path


def names(folder: Path, files: list) -> list[str]:
    return [str(Path(file.path).relative_to(folder)) for file in files]


def test_paths_globs_folders_lists(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_order = ["part-2.jsonl", "part-10.jsonl"]
    assert names(folder, resolve(str(folder / "*.jsonl"))) == ["_SUCCESS.jsonl", *in_order]
    assert names(folder, resolve(folder / "**" / "part*.jsonl")) == ["deep/part-1.jsonl", *in_order]
    assert names(folder, resolve(folder, extensions=["json"])) == ["deep/part-1.jsonl", *in_order]
    assert names(folder, resolve(folder)) == ["deep/part-1.jsonl", *in_order, "x[1].txt"]
    assert (
        names(folder, resolve([folder / "part-10.jsonl", folder / "part-2.jsonl"]))
        == in_order[::-1]
    )
    assert names(folder, resolve(folder / "x[1].txt")) == ["x[1].txt"]
    assert names(folder, resolve(f"file://{folder}/part-2.jsonl")) == ["part-2.jsonl"]
    monkeypatch.chdir(folder)
    assert names(folder, resolve("deep")) == ["deep/part-1.jsonl"]
    monkeypatch.setenv("HOME", str(folder))
    assert names(folder, resolve("~/part-2.jsonl")) == ["part-2.jsonl"]


def test_data_that_a_folder_packs_otherwise_is_named(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    resolve(folder)
    assert not caplog.messages  # notes.md is no data
    for name in ("rows-10.jsonl.xz", "rows-9.jsonl.xz", "deep/t.parquet.gz", ".x.csv.zip"):
        (folder / name).touch()
    assert len(resolve(folder)) == 4
    assert (
        f"{folder}: left out 3 files that are packed in a way that is not read, such as {folder}"
        in (caplog.text)
    )
    assert "Unpack them to read them too." in caplog.text
    caplog.clear()
    resolve(folder, extensions=["csv", "txt"])
    assert not caplog.messages


def test_links_are_not_read_again_and_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Links to a folder above, a folder under two names, a file under two names; what a link alone
    leads to is read.
    """
    for name in ("data/a.jsonl", "data/deep/b.jsonl", "elsewhere/c.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('{"text": "x"}\n')
    data = tmp_path / "data"
    for link, target in {
        "current": ".",
        "deep/up": "..",
        "again": "deep",
        "other": "../elsewhere",
    }.items():
        (data / link).symlink_to(target)
    (data / "z.jsonl").symlink_to("a.jsonl")
    assert names(data, resolve(data / "**" / "*.jsonl")) == [
        "a.jsonl",
        "deep/b.jsonl",
        "other/c.jsonl",
    ]
    for said in ("current", "deep/up", "again"):
        assert f"{data / said}" in caplog.text
    assert (
        f"1 names stand for files that it has already ({data / 'z.jsonl'} is {data / 'a.jsonl'})"
        in caplog.text
    )
    assert names(tmp_path, resolve(tmp_path / "**" / "deep" / "**" / "b*")) == ["data/deep/b.jsonl"]
    caplog.clear()
    assert names(data, resolve(data)) == ["a.jsonl", "deep/b.jsonl"]
    assert f"{data / 'other'}" in caplog.text
    caplog.clear()
    resolve(data)
    resolve(data / "**" / "*.jsonl")
    assert not caplog.text, "a command lists files more than once, and says so once"
    with pytest.raises(SourceError, match=r"named twice in data_files as .*a\.jsonl \(again by "):
        resolve([data / "a.jsonl", data / "current" / "a.jsonl"])


@pytest.mark.parametrize("name", [".cache", "_old"])
def test_of_links_that_no_one_reads_nothing_is_said(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "elsewhere").mkdir()
    data = tmp_path / "data"
    data.mkdir()
    (data / "a.jsonl").write_text('{"text": "x"}\n')
    (data / name).symlink_to("../elsewhere")
    assert names(data, resolve(data)) == ["a.jsonl"]
    assert not caplog.text


@pytest.mark.parametrize(
    "pattern",
    ["", "**", "**/*.jsonl", "*/*.jsonl", "*/b.jsonl", "locked/*.jsonl", "*/deep/**", "locked/**"],
)
def test_a_folder_that_cannot_be_listed_is_an_error_and_no_rows_are_left_out(
    pattern: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may list every folder, so the system is asked by functions that refuse."""
    for name in ("a.jsonl", "open/b.jsonl", "locked/b.jsonl", "locked/deep/c.jsonl", "z/b.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('{"text": "x"}\n')
    locked = tmp_path / "locked"

    def refusing(name: str, call: Any) -> Any:
        def refused(path: Any, *args: Any, **kwargs: Any) -> Any:
            if locked in (Path(path), *(Path(path).parents if name == "lstat" else ())):
                raise PermissionError(13, "Permission denied", str(path))
            return call(path, *args, **kwargs)

        return refused

    for name in ("scandir", "listdir", "lstat"):
        monkeypatch.setattr(os, name, refusing(name, vars(os)[name]))
    said = r"locked.*: cannot be listed, and its files would be left out: Permission denied\. Corr"
    with pytest.raises(SourceError, match=said):
        resolve(f"{tmp_path}/{pattern}")
    assert names(tmp_path, resolve(tmp_path / "[!l]*" / "*.jsonl")) == ["open/b.jsonl", "z/b.jsonl"]
    for leftover in ("lost+found", ".Trash", "_tmp"):
        locked = tmp_path / "open" / leftover
        locked.mkdir()
        assert len(resolve(tmp_path / "open")) == 1, "what is never read may be locked"


@pytest.mark.parametrize("pattern", ["", "*.jsonl", "**/*.jsonl", "*[b]*"])
def test_a_link_to_nothing_that_data_files_names_is_an_error(pattern: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n')
    link = tmp_path / "b.jsonl"
    link.symlink_to("gone.jsonl")
    said = rf"^{link}: is a link to gone\.jsonl, which cannot be read: No such file .*\. Correct or"
    with pytest.raises(MissingFileError, match=said):
        resolve(f"{tmp_path}/{pattern}")
    link.unlink()
    link.symlink_to(link)
    with pytest.raises(SourceError, match="which cannot be read: Too many levels"):
        resolve(f"{tmp_path}/{pattern}")
    link.rename(tmp_path / "b.md")
    assert names(tmp_path, resolve(tmp_path)) == ["a.jsonl"], "it is not data"
    (tmp_path / "day").symlink_to("gone")
    with pytest.raises(SourceError, match=r"day: cannot be listed, .*: No such file"):
        resolve(tmp_path / "*" / "*.jsonl")


def test_patterns_match_what_glob_matches(tmp_path: Path) -> None:
    for name in ("a/b.x", "a/a/b.x", "a[1]/a/x", ".h/b.x", "b.x/a", "a/.h/a", "b/a[1]", "b/.x"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    parts, compared = ["a", ".h", "a[1]", "**", "*", "?", "*.x", ".*", "[ab]*"], 0
    for count in range(3):
        for chosen in itertools.product(parts, repeat=count):
            pattern = os.path.join(tmp_path, *chosen, "*")
            expected = sorted(filter(os.path.isfile, glob.glob(pattern, recursive=True)))
            if expected:
                assert sorted({file.path for file in resolve(pattern)}) == sorted({*expected}), (
                    chosen
                )
                compared += 1
    assert compared > 40


def test_wrong_arguments() -> None:
    for wrong in ([], [""], [5]):
        with pytest.raises(ConfigError, match="data_files"):
            resolve(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        *((f"a.{ending}", "parquet") for ending in ("parquet", "pq")),
        *((f"a.{ending}", "arrow") for ending in ("arrow", "arrows", "ipc", "feather")),
        *((f"a.{ending}", "json") for ending in ("jsonl", "ndjson", "json")),
        *((f"a.{ending}", "csv") for ending in ("csv", "tsv")),
        *((f"a.{ending}", "txt") for ending in ("txt", "text")),
        *((f"a.{ending}", "tokens") for ending in ("npy", "bin")),
        *((f"a.{ending}", "arrayrecord") for ending in ("array_record", "arrayrecord")),
        ("a.mds", "mds"),
        ("a.tar", "webdataset"),
        ("A.JSONL", "json"),
        *((f"a.jsonl.{ending}", "json") for ending in ("gz", "zst", "zstd", "bz2")),
        *(
            (f"a.{one}.zst", kind)
            for one, kind in (("csv", "csv"), ("txt", "txt"), ("mds", "mds"), ("tar", "webdataset"))
        ),
        ("a.parquet.gz", None),
        ("a.b", None),
        ("a.gz", None),
    ],
)
def test_format_of(path: str, kind: str | None) -> None:
    assert format_of(path) == kind


def test_natural_order() -> None:
    assert sorted(["a10", "a2", "a", "b1", "1", "a02b", "1²2"], key=natural) == [
        "1",
        "1²2",
        "a",
        "a2",
        "a02b",
        "a10",
        "b1",
    ]


@pytest.fixture
def memory() -> fsspec.AbstractFileSystem:
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]
    lines = b"".join(b'{"text": "row %d"}\n' % i for i in range(3000))
    table = pa.table({"text": [f"row {i}" for i in range(3000)]})
    fs.pipe("/bucket/a-10.jsonl", lines)
    fs.pipe("/bucket/a-2.jsonl", lines[: len(lines) // 2].rpartition(b"\n")[0])
    fs.pipe("/bucket/z/b.jsonl.gz", gzip.compress(lines))
    fs.pipe("/bucket/z/c.csv", b"text\n" + b"".join(b"row %d\n" % i for i in range(3000)))
    with fs.open("/bucket/z/d.parquet", "wb") as file:
        pq.write_table(table, file, row_group_size=500)
    with fs.open("/bucket/z/e.arrow", "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=700)
    with (
        fs.open("/bucket/z/f.arrows", "wb") as file,
        pa.ipc.new_stream(file, table.schema) as writer,
    ):
        writer.write_table(table, max_chunksize=700)
    return fs


@pytest.mark.parametrize(
    "name", ["a-10.jsonl", "z/b.jsonl.gz", "z/c.csv", "z/d.parquet", "z/e.arrow", "z/f.arrows"]
)
def test_urls(memory: fsspec.AbstractFileSystem, name: str) -> None:
    source = open_files(f"memory://bucket/{name}")
    assert_stateless_reads(source, [1, 499, 1024, 2999])
    assert source.read(0, 1234, 1236).column("text").to_pylist() == ["row 1234", "row 1235"]


def test_url_globs_folders_and_what_is_missing(memory: fsspec.AbstractFileSystem) -> None:
    for pattern in ("*.jsonl", "*"):  # the folder beside them is not a file
        assert [file.path for file in resolve(f"memory://bucket/{pattern}")] == [
            "memory:///bucket/a-2.jsonl",
            "memory:///bucket/a-10.jsonl",
        ]
    assert [file.path for file in resolve("memory://bucket", extensions=["parquet"])] == [
        "memory:///bucket/z/d.parquet"
    ]
    with pytest.raises(MissingFileError, match=r"memory://bucket/b\*: the pattern matches no file"):
        resolve("memory://bucket/b*")
    with pytest.raises(
        MissingFileError, match=r"memory://bucket/b: no such file or folder\. Check the URL"
    ):
        resolve("memory://bucket/b")
    with pytest.raises(MissingFileError, match="holds no data file"):
        resolve("memory://bucket/z", extensions=["txt"])


def test_a_url_may_have_brackets_in_its_name(memory: fsspec.AbstractFileSystem) -> None:
    """As a pattern it means another file, which was read in its place."""
    for name in ("x[1].txt", "x1.txt", "y[1]/1.txt", "y1/1.txt"):
        memory.pipe(f"/bucket/{name}", name.encode())
    for given, found in (
        ("x[1].txt", "x[1].txt"),
        ("y[1]/1.txt", "y[1]/1.txt"),
        ("y[1]", "y[1]/1.txt"),
        ("x[12].txt", "x1.txt"),
    ):
        [row] = open_files(f"memory://bucket/{given}").read(0, 0, 1).to_pylist()
        assert row["text"] == found


def test_url_fingerprints(memory: fsspec.AbstractFileSystem) -> None:
    before = open_files("memory://bucket/a-2.jsonl")
    assert before.fingerprint == open_files("memory://bucket/a-2.jsonl").fingerprint
    memory.pipe("/bucket/a-2.jsonl", b'{"text": "new"}')
    after = open_files("memory://bucket/a-2.jsonl")
    assert after.fingerprint != before.fingerprint
    assert after.read(0, 0, 1).to_pylist() == [{"text": "new", ROW_NUMBER: 0}]


def test_a_file_is_another_where_its_values_become_others(tmp_path: Path) -> None:
    """By the type that the files have together: 1 is text as 1 in one, and as 1.0 beside floats."""
    for name, values in (("1", [1]), ("2", [2]), ("3", [0.5])):
        pq.write_table(pa.table({"n": values}), tmp_path / f"{name}.parquet")
    one, like, unlike = (
        open_files([tmp_path / f"{name}.parquet" for name in names]) for names in ("1", "12", "13")
    )
    assert one.shard_identity(0) == like.shard_identity(0) != unlike.shard_identity(0)
    assert str(unlike.read(0, 0, 1).column("n")[0]) != str(one.read(0, 0, 1).column("n")[0])


def test_storage_options_stay_secret(memory: fsspec.AbstractFileSystem) -> None:
    file = resolve("memory://bucket/a-2.jsonl", {"skip_instance_cache": True})[0]
    assert "skip_instance_cache" not in repr(file)
    assert open_files(
        "memory://bucket/a-2.jsonl", storage_options={"skip_instance_cache": True}
    ).schema.names == ["text", ROW_NUMBER]


def test_schemas_are_reconciled(tmp_path: Path) -> None:
    """A column that a file lacks is null in it, numbers widen, kinds of storage do not matter."""
    pq.write_table(
        pa.table({"text": ["a"], "n": pa.array([1], pa.int32()), "m": [{"x": 1}]}),
        tmp_path / "1.parquet",
    )
    dictionary = pa.array(["b"]).dictionary_encode()
    more = pa.table(
        {
            "n": pa.array([2.5], pa.float32()),
            "text": dictionary,
            "extra": [[1]],
            "m": [{"y": [None, "q"]}],
        }
    )
    pq.write_table(more, tmp_path / "2.parquet")
    pq.write_table(
        pa.table({"text": pa.array(["c"], pa.large_string()), "n": pa.array([None], pa.null())}),
        tmp_path / "3.parquet",
    )
    source = open_files(tmp_path)
    inner = pa.struct([("x", pa.int64()), ("y", pa.large_list(pa.large_string()))])
    assert source.schema == pa.schema(
        [
            ("text", pa.large_string()),
            ("n", pa.float64()),
            ("m", inner),
            ("extra", pa.large_list(pa.int64())),
        ]
    )
    assert [source.read(s, 0, 1).to_pylist()[0] for s in range(3)] == [
        {"text": "a", "n": 1.0, "m": {"x": 1, "y": None}, "extra": None},
        {"text": "b", "n": 2.5, "m": {"x": None, "y": [None, "q"]}, "extra": [1]},
        {"text": "c", "n": None, "m": None, "extra": None},
    ]
    assert_stateless_reads(source, [1])


def test_a_number_that_does_not_fit(tmp_path: Path) -> None:
    pq.write_table(pa.table({"n": [1.5]}), tmp_path / "1.parquet")
    pq.write_table(pa.table({"n": [2**60 + 1]}), tmp_path / "2.parquet")
    source = open_files(tmp_path)
    assert source.read(0, 0, 1).to_pylist() == [{"n": 1.5}]
    with pytest.raises(
        SourceError,
        match=r"2\.parquet, column 'n': cannot be read as double, which it has in other files or "
        r"rows: ",
    ):
        source.read(1, 0, 1)


def test_stored_row_numbers_are_not_read(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a", "b"], ROW_NUMBER: [7, 9]}), tmp_path / "a.parquet")
    assert open_files(tmp_path / "a.parquet").schema.names == ["text"]
    assert open_files(tmp_path / "a.parquet", on_error="skip").read(0, 1, 2).to_pylist() == [
        {"text": "b", ROW_NUMBER: 1}
    ]


def test_real_data(shared_data: Path) -> None:
    """Every text and chat file beside the checkout."""
    import json

    for path in sorted([*(shared_data / "text").iterdir(), *(shared_data / "chat").iterdir()]):
        source = open_files(path)
        assert_stateless_reads(source, [1, 100, 2000, 30000])
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        if path.suffix == ".txt":
            rows = [{"text": line} for line in data.decode().split("\n") if line.strip()]
        else:
            rows = (
                json.loads(data)
                if path.suffix == ".json"
                else [json.loads(line) for line in data.splitlines() if line.strip()]
            )
        texts = [
            name
            for name in source.schema.names
            if source.schema.field(name).type == pa.large_string()
        ]
        assert texts or "messages" in source.schema.names
        read = source.read(0, 0, source.shards[0].num_rows).select(texts).to_pylist()
        assert read == [{name: row.get(name) for name in texts} for row in rows]


def test_brackets_in_a_folder_that_is_there_are_no_pattern(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "w[1]" / "part[ab]"
    (here / "sub").mkdir(parents=True)
    for name in ("a.jsonl", "sub/b.jsonl"):
        (here / name).write_text('{"text": "x"}\n')
    monkeypatch.chdir(here)
    everywhere = ["sub/b.jsonl"], ["a.jsonl"], ["a.jsonl", "sub/b.jsonl"]
    for pattern, names in zip(("*/*.jsonl", "*.jsonl", "**/*.jsonl"), everywhere, strict=True):
        for given in (pattern, str(here / pattern)):
            assert [file.path for file in resolve(given)] == [str(here / name) for name in names]
    with pytest.raises(MissingFileError, match=r"no such file or folder \(have: a.jsonl, sub\)"):
        resolve("c.jsonl")


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.jsonl.gz", "a.txt", "a.csv", "a.parquet", "a.feather"]
)
def test_a_file_that_was_written_again_is_refused_though_its_size_is_the_same(
    tmp_path: Path, name: str
) -> None:
    path = tmp_path / name
    table = pa.table({"text": ["one", "two", "six"]})
    lines = b"".join(b'{"text": "%s"}\n' % word for word in (b"one", b"two", b"six"))
    if name.endswith("parquet"):
        pq.write_table(table, path)
    elif name.endswith("feather"):
        feather.write_feather(table, str(path), compression="uncompressed")
    else:
        path.write_bytes(
            gzip.compress(lines)
            if name.endswith("gz")
            else lines
            if name.endswith("jsonl")
            else b"text\none\ntwo\nsix\n"
        )
    source = open_files(str(path))
    assert source.shards[0].num_rows
    status = path.stat()
    path.write_bytes(path.read_bytes())
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1_000_000_000))
    with pytest.raises(SourceError, match="changed after the source was made"):
        source.read(0, 1, 2)
    assert open_files(str(path)).read(0, 1, 2).num_rows == 1


def test_patterns_enter_no_folder_that_begins_with_a_dot_unless_it_is_named(tmp_path: Path) -> None:
    for name in ("a/x.jsonl", ".git/x.jsonl", "a/.cache/x.jsonl", "a/b/x.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('{"text": "x"}\n')
    seen = names(tmp_path, resolve(tmp_path / "**" / "*.jsonl"))
    assert seen == ["a/b/x.jsonl", "a/x.jsonl"]
    assert names(tmp_path, resolve(tmp_path / ".git" / "*.jsonl")) == [".git/x.jsonl"]


CONTENT = ("etag", "ETag", "generation", "md5Hash", "md5", "checksum")
DATES = ("mtime", "LastModified", "last_modified", "updated", "modified", "created")


@pytest.mark.parametrize("key", [*CONTENT, *DATES, "whatever"])
def test_an_object_is_known_by_the_best_that_its_store_tells(key: str) -> None:
    """By what changes with its content, else by its date, else by all there is: what changes when
    it is read must not make it another.
    """
    info = {"size": 3, key: 1, "accessed": 1} | ({"mtime": 1} if key in CONTENT else {})
    assert _identity(info) == _identity(dict(reversed(info.items())))
    assert _identity(info) != _identity(info | {key: 2})
    assert (_identity(info) == _identity(info | {"accessed": 2})) == (key != "whatever")
    assert (_identity(info) == _identity(info | {"mtime": 2})) == (key in CONTENT)


def test_a_short_read_is_asked_for_again_and_gives_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(range(100)))
    (file,) = resolve(tmp_path / "a.txt")
    whole = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, size, at: whole(fd, min(size, 7), at))
    assert read_range(file, 3, 20) == bytes(range(3, 20))
