"""A few of the points at which a job can be struck, and of the ways in which its files can be
damaged: `nox -s disasters` tries all of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from disasters import soak, unreliable
from disasters.damage import EQUAL, KINDS, Damaged, Kind
from disasters.interposer import ERROR_OF_OURS, Interposed, missing
from disasters.jobs import JOBS
from disasters.page import PAGE
from disasters.points import FULL, KILLED, POWER, REFUSED, Trial, spread
from disasters.together import Shared

ALL = os.environ.get("EASYPIPE_DISASTERS") == "all"
# how many points of each job are tried in the normal run, and in which ways
QUICK = {"prepare": 7, "tokenize_and_save": 2, "save": 4}
ONE_OF_EACH = (KILLED, POWER, FULL, *list(REFUSED)[:2])
LONG = "takes minutes: nox -s disasters tries it"
# by the reader that finds them, so that few folders have to be made
QUICK_KINDS = [kind for kind in KINDS if kind.reader.startswith("batches")]
CELLS = (
    [(kind, way) for kind in KINDS for way in kind.ways]
    if ALL
    else [(kind, EQUAL if kind.equal else "another one's") for kind in QUICK_KINDS]
)


@pytest.fixture(scope="module")
def interposed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Interposed]:
    if why := missing():
        pytest.skip(f"file operations are not interposed: {why}")
    with Interposed(tmp_path_factory.mktemp("interposed"), arrays=ALL) as process:
        yield process


@pytest.fixture(scope="module")
def damaged(interposed: Interposed, tmp_path_factory: pytest.TempPathFactory) -> Damaged:
    return Damaged(interposed, tmp_path_factory.mktemp("damaged"))


@pytest.mark.parametrize("job", JOBS)
def test_struck_at_any_file_operation_nothing_is_lost(
    interposed: Interposed, job: str, tmp_path: Path
) -> None:
    if job not in QUICK:
        pytest.skip(LONG)
    trial = Trial(interposed, job, tmp_path)
    for i, number in enumerate(spread(trial.operations, QUICK[job])):
        found = trial.at(number, ONE_OF_EACH[i % len(ONE_OF_EACH)])
        assert not found.wrong, found


@pytest.mark.parametrize(("kind", "way"), CELLS, ids=[f"{kind.what}, {way}" for kind, way in CELLS])
def test_damage_is_found_before_it_is_used(damaged: Damaged, kind: Kind, way: str) -> None:
    cell = damaged.cell(kind, way)
    assert not cell.wrong, cell


@pytest.fixture(scope="module")
def shared(interposed: Interposed, tmp_path_factory: pytest.TempPathFactory) -> Shared:
    return Shared(interposed, tmp_path_factory.mktemp("shared"))


@pytest.mark.parametrize("seed", range(200 if ALL else 3))
def test_processes_that_share_a_cache_leave_what_one_makes(shared: Shared, seed: int) -> None:
    processes = 2 + seed % 7 if ALL else 2 + seed
    assert shared.wrong(seed, processes) == ""


@pytest.mark.skipif(not ALL, reason=LONG)
@pytest.mark.parametrize("processes", [2, 4])
def test_one_of_several_trainers_trains(shared: Shared, processes: int) -> None:
    assert shared.trainers(processes) == [0] + [ERROR_OF_OURS] * (processes - 1)


def test_restores_and_epochs_keep_order_threads_and_handles(tmp_path: Path) -> None:
    soaked = soak.soak(0.15, tmp_path)
    assert soaked.batches > 10, soaked
    assert (soaked.first.threads, soaked.first.handles) == (
        soaked.last.threads,
        soaked.last.handles,
    ), soaked


def test_a_server_that_fails_and_stalls_changes_nothing_but_the_time(tmp_path: Path) -> None:
    """5 % of its answers fail and 1 % never come."""
    measured = unreliable.measure(800 if ALL else 80, tmp_path)
    print(measured)
    assert not measured.different, measured
    assert min(measured.failed, measured.stalled) > 0, measured
    # a few stalls of a second each weigh more in a short run
    assert measured.failing_s < 2 * measured.healthy_s + (0 if ALL else 4), measured


def test_the_page_lists_every_job_and_kind_of_file() -> None:
    """After a change of the tables: python tests/disasters/page.py."""
    rows = [
        row.removeprefix("| ").split(" | ")[0]
        for row in PAGE.read_text(encoding="utf-8").splitlines()
        if row.startswith("| ") and not row.startswith(("| job |", "| file |", "| ---"))
    ]
    assert rows == [*JOBS, *(kind.what for kind in KINDS)]
