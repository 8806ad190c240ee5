"""Fault trials: does the suite notice when the code is wrong?

    python tests/faults.py                 # puts every fault in, one after another, and runs the tests that must fail
    python tests/faults.py remote mix      # those whose name or file holds one of the words

Each fault is one change of one file, put into a copy of `src`. It dies where a test of its room fails, and lives where all pass; exit
code 1 where more than `MAY_LIVE` live. `nox -s faults` runs them all (tests/test_faults.py asserts that each still fits the code).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "easypipe"
MAY_LIVE = 0
LONGEST_S = 600  # of the tests of one fault; a fault that hangs has died


@dataclass(frozen=True)
class Fault:
    """`old`, which stands once in `file`, becomes `new`; `tests` are pytest's arguments."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def fits(self) -> bool:
        return (PACKAGE / self.file).read_text(encoding="utf-8").count(self.old) == 1


def fault(name: str, file: str, old: str, new: str, *tests: str) -> Fault:
    return Fault(name, file, old, new, tests)


FAULTS = [
    # Faults that once lived
    fault(
        "secrets of storage_options are told",
        "core/remote.py",
        "{*_secrets_of(options), *_secrets_of_url(url)}",
        "{*_secrets_of_url(url)}",
        "tests/sources/test_remote.py",
        "-k",
        "secret",
    ),
    fault(
        "secrets of signed URLs are told",
        "core/remote.py",
        "{*_secrets_of(options), *_secrets_of_url(url)}",
        "{*_secrets_of(options)}",
        "tests/sources/test_remote.py",
        "-k",
        "secret",
    ),
    fault("a committed file is not synced", "core/storage.py", "            sync(temporary)\n", "", "tests/core/test_storage.py"),
    fault("its folder is not synced", "core/storage.py", "                sync(Path(target).parent)\n", "", "tests/core/test_storage.py"),
    fault(
        "dropout is left on in evaluation",
        "train/step.py",
        "model.set_attributes(deterministic=True,",
        "model.set_attributes(",
        "tests/train/test_step.py",
        "-k",
        "dropout",
    ),
    fault(
        "a checkpoint in doubt is taken for the good one",
        "train/loop.py",
        "if calendar and not watch.in_doubt:",
        "if calendar:",
        "tests/train/test_watch.py",
    ),
    fault(
        "a row group entered in its middle gives rows from its start",
        "sources/parquet.py",
        "stream.held.slice(max(a - stream.position, 0), ",
        "stream.held.slice(0, ",
        "tests/sources/test_formats.py",
        "-k",
        "row_group or parquet",
    ),
    fault(
        "a token file with another number of documents is opened",
        "sources/cache.py",
        "if batch.num_rows != part.docs or not",
        "if not",
        "tests/sources/test_cache.py",
    ),
    fault(
        "a cache is reused when max_bad_rows is lowered",
        "stages/cache_writer.py",
        "[r.key for r in ranges], on_error, max_bad_rows)",
        "[r.key for r in ranges], on_error)",
        "tests/stages/test_tokenize.py",
        "tests/stages/test_cache_writer.py",
        "-k",
        "bad_rows or budget",
    ),
    fault(
        "a resume takes another pad token",
        "loader/rows.py",
        "for c in self._caches], eos, self.pad_token_id)",
        "for c in self._caches], eos)",
        "tests/loader/test_rows.py",
        "-k",
        "pads",
    ),
    fault(
        "a plan over fewer documents than the cache has",
        "loader/rows.py",
        "if dataset.num_docs != cache.num_docs:",
        "if dataset.num_docs > cache.num_docs:",
        "tests/loader/test_rows.py",
        "-k",
        "belong",
    ),
    fault(
        "documents of exactly seq_length weigh 1 token",
        "plan/window.py",
        "sizes[sizes > pack.seq_length] = 0",
        "sizes[sizes >= pack.seq_length] = 0",
        "tests/plan/test_windows.py",
        "-k",
        "weigh",
    ),
    fault(
        "trained turns may overlap",
        "transforms/chat_spans.py",
        'raise UnprovenError("trained turns overlap")',
        "pass",
        "tests/transforms/test_spans.py",
        "-k",
        "overlap",
    ),
    fault(
        "a namespace takes private names",
        "transforms/chat_sandbox.py",
        'if isinstance(name, str) and name.startswith("_"):',
        "if False:",
        "tests/transforms/test_chat.py",
        "-k",
        "namespace",
    ),
    fault(
        "weights are rounded down",
        "plan/mix.py",
        "(2 * part * room + total) // (2 * total)",
        "(part * room) // total",
        "tests/plan/test_mix.py",
        "-k",
        "near",
    ),
    fault(
        "a sweep removes what a living process writes",
        "core/storage.py",
        "pid.isdigit() and not _alive(int(pid))",
        "pid.isdigit()",
        "tests/core/test_storage.py",
    ),
    fault(
        "uploads to GCS have no checksum",
        "core/storage.py",
        '{"consistency": "md5"} if "gs" in fs.protocol else {}',
        "{}",
        "tests/core/test_remote_writes.py",
    ),
    fault(
        "evaluation's time counts into tokens per second",
        "train/loop.py",
        "            self._meter.restart()\n        self._write(record)",
        "        self._write(record)",
        "tests/train/test_meter.py",
    ),
    fault(
        "a checkpoint of another format is read",
        "train/checkpoint.py",
        'not isinstance(saved, dict) or saved.get("format") != FORMAT',
        "not isinstance(saved, dict)",
        "tests/train/test_run_folder.py",
        "tests/train/test_checkpoint_manager.py",
        "-k",
        "format",
    ),
    fault(
        "every shuffle block has one permutation",
        "loader/order.py",
        "fold(self._shuffle_key, block))",
        "self._shuffle_key)",
        "tests/loader/test_lengths.py",
        "tests/loader/test_loader.py",
        "-k",
        "block or shuffle",
    ),
    fault(
        "grouped batches have one order in every window",
        "loader/order.py",
        "fold(self._group_key, window))",
        "self._group_key)",
        "tests/loader/test_lengths.py",
    ),
    fault(
        "a label beyond the vocabulary meets a padding column on TPU",
        "kernels/pallas_tpu_forward.py",
        "jnp.where(labels_R1 < vocab, labels_R1, -1)",
        "labels_R1",
        "tests/kernels/test_pallas_tpu.py",
        "-k",
        "beyond",
    ),
    fault(
        "the same in the backward pass",
        "kernels/pallas_tpu_backward.py",
        "jnp.where(labels < vocab, labels, -1).astype",
        "labels.astype",
        "tests/kernels/test_pallas_tpu.py",
        "-k",
        "beyond",
    ),
    fault(
        "wrong row numbers pass verify",
        "stages/verify.py",
        "(np.diff(rows) >= 0).all())",
        "True)",
        "tests/stages/test_verify.py",
        "-k",
        "row_numbers",
    ),
    fault(
        "row numbers of another range pass verify",
        "stages/verify.py",
        "part.start <= rows[0] and rows[-1] < part.stop and",
        "",
        "tests/stages/test_verify.py",
        "-k",
        "row_numbers",
    ),
]


def dies(one: Fault, copy: Path) -> str:
    """ "dies", "lives", or what went wrong with the trial itself."""
    file = copy / "easypipe" / one.file
    whole = file.read_text(encoding="utf-8")
    file.write_text(whole.replace(one.old, one.new), encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(copy), "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1", "EASYPIPE_FAULT_TRIAL": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *one.tests]
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LONGEST_S, check=False)
    except subprocess.TimeoutExpired:
        return "dies"
    finally:
        file.write_text(whole, encoding="utf-8")
    if done.returncode in (0, 1):
        return "lives" if done.returncode == 0 else "dies"
    return f"NOT TRIED (pytest's exit code {done.returncode}): {done.stdout.strip().splitlines()[-1:]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*")
    words = parser.parse_args().words
    chosen = [one for one in FAULTS if not words or any(word in f"{one.file} {one.name}" for word in words)]
    stale = [one.name for one in chosen if not one.fits]
    if stale:
        print(f"these faults no longer fit the code: {stale}")
        return 2
    wrong = []
    with tempfile.TemporaryDirectory(prefix="easypipe-faults-") as scratch:
        copy = Path(scratch, "src")
        shutil.copytree(PACKAGE, copy / "easypipe", ignore=shutil.ignore_patterns("__pycache__"))
        for one in chosen:
            started = time.monotonic()
            found = dies(one, copy)
            wrong += [] if found == "dies" else [one]
            print(f"{found:5} {time.monotonic() - started:5.0f} s  {one.file}: {one.name}", flush=True)
    print(f"{len(chosen) - len(wrong)} of {len(chosen)} faults die")
    return int(len(wrong) > MAY_LIVE)


if __name__ == "__main__":
    sys.exit(main())
