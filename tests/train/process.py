"""Run by test_processes.py as one of several processes: `process.py FOLDER JOBS...`, where a job is
a line of JSON:

{"name", "mesh", "steps", "every", "signal": [process, step] or null, "apart": by how many steps
each process has more than the one before}. They train the same model, one job after the other; the exit code is that of the last one. VARIABLES of
train/parallel/distributed.py say who the others are.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import jax
from jax.sharding import NamedSharding, PartitionSpec

from easypipe.train import initialize
from easypipe.train.config import CheckpointConfig
from easypipe.train.parallel.mesh import TOKEN_AXES, make_mesh
from easypipe.train.signals import Interrupted
from easypipe.train.trainer import Trainer
from train.runs import Arithmetic, Tiny, settings


class Placed(Arithmetic):
    """Batches that lie on the mesh already, as easypipe's loader makes them: each process has the
    rows of its own devices.
    """

    def __init__(self, mesh, *arguments, **options) -> None:
        super().__init__(*arguments, **options)
        self.mesh = mesh

    def __iter__(self):
        sharding = NamedSharding(self.mesh, PartitionSpec(*TOKEN_AXES))
        for batch in super().__iter__():
            yield {
                name: jax.make_array_from_callback(v.shape, sharding, v.__getitem__)
                for name, v in batch.items()
            }


def run(folder: Path, job: dict) -> int:
    mesh = make_mesh(job["mesh"])
    config = settings(
        folder / job["name"],
        steps=job["steps"] + job.get("apart", 0) * jax.process_index(),
        checkpoint=CheckpointConfig(every=job["every"]),
        mesh=job["mesh"],
    )

    def listener(event) -> None:
        if event.kind == "step" and job.get("signal") == [jax.process_index(), event.step]:
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        Trainer(
            Tiny,
            config,
            Placed(mesh),
            {"held": Placed(mesh, 2, seed=7)},
            mesh=mesh,
            listener=listener,
        ).run()
    except Interrupted as stopped:
        print(stopped, file=sys.stderr, flush=True)
        return stopped.exit_code
    return 0


if __name__ == "__main__":
    initialize()
    code = 0
    for job in map(json.loads, sys.argv[2:]):
        code = run(Path(sys.argv[1]), job)
    grid = make_mesh("hybrid").devices[:, :, 0, 0]
    print(json.dumps([[device.process_index for device in row] for row in grid]))
    sys.exit(code)
