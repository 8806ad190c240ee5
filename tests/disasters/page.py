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

`nox -s disasters` does to easypipe what machines do to programs. Each job is struck at every file operation, in {len(HOWS)} ways: {", ".join(HOWS)}. Then it ends
well, or with an error of easypipe's, or is dead; run again it ends well, the folder holds what the undisturbed job made, byte for byte where no times are kept,
and nothing else. *Power lost* takes from each file what was written behind its last sync, and takes away new names, with all below them, whose folder was not synced since. The normal run
of the tests tries a few points of each job.

It needs Linux and a C compiler: a small library counts the calls of libc that change files, of all threads. Calls that go past it are not struck: writes
to memory that is mapped, and the renaming of `model.safetensors` within an export that has no name yet.

*First* and *second of two*, *third of four processes* are runs of `jax.distributed`, of which one process is struck; the others are ended 5 s after it, as those do that start
such runs. A worker of Ray is killed at the steps of its commits by `tests/executors/test_ray.py` (at all 16 on 2026-11-27: none came to anything else). `EASYPIPE_PATIENCE_S` is how long a job may take, 120 s without it.

To try your own machine, clone the repository and let the jobs run on the file system that yours run on: `TMPDIR=/mnt/shared nox -s disasters`. For your own config
and data there is [`easypipe doctor`](doctor.md), which kills and resumes on them, and needs neither a clone nor a compiler.

`python tests/disasters/page.py` writes the tables of this page.

## A server that fails

5 % of the requests fail (429, 500, 503, a reset, half of the bytes, a page in place of the file) and 1 % are never answered, after 50 ms each, eight at a time:
`python tests/disasters/unreliable.py 800` prepares 800 files from such a server and from one that is well, and compares the caches byte for byte. On 2026-11-27, on
two busy cores, with 1,000 files: 3,210 requests, 163 failed, 24 unanswered: 32.0 s, where all is well 22.0 s (1.45 times); the cache is the same. The suite prepares 80 files so.

## Several processes

2 to 8 processes prepare, save, read and clear one cache at the same time, in an order drawn by a seed, and a quarter of them is killed at some file operation. Each
ends well, or with an error of easypipe's, or is dead; one that comes after them makes what an undisturbed one makes, and nothing else is left. Of several trainers in
one run folder, one trains. The suite tries three seeds; `nox -s disasters` 200 (all tried on 2026-11-27): none came to anything else.

## Minutes on end

`nox -s soak` lets a cached and a streaming loader run for 30 minutes (`-- MINUTES`), with pauses, restores and epochs. Every batch is the one that the plan has at its
number; anonymous memory grows by 1 % at most after the first sixth, threads and handles stay as many. On 2026-11-27, 30 minutes: 109,808 batches, 1,892 restores, +0.06 %, 6 threads, 10 handles.

## Much of everything

`python tests/disasters/load.py` prepares and loads much in a process of its own, and some text with little memory. On two cores with a load of 18: 2,000 datasets
of one row are prepared in 18.7 s (2026-11-27, with a type check beside it; 246 MB of anonymous memory at most),
a document of 50 M tokens in 13.3 s (1,019 MB), 10 M empty rows in 17.4 s (448 MB); a line of 3 GB is refused after 10 s, by its file and row (a record has 1 GiB at most).
Many files take as much time for each: 3,000 of one row 12.0 s, 9,000 33.6 s, in memory at a load of 17, 3 ms of processor time a file; 100,000 take 447 s of processor time (2026-11-27, 1,261 MB at most), and their tokens are those of plain `tokenizers`.
60 MB of text with `ulimit -v` 50 and 100 MB above what the process has are refused (memory that cannot be mapped, threads that do not start); up to 200 MB a library may end
it where it asks for memory in vain (SIGABRT, seen at 50 and 200); with 400 MB it is done. In a group of the kernel's with 50 and 100 MB more the kernel ends it (SIGKILL), with 200 MB it
is done. After each, the same without a limit ends well.

## File operations

*Killed* is how many operations were the last one of the process, which was killed or lost power there; *failing* is how many failed, in one of the other ways. *Points* are
operations times ways. Operations of one kind, on files of one kind, made by the same lines of easypipe, are one *class*: those are struck first, one of each, then each operation
once killed and once failing, then each class in each way (`--once` leaves that out). Where threads or processes race, the n-th operation of a struck run may be another one than the n-th that was listed. *Wrong* is what the last code still answered badly.

| job | operations | of them | killed | failing | classes | points | dead, refused, well | wrong |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""
DAMAGE = """
## Damage

What the next reader does of a file that was damaged. *Made again* means that it stands there as it was, and the result is the same.

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
        came = [one.came for one in cells] + ["there is none"] * (len(ways) - len(cells))
        lines.append(f"| {kind.what} | {kind.reader} | {' | '.join(came)} |")
        if kind.unread:
            notes.append(f"- {kind.what}: {kind.unread}.")
    return [*lines, "", "Not noticed, because:", "", *notes]


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="easypipe-disasters-") as name:
        folder = Path(name).resolve()
        with Interposed(folder, arrays=True) as interposed:
            parts = [*operations(), DAMAGE, *damage(interposed, folder)]
    PAGE.write_text(HEAD + "\n".join(parts).replace("\n\n\n", "\n\n") + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
