"""Compares the time of training steps on preference pairs. The log probabilities of the reference
model are `cached`, or computed in every step (`initial`), or there is no reference model (`none`).
Either all parameters are trained (`full`), or only adapters (`lora`).

All train the same model on one batch of pairs, in alternation. Seconds are of processor time, so
that other work on the machine does not count.

The limit by arithmetic counts products of matrices alone: 2 of each parameter and token in a
forward pass, 4 in a backward pass, 2 where the matrix is frozen, and 2 more of the head in every
backward pass, since the loss computes the logits a second time. No cache can be faster than a step
that has no reference at all, which is measured beside.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from _common import Report, arguments
from easypipe.train import state as states
from easypipe.train.config import PreferenceConfig, TrainingConfig
from easypipe.train.engine import Engine
from easypipe.train.losses.cached_reference import Passes
from easypipe.train.model.config import LoraConfig, ModelConfig
from easypipe.train.model.flops import matmul_params
from easypipe.train.parallel.mesh import place_batch

SHAPE = ModelConfig(
    vocab_size=8192,
    hidden_size=256,
    intermediate_size=704,
    num_layers=4,
    num_heads=8,
    num_kv_heads=4,
)
ROWS, LENGTH, ANSWERS = 4, 256, 4  # answers of a row


class Pairs:
    """A loader that yields one batch of pairs, once."""

    batch_size = ROWS

    def __init__(self) -> None:
        random = np.random.default_rng(0)
        shape, each = (ROWS, LENGTH), LENGTH // ANSWERS
        place = np.tile(np.arange(LENGTH, dtype=np.int32) % each, (ROWS, 1))
        ids = random.integers(0, SHAPE.vocabulary, shape).astype(np.int32)
        labels = np.where(place < each // 2, -100, np.roll(ids, -1, axis=1)).astype(np.int32)
        labels[place == each - 1] = -100
        segments = np.tile(1 + np.arange(LENGTH, dtype=np.int32) // each, (ROWS, 1))
        names = "input_ids", "labels", "segment_ids", "position_ids"
        self.batch = dict(zip(names, (ids, labels, segments, place), strict=True))

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        yield self.batch

    def __len__(self) -> int:
        raise TypeError

    def state(self) -> dict[str, int]:
        return {}

    def restore(self, state: dict[str, int]) -> None: ...


class Contender:
    def __init__(self, folder: Path, reference: Any, lora: LoraConfig | None) -> None:
        preference = PreferenceConfig(reference=reference)
        config = TrainingConfig(output_dir=folder, steps=1000, preference=preference, lora=lora)
        self.engine, pairs = Engine(SHAPE, config, Pairs()), Pairs()
        self.engine.passes = Passes(lambda: [pairs], folder)
        with states.on(self.engine.mesh):
            self.state = self.engine.fresh()
            self.batch = place_batch(pairs.batch, self.engine.mesh)
            if self.engine.reference is not None:
                self.engine.reference.keep(self.state.params)
                self.engine.ask_reference(self.state)

    def seconds(self, steps: int) -> float:
        engine, begin = self.engine, time.process_time()
        with states.on(engine.mesh):
            for _ in range(steps):
                batch = engine.completed(self.state.rest, self.batch)
                self.state, measured = engine.train_step(self.state, batch)
            jax.block_until_ready(measured)
        return time.process_time() - begin


def limit(*, frozen: bool) -> float:
    """Returns the least share of a step with a reference that a step without one can take."""
    every, head = matmul_params(SHAPE), SHAPE.hidden_size * SHAPE.vocabulary
    forward, backward = 2 * every, (2 if frozen else 4) * every + 2 * head
    return (forward + backward) / (2 * forward + backward)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--steps", type=int, default=2, help="steps of a round")
    given = parser.parse_args()
    report = Report("preference", "s", facts={"rows": ROWS, "length": LENGTH, "steps": given.steps})
    for way, lora, wanted in (("full", None, 0.8), ("lora", LoraConfig(rank=8), 0.7)):
        with tempfile.TemporaryDirectory() as folder:
            both = {
                name: Contender(Path(folder, name), name, lora)
                for name in ("initial", "cached", "none")
            }
            for one in both.values():
                one.seconds(1)  # compiles
            for _ in range(given.rounds):
                for name, one in both.items():
                    report.seconds.setdefault(f"{name}, {way}", []).append(one.seconds(given.steps))
        part = report.figure(f"cached, {way}") / report.figure(f"initial, {way}")
        report.target(f"cached / initial, {way}", part, below=wanted)
        left = report.figure(f"cached, {way}") / report.figure(f"none, {way}")
        report.target(f"cached / no reference at all, {way}", left, below=1.05)
        report.facts[f"limit by arithmetic, {way}"] = limit(frozen=lora is not None)
    report.finish(given.out)


if __name__ == "__main__":
    main()
