"""Checks of a small model like the run's: a packed row equals its documents; accumulation."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from easypipe.core.schema import IGNORE, INPUT_IDS, LABELS, POSITION_IDS, SEGMENT_IDS
from easypipe.core.values import Batch, Json
from easypipe.doctor.check import Check, Failed, Skipped
from easypipe.doctor.data import Sample
from easypipe.run import RunConfig
from easypipe.train.config import CheckpointConfig, OptimizerConfig, TrainingConfig
from easypipe.train.losses.loss import loss_sums
from easypipe.train.model.decoder import Decoder, ModelConfig
from easypipe.train.parallel.mesh import make_mesh
from easypipe.train.trainer import Trainer

LAYERS, INNER, SLOTS = 2, 256, 512  # the upper limits of the small model and its rows
CLOSE = 1e-3  # float32; a leak through attention is a hundred times larger


def model_checks(run: RunConfig, sample: Sample, folder: Path) -> Sequence[Check]:
    accumulated = partial(accumulated_equals_whole, run, sample, folder)
    return [
        Check("no document sees another", partial(no_document_sees_another, run, sample)),
        Check("packing keeps the loss", partial(packing_keeps_the_loss, run, sample)),
        Check("accumulation equals the whole batch", accumulated),
    ]


def no_document_sees_another(run: RunConfig, sample: Sample) -> str:
    """Checks that changing the first document of a row changes nothing in the others."""
    row, model = _packed_row(sample), _small(run, sample)
    changed = {name: values.copy() for name, values in row.items()}
    first = row[SEGMENT_IDS] == 1
    changed[INPUT_IDS][first] = (row[INPUT_IDS][first] + 1) % model.config.vocab_size
    before, after = (np.asarray(_hidden(model, one), np.float32) for one in (row, changed))
    apart = np.abs(before - after).max(-1) * ~first * (row[SEGMENT_IDS] > 0)
    if apart.max() > CLOSE * np.abs(before).max():
        at, slot = map(int, np.unravel_index(apart.argmax(), apart.shape))
        raise Failed(
            f"slot {slot}, of document {row[SEGMENT_IDS][at, slot]} of a row, changes by "
            f"{apart.max():.3g} when the tokens of document 1 change"
        )
    return f"{int(row[SEGMENT_IDS].max())} documents of a row"


def packing_keeps_the_loss(run: RunConfig, sample: Sample) -> str:
    """Checks that the loss of a packed row is the sum of the losses of its separate documents."""
    row, model = _packed_row(sample), _small(run, sample)
    whole, alone = _loss(model, row), 0.0
    for number in range(1, int(row[SEGMENT_IDS].max()) + 1):
        alone += _loss(model, _alone(row, number))
    if abs(whole - alone) > CLOSE * abs(alone):
        raise Failed(f"the loss of a row is {whole:.6g}, and {alone:.6g} for its documents alone")
    return f"a loss of {whole:.4g} both ways"


def accumulated_equals_whole(run: RunConfig, sample: Sample, folder: Path) -> str:
    """Checks that a step over a batch and one over its halves have equal loss and gradient norm."""
    batch = sample.batches[0]
    if LABELS not in batch or len(batch[INPUT_IDS]) % 2:
        raise Skipped("it needs batches of labels with an even number of rows")
    model, found = _small(run, sample), []
    for pieces in (1, 2):
        config = TrainingConfig(
            output_dir=folder / f"in{pieces}",
            steps=1,
            accumulate_steps=pieces,
            optimizer=OptimizerConfig(learning_rate=0.01, warmup_steps=0),
            checkpoint=CheckpointConfig(every=None),
            seed=1,
        )
        # one device, as the halves may have fewer rows than there are devices
        mesh = make_mesh(devices=jax.local_devices()[:1])
        made = partial(Decoder, model.config)
        last = Trainer(made, config, _OneBatch(batch), mesh=mesh).run().last
        found.append({name: float(last[name]) for name in ("loss", "grad_norm")})
    for name, value in found[0].items():
        if abs(value - found[1][name]) > CLOSE * abs(value):
            raise Failed(f"{name} is {value:.6g}, and {found[1][name]:.6g} in two micro-batches")
    return f"a gradient of norm {found[0]['grad_norm']:.4g} both ways"


class _OneBatch:
    """A loader that yields the same batch forever."""

    def __init__(self, batch: Batch) -> None:
        self._batch, self.batch_size = batch, len(batch[INPUT_IDS])

    def __iter__(self) -> Iterator[Batch]:
        while True:
            yield dict(self._batch)

    def __len__(self) -> int:
        raise TypeError("it never ends")

    def state(self) -> Json:
        return {}

    def restore(self, state: Json) -> None:
        """Does nothing: every batch is the same."""


def _small(run: RunConfig, sample: Sample) -> Decoder:
    """Returns a float32 model with the run's options, fewer layers and narrower MLPs."""
    usual = run.model if isinstance(run.model, ModelConfig) else ModelConfig()
    vocabulary = usual.vocab_size or 1 + max(int(one[INPUT_IDS].max()) for one in sample.batches)
    config = dataclasses.replace(
        usual,
        vocab_size=vocabulary,
        num_layers=min(usual.num_layers, LAYERS),
        intermediate_size=min(usual.intermediate_size, INNER),
        dtype="float32",
        param_dtype="float32",
    )
    return Decoder(config, nnx.Rngs(1))


def _packed_row(sample: Sample) -> dict[str, np.ndarray]:
    """Returns the row with the most documents, cut to SLOTS: [1, S] arrays."""
    best: dict[str, np.ndarray] = {}
    for batch in sample.batches:
        if SEGMENT_IDS not in batch or LABELS not in batch:
            raise Skipped("rows are not packed")
        row = int(np.asarray(batch[SEGMENT_IDS]).max(1).argmax())
        names = (INPUT_IDS, LABELS, SEGMENT_IDS, POSITION_IDS)
        found = {name: np.array(batch[name][row : row + 1, :SLOTS]) for name in names}
        if not best or found[SEGMENT_IDS].max() > best[SEGMENT_IDS].max():
            best = found
    best[LABELS][:, -1] = IGNORE
    if best[SEGMENT_IDS].max() < 2:
        raise Skipped("no row of the sample holds two documents")
    return best


def _alone(row: dict[str, np.ndarray], number: int) -> dict[str, np.ndarray]:
    """Returns document `number` of a row at the start of a separate row."""
    of_it = np.flatnonzero(row[SEGMENT_IDS][0] == number)
    found = {name: np.zeros_like(values) for name, values in row.items()}
    found[LABELS][:] = IGNORE
    for name, values in row.items():
        found[name][0, : len(of_it)] = 1 if name == SEGMENT_IDS else values[0, of_it]
    return found


def _hidden(model: Decoder, row: dict[str, np.ndarray]) -> jax.Array:
    return model.hidden(*(jnp.asarray(row[c]) for c in (INPUT_IDS, SEGMENT_IDS, POSITION_IDS)))


def _loss(model: Decoder, row: dict[str, np.ndarray]) -> float:
    return float(loss_sums(model, {name: jnp.asarray(row[name]) for name in row}).loss_sum)
