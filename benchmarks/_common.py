"""What all benchmarks share: real text, fair timing, one way to print.

Law (fair timing): every contender of a comparison runs in this process (or is started by it), in
alternation, so that a busy or throttled machine hits all alike; one untimed round first, then
medians of the timed ones; the ratio is of medians.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

REPOSITORY = Path(__file__).resolve().parents[1]
SHARED = REPOSITORY.parent / "shared" / "data"


def arguments(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--text",
        type=Path,
        help="a folder or file of text to use (default: ../shared/data and the standard library)",
    )
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds")
    parser.add_argument(
        "--out", type=Path, default=REPOSITORY / "benchmarks" / "out", help="where the JSON goes"
    )
    return parser


@dataclass
class Report:
    """Contenders and what they did. `rows` hold the timed rounds, so that a reader can judge the
    spread.
    """

    name: str
    unit: str  # of a rate: "MB/s", "tokens/s", or "s" where the figure is a time
    facts: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    work: dict[str, float] = field(default_factory=dict)
    targets: list[dict[str, Any]] = field(default_factory=list)

    def figure(self, contender: str) -> float:
        seconds = statistics.median(self.seconds[contender])
        return seconds if self.unit == "s" else self.work[contender] / seconds

    def ratio(self, ours: str, theirs: str) -> float:
        """How many times better `ours` is."""
        a, b = self.figure(ours), self.figure(theirs)
        return b / a if self.unit == "s" else a / b

    def target(
        self, what: str, value: float, *, at_least: float | None = None, below: float | None = None
    ) -> None:
        met = (at_least is None or value >= at_least) and (below is None or value < below)
        wanted = f"≥ {at_least:g}" if at_least is not None else f"< {below:g}"
        self.targets.append({"what": what, "value": value, "wanted": wanted, "met": met})

    def finish(self, folder: Path) -> None:
        """Prints the tables and writes `NAME.json`."""
        peers = {
            name: {
                "median": self.figure(name),
                "seconds": self.seconds[name],
                "spread": _spread(self.seconds[name]),
            }
            for name in self.seconds
        }
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.json"
        document = {
            "benchmark": self.name,
            "unit": self.unit,
            "contenders": peers,
            "targets": self.targets,
            "facts": self.facts,
            "machine": machine(),
        }
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        if peers:
            rows = [
                (name, _short(p["median"]), f"±{p['spread']:.0%}", len(p["seconds"]))
                for name, p in peers.items()
            ]
            table((self.name, self.unit, "spread", "rounds"), rows)
        if self.targets:
            table(
                ("target", "measured", "wanted", ""),
                [
                    (t["what"], _short(t["value"]), t["wanted"], "met" if t["met"] else "MISSED")
                    for t in self.targets
                ],
            )
        for key, value in self.facts.items():
            print(f"{key}: {_short(value) if isinstance(value, float) else value}")
        print(f"written to {path}")


def alternate(
    report: Report,
    contenders: Mapping[str, Callable[[], float]],
    rounds: int,
    clear: Callable[[str], None] = lambda name: None,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Runs all contenders once untimed, then `rounds` times in alternation, in an order that turns
    from round to round.

    A contender returns how much work it did, in the unit of the report without its "/s". clear:
    called with its name before each, untimed.
    clock: `time.process_time` counts what all threads and the kernel do for this process, and no
    waiting.
    """
    names = list(contenders)
    for turn in range(-1, rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            clear(name)
            gc.collect()
            os.sync()  # what one has written is not flushed in the time of the next
            start = clock()
            done = contenders[name]()
            elapsed = clock() - start
            if turn >= 0:
                report.seconds.setdefault(name, []).append(elapsed)
                report.work[name] = done
            print(
                f"  {'warm-up' if turn < 0 else f'round {turn + 1}'}: {name} {elapsed:.3f} s",
                file=sys.stderr,
            )


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    cells = [[str(cell) for cell in row] for row in [head, *rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    print()
    for number, row in enumerate(cells):
        print(
            "| "
            + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            + " |"
        )
        if number == 0:
            print("|" + "|".join("-" * (width + 2) for width in widths) + "|")
    print()


def machine() -> dict[str, Any]:
    packages = (
        "easypipe",
        "jax",
        "numpy",
        "pyarrow",
        "tokenizers",
        "gigatoken",
        "numba",
        "datasets",
        "grain",
        "torch",
    )
    versions = {}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None  # a peer that this benchmark does not need
    return {
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "cpu": _cpu(),
        "versions": versions,
    }


class AnonymousMemory(threading.Thread):
    """Samples RssAnon of this process: memory that is really held, unlike pages of mapped files,
    which the kernel takes back at will.
    """

    def __init__(self, every_s: float = 0.05) -> None:
        super().__init__(daemon=True)
        self._every_s = every_s
        self._over = threading.Event()
        self.samples: list[tuple[float, int]] = []  # (seconds since the start, bytes)

    def __enter__(self) -> AnonymousMemory:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()

    def run(self) -> None:
        begin = time.perf_counter()
        while not self._over.wait(self._every_s):
            self.samples.append((time.perf_counter() - begin, anonymous_bytes()))

    @property
    def peak(self) -> int:
        return max(size for _, size in self.samples)


def anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this kernel does not report RssAnon")


def documents(path: Path | None) -> list[str]:
    """Real documents, each once: of `path`, or of the shared data where it is, with the standard
    library's sources.
    """
    if path is not None:
        if not path.exists():
            raise SystemExit(f"--text {path}: no such file or folder")
        files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        texts = [text for file in files for text in _texts(file)]
    else:
        texts = [text for file in sorted((SHARED / "text").glob("*")) for text in _texts(file)]
        library = Path(sysconfig.get_paths()["stdlib"])
        texts += [
            text
            for file in sorted(library.rglob("*.py"))
            if "site-packages" not in file.parts
            for text in _texts(file)
        ]
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise SystemExit("no text found; give a folder of text files with --text")
    order = np.random.Generator(np.random.PCG64(0)).permutation(len(texts))
    return [texts[i] for i in order]


def text_parquet(
    folder: Path, texts: Sequence[str], num_bytes: int, *, files: int = 4
) -> list[Path]:
    """`files` parquet files of together about `num_bytes` of text. Where the real text runs out, it
    is repeated.
    """
    paths = []
    stream = _forever(texts)
    for number in range(files):
        chunk, size = [], 0
        while size < num_bytes // files:
            text = next(stream)
            chunk.append(text)
            size += len(text.encode())
        path = folder / f"text-{number:03d}.parquet"
        pq.write_table(
            pa.table({"text": pa.array(chunk, pa.large_string())}),
            path,
            row_group_size=512,
            compression="zstd",
        )
        paths.append(path)
    return paths


def one_parquet(folder: Path, texts: Sequence[str]) -> Path:
    path = folder / "documents.parquet"
    pq.write_table(
        pa.table({"text": pa.array(texts, pa.large_string())}),
        path,
        row_group_size=4096,
        compression="zstd",
    )
    return path


def packed_loader(
    file: Path, tokenizer: Path, seq_length: int, *, strategy: str = "first_fit", **load: Any
) -> Any:
    """The public path from a parquet file of documents to a loader over packed rows; tokens come
    from the cache when they are there.
    """
    from easypipe import DatasetConfig, LoadStageConfig, PackStageConfig, Pipeline, PipelineConfig

    config = PipelineConfig(
        datasets=[DatasetConfig(name="text", data_files=str(file))],
        default_tokenizer=str(tokenizer),
        seed=1,
        pack=PackStageConfig(seq_length=seq_length, strategy=strategy),
        load=LoadStageConfig(**load),
    )
    return Pipeline.from_config(config).source().tokenize().pack().load().build()


def cut_documents(
    texts: Sequence[str], count: int, median_chars: int, sigma: float = 0.8
) -> list[str]:
    """`count` documents of real text whose lengths are lognormal around `median_chars`."""
    lengths = (
        np.random.Generator(np.random.PCG64(1))
        .lognormal(np.log(median_chars), sigma, count)
        .astype(int)
        .clip(16, 40 * median_chars)
    )
    joined = "\n".join(texts)
    result, at = [], 0
    for length in lengths.tolist():
        if at + length > len(joined):
            # wrap to another offset, so that a repeat is not the same document
            at = (at + length) % 9973
        result.append(joined[at : at + length])
        at += length
    return result


@functools.cache
def gpt2_tokenizer() -> Path | None:
    path = SHARED / "tokenizers" / "gpt2"
    return path if path.is_dir() else None


def tokenizer_folder(scratch: Path, texts: Sequence[str]) -> Path:
    """GPT-2's tokenizer where the shared data has it, else a byte-level BPE of 32k trained on
    `texts`.
    """
    found = gpt2_tokenizer()
    if found is not None:
        return found
    from easypipe.transforms.tokenizer.bpe import train_bpe

    return train_bpe(texts, 32_000, [], scratch / "tokenizer")


def _texts(file: Path) -> Iterator[str]:
    name = file.name.lower()
    if name.endswith(".jsonl"):
        for line in file.read_text(encoding="utf-8").splitlines():
            text = json.loads(line).get("text")
            if isinstance(text, str):
                yield text
    elif name.endswith((".txt", ".md", ".py", ".rst")):
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            return  # the standard library tests its decoders with such files
        if len(text) <= 100_000:
            yield text
        else:
            paragraphs = text.split("\n\n")
            for start in range(0, len(paragraphs), 20):
                yield "\n\n".join(paragraphs[start : start + 20])


def _forever(texts: Sequence[str]) -> Iterator[str]:
    while True:
        yield from texts


def _spread(seconds: Sequence[float]) -> float:
    """Half the distance between the fastest and the slowest round, over the median."""
    return (max(seconds) - min(seconds)) / 2 / statistics.median(seconds)


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.4g}"
    return str(value)


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        return platform.processor()
    return platform.processor()
