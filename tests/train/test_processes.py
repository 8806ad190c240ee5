"""Runs of several processes, which meet by jax.distributed and gloo on this machine: four devices
in all, however many share them.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import forked
from chat_support import chat_tokenizer
from easypipe.core.errors import ConfigError
from easypipe.train.metrics.log import read_metrics
from easypipe.train.parallel.config import DistributedConfig
from easypipe.train.parallel.distributed import VARIABLES, initialize
from loader_processes import free_port
from train.runs import numbers

PROGRAM = Path(__file__).with_name("process.py")
MESH = {"data": 2, "tensor": 2}  # sums of two numbers, which are the same in any order


def start(
    count: int, folder: Path, *jobs: dict, begin: type[subprocess.Popen] = forked.Popen
) -> list[subprocess.Popen[str]]:
    return launched(count, [str(PROGRAM), str(folder), *map(json.dumps, jobs)], begin)


def launched(
    count: int, arguments: list[str], begin: type[subprocess.Popen] = forked.Popen
) -> list[subprocess.Popen[str]]:
    """Processes of Python that find each other, with four devices in all."""
    asked = os.environ.get("XLA_FLAGS", "")
    flags = f"{asked} --xla_force_host_platform_device_count={4 // count}"
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": flags,
        "PYTHONPATH": os.pathsep.join([str(PROGRAM.parents[1]), *sys.path]),
    }
    if count > 1:
        environment |= {
            "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}",
            "JAX_NUM_PROCESSES": str(count),
        }
    command = [sys.executable, *arguments]
    each = [environment | ({"JAX_PROCESS_ID": str(i)} if count > 1 else {}) for i in range(count)]
    return [
        begin(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for env in each
    ]


def finish(processes: list[subprocess.Popen[str]], code: int = 0) -> list[tuple[str, str]]:
    """What each has printed, and said beside it."""
    done = [process.communicate(timeout=240) for process in processes]
    for process, (_, said) in zip(processes, done, strict=True):
        assert process.returncode == code, said[-4000:]
    return done


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """whole: one process, 8 steps. stopped: two processes, of which one is told to stop at step 3;
    four go on with it. moved: one process goes on with it on another mesh."""
    folder = tmp_path_factory.mktemp("runs")
    job = {"steps": 8, "every": 4, "mesh": MESH}
    stopped = job | {"name": "stopped", "signal": [1, 3]}
    said = finish(start(2, folder, stopped, begin=subprocess.Popen), code=143)
    stopped = max(int(path.name) for path in (folder / "stopped" / "checkpoints").iterdir())
    shutil.copytree(folder / "stopped", folder / "moved")
    four = start(4, folder, job | {"name": "stopped"})
    finish(
        start(
            1,
            folder,
            job | {"name": "whole"},
            job | {"name": "moved", "mesh": {"fsdp": 2, "sequence": 2}},
        )
    )
    finish(four)
    return folder, said, stopped


def curve(folder: Path) -> list[dict]:
    return numbers(read_metrics(folder / "metrics.jsonl"))


def test_the_curve_is_the_same_bit_for_bit_for_one_two_and_four_processes(runs):
    folder, _, stopped = runs
    whole = curve(folder / "whole")
    assert [record["step"] for record in whole] == list(range(1, 9))
    assert "held" in whole[-1]["eval"]
    # Before the stop written by the first of two processes, behind it by the first of four.
    assert 3 <= stopped < 8
    assert [r | {"eval": None} for r in curve(folder / "stopped")] == [
        r | {"eval": None} for r in whole
    ]
    assert curve(folder / "stopped")[-1]["eval"] == whole[-1]["eval"]


def test_a_signal_to_one_process_stops_all_after_the_same_step(runs):
    _, said, stopped = runs
    for _, words in said:
        assert f"step {stopped}: stopped by SIGTERM, saved in" in words


def test_processes_with_other_options_are_refused_in_all_of_them(tmp_path):
    """They trained together, each its own half of a batch."""
    job = {"name": "apart", "mesh": MESH, "steps": 4, "every": 4, "apart": 1}
    for _, said in finish(start(2, tmp_path, job, begin=subprocess.Popen), code=2):
        assert (
            "train: the processes train different runs: train.steps: 5 in process 1, 4 in" in said
        )
    assert not (tmp_path / "apart" / "metrics.jsonl").exists()


def test_hybrid_puts_data_across_processes_and_fsdp_within(runs):
    _, said, _ = runs
    for out, _ in said:
        assert json.loads(out.splitlines()[-1]) == [[0, 0], [1, 1]], (
            "which process's devices lie along data, and along fsdp"
        )


def test_a_run_goes_on_with_other_processes_on_another_mesh(runs):
    folder, _, _ = runs
    for ours, theirs in zip(curve(folder / "moved"), curve(folder / "whole"), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
    assert curve(folder / "moved")[-1]["eval"]["held"]["loss"] == pytest.approx(
        curve(folder / "whole")[-1]["eval"]["held"]["loss"], rel=1e-5
    )


ALONE = """
from easypipe.core.errors import EasypipeError
from easypipe.train import initialize
from easypipe.train.parallel.config import DistributedConfig
import sys, jax
if sys.argv[2] == "late":
    jax.devices()
try:
    initialize(DistributedConfig(coordinator_address=sys.argv[1], num_processes=2, process_id=int(sys.argv[3]), timeout=1))
except EasypipeError as error:
    print(type(error).__name__, error)
"""


def test_who_does_not_meet_the_others_says_so_in_time():
    address, other = (f"127.0.0.1:{free_port()}" for _ in range(2))
    cases = [(address, "early", "0"), (other, "early", "1"), (other, "late", "1")]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    started = [
        forked.Popen(
            [sys.executable, "-c", ALONE, *case],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for case in cases
    ]
    first, second, late = (process.communicate(timeout=120)[0] for process in started)
    assert first.startswith(
        "StallError train.distributed: process 0 of 2 could not connect to the other processes within 1 s at "
        f"{address}. See that all"
    )
    assert second.startswith(
        "StallError train.distributed: process 1 of 2 could not connect to the other processes within 1 s at "
        f"{other}."
    )
    assert late.startswith(
        "ConfigError train.distributed: cannot be joined to other processes: JAX has made devices "
        "already. Call easypipe."
    )


ASKED = """
import dataclasses, shutil, sys
from pathlib import Path
import jax
from easypipe.run import train
from easypipe.train import initialize
from easypipe.train.metrics.log import read_metrics
from train.test_preference import told_run
initialize()
folder, cache = Path(sys.argv[1]), Path(sys.argv[1], f"cache{jax.process_index()}")
for name in ("asked", "half"):
    run = told_run(folder, name, reference="cached", tokenizer=sys.argv[2])
    load = dataclasses.replace(run.data.load, batch_size=4)
    data = dataclasses.replace(run.data, cache_dir=cache, load=load)
    train(dataclasses.replace(run, data=data))
    (kept,) = (cache / "reference").iterdir()
    if name == "asked" and jax.process_index() == 1:
        kept.unlink()
"""


def test_hosts_with_caches_of_their_own_ask_a_reference_together(tmp_path):
    finish(launched(2, ["-c", ASKED, str(tmp_path), chat_tokenizer()]))
    asked, half = (
        [line["loss"] for line in read_metrics(tmp_path / name / "metrics.jsonl")]
        for name in ("asked", "half")
    )
    assert asked == half
    assert len(asked) == 4


MET = """
import jax
from easypipe.train import initialize
from easypipe.train.parallel.distributed import shared_seed
initialize()
print(jax.process_index(), jax.process_count(), shared_seed())
"""


def _slurm(process: int, nodes: str) -> dict[str, str]:
    """What `srun` tells a task; jax takes the coordinator's port from the job's number, here one
    that is free.
    """
    job = next(
        number
        for number in range(os.getpid(), os.getpid() + 4096)
        if _is_free(number % 4096 + 61440)
    )
    told = {
        "SLURM_JOB_ID": job,
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_NTASKS": 2,
        "SLURM_PROCID": process,
        "SLURM_LOCALID": process,
    }
    return {name: str(value) for name, value in told.items()}


def _openmpi(process: int) -> dict[str, str]:
    """What `mpirun` tells a rank; the port follows from the first number of the address."""
    job = next(
        number
        for number in range(os.getpid() + 2048, os.getpid() + 6144)
        if _is_free(number % 4096 + 61440)
    )
    uri = f"{job * 4096}.0;tcp://127.0.0.1:34911"
    ranks = {
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_RANK": str(process),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(process),
    }
    return {"OMPI_MCA_orte_hnp_uri": uri, **ranks}


def _tpu_pod(process: int) -> dict[str, str]:
    """What GKE tells a worker of a TPU slice, on a machine that jax is made to take for one."""
    slices = {
        "MEGASCALE_COORDINATOR_ADDRESS": "127.0.0.1",
        "MEGASCALE_NUM_SLICES": "1",
        "MEGASCALE_SLICE_ID": "0",
    }
    hosts = {
        "TPU_WORKER_HOSTNAMES": "127.0.0.1,127.0.0.1",
        "TPU_WORKER_ID": str(process),
        "TPU_SKIP_MDS_QUERY": "1",
    }
    return {"JAX_FORCE_TPU_INIT": "1", "JAX_COORDINATOR_PORT": str(_PORT), **slices, **hosts}


_PORT = free_port()


def _is_free(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) != 0


@pytest.mark.parametrize(
    ("scheduler", "told"),
    [
        ("slurm", lambda i: _slurm(i, "127.0.0.1")),
        ("slurm, several nodes", lambda i: _slurm(i, "localhost,other")),
        ("open mpi", _openmpi),
        ("tpu pod", _tpu_pod),
    ],
)
def test_processes_that_a_scheduler_has_started_find_each_other(scheduler, told):
    others = ("SLURM_", "OMPI_", "JAX_", "KUBERNETES_", "TPU_")
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(others)
    } | {"JAX_PLATFORMS": "cpu"}
    each = [environment | told(i) for i in range(2)]
    command = [sys.executable, "-c", MET]
    # jax takes a machine for one with TPUs while it is imported
    begin = subprocess.Popen if scheduler == "tpu pod" else forked.Popen
    done = finish(
        [
            begin(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for env in each
        ]
    )
    (first, count, seed), (second, _, other) = (out.splitlines()[-1].split() for out, _ in done)
    assert (first, second, count) == ("0", "1", "2")
    assert seed == other, "they have spoken with each other"


LOST = """
import os, sys, time
from easypipe.train import initialize
from easypipe.train.parallel.config import DistributedConfig
initialize(DistributedConfig(coordinator_address=sys.argv[1], num_processes=2, process_id=int(sys.argv[2]), heartbeat=5))
if sys.argv[2] == "1":
    os._exit(1)
time.sleep(90)
"""


def test_a_lost_process_ends_the_others_after_its_heartbeats():
    address, environment, began = (
        f"127.0.0.1:{free_port()}",
        os.environ | {"JAX_PLATFORMS": "cpu"},
        time.monotonic(),
    )
    command = [sys.executable, "-c", LOST, address]
    started = [
        forked.Popen(
            [*command, str(i)], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        for i in range(2)
    ]
    errors = [process.communicate(timeout=120)[1] for process in started]
    assert b"heartbeat" in errors[0]
    assert started[0].returncode not in (0, None)
    assert time.monotonic() - began < 80, "it did not sleep to its end"


FAILS = """
import logging, sys
from easypipe.cli import main
from easypipe.core.errors import StorageError
from easypipe.train import initialize
from easypipe.train.parallel.config import DistributedConfig
from jax.experimental import multihost_utils
logging.basicConfig(format="%(message)s")
_, address, rank, fails, how = sys.argv
initialize(DistributedConfig(coordinator_address=address, num_processes=2, process_id=int(rank)))
if rank == fails:
    if how == "command":
        sys.exit(main(["train", "nowhere.yaml"]))
    raise ValueError("mine alone") if how == "any" else StorageError(at="x", problem="mine alone")
multihost_utils.sync_global_devices("where the other one never comes")
"""


@pytest.mark.parametrize(
    ("fails", "how", "code", "says"),
    [
        (1, "any", 1, "ValueError: mine alone"),
        (0, "ours", 2, "StorageError: x: mine alone"),
        (1, "command", 2, "easypipe: nowhere.yaml: "),
    ],
)
def test_an_error_in_one_process_ends_all_at_once_and_is_said_in_all(fails, how, code, says):
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", FAILS, f"127.0.0.1:{free_port()}"]
    started = [
        forked.Popen(
            [*command, str(i), str(fails), how], env=environment, stderr=subprocess.PIPE, text=True
        )
        for i in range(2)
    ]
    said = [process.communicate(timeout=90)[1] for process in started]  # jax would wait 300 s
    assert [process.returncode for process in started] == [code, code], said
    assert says in said[fails]
    reason = says.partition(": ")[2]
    assert f"process {fails} has failed: {reason}" in said[1 - fails]
    assert "has failed" not in said[fails]


KILLED = """
import os, signal, sys, time
from easypipe.cli import app, main
from easypipe.train import initialize
from easypipe.train.parallel.config import DistributedConfig
from jax.experimental import multihost_utils
_, address, rank = sys.argv
initialize(DistributedConfig(coordinator_address=address, num_processes=2, process_id=int(rank)))
def command(*_, **__):
    for i in range(99):
        multihost_utils.sync_global_devices(str(i))
        if rank == "1" and i == 3:
            os.kill(os.getpid(), signal.SIGKILL)
app.app = command
sys.exit(main([]))
"""


def test_the_command_line_says_that_another_process_was_lost():
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", KILLED, f"127.0.0.1:{free_port()}"]
    left, _ = [
        forked.Popen([*command, str(i)], env=environment, stderr=subprocess.PIPE, text=True)
        for i in range(2)
    ]
    said = left.communicate(timeout=90)[1]
    assert (left.returncode, "a bug in easypipe" in said) == (1, False), said
    assert "another process of the run has ended or cannot be reached: see what it" in said


STOPS = """
import sys, time
from easypipe.train import initialize
from easypipe.train.parallel.config import DistributedConfig
from easypipe.train.signals import Interrupted
_, address, rank = sys.argv
initialize(DistributedConfig(coordinator_address=address, num_processes=2, process_id=int(rank)))
if rank == "0":
    time.sleep(6)  # the first has more to write
    print("all is written")
raise Interrupted(signum=15, step=3, folder="run")
"""


def test_a_stop_that_all_have_agreed_on_lets_each_finish():
    command = [sys.executable, "-c", STOPS, f"127.0.0.1:{free_port()}"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    started = [
        forked.Popen(
            [*command, str(i)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    (first, said), _ = (process.communicate(timeout=90) for process in started)
    assert first == "all is written\n", said
    assert "stopped by SIGTERM" in said


@pytest.fixture
def alone(monkeypatch):
    for name in (
        *VARIABLES.values(),
        "SLURM_NTASKS",
        "OMPI_COMM_WORLD_SIZE",
        "JOB_COMPLETION_INDEX",
    ):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_where_nothing_speaks_of_other_processes_nothing_is_done(alone):
    assert initialize() is False
    for name in ("SLURM_NTASKS", "SLURM_PROCID", "OMPI_COMM_WORLD_SIZE"):
        alone.setenv(name, "0" if name == "SLURM_PROCID" else "1")
    alone.setenv("SLURM_STEP_NODELIST", "node1")
    assert initialize() is False  # one task, whoever started it
    alone.setenv("SLURM_NTASKS", "2")
    alone.delenv("SLURM_STEP_NODELIST")
    assert initialize() is False  # the script of a job, which no `srun` started
    alone.setenv("JAX_NUM_PROCESSES", "2")
    assert initialize(DistributedConfig(enabled=False)) is False


@pytest.mark.parametrize(
    ("given", "variables", "message"),
    [
        (
            {"num_processes": 2},
            {},
            "train.distributed.coordinator_address: not given, though num_processes is. Set it, or "
            "JAX_COORDINATOR",
        ),
        ({}, {"JAX_NUM_PROCESSES": "two"}, "JAX_NUM_PROCESSES: 'two' is not a number"),
        (
            {"coordinator_address": "a:1", "num_processes": 2},
            {"JAX_PROCESS_ID": "2"},
            "train.distributed.process_id: 2 is not from 0 to 1. Number the processes from 0.",
        ),
        (  # what is configured wins
            {"coordinator_address": "a:1", "num_processes": 2},
            {
                "JAX_COORDINATOR_ADDRESS": "no port",
                "JAX_NUM_PROCESSES": "many",
                "JAX_PROCESS_ID": "5",
            },
            "train.distributed.process_id: 5 is not from 0 to 1. Number the processes from 0.",
        ),
        (
            {},
            {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"},
            "train.distributed: an indexed Kubernetes job, which jax cannot query",
        ),
    ],
)
def test_a_description_that_is_not_whole_is_refused(alone, given, variables, message):
    for name, value in variables.items():
        alone.setenv(name, value)
    alone.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError) as error:
        initialize(DistributedConfig(**given))
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"coordinator_address": "host"},
            "coordinator_address: 'host' has no port. Write it as \"host:port\".",
        ),
        (
            {"coordinator_address": "1234"},
            "coordinator_address: '1234' has no host. Write it as \"host:port\".",
        ),
        (
            {"coordinator_address": "host:65536"},
            "coordinator_address: 'host:65536' has no port. Write it as \"host:port\".",
        ),
        ({"num_processes": 0}, "num_processes: 0 is too small. Give at least 1."),
        ({"timeout": 0}, "timeout: 0 is too small. Give at least 1."),
        ({"process_id": -1}, "process_id: -1 is not from 0 up."),
        (
            {"enabled": False, "process_id": 1},
            "enabled: false, but the processes are described",
        ),
    ],
)
def test_bad_values_are_refused(values, message):
    with pytest.raises(ConfigError) as error:
        DistributedConfig(**values)
    assert str(error.value).startswith(message)
