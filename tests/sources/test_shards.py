"""MDS folders and WebDataset tars: what is checked, and what is refused. The laws run in
test_formats.py; nox -s shards compares with the libraries.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import struct
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import xxhash
import zstandard

from easypipe import DatasetConfig, LoadStageConfig, PackStageConfig, Pipeline, PipelineConfig
from easypipe.core.errors import EasypipeError, MissingFileError, SchemaError, SourceError
from easypipe.sources.open import open_files
from laws import assert_exact_resume, assert_stateless_reads
from pipelines import tokenizer

# name -> (encoding, its fixed size)
Columns = dict[str, tuple[str, int | None]]
TEXT: Columns = {"text": ("str", None)}


def mds(columns: Columns, rows: Sequence[Sequence[bytes]]) -> bytes:
    names, told = zip(*columns.items(), strict=True)
    encodings, sizes = zip(*told, strict=True)
    header = {"column_names": names, "column_encodings": encodings, "column_sizes": sizes}
    data, text = [], json.dumps(header).encode()
    for row in rows:
        own = [len(value) for value, size in zip(row, sizes, strict=True) if size is None]
        data.append(struct.pack(f"<{len(own)}I", *own) + b"".join(row))
    ends = [4 + 4 * (len(rows) + 1) + len(text)]
    for one in data:
        ends.append(ends[-1] + len(one))
    return struct.pack(f"<{len(rows) + 2}I", len(rows), *ends) + text + b"".join(data)


def folder(path: Path, shards: Sequence[bytes], rows: Sequence[int], zipped: bool = False) -> Path:
    """The shards, and their index.json."""
    path.mkdir()
    entries = []
    for i, data in enumerate(shards):
        entry = {"samples": rows[i], "zip_data": None}
        for kind in ("raw_data", "zip_data")[: 1 + zipped]:
            name = f"shard.{i:05}.mds" + ".zstd" * (kind == "zip_data")
            lies = zstandard.compress(data) if kind == "zip_data" else data
            hashes = {
                "sha1": hashlib.sha1(lies).hexdigest(),
                "xxh64": xxhash.xxh64(lies).hexdigest(),
            }
            entry[kind] = {"basename": name, "bytes": len(lies), "hashes": hashes}
            if kind == "zip_data" or not zipped:
                (path / name).write_bytes(lies)
        entries.append(entry)
    (path / "index.json").write_text(json.dumps({"version": 2, "shards": entries}))
    return path


def texts(number: int, at: int = 0) -> bytes:
    return mds(TEXT, [[f"row {at + i} é".encode()] for i in range(number)])


def tar(path: Path, members: Sequence[tuple[str, bytes]]) -> Path:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as opened:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            opened.addfile(info, io.BytesIO(data))
    data = out.getvalue()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def npy(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


@pytest.mark.parametrize("zipped", [False, True])
def test_a_folder_of_shards(tmp_path: Path, zipped: bool) -> None:
    path = folder(tmp_path / "mds", [texts(30), texts(12, 30)], [30, 12], zipped)
    source = open_files(path)  # its index.json is not data
    assert_stateless_reads(source, [1, 7, 11])
    assert [shard.num_rows for shard in source.shards] == [30, 12]
    assert source.read(1, 0, 2).column("text").to_pylist() == ["row 30 é", "row 31 é"]


def test_a_shard_that_lies_there_twice_is_read_once(tmp_path: Path) -> None:
    path = folder(tmp_path / "mds", [texts(3)], [3], zipped=True)
    (path / "shard.00000.mds").write_bytes(texts(3))
    assert [shard.num_rows for shard in open_files(path).shards] == [3]


def test_every_encoding_that_is_read(tmp_path: Path) -> None:
    """Those that MosaicML's library writes, without pickles, arrays of images and decimals."""
    numbers = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
    numbers += ["float16", "float32", "float64"]
    columns: Columns = {name: (name, np.dtype(name).itemsize) for name in numbers}
    row = [np.array(3, name).tobytes() for name in numbers]
    expected: dict[str, Any] = dict.fromkeys(numbers, 3)
    for name in numbers:
        head = bytes([1 << 2, 3]) if name != "uint32" else bytes([1 << 2 | 1]) + b"\3\0"
        columns |= {f"{name}s": (f"ndarray:{name}", None)}
        row += [head + np.array([7, 8, 9], name).tobytes()]
        expected |= {f"{name}s": [7, 8, 9]}
    for name, encoding, size, data, value in (
        ("fixed", "ndarray:int32:2", 8, np.array([5, 6], "<i4").tobytes(), [5, 6]),
        ("int", "int", 8, struct.pack("<q", -3), -3),
        ("str", "str", None, "é".encode(), "é"),
        *((name, name, None, b"\xff", b"\xff") for name in ("bytes", "jpeg", "png")),
        ("json", "json", None, b'{"a": [1]}', '{"a": [1]}'),
        ("whole", "str_int", None, b"-12", -12),
        ("real", "str_float", None, b"1.5", 1.5),
    ):
        columns[name], expected[name] = (encoding, size), value
        row.append(data)
    (tmp_path / "a.mds").write_bytes(mds(columns, [row, row]))
    source = open_files(tmp_path / "a.mds")
    assert_stateless_reads(source, [1])
    assert source.read(0, 1, 2).to_pylist() == [expected]
    for name in numbers:
        own = pa.from_numpy_dtype(np.dtype(name))
        assert source.schema.field(name).type == own
        assert source.schema.field(f"{name}s").type == pa.large_list(own)


def test_pickled_columns_are_refused_by_name(tmp_path: Path) -> None:
    data = mds({"evil": ("pkl", None), "text": ("str", None)}, [[b"cos\nsystem", b"a"]])
    (tmp_path / "a.mds").write_bytes(data)
    found = r"a.mds, column 'evil'.*pickle is not read: reading it would run code of the file"
    with pytest.raises(SchemaError, match=found):
        open_files(tmp_path / "a.mds").schema  # noqa: B018
    chosen = open_files(tmp_path / "a.mds").select(["text"])
    assert chosen.read(0, 0, 1).to_pylist() == [{"text": "a"}]
    for name in ("x.pyd", "x.pickle", "x.pth", "x.pt", "x.meta.pkl"):
        path = tar(tmp_path / "a.tar", [("x.txt", b"a"), (name, b"cos\nsystem")])
        with pytest.raises(SchemaError, match=name.partition(".")[2]):
            open_files(path).schema  # noqa: B018
        assert open_files(path).select(["txt"]).read(0, 0, 1).to_pylist() == [{"txt": "a"}]
    array = npy(np.array([{}], object))
    with pytest.raises(EasypipeError, match="pickle"):
        open_files(tar(tmp_path / "b.tar", [("x.npy", array)])).schema  # noqa: B018


@pytest.mark.parametrize(
    ("name", "hashed"),
    [
        *((name, getattr(hashlib, name)) for name in ("md5", "sha1", "sha256", "sha512")),
        ("xxh32", xxhash.xxh32),
        ("xxh64", xxhash.xxh64),
    ],
)
def test_every_hash_of_an_index_is_checked(tmp_path: Path, name: str, hashed: Any) -> None:
    path, whole = folder(tmp_path / "mds", [texts(3)], [3]), texts(3)
    index = json.loads((path / "index.json").read_text())
    index["shards"][0]["raw_data"]["hashes"] = {name: hashed(whole).hexdigest()}
    (path / "index.json").write_text(json.dumps(index))
    assert open_files(path).read(0, 0, 3).num_rows == 3
    (path / "shard.00000.mds").write_bytes(whole[:-1] + b"x")
    with pytest.raises(
        SourceError, match=rf"{name}: \w+, index.json says {hashed(whole).hexdigest()}"
    ):
        open_files(path).read(0, 0, 3)


def test_the_index_is_checked(tmp_path: Path) -> None:
    path = folder(tmp_path / "mds", [texts(30), texts(12, 30)], [30, 12])
    first, whole = path / "shard.00000.mds", texts(30)
    flipped = bytearray(whole)
    flipped[-1] ^= 1
    first.write_bytes(flipped)
    source = open_files(path)
    for _ in range(2):  # to ask again helps nobody
        with pytest.raises(SourceError, match=r"shard.00000.mds: sha1: \w+, index.json says"):
            source.read(0, 0, 1)
    first.write_bytes(texts(31))
    with pytest.raises(SourceError, match=r"bytes: \d+, index.json says \d+"):
        open_files(path).shards  # noqa: B018
    first.write_bytes(whole[:-1])
    with pytest.raises(SourceError, match="not an MDS shard, or truncated"):
        open_files(path).shards  # noqa: B018
    for length in range(0, 40, 3):  # also in the middle of a number
        (tmp_path / "cut.mds").write_bytes(whole[:length])
        with pytest.raises(EasypipeError, match=r"cut.mds: (not an MDS shard|.*empty|.*0 bytes)"):
            open_files(tmp_path / "cut.mds").shards  # noqa: B018
    first.unlink()
    with pytest.raises(MissingFileError, match="no such file, which index"):
        open_files(path)
    assert len(open_files(path / "shard.00001.mds").shards) == 1  # named alone
    (path / "more.mds").write_bytes(texts(1))
    with pytest.raises(SourceError, match=r"more.mds: index.json beside it does not name it"):
        open_files(path / "more.mds").shards  # noqa: B018


def test_a_shard_names_each_column_once(tmp_path: Path) -> None:
    """Of a column that comes twice, every row was read twice."""
    twice = mds({"a": ("str", 1), "b": ("str", 1)}, [[b"1", b"2"]]).replace(b'"b"', b'"a"')
    text = json.dumps({f"column_{key}": [] for key in ("names", "encodings", "sizes")})
    behind = 12 + len(text)
    none = struct.pack("<3I", 1, behind, behind) + text.encode()
    for data in (twice, none):
        (tmp_path / "a.mds").write_bytes(data)
        with pytest.raises(SourceError, match=r"a\.mds: not an MDS shard"):
            open_files(tmp_path / "a.mds").read(0, 0, 1)


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz"])
def test_members_of_one_name_are_a_row(tmp_path: Path, name: str) -> None:
    ids = [npy(np.arange(n, dtype=np.int32)) for n in range(3)]
    members = [
        ("__meta__", b"left out"),
        ("__notes__/0.txt", b"left out"),
        (".hidden", b"left out"),
        ("d/0.txt", "é".encode()),
        ("d/0.cls", b" 5"),
        ("d/1.JSON", b'{"a": 1}'),
        ("d/1.input.ids.npy", ids[2]),
        ("README", b"left out"),
        ("d/2.jpg", b"\xff"),
        ("d/2.txt", b""),
    ]
    source = open_files(tar(tmp_path / name, members))
    assert_stateless_reads(source, [1, 2])
    assert source.read(0, 0, 3).to_pylist() == [
        {"__key__": "d/0", "txt": "é", "cls": 5, "json": None, "input.ids.npy": None, "jpg": None},
        {"__key__": "d/1", "txt": None, "cls": None, "json": '{"a": 1}', "input.ids.npy": [0, 1]}
        | {"jpg": None},
        {"__key__": "d/2", "txt": "", "cls": None, "json": None, "input.ids.npy": None}
        | {"jpg": b"\xff"},
    ]


@pytest.mark.parametrize(
    ("names", "data", "value"),
    [
        (("txt", "text", "transcript"), "é".encode(), "é"),
        (("cls", "cls2", "index", "inx", "id"), b"7", 7),
        (("json", "jsn"), b"[1]", "[1]"),
        (("jpg", "7"), b"7", b"7"),
    ],
)
def test_what_a_member_is_follows_from_its_name(
    tmp_path: Path, names: Sequence[str], data: bytes, value: Any
) -> None:
    path = tar(tmp_path / "a.tar", [(f"0.{name}", data) for name in names])
    [row] = open_files(path).read(0, 0, 1).to_pylist()
    assert row == {"__key__": "0"} | dict.fromkeys(names, value)


def test_members_of_a_row_may_stand_in_any_order(tmp_path: Path) -> None:
    values = {"txt": b"a text", "cls": b"7", "jpg": b"\xff\xd8"}
    orders = (("txt", "cls", "jpg"), ("jpg", "cls", "txt"), ("cls", "jpg", "txt"))
    members = [(f"{i}.{name}", values[name]) for i, order in enumerate(orders) for name in order]
    read = open_files(tar(tmp_path / "a.tar", members)).read(0, 0, 3).to_pylist()
    assert read == [
        {"__key__": str(i), "txt": "a text", "cls": 7, "jpg": values["jpg"]} for i in range(3)
    ]


def test_bad_members(tmp_path: Path) -> None:
    utf16 = "[1]".encode("utf-16-le")
    members = [("0.json", b"{}"), ("1.json", b"{"), ("2.json", b"[]"), ("3.cls", b"9" * 30)]
    members.append(("4.json", utf16))
    path = tar(tmp_path / "a.tar", members)
    with pytest.raises(SourceError, match=r"row 1: column 'json' cannot be read"):
        open_files(path).read(0, 0, 3)
    source = open_files(path, on_error="skip")
    assert_stateless_reads(source, [1, 2])
    scanned = source.scan(0, 0, 5)
    assert scanned.batch.column("__key__").to_pylist() == ["0", "2"]
    assert [(reject.row, reject.reason) for reject in scanned.rejects] == [
        (1, "unparsable"),
        (3, "unparsable"),
        (4, "unparsable"),
    ]
    with pytest.raises(SourceError, match=r"two members of one name \(0.txt\)"):
        open_files(tar(tmp_path / "b.tar", [("0.txt", b""), ("0.txt", b"")])).shards  # noqa: B018


def test_an_array_of_another_type_or_shape_is_a_bad_row(tmp_path: Path) -> None:
    arrays = [np.arange(2, dtype=np.uint16), np.arange(2, dtype=np.int64), np.ones((1, 2), "<u2")]
    path = tar(tmp_path / "a.tar", [(f"{i}.npy", npy(array)) for i, array in enumerate(arrays)])
    scanned = open_files(path, on_error="skip").scan(0, 0, 3)
    assert scanned.batch.column("npy").to_pylist() == [[0, 1]]
    assert [(reject.row, reject.reason) for reject in scanned.rejects] == [
        (1, "unparsable"),
        (2, "unparsable"),
    ]


def test_what_is_no_array_of_numbers_is_refused_by_name(tmp_path: Path) -> None:
    """Whether it is the first of its column, which says the type, or a later one."""
    whole = npy(np.arange(3))
    endless = whole.replace(b"(3,), }           ", b"(30000000000000,)}", 1)
    assert endless != whole
    others = [npy(np.zeros(2, kind)) for kind in (complex, ">i4", [("a", "i4")], "M8[D]")]
    for data in (b"", b"PK\3\4 not", whole[:8] + b"\3\0(((", whole[:-1], endless, *others):
        first = tar(tmp_path / "a.tar", [("0.txt", b"x"), ("0.npy", data)])
        with pytest.raises(SchemaError, match=r"a.tar, column 'npy': its first array cannot be re"):
            open_files(first).schema  # noqa: B018
        assert open_files(first).select(["txt"]).read(0, 0, 1).to_pylist() == [{"txt": "x"}]
        scanned = open_files(
            tar(tmp_path / "b.tar", [("0.npy", whole), ("1.npy", data)]), on_error="skip"
        ).scan(0, 0, 2)
        assert scanned.batch.column("npy").to_pylist() == [[0, 1, 2]]
        assert [(reject.row, reject.reason) for reject in scanned.rejects] == [(1, "unparsable")]


def test_members_without_bytes_of_their_own_are_refused(tmp_path: Path) -> None:
    """The rows of links would be missing, and holes of a sparse file read as other members."""
    (tmp_path / "0.txt").write_bytes(b"a")
    (tmp_path / "1.txt").hardlink_to(tmp_path / "0.txt")
    (tmp_path / "2.txt").symlink_to(tmp_path / "0.txt")
    with (tmp_path / "3.txt").open("wb") as file:
        file.seek(1 << 20)
        file.write(b"z")
    for names, options, member in [
        (["0.txt", "1.txt"], [], r"'1.txt' is a link, which has no bytes of its own"),
        (["2.txt"], [], r"'2.txt' is a link"),
        (["3.txt"], ["--sparse"], r"'3.txt' is a sparse file, whose holes are not stored"),
        (["0.txt", "1.txt", "3.txt"], ["--hard-dereference"], None),
    ]:
        path = tmp_path / "x.tar"
        subprocess.run(["tar", *options, "-cf", path, "-C", tmp_path, *names], check=True)
        if member is None:
            assert open_files(path).shards[0].num_rows == 3
            continue
        with pytest.raises(SourceError, match=member + ".*Pack it again: tar --dereference"):
            open_files(path).shards  # noqa: B018


def test_damaged_tars(tmp_path: Path) -> None:
    path = tar(tmp_path / "a.tar", [(f"{i}.txt", b"x" * 600) for i in range(3)])
    whole = path.read_bytes()
    member = 512 + 1024
    for data, found in (
        (whole[: member + 700], "not a tar file, or truncated"),
        (whole[:member] + b"\1" * 512 + whole[member + 512 :], "no member begins at byte 1536"),
        (b"text" * 300, "not a tar file"),
    ):
        path.write_bytes(data)
        with pytest.raises(SourceError, match=found):
            open_files(path).shards  # noqa: B018
    path.write_bytes(whole[: 3 * member])
    source = open_files(path)
    assert source.shards[0].num_rows == 3
    assert source.files_cut == 1  # members may be missing


@pytest.mark.parametrize("kind", ["mds", "webdataset"])
@pytest.mark.parametrize("streaming", [False, True])
def test_batches_resume(tmp_path: Path, kind: str, streaming: bool) -> None:
    if kind == "mds":
        path = folder(tmp_path / "data", [texts(30), texts(12, 30)], [30, 12])
    else:
        path = tmp_path / "data"
        path.mkdir()
        for i in range(2):
            members = [(f"{n}.txt", f"row {n} {i}".encode()) for n in range(20)]
            tar(path / f"{i}.tar", members)
    dataset = DatasetConfig(
        data_files=str(path), type=kind, content_field="text" if kind == "mds" else "txt"
    )
    config = PipelineConfig(
        datasets=[dataset],
        seed=1,
        default_tokenizer=tokenizer(),
        cache_dir=str(tmp_path / "c"),
        streaming=streaming,
    )

    def make() -> object:
        chain = Pipeline.from_config(config).source().tokenize()
        packed = chain.pack(PackStageConfig(seq_length=32))
        return packed.load(LoadStageConfig(batch_size=2)).build()

    assert_exact_resume(make, 6, stops=[0, 2, 5])
