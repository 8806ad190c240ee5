"""Parquet text → tokenized parquet (zstd): `tokenize_and_save` against `datasets.map(batched,
num_proc=2)` + `to_parquet`, same files.

easypipe's time runs from parquet files to a committed folder (synced, checksummed) that
`load_saved` reads back; it starts every round without tokens in its cache. The peer keeps its Arrow
copy of the text between rounds (its first, untimed round makes it). Encoding alone, from Arrow
memory and into nothing, is timed in the same rounds: what no pipeline around that tokenizer can
pass. So is the shortest pipeline there is, in three threads, which checks and keeps nothing.

--tokenizer: gpt2, which gigatoken encodes, or wordpiece, which only `tokenizers` supports, trained
here on the text. --cold: one run each in a new process, imports and proofs included, with no cache
but the system's. --floor: processor time instead, of the whole and of what it cannot do without,
each alone. --memory 1000: RssAnon instead, on real text and on text without repetitions.
"""

from __future__ import annotations

import base64
import functools
import importlib.util
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from _common import (
    AnonymousMemory,
    Report,
    alternate,
    arguments,
    documents,
    text_parquet,
    tokenizer_folder,
)

WORKERS = 2
HIGH_ENTROPY_BYTES = 20_000  # per document: base64 of random bytes, in words of random length
DOCUMENTED = "datasets.map with transformers' tokenizer"
# by a run of easypipe, beside the proof of the tokenizer
MADE = ("out", "cache/tokens", "cache/ranges", "cache/manifests")
LIGHT = "easypipe, lz4"  # a codec of the weight of the peer's
BARE = "three threads alone"


def ours(files: list[Path], tokenizer: Path, scratch: Path, compression: Any = None) -> None:
    from easypipe import tokenize_and_save

    os.environ["EASYPIPE_CACHE"] = str(scratch / "cache")
    tokenize_and_save(
        data_files=[str(file) for file in files],
        tokenizer=str(tokenizer),
        output_path=str(scratch / "out"),
        compression=compression,
    )


def theirs(
    files: list[Path], tokenizer: Path, scratch: Path, arrow_copy: Path, call: Any = None
) -> None:
    """call: what encodes a batch; default: `tokenizers` bare, the fastest that users of this
    library write.
    """
    import datasets

    rows = datasets.load_dataset(
        "parquet",
        data_files=[str(file) for file in files],
        split="train",
        cache_dir=str(arrow_copy),
    )
    encode = functools.partial(call or _encode, path=str(tokenizer / "tokenizer.json"))
    scratch.mkdir(parents=True)
    mapped = rows.map(
        encode,
        batched=True,
        num_proc=WORKERS,
        remove_columns=["text"],
        cache_file_name=str(scratch / "mapped.arrow"),
    )
    # it refuses a compression of ours: its own is lighter than zstd
    mapped.to_parquet(str(scratch / "out.parquet"))


def _encode(batch: dict[str, Any], path: str) -> dict[str, Any]:
    return {
        "input_ids": [
            encoding.ids for encoding in _reference(path).encode_batch_fast(batch["text"])
        ]
    }


def _encode_as_documented(batch: dict[str, Any], path: str) -> dict[str, Any]:
    """`tokenizer(batch["text"])`, as the documentation of datasets has it."""
    return dict(_transformers(path)(batch["text"]))


@functools.cache
def _transformers(path: str) -> Any:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_file=path)


@functools.cache
def _reference(path: str) -> Any:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    from tokenizers import Tokenizer

    return Tokenizer.from_file(path)


@functools.cache
def _parallel(path: str) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(path)


def ours_ids(out: Path) -> pa.ChunkedArray:
    return pq.read_table(sorted(out.rglob("*.parquet")), columns=["input_ids"]).column(0)


def encode_alone(
    columns: list[pa.LargeStringArray], tokenizer: Path, fast: bool, threads: int
) -> None:
    """Every column to ids in memory, by the tokenizer's own library. gigatoken: a tokenizer for
    each thread; `tokenizers` has its own.
    """
    if not fast:
        encoder = _parallel(str(tokenizer / "tokenizer.json"))
        for column in columns:
            encoder.encode_batch_fast(column.to_pylist())
        return
    waiting = list(columns)

    def work(number: int) -> None:
        engine = _engine(str(tokenizer / "tokenizer.json"), number)
        while waiting:
            try:
                column = waiting.pop()
            except IndexError:  # another thread took the last one
                return
            engine.encode(column)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


@functools.cache
def _engine(path: str, number: int) -> Any:
    from easypipe.transforms.tokenizer.fast import FastEngine

    return FastEngine(Path(path).read_text(encoding="utf-8"))


def bare(files: list[Path], tokenizer: Path, out: Path) -> None:
    """Reader, encoder and writer in a thread each, and nothing else: no cache, no check, no sync,
    no second file, ids of 32 bits.
    """
    engine = _engine(str(tokenizer / "tokenizer.json"), 0)
    texts: queue.Queue[Any] = queue.Queue(4)
    tokens: queue.Queue[Any] = queue.Queue(4)

    def read() -> None:
        for file in files:
            opened = pq.ParquetFile(file)
            for group in range(opened.num_row_groups):
                texts.put(
                    opened.read_row_group(group, columns=["text"], use_threads=False).column(0)
                )
        texts.put(None)

    def encode() -> None:
        while (column := texts.get()) is not None:
            for chunk in column.chunks:
                tokens.put(engine.encode(chunk.cast(pa.large_string())))
        tokens.put(None)

    threads = [threading.Thread(target=work) for work in (read, encode)]
    for thread in threads:
        thread.start()
    schema = pa.schema([pa.field("input_ids", pa.large_list(pa.uint32()))])
    with pq.ParquetWriter(
        out, schema, compression="zstd", use_dictionary=False, write_statistics=False
    ) as writer:
        while (made := tokens.get()) is not None:
            offsets, ids = made
            writer.write_batch(
                pa.record_batch(
                    [pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(ids))], schema=schema
                )
            )
    for thread in threads:
        thread.join()


def wordpiece(scratch: Path, texts: list[str]) -> Path:
    """A WordPiece of 30,000 on the text: what gigatoken refuses to load."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = (
        normalizers.BertNormalizer(),
        pre_tokenizers.BertPreTokenizer(),
    )
    tokenizer.train_from_iterator(
        texts[:2000],
        trainers.WordPieceTrainer(vocab_size=30_000, special_tokens=["[UNK]"], show_progress=False),
    )
    folder = scratch / "wordpiece"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def prepared(options: Any, scratch: Path) -> tuple[list[str], Path, list[Path], float]:
    """(documents, tokenizer, parquet files, megabytes of text)."""
    texts = documents(options.text)
    tokenizer = (
        tokenizer_folder(scratch, texts)
        if options.tokenizer == "gpt2"
        else wordpiece(scratch, texts)
    )
    files = text_parquet(scratch, texts, options.megabytes * 1_000_000)
    return texts, tokenizer, files, sum(_text_bytes(file) for file in files) / 1e6


def compare(options: Any) -> None:
    import datasets

    datasets.disable_progress_bars()
    fast = options.tokenizer == "gpt2"
    report = Report("tokenizing" if fast else f"tokenizing_{options.tokenizer}", "MB/s")
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        texts, tokenizer, files, megabytes = prepared(options, scratch)
        columns = [
            chunk.cast(pa.large_string())
            for file in files
            for chunk in pq.read_table(file).column("text").chunks
        ]
        unique = sum(len(text.encode()) for text in texts) / 1e6

        def run_ours() -> float:
            ours(files, tokenizer, scratch / "ours")
            return megabytes

        def run_light() -> float:
            ours(files, tokenizer, scratch / "light", "lz4")
            return megabytes

        def run_theirs() -> float:
            theirs(files, tokenizer, scratch / "theirs", scratch / "arrow")
            return megabytes

        def run_documented() -> float:
            theirs(
                files, tokenizer, scratch / "documented", scratch / "arrow", _encode_as_documented
            )
            return megabytes

        # the proof of the tokenizer, made once, stays, and so does the peer's Arrow copy of the
        # text
        made = {
            "easypipe": tuple(f"ours/{folder}" for folder in MADE),
            LIGHT: tuple(f"light/{folder}" for folder in MADE),
            "datasets.map + to_parquet": ("theirs",),
            DOCUMENTED: ("documented",),
        }

        def clear(name: str) -> None:
            for folder in made.get(name, ()):
                shutil.rmtree(scratch / folder, ignore_errors=True)

        def alone(threads: int) -> float:
            encode_alone(columns, tokenizer, fast, threads)
            return megabytes

        def run_bare() -> float:
            bare(files, tokenizer, scratch / "bare.parquet")
            return megabytes

        own: dict[str, Any] = (
            {
                f"gigatoken alone, {n} thread{'s'[: n - 1]}": functools.partial(alone, n)
                for n in (1, 2)
            }
            if fast
            else {}
        )
        own = own or {"encode_batch_fast alone, all cores": functools.partial(alone, 0)}
        if importlib.util.find_spec("transformers"):
            own[DOCUMENTED] = run_documented
        contenders = {
            "easypipe": run_ours,
            LIGHT: run_light,
            "datasets.map + to_parquet": run_theirs,
            **own,
        }
        if fast:
            contenders[BARE] = run_bare
        alternate(report, contenders, options.rounds, clear)
        mine, other = (
            ours_ids(scratch / "ours" / "out"),
            pq.read_table(scratch / "theirs" / "out.parquet").column("input_ids"),
        )
        report.facts |= {
            "text MB": round(megabytes, 1),
            "of it different MB": round(min(unique, megabytes), 1),
            "tokenizer": tokenizer.name,
            "same tokens as the peer": _same(mine, other),
        }
    report.target(
        "times datasets.map",
        report.ratio("easypipe", "datasets.map + to_parquet"),
        at_least=40 if fast else 1.3,
    )
    report.facts[f"times datasets.map, {LIGHT}"] = report.ratio(LIGHT, "datasets.map + to_parquet")
    if own.pop(DOCUMENTED, None):
        report.facts[f"times {DOCUMENTED}"] = report.ratio("easypipe", DOCUMENTED)
    shares = {name: report.ratio("easypipe", name) for name in own}
    first, *others = shares
    report.target(f"share of {first}", shares[first], at_least=0.6 if fast else 0.9)
    report.facts |= {f"share of {name}": shares[name] for name in others}
    if fast:
        report.facts[f"times {BARE}"] = report.ratio("easypipe", BARE)
    report.facts[f"share of {first}, {LIGHT}"] = report.ratio(LIGHT, first)
    report.finish(options.out)


def cold(options: Any) -> None:
    """New processes in alternation: imports, proofs and empty caches are part of it."""
    report = Report("tokenizing_cold", "MB/s")
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        _, tokenizer, files, megabytes = prepared(options, scratch)

        def run(peer: bool) -> float:
            task = {
                "files": [str(file) for file in files],
                "tokenizer": str(tokenizer),
                "scratch": str(scratch / "run"),
                "peer": peer,
            }
            done = subprocess.run(
                [sys.executable, __file__, "--child", json.dumps(task)],
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                raise SystemExit(done.stderr)
            return megabytes

        contenders = {
            "easypipe": functools.partial(run, False),
            "datasets.map + to_parquet": functools.partial(run, True),
        }
        alternate(
            report,
            contenders,
            options.rounds,
            lambda name: shutil.rmtree(scratch / "run", ignore_errors=True),
        )
    report.target(
        "times datasets.map", report.ratio("easypipe", "datasets.map + to_parquet"), at_least=10
    )
    report.finish(options.out)


def floor(options: Any) -> None:
    """Processor seconds of user and kernel, all threads: the sum of the parts is what no
    arrangement of them can pass.
    """
    from easypipe.save.shard_writer import open_writer

    report = Report("tokenizing_floor", "s")
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        _, tokenizer, files, megabytes = prepared(options, scratch)
        columns = [
            chunk.cast(pa.large_string())
            for file in files
            for chunk in pq.read_table(file).column("text").chunks
        ]
        ours(files, tokenizer, scratch / "ours")
        stored = [
            pa.ipc.open_file(file).get_batch(0)
            for file in sorted((scratch / "ours" / "cache" / "tokens").rglob("*.arrow"))
        ]
        saved = [batch.select(["input_ids"]) for batch in stored]

        def write_arrow() -> None:
            for number, batch in enumerate(stored):
                with open(scratch / f"{number}.arrow", "wb") as sink:
                    with pa.ipc.new_file(sink, batch.schema) as writer:
                        writer.write_batch(batch)
                    os.fsync(sink.fileno())

        def write_parquet() -> None:
            for number, batch in enumerate(saved):
                with open_writer(
                    scratch / f"{number}.parquet", "parquet", "zstd", batch.schema
                ) as write:
                    write(batch)

        fast = options.tokenizer == "gpt2"
        parts = {
            "parquet to text, pyarrow": lambda: [
                pq.ParquetFile(file).read(columns=["text"], use_threads=False) for file in files
            ],
            f"text to tokens, {'gigatoken' if fast else 'tokenizers'}": functools.partial(
                encode_alone, columns, tokenizer, fast, 1
            ),
            "tokens to Arrow files, synced": write_arrow,
            "tokens to parquet, zstd": write_parquet,
        }
        whole = "easypipe, all of it"

        def counted(call: Any) -> float:
            call()
            return 1.0

        def clear(name: str) -> None:
            for made in MADE if name == whole else ():
                shutil.rmtree(scratch / "ours" / made, ignore_errors=True)

        contenders = {**parts, whole: functools.partial(ours, files, tokenizer, scratch / "ours")}
        runs = {name: functools.partial(counted, call) for name, call in contenders.items()}
        alternate(report, runs, options.rounds, clear, clock=time.process_time)
        least, cores = sum(report.figure(name) for name in parts), len(os.sched_getaffinity(0))
        report.facts |= {
            "text MB": round(megabytes, 1),
            "sum of the parts s": least,
            "share of the whole": least / report.figure(whole),
            f"MB/s that {cores} cores cannot pass": megabytes * cores / report.figure(whole),
            "the same with nothing but the parts": megabytes * cores / least,
        }
    report.finish(options.out)


def _same(mine: pa.ChunkedArray, other: pa.ChunkedArray) -> bool:
    """Document by document, in order; easypipe's rows may end with the tokenizer's EOS column
    apart, never in the ids.
    """
    if len(mine) != len(other):
        return False
    flat_mine, flat_other = mine.combine_chunks(), other.combine_chunks()
    same_ids = np.array_equal(
        flat_mine.values.to_numpy().astype(np.int64), flat_other.values.to_numpy().astype(np.int64)
    )
    same_cuts = np.array_equal(
        np.asarray(flat_mine.offsets).astype(np.int64),
        np.asarray(flat_other.offsets).astype(np.int64),
    )
    return bool(same_ids and same_cuts)


def _text_bytes(file: Path) -> int:
    text = pq.read_table(file).column("text").combine_chunks()
    offsets = np.frombuffer(
        text.buffers()[1], np.int64 if pa.types.is_large_string(text.type) else np.int32
    )
    return int(offsets[len(text)] - offsets[0])


def high_entropy(folder: Path, num_bytes: int, files: int = 8) -> list[Path]:
    """Text in which hardly a word comes twice: what a tokenizer's caches like least."""
    generator = np.random.Generator(np.random.PCG64(7))
    paths = []
    for number in range(files):
        rows = []
        for _ in range(max(1, num_bytes // files // HIGH_ENTROPY_BYTES)):
            raw = bytearray(base64.b64encode(generator.bytes(HIGH_ENTROPY_BYTES * 3 // 4)))
            for space in np.cumsum(generator.integers(3, 12, len(raw) // 8)).tolist():
                if space < len(raw):
                    raw[space] = 32
            rows.append(raw.decode())
        path = folder / f"entropy-{number:03d}.parquet"
        pq.write_table(
            pa.table({"text": pa.array(rows, pa.large_string())}),
            path,
            row_group_size=512,
            compression="none",
        )
        paths.append(path)
    return paths


def memory(options: Any) -> None:
    """Each kind of text in a process of its own, started by this one."""
    report = Report("tokenizing_memory", "s")
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        texts = documents(options.text)
        tokenizer = tokenizer_folder(scratch, texts)
        kinds = {
            "real text": functools.partial(text_parquet, texts=texts, files=8),
            "high-entropy text": high_entropy,
        }
        for kind, write in kinds.items():
            peaks = []
            # memory that follows the data shows between the two
            for megabytes in (options.memory // 2, options.memory):
                folder_of = scratch / f"{kind}-{megabytes}"
                folder_of.mkdir()
                files = write(folder_of, num_bytes=megabytes * 1_000_000)
                result = measured(files, tokenizer, folder_of / "made")
                shutil.rmtree(folder_of)
                peaks.append(result["peak_rss_anon_gb"])
                report.seconds[f"{kind}, {megabytes} MB"] = [result["seconds"]]
                report.facts[f"{kind}, {megabytes} MB: peak GB"] = result["peak_rss_anon_gb"]
            report.target(f"peak RssAnon in GB, {options.memory} MB of {kind}", peaks[1], below=1)
            report.target(
                f"that over the peak of half as much, {kind}", peaks[1] / peaks[0], below=1.25
            )
    report.finish(options.out)


def measured(files: list[Path], tokenizer: Path, scratch: Path) -> dict[str, Any]:
    """`ours` in a process of its own."""
    task = json.dumps(
        {
            "files": [str(file) for file in files],
            "tokenizer": str(tokenizer),
            "scratch": str(scratch),
        }
    )
    done = subprocess.run(
        [sys.executable, __file__, "--child", task], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def child(task: dict[str, Any]) -> None:
    start = time.perf_counter()
    files, tokenizer, scratch = (
        [Path(file) for file in task["files"]],
        Path(task["tokenizer"]),
        Path(task["scratch"]),
    )
    with AnonymousMemory() as held:
        if task.get("peer"):
            theirs(files, tokenizer, scratch / "theirs", scratch / "arrow")
        else:
            ours(files, tokenizer, scratch)
    print(
        json.dumps(
            {
                "seconds": round(time.perf_counter() - start, 2),
                "peak_rss_anon_gb": round(held.peak / 1e9, 3),
            }
        )
    )


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--megabytes", type=int, default=100, help="text to tokenize")
    parser.add_argument(
        "--tokenizer", choices=["gpt2", "wordpiece"], default="gpt2", help="which tokenizer"
    )
    parser.add_argument("--cold", action="store_true", help="new processes, imports included")
    parser.add_argument(
        "--floor", action="store_true", help="processor time of the whole and of its parts"
    )
    parser.add_argument(
        "--memory", type=int, metavar="MB", help="measure memory on so much text instead of speed"
    )
    parser.add_argument("--child", help="used by --memory and --cold for the process they measure")
    options = parser.parse_args()
    if options.child:
        child(json.loads(options.child))
    elif options.memory:
        memory(options)
    elif options.floor:
        floor(options)
    elif options.cold:
        cold(options)
    else:
        compare(options)


if __name__ == "__main__":
    main()
