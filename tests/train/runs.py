"""What the training tests train: a small module, batches made by arithmetic, and a program that
trains them in a process of its own.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from easypipe.train.config import CheckpointConfig, OptimizerConfig, TrainingConfig
from easypipe.train.events import TrainEvent
from easypipe.train.metrics.meter import RATES
from easypipe.train.parallel.mesh import partitioned
from easypipe.train.signals import Interrupted
from easypipe.train.trainer import Trainer

VOCAB, WIDTH, INNER, ROWS, LENGTH = 32, 8, 16, 8, 12


class Tiny(nnx.Module):
    """Predicts the next token from this one: two labelled matrices, a list, a norm; dropout if
    asked for.
    """

    def __init__(self, rngs: nnx.Rngs, dropout: float = 0.0) -> None:
        normal = nnx.initializers.normal(0.3)
        self.table = nnx.Embed(
            VOCAB, WIDTH, embedding_init=partitioned(normal, "vocab", "embed"), rngs=rngs
        )
        self.layers = nnx.List(
            [
                nnx.Linear(
                    WIDTH, INNER, kernel_init=partitioned(normal, "embed", "mlp"), rngs=rngs
                ),
                nnx.Linear(
                    INNER, WIDTH, kernel_init=partitioned(normal, "mlp", "embed"), rngs=rngs
                ),
            ]
        )
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs) if dropout else None

    def hidden(
        self, input_ids: jax.Array, segment_ids: Any = None, position_ids: Any = None
    ) -> jax.Array:
        x = jnp.take(self.table.embedding[...], input_ids, axis=0)
        x = x + self.layers[1](nnx.silu(self.layers[0](x)))
        return self.norm(x if self.dropout is None else self.dropout(x))

    def lm_head(self) -> jax.Array:
        return self.table.embedding[...].T


class Arithmetic:
    """A BatchLoader whose batch t is a function of (seed, t) alone: rows that count up, padded to
    uneven lengths.
    """

    def __init__(
        self,
        batches: int | None = None,
        *,
        seed: int = 0,
        batch_size: int = ROWS,
        last: int | None = None,
        blank: int | None = None,
        bad: int | None = None,
    ) -> None:
        self.batch_size, self.batches, self.seed, self.last, self.blank, self.bad, self.t = (
            batch_size,
            batches,
            seed,
            last,
            blank,
            bad,
            0,
        )

    def __len__(self) -> int:
        if self.batches is None:
            raise TypeError("this loader never ends")
        return self.batches

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        while self.batches is None or self.t < self.batches:
            self.t += 1
            yield self.batch(self.t)

    def batch(self, t: int) -> dict[str, np.ndarray]:
        """Batch t, counted from 1. `last` rows in the last one; `blank` has no targets, `bad` a
        label outside the vocabulary.
        """
        rows = self.last if self.last is not None and t == self.batches else self.batch_size
        random = np.random.default_rng((self.seed, t))
        ids = ((random.integers(0, VOCAB, (rows, 1)) + np.arange(LENGTH)) % VOCAB).astype(np.int32)
        real = np.arange(LENGTH) < random.integers(3, LENGTH + 1, (rows, 1))
        segments = real.astype(np.int32)
        labels = np.where(real & np.roll(real, -1, 1), np.roll(ids, -1, 1), -100).astype(np.int32)
        labels[:, -1] = -100
        if t == self.blank:
            labels[:] = -100
        if t == self.bad:
            labels[0, 0] = VOCAB + 5
        positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), ids.shape).copy()
        return {
            "input_ids": np.where(real, ids, 0),
            "labels": labels,
            "segment_ids": segments,
            "position_ids": positions * segments,
        }

    def state(self) -> dict[str, int]:
        return {"t": self.t}

    def restore(self, state: dict[str, int]) -> None:
        self.t = state["t"]


def settings(output_dir: Path | str, **changes: Any) -> TrainingConfig:
    values: dict[str, Any] = {
        "steps": 12,
        "optimizer": OptimizerConfig(learning_rate=0.03, warmup_steps=2),
        "checkpoint": CheckpointConfig(every=4),
    }
    return TrainingConfig(output_dir=output_dir, **(values | changes))


def numbers(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the law says is equal bit for bit: everything but rates."""
    return [{key: r[key] for key in r if key not in (*RATES, "peak_memory")} for r in records]


def main(output_dir: str, kill_step: str = "0", kill_save: str = "0", save_files: str = "0") -> int:
    """Trains 30 steps, saving every 5. Dies by kill -9 after the line of `kill_step`, or once save
    `kill_save` has `save_files` files.
    """

    def listener(event: TrainEvent) -> None:
        if event.kind == "step":
            print(event.step, flush=True)
            time.sleep(0.02)
            if event.step == int(kill_step):
                os.kill(os.getpid(), signal.SIGKILL)
        if event.kind == "checkpoint" and event.step == int(kill_save):
            time.sleep(5)  # the watcher strikes first

    def watch() -> None:
        saving = Path(output_dir, "checkpoints")
        while True:
            for folder in saving.glob(f"{kill_save}.*tmp*"):
                if sum(path.is_file() for path in folder.rglob("*")) >= int(save_files):
                    os.kill(os.getpid(), signal.SIGKILL)

    if int(kill_save):
        threading.Thread(target=watch, daemon=True).start()
    config = settings(output_dir, steps=30, eval_every=10, checkpoint=CheckpointConfig(every=5))
    try:
        Trainer(
            Tiny, config, Arithmetic(), {"held": Arithmetic(2, seed=7)}, listener=listener
        ).run()
    except Interrupted as stopped:
        print(stopped, file=sys.stderr)
        return stopped.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
