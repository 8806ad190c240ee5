"""What the Trainer costs around the step: against a loop written by hand, waiting for data, and
saving while it trains.

1. The quickstart's model and batch: blocks of steps by the Trainer and by loops written by hand, in
  alternation, from the same parameters:
   one over easypipe's decoder and loss, so that what differs is the Trainer, and one whose model is
   written by hand too.
2. `next(loader)` while a step of 50 ms sleeps.
3. Saving a state of 1 GB while steps of 50 ms sleep: they hold no core, as on an accelerator, but
  take the state and give it back,
   donated, as any step does.
"""

from __future__ import annotations

import functools
import itertools
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from _common import (
    Report,
    arguments,
    cut_documents,
    documents,
    one_parquet,
    packed_loader,
    tokenizer_folder,
)
from _plain_decoder import descend, make_step
from easypipe.train import state as states
from easypipe.train.checkpoint.checkpoint import Checkpoints
from easypipe.train.config import CheckpointConfig, OptimizerConfig, TrainingConfig
from easypipe.train.losses.loss import LossOutput, loss_sums
from easypipe.train.model.decoder import ModelConfig
from easypipe.train.optim.optimizers import make_optimizer
from easypipe.train.trainer import Trainer

QUICKSTART = ModelConfig(
    vocab_size=8192,
    hidden_size=192,
    intermediate_size=512,
    num_layers=4,
    num_heads=6,
    num_kv_heads=2,
    scan_layers=False,
)
BATCH, LENGTH = 8, 256
SLEEP_S = 0.05


class Same:
    """A loader of one batch, over and over; `allow(n)` lets the next n of them out."""

    batch_size = BATCH

    def __init__(self, batch: dict[str, np.ndarray], gated: bool = True) -> None:
        self.batch, self._open = batch, threading.Semaphore(0)
        self._gated = gated

    def __len__(self) -> int:
        raise TypeError("it never ends")

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        while True:
            if self._gated:
                self._open.acquire()
            yield self.batch

    def allow(self, count: int) -> None:
        self._open.release(count)

    def state(self) -> dict[str, int]:
        return {}

    def restore(self, state: dict[str, int]) -> None: ...


def packed_batch(vocab: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    ids = random.integers(0, vocab, (BATCH, LENGTH)).astype(np.int32)
    segments = np.sort(random.integers(1, 5, (BATCH, LENGTH)), axis=1).astype(np.int32)
    same = segments[:, 1:] == segments[:, :-1]
    labels = np.full_like(ids, -100)
    labels[:, :-1] = np.where(same, ids[:, 1:], -100)
    starts = np.concatenate([np.ones((BATCH, 1), bool), ~same], axis=1)
    place = np.arange(LENGTH) - np.maximum.accumulate(
        np.where(starts, np.arange(LENGTH), 0), axis=1
    )
    return {
        "input_ids": ids,
        "labels": labels,
        "segment_ids": segments,
        "position_ids": place.astype(np.int32),
    }


def against_a_plain_loop(report: Report, folder: Path, rounds: int, block: int) -> None:
    batch = packed_batch(QUICKSTART.vocab_size or 0)
    steps = (rounds + 1) * block
    optimizer = OptimizerConfig(learning_rate=2e-3, warmup_steps=20)
    config = TrainingConfig(
        output_dir=folder / "run",
        steps=max(steps, 30),
        optimizer=optimizer,
        checkpoint=CheckpointConfig(every=None),
    )
    loader = Same(batch)
    losses: list[float] = []
    trainer = Trainer(
        QUICKSTART,
        config,
        loader,
        listener=lambda e: losses.append(e.record["loss"]) if e.kind == "step" else None,
    )
    with states.on(trainer.mesh):
        begun = trainer.fresh()
    transformation = make_optimizer(optimizer, trainer.steps, trainer.layout.decays).transformation
    loops = {
        "a plain loop": descend(
            functools.partial(mean_loss, trainer.layout, begun.rest), transformation
        ),
        "a plain loop and model": make_step(QUICKSTART, transformation),
    }
    kept = {}
    for name in loops:
        params = jax.tree.map(jnp.copy, dict(begun.params))
        kept[name] = (params, transformation.init(params))
    dispatched: list[Any] = []
    given = trainer.train_step

    def watched(state: Any, placed: Any) -> Any:
        state, measured = given(state, placed)
        dispatched.append(measured["loss"])
        return state, measured

    trainer.train_step = watched
    running = threading.Thread(target=trainer.run, daemon=True)
    running.start()
    plain_losses: dict[str, list[float]] = {name: [] for name in loops}

    def ours() -> None:
        wanted = len(dispatched) + block
        loader.allow(block)
        while len(dispatched) < wanted:
            time.sleep(0.0005)
        dispatched[-1].block_until_ready()

    def theirs(name: str) -> None:
        (params, moments), unread = kept[name], None
        for _ in range(block):
            placed = jax.device_put(batch)
            params, moments, loss = loops[name](params, moments, placed)
            if unread is not None:
                plain_losses[name].append(float(unread))
            unread = loss
        kept[name] = (params, moments)
        plain_losses[name].append(float(unread))  # type: ignore[arg-type]

    contenders = {"easypipe": ours, **{name: functools.partial(theirs, name) for name in loops}}
    for turn in range(rounds + 1):
        for name in list(contenders)[:: 1 if turn % 2 else -1]:
            began = time.perf_counter()
            contenders[name]()
            if turn:  # the first block compiles
                report.seconds.setdefault(name, []).append((time.perf_counter() - began) / block)
    for name in loops:
        ratios = [
            a / b for a, b in zip(report.seconds["easypipe"], report.seconds[name], strict=True)
        ]
        report.facts[f"losses differ from those of {name} by at most"] = max(
            abs(a - b) for a, b in zip(losses, plain_losses[name], strict=False)
        )
        report.target(
            f"step time over that of {name}, median of pairs", statistics.median(ratios), below=1.03
        )
    loader.allow(trainer.steps - steps)
    running.join()


def mean_loss(layout: Any, rest: Any, params: Any, batch: Any) -> Any:
    out = loss_sums(layout.merge(params, rest), batch)
    return out.loss_sum / out.num_targets


def waiting_for_data(report: Report, folder: Path, texts: list[str]) -> None:
    os.environ["EASYPIPE_CACHE"] = str(folder / "cache")
    file = one_parquet(folder, cut_documents(texts, 6000, 1050))
    loader = packed_loader(
        file,
        tokenizer_folder(folder, texts),
        2048,
        batch_size=BATCH,
        mesh={"data": 1},
        num_epochs=None,
    )
    waits, batches = [], iter(loader)
    next(batches)
    for _ in range(60):
        time.sleep(SLEEP_S)
        began = time.perf_counter()
        next(batches)
        waits.append((time.perf_counter() - began) * 1e6)
    batches.close()
    report.facts["next(loader) in µs, worst of 60"] = max(waits)
    report.target(
        "median next(loader) in µs while a step of 50 ms runs", statistics.median(waits), below=250
    )


class Large(nnx.Module):
    """1 GB of parameters, of which a step touches nothing."""

    def __init__(self, rngs: nnx.Rngs, parts: int = 16) -> None:
        self.parts = nnx.List(
            [nnx.Param(jnp.zeros((1 << 22, 4), jnp.float32)) for _ in range(parts)]
        )


def nothing(module: Any, batch: Any) -> LossOutput:
    return LossOutput(jnp.float32(1), jnp.int32(1), jnp.float32(1))


def saving(report: Report, folder: Path, every: int, saves: int) -> None:
    config = TrainingConfig(
        output_dir=folder / "saving",
        steps=every * (saves + 1),
        checkpoint=CheckpointConfig(every=every, keep=1),
    )
    loader = Same(packed_batch(16), gated=False)
    trainer = Trainer(
        lambda rngs: Large(rngs), config, loader, loss=nothing, optimizer=optax.identity()
    )
    with states.on(trainer.mesh):
        measured = jax.eval_shape(
            trainer.train_step,
            states.abstract_state(trainer.layout, trainer.optimizer),
            trainer_batch(loader),
        )[1]
    told = {name: jnp.ones(value.shape, value.dtype) for name, value in measured.items()}

    def sleep(state: Any, batch: Any) -> Any:
        waited = jax.pure_callback(
            lambda: (time.sleep(SLEEP_S), np.int32(1))[1], jax.ShapeDtypeStruct((), jnp.int32)
        )
        return state._replace(step=state.step + waited), told | {"updates": state.step + waited}

    slept, calls, dispatched, committed = jax.jit(sleep, donate_argnums=0), [], [], []
    save = Checkpoints.save

    def timed_step(state: Any, batch: Any) -> Any:
        dispatched.append(time.perf_counter())
        return slept(state, batch)

    def timed_save(checkpoints: Any, step: int, *rest: Any) -> None:
        began = time.perf_counter()
        save(checkpoints, step, *rest)
        calls.append((began, time.perf_counter()))

        def watch() -> None:
            while not (checkpoints.folder / str(step)).is_dir():
                time.sleep(0.005)
            committed.append(time.perf_counter())

        threading.Thread(target=watch, daemon=True).start()

    trainer.train_step = timed_step
    with mock.patch.object(Checkpoints, "save", timed_save):
        trainer.run()
    size = sum(array.size * 4 for array in trainer.layout.params.values()) / 1e9
    steps = [(a, b - a) for a, b in itertools.pairwise(dispatched)]
    spans = [(call[0], end) for call, end in zip(calls, committed, strict=False)][:saves]
    during = [
        took for at, took in steps if any(began <= at + took and at <= end for began, end in spans)
    ]
    apart = [
        took
        for at, took in steps[2:]
        if not any(began <= at + took and at <= end for began, end in spans)
    ]
    report.facts["state in GB"] = size
    report.facts["steps during a save, and apart"] = f"{len(during)}, {len(apart)}"
    report.facts["a save takes s"] = statistics.median(end - began for began, end in spans)
    report.facts["step apart from saves in ms"] = statistics.median(apart) * 1e3
    worst = [
        max((took for at, took in steps if began <= at + took and at <= end), default=0) * 1e3
        for began, end in spans
    ]
    report.facts["step during a save in ms, median, and the slowest of each"] = (
        f"{statistics.median(during) * 1e3:.1f}; {', '.join(f'{one:.0f}' for one in worst)}"
    )
    report.target(
        "the save call returns in ms, worst",
        max(end - began for began, end in calls[:saves]) * 1e3,
        below=50,
    )
    report.target(
        "median step during a save over one apart",
        statistics.median(during) / statistics.median(apart),
        below=1.1,
    )


def trainer_batch(loader: Same) -> dict[str, Any]:
    return {name: jnp.asarray(value) for name, value in loader.batch.items()}


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--block", type=int, default=4, help="steps in a row of each loop")
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--every", type=int, default=100, help="steps between saves")
    parser.add_argument("--only", choices=["plain", "data", "saving"], help="one part")
    options = parser.parse_args()
    report = Report("train_step", "s")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.only in (None, "plain"):
            against_a_plain_loop(report, folder, options.rounds, options.block)
        if options.only in (None, "data"):
            waiting_for_data(report, folder, documents(options.text))
        if options.only in (None, "saving"):
            saving(report, folder, options.every, options.saves)
    report.finish(options.out)


if __name__ == "__main__":
    main()
