"""Which record stands where: explain, quarantine, splits, `num_rows`, interleaving, shards prepared
apart, files that grow.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from easypipe import DatasetConfig, MixStageConfig, Pipeline, block_mixture_interleave
from easypipe.core.schema import ROW_NUMBER
from easypipe.transforms.columns.hold_out import HoldOutConfig
from golden.batches import chain, load, mixed, pack
from golden.cases import golden
from golden.data import config, rows_of, texts, write
from golden.digests import batches, digest, without

FORMATS = (
    "jsonl",
    "jsonl.gz",
    "jsonl.zst",
    "jsonl.bz2",
    "json",
    "csv",
    "csv.gz",
    "tsv",
    "txt",
    "parquet",
    "arrow",
    "mds",
    "tar",
)


@golden(*(f"explain_{name.replace('.', '_')}" for name in FORMATS))
def explain(folder: Path, name: str) -> Any:
    """(file, row, first token, tokens) of every segment of every batch."""
    ending = name.removeprefix("explain_").replace("_", ".")
    files = [write(folder / f"part-{i}.{ending}", rows_of(14 + i, 3 + 2 * i)) for i in range(2)]
    kind = "webdataset" if ending == "tar" else None  # a tar is read where `type` says so
    datasets = [DatasetConfig(name="data", data_files=[str(file) for file in files], type=kind)]
    loader = chain(
        config(
            folder,
            datasets=datasets,
            pack=pack("first_fit"),
            load=load(batch_size=2, drop_last=False),
        )
    ).build()
    return _explained(loader, folder)


@golden()
def explain_quoted_newlines(folder: Path) -> Any:
    """Rows of a CSV whose texts hold newlines, quotes and commas, and are counted as records."""
    path = folder / "a.csv"
    path.write_text(
        "n,text\n" + "".join(f'{i},"line one of {i}\nsaid ""two"", {i}"\n' for i in range(30)),
        encoding="utf-8",
    )
    loader = chain(
        config(
            folder,
            datasets=[DatasetConfig(name="data", data_files=str(path))],
            pack=pack(),
            load=load(batch_size=2),
        )
    ).build()
    return _explained(loader, folder)


@golden()
def explain_fan_out(folder: Path) -> Any:
    """One long row becomes several documents of its row."""
    from easypipe import LengthPolicy, TokenizeStageConfig

    path = write(folder / "a.jsonl", rows_of(12, 3, 120))
    datasets = [
        DatasetConfig(
            name="data", data_files=str(path), length=LengthPolicy(policy="split", overlap=4)
        )
    ]
    made = config(
        folder,
        datasets=datasets,
        tokenize=TokenizeStageConfig(max_length=30),
        pack=pack(),
        load=load(batch_size=2),
    )
    return _explained(chain(made).build(), folder)


@golden()
def explain_mixture_over_epochs(folder: Path) -> Any:
    made = config(
        folder,
        mix=mixed(stop_strategy="restart"),
        pack=pack("first_fit"),
        load=load(num_epochs=None),
    )
    return _explained(chain(made).build(), folder, steps=(0, 7, 40))


def _explained(loader: Any, folder: Path, steps: Any = None) -> Any:
    found = []
    for step in range(len(loader)) if steps is None else steps:
        for row in loader.explain(step).rows:
            segments = [
                [
                    without(str(s.file), folder),
                    s.row,
                    s.token_start,
                    s.token_stop,
                    digest(list(s.ids)),
                ]
                for s in row.segments
            ]
            found.append(segments)
    return {"first": found[:2], "all": digest(found), "segments": sum(map(len, found))}


@golden("skip", "quarantine")
def bad_rows(folder: Path, policy: str) -> Any:
    """Rows that cannot be read, in every format that has them; and what is kept of them."""
    folder.mkdir(exist_ok=True)
    (folder / "a.jsonl").write_text(
        "".join(
            [
                "{broken\n"
                if i % 6 == 5
                else json.dumps({"text": None if i == 8 else f"good {i}"}) + "\n"
                for i in range(24)
            ]
        )
    )
    (folder / "b.csv").write_text(
        "text,n\n" + "".join("too,many,cells\n" if i == 4 else f"cell {i},{i}\n" for i in range(9))
    )
    found: dict[str, Any] = {}
    for name in ("a.jsonl", "b.csv"):
        datasets = [
            DatasetConfig(
                name="bad", data_files=str(folder / name), on_error=policy, max_bad_rows=9
            )
        ]  # pyright: ignore[reportArgumentType]
        with heard(folder) as lines:
            pipeline = chain(
                config(
                    folder,
                    datasets=datasets,
                    cache_dir=folder / name.replace(".", "-"),
                    pack=pack(),
                    load=load(batch_size=1),
                )
            )
            of_all = batches(pipeline.build())
        kept = sorted((folder / name.replace(".", "-")).rglob("*.quarantine.jsonl"))
        entries = [
            json.loads(without(line, folder))
            for path in kept
            for line in path.read_text(encoding="utf-8").splitlines()
        ]
        found[name] = {
            "batches": of_all,
            "quarantine": [e for e in entries if "checksum" not in e],
            "warnings": len(lines),
        }
    return found


@golden()
def splits(folder: Path) -> Any:
    """The rows that parts of files, and `num_rows`, let through."""
    files = [
        write(folder / "in" / f"part-{i}.{ending}", rows_of(10 + 7 * i, 3))
        for i, ending in enumerate(("jsonl", "jsonl"))
    ]
    found = {}
    for split in ("train[:10%]", "train[5:20]", "train[-5%:]", "train[30%:70%]"):
        found[split] = _rows_of(
            folder, DatasetConfig(name="data", data_files=[str(f) for f in files], split=split)
        )
    for number in (1, 10, 15, 27):
        found[f"num_rows={number}"] = _rows_of(
            folder, DatasetConfig(name="data", data_files=[str(f) for f in files], num_rows=number)
        )
    return found


@golden()
def held_out(folder: Path) -> Any:
    """The rows of both sides of a hold-out, with one file and with another beside it."""
    path, found = folder / "in" / "b.jsonl", {}
    for when, name in (("alone", path), ("beside another", path.with_name("a.jsonl"))):
        write(name, rows_of(60, 3 if name == path else 5))
        for held in (False, True):
            side = HoldOutConfig(fraction=0.3, seed=7, held=held)
            dataset = DatasetConfig(
                name="data", data_files=str(folder / "in" / "*.jsonl"), hold_out=side
            )
            found[f"{when}, held: {held}"] = _rows_of(folder, dataset)
    return found


@golden()
def text_units(folder: Path) -> Any:
    """What is a document of a text file, by unit."""
    path = folder / "a.txt"
    path.write_text("one\n\n two  \nthree\n \nfour\n\n\nfive", encoding="utf-8")
    found = {}
    for unit in ("line", "paragraph", "file"):
        dataset = DatasetConfig(name="data", data_files=str(path), text_unit=unit)
        made = config(folder, datasets=[dataset], pack=pack(), load=load(batch_size=1))
        source = Pipeline(made).source().get_data()["data"]
        texts_read = [row["text"] for row in source.open_shard(source.shard_names[0])]
        found[unit] = {"texts": texts_read, "batches": batches(chain(made).build())}
    return found


def _rows_of(folder: Path, dataset: DatasetConfig) -> list[list[int]]:
    source = Pipeline(config(folder, datasets=[dataset])).source().get_data()["data"]
    found = []
    for shard, info in enumerate(source.shards):
        assert info.num_rows is not None
        batch = source.read(shard, 0, info.num_rows)
        found.append(
            batch.column("n").to_pylist()
            if "n" in batch.schema.names
            else batch.column(ROW_NUMBER).to_pylist()
        )
    return found


@golden()
def interleaved(folder: Path) -> Any:
    """What `block_mixture_interleave` gives of two sources, in which order; with a seed and
    another, and in file order.
    """
    data = Pipeline(config(folder)).source().get_data()
    found = {}
    for name, options in {"seed 1": {"seed": 1}, "seed 2": {"seed": 2}, "in order": {}}.items():
        source = block_mixture_interleave(
            data, {"code": 0.7, "docs": 0.3}, 10, stop_strategy="all_exhausted", **options
        )
        rows = [
            source.read(shard, 0, info.num_rows).column("text").to_pylist()
            for shard, info in enumerate(source.shards)
        ]
        found[name] = {"rows": sum(map(len, rows)), "first": rows[0][:3], "all": digest(rows)}
    return found


@golden()
def prepared_apart(folder: Path) -> Any:
    """Parts that are tokenized one by one, in any order, are what one process makes."""
    whole = chain(config(folder / "whole", mix=mixed(), pack=pack("first_fit"), load=load()))
    expected = batches(whole.build())
    for number in (2, 0, 1):
        Pipeline(config(folder / "parts")).source().tokenize().prepare_part(number, 3)
    apart = chain(config(folder / "parts", mix=mixed(), pack=pack("first_fit"), load=load()))
    assert not any(missing for missing, _ in apart.pending().values())
    assert batches(apart.build()) == expected
    return expected


@golden()
def encoded_again(folder: Path) -> Any:
    """How many documents are tokenized anew when a file is appended, edited, renamed, or
    touched.
    """
    files = [write(folder / "in" / f"part-{i}.jsonl", rows_of(20, 3 + 2 * i)) for i in range(3)]
    datasets = [DatasetConfig(name="data", data_files=str(folder / "in" / "*.jsonl"))]

    def pending() -> list[int]:
        pipeline = Pipeline(config(folder, datasets=datasets)).source().tokenize()
        waiting = list(pipeline.pending()["data"])
        pipeline.ledger()
        return waiting

    found = {"first": pending(), "again": pending()}
    write(folder / "in" / "part-3.jsonl", rows_of(8, 11))
    found["appended"] = pending()
    write(files[1], [*rows_of(20, 5)[:-1], {"text": "edited", "n": 19}])
    found["edited"] = pending()
    shutil.copy(files[0], folder / "in" / "copy.jsonl")
    files[0].unlink()
    found["renamed"] = pending()
    return found


@golden()
def documents_encoded(folder: Path) -> Any:
    """How many documents meet the tokenizer when a file is appended to, edited, or joined by
    another; and what is taken as it stands.
    """
    path = write(folder / "in" / "a.jsonl", rows_of(20, 3))
    write(folder / "in" / "b.jsonl", rows_of(12, 5))

    def encoded() -> dict[str, int]:
        files = str(folder / "in" / "*.jsonl")
        made = config(folder, datasets=[DatasetConfig(name="data", data_files=files)])
        cache = Pipeline(made).source().tokenize().get_data()["data"].materialize()
        names = ("documents_encoded", "ranges_written", "ranges_reused", "ranges_found_by_content")
        return {"documents": cache.num_docs} | {name: cache.manifest.facts[name] for name in names}

    found = {"first": encoded()}
    write(path, [*rows_of(20, 3), {"text": "appended", "n": 20}])
    found["appended to"] = encoded()
    write(path, [{"text": "edited", "n": 0}, *rows_of(20, 3)[1:]])
    found["edited"] = encoded()
    write(folder / "in" / "c.jsonl", rows_of(7, 7))
    found["joined"] = encoded()
    shutil.copy(path, folder / "in" / "d.jsonl")
    found["copied"] = encoded()
    return found


@golden()
def weights_of_the_plan(folder: Path) -> Any:
    """What `plan` says of a mixture, in numbers."""
    made = config(
        folder,
        mix=MixStageConfig(weights={"code": 0.8, "docs": 0.2}, stop_strategy="restart"),
        pack=pack("first_fit"),
        load=load(num_epochs=None),
    )
    report = Pipeline(made).source().tokenize().mix().pack().load().plan(steps=20)
    values = (
        json.loads(json.dumps(report.to_json(), default=str)) if hasattr(report, "to_json") else {}
    )
    return {
        key: values[key]
        for key in sorted(values)
        if isinstance(values[key], int | float | dict) and "second" not in key and "path" not in key
    }


@golden()
def texts_are_counted(folder: Path) -> Any:
    """Empty texts and white space."""
    rows = [{"text": text} for text in ("", "  \n", *texts(5, 3))]
    path = write(folder / "a.jsonl", rows)
    pipeline = chain(
        config(
            folder,
            datasets=[DatasetConfig(name="data", data_files=str(path))],
            pack=pack(),
            load=load(batch_size=1),
        )
    )
    of_all = batches(pipeline.build())
    return {
        "batches": of_all,
        "ledger": {
            f"{e.stage} {e.unit}": [dict(e.into), dict(e.out)] for e in pipeline.ledger().entries
        },
    }


@contextmanager
def heard(*folders: Path) -> Iterator[list[str]]:
    """The warnings that easypipe's logger gives meanwhile."""
    lines: list[str] = []

    class Keeper(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(without(record.getMessage(), *folders))

    logger, keeper = logging.getLogger("easypipe"), Keeper(logging.WARNING)
    logger.addHandler(keeper)
    try:
        yield lines
    finally:
        logger.removeHandler(keeper)
