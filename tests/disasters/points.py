"""Every file operation of a job as a point where it is killed, loses power, or is refused.

What must hold at each: the job ends well, or with an error of ours, or is dead; the same job run
again ends well; then the folder holds what the undisturbed job made, and nothing else.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import math
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from disasters.interposer import (
    BARE,
    FAIL,
    FAIL_ON,
    KILL,
    RECORD,
    TOO_LONG,
    Interposed,
    Order,
    Outcome,
)
from disasters.jobs import JOBS, write_inputs
from loader_processes import free_port

WRITES = frozenset(("write", "pwrite", "writev", "pwritev", "sendfile", "copy_file_range"))
SYNCS = frozenset(("fsync", "fdatasync"))
NAMES = frozenset(("open", "rename", "link", "mkdir"))  # these may make one
GONE = frozenset(("unlink", "rmdir"))
KILLED = "killed"
POWER = "power lost"  # killed, and whatever was not synced is gone
FULL = "disk full from here on"
REFUSED = {
    name: getattr(errno, name)
    for name in ("ENOSPC", "EIO", "EDQUOT", "EACCES", "EROFS", "EMFILE", "EXDEV", "ENOLCK", "EINTR")
}
HOWS = (KILLED, POWER, FULL, *REFUSED)
KILLS = (KILLED, POWER)
# Keys of JSON whose values are measured, or are checksums of what is.
MEASURED = frozenset(
    [
        "facts",
        "seconds",
        "xxh3_128",
        "metrics.jsonl",  # a checksum of its lines, which say how long a step took
        "megabytes_per_second",
        "tokens_per_second",
        "data_wait",
        "peak_memory",
    ]
)
# Files that hold times, or checksums of files that do.
UNEQUAL = frozenset(("_CHECKPOINT_METADATA", "checksums.json", "report.html"))
_FRAME = re.compile(r'(.*)", line (\d+) in (.*)')  # as Python's dump of a traceback writes it
# The checkpoint that goes with the save behind it: killed in between, it goes with the next save.
# Locks, which are empty: where one cannot be made, that is warned of. When a run was taken up again.
NO_RESULT = ("run/checkpoints/2/", "cache/locks/", "run/restarts.json")


@dataclass(frozen=True)
class Found:
    """What one point came to. wrong: "" where all that must hold does. group: of its operation, see
    Trial."""

    job: str
    how: str
    number: int
    operation: str
    ended: str
    wrong: str
    group: str = ""


class Trial:
    """One job in a folder that it finds again as it was, however often it is run.

    groups: of each operation, a digest of the places in easypipe that made it, its kind, and the
    kind of its file: those that are equal in these are one class.
    """

    def __init__(self, interposed: Interposed, job: str, folder: Path) -> None:
        self._interposed, self.job = interposed, job
        self._work, self._before = folder / "work", folder / f"before-{job}"
        write_inputs(self._work)
        for name in JOBS[job].before:
            self._well(self._run(name), name)
        self._work.rename(self._before)
        self._set_back()
        done = self._run(job, RECORD)
        self._well(done, job)
        self.operations = [
            (call, _named(path.removeprefix(f"{self._work}/"))) for call, path in done.operations
        ]
        self.groups = [
            hashlib.sha256(repr((call, _kind(path), frames)).encode()).hexdigest()[:12]
            for (call, path), frames in zip(self.operations, places(done.frames), strict=True)
        ]
        self._expected = contents(self._work)

    def at(self, number: int, how: str) -> Found:
        """The `number`-th file operation, from 1, as a point where the job is struck."""
        self._set_back()
        if how in REFUSED:
            outcome = self._run(self.job, FAIL, number, REFUSED[how])
        elif how == FULL:
            outcome = self._run(self.job, FAIL_ON, number, errno.ENOSPC)
        else:
            outcome = self._run(self.job, KILL, number)
            if how == POWER:
                lose_unsynced(outcome, number, self._before, self._work)
        call, path = self.operations[number - 1]
        ended = "dead" if outcome.code < 0 else ("well", "refused")[outcome.code > 0]
        wrong = self._wrong(outcome)
        group = self.groups[number - 1]
        return Found(self.job, how, number, f"{call} {path}", ended, wrong, group)

    def close(self) -> None:
        shutil.rmtree(self._before)
        shutil.rmtree(self._work)

    def _wrong(self, outcome: Outcome) -> str:
        if outcome.code == TOO_LONG:
            return "not done in EASYPIPE_PATIENCE_S"
        if outcome.code == BARE or "This is a bug in easypipe" in outcome.said:
            return f"no error of ours: {outcome.said[-1500:]}"
        again = self._run(self.job)
        if again.code == TOO_LONG:
            return "the next run: not done in EASYPIPE_PATIENCE_S"
        left = difference(self._expected, contents(self._work))
        if again.code and not (left == "" and "is there already" in again.said):
            return f"the next run fails: {again.said[-1500:]} (before: {outcome.said[-600:]})"
        return left

    def _run(self, name: str, action: int = 0, at: int = 0, code: int = 0) -> Outcome:
        """What becomes of the process that is struck."""
        job, folder = JOBS[name], str(self._work)
        struck = Order(name, folder, action, at, code)
        if job.processes == 1:
            return self._interposed.run(struck)
        told = {
            "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}",
            "JAX_NUM_PROCESSES": str(job.processes),
        }
        beside = Order(name, folder, KILL)  # at none of its operations: they are listed
        orders = [
            replace(
                struck if rank == job.struck else beside,
                environment=told | {"JAX_PROCESS_ID": str(rank)},
            )
            for rank in range(job.processes)
        ]
        every = self._interposed.together(orders, as_one=True)
        own = every.pop(job.struck)
        return replace(own, others=every)

    def _set_back(self) -> None:
        shutil.rmtree(self._work, ignore_errors=True)
        shutil.copytree(self._before, self._work)  # with the times of its files

    def _well(self, outcome: Outcome, job: str) -> None:
        assert outcome.code == 0, f"{job}, undisturbed: {outcome.said}"


def places(frames: Sequence[Sequence[str]]) -> list[list[tuple[str, str, int]]]:
    """Frames by file, function, and the place of the line among those of the function that are in
    any frame: a docstring that is changed moves all lines, and none of these.
    """
    found = [[_FRAME.fullmatch(frame) for frame in one] for one in frames]
    split = [[frame.groups() for frame in one if frame] for one in found]
    lines: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
    for file, line, name in itertools.chain.from_iterable(split):
        lines[file, name].add(int(line))
    return [
        [(file, name, sorted(lines[file, name]).index(int(line))) for file, line, name in one]
        for one in split
    ]


def spread(operations: Sequence[tuple[str, str]], count: int) -> list[int]:
    """Numbers of `count` operations, of as many kinds as they can be."""
    first = {call: i + 1 for i, (call, _) in reversed([*enumerate(operations)])}
    even = (1 + i * len(operations) // count for i in range(count))
    return [*dict.fromkeys((*first.values(), *even))][:count]


def lose_unsynced(outcome: Outcome, number: int, before: Path, folder: Path) -> None:
    """What a job that began in a copy of `before` loses of `folder` when the power goes at its
    `number`-th operation, in which a write is half done and a sync is not.

    Of a file what was written behind its last sync; a name that is new, with all below it, where
    the folder that holds it was not synced since, by this process or another one.
    """
    struck_at = outcome.times[number - 1] if number <= len(outcome.times) else math.inf
    lengths: dict[int, int] = {}  # of files, by inode: this much is on the disk
    names, kept = set[Path](), set[Path]()  # those that are on the disk are kept
    listed = zip(outcome.times, outcome.operations, outcome.files, strict=True)
    synced = (
        (when, operation, file)
        for other in outcome.others
        for when, operation, file in zip(other.times, other.operations, other.files, strict=True)
        if operation[0] in SYNCS and when < struck_at
    )
    for when, (call, name), (inode, size) in sorted((*listed, *synced)):
        path = Path(name)
        if call in SYNCS and when != struck_at:
            lengths.pop(inode, None)
            kept |= {one for one in names if one.parent == path}
            names -= kept
        elif call in WRITES:
            lengths[inode] = min(lengths.get(inode, size), size)
        elif call in GONE:
            names.discard(path)
            kept.discard(path)
        elif (
            call in NAMES and path not in kept and not (before / path.relative_to(folder)).exists()
        ):
            names.add(path)
    for path in folder.rglob("*"):
        if path.is_file() and path.stat().st_size > lengths.get(path.stat().st_ino, math.inf):
            os.truncate(path, lengths[path.stat().st_ino])
    for path in names:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def contents(folder: Path) -> dict[str, str]:
    """A digest of each file below `folder` by its name, without what is measured."""
    return dict(sorted(_contents(folder)))


def difference(expected: Mapping[str, str], found: Mapping[str, str]) -> str:
    names = [
        name for name in sorted(expected.keys() | found.keys()) if not name.startswith(NO_RESULT)
    ]
    said = [
        f"{name}: {'is missing' if name not in found else 'is left' if name not in expected else 'differs'}"
        for name in names
        if expected.get(name) != found.get(name)
    ]
    return "; ".join(said)


def _contents(folder: Path) -> Iterator[tuple[str, str]]:
    for path in folder.iterdir():
        if (path / "manifest.ocdbt").is_file():
            yield path.name, _arrays(path)
        elif path.is_dir():
            yield f"{path.name}/", ""
            yield from ((f"{path.name}/{name}", digest) for name, digest in _contents(path))
        elif path.suffix == ".png" or path.name in UNEQUAL:
            yield path.name, ""
        else:
            yield path.name, hashlib.sha256(unmeasured(path)).hexdigest()


def _arrays(folder: Path) -> str:
    """A digest of the arrays that Orbax wrote, whose files have random names and order."""
    import tensorstore

    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": f"file://{folder}"}).result()
    hasher = hashlib.sha256()
    for key in sorted(store.list().result()):
        hasher.update(key + b"\0" + store.read(key).result().value)
    return hasher.hexdigest()


def unmeasured(path: Path) -> bytes:
    """The bytes of a file without what is measured."""
    data = path.read_bytes()
    if path.suffix not in (".json", ".jsonl"):
        return data
    lines = data.splitlines() if path.suffix == ".jsonl" else [data]
    try:
        return json.dumps([_without(json.loads(line)) for line in lines]).encode()
    except ValueError:
        return data


def _without(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without(one) for key, one in value.items() if key not in MEASURED}
    return [_without(one) for one in value] if isinstance(value, list) else value


def _named(path: str) -> str:
    """Without what is another one in every run."""
    path = re.sub(r"\.tmp-\w+-[0-9a-f]{8}-", ".tmp-...-", path)
    path = re.sub(r"[0-9a-f]{32}", "...", path)
    return re.sub(r"part-[0-9a-f]{8}-", "part-...-", path)


def _kind(path: str) -> str:
    """What files that differ in numbers and digests alone have in common."""
    return re.sub(r"\b[0-9a-f]{2}/|[0-9a-f]{16,}|[0-9]+", "#", path)
