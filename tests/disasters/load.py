"""Much of everything, and little memory: 100,000 files, 10 M empty rows, a document of 50 M tokens,
a line of 3 GB, 2,000 datasets, and limits of memory.

python tests/disasters/load.py [STEP ...]

Each step prepares and loads in a process of its own, for BOX_S at most, or FILES_S. Where memory is limited, the
process has to end well, or with an error of ours, or by a signal of the kernel or of a library that
asked for memory in vain; the same without a limit has to end well afterwards. What a machine does not allow is skipped, and the reason is printed.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["HF_HUB_OFFLINE"] = "1"

from disasters.interposer import ERROR_OF_OURS
from disasters.soak import Sample
from easypipe import DatasetConfig, LoadStageConfig, PackStageConfig, Pipeline, PipelineConfig
from easypipe.core.errors import EasypipeError
from easypipe.core.protocols import silent
from pipelines import jsonl, texts, tokenizer

BOX_S, FILES_S = 300.0, 1800.0
SENTENCE = "the cat sat on a mat and went. "  # 13 tokens of the tokenizer of the tests
LIMITS_MB = (50, 100, 200, 400, 800)  # more than the process has once it has loaded a little
# where a kernel lets a process put itself under a limit: of version 2 of cgroups, else of version 1
CGROUPS = (
    (Path("/sys/fs/cgroup"), "memory.max"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
)


def _files(folder: Path, count: int = 100_000) -> None:
    for i in range(count):
        (folder / f"{i}.jsonl").write_text(f'{{"text": "a few words {i}"}}\n')


def _empty(folder: Path, count: int = 10_000_000) -> None:
    with (folder / "a.jsonl").open("w") as file:
        for _ in range(count // 10_000):
            file.write('{"text": ""}\n' * 10_000)
    jsonl(folder / "b.jsonl", [{"text": text} for text in texts(100)])


def _document(folder: Path, tokens: int = 50_000_000) -> None:
    jsonl(folder / "a.jsonl", [{"text": SENTENCE * (tokens // 13)}, {"text": SENTENCE}])


def _line(folder: Path, num_bytes: int = 3_000_000_000) -> None:
    with (folder / "a.jsonl").open("w") as file:
        file.write('{"text": "')
        for _ in range(num_bytes // 1_000_000):
            file.write("a few words " * 83_333)
        file.write(f'"}}\n{{"text": "{SENTENCE}"}}\n')


def _datasets(folder: Path, count: int = 2000) -> None:
    for i in range(count):
        jsonl(folder / f"{i}" / "a.jsonl", [{"text": f"a few words {i}"}])


def _text(folder: Path) -> None:
    """60 MB of it."""
    rows = [{"text": text} for text in texts(3000, 3, 60)]
    jsonl(folder / "a.jsonl", rows)
    line = (folder / "a.jsonl").read_bytes()
    (folder / "a.jsonl").write_bytes(line * (60_000_000 // len(line)))


@dataclass(frozen=True)
class Step:
    """what: in words. make: writes its data. seconds: what it may take. refused: it has to be."""

    what: str
    make: Callable[[Path], None]
    seconds: float = BOX_S
    refused: bool = False


NONE = Step("", lambda folder: None)
STEPS = {
    "files": Step("100,000 files of one row", _files, FILES_S),
    "empty": Step("10 M empty rows", _empty),
    "document": Step("a document of 50 M tokens", _document),
    "line": Step("a line of 3 GB", _line, refused=True),
    "datasets": Step("2,000 datasets of one row", _datasets),
    "ulimit": Step("60 MB of text under ulimit -v", _text),
    "cgroup": Step("60 MB of text in a cgroup", _text),
}


class Peak:
    """The most anonymous memory that this process has had while the block ran."""

    def __init__(self) -> None:
        self.bytes, self._end = 0, threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def _look(self) -> None:
        while not self._end.wait(0.02):
            self.bytes = max(self.bytes, Sample.taken(0).anonymous)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()


def load(folder: Path, folder_of_tokenizer: str) -> str:
    """Prepares what lies in `folder`, then makes some batches; says what there was."""
    began = time.monotonic()
    subfolders = sorted(path for path in (folder / "data").iterdir() if path.is_dir())
    config = PipelineConfig(
        datasets=[
            DatasetConfig(name=f"d{i}", data_files=path, on_error="skip")
            for i, path in enumerate(subfolders or [folder / "data"])
        ],
        seed=1,
        cache_dir=folder / "cache",
        default_tokenizer=folder_of_tokenizer,
        pack=PackStageConfig(seq_length=1024),
        load=LoadStageConfig(batch_size=1, num_epochs=1, drop_last=False),
    )
    with Peak() as peak:
        chain = Pipeline(config, progress=silent).source().tokenize()
        chain.prepare()
        prepared = time.monotonic() - began
        loader = chain.mix().pack().load().build()
        batches = sum(1 for _, _ in zip(range(100), loader, strict=False))
    return (
        f"prepared in {prepared:.1f} s, {batches} batches after {time.monotonic() - began:.1f} s, "
        f"RssAnon {peak.bytes / 1e6:.0f} MB at most"
    )


def child(folder: Path, folder_of_tokenizer: str, kind: str, limit_mb: int) -> int:
    if kind:  # what libraries and compiled kernels need is there before there is a limit
        with tempfile.TemporaryDirectory() as little:
            jsonl(Path(little) / "data" / "a.jsonl", [{"text": text} for text in texts(9)])
            load(Path(little), folder_of_tokenizer)
    if kind == "ulimit":
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + (limit_mb << 20),) * 2)
    if kind == "cgroup":
        group, name = cgroup()  # what a process has before it comes is not counted
        (group / name).write_text(str(limit_mb << 20))
        (group / "cgroup.procs").write_text(str(os.getpid()))
    try:
        print(load(folder, folder_of_tokenizer))
    except EasypipeError as error:
        print(f"refused: {' '.join(str(error).split())[:160]}")
        return ERROR_OF_OURS
    return 0


def cgroup() -> tuple[Path, str]:
    """A group for children of this program, and the file that limits it. Raises OSError where this
    machine allows none.
    """
    for root, name in CGROUPS:
        group = root / "easypipe-load"
        with suppress(FileExistsError):
            group.mkdir()
        if (group / name).exists():
            return group, name
        group.rmdir()
    raise OSError("no group of this kernel has a limit of memory")


def run(
    folder: Path, told: str, kind: str = "", limit_mb: int = 0, *, step: Step = NONE
) -> tuple[bool, str]:
    """Whether a child ended as it may, and what it said."""
    asked = [sys.executable, __file__, "--child", str(folder), told, kind, str(limit_mb)]
    try:
        done = subprocess.run(
            asked, capture_output=True, text=True, timeout=step.seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return True, f"stopped after {step.seconds:.0f} s"
    if kind and done.returncode < 0:
        return (
            True,
            f"ended by {signal.Signals(-done.returncode).name}: {done.stderr.strip()[-80:]}",
        )
    may = (0, ERROR_OF_OURS) if limit_mb else (ERROR_OF_OURS if step.refused else 0,)
    well = done.returncode in may
    return well, (done.stdout if well else f"code {done.returncode}: {done.stderr[-1500:]}").strip()


def limited(folder: Path, told: str, kind: str) -> list[tuple[bool, str]]:
    """Under each limit until one is enough, then without one, in the cache that those left."""
    found: list[tuple[bool, str]] = []
    for limit_mb in LIMITS_MB:
        well, said = run(folder, told, kind, limit_mb)
        found.append((well, f"{limit_mb} MB more than at the start: {said}"))
        if said.startswith("prepared"):
            break
    return [*found, run(folder, told)]


def main(names: list[str]) -> int:
    wrong, told = 0, tokenizer()
    for name in names or STEPS:
        with tempfile.TemporaryDirectory(prefix="easypipe-load-") as made:
            folder = Path(made).resolve()
            (folder / "data").mkdir()
            if name == "cgroup":
                try:
                    cgroup()
                except OSError as error:
                    print(f"{STEPS[name].what}: skipped: {error}", flush=True)
                    continue
            STEPS[name].make(folder / "data")
            limits = name in ("ulimit", "cgroup")
            step = STEPS[name]
            found = limited(folder, told, name) if limits else [run(folder, told, step=step)]
        for well, said in found:
            print(f"{STEPS[name].what}: {said}{'' if well else ' WRONG'}", flush=True)
            wrong += not well
    with suppress(OSError):
        cgroup()[0].rmdir()
    return wrong > 0


if __name__ == "__main__":
    if "--child" in sys.argv:
        _, _, at, its_tokenizer, its_kind, its_limit = sys.argv
        sys.exit(child(Path(at), its_tokenizer, its_kind, int(its_limit)))
    sys.exit(main(sys.argv[1:]))
