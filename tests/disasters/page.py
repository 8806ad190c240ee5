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

`nox -s disasters` tests easypipe against failures of the machine. It *strikes* a job at one of
its file operations: the operation fails, or the job is killed or loses power there. These are the
{len(HOWS)} ways:

{", ".join(HOWS)}.

The job must then succeed (*well*), end with an easypipe error (*refused*), or be killed (*dead*).
When the job runs again, it must succeed. Its folder must then contain the same files as after an
undisturbed job, and no others; files that store no times must be equal byte for byte. *Power lost*
removes from each file what was written after its last sync. It also removes each new name, with
everything below it, from a folder that was not synced afterwards. Trying every operation in every
way takes too long. [A table](#file-operations) says for each job how many pairs of an operation and
a way (*points*) were tried. The normal test run tries a few points of the first three jobs in this
table.

The test needs Linux and a C compiler, because a small library counts the libc calls that change
files, in all threads. Operations that bypass these calls are not struck. They are writes to mapped
memory, and the renaming of `model.safetensors` in a folder of an export that does not have its
final name yet.

*First of two*, *second of two* and *third of four processes* are `jax.distributed` runs in which
one process is struck. The other processes are killed 5 s later, because launchers of such runs do
the same. `tests/executors/test_ray.py` kills a Ray worker at the steps of its commits (all 16 steps
were tried on 2026-11-27, and none changed the result). `EASYPIPE_PATIENCE_S` sets how long a job
may take (120 s by default).

To test your own machine, clone the repository and run the jobs on the file system that your own
jobs use: `TMPDIR=/mnt/shared nox -s disasters`. To test your own config and data, use
[`easypipe doctor`](doctor.md). It kills and resumes runs with your config and data, and needs no
clone and no compiler.

`python tests/disasters/page.py` writes the tables of this page.

## A server that fails

In this test, 5 % of the requests fail (429, 500, 503, a reset, half of the bytes, or an HTML page
instead of the file) and 1 % are never answered. Each answer takes 50 ms, and eight requests run at
a time. `python tests/disasters/unreliable.py 800` prepares 800 files from such a server and from a
healthy one, and compares the caches byte for byte. On 2026-11-27, on two busy cores and with 1,000
files, 163 of 3,210 requests failed and 24 were not answered. Preparing from this server took
32.0 s, which is 1.45 times as long as from the healthy server (22.0 s). The caches were equal. The
test suite prepares 80 files in this way.

## Several processes

Between 2 and 8 processes prepare, save, read and clear one cache at the same time, in an order
drawn from a seed. A quarter of them are killed at some file operation; the others must succeed or
end with an easypipe error. A process that runs alone afterwards must make the same files as an
undisturbed process, and no other files may be left. If several trainers start in one run folder,
exactly one trains. The test suite tries three seeds; `nox -s disasters` tries 200 seeds (all of
them were tried on 2026-11-27, and none changed the result).

## Long runs

`nox -s soak` runs a cached and a streaming loader for 30 minutes (`-- MINUTES` sets another time),
with pauses, restores and epochs. Each batch of the cached loader must be the batch that the plan
has at this number. When the streaming loader makes a batch with the same number again, both must be
equal. After the first sixth of the time, anonymous memory may grow by at most 1 %, and the numbers
of threads and handles must stay the same. A run of 30 minutes on 2026-11-27 made 109,808 batches
and 1,892 restores; memory grew by 0.06 %, with 6 threads and 10 handles.

## Large inputs and little memory

`python tests/disasters/load.py` prepares and loads large inputs, each in a separate process, and
some text under memory limits. On two cores with a load average of 18, 2,000 datasets of one row are
prepared in 18.7 s (2026-11-27, while a type check ran; at most 246 MB of anonymous memory). A
document of 50 M tokens takes 13.3 s (1,019 MB), and 10 M empty rows take 17.4 s (448 MB). A line of
3 GB is refused after 10 s, and the error names its file and row (a record may have at most 1 GiB).

The time per file does not grow with the number of files: 3,000 files of one row take 12.0 s, and
9,000 take 33.6 s (files in memory, load average 17, 3 ms of processor time per file). 100,000 files
take 447 s of processor time (2026-11-27, at most 1,261 MB), and their tokens equal those of plain
`tokenizers`.

A job that prepares 60 MB of text is refused if `ulimit -v` is 50 or 100 MB above the memory that
the process has, because memory cannot be mapped or threads do not start. With up to 200 MB, a
library may instead abort the process when an allocation fails (SIGABRT, seen at 50 and 200 MB).
With 400 MB the job succeeds. If the limit is that of a cgroup, the kernel kills the process with 50
or 100 MB (SIGKILL), and the job succeeds with 200 MB. After each of these failures, the same job
without a limit succeeds.

## File operations

*Killed* is the number of operations at which the process was killed or lost power. *Failing* is the
number of operations that failed in one of the other ways. A *point* is a pair of an operation and a
way. Operations form one *class* if they are of the same kind, on files of the same kind, and made
by the same lines of easypipe. The points are tried in this order: one operation of each class; each
operation once killed and once failing; each class in each way; all other points. With `--once`, the
test ends after the second of these steps. If threads or processes race, the n-th operation of a
struck run may differ from the n-th operation in the list. *Wrong* is the number of points at which
the latest tested code did not meet the requirements at the top of this page.

| job | operations | by kind | killed | failing | classes | points | dead, refused, well | wrong |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""
DAMAGE = """
## Damage

The table shows what the next reader does with a damaged file. *Made again* means that the file is
recreated as it was, and the result of the job is the same.

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
