"""Measures the peak anonymous memory (RssAnon) of every stage on 100 MB and on 2 GB of text. The
text is either in one Parquet row group (`row-group`) or in JSON lines with one line of 60 MB
(`long-line`). The memory must not grow with the data.

Each stage runs in a process of its own, on real text and on text without repetitions (high
entropy): prepare (text to the token cache), save (the cache to packed parquet), load (a pass over
packed rows of the cache, in batches) and streaming (a pass over the text itself). Text is repeated
where there is too little of it. Needs four times the largest size in the temporary folder, and
gives it back.
"""

from __future__ import annotations

import functools
import itertools
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from _common import (
    AnonymousMemory,
    Report,
    anonymous_bytes,
    arguments,
    documents,
    table,
    text_parquet,
    tokenizer_folder,
)
from tokenizing import high_entropy

STAGES = ("prepare", "save", "load", "streaming")
SEQ_LENGTH = 2048
LONG_LINE = 60_000_000  # characters
# MB that the larger size may take more: an encoder is made anew after 256 MB of text, so 100 MB do
# not fill its caches
MOST_MORE = 256.0


def config(task: dict[str, Any], **more: Any) -> Any:
    from easypipe import DatasetConfig, LoadStageConfig, PackStageConfig, PipelineConfig

    made = Path(task["made"])
    return PipelineConfig(
        datasets=(
            DatasetConfig(name="text", data_files=task["files"], tokenizer=task["tokenizer"]),
        ),
        seed=1,
        cache_dir=made / "cache",
        pack=PackStageConfig(seq_length=SEQ_LENGTH),
        load=LoadStageConfig(batch_size=8),
        **more,
    )


def run(stage: str, task: dict[str, Any]) -> int:
    """Does it; returns what it went through: documents, rows or batches."""
    from easypipe import Pipeline, SaveStageConfig

    if stage == "prepare":
        return Pipeline(config(task)).source().tokenize().get_data()["text"].materialize().num_docs  # pyright: ignore[reportAttributeAccessIssue]
    if stage == "save":
        save = SaveStageConfig(output_dir=Path(task["made"]) / "out", overwrite=True)
        return Pipeline(config(task)).source().tokenize().pack().save(save).build().num_rows
    if stage == "load":
        return sum(1 for _ in Pipeline(config(task)).source().tokenize().pack().load().build())
    return sum(
        1 for _ in Pipeline(config(task, streaming=True)).source().tokenize().pack().load().build()
    )


def child(task: dict[str, Any]) -> None:
    import easypipe  # noqa: F401

    base, start = anonymous_bytes(), time.perf_counter()
    with AnonymousMemory() as held:
        count = run(task["stage"], task)
    seconds = time.perf_counter() - start
    print(
        json.dumps(
            {"peak": held.peak / 1e6, "base": base / 1e6, "seconds": seconds, "count": count}
        )
    )


def measured(task: dict[str, Any]) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, __file__, "--child", json.dumps(task)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def one_row_group(folder: Path, texts: Sequence[str], num_bytes: int) -> list[Path]:
    """All of the text in one row group."""
    file = folder / "one.parquet"
    parts = text_parquet(folder, texts, num_bytes, files=8)
    with pq.ParquetWriter(file, pq.read_schema(parts[0])) as writer:
        writer.write_table(
            pa.concat_tables([pq.read_table(part) for part in parts]), row_group_size=1 << 40
        )
    for part in parts:
        part.unlink()
    assert pq.ParquetFile(file).metadata.num_row_groups == 1
    return [file]


def one_long_line(folder: Path, texts: Sequence[str], num_bytes: int) -> list[Path]:
    file, written = folder / "long.jsonl", 0
    with file.open("w", encoding="utf-8") as lines:
        for number, text in enumerate(itertools.cycle(texts)):
            if number == 100:
                text = " ".join(
                    itertools.islice(
                        itertools.cycle(texts),
                        1 + LONG_LINE // (sum(map(len, texts)) // len(texts)),
                    )
                )[:LONG_LINE]
            written += lines.write(json.dumps({"text": text}) + "\n")
            if written >= num_bytes:
                return [file]
    raise AssertionError


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument(
        "--sizes", type=int, nargs=2, default=(100, 2000), metavar="MB", help="of text"
    )
    kinds = ("real", "high-entropy", "row-group", "long-line")
    parser.add_argument("--kinds", nargs="+", default=kinds, choices=kinds)
    parser.add_argument("--stages", nargs="+", default=STAGES, choices=STAGES)
    parser.add_argument("--child", help="used for the processes that are measured")
    options = parser.parse_args()
    if options.child:
        child(json.loads(options.child))
        return
    report, lines = Report("memory", "s"), []
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        texts = documents(options.text)
        tokenizer = tokenizer_folder(scratch, texts)
        writers = {
            "real": functools.partial(text_parquet, texts=texts, files=8),
            "high-entropy": high_entropy,
            "row-group": functools.partial(one_row_group, texts=texts),
            "long-line": functools.partial(one_long_line, texts=texts),
        }
        for kind in options.kinds:
            peaks: dict[str, list[float]] = {}
            for megabytes in options.sizes:
                data = scratch / f"{kind}-{megabytes}"
                data.mkdir()
                files = [str(file) for file in writers[kind](data, num_bytes=megabytes * 1_000_000)]
                for stage in options.stages:
                    task = {
                        "stage": stage,
                        "files": files,
                        "tokenizer": str(tokenizer),
                        "made": str(data / "made"),
                    }
                    result = measured(task)
                    peaks.setdefault(stage, []).append(result["peak"])
                    report.seconds[f"{stage}, {megabytes} MB of {kind} text"] = [result["seconds"]]
                    print(
                        kind,
                        megabytes,
                        stage,
                        {key: round(value, 2) for key, value in result.items()},
                        file=sys.stderr,
                        flush=True,
                    )
                shutil.rmtree(data)
            for stage, (small, large) in peaks.items():
                lines.append((kind, stage, f"{small:.0f}", f"{large:.0f}", f"{large - small:+.0f}"))
                report.facts[f"{stage}, {kind} text: peak MB"] = [round(small), round(large)]
                report.target(
                    f"{stage}, MB more for {options.sizes[1]} MB of {kind} text",
                    large - small,
                    below=MOST_MORE,
                )
    report.finish(options.out)
    table(("text", "stage", *(f"{size} MB" for size in options.sizes), "difference"), lines)


if __name__ == "__main__":
    main()
