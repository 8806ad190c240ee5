"""Writes docs/disasters.md: the file operations that jobs are struck at, and what came of damage.

python tests/disasters/page.py
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["HF_HUB_OFFLINE"] = "1"

from disasters.damage import EQUAL, KINDS, PLACED, WAYS, Damaged
from disasters.interposer import Interposed
from disasters.points import HOWS
from disasters.strike import STRUCK

PAGE = Path(__file__).parents[2] / "docs" / "disasters.md"
HEAD = f"""# Disasters

`nox -s disasters` tests easypipe against failures of the machine. It strikes jobs at their file
operations, in {len(HOWS)} ways:
{", ".join(HOWS)}.
The job must then succeed (*well*), end with an easypipe error (*refused*), or be killed (*dead*).
When it runs again, it must succeed. The folder must then contain what the undisturbed job made, and
nothing else; files that store no times must be equal byte for byte. *Power lost* removes from each
file what was written after its last sync. It also removes each new name, with everything below it,
if its folder was not synced since. The normal test run tries a few points of the first three jobs.
[A table](#file-operations) says how many points were tried: every operation in every way takes too
long.

It needs Linux and a C compiler: a small library counts the libc calls, of all threads, that change
files. Operations that bypass these calls are not struck: writes to mapped memory, and the renaming
of `model.safetensors` within an export that does not have its final name yet.

*First of two*, *second of two* and *third of four processes* are `jax.distributed` runs in which
one process is struck. The others are killed 5 s later, as launchers of such runs do.
`tests/executors/test_ray.py` kills a Ray worker at the steps of its commits (all 16 were tried on
2026-11-27, and none changed the result). `EASYPIPE_PATIENCE_S` sets how long a job may take (120 s
by default).

To test your own machine, clone the repository and run the jobs on the file system that your own
jobs use: `TMPDIR=/mnt/shared nox -s disasters`. To test your own config and data, use
[`easypipe doctor`](doctor.md). It kills and resumes runs of them, and needs neither a clone nor a
compiler.

`python tests/disasters/page.py` writes the tables of this page.

## A server that fails

In this test, 5 % of the requests fail (429, 500, 503, a reset, half of the bytes, or an HTML page
instead of the file) and 1 % are never answered. Each answer takes 50 ms, and eight requests run at
a time. `python tests/disasters/unreliable.py 800` prepares 800 files from such a server and from a
healthy one, and compares the caches byte for byte. On 2026-11-27, on two busy cores and with 1,000
files, 163 of 3,210 requests failed and 24 were not answered. Preparing took 32.0 s, and 22.0 s from
the healthy server (1.45 times as long); the caches were equal. The test suite prepares 80 files in
this way.

## Several processes

2 to 8 processes prepare, save, read and clear one cache at the same time, in an order drawn from a
seed. A quarter of them are killed at some file operation; the others must succeed or end with an
easypipe error. A process that runs alone afterwards must make what an undisturbed one makes, and
nothing else may be left. If several trainers start in one run folder, exactly one trains. The test
suite tries three seeds; `nox -s disasters` tries 200 (all of them on 2026-11-27, and none changed
the result).

## Long runs

`nox -s soak` runs a cached and a streaming loader for 30 minutes (`-- MINUTES` sets another time),
with pauses, restores and epochs. Each batch of the cached loader must be the one that the plan has
at its number. Each batch of the streaming loader must be the same whenever its number comes again.
After the first sixth of the time, anonymous memory may grow by at most 1 %, and the numbers of
threads and handles must stay the same. A run of 30 minutes on 2026-11-27 made 109,808 batches and
1,892 restores; memory grew by 0.06 %, with 6 threads and 10 handles.

## Large inputs and little memory

`python tests/disasters/load.py` prepares and loads large inputs, each in a separate process, and
some text under memory limits. On two cores with a load average of 18, 2,000 datasets of one row are
prepared in 18.7 s (2026-11-27, while a type check ran; at most 246 MB of anonymous memory). A
document of 50 M tokens takes 13.3 s (1,019 MB), and 10 M empty rows take 17.4 s (448 MB). A line of
3 GB is refused after 10 s, and the error names its file and row (a record may have at most 1 GiB).

The time per file does not grow with the number of files: 3,000 files of one row take 12.0 s, and
9,000 take 33.6 s (files in memory, load average 17, 3 ms of processor time per file). 100,000 files
take 447 s of processor time (2026-11-27, at most 1,261 MB), and their tokens are those of plain
`tokenizers`.

60 MB of text is refused if `ulimit -v` is 50 or 100 MB above the memory that the process has
(memory cannot be mapped, or threads do not start). Up to 200 MB, a library may abort the process
when an allocation fails (SIGABRT, seen at 50 and 200); with 400 MB the job succeeds. In a cgroup
with 50 or 100 MB more, the kernel kills the process (SIGKILL); with 200 MB the job succeeds. After
each of these, the same job without a limit succeeds.

## File operations

*Killed* is the number of operations at which the process was killed or lost power. *Failing* is the
number of operations that failed in one of the other ways. *Points* are operations times ways.
Operations of the same kind, on files of the same kind, that the same lines of easypipe make are one
*class*. First, one operation of each class is struck; then each operation once killed and once
failing; then each class in each way, then the other points (`--once` leaves these out). If threads
or processes race, the n-th operation of a struck run may differ from the n-th that was listed.
*Wrong* is the number of points that the latest tested code still handled badly.

| job | operations | of them | killed | failing | classes | points | dead, refused, well | wrong |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""
DAMAGE = """
## Damage

The table shows what the next reader does with a damaged file. *Made again* means that the file is
recreated as it was, and the result is the same.

"""


def operations() -> list[str]:
    lines: list[str] = []
    for name, one in json.loads(STRUCK.read_text(encoding="utf-8")).items():
        own, count = Counter(one), one["operations"]
        lines.append(
            f"| {name} | {count} | {one['of them']} | {own['killed']} of {count} | "
            f"{own['failing']} of {count} | {own['classes']} of {own['classes listed']} | "
            f"{own['struck']:,} of {count * len(HOWS):,} | "
            f"{own['dead']}, {own['refused']}, {own['well']} | {own['wrong']} |"
        )
    return lines


def damage(interposed: Interposed, folder: Path) -> list[str]:
    damaged = Damaged(interposed, folder)
    ways = [*WAYS, *PLACED, EQUAL]
    lines = [f"| file | read by | {' | '.join(ways)} |", "| --- " * (len(ways) + 2) + "|"]
    notes: list[str] = []
    for kind in KINDS:
        cells = [damaged.cell(kind, way) for way in kind.ways]
        wrong = [cell for cell in cells if cell.wrong]
        assert not wrong, wrong
        came = [one.came for one in cells] + ["not applicable"] * (len(ways) - len(cells))
        lines.append(f"| {kind.what} | {kind.reader} | {' | '.join(came)} |")
        if kind.unread:
            notes.append(f"- {kind.what}: {kind.unread}.")
    return [*lines, "", "Damage to some files is not noticed, for these reasons:", "", *notes]


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="easypipe-disasters-") as name:
        folder = Path(name).resolve()
        with Interposed(folder, arrays=True) as interposed:
            parts = [*operations(), DAMAGE, *damage(interposed, folder)]
    PAGE.write_text(HEAD + "\n".join(parts).replace("\n\n\n", "\n\n") + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
