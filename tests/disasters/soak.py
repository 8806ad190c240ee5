"""Loaders that run for minutes with pauses, restores and epochs: memory, threads and handles stay
as they are, and every batch is the one that the plan says.

python tests/disasters/soak.py [MINUTES]
"""

from __future__ import annotations

import hashlib
import os
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, fields
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["HF_HUB_OFFLINE"] = "1"

from easypipe import (
    DatasetConfig,
    Loader,
    LoadStageConfig,
    MixStageConfig,
    PackStageConfig,
    Pipeline,
    PipelineConfig,
)
from easypipe.core.protocols import silent
from easypipe.core.values import Batch
from pipelines import jsonl, texts, tokenizer

MINUTES = 30.0
SETTLED = 1 / 6  # of the samples, until then caches fill: five of 30 minutes
EPOCHS = 3
MOST_BATCHES = 60  # between two disturbances
MOST_STATES = 200  # that are gone back to


@dataclass(frozen=True)
class Sample:
    """After `seconds`. anonymous: bytes."""

    seconds: float
    anonymous: int
    threads: int
    handles: int

    @classmethod
    def taken(cls, seconds: float) -> Sample:
        status = Path("/proc/self/status").read_text(encoding="ascii")
        anonymous = int(status.partition("RssAnon:")[2].split()[0]) << 10
        tasks, files = (len(os.listdir(f"/proc/self/{name}")) for name in ("task", "fd"))
        return cls(seconds, anonymous, tasks, files)


@dataclass(frozen=True)
class Soaked:
    """first, last: medians of a tenth of the samples, after the start has settled and at the end."""

    minutes: float
    batches: int
    restores: int
    first: Sample
    last: Sample

    @property
    def growth(self) -> float:
        return self.last.anonymous / self.first.anonymous - 1

    def __str__(self) -> str:
        return (
            f"{self.minutes:.1f} minutes, {self.batches} batches, {self.restores} restores: RssAnon "
            f"{self.first.anonymous / 1e6:.1f} -> {self.last.anonymous / 1e6:.1f} MB "
            f"({self.growth:+.2%}), threads {self.first.threads} -> {self.last.threads}, handles "
            f"{self.first.handles} -> {self.last.handles}"
        )


class Soak:
    """A cached loader and a streaming one over the same text, disturbed at random."""

    def __init__(self, folder: Path) -> None:
        rows = [{"text": text} for text in texts(3000, 3, 60)]
        jsonl(folder / "a.jsonl", rows[:1000])
        jsonl(folder / "b.jsonl", rows[1000:])
        self._loaders = [_loader(folder, streaming=streaming) for streaming in (False, True)]
        self._plan = _loader(folder, streaming=False)
        self._states = [[loader.state()] for loader in self._loaders]
        self._seen: list[dict[int, str]] = [{}, {}]
        self._drawn = random.Random(1)
        self.batches = self.restores = 0

    def disturbed(self) -> None:
        """Some batches of one of the loaders, a pause, and on from another batch."""
        which = self._drawn.randrange(2)
        loader, states = self._loaders[which], self._states[which]
        stream = iter(loader)
        for _ in range(self._drawn.randint(1, MOST_BATCHES)):
            at = loader.state().batch
            if (batch := next(stream, None)) is None:
                break
            self._check(which, at, batch)
        if len(states) < MOST_STATES:
            states.append(loader.state())
        del stream
        time.sleep(self._drawn.random() ** 4)  # readers run ahead
        if self._drawn.random() < 0.5:  # else the next iteration goes on, or begins anew at the end
            loader.restore(self._drawn.choice(states))
            self.restores += 1

    def _check(self, which: int, at: int, batch: Batch) -> None:
        digest, seen = _digest(batch), self._seen[which]
        if at not in seen:
            seen[at] = digest if which else _digest(self._plan.batch(at))
        assert digest == seen[at], f"batch {at} of loader {which} is another one"
        self.batches += 1


def soak(minutes: float, folder: Path) -> Soaked:
    """Raises AssertionError at the first batch that is another one than the plan says."""
    one, began, samples = Soak(folder), time.monotonic(), list[Sample]()
    whole, told = minutes * 60, 0.0
    while (now := time.monotonic() - began) < whole:
        one.disturbed()
        samples.append(Sample.taken(now))
        if now - told > 60:
            print(f"{one.batches} batches, {samples[-1]}", file=sys.stderr, flush=True)
            told = now
    settled, tenth = round(len(samples) * SETTLED), -(-len(samples) // 10)
    first, last = _median(samples[settled : settled + tenth]), _median(samples[-tenth:])
    return Soaked(minutes, one.batches, one.restores, first, last)


def _median(samples: list[Sample]) -> Sample:
    return Sample(
        *(
            round(statistics.median(getattr(one, field.name) for one in samples))
            for field in fields(Sample)
        )
    )


def _loader(folder: Path, *, streaming: bool) -> Loader:
    names = ("a",) if streaming else ("a", "b")
    config = PipelineConfig(
        datasets=[DatasetConfig(name=name, data_files=folder / f"{name}.jsonl") for name in names],
        default_tokenizer=str(tokenizer()),
        cache_dir=folder / "cache",
        seed=7,
        streaming=streaming,
        pack=PackStageConfig(seq_length=64),
        mix=None if streaming else MixStageConfig(stop_strategy="all_exhausted"),
        load=LoadStageConfig(batch_size=8, num_epochs=EPOCHS),
    )
    chain = Pipeline(config, progress=silent).source().tokenize()
    loader = (chain if streaming else chain.mix()).pack().load().build()
    assert isinstance(loader, Loader)
    return loader


def _digest(batch: Batch) -> str:
    hasher = hashlib.sha256()
    for name in sorted(batch):
        hasher.update(bytes(memoryview(batch[name]).cast("B")))
    return hasher.hexdigest()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="easypipe-soak-") as name:
        done = soak(float(sys.argv[1]) if len(sys.argv) > 1 else MINUTES, Path(name))
    print(done)
    same = (done.first.threads, done.first.handles) == (done.last.threads, done.last.handles)
    sys.exit(0 if same and done.growth <= 0.01 else 1)
