"""Cases: data files that are not there, not what their names say, damaged, or with rows of other
shapes.
"""

from __future__ import annotations

import bz2
import functools
import gzip
import io
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.feather as feather
import pyarrow.parquet as pq
import zstandard

from bad_input.case import DATA, ROWS, Case, lines

TABLE = pa.Table.from_pylist(ROWS)


def data(what: str, says: str | None, name: str, content: bytes | str, **options: Any) -> Case:
    """One file in place of data.jsonl; further options of its dataset."""
    chosen = {f"datasets.0.{key}": value for key, value in options.items()}
    return Case(what, says, files={name: content}, options={"datasets.0.data_files": name} | chosen)


def row(what: str, says: str | None, line: bytes | str, **options: Any) -> Case:
    """A file of JSON lines whose third line is `line`."""
    raw = line if isinstance(line, bytes) else line.encode()
    good = DATA.encode().splitlines(keepends=True)
    content = b"".join([*good[:2], raw + b"\n", *good[3:]])
    return data(what, says, "rows.jsonl", content, **options)


def parquet(table: pa.Table = TABLE, **options: Any) -> bytes:
    out = io.BytesIO()
    pq.write_table(table, out, **options)
    return out.getvalue()


def arrow(table: pa.Table = TABLE) -> bytes:
    out = io.BytesIO()
    feather.write_feather(table, out, compression="uncompressed")
    return out.getvalue()


def stream(table: pa.Table = TABLE) -> bytes:
    out = io.BytesIO()
    with pa.ipc.new_stream(out, table.schema) as writer:
        for batch in table.to_batches():
            writer.write_batch(batch)
    return out.getvalue()


def csv(table: pa.Table = TABLE) -> bytes:
    out = io.BytesIO()
    pacsv.write_csv(table, out)
    return out.getvalue()


def npy(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


TEXT = "\n".join(r["text"] for r in ROWS) + "\n"
PACK: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "zst": zstandard.compress,
    "bz2": bz2.compress,
}
GOOD: dict[str, Callable[[], bytes]] = {
    "a.parquet": parquet,
    "a.arrow": arrow,
    "a.arrows": stream,
    "a.jsonl": DATA.encode,
    "a.json": lambda: json.dumps(ROWS).encode(),
    "a.csv": csv,
    "a.txt": TEXT.encode,
    "a.jsonl.gz": lambda: gzip.compress(DATA.encode()),
    "a.jsonl.zst": lambda: zstandard.compress(DATA.encode()),
    "a.jsonl.bz2": lambda: bz2.compress(DATA.encode()),
    "a.npy": lambda: npy(np.arange(64, dtype=np.uint16)),
}
BINARY = ("a.parquet", "a.arrow", "a.arrows", "a.jsonl.gz", "a.jsonl.zst", "a.jsonl.bz2", "a.npy")
NOISE = bytes((i * 197 + i // 7 * 31) % 251 for i in range(4000))


@functools.cache
def good(name: str) -> bytes:
    return GOOD[name]()


def tokens(name: str) -> dict[str, Any]:
    return {"token_files": {"dtype": "uint16", "document_length": 16}} if "npy" in name else {}


def of_every_format() -> list[Case]:
    cases = []
    for name in GOOD:
        whole, given = good(name), {}
        cases.append(data(f"{name} of 0 bytes", f"{name}: is empty", name, b"", **given))
        if name in BINARY:
            cases += [
                data(f"{name} cut in the middle", f"{name}", name, whole[: len(whole) // 2]),
                data(f"{name} without its last byte", name, name, whole[:-1]),
                data(f"{name} of noise", name, name, NOISE),
                data(f"{name} of zeros", name, name, bytes(4096)),
                data(f"{name} that is HTML", name, name, b"<!DOCTYPE html><html>Not found</html>"),
            ]
    for name in ("a.jsonl", "a.json", "a.csv", "a.txt"):
        whole = good(name)
        cases += [
            data(f"{name} with a BOM", None, name, b"\xef\xbb\xbf" + whole),
            data(f"{name} with line ends of Windows", None, name, whole.replace(b"\n", b"\r\n")),
            data(f"{name} in UTF-16", f"{name}: is UTF-16", name, whole.decode().encode("utf-16")),
            data(
                f"{name} in UTF-16 without a mark", name, name, whole.decode().encode("utf-16-le")
            ),
            data(f"{name} of noise", name, name, NOISE),
            data(f"{name} of zeros", name, name, bytes(4096)),
            data(
                f"{name} that is gz data", f"{name}: is compressed (gz)", name, gzip.compress(whole)
            ),
            data(f"{name} that is a Parquet file", name, name, parquet()),
        ]
    return cases


DEEP = "[" * 100_000 + "]" * 100_000
FORMATS = [
    *of_every_format(),
    data("JSON lines without a column of the config", "a.jsonl", "a.jsonl", lines([{"body": "x"}])),
    data(
        "Parquet without a column of the config",
        "a.parquet",
        "a.parquet",
        parquet(TABLE.rename_columns(["body"])),
    ),
    data(
        "Arrow without a column of the config",
        "a.arrow",
        "a.arrow",
        arrow(TABLE.rename_columns(["body"])),
    ),
    data("CSV without a column of the config", "a.csv", "a.csv", "body\nx\n"),
    data("Parquet without rows", "a.parquet", "a.parquet", parquet(TABLE.slice(0, 0))),
    data("Arrow without rows", "a.arrow", "a.arrow", arrow(TABLE.slice(0, 0))),
    data("an Arrow stream without batches", "a.arrows", "a.arrows", stream(TABLE.slice(0, 0))),
    data("an Arrow stream without columns", "a.arrows", "a.arrows", stream(pa.table({}))),
    data("Parquet without columns", "a.parquet", "a.parquet", parquet(pa.table({}))),
    data("CSV with only a header", "a.csv", "a.csv", "text,url\n"),
    data("CSV with a header without a line end", "a.csv", "a.csv", "text"),
    data("CSV with only line ends", "a.csv", "a.csv", "\n\n\n"),
    data("CSV with the same column twice", "a.csv, header", "a.csv", "text,text\na,b\n"),
    data("CSV with a column without a name", "a.csv, header", "a.csv", "text,\na,b\n"),
    data("CSV with too few fields", "a.csv, row 1, line 3", "a.csv", "text,url\na,b\nc\n"),
    data("CSV with too many fields", "a.csv, row 1, line 3", "a.csv", "text,url\na,b\nc,d,e\n"),
    data("CSV with an open quote", "a.csv, row 1", "a.csv", 'text,url\na,b\n"c,d\n'),
    data("CSV with a quote in a field", None, "a.csv", 'text,url\na "b" c,d\n'),
    data("CSV with semicolons", "a.csv", "a.csv", "text;url\na;b\n"),
    data("CSV with NUL bytes", None, "a.csv", "text,url\na\0b,c\n"),
    data("CSV that is not UTF-8", "a.csv, row 1, line 3", "a.csv", b"text\na\n\xff\xfe\xfd\n"),
    data("a CSV header that is not UTF-8", "a.csv", "a.csv", b"t\xffxt\na\n"),
    data(
        "CSV of 5,000 columns",
        "text",
        "a.csv",
        ",".join(f"c{i}" for i in range(5000)) + "\n" + ",".join(["x"] * 5000) + "\n",
    ),
    data(
        "a column of numbers in Parquet",
        "a.parquet",
        "a.parquet",
        parquet(pa.table({"text": [1, 2]})),
    ),
    data(
        "a column of lists in Parquet",
        "a.parquet",
        "a.parquet",
        parquet(pa.table({"text": [["a"], ["b"]]})),
    ),
    data(
        "a column of bytes that are not text in Parquet",
        "a.parquet",
        "a.parquet",
        parquet(pa.table({"text": [b"\xff\xfe"]})),
    ),
    data(
        "a column of nulls in Parquet",
        "a.parquet, row 0",
        "a.parquet",
        parquet(pa.table({"text": pa.array([None, None], pa.string())})),
    ),
    data(
        "a column of type null in Parquet",
        "a.parquet",
        "a.parquet",
        parquet(pa.table({"text": pa.nulls(3)})),
    ),
    data("a null in Arrow", "a.arrow, row 1", "a.arrow", arrow(pa.table({"text": ["a", None]}))),
    data(
        "a dictionary column in Parquet",
        None,
        "a.parquet",
        parquet(pa.table({"text": pa.array(["a", "b", "a"]).dictionary_encode()})),
    ),
    data(
        "encrypted Parquet",
        "a.parquet: is an encrypted parquet file",
        "a.parquet",
        b"PARE" + bytes(50) + b"PARE",
    ),
    data(
        "Parquet whose footer says too much",
        "a.parquet",
        "a.parquet",
        good("a.parquet")[:-8] + b"\xff\xff\xff\x7fPAR1",
    ),
    data(
        "Parquet whose footer is zeros",
        "a.parquet",
        "a.parquet",
        good("a.parquet")[:-200] + bytes(192) + good("a.parquet")[-8:],
    ),
    data(
        "Parquet whose pages are zeros",
        "a.parquet",
        "a.parquet",
        b"PAR1" + bytes(100) + good("a.parquet")[104:],
    ),
    data("JSON: an empty array", "a.json", "a.json", "[]"),
    data("JSON: an array of texts", "a.json, row 0", "a.json", '["a", "b"]'),
    data("JSON: an array of arrays", "a.json, row 0", "a.json", '[["a"], ["b"]]'),
    data("JSON: an object of columns", "a.json", "a.json", '{"text": ["a", "b"]}'),
    data(
        "JSON: one pretty-printed object", "a.json", "a.json", json.dumps({"text": "a"}, indent=1)
    ),
    data("JSON: rows under a key", "a.json", "a.json", json.dumps({"data": ROWS})),
    data("JSON: an array that does not end", "a.json, row 20", "a.json", json.dumps(ROWS)[:-1]),
    data(
        "JSON: an array with a comma at the end",
        "a.json, row 20",
        "a.json",
        json.dumps(ROWS)[:-1] + ",]",
    ),
    data("JSON: two arrays", "a.json", "a.json", json.dumps(ROWS) * 2),
    data("JSON: a number", "a.json", "a.json", "5"),
    data("JSON: null", "a.json", "a.json", "null"),
    data("JSON: white space", "a.json", "a.json", "  \n \n"),
    data("JSON lines of white space", "a.jsonl", "a.jsonl", "\n\n  \n"),
    data("JSON lines that are an array", None, "a.jsonl", json.dumps(ROWS)),
    data("JSON lines with ' for quotes", "a.jsonl, row 0, line 1", "a.jsonl", "{'text': 'a'}\n"),
    data(
        "JSON lines with NaN in each",
        "a.jsonl: has rows, but columns … no NaN",
        "a.jsonl",
        '{"text": "a", "score": NaN}\n' * 3,
    ),
    Case(
        "a file whose name is beyond the first plane of Unicode, in a config that is JSON",
        None,
        files={"\U0001f600.jsonl": DATA},
        options={"datasets.0.data_files": "\U0001f600.jsonl"},
    ),
    data("JSON lines of Python's words", "a.jsonl", "a.jsonl", '{"text": None}\n'),
    data("a text file with only line ends", "a.txt", "a.txt", "\n\n\n"),
    data("a text file with only spaces", "a.txt", "a.txt", "  \n \n"),
    data("a text file of one NUL", None, "a.txt", "\0\n"),
    data("a text file without a line end", None, "a.txt", "words"),
    data("a text file that is not UTF-8", "a.txt, row 1, line 2", "a.txt", b"a\nb\xff\nc\n"),
    data("an empty file in gz", "a.txt.gz: is empty", "a.txt.gz", gzip.compress(b"")),
    data("plain text called gz", "a.txt.gz: not gz data", "a.txt.gz", TEXT),
    data("gz within gz", "a.txt.gz", "a.txt.gz", gzip.compress(gzip.compress(TEXT.encode()))),
    data(
        "gz with garbage behind it",
        "a.txt.gz",
        "a.txt.gz",
        gzip.compress(TEXT.encode()) + b"garbage",
    ),
    data(
        "zst whose checksum is wrong",
        "a.txt.zst",
        "a.txt.zst",
        zstandard.ZstdCompressor(write_checksum=True).compress(TEXT.encode())[:-1] + b"\0",
    ),
    data("zst called gz", "a.txt.gz", "a.txt.gz", zstandard.compress(TEXT.encode())),
    data("xz", "a.txt.xz", "a.txt.xz", b"\xfd7zXZ\0"),
    data("zip", "a.zip", "a.zip", b"PK\3\4"),
    data("an extension of nothing", "a.dat", "a.dat", TEXT),
    data("no extension", "notes", "notes", TEXT),
    data("npy of objects", "a.npy", "a.npy", npy(np.array([{}, None], dtype=object))),
    data("npy of floats", "a.npy", "a.npy", npy(np.arange(8.0))),
    data("npy of three axes", "a.npy", "a.npy", npy(np.zeros((2, 2, 2), np.uint16))),
    data("npy of negative numbers", "a.npy", "a.npy", npy(np.full(64, -1, np.int32))),
    data(
        "npy of numbers beyond the vocabulary",
        "a.npy",
        "a.npy",
        npy(np.full(64, 60_000, np.uint16)),
    ),
    data("npy of nothing", "a.npy", "a.npy", npy(np.zeros(0, np.uint16))),
    data(
        "raw tokens of an odd number of bytes",
        "a.bin",
        "a.bin",
        b"\1\2\3",
        token_files={"dtype": "uint16"},
    ),
    data(
        "raw tokens of another dtype",
        "token_files.dtype",
        "a.bin",
        b"\1\2",
        token_files={"dtype": "float16"},
    ),
    data("raw tokens without their dtype", "a.bin", "a.bin", b"\1\2\3\4"),
    Case(
        "Megatron's index that is noise",
        "a",
        files={"a.bin": bytes(64), "a.idx": NOISE},
        options={"datasets.0.data_files": "a.bin"},
    ),
    Case(
        "Megatron's index that is cut",
        "a",
        files={"a.bin": bytes(64), "a.idx": b"MMIDIDX\0\0"},
        options={"datasets.0.data_files": "a.bin"},
    ),
]
ROWS_OF = [
    row("a line that is cut", "rows.jsonl, row 2, line 3", '{"text": "a'),
    row("a line of noise", "rows.jsonl, row 2, line 3", NOISE[:100].replace(b"\n", b"")),
    row("a number", "rows.jsonl, row 2, line 3", "5"),
    row("an array", "rows.jsonl, row 2, line 3", '["text"]'),
    row("null", "rows.jsonl, row 2, line 3", "null"),
    row("a text", "rows.jsonl, row 2, line 3", '"text"'),
    row("NaN", "rows.jsonl, row 2, line 3", '{"text": NaN}'),
    row("an empty object", "rows.jsonl, row 2", "{}"),
    row("the text is null", "rows.jsonl, row 2, column 'text'", '{"text": null}'),
    row("the text is a number", "rows.jsonl, row 2, line 3", '{"text": 5}'),
    row("the text is a huge number", "rows.jsonl, row 2, line 3", '{"text": %s}' % ("9" * 5000)),
    row("the text is true", "rows.jsonl, row 2, line 3", '{"text": true}'),
    row("the text is a list", "rows.jsonl, row 2, line 3", '{"text": ["a"]}'),
    row("the text is an object", "rows.jsonl, row 2, line 3", '{"text": {"a": "b"}}'),
    row("the text appears twice", "rows.jsonl, row 2, line 3", '{"text": "a", "text": "b"}'),
    row("half a surrogate pair", "rows.jsonl, row 2, line 3", '{"text": "\\ud800"}'),
    row("not UTF-8", "rows.jsonl, row 2, line 3", b'{"text": "\xff"}'),
    row("an invalid escape", "rows.jsonl, row 2, line 3", '{"text": "\\q"}'),
    row("a raw control character", "rows.jsonl, row 2, line 3", '{"text": "a\x01b"}'),
    row("a NUL in the text", None, '{"text": "a\\u0000b"}'),
    row("NUL bytes between", "rows.jsonl, row 2, line 3", b'{"text":\0 "a"}'),
    row("two objects", "rows.jsonl, row 2, line 3", '{"text": "a"} {"text": "b"}'),
    row(
        "deep nesting in another column",
        "rows.jsonl, row 2, line 3: nested too deeply",
        '{"text": "a", "x": ' + DEEP + "}",
    ),
    row("deep nesting in the text", "rows.jsonl, row 2, line 3", '{"text": ' + DEEP + "}"),
    row("a huge integer in another column", None, '{"text": "a", "n": %s}' % ("9" * 5000)),
    row(
        "a huge exponent in another column",
        "rows.jsonl, row 2, line 3",
        '{"text": "a", "n": 1e99999}',
    ),
    row("10,000 keys", None, json.dumps({"text": "a"} | {f"k{i}": i for i in range(10_000)})),
    row("a key of a million characters", None, json.dumps({"text": "a", "k" * 1_000_000: 1})),
    row("a text of white space", None, '{"text": " \\n\\t"}'),
    row("an empty text", None, '{"text": ""}'),
    row("a text of a million letters without a space", None, json.dumps({"text": "x" * 1_000_000})),
    row("a text of a million line ends", None, json.dumps({"text": "\n" * 1_000_000})),
    row(
        "a text of 100,000 emoji",
        None,
        json.dumps({"text": "👩‍👩‍👧‍👦" * 100_000}, ensure_ascii=False),
    ),
    row(
        "a special token in the text",
        "rows.jsonl, row 2",
        '{"text": "a<|endoftext|>b"}',
        tokenizer_kwargs={"special_strings": "error"},
    ),
    row("unassigned code points", None, '{"text": "\\u0378\\uffff\\ufffe"}'),
    row("a column that changes its type", None, '{"text": "a", "n": "one"}'),
    row("more bad rows than allowed", "rows.jsonl, row 2", "5", on_error="skip", max_bad_rows=0),
    row("a bad row that is skipped", None, "5", on_error="skip"),
    row("a bad row that is kept apart", None, "5", on_error="quarantine"),
    row(
        "a number in prompt_field",
        "column 'answer': holds int64 … rows.jsonl",
        '{"text": "a", "answer": 5}',
        prompt_field="text",
        completion_field="answer",
    ),
]
KINDS = {"Data files": FORMATS, "Rows of JSON lines": ROWS_OF}
