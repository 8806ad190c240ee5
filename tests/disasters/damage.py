"""Damage to every kind of file that easypipe writes: who reads it next finds it, makes it again, or
names it.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from disasters.interposer import BARE, TOO_LONG, Interposed, Order, Outcome
from disasters.jobs import READERS, write_inputs
from disasters.points import unmeasured

NOISE = bytes((i * 197 + i // 7 * 31) % 251 for i in range(4000))


def _flip(data: bytes, _: bytes) -> bytes:
    at = len(data) // 2
    return data[:at] + bytes((data[at] ^ 0x55,)) + data[at + 1 :] if data else b"\x55"


# What becomes of the bytes of a file, given those of another of its kind; None: it is deleted.
WAYS: Mapping[str, Callable[[bytes, bytes], bytes | None]] = {
    "a bit flipped": _flip,
    "cut": lambda data, _: data[: len(data) // 2],
    "cut at a line": lambda data, _: data[: data.rfind(b"\n", 0, len(data) * 3 // 4) + 1],
    "zeros": lambda data, _: bytes(len(data)),
    "lengthened": lambda data, _: data + NOISE[:64],
    "another one's": lambda _, other: other,
    "deleted": lambda _, __: None,
    "of another shape": lambda _, __: b"[1]\n",
}
# What stands in the place of a file, as nothing that can be read to its end.
PLACED: Mapping[str, Callable[[Path], object]] = {
    "a folder": Path.mkdir,
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a pipe": os.mkfifo,
}
EQUAL = "another one's, of equal shape"  # of token files: by size and counts it is the right one


@dataclass(frozen=True)
class Kind:
    """A kind of file. pattern: the first that fits is damaged. reader: the job that reads it.

    unread: why damage to it is not told, where it is not. equal: files of another text can have
    the same shape. own: easypipe opens it, not its caller.
    """

    what: str
    pattern: str
    reader: str
    unread: str = ""
    equal: bool = False
    own: bool = True

    @property
    def ways(self) -> list[str]:
        placed = PLACED if self.own else ()
        return [*WAYS, *placed, *((EQUAL,) if self.equal else ())]


BY_SIZE = (
    "a folder whose file sizes are right counts as up to date; reading the rows finds the damage"
)
BUILD = (
    "`easypipe verify --repair` needs this file, and asks for the config if the file cannot be read"
)
PICTURE = "easypipe does not read it, and draws it again at the end of a run"
KINDS = (
    Kind("manifest of a token cache", "cache/manifests/*[0-9a-f].json", "batches"),
    Kind("quarantine file", "cache/manifests/*.quarantine.jsonl", "batches"),
    Kind("tokens", "cache/tokens/*/*.arrow", "batches", equal=True),
    Kind("tokens, used again", "cache/tokens/*/*.arrow", "batches, manifests gone", equal=True),
    Kind("tokens, found by text", "cache/tokens/*/*.arrow", "batches, records gone", equal=True),
    Kind("record of a range", "cache/ranges/*/*.json", "batches, manifests gone"),
    Kind("plan", "cache/plans/*.json", "batches"),
    Kind("record of a build", "cache/configs/*.json", "batches, manifests gone", BUILD),
    Kind("index of a file", "cache/indexes/*.json", "batches"),
    Kind("proof of a tokenizer", "cache/proofs/*.json", "batches, tokens gone"),
    Kind("state of a loader", "state.json", "batches", own=False),
    Kind("saved rows", "saved/part-*.parquet", "rows of the saved folder"),
    Kind("manifest of a saved folder", "saved/_easypipe.json", "rows of the saved folder"),
    Kind("saved rows, saved again", "saved/part-*.parquet", "save again", BY_SIZE),
    Kind("card of a saved folder", "saved/_README.md", "save again", "people may edit it"),
    Kind("arrays of a checkpoint", "run/checkpoints/*/arrays/d/*", "export"),
    Kind("state in a checkpoint", "run/checkpoints/*/run/data.json", "train again"),
    Kind("checksums of a checkpoint", "run/checkpoints/*/checksums.json", "train again"),
    Kind("names of the arrays of a checkpoint", "run/checkpoints/*/arrays/_METADATA", "export"),
    Kind("index of the arrays", "run/checkpoints/*/arrays/manifest.ocdbt", "train again"),
    Kind("mark of a whole checkpoint", "run/checkpoints/*/commit_success.txt", "train again"),
    Kind("arrays of a checkpoint, trained on", "run/checkpoints/*/arrays/d/*", "train again"),
    Kind("metrics of a run", "run/metrics.jsonl", "train again"),
    Kind("configuration of a run", "run/run.yaml", "export", "people may edit it"),
    Kind("fingerprints of a run", "run/fingerprints.json", "train again"),
    Kind("restarts of a run", "run/restarts.json", "report of a run that went on"),
    Kind("ledger of a run", "run/ledger.json", "report"),
    Kind("plan of a run", "run/plan.json", "report"),
    Kind("versions of a run", "run/versions.json", "report"),
    Kind("picture of a run", "run/loss.png", "report", PICTURE),
)


@dataclass(frozen=True)
class Cell:
    """came: what came of the damage, for the table. wrong: "" where that is as it must be."""

    kind: Kind
    way: str
    came: str
    wrong: str


class Damaged:
    """Folders in which jobs went well, to be damaged one file at a time."""

    def __init__(self, interposed: Interposed, folder: Path) -> None:
        self._interposed, self._folder = interposed, folder
        self._work = folder / "work"
        self._sound: dict[str, Outcome] = {}

    def cell(self, kind: Kind, way: str) -> Cell:
        sound = self._sound_of(kind.reader)
        self._set_back(kind.reader)
        # the names of most are digests of paths that are others in every run
        [path, *others] = sorted(self._work.glob(kind.pattern), key=lambda one: one.stat().st_size)
        before, measured = path.read_bytes(), unmeasured(path)
        data: bytes | None = None
        if way == EQUAL:
            data = self._equal(before)
        elif way in WAYS:
            data = WAYS[way](before, others[-1].read_bytes() if others else NOISE)
        path.unlink() if data is None else path.write_bytes(data)
        if way in PLACED:
            PLACED[way](path)
        outcome = self._run(kind.reader)
        # a measured value that was damaged, and stands as it was left, is not made again
        again = path.is_file() and path.read_bytes() != data and unmeasured(path) == measured
        came = self._came(outcome, sound, path, again)
        wrong = "" if came in (NAMED, AGAIN, TOLD, WITHOUT) or kind.unread else came
        return Cell(kind, way, came, wrong and f"{wrong}: {outcome.said[-1500:]}")

    def _equal(self, tokens: bytes) -> bytes:
        """A token file as large as `tokens`, of the same texts in another order."""
        folder = self._folder / "turned"
        if not folder.exists():
            write_inputs(folder)
            for path in folder.glob("*.jsonl"):
                path.write_bytes(b"".join(reversed(path.read_bytes().splitlines(keepends=True))))
            self._interposed.run(Order("prepare", str(folder)))
        found = [path.read_bytes() for path in folder.glob("cache/tokens/*/*.arrow")]
        return next(one for one in found if len(one) == len(tokens) and one != tokens)

    def _came(self, outcome: Outcome, sound: Outcome, path: Path, again: bool) -> str:
        said = re.sub(r"\s", "", outcome.said)
        named = any(name in said for name in (path.name, path.parent.name, "loaderstate:"))
        if outcome.code in (BARE, TOO_LONG) or "This is a bug in easypipe" in outcome.said:
            return "no error of ours"
        if outcome.code:
            return NAMED if named else "an error that does not name it"
        if _digest(outcome) != _digest(sound):
            return "believed"
        if again:
            return AGAIN
        if not path.exists():
            return WITHOUT
        return TOLD if re.search("damaged|is rebuilt|cannot", outcome.said) else UNSEEN

    def _sound_of(self, reader: str) -> Outcome:
        if reader not in self._sound:
            shutil.rmtree(self._work, ignore_errors=True)
            write_inputs(self._work)
            for name in READERS[reader].before:
                for job in ("prepare", name):
                    done = self._run(job)
                    assert done.code == 0, done.said
            if reader.startswith("batches"):  # which writes the state that is read from then on
                self._run("batches")
            self._work.rename(self._folder / reader)
            self._set_back(reader)
            self._sound[reader] = self._run(reader)
            assert self._sound[reader].code == 0, self._sound[reader].said
        return self._sound[reader]

    def _set_back(self, reader: str) -> None:
        shutil.rmtree(self._work, ignore_errors=True)
        shutil.copytree(self._folder / reader, self._work)

    def _run(self, job: str) -> Outcome:
        return self._interposed.run(Order(job, str(self._work)))


NAMED, AGAIN, TOLD = "an error names it", "made again", "reported, and ignored"
WITHOUT = "ignored"
UNSEEN = "not noticed"


def _digest(outcome: Outcome) -> list[str]:
    return [line for line in outcome.said.splitlines() if line.startswith("digest ")]
