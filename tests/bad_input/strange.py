"""Cases that a stranger might bring: shards of other libraries, verdicts, values beside tokens, and
names of files that are none.
"""

from __future__ import annotations

import io
import json
import struct
import tarfile
from typing import Any

from bad_input.case import ROWS, Case, Files, lines
from bad_input.commands import command

NOBODY = "~nobody-of-this-name/x"  # a home that is not there


# WebDataset


def tar(*members: tuple[str, bytes], compression: str = "") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=f"w:{compression}") as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


TEXTS = tuple((f"{i}.txt", row["text"].encode()) for i, row in enumerate(ROWS))


def webdataset(what: str, says: str | None, content: bytes, column: str = "txt") -> Case:
    options = {"datasets.0.data_files": "a.tar", "datasets.0.content_field": column}
    return Case(what, says, files={"a.tar": content}, options=options)


TARS = [
    webdataset("good members", None, tar(*TEXTS)),
    webdataset("cut in a header", "a.tar: … truncated", tar(*TEXTS)[:700]),
    webdataset("cut in a member", "a.tar: … truncated", tar(("0.txt", b"x" * 2000))[:1200]),
    webdataset("packed within", "a.tar: not a tar file", tar(*TEXTS, compression="gz")),
    webdataset("noise", "a.tar: not a tar file", bytes(range(256)) * 8),
    webdataset(
        "an invalid size",
        "a.tar: not a tar file",
        tar(*TEXTS)[:124] + b"77777777777\0" + tar(*TEXTS)[136:],
    ),
    webdataset("no members", "no such column", tar()),
    webdataset("members without an extension", "no such column", tar(("a", b"x"), ("b", b"y"))),
    webdataset("two members of one name", "a.tar, row 0: two members", tar(TEXTS[0], TEXTS[0])),
    webdataset("a sample without the text", "a.tar, row 1", tar(TEXTS[0], ("1.cls", b"3"))),
    webdataset("a text that is not UTF-8", "a.tar, row 1", tar(TEXTS[0], ("1.txt", b"\xff"))),
]


# MDS


def mds(*rows: bytes) -> bytes:
    facts = {"column_encodings": ["str"], "column_names": ["text"], "column_sizes": [None]}
    named = json.dumps(facts | {"compression": None, "format": "mds", "version": 2}).encode()
    offsets = [4 + 4 * (len(rows) + 1) + len(named)]
    offsets += [offsets[-1] + sum(4 + len(row) for row in rows[: i + 1]) for i in range(len(rows))]
    texts = b"".join(struct.pack("<I", len(row)) + row for row in rows)
    return struct.pack(f"<{len(rows) + 2}I", len(rows), *offsets) + named + texts


SHARD = mds(b"a few words", b"some more words")


def index(*names: str, **facts: Any) -> str:
    """Of shards that are as `SHARD` is, but for these facts."""
    raw = {"bytes": len(SHARD), "hashes": {}}
    shards = [
        {"samples": 2, "zip_data": None, "raw_data": raw | {"basename": name} | facts}
        for name in names
    ]
    return json.dumps({"version": 2, "shards": shards})


def shards(what: str, says: str | None, told: str | bytes, shard: bytes = SHARD) -> Case:
    files: Files = {"m/index.json": told, "m/a.mds": shard}
    options = {"datasets.0.data_files": "m", "datasets.0.type": "mds"}
    return Case(what, says, files=files, options=options)


GOOD_INDEX = index("a.mds")
MDS = [
    shards("a good folder", None, GOOD_INDEX),
    shards("an index that is a list", "index.json: not an index", "[]"),
    shards("an index that is null", "index.json: not an index", "null"),
    shards("an index that is cut", "index.json: not an index", GOOD_INDEX[:40]),
    shards("an index of deep nesting", "index.json: not an index", "[" * 100_000),
    shards("an index that is not UTF-8", "index.json: not an index", b"\xff\xfe"),
    shards("an index of no bytes", "m/", ""),
    shards("an index with a shard that is not there", "b.mds", index("a.mds", "b.mds")),
    shards("an index of other shards", "m/", index("b.mds")),
    shards("an index of another size", "a.mds: bytes", index("a.mds", bytes=5)),
    shards("an offset beyond the end", "a.mds", GOOD_INDEX, SHARD[:8] + b"\xff" * 4 + SHARD[12:]),
    shards("more rows than there are", "a.mds", GOOD_INDEX, b"\xff" * 4 + SHARD[4:]),
    shards(
        "a head that is not JSON", "a.mds", GOOD_INDEX, SHARD.replace(b'"version"', b'"vers\0ion')
    ),
    shards("values that run code", "a.mds … pickle", GOOD_INDEX, SHARD.replace(b"str", b"pkl")),
    shards("values of nothing known", "a.mds … xyz", GOOD_INDEX, SHARD.replace(b"str", b"xyz")),
]


# Verdicts, and values beside tokens


def judged(
    what: str, says: str | None, row: dict[str, Any], first: Any = None, **options: Any
) -> Case:
    good = {"prompt": "a?", "completion": "b", "good": True}
    fields = {"prompt_field": "prompt", "completion_field": "completion", "desirable_field": "good"}
    chosen = {f"datasets.0.{key}": value for key, value in (fields | options).items()}
    chosen |= {"datasets.0.data_files": "k.jsonl", "pack.oversize": "drop"}
    return Case(
        what, says, files={"k.jsonl": lines([first or good, row, first or good])}, options=chosen
    )


def beside(what: str, says: str | None, row: dict[str, Any], columns: Any = ("w",)) -> Case:
    options = {"datasets.0.data_files": "t.jsonl", "datasets.0.aligned_columns": columns}
    return Case(what, says, files={"t.jsonl": lines([row])}, options=options)


ANSWER = {"prompt": "a?", "completion": "b"}
VERDICTS = [
    judged("a verdict that is null", "k.jsonl, row 1 … column 'good'", {**ANSWER, "good": None}),
    judged("a verdict that is a number", "k.jsonl, row 1 … 'good'", {**ANSWER, "good": 1}),
    judged("a verdict that is a text", "column 'good'", {**ANSWER, "good": "yes"}),
    *(
        judged(
            f"verdicts that are {json.dumps(value)}",
            says,
            {**ANSWER, "good": value},
            first={**ANSWER, "good": value},
        )
        for value, says in (
            ("yes", "k.jsonl, row 0 … column 'good' is 'yes', not true or false"),
            (1, "k.jsonl, row 0, column 'good': 1 is not a verdict … Give true where"),
            ("true", None),
            ("FALSE", None),
        )
    ),
    judged("a row without a verdict", "k.jsonl, row 1", ANSWER),
    judged("a column of verdicts that is not there", "'gut'", ANSWER, desirable_field="gut"),
    judged("verdicts on pairs", "desirable", {**ANSWER, "no": "c"}, rejected_field="no"),
    beside("fewer values than tokens", "t.jsonl, row 0", {"input_ids": [1, 2], "w": [1.0]}),
    beside("values that are texts", "column 'w'", {"input_ids": [1], "w": ["a"]}),
    beside("a null among the values", "t.jsonl, row 0", {"input_ids": [1, 2], "w": [1.0, None]}),
    beside("values in addition to text", "aligned_columns", {"text": "a b", "w": [1.0]}),
    beside("tokens below zero", "t.jsonl, row 0", {"input_ids": [-1, 2], "w": [1, 2]}),
    beside("tokens beyond int32", "t.jsonl", {"input_ids": [2**40, 2], "w": [1, 2]}),
    beside(
        "more numbers than fit", "aligned_columns.w", {"input_ids": [1], "w": [[1]]}, {"w": 10**12}
    ),
]


# Names that no file can have


def named(says: str, **options: Any) -> Case:
    [(path, value)] = options.items()
    path = path.replace("__", ".")
    return Case(f"`{path}` {value!a}", says, options={path: value})


NAMES = [
    named(NOBODY, datasets__0__data_files=NOBODY),
    named("cache_dir", cache_dir=NOBODY),
    named("cache_path", datasets__0__cache_path=NOBODY),
    named("x: no such file", default_tokenizer=NOBODY),
    named("save", save={"output_dir": NOBODY}),
    named("cache_dir", cache_dir="\ud800"),
    named("datasets[0].name", datasets__0__name="\ud800"),
    named("datasets[0].content_field", datasets__0__content_field="\ud800"),
    named("datasets[0].format_fields", datasets__0__format_fields={"text": "\ud800"}),
    named("load.num_epochs", load__num_epochs=10**18),
    command("x: is neither", "verify", NOBODY),
    command("x: no such folder", "report", NOBODY),
    command("x: no such folder", "report", NOBODY, "--serve"),
    command("there is no home", "quickstart", "--output-dir", NOBODY),
    command("'': is neither", "verify", ""),
    command("Give 0 to 1", "explain", "run.yaml", "--step", "1", "--row", "99"),
    command("Quote it", "prepare", "run.yaml", "--set", "seed=!!python/name:os.system"),
    command("datasets.-1", "prepare", "run.yaml", "--set", "datasets.-1.name=x"),
]

KINDS = {
    "Shards of WebDataset": TARS,
    "Shards of MDS": MDS,
    "Verdicts, and values beside tokens": VERDICTS,
    "Names that no file can have": NAMES,
}
