"""Tokens that others made: .npy, raw .bin, and Megatron's .bin with .idx, read and written."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from easypipe.core.errors import ConfigError, SourceError
from easypipe.sources.external import megatron
from easypipe.sources.external.megatron import write_megatron
from easypipe.sources.external.memory import InMemoryShardedSource
from easypipe.sources.external.token_files import TokenFilesConfig
from easypipe.sources.formats import records
from easypipe.sources.open import open_files
from laws import assert_stateless_reads
from strategies import examples, row_cuts

EOS = 9


def docs_of(source: Any) -> list[list[int]]:
    return [
        ids
        for s, shard in enumerate(source.shards)
        for ids in source.read(s, 0, shard.num_rows).column("input_ids").to_pylist()
    ]


documents = st.lists(st.lists(st.integers(0, 8), max_size=12), min_size=1, max_size=40)


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "ENTRY_ROWS": 3,
        "ENTRY_BYTES": 90,
        "CUT_BYTES": 40,
        "CHUNK_BYTES": 32,
        "PIECE_BYTES": 64,
        "BATCH_RECORDS": 2,
    }.items():
        monkeypatch.setattr(records, name, value)


@examples(25)
@given(
    docs=documents,
    cuts=row_cuts(),
    dtype=st.sampled_from(["uint8", "uint16", "uint32", "int32", "int64"]),
    last=st.booleans(),
)
def test_separated(
    tmp_path: Path, small_steps: None, docs: list, cuts: list[int], dtype: Any, last: bool
) -> None:
    """The documents come back, each with its separator; the last one of a file may lack it."""
    expected = [[*doc, EOS] for doc in docs]
    if not last and docs[-1]:
        expected[-1].pop()
    flat = np.array([token for doc in expected for token in doc], dtype)
    flat.tofile(tmp_path / "a.bin")
    np.save(tmp_path / "a.npy", flat)
    for name, layout in (
        ("a.bin", TokenFilesConfig(dtype=dtype, separator_id=EOS)),
        ("a.npy", TokenFilesConfig(separator_id=EOS)),
    ):
        source = open_files(tmp_path / name, token_files=layout)
        assert_stateless_reads(source, cuts)
        assert source.schema == pa.schema(
            [("input_ids", pa.large_list(pa.from_numpy_dtype(dtype)))]
        )
        assert docs_of(source) == expected


@examples(15)
@given(length=st.integers(1, 60), width=st.integers(1, 20), cuts=row_cuts())
def test_fixed_lengths(tmp_path: Path, length: int, width: int, cuts: list[int]) -> None:
    np.arange(length, dtype=np.uint16).tofile(tmp_path / "a.bin")
    source = open_files(
        tmp_path / "a.bin", token_files=TokenFilesConfig(dtype="uint16", document_tokens=width)
    )
    assert_stateless_reads(source, cuts)
    assert docs_of(source) == [
        list(range(i, min(i + width, length))) for i in range(0, length, width)
    ]


def test_rows_of_an_array(tmp_path: Path) -> None:
    array = np.arange(60, dtype=np.uint32).reshape(12, 5)
    np.save(tmp_path / "a.npy", array)
    source = open_files(tmp_path / "a.npy")
    assert_stateless_reads(source, [1, 5])
    assert docs_of(source) == array.tolist()


@examples(20)
@given(docs=documents.filter(any), cuts=row_cuts(), dtype=st.sampled_from(["uint16", "int32"]))
def test_megatron(tmp_path: Path, docs: list, cuts: list[int], dtype: Any) -> None:
    """What is written is what is read, and byte for byte what the format says."""
    assert write_megatron(tmp_path / "m", docs, dtype=dtype) == (len(docs), sum(map(len, docs)))
    source = open_files(tmp_path / "m.bin")
    assert_stateless_reads(source, cuts)
    assert docs_of(source) == docs
    sizes = [len(doc) for doc in docs]
    pointers = (np.cumsum([0, *sizes[:-1]]) * np.dtype(dtype).itemsize).tolist()
    n = len(docs)
    expected = b"MMIDIDX\x00\x00" + struct.pack(
        "<QBQQ", 1, {"uint16": 8, "int32": 4}[dtype], n, n + 1
    )
    expected += (
        struct.pack(f"<{n}i", *sizes)
        + struct.pack(f"<{n}q", *pointers)
        + struct.pack(f"<{n + 1}q", *range(n + 1))
    )
    assert (tmp_path / "m.idx").read_bytes() == expected
    assert (tmp_path / "m.bin").read_bytes() == np.array(
        [t for doc in docs for t in doc], dtype
    ).tobytes()


def test_a_megatron_index_goes_on_behind_its_first_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(megatron, "CHUNK_DOCS", 2)
    docs = [[1, 2], [3], [], [4, 5, 6], [7]]
    write_megatron(tmp_path / "m", docs)
    assert docs_of(open_files(tmp_path / "m.bin")) == docs


def test_megatron_documents_of_several_sequences(tmp_path: Path) -> None:
    """Sequences need not lie in order, and a document may have several or none."""
    np.array([5, 6, 1, 2, 3, 4], "<u2").tofile(tmp_path / "m.bin")
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 3, 4)
    (tmp_path / "m.idx").write_bytes(
        head
        + struct.pack("<3i", 2, 2, 2)
        + struct.pack("<3q", 4, 8, 0)
        + struct.pack("<4q", 0, 2, 2, 3)
    )
    source = open_files(tmp_path / "m.bin")
    assert_stateless_reads(source, [1, 2])
    assert docs_of(source) == [[1, 2, 3, 4], [], [5, 6]]


@pytest.mark.parametrize(
    ("code", "dtype"),
    # the numbers of Megatron-LM's DType
    [*enumerate(["uint8", "int8", "int16", "int32", "int64", "float64", "float32", "uint16"], 1)],
)
def test_megatron_tokens_of_every_type(tmp_path: Path, code: int, dtype: str) -> None:
    real = dtype.startswith("float")
    ends = [0.5] if real else [np.iinfo(dtype).min, np.iinfo(dtype).max]
    np.array(ends, dtype).tofile(tmp_path / "m.bin")
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, 1, 2)
    (tmp_path / "m.idx").write_bytes(head + struct.pack("<iqqq", len(ends), 0, 0, 1))
    if real:
        with pytest.raises(
            SourceError, match=f"dtype code {code} is not known .*<u2.* as integers"
        ):
            open_files(tmp_path / "m.bin").shards  # noqa: B018
    else:
        assert docs_of(open_files(tmp_path / "m.bin")) == [ends]


def test_megatron_from_a_source(tmp_path: Path) -> None:
    source = InMemoryShardedSource({"input_ids": [[1, 2], [], [3]]})
    assert write_megatron(tmp_path / "m", source) == (3, 3)
    assert docs_of(open_files(tmp_path / "m.bin")) == [[1, 2], [], [3]]
    pq.write_table(pa.table({"input_ids": [[1, 2], None, [], [3]]}), tmp_path / "a.parquet")
    assert write_megatron(tmp_path / "m", open_files(tmp_path / "a.parquet")) == (4, 3)
    assert docs_of(open_files(tmp_path / "m.bin")) == [[1, 2], [], [], [3]]
    with pytest.raises(
        SourceError,
        match=re.escape("m, row 1: token 65536 is not a uint16. Write it with dtype='int32'."),
    ):
        write_megatron(tmp_path / "m", [[1], [2, 65536]])
    assert not (tmp_path / "m.idx").exists()
    write_megatron(tmp_path / "m", [[1], [2, 65536]], dtype="int32")
    assert docs_of(open_files(tmp_path / "m.bin")) == [[1], [2, 65536]]


def test_fingerprints_follow_files_and_layout(tmp_path: Path) -> None:
    np.array([1, EOS, 2, EOS], np.uint16).tofile(tmp_path / "a.bin")
    made = [
        open_files(tmp_path / "a.bin", token_files=TokenFilesConfig(dtype="uint16", **more))
        for more in ({"separator_id": EOS}, {"document_tokens": 2})
    ]
    write_megatron(tmp_path / "m", [[1, 2], [3]])
    made.append(open_files(tmp_path / "m.bin"))
    index = (tmp_path / "m.idx").read_bytes()
    identity = open_files(tmp_path / "m.bin").shard_identity(0)
    (tmp_path / "m.idx").write_bytes(
        index[:34] + struct.pack("<2i", 1, 2) + struct.pack("<2q", 0, 2) + index[-24:]
    )
    made.append(open_files(tmp_path / "m.bin"))
    assert docs_of(made[-1]) == [[1], [2, 3]]
    assert len({source.fingerprint for source in made}) == 4
    assert made[-1].shard_identity(0) != identity
    assert (
        len({source.shard_identity(0) for source in made if "a.bin" in source.files[0].path}) == 2
    )
    with pytest.raises(SourceError, match=r"m\.idx: changed after the source was made"):
        docs_of(made[-2])
    np.array([1, EOS, 3, EOS, 4], np.uint16).tofile(tmp_path / "a.bin")
    assert (
        open_files(
            tmp_path / "a.bin", token_files=TokenFilesConfig(dtype="uint16", separator_id=EOS)
        ).fingerprint
        != made[0].fingerprint
    )


def idx(
    sizes: list[int],
    pointers: list[int],
    docs: list[int],
    *,
    magic: bytes = b"MMIDIDX\x00\x00",
    version: int = 1,
    code: int = 8,
) -> bytes:
    n = len(sizes)
    return (
        magic
        + struct.pack("<QBQQ", version, code, n, len(docs))
        + struct.pack(f"<{n}i{n}q", *sizes, *pointers)[: 12 * n]
        + struct.pack(f"<{len(docs)}q", *docs)
    )


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (b"hello" * 10, "m.idx: not a Megatron index: it begins with b'hellohell'"),
        (idx([2], [0], [0, 1], version=2), "m.idx: version 2 is not known"),
        (idx([2], [0], [0, 1], code=6), "m.idx: dtype code 6 is not known"),
        (idx([2], [0], [0, 1])[:-3], "m.idx: 59 bytes, its header says 62: truncated"),
        (idx([2], [0], [0, 1]) + b"x", "it may be of a multimodal dataset"),
        *(
            (idx([2, 2], [0, 4], edges), "m.idx: its documents do not cover its sequences in order")
            for edges in ([1, 2], [0, 1], [0, 2, 1, 2])
        ),
        (idx([1, 1], [100, 0], [0, 1, 2]), "m.idx, row 0: bytes 100:102 of "),
        (
            b"MMIDIDX\x00\x00"
            + struct.pack("<QBQQ", 1, 8, 1, 2)
            + struct.pack("<i", 9)
            + struct.pack("<q", 0)
            + struct.pack("<2q", 0, 1),
            "m.bin: 4 bytes, ",
        ),
    ],
)
def test_bad_indexes(tmp_path: Path, index: bytes, message: str) -> None:
    (tmp_path / "m.bin").write_bytes(b"\1\0\2\0")
    (tmp_path / "m.idx").write_bytes(index)
    source = open_files(tmp_path / "m.bin")
    with pytest.raises(SourceError, match=re.escape(message)):
        docs_of(source)


def test_bad_token_files(tmp_path: Path) -> None:
    def refused(name: str, data: bytes, message: str, **layout: Any) -> None:
        (tmp_path / name).write_bytes(data)
        with pytest.raises(SourceError) as caught:
            docs_of(open_files(tmp_path / name, token_files=TokenFilesConfig(**layout)))
        assert message in str(caught.value)

    np.save(tmp_path / "good.npy", np.arange(10, dtype=np.uint16))
    good = (tmp_path / "good.npy").read_bytes()
    refused("a.bin", b"", "is empty (0 bytes)", dtype="uint16", separator_id=1)
    refused(
        "a.bin",
        b"abcd",
        "raw tokens do not say their dtype. Give token_files=TokenFilesConfig(dtype='uint16', "
        "...).",
        separator_id=1,
    )
    refused(
        "a.bin",
        b"abc",
        "3 bytes are not a whole number of uint16 tokens. Check dtype",
        dtype="uint16",
        separator_id=1,
    )
    refused(
        "a.bin",
        b"abcd",
        "one long row of tokens does not say where documents end. Give token_files",
        dtype="uint16",
    )
    refused("a.npy", b"abcd", "not an .npy file: it begins with b'abcd'", separator_id=1)
    refused("a.npy", good[:-1], "147 bytes, its header says 148: truncated", separator_id=1)
    refused("a.npy", good[:20], "damaged .npy header", separator_id=1)
    head = good[:10] + good[10:].replace(b"(10,)", b"(-1,)", 1)
    refused("a.npy", head, "damaged .npy header: its shape is (-1,)", separator_id=1)
    text = b"{'descr': '<u2', 'fortran_order': False, 'shape': (%d,)}" % 10**30
    head = good[:8] + struct.pack("<H", len(text)) + text
    refused("a.npy", head, "its header says 2000000000000000000000000000", separator_id=1)
    refused("a.npy", good[:8] + b"\3\0(((", "its header is not a dict: ", separator_id=1)
    refused(
        "a.npy",
        good,
        "says itself that it holds uint16. Leave dtype out",
        dtype="uint16",
        separator_id=1,
    )
    for array, message in (
        (np.zeros(3), "an array of <f8 is not an array of tokens"),
        (np.zeros(3, ">i4"), "an array of >i4 is not an array of tokens"),
        (np.zeros((2, 2, 2), np.uint8), "an array of shape (2, 2, 2)"),
        (np.asfortranarray(np.zeros((2, 3), np.uint8)), "in Fortran order"),
    ):
        np.save(tmp_path / "b.npy", array)
        refused("b.npy", (tmp_path / "b.npy").read_bytes(), message)
    np.save(tmp_path / "c.npy", np.zeros((2, 3), np.uint8))
    refused(
        "c.npy",
        (tmp_path / "c.npy").read_bytes(),
        "separator_id has no effect: its array has two dimensions",
        separator_id=1,
    )
    write_megatron(tmp_path / "m", [[1]])
    refused(
        "m.bin",
        (tmp_path / "m.bin").read_bytes(),
        "dtype has no effect: the .idx file beside it",
        dtype="uint16",
    )


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (
            {"separator_id": 1, "document_tokens": 2},
            "document_tokens: has no effect together with separator_id",
        ),
        ({"separator_id": -1}, "separator_id: -1 is too small. Give at least 0."),
        ({"document_tokens": 0}, "document_tokens: 0 is too small. Give at least 1."),
        ({"dtype": "float32"}, "dtype: 'float32' is not an option"),
    ],
)
def test_bad_layouts(layout: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        TokenFilesConfig(**layout)


def test_layouts_are_for_token_files(tmp_path: Path) -> None:
    from easypipe import DatasetConfig

    (tmp_path / "a.txt").write_text("x\n")
    with pytest.raises(ConfigError, match="token_files: has no effect on txt files"):
        open_files(tmp_path / "a.txt", token_files=TokenFilesConfig())
    with pytest.raises(
        ConfigError,
        match=r"token_files: has no effect: these are not files of tokens\. Set type='tokens'",
    ):
        DatasetConfig(data_files="a.txt", token_files=TokenFilesConfig())
    (tmp_path / "b.bin").write_bytes(b"weights")
    # a folder of text may hold a .bin of anything
    assert open_files(tmp_path).shards[0].name.endswith("a.txt")


def test_tokens_pass_through_a_pipeline(tmp_path: Path) -> None:
    """Made by one pipeline, written as Megatron does, and packed by another: the batches are those
    of the text itself.
    """
    from easypipe import LoadStageConfig, PackStageConfig, Pipeline, PipelineConfig, train_bpe
    from laws import assert_same_batches

    texts = {"text": [f"some words of document {i} " * (i % 7 + 1) for i in range(60)]}
    tokenizer = str(train_bpe(texts["text"], 300, ["<eos>"], tmp_path / "tokenizer"))
    common: dict[str, Any] = {
        "default_tokenizer": tokenizer,
        "seed": 1,
        "cache_dir": str(tmp_path / "cache"),
    }
    stages = {"pack": PackStageConfig(seq_length=64), "load": LoadStageConfig(batch_size=2)}
    text = Pipeline.from_config(
        PipelineConfig(datasets=[{"name": "d", "data_files": texts}], **common, **stages)
    )
    tokenized = text.copy().source().tokenize().get_data()["d"]
    write_megatron(tmp_path / "m", tokenized)
    tokens = Pipeline.from_config(
        PipelineConfig(
            datasets=[{"name": "d", "data_files": str(tmp_path / "m.bin")}], **common, **stages
        )
    )
    assert_same_batches(
        text.source().tokenize().pack().load().build(),
        tokens.source().tokenize().pack().load().build(),
    )
