"""Held-out loss, weighted by tokens."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from easypipe.core.errors import ConfigError, TrainError
from easypipe.core.protocols import BatchLoader
from easypipe.train.metrics.log import perplexity
from easypipe.train.parallel.mesh import batch_shards, check_batch_size, place_batch
from easypipe.train.state import TrainState
from easypipe.train.step import EvalStep


class HeldOut:
    """A loader that is read from where it stood when the run began, every time."""

    def __init__(self, name: str, loader: BatchLoader, *, max_batches: int | None) -> None:
        """Raises ConfigError for a loader that never ends, where `max_batches` does not end it."""
        self.name, self.max_batches = name, max_batches
        self.loader, self._start = loader, loader.state()
        if max_batches is None:
            try:
                len(loader)
            except TypeError:
                raise ConfigError(
                    at="train.eval_batches",
                    problem=f"held-out loader {name!r} never ends",
                    fix="Say how many of its batches to look at.",
                ) from None

    def check(self, mesh: Mesh) -> None:
        """Raises PlacementError where the loader's batches do not divide by the mesh."""
        check_batch_size(self.loader.batch_size, mesh, at=f"eval.{self.name}.batch_size")

    def evaluate(
        self, step: EvalStep, state: TrainState, mesh: Mesh, heard: Callable[[int], None]
    ) -> dict[str, Any]:
        """loss and nll (nats a token, over all targets of all batches, the short last one
        included), ppl, what the loss tells besides, and num_targets. nll and ppl are None of a loss
        that gives no nll.

        heard: called with the number of batches seen. Raises TrainError where nothing is a target.
        """
        self.loader.restore(self._start)
        rows = -(-self.loader.batch_size // batch_shards(mesh)) * batch_shards(mesh)
        sums = []
        for seen, batch in enumerate(
            itertools.islice(iter(self.loader), self.max_batches), start=1
        ):
            sums.append(step(state.params, state.rest, place_batch(batch, mesh, rows=rows)))
            if seen > 2:
                # batches in flight hold memory: two are enough to keep the device busy
                jax.block_until_ready(sums[-3])
            heard(seen)
        outs = jax.device_get(sums)
        num_targets = sum(int(out.num_targets) for out in outs)
        if num_targets == 0:
            raise TrainError(
                at=f"eval.{self.name}",
                problem=f"no label to predict in {len(outs)} batches",
                fix="Look at its loss_mask and its length.",
            )
        loss = math.fsum(float(out.loss_sum) for out in outs) / num_targets
        nll = math.fsum(float(out.nll_sum) for out in outs) / num_targets
        if not math.isfinite(loss):
            raise TrainError(
                at=f"eval.{self.name}",
                problem=f"the held-out loss is {loss}",
                fix="Look for labels outside the vocabulary.",
            )
        more = {
            name: math.fsum(float(out.more[name]) for out in outs) / num_targets
            for name in outs[0].more
        }
        told = nll if math.isfinite(nll) else None
        return {
            "loss": loss,
            "nll": told,
            "ppl": perplexity(nll),
            **more,
            "num_targets": num_targets,
        }


def held_out(evals: Mapping[str, BatchLoader], *, max_batches: int | None) -> tuple[HeldOut, ...]:
    return tuple(HeldOut(name, loader, max_batches=max_batches) for name, loader in evals.items())
