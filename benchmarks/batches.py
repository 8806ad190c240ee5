"""Processor time of a batch of 8 rows from a token cache, in this source tree, and in another where
`--other SRC` names one: in first passes, which check every block of the token files, and in warm
ones; rows of 2,048 slots, and of 128, where what a batch costs beside its tokens shows, in order
and from anywhere in 100,000.

Each tree is one process, and they take turns. Where the system allows it (Linux, as root) they run
in real time on one core while a loop that waits holds the other cores, so that nothing beside them
shares a core's caches and clock; the table says whether it did.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _common import Report, arguments, documents, one_parquet, table, tokenizer_folder

HERE = Path(__file__).resolve().parents[1] / "src"
# slots of a row, pack strategy, rows that are permuted, batches of a turn
CASES = {
    "long rows": (2048, "first_fit", None, 20_000),
    "short rows": (128, "concat", None, 20_000),
    "short rows, permuted": (128, "concat", 100_000, 20_000),
}


def serve(data: str, tokenizer: str, cache: str) -> None:
    """Answers each line of standard input, the name of a case and of a pass, by microseconds."""
    from easypipe import DatasetConfig, LoadStageConfig, PackStageConfig, Pipeline, PipelineConfig

    def loader(case: str) -> Any:
        seq_length, strategy, permuted, _ = CASES[case]
        config = PipelineConfig(
            datasets=[DatasetConfig(name="text", data_files=data)],
            default_tokenizer=tokenizer,
            seed=1,
            cache_dir=cache,
            pack=PackStageConfig(seq_length=seq_length, strategy=strategy),
            load=LoadStageConfig(batch_size=8, drop_last=False, shuffle_buffer_size=permuted),
        )
        made = Pipeline.from_config(config).source().tokenize().pack().load().build()
        len(made)  # plans the whole run
        return made

    def turn(case: str, batches: Any) -> float:
        before, count = time.process_time(), 0
        for _ in itertools.islice(batches, CASES[case][-1]):
            count += 1
        return (time.process_time() - before) / count * 1e6

    warm = {case: loader(case) for case in CASES}
    for case, batches in warm.items():
        turn(case, batches)
    print("ready", flush=True)
    for line in sys.stdin:
        case, way = json.loads(line)
        print(turn(case, loader(case) if way == "first" else warm[case]), flush=True)


@contextlib.contextmanager
def held_cores(processes: list[int]) -> Iterator[bool]:
    """Gives the last core to `processes`, in real time, and holds the others by a loop each."""
    *others, last = sorted(os.sched_getaffinity(0))
    loops: list[subprocess.Popen[bytes]] = []
    try:
        for process in processes:
            os.sched_setscheduler(process, os.SCHED_FIFO, os.sched_param(20))
            os.sched_setaffinity(process, {last})
        for core in others:
            loops.append(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            os.sched_setscheduler(loops[-1].pid, os.SCHED_FIFO, os.sched_param(10))
            os.sched_setaffinity(loops[-1].pid, {core})
        yield True
    except PermissionError:
        yield False
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--other", type=Path, help="the `src` folder of another easypipe")
    given = parser.parse_args()
    if given.serve:
        serve(*given.serve)
        return
    trees = {"easypipe": HERE} | ({"other": given.other.resolve()} if given.other else {})
    taken: dict[tuple[str, str, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        texts = documents(given.text)
        data, tokenizer = one_parquet(Path(scratch), texts), tokenizer_folder(Path(scratch), texts)
        servers = {
            name: subprocess.Popen(
                [
                    sys.executable,
                    __file__,
                    "--serve",
                    str(data),
                    str(tokenizer),
                    f"{scratch}/{name}",
                ],
                env=os.environ | {"PYTHONPATH": str(tree), "JAX_PLATFORMS": "cpu"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for name, tree in trees.items()
        }
        answers = {name: (server.stdin, server.stdout) for name, server in servers.items()}
        for name, (_, told) in answers.items():
            if told is None or told.readline().strip() != "ready":
                raise SystemExit(f"{name} ended")
        held = stack.enter_context(held_cores([server.pid for server in servers.values()]))
        for _, case, way in itertools.product(range(given.rounds), CASES, ("first", "warm")):
            for name, (asked, told) in answers.items():
                assert asked is not None
                assert told is not None
                print(json.dumps([case, way]), file=asked, flush=True)
                taken.setdefault((case, way, name), []).append(float(told.readline()))
        for server in servers.values():
            server.kill()
    facts: dict[str, Any] = {"cores held": held}
    lines = []
    for (case, way, name), each in taken.items():
        middle = facts[f"{case}, {way} pass, {name}"] = statistics.median(each)
        here = statistics.median(taken[case, way, "easypipe"])
        rate = "" if name == "easypipe" else f"{middle / here:.2f}"
        lines.append((case, way, name, f"{middle:.1f} us", rate))
    print(f"cores held: {'yes' if held else 'no'}")
    table(("rows", "pass", "tree", "median", "rate of easypipe to it"), lines)
    Report("batches", "us", facts).finish(given.out)


if __name__ == "__main__":
    main()
